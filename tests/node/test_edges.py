"""The driver with its edges: it applies rounds and fetches and serves states and data, despite liars and losses."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from p2ptrain.core import events as ev
from p2ptrain.core.messages import KEY_BYTES, NUMBER_MAX, authored, content_name, payload_digest
from p2ptrain.data.dataset import piece_digest
from p2ptrain.digest import PIECE_BYTES
from p2ptrain.errors import DataError, MemoryShortError, PassedError
from p2ptrain.net import questions
from p2ptrain.net.blobs.blob import BlobName, FileSink
from p2ptrain.net.transport import Stream
from p2ptrain.node.persistence import DISK_SECONDS
from p2ptrain.node.replica_thread import Standing
from p2ptrain.train.saved_state import Capture
from tests.helpers.blobs import BlobNode, MemoryBlob
from tests.helpers.core import KEYS
from tests.helpers.driver import (
    DATA,
    PAYLOAD_BYTES,
    STATE,
    STATE_BYTES,
    ChainCapture,
    DriverBench,
    a_dataset,
    a_manifest,
    bench,
    doing,
    of_kind,
    root_of,
)
from tests.helpers.net import at, skipping_time, some_bytes, until

ME, PEER, OTHER, THIRD, FAR = KEYS[:5]
BODY = authored(PEER, some_bytes(PAYLOAD_BYTES - KEY_BYTES, 7))
NAME = payload_digest(BODY)
BLOB = BlobName("payload", NAME)
FETCH = ev.Fetch(NAME, PAYLOAD_BYTES, (PEER,))
ARRIVED = ev.PayloadArrived(NAME, True, PEER, PAYLOAD_BYTES, content_name(BODY))
NEWER = some_bytes(STATE_BYTES, 8)


async def tells_states(node: BlobNode, *states: tuple[int, bytes]) -> None:
    await questions.serve(node.transport, lambda peer, question: questions.States(states))


def state_blob(state: bytes) -> dict[BlobName, MemoryBlob]:
    return {BlobName("state", root_of(state)): MemoryBlob.tree(state)}


# ---------------------------------------------------------------------------------------------------
# Rounds


def held(each: DriverBench, number: int, count: int = 2) -> Any:
    """Stores payloads and makes the manifest of a round that took them."""
    bodies = [some_bytes(PAYLOAD_BYTES, 100 * number + seat) for seat in range(count)]
    for body in bodies:
        each.store.payloads.put(payload_digest(body), body)
    return a_manifest(each.genesis, number, bodies)


@skipping_time
async def test_a_round_is_applied_and_its_contribution_forgotten(tmp_path: Path) -> None:
    async with bench(tmp_path) as each, each.running():
        manifest = held(each, 1)
        doing(each, ev.Apply(manifest))
        await until(lambda: bool(each.node.events))
        assert each.node.events == [ev.Applied(manifest.branch, 1, root_of(each.trainer.state))]
        assert each.trainer.done == [("apply", 1, 2, 1)]


@skipping_time
async def test_a_lost_payload_of_an_agreed_round_is_fetched_until_somebody_has_it(tmp_path: Path) -> None:
    async with bench(tmp_path) as each, each.running():
        each.store.payloads.put(NAME, BODY)
        lost = some_bytes(PAYLOAD_BYTES, 9)
        manifest = a_manifest(each.genesis, 1, [BODY, lost])
        server = await each.serve(PEER)
        doing(each, ev.Apply(manifest))
        await at(2.5 * DISK_SECONDS)
        assert each.node.events == []
        server.blobs[BlobName("payload", payload_digest(lost))] = MemoryBlob.tree(lost)
        await until(lambda: bool(each.node.events))
        assert each.node.events == [ev.Applied(manifest.branch, 1, root_of(each.trainer.state))]
        assert each.store.payloads.get(payload_digest(lost)) == lost


@skipping_time
async def test_a_round_that_does_not_follow_the_state_is_not_applied(tmp_path: Path) -> None:
    async with bench(tmp_path) as each, each.running():
        each.trainer.adopt(7, [NEWER])
        doing(each, ev.Apply(held(each, 4)), ev.Apply(held(each, 8)))
        await until(lambda: bool(each.node.events))
        [applied] = each.node.events
        assert isinstance(applied, ev.Applied) and applied.round == 8
        await until(lambda: bool(each.store.checkpoints.present()))
        assert [checkpoint.round for checkpoint in each.store.checkpoints.present()] == [8]  # round 4 has left none


@skipping_time
async def test_a_round_of_a_line_that_was_left_is_not_applied_to_the_state_that_was_taken_over(tmp_path: Path) -> None:
    """It waited for a payload while the state of another branch arrived, of the round before it."""
    async with bench(tmp_path) as each, each.running():
        lost = some_bytes(PAYLOAD_BYTES, 9)
        server = await each.serve(PEER)
        server.blobs |= state_blob(NEWER)
        await tells_states(server, (0, root_of(NEWER)))
        doing(each, ev.Apply(a_manifest(each.genesis, 1, [lost])))
        await at(1.0)
        doing(each, ev.CatchUp(((0, root_of(NEWER)),), (PEER,), 1))
        await each.heard(ev.CaughtUp(0, root_of(NEWER), 1))
        server.blobs[BlobName("payload", payload_digest(lost))] = MemoryBlob.tree(lost)
        await at(4 * DISK_SECONDS)
        assert each.trainer.state == NEWER
        assert of_kind(each, ev.Applied) == []


def applying() -> int:
    """Returns how many rounds are being applied, or wait for their payloads."""
    return sum(task.get_name() == "apply" for task in asyncio.all_tasks())


@skipping_time
async def test_payloads_of_a_line_that_was_left_are_not_fetched_for_ever(tmp_path: Path) -> None:
    async with bench(tmp_path) as each, each.running():
        server = await each.serve(PEER)
        server.blobs |= state_blob(NEWER)
        await tells_states(server, (0, root_of(NEWER)))
        doing(each, ev.Apply(a_manifest(each.genesis, 1, [some_bytes(PAYLOAD_BYTES, 9)])))
        await at(1.0)
        assert applying() == 1
        doing(each, ev.CatchUp(((0, root_of(NEWER)),), (PEER,), 1))
        await each.heard(ev.CaughtUp(0, root_of(NEWER), 1))
        await at(4 * DISK_SECONDS)
        assert applying() == 0


@skipping_time
async def test_every_few_rounds_the_state_is_saved_and_served(tmp_path: Path) -> None:
    async with bench(tmp_path) as each, each.running():
        for number in range(1, 9):
            doing(each, ev.Apply(held(each, number)))
            await until(lambda: len(of_kind(each, ev.Applied)) == number)  # noqa: B023
        await until(lambda: len(each.edges.served_blobs.states.places()) == 2)
        [(newest, root), (older, _)] = each.edges.served_blobs.states.places()
        assert (newest, older, root) == (8, 4, root_of(each.trainer.state))
        peer = await each.serve(PEER)
        mine = await each.serve(OTHER, connected=False)
        mine.find = each.edges.served_blobs.find  # type: ignore[method-assign]
        await peer.transport.connect(mine.transport.addresses()[0])
        assert await peer.fetch(BlobName("state", root), STATE_BYTES, OTHER) == each.trainer.state


@skipping_time
async def test_a_checkpoint_that_cannot_be_written_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench(tmp_path) as each, each.running():

        class Broken(ChainCapture):
            def write(self, path: Path) -> None:
                raise OSError(28, "No space left on device")

        monkeypatch.setattr(each.trainer, "capture", lambda: Broken(4, b"", memoryview(STATE)))
        each.trainer.adopt(3, [NEWER])
        for number in (4, 5):
            doing(each, ev.Apply(held(each, number)))
            await until(lambda: len(of_kind(each, ev.Applied)) == number - 3)  # noqa: B023
        assert each.store.checkpoints.present() == []
        assert "No space left on device" in each.persistence.checkpoint_trouble  # which the health tells
    assert [
        record.levelname
        for record in caplog.records
        if "could not save the checkpoint of round 4" in record.getMessage()
    ] == ["ERROR"]


def test_a_trainer_that_finds_no_room_for_its_state_says_so_as_a_disk_does(tmp_path: Path) -> None:
    """safetensors raises its own error for that, which is not an OSError."""
    with pytest.raises(DataError):
        Capture(0, {}, {}, torch.zeros(0)).write(tmp_path / "gone" / "trainer.safetensors")


# ---------------------------------------------------------------------------------------------------
# States


@skipping_time
async def test_a_newer_catching_up_replaces_the_one_before_it(tmp_path: Path) -> None:
    async with bench(tmp_path) as each, each.running():
        silent, good = await each.serve(PEER), await each.serve(OTHER)
        await tells_states(silent, (5, root_of(STATE)))  # and never gives it
        good.blobs |= state_blob(NEWER)
        await tells_states(good, (6, root_of(NEWER)))
        silent.blobs |= state_blob(STATE)
        silent.upload.set_rate(1)  # a state a fortnight
        doing(each, ev.CatchUp(((5, root_of(STATE)),), (PEER,), 1))
        await at(1.0)
        doing(each, ev.CatchUp(((6, root_of(NEWER)),), (OTHER,), 2))
        await each.heard(ev.CaughtUp(6, root_of(NEWER), 2))
        await at(300.0)
        assert each.node.events == [ev.CaughtUp(6, root_of(NEWER), 2)]
        assert each.trainer.done == [("adopt", 6)]


@skipping_time
async def test_the_newest_state_that_somebody_has_is_taken(tmp_path: Path) -> None:
    async with bench(tmp_path) as each, each.running():
        one, other = await each.serve(PEER), await each.serve(OTHER)
        one.blobs |= state_blob(STATE)
        other.blobs |= state_blob(STATE) | state_blob(NEWER)
        await tells_states(one, (8, root_of(STATE)))
        await tells_states(other, (8, root_of(STATE)), (16, root_of(NEWER)))
        doing(each, ev.CatchUp(((24, bytes(32)), (16, root_of(NEWER)), (8, root_of(STATE))), (PEER, OTHER, FAR), 3))
        await until(lambda: bool(each.node.events))
        assert each.node.events == [ev.CaughtUp(16, root_of(NEWER), 3)]
        assert (each.trainer.round, each.trainer.state) == (16, NEWER)


@skipping_time
async def test_who_claims_the_newest_state_and_does_not_give_it_keeps_nobody_from_an_older_one(tmp_path: Path) -> None:
    async with bench(tmp_path) as each, each.running():
        liar, good = await each.serve(PEER), await each.serve(OTHER)
        await tells_states(liar, (16, root_of(NEWER)), (8, root_of(STATE)))
        good.blobs |= state_blob(STATE)
        await tells_states(good, (8, root_of(STATE)))
        doing(each, ev.CatchUp(((16, root_of(NEWER)), (8, root_of(STATE))), (PEER, OTHER), 1))
        await until(lambda: bool(each.node.events))
        assert each.node.events == [ev.CaughtUp(8, root_of(STATE), 1)]


@skipping_time
async def test_a_state_that_came_out_wrong_is_replaced(tmp_path: Path) -> None:
    wrong = bytearray(NEWER)
    wrong[PIECE_BYTES + 5] ^= 1
    async with bench(tmp_path) as each, each.running():
        server = await each.serve(PEER)
        server.blobs |= state_blob(NEWER)
        await tells_states(server, (8, root_of(NEWER)))
        each.trainer.round, each.trainer.state = 8, bytes(wrong)
        doing(each, ev.CatchUp(((8, root_of(NEWER)),), (PEER,), 1))
        await each.heard(ev.CaughtUp(8, root_of(NEWER), 1))
        assert each.trainer.state == NEWER
        assert list((tmp_path / "fetching").iterdir()) == []


@skipping_time
async def test_a_state_that_an_earlier_life_had_begun_to_fetch_is_gone_on_with(tmp_path: Path) -> None:
    async with bench(tmp_path) as each, each.running():
        server = await each.serve(PEER)
        server.blobs |= state_blob(NEWER)
        await tells_states(server, (8, root_of(NEWER)))
        directory = tmp_path / "fetching"
        directory.mkdir()
        begun, other = FileSink(directory / root_of(NEWER).hex()), FileSink(directory / root_of(STATE).hex())
        for sink in (begun, other):
            sink.begin(STATE_BYTES, b"")
        begun.write(0, NEWER[:PIECE_BYTES])
        doing(each, ev.CatchUp(((8, root_of(NEWER)),), (PEER,), 1))
        await each.heard(ev.CaughtUp(8, root_of(NEWER), 1))
        assert each.trainer.state == NEWER
        assert server.server.counters["pieces"] == 1
        assert list(directory.iterdir()) == [], "nobody will ask for the other again"


@skipping_time
async def test_a_state_that_was_taken_over_is_saved_at_once(tmp_path: Path) -> None:
    async with bench(tmp_path) as each, each.running():
        server = await each.serve(PEER)
        server.blobs |= state_blob(NEWER)
        await tells_states(server, (7, root_of(NEWER)))
        doing(each, ev.CatchUp(((7, root_of(NEWER)),), (PEER,), 1))
        await each.heard(ev.CaughtUp(7, root_of(NEWER), 1))
        await until(lambda: bool(each.store.checkpoints.present()))
        [saved] = each.store.checkpoints.present()
        assert (saved.round, saved.root, saved.head) == (7, root_of(NEWER), b"")


@skipping_time
async def test_when_nobody_has_a_state_that_would_do_catching_up_has_failed(tmp_path: Path) -> None:
    async with bench(tmp_path) as each, each.running():
        await tells_states(await each.serve(PEER), (8, root_of(STATE)))
        doing(each, ev.CatchUp(((16, root_of(NEWER)),), (PEER, FAR), 1))
        await until(lambda: bool(each.node.events))
        [failed] = each.node.events
        assert isinstance(failed, ev.CatchUpFailed) and failed.attempt == 1
        assert failed.why == "none of 2 peers has one of the 1 usable states"


@skipping_time
async def test_who_answers_with_junk_when_asked_for_its_states_is_blamed(tmp_path: Path) -> None:
    async with bench(tmp_path) as each, each.running():
        junk = await each.serve(PEER)

        async def answer(stream: Stream) -> None:
            await stream.send(b"junk")

        await junk.transport.serve(questions.PROTOCOL, answer)
        doing(each, ev.CatchUp(((16, root_of(NEWER)),), (PEER,), 1))
        await until(lambda: bool(each.node.events))
        assert [peer for peer, _ in each.blamed] == [PEER]


@skipping_time
async def test_my_own_checkpoint_is_read_before_anybody_is_asked_for_it(tmp_path: Path) -> None:
    async with bench(tmp_path) as each, each.running():
        first = Standing(0, each.genesis.branch, each.genesis.head, root_of(STATE))
        mine = await each.persistence.save_first(each.workshop.worker, first)
        doing(each, ev.CatchUp(((0, root_of(STATE)),), (), 1))
        await each.heard(ev.CaughtUp(0, root_of(STATE), 1))
        (mine.path / "state.bin").write_bytes(NEWER)  # damaged: then others are asked
        good = await each.serve(PEER)
        good.blobs |= state_blob(STATE)
        await tells_states(good, (0, root_of(STATE)))
        doing(each, ev.CatchUp(((0, root_of(STATE)),), (PEER,), 2))
        await each.heard(ev.CaughtUp(0, root_of(STATE), 2))
        (mine.path / "state.bin").unlink()
        (mine.path / "state.bin").mkdir()  # what is there cannot be read
        doing(each, ev.CatchUp(((0, root_of(STATE)),), (PEER,), 3))
        await each.heard(ev.CaughtUp(0, root_of(STATE), 3))


# ---------------------------------------------------------------------------------------------------
# Training


@skipping_time
async def test_training_fetches_its_data_first_and_announces_what_came_of_it(tmp_path: Path) -> None:
    data = a_dataset(tmp_path / "missing", is_whole=False)
    async with bench(tmp_path, data) as each, each.running():
        each.trainer.dataset = data
        server = await each.serve(PEER)
        doing(each, ev.Train(1, 0, 1, 4))
        await at(30.0)
        assert each.node.events == []
        server.blobs[BlobName("data", bytes.fromhex(piece_digest(DATA)))] = MemoryBlob(DATA)
        await until(lambda: bool(each.node.events))
        [finished] = each.node.events
        assert isinstance(finished, ev.TrainingFinished) and (finished.round, finished.base_round) == (1, 0)
        assert payload_digest(finished.attachment) == finished.payload  # it is small enough to ride along
        assert each.store.payloads.get(finished.payload) == finished.attachment
        assert data.missing_anywhere() == []


@skipping_time
async def test_data_that_nobody_has_makes_the_round_fail_in_time(tmp_path: Path) -> None:
    data = a_dataset(tmp_path / "missing", is_whole=False)
    async with bench(tmp_path, data) as each, each.running():
        each.trainer.dataset = data
        doing(each, ev.Train(1, 0, 1, 4))
        await until(lambda: bool(each.node.events))
        [failed] = each.node.events
        assert isinstance(failed, ev.TrainingFailed) and failed.round == 1
        assert 100 < asyncio.get_running_loop().time() < 140


async def test_a_round_that_passes_is_no_trouble_and_needs_no_data(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = a_dataset(tmp_path / "missing", is_whole=False)
    async with bench(tmp_path, data) as each, each.running():
        each.trainer.dataset, each.driver.worker.reads_data = data, False

        async def passed(*_: object) -> None:
            raise PassedError("its turn has not come")

        each.driver.worker.train = passed  # type: ignore[method-assign,assignment]
        doing(each, ev.Train(1, 0, 1, 4))
        await until(lambda: bool(each.node.events))
        assert each.node.events == [ev.TrainingFailed(1, "its turn has not come", has_passed=True)]
        assert caplog.text == ""


@skipping_time
async def test_data_that_finds_no_room_makes_the_round_fail_and_not_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = a_dataset(tmp_path / "missing", is_whole=False)

    def full(name: bytes, piece: bytes) -> None:
        raise DataError("the disk is full")

    monkeypatch.setattr(data, "add_piece", full)
    async with bench(tmp_path, data) as each, each.running() as task:
        each.trainer.dataset = data
        server = await each.serve(PEER)
        server.blobs[BlobName("data", bytes.fromhex(piece_digest(DATA)))] = MemoryBlob(DATA)
        doing(each, ev.Train(1, 0, 1, 4))
        await until(lambda: bool(each.node.events) or task.done())
        assert each.node.events == [ev.TrainingFailed(1, "the disk is full")]


@skipping_time
async def test_the_device_is_told_the_pace_while_it_trains_and_the_steps_that_it_took_are_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(tmp_path) as each, each.running():
        told: list[tuple[int, float, float]] = []
        monkeypatch.setattr(each.driver.worker, "keep_pace", lambda *pace: told.append(pace))
        train = each.trainer.train
        monkeypatch.setattr(each.trainer, "train", lambda *arguments: 3 * train(*arguments))
        doing(each, ev.Train(1, 0, 1, 4), ev.Pace(1, 2.0, 3.0))
        await until(lambda: bool(each.node.events))
        assert told == [(1, 2.0, 3.0)]
        [finished] = each.node.events
        assert isinstance(finished, ev.TrainingFinished) and finished.steps == 3


MOST = NUMBER_MAX - 1


@pytest.mark.parametrize(("loss", "told"), [(-0.5, 0), (math.nan, 0), (math.inf, MOST), (1e305, MOST)])
@skipping_time
async def test_a_loss_that_has_no_place_in_an_announcement_is_told_as_the_nearest(
    loss: float, told: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a node whose objective has one would end."""
    async with bench(tmp_path) as each, each.running():
        train = each.trainer.train
        monkeypatch.setattr(
            each.trainer, "train", lambda *arguments: [replace(step, loss=loss) for step in train(*arguments)]
        )
        doing(each, ev.Train(1, 0, 1, 4))
        await until(lambda: bool(each.node.events))
        [finished] = each.node.events
        assert isinstance(finished, ev.TrainingFinished) and finished.loss == told


@skipping_time
async def test_a_round_in_training_ends_with_the_node(tmp_path: Path) -> None:
    async with bench(tmp_path) as each, each.running() as task:
        doing(each, ev.Train(1, 0, 1, 4))
        await at(0.5)
        each.driver.intake.give(ev.StopRequested())
        assert await task == "the test is over"
        assert each.node.events == []


@skipping_time
async def test_a_contribution_that_nobody_took_goes_back(tmp_path: Path) -> None:
    async with bench(tmp_path) as each, each.running():
        doing(each, ev.Train(1, 0, 1, 4))
        await until(lambda: bool(each.node.events))
        assert each.trainer.kept_rounds == (1,)
        doing(each, ev.Return(1), ev.Train(2, 0, 1, 4))
        await until(lambda: len(each.node.events) == 2)
        assert each.trainer.kept_rounds == (2,)
        assert ("restore", 1) in each.trainer.done


@skipping_time
async def test_run_and_data_are_served_and_nothing_of_other_runs(tmp_path: Path) -> None:
    async with bench(tmp_path) as each:
        library = each.edges.served_blobs

        def found(kind: Any, name: bytes) -> bytes | None:
            blob = library.find(BlobName(kind, name), PEER)
            return None if blob is None else blob.read(0)

        assert found("data", bytes.fromhex(piece_digest(DATA))) == DATA
        manifest = bytes.fromhex(each.run.data.manifest)
        assert found("manifest", manifest) == each.edges.fetching.dataset.manifest_bytes()
        for kind in ("data", "manifest", "tokenizer", "payload", "state"):
            assert found(kind, bytes(32)) is None


@skipping_time
async def test_a_device_without_memory_makes_the_round_fail_and_not_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(*_: object) -> None:
        raise MemoryShortError("a pass of one sequence of 64 tokens does not fit: cuda has 8,000 MB")

    async with bench(tmp_path) as each, each.running() as task:
        monkeypatch.setattr(each.trainer, "train", train)
        doing(each, ev.Train(1, 0, 1, 4))
        await until(lambda: bool(each.node.events) or task.done())
        [failed] = each.node.events
        assert isinstance(failed, ev.TrainingFailed) and "does not fit" in failed.why
