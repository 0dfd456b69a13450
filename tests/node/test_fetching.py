"""Training data from peers of which some give nothing: each costs time now and then, not for every piece."""

from __future__ import annotations

import asyncio
from pathlib import Path

from p2ptrain.data.dataset import piece_digest
from p2ptrain.net.blobs.blob import BlobName
from p2ptrain.net.blobs.server import blob_protocol
from p2ptrain.net.blobs.swarm_fetch import PIECE_SECONDS
from p2ptrain.net.transport import Stream
from p2ptrain.node.fetching import DATA_SOURCES, LATE_MAX, LATE_SECONDS, LATE_TIMES
from tests.helpers.blobs import MemoryBlob
from tests.helpers.core import KEYS
from tests.helpers.driver import DATA, DriverBench, a_dataset, bench
from tests.helpers.net import at, key, skipping_time

PEER, OTHER = KEYS[1:3]
PIECE = bytes.fromhex(piece_digest(DATA))


def now() -> float:
    return asyncio.get_running_loop().time()


async def serve_data(each: DriverBench, peer: bytes) -> None:
    (await each.serve(peer)).blobs[BlobName("data", PIECE)] = MemoryBlob(DATA)


async def be_silent(each: DriverBench, *peers: bytes) -> None:
    """A peer that is connected but answers no request."""

    async def hang(stream: Stream) -> None:
        await asyncio.get_running_loop().create_future()

    for peer in peers:
        transport = each.network.transport(peer)
        await transport.serve(blob_protocol(each.edges.run_id), hang)
        await each.transport.connect(transport.addresses()[0])
        each.edges.connections.linked[peer] = None


async def piece_seconds(each: DriverBench) -> float:
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
        await at(now() + LATE_TIMES * PIECE_SECONDS)
        each.edges.fetching.data_sources()
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
async def test_who_has_nothing_comes_after_the_others_for_a_while_and_before_who_was_silent(tmp_path: Path) -> None:
    async with bench(tmp_path, a_dataset(tmp_path / "missing", is_whole=False)) as each:
        fetching, connections = each.edges.fetching, each.edges.connections
        await be_silent(each, OTHER)
        await each.serve(PEER)
        connections.members = frozenset({PEER, OTHER})
        waiting = asyncio.create_task(piece_seconds(each))
        await at(PIECE_SECONDS + 5.0)
        assert fetching.data_sources() == [PEER, OTHER]
        assert LATE_SECONDS <= fetching.late[PEER] < fetching.late[OTHER]
        assert fetching.late[OTHER] >= LATE_TIMES * PIECE_SECONDS
        await serve_data(each, key(200))  # no member, and has not failed
        assert fetching.data_sources() == [key(200), PEER, OTHER]
        await waiting
        await at(now() + LATE_SECONDS)
        assert fetching.data_sources() == [PEER, key(200), OTHER]


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
            each.edges.fetching._put_last(number.to_bytes(32, "big"), 100.0)
        assert len(each.edges.fetching.late) == LATE_MAX
        each.edges.connections.linked.update(dict.fromkeys(number.to_bytes(32, "big") for number in range(1_000)))
        assert len(each.edges.fetching.data_sources()) == DATA_SOURCES
        await at(100.0)
        each.edges.fetching.data_sources()
        assert each.edges.fetching.late == {}
