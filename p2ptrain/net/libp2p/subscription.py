"""A subscription: the connection on which p2pd sends the messages of one topic.

gossipsub delivers what anyone publishes, and does not say over which connection it came. So a message begins with its
publisher, whose signature p2pd has checked, and the look-up of that key comes before everything else: a message of a
publisher that is not heard is skipped as its bytes arrive, undecoded and never whole in memory. Waking up costs ten
times what that takes, so after such a message the next are left to pile up in the socket for a moment. p2pd buffers 32
messages for a subscriber, and the socket hundreds of small ones.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import cast

from p2ptrain.identity import ID_PREFIX, KEY_BYTES
from p2ptrain.net.boundary import Boundary
from p2ptrain.net.frames import length_at, with_length
from p2ptrain.net.transport import STRANGERS, TransportError

BYTES_MAX = 2**22  # from p2pd, which we trust; gossipsub passes on a quarter
BEGINNING = b"\x0a" + bytes([len(ID_PREFIX) + KEY_BYTES]) + ID_PREFIX  # of a PSMessage: field 1, an Ed25519 key's id
KEY_END = len(BEGINNING) + KEY_BYTES
PILE_SECONDS = 0.008  # 40 messages of a flood of 5,000 a second; a unix socket holds 200 small ones, and p2pd 32


class Subscription(asyncio.Protocol):
    """Sends the request to subscribe, and hands over heard publishers' messages, with their keys, until p2pd hangs up.

    `answered` takes p2pd's answer, and raises TransportError if it refuses.
    """

    def __init__(
        self,
        request: bytes,
        answered: Callable[[bytes], None],
        is_heard: Callable[[bytes], bool],
        put: Callable[[bytes, bytes], None],
        counters: Counter[str],
        boundary: Boundary,
    ) -> None:
        self._request, self._answered, self._boundary = request, answered, boundary
        self._is_heard, self._put, self._counters = is_heard, put, counters
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._is_answered = False
        self._rest = b""  # the beginning of a message
        self._skip = 0  # bytes still to come of a message that is not heard
        self.ended: asyncio.Future[str] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._transport.write(with_length(self._request))

    def connection_lost(self, error: Exception | None) -> None:
        self._end(f"p2pd hung up: {error}" if error else "p2pd hung up")

    def data_received(self, data: bytes) -> None:
        if self._skip >= len(data):
            self._skip -= len(data)
            self._pile()
            return
        try:
            with self._boundary.guard("gossip as it arrives"):
                self._receive(data)
        except TransportError as error:
            self._end(str(error))
            self.abort()

    def _receive(self, data: bytes) -> None:
        data, at, junk = self._rest + data[self._skip :] if self._rest or self._skip else data, 0, 0
        self._skip, size = 0, len(data)
        while (head := length_at(data, at, BYTES_MAX)) is not None:
            start, end = head
            if size < min(end, start + KEY_END):
                break
            if self._is_answered and not self._hears(data[start : start + KEY_END]):
                junk += 1
                self._skip, at = max(0, end - size), min(end, size)
                continue
            if size < end:
                break
            self._take(data[start:end])
            at = end
        self._rest = data[at:]
        if junk:
            self._counters[STRANGERS] += junk
            self._pile()

    def _hears(self, beginning: bytes) -> bool:
        return beginning.startswith(BEGINNING) and self._is_heard(beginning[len(BEGINNING) :])

    def _take(self, message: bytes) -> None:
        if self._is_answered:
            self._put(message[len(BEGINNING) : KEY_END], message)
            return
        self._answered(message)
        self._is_answered = True

    def _pile(self) -> None:
        """Reads no more for a moment."""
        assert self._transport is not None
        self._transport.pause_reading()
        self._loop.call_later(PILE_SECONDS, self._resume)

    def _resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _end(self, why: str) -> None:
        if not self.ended.done():
            self.ended.set_result(why)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
