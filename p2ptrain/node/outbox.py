"""The outbox: messages waiting to be gossiped. When it is full, the oldest is dropped; it will be sent again."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress

from p2ptrain.net.boundary import Boundary
from p2ptrain.net.transport import TransportError

OUTBOX_MAX = 1_024
LOST = "messages not published"


class Outbox:
    """Publishes messages one after the other, and counts lost ones in `counters`."""

    def __init__(self, publish: Callable[[bytes], Awaitable[None]], counters: Counter[str], boundary: Boundary) -> None:
        self._publish, self._counters, self._boundary = publish, counters, boundary
        self._waiting: deque[bytes] = deque()
        self._has_any = asyncio.Event()

    def put(self, envelope: bytes) -> None:
        if len(self._waiting) >= OUTBOX_MAX:
            self._waiting.popleft()
            self._counters[LOST] += 1
        self._waiting.append(envelope)
        self._has_any.set()

    async def run(self) -> None:
        while True:
            await self._has_any.wait()
            self._has_any.clear()
            while self._waiting:
                is_lost = True
                with self._boundary.contain("gossiping a message"), suppress(TransportError):
                    await self._publish(self._waiting[0])
                    is_lost = False
                self._counters[LOST] += is_lost
                self._waiting.popleft()

    async def drain(self, others: Callable[[], int]) -> None:
        """Waits up to a second for the last messages to go out, and for `others`, which returns how many there are."""
        for _ in range(50):
            if not self._waiting and not others():
                return
            await asyncio.sleep(0.02)
