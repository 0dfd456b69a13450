"""The driver: effects in order, the disk before sending, and the core's deadline."""

from __future__ import annotations

import asyncio
import logging
from itertools import pairwise
from pathlib import Path
from threading import Semaphore
from typing import Any, get_args

import pytest

from p2ptrain.core import events as ev
from p2ptrain.net.connections import topic_of
from p2ptrain.net.mailbox import Deliver
from p2ptrain.node import driver as driver_module
from p2ptrain.node import edges as edges_module
from p2ptrain.node.edges import OUTBOX_MAX
from p2ptrain.node.persistence import DISK_SECONDS
from tests.helpers.core import KEYS
from tests.helpers.driver import ME, OTHER, PEER, THIRD, DriverBench, bench, doing
from tests.helpers.net import at, skipping_time, until


def send(number: int, peer: bytes = PEER) -> ev.Send:
    return ev.Send(peer, (bytes([number]),))


def said(number: int, peer: bytes = PEER) -> tuple[str, bytes, Deliver]:
    """Returns the record of a message posted to a peer."""
    return ("post", peer, Deliver((bytes([number]),)))


def persist(number: int) -> ev.Persist:
    return ev.Persist(ev.Observed(bytes([number])))


def answering(each: DriverBench, effects: dict[bytes, list[ev.Effect]]) -> None:
    """Makes the core answer `PeerSeen` with these effects."""
    each.node.answer = lambda event: effects.get(event.peer, []) if isinstance(event, ev.PeerSeen) else []


async def now_is(moment: float) -> None:
    await at(moment)


def iterations(counts: list[int]) -> None:
    """Counts the loop's iterations."""
    loop: Any = asyncio.get_running_loop()
    select = loop.clock.select

    def counted(timeout: float | None = None) -> Any:
        counts.append(1)
        return select(timeout)

    loop.clock.select = counted


# ---------------------------------------------------------------------------------------------------
# Histories


async def test_histories_are_encoded_beside_the_loop_one_at_a_time_and_one_for_each_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = Semaphore(0), Semaphore(0)

    def encode(history: bytes) -> bytes:
        begun.release()
        assert may_end.acquire(timeout=30.0)
        return history

    def asks(peer: bytes, history: bytes) -> None:
        doing(each, ev.SendHistory(peer, history))  # type: ignore[arg-type]

    monkeypatch.setattr(edges_module, "encode_answer", encode)
    async with bench(tmp_path) as each, each.running():
        asks(PEER, b"1")
        await until(lambda: begun.acquire(blocking=False))  # and the loop runs
        asks(PEER, b"2")
        asks(OTHER, b"3")
        await until(lambda: not each.driver.effects)
        await asyncio.sleep(0)
        assert not begun.acquire(blocking=False)
        may_end.release(2)
        await until(lambda: len(each.done) == 2)
        assert each.done == [("tell history", PEER, b"1"), ("tell history", OTHER, b"3")]
        may_end.release()
        asks(PEER, b"4")
        await until(lambda: len(each.done) == 3)


async def test_a_history_for_which_there_is_no_room_is_not_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[bytes] = []
    monkeypatch.setattr(edges_module, "encode_answer", lambda history: encoded.append(history) or history)
    async with bench(tmp_path) as each, each.running():
        each.driver.edges.mailboxes.full.add(PEER)  # type: ignore[attr-defined]
        doing(each, ev.SendHistory(PEER, b"1"), ev.SendHistory(OTHER, b"2"))  # type: ignore[arg-type]
        await until(lambda: bool(each.done))
        assert each.done == [("tell history", OTHER, b"2")]
        assert encoded == [b"2"]


# ---------------------------------------------------------------------------------------------------
# Effects and the disk


async def test_every_effect_of_the_core_is_carried_out(tmp_path: Path) -> None:
    async with bench(tmp_path) as each:
        assert {*each.driver.effects.actions, ev.Persist} == {*get_args(ev.Effect)}


@skipping_time
async def test_effects_are_carried_out_in_order_and_what_follows_a_persist_waits_for_the_disk(tmp_path: Path) -> None:
    async with bench(tmp_path) as each:
        each.persistence.disk_seconds = 10.0
        answering(each, {PEER: [send(1), persist(1), send(2), persist(2), ev.Publish(b"3"), send(4)]})
        async with each.running():
            each.driver.intake.give(ev.PeerSeen(PEER))
            await now_is(9.9)
            assert each.done == [said(1)]
            assert each.persistence.writes == []
            await until(lambda: len(each.done) == 4)
            assert asyncio.get_running_loop().time() == pytest.approx(10.0, abs=0.2)  # both went in one write
            assert sorted(each.done[1:], key=lambda one: one[0] == "publish") == [said(2), said(4), ("publish", b"3")]
            assert each.persistence.writes == [[ev.Observed(b"\1"), ev.Observed(b"\2")]]
    assert each.store.journal.scores == b"\2"


@skipping_time
async def test_all_that_waits_for_the_disk_goes_in_one_write(tmp_path: Path) -> None:
    async with bench(tmp_path) as each:
        each.persistence.disk_seconds = 1.0
        answering(each, {key: [persist(seat), send(seat, key)] for seat, key in enumerate(KEYS)})
        async with each.running():
            each.driver.intake.give(ev.PeerSeen(KEYS[0]))
            await now_is(0.5)
            for key in KEYS[1:8]:
                each.driver.intake.give(ev.PeerSeen(key))
            await until(lambda: len(each.done) == 8)
            assert asyncio.get_running_loop().time() == pytest.approx(2.0, abs=0.2)
        assert each.done == [said(seat, key) for seat, key in enumerate(KEYS[:8])]
        assert [len(records) for records in each.persistence.writes] == [1, 7]


@skipping_time
async def test_a_disk_that_fails_is_tried_again_and_meanwhile_nothing_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench(tmp_path) as each:
        answering(each, {PEER: [persist(1), send(1)], OTHER: [persist(2), send(2)], THIRD: [send(3)]})
        each.persistence.trouble = ["the disk is full"] * 3
        async with each.running():
            each.driver.intake.give(ev.PeerSeen(PEER))
            await now_is(2.0)
            assert each.driver.effects.disk_trouble == "the disk is full"
            each.driver.intake.give(ev.PeerSeen(OTHER))
            each.driver.intake.give(ev.PeerSeen(THIRD))
            await now_is(3 * DISK_SECONDS - 0.5)
            assert each.done == []
            assert each.driver.effects.disk_trouble == "the disk is full"
            assert ev.PeerSeen(THIRD) in each.node.events  # the core goes on
            await until(lambda: len(each.done) == 3)
            assert each.driver.effects.disk_trouble == ""
        assert each.done == [said(1), said(2), said(3)]
        assert each.persistence.writes == 4 * [[ev.Observed(b"\1")]] + [[ev.Observed(b"\2")]]
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert told == [
        "the disk is full; the node sends and applies nothing until this can be written",
        "the disk can be written again",
    ]


@skipping_time
async def test_who_wants_to_stop_does_not_wait_for_ever_for_a_disk_that_takes_nothing(tmp_path: Path) -> None:
    async with bench(tmp_path) as each:
        each.node.answer = lambda event: [ev.Persist(ev.Observed(b"\1"))]
        each.persistence.trouble = ["the disk is full"] * 1_000
        async with each.running() as life:
            each.driver.intake.give(ev.PeerSeen(PEER))
            await now_is(DISK_SECONDS)
            assert not life.done()
            each.node.seen.is_stopping = True
            await now_is(4 * DISK_SECONDS)
            assert life.result() == "the disk cannot be written: the disk is full"


@skipping_time
async def test_while_the_disk_fails_the_core_stops_when_too_much_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "EFFECTS_MAX", 8)
    async with bench(tmp_path) as each:
        answering(each, {key: [persist(seat), send(seat, key)] for seat, key in enumerate(KEYS)})
        each.persistence.trouble = ["the disk is full"] * 3
        async with each.running():
            for key in KEYS:
                each.driver.intake.give(ev.PeerSeen(key))
            await now_is(3 * DISK_SECONDS - 0.5)
            assert len(each.driver.effects) == 10
            assert len(each.node.events) == 5
            await until(lambda: len(each.done) == len(KEYS))
        assert each.done == [said(seat, key) for seat, key in enumerate(KEYS)]


@skipping_time
async def test_what_cannot_be_published_is_counted_and_the_rest_goes_out(tmp_path: Path) -> None:
    async with bench(tmp_path) as each:
        heard: list[bytes] = []
        peer = each.network.transport(PEER)
        await peer.subscribe(topic_of(each.edges.run_id), lambda author, data: heard.append(data))
        await each.transport.connect(peer.addresses()[0])
        answering(each, {PEER: [ev.Publish(bytes([number % 251])) for number in range(OUTBOX_MAX + 5)]})
        async with each.running():
            each.driver.intake.give(ev.PeerSeen(PEER))
            await until(lambda: len(heard) == OUTBOX_MAX)
        assert sorted(heard) == sorted(bytes([number % 251]) for number in range(5, OUTBOX_MAX + 5))  # the oldest went
        assert each.driver.intake.counters == {"messages not published": 5}


@skipping_time
async def test_a_network_that_is_down_loses_messages_and_no_more(tmp_path: Path) -> None:
    async with bench(tmp_path) as each:
        answering(each, {PEER: [ev.Publish(b"1"), ev.Publish(b"2"), persist(1), send(3)]})
        async with each.running():
            each.network.kill(ME)
            each.driver.intake.give(ev.PeerSeen(PEER))
            await until(lambda: each.driver.intake.counters["messages not published"] == 2)
            await until(lambda: said(3) in each.done)


@skipping_time
async def test_what_is_published_last_goes_out_before_the_end(tmp_path: Path) -> None:
    async with bench(tmp_path) as each:
        last: list[ev.Effect] = [ev.Publish(bytes([number])) for number in range(3)]
        answering(each, {PEER: [persist(1), *last, ev.Stop("left"), ev.Stop("again")]})
        publish = each.transport.publish

        async def slowly(topic: str, data: bytes) -> None:
            await at(asyncio.get_running_loop().time() + 0.1)
            await publish(topic, data)

        each.transport.publish = slowly  # type: ignore[method-assign]
        async with each.running() as task:
            each.driver.intake.give(ev.PeerSeen(PEER))
            assert await task == "left"
        assert each.done == [("publish", bytes([number])) for number in range(3)]
        assert each.workshop.worker.is_stopping


@skipping_time
async def test_a_core_that_fails_ends_the_driver(tmp_path: Path) -> None:
    def fail(event: ev.Event) -> list[ev.Effect]:
        assert not isinstance(event, ev.PeerLost), "the core has made a mistake"
        return []

    async with bench(tmp_path) as each:
        each.node.answer = fail
        task = asyncio.create_task(each.driver.run(each.started))
        each.driver.intake.give(ev.PeerLost(PEER))
        with pytest.raises(ExceptionGroup) as raised:
            await task
        assert raised.group_contains(AssertionError, match="the core has made a mistake")


# ---------------------------------------------------------------------------------------------------
# Events


@skipping_time
async def test_others_get_their_turn_while_events_come_without_end(tmp_path: Path) -> None:
    async with bench(tmp_path) as each:
        for number in range(1_000):
            each.driver.intake.give(ev.PeerSeen(number.to_bytes(32, "big")))
        counts = [0]
        task = asyncio.create_task(each.driver.run(each.started))
        while counts[-1] <= 1_000:
            await asyncio.sleep(0)
            counts.append(len(each.node.handled))
        assert max(later - earlier for earlier, later in pairwise(counts)) <= 64
        each.driver.intake.give(ev.StopRequested())
        await task


# ---------------------------------------------------------------------------------------------------
# The deadline


@skipping_time
async def test_the_deadline_wakes_the_core_without_any_event_and_without_a_busy_loop(tmp_path: Path) -> None:
    async with bench(tmp_path) as each:
        node, loop = each.node, asyncio.get_running_loop()

        def answer(event: ev.Event) -> list[ev.Effect]:
            node.deadline = loop.time() + 5.0
            return []

        node.answer = answer
        rounds: list[int] = []
        async with each.running():
            await until(lambda: bool(node.handled))
            iterations(rounds)
            await now_is(101.0)
            ticked = [now for now, event in node.handled if isinstance(event, ev.Tick)]
            assert ticked == [pytest.approx(5.0 * number, abs=0.1) for number in range(1, 21)]
            assert len(rounds) < 100
            node.answer = lambda event: []
            node.deadline = None
            each.driver.intake.give(ev.PeerSeen(PEER))
            await until(lambda: len(node.handled) == 22)
            await now_is(1_000.0)
            assert len(node.handled) == 22
            assert len(rounds) < 200


@skipping_time
async def test_a_timer_that_comes_early_is_set_again(tmp_path: Path) -> None:
    """uvloop rounds to milliseconds: every third of its timers fires early."""
    async with bench(tmp_path) as each:
        loop: Any = asyncio.get_running_loop()
        call_at = loop.call_at
        loop.call_at = lambda when, *rest, **more: call_at(max(loop.time(), when - 0.0004), *rest, **more)
        node = each.node

        def answer(event: ev.Event) -> list[ev.Effect]:
            node.deadline = 5.0 if isinstance(event, ev.Started) else None
            return []

        node.answer = answer
        async with each.running():
            await now_is(6.0)
            [(now, event)] = node.handled[1:]
            assert now == pytest.approx(5.0, abs=0.01)
            assert event == ev.Tick()


@skipping_time
async def test_an_event_before_the_deadline_is_handled_at_once(tmp_path: Path) -> None:
    async with bench(tmp_path) as each:
        each.node.deadline = 50.0
        async with each.running():
            await now_is(1.0)
            each.driver.intake.give(ev.PeerSeen(PEER))
            await each.heard(ev.PeerSeen(PEER))
            assert asyncio.get_running_loop().time() < 1.1
            each.node.deadline = None
            each.driver.intake.give(ev.PeerSeen(OTHER))
