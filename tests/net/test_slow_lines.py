"""Slow lines: what moves is not given up, the first copies arrive early, and who hardly reads holds up nobody."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from contextlib import suppress

import pytest

from p2ptrain.net.blobs.server import SEND_SECONDS, SEND_SECONDS_MAX, FetchError
from p2ptrain.net.blobs.turns import PROBE_SECONDS, STILL_SECONDS, URGENT_AT_ONCE, Turns
from p2ptrain.net.libp2p import streams
from p2ptrain.net.libp2p.streams import FrameStream
from p2ptrain.net.rate_limit import TokenBucket
from p2ptrain.net.transport import TransportError, while_it_moves
from tests.helpers.blobs import BlobNode, now, swarm, tree
from tests.helpers.memory_network import MemoryStream, Pipe, SlowLine
from tests.helpers.net import at, key, skipping_time, until

MBIT = 125_000
SIZE = 1_000_000


@pytest.mark.parametrize(
    ("rate", "members", "first", "last"), [(5, 20, 7, 25), (2, 8, 20, 34), (1, 4, 34, 34), (1, 20, 45, 150)]
)
def test_a_payload_reaches_all_over_a_slow_uplink(rate: int, members: int, first: float, last: float) -> None:
    name, blob = tree(SIZE)
    came: list[float] = []

    async def fetch(node: BlobNode, author: BlobNode, others: list[BlobNode]) -> None:
        while name not in node.blobs:
            with suppress(FetchError):
                await node.fetch(name, blob.size, author.key, *(each.key for each in others if each is not node))
                came.append(now())
                return
            await at(now() + 1)

    @skipping_time
    async def test() -> None:
        async with swarm(1 + members) as (network, (author, *others)):
            network.lines[author.key] = line = SlowLine(rate * MBIT)
            author.blobs[name] = blob
            await asyncio.wait_for(asyncio.gather(*(fetch(each, author, others[:8]) for each in others)), 2 * last)
            assert min(came) < first
            assert max(came) < last
            assert line.carried <= members * SIZE * 1.01  # nothing was carried in vain

    test()


@skipping_time
async def test_all_payloads_of_a_round_come_over_a_slow_downlink() -> None:
    async with swarm(33) as (network, (node, *authors)):
        network.lines[node.key] = line = SlowLine(5 * MBIT)
        blobs = [tree(SIZE, seed=number) for number in range(len(authors))]
        for author, (name, blob) in zip(authors, blobs, strict=True):
            author.blobs[name] = blob
        wanted = zip(authors, blobs, strict=True)
        await asyncio.gather(*(node.fetch(name, SIZE, author.key) for author, (name, _) in wanted))
        assert line.carried <= len(authors) * SIZE * 1.01
        assert (node.failed, node.blamed) == ([], [])


@pytest.mark.parametrize(("rate", "sources", "seconds"), [(1, 8, 160), (1, 48, 300)])
def test_a_newcomer_on_a_slow_line_gets_a_state_from_many(rate: int, sources: int, seconds: float) -> None:
    @skipping_time
    async def test() -> None:
        async with swarm(1 + sources) as (network, (newcomer, *others)):
            network.lines[newcomer.key] = SlowLine(rate * MBIT)
            name, blob = tree(8 * SIZE, "state")
            for each in others:
                each.blobs[name] = blob
            async with asyncio.timeout(seconds):
                await newcomer.fetch(name, blob.size, *(each.key for each in others))
            assert (newcomer.failed, newcomer.blamed) == ([], [])

    test()


@skipping_time
async def test_a_stranger_may_ask_for_the_next_piece_when_the_last_has_come() -> None:
    """On a slow line a piece takes longer than a stranger may be silent otherwise."""
    async with swarm(5) as (network, (newcomer, *others)):
        network.lines[newcomer.key] = SlowLine(MBIT)
        name, blob = tree(32 * 2**20, "state")
        for each in others:
            each.blobs[name] = blob
            each.strangers.add(newcomer.key)
        async with asyncio.timeout(360):
            await newcomer.fetch(name, blob.size, *(each.key for each in others))
        assert newcomer.failed == []


# ---------------------------------------------------------------------------------------------------
# Whether bytes move


def stream_of(rate: float) -> tuple[MemoryStream, MemoryStream]:
    there, back = Pipe(lambda: 0.0), Pipe(lambda: 0.0)
    line = SlowLine(rate)
    one = MemoryStream(key(1), back, there, lambda size: None, [line])
    return one, MemoryStream(key(2), there, back, lambda size: None, [line])


@pytest.mark.parametrize(("rate", "seconds"), [(SIZE / 50, 50), (SIZE / 70, SEND_SECONDS_MAX)])
def test_a_frame_may_take_long_while_it_moves_but_not_for_ever(rate: float, seconds: float) -> None:
    @skipping_time
    async def test() -> None:
        one, other = stream_of(rate)
        sending = asyncio.create_task(one.send(bytes(SIZE)))
        with suppress(TimeoutError):
            async with while_it_moves(other, SEND_SECONDS, SEND_SECONDS_MAX):
                await other.receive(SIZE)
        assert now() == pytest.approx(seconds, abs=1)
        sending.cancel()
        await asyncio.wait([sending])

    test()


@skipping_time
async def test_a_frame_that_does_not_move_is_given_up_soon() -> None:
    one, _ = stream_of(SIZE)
    sending = asyncio.create_task(one.send(bytes(SIZE // 2)))
    await sending
    with pytest.raises(TimeoutError):
        async with while_it_moves(one, SEND_SECONDS, SEND_SECONDS_MAX):
            await one.receive(SIZE)
    assert now() == pytest.approx(0.5 + SEND_SECONDS, abs=0.1)


async def test_a_frame_that_was_read_in_part_is_read_on_or_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PART_BYTES", 2)
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    _, far = await asyncio.open_connection(sock=theirs)
    stream = FrameStream(key(1), "protocol", reader, writer, Counter(), lambda _: None)
    try:
        for is_skipped in (False, True):
            before = stream.moved
            far.write((6).to_bytes(4, "big") + b"abc")
            reading = asyncio.create_task(stream.receive(6))
            await until(lambda: stream.moved == before + 6)  # noqa: B023
            reading.cancel()
            await asyncio.wait([reading])
            far.write(b"def" + (1).to_bytes(4, "big") + b"!")
            if is_skipped:
                await stream.skip()
            else:
                assert await stream.receive(6) == b"abcdef"
            assert await stream.receive(1) == b"!"
            assert stream.moved == before + 15
        before = stream.moved
        await stream.send(b"four")
        assert stream.moved == before + 8
        far.write((6).to_bytes(4, "big") + b"abc")
        far.write_eof()
        with pytest.raises(TransportError, match="in the middle of a frame"):
            await stream.receive(6)
    finally:
        stream.abort()
        far.close()


# ---------------------------------------------------------------------------------------------------
# Turns


class SlowReader:
    """A stream whose peer reads a little now and then, or nothing."""

    def __init__(self, *, reads: bool) -> None:
        self._reads = reads

    @property
    def moved(self) -> int:
        return int(now() * 10) if self._reads else 0


@pytest.mark.parametrize(("reads", "seconds"), [(False, STILL_SECONDS), (True, PROBE_SECONDS)])
def test_those_that_hardly_read_hold_up_others_for_seconds_only(reads: bool, seconds: float) -> None:
    begun: list[float] = []

    @skipping_time
    async def test() -> None:
        turns = Turns(TokenBucket(0))

        async def take(number: int) -> None:
            async with turns.turn(key(number), SIZE, stream=SlowReader(reads=reads)):  # type: ignore[arg-type]
                begun.append(now())
                await at(100.0)

        tasks = [asyncio.create_task(take(number)) for number in range(URGENT_AT_ONCE + 1)]
        await asyncio.wait(tasks)
        assert begun[:-1] == [0.0] * URGENT_AT_ONCE
        assert seconds <= begun[-1] <= seconds + 1

    test()


@skipping_time
async def test_who_reads_slowly_holds_up_nobody_once_somebody_was_quick() -> None:
    """Or as many members as may lie would make everybody wait for every contribution of a round."""
    turns, begun, slow = Turns(TokenBucket(0)), list[float](), list[asyncio.Task[None]]()

    async def take(number: int, seconds: float, stream: SlowReader | None = None) -> None:
        async with turns.turn(key(number), SIZE, stream=stream):  # type: ignore[arg-type]
            begun.append(now())
            await at(now() + seconds)

    await take(0, 0.1)
    start = now()
    for number in range(1, 17):
        slow.append(asyncio.create_task(take(number, 50.0, SlowReader(reads=True))))
    await asyncio.gather(*(take(number, 0.1) for number in range(20, 40)))
    assert max(begun) < start + 4 * (STILL_SECONDS + 1)
    for task in slow:
        task.cancel()


@skipping_time
async def test_a_quick_line_sends_to_many_at_once() -> None:
    async with swarm(33) as (network, (author, *others)):
        network.lines[author.key] = SlowLine(800 * MBIT)
        name, blob = tree(SIZE)
        author.blobs[name] = blob
        await asyncio.gather(*(each.fetch(name, blob.size, author.key) for each in others))
        assert now() < 1.5
