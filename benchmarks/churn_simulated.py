"""The simulator's part of benchmarks/churn.py: the same faults in virtual time, with every checker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from time import monotonic
from typing import Any

from churn_daemon import STEP_SECONDS
from churn_faults import (
    DOWN_SECONDS,
    LENGTH,
    LOCAL_STEPS,
    SEQUENCES,
    START_SECONDS,
    Segment,
    faults_of,
    liars_of,
    median_and_p95,
    rounded,
)

from p2ptrain.core import events as ev
from p2ptrain.sim.checkers import standard
from p2ptrain.sim.cluster import Cluster
from p2ptrain.sim.machine import SimNode
from p2ptrain.sim.outcome import simulate
from p2ptrain.sim.scenario import Scenario, scenario_of

WARM_UP_SECONDS = 60.0  # until the simulated swarm knows its pace


class Watched:
    """What a simulated swarm does between two times: rounds, steps of honest contributions, and who catches up."""

    def __init__(self, cluster: Cluster, begin: float, end: float) -> None:
        self.cluster, self.begin, self.end = cluster, begin, end
        self.steps: dict[tuple[int, int], int] = {}  # by node and round
        self.decided: dict[tuple[bytes, int], tuple[int, int]] = {}  # rounds: contributions, and honest steps
        self.there: list[int] = []  # nodes, by round
        self.before: set[tuple[bytes, int]] = set()  # rounds decided before `begin`, which newcomers apply later
        self.times: list[float] = [begin]
        self.started: dict[int, float] = {}  # of those who have not caught up
        self.caught_up: list[float] = []
        self.kills = 0
        cluster.watch.observers.append(self.note)
        cluster.calendar.at(end, cluster.calendar.stop)

    def note(self, node: SimNode, event: ev.Event, effects: Sequence[Any] | None, local: float) -> None:
        now = self.cluster.calendar.now
        match event:
            case ev.TrainingFinished():
                self.steps[node.index, event.round] = event.steps
            case ev.Started() if now > self.begin and node.life > 1:
                self.started[node.index] = now
            case ev.Applied() | ev.CaughtUp() if node.index in self.started:
                newest = max(each.state.round for each in self.cluster.honest)
                if node.state.round >= newest:
                    self.caught_up.append(now - self.started.pop(node.index) + START_SECONDS)
            case _:
                pass
        for effect in effects or ():
            if isinstance(effect, ev.Apply) and node.honest:
                self.apply(effect, now)

    def apply(self, effect: ev.Apply, now: float) -> None:
        manifest = effect.manifest
        place = manifest.branch, manifest.round
        if now <= self.begin:
            self.before.add(place)
        if place in self.before or place in self.decided or now > self.end:
            return
        self.times.append(now)
        authors = [(self.cluster.node_of(taken.author), taken.round) for taken in manifest.taken]
        steps = sum(self.steps.get((node.index, number), 0) for node, number in authors if node.honest)
        self.decided[place] = len(authors), steps
        self.there.append(sum(node.alive for node in self.cluster.nodes))

    def row(self) -> dict[str, Any]:
        times, steps = [*self.times, self.end], sum(steps for _, steps in self.decided.values())
        return {
            "seconds": round(self.end - self.begin, 1),
            "rounds": len({number for _, number in self.decided}),
            "honest tokens": steps * SEQUENCES * LENGTH,
            "contributions a round": rounded(sum(count for count, _ in self.decided.values()), len(self.decided)),
            "nodes at a round's end": rounded(sum(self.there), len(self.there)),
            "longest time without a round": round(max(late - early for early, late in pairwise(times)), 1),
            "branches": len({branch for branch, _ in self.decided}),
            "seconds to catch up": median_and_p95(self.caught_up),
            "did not catch up": len(self.started),
        }


def twin(segment: Segment, nodes: int, seed: int) -> Scenario:
    """Makes the scenario with a segment's faults: with sixteen nodes for as long, at the daemons' times."""
    faults: list[dict[str, Any]] = []
    for fault in faults_of(segment, seed, nodes):
        at = WARM_UP_SECONDS + fault.at
        match fault.kind:
            case "kill":
                until = at + DOWN_SECONDS + START_SECONDS
                faults.append({"kind": "crash", "at": at, "until": until, "nodes": [fault.node]})
            case "join":
                faults.append({"kind": "join", "at": at + START_SECONDS})
            case _:
                faults.append({"kind": "leave", "at": at, "nodes": [fault.node]})
    for node, how in liars_of(segment, nodes).items():
        faults.append({"kind": "liar", "at": 0.0, "nodes": [node], "how": how})
    return scenario_of(
        {
            "sentence": f"{nodes} nodes: {segment.name}.",
            "nodes": nodes,
            "rounds": 10**6,
            "seconds": WARM_UP_SECONDS + 60.0 * segment.minutes + 1.0,
            "training": {"seconds": LOCAL_STEPS * STEP_SECONDS, "spread": 0.02, "audit_share": 0.035},
            "links": {"latency_seconds": 0.001, "jitter_seconds": 0.002},
            "recipe": {"name": "local", "local_steps": LOCAL_STEPS, "sequences_per_pass": SEQUENCES},
            "admission": {"policy": "allowlist"},
            "admission_keys": f"0-{nodes - 1 + sum(fault['kind'] == 'join' for fault in faults)}",
            "fault": faults,
        }
    )


def of_simulated(segment: Segment, nodes: int, seed: int) -> dict[str, Any]:
    """Simulates a segment with every checker, which compares all nodes' roots, and returns its row."""
    watched: list[Watched] = []
    began = monotonic()

    def watch(cluster: Cluster) -> None:
        watched.append(Watched(cluster, WARM_UP_SECONDS, WARM_UP_SECONDS + 60.0 * segment.minutes))

    scenario = twin(segment, nodes, seed)
    outcome = simulate(scenario, seed, standard(), watch)
    assert not outcome.failures, outcome.failures  # the segment did not pass to its end
    kinds = Counter(fault.kind for fault in faults_of(segment, seed, nodes))
    return {
        **watched[0].row(),
        **{f"{kind}s": kinds[kind] for kind in ("kill", "join")},
        "leaves": kinds["leave"],
        "beyond f": outcome.cluster.watch.is_beyond,
        "took": round(monotonic() - began, 1),
    }
