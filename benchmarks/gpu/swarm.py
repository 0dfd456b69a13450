"""Trainers on a CPU and on the device, one swarm: equal roots, round after round, whatever training may round.

Two on either side, for each recipe, with fp32 alone and with TF32 and bf16 allowed. What they contribute differs, since
each trains with its own rounding; what is applied may not. `training_differs` says that the comparison means something.
"""

from __future__ import annotations

import sys
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import Report, model_config, run_part
from p2ptrain.config import DeviceConfig, RunConfig
from p2ptrain.learn.data import TokenDataset
from p2ptrain.learn.prepare import prepare
from p2ptrain.learn.tokenizer import load_tokenizer
from p2ptrain.learn.trainer import Trainer

RECIPES: dict[str, dict[str, Any]] = {
    "distro": {},
    "demo": {},
    "local": {"local_steps": 2, "inner_learning_rate": "1/200"},
}
PRECISIONS = {"fp32": ("highest", "off"), "tf32 and bf16": ("high", "bf16")}
ROUNDS, ROUNDS_SMALL = 200, 8
SECONDS_KEPT = 5.0  # for what is still to be told when the time is over


def embedded(folder: Path) -> TokenDataset:
    made = prepare(
        folder,
        [],
        embedded=True,
        tokenizer=load_tokenizer(None),
        held_out=Fraction(1, 50),
        progress=lambda done, all_: None,
    )
    return TokenDataset.open(folder, made.digest)


def rounds_of(
    report: Report, dataset: TokenDataset, recipe: dict[str, Any], autocast: str, seconds_each: float
) -> dict[str, Any]:
    run = RunConfig.model_validate(
        {"name": "swarm", "model": model_config("tiny").model_dump(), "recipe": {"sequences_per_pass": 4} | recipe}
    )
    cpu, other = (
        DeviceConfig(name="cpu", threads=1, autocast="off"),
        DeviceConfig(name=str(report.device), autocast=autocast),
    )  # type: ignore[arg-type]
    trainers = [Trainer(run, config, dataset) for config in (cpu, other, cpu, other)]
    ends_with = report.seconds_left - seconds_each
    before, differs, done = trainers[0].evaluate(), False, 0
    for number in range(ROUNDS_SMALL if report.small else ROUNDS):
        if report.seconds_left < ends_with:
            break
        payloads = []
        for place, trainer in enumerate(trainers):
            trainer.train(number, place // 2, 2)  # a CPU and the device have the same data: only rounding differs
            payloads.append(trainer.contribute(number))
            trainer.forget(number)
        differs |= payloads[0] != payloads[1]
        for place, trainer in enumerate(trainers):
            assert not any(trainer.check(payload) for payload in payloads)
            trainer.apply(number, payloads[place:] + payloads[:place])
        done = number + 1
        if len({trainer.root() for trainer in trainers}) != 1:
            break
    equal = len({trainer.root() for trainer in trainers}) == 1
    return {
        "rounds": done,
        "roots_equal": equal,
        "training_differs": differs,
        "loss_before": round(before, 4),
        "loss_after": round(trainers[0].evaluate(), 4),
        "final_root": trainers[0].root().hex(),
    }


def main(report: Report) -> None:
    torch.set_num_threads(1)
    bad = []
    with tempfile.TemporaryDirectory() as folder:
        dataset = embedded(Path(folder) / "data")
        left = len(RECIPES) * len(PRECISIONS)
        for precision, (matmul, autocast) in PRECISIONS.items():
            torch.set_float32_matmul_precision(matmul)
            for name, settings in RECIPES.items():
                each = (report.seconds_left - SECONDS_KEPT) / left
                found = rounds_of(report, dataset, {"name": name} | settings, autocast, each)
                report.add(f"{name}, {precision}", found)
                if not found["roots_equal"] or not found["rounds"]:
                    bad.append(name)
                left -= 1
    if bad:
        sys.exit(f"roots differ: {bad}")


if __name__ == "__main__":
    run_part(__doc__ or "", main)
