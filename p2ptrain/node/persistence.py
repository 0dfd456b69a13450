"""Writes contributions, history and checkpoints to the store, each kind in its own thread.

A checkpoint is copied in the trainer's thread, between two rounds, and written in another, so that training does not
wait for the disk.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from shutil import disk_usage
from time import monotonic, sleep, time
from typing import TypeVar

from p2ptrain.core.manifest import Manifest
from p2ptrain.digest import leaves_of
from p2ptrain.errors import DataError
from p2ptrain.exact.shortage import is_out_of_memory
from p2ptrain.node.device import Device
from p2ptrain.node.served_blobs import SavedStates
from p2ptrain.store.checkpoints import Checkpoint
from p2ptrain.store.diary import Trained
from p2ptrain.store.records import Batch
from p2ptrain.store.store import Store
from p2ptrain.train.saved_state import Capture

FRESH_SECONDS = 60.0  # by then the core has counted a payload that arrived, or does not need it
LAST_CHANCE = 0.75  # share of the kept history that may pass without a checkpoint before training waits for one
RETRY_SECONDS = 5.0  # between attempts to write it then
NOT_OFFERED = "it is damaged, or its root covers only a part of it"
PRUNE_ROUNDS = 8  # between prunings of the store

log = logging.getLogger("p2ptrain.node")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CheckpointDraft:
    """The contents of a checkpoint that is about to be written."""

    round: int
    branch: bytes
    head: bytes
    root: bytes
    trained: int  # the number of the last training in it
    capture: Capture

    @classmethod
    def of(
        cls, device: Device, number: int, branch: bytes, head: bytes, root: bytes, is_copied: bool = True
    ) -> CheckpointDraft | None:
        """Captures the state after a round; None if another state has been adopted. Runs in the trainer's thread.

        A copy is not needed if that thread waits until the checkpoint is written.
        """
        if device.trainer.round != number:
            return None
        try:
            return cls(number, branch, head, root, device.trained, device.trainer.capture(is_copied))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise DataError("not enough memory for a copy of the state") from error


class Persistence:
    """Writes to the store on behalf of the driver, without blocking the event loop."""

    def __init__(
        self,
        store: Store,
        states: SavedStates,
        checkpoint_rounds: int,
        history_rounds: int,
        needed: Callable[[], Collection[bytes]],
    ) -> None:
        """A checkpoint older than `history_rounds` is useless; `needed` returns the payloads that the core may still
        ask for.
        """
        self.store, self._states, self._needed = store, states, needed
        self._checkpoint_rounds, self._history_rounds = checkpoint_rounds, history_rounds
        self.fresh: dict[bytes, float] = {}  # payloads that the core may not know of yet, and when they arrived
        self.records_trouble = ""  # the error, while records cannot be written
        self.checkpoint_trouble = ""  # why the last checkpoint or diary entry was not written
        self.free_bytes: int | None = None  # on the disk, at the last check; None: unknown
        self._saved_round = 0  # the round of the last checkpoint
        self._turn = asyncio.Lock()  # one checkpoint at a time: there is memory for one copy
        self._disk = ThreadPoolExecutor(1, "disk")
        self._historian = ThreadPoolExecutor(1, "records")  # sqlite may prune for a second; votes must not wait
        self._writer = ThreadPoolExecutor(1, "checkpoint")  # votes must not wait for gigabytes

    def close(self) -> None:
        """Waits until everything handed in is on the disk, and ends the threads."""
        self._writer.shutdown()
        self._historian.shutdown()
        self._disk.shutdown()

    async def on_disk(self, job: Callable[..., T], *arguments: object) -> T:
        """Runs a job in the one thread that writes to the store."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, job, *arguments)

    # -----------------------------------------------------------------------------------------------
    # Contributions

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
        """After a round was applied, writes out those of its payloads that arrived late; every few rounds, prunes the
        store, even if the disk is full."""
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
                await self.on_disk(self.store.prune, {*self._needed(), *self.fresh}, known)
            except DataError as error:
                log.error("%s", error)

    async def note_mismatch(self, number: int) -> None:
        """Notes that this node computed a wrong state. Raises HardwareError if that has happened too often."""
        await self.on_disk(self.store.mismatches.note, number)

    # -----------------------------------------------------------------------------------------------
    # History for people

    async def record(self, batch: Batch) -> bool:
        """Writes records; False if that failed. Only history is lost then, and the caller may try again."""
        return await self._note(self.store.records.write, batch)

    async def remember(self, addresses: Sequence[str], linked: Collection[str]) -> bool:
        """Stores addresses for the next start; `linked` are the ids of the peers connected now."""
        return await self._note(self.store.records.remember, addresses, linked, time())

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

    # -----------------------------------------------------------------------------------------------
    # Checkpoints

    async def checkpoint(self, device: Device, manifest: Manifest, root: bytes, *, now: bool = False) -> None:
        """Saves the state after this round if one is due. Training waits for the copy in memory, not for the disk.

        A checkpoint that is due while another is being written is skipped: there is memory for one copy only. But if
        the last checkpoint is about to become older than the kept history, training waits until one is saved: without
        it, a restart would have nothing to go on from.
        """
        is_last_chance = manifest.round - self._saved_round >= LAST_CHANCE * self._history_rounds
        if is_last_chance and not now:
            await device.run(self._save_at_last, device, manifest, root)
            return
        if not now and (manifest.round % self._checkpoint_rounds or self._turn.locked()):
            return
        async with self._turn:
            try:
                draft = await device.run(
                    CheckpointDraft.of, device, manifest.round, manifest.branch, manifest.digest, root
                )
            except DataError as error:
                self._failed(manifest.round, error)
                return
            if draft is None:
                log.info("no checkpoint of round %d: another state was adopted", manifest.round)
            else:
                await asyncio.get_running_loop().run_in_executor(self._writer, self._try, draft)

    def _save_at_last(self, device: Device, manifest: Manifest, root: bytes) -> None:
        """Blocks the trainer's thread until the checkpoint is written or the node ends."""
        while not device.is_stopping and manifest.round > self._saved_round:
            try:
                draft = CheckpointDraft.of(
                    device, manifest.round, manifest.branch, manifest.digest, root, is_copied=False
                )
                if draft is None or self._writer.submit(self._try, draft).result():
                    return
            except DataError as error:
                self._failed(manifest.round, error)
            sleep(RETRY_SECONDS)

    def checkpoint_first(self, device: Device, root: bytes) -> Checkpoint:
        """Saves the first weights, on the node that starts the run. Runs in the trainer's thread."""
        genesis = self.store.genesis
        draft = CheckpointDraft.of(device, 0, genesis.branch, genesis.head, root, is_copied=False)
        assert draft is not None, "the trainer has them"
        return self._writer.submit(self._write, draft).result()

    async def checkpoint_adopted(self, device: Device, number: int, root: bytes) -> None:
        """Saves a state that was adopted. Training waits for it, since it builds on it."""

        def save() -> None:
            try:
                draft = CheckpointDraft.of(device, number, b"", b"", root, is_copied=False)
            except DataError as error:
                self._failed(number, error)
                return
            if draft is not None:
                self._writer.submit(self._try, draft).result()

        await device.run(save)

    async def note(self, trained: Trained) -> None:
        """Notes a training so that a restart can repeat it. If that fails, a restart is only inexact."""
        try:
            await self.on_disk(self.store.diary.note, trained)
        except DataError as error:
            self.checkpoint_trouble = str(error)
            log.error("%s; a restart before the next checkpoint will not repeat this training", error)

    def _try(self, draft: CheckpointDraft) -> bool:
        try:
            self._write(draft)
        except DataError as error:
            self._failed(draft.round, error)
            return False
        self.checkpoint_trouble = ""
        return True

    def _failed(self, number: int, error: DataError) -> None:
        self.checkpoint_trouble = str(error)
        log.error("could not save the checkpoint of round %d: %s", number, error)

    def _write(self, draft: CheckpointDraft) -> Checkpoint:
        capture = draft.capture
        leaves = leaves_of(capture.state, draft.root)  # none if the root is partial and proves no pieces
        checkpoint = self.store.checkpoints.write(
            draft.round, draft.branch, draft.head, draft.root, draft.trained, capture.write, capture.state, leaves
        )
        self._saved_round = draft.round
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
