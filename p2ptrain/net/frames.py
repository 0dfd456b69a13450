"""Frames over a byte stream: four bytes of length, the largest first, and the frame.

The length is checked before a byte of the frame is awaited, so that a peer cannot make us allocate what it names.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from p2ptrain.errors import RemoteProtocolError
from p2ptrain.net.transport import FRAME_BYTES_MAX, TransportError

LENGTH_BYTES = 4
LINGER_SECONDS = 3.0  # for a peer to read the last frame, which is short, and hang up
CLOSE_SECONDS = 10.0  # for what was sent to go out; a peer that takes longer to read a last frame is not reading
VARINT_BITS_MAX = 35  # of a length from p2pd
BUFFER_BYTES = 2**18  # of a stream, each way; what is read ahead of its reader may be twice that


class FrameStream:
    """A `Stream` over a connection to p2pd, which passes on whatever it is given, both ways."""

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
        self._coming = -1  # bytes of the frame whose length has been read, for one who was interrupted in between
        writer.transport.set_write_buffer_limits(high=BUFFER_BYTES)

    def __repr__(self) -> str:
        return f"FrameStream({self.peer.hex()[:8]}, {self.protocol})"

    async def send(self, frame: bytes | memoryview) -> None:
        size = frame.nbytes if isinstance(frame, memoryview) else len(frame)
        assert size <= FRAME_BYTES_MAX, f"a frame of {size} bytes; it goes in several"
        if self._writer.is_closing():
            raise TransportError("the stream was closed")
        try:
            self._writer.write(size.to_bytes(LENGTH_BYTES, "big"))  # nothing can come between it and the frame
            self._writer.write(frame)
            await self._writer.drain()
        except ConnectionError as error:
            raise TransportError(f"the stream broke while sending: {error}") from error
        self._counters.update({"bytes sent": size, f"sent {self.protocol}": size})

    async def receive(self, bytes_max: int) -> bytes:
        try:
            if self._coming < 0:
                self._coming = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "big")
            size = self._coming
            if size > min(bytes_max, FRAME_BYTES_MAX):
                self.abort()  # where the next frame begins is past what we are willing to read
                raise RemoteProtocolError(f"a frame of {size} bytes, where at most {bytes_max} are taken")
            frame, self._coming = await self._reader.readexactly(size), -1
        except asyncio.IncompleteReadError as error:
            inside = " in the middle of a frame" if error.partial or self._coming >= 0 else ""
            raise TransportError(f"the peer closed the stream{inside}") from error
        except ConnectionError as error:
            raise TransportError(f"the stream broke while receiving: {error}") from error
        self._counters.update({"bytes received": size, f"received {self.protocol}": size})
        return frame

    async def close(self) -> None:
        """Wait until p2pd has taken everything: it hangs up when all of it is on its way.

        Told of the end, p2pd lets go of both ways at once, and over QUIC that undoes what the peer has not read yet. So
        who was sent an answer should hang up first.
        """
        try:
            if not self._writer.is_closing():
                with suppress(TimeoutError):
                    async with asyncio.timeout(LINGER_SECONDS):
                        await self._read_on()
                async with asyncio.timeout(CLOSE_SECONDS):
                    self._writer.write_eof()
                    await self._read_on()
        except (TimeoutError, ConnectionError):
            pass  # the peer does not read, or is gone: either way there is nothing left to wait for
        finally:
            self.abort()

    async def _read_on(self) -> None:
        """To the end: nobody asks for it any more, and closing with unread bytes would be a reset."""
        while await self._reader.read(BUFFER_BYTES):
            pass

    def abort(self) -> None:
        self._writer.transport.abort()
        self._ended(self)


async def read_message(reader: asyncio.StreamReader, bytes_max: int) -> bytes:
    """A message on a connection to p2pd, which counts its lengths in protobuf's varints: seven bits a byte."""
    size = shift = 0
    try:
        while True:
            byte = (await reader.readexactly(1))[0]
            size |= (byte & 0x7F) << shift
            shift += 7
            if size > bytes_max or shift > VARINT_BITS_MAX:
                raise TransportError(f"p2pd sends a message of {size} bytes or more")
            if byte < 0x80:
                return await reader.readexactly(size)
    except asyncio.IncompleteReadError as error:
        raise TransportError("p2pd hung up") from error
    except OSError as error:
        raise TransportError(f"p2pd is gone: {error}") from error


async def write_message(writer: asyncio.StreamWriter, message: bytes) -> None:
    size, encoded = len(message), bytearray()
    while size > 0x7F:
        encoded.append(size & 0x7F | 0x80)
        size >>= 7
    encoded.append(size)
    try:
        writer.write(bytes(encoded))
        writer.write(message)
        await writer.drain()
    except OSError as error:
        raise TransportError(f"p2pd is gone: {error}") from error
