"""Helpers for tests of the simulator: scripted cores, and signed messages of simulated nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from p2ptrain.core import events as ev
from p2ptrain.core.messages import NOTHING, Announcement, Ballot, Message, Vote, encode, signed_bytes
from p2ptrain.sim import faults
from p2ptrain.sim.cluster import Cluster
from p2ptrain.sim.keys import FakeSigner
from p2ptrain.sim.ledger import Checker, Ledger
from p2ptrain.sim.machine import SimNode
from p2ptrain.sim.scenario import Scenario, scenario_of
from tests.helpers.history_checker import check


def scenario(nodes: int = 3, **changes: Any) -> Scenario:
    """A swarm on perfect links, with a delay of exactly 10 ms."""
    plain = {
        "sentence": "Something happens.",
        "nodes": nodes,
        "rounds": 5,
        "seconds": 100.0,
        "links": {"latency_seconds": 0.01, "jitter_seconds": 0.0},
        "training": {"seconds": 1.0, "spread": 0.0, "apply_seconds": 0.5},
        "disk": {"fsync_seconds": 0.0},
    }
    return scenario_of({**plain, **changes})


class MessageLog(Checker):
    """Keeps every message that honest nodes send in their own names: when, by which node, and its envelope."""

    holds_beyond = True

    def __init__(self) -> None:
        self.messages: list[tuple[float, int, bytes]] = []

    def said(self, cluster: Cluster, index: int, envelope: bytes) -> None:
        self.messages.append((cluster.calendar.now, index, envelope))


class ScriptedCore:
    """A scripted core that records what it hears."""

    def __init__(self, cluster: Cluster, node: SimNode, deadline: float | None = None) -> None:
        self.cluster, self.node, self.deadline = cluster, node, deadline
        self.heard: list[tuple[float, ev.Event]] = []
        self.replies: dict[type, Callable[[Any], list[ev.Effect]]] = {}
        self.times: list[float] = []
        self.is_stalled = False

    def is_in(self, peer: bytes) -> bool:
        return True

    def view(self) -> ScriptedCore:
        return self

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        self.heard.append((round(self.cluster.calendar.now, 5), event))
        self.times.append(now)
        return self.replies.get(type(event), lambda _: [])(event)


def scripted(nodes: int = 3, **changes: Any) -> tuple[Cluster, list[ScriptedCore]]:
    """Makes a cluster of scripted cores, started at time zero."""
    cluster = Cluster(1, scenario(nodes, **changes))
    scripts = []
    for node in cluster.nodes:
        script = ScriptedCore(cluster, node)
        node.begin(script)  # type: ignore[arg-type]
        node.life = 1
        scripts.append(script)
    return cluster, scripts


def do(cluster: Cluster, index: int, *effects: ev.Effect) -> None:
    cluster.executor.carry_out(cluster.nodes[index], effects)


def said(cluster: Cluster, index: int, message: Message) -> bytes:
    return encode(message, cluster.nodes[index].signer.sign(signed_bytes(cluster.setup.run_id, message)))


def vote(cluster: Cluster, index: int, view: int = 0) -> bytes:
    return said(cluster, index, Vote(cluster.setup.run_id, 1, view, Ballot.PREVOTE, NOTHING, cluster.nodes[index].key))


def announcement(cluster: Cluster, index: int, number: int = 1, payload: bytes = bytes(32)) -> bytes:
    key = cluster.nodes[index].key
    return said(
        cluster,
        index,
        Announcement(cluster.setup.run_id, number, number - 1, bytes(32), payload, 40, payload[:16], 1, 2, 0, key),
    )


def begin_faults(cluster: Cluster) -> None:
    """Starts only the faults, because the scripts are running already."""
    for number, fault in enumerate(cluster.setup.scenario.fault):
        faults._ACTIONS[type(fault)](cluster, number, fault)


def of_kind(script: ScriptedCore, kind: type) -> list[tuple[float, Any]]:
    """Returns the events of a kind that a script heard, with their times."""
    return [(at, event) for at, event in script.heard if isinstance(event, kind)]


def judged_simulation(cluster: Cluster, ledger: Ledger, log: MessageLog) -> list[str]:
    """Checks all envelopes that honest nodes sent in a simulation."""
    rosters = {place: ledger.rosters[ledger.parents[head]] for place, (head, _) in ledger.decided.items()}
    honest = [node.key for node in cluster.nodes if node.honest]
    verify = FakeSigner(cluster.setup.run_id, b"")
    return check(cluster.setup.run_id, [envelope for _, _, envelope in log.messages], rosters, honest, verify)
