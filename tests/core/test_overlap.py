"""When a node trains on while a round is agreed on: by how long exchange takes, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest

from p2ptrain.core import events as ev
from p2ptrain.core.messages import Announcement, read
from p2ptrain.core.overlap import BEGIN_ROUNDS, END_ROUNDS, TIMED_MAX, Exchange, Exchanged, Overlap
from p2ptrain.sim import checkers
from p2ptrain.sim.machine import SimNode
from p2ptrain.sim.outcome import Outcome, simulate
from p2ptrain.sim.scenario import scenario_of
from tests.helpers.core import Bench, announced

TRAINING = 10.0  # seconds
LONG, SHORT, BETWEEN = 1.5, 0.2, 0.8  # of exchange, after it


def bench_of(overlap: int | str = "auto", can_overlap: bool = True) -> Bench:
    bench = Bench(4, me=1, agreement={"overlap_rounds": overlap}, start=False)
    bench.do(ev.Started(bench.saved(), can_overlap=can_overlap))
    for peer in bench.others:
        bench.do(ev.PeerSeen(peer))
    return bench


def play(bench: Bench, exchange: float, training: float = TRAINING) -> bool:
    """Plays a round in which the others take ten seconds to train, and this node so many; returns whether it trained
    on while the round was agreed on."""
    number = bench.state.round + 1
    others = tuple(announced(key, number, inline=True) for key in bench.others)
    bench.wait(min(training, TRAINING))
    if training <= TRAINING:
        bench.train(number)
        bench.wait(TRAINING - training)
    for offer in others:
        bench.hear_offer(offer)
    if training > TRAINING:
        bench.wait(training - TRAINING)
        bench.train(number)
    goes_on = bench.parts.work.training is not None
    bench.wait(exchange)
    mine = read(bench.parts.work.outstanding[number], Announcement)
    bench.agree((*others, mine))
    return goes_on


def overlaps(bench: Bench, rounds: int, exchange: float, training: float = TRAINING) -> list[bool]:
    return [play(bench, exchange, training) for _ in range(rounds)]


def test_a_node_on_a_slow_line_begins_to_overlap_after_a_few_rounds() -> None:
    bench = bench_of()
    assert overlaps(bench, 8, LONG) == [False] * (1 + BEGIN_ROUNDS) + [True] * (7 - BEGIN_ROUNDS)
    view = bench.node.view()
    assert view.is_overlapping
    assert view.exchange_share == pytest.approx(LONG / (TRAINING + 2 * LONG)), "without overlap a round were longer"
    assert view.counters["overlap begun"] == 1
    assert view.counters["contributions taken"] == 8


def test_it_waits_again_once_exchange_is_fast() -> None:
    bench = bench_of()
    overlaps(bench, 1 + BEGIN_ROUNDS, LONG)
    assert overlaps(bench, END_ROUNDS + 2, SHORT) == [True] * END_ROUNDS + [False] * 2
    assert not bench.node.view().is_overlapping
    assert bench.node.view().counters["overlap ended"] == 1
    assert bench.node.view().counters["contributions taken"] == 3 + BEGIN_ROUNDS + END_ROUNDS


def test_a_node_on_a_fast_line_never_overlaps() -> None:
    bench = bench_of()
    assert overlaps(bench, 20, SHORT) == [False] * 20
    assert bench.node.view().exchange_share == pytest.approx(SHORT / (TRAINING + SHORT))


def test_in_between_a_node_does_what_it_did() -> None:
    bench = bench_of()
    assert overlaps(bench, 12, BETWEEN) == [False] * 12
    assert not any(overlaps(bench, BEGIN_ROUNDS - 1, LONG)), "and a single slow round changes nothing"
    assert overlaps(bench, 12, BETWEEN)[2:] == [True] * 10


def test_waiting_for_slower_machines_is_no_exchange() -> None:
    bench = bench_of()
    assert overlaps(bench, 12, SHORT, training=3.0) == [False] * 12
    assert bench.node.view().exchange_share == pytest.approx(SHORT / (TRAINING + SHORT))


def test_training_of_its_own_is_no_exchange() -> None:
    bench = bench_of()
    assert overlaps(bench, 12, SHORT, training=TRAINING + 1.1) == [False] * 12
    assert bench.node.view().exchange_share == pytest.approx(SHORT / (TRAINING + 1.1 + SHORT))


def test_payloads_on_their_way_are_exchange() -> None:
    bench = bench_of()
    for number in range(1, 3 + BEGIN_ROUNDS):
        bench.wait(TRAINING)
        bench.train(number)
        others = tuple(announced(key, number) for key in bench.others)
        bench.hear_all(*others)
        bench.wait(LONG)
        for offer in others:
            bench.arrives(offer.payload)
        mine = read(bench.parts.work.outstanding[number], Announcement)
        bench.agree((*others, mine))
    assert bench.node.view().is_overlapping


@pytest.mark.parametrize(("setting", "can", "goes_on"), [(0, True, False), (1, True, True), ("auto", False, False)])
def test_a_fixed_choice_stays_and_who_cannot_overlap_waits(setting: int | str, can: bool, goes_on: bool) -> None:
    bench = bench_of(setting, can)
    assert overlaps(bench, 12, LONG if not goes_on else SHORT) == [goes_on] * 12


def test_rounds_that_were_not_followed_are_not_timed() -> None:
    exchange = Exchange()
    exchange.heard(1, 1.0)
    assert exchange.applied(1, 2.0) is None, "when it began is not known"
    exchange.heard(2, 3.0)
    assert exchange.applied(2, 4.0) == Exchanged(1.0, 2.0)
    assert exchange.applied(3, 5.0) is None, "it was caught up with"
    exchange.heard(4, 4.5)
    assert exchange.applied(4, 7.0) == Exchanged(2.0, 2.0), "exchange took all of the round"
    for number in range(6, 20):
        exchange.heard(number, 8.0)
    assert exchange.limits() == {"rounds timed": (TIMED_MAX, TIMED_MAX)}


def test_rounds_without_time_decide_nothing() -> None:
    overlap = Overlap("auto", can=True)
    assert not any(overlap.look(Exchanged(0.0, 0.0)) for _ in range(20))
    assert overlap.share == 0.0


# ---------------------------------------------------------------------------------------------------
# Swarms


def swarm(**table: Any) -> tuple[Outcome, list[bool]]:
    """Simulates a swarm; returns which nodes overlap in the end."""
    agreement = {"overlap_rounds": "auto", **table.pop("agreement", {})}
    table = {"sentence": "Overlap.", "nodes": 4, "rounds": 20, "agreement": agreement, **table}
    outcome = simulate(scenario_of(table), 1, checkers.standard())
    assert outcome.failures == []
    nodes: list[SimNode] = outcome.cluster.nodes
    return outcome, [node.core.view().is_overlapping for node in nodes if node.core is not None]


def test_nodes_on_slow_lines_all_overlap_and_rounds_are_as_long_as_their_training() -> None:
    waits, _ = swarm(links={"line": "satellite"}, training={"seconds": 3}, agreement={"overlap_rounds": 0})
    outcome, are_on = swarm(links={"line": "satellite"}, training={"seconds": 3})
    assert are_on == [True] * 4
    assert outcome.cluster.calendar.now < 0.8 * waits.cluster.calendar.now


def test_one_node_that_overlaps_agrees_with_others_that_do_not() -> None:
    slow = {"kind": "slow disk", "at": 0, "until": 1000, "nodes": [0], "fsync_seconds": 0.8}
    _, are_on = swarm(nodes=7, training={"seconds": 5, "spread": 0}, fault=[slow], faults_end=1)
    assert are_on == [True] + [False] * 6


def test_a_node_alone_has_no_exchange() -> None:
    _, are_on = swarm(nodes=1, training={"seconds": 1, "apply_seconds": 0.5})
    assert are_on == [False]


def test_nodes_that_are_killed_while_they_overlap_go_on_overlapping() -> None:
    kills = [{"kind": "crash", "at": 20 + 5 * node, "until": 27 + 5 * node, "nodes": [node]} for node in range(4)]
    outcome, are_on = swarm(rounds=40, links={"line": "satellite"}, training={"seconds": 3}, fault=kills)
    assert are_on == [True] * 4
    assert all(node.life > 1 for node in outcome.cluster.nodes)
