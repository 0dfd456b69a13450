"""Incoming streams: no peer or handful of peers can keep others out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from p2ptrain.net.libp2p import streams
from p2ptrain.net.transport import Stream
from tests.helpers.net import key, until
from tests.helpers.streams import PROTOCOL, SECONDS, echo, listening


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "STREAMS_MAX", 8)
    monkeypatch.setattr(streams, "STREAMS_OF_PEER_MAX", 4)


async def test_whoever_has_most_gives_way_to_others_until_all_have_as_many(tmp_path: Path) -> None:
    async with listening(tmp_path) as incoming:
        greedy = {number: [await incoming.open(number) for _ in range(4)] for number in (1, 2)}
        assert [await incoming.is_answered(each) for each in greedy[1] + greedy[2]] == [True] * 8
        others = [await incoming.open(number) for number in (3, 4, 5, 6)]
        assert [await incoming.is_answered(each) for each in others] == [True] * 4
        answered = {number: [await incoming.is_answered(each) for each in greedy[number]] for number in (1, 2)}
        assert answered == {1: [True, True, False, False], 2: [True, True, False, False]}  # they lost the newest
        again = [await incoming.is_answered(await incoming.open(number)) for number in (1, 2, 3)]
        assert again == [False] * 3
        assert await incoming.is_answered(await incoming.open(7))
        assert (incoming.counters["streams given up"], incoming.counters["streams refused"]) == (5, 3)


async def test_a_peer_has_no_more_streams_than_it_may_and_may_have_others_when_some_end(tmp_path: Path) -> None:
    async with listening(tmp_path) as incoming:
        held = [await incoming.open(1) for _ in range(4)]
        assert [await incoming.is_answered(each) for each in held] == [True] * 4
        assert not await incoming.is_answered(await incoming.open(1))
        held[0].abort()
        async with asyncio.timeout(SECONDS):
            while not await incoming.is_answered(await incoming.open(1)):
                pass


async def test_a_stream_that_was_given_up_and_ends_late_takes_no_place_from_others(tmp_path: Path) -> None:
    async with listening(tmp_path) as incoming:
        end = asyncio.Event()

        async def linger(stream: Stream) -> None:
            try:
                await echo(stream)
            except streams.TransportError:
                await end.wait()

        incoming.streams.handlers[PROTOCOL] = linger
        first = [await incoming.open(1) for _ in range(4)]
        rest = [await incoming.open(number) for number in (2, 2, 2, 2, 3, 4, 5, 6)]
        assert [await incoming.is_answered(each) for each in rest[4:]] == [True] * 4
        incoming.streams.handlers[PROTOCOL] = echo
        end.set()
        for stream in first:
            stream.abort()
        async with asyncio.timeout(SECONDS):
            while not await incoming.is_answered(await incoming.open(1)):
                pass
        mine = incoming.streams._incoming_of[key(1)]
        assert len(mine) == 1
        assert sum(map(len, incoming.streams._incoming_of.values())) <= 8


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("is_all", [True, False])
def test_a_stream_that_is_given_up_while_its_last_frame_is_read_is_no_fault(
    is_all: bool, new_loop: Callable[[], asyncio.AbstractEventLoop], tmp_path: Path
) -> None:
    """It was with uvloop: a stranger who opened streams and did not hang up had honest ones pay."""

    answered = []

    async def answered_once(stream: Stream) -> None:
        await stream.send(await stream.receive(10))
        answered.append(stream)

    async def work() -> None:
        async with listening(tmp_path) as incoming:
            incoming.streams.handlers[PROTOCOL] = answered_once
            lingering = [await incoming.open(number) for number in (1, 1, 1, 1, 2, 2, 2, 2)]
            assert [await incoming.is_answered(each) for each in lingering] == [True] * 8
            await until(lambda: len(answered) == 8)  # from here on they are being closed
            if is_all:
                incoming.streams.abort()
            else:
                assert await incoming.is_answered(await incoming.open(3))
                assert incoming.counters["streams given up"] == 1
            await until(lambda: incoming.streams._incoming == (0 if is_all else 8))
            assert not incoming.boundary.counts

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(work())
