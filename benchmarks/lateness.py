"""What it costs that contributions are applied late, and that peers take unequal numbers of steps.

    python benchmarks/lateness.py [--size quick|0.8m] [--seeds N] [--only WORDS] [--json FILE] [--figures FILE]
        [--processes N]

The model, data and codec of benchmarks/learning.py; `local` with Muon, k = 256, four peers. A contribution's gap is how
far the weights that its steps began from are from those that it is applied to, averaged over its steps, over the
distance that they moved; 0 where all begin at the agreed weights. The loss is that on held-out text beyond the same
seed's run without delay, in nats a byte. --figures writes what docs/pictures.py draws.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import figures
from learning import Runs, prepare_corpus
from methods import Setting
from unequal import RATES

# The figures are about this code, and old when it has changed.
ABOUT = ("p2ptrain/train/recipes.py", "p2ptrain/train/learner.py")
BASE = Setting("local", "muon", k=256, local_steps=10)
# Of twelve steps a round, how many each peer takes: six on average in all of them.
SPREADS = ((6, 6, 6, 6), (8, 8, 4, 4), (10, 10, 2, 2), (11, 11, 1, 1))
VARIED = ("delay", "between", "early_share", "fragments", "local_steps", "steps_of")
SHARES = ("0", "1/4", "1/2", "3/4", "1")


def variants() -> dict[str, list[Setting]]:
    """Returns the settings by group; the first of a group is what the others are compared with."""
    late = [
        replace(BASE, delay=max(1, rounds), between=steps, early_share=share)
        for rounds, steps in ((0, 2), (0, 5), (1, 0), (2, 0), (4, 0))
        for share in SHARES
    ]
    parts = [replace(BASE, fragments=count, local_steps=BASE.local_steps // count) for count in (2, 5)]
    unequal = [replace(BASE, local_steps=12, steps_of=steps) for steps in SPREADS]
    return {"late": [BASE, *late], "fragments": [BASE, *parts], "unequal": unequal}


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
        group: [
            [replace(each, size=arguments.size, rate=RATES[arguments.size], seed=seed) for seed in seeds]
            for number, each in enumerate(settings)
            if not number or arguments.only in each.method
        ]
        for group, settings in variants().items()
    }
    runs.all({each for settings in sized.values() for seeded in settings for each in seeded})
    told: list[dict[str, Any]] = []
    for group, settings in sized.items():
        compared: list[float] = []
        print(f"{group}\n  {'loss':>6} {'more':>7} {'gap':>6}")
        for seeded in settings:
            done = runs.all(seeded)
            losses = [math.inf if one["validation_loss"] is None else one["validation_loss"] for one in done]
            compared = compared or losses
            more = statistics.mean(loss - other for loss, other in zip(losses, compared, strict=True))
            gap, each = statistics.mean(one["gap"] for one in done), " ".join(f"{loss:.3f}" for loss in losses)
            print(f"  {statistics.mean(losses):6.3f} {more:+7.3f} {gap:6.2f}  {seeded[0].method}: {each}")
            varied = {name: getattr(seeded[0], name) for name in VARIED}
            told.append({"group": group, "gap": gap, "more_loss": more, "losses": losses} | varied)
    late = [each for each in told if each["group"] == "late"]
    if len(late) > 2:
        costs = [each["more_loss"] for each in late]
        delays = [each["delay"] if not each["between"] else each["between"] / each["local_steps"] for each in late]
        gaps = [each["gap"] for each in late]
        print(f"rank correlation with loss: gap {correlation(gaps, costs):.2f}, delay {correlation(delays, costs):.2f}")
    if arguments.figures:
        figures.save(arguments.figures, told, ABOUT)


if __name__ == "__main__":
    main()
