"""What this node keeps: contributions, checkpoints, and the one thread that writes to the store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import TypeVar

from p2ptrain.core.manifest import Manifest
from p2ptrain.daemon.device import Device
from p2ptrain.daemon.library import Library, leaves_of, read_state
from p2ptrain.errors import DataError
from p2ptrain.store.checkpoints import Checkpoint
from p2ptrain.store.diary import Trained
from p2ptrain.store.store import Store

FRESH_SECONDS = 60.0  # until a payload that arrived is counted by the core, or is of no use
PRUNE_ROUNDS = 8  # between looks at what the store may forget

log = logging.getLogger("p2ptrain.daemon")
T = TypeVar("T")


class Keeping:
    """Of one node in one run."""

    def __init__(
        self, store: Store, library: Library, checkpoint_rounds: int, needed: Callable[[], Collection[bytes]]
    ) -> None:
        """`needed` are the payloads that the core may still ask for."""
        self.store, self.library, self.checkpoint_rounds, self._needed = store, library, checkpoint_rounds, needed
        self.fresh: dict[bytes, float] = {}  # payloads that the core may not have heard of yet, and since when
        self._disk = ThreadPoolExecutor(1, "disk")

    def close(self) -> None:
        """When what was asked for is on the disk."""
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
        """Now and then, forget what nobody needs any more."""
        if manifest.round % PRUNE_ROUNDS == 0:
            try:
                now = monotonic()
                self.fresh = {payload: at for payload, at in self.fresh.items() if now - at < FRESH_SECONDS}
                known = self.store.payloads.in_memory()  # what comes from now on, `needed` cannot name
                await self.on_disk(self.store.prune, {*self._needed(), *self.fresh}, known)
            except DataError as error:
                log.error("%s", error)

    # -----------------------------------------------------------------------------------------------
    # Checkpoints

    async def checkpoint(self, device: Device, manifest: Manifest, root: bytes, *, now: bool = False) -> None:
        """Save the state after this round, if it is time; the next training waits for it."""
        if not now and manifest.round % self.checkpoint_rounds:
            return
        await device.run(self._save, device, manifest.round, manifest.branch, manifest.digest, root)

    def checkpoint_first(self, device: Device, state: bytes, root: bytes) -> Checkpoint:
        """Of the first weights, by whoever begins the run."""
        return self._write(device, 0, self.store.genesis.branch, self.store.genesis.head, root, state)

    async def checkpoint_adopted(self, device: Device, number: int, root: bytes) -> None:
        """Of a state that was taken over: what is trained from now on rests on it."""
        await device.run(self._save, device, number, b"", b"", root)

    async def note(self, trained: Trained) -> None:
        """Have a restart repeat this training. A disk that does not take it costs exactness, and no round."""
        try:
            await self.on_disk(self.store.diary.note, trained)
        except DataError as error:
            log.error("%s; a restart will not repeat what is trained until the next checkpoint", error)

    def _save(self, device: Device, number: int, branch: bytes, head: bytes, root: bytes) -> None:
        if device.trainer.round != number:
            return  # a state was taken over meanwhile
        try:
            self._write(device, number, branch, head, root, device.trainer.state_bytes())
        except DataError as error:
            log.error("no checkpoint of round %d: %s", number, error)

    def _write(self, device: Device, number: int, branch: bytes, head: bytes, root: bytes, state: bytes) -> Checkpoint:
        checkpoint = self.store.checkpoints.write(
            number, branch, head, root, device.trained, device.trainer.save, state
        )
        if leaves := leaves_of(state, root):  # a partial root proves no pieces
            self.library.offer_state(checkpoint, leaves)
        return checkpoint

    def offer(self, checkpoint: Checkpoint) -> None:
        """Serve what an earlier life has saved."""
        if found := read_state(checkpoint):
            self.library.offer_state(checkpoint, found[1])
