"""Surprises in exchanges with peers, in virtual time: what the boundary of a daemon makes of them harms no swarm.

A daemon whose exchange ends by a fault (net/boundary.py) tells its core what it tells it of a peer that hung up: a
message is lost, a payload, a state or a history could not be had. Here that happens to drawn nodes at drawn moments.
"""

from __future__ import annotations

from random import Random

import pytest

from p2ptrain.core import events as ev
from p2ptrain.sim.checkers import standard
from p2ptrain.sim.cluster import Cluster
from p2ptrain.sim.machine import SimNode
from p2ptrain.sim.outcome import simulate
from tests.helpers.sim import scenario

NODES, ROUNDS = 7, 30
CRASHES = [{"kind": "crash", "nodes": [5, 6], "at": 10.0, "until": 40.0}]  # so that histories and states are fetched


def surprised(event: ev.Event) -> ev.Event | None:
    """Returns what the core hears instead; None: nothing."""
    match event:
        case ev.PayloadArrived(payload=payload, author=author):
            return ev.FetchFailed(payload, author, "a bug of p2ptrain")
        case ev.HistoryArrived(peer=peer):
            return ev.HistoryFailed(peer, "a bug of p2ptrain")
        case ev.CaughtUp(attempt=attempt):
            return ev.CatchUpFailed("a bug of p2ptrain", attempt)
        case _:
            return None


OF_PEERS = ev.MessageReceived, ev.PayloadArrived, ev.HistoryArrived, ev.CaughtUp, ev.Asked, ev.HistoryAsked


class Surprises:
    """Stands between the network and the cores."""

    def __init__(self, cluster: Cluster, shares: dict[int, float], seed: int) -> None:
        self.give, self.shares, self.rng = cluster.give, shares, Random(seed)
        self.kinds: set[type] = set()
        cluster.give = self.hear  # type: ignore[method-assign]

    def hear(self, node: SimNode, event: ev.Event) -> None:
        if isinstance(event, OF_PEERS) and self.rng.random() < self.shares.get(node.index, 0.0):
            self.kinds.add(type(event))
            found = surprised(event)
            if found is None:
                return
            event = found
        self.give(node, event)


@pytest.mark.parametrize("shares", [{3: 0.5}, dict.fromkeys(range(NODES), 0.1), {5: 0.9, 6: 0.3}], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_rounds_go_on_and_agree(shares: dict[int, float], seed: int) -> None:
    found: list[Surprises] = []
    plan = scenario(NODES, rounds=ROUNDS, seconds=900.0, fault=CRASHES, links={})
    outcome = simulate(plan, seed, standard(), lambda cluster: found.append(Surprises(cluster, shares, seed)))
    assert outcome.failures == []
    assert outcome.cluster.rounds >= ROUNDS
    assert ev.MessageReceived in found[0].kinds
