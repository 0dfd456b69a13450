"""Compiles the programs of a card that the other parts need, in many processes, so that no part waits for a compiler.

Triton keeps what it has compiled on disk. A job is the check of a recipe's programs, which a node makes before it uses
them, or a round at a model's real size: a program is compiled for its constants, and for which of its numbers are
multiples of sixteen.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

from benchmarks.gpu import Report, run_part
from benchmarks.gpu.compiling import COMPILING, compiled
from benchmarks.gpu.rounds import RECIPES, stepless
from p2ptrain.config import RecipeConfig
from p2ptrain.exact.exactness import check_exactness
from p2ptrain.exact.kernels import launches

PROCESSES_MAX = 14  # of the 16 cores that lent machines have
VOCABULARY = 50_304
# By size, the numbers of contributions that are applied. All of these at a time take 50 GB of a card.
SIZES: dict[str, tuple[int, ...]] = {"124m": (8, 100), "350m": (8,)}
SIZES_SMALL: dict[str, tuple[int, ...]] = {"1m": (2,)}
LARGE, LARGE_CONTRIBUTIONS = "1b", 8  # by `local` alone
CHECKED: tuple[dict[str, Any], ...] = (
    {"name": "distro"},
    {"name": "demo"},
    {"name": "local"},
    {"name": "local", "chunk": 32},
    {"name": "demo", "chunk": 64},
)


def checked(device: str, recipe: RecipeConfig) -> dict[str, Any]:
    """Checks a card's programs as a node does at its start."""
    return timed(device, partial(check_exactness, recipe))


def round_of(device: str, size: str, recipe: str, contributions: int) -> dict[str, Any]:
    """Does a round without steps."""

    @torch.no_grad()
    def work(where: torch.device) -> None:
        rounds = stepless(size, 256 if size == "1m" else VOCABULARY, recipe, where)
        rounds.with_contributions(contributions)
        for _, stage in rounds.stages():
            stage()

    return timed(device, work)


def timed(device: str, work: Callable[[torch.device], None]) -> dict[str, Any]:
    torch.set_num_threads(1)
    where, counts, start = torch.device(device), compiled(), time.monotonic()
    work(where)
    return {"seconds": round(time.monotonic() - start, 1), "compiled": counts.figures()} | (
        {"refused": "; ".join(launches.refused.values())} if launches.refused else {}
    )


def jobs_of(report: Report) -> dict[str, tuple[Any, ...]]:
    """Returns the jobs by name, what takes longest first."""
    device = str(report.device)
    checks = {
        f"check of {recipe.name}, chunks of {recipe.chunk}": (checked, device, recipe)
        for recipe in map(RecipeConfig.model_validate, CHECKED)
    }
    rounds = {
        f"{size}, {recipe}, {count} contributions": (round_of, device, size, recipe, count)
        for size, counts in (SIZES_SMALL if report.small else SIZES).items()
        for recipe in RECIPES
        for count in counts
    }
    if not report.small:
        rounds[f"{LARGE}, local"] = (round_of, device, LARGE, "local", LARGE_CONTRIBUTIONS)
    return checks | rounds


def main(report: Report) -> None:
    jobs, bad, total = jobs_of(report), [], 0.0
    processes = max(1, min(PROCESSES_MAX, len(os.sched_getaffinity(0)) - 1))
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        started = {pool.submit(*job): name for name, job in jobs.items()}
        for done in as_completed(started):
            name = started[done]
            if error := done.exception():
                bad.append(f"{name}: {error!r}")
                report.add(name, {"failed": repr(error)[:500]})
                continue
            figures = done.result()
            total += figures["compiled"]["seconds"]
            report.add(name, figures)
            if "refused" in figures:
                bad.append(f"{name}: {figures['refused']}")
    report.add(COMPILING, round(total, 1))  # of all processes together
    if bad:
        sys.exit("\n".join(bad))


if __name__ == "__main__":
    run_part(__doc__ or "", main)
