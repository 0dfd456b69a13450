"""The faults of benchmarks/churn.py: which segments there are, and what strikes whom and when, drawn from a seed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from churn_daemon import FALSE_ROOTS, NO_WORK, SILENT_PROPOSE

NODES = 16
LOCAL_STEPS, SEQUENCES, LENGTH = 5, 8, 64  # of a contribution
DOWN_SECONDS = 2.0  # from a kill until the process is started again
START_SECONDS = 1.5  # of a process, from its start to its first round; in the simulator it takes none
APART_SECONDS = 5.0  # from a kill to the next one of the same node, at least: until its process runs again


@dataclass(frozen=True)
class Segment:
    """Some minutes with one kind of fault. Seconds are means of the swarm of sixteen."""

    name: str
    minutes: float
    kill_seconds: float = 0.0  # from one kill in the swarm to the next; 0: none
    leave_seconds: float = 0.0  # from one departure to the next, and likewise from one newcomer to the next
    lies: tuple[str, ...] = ()  # the liars tell these in turn


SEGMENTS = {
    each.name: each
    for each in (
        Segment("no faults", 5),
        Segment("a kill every 20 min", 10, kill_seconds=1_200),
        Segment("a kill every 5 min", 5, kill_seconds=300),
        Segment("a kill every 1 min", 5, kill_seconds=60),
        Segment("a kill every 15 s", 5, kill_seconds=15),
        Segment("a kill every 3.75 s", 4, kill_seconds=3.75),
        Segment("a kill every 0.94 s", 3, kill_seconds=15 / 16),
        Segment("joins and leaves", 5, leave_seconds=30),
        Segment("no faults, again", 3),
        Segment("5 silent proposers", 3, lies=(SILENT_PROPOSE,)),
        Segment("5 false roots", 3, lies=(FALSE_ROOTS,)),
        Segment("5 liars of three kinds, a kill every 15 s", 4, 15, lies=(SILENT_PROPOSE, FALSE_ROOTS, NO_WORK)),
        Segment("5 that do no work", 4, lies=(NO_WORK,)),
    )
}


# ---------------------------------------------------------------------------------------------------
# Faults


@dataclass(frozen=True)
class Fault:
    """A kill of a node, a newcomer, or a departure of a node, so many seconds after the segment's begin."""

    at: float
    kind: str  # "kill", "join" or "leave"
    node: int = -1


def faults_of(segment: Segment, seed: int, nodes: int = NODES) -> list[Fault]:
    """Draws when and whom a segment's faults strike: as many as are expected, at least one.

    In a swarm of another size each node is killed as often, and leaves as often. The tables have the rate measured.
    """
    draw, seconds = Random(f"{segment.name} {seed}"), 60.0 * segment.minutes  # noqa: S311
    liars, share, last = liars_of(segment, nodes), nodes / NODES, nodes - (nodes - 1) // 3
    means = {"kill": segment.kill_seconds, "join": segment.leave_seconds, "leave": segment.leave_seconds}
    times = [
        (draw.uniform(0.0, seconds - DOWN_SECONDS), kind)
        for kind, mean in means.items()
        for _ in range(max(1, round(share * seconds / mean)) if mean else 0)
    ]
    free_at, gone, found = [0.0] * nodes, set[int](), list[Fault]()
    for at, kind in sorted(times):
        able = [node for node in range(nodes) if free_at[node] <= at and node not in gone and node not in liars]
        if kind == "leave":  # those who lie in later segments stay
            able = [node for node in able if node < last]
        node = draw.choice(able) if able and kind != "join" else -1
        if kind == "kill" and able:
            free_at[node] = at + APART_SECONDS
        elif kind == "leave":
            gone.add(node)
        if able or kind == "join":
            found.append(Fault(at, kind, node))
    return found


def liars_of(segment: Segment, nodes: int) -> dict[int, str]:
    """Returns what each liar says: the last f of a swarm."""
    count = (nodes - 1) // 3 if segment.lies else 0
    return {nodes - count + place: segment.lies[place % len(segment.lies)] for place in range(count)}


def rounded(total: float, count: int) -> float:
    return round(total / max(1, count), 2)


def median_and_p95(values: Sequence[float]) -> dict[str, float | None]:
    ordered = sorted(values)
    late = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))] if ordered else None
    middle = statistics.median(ordered) if ordered else None
    return {"median": middle and round(middle, 1), "p95": late and round(late, 1), "count": len(ordered)}
