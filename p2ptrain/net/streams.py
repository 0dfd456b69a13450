"""Incoming streams: who may have how many, who answers them, and what becomes of them when the answer fails."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from p2ptrain.errors import RemoteProtocolError
from p2ptrain.identity import PeerIdError, key_of_bytes, peer_id_of
from p2ptrain.net.frames import FrameStream
from p2ptrain.net.tasks import Tasks
from p2ptrain.net.transport import Handler, TransportError

STREAMS_MAX, STREAMS_OF_PEER_MAX = 256, 32  # at a time; a peer with more has lost count of them. 130 MB of buffers
HANDSHAKE_SECONDS = 10.0  # for p2pd to say whose stream it brings

ReadOpening: TypeAlias = Callable[[asyncio.StreamReader], Awaitable[tuple[bytes, str]]]  # the peer's id, the protocol
logger = logging.getLogger("p2ptrain.net")


class Streams:
    """All open streams of a node, and the handlers of those that peers open."""

    def __init__(self, counters: Counter[str], tasks: Tasks, read_opening: ReadOpening) -> None:
        self.handlers: dict[str, Handler] = {}
        self._counters, self._tasks, self._read_opening = counters, tasks, read_opening
        self._open: set[FrameStream] = set()
        self._incoming = 0
        self._incoming_of: Counter[bytes] = Counter()

    def add(
        self, peer: bytes, protocol: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> FrameStream:
        stream = FrameStream(peer, protocol, reader, writer, self._counters, self._open.discard)
        self._open.add(stream)
        return stream

    def abort(self) -> None:
        for stream in list(self._open):
            stream.abort()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection from p2pd."""
        if self._incoming < STREAMS_MAX:
            self._incoming += 1
            self._tasks.spawn(self._answer(reader, writer))
        else:
            self._refuse(writer, f"{STREAMS_MAX} are open")

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                peer_id, protocol = await self._read_opening(reader)
            peer = key_of_bytes(peer_id)
            if self._incoming_of[peer] >= STREAMS_OF_PEER_MAX:
                self._refuse(writer, f"{peer_id_of(peer)} has {STREAMS_OF_PEER_MAX}")
            else:
                await self._handle(self.add(peer, protocol, reader, writer))
        except PeerIdError as error:
            self._refuse(writer, str(error))
        except (TransportError, TimeoutError) as error:
            logger.debug("p2pd did not say whose stream it brings: %s", error)
        finally:
            self._incoming -= 1
            writer.transport.abort()

    async def _handle(self, stream: FrameStream) -> None:
        self._incoming_of[stream.peer] += 1
        try:
            await self.handlers[stream.protocol](stream)
            await stream.close()
        except (RemoteProtocolError, TransportError) as error:
            logger.debug("a stream %s of %s ended: %s", stream.protocol, peer_id_of(stream.peer), error)
        finally:
            stream.abort()
            self._incoming_of[stream.peer] -= 1
            if not self._incoming_of[stream.peer]:
                del self._incoming_of[stream.peer]

    def _refuse(self, writer: asyncio.StreamWriter, why: str) -> None:
        self._counters["streams refused"] += 1
        logger.debug("refused a stream: %s", why)
        writer.transport.abort()
