"""Memory of a simulation in the long run: one process with many nodes, which crash, join and leave.

    OMP_NUM_THREADS=1 nice python benchmarks/long_simulation.py [--nodes 60] [--rounds 10000] [--every 250]
        [--settled 5000] [--seed 1]

A line for each so many rounds. At the end memory is compared with what it was after `--settled` rounds (medians of
five looks): exit status 1 if it has grown by more than 3 %, or a promise was broken. All checkers watch all rounds.
Every 400 virtual seconds a tenth of the nodes are killed for 40 seconds; every 1,200 one joins and another leaves.
"""

from __future__ import annotations

import argparse
import sys
from random import Random
from statistics import median
from time import monotonic, process_time

import psutil

from p2ptrain.sim.checkers import standard
from p2ptrain.sim.cluster import Cluster
from p2ptrain.sim.outcome import simulate
from p2ptrain.sim.scenario import Scenario, scenario_of

GROWTH_MAX = 1.03
LOOKS = 5  # whose median is compared
ROUND_SECONDS = 1.35  # of a round, at least: churn ends before the last round


def churn(nodes: int, rounds: int, seed: int) -> Scenario:
    """Makes a scenario of crashes, newcomers and departures."""
    draw = Random(seed)  # noqa: S311
    end = int(ROUND_SECONDS * rounds) - 100
    crashes = [
        {"kind": "crash", "at": at, "until": at + 40, "nodes": draw.sample(range(nodes), max(1, nodes // 10))}
        for at in range(30, end, 400)
    ]
    joins = [{"kind": "join", "at": at} for at in range(1_290, end, 1_200)]
    leaves = [{"kind": "leave", "at": join["at"] + 100, "nodes": [node]} for node, join in enumerate(joins)]
    table = {"sentence": "Nodes crash, join and leave.", "nodes": nodes, "rounds": rounds, "seconds": 1e6}
    return scenario_of({**table, "fault": crashes + joins + leaves})


class Looks:
    """Looks at the memory of this process every so many virtual seconds, and prints it."""

    def __init__(self, every: int) -> None:
        self.every, self.began, self.found = every, monotonic(), list[tuple[int, int]]()

    def begin(self, cluster: Cluster) -> None:
        cluster.calendar.at(cluster.calendar.now + 1.0, self.look, cluster)

    def look(self, cluster: Cluster) -> None:
        last = self.found[-1][0] if self.found else 0
        if cluster.rounds // self.every > last // self.every:
            self.found.append((cluster.rounds, psutil.Process().memory_info().rss))
            number, memory = self.found[-1]
            times = f"{monotonic() - self.began:6.0f} s, {process_time():6.0f} s of processor"
            print(f"round {number:6} {times} · {len(cluster.honest)} nodes · {memory / 1e6:.1f} MB", flush=True)
        self.begin(cluster)

    def has_grown(self, settled: int) -> bool:
        """Compares memory at the end with memory after `settled` rounds."""
        after = [memory for number, memory in self.found if number >= settled]
        if len(after) < 2 * LOOKS:
            print(f"only {len(after)} looks after round {settled}: nothing to compare")
            return True
        early, late = median(after[:LOOKS]), median(after[-LOOKS:])
        print(f"memory: {early:,.0f} to {late:,.0f} bytes, {late / early:.3f}")
        return late > GROWTH_MAX * early


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"nodes": 60, "rounds": 10_000, "every": 250, "settled": 5_000, "seed": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    looks = Looks(arguments.every)
    scenario = churn(arguments.nodes, arguments.rounds, arguments.seed)
    outcome = simulate(scenario, arguments.seed, standard(), looks.begin)
    has_grown = looks.has_grown(arguments.settled)
    print(*(outcome.failures or ["every promise was kept"]), f"{outcome.cluster.rounds} rounds", sep="\n")
    return int(has_grown or not outcome.is_good)


if __name__ == "__main__":
    sys.exit(main())
