"""The cost of a checkpoint: the pause in training, and the speed of writing.

    python benchmarks/checkpoint.py [--preset 100m] [--turns 5] [--json FILE]

A real trainer, and the daemon's own way to save (node/persistence.py). `pause` is the time taken from the trainer's
thread, `copy` a plain copy of the same bytes in the same turn; `write` is from then until the checkpoint has its name,
`cp` is `cp` of the same files to the same disk, and `sync` of them. Turns alternate, and medians are told.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from p2ptrain.config import DeviceConfig, RunConfig
from p2ptrain.core.messages import NOTHING
from p2ptrain.data.corpus import Reading
from p2ptrain.data.dataset import TokenDataset, manifest_digest
from p2ptrain.data.prepare import prepare
from p2ptrain.data.tokenizer import load_tokenizer
from p2ptrain.digest import leaves_of
from p2ptrain.store.checkpoints import Checkpoints
from tests.helpers.trainer import Trainer


def seconds(job: Callable[[], object]) -> float:
    began = time.perf_counter()
    job()
    return time.perf_counter() - began


def run(*command: str | Path) -> None:
    subprocess.run(command, check=True)  # noqa: S603  # three programs that everybody has


def a_trainer(preset: str, place: Path) -> Trainer:
    text = place / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 1_000)
    tokenizer = load_tokenizer(None)
    prepare(
        place / "data", [text], embedded=False, how=Reading(tokenizer=tokenizer), held_out=0, progress=lambda *_: None
    )
    model = {"preset": preset, "vocab_size": 256}
    run = RunConfig.model_validate({"name": "checkpoint", "model": model})
    found = manifest_digest((place / "data" / "manifest.json").read_bytes())
    return Trainer(run, DeviceConfig(), TokenDataset.open(place / "data", found))


def turn(trainer: Trainer, place: Path, number: int) -> dict[str, float]:
    checkpoints = Checkpoints(place / "checkpoints", bytes(32))
    checkpoints.tidy()
    held = [trainer.replica.weights, trainer.recipe.residual.coefficients, *trainer.recipe.state().values()]
    copy = seconds(lambda: [each.clone() for each in held])
    began = time.perf_counter()
    capture = trainer.capture()
    pause = time.perf_counter() - began
    root = trainer.root()

    def write() -> None:
        checkpoints.write(number, NOTHING, NOTHING, root, number, capture.write, capture.state)
        assert leaves_of(capture.state, root), "peers are served from it"

    write_seconds = seconds(write)
    made = checkpoints.present()[-1].path
    size = sum(each.stat().st_size for each in made.iterdir())
    target = place / "copied"
    cp = seconds(lambda: run("cp", "-r", made, target)) + seconds(lambda: run("sync", *target.iterdir()))
    run("rm", "-r", target, made)
    return {"bytes": size, "copy": copy, "pause": pause, "write": write_seconds, "cp": cp}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="100m")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        trainer = a_trainer(chosen.preset, place)
        turns = [turn(trainer, place, number) for number in range(1, chosen.turns + 1)]
    parameters = trainer.replica.weights.numel()
    over = median(each["pause"] - each["copy"] for each in turns)
    ratio = median(each["cp"] / each["write"] for each in turns)
    for each in turns:
        print("  ".join(f"{name} {value:.3f} s" for name, value in each.items() if name != "bytes"))
    size = turns[0]["bytes"] / 1e6
    print(f"{parameters:,} parameters, {size:,.0f} MB, {torch.get_num_threads()} threads of torch")
    print(f"training pauses {1e3 * over:.0f} ms longer than a copy takes; written at {ratio:.2f} of cp's rate")
    if chosen.json:
        chosen.json.write_text(json.dumps({"parameters": parameters, "turns": turns}, indent=2) + "\n")


if __name__ == "__main__":
    main()
