"""What a card would take for a round's own work at 124M, from what the round asks of it: needs no card.

Launches, waits and bytes are counted (counted.py); how long each takes was fitted to rounds of eight contributions on
one H200, on 2026-11-28 at commit d3fb243e. Host and card are added up, not overlapped: a stage begins and ends with an
idle card. The ratio beside each stage, to what was measured then, tells what the model is worth. It is made for
changes: what more launches, bytes or numbers would cost.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu import Report, ratio, run_part
from benchmarks.gpu.counted import Counting, counting
from benchmarks.gpu.rounds import RECIPES, stepless

SIZE, VOCABULARY, CONTRIBUTIONS = "124m", 50_304, 8
PROGRAM_SECONDS, OPERATION_SECONDS, WAIT_SECONDS = 75e-6, 15e-6, 100e-6  # of Python a launch, and of a wait
DEVICE_BYTES_A_SECOND = 4.2e12  # of the card's own memory, read and written
PINNED_BYTES_A_SECOND = 54e9  # over the bus, from memory that stays in its place
PAGEABLE_BYTES_A_SECOND = 5.8e9  # of payloads, from where they are to such memory
# Of a number that a program has before it, by program; any other takes so little that its launch is what counts.
PICOSECONDS = {
    "update": 23.0, "select": 12.0, "accumulate": 9.9, "subtract": 23.0, "withdraw": 1.0,
    "count_ranks": 56.0, "count_strings": 25.0, "chunks": 1_020.0,
}  # fmt: skip
# Milliseconds of each stage on that H200 (torch 2.11, Triton 3.6), the last of three rounds.
MEASURED = {
    "distro": {"begin": 0.27, "end": 0.0, "take": 3.18, "pack": 0.8, "apply": 5.01, "root": 1.74},
    "local": {"begin": 4.07, "end": 4.44, "take": 4.21, "pack": 1.48, "apply": 15.66, "root": 2.57},
}


def modelled_ms(counts: Counting) -> dict[str, float]:
    """Returns the milliseconds of a stage: of the host, of the card, and of the copies between them."""
    own = sum(counts.programs.values())
    host = own * PROGRAM_SECONDS + (counts.launches - own) * OPERATION_SECONDS + counts.waits * WAIT_SECONDS
    host += counts.to_card / PAGEABLE_BYTES_A_SECOND
    card = counts.moved / DEVICE_BYTES_A_SECOND
    card += sum(PICOSECONDS.get(name, 0.0) * numbers / 1e12 for name, numbers in counts.numbers.items())
    bus = (counts.to_card + counts.to_host) / PINNED_BYTES_A_SECOND
    return {name: round(1e3 * seconds, 3) for name, seconds in (("host", host), ("card", card), ("bus", bus))}


def modelled(recipe: str) -> dict[str, dict[str, Any]]:
    """Returns each stage of a round: what it asks of a card, the milliseconds of the model, and those measured."""
    stages: dict[str, dict[str, Any]] = {}
    with torch.no_grad(), counting() as counts:
        rounds = stepless(SIZE, VOCABULARY, recipe, torch.device("meta"))
        with counts:
            rounds.with_contributions(CONTRIBUTIONS)
        for name, stage in rounds.stages():
            counts.clear()
            with counts:
                stage()
            asked: dict[str, Any] = {"launches": counts.launches, "waits": counts.waits}
            asked |= {"to_card_bytes": counts.to_card, "to_host_bytes": counts.to_host}
            asked["programs"] = dict(counts.programs)
            parts = modelled_ms(counts)
            total = round(sum(parts.values()), 2)
            measured = MEASURED[recipe][name]
            stages[name] = asked | parts | {"ms": total, "measured_ms": measured, "over": ratio(total, measured)}
    return stages


def main(report: Report) -> None:
    for recipe in RECIPES:
        stages = modelled(recipe)
        for name, figures in stages.items():
            report.add(f"{recipe}, {name}", figures)
        total, measured = sum(figures["ms"] for figures in stages.values()), sum(MEASURED[recipe].values())
        told = {"ms": round(total, 2), "measured_ms": round(measured, 2), "error": round(total / measured - 1, 3)}
        report.add(f"{recipe}, a round beside its steps", told)


if __name__ == "__main__":
    run_part(__doc__ or "", main)
