"""Serving blobs: who gets how much, who is put off, and what a server does not stand."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from bulk_known import BLOB, NAME, PIECE, RUN, now, swarm, tree
from net_known import at, skipping_time, until

from p2ptrain.core.wire import encode
from p2ptrain.net import bulk
from p2ptrain.net.bulk import FetchError, Given, Have, Later, Piece, Reply, Request, Want
from p2ptrain.net.transport import FRAME_BYTES_MAX, Stream, TransportError


async def said(stream: Stream, request: Request) -> Reply:
    await stream.send(encode(request))
    return bulk.decode_reply(await stream.receive(FRAME_BYTES_MAX))


@skipping_time
async def test_who_wants_what_two_others_have_taken_is_put_off_until_it_insists() -> None:
    async with swarm(5) as (_, (server, *others)):
        server.blobs[NAME] = BLOB
        streams = [await other.transport.open(server.key, bulk.bulk_protocol(RUN)) for other in others]
        for stream in streams:
            assert isinstance(await said(stream, Want("payload", NAME.name, False)), Have)
        for stream in (streams[0], streams[0], streams[1]):  # who takes it twice counts once
            assert await said(stream, Piece(3, False)) == Given(3, BLOB.read(3))
        assert await said(streams[2], Piece(3, False)) == Later(3)
        assert await said(streams[2], Piece(2, False)) == Given(2, BLOB.read(2))
        assert await said(streams[2], Piece(3, True)) == Given(3, BLOB.read(3))
        have = await said(streams[3], Want("payload", NAME.name, True))
        takers = (others[2].key, others[1].key, others[0].key)
        assert have == Have(BLOB.size, BLOB.leaves, b"\x3f", bytes([0, 0, 1, 3, 0, 0]), takers)
        await at(now() + bulk.COUNTED_SECONDS + 1)  # whoever had it may be gone
        assert await said(streams[3], Piece(3, False)) == Given(3, BLOB.read(3))


@skipping_time
async def test_a_flood_of_requests_does_not_keep_others_from_being_served() -> None:
    async with swarm(3, upload=8 * PIECE) as (network, (server, me, other)):
        server.blobs[NAME] = BLOB
        streams = [await other.transport.open(server.key, bulk.bulk_protocol(RUN)) for _ in range(10)]

        async def flood(number: int) -> None:
            try:
                await streams[number].send(encode(Want("payload", NAME.name, True)))
                while True:
                    await streams[number].send(encode(Piece(0, True)))
            except TransportError:
                pass

        async def read(number: int) -> None:
            try:
                while True:
                    await streams[number].receive(FRAME_BYTES_MAX)
            except TransportError:
                pass

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work(number)) for number in range(10) for work in (flood, read)]
            await until(lambda: network.sent[server.key, other.key] > 10 * PIECE)
            start = now()
            assert await me.fetch(NAME, BLOB.size, server.key) == BLOB.data()
            assert now() - start < 6  # a fifth of what goes out, and one of four that it asked for before
            assert server.server.counters()["refused"] == 6
            for task in tasks:
                task.cancel()


@skipping_time
async def test_who_does_not_read_holds_up_nobody_but_itself() -> None:
    async with swarm(3) as (_, (server, me, other)):
        server.blobs[NAME] = BLOB
        stream = await other.transport.open(server.key, bulk.bulk_protocol(RUN))
        await stream.send(encode(Want("payload", NAME.name, True)))
        for index in range(60):
            await stream.send(encode(Piece(index % 6, True)))
        assert await me.fetch(NAME, BLOB.size, server.key) == BLOB.data()
        start = now()
        await until(lambda: not server.server._streams)
        assert now() - start == pytest.approx(bulk.SEND_SECONDS, abs=1)


@skipping_time
async def test_a_stream_that_asks_for_nothing_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "STREAMS_MAX", 2)
    async with swarm(3) as (_, (server, me, other)):
        server.blobs[NAME] = BLOB
        streams = [await other.transport.open(server.key, bulk.bulk_protocol(RUN)) for _ in range(2)]
        await until(lambda: len(server.server._streams) == 2)
        with pytest.raises(FetchError, match="busy"):
            await me.fetch(NAME, BLOB.size, server.key)
        await at(now() + bulk.EVICTED_SECONDS)
        assert await me.fetch(NAME, BLOB.size, server.key) == BLOB.data()
        with pytest.raises(TransportError):
            await streams[0].receive(1)


WRONG_REQUESTS = {
    "garbage": b"\xc1",
    "a piece of nothing": encode(Piece(0, False)),
    "an unknown kind": msgspec.msgpack.encode(["want", "gossip", bytes(32), True]),
    "a short name": msgspec.msgpack.encode(["want", "state", bytes(31), True]),
    "too long": bytes(129),
    "something after it": encode(Want("state", bytes(32), True)) + b"\0",
}


@pytest.mark.parametrize("request_bytes", WRONG_REQUESTS.values(), ids=WRONG_REQUESTS.keys())
def test_who_asks_wrongly_is_blamed(request_bytes: bytes) -> None:
    @skipping_time
    async def test() -> None:
        async with swarm(2) as (_, (server, other)):
            stream = await other.transport.open(server.key, bulk.bulk_protocol(RUN))
            await stream.send(request_bytes)
            with pytest.raises(TransportError):
                await stream.receive(1_000)
            assert [peer for peer, _ in server.blamed] == [other.key]

    test()


@skipping_time
async def test_a_piece_beyond_the_end_is_a_wrong_request() -> None:
    async with swarm(2) as (_, (server, other)):
        server.blobs[NAME] = BLOB
        stream = await other.transport.open(server.key, bulk.bulk_protocol(RUN))
        await stream.send(encode(Want("payload", NAME.name, False)))
        assert isinstance(bulk.decode_reply(await stream.receive(FRAME_BYTES_MAX)), Have)
        await stream.send(encode(Piece(6, True)))
        with pytest.raises(TransportError):
            await stream.receive(1_000)
        assert server.blamed == [(other.key, "piece 6 of what it was not told of")]


@skipping_time
async def test_the_limits_on_bytes_hold() -> None:
    for limits in ({"upload": 2 * PIECE}, {"download": 2 * PIECE}):
        start = now()
        async with swarm(3, **limits) as (_, (me, *others)):
            async with asyncio.TaskGroup() as group:
                for seed in range(4):
                    name, blob = tree(5 * PIECE, seed=seed)
                    others[0].blobs[name] = blob
                    group.create_task(me.fetch(name, blob.size, others[0].key))
            assert now() - start == pytest.approx((20 - 2) / 2, abs=0.6)
            assert me.failed == []


@skipping_time
async def test_more_fetches_than_a_source_serves_at_once_wait_for_one_another() -> None:
    async with swarm(2, upload=8 * PIECE) as (_, (me, other)):
        async with asyncio.TaskGroup() as group:
            for seed in range(12):
                name, blob = tree(2 * PIECE if seed % 2 else 100_000, seed=seed)
                other.blobs[name] = blob
                group.create_task(me.fetch(name, blob.size, other.key))
        assert me.failed == []
        assert "refused" not in other.server.counters()


def test_the_largest_answer_fits_a_frame() -> None:
    pieces = 60_000
    have = Have(pieces * PIECE, bytes(32 * pieces), bytes(pieces // 8), bytes(pieces), (bytes(32),) * 16)
    assert len(encode(have)) <= FRAME_BYTES_MAX
    assert bulk.decode_reply(encode(have)) == have
    assert len(encode(Given(59_999, bytes(PIECE)))) <= FRAME_BYTES_MAX
    assert len(encode(Want("tokenizer", bytes(32), True))) <= bulk.REQUEST_BYTES_MAX
