"""To whom the next piece goes.

Turns are fair between peers and not between streams: it helps nobody to hold many of them, and one that asks for no
piece takes nothing from anyone.

A round waits for payloads; a newcomer can wait for its state. So states and training data go out when no payload waits
or is on its way and the upload limit lets them go at once, a few at a time, and all together no faster than
BACKGROUND_BYTES_PER_SECOND, whatever the line could carry. Payloads do not hold them up for ever: what has waited for
OVERDUE_SECONDS goes between them, and is paid for with half of what the upload limit lets go afterwards.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from p2ptrain.errors import P2ptrainError
from p2ptrain.net.limits import DEBT_SECONDS, TokenBucket

PEERS_AT_ONCE = 64  # that a piece is on its way to: 64 MiB, if all of them read slowly
TURN_SECONDS = 10.0  # that a request waits for its turn, of the 20 that a client waits
TURNS_MAX = 1_024  # peers whose last turn is remembered
OVERDUE_SECONDS = 8.0  # a piece of a megabyte in as many seconds from each source, however busy they are
BACKGROUND_AT_ONCE = 4  # peers that such a piece is on its way to: they queue in the line before a payload
BACKGROUND_BYTES_PER_SECOND = 2**22  # 34 Mbit/s from each source; eight of them fill a newcomer's line, and a core


class BusyError(P2ptrainError):
    """It would take too long until a peer's turn comes."""


@dataclass(slots=True, eq=False)
class Turn:
    """Of one piece, or long word, for a peer."""

    peer: bytes
    size: int
    is_urgent: bool
    overdue_at: float
    come: asyncio.Future[None]


class Turns:
    """One at a time to a peer, and first to those whose last one is longest ago."""

    def __init__(self, upload: TokenBucket) -> None:
        self._upload, self._background = upload, TokenBucket(BACKGROUND_BYTES_PER_SECOND)
        self._waiting: list[Turn] = []  # the first first
        self._going: dict[bytes, Turn] = {}  # by peer
        self._payer: Turn | None = None  # whose bytes the limit does not let go yet
        self._served: OrderedDict[bytes, int] = OrderedDict()  # by peer its last turn's number, the latest last
        self._number = 0
        self._paid_at = 0.0  # when the last piece that went without waiting for the limit is paid for

    @asynccontextmanager
    async def turn(self, peer: bytes, size: int, is_urgent: bool = True) -> AsyncIterator[None]:
        """For so many bytes. Who goes away before they may go has used up nothing."""
        loop = asyncio.get_running_loop()
        mine = Turn(peer, size, is_urgent, loop.time() + OVERDUE_SECONDS, loop.create_future())
        timer = loop.call_at(mine.overdue_at, self._advance)
        self._waiting.append(mine)
        self._advance()
        try:
            try:
                async with asyncio.timeout(TURN_SECONDS):
                    await mine.come
            except TimeoutError as error:
                raise BusyError("busy") from error
            if is_urgent:
                await self._upload.take(size)
            elif not self._upload.take_now(size):  # overdue: to wait for the limit here would hold up payloads
                self._upload.charge(size)
                self._paid_at = loop.time() + 2 * size / self._upload.rate
            self._number += 1
            self._served[peer] = self._number
            self._served.move_to_end(peer)
            while len(self._served) > TURNS_MAX:
                self._served.popitem(last=False)
            self._payer = None
            self._advance()
            yield
        finally:
            timer.cancel()
            if mine in self._waiting:
                self._waiting.remove(mine)
            if self._going.get(peer) is mine:
                del self._going[peer]
            if self._payer is mine:
                self._payer = None
            self._advance()

    def _advance(self) -> None:
        """Let one go; the next when the limit has let that one's bytes go."""
        if self._payer is not None or len(self._going) >= PEERS_AT_ONCE:
            return
        turn = self._next()
        if turn is not None:
            self._payer = self._going[turn.peer] = turn
            self._waiting.remove(turn)
            turn.come.set_result(None)

    def _next(self) -> Turn | None:
        loop = asyncio.get_running_loop()
        ready = [each for each in self._waiting if each.peer not in self._going and not each.come.done()]
        ready.sort(key=lambda each: self._served.get(each.peer, 0))
        urgent = [each for each in ready if each.is_urgent]
        going = [each.is_urgent for each in self._going.values()]
        if urgent or any(going) or going.count(False) >= BACKGROUND_AT_ONCE:
            ready = [each for each in ready if each.is_urgent or loop.time() >= each.overdue_at]
        if not ready or ready[0].is_urgent:
            return ready[0] if ready else None
        turn = ready[0]
        wait = self._background.seconds_until(turn.size)
        may_owe = loop.time() >= self._paid_at and turn.size <= DEBT_SECONDS * self._upload.rate
        if loop.time() < turn.overdue_at or not may_owe:
            wait = max(wait, self._upload.seconds_until(turn.size))
        if wait > 0:
            loop.call_later(wait, self._advance)
            return urgent[0] if urgent else None
        was_taken = self._background.take_now(turn.size)
        assert was_taken, "there was enough just now"
        return turn
