"""Writes contributions, history and checkpoints to the store, each kind in its own thread, and the log of events.

A checkpoint is copied in the worker's thread, between two trainings, and written in another, so that training does not
wait for the disk. It is made every `storage.checkpoint_every_rounds`, at the end, and of a state that was taken over,
because the diary goes on from there; one that is due while another is being written is left out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import disk_usage
from time import monotonic
from typing import BinaryIO, TypeVar

import msgspec

from p2ptrain.config import StateConfig
from p2ptrain.core import events as ev
from p2ptrain.core.manifest import Manifest
from p2ptrain.digest import leaves_of
from p2ptrain.errors import DataError
from p2ptrain.node.replica_thread import Standing
from p2ptrain.node.served_blobs import SavedStates
from p2ptrain.node.work import Worker
from p2ptrain.replay import EventLog, Header, NotingSigner
from p2ptrain.store.checkpoints import Checkpoint
from p2ptrain.store.diary import Trained
from p2ptrain.store.records import Batch
from p2ptrain.store.store import Store
from p2ptrain.train.saved_state import Capture

DISK_SECONDS = 5.0  # between attempts to write to a failing disk, or to fetch what it has lost
FRESH_SECONDS = 60.0  # by then the core has counted a payload that arrived, or does not need it
LAST_CHANCE = 0.75  # share of the kept history that may pass without a checkpoint before training waits for one
NOT_OFFERED = "it is damaged, or its root covers only a part of it"
EVENTS_BYTES_MAX = 2**24  # of a file of events, and one event more; 1,400 rounds of a small swarm
EVENT_FILES_KEPT = 12  # 192 MiB
PRUNE_ROUNDS = 8  # between prunings of the store

log = logging.getLogger("p2ptrain.node")
T = TypeVar("T")

Standings = Mapping[int, Standing]  # by round


class Persistence:
    """Writes to the store on behalf of the driver, without blocking the event loop."""

    def __init__(
        self,
        store: Store,
        states: SavedStates,
        state: StateConfig,
        checkpoint_rounds: int,
        history_rounds: int,
        needed: Callable[[], Collection[bytes]],
        forget_before: Callable[[], bool] = lambda: True,
    ) -> None:
        """A checkpoint older than `history_rounds` is useless; `needed` returns the payloads that the core may still
        ask for; `forget_before` removes what earlier runs have saved, and is called until it returns True."""
        self.store, self._states, self._needed = store, states, needed
        self._forget_before: Callable[[], bool] | None = forget_before
        self._checkpoint_rounds, self._history_rounds, self._state = checkpoint_rounds, history_rounds, state
        self.fresh: dict[bytes, float] = {}  # payloads that the core may not know of yet, and when they arrived
        self.records_trouble = ""  # the error, while records cannot be written
        self.checkpoint_trouble = ""  # why the last checkpoint or diary entry was not written
        self.free_bytes: int | None = None  # on the disk, at the last check; None: unknown
        self._saved_round = 0  # the round of the last checkpoint
        self._turn = asyncio.Lock()  # one checkpoint at a time: there is memory for one copy
        self.is_safe = asyncio.Event()  # a training may begin
        self.is_safe.set()
        self._holding = 0  # who has training wait
        self._disk = ThreadPoolExecutor(1, "disk")
        self._historian = ThreadPoolExecutor(1, "records")  # sqlite may prune for a second; votes must not wait
        self._writer = ThreadPoolExecutor(1, "checkpoint")  # votes must not wait for gigabytes

    def close(self) -> None:
        """Waits until everything handed in is on the disk, and ends the threads."""
        for each in (self._writer, self._historian, self._disk):
            each.shutdown()
        with suppress(DataError):  # what came late for rounds that were applied just before the end
            self.store.payloads.keep(self.store.payloads.fleeting(self.store.journal.payloads()))

    async def on_disk(self, job: Callable[..., T], *arguments: object) -> T:
        """Runs a job in the one thread that writes to the store."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, job, *arguments)

    # -- Contributions ------------------------------------------------------------------------------

    def put(self, name: bytes, payload: bytes) -> None:
        """Stores a payload that the core is about to be told of."""
        self.fresh[name] = monotonic()
        try:
            self.store.payloads.put(name, payload)
        except DataError as error:  # spilling an older one failed; this one is in memory
            log.error("%s", error)

    async def payload(self, name: bytes) -> bytes | None:
        """Returns a payload; None if it is not here or cannot be read."""
        try:
            return await asyncio.to_thread(self.store.payloads.get, name)
        except DataError as error:
            log.error("%s", error)
            return None

    async def let_go(self, manifest: Manifest) -> None:
        """After a round was applied, writes its late payloads; every few rounds, prunes, even if the disk is full."""
        try:
            if late := self.store.payloads.fleeting(taken.payload for taken in manifest.taken):
                await self.on_disk(self.store.payloads.keep, late)
        except DataError as error:
            log.error("%s", error)
        if manifest.round % PRUNE_ROUNDS == 0:
            now = monotonic()
            self.fresh = {payload: at for payload, at in self.fresh.items() if now - at < FRESH_SECONDS}
            known = self.store.payloads.names()  # `needed` cannot name payloads that arrive from now on
            try:
                await self.on_disk(self.store.prune, {*self._needed(), *self.fresh}, known, self._states.fetched())
                if self._forget_before is not None and await self.on_disk(self._forget_before):
                    self._forget_before = None
            except DataError as error:
                log.error("%s", error)

    # -- History for people -------------------------------------------------------------------------

    async def record(self, batch: Batch) -> bool:
        """Writes records; False if that failed. Only history is lost then, and the caller may try again."""
        return await self._note(self.store.records.write, batch)

    async def remember(self, addresses: Sequence[str]) -> bool:
        return await self._note(self.store.records.remember, addresses)

    async def look_for_room(self) -> None:
        """Updates `free_bytes`. Runs in the records' thread, since a network disk may take minutes to answer."""
        try:
            usage = await asyncio.get_running_loop().run_in_executor(self._historian, disk_usage, self.store.directory)
        except OSError:
            self.free_bytes = None
        else:
            self.free_bytes = usage.free  # for users other than root

    async def _note(self, job: Callable[..., None], *arguments: object) -> bool:
        try:
            await asyncio.get_running_loop().run_in_executor(self._historian, job, *arguments)
        except DataError as error:
            self.records_trouble = str(error)
            return False
        self.records_trouble = ""
        return True

    # -- Checkpoints --------------------------------------------------------------------------------

    async def checkpoint(self, worker: Worker, standings: Standings, number: int) -> None:
        """Saves the state if one is due after this round. Training waits for the copy in memory, not for the disk.

        A checkpoint that is due while another is being written is skipped: there is memory for one copy only. But if a
        restart would soon find none within the kept history, training waits until one is saved."""
        is_due = not number % self._checkpoint_rounds
        to_whole = -number % self._state.full_root_rounds
        if worker.replica.state_bytes > self._state.full_root_bytes_max and to_whole < self._checkpoint_rounds:
            is_due = not to_whole  # its root seldom covers all of it, and the disk must not be busy when it does
        if not self._holding and number - self._saved_round >= LAST_CHANCE * self._history_rounds:
            with self.training_waits():
                while not worker.is_stopping and await self.save(worker, standings) is None:  # noqa: ASYNC110
                    await asyncio.sleep(DISK_SECONDS)
        elif is_due and not self._turn.locked():
            await self.save(worker, standings)

    @contextmanager
    def training_waits(self) -> Iterator[None]:
        """Lets no training begin inside the block."""
        self._holding += 1
        self.is_safe.clear()
        try:
            yield
        finally:
            self._holding -= 1
            if not self._holding:
                self.is_safe.set()

    async def save(self, worker: Worker, standings: Standings) -> int | None:
        """Saves the state that the replica has now. Returns its round; None if that failed."""
        async with self._turn:
            standing, loop = None, asyncio.get_running_loop()
            while standing is None:  # another state may be adopted as soon as a copy is made
                try:
                    capture = await worker.capture()
                except DataError as error:
                    self._failed(worker.replica.round, error)
                    return None
                standing = standings.get(capture.round)
            return capture.round if await loop.run_in_executor(self._writer, self._try, capture, standing) else None

    async def has(self, number: int) -> bool:
        """Whether a round is saved, once what is being written is."""
        there = await asyncio.get_running_loop().run_in_executor(self._writer, self.store.checkpoints.present)
        return any(each.round == number for each in there)

    async def save_first(self, worker: Worker, standing: Standing) -> Checkpoint:
        """Saves the first weights, on the node that starts the run."""
        capture = await worker.capture()
        return await asyncio.get_running_loop().run_in_executor(self._writer, self._write, capture, standing)

    async def note(self, trained: Trained) -> None:
        """Notes a training so that a restart can repeat it. If that fails, a restart is only inexact."""
        try:
            await self.on_disk(self.store.diary.note, trained)
        except DataError as error:
            self.checkpoint_trouble = str(error)
            log.error("%s; a restart before the next checkpoint will not repeat this training", error)

    def _try(self, capture: Capture, standing: Standing) -> bool:
        try:
            self._write(capture, standing)
        except DataError as error:
            self._failed(standing.round, error)
            return False
        self.checkpoint_trouble = ""
        return True

    def _failed(self, number: int, error: DataError) -> None:
        self.checkpoint_trouble = str(error)
        log.error("could not save the checkpoint of round %d: %s", number, error)

    def _write(self, capture: Capture, standing: Standing) -> Checkpoint:
        leaves = leaves_of(capture.state, standing.root)  # none if the root is partial and proves no pieces
        checkpoint = self.store.checkpoints.write(
            standing.round, standing.branch, standing.head, standing.root, capture.trained, capture.write,
            capture.state, leaves,
        )  # fmt: skip
        self._saved_round = standing.round
        if leaves:
            self._states.offer(checkpoint, leaves)
        return checkpoint

    def offer(self, checkpoint: Checkpoint) -> None:
        """Serves a checkpoint that was saved before this start."""
        self._saved_round = max(self._saved_round, checkpoint.round)
        try:
            leaves = checkpoint.leaves()
        except DataError as error:  # peers may have a good copy
            log.error("%s", error)
            return
        if leaves:
            self._states.offer(checkpoint, leaves)
        else:
            log.warning("the saved state of round %d is not offered to peers: %s", checkpoint.round, NOT_OFFERED)


class EventFile:
    """Records the daemon's events for `p2ptrain replay`; `round_now` tells where a file begins.

    Each start writes a new file, and goes on in another one when it is full; of all files the newest are kept, so that
    nobody can end the log by making the node hear much. One that cannot be written is closed with a warning."""

    def __init__(
        self, directory: Path, signer: NotingSigner, header: Header, round_now: Callable[[], int] = lambda: 0
    ) -> None:
        self._directory, self._signer, self._header, self._round_now = directory, signer, header, round_now
        self._file: BinaryIO | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._begin(header)
        except OSError as error:
            self._give_up(error)

    def _begin(self, header: Header) -> None:
        """Begins the next file, and removes the oldest."""
        self.close()
        names = sorted(self._directory.glob("*.jsonl"))
        for old in names[: max(0, len(names) - EVENT_FILES_KEPT + 1)]:
            old.unlink()
        number = int(names[-1].stem) + 1 if names and names[-1].stem.isdigit() else 1
        self.path = self._directory / f"{number:08d}.jsonl"
        self._file = self.path.open("wb", buffering=0)  # a hung node that gets killed must leave its last events
        EventLog(self._file).begin(header)
        self._header = header

    def note(self, now: float, event: ev.Event, effects: Sequence[ev.Effect] | None) -> None:
        """Records an event after the core has handled it; `effects` is None if the core crashed on it."""
        made = self._signer.take()
        if self._file is None:
            return
        try:
            EventLog(self._file).note(now, event, effects, made)
            if self._file.tell() > EVENTS_BYTES_MAX:
                self._begin(msgspec.structs.replace(self._header, part=self._header.part + 1, round=self._round_now()))
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _give_up(self, error: OSError) -> None:
        log.warning("cannot write the event log: %s", error)
        self.close()
