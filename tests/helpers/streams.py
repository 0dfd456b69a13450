"""Helpers for tests of incoming streams: opens them the way p2pd does."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from p2ptrain.identity import ID_PREFIX
from p2ptrain.net.boundary import Boundary
from p2ptrain.net.libp2p import streams
from p2ptrain.net.libp2p.streams import FrameStream, Streams
from p2ptrain.net.tasks import Tasks, report_crash
from p2ptrain.net.transport import Stream
from tests.helpers.net import key

PROTOCOL = "/echo/1"
SECONDS = 10.0  # for a local socket


async def echo(stream: Stream) -> None:
    while True:
        await stream.send(await stream.receive(10))


async def read_opening(reader: asyncio.StreamReader) -> tuple[bytes, str]:
    return ID_PREFIX + await reader.readexactly(32), PROTOCOL


class Incoming:
    """Opens streams the way p2pd does, on behalf of any peer."""

    def __init__(self, path: Path) -> None:
        self.counters: Counter[str] = Counter()
        self.tasks = Tasks(report_crash)
        self.ranges: dict[bytes, str] = {}  # of addresses, by peer
        self.boundary = Boundary(lambda peer: self.ranges.get(peer, ""))
        self.streams = Streams(self.counters, self.tasks, read_opening, self.boundary)
        self.streams.handlers[PROTOCOL] = echo
        self._path, self._opened = path, list[FrameStream]()

    async def open(self, number: int) -> FrameStream:
        reader, writer = await asyncio.open_unix_connection(self._path)
        writer.write(key(number))
        self._opened.append(FrameStream(key(number), PROTOCOL, reader, writer, Counter(), lambda _: None))
        return self._opened[-1]

    async def is_answered(self, stream: FrameStream) -> bool:
        """Returns whether a stream gets its answer; False if it was hung up."""
        try:
            async with asyncio.timeout(SECONDS):
                await stream.send(b"?")
                return await stream.receive(10) == b"?"
        except streams.TransportError:
            return False

    async def close(self) -> None:
        for stream in self._opened:
            stream.abort()
        self.streams.abort()
        await self.tasks.cancel()


@asynccontextmanager
async def listening(path: Path) -> AsyncIterator[Incoming]:
    incoming = Incoming(path / "socket")
    async with await asyncio.start_unix_server(incoming.streams.accept, path / "socket"):
        try:
            yield incoming
        finally:
            await incoming.close()
