"""The recipes' learning: validation loss against steps and against bytes.

    python benchmarks/learning.py [--json FILE] [--plot FILE] [--long] [--only WORD]

Simulated peers in one process take real gradients on a real corpus, the text that every Python carries,
each on its own shard; every contribution goes through the real codec, and the real exact aggregate applies
it. Each method gets three learning rates with one seed; the best method of each family (recipe, outer rule,
peers, delay) gets two more seeds at its best rate. Runs share the cores, one thread each.

A peer's bytes are what it uploads a local step. For AdamW with full synchronisation that is the gradient in
fp32, once (a ring all-reduce sends almost twice that; bf16 would halve it): all ratios have that baseline.
The recipes' defaults, and which of the outer rules is one, follow from what this shows; see LOG.md.

`delay` applies each round's contributions after the next round's training, as overlap_rounds = 1 would.
--long takes the model of 0.8M parameters and 600 steps, as in LOG.md; hours on two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib import pyplot
from simulated import FullySynchronised, Swarm

from p2ptrain.config import ModelConfig, RecipeConfig
from p2ptrain.learn.assignment import shard
from p2ptrain.learn.data import TokenDataset
from p2ptrain.learn.live import LiveModel
from p2ptrain.learn.model import Transformer, initialise
from p2ptrain.learn.prepare import prepare
from p2ptrain.learn.tokenizer import load_tokenizer

CACHE = Path(tempfile.gettempdir()) / f"p2ptrain-learning-{os.getpid()}"
STEPS, LONG_STEPS = 200, 600
RUN_SEED = 11  # of the data's order; a run's own seed makes its first weights and draws its shards


@dataclass(frozen=True)
class Setting:
    """One simulated run."""

    recipe: str  # adamw, distro, demo or local
    outer: str = "normalised"
    k: int = 32
    peers: int = 4
    local_steps: int = 1
    delay: int = 0
    learning_rate: str = "1/1000"  # AdamW's own for adamw and local
    outer_rate: str = "1"  # for local
    seed: int = 0
    long: bool = False

    @property
    def sequences(self) -> int:
        """Returns the sequences in a peer's step: one for 32 peers, so that a large swarm's run takes only minutes."""
        return 4 if self.peers < 32 else 1

    @property
    def method(self) -> str:
        if self.recipe == "adamw":
            return f"adamw, full synchronisation, {self.peers} peers"
        steps = f", {self.local_steps} steps" if self.local_steps > 1 else ""
        delay = ", one round late" if self.delay else ""
        return f"{self.recipe} {self.outer}, k={self.k}{steps}{delay}, {self.peers} peers"


def grid() -> list[tuple[Setting, tuple[str, ...]]]:
    """Returns every method with its learning rates; where the best was at an edge, the grid was extended."""
    inner = ("1/1000", "3/1000", "6/1000")
    by_outer = {
        "normalised": ("1/2000", "1/1000", "2/1000"),
        "mean": ("1/1000", "2/1000", "4/1000"),
        "sign": ("1/1000", "2/1000", "4/1000"),
    }
    by_outer_of_many = by_outer | {"mean": ("2/1000", "4/1000", "8/1000")}
    found = [
        (Setting("adamw"), inner),
        (Setting("demo"), ("1/1000", "2/1000", "4/1000")),
        (Setting("demo", "sign"), by_outer["sign"]),
        (Setting("distro", "sign", delay=1), ("1/4000", "1/2000", "1/1000")),
        (Setting("local", "mean", local_steps=10, delay=1), inner),
    ]
    found += [(Setting("local", "mean", local_steps=steps), inner) for steps in (5, 10, 30)]
    found += [(Setting("distro", outer, k), tried) for k in (8, 32, 128) for outer, tried in by_outer.items()]
    found += [(Setting("distro", outer, peers=32), tried) for outer, tried in by_outer_of_many.items()]
    return found


def run(setting: Setting) -> dict[str, Any]:
    """Trains one swarm, and measures the loss on the held-out slice at eight points."""

    torch.set_num_threads(1)
    steps = LONG_STEPS if setting.long else STEPS
    sizes = {"dim": 128, "ffn_dim": 384, "layers": 4} if setting.long else {"dim": 64, "ffn_dim": 192, "layers": 2}
    model_config = ModelConfig(heads=4, kv_heads=2, sequence_length=128 if setting.long else 64, **sizes)
    local = setting.recipe == "local"
    recipe = RecipeConfig(
        name="distro" if setting.recipe == "adamw" else setting.recipe,
        outer=setting.outer,  # type: ignore[arg-type]
        k=setting.k,
        value_bits=3 if setting.recipe == "demo" else 1,
        decay=Fraction(95, 100) if local else Fraction(999, 1000),
        local_steps=setting.local_steps,
        sequences_per_pass=setting.sequences,
        inner_learning_rate=Fraction(setting.learning_rate),
        learning_rate=Fraction(setting.outer_rate if local else setting.learning_rate),
        warmup_rounds=max(1, steps // 15 // setting.local_steps),
    )
    dataset = TokenDataset.open(CACHE, (CACHE / "digest").read_text())
    model = Transformer(model_config)
    initialise(model, setting.seed)
    live = LiveModel(model, autocast=False)
    length, rounds = model_config.sequence_length, steps // setting.local_steps

    def batches(round_number: int, peer: int) -> list[torch.Tensor]:
        count = setting.sequences * setting.local_steps
        seed = RUN_SEED + setting.seed
        found = shard(seed, round_number, peer, setting.peers, count, dataset.sequences(length))
        return list(torch.split(torch.from_numpy(dataset.batch(found, length)), setting.sequences))

    @torch.no_grad()
    def validation() -> float:
        count = min(64, dataset.held_out_sequences(length))
        return float(live.model.loss(torch.from_numpy(dataset.held_out_batch(np.arange(count), length))))

    if setting.recipe == "adamw":
        swarm: FullySynchronised | Swarm = FullySynchronised(recipe, live)
    else:
        swarm = Swarm(recipe, live, setting.peers, setting.delay)
    curve = [(0, validation())]
    start = time.perf_counter()
    for round_number in range(rounds):
        swarm.round(round_number, [batches(round_number, peer) for peer in range(setting.peers)])
        if (round_number + 1) % max(1, rounds // 8) == 0 or round_number + 1 == rounds:
            curve.append(((round_number + 1) * setting.local_steps, validation()))
    payload = swarm.payload_bytes
    return {
        **asdict(setting),
        "method": setting.method,
        "parameters": live.weights.numel(),
        "steps": rounds * setting.local_steps,
        "rounds": rounds,
        "payload_bytes": payload,
        "bytes_per_peer_step": payload / setting.local_steps,
        "validation_loss": curve[-1][1] if math.isfinite(curve[-1][1]) else None,
        "curve": curve,
        "seconds": round(time.perf_counter() - start, 2),
    }


# ---------------------------------------------------------------------------------------------------
# The grid, its winners, the table and the plot


def prepare_corpus() -> None:
    if not (CACHE / "digest").exists():
        held_out = Fraction(2, 100)
        made = prepare(
            CACHE,
            [],
            embedded=True,
            tokenizer=load_tokenizer(None),
            held_out=held_out,
            progress=lambda done, all_: None,
        )
        (CACHE / "digest").write_text(made.digest)


def best(results: list[dict[str, Any]]) -> dict[str, Any]:
    return min(results, key=lambda result: result["validation_loss"] or math.inf)


def group(results: list[dict[str, Any]], key: Callable[[dict[str, Any]], Any]) -> dict[Any, list[dict[str, Any]]]:
    found: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        found[key(result)].append(result)
    return found


def by_method(results: list[dict[str, Any]]) -> dict[Any, list[dict[str, Any]]]:
    return group(results, lambda one: one["method"])


def run_all(settings: list[Setting], pool: Any, label: str) -> list[dict[str, Any]]:
    start, results = time.perf_counter(), []
    settings = sorted(settings, key=lambda setting: -setting.peers)  # the long ones first, so that no core idles
    for result in pool.imap_unordered(run, settings):
        results.append(result)
        loss = result["validation_loss"]
        print(
            f"[{label} {len(results)}/{len(settings)}, {time.perf_counter() - start:.0f} s] {result['method']}, "
            f"rate {result['learning_rate']}, seed {result['seed']}: {loss if loss is None else f'{loss:.3f}'}",
            flush=True,
        )
    return results


def table(results: list[dict[str, Any]]) -> str:
    baseline = next((4 * one["parameters"] for one in results), 0)
    rows = []
    for method, runs in by_method(results).items():
        winner = best(runs)
        same = [one for one in runs if one["learning_rate"] == winner["learning_rate"]]
        losses = [one["validation_loss"] for one in same if one["validation_loss"] is not None]
        spread = statistics.stdev(losses) if len(losses) > 1 else math.nan
        size = winner["bytes_per_peer_step"]
        rows.append((statistics.mean(losses), spread, len(losses), winner["learning_rate"], size, method))
    lines = [f"{'loss':>6} {'+-':>6} {'seeds':>5} {'rate':>7} {'bytes/step':>11} {'fp32/ours':>9}  method"]
    lines += [
        f"{loss:6.3f} {spread:6.3f} {seeds:5} {rate:>7} {size:11,.0f} {baseline / size:9.0f}  {method}"
        for loss, spread, seeds, rate, size, method in sorted(rows)
    ]
    return "\n".join(lines)


def plot(results: list[dict[str, Any]], path: Path) -> None:
    matplotlib.use("Agg")
    figure, axes = pyplot.subplots(1, 2, figsize=(15, 7), sharey=True)
    colours = matplotlib.colormaps["tab20"].colors  # type: ignore[attr-defined]
    for number, (method, runs) in enumerate(sorted(by_method(results).items())):
        winner = best(runs)
        steps, losses = zip(*winner["curve"], strict=True)
        sent = [max(1.0, step * winner["bytes_per_peer_step"]) for step in steps]
        style = {"label": method, "color": colours[number % 20], "linestyle": "-" if number < 20 else "--"}
        axes[0].plot(steps, losses, **style)
        axes[1].plot(sent[1:], losses[1:], marker="o", markersize=3, **style)
    axes[0].set(xlabel="local steps", ylabel="validation loss, nats a byte")
    axes[1].set(xlabel="bytes uploaded by a peer", xscale="log")
    axes[1].legend(fontsize=7)
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"plot: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", type=Path, help="also write every run there")
    parser.add_argument("--plot", type=Path, default=Path("out/learning.png"), help="where the plot goes")
    parser.add_argument("--long", action="store_true", help="a larger model and 600 steps; hours")
    parser.add_argument("--only", action="append", metavar="WORDS", help="only methods described with these words")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    prepare_corpus()
    start = time.perf_counter()
    only = arguments.only or [""]
    methods = [
        (replace(one, long=arguments.long), tried) for one, tried in grid() if any(word in one.method for word in only)
    ]
    with multiprocessing.get_context("spawn").Pool(arguments.processes, _use_cache, (CACHE,)) as pool:
        tried = [replace(setting, learning_rate=rate) for setting, tried in methods for rate in tried]
        results = run_all(tried, pool, "rates")
        families = group(results, lambda one: (one["recipe"], one["outer"], one["peers"], one["delay"]))
        winners = [best(runs) for runs in families.values()]
        chosen = [Setting(**{name: winner[name] for name in Setting.__dataclass_fields__}) for winner in winners]
        results += run_all([replace(one, seed=seed) for one in chosen for seed in (1, 2)], pool, "seeds")
    print(table(results))
    print(f"{len(results)} runs in {time.perf_counter() - start:.0f} s")
    arguments.plot.parent.mkdir(parents=True, exist_ok=True)
    plot(results, arguments.plot)
    if arguments.json:
        numbers = [one | {"learning_rate": float(Fraction(one["learning_rate"]))} for one in results]
        arguments.json.write_text(json.dumps(numbers, indent=1) + "\n")


def _use_cache(directory: Path) -> None:
    global CACHE  # noqa: PLW0603  # a worker is told where the corpus lies
    CACHE = directory


if __name__ == "__main__":
    main()
