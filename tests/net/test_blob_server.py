"""Serving blobs: fair shares, clients that are put off, and requests that a server rejects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec
import pytest

from p2ptrain.core.wire import encode
from p2ptrain.net.blobs import server as protocol
from p2ptrain.net.blobs.server import BlobRequest, FetchError, Given, Have, Later, Nothing, Piece
from p2ptrain.net.blobs.turns import PEERS_AT_ONCE
from p2ptrain.net.transport import FRAME_BYTES_MAX, Stream, TransportError
from tests.helpers import memory_network
from tests.helpers.blobs import BLOB, NAME, PIECE, RUN, crowd, download, now, read_nothing, said, swarm, tree
from tests.helpers.net import at, skipping_time, until


@skipping_time
async def test_who_wants_what_two_others_have_taken_is_put_off_until_it_insists() -> None:
    async with swarm(5) as (_, (server, *others)):
        server.blobs[NAME] = BLOB
        streams = [await other.transport.open(server.key, protocol.blob_protocol(RUN)) for other in others]
        for stream in streams:
            assert isinstance(await said(stream, BlobRequest("payload", NAME.name, False)), Have)
        for stream in (streams[0], streams[0], streams[1]):  # a peer that takes it twice counts once
            assert await said(stream, Piece(3, False)) == Given(3, BLOB.read(3))
        assert await said(streams[2], Piece(3, False)) == Later(3)
        assert await said(streams[2], Piece(2, False)) == Given(2, BLOB.read(2))
        assert await said(streams[2], Piece(3, True)) == Given(3, BLOB.read(3))
        have = await said(streams[3], BlobRequest("payload", NAME.name, True))
        takers = (others[2].key, others[1].key, others[0].key)
        assert have == Have(BLOB.size, BLOB.leaves, b"\x3f", bytes([0, 0, 1, 3, 0, 0]), takers)
        await at(now() + protocol.COUNTED_SECONDS + 1)  # the peers that have it may be gone
        assert await said(streams[3], Piece(3, False)) == Given(3, BLOB.read(3))


@skipping_time
async def test_who_asks_too_far_ahead_is_blamed() -> None:
    async with swarm(2) as (_, (server, other)):
        server.blobs[NAME] = BLOB
        stream = await other.transport.open(server.key, protocol.blob_protocol(RUN))
        await stream.send(encode(BlobRequest("payload", NAME.name, True)))
        with pytest.raises(TransportError):
            while True:
                await stream.send(encode(Piece(0, True)))
        await until(lambda: not server.server.streams)
        assert server.blamed == [(other.key, "more than 16 unanswered requests")]


@skipping_time
async def test_who_does_not_read_holds_up_nobody_but_itself() -> None:
    async with swarm(3) as (_, (server, me, other)):
        server.blobs[NAME] = BLOB
        stream = await other.transport.open(server.key, protocol.blob_protocol(RUN))
        await stream.send(encode(BlobRequest("payload", NAME.name, True)))
        for index in range(10):
            await stream.send(encode(Piece(index % 6, True)))
        assert await me.fetch(NAME, BLOB.size, server.key) == BLOB.data()
        start = now()
        await until(lambda: not server.server.streams)
        assert now() - start == pytest.approx(protocol.SEND_SECONDS, abs=1)


# ---------------------------------------------------------------------------------------------------
# Fairness


async def only_talk(stream: Stream) -> None:
    while True:
        await at(now() + 4)
        await said(stream, BlobRequest("payload", NAME.name, False))


async def ask_and_go(stream: Stream) -> None:
    await stream.send(encode(Piece(0, True)))
    await at(now() + 0.2)


async def read_no_words(stream: Stream) -> None:
    for _ in range(10):
        await stream.send(encode(BlobRequest("payload", NAME.name, False)))
    await at(now() + 1_000)


async def ask_and_ask(stream: Stream) -> None:
    while True:
        await said(stream, BlobRequest("payload", NAME.name, True))


@pytest.mark.parametrize(
    ("use", "keys", "upload", "seconds"),
    [
        (only_talk, 1, PIECE // 5, 30 + 1),
        (only_talk, 8, 0, 1),
        (only_talk, 60, 0, 1),
        (ask_and_go, 8, PIECE // 2, 12 + 2),
        (read_nothing, 60, 0, 2),  # it is put off once because all asked for the same piece
        (download, 8, 8 * PIECE, 9 * 6 / 8 + 2),  # every ninth piece goes to us
        (download, 60, 8 * PIECE, 61 * 6 / 8 + 8),
    ],
)
def test_whatever_a_crowd_does_a_peer_gets_its_share(
    use: Callable[[Stream], Awaitable[None]], keys: int, upload: int, seconds: float
) -> None:
    @skipping_time
    async def test() -> None:
        async with swarm(2, upload=upload) as (network, (server, me)), crowd(network, server, keys, use):
            start = now()
            assert await me.fetch(NAME, BLOB.size, server.key) == BLOB.data()
            assert now() - start < seconds
            assert "refused" not in server.server.counters

    test()


@skipping_time
async def test_with_more_in_line_than_can_be_served_a_peer_gets_its_share_in_several_attempts() -> None:
    async with swarm(2, upload=PIECE) as (network, (server, me)), crowd(network, server, 30, download):
        end = now() + 6 * 31 + 31  # every 31st piece goes to us, and pieces are kept between attempts
        while NAME not in me.blobs and now() < end:
            with suppress(FetchError):
                await me.fetch(NAME, BLOB.size, server.key)
        assert NAME in me.blobs
        assert server.server.counters["busy"] > 0
        assert me.blamed == []


@skipping_time
async def test_a_peer_has_no_more_streams_than_it_may() -> None:
    async with swarm(2) as (_, (server, other)):
        server.blobs[NAME] = BLOB
        want = BlobRequest("payload", NAME.name, False)
        streams = [await other.transport.open(server.key, protocol.blob_protocol(RUN)) for _ in range(4)]
        assert [isinstance(await said(stream, want), Have) for stream in streams] == [True] * 4
        refused = await other.transport.open(server.key, protocol.blob_protocol(RUN))
        assert protocol.decode_reply(await refused.receive(100)) == Nothing("busy")
        streams[0].abort()
        await until(lambda: len(server.server.streams) == 3)
        assert isinstance(await said(await other.transport.open(server.key, protocol.blob_protocol(RUN)), want), Have)


@skipping_time
async def test_words_take_no_more_than_their_part_beyond_the_upload_limit() -> None:
    rate = PIECE // 4
    async with swarm(1, upload=rate) as (network, (server,)), crowd(network, server, 8, ask_and_ask):
        await at(now() + 6)
        assert server.server.counters["bytes"] < PIECE + 7 * rate / protocol.WORD_SHARE + 1_000


@skipping_time
async def test_peers_that_read_no_replies_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_network, "WINDOW_FRAMES", 4)
    async with swarm(2) as (network, (server, me)), crowd(network, server, PEERS_AT_ONCE, read_no_words):
        start = now()
        assert await me.fetch(NAME, BLOB.size, server.key) == BLOB.data()
        assert now() - start < 1


# ---------------------------------------------------------------------------------------------------
# Wrong requests


WRONG_REQUESTS = {
    "garbage": b"\xc1",
    "a piece of nothing": encode(Piece(0, False)),
    "an unknown kind": msgspec.msgpack.encode(["want", "gossip", bytes(32), True]),
    "a short name": msgspec.msgpack.encode(["want", "state", bytes(31), True]),
    "too long": bytes(129),
    "something after it": encode(BlobRequest("state", bytes(32), True)) + b"\0",
}


@pytest.mark.parametrize("request_bytes", WRONG_REQUESTS.values(), ids=WRONG_REQUESTS.keys())
def test_who_asks_wrongly_is_blamed(request_bytes: bytes) -> None:
    @skipping_time
    async def test() -> None:
        async with swarm(2) as (_, (server, other)):
            stream = await other.transport.open(server.key, protocol.blob_protocol(RUN))
            await stream.send(request_bytes)
            with pytest.raises(TransportError):
                await stream.receive(1_000)
            await until(lambda: bool(server.blamed))
            assert [peer for peer, _ in server.blamed] == [other.key]

    test()


@skipping_time
async def test_a_piece_beyond_the_end_is_a_wrong_request() -> None:
    async with swarm(2) as (_, (server, other)):
        server.blobs[NAME] = BLOB
        stream = await other.transport.open(server.key, protocol.blob_protocol(RUN))
        await stream.send(encode(BlobRequest("payload", NAME.name, False)))
        assert isinstance(protocol.decode_reply(await stream.receive(FRAME_BYTES_MAX)), Have)
        await stream.send(encode(Piece(6, True)))
        with pytest.raises(TransportError):
            await stream.receive(1_000)
        assert server.blamed == [(other.key, "piece 6 requested without being offered")]


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
        assert "refused" not in other.server.counters


def test_the_largest_answer_fits_a_frame() -> None:
    pieces = 60_000
    have = Have(pieces * PIECE, bytes(32 * pieces), bytes(pieces // 8), bytes(pieces), (bytes(32),) * 16)
    assert len(encode(have)) <= FRAME_BYTES_MAX
    assert protocol.decode_reply(encode(have)) == have
    assert len(encode(Given(59_999, bytes(PIECE)))) <= FRAME_BYTES_MAX
    assert len(encode(BlobRequest("tokenizer", bytes(32), True))) <= protocol.REQUEST_BYTES_MAX
