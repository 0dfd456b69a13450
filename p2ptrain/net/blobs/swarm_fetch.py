"""Fetches one tree from several sources at once, while other peers fetch it from us.

From each source we request the pieces that it gave out least, in random order, so that many peers that fetch the same
blob from its author take different pieces and then exchange them; the holders that a source names are asked too. When
nothing has arrived for a while, we insist on pieces we were put off with, and request pieces that are late elsewhere.

A source cannot block the others by sending little or nothing: while others wait, only the two fastest keep their slots
for longer than their leases. Leases double, so that even sources that are all slow get time for a piece."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from random import Random, SystemRandom
from typing import TypeAlias
from weakref import WeakValueDictionary

from p2ptrain.core.wire import encode
from p2ptrain.digest import PIECE_BYTES, is_piece, piece_bytes, piece_count, proves
from p2ptrain.errors import DataError, P2ptrainError, RemoteProtocolError
from p2ptrain.net.blobs import server
from p2ptrain.net.blobs.blob import BlobName, Sink, all_pieces, aside
from p2ptrain.net.rate_limit import TokenBucket
from p2ptrain.net.transport import FRAME_BYTES_MAX, Stream, Transport, TransportError, while_it_moves

OPEN_SECONDS = 10.0
PIECE_SECONDS = server.SEND_SECONDS  # without a byte before a source is dropped
SOURCES_AT_ONCE = 4
QUICK_AT_ONCE = 2  # of these, sources that keep their slots because they are quick
NAMED_AT_ONCE = 3  # of these, sources named only by peers: one slot stays for those that the core knows
SLOWEST = PIECE_BYTES / server.SEND_SECONDS_MAX  # bytes a second: a piece that comes slower comes in vain
LEASE_SECONDS = 5.0  # a source's first lease; doubles each time
LEASE_DOUBLINGS_MAX = 8
SOURCES_MAX = 64  # per fetch, including those named by peers
PIPELINE = 4  # requests in flight per source: 4 MiB hide a round trip of 30 ms at 1 Gbit/s
REFRESH_PIECES = 8  # between requests for a source's list of pieces; at first one
STALL_SECONDS = 5.0  # without a piece from any source before we insist
ALONE_SECONDS = 1.0  # the same when no other source answers that might send us the piece
INSIST_SECONDS = 0.5  # before insisting on more, as long as nothing arrives by itself
POLL_SECONDS = 0.05  # before a source that had nothing new is asked again; doubles
POLL_SECONDS_MAX = 0.8
POLLS_MAX = 5  # in vain, over 1.5 s, before another waiting source gets the slot

Failed: TypeAlias = Callable[[bytes, str], None]


# -- One source -------------------------------------------------------------------------------------


class SourceError(P2ptrainError):
    """A source that did not deliver, without having broken a rule."""


_ZERO = bytes(b"01"[value == 0] for value in range(256))
_ONE = bytes(b"01"[value == 1] for value in range(256))


def pick(pieces: int, rng: Random) -> int:
    assert pieces
    start = rng.randrange(pieces.bit_length())
    later = pieces >> start
    found, base = (later, start) if later else (pieces, 0)
    return base + (found & -found).bit_length() - 1


class Source:
    """A stream to a peer, and the pieces of a blob that it has."""

    def __init__(self, stream: Stream, name: BlobName, traffic: Counter[str]) -> None:
        self.stream, self.name, self._traffic = stream, name, traffic
        self.size = -1
        self.leaves = b""
        self.held = 0
        self.rarity: tuple[int, ...] = ()  # pieces it gave out never, once, more often
        self.holders: tuple[bytes, ...] = ()
        self.asked: deque[int | None] = deque()  # pieces in order; None: its list of pieces
        self.at = asyncio.get_running_loop().time()  # when it last answered
        self.put_off = 0  # pieces that it refused for now
        self.insisted = 0  # pieces that we insisted on

    async def ask(self, request: server.Request) -> None:
        self.asked.append(request.index if isinstance(request, server.Piece) else None)
        data = encode(request)
        async with asyncio.timeout(PIECE_SECONDS):
            await self.stream.send(data)
        self._traffic[f"sent {self.name.kind}"] += len(data)

    async def reply(self) -> server.Reply:
        """Reads the answer to the oldest request. RemoteProtocolError if it is not one."""
        async with while_it_moves(self.stream, PIECE_SECONDS, server.SEND_SECONDS_MAX):
            data = await self.stream.receive(FRAME_BYTES_MAX)
        self._traffic[f"received {self.name.kind}"] += len(data)
        reply = server.decode_reply(data)
        index = self.asked.popleft()
        self.at = asyncio.get_running_loop().time()
        match reply:
            case server.Have() if index is None:
                self._note(reply)
            case server.Given() | server.Later() if reply.index == index:
                pass
            case server.Nothing(why):
                raise SourceError(f"has nothing: {why}")
            case _:
                raise RemoteProtocolError("an answer to another request")
        return reply

    def _note(self, have: server.Have) -> None:
        pieces = piece_count(have.size)
        held = int.from_bytes(have.held, "little")
        if len(have.given) != pieces or len(have.held) != -(-pieces // 8) or held >> pieces:
            raise RemoteProtocolError(f"a list of pieces that does not match {have.size} bytes")
        if self.size not in (-1, have.size):
            raise RemoteProtocolError(f"a blob of {self.size} bytes that now claims {have.size}")
        self.size, self.held, self.holders = have.size, held, have.holders
        self.leaves = have.leaves or self.leaves
        counts = have.given[::-1]
        never, once = int(counts.translate(_ZERO), 2), int(counts.translate(_ONE), 2)
        self.rarity = (never, once, all_pieces(have.size) & ~(never | once))


class Sources:
    """The streams to the peers from which a run's blobs are fetched, and their limits."""

    def __init__(
        self,
        transport: Transport,
        run_id: bytes,
        *,
        download: TokenBucket,
        blame: Callable[[bytes, str], None],
        rng: Random | None = None,
    ) -> None:
        self.protocol = server.blob_protocol(run_id)
        self.transport, self.download, self.blame = transport, download, blame
        self.rng = rng or SystemRandom()  # peers must not predict our next request
        self.counters: Counter[str] = Counter()
        self.traffic: Counter[str] = Counter()  # bytes by direction and kind, such as "received payload"
        self._places: WeakValueDictionary[bytes, asyncio.Semaphore] = WeakValueDictionary()  # of peers that are asked

    @asynccontextmanager
    async def opened(self, peer: bytes, name: BlobName) -> AsyncIterator[Source]:
        """Opens a stream to a source, when one of its slots is free, and closes it at the end."""
        places = self._places.setdefault(peer, asyncio.Semaphore(server.STREAMS_PER_PEER_MAX))
        async with places:
            async with asyncio.timeout(OPEN_SECONDS):
                stream = await self.transport.open(peer, self.protocol)
            try:
                yield Source(stream, name, self.traffic)
            finally:
                stream.abort()

    async def may_ask(self, source: Source, size: int) -> bool:
        """Returns whether the download limit allows a request of this size; waits for it if none is in flight."""
        if self.download.take_now(size):
            return True
        if source.asked:
            return False
        await self.download.take(size)
        return True


# -- Several at once --------------------------------------------------------------------------------


@dataclass(slots=True)
class Lease:
    """A source's use of a slot."""

    began: float
    ends: float  # if others wait
    task: asyncio.Task[None]
    source: Source | None = None
    is_over: bool = False  # the slot goes to another source, and this one queues again

    def speed(self, now: float) -> float:
        """Bytes per second, counted over at least LEASE_SECONDS so that a newcomer does not seem fast."""
        return (self.source.stream.moved if self.source else 0) / max(now - self.began, LEASE_SECONDS)


class SwarmFetch:
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
        self.flying: dict[int, list[Source]] = {}  # by piece: the sources it was requested from
        self.flying_since: dict[int, float] = {}
        self.first = frozenset(first)
        self.known = set(first[:SOURCES_MAX]) | {sources.transport.me}
        self.waiting = deque(first[:SOURCES_MAX])
        self.working: dict[bytes, Lease] = {}
        self.leases_had: Counter[bytes] = Counter()  # how many each source has had
        self.failures: dict[bytes, str] = {}
        self.broken: DataError | None = None  # an error of the sink: our disk, not the sources' fault
        self.changed, self.beginning = asyncio.Event(), asyncio.Lock()
        self.moved_at = asyncio.get_running_loop().time()
        self.insists, self.rounds = 0, 0  # pieces we may insist on now; how often we got to that point

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            while not self._is_over():
                while len(self.working) < SOURCES_AT_ONCE and (peer := self._next()) is not None:
                    now, seconds = asyncio.get_running_loop().time(), LEASE_SECONDS * 2 ** self.leases_had[peer]
                    self.leases_had[peer] = min(self.leases_had[peer] + 1, LEASE_DOUBLINGS_MAX)
                    self.working[peer] = Lease(now, now + seconds, group.create_task(self._work(peer)))
                self.changed.clear()
                with suppress(TimeoutError):  # time to end one
                    async with asyncio.timeout_at(self._end_leases()):
                        await self.changed.wait()
            for lease in self.working.values():
                lease.task.cancel()
        if self.broken is not None:
            raise self.broken
        if not self._is_complete():
            raise server.FetchError(self.name, self.failures)
        await aside(self.sink, self.sink.finish)

    def _is_complete(self) -> bool:
        return self.size >= 0 and not self.missing

    def _is_over(self) -> bool:
        return self._is_complete() or self.broken is not None or not (self.waiting or self.working)

    # -- Slots ------------------------------------------------------------------------------------------

    def _next(self) -> bytes | None:
        """Takes the next waiting source that may have a slot."""
        peer = next(filter(self._may_work, self.waiting), None)
        if peer is not None:
            self.waiting.remove(peer)
        return peer

    def _may_work(self, peer: bytes, instead_of: bytes = b"") -> bool:
        named = sum(each not in self.first for each in self.working if each != instead_of)
        return peer in self.first or named < NAMED_AT_ONCE

    def _is_place_wanted(self, peer: bytes) -> bool:
        """Whether another source is waiting for this one's slot."""
        return any(self._may_work(each, peer) for each in self.waiting)

    def _end_leases(self) -> float | None:
        """Ends expired leases if other sources wait, and returns when the next one expires."""
        now = asyncio.get_running_loop().time()
        quick = sorted(self.working.values(), key=lambda lease: lease.speed(now), reverse=True)[:QUICK_AT_ONCE]
        for peer, lease in self.working.items():
            if lease.ends <= now and not lease.is_over and self._is_place_wanted(peer):
                if lease in quick and lease.speed(now) >= max(SLOWEST, quick[0].speed(now) / 2):
                    lease.ends = now + LEASE_SECONDS
                    continue
                lease.is_over = True
                lease.task.cancel()
        ends = [lease.ends for peer, lease in self.working.items() if not lease.is_over and self._is_place_wanted(peer)]
        return min(ends, default=None)

    # -- One source -------------------------------------------------------------------------------------

    async def _work(self, peer: bytes) -> None:
        lease, why = self.working[peer], ""
        try:
            with self.sources.transport.boundary.guard("a source of pieces", peer):
                async with self.sources.opened(peer, self.name) as source:
                    lease.source = source
                    try:
                        await self._pull(source, lease)
                    finally:  # the pieces that it still owed are free for other sources
                        for index in [index for index, expected in self.flying.items() if source in expected]:
                            self._arrive(source, index)
        except RemoteProtocolError as error:
            why = error.why
            self.sources.blame(peer, why)
        except (TransportError, TimeoutError, SourceError) as error:
            why = str(error) or "no answer in time"
        except DataError as error:
            self.broken = error
        finally:
            del self.working[peer]
            if lease.is_over and not why:
                self.waiting.append(peer)
            self.changed.set()
        if why and not self._is_complete():
            self.failures[peer] = why
            if peer in self.first:
                self.failed(peer, why)

    async def _pull(self, source: Source, lease: Lease) -> None:
        """Takes pieces from a source until none is missing, or until its slot is better given to another one."""
        await self._look(source, leaves=not self.leaves)
        since, refresh, polls = 0, 1, 0
        while self.missing:
            await self._ask(source, since >= refresh)
            if source.asked:
                reply = await source.reply()
                await self._take(source, reply)
                since, polls = since + 1, 0
                if isinstance(reply, server.Have):
                    since, refresh = 0, min(2 * refresh, REFRESH_PIECES)
                continue
            polls += 1
            now = asyncio.get_running_loop().time()
            rate = self.sources.download.rate  # under a low limit, the delay may be our own
            if now - self.moved_at > PIECE_SECONDS + (SOURCES_AT_ONCE * PIECE_BYTES / rate if rate else 0.0):
                raise SourceError("has none of the missing pieces")
            is_empty = not self.missing & source.held & ~source.put_off  # missing: also those in flight
            if is_empty and polls > POLLS_MAX and self._is_place_wanted(source.stream.peer):
                lease.is_over = True
                return
            await asyncio.sleep(min(POLL_SECONDS * 2 ** (polls - 1), POLL_SECONDS_MAX))
            await self._look(source, leaves=False)

    async def _look(self, source: Source, *, leaves: bool) -> None:
        await source.ask(server.BlobRequest(self.name.kind, self.name.name, leaves))
        await self._take(source, await source.reply())

    async def _ask(self, source: Source, refresh: bool) -> None:
        """Fills the pipeline of a source."""
        if refresh and None not in source.asked:
            await source.ask(server.BlobRequest(self.name.kind, self.name.name, leaves=False))
        while len(source.asked) < PIPELINE and (choice := self._choose(source)) is not None:
            index, insist = choice
            if not await self.sources.may_ask(source, piece_bytes(self.size, index)):
                return
            if not self.missing >> index & 1:  # another source has sent it meanwhile
                self.sources.download.spend(-piece_bytes(self.size, index))
                continue
            self.flying.setdefault(index, []).append(source)
            self.flying_since.setdefault(index, asyncio.get_running_loop().time())
            if insist:
                self.insists -= 1
                source.insisted |= 1 << index
                self.sources.counters["insisted"] += 1
            await source.ask(server.Piece(index, insist))

    async def _take(self, source: Source, reply: server.Reply) -> None:
        match reply:
            case server.Have():
                await self._learn(source)
            case server.Given(index, data):
                if not is_piece(self.leaves, self.size, index, data):
                    raise RemoteProtocolError(f"a wrong piece {index} of {self.name}")
                self.sources.counters["bytes"] += len(data)
                if self.missing >> index & 1:
                    await aside(self.sink, self.sink.write, index, data)
                    self.missing &= ~(1 << index)
                    self.moved_at = asyncio.get_running_loop().time()
                    if not source.insisted >> index & 1:
                        self.insists, self.rounds = 0, 0
                    if not self.missing:
                        self.changed.set()
                else:
                    self.sources.counters["duplicates"] += 1
                self._arrive(source, index)
            case server.Later(index):
                self.sources.download.spend(-piece_bytes(self.size, index))
                self._arrive(source, index)
                if source.insisted >> index & 1:
                    raise SourceError("withholds pieces that it has")
                source.put_off |= 1 << index
            case _:
                raise AssertionError("decode_reply has refused all others")

    async def _learn(self, source: Source) -> None:
        """Records a source's list of pieces; the first source whose digests prove the blob's name sets the size."""
        if source.size > self.limit or (self.name.kind == "payload" and source.size != self.limit):
            raise RemoteProtocolError(f"{self.name} of {source.size} bytes, expected {self.limit}")
        async with self.beginning:
            if self.size < 0:
                if not proves(source.leaves, source.size, self.name.name):
                    raise RemoteProtocolError(f"digests that do not prove {self.name}")
                await self._begin(source.size, source.leaves)
        if source.size != self.size:
            raise RemoteProtocolError(f"{self.name} of {source.size} bytes, expected {self.size}")
        if source.leaves and source.leaves != self.leaves:
            raise RemoteProtocolError(f"digests that do not prove {self.name}")
        learnt = [peer for peer in source.holders if peer not in self.known]
        self.sources.rng.shuffle(learnt)
        for peer in learnt[: SOURCES_MAX - len(self.known)]:
            self.known.add(peer)
            self.waiting.append(peer)
            self.changed.set()

    async def _begin(self, size: int, leaves: bytes) -> None:
        """Makes room, and checks the pieces left from an earlier fetch."""
        await aside(self.sink, self.sink.begin, size, leaves)
        for index in range(piece_count(size)):
            if self.sink.held >> index & 1:
                if not is_piece(leaves, size, index, await aside(self.sink, self.sink.read, index)):
                    self.sink.drop(index)
                    self.sources.counters["damaged"] += 1
                await asyncio.sleep(0)
        self.size, self.leaves = size, leaves
        self.missing = all_pieces(size) & ~self.sink.held
        self.moved_at = asyncio.get_running_loop().time()
        self.begun()
        if not self.missing:
            self.changed.set()

    # -- Choosing pieces --------------------------------------------------------------------------------

    def _choose(self, source: Source) -> tuple[int, bool] | None:
        """Chooses a piece to request from a source, first those it gave to nobody, and whether to insist."""
        rng, now = self.sources.rng, asyncio.get_running_loop().time()
        asked = sum(1 << index for index in source.asked if index is not None)
        can = self.missing & source.held & ~asked
        free = can & ~sum(1 << index for index in self.flying)
        for rare in source.rarity:
            if found := free & rare & ~source.put_off:
                return pick(found, rng), False
        slow = can & sum(1 << index for index in self.flying if self._is_late(index, source, now))
        if found := slow & ~source.put_off:
            return pick(found, rng), False
        if (found := (free | slow) & source.put_off & ~source.insisted) and self._may_insist(source, now):
            return pick(found, rng), True
        return None

    def _is_late(self, index: int, source: Source, now: float) -> bool:
        """Whether to request a piece from this source too, since those it is expected from are slow or silent."""
        them, mine = self.flying[index], self.working[source.stream.peer].speed(now)
        if now - self.moved_at > STALL_SECONDS:
            return True  # otherwise sources that only list pieces could hold it up in turn
        if any(now - each.at > STALL_SECONDS for each in them):
            return True
        is_quick = all(mine > 2 * self.working[each.stream.peer].speed(now) for each in them)
        return is_quick and now - self.flying_since[index] > STALL_SECONDS

    def _may_insist(self, source: Source, now: float) -> bool:
        """Whether to insist: on a few pieces at first, and on more while nothing arrives by itself."""
        others = [lease.source for lease in self.working.values() if lease.source not in (None, source)]
        is_alone = not any(each and each.size >= 0 and now - each.at < STALL_SECONDS for each in others)
        stall = ALONE_SECONDS if is_alone else STALL_SECONDS
        if self.insists <= 0 and now - self.moved_at > (INSIST_SECONDS if self.rounds else stall):
            self.insists = PIPELINE << min(self.rounds, 8)
            self.rounds += 1
        return self.insists > 0

    def _arrive(self, source: Source, index: int) -> None:
        expected = self.flying[index]
        expected.remove(source)
        if not expected:
            del self.flying[index], self.flying_since[index]
