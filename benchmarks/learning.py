"""The recipes' learning beside what others do: held-out loss against steps, against bytes, and against time on a line.

    python benchmarks/learning.py [--size quick|0.8m|10m] [--only WORDS] [--json FILE] [--figures FILE]
        [--plot FILE] [--processes N]

Simulated peers in one process take real gradients on a real corpus, the text that every Python carries, each on its own
shard; every contribution of ours goes through the real codec, and the real exact aggregate applies it. Other systems
(benchmarks/rivals.py) get the same model, data and inner optimizers.

Each method gets the same care: its rate is tried at three values, a factor of two apart, and at further ones until the
best is not at an edge; rates are chosen by one half of the held-out documents and losses reported on the other. The
winners of each family then run with two more seeds. All rates warm up over a fifteenth of the run and fall in a
straight line to a tenth. A run that was broken off goes on with what --json lacks.

A peer's bytes are what it uploads. With full synchronisation that is the gradient in fp32, once a step (a ring
all-reduce sends almost twice that; bf16 would halve it): all ratios have that baseline. Time on a line is worked out:
the steps at 0.3 s each, and in every round a payload for each of the others, up and down at the line's rate; dense ones
in a ring. A method of which fewer than three rates have run is not in the table; a star marks a best rate beyond which
none was tried.

Whether documents that share a sequence should see each other is tried on a corpus of short ones, in no order. Their
loss is that of documents by themselves, as they are read afterwards, whichever way they were learned.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import figures
import matplotlib
import msgspec
import numpy as np
import torch
from matplotlib import pyplot
from methods import SIZES, Setting, grid, recipe_of
from rivals import RIVALS, DeMoWithFloats, LocalRival
from simulated import FullySynchronised, RadialSwarm, Swarm, SwarmOfSpeeds, TwoLevelSwarm

from p2ptrain.config import ModelConfig, PrivacyConfig, RecipeConfig
from p2ptrain.data.assignment import shard, shard_in_window
from p2ptrain.data.corpus import Reading, documents, embedded_sources
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.data.packing import PLAIN, Packing
from p2ptrain.data.prepare import prepare
from p2ptrain.data.tokenizer import BytesTokenizer
from p2ptrain.models.built_in import Transformer, initialise
from p2ptrain.train.live import LiveModel
from p2ptrain.train.private import Privacy, SpentSteps

# The figures are about this code, and old when it has changed.
ABOUT = (
    "p2ptrain/train/recipes.py",
    "p2ptrain/train/residual.py",
    "p2ptrain/train/inner.py",
    "p2ptrain/train/learner.py",
)
CACHE = Path(tempfile.gettempdir()) / f"p2ptrain-learning-{os.getpid()}"
SHORT = "short"  # the corpus of short documents, in CACHE
RUN_SEED = 11  # of the data's order; a run's own seed makes its first weights and draws its shards
EVALUATED = 64  # sequences of each half of the held-out documents
POINTS = 8  # of a curve
RATES_MIN, RATES_MAX = 3, 6  # tried for a method
DENSE = ("full", "diloco", "diloco4", "muloco")  # contributions of all weights
LINES_MBIT = (10, 100, 1_000)
STEP_SECONDS = 0.3  # of one local step; an assumption, the same for all


def swarm_of(setting: Setting, recipe: RecipeConfig, live: LiveModel) -> Any:
    if setting.system == "full":
        return FullySynchronised(recipe, live)
    if setting.system in RIVALS:
        return LocalRival(RIVALS[setting.system], recipe, live, setting.peers)
    of_kind = DeMoWithFloats if setting.system == "demo32" else RadialSwarm if setting.outer == "radial" else None
    if of_kind is not None:
        return of_kind(recipe, live, setting.peers)
    if setting.regions:
        rounds, regional = setting.local_steps // setting.region_steps, dict(setting.regional)
        return TwoLevelSwarm(recipe, live, setting.peers, setting.regions, rounds, setting.region_late, regional)
    if setting.speeds:
        return SwarmOfSpeeds(recipe, live, setting.speeds)
    shares = [count / setting.sequences for count in setting.sequences_of]
    early = float(Fraction(setting.early_share))
    return Swarm(recipe, live, setting.peers, setting.delay, setting.between, shares=shares, early_share=early)


def run(setting: Setting) -> dict[str, Any]:
    """Trains one swarm, and measures the loss on both halves of the held-out slice along the way."""

    torch.set_num_threads(1)
    size = SIZES[setting.size]
    model_config = ModelConfig(**({"heads": 4, "kv_heads": 2} | size.model))
    recipe = recipe_of(setting, size.steps)
    directory = CACHE / SHORT if setting.documents else CACHE
    dataset = TokenDataset.open(directory, (directory / "digest").read_text())
    model = Transformer(model_config)
    initialise(model, setting.seed)
    apart = Packing(document_end=BytesTokenizer.end_of_document)
    packing = apart if setting.documents == "apart" else PLAIN
    length, rounds = model_config.sequence_length, size.steps // setting.local_steps
    privacy = None
    if Fraction(setting.noise or 0):
        one_each = dataset.sequences(length) // setting.peers
        terms = PrivacyConfig(epsilon=Fraction(1_000), delta=Fraction(1, 10**5), noise=Fraction(setting.noise))
        privacy = Privacy(
            terms, setting.sequences, one_each, SpentSteps(CACHE / "no ledger", length)
        )  # nothing is spent
    live = LiveModel(model, autocast=False, half_state=setting.half_state, packing=packing, privacy=privacy)
    half = min(EVALUATED, dataset.held_out_sequences(length) // 2)
    last = dataset.held_out_sequences(length)

    def batches(round_number: int, peer: int) -> list[torch.Tensor]:
        if privacy is not None:
            draws = (privacy.draw() * setting.peers + peer for _ in range(setting.local_steps))
            return [torch.from_numpy(dataset.batch(draw, length)) for draw in draws]
        count = setting.sequences * setting.local_steps
        seed = RUN_SEED + setting.seed
        share = round_number, peer, setting.peers, count, dataset.sequences(length)
        found = shard_in_window(seed, *share, setting.window) if setting.window else shard(seed, *share)
        steps = list(torch.split(torch.from_numpy(dataset.batch(found, length)), setting.sequences))
        if setting.sequences_of:
            steps = [step[: setting.sequences_of[peer]] for step in steps]
        return steps[: setting.steps_of[peer]] if setting.steps_of else steps

    @torch.no_grad()
    def losses() -> list[float]:
        """Returns the loss on the first half, by which rates are chosen, and on the second."""
        halves = np.arange(half), np.arange(last - half, last)
        batches = (torch.from_numpy(dataset.held_out_batch(each, length)) for each in halves)
        if setting.documents:
            return [float(live.model.packed_loss(*apart.split(batch))) for batch in batches]
        return [float(live.model.loss(batch)) for batch in batches]

    swarm = swarm_of(setting, recipe, live)
    curve = [(0, *losses())]
    start = time.process_time()
    for round_number in range(rounds):
        swarm.round(round_number, [batches(round_number, peer) for peer in range(setting.peers)])
        if round_number + 1 == rounds and isinstance(swarm, Swarm):
            swarm.settle(rounds)
        if (round_number + 1) % max(1, rounds // POINTS) == 0 or round_number + 1 == rounds:
            curve.append(((round_number + 1) * setting.local_steps, *losses()))
    _, tuning, reported = curve[-1]
    return {
        **asdict(setting),
        "method": setting.method,
        "parameters": live.weights.numel(),
        "steps": rounds * setting.local_steps,
        "rounds": rounds,
        "payload_bytes": swarm.payload_bytes,
        "bytes_per_peer_step": swarm.payload_bytes / setting.local_steps,
        "tuning_loss": tuning if math.isfinite(tuning) else None,
        "validation_loss": reported if math.isfinite(reported) else None,
        "curve": [(step, loss) for step, _, loss in curve],
        "gap": statistics.mean(gaps) if (gaps := getattr(swarm, "gaps", [])) else None,
        "epsilon": privacy and privacy.epsilon(rounds * setting.local_steps),
        "processor_seconds": round(time.process_time() - start, 2),
    }


# ---------------------------------------------------------------------------------------------------
# Which runs there are


class Runs:
    """The runs that are done, in a file, and the processes that do more."""

    def __init__(self, path: Path | None, processes: int) -> None:
        self.path, self.processes = path, processes
        self.results: list[dict[str, Any]] = json.loads(path.read_text()) if path and path.exists() else []

    def all(self, settings: Iterable[Setting]) -> list[dict[str, Any]]:
        """Returns the results of these runs, after doing those that are not done."""
        settings = list(settings)
        missing = [each for each in settings if self._find(each) is None]
        missing.sort(key=lambda each: -each.peers)  # the long ones first, so that no core idles
        start = time.perf_counter()
        if missing:
            with multiprocessing.get_context("spawn").Pool(self.processes, _use_cache, (CACHE,)) as pool:
                for number, result in enumerate(pool.imap_unordered(run, missing), 1):
                    self.results.append(result)
                    if self.path:
                        partial = self.path.with_suffix(".partial")
                        partial.write_text(json.dumps(self.results, indent=1) + "\n")
                        partial.replace(self.path)
                    loss = result["validation_loss"]
                    print(
                        f"[{number}/{len(missing)}, {time.perf_counter() - start:.0f} s] {result['method']}, "
                        f"rate {result['rate']}, seed {result['seed']}: {loss if loss is None else f'{loss:.3f}'}",
                        flush=True,
                    )
        return [found for each in settings if (found := self._find(each)) is not None]

    def _find(self, setting: Setting) -> dict[str, Any] | None:
        return next((one for one in self.results if setting_of(one) == setting), None)

    def tuned(self, settings: list[Setting]) -> list[dict[str, Any]]:
        """Tries rates of each setting until the best has a worse one on either side; returns the best of each."""
        rates = {each: [Fraction(each.rate) * factor for factor in (Fraction(1, 2), 1, 2)] for each in settings}
        while True:
            self.all(replace(each, rate=str(rate)) for each, tried in rates.items() for rate in tried)
            winners, moved = [], False
            for each, tried in rates.items():
                found = {rate: self._find(replace(each, rate=str(rate))) for rate in tried}
                best = min(tried, key=lambda rate: chosen_by(found[rate]))
                winners.append(found[best])
                if best in (tried[0], tried[-1]) and len(tried) < RATES_MAX:
                    tried.insert(*((0, best / 2) if best == tried[0] else (len(tried), best * 2)))
                    moved = True
            if not moved:
                return [each for each in winners if each is not None]


def chosen_by(result: dict[str, Any] | None) -> float:
    return math.inf if result is None or result["tuning_loss"] is None else result["tuning_loss"]


def setting_of(result: dict[str, Any]) -> Setting:
    found = {name: result[name] for name in Setting.__dataclass_fields__ if name in result}
    return Setting(**found | {name: tuple(found.get(name, ())) for name in ("speeds", "steps_of", "sequences_of")})


def prepare_corpus(has_short: bool) -> None:
    _prepare(CACHE, None)
    if has_short:
        texts = [document.text for source in embedded_sources() for document in documents(source)]
        paragraphs = [each for text in texts for each in text.split("\n\n") if 20 < len(each) < 150]
        random.Random(RUN_SEED).shuffle(paragraphs)  # noqa: S311
        (CACHE / f"{SHORT}.jsonl").write_bytes(b"\n".join(msgspec.json.encode({"text": each}) for each in paragraphs))
        _prepare(CACHE / SHORT, CACHE / f"{SHORT}.jsonl")


def _prepare(out: Path, source: Path | None) -> None:
    if not (out / "digest").exists():
        sources = [] if source is None else [source]
        share = Fraction(4, 100)
        made = prepare(out, sources, embedded=source is None, how=Reading(), held_out=share, progress=lambda *_: None)
        (out / "digest").write_text(made.digest)


def _use_cache(directory: Path) -> None:
    global CACHE  # noqa: PLW0603  # a worker is told where the corpus lies
    CACHE = directory


# ---------------------------------------------------------------------------------------------------
# The table and the plot


def by_method(results: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns each method's runs at its best rate, that of seed 0 first."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        found[result["method"]].append(result)
    best = {name: min((one for one in runs if not one["seed"]), key=chosen_by) for name, runs in found.items()}
    return {
        name: sorted((one for one in found[name] if one["rate"] == winner["rate"]), key=lambda one: one["seed"])
        for name, winner in best.items()
    }


def line_seconds(result: dict[str, Any], steps: int, mbit: int, step_seconds: float = STEP_SECONDS) -> float:
    """Returns the time of so many steps on a line of that rate. What is dense goes round in a ring, which carries it
    twice less a share; what is sparse goes from each to all others."""
    rounds, others = steps / (result["steps"] / result["rounds"]), result["peers"] - 1
    is_dense = result["system"] in DENSE
    payloads = 2 * others / result["peers"] if is_dense else others
    return steps * step_seconds + rounds * payloads * result["payload_bytes"] * 8 / (mbit * 1e6)


def summary(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each method at its best rate, the lowest loss first; `edge`: no rate beyond it was tried."""
    rows = []
    for method, runs in by_method(results).items():
        losses = [one["validation_loss"] for one in runs if one["validation_loss"] is not None]
        rates = sorted({Fraction(one["rate"]) for one in results if one["method"] == method})
        if losses and len(rates) >= RATES_MIN:
            row = {"method": method, "family": setting_of(runs[0]).family, "seeds": len(losses)}
            row |= {name: runs[0][name] for name in ("k", "rate", "parameters", "steps", "bytes_per_peer_step")}
            row["seconds"] = {str(mbit): line_seconds(runs[0], runs[0]["steps"], mbit) for mbit in LINES_MBIT}
            row["epsilon"] = runs[0].get("epsilon")
            row["edge"] = Fraction(runs[0]["rate"]) in (rates[0], rates[-1])
            row["deviation"] = statistics.stdev(losses) if len(losses) > 1 else None
            rows.append(row | {"loss": statistics.mean(losses)})
    return sorted(rows, key=lambda row: row["loss"])


def table(results: list[dict[str, Any]]) -> str:
    lines = [
        f"{'loss':>6} {'+-':>6} {'seeds':>5} {'rate':>8} {'bytes/step':>11} {'fp32/ours':>9} "
        + " ".join(f"{f'{mbit} Mbit/s':>11}" for mbit in LINES_MBIT)
        + "  method"
    ]
    for row in summary(results):
        size, spread = row["bytes_per_peer_step"], math.nan if row["deviation"] is None else row["deviation"]
        on_lines = " ".join(f"{seconds:9,.0f} s" for seconds in row["seconds"].values())
        text = f"{row['loss']:6.3f} {spread:6.3f} {row['seeds']:5} {row['rate'] + '*' * row['edge']:>8} {size:11,.0f} "
        private = "" if row["epsilon"] is None else f", epsilon {row['epsilon']:.2f}"
        lines.append(f"{text}{4 * row['parameters'] / size:9,.0f} {on_lines}  {row['method']}{private}")
    return "\n".join(lines)


def plot(results: list[dict[str, Any]], path: Path) -> None:
    matplotlib.use("Agg")
    figure, axes = pyplot.subplots(1, 3, figsize=(20, 7), sharey=True)
    colours = matplotlib.colormaps["tab20"].colors  # type: ignore[attr-defined]
    for number, (method, runs) in enumerate(sorted(by_method(results).items())):
        first = runs[0]
        steps, losses = zip(*first["curve"], strict=True)
        sent = [max(1.0, step * first["bytes_per_peer_step"]) for step in steps]
        seconds = [max(1.0, line_seconds(first, step, LINES_MBIT[0])) for step in steps]
        style = {"label": method, "color": colours[number % 20], "linestyle": "-" if number < 20 else "--"}
        axes[0].plot(steps, losses, **style)
        axes[1].plot(sent[1:], losses[1:], marker="o", markersize=3, **style)
        axes[2].plot(seconds[1:], losses[1:], **style)
    axes[0].set(xlabel="local steps", ylabel="held-out loss, nats a byte")
    axes[1].set(xlabel="bytes uploaded by a peer", xscale="log")
    axes[2].set(xlabel=f"seconds on a line of {LINES_MBIT[0]} Mbit/s", xscale="log")
    axes[1].legend(fontsize=6)
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"plot: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--size", choices=SIZES, default="quick", help="how large the model is, and how long it trains")
    parser.add_argument("--json", type=Path, help="where every run is kept; those that are there are not run again")
    parser.add_argument("--plot", type=Path, default=Path("out/learning.png"), help="where the plot goes")
    parser.add_argument("--figures", type=Path, help="where the table goes as JSON, for `make pictures`")
    parser.add_argument("--only", action="append", metavar="WORDS", help="only methods described with these words")
    parser.add_argument("--seeds", type=int, default=3, help="of each family's winner")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    only = arguments.only or [""]
    settings = [replace(one, size=arguments.size) for one in grid() if any(word in one.method for word in only)]
    prepare_corpus(any(one.documents for one in settings))
    start = time.perf_counter()
    runs = Runs(arguments.json, arguments.processes)
    families: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for winner in runs.tuned(settings):
        families[setting_of(winner).family].append(winner)
    winners = [setting_of(min(found, key=chosen_by)) for found in families.values()]
    runs.all(replace(each, seed=seed) for each in winners for seed in range(1, arguments.seeds))
    shown = [one for one in runs.results if one["size"] == arguments.size]
    print(table(shown))
    print(f"{len(shown)} runs, {time.perf_counter() - start:.0f} s")
    plot(shown, arguments.plot)
    if arguments.figures:
        figures.save(arguments.figures, summary(shown), ABOUT)


if __name__ == "__main__":
    main()
