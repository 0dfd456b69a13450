"""Frames over a byte stream: a length of four bytes, big-endian, then the frame.

The length is checked before anything is allocated, so that a peer cannot make us allocate whatever it claims.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from p2ptrain.errors import RemoteProtocolError
from p2ptrain.net.transport import FRAME_BYTES_MAX, TransportError

LENGTH_BYTES = 4
LINGER_SECONDS = 3.0  # for a peer to read the last, short frame and hang up
CLOSE_SECONDS = 10.0  # to flush what was sent; a peer that needs longer for the last frame is not reading
VARINT_BITS_MAX = 35  # in a length sent by p2pd
BUFFER_BYTES = 2**18  # per stream and direction; asyncio may read ahead twice as much


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
        writer.transport.set_write_buffer_limits(high=BUFFER_BYTES)

    def __repr__(self) -> str:
        return f"FrameStream({self.peer.hex()[:8]}, {self.protocol})"

    async def send(self, frame: bytes | memoryview) -> None:
        size = frame.nbytes if isinstance(frame, memoryview) else len(frame)
        assert size <= FRAME_BYTES_MAX, f"a frame of {size} bytes, which has to be split"
        if self.is_gone:
            raise TransportError("the stream was closed")
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

    async def coming(self) -> int:
        if self._coming < 0:
            self._coming = int.from_bytes(await self._read(LENGTH_BYTES), "big")
        return self._coming

    async def skip(self) -> None:
        while left := await self.coming():
            part = await self._read(min(left, BUFFER_BYTES))
            self._coming -= len(part)
        self._coming = -1

    async def receive(self, bytes_max: int) -> bytes:
        if (size := await self.coming()) > min(bytes_max, FRAME_BYTES_MAX):
            self.abort()  # the next frame begins beyond what we are willing to read
            raise RemoteProtocolError(f"a frame of {size} bytes; the limit is {bytes_max}")
        frame, self._coming = await self._read(size), -1
        self._counters.update({"bytes received": size, f"received {self.protocol}": size})
        return frame

    async def _read(self, size: int) -> bytes:
        try:
            return await self._reader.readexactly(size)
        except asyncio.IncompleteReadError as error:
            inside = " in the middle of a frame" if error.partial or self._coming >= 0 else ""
            raise TransportError(f"the peer closed the stream{inside}") from error
        except ConnectionError as error:
            raise TransportError(f"the stream broke while receiving: {error}") from error

    async def close(self) -> None:
        """Waits until p2pd has sent everything: it hangs up when all of it is on its way.

        At our end of file p2pd closes both directions at once, and over QUIC that discards what the peer has not read
        yet. So the peer that gets the last frame should hang up first.
        """
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

    It is a varint of protobuf: seven bits a byte.
    """
    size = shift = 0
    for place in range(at, len(data)):
        size |= (data[place] & 0x7F) << shift
        shift += 7
        if size > bytes_max or shift > VARINT_BITS_MAX:
            raise TransportError(f"p2pd sent a message of {size} bytes or more")
        if data[place] < 0x80:
            return place + 1, place + 1 + size
    return None
