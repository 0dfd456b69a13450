"""Fetches contributions, training data, states, frozen weights and data sets' manifests and tokenizers from peers.

Everything is checked against its digest: the fetcher checks payloads and states piece by piece as they arrive; the
other kinds are checked here as a whole. An interrupted fetch of a state goes on where it was."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from p2ptrain.config import RunConfig
from p2ptrain.data.assignment import Positions
from p2ptrain.data.dataset import MANIFEST_BYTES_MAX, TokenDataset, manifest_digest, piece_digest
from p2ptrain.data.tokenizer import TOKENIZER_BYTES_MAX, tokenizer_digest
from p2ptrain.digest import PIECE_BYTES
from p2ptrain.errors import DataError, RemoteProtocolError
from p2ptrain.files import entries, forget, make_directory
from p2ptrain.models.adapters import base_file
from p2ptrain.net import questions
from p2ptrain.net.blobs.blob import Blob, BlobName, FileSink, verified
from p2ptrain.net.blobs.fetch import Fetcher
from p2ptrain.net.blobs.server import FetchError
from p2ptrain.net.blobs.swarm_fetch import Failed
from p2ptrain.net.connections import Connections
from p2ptrain.net.tasks import pauses
from p2ptrain.net.transport import Transport, TransportError
from p2ptrain.node.served_blobs import SavedStates

PIECES_AT_ONCE = 4  # of training data
DATA_SOURCES = 64  # peers asked for a piece: usually all, so that those that failed lately get a turn, too
WAIT_SECONDS, WAIT_SECONDS_MAX = 0.5, 10.0  # between attempts to fetch a piece of training data
LATE_SECONDS = 60.0  # for which a peer that failed to send a piece is asked last
LATE_TIMES = 30.0  # or this many times as long as it took: a silent peer costs us 20 s per ten minutes, not each time
LATE_MAX = 1_024  # such peers remembered; the oldest are forgotten

log = logging.getLogger("p2ptrain.node")


@dataclass(slots=True)
class Fetching:
    """Fetches blobs of a run for this node, and remembers which peers have failed lately."""

    run: RunConfig
    transport: Transport
    connections: Connections
    fetcher: Fetcher
    dataset: TokenDataset
    states: SavedStates
    directory: Path  # for states that are being fetched
    blame: Callable[[bytes, str], None]
    late: dict[bytes, float] = field(default_factory=dict)  # peers asked last for training data, and until when

    async def payload(self, name: bytes, size: int, sources: Sequence[bytes], failed: Failed) -> bytes:
        """Fetches a contribution. Raises FetchError if none of the sources has it."""
        blob = BlobName("payload", name)
        return (await self.fetcher.fetch(blob, size, sources, failed=failed)).data()

    async def data(self, positions: Positions) -> None:
        """Fetches all missing pieces of training data that these sequences need; they stay until the next call."""
        await self._pieces(await asyncio.to_thread(self.dataset.need, positions, self.run.model.sequence_length))

    async def ahead(self, positions: Positions, goes_on: Callable[[], bool]) -> None:
        """Fetches what fits of a later training's data, as long as `goes_on` says so."""
        length = self.run.model.sequence_length
        await self._pieces(await asyncio.to_thread(self.dataset.expect, positions, length), goes_on)

    async def held_out(self, sequences: int) -> None:
        length = self.run.model.sequence_length
        await self._pieces(await asyncio.to_thread(self.dataset.need_held_out, sequences, length))

    async def _pieces(self, missing: Sequence[bytes], goes_on: Callable[[], bool] = lambda: True) -> None:
        places = asyncio.Semaphore(PIECES_AT_ONCE)

        async def fetch(piece: bytes) -> None:
            async with places:
                if goes_on():
                    await self._data_piece(piece)

        try:
            async with asyncio.TaskGroup() as group:
                for piece in missing:
                    group.create_task(fetch(piece))
        except ExceptionGroup as errors:  # within `except*` Python 3.11.2 wraps again what is raised
            if (bad := errors.subgroup(DataError)) is None:
                raise
            raise DataError(str(bad.exceptions[0])) from errors

    async def _data_piece(self, piece: bytes) -> None:
        """Fetches one piece, however long it takes: without its data a node cannot train, and peers come and go."""
        loop = asyncio.get_running_loop()
        asked_at = loop.time()

        def failed(peer: bytes, why: str) -> None:
            nonlocal asked_at
            now = loop.time()
            self._put_last(peer, now + max(LATE_SECONDS, LATE_TIMES * (now - asked_at)))
            asked_at = now
            ignore(peer, why)

        for wait in pauses(WAIT_SECONDS, WAIT_SECONDS_MAX):
            asked_at = loop.time()
            try:
                with self.transport.boundary.guard("the fetch of data"):
                    sources = self.data_sources()
                    name = BlobName("data", piece)
                    sink = await self.fetcher.fetch(
                        name, PIECE_BYTES, sources, check=lambda data: piece_digest(data) == piece.hex(), failed=failed
                    )
                break
            except (FetchError, TransportError) as error:
                log.debug("%s; trying again", error)
                await asyncio.sleep(wait)
        await asyncio.to_thread(self.dataset.add_piece, piece, sink.data())

    def data_sources(self) -> list[bytes]:
        """Returns the linked peers in random order, members first, and those which failed lately last."""
        now, members = asyncio.get_running_loop().time(), self.connections.members
        self.late = {peer: until for peer, until in self.late.items() if until > now}
        sources = list(self.connections.linked)
        self.connections.rng.shuffle(sources)
        sources.sort(key=lambda peer: (self.late.get(peer, 0.0), peer not in members))
        return sources[:DATA_SOURCES]

    def _put_last(self, peer: bytes, until: float) -> None:
        self.late[peer] = max(until, self.late.pop(peer, 0.0))
        while len(self.late) > LATE_MAX:
            del self.late[next(iter(self.late))]

    @asynccontextmanager
    async def state(
        self, roots: Sequence[tuple[int, bytes]], sources: Sequence[bytes], size: int
    ) -> AsyncIterator[tuple[int, bytes, Blob]]:
        """Fetches the newest of these states that a peer has; yields its round, root and blob, whose file goes then."""
        wanted = {root: number for number, root in roots}
        holders: dict[bytes, list[bytes]] = {}
        answers = await asyncio.gather(*(self.states_of(source) for source in sources))
        for source, states in zip(sources, answers, strict=True):
            for _, root in states:
                if root in wanted:
                    holders.setdefault(root, []).append(source)
        mine = {root: blob for root in wanted if (blob := self.states.find(root)) is not None}
        for root in sorted(mine.keys() | holders.keys(), key=lambda root: -wanted[root]):
            if root in mine and await asyncio.to_thread(_is_whole, mine[root]):
                yield wanted[root], root, mine[root]
                return
            if root in holders:
                try:
                    sink = await self._state(root, size, holders[root])
                except FetchError as error:  # the peers may have lied; others may have an older state
                    log.info("%s", error)
                    continue
                try:
                    yield wanted[root], root, sink
                finally:
                    await asyncio.to_thread(forget, sink.path)  # but not the file of a fetch that began meanwhile
                return
        raise DataError(f"none of {len(sources)} peers has one of the {len(roots)} usable states")

    async def _state(self, root: bytes, size: int, holders: Sequence[bytes]) -> FileSink:
        """Fetches a state into a file, so that an interrupted fetch resumes, even after a restart."""
        sink = FileSink(self.directory / root.hex())
        await asyncio.to_thread(make_directory, self.directory)
        await asyncio.to_thread(self._clear, but=root.hex())
        await self.fetcher.fetch_into(sink, BlobName("state", root), size, holders, failed=ignore)
        return sink

    def _clear(self, but: str) -> None:
        """Removes the files of other states: those will not be fetched again."""
        for path in entries(self.directory):
            if not path.name.startswith(but):
                forget(path)

    async def states_of(self, source: bytes) -> tuple[tuple[int, bytes], ...]:
        """Asks a peer which states it has; returns round and root of each."""
        try:
            return await questions.ask_states(self.transport, source, self.run.id)
        except RemoteProtocolError as error:
            self.blame(source, error.why)
            return ()
        except TransportError:
            return ()


def _is_whole(blob: Blob) -> bool:
    try:
        for _ in verified(blob):
            pass
    except DataError as error:  # peers may have a good copy
        log.error("%s", error)
        return False
    return True


def ignore(peer: bytes, why: str) -> None:
    log.debug("%s: %s", peer.hex()[:16], why)


async def fetch_manifest(fetcher: Fetcher, manifest: str, sources: Sequence[bytes]) -> bytes:
    """Fetches a data set's list of pieces; the pieces themselves are fetched when they are needed."""
    sink = await fetcher.fetch(
        BlobName("manifest", bytes.fromhex(manifest)), MANIFEST_BYTES_MAX, sources,
        check=lambda whole: manifest_digest(whole) == manifest, failed=ignore,
    )  # fmt: skip
    return sink.data()


async def fetch_base(fetcher: Fetcher, run: RunConfig, directory: Path, sources: Sequence[bytes]) -> None:
    """Fetches the frozen weights of a run that trains adapters into the directory."""
    await asyncio.to_thread(make_directory, directory)
    sink = FileSink(base_file(directory, run.adapt.base))
    name = BlobName("base", bytes.fromhex(run.adapt.base))
    await fetcher.fetch_into(sink, name, run.adapt.base_bytes, sources, failed=ignore)


async def fetch_tokenizer(fetcher: Fetcher, run: RunConfig, dataset: TokenDataset, sources: Sequence[bytes]) -> None:
    named = run.tokenizer.digest
    sink = await fetcher.fetch(
        BlobName("tokenizer", bytes.fromhex(named)), TOKENIZER_BYTES_MAX, sources,
        check=lambda whole: tokenizer_digest(whole) == named, failed=ignore,
    )  # fmt: skip
    await asyncio.to_thread(dataset.store_tokenizer, sink.data())
