"""Kills one of four real daemons with SIGKILL, again and again: do replicas stay equal, and do the others continue?

    OMP_NUM_THREADS=1 python benchmarks/kills.py [--minutes 20] [--nodes 4] [--passes 4] [--seed 1] [--keep]
        [--json FILE]

A victim is drawn, the first node too, killed, started again after five seconds, and the next is killed 15 s after it
has voted again. Then each node's own records (store/records.py) are compared: every round's root, between all who
applied it; and how long the others went without a round while one was down, in round times, which are the median of
the whole run. A state that came out wrong heals by itself before it is recorded, so each node is also asked all along
how often that was. Exit status 1 if a root differs, a state came out wrong, or a stall was longer than STALL_ROUNDS.

A million parameters; `--passes` of a training step make a round take seconds, as real ones do: a round whose proposer
is dead takes `view_seconds` (2) longer, however short it is.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import monotonic, time
from typing import Any, NamedTuple

from daemons import START_SECONDS, Swarm, recipe, swarm_of

from p2ptrain.demo import DemoNode
from p2ptrain.observe.rounds import recorded
from p2ptrain.observe.schema import RoundRecord
from p2ptrain.store.records import ROUNDS_MAX

DOWN_SECONDS = 5.0  # and the time that a start takes
REST_SECONDS = 15.0  # from the moment a victim has voted again to the next kill
STALL_ROUNDS = 5.0
WARM_UP_ROUNDS = 5
ADMISSION = "absence_rounds_max = 1000"  # the roster stays at four, of which one may be missing


class Kill(NamedTuple):
    """The times of one kill, in seconds since 1970."""

    victim: str
    at: float
    back_at: float  # when it had voted again


class Watched(Swarm):
    """A swarm whose nodes' counters are read regularly, because a kill loses them."""

    def __init__(self, directory: Path, run: str, size: int) -> None:
        super().__init__(directory, run, size)
        self.mismatches: set[str] = set()  # nodes that came to a wrong state

    def look(self) -> None:
        super().look()
        for node in self.nodes:
            if node.status.get("counters", {}).get("root mismatches"):
                self.mismatches.add(node.name)


def kill_one(swarm: Swarm, victim: DemoNode) -> Kill:
    others = [node for node in swarm.nodes if node is not victim]
    at = time()
    victim.kill()
    victim.process, victim.status = None, {}  # `look` would complain of a node that has ended
    wait(swarm, DOWN_SECONDS)
    victim.start()
    swarm.until(lambda: bool(victim.status.get("is_member")), START_SECONDS)
    came_at = max(node.applied for node in others)
    swarm.until(lambda: victim.applied > came_at + 1, START_SECONDS)  # it voted on the round before that
    return Kill(victim.name, at, time())


def wait(swarm: Swarm, seconds: float) -> None:
    until = monotonic() + seconds
    swarm.until(lambda: monotonic() >= until, seconds + 10.0)


def records_of(node: DemoNode) -> list[RoundRecord]:
    [directory] = (node.directory / "runs").iterdir()
    return recorded(directory, ROUNDS_MAX)


def judge(records: dict[str, list[RoundRecord]], kills: list[Kill]) -> dict[str, Any]:
    """Compares the nodes' records."""
    roots: dict[tuple[bytes, int], set[bytes]] = defaultdict(set)
    tellers: dict[tuple[bytes, int], int] = defaultdict(int)
    for each in (record for told in records.values() for record in told):
        roots[each.branch, each.round].add(each.root)
        tellers[each.branch, each.round] += 1
    gaps = [late.applied_at - early.applied_at for told in records.values() for early, late in pairwise(told)]
    round_seconds = median(gaps)
    stalls = {kill: longest_gap(records, kill) for kill in kills}
    worst = max(stalls, key=lambda kill: stalls[kill], default=None)
    return {
        "rounds": len(roots),
        "branches": len({branch for branch, _ in roots}),
        "compared": sum(count > 1 for count in tellers.values()),
        "differing": sorted(number for (_, number), found in roots.items() if len(found) > 1),
        "kills": len(kills),
        "victims": sorted(kill.victim for kill in kills),
        "away_seconds": [round(kill.back_at - kill.at, 1) for kill in kills],
        "round_seconds": round_seconds,
        "stall_seconds": [round(stall, 2) for stall in stalls.values()],
        "stall_rounds": 0.0 if worst is None else stalls[worst] / round_seconds,
        "worst": "" if worst is None else worst.victim,
    }


def longest_gap(records: dict[str, list[RoundRecord]], kill: Kill) -> float:
    """Returns the longest gap between two rounds of a surviving node while one was down."""
    found = [0.0]
    for name, told in records.items():
        if name != kill.victim:
            times = [each.applied_at for each in told]
            found += [late - early for early, late in pairwise(times) if late > kill.at and early < kill.back_at]
    return max(found)


def run(minutes: float, nodes: int, passes: int, seed: int, keep: bool) -> dict[str, Any]:
    rng = random.Random(seed)  # noqa: S311  # chance that can be repeated
    kills: list[Kill] = []
    with swarm_of(nodes, keep, Watched, recipe=recipe(passes), admission=ADMISSION) as swarm:
        assert isinstance(swarm, Watched)
        swarm.start()
        swarm.pass_rounds(WARM_UP_ROUNDS)
        until = monotonic() + 60.0 * minutes
        while monotonic() < until:
            kills.append(kill_one(swarm, rng.choice(swarm.nodes)))
            print(f"{kills[-1].victim}: away {kills[-1].back_at - kills[-1].at:.1f} s, round {swarm.round}", flush=True)
            wait(swarm, REST_SECONDS)
        swarm.stop()
        found = judge({node.name: records_of(node) for node in swarm.nodes}, kills)
        return found | {"mismatches": sorted(swarm.mismatches)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    result = run(chosen.minutes, chosen.nodes, chosen.passes, chosen.seed, chosen.keep)
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=2) + "\n")
    print(
        f"{result['kills']} kills, {result['rounds']} rounds on {result['branches']} branches, {result['compared']} "
        f"compared, {len(result['differing'])} differ, {len(result['mismatches'])} nodes came to a wrong state; a "
        f"round takes {result['round_seconds']:.2f} s, the longest stall while one was down took "
        f"{result['stall_rounds']:.1f} of them ({result['worst']}); {STALL_ROUNDS:.0f} are allowed"
    )
    return int(
        bool(result["differing"] or result["mismatches"])
        or result["stall_rounds"] > STALL_ROUNDS
        or not result["compared"]
    )


if __name__ == "__main__":
    sys.exit(main())
