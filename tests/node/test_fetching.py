"""Whom a node asks for blobs: near peers before far ones, and those that give nothing now and then, not each time."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from p2ptrain.core.messages import KEY_BYTES, authored, payload_digest
from p2ptrain.learn.data import piece_digest
from p2ptrain.net.address_book import KnownPeer
from p2ptrain.net.blobs.blob import BlobName
from p2ptrain.net.blobs.server import blob_protocol
from p2ptrain.net.blobs.swarm_fetch import PIECE_SECONDS
from p2ptrain.net.transport import Stream
from p2ptrain.node.fetching import DATA_SOURCES, LATE_MAX, LATE_SECONDS_MAX, LATE_TIMES, NEAR_SECONDS
from tests.helpers.blobs import MemoryBlob, Node
from tests.helpers.core import KEYS
from tests.helpers.driver import DATA, PAYLOAD_BYTES, Bench, a_dataset, bench
from tests.helpers.net import at, key, skipping_time, some_bytes

ME, PEER, OTHER, THIRD = KEYS[:4]
PIECE = bytes.fromhex(piece_digest(DATA))
NEAR, AFAR = 0.001, 0.2  # round trips


def now() -> float:
    return asyncio.get_running_loop().time()


async def serve_data(each: Bench, peer: bytes) -> None:
    (await each.serve(peer)).blobs[BlobName("data", PIECE)] = MemoryBlob(DATA)


async def be_silent(each: Bench, *peers: bytes) -> None:
    """A peer that is connected but answers no request."""

    async def hang(stream: Stream) -> None:
        await asyncio.get_running_loop().create_future()

    for peer in peers:
        transport = each.network.transport(peer)
        await transport.serve(blob_protocol(each.edges.run_id), hang)
        await each.transport.connect(transport.addresses()[0])
        each.edges.connections.linked[peer] = None


def set_latency(each: Bench, seconds: float, *peers: bytes) -> None:
    for peer in peers:
        each.edges.connections.known.setdefault(peer, KnownPeer()).answered_in.append(seconds)


def payload_for(drawn: bytes) -> tuple[bytes, bytes]:
    """Returns the name and the bytes of a payload of PEER's which, of ME, OTHER and THIRD, `drawn` is to fetch."""
    for seed in range(1_000):
        body = authored(PEER, some_bytes(PAYLOAD_BYTES - KEY_BYTES, seed))
        name = payload_digest(body)
        if max((ME, OTHER, THIRD), key=lambda key: hashlib.sha256(name + key).digest()) == drawn:
            return name, body
    raise AssertionError


async def piece_seconds(each: Bench) -> float:
    """Returns how long it takes to fetch a piece."""
    began = now()
    await each.edges.fetching._data_piece(PIECE)
    return now() - began


@skipping_time
async def test_peers_that_are_silent_cost_their_time_once_and_not_with_each_piece(tmp_path: Path) -> None:
    async with bench(tmp_path, a_dataset(tmp_path / "missing", is_whole=False)) as each:
        silent = [key(100 + number) for number in range(12)]
        await be_silent(each, *silent)
        await serve_data(each, PEER)
        took = [await piece_seconds(each) for _ in range(200)]
        assert sum(took) < (len(silent) + 1) * PIECE_SECONDS
        assert max(took[len(silent) :]) < 1.0
        await at(now() + LATE_SECONDS_MAX)
        each.edges.fetching._data_sources()
        assert each.edges.fetching.late == {}  # by now they may be better; if not, it costs no more than before
        assert sum([await piece_seconds(each) for _ in range(200)]) < (len(silent) + 1) * PIECE_SECONDS


@skipping_time
async def test_members_are_asked_before_others(tmp_path: Path) -> None:
    async with bench(tmp_path, a_dataset(tmp_path / "missing", is_whole=False)) as each:
        await be_silent(each, *(key(100 + number) for number in range(12)))
        await serve_data(each, PEER)
        each.edges.connections.members = frozenset({PEER})
        assert max([await piece_seconds(each) for _ in range(20)]) < 1.0
        assert each.edges.fetching.late == {}


@skipping_time
async def test_who_is_silent_comes_last_for_long_and_who_fails_fast_for_a_short_while(tmp_path: Path) -> None:
    async with bench(tmp_path, a_dataset(tmp_path / "missing", is_whole=False)) as each:
        fetching, connections = each.edges.fetching, each.edges.connections
        await be_silent(each, OTHER)
        await each.serve(PEER)
        connections.members = frozenset({PEER, OTHER})
        waiting = asyncio.create_task(piece_seconds(each))
        await at(PIECE_SECONDS + 5.0)
        assert fetching._data_sources() == [PEER, OTHER]
        assert list(fetching.late) == [OTHER], "PEER said at once that it has nothing"
        await serve_data(each, key(200))  # no member, and has not failed
        assert fetching._data_sources() == [PEER, key(200), OTHER]
        fetching._put_last(PEER, 0.1)
        assert fetching._data_sources() == [key(200), PEER, OTHER]
        await waiting
        await at(now() + LATE_TIMES * 0.1)
        assert fetching._data_sources() == [PEER, key(200), OTHER]


@skipping_time
async def test_near_peers_are_asked_before_far_ones(tmp_path: Path) -> None:
    async with bench(tmp_path, a_dataset(tmp_path / "missing", is_whole=False)) as each:
        fetching, crowd = each.edges.fetching, [key(100 + number) for number in range(DATA_SOURCES)]
        each.edges.connections.linked.update(dict.fromkeys([*crowd, PEER, OTHER, THIRD]))
        set_latency(each, AFAR, *crowd, THIRD)
        set_latency(each, NEAR, PEER, OTHER)
        each.edges.connections.members = frozenset({OTHER, THIRD})
        first = fetching._data_sources()
        assert first[:3] == [OTHER, THIRD, PEER], "members first, and the near one of them"
        fetching._put_last(OTHER, 0.01)
        assert fetching._data_sources()[:2] == [THIRD, PEER]


@dataclass
class FarAway:
    """A node, two near members, and the contribution of a far author."""

    each: Bench
    name: bytes
    body: bytes
    author: Node
    other: Node
    third: Node
    failed: list[bytes] = field(default_factory=list)

    async def seconds(self) -> float:
        """Returns how long it takes to get the contribution."""
        began = now()

        def failed(peer: bytes, why: str) -> None:
            self.failed.append(peer)

        assert await self.each.edges.fetching.payload(self.name, PAYLOAD_BYTES, [PEER], failed) == self.body
        return now() - began

    def gets_it_after(self, seconds: float, peer: Node) -> None:
        blob, tree = BlobName("payload", self.name), MemoryBlob.tree(self.body)
        asyncio.get_running_loop().call_later(seconds, peer.blobs.__setitem__, blob, tree)


@asynccontextmanager
async def far_away(tmp_path: Path, drawn: bytes) -> AsyncIterator[FarAway]:
    async with bench(tmp_path) as each:
        name, body = payload_for(drawn)
        author, other, third = [await each.serve(peer) for peer in (PEER, OTHER, THIRD)]
        author.blobs[BlobName("payload", name)] = MemoryBlob.tree(body)
        set_latency(each, AFAR, PEER)
        set_latency(each, NEAR, OTHER, THIRD)
        each.edges.connections.members = frozenset({PEER, OTHER, THIRD})
        yield FarAway(each, name, body, author, other, third)


@skipping_time
async def test_who_is_drawn_asks_the_author_at_once(tmp_path: Path) -> None:
    async with far_away(tmp_path, ME) as made:
        assert await made.seconds() < 0.1
        assert (len(made.author.asked), made.other.asked, made.third.asked) == (1, [], [])


@skipping_time
async def test_the_others_get_it_from_who_is_drawn_and_ask_nobody_far_away(tmp_path: Path) -> None:
    async with far_away(tmp_path, OTHER) as made:
        made.gets_it_after(1.0, made.other)
        assert 1.0 < await made.seconds() < 1.5
        assert (made.author.asked, made.third.asked, made.failed) == ([], [], [])


@skipping_time
async def test_a_near_member_that_does_not_get_it_is_waited_for_once_and_not_with_each(tmp_path: Path) -> None:
    async with far_away(tmp_path, OTHER) as made:
        made.gets_it_after(0.0, made.third)  # who is the next to be drawn, once the first has failed
        assert NEAR_SECONDS < await made.seconds() < NEAR_SECONDS + 1.0
        assert made.failed == [], "nobody is to blame who was not said to have it"
        asked = len(made.other.asked)
        assert await made.seconds() < 0.5
        assert len(made.other.asked) == asked
        await at(now() + LATE_SECONDS_MAX)
        made.gets_it_after(0.0, made.other)
        assert await made.seconds() < 0.5
        assert len(made.other.asked) == asked + 1, "it is drawn again"


@skipping_time
@pytest.mark.parametrize("change", ["author near", "author unknown", "no member", "unknown", "gone"])
async def test_the_author_is_asked_where_nobody_is_nearer(change: str, tmp_path: Path) -> None:
    async with far_away(tmp_path, OTHER) as made:
        connections = made.each.edges.connections
        match change:
            case "author near":
                connections.known[PEER].answered_in.extend([0.02] * 5)
            case "author unknown":
                del connections.known[PEER]
            case "no member":
                connections.members = frozenset({PEER})
            case "unknown":
                del connections.known[OTHER], connections.known[THIRD]
            case "gone":
                del connections.linked[OTHER], connections.linked[THIRD]
        assert await made.seconds() < 0.1
        assert (len(made.author.asked), made.other.asked, made.third.asked) == (1, [], [])


@skipping_time
async def test_those_who_failed_are_still_asked_when_there_is_nobody_else(tmp_path: Path) -> None:
    async with bench(tmp_path, a_dataset(tmp_path / "missing", is_whole=False)) as each:
        peer = await each.serve(PEER)
        waiting = asyncio.create_task(piece_seconds(each))
        await at(2.0)
        assert list(each.edges.fetching.late) == [PEER]
        peer.blobs[BlobName("data", PIECE)] = MemoryBlob(DATA)
        assert await waiting < 10.0


@skipping_time
async def test_no_more_failures_are_noted_than_there_is_room_for(tmp_path: Path) -> None:
    async with bench(tmp_path) as each:
        for number in range(2 * LATE_MAX):
            each.edges.fetching._put_last(number.to_bytes(32, "big"), 100.0 / LATE_TIMES)
        assert len(each.edges.fetching.late) == LATE_MAX
        each.edges.connections.linked.update(dict.fromkeys(number.to_bytes(32, "big") for number in range(1_000)))
        assert len(each.edges.fetching._data_sources()) == DATA_SOURCES
        await at(100.0)
        each.edges.fetching._data_sources()
        assert each.edges.fetching.late == {}
