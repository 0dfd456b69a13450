"""Fetches contributions, training data, states, frozen weights and data sets' manifests and tokenizers from peers.

Everything is checked against its digest: the fetcher checks payloads and states piece by piece as they arrive; the
other kinds are checked here as a whole. An interrupted fetch of a state goes on where it was. A node whose own state
came out wrong begins with that one and fetches only the pieces that differ, where a peer has kept the round.

Where several members are near one another and a payload's author is far, by the round trips of small questions, one of
them, drawn by the payload's digest, fetches it from the author and the others fetch it from that one: so a payload
crosses a shared slow line once.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from p2ptrain.config import RunConfig
from p2ptrain.data.assignment import Positions
from p2ptrain.data.dataset import MANIFEST_BYTES_MAX, TokenDataset, manifest_digest, piece_digest, store_manifest
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
from p2ptrain.net.transport import Transport, TransportError
from p2ptrain.node.served_blobs import SavedStates

PIECES_AT_ONCE = 4  # of training data
DATA_SOURCES = 64  # peers asked for a piece: usually all, so that those that failed lately get a turn, too
PIECES_TOLD = 16  # wrong pieces of a state that the log names
WAIT_SECONDS, WAIT_SECONDS_MAX = 0.5, 10.0  # between attempts to fetch a piece of training data
LATE_SECONDS = 60.0  # for which a peer that failed to send a piece is asked last
LATE_TIMES = 30.0  # or this many times as long as it took: a silent peer costs us 20 s per ten minutes, not each time
LATE_MAX = 1_024  # such peers remembered; the oldest are forgotten
FAR_SECONDS = 0.03  # round trip to a payload's nearest source, from which on a near member may fetch it for us
NEARER_TIMES = 8  # how many times shorter the round trip to such a member is
PATIENCE_TIMES, PATIENCE_SECONDS_MIN, PATIENCE_SECONDS_MAX = 2.0, 0.5, 30.0  # over what fetching from afar takes us
USUAL_SECONDS, USUAL_BYTES_PER_SECOND = 2.0, 250_000  # what that takes, until we know
FETCHES_KNOWN, FETCHES_KEPT = 3, 15  # from afar, before we do, and of which we take the median
NEAR_POLL_SECONDS, NEAR_POLL_SECONDS_MAX = 0.05, 0.4  # between questions whether it has the payload; doubles
POLLS_PER_SECOND = 100  # for all payloads that we wait for
PASSED_OVER_SECONDS, PASSED_OVER_SECONDS_MAX = 30.0, 600.0  # for which a slow neighbour is not drawn; doubles

log = logging.getLogger("p2ptrain.node")


@dataclass(slots=True)
class Neighbour:
    """A near member that was too slow to fetch a payload for us."""

    times: int = 0
    passed_over_until: float = 0.0

    def was_slow(self, now: float) -> None:
        """Notes a payload that came too late. Others that were waited for at the same time count as one with it."""
        if now >= self.passed_over_until:
            seconds = min(PASSED_OVER_SECONDS * 2.0 ** min(self.times, 16), PASSED_OVER_SECONDS_MAX)
            self.times, self.passed_over_until = self.times + 1, now + seconds


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
    neighbours: dict[bytes, Neighbour] = field(default_factory=dict)  # members that were slow to fetch for us
    byte_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=FETCHES_KEPT))  # from afar, by us
    waits: int = 0  # for neighbours

    async def payload(self, name: bytes, size: int, sources: Sequence[bytes], failed: Failed) -> bytes:
        """Fetches a contribution. Raises FetchError if none of the sources has it."""
        blob, loop = BlobName("payload", name), asyncio.get_running_loop()
        round_trip = self._round_trip(sources)
        is_far = round_trip >= FAR_SECONDS
        near = self._drawn_neighbour(name, round_trip) if is_far else None
        if near is not None and (payload := await self._from_near(near, blob, size)) is not None:
            self.neighbours.pop(near, None)
            return payload
        began = loop.time()
        payload = (await self.fetcher.fetch(blob, size, sources, failed=failed)).data()
        if is_far:
            self.byte_seconds.append((loop.time() - began) / size)
        if near is not None:  # it could have got it, too
            self.neighbours = {peer: each for peer, each in self.neighbours.items() if peer in self.connections.members}
            self.neighbours.setdefault(near, Neighbour()).was_slow(loop.time())
        return payload

    def _round_trip(self, sources: Sequence[bytes]) -> float:
        """Returns the shortest round trip to those of the sources that are connected; 0 if one is unknown."""
        connections = self.connections
        return min((connections.latency(peer) or 0.0 for peer in sources if peer in connections.linked), default=0.0)

    def _drawn_neighbour(self, name: bytes, round_trip: float) -> bytes | None:
        """Returns the near member that is drawn to fetch a payload that is so far away for all who are near it; None if
        that is this node, or if no member is near."""
        connections, now = self.connections, asyncio.get_running_loop().time()
        near = [
            peer
            for peer in connections.members
            if (took := connections.latency(peer)) is not None
            and NEARER_TIMES * took <= round_trip
            and not (peer in self.neighbours and self.neighbours[peer].passed_over_until > now)
        ]
        drawn = max([*near, self.transport.me], key=lambda peer: hashlib.sha256(name + peer).digest())
        return None if drawn == self.transport.me else drawn

    def _patience(self, size: int) -> float:
        """Returns for how long a neighbour is waited for: twice as long as fetching a payload from afar takes us."""
        usual = USUAL_SECONDS + size / USUAL_BYTES_PER_SECOND
        if len(self.byte_seconds) >= FETCHES_KNOWN:
            usual = median(self.byte_seconds) * size
        return min(PATIENCE_SECONDS_MIN + PATIENCE_TIMES * usual, PATIENCE_SECONDS_MAX)

    async def _from_near(self, peer: bytes, name: BlobName, size: int) -> bytes | None:
        """Fetches a payload from a near member as soon as that one has it; None if it is too slow, or gone."""
        wait = NEAR_POLL_SECONDS
        self.waits += 1
        try:
            async with asyncio.timeout(self._patience(size)):
                while peer in self.connections.linked:
                    await asyncio.sleep(max(wait, self.waits / POLLS_PER_SECOND))
                    try:
                        return (await self.fetcher.fetch(name, size, [peer], failed=ignore)).data()
                    except FetchError as error:
                        if not error.is_missing:
                            break
                    wait = min(2 * wait, NEAR_POLL_SECONDS_MAX)
        except TimeoutError:
            pass
        finally:
            self.waits -= 1
        return None

    async def data(self, positions: Positions) -> None:
        """Fetches all missing pieces of training data that these sequences need; they stay until the next call."""
        await self._pieces(await asyncio.to_thread(self.dataset.need, positions, self.run.model.sequence_length))

    async def ahead(self, positions: Positions, goes_on: Callable[[], bool]) -> None:
        """Fetches what fits of a later training's data, as long as `goes_on` says so."""
        length = self.run.model.sequence_length
        await self._pieces(await asyncio.to_thread(self.dataset.expect, positions, length), goes_on)

    async def held_out(self, sequences: int) -> None:
        """Fetches the missing pieces of the first held-out sequences."""
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
        except* DataError as errors:
            raise DataError(str(errors.exceptions[0])) from errors

    async def _data_piece(self, piece: bytes) -> None:
        """Fetches one piece, however long it takes: without its data a node cannot train, and peers come and go."""
        loop = asyncio.get_running_loop()
        asked_at = loop.time()

        def check(data: bytes) -> bool:
            return piece_digest(data) == piece.hex()

        def failed(peer: bytes, why: str) -> None:
            nonlocal asked_at
            now = loop.time()
            self._put_last(peer, now + max(LATE_SECONDS, LATE_TIMES * (now - asked_at)))
            asked_at = now
            ignore(peer, why)

        name, wait = BlobName("data", piece), WAIT_SECONDS
        while True:
            asked_at = loop.time()
            try:
                with self.transport.boundary.guard("the fetch of data"):
                    sources = self.data_sources()
                    sink = await self.fetcher.fetch(name, PIECE_BYTES, sources, check=check, failed=failed)
            except (FetchError, TransportError) as error:
                log.debug("%s; trying again", error)
                await asyncio.sleep(wait)
                wait = min(2 * wait, WAIT_SECONDS_MAX)
                continue
            await asyncio.to_thread(self.dataset.add_piece, piece, sink.data())
            return

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
        self, roots: Sequence[tuple[int, bytes]], sources: Sequence[bytes], size: int, like: tuple[int, bytes] | None
    ) -> AsyncIterator[tuple[int, bytes, Blob]]:
        """Fetches the newest of these states that a peer has, and yields its round, root and blob. The file is removed
        afterwards.

        `like` is a round and this node's own state after it: if that round's state is fetched, only the pieces that
        differ are transferred.
        """
        wanted = {root: number for number, root in roots}
        holders: dict[bytes, list[bytes]] = {}
        answers = await asyncio.gather(*(self._states_of(source) for source in sources))
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
                similar = like[1] if like is not None and like[0] == wanted[root] else None
                try:
                    sink = await self._state(root, size, holders[root], similar)
                except FetchError as error:  # the peers may have lied; others may have an older state
                    log.info("%s", error)
                    continue
                try:
                    yield wanted[root], root, sink
                finally:
                    await asyncio.to_thread(forget, sink.path)  # but not the file of a fetch that began meanwhile
                return
        raise DataError(f"none of {len(sources)} peers has one of the {len(roots)} usable states")

    async def _state(self, root: bytes, size: int, holders: Sequence[bytes], similar: bytes | None) -> FileSink:
        """Fetches a state into a file, so that an interrupted fetch resumes, even after a restart."""
        sink = FileSink(self.directory / root.hex())
        await asyncio.to_thread(make_directory, self.directory)
        await asyncio.to_thread(self._clear, but=root.hex())
        if similar is not None:
            await asyncio.to_thread(sink.seed, similar)
        await self.fetcher.fetch_into(sink, BlobName("state", root), size, holders, failed=ignore)
        if similar is not None:
            pieces = ", ".join(map(str, sink.dropped[:PIECES_TOLD]))
            log.error("%d pieces (1 MiB each) of this node's own state were wrong: %s", len(sink.dropped), pieces)
        return sink

    def _clear(self, but: str) -> None:
        """Removes the files of other states: those will not be fetched again."""
        for path in entries(self.directory):
            if not path.name.startswith(but):
                forget(path)

    async def _states_of(self, source: bytes) -> tuple[tuple[int, bytes], ...]:
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


async def fetch_manifest(fetcher: Fetcher, run: RunConfig, directory: Path, sources: Sequence[bytes]) -> TokenDataset:
    """Fetches the data set's list of pieces; the pieces themselves are fetched when they are needed."""
    name = BlobName("manifest", bytes.fromhex(run.data.manifest))

    def check(data: bytes) -> bool:
        return manifest_digest(data) == run.data.manifest

    sink = await fetcher.fetch(name, MANIFEST_BYTES_MAX, sources, check=check, failed=ignore)
    return await asyncio.to_thread(store_manifest, directory, sink.data(), run.data.manifest)


async def fetch_base(fetcher: Fetcher, run: RunConfig, directory: Path, sources: Sequence[bytes]) -> None:
    """Fetches the frozen weights of a run that trains adapters into the directory."""
    await asyncio.to_thread(make_directory, directory)
    sink = FileSink(base_file(directory, run.adapt.base))
    name = BlobName("base", bytes.fromhex(run.adapt.base))
    await fetcher.fetch_into(sink, name, run.adapt.base_bytes, sources, failed=ignore)


async def fetch_tokenizer(fetcher: Fetcher, run: RunConfig, dataset: TokenDataset, sources: Sequence[bytes]) -> None:
    """Fetches the tokenizer's file of a run that has one."""
    name = BlobName("tokenizer", bytes.fromhex(run.tokenizer.digest))

    def check(data: bytes) -> bool:
        return tokenizer_digest(data) == run.tokenizer.digest

    sink = await fetcher.fetch(name, TOKENIZER_BYTES_MAX, sources, check=check, failed=ignore)
    await asyncio.to_thread(dataset.store_tokenizer, sink.data())
