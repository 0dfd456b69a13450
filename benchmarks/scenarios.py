"""Runs every scenario with random seeds: its expectations must not depend on the seed.

    make scenarios                               # 40 seeds of each scenario, an hour on a quiet core
    make scenarios SEEDS=3 SEED=7                # fewer; the same SEED draws the same ones again

All scenarios run once before any runs again. Each failure is printed with the command that repeats it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random

from p2ptrain.sim.checkers import standard
from p2ptrain.sim.outcome import simulate
from p2ptrain.sim.scenario import load_scenario

FOLDER = Path(__file__).parents[1] / "scenarios"
NAMES = sorted(path.stem for path in FOLDER.glob("*.toml"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME", help="a scenario; default: all")
    parser.add_argument("--seeds", type=int, default=40, help="of each scenario")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="draws the others; default: the time")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    failed: Counter[str] = Counter()
    for turn in range(arguments.seeds):
        for name in arguments.names:
            seed = Random(f"{arguments.seed} {name} {turn}").randrange(2**31)  # noqa: S311
            outcome = simulate(load_scenario(FOLDER / f"{name}.toml"), seed, standard())
            if not outcome.is_good:
                failed[name] += 1
                print(
                    f"p2ptrain simulate scenarios/{name}.toml --seed {seed}", *outcome.failures, sep="\n  ", flush=True
                )
        print(f"{turn + 1} seeds of {len(arguments.names)} scenarios, {failed.total()} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
