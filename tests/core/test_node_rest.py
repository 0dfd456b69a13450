"""A node that advances after every event behaves the same as one that rests while nothing relevant has changed."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from p2ptrain.core import events as ev
from p2ptrain.core.node import Node
from p2ptrain.core.participant import Participant
from p2ptrain.sim.cluster import Cluster
from p2ptrain.sim.keys import FakeSigner
from p2ptrain.sim.machine import SimNode
from p2ptrain.sim.outcome import simulate
from p2ptrain.sim.scenario import scenario_of
from tests.helpers.core import Restless

SWARMS: dict[str, dict[str, Any]] = {
    "clean": {"nodes": 7, "rounds": 12},
    "loss": {"nodes": 5, "rounds": 12, "links": {"loss": 0.1, "duplicate": 0.1, "reorder": 0.1}},
    "long rounds": {"nodes": 4, "rounds": 4, "training": {"seconds": 100}},
    "overlap": {"nodes": 4, "rounds": 12, "agreement": {"overlap_rounds": 1, "staleness_rounds_max": 2}},
    "overlap by itself": {
        "nodes": 4,
        "rounds": 16,
        "links": {"line": "satellite"},
        "agreement": {"overlap_rounds": "auto"},
        "fault": [{"kind": "crash", "at": 12, "nodes": [1], "until": 20}],
    },
    "large payloads": {"nodes": 4, "rounds": 6, "training": {"payload_bytes": 200_000}, "links": {"loss": 0.1}},
    "joins": {"nodes": 4, "rounds": 12, "fault": [{"kind": "join", "at": 5, "count": 2}]},
    "leaves": {"nodes": 5, "rounds": 12, "fault": [{"kind": "leave", "at": 5, "nodes": [1]}]},
    "fewer steps": {
        "nodes": 5,
        "rounds": 12,
        "training": {"slow": [{"nodes": [4], "times": 10}]},
        "recipe": {"name": "local", "local_steps": 10},
        "fault": [{"kind": "crash", "at": 5, "nodes": [1], "until": 20}],
    },
    "kills": {"nodes": 4, "rounds": 9, "fault": [{"kind": "crash", "at": 5, "nodes": [1, 2], "until": 30}]},
    "sleep": {"nodes": 4, "rounds": 9, "fault": [{"kind": "sleep", "at": 5, "nodes": [1], "until": 90}]},
    "halves": {
        "nodes": 5,
        "rounds": 14,
        "fault": [{"kind": "partition", "at": 5, "until": 120, "groups": ["0-1", "2-4"]}],
    },
    "thirds": {
        "nodes": 6,
        "rounds": 14,
        "fault": [{"kind": "partition", "at": 5, "until": 200, "groups": ["0-1", "2-3", "4-5"]}],
    },
}
LIES = ("equivocate votes", "equivocate proposals", "equivocate announcements", "flood", "replay", "withhold", "fork")


class Twins:
    """A simulation with a twin beside every honest node that never rests and gets the same events."""

    def __init__(self) -> None:
        self.nodes: dict[int, tuple[int, Node]] = {}
        self.cluster: Cluster | None = None

    def watch(self, cluster: Cluster) -> None:
        self.cluster = cluster
        cluster.watch.observers.append(self.note)

    def note(self, node: SimNode, event: ev.Event, effects: Any, local: float) -> None:
        if node.liar is not None:
            return
        core = node.core
        assert core is not None
        assert self.cluster is not None
        life, twin = self.nodes.get(node.index, (-1, None))
        if life != node.life or twin is None:
            rng, run_id = Random(self.cluster.setup.rng_name("node", node.index, node.life)), core.context.run_id
            twin = Restless(core.context.run, run_id, node.key, FakeSigner(run_id, node.key), rng)
            self.nodes[node.index] = node.life, twin
        expected = twin.handle(event, local)
        where = f"node {node.index} at {local:.6f} s, {type(event).__name__}: {event}"[:400]
        assert list(effects) == expected, where
        assert core.deadline == twin.deadline, where


@pytest.mark.parametrize("name", [*SWARMS, *LIES])
def test_a_node_that_rests_does_what_one_that_never_rests_does(name: str) -> None:
    swarm: dict[str, Any] = SWARMS.get(name) or {
        "nodes": 7,
        "rounds": 8,
        "fault": [{"kind": "liar", "at": 0, "nodes": "f", "how": name}],
    }
    for seed in (1, 2):
        twins = Twins()
        outcome = simulate(scenario_of({"sentence": f"{name}.", **swarm}), seed, prepare=twins.watch)
        assert outcome.failures == []


def test_a_node_rests_most_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    went_on, go_on = Counter[str](), Participant.go_on

    def count(self: Participant) -> float:
        went_on["calls"] += 1
        return go_on(self)

    monkeypatch.setattr(Participant, "go_on", count)
    outcome = simulate(scenario_of({"sentence": "Clean.", "nodes": 20, "rounds": 5}), 1)
    assert outcome.failures == []
    assert went_on["calls"] < outcome.cluster.metrics.heard_messages / 4
