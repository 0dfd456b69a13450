"""A joiner fetches the next round's data while it trains, in the room that it has, and again what had to go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from p2ptrain.core import events as ev
from p2ptrain.core.complaints import Code, complaint
from p2ptrain.data.dataset import TokenDataset, manifest_digest, store_manifest
from p2ptrain.digest import PIECE_BYTES
from p2ptrain.errors import DataError
from p2ptrain.net.blobs.blob import BlobName
from p2ptrain.node.trainings import DATA_SECONDS
from p2ptrain.share import PassSlots, Share
from p2ptrain.store.diary import Trained
from tests.helpers.blobs import BlobNode, MemoryBlob
from tests.helpers.driver import PEER, SEQUENCE, DriverBench, a_manifest, bench, doing, of_kind, root_of
from tests.helpers.large_sets import set_of_pieces
from tests.helpers.net import skipping_time, until

PLACE, PLACES = 1, 4
ROUND_PIECES = 2  # that the fake trainer needs


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    return set_of_pieces(tmp_path_factory.mktemp("whole") / "data", 64)


@asynccontextmanager
async def joined(
    tmp_path: Path, whole: TokenDataset, room_pieces: int
) -> AsyncIterator[tuple[DriverBench, TokenDataset]]:
    """A node with room for so many pieces of the data, none of which it has."""
    encoded = whole.manifest_bytes()
    data = store_manifest(tmp_path / "mine", encoded, manifest_digest(encoded))
    data.keep_within(room_pieces * PIECE_BYTES)
    async with bench(tmp_path, data) as each, each.running():
        each.trainer.dataset = data
        yield each, data


def needed(each: DriverBench, whole: TokenDataset, number: int, place: int = PLACE) -> list[bytes]:
    positions = each.trainer.positions_for(Share(number, place, PLACES))
    names = whole._pieces_of(whole.manifest.training, positions, SEQUENCE)
    return [bytes.fromhex(name) for name in names]


def give(server: BlobNode, whole: TokenDataset, names: Sequence[bytes]) -> None:
    for name in names:
        piece = whole.piece(name)
        assert piece is not None
        server.blobs[BlobName("data", name)] = MemoryBlob(piece)


def lacks(each: DriverBench, data: TokenDataset, number: int, place: int = PLACE) -> list[bytes]:
    return data.missing(each.trainer.positions_for(Share(number, place, PLACES)), SEQUENCE)


@skipping_time
async def test_the_next_rounds_data_are_fetched_while_this_one_trains(tmp_path: Path, whole: TokenDataset) -> None:
    async with joined(tmp_path, whole, 2 * ROUND_PIECES) as (each, data):
        server = await each.serve(PEER)
        give(server, whole, needed(each, whole, 1) + needed(each, whole, 2))
        each.workshop.thread.train_seconds = 60.0
        doing(each, ev.Train(1, 0, PLACE, PLACES))
        await until(lambda: lacks(each, data, 2) == [])
        assert each.node.events == [], "the training goes on"
        server.blobs.clear()  # what is needed next is here
        await until(lambda: bool(of_kind(each, ev.TrainingFinished)))
        doing(each, ev.Train(2, 0, PLACE, PLACES))
        await until(lambda: len(of_kind(each, ev.TrainingFinished)) == 2)
        assert [done[1] for done in each.trainer.done if done[0] == "train"] == [1, 2]


@skipping_time
async def test_the_slots_of_the_next_round_are_fetched_ahead_by_capability(tmp_path: Path, whole: TokenDataset) -> None:
    async with joined(tmp_path, whole, 2 * ROUND_PIECES) as (each, data):
        server, slots = await each.serve(PEER), PassSlots(600, 8, 2, ROUND_PIECES)
        used = [each.trainer.positions_for(Share(1, PLACE, PLACES, at)).tolist() for at in (slots, slots.next)]
        give(server, whole, [bytes.fromhex(name) for name in whole.manifest.training.pieces])
        doing(each, ev.Train(1, 0, PLACE, PLACES, slots=slots))
        await until(lambda: bool(of_kind(each, ev.TrainingFinished)))
        ahead = each.driver.trainings.ahead
        assert ahead is not None
        await ahead
        assert each.trainer.used == {1: used[0]}
        assert data.missing(np.array(used[0] + used[1]), SEQUENCE) == []


@skipping_time
async def test_a_wrong_guess_costs_its_bytes_and_what_is_needed_comes_first(
    tmp_path: Path, whole: TokenDataset
) -> None:
    async with joined(tmp_path, whole, 2 * ROUND_PIECES) as (each, _):
        server = await each.serve(PEER)
        give(server, whole, needed(each, whole, 1))  # nobody has those of the guess: it waits
        doing(each, ev.Train(1, 0, PLACE, PLACES))
        await until(lambda: bool(of_kind(each, ev.TrainingFinished)))
        ahead = each.driver.trainings.ahead
        assert ahead is not None and not ahead.done()
        give(server, whole, needed(each, whole, 2, place=3))
        began = asyncio.get_running_loop().time()
        doing(each, ev.Train(2, 0, 3, PLACES))
        await until(lambda: len(of_kind(each, ev.TrainingFinished)) == 2)
        assert asyncio.get_running_loop().time() - began < DATA_SECONDS / 4
        assert ahead.cancelled()


@skipping_time
async def test_a_guess_that_fails_fails_nothing_else(
    tmp_path: Path, whole: TokenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with joined(tmp_path, whole, 2 * ROUND_PIECES) as (each, data):
        server = await each.serve(PEER)
        give(server, whole, needed(each, whole, 1))
        doing(each, ev.Train(1, 0, PLACE, PLACES))
        await until(lambda: bool(of_kind(each, ev.TrainingFinished)))

        def full(name: bytes, piece: bytes) -> None:
            raise DataError("the disk is full")

        monkeypatch.setattr(data, "add_piece", full)
        give(server, whole, needed(each, whole, 2))
        ahead = each.driver.trainings.ahead
        assert ahead is not None
        await ahead
        await each.driver.trainings.fetch_ahead(
            ev.Train(40, 0, PLACE, PLACES)
        )  # which nobody has: until the time is up
        assert of_kind(each, ev.TrainingFailed) == []


@skipping_time
async def test_a_node_that_is_paused_or_leaves_fetches_nothing_ahead(tmp_path: Path, whole: TokenDataset) -> None:
    async with joined(tmp_path, whole, 2 * ROUND_PIECES) as (each, data):
        give(await each.serve(PEER), whole, needed(each, whole, 2))
        train, pause = ev.Train(1, 0, PLACE, PLACES), complaint(Code.PAUSED)
        each.driver.trainings.pauses.begin(pause)
        await each.driver.trainings.fetch_ahead(train)
        assert lacks(each, data, 2) == needed(each, whole, 2)
        each.driver.trainings.pauses.end(pause.code)
        each.node.seen.is_stopping = True
        await each.driver.trainings.fetch_ahead(train)
        assert lacks(each, data, 2) == needed(each, whole, 2)
        each.node.seen.is_stopping = False
        await each.driver.trainings.fetch_ahead(train)
        assert lacks(each, data, 2) == []


@skipping_time
async def test_with_room_for_one_round_alone_nothing_is_fetched_ahead_and_all_rounds_train(
    tmp_path: Path, whole: TokenDataset
) -> None:
    async with joined(tmp_path, whole, ROUND_PIECES) as (each, data):
        server = await each.serve(PEER)
        give(server, whole, [bytes.fromhex(name) for name in whole.manifest.training.pieces])
        for number in range(1, 6):
            doing(each, ev.Train(number, 0, PLACE, PLACES))
            await until(lambda count=number: len(of_kind(each, ev.TrainingFinished)) == count)
            assert len(list((data.directory / "fetched").iterdir())) <= ROUND_PIECES
        assert of_kind(each, ev.TrainingFailed) == []


@skipping_time
async def test_trainings_that_a_restart_repeats_get_the_data_that_had_to_go(
    tmp_path: Path, whole: TokenDataset
) -> None:
    """Both from one state, and with room for the data of one at a time."""
    async with joined(tmp_path, whole, ROUND_PIECES) as (each, _):
        give(await each.serve(PEER), whole, [bytes.fromhex(name) for name in whole.manifest.training.pieces])
        noted = [Trained(number, number, 0, PLACE, PLACES, (), "ab" * 32) for number in (1, 2)]
        each.workshop.worker.repeat_all(noted, 2)
        manifest = a_manifest(each.genesis, 1, [])
        doing(each, ev.Apply(manifest))
        await until(lambda: bool(each.node.events))
        assert each.node.events == [ev.Applied(manifest.branch, 1, root_of(each.trainer.state))]
        trained = [done for done in each.trainer.done if done[0] != "restore"]
        assert [done[:2] for done in trained] == [("train", 1), ("train", 2), ("apply", 1)]
