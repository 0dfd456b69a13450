"""One tree from several sources at once, while others fetch it from us.

From each source come the pieces that it gave out least, in random order, so that many who fetch the same blob from its
author take different pieces and then exchange them; whom a source names as holders are asked too. When nothing has
moved for a while, we insist on what we were put off with, and ask others for what we wait for elsewhere.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

from p2ptrain.digest import PIECE_BYTES, piece_count
from p2ptrain.errors import DataError, RemoteProtocolError
from p2ptrain.net.blobs import Blob, BlobName, Sink, all_pieces, is_piece, piece_bytes, proves
from p2ptrain.net.bulk import FetchError, Given, Have, Later, Piece, Reply, Want
from p2ptrain.net.sources import PIECE_SECONDS, Source, SourceError, Sources, pick
from p2ptrain.net.transport import TransportError

SOURCES_AT_ONCE = 4
SOURCES_MAX = 64  # of a fetch, with those that were learnt from others
PIPELINE = 4  # pieces asked for ahead: hides the way there and back up to 4 MiB, 30 ms at a gigabit
REFRESH_PIECES = 8  # until a source is asked again what it has, and has given to others; at first after one
STALL_SECONDS = 5.0  # without a piece from anywhere, and we insist
INSIST_SECONDS = 0.5  # between insisting and insisting on more, as long as nothing comes by itself
POLL_SECONDS = 0.05  # until a source that had nothing new is asked again; doubles
POLL_SECONDS_MAX = 0.8
POLLS_MAX = 5  # in vain, over 1.5 s; then another source gets its turn, if there is one

Failed: TypeAlias = Callable[[bytes, str], None]
T = TypeVar("T")


async def aside(blob: Blob, work: Callable[..., T], *args: object) -> T:
    """Do what may wait for a disk in a thread."""
    return work(*args) if blob.is_quick else await asyncio.to_thread(work, *args)


class Relay:
    """One fetch of a tree, from several sources at once."""

    def __init__(
        self,
        sources: Sources,
        name: BlobName,
        size: int,
        first: Sequence[bytes],
        sink: Sink,
        *,
        failed: Failed,
        begun: Callable[[], None],
    ) -> None:
        self.sources, self.name, self.limit, self.sink = sources, name, size, sink
        self.failed, self.begun = failed, begun
        self.size, self.leaves = -1, b""
        self.missing = 0  # pieces, once the size is known
        self.flying: dict[int, list[Source]] = {}  # by piece: from whom it is expected
        self.first = frozenset(first)
        self.known = set(first[:SOURCES_MAX]) | {sources.transport.me}
        self.waiting = deque(first[:SOURCES_MAX])
        self.working: set[bytes] = set()
        self.failures: dict[bytes, str] = {}
        self.broken: DataError | None = None  # of the sink: our world, not theirs
        self.changed = asyncio.Event()
        self.beginning = asyncio.Lock()
        self.moved_at = asyncio.get_running_loop().time()
        self.insists, self.rounds = 0, 0  # pieces that we may insist on now, and how often we came to that

    async def run(self) -> None:
        workers: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as group:
            while not self._is_over():
                while self.waiting and len(self.working) < SOURCES_AT_ONCE:
                    peer = self.waiting.popleft()
                    self.working.add(peer)
                    worker = group.create_task(self._work(peer))
                    workers.add(worker)
                    worker.add_done_callback(workers.discard)
                self.changed.clear()
                await self.changed.wait()
            for worker in workers:
                worker.cancel()
        if self.broken is not None:
            raise self.broken
        if not self._is_complete():
            raise FetchError(self.name, self.failures)
        await aside(self.sink, self.sink.finish)

    def _is_complete(self) -> bool:
        return self.size >= 0 and not self.missing

    def _is_over(self) -> bool:
        return self._is_complete() or self.broken is not None or not (self.waiting or self.working)

    # ---------------------------------------------------------------------------------------------------
    # A source

    async def _work(self, peer: bytes) -> None:
        why = ""
        try:
            async with self.sources.opened(peer, self.name) as source:
                try:
                    await self._pull(source)
                finally:
                    self._land(source)
        except RemoteProtocolError as error:
            why = error.why
            self.sources.blame(peer, why)
        except (TransportError, TimeoutError, SourceError) as error:
            why = str(error) or "no answer in time"
        except DataError as error:
            self.broken = error
        finally:
            self.working.discard(peer)
            self.changed.set()
        if why and not self._is_complete():
            self.failures[peer] = why
            if peer in self.first:
                self.failed(peer, why)

    async def _pull(self, source: Source) -> None:
        """Take from a source until there is nothing missing, or another one had better have its place."""
        await self._look(source, leaves=not self.leaves)
        since, refresh, polls = 0, 1, 0
        while self.missing:
            await self._ask(source, since >= refresh)
            if source.asked:
                reply = await source.reply()
                await self._take(source, reply)
                since, polls = since + 1, 0
                if isinstance(reply, Have):
                    since, refresh = 0, min(2 * refresh, REFRESH_PIECES)
                continue
            polls += 1
            now = asyncio.get_running_loop().time()
            rate = self.sources.download.rate  # under a low limit, we may be what others wait for
            if now - self.moved_at > PIECE_SECONDS + (SOURCES_AT_ONCE * PIECE_BYTES / rate if rate else 0.0):
                raise SourceError("has nothing of what is missing")
            if polls > POLLS_MAX and self.waiting:
                self.waiting.append(source.stream.peer)
                return
            await asyncio.sleep(min(POLL_SECONDS * 2 ** (polls - 1), POLL_SECONDS_MAX))
            await self._look(source, leaves=False)

    async def _look(self, source: Source, *, leaves: bool) -> None:
        await source.ask(Want(self.name.kind, self.name.name, leaves))
        await self._take(source, await source.reply())

    async def _ask(self, source: Source, refresh: bool) -> None:
        """Fill the pipeline."""
        if refresh and None not in source.asked:
            await source.ask(Want(self.name.kind, self.name.name, leaves=False))
        while len(source.asked) < PIPELINE and (choice := self._choose(source)) is not None:
            index, insist = choice
            if not await self.sources.may_ask(source, piece_bytes(self.size, index)):
                return
            if not self.missing >> index & 1:
                continue  # it came from elsewhere meanwhile
            self.flying.setdefault(index, []).append(source)
            if insist:
                self.insists -= 1
                source.insisted |= 1 << index
                self.sources.counts["insisted"] += 1
            await source.ask(Piece(index, insist))

    async def _take(self, source: Source, reply: Reply) -> None:
        match reply:
            case Have():
                await self._learn(source)
            case Given(index, data):
                if not is_piece(self.leaves, self.size, index, data):
                    raise RemoteProtocolError(f"a wrong piece {index} of {self.name}")
                self.sources.counts["bytes"] += len(data)
                if self.missing >> index & 1:
                    await aside(self.sink, self.sink.write, index, data)
                    self.missing &= ~(1 << index)
                    self.moved_at = asyncio.get_running_loop().time()
                    if not source.insisted >> index & 1:
                        self.insists, self.rounds = 0, 0
                    if not self.missing:
                        self.changed.set()
                else:
                    self.sources.counts["duplicates"] += 1
                self._arrive(source, index)
            case Later(index):
                self._arrive(source, index)
                if source.insisted >> index & 1:
                    raise SourceError("keeps back what it has")
                source.put_off |= 1 << index
            case _:
                raise AssertionError("that was an error before")

    async def _learn(self, source: Source) -> None:
        """What a source has; from the first one whose digests lead to the name, how large it is."""
        if source.size > self.limit or (self.name.kind == "payload" and source.size != self.limit):
            raise RemoteProtocolError(f"{self.name} of {source.size} bytes, where {self.limit} are right")
        async with self.beginning:
            if self.size < 0:
                if not proves(source.leaves, source.size, self.name.name):
                    raise RemoteProtocolError(f"digests that do not lead to {self.name}")
                await self._begin(source.size, source.leaves)
        if source.size != self.size:
            raise RemoteProtocolError(f"{self.name} of {source.size} bytes, where {self.size} are right")
        if source.leaves and source.leaves != self.leaves:
            raise RemoteProtocolError(f"digests that do not lead to {self.name}")
        learnt = [peer for peer in source.holders if peer not in self.known]
        self.sources.rng.shuffle(learnt)
        for peer in learnt[: SOURCES_MAX - len(self.known)]:
            self.known.add(peer)
            self.waiting.append(peer)
            self.changed.set()

    async def _begin(self, size: int, leaves: bytes) -> None:
        """Make room, and check what is there from the last time."""
        await aside(self.sink, self.sink.begin, size, leaves)
        for index in range(piece_count(size)):
            if self.sink.held >> index & 1:
                piece = await aside(self.sink, self.sink.read, index)
                if not is_piece(leaves, size, index, piece):
                    self.sink.drop(index)
                    self.sources.counts["damaged"] += 1
                await asyncio.sleep(0)
        self.size, self.leaves = size, leaves
        self.missing = all_pieces(size) & ~self.sink.held
        self.moved_at = asyncio.get_running_loop().time()
        self.begun()
        if not self.missing:
            self.changed.set()

    # ---------------------------------------------------------------------------------------------------
    # What to ask for

    def _choose(self, source: Source) -> tuple[int, bool] | None:
        """A piece to ask a source for, and whether to insist: first what it gave to nobody else."""
        rng, now = self.sources.rng, asyncio.get_running_loop().time()
        asked = sum(1 << index for index in source.asked if index is not None)
        can = self.missing & source.held & ~asked
        free = can & ~sum(1 << index for index in self.flying)
        for rare in source.rarity:
            if found := free & rare & ~source.put_off:
                return pick(found, rng), False
        silent = [index for index, them in self.flying.items() if any(now - each.at > STALL_SECONDS for each in them)]
        slow = can & sum(1 << index for index in silent)
        if found := slow & ~source.put_off:
            return pick(found, rng), False
        if (found := (free | slow) & source.put_off & ~source.insisted) and self._may_insist(now):
            return pick(found, rng), True
        return None

    def _may_insist(self, now: float) -> bool:
        """A few pieces at first, and more as long as nothing comes by itself."""
        if self.insists <= 0 and now - self.moved_at > (INSIST_SECONDS if self.rounds else STALL_SECONDS):
            self.insists = PIPELINE << min(self.rounds, 8)
            self.rounds += 1
        return self.insists > 0

    def _arrive(self, source: Source, index: int) -> None:
        expected = self.flying[index]
        expected.remove(source)
        if not expected:
            del self.flying[index]

    def _land(self, source: Source) -> None:
        """What a source still owed is free for others."""
        for index in [index for index, expected in self.flying.items() if source in expected]:
            self._arrive(source, index)
