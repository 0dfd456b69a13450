"""/events: changes as server-sent events, for a few watchers.

Each watcher has a bounded queue. One that does not read is dropped; a page that reconnects asks for /status and
/rounds, and so misses nothing. An event is encoded once for all watchers, and without watchers nothing is computed.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable

from aiohttp import web

from p2ptrain.observe.guard import secured
from p2ptrain.observe.schema import Answer

WATCHERS_MAX = 16  # of the 64 connections; the rest are for ordinary requests
QUEUED_MAX = 256  # events for one watcher; there are about three per second
QUEUED_BYTES_MAX = 2**22  # a status with hundreds of peers has 100 kB
SEND_SECONDS = 10.0  # for a watcher to receive an event
SILENT_SECONDS = 15.0  # before a keep-alive comment, by which both ends notice a dead connection
RETRY_MILLISECONDS = 2_000  # until a browser reconnects


def encode(name: str, answer: Answer) -> bytes:
    """Encodes an event. The JSON contains no line breaks, so the data is one line."""
    return f"event: {name}\ndata: {answer.model_dump_json()}\n\n".encode()


def client_of(request: web.Request) -> str:
    """Names who asks: an address, and whether it is our own page there, for which a browser vouches."""
    return f"{request.remote} {request.headers.get('Sec-Fetch-Site') == 'same-origin'}"


class Watcher:
    """A client of /events, with its queue."""

    def __init__(self, client: str = "") -> None:
        self.client = client
        self.queue: deque[bytes] = deque()
        self.size = 0
        self.is_over = False
        self.is_filled = asyncio.Event()

    def put(self, event: bytes) -> None:
        if len(self.queue) >= QUEUED_MAX or self.size + len(event) > QUEUED_BYTES_MAX:
            self.end()
            return
        self.queue.append(event)
        self.size += len(event)
        self.is_filled.set()

    def take(self) -> bytes:
        event = b"".join(self.queue)
        self.queue.clear()
        self.size = 0
        self.is_filled.clear()
        return event

    def end(self) -> None:
        self.is_over = True
        self.is_filled.set()


class Events:
    """Publishes events to all watchers of a node."""

    def __init__(self) -> None:
        self.watchers: dict[Watcher, None] = {}  # the oldest first
        self.dropped = 0  # watchers that did not read
        self.broken = 0  # times that the publisher failed
        self.is_broken = False  # until it recovers: silence must not look like a node where nothing changes
        self.is_watched = asyncio.Event()

    def make_room(self, client: str) -> bool:
        """Whether this client may watch. If all places are taken, the client with most of them loses its oldest one to
        a client with fewer."""
        if len(self.watchers) < WATCHERS_MAX:
            return True
        counts = Counter(each.client for each in self.watchers)
        most, count = max(counts.items(), key=lambda item: item[1], default=("", 0))
        if counts[client] + 1 >= count:
            return False
        oldest = next(each for each in self.watchers if each.client == most)
        oldest.end()
        del self.watchers[oldest]
        return True

    def publish(self, name: str, answer: Answer) -> None:
        event = encode(name, answer)
        for each in self.watchers:
            each.put(event)

    async def watch(self, request: web.Request, first: Iterable[tuple[str, Answer]]) -> web.StreamResponse:
        """Sends events, beginning with `first`, until the watcher or the node goes away."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        secured(response)
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        watcher = Watcher(client_of(request))
        watcher.put(f"retry: {RETRY_MILLISECONDS}\n\n".encode())
        for name, answer in first:
            watcher.put(encode(name, answer))
        self.watchers[watcher] = None
        self.is_watched.set()
        try:
            await self._send(response, watcher)
        except (TimeoutError, ConnectionError):
            self.dropped += 1
            if request.transport is not None:
                request.transport.abort()  # otherwise its slot stays taken until it reads
        finally:
            self.watchers.pop(watcher, None)
            if not self.watchers:
                self.is_watched.clear()
        return response

    async def _send(self, response: web.StreamResponse, watcher: Watcher) -> None:
        while not watcher.is_over:
            try:
                async with asyncio.timeout(SILENT_SECONDS):
                    await watcher.is_filled.wait()
            except TimeoutError:
                watcher.put(b": still here\n\n")
            async with asyncio.timeout(SEND_SECONDS):
                await response.write(watcher.take())

    def break_off(self) -> None:
        """Disconnects all watchers because the publisher has failed."""
        self.broken += 1
        self.is_broken = True
        self.close()

    def go_on(self) -> None:
        """Lets watchers in again."""
        self.is_broken = False

    def close(self) -> None:
        for each in self.watchers:
            each.end()
