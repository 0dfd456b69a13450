"""What this node keeps: contributions, checkpoints, and the one thread that writes to the store.

A checkpoint is copied in the trainer's thread, between two rounds, and written in a thread of its own.
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
from p2ptrain.learn.shortage import is_out_of_memory
from p2ptrain.learn.trainer import Capture
from p2ptrain.node.device import Device
from p2ptrain.node.served_blobs import SavedStates
from p2ptrain.store.checkpoints import Checkpoint
from p2ptrain.store.diary import Trained
from p2ptrain.store.records import Batch
from p2ptrain.store.store import Store

FRESH_SECONDS = 60.0  # until a payload that arrived is counted by the core, or is of no use
LAST_CHANCE = 0.75  # of the rounds whose history is kept, without a checkpoint
RETRY_SECONDS = 5.0  # between tries to write one then
NOT_OFFERED = "it is damaged, or its root covers only a part of it"
PRUNE_ROUNDS = 8  # between looks at what the store may forget

log = logging.getLogger("p2ptrain.daemon")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Moment:
    """What a checkpoint is made of."""

    round: int
    branch: bytes
    head: bytes
    root: bytes
    trained: int  # the number of the last training in it
    capture: Capture

    @classmethod
    def of(
        cls, device: Device, number: int, branch: bytes, head: bytes, root: bytes, is_copied: bool = True
    ) -> Moment | None:
        """In the trainer's thread, which need not copy what it waits for; None if a state was taken over meanwhile."""
        if device.trainer.round != number:
            return None
        try:
            return cls(number, branch, head, root, device.trained, device.trainer.capture(is_copied))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise DataError("there is no memory for a copy of the state") from error


class Persistence:
    """Of one node in one run."""

    def __init__(
        self,
        store: Store,
        states: SavedStates,
        checkpoint_rounds: int,
        history_rounds: int,
        needed: Callable[[], Collection[bytes]],
    ) -> None:
        """A checkpoint older than `history_rounds` leads nowhere; `needed` are the payloads that the core may still ask
        for.
        """
        self.store, self._states, self._needed = store, states, needed
        self._checkpoint_rounds, self._history_rounds = checkpoint_rounds, history_rounds
        self.fresh: dict[bytes, float] = {}  # payloads that the core may not have heard of yet, and since when
        self.records_trouble = ""  # why no history is written, as long as none is
        self.checkpoint_trouble = ""  # why the last checkpoint, or note for one, was not written
        self.free_bytes: int | None = None  # of the disk, when it was looked at last; None: it was not, or did not say
        self._saved_round = 0  # of the last that was written
        self._turn = asyncio.Lock()  # of who makes a checkpoint: there is memory for one copy
        self._disk = ThreadPoolExecutor(1, "disk")
        self._historian = ThreadPoolExecutor(1, "records")  # sqlite prunes for a second, and votes must not wait
        self._writer = ThreadPoolExecutor(1, "checkpoint")  # one of its own: gigabytes must not hold up what is said

    def close(self) -> None:
        """When what was asked for is on the disk."""
        self._writer.shutdown()
        self._historian.shutdown()
        self._disk.shutdown()

    async def on_disk(self, job: Callable[..., T], *arguments: object) -> T:
        """Do something with the store, in the one thread that writes there."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, job, *arguments)

    # -----------------------------------------------------------------------------------------------
    # Contributions

    def put(self, name: bytes, payload: bytes) -> None:
        """Hold a payload that is about to be told to the core."""
        self.fresh[name] = monotonic()
        try:
            self.store.payloads.put(name, payload)
        except DataError as error:  # an older one finds no room on the disk, and this one is in memory
            log.error("%s", error)

    async def payload(self, name: bytes) -> bytes | None:
        """If it is here; a disk that does not answer has nothing."""
        try:
            return await asyncio.to_thread(self.store.payloads.get, name)
        except DataError as error:
            log.error("%s", error)
            return None

    async def let_go(self, manifest: Manifest) -> None:
        """A round was applied. What came after it was decided lasts from now on; now and then, forget what nobody needs
        any more, all the more on a disk that is full."""
        try:
            if late := self.store.payloads.fleeting(taken.payload for taken in manifest.taken):
                await self.on_disk(self.store.payloads.keep, late)
        except DataError as error:
            log.error("%s", error)
        if manifest.round % PRUNE_ROUNDS == 0:
            now = monotonic()
            self.fresh = {payload: at for payload, at in self.fresh.items() if now - at < FRESH_SECONDS}
            known = self.store.payloads.names()  # what comes from now on, `needed` cannot name
            try:
                await self.on_disk(self.store.prune, {*self._needed(), *self.fresh}, known)
            except DataError as error:
                log.error("%s", error)

    async def note_mismatch(self, number: int) -> None:
        """A state came out wrong here. HardwareError: once too often."""
        await self.on_disk(self.store.mismatches.note, number)

    # -----------------------------------------------------------------------------------------------
    # History for people

    async def record(self, batch: Batch) -> bool:
        """Whether the disk took it. If not, it costs history and nothing else, and may be tried again."""
        return await self._note(self.store.records.write, batch)

    async def remember(self, addresses: Sequence[str], linked: Collection[str]) -> bool:
        """Addresses for the next start; peers of these ids are connected now."""
        return await self._note(self.store.records.remember, addresses, linked, time())

    async def look_for_room(self) -> None:
        """How much the disk still takes. Asked where nobody waits: a disk of the network may take minutes."""
        try:
            usage = await asyncio.get_running_loop().run_in_executor(self._historian, disk_usage, self.store.directory)
        except OSError:
            self.free_bytes = None
        else:
            self.free_bytes = usage.free  # to whoever is not root

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
        """Save the state after this round, if it is time: training waits for a copy in memory, and not for the disk.

        One that is due while another is being written is left out: there is memory for one copy, and a disk as slow
        as that does not get faster. But rounds do not run away from the last one that was saved: without it, a restart
        would have nothing to go on from. Then everything waits, until one is saved.
        """
        is_last_chance = manifest.round - self._saved_round >= LAST_CHANCE * self._history_rounds
        if is_last_chance and not now:
            await device.run(self._save_at_last, device, manifest, root)
            return
        if not now and (manifest.round % self._checkpoint_rounds or self._turn.locked()):
            return
        async with self._turn:
            try:
                moment = await device.run(Moment.of, device, manifest.round, manifest.branch, manifest.digest, root)
            except DataError as error:
                self._failed(manifest.round, error)
                return
            if moment is None:
                log.info("no checkpoint of round %d: another state was taken over", manifest.round)
            else:
                await asyncio.get_running_loop().run_in_executor(self._writer, self._try, moment)

    def _save_at_last(self, device: Device, manifest: Manifest, root: bytes) -> None:
        """In the trainer's thread, which does nothing else until it has succeeded, or the node ends."""
        while not device.is_stopping and manifest.round > self._saved_round:
            try:
                moment = Moment.of(device, manifest.round, manifest.branch, manifest.digest, root, is_copied=False)
                if moment is None or self._writer.submit(self._try, moment).result():
                    return
            except DataError as error:
                self._failed(manifest.round, error)
            sleep(RETRY_SECONDS)

    def checkpoint_first(self, device: Device, root: bytes) -> Checkpoint:
        """Of the first weights, by whoever begins the run; in the trainer's thread."""
        genesis = self.store.genesis
        moment = Moment.of(device, 0, genesis.branch, genesis.head, root, is_copied=False)
        assert moment is not None, "the trainer has them"
        return self._writer.submit(self._write, moment).result()

    async def checkpoint_adopted(self, device: Device, number: int, root: bytes) -> None:
        """Of a state that was taken over: what is trained from now on rests on it, and waits for it."""

        def save() -> None:
            try:
                moment = Moment.of(device, number, b"", b"", root, is_copied=False)
            except DataError as error:
                self._failed(number, error)
                return
            if moment is not None:
                self._writer.submit(self._try, moment).result()

        await device.run(save)

    async def note(self, trained: Trained) -> None:
        """Have a restart repeat this training. A disk that does not take it costs exactness, and no round."""
        try:
            await self.on_disk(self.store.diary.note, trained)
        except DataError as error:
            self.checkpoint_trouble = str(error)
            log.error("%s; a restart will not repeat what is trained until the next checkpoint", error)

    def _try(self, moment: Moment) -> bool:
        try:
            self._write(moment)
        except DataError as error:
            self._failed(moment.round, error)
            return False
        self.checkpoint_trouble = ""
        return True

    def _failed(self, number: int, error: DataError) -> None:
        self.checkpoint_trouble = str(error)
        log.error("no checkpoint of round %d: %s", number, error)

    def _write(self, moment: Moment) -> Checkpoint:
        capture = moment.capture
        leaves = leaves_of(capture.state, moment.root)  # none of a partial root, which proves no pieces
        checkpoint = self.store.checkpoints.write(
            moment.round, moment.branch, moment.head, moment.root, moment.trained, capture.write, capture.state, leaves
        )
        self._saved_round = moment.round
        if leaves:
            self._states.offer(checkpoint, leaves)
        return checkpoint

    def offer(self, checkpoint: Checkpoint) -> None:
        """Serve what an earlier life has saved."""
        self._saved_round = max(self._saved_round, checkpoint.round)
        try:
            leaves = checkpoint.leaves()
        except DataError as error:  # peers may have it
            log.error("%s", error)
            return
        if leaves:
            self._states.offer(checkpoint, leaves)
        else:
            log.warning("the saved state of round %d is not offered to peers: %s", checkpoint.round, NOT_OFFERED)
