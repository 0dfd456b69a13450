"""Blobs in memory and in files, and what an interrupted fetch leaves on the disk."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest

from p2ptrain.core.messages import payload_digest
from p2ptrain.digest import is_piece, proves
from p2ptrain.errors import DataError
from p2ptrain.net.blobs.blob import BlobName, FileSink, MemorySink, Sink, all_pieces
from p2ptrain.net.blobs.swarm_fetch import pick
from tests.helpers.blobs import BLOB, NAME, PIECE, MemoryBlob, lie, swarm, tree, wrong_piece
from tests.helpers.net import skipping_time, some_bytes, until


@pytest.mark.parametrize("size", [0, 1, PIECE, PIECE + 1, 3 * PIECE])
def test_a_tree_is_named_as_the_core_names_payloads(size: int) -> None:
    data = some_bytes(size)
    blob = MemoryBlob.tree(data)
    assert blob.name == payload_digest(data)
    assert proves(blob.leaves, size, blob.name)
    assert not proves(blob.leaves, size + 1, blob.name)
    assert not proves(blob.leaves + bytes(32), size, blob.name)
    assert all(is_piece(blob.leaves, size, index, blob.read(index)) for index in range(blob.held.bit_length()))
    assert not is_piece(blob.leaves, size, 0, blob.read(0) + b"x")


def test_names_are_checked_where_they_come_in() -> None:
    with pytest.raises(AssertionError):
        BlobName("payload", b"short")
    with pytest.raises(AssertionError):
        BlobName("gossip", bytes(32))  # type: ignore[arg-type]


def test_a_choice_at_random_reaches_every_piece_and_no_other() -> None:
    rng, pieces = Random(0), 0b1001_0110
    assert {pick(pieces, rng) for _ in range(200)} == {1, 2, 4, 7}
    assert pick(1 << 59_999, rng) == 59_999


def test_a_file_that_came_whole_can_be_served_as_long_as_it_is_whole(tmp_path: Path) -> None:
    path, data = tmp_path / "blob", some_bytes(PIECE + 5)
    sink = FileSink(path)
    sink.begin(len(data), b"")
    sink.write(0, data[:PIECE])
    sink.write(1, data[PIECE:])
    sink.finish()
    assert (sink.size, sink.held, sink.read(0) + sink.read(1)) == (PIECE + 5, 3, data)
    path.write_bytes(data[:PIECE])
    with pytest.raises(DataError, match="shorter"):
        sink.read(1)
    path.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        sink.read(0)


@pytest.mark.parametrize("size", [1, PIECE, 9 * PIECE + 5])
def test_a_sink_holds_what_was_written(tmp_path: Path, size: int) -> None:
    blob = MemoryBlob.tree(some_bytes(size))
    for sink in (MemorySink(), FileSink(tmp_path / "blob")):
        sink.begin(size, blob.leaves)
        assert sink.held == 0
        for index in reversed(range(blob.held.bit_length())):
            sink.write(index, blob.read(index))
            assert sink.read(index) == blob.read(index)
        assert sink.held == blob.held
        sink.finish()
        assert sink.read(0) == blob.read(0)
    assert [path.name for path in tmp_path.iterdir()] == ["blob"]
    assert (tmp_path / "blob").read_bytes() == blob.data()


@pytest.mark.parametrize("is_file", [True, False])
def test_a_sink_goes_on_only_with_a_blob_of_the_same_size(tmp_path: Path, is_file: bool) -> None:
    memory = MemorySink()

    def begun(size: int) -> Sink:
        sink = FileSink(tmp_path / "blob") if is_file else memory
        sink.begin(size, b"")
        return sink

    begun(2 * PIECE).write(1, bytes(PIECE))
    sink = begun(2 * PIECE)
    assert sink.held == 2
    sink.drop(1)
    assert sink.held == 0
    assert begun(3 * PIECE).held == 0


def test_a_list_of_pieces_that_is_damaged_does_no_harm(tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "blob")
    sink.begin(2 * PIECE, b"")
    (tmp_path / "blob.held").write_bytes(b"\xff" * 100)
    sink.begin(2 * PIECE, b"")
    assert sink.held == all_pieces(2 * PIECE)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "missing" / "blob")
    with pytest.raises(DataError, match=r"missing/blob\.part cannot be written"):
        sink.begin(10, b"")


# ---------------------------------------------------------------------------------------------------
# Fetching into files


@skipping_time
async def test_a_state_is_fetched_into_a_file(tmp_path: Path) -> None:
    async with swarm(3) as (_, (me, a, b)):
        name, blob = tree(20 * PIECE + 1, "state")
        a.blobs[name] = b.blobs[name] = blob
        sink = FileSink(tmp_path / "state")
        await me.fetcher.fetch_into(sink, name, 30 * PIECE, [a.key, b.key], failed=me.fail)
        assert (tmp_path / "state").read_bytes() == blob.data()
        me.blobs[name] = sink
        assert await b.fetch(name, 30 * PIECE, me.key) == blob.data()


@skipping_time
async def test_a_fetch_into_a_file_goes_on_after_a_crash_and_damage(tmp_path: Path) -> None:
    path = tmp_path / "state"
    async with swarm(2, upload=4 * PIECE) as (network, (me, other)):
        name, blob = tree(20 * PIECE, "state")
        other.blobs[name] = blob
        sink = FileSink(path)
        fetching = asyncio.create_task(me.fetcher.fetch_into(sink, name, blob.size, [other.key], failed=me.fail))
        await until(lambda: sink.held.bit_count() >= 10)
        fetching.cancel()
        await asyncio.wait([fetching])
        held, before = sink.held, network.sent[other.key, me.key]
        damaged = held.bit_length() - 1
        with path.with_name("state.part").open("r+b") as file:
            file.seek(damaged * PIECE + 7)
            file.write(b"damage")
        again = FileSink(path)
        await me.fetcher.fetch_into(again, name, blob.size, [other.key], failed=me.fail)
        assert path.read_bytes() == blob.data()
        assert again.held == blob.held
        assert me.fetcher.counters["damaged"] == 1
        assert network.sent[other.key, me.key] - before < (20 - held.bit_count() + 2) * PIECE
        assert not path.with_name("state.part").exists()
        assert not path.with_name("state.held").exists()


@skipping_time
async def test_a_fetch_that_is_in_progress_is_served_from(tmp_path: Path) -> None:
    async with swarm(3, upload=2 * PIECE) as (network, (author, first, second)):
        name, blob = tree(12 * PIECE)
        author.blobs[name] = blob
        sink = FileSink(tmp_path / "payload")
        async with asyncio.TaskGroup() as group:
            group.create_task(first.fetcher.fetch_into(sink, name, blob.size, [author.key], failed=first.fail))
            await until(lambda: sink.held.bit_count() > 3)
            assert await second.fetch(name, blob.size, first.key) == blob.data()
        assert network.sent[author.key, second.key] < PIECE * 12
        assert network.sent[first.key, second.key] > PIECE * 3


@skipping_time
async def test_what_was_fetched_right_before_a_lie_is_kept(tmp_path: Path) -> None:
    async with swarm(2) as (network, (me, good)):
        good.blobs[NAME] = BLOB
        liar = await lie(network, 100, [me], wrong_piece)
        sink = FileSink(tmp_path / "payload")
        await me.fetcher.fetch_into(sink, NAME, BLOB.size, [liar, good.key], failed=me.fail)
        assert (tmp_path / "payload").read_bytes() == BLOB.data()
