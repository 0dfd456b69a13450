"""Trainers on a CPU and on the device in one swarm: equal roots in each round, although training rounds differently.

Two on either side, for each recipe, with fp32 alone, with TF32 and with bf16 allowed. What they train differs, since
each rounds in its own way; what is applied may not. `training_differs` says that the comparison means something: a
device that trains to a CPU's bits is no other device.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from fractions import Fraction
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import Report, model_config, run_part
from p2ptrain.config import DeviceConfig, RunConfig
from p2ptrain.data.corpus import Reading
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.data.prepare import prepare
from p2ptrain.data.tokenizer import load_tokenizer
from p2ptrain.share import Share
from tests.helpers.trainer import Trainer

RECIPES: dict[str, dict[str, Any]] = {
    "distro": {},
    "demo": {},
    "local": {"local_steps": 2, "inner_learning_rate": "1/200"},
}
# Each apart: under bf16 every matrix product is bf16, and none is left for TF32.
PRECISIONS = {"fp32": ("highest", "off"), "tf32": ("high", "off"), "bf16": ("high", "bf16")}
ROUNDS, ROUNDS_SMALL = 120, 4
SECONDS_KEPT = 5.0  # for what is still to be told when the time is over
WORKERS_MAX, START_SECONDS = 5, 10.0  # of processes, and until they train


def embedded(folder: Path) -> str:
    """Prepares the embedded text, and returns its digest."""
    return prepare(
        folder,
        [],
        embedded=True,
        how=Reading(tokenizer=load_tokenizer(None)),
        held_out=Fraction(1, 50),
        progress=lambda *_: None,
    ).digest


def rounds_of(
    device: str,
    folder: Path,
    digest: str,
    wanted: int,
    name: str,
    precision: str,
    seconds: float,
    end: float = math.inf,
) -> dict[str, Any]:
    """Trains as many rounds as there is time for, but not more than wanted. end: of all time, on the system's clock"""
    torch.set_num_threads(1)
    dataset = TokenDataset.open(folder, digest)
    ends_at = min(time.monotonic() + seconds, end)
    before = torch.get_float32_matmul_precision()
    matmul, autocast = PRECISIONS[precision]
    torch.set_float32_matmul_precision(matmul)
    try:
        return _rounds_of(device, dataset, wanted, {"name": name} | RECIPES[name], autocast, ends_at)
    finally:
        torch.set_float32_matmul_precision(before)


def _rounds_of(
    device: str, dataset: TokenDataset, wanted: int, recipe: dict[str, Any], autocast: str, ends_at: float
) -> dict[str, Any]:
    run = RunConfig.model_validate(
        {"name": "swarm", "model": model_config("tiny").model_dump(), "recipe": {"sequences_per_pass": 4} | recipe}
    )
    cpu, other = (
        DeviceConfig.model_validate({"name": name, "threads": 1, "autocast": cast})
        for name, cast in (("cpu", "off"), (device, autocast))
    )
    trainers = [Trainer(run, config, dataset) for config in (cpu, other, cpu, other)]
    before, training_differs, contributions_differ, done = trainers[0].evaluate(), False, False, 0
    for number in range(wanted):
        if time.monotonic() > ends_at:
            break
        steps, payloads = [], []
        for place, trainer in enumerate(trainers):
            # A CPU and the device have the same data: only rounding differs.
            steps.append(trainer.train(Share(number, place // 2, 2)))
            payloads.append(trainer.contribute(number))
        training_differs |= steps[0] != steps[1]
        contributions_differ |= payloads[0] != payloads[1]
        assert not any(trainers[0].check(payload) for payload in payloads)
        for place, trainer in enumerate(trainers):
            trainer.apply(number, payloads[place:] + payloads[:place], {number: payloads[place]})
        done = number + 1
        if len({trainer.root() for trainer in trainers}) != 1:
            break
    equal = len({trainer.root() for trainer in trainers}) == 1
    return {
        "rounds": done,
        "incomplete": equal and done < wanted,  # for want of time
        "roots_equal": equal,
        "training_differs": training_differs,
        "contributions_differ": contributions_differ,
        "loss_before": round(before, 4),
        "loss_after": round(trainers[0].evaluate(), 4),
        "final_root": trainers[0].root().hex(),
    }


def workers(report: Report) -> int:
    """Returns how many swarms train at a time."""
    return 1 if report.device.type == "cpu" else max(1, min(WORKERS_MAX, len(os.sched_getaffinity(0)) // 3))


def fault_of(found: dict[str, Any], report: Report) -> str | None:
    if not found["roots_equal"]:
        return "roots differ"
    if found["incomplete"]:
        return f"the time was over after {found['rounds']} rounds"
    if report.device.type == "cuda" and not found["training_differs"]:
        return "the device trained to the same bits as the CPU, so this has shown nothing"
    return None


def main(report: Report) -> None:
    """On a GPU some at a time, each in a process of its own: it is a processor's core that takes the time."""
    jobs = [(name, precision) for name in RECIPES for precision in PRECISIONS]
    wanted, bad = ROUNDS_SMALL if report.small else ROUNDS, []

    def told(job: tuple[str, str], found: dict[str, Any]) -> None:
        report.add(", ".join(job), found)
        if fault := fault_of(found, report):
            bad.append(f"{', '.join(job)}: {fault}")

    with tempfile.TemporaryDirectory() as folder:
        same = (str(report.device), Path(folder), embedded(Path(folder)), wanted)
        if (at_once := workers(report)) == 1:
            for place, job in enumerate(jobs):
                told(job, rounds_of(*same, *job, (report.seconds_left - SECONDS_KEPT) / (len(jobs) - place)))
        else:
            left = report.seconds_left - SECONDS_KEPT
            each = (left - START_SECONDS) / -(-len(jobs) // at_once)
            with ProcessPoolExecutor(at_once, get_context("spawn")) as pool:
                started = {
                    pool.submit(rounds_of, *same, *job, each, time.monotonic() + left): job for job in reversed(jobs)
                }  # slow ones first
                for done in as_completed(started):
                    if error := done.exception():
                        bad.append(f"{', '.join(started[done])}: {error!r}")
                    else:
                        told(started[done], done.result())
    if bad:
        sys.exit("\n".join(bad))


if __name__ == "__main__":
    run_part(__doc__ or "", main)
