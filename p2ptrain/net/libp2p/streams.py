"""Frames over a connection to p2pd; accepts incoming streams, limits them per peer, and runs their handlers.

A frame is a length of four bytes, big-endian, and its content. The length is checked before anything is allocated, so
that a peer cannot make us allocate whatever it claims. p2pd's own messages begin with a varint.

When all slots are taken, an admitted peer gets that of a stranger: so strangers keep no member out, however many they
are. Among themselves, the address range with the most streams loses one to a range that has fewer, because keys cost
nothing; and within a range, or among members, so does the peer with the most streams. Ranges are not known of peers
behind a relay and of those that have just come, who share one."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeAlias

from p2ptrain.errors import RemoteProtocolError
from p2ptrain.identity import PeerIdError, key_of_bytes, peer_id_of
from p2ptrain.net.boundary import Boundary
from p2ptrain.net.tasks import Tasks
from p2ptrain.net.transport import FRAME_BYTES_MAX, Handler, IsAdmitted, TransportError

LENGTH_BYTES = 4
PART_BYTES = 2**15  # of a frame, read at a time: so `moved` shows that it comes
LINGER_SECONDS = 3.0  # for a peer to read the last, short frame and hang up
CLOSE_SECONDS = 10.0  # to flush what was sent; a peer that needs longer for the last frame is not reading
VARINT_BITS_MAX = 35  # in a length sent by p2pd
BUFFER_BYTES = 2**18  # per stream and direction; asyncio may read ahead twice as much
STREAMS_MAX, STREAMS_OF_PEER_MAX = 256, 32  # open at a time; no honest peer needs more. 130 MB of buffers
OPENINGS_MAX = 64  # on top: streams whose peer is not known yet, or that are being closed
HANDSHAKE_SECONDS = 10.0  # for p2pd to name the peer of a stream

ReadOpening: TypeAlias = Callable[[asyncio.StreamReader], Awaitable[tuple[bytes, str]]]  # the peer's id, the protocol
logger = logging.getLogger("p2ptrain.net")


class FrameStream:
    """A `Stream` over a connection to p2pd, which forwards bytes both ways."""

    def __init__(
        self,
        peer: bytes,
        protocol: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        counters: Counter[str],
        ended: Callable[[FrameStream], None],
    ) -> None:
        self.peer, self.protocol = peer, protocol
        self._reader, self._writer, self._counters, self._ended = reader, writer, counters, ended
        self._coming = -1  # size of a frame whose header was read before the reader was cancelled
        self._part = bytearray()  # of that frame
        self._read_bytes = self._written_bytes = 0
        writer.transport.set_write_buffer_limits(high=BUFFER_BYTES)

    def __repr__(self) -> str:
        return f"FrameStream({self.peer.hex()[:8]}, {self.protocol})"

    async def send(self, frame: bytes | memoryview) -> None:
        size = frame.nbytes if isinstance(frame, memoryview) else len(frame)
        assert size <= FRAME_BYTES_MAX, f"a frame of {size} bytes, which has to be split"
        if self.is_gone:
            raise TransportError("the stream was closed")
        self._written_bytes += LENGTH_BYTES + size
        try:
            self._writer.write(size.to_bytes(LENGTH_BYTES, "big"))  # no other task can write between this and the frame
            self._writer.write(frame)
            await self._writer.drain()
        except ConnectionError as error:
            raise TransportError(f"the stream broke while sending: {error}") from error
        self._counters.update({"bytes sent": size, f"sent {self.protocol}": size})

    @property
    def is_gone(self) -> bool:
        return self._writer.is_closing()

    @property
    def moved(self) -> int:
        return self._read_bytes + self._written_bytes - self._writer.transport.get_write_buffer_size()

    async def coming(self) -> int:
        if self._coming < 0:
            self._coming = int.from_bytes(await self._read(LENGTH_BYTES), "big")
        return self._coming

    async def skip(self) -> None:
        while left := await self.coming():
            part = self._part or await self._read(min(left, BUFFER_BYTES))
            self._coming, self._part = self._coming - len(part), bytearray()
        self._coming = -1

    async def receive(self, bytes_max: int) -> bytes:
        if (size := await self.coming()) > min(bytes_max, FRAME_BYTES_MAX):
            self.abort()  # the next frame begins beyond what we are willing to read
            raise RemoteProtocolError(f"a frame of {size} bytes; the limit is {bytes_max}")
        while len(self._part) < size:
            self._part += await self._read(min(PART_BYTES, size - len(self._part)))
        frame, self._part, self._coming = bytes(self._part), bytearray(), -1
        self._counters.update({"bytes received": size, f"received {self.protocol}": size})
        return frame

    async def _read(self, size: int) -> bytes:
        try:
            data = await self._reader.readexactly(size)
        except asyncio.IncompleteReadError as error:
            inside = " in the middle of a frame" if error.partial or self._coming >= 0 else ""
            raise TransportError(f"the peer closed the stream{inside}") from error
        except ConnectionError as error:
            raise TransportError(f"the stream broke while receiving: {error}") from error
        self._read_bytes += len(data)
        return data

    async def close(self) -> None:
        """Waits until p2pd has sent everything: it hangs up when all of it is on its way.

        At our end of file p2pd closes both directions at once, and over QUIC that discards what the peer has not read
        yet. So the peer that gets the last frame should hang up first."""
        try:
            if not self._writer.is_closing():
                with suppress(TimeoutError):
                    async with asyncio.timeout(LINGER_SECONDS):
                        await self._read_on()
                if not self._writer.is_closing():  # it may have been aborted meanwhile
                    async with asyncio.timeout(CLOSE_SECONDS):
                        self._writer.write_eof()
                        await self._read_on()
        except (TimeoutError, ConnectionError):
            pass  # the peer does not read or is gone: nothing left to wait for
        finally:
            self.abort()

    async def _read_on(self) -> None:
        """Discards input up to the end of file: closing with unread bytes would reset the connection."""
        while await self._reader.read(BUFFER_BYTES):
            pass

    def abort(self) -> None:
        self._writer.transport.abort()
        self._ended(self)


async def read_length(reader: asyncio.StreamReader, bytes_max: int) -> int:
    """Reads the length of the next message from p2pd."""
    head = b""
    while (found := length_at(head, 0, bytes_max)) is None:
        head += await read_bytes(reader, 1)
    start, end = found
    return end - start


async def read_message(reader: asyncio.StreamReader, bytes_max: int) -> bytes:
    """Reads a message from p2pd; its length comes first."""
    return await read_bytes(reader, await read_length(reader, bytes_max))


async def read_bytes(reader: asyncio.StreamReader, size: int) -> bytes:
    try:
        return await reader.readexactly(size)
    except asyncio.IncompleteReadError as error:
        raise TransportError("p2pd hung up") from error
    except OSError as error:
        raise TransportError(f"p2pd is gone: {error}") from error


def with_length(message: bytes) -> bytes:
    """Puts the length in front of a message for p2pd, as `read_message` expects it."""
    size, encoded = len(message), bytearray()
    while size > 0x7F:
        encoded.append(size & 0x7F | 0x80)
        size >>= 7
    encoded.append(size)
    return bytes(encoded) + message


async def write_message(writer: asyncio.StreamWriter, message: bytes) -> None:
    try:
        writer.write(with_length(message))
        await writer.drain()
    except OSError as error:
        raise TransportError(f"p2pd is gone: {error}") from error


def length_at(data: bytes, at: int, bytes_max: int) -> tuple[int, int] | None:
    """Returns where the message of p2pd begins and ends whose length is at `at`, or None if the length is not whole.

    It is a varint of protobuf: seven bits a byte."""
    size = shift = 0
    for place in range(at, len(data)):
        size |= (data[place] & 0x7F) << shift
        shift += 7
        if size > bytes_max or shift > VARINT_BITS_MAX:
            raise TransportError(f"p2pd sent a message of {size} bytes or more")
        if data[place] < 0x80:
            return place + 1, place + 1 + size
    return None


class Streams:
    """All open streams, and the handlers of incoming ones."""

    def __init__(self, counters: Counter[str], tasks: Tasks, read_opening: ReadOpening, boundary: Boundary) -> None:
        self.handlers: dict[str, Handler] = {}
        self._counters, self._tasks, self.read_opening = counters, tasks, read_opening
        self._range_of, self._boundary = boundary.range_of, boundary
        self.is_admitted: IsAdmitted = lambda peer: False
        self._open: set[FrameStream] = set()
        self._incoming = 0
        self._incoming_of: dict[bytes, list[FrameStream]] = {}  # by peer, the oldest first

    def add(
        self, peer: bytes, protocol: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> FrameStream:
        stream = FrameStream(peer, protocol, reader, writer, self._counters, self._open.discard)
        self._open.add(stream)
        return stream

    def prefer(self, is_admitted: IsAdmitted) -> None:
        self.is_admitted = is_admitted

    def abort(self) -> None:
        for stream in list(self._open):
            stream.abort()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Accepts an incoming stream, which is a connection from p2pd."""
        if self._incoming < STREAMS_MAX + OPENINGS_MAX:
            self._incoming += 1
            work = self._boundary.contained("a stream's opening", b"", self._answer, reader, writer)
            self._tasks.spawn(work).add_done_callback(lambda _: self._ended(writer))  # even if it never began
        else:
            self._refuse(writer, f"{self._incoming} are open")

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                peer_id, protocol = await self.read_opening(reader)
            peer = key_of_bytes(peer_id)
            if why := self._make_room(peer) if protocol in self.handlers else "its run has ended":
                self._refuse(writer, why)
            else:
                await self._handle(self.add(peer, protocol, reader, writer))
        except PeerIdError as error:
            self._refuse(writer, str(error))
        except (TransportError, TimeoutError) as error:
            logger.debug("p2pd did not name the peer of a stream: %s", error)

    def _ended(self, writer: asyncio.StreamWriter) -> None:
        self._incoming -= 1
        writer.transport.abort()

    def _make_room(self, peer: bytes) -> str:
        """Makes room for a stream of this peer, or returns why it may have no more.

        A peer that has to give one up loses its newest: the first one it opens is that of its mailbox."""
        if self._boundary.is_tired_of(peer):
            return f"{peer_id_of(peer)} has caused too many faults"
        mine = len(self._incoming_of.get(peer, ()))
        if mine >= STREAMS_OF_PEER_MAX:
            return f"{peer_id_of(peer)} has {mine}"
        if sum(map(len, self._incoming_of.values())) >= STREAMS_MAX:
            other = self._who_gives_way(peer)
            if other is None:
                return f"{STREAMS_MAX} are open"
            self._counters["streams given up"] += 1
            self._incoming_of[other].pop().abort()
            if not self._incoming_of[other]:
                del self._incoming_of[other]
        return ""

    def _who_gives_way(self, peer: bytes) -> bytes | None:
        """Returns the peer that has to give up a stream for this one; one with as many would want it back at once."""
        streams, ranges = self._incoming_of, Counter[str]()
        most: dict[str, bytes] = {}  # by range: the stranger with the most streams
        for each, open_ones in streams.items():
            if not self.is_admitted(each):
                place = self._range_of(each)
                ranges[place] += len(open_ones)
                if place not in most or len(open_ones) > len(streams[most[place]]):
                    most[place] = each
        mine, place, is_admitted = len(streams.get(peer, ())), self._range_of(peer), self.is_admitted(peer)
        widest = max(ranges, key=ranges.__getitem__, default="")
        if ranges and (is_admitted or ranges[widest] >= ranges[place] + 2):
            return most[widest]
        other = max(streams, key=lambda each: len(streams[each])) if is_admitted else most.get(place)
        return other if other is not None and len(streams[other]) >= mine + 2 else None

    async def _handle(self, stream: FrameStream) -> None:
        self._incoming_of.setdefault(stream.peer, []).append(stream)
        try:
            with self._boundary.guard("an incoming stream", stream.peer):
                await self.handlers[stream.protocol](stream)
                await stream.close()
        except (RemoteProtocolError, TransportError, TimeoutError) as error:
            logger.debug("a stream %s of %s ended: %s", stream.protocol, peer_id_of(stream.peer), error)
        finally:
            stream.abort()
            streams = self._incoming_of.get(stream.peer, [])
            if stream in streams:  # it may have been given up meanwhile
                streams.remove(stream)
                if not streams:
                    del self._incoming_of[stream.peer]

    def _refuse(self, writer: asyncio.StreamWriter, why: str) -> None:
        self._counters["streams refused"] += 1
        logger.debug("refused a stream: %s", why)
        writer.transport.abort()
