"""Sources of blobs: a stream to a peer, the pieces it has, and the limits that all fetches share."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random

from p2ptrain.core.wire import encode
from p2ptrain.digest import piece_count
from p2ptrain.errors import P2ptrainError, RemoteProtocolError
from p2ptrain.net.blobs import BlobName, all_pieces
from p2ptrain.net.bulk import (
    STREAMS_PER_PEER_MAX,
    Given,
    Have,
    Later,
    Nothing,
    Piece,
    Reply,
    Request,
    bulk_protocol,
    decode_reply,
)
from p2ptrain.net.limits import TokenBucket
from p2ptrain.net.transport import FRAME_BYTES_MAX, Stream, Transport

OPEN_SECONDS = 10.0
PIECE_SECONDS = 20.0  # without an answer before a source is dropped: 52 KB/s


class SourceError(P2ptrainError):
    """A source that did not deliver, without having broken a rule."""


_ZERO = bytes(b"01"[value == 0] for value in range(256))
_ONE = bytes(b"01"[value == 1] for value in range(256))


def pick(pieces: int, rng: Random) -> int:
    """Picks one of these pieces at random."""
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
        self.put_off = 0  # pieces it put us off with
        self.insisted = 0  # pieces we insisted on

    async def ask(self, request: Request) -> None:
        self.asked.append(request.index if isinstance(request, Piece) else None)
        data = encode(request)
        async with asyncio.timeout(PIECE_SECONDS):
            await self.stream.send(data)
        self._traffic[f"sent {self.name.kind}"] += len(data)

    async def reply(self) -> Reply:
        """Reads the answer to the oldest request. RemoteProtocolError if it is not one."""
        async with asyncio.timeout(PIECE_SECONDS):
            data = await self.stream.receive(FRAME_BYTES_MAX)
        self._traffic[f"received {self.name.kind}"] += len(data)
        reply = decode_reply(data)
        index = self.asked.popleft()
        self.at = asyncio.get_running_loop().time()
        match reply:
            case Have() if index is None:
                self._note(reply)
            case Given() | Later() if reply.index == index:
                pass
            case Nothing(why):
                raise SourceError(f"has nothing: {why}")
            case _:
                raise RemoteProtocolError("an answer to another request")
        return reply

    def _note(self, have: Have) -> None:
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


class Places:
    """The slots for our streams to one peer."""

    def __init__(self) -> None:
        self.free = asyncio.Semaphore(STREAMS_PER_PEER_MAX)
        self.users = 0  # tasks that have a slot or wait for one


class Sources:
    """The streams to the peers from which a run's blobs are fetched, and their limits."""

    def __init__(
        self,
        transport: Transport,
        run_id: bytes,
        *,
        download: TokenBucket,
        blame: Callable[[bytes, str], None],
        rng: Random,
    ) -> None:
        self.protocol = bulk_protocol(run_id)
        self.transport, self.download, self.blame, self.rng = transport, download, blame, rng
        self.counts: Counter[str] = Counter()
        self.traffic: Counter[str] = Counter()  # bytes by direction and kind
        self._places: dict[bytes, Places] = {}

    @asynccontextmanager
    async def opened(self, peer: bytes, name: BlobName) -> AsyncIterator[Source]:
        """Opens a stream to a source, when one of its slots is free, and closes it at the end."""
        places = self._places.setdefault(peer, Places())
        places.users += 1
        try:
            async with places.free:
                async with asyncio.timeout(OPEN_SECONDS):
                    stream = await self.transport.open(peer, self.protocol)
                try:
                    yield Source(stream, name, self.traffic)
                finally:
                    stream.abort()
        finally:
            places.users -= 1
            if not places.users:
                del self._places[peer]

    async def may_ask(self, source: Source, size: int) -> bool:
        """Returns whether the download limit allows a request of this size; waits for it if none is in flight."""
        if self.download.take_now(size):
            return True
        if source.asked:
            return False
        await self.download.take(size)
        return True
