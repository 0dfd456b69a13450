"""Checkpoints while rounds go on: when the state is copied, and what waits for the disk."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from p2ptrain.config import StateConfig
from p2ptrain.core import events as ev
from p2ptrain.node import persistence
from p2ptrain.node.owner import save_now
from p2ptrain.node.replica_thread import Standing
from p2ptrain.node.served_blobs import SavedStates
from tests.helpers.core import certified
from tests.helpers.driver import STATE, DriverBench, a_manifest, bench, root_of
from tests.helpers.net import some_bytes

NEWER = some_bytes(len(STATE), 5)
GATE_SECONDS = 20.0  # a test that fails should not hang


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """A gate that holds up the disk until the test opens it."""
    opened = threading.Event()
    yield opened
    opened.set()


def stands(each: DriverBench, number: int) -> None:
    """Lets the replica have applied a round."""
    each.trainer.round = number
    each.replica.begin(Standing(number, each.genesis.branch, bytes(32), root_of(each.trainer.state)))


async def saved(each: DriverBench, number: int, *, now: bool = False) -> None:
    """Saves a checkpoint after a round, if it is due."""
    stands(each, number)
    worker, standings = each.workshop.worker, each.replica.standings
    if now:
        await each.persistence.save(worker, standings)
    else:
        await each.persistence.checkpoint(worker, standings, number)


async def begun(each: DriverBench, gate: threading.Event, number: int, *, now: bool = False) -> asyncio.Task[None]:
    """Begins a checkpoint that cannot be written, nor any later one, until the gate is open."""
    capture, has_begun = each.trainer.capture, threading.Event()

    def slow() -> Any:
        moment = capture()

        class SlowMoment(type(moment)):  # type: ignore[misc]
            def write(self, path: Path) -> None:
                has_begun.set()
                assert gate.wait(GATE_SECONDS)
                moment.write(path)

        return SlowMoment(moment.round, moment.content, moment.state)  # type: ignore[attr-defined]

    each.trainer.capture = slow  # type: ignore[method-assign]
    saving = asyncio.create_task(saved(each, number, now=now))
    assert await asyncio.to_thread(has_begun.wait, GATE_SECONDS)
    return saving


def failing(each: DriverBench, why: str, times: int = 2**62) -> list[int]:
    """Makes the trainer fail to copy its state a number of times. Returns the rounds of the attempts."""
    capture, tries = each.trainer.capture, []

    def fail() -> Any:
        tries.append(each.trainer.round)
        if len(tries) <= times:
            raise RuntimeError(why)
        return capture()

    each.trainer.capture = fail  # type: ignore[method-assign]
    return tries


def rounds_saved(each: DriverBench) -> list[int]:
    return [checkpoint.round for checkpoint in each.store.checkpoints.present()]


async def test_training_waits_for_a_copy_of_the_state_and_not_for_the_disk(
    tmp_path: Path, gate: threading.Event
) -> None:
    async with bench(tmp_path) as each:
        saving = await begun(each, gate, 4)
        await each.replica.adopt(5, bytes(32), [NEWER])  # the worker is free, and the state changes
        await each.workshop.thread.run(lambda: None)
        assert not saving.done()
        gate.set()
        await saving
        [checkpoint] = each.store.checkpoints.present()
        assert (checkpoint.round, checkpoint.root) == (4, root_of(STATE))
        assert (checkpoint.path / "state.bin").read_bytes() == STATE
        assert each.store.checkpoints.verify(checkpoint) is None


async def test_a_large_state_is_saved_whenever_peers_can_fetch_it(tmp_path: Path) -> None:
    """Its root covers all of it only now and then."""
    async with bench(tmp_path) as each:
        for most in (2**20, 2**21):
            settings = StateConfig(full_root_bytes_max=most, full_root_rounds=6)
            each.persistence = persistence.Persistence(each.store, SavedStates(), settings, 4, 100, needed=lambda: ())  # type: ignore[assignment]
            for number in range(1, 13):
                await saved(each, number)
            each.persistence.close()
        assert 2**20 < len(STATE) < 2**21
        assert rounds_saved(each) == [6, 8, 12, 4, 8, 12]


async def test_a_state_that_is_just_being_applied_is_saved_as_soon_as_it_is_noted(tmp_path: Path) -> None:
    async with bench(tmp_path) as each:
        stands(each, 4)
        each.trainer.round, capture = 5, each.trainer.capture  # its root is not computed yet

        def after_it() -> Any:
            stands(each, 5)
            return capture()

        each.trainer.capture = after_it  # type: ignore[method-assign]
        edges = SimpleNamespace(persistence=each.persistence)
        driver: Any = SimpleNamespace(edges=edges, replica=each.replica, worker=each.workshop.worker)
        assert await save_now(driver) == 5
        assert rounds_saved(each) == [5]


async def test_a_copy_of_a_state_that_was_given_up_meanwhile_is_made_again(tmp_path: Path) -> None:
    async with bench(tmp_path) as each:
        stands(each, 4)
        capture = each.trainer.capture

        def before_another_is_adopted() -> Any:
            moment, each.trainer.capture = capture(), capture  # type: ignore[method-assign]
            each.replica.standings.clear()
            stands(each, 7)
            return moment

        each.trainer.capture = before_another_is_adopted  # type: ignore[method-assign]
        assert await each.persistence.save(each.workshop.worker, each.replica.standings) == 7
        assert rounds_saved(each) == [7]


async def test_a_checkpoint_that_is_due_while_one_is_written_is_left_out_unless_it_is_the_last(
    tmp_path: Path, gate: threading.Event
) -> None:
    async with bench(tmp_path) as each:
        first = await begun(each, gate, 4)
        await saved(each, 8)  # at once
        last = asyncio.create_task(saved(each, 9, now=True))
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(first, last)
        assert rounds_saved(each) == [4, 9]


async def test_no_training_begins_while_one_waits_for_what_it_builds_on(tmp_path: Path) -> None:
    async with bench(tmp_path) as each:
        persistence = each.persistence
        with persistence.training_waits(), persistence.training_waits():
            assert not persistence.is_safe.is_set()
        assert persistence.is_safe.is_set()
        with persistence.training_waits():
            with persistence.training_waits():
                pass
            assert not persistence.is_safe.is_set()


async def test_the_first_checkpoint_is_there_when_it_is_asked_for(tmp_path: Path) -> None:
    async with bench(tmp_path) as each:
        first = Standing(0, each.genesis.branch, each.genesis.head, root_of(STATE))
        made = await each.persistence.save_first(each.workshop.worker, first)
        assert each.store.checkpoints.present() == [made]
        assert each.edges.served_blobs.states.places() == ((0, root_of(STATE)),)


async def test_without_memory_for_a_copy_there_is_no_checkpoint_and_the_node_goes_on(tmp_path: Path) -> None:
    async with bench(tmp_path) as each:
        failing(each, "can't allocate memory")
        await saved(each, 4)
        assert each.persistence.checkpoint_trouble == "not enough memory for a copy of the state"


async def test_a_mistake_in_the_trainer_is_not_taken_for_a_lack_of_memory(tmp_path: Path) -> None:
    async with bench(tmp_path) as each:
        failing(each, "shapes do not fit")
        with pytest.raises(RuntimeError, match="shapes do not fit"):
            await saved(each, 4)


async def test_orders_for_a_checkpoint_hold_one_copy_at_a_time(tmp_path: Path, gate: threading.Event) -> None:
    async with bench(tmp_path) as each:
        copies = failing(each, "never", 0)
        orders = [await begun(each, gate, 4, now=True)]
        orders += [asyncio.create_task(saved(each, 4, now=True)) for _ in range(3)]
        await asyncio.sleep(0)
        await each.workshop.thread.run(lambda: None)
        assert copies == [4]
        gate.set()
        await asyncio.gather(*orders)


async def test_rounds_do_not_run_away_from_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the kept history, a restart could not continue from it."""
    monkeypatch.setattr("p2ptrain.node.persistence.DISK_SECONDS", 0.01)
    async with bench(tmp_path) as each:
        each.persistence._history_rounds = 8
        tries = failing(each, "can't allocate memory", 3)
        await saved(each, 5)
        assert tries == [], "it is not time"
        await saved(each, 7)
        assert tries == [7] * 4
        assert rounds_saved(each) == [7]


async def test_one_round_alone_waits_for_an_overdue_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those after it prune the store, which may make the room."""
    monkeypatch.setattr("p2ptrain.node.persistence.DISK_SECONDS", 0.01)
    monkeypatch.setattr("p2ptrain.node.persistence.LAST_CHANCE", 0)
    async with bench(tmp_path) as each:
        failing(each, "can't allocate memory")
        rounds = [asyncio.create_task(saved(each, number)) for number in (7, 9)]
        done, waiting = await asyncio.wait(rounds, timeout=GATE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        assert (len(done), len(waiting)) == (1, 1)
        waiting.pop().cancel()


async def test_a_round_is_looked_for_once_what_is_being_written_is_there(tmp_path: Path, gate: threading.Event) -> None:
    async with bench(tmp_path) as each:
        saving = await begun(each, gate, 4)
        saving.cancel()  # as when the node stops; the disk goes on
        looking = asyncio.create_task(each.persistence.has(4))
        gate.set()
        assert await looking
        assert rounds_saved(each) == [4]


async def test_an_overdue_checkpoint_of_a_branch_that_was_left_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2ptrain.node.persistence.DISK_SECONDS", 0.01)
    monkeypatch.setattr("p2ptrain.node.persistence.LAST_CHANCE", 0)
    async with bench(tmp_path) as each:
        capture = each.trainer.capture

        def fail() -> Any:
            each.trainer.capture = capture  # type: ignore[method-assign]
            stands(each, 3)  # as if another state was adopted meanwhile
            raise RuntimeError("can't allocate memory")

        each.trainer.capture = fail  # type: ignore[method-assign]
        async with asyncio.timeout(GATE_SECONDS):
            await saved(each, 7)
        assert rounds_saved(each) == [3]


async def test_a_payload_that_came_after_its_round_was_decided_lasts_once_that_is_applied(tmp_path: Path) -> None:
    async with bench(tmp_path) as each:
        payload = some_bytes(1_000)
        manifest = a_manifest(each.genesis, 1, [payload])
        name = manifest.taken[0].payload
        each.persistence.put(name, payload)
        assert each.store.payloads.fleeting([name]) == [name]
        await each.persistence.let_go(manifest)
        assert (each.store.payloads.directory / name.hex()).read_bytes() == payload


async def test_what_came_for_a_round_that_was_applied_at_the_very_end_lasts_too(tmp_path: Path) -> None:
    async with bench(tmp_path) as each:
        payload = some_bytes(1_000)
        manifest = a_manifest(each.genesis, 1, [payload])
        name = manifest.taken[0].payload
        each.store.write([ev.Certified(certified(manifest, each.genesis), replace(each.genesis, round=1))])
        each.persistence.put(name, payload)
        each.persistence.close()  # before it was let go: the node has left
        assert (each.store.payloads.directory / name.hex()).read_bytes() == payload


async def test_the_room_on_the_disk_is_what_the_disk_says_and_unknown_where_it_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(tmp_path) as each:
        assert each.persistence.free_bytes is None, "nobody has looked"
        await each.persistence.look_for_room()
        disk = os.statvfs(each.store.directory)
        assert each.persistence.free_bytes == pytest.approx(disk.f_bavail * disk.f_frsize, abs=2**30)
        monkeypatch.setattr(each.store, "directory", each.store.directory / "gone")
        await each.persistence.look_for_room()
        assert each.persistence.free_bytes is None


async def test_a_disk_that_does_not_tell_its_room_holds_up_nothing_that_is_said(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network disk may be unreachable."""

    def slow(path: Path) -> SimpleNamespace:
        assert gate.wait(GATE_SECONDS)
        return SimpleNamespace(free=7)

    monkeypatch.setattr(persistence, "disk_usage", slow)
    async with bench(tmp_path) as each:
        looking = asyncio.create_task(each.persistence.look_for_room())
        await each.persistence.on_disk(int)
        assert not looking.done()
        gate.set()
        await looking
        assert each.persistence.free_bytes == 7
