"""What drift costs: contributions computed elsewhere than where they are applied, and unequal numbers of steps.

    python benchmarks/drift.py [--size quick|0.8m] [--seeds N] [--only WORDS] [--json FILE] [--figures FILE]
        [--processes N]

The model, data and codec of benchmarks/learning.py; `local` with Muon, k = 256, four peers. Drift is the distance
between the weights that a contribution's steps began from and those that it is applied to, over the distance that these
steps moved; 0 where all begin at the agreed weights. The loss is that on held-out text beyond the same seed's run
without delay, in nats a byte. --figures writes what docs/pictures.py draws.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from learning import Runs, prepare_corpus
from methods import Setting
from unequal import RATES

BASE = Setting("local", "muon", k=256, local_steps=10)
# Of twelve steps a round, how many each peer takes: six on average in all of them.
SPREADS = {"1": (6, 6, 6, 6), "2": (8, 8, 4, 4), "5": (10, 10, 2, 2), "11": (11, 11, 1, 1)}
SHARES = ("0", "1/4", "1/2", "3/4", "1")


def variants() -> dict[str, dict[str, Setting]]:
    """Returns the settings by group and name; the first of a group is what the others are compared with."""
    late = {"in time": BASE}
    late |= {
        f"{rounds} late, {share} of its own": replace(BASE, delay=rounds, early_share=share)
        for rounds in (1, 2, 4)
        for share in SHARES
    }
    ahead = {
        f"{steps} steps late, {share} of its own": replace(BASE, delay=1, between=steps, early_share=share)
        for steps in (2, 5)
        for share in SHARES
    }
    parts = {f"{count} fragments": replace(BASE, fragments=count) for count in (2, 4)}
    spreads = {f"steps {spread}": replace(BASE, local_steps=12, steps_of=steps) for spread, steps in SPREADS.items()}
    return {"drift": late | ahead | parts, "unequal steps": spreads}


def ranks(values: list[float]) -> list[float]:
    order = sorted(values)
    return [order.index(each) + (order.count(each) - 1) / 2 for each in values]


def correlation(these: list[float], those: list[float]) -> float:
    """Returns Spearman's: 1 if the one rises whenever the other does."""
    return statistics.correlation(ranks(these), ranks(those))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--size", choices=RATES, default="quick")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", metavar="WORDS", help="only variants described with these words")
    parser.add_argument("--json", type=Path, help="where every run is kept; those that are there are not run again")
    parser.add_argument("--figures", type=Path, help="where the table goes as JSON")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    prepare_corpus(has_short=False)
    runs, seeds = Runs(arguments.json, arguments.processes), range(arguments.seeds)
    sized = {
        group: {
            name: [replace(each, size=arguments.size, rate=RATES[arguments.size], seed=seed) for seed in seeds]
            for number, (name, each) in enumerate(settings.items())
            if not number or arguments.only in name
        }
        for group, settings in variants().items()
    }
    runs.all(each for settings in sized.values() for seeded in settings.values() for each in seeded)
    figures: list[dict[str, Any]] = []
    for group, settings in sized.items():
        compared: list[float] = []
        print(f"{group}\n  {'loss':>6} {'more':>7} {'drift':>6}")
        for name, seeded in settings.items():
            done = runs.all(seeded)
            losses = [math.inf if one["validation_loss"] is None else one["validation_loss"] for one in done]
            compared = compared or losses
            more = statistics.mean(loss - other for loss, other in zip(losses, compared, strict=True))
            drift = statistics.mean(one["drift"] for one in done)
            print(
                f"  {statistics.mean(losses):6.3f} {more:+7.3f} {drift:6.2f}  {name:28}",
                *(f"{each:.3f}" for each in losses),
            )
            if math.isfinite(more):
                figures.append({"group": group, "name": name, "drift": drift, "more_loss": more, "losses": losses})
    drifting = [each for each in figures if each["group"] == "drift"]
    if len(drifting) > 2:
        drifts, costs = ([each[of] for each in drifting] for of in ("drift", "more_loss"))
        print(f"rank correlation of drift and loss: {correlation(drifts, costs):.2f}")
    if arguments.figures:
        arguments.figures.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
