"""Memory and step time of ranks that hold the whole model each, and of ranks that hold parts.

    python benchmarks/ranks.py [--size 10m] [--out FILE]

Real processes on this machine's processor, AdamW, fp32, one sequence a pass, two threads together. A rank's memory is
what it alone has (RSS without shared pages), the most of many looks while it takes steps; less that of a rank whose
model is tiny, which is the program. What it maps of the round's tensors is shared, and the node's: it is told beside.
The estimate is that of train/memory.py. A step takes as many sequences as there are ranks at most; its time is the
least of those after the first.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
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
from p2ptrain.exact.outer import Outer  # noqa: E402
from p2ptrain.models.kinds import first_model  # noqa: E402
from p2ptrain.ranks.group import RankGroup, RankWork  # noqa: E402
from p2ptrain.train.live import LiveModel  # noqa: E402
from p2ptrain.train.memory import PassSettings, need_of  # noqa: E402
from p2ptrain.train.recipes import make_recipe  # noqa: E402
from p2ptrain.visible import few  # noqa: E402
from tests.helpers.trainer import ONE_THREAD, TINY, embedded  # noqa: E402

LOOK_SECONDS = 0.02
STEPS, THREADS = 3, 2
LAYOUTS = {
    "10m": ((2, False), (2, True), (4, True)),
    "100m": ((1, False), (1, True), (2, False), (2, True)),
}


def run_of(size: str) -> RunConfig:
    model = ModelConfig(**TINY) if size == "tiny" else ModelConfig(preset=size)
    sequences = max(ranks for ranks, _ in LAYOUTS.get(size, LAYOUTS["10m"]))
    return RunConfig(name="ranks", model=model, recipe=RecipeConfig(inner="adamw", sequences_per_pass=sequences))


def measure(data: TokenDataset, size: str, ranks: int, is_sharded: bool) -> dict[str, float]:
    """Returns the most memory of a rank alone, and of what it shares, in bytes; and the seconds of a step."""
    run, times = run_of(size), list[float]()
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
        group.bring_back()
    finally:
        is_done.set()
        group.close()
    looking.join()
    return found | {"seconds": min(times[1:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--size", choices=LAYOUTS, default="10m")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(THREADS)
    need = need_of(run_of(asked.size), PassSettings(sequences_per_pass=1))
    with tempfile.TemporaryDirectory() as directory:
        data = embedded(Path(directory))
        program = {is_sharded: measure(data, "tiny", 2, is_sharded) for is_sharded in (False, True)}
        rows: dict[str, Any] = {}
        for ranks, is_sharded in LAYOUTS[asked.size]:
            found = measure(data, asked.size, ranks, is_sharded)
            more = {each: found[each] - program[is_sharded][each] for each in ("alone", "shared")}
            name = f"{few(ranks, 'rank', 'ranks')}, {'parts' if is_sharded else 'whole'}"
            rows[name] = {
                "MB besides the program": round(more["alone"] / 1e6),
                "MB estimated": round(need.rank(ranks if is_sharded else 1) / 1e6),
                "MB shared": round(more["shared"] / 1e6),
                "MB of the program": round(program[is_sharded]["alone"] / 1e6),
                "seconds of a step": round(found["seconds"], 2),
            }
            print(name, rows[name], flush=True)
    if asked.out:
        added = round((program[True]["alone"] - program[False]["alone"]) / 1e6)
        rows["MB that FSDP2 adds to the program"] = added
        made = {"size": asked.size, "parameters": need.parameters, "MB of the weights": round(need.state / 1e6)}
        save(asked.out, made | rows, ["p2ptrain/ranks"])


if __name__ == "__main__":
    main()
