"""Accepts incoming streams, limits them per peer, and runs their handlers.

When all slots are taken, an admitted peer gets that of a stranger: so strangers keep no member out, however many they
are. Among themselves, the address range with the most streams loses one to a range that has fewer, because keys cost
nothing; and within a range, or among members, so does the peer with the most streams. Ranges are not known of peers
behind a relay and of those that have just come, who share one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

from p2ptrain.errors import RemoteProtocolError
from p2ptrain.identity import PeerIdError, key_of_bytes, peer_id_of
from p2ptrain.net.boundary import Boundary
from p2ptrain.net.frames import FrameStream
from p2ptrain.net.tasks import Tasks
from p2ptrain.net.transport import Handler, IsAdmitted, TransportError

STREAMS_MAX, STREAMS_OF_PEER_MAX = 256, 32  # open at a time; no honest peer needs more. 130 MB of buffers
OPENINGS_MAX = 64  # on top: streams whose peer is not known yet, or that are being closed
HANDSHAKE_SECONDS = 10.0  # for p2pd to name the peer of a stream

ReadOpening: TypeAlias = Callable[[asyncio.StreamReader], Awaitable[tuple[bytes, str]]]  # the peer's id, the protocol
logger = logging.getLogger("p2ptrain.net")


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
            ended = partial(self._ended, writer)
            work = self._boundary.contained("a stream's opening", b"", self._answer, reader, writer, ended=ended)
            self._tasks.spawn(work)
        else:
            self._refuse(writer, f"{self._incoming} are open")

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                peer_id, protocol = await self.read_opening(reader)
            peer = key_of_bytes(peer_id)
            if why := self._make_room(peer):
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

        A peer that has to give one up loses its newest: the first one it opens is that of its mailbox.
        """
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
