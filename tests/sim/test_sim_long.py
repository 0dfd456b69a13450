"""A long simulation forgets what no node can return to, and what it promises holds for all rounds nonetheless."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from p2ptrain.core import events as ev
from p2ptrain.core.history import Entry
from p2ptrain.sim import checkers as ck
from p2ptrain.sim import faults
from p2ptrain.sim.cluster import Cluster
from p2ptrain.sim.ledger import Ledger, Violation
from p2ptrain.sim.machine import ModelState
from p2ptrain.sim.outcome import history, simulate
from tests.helpers.sim import scenario

KEPT = 8  # rounds of history
SHORT = {"history_rounds": KEPT}


def begun(rounds: int, **changes: Any) -> tuple[Cluster, Ledger, ck.EqualRoots]:
    """Begins a simulation of four nodes."""
    checkers = ck.standard()
    table = scenario(4, **{"rounds": rounds, "seconds": 10_000.0, "agreement": SHORT, **changes})
    cluster = Cluster(1, table, checkers)
    faults.begin(cluster)
    ledger, roots = checkers[0], next(each for each in checkers if isinstance(each, ck.EqualRoots))
    assert isinstance(ledger, Ledger)
    return cluster, ledger, roots


def ran(rounds: int) -> tuple[Cluster, Ledger, ck.EqualRoots]:
    """Runs four nodes until they have decided so many rounds."""
    found = begun(rounds)
    found[0].run()
    return found


def sizes(cluster: Cluster, ledger: Ledger, roots: ck.EqualRoots) -> list[int]:
    records: tuple[Any, ...] = (
        cluster.payloads.by_name,
        cluster.executor.devices.states,
        ledger.rosters,
        ledger.parents,
    )
    records += ledger.rounds, ledger.guarantees, ledger.decided, roots.roots, roots.known
    offers = [each.offers for each in cluster.watch.checkers if isinstance(each, ck.NothingCensored)]
    places = [each.places for each in cluster.watch.checkers if isinstance(each, ck.OneVoice)]
    return [*map(len, (*records, *offers, *places))]


def test_records_do_not_grow_with_the_rounds() -> None:
    few, many = ran(160), ran(288)  # each with 32 rounds since the last time that it forgot
    assert sizes(*many) == pytest.approx(sizes(*few), rel=0.1)
    assert min(ran(40)[1].rounds.values()) == 0, "nothing is forgotten before a history is full"
    assert [manifest.round for manifest in history(many[0])] == [*range(1, many[0].rounds + 1)]
    assert sum(manifest.taken for manifest in history(many[0])) > 4 * 280


def test_nothing_is_forgotten_that_a_node_which_is_down_may_return_to() -> None:
    cluster, ledger, roots = begun(250, fault=[{"kind": "crash", "at": 30.0, "until": 240.0, "nodes": [3]}])
    cluster.calendar.run(239.0, cluster.nodes, cluster.hear)
    last = cluster.nodes[3].disk.state.round
    assert last < 50
    assert cluster.rounds > 140
    assert set(range(last - KEPT, cluster.rounds)) <= {number for _, number in ledger.decided}
    assert set(range(last - KEPT, cluster.rounds)) <= {number for _, number in roots.roots}
    cluster.run()
    assert cluster.calendar.is_over
    assert min(number for _, number in ledger.decided) > 150


def test_a_node_that_returns_to_what_was_forgotten_is_seen() -> None:
    cluster, ledger, roots = ran(160)
    branch, old = cluster.setup.run_id, min(ledger.rounds.values()) - 1
    assert old > 32
    with pytest.raises(Violation, match=f"node 2 applies round {old}, which everyone has long left behind"):
        roots.after(cluster, 2, ev.Applied(branch, old, bytes(32)), [])
    record = cluster.nodes[2].disk.history[-1]
    assert isinstance(record.step, Entry)
    again = replace(record.step.manifest, round=old, parent=b"forgotten".ljust(32))
    with pytest.raises(Violation, match=f"decided round {old}, which follows something that no honest node"):
        ledger.after(cluster, 2, ev.Tick(), [ev.Persist(replace(record, step=replace(record.step, manifest=again)))])


def test_what_a_node_held_is_dropped_once_it_is_gone() -> None:
    gone = [{"kind": "leave", "at": 20.0, "nodes": [3]}, {"kind": "crash", "at": 30.0, "nodes": [2]}]
    cluster = simulate(scenario(6, rounds=40, fault=gone), 1).cluster
    for node in cluster.nodes[2:4]:
        assert node.is_gone
        assert not (node.disk.history or node.disk.said or node.held_payloads.new or node.held_payloads.old)
        assert 10 < node.disk.state.round < cluster.rounds
    assert len(history(cluster)) == cluster.rounds


def test_rounds_applied_one_after_the_other_are_one_stretch() -> None:
    cluster, *_ = ran(5)
    first = next(each.step for each in cluster.nodes[0].disk.history if isinstance(each.step, Entry)).manifest
    state = ModelState(0, b"", b"")
    following = replace(first, round=first.round + 1, parent=first.digest)
    for manifest in (first, following, replace(following, round=first.round + 7)):
        state.note_applied(manifest)
    assert [(each.first, each.last) for each in state.applied] == [
        (first.round, first.round + 1), (first.round + 7, first.round + 7)
    ]  # fmt: skip
    assert [(each.first, each.last) for each in cluster.nodes[0].state.applied] == [(1, cluster.nodes[0].state.round)]
