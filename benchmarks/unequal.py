"""Peers of unequal speed: held-out loss with the slow ones, without them, and with equal peers.

    python benchmarks/unequal.py [--size quick|0.8m] [--seeds N] [--only WORDS] [--json FILE] [--processes N]

The model, data and codec of benchmarks/learning.py; local Muon, k = 256, rounds of ten steps. Wanted: a swarm with slow
peers is never worse than the same swarm without them, and within 2 % of equal peers that see as many tokens.
"""

from __future__ import annotations

import argparse
import os
import statistics
from dataclasses import replace
from pathlib import Path

from learning import Runs, prepare_corpus
from methods import Setting

RATES = {"quick": "1/50", "0.8m": "1/100"}
STEPS = 10  # of a round
MUON = Setting("local", "muon", k=256, local_steps=STEPS)


def spread(*steps: int) -> Setting:
    """Returns a swarm whose peers take so many of a round's steps; who takes none is away."""
    return replace(MUON, peers=len(steps), steps_of=steps)


def fortieth(slow: int) -> Setting:
    """Returns eight peers of which so many take one step, on one of its four sequences: a fortieth of the work."""
    fast = 8 - slow
    return replace(spread(*[1] * slow, *[10] * fast), sequences_of=(*[1] * slow, *[4] * fast))


def late(*speeds: int) -> Setting:
    """Returns a swarm whose peers take so many rounds for a training, and contribute late; 0: away."""
    return replace(MUON, peers=len(speeds), speeds=speeds)


# Whoever is there has the same data in all swarms of a comparison, so that its draw makes no difference.
COMPARED: dict[str, list[tuple[str, Setting]]] = {
    "3 of 8 take a tenth": [
        ("all", spread(*[1] * 3, *[10] * 5)),
        ("without the slow ones", spread(*[0] * 3, *[10] * 5)),
        ("equal, as many tokens", spread(*[7] * 5, *[6] * 3)),
    ],
    "5 of 8 take a tenth": [
        ("all", spread(*[1] * 5, *[10] * 3)),
        ("without the slow ones", spread(*[0] * 5, *[10] * 3)),
        ("equal, as many tokens", spread(*[5] * 3, *[4] * 5)),
    ],
    "3 of 8 take a fortieth": [
        ("all", fortieth(3)),
        ("without the slow ones", spread(*[0] * 3, *[10] * 5)),
    ],
    "5 of 8 take a fortieth": [
        ("all", fortieth(5)),
        ("without the slow ones", spread(*[0] * 5, *[10] * 3)),
    ],
    "steps 10/5/2/1": [
        ("all", spread(10, 5, 2, 1)),
        ("without the slowest", spread(10, 5, 2, 0)),
        ("without the two slowest", spread(10, 5, 0, 0)),
        ("the fastest alone", spread(10, 0, 0, 0)),
        ("equal, as many tokens", spread(5, 5, 4, 4)),
    ],
    "speeds 1/2/5/10, late": [
        ("all", late(1, 2, 5, 10)),
        ("without the slowest", late(1, 2, 5, 0)),
        ("without the two slowest", late(1, 2, 0, 0)),
        ("the fastest alone", late(1, 0, 0, 0)),
    ],
    "8 equal": [("all", spread(*[10] * 8))],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--size", choices=RATES, default="quick")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", metavar="WORDS")
    parser.add_argument("--json", type=Path, help="where every run is kept; those that are there are not run again")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    prepare_corpus(has_short=False)
    runs = Runs(arguments.json, arguments.processes)
    seeds = range(arguments.seeds)
    sized = {
        what: [(who, replace(each, size=arguments.size, rate=RATES[arguments.size])) for who, each in swarms]
        for what, swarms in COMPARED.items()
        if arguments.only in what
    }
    runs.all(replace(each, seed=seed) for swarms in sized.values() for _, each in swarms for seed in seeds)
    for what, swarms in sized.items():
        print(what)
        for who, each in swarms:
            losses = [one["validation_loss"] for one in runs.all(replace(each, seed=seed) for seed in seeds)]
            print(f"  {statistics.mean(losses):.3f}  {who:28}" + " ".join(f"{loss:.3f}" for loss in losses))


if __name__ == "__main__":
    main()
