"""The edges of one daemon in one run, wired together: what is served to peers, and what is fetched from them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TypeVar

from p2ptrain.config import RunConfig
from p2ptrain.core.manifest import Manifest
from p2ptrain.daemon.device import Device
from p2ptrain.daemon.library import Library, leaves_of, read_state
from p2ptrain.digest import PIECE_BYTES
from p2ptrain.errors import DataError, RemoteProtocolError
from p2ptrain.learn.assignment import Positions
from p2ptrain.learn.data import MANIFEST_BYTES_MAX, TokenDataset, manifest_digest, piece_digest, store_manifest
from p2ptrain.learn.tokenizer import TOKENIZER_BYTES_MAX, tokenizer_digest
from p2ptrain.net import inquiry
from p2ptrain.net.blobs import BlobName
from p2ptrain.net.bulk import FetchError
from p2ptrain.net.connections import Connections, topic_of
from p2ptrain.net.fetch import Fetcher
from p2ptrain.net.line import Lines
from p2ptrain.net.transport import Transport, TransportError
from p2ptrain.store.checkpoints import Checkpoint
from p2ptrain.store.store import Store

PIECES_AT_ONCE = 4  # of training data
DATA_SOURCES = 8  # peers that are asked for a piece
FRESH_SECONDS = 60.0  # until a payload that arrived is counted by the core, or is of no use
PRUNE_ROUNDS = 8  # between looks at what the store may forget

log = logging.getLogger("p2ptrain.daemon")
T = TypeVar("T")


@dataclass(slots=True)
class Edges:
    """Of one daemon."""

    run: RunConfig
    run_id: bytes
    transport: Transport
    store: Store
    dataset: TokenDataset
    library: Library
    lines: Lines
    fetcher: Fetcher
    connections: Connections
    checkpoint_rounds: int
    needed: Callable[[], Collection[bytes]]  # payloads that the core may still ask for
    fresh: dict[bytes, float] = field(default_factory=dict)  # payloads that the core may not have heard of yet
    disk: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "disk"))

    async def publish(self, envelope: bytes) -> None:
        await self.transport.publish(topic_of(self.run_id), envelope)

    # -----------------------------------------------------------------------------------------------
    # Training data

    async def fetch_data(self, positions: Positions) -> None:
        """Have all pieces that these sequences need."""
        missing = await asyncio.to_thread(self.dataset.missing, positions, self.run.model.sequence_length)
        places = asyncio.Semaphore(PIECES_AT_ONCE)

        async def fetch(piece: bytes) -> None:
            async with places:
                await self._fetch_piece(piece)

        try:
            async with asyncio.TaskGroup() as group:
                for piece in missing:
                    group.create_task(fetch(piece))
        except* DataError as errors:
            raise DataError(str(errors.exceptions[0])) from errors

    async def _fetch_piece(self, piece: bytes) -> None:
        """As long as it takes: without its data a node cannot train, and peers come and go."""
        wait = 0.5
        while True:
            sources = list(self.connections.linked)
            self.connections.rng.shuffle(sources)

            def check(data: bytes) -> bool:
                return piece_digest(data) == piece.hex()

            try:
                name = BlobName("data", piece)
                sink = await self.fetcher.fetch(name, PIECE_BYTES, sources[:DATA_SOURCES], check=check, failed=ignore)
            except FetchError as error:
                log.debug("%s; trying again", error)
                await asyncio.sleep(wait)
                wait = min(2 * wait, 10.0)
                continue
            await asyncio.to_thread(self.dataset.add_piece, piece, sink.data())
            return

    # -----------------------------------------------------------------------------------------------
    # States

    async def fetch_state(
        self, roots: Sequence[tuple[int, bytes]], sources: Sequence[bytes], size: int
    ) -> tuple[int, bytes, bytes]:
        """The newest of these states that somebody has: round, root and bytes."""
        wanted = {root: number for number, root in roots}
        holders: dict[bytes, list[bytes]] = {}
        answers = await asyncio.gather(*(self._states_of(source) for source in sources))
        for source, states in zip(sources, answers, strict=True):
            for _, root in states:
                if root in wanted:
                    holders.setdefault(root, []).append(source)
        mine = {root for root in wanted if self.library.state(root)}
        for root in sorted(mine | holders.keys(), key=lambda root: -wanted[root]):
            checkpoint = self.library.state(root)
            found = await asyncio.to_thread(read_state, checkpoint) if checkpoint else None
            state = found and found[0]
            if state is None and root in holders:
                try:
                    sink = await self.fetcher.fetch(BlobName("state", root), size, holders[root], failed=ignore)
                except FetchError as error:  # whoever told of it may lie: others may have an older one
                    log.info("%s", error)
                    continue
                state = sink.data()
            if state is not None:
                return wanted[root], root, state
        raise DataError(f"none of {len(sources)} peers has a state of the {len(roots)} that would do")

    async def _states_of(self, source: bytes) -> tuple[tuple[int, bytes], ...]:
        try:
            return await inquiry.ask_states(self.transport, source, self.run_id)
        except (TransportError, RemoteProtocolError):
            return ()

    async def keep_checkpoint(self, device: Device, manifest: Manifest, root: bytes, *, now: bool = False) -> None:
        """Save the state after this round, if it is time; the next training waits for it."""
        if not now and manifest.round % self.checkpoint_rounds:
            return
        await device.run(self._save, device, manifest.round, manifest.branch, manifest.digest, root)

    def save_first(self, device: Device, state: bytes, root: bytes) -> Checkpoint:
        return self._write(device, 0, self.run_id, self.run_id, root, state)

    def _save(self, device: Device, number: int, branch: bytes, head: bytes, root: bytes) -> None:
        if device.trainer.round != number:
            return  # a state was taken over meanwhile
        try:
            self._write(device, number, branch, head, root, device.trainer.state_bytes())
        except DataError as error:
            log.error("no checkpoint of round %d: %s", number, error)

    def _write(self, device: Device, number: int, branch: bytes, head: bytes, root: bytes, state: bytes) -> Checkpoint:
        checkpoint = self.store.checkpoints.write(number, branch, head, root, device.trainer.save, state)
        if leaves := leaves_of(state, root):  # a partial root proves no pieces
            self.library.offer_state(checkpoint, leaves)
        return checkpoint

    def offer(self, checkpoint: Checkpoint) -> None:
        """Serve what an earlier life has saved."""
        if found := read_state(checkpoint):
            self.library.offer_state(checkpoint, found[1])

    async def on_disk(self, job: Callable[..., T], *arguments: object) -> T:
        """Do something with the store, in the one thread that writes there."""
        return await asyncio.get_running_loop().run_in_executor(self.disk, job, *arguments)

    def put(self, payload: bytes, content: bytes) -> None:
        """Hold a payload that is about to be told to the core."""
        self.fresh[payload] = monotonic()
        try:
            self.store.payloads.put(payload, content)
        except DataError as error:  # an older one finds no room on the disk, and this one is in memory
            log.error("%s", error)

    async def let_go(self, manifest: Manifest) -> None:
        """Now and then, forget what nobody needs any more."""
        if manifest.round % PRUNE_ROUNDS == 0:
            try:
                now = monotonic()
                self.fresh = {payload: at for payload, at in self.fresh.items() if now - at < FRESH_SECONDS}
                known = self.store.payloads.in_memory()  # what comes from now on, `needed` cannot name
                await self.on_disk(self.store.prune, {*self.needed(), *self.fresh}, known)
            except DataError as error:
                log.error("%s", error)


def ignore(peer: bytes, why: str) -> None:
    log.debug("%s: %s", peer.hex()[:16], why)


async def fetch_manifest(fetcher: Fetcher, run: RunConfig, directory: Path, sources: Sequence[bytes]) -> TokenDataset:
    """The data set's list of pieces, from peers; the pieces come when they are needed."""
    name = BlobName("manifest", bytes.fromhex(run.data.manifest))

    def check(data: bytes) -> bool:
        return manifest_digest(data) == run.data.manifest

    sink = await fetcher.fetch(name, MANIFEST_BYTES_MAX, sources, check=check, failed=ignore)
    return await asyncio.to_thread(store_manifest, directory, sink.data(), run.data.manifest)


async def fetch_tokenizer(fetcher: Fetcher, run: RunConfig, dataset: TokenDataset, sources: Sequence[bytes]) -> None:
    """The tokenizer's file, if the run has one: text is read and written with it."""
    name = BlobName("tokenizer", bytes.fromhex(run.tokenizer.digest))

    def check(data: bytes) -> bool:
        return tokenizer_digest(data) == run.tokenizer.digest

    sink = await fetcher.fetch(name, TOKENIZER_BYTES_MAX, sources, check=check, failed=ignore)
    await asyncio.to_thread(dataset.store_tokenizer, sink.data())
