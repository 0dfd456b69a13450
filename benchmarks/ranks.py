"""Memory and step time of ranks that hold the whole model each, and of ranks that hold parts.

    python benchmarks/ranks.py [--size 10m] [--threads 2] [--out FILE]
    python benchmarks/ranks.py --rounds 200 [--out FILE]    roots over 1, 2, 4 and 8 ranks, and loss beside one process
    python benchmarks/ranks.py --kills 10 [--out FILE]      seconds from SIGKILL of a rank to the next contribution

Real processes on this machine's processor, AdamW, fp32, one sequence a pass, so many threads together. "1 process"
takes the steps itself, as a node without ranks does, with as many threads. A rank's memory is
what it alone has (RSS without shared pages), the most of many looks while it takes steps; less that of a rank whose
model is tiny, which is the program. What it maps of the round's tensors is shared, and the node's: it is told beside.
The estimate is that of train/memory.py. A step takes as many sequences as there are ranks at most; its time is the
least of those after the first. Bytes between ranks are what the loopback interface has sent in these steps, headers
included, so nothing else may use it meanwhile; a node talks to its ranks by other ways, which are not in it.

Rounds and kills take a model of some thousand parameters. Each layout trains every round by itself, and applies the
payload of one process with its own as the one that it withheld: so its next round begins from the same weights, with
its own inner state and residual. All roots have to be that process', and losses stay within rounding.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from statistics import median
from threading import Event, Thread
from time import perf_counter
from typing import Any

import numpy as np
import psutil
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from figures import save  # noqa: E402

from p2ptrain.config import ModelConfig, RecipeConfig, RunConfig  # noqa: E402
from p2ptrain.data.dataset import TokenDataset  # noqa: E402
from p2ptrain.errors import RanksLostError  # noqa: E402
from p2ptrain.exact.outer import Outer  # noqa: E402
from p2ptrain.models.kinds import first_model  # noqa: E402
from p2ptrain.ranks.group import RankGroup, RankWork  # noqa: E402
from p2ptrain.ranks.together import LOOPBACK  # noqa: E402
from p2ptrain.share import Share  # noqa: E402
from p2ptrain.train.live import LiveModel  # noqa: E402
from p2ptrain.train.memory import PassSettings, need_of  # noqa: E402
from p2ptrain.train.recipes import make_recipe  # noqa: E402
from p2ptrain.visible import few  # noqa: E402
from tests.helpers.ranks import ranked  # noqa: E402
from tests.helpers.trainer import ONE_THREAD, TINY, Trainer, embedded, make  # noqa: E402

LOOK_SECONDS = 0.02
STEPS, THREADS = 3, 2
LAYOUTS = {
    "tiny": ((1, False), (2, False), (2, True)),
    "10m": ((1, False), (2, False), (4, False), (2, True), (4, True)),
    "100m": ((1, False), (1, True), (2, False), (2, True)),
}


def run_of(size: str) -> RunConfig:
    model = ModelConfig(**TINY) if size == "tiny" else ModelConfig(preset=size)
    sequences = max(ranks for ranks, _ in LAYOUTS[size])
    return RunConfig(name="ranks", model=model, recipe=RecipeConfig(inner="adamw", sequences_per_pass=sequences))


def named(ranks: int, is_sharded: bool) -> str:
    return f"{few(ranks, 'rank', 'ranks')}, {'parts' if is_sharded else 'whole'}"


def loopback_bytes() -> int:
    """Returns what the interface that no other machine reaches has sent so far."""
    return sum(each.bytes_sent for name, each in psutil.net_io_counters(pernic=True).items() if name in LOOPBACK)


def seconds_alone(data: TokenDataset, size: str) -> float:
    """Returns the seconds of a step that this process takes itself."""
    run, times = run_of(size), list[float]()
    live = LiveModel(first_model(run.model, 1), autocast=False, sequences_per_pass=1)
    recipe = make_recipe(run.recipe, live, Outer.of(run, live.shapes).layouts)
    recipe.begin(1)
    for step, positions in enumerate(np.arange(STEPS * run.recipe.step_sequences).reshape(STEPS, -1)):
        began = perf_counter()
        batch = live.packing.batch(data.batch(positions, run.model.sequence_length), positions, 1)
        recipe.local_step(step, batch, positions.tolist())
        times.append(perf_counter() - began)
    return min(times[1:])


def measure(data: TokenDataset, size: str, ranks: int, is_sharded: bool) -> dict[str, float]:
    """Returns the most memory of a rank alone, and of what it shares; seconds and bytes between ranks of a step."""
    run, times, sent = run_of(size), list[float](), list[int]()
    settings = ONE_THREAD.model_copy(update={"shard": is_sharded})
    live = LiveModel(first_model(run.model, 1), autocast=False, sequences_per_pass=1)
    recipe = make_recipe(run.recipe, live, Outer.of(run, live.shapes).layouts)
    work = RankWork(run, settings, data)
    group, found, is_done = RankGroup(work, ["cpu"] * ranks, live, recipe), {"alone": 0.0, "shared": 0.0}, Event()

    def look() -> None:
        processes = [psutil.Process(each.pid) for each in group.figures]
        while not is_done.wait(LOOK_SECONDS):
            for each in processes:
                memory = each.memory_info()
                found["alone"] = max(found["alone"], memory.rss - memory.shared)
                found["shared"] = max(found["shared"], memory.shared)

    try:
        group.wait()
        looking = Thread(target=look)
        looking.start()
        group.begin(1, 0)
        for step, positions in enumerate(np.arange(STEPS * run.recipe.step_sequences).reshape(STEPS, -1)):
            began = perf_counter()
            group.step(step, positions)
            times.append(perf_counter() - began)
            sent.append(loopback_bytes())
        group.bring_back()
    finally:
        is_done.set()
        group.close()
    looking.join()
    return found | {"seconds": min(times[1:]), "sent": (sent[-1] - sent[0]) / (STEPS - 1)}


# ---------------------------------------------------------------------------------------------------
# Roots, and the end of a rank


def train_rounds(trainer: Trainer, rounds: int, applied: list[bytes]) -> tuple[list[bytes], list[float]]:
    """Trains so many rounds, and applies these payloads, or its own where there are none, which it then adds. Returns
    the roots, and the loss of each round's last step."""
    roots, losses = list[bytes](), list[float]()
    for number in range(rounds):
        losses.append(trainer.train(Share(number, 0, 1))[-1].loss)
        own = trainer.contribute(number)
        if number == len(applied):
            applied.append(own)
        trainer.apply(number, [applied[number]], {number: own})
        roots.append(trainer.root())
    return roots, losses


def compare_roots(data: TokenDataset, rounds: int) -> dict[str, Any]:
    """Returns for each layout how many roots are those of one process, and how far apart losses were at most."""
    changes: dict[str, Any] = {"inner": "muon", "sequences_per_pass": 8}  # one for each of eight ranks
    payloads, rows = list[bytes](), dict[str, Any]()
    roots, losses = train_rounds(make(data, "local", **changes), rounds, payloads)
    for ranks in (1, 2, 4, 8):
        for is_sharded in (False, True):
            settings = ONE_THREAD.model_copy(update={"shard": is_sharded})
            with ranked(data, ["cpu"] * ranks, settings=settings, **changes) as (trainer, _):
                theirs, other = train_rounds(trainer, rounds, payloads)
            rows[named(ranks, is_sharded)] = {
                "roots of one process": sum(one == another for one, another in zip(roots, theirs, strict=True)),
                "loss apart, at most": float(f"{np.abs(np.subtract(losses, other)).max():.2g}"),
            }
            print(named(ranks, is_sharded), rows[named(ranks, is_sharded)], flush=True)
    began, ended = (round(losses[place], 4) for place in (0, -1))
    return {"rounds": rounds, "loss of the first round": began, "of the last": ended} | rows


def time_kills(data: TokenDataset, kills: int) -> dict[str, Any]:
    """Returns the seconds from SIGKILL of a rank, within a step, to the next contribution, over so many of them."""
    rows: dict[str, Any] = {"kills": kills}
    for is_sharded in (False, True):
        settings, times = ONE_THREAD.model_copy(update={"shard": is_sharded}), list[float]()
        with ranked(data, ["cpu"] * 2, settings=settings, inner="muon") as (trainer, group):
            for number in range(kills):
                trainer.train(Share(number, 0, 1))
                os.kill(group.figures[number % 2].pid, signal.SIGKILL)
                killed = perf_counter()
                with suppress(RanksLostError):  # where its end is noticed before the round begins, none is lost
                    trainer.train(Share(number, 0, 1))
                trainer.train(Share(number, 0, 1))
                trainer.contribute(number)
                times.append(perf_counter() - killed)
        rows[named(2, is_sharded)] = {"seconds, median": round(median(times), 1), "most": round(max(times), 1)}
        print(named(2, is_sharded), rows[named(2, is_sharded)], flush=True)
    return rows


# ---------------------------------------------------------------------------------------------------
# The command


def measure_all(data: TokenDataset, size: str, threads: int) -> dict[str, Any]:
    """Returns a row for one process without ranks, and one for each layout."""
    need = need_of(run_of(size), PassSettings(sequences_per_pass=1))
    made: dict[str, Any] = {"size": size, "threads": threads, "parameters": need.parameters}
    made["MB of the weights"] = round(need.state / 1e6)
    program = {is_sharded: measure(data, "tiny", 2, is_sharded) for is_sharded in (False, True)}
    rows: dict[str, Any] = {"1 process": {"seconds of a step": round(seconds_alone(data, size), 2)}}
    print("1 process", rows["1 process"], flush=True)
    for ranks, is_sharded in LAYOUTS[size]:
        found = measure(data, size, ranks, is_sharded)
        more = {each: found[each] - program[is_sharded][each] for each in ("alone", "shared")}
        name = named(ranks, is_sharded)
        rows[name] = {
            "MB besides the program": round(more["alone"] / 1e6),
            "MB estimated": round(need.rank(ranks if is_sharded else 1) / 1e6),
            "MB shared": round(more["shared"] / 1e6),
            "MB of the program": round(program[is_sharded]["alone"] / 1e6),
            "seconds of a step": round(found["seconds"], 2),
            "MB between ranks a step": round(found["sent"] / 1e6, 1),
        }
        print(name, rows[name], flush=True)
    added = round((program[True]["alone"] - program[False]["alone"]) / 1e6)
    return made | rows | {"MB that FSDP2 adds to the program": added}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--size", choices=LAYOUTS, default="10m")
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        data = embedded(Path(directory))
        if asked.rounds:
            found = compare_roots(data, asked.rounds)
        elif asked.kills:
            found = time_kills(data, asked.kills)
        else:
            torch.set_num_threads(asked.threads)
            found = measure_all(data, asked.size, asked.threads)
    if asked.out:
        save(asked.out, found, ["p2ptrain/ranks"])


if __name__ == "__main__":
    main()
