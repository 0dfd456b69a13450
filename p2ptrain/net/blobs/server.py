"""Serves blobs over streams; also defines the messages of that protocol.

A client requests a blob and learns its size, the digests of its pieces and which pieces are here; then it requests
pieces, a few at a time, and gets each in a frame. Replies come in the order of the requests. It may ask for the list of
pieces again: a blob that is still being fetched is served while it grows.

Peers that want the same blob from its author at once should exchange pieces with one another (the idea of BitTorrent,
Cohen 2003). So the server tells how often it gave out each piece, so that clients pick those that others lack, and to
whom it recently gave some. A client that requests a piece given out twice already is put off, unless it insists.

The counts are over all clients. Pieces go out in turns (turns.py): a round waits for payloads, so these go before
states and training data, and admitted peers go before strangers, who share one small number of requests a second.
Whatever has to be read, hashed or encoded for a reply is done once for all who ask, in threads, and kept for a while
(`Shared`): a piece is in memory once, however many peers are being sent it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Self, TypeAlias

import msgspec
from msgspec import Meta, Struct

from p2ptrain.core.messages import Digest, Key
from p2ptrain.core.wire import decode_strictly, encode
from p2ptrain.digest import DIGEST_BYTES, PIECE_BYTES, piece_bytes, piece_count
from p2ptrain.errors import DataError, P2ptrainError, RemoteProtocolError
from p2ptrain.net.blobs.blob import PIECES_MAX, Blob, BlobName, Kind, all_pieces
from p2ptrain.net.blobs.turns import BusyError, Turns
from p2ptrain.net.rate_limit import TokenBucket
from p2ptrain.net.transport import FRAME_BYTES_MAX, IsAdmitted, Stream, Transport, TransportError, while_it_moves

KEPT_BYTES = 2**25  # 32 MiB: the pieces of a round's payloads that several peers are fetching now
THREADS = 2  # of our own: a slow disk holds up nobody who uses asyncio's
HOLDERS_MAX = 16  # peers named in a reply
WHY_MAX = 200
REQUEST_BYTES_MAX = 128
GIVEN_MAX = 2  # copies of a piece before clients are put off: one copy might die with its holder
STREAMS_PER_PEER_MAX = 4
AHEAD_MAX = 16  # unanswered requests on a stream; a client has five
TAKERS_MAX = 4  # remembered per piece, so that one peer does not count several times
COUNTED_SECONDS = 60.0  # after the last piece was given out: its takers may be gone by then
COUNTED_MAX = 64  # blobs whose pieces are counted
IDLE_SECONDS = 120.0  # without a request; a client with a low download limit may be slow to ask
STRANGER_IDLE_SECONDS = 70.0  # a piece may take 60 s, even if the next one is asked for only then
STRANGER_REQUESTS_PER_SECOND = 100  # of all strangers together: 2% of the event loop. One newcomer asks for five
SEND_SECONDS, SEND_SECONDS_MAX = 20.0, 60.0  # without a byte; per piece: 17 KB/s. A client gives up then too
WORD_BYTES_MAX = 4_096  # replies up to this size do not queue behind pieces for the upload limit
WORD_SHARE = 8  # short replies may use another 1/8 of the upload limit
WORD_SECONDS = 0.01  # between short replies on a stream, so that nobody can flood us

Part: TypeAlias = tuple[BlobName, int | None]  # the frame with a piece; None: the digests of all pieces
Find: TypeAlias = Callable[[BlobName, bytes], Blob | None]  # a blob that a peer may have, complete or not
log = logging.getLogger("p2ptrain.net")


class Shared:
    """Parts of blobs, made in threads. They never change, because a blob's name is its digest."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, "blobs")
        self._making: dict[Part, asyncio.Future[bytes]] = {}
        self._kept: OrderedDict[Part, bytes] = OrderedDict()  # the least recently used first
        self._bytes = 0
        self._is_closed = False

    async def get(self, part: Part, make: Callable[[], bytes]) -> bytes:
        """Returns a part, made by `make` if it is not here. Raises what `make` raises."""
        if (kept := self._kept.get(part)) is not None:
            self._kept.move_to_end(part)
            return kept
        making = self._making.get(part)
        if making is None:
            if self._is_closed:
                raise DataError("the node is stopping")
            making = self._making[part] = asyncio.get_running_loop().run_in_executor(self._threads, make)
            making.add_done_callback(partial(self._made, part))
        return await asyncio.shield(making)  # one who gives up does not end it for the others

    def close(self) -> None:
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _made(self, part: Part, making: asyncio.Future[bytes]) -> None:
        del self._making[part]
        if making.cancelled() or making.exception() is not None:
            return
        made = making.result()
        self._kept[part] = made
        self._bytes += len(made)
        while self._bytes > KEPT_BYTES:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= len(dropped)


class FetchError(P2ptrainError):
    """No source delivered a blob; says how each of them failed."""

    def __init__(self, name: BlobName, failures: dict[bytes, str]) -> None:
        reasons = "; ".join(f"{peer.hex()[:16]}: {why}" for peer, why in failures.items())
        super().__init__(f"{name} is not available: {reasons or 'nobody to ask'}")
        self.name, self.failures = name, failures


# -- Messages ---------------------------------------------------------------------------------------


class BlobRequest(Struct, frozen=True, array_like=True, tag="want"):
    kind: Kind
    name: Digest
    leaves: bool  # also send the digests of the pieces


class Piece(Struct, frozen=True, array_like=True, tag="piece"):
    index: Annotated[int, Meta(ge=0, lt=PIECES_MAX)]
    insist: bool


class Have(Struct, frozen=True, array_like=True, tag="have"):
    size: Annotated[int, Meta(ge=0, le=PIECES_MAX * PIECE_BYTES)]
    leaves: Annotated[bytes, Meta(max_length=PIECES_MAX * DIGEST_BYTES)]
    held: Annotated[bytes, Meta(max_length=PIECES_MAX // 8)]  # piece i is bit i % 8 of byte i // 8
    given: Annotated[bytes, Meta(max_length=PIECES_MAX)]  # by piece: how often it was given out
    holders: Annotated[tuple[Key, ...], Meta(max_length=HOLDERS_MAX)]  # others that got pieces, the latest first


class Given(Struct, frozen=True, array_like=True, tag="given"):
    index: Annotated[int, Meta(ge=0, lt=PIECES_MAX)]
    data: Annotated[bytes, Meta(max_length=PIECE_BYTES)]


class Later(Struct, frozen=True, array_like=True, tag="later"):
    """Puts a client off: others have this piece by now, or it is not here yet."""

    index: Annotated[int, Meta(ge=0, lt=PIECES_MAX)]


class Nothing(Struct, frozen=True, array_like=True, tag="nothing"):
    why: Annotated[str, Meta(max_length=WHY_MAX)]


Request: TypeAlias = BlobRequest | Piece
Reply: TypeAlias = Have | Given | Later | Nothing

_REQUEST: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_REPLY: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def decode_request(data: bytes) -> Request:
    return decode_strictly(_REQUEST, data, "a request")


def decode_reply(data: bytes) -> Reply:
    return decode_strictly(_REPLY, data, "a reply")


def blob_protocol(run_id: bytes) -> str:
    return f"/p2ptrain/2/{run_id.hex()}/bulk"


# -- Serving ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Handouts:
    """The pieces of a blob that were given out: how often and to whom."""

    counts: bytearray  # by piece, up to 255
    until: float  # when these counts expire
    takers: dict[int, list[bytes]] = field(default_factory=dict)  # by piece: the first few peers, each once
    peers: deque[bytes] = field(default_factory=lambda: deque(maxlen=2 * HOLDERS_MAX))  # each once, the latest last


class Server:
    """Serves blobs to the peers of a run. Used with `async with`."""

    def __init__(
        self,
        transport: Transport,
        run_id: bytes,
        find: Find,
        *,
        upload: TokenBucket,
        blame: Callable[[bytes, str], None],
        is_admitted: IsAdmitted,
    ) -> None:
        self.protocol = blob_protocol(run_id)
        self._transport, self._find, self._upload, self._blame = transport, find, upload, blame
        self._turns, self._word_limit = Turns(upload), TokenBucket(0)
        self._word_turns = Turns(self._word_limit)
        self._is_admitted = is_admitted
        self._stranger_turns = Turns(TokenBucket(STRANGER_REQUESTS_PER_SECOND, burst=STRANGER_REQUESTS_PER_SECOND))
        self._shared = Shared()
        self.streams: set[Stream] = set()
        self._kinds: dict[Stream, Kind] = {}  # the kind that was last requested on each stream
        self.traffic: Counter[str] = Counter()  # bytes by direction and kind, such as "sent payload"
        self._tallies: OrderedDict[BlobName, Handouts] = OrderedDict()
        self.counters: Counter[str] = Counter()
        self._is_open = False

    async def __aenter__(self) -> Self:
        self._is_open = True
        await self._transport.serve(self.protocol, self._serve)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_open = False
        for stream in list(self.streams):
            stream.abort()
        self._shared.close()

    async def _serve(self, stream: Stream) -> None:
        if not self._is_open:
            stream.abort()
            return
        if sum(each.peer == stream.peer for each in self.streams) >= STREAMS_PER_PEER_MAX:
            self.counters["refused"] += 1
            await stream.send(encode(Nothing("busy")))
            return
        self.streams.add(stream)
        requests: asyncio.Queue[Request] = asyncio.Queue()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read(stream, requests))
                group.create_task(self._answer_all(stream, requests))
        except* RemoteProtocolError as errors:
            if self._is_open:
                self._blame(stream.peer, str(errors.exceptions[0]))
        except* (TransportError, TimeoutError, BusyError):
            pass
        finally:
            self.streams.discard(stream)
            self._kinds.pop(stream, None)
            stream.abort()

    async def _read(self, stream: Stream, requests: asyncio.Queue[Request]) -> None:
        """Queues the requests of a stream. Reading ahead notices at once when a stream with queued replies ends."""
        while True:
            async with asyncio.timeout(IDLE_SECONDS if self._is_admitted(stream.peer) else STRANGER_IDLE_SECONDS):
                data = await stream.receive(REQUEST_BYTES_MAX)
            request = decode_request(data)
            if isinstance(request, BlobRequest):
                self._kinds[stream] = request.kind
            self.traffic[f"received {self._kinds.get(stream, 'payload')}"] += len(data)
            if requests.qsize() >= AHEAD_MAX:
                raise RemoteProtocolError(f"more than {AHEAD_MAX} unanswered requests")
            requests.put_nowait(request)

    async def _answer_all(self, stream: Stream, requests: asyncio.Queue[Request]) -> None:
        name: BlobName | None = None
        blob: Blob | None = None
        while True:
            request = await requests.get()
            if not self._is_admitted(stream.peer):
                async with self._stranger_turns.turn(stream.peer, 1, of_range=self._transport.range_of(stream.peer)):
                    pass
            if isinstance(request, BlobRequest):
                if name != BlobName(request.kind, request.name):
                    name, blob = BlobName(request.kind, request.name), None
                if blob is None or blob.held != all_pieces(blob.size):  # a complete blob stays so while it is served
                    blob = self._find(name, stream.peer) or blob
                await self._say(stream, await self._have(name, blob, request, stream.peer))
            elif name is None or blob is None or request.index >= piece_count(blob.size):
                raise RemoteProtocolError(f"piece {request.index} requested without being offered")
            else:
                await self._give(stream, name, blob, request)
            await asyncio.sleep(0)  # so that one peer's flood does not starve the others

    async def _have(self, name: BlobName, blob: Blob | None, want: BlobRequest, peer: bytes) -> Have | Nothing:
        if blob is None:
            return Nothing("not here")
        leaves = b""
        if want.leaves:
            try:
                leaves = await self._shared.get((name, None), lambda: blob.leaves) if name.is_tree else b""
            except DataError as error:
                log.warning("%s cannot be served: %s", name, error)
                return Nothing("not here any more")
        tally = self._tally(name, blob)
        holders = [each for each in reversed(tally.peers) if each != peer][:HOLDERS_MAX]
        held = blob.held.to_bytes(-(-piece_count(blob.size) // 8), "little")
        return Have(blob.size, leaves, held, bytes(tally.counts), tuple(holders))

    def _tally(self, name: BlobName, blob: Blob) -> Handouts:
        tally, now = self._tallies.get(name), asyncio.get_running_loop().time()
        if tally is None or len(tally.counts) != piece_count(blob.size) or tally.until < now:
            tally = self._tallies[name] = Handouts(bytearray(piece_count(blob.size)), now + COUNTED_SECONDS)
        self._tallies.move_to_end(name)
        while len(self._tallies) > COUNTED_MAX:
            self._tallies.popitem(last=False)
        return tally

    async def _give(self, stream: Stream, name: BlobName, blob: Blob, request: Piece) -> None:
        index, tally = request.index, self._tally(name, blob)
        count = tally.counts[index]
        is_shared = name.is_tree and piece_count(blob.size) > 1  # a blob checked as a whole comes from one source
        if not blob.held >> index & 1 or (is_shared and count >= GIVEN_MAX and not request.insist):
            self.counters["put_off"] += 1
            await self._say(stream, Later(index))
            return
        takers = tally.takers.setdefault(index, [])
        is_new = stream.peer not in takers
        if is_new:
            takers.append(stream.peer)
            del takers[TAKERS_MAX:]
            tally.counts[index] = min(255, count + 1)  # before sending, so that not everyone is promised it at once
        is_given = False
        try:
            async with self._turn(stream, piece_bytes(blob.size, index), is_urgent=name.kind == "payload"):
                frame = await self._shared.get((name, index), lambda: encode(Given(index, blob.read(index))))
                await self._send(stream, frame)
            is_given = True
        except BusyError:
            self.counters["busy"] += 1
            await self._say(stream, Nothing("busy") if request.insist else Later(index))
            return
        except DataError as error:
            log.warning("%s cannot be served: %s", name, error)
            await self._say(stream, Nothing("not here any more"))
            raise TransportError("nothing more to say") from error
        finally:
            if is_new and not is_given:
                tally.counts[index] = max(0, tally.counts[index] - 1)
                if stream.peer in takers:
                    takers.remove(stream.peer)
        self.counters["pieces"] += 1
        if stream.peer in tally.peers:
            tally.peers.remove(stream.peer)
        tally.peers.append(stream.peer)
        tally.until = asyncio.get_running_loop().time() + COUNTED_SECONDS

    def _turn(self, stream: Stream, size: int, *, is_urgent: bool) -> AbstractAsyncContextManager[None]:
        is_admitted = self._is_admitted(stream.peer)
        of_range = None if is_admitted else self._transport.range_of(stream.peer)
        return self._turns.turn(stream.peer, size, is_urgent, is_admitted, stream, of_range)

    async def _say(self, stream: Stream, reply: Have | Later | Nothing) -> None:
        """Sends a reply other than a piece."""
        data = encode(reply)
        if len(data) > WORD_BYTES_MAX:
            async with self._turn(stream, len(data), is_urgent=self._kinds.get(stream, "payload") == "payload"):
                await self._send(stream, data)
            return
        self._word_limit.set_rate(self._upload.rate // WORD_SHARE)  # the owner may have changed the limit
        async with self._word_turns.turn(stream.peer, len(data)):
            pass  # or who does not read would hold its place
        await self._send(stream, data)
        await asyncio.sleep(WORD_SECONDS)

    async def _send(self, stream: Stream, data: bytes) -> None:
        assert len(data) <= FRAME_BYTES_MAX, "a blob has no more pieces than fit"
        async with while_it_moves(stream, SEND_SECONDS, SEND_SECONDS_MAX):
            await stream.send(data)
        self.counters["bytes"] += len(data)
        self.traffic[f"sent {self._kinds.get(stream, 'payload')}"] += len(data)
