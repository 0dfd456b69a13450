"""Decides which peer gets the next piece.

Turns are fair between peers, not streams: nobody gains by many, and one that requests nothing takes nothing away. On a
slow line few payloads go at once, so that the first arrive early and their takers pass them on; who reads much more
slowly than others did keeps nobody from beginning.

A round waits for payloads, while a newcomer can wait for its state. So states and training data are sent only when no
payload is queued or being sent and the upload limit lets them go at once; a few at a time, and all together no faster
than BACKGROUND_BYTES_PER_SECOND, however fast the link is. Payloads do not block them forever: a piece that has waited
for OVERDUE_SECONDS goes in between, and is paid for with half of what the upload limit allows afterwards.

Strangers, whom the run has not admitted, come after all others and are never urgent. So that newcomers still get what
they need from a busy source, their overdue pieces go in between, too, but at a small rate for all of them together."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from p2ptrain.errors import P2ptrainError
from p2ptrain.net.rate_limit import DEBT_SECONDS, TokenBucket
from p2ptrain.net.transport import MOVES_SECONDS, Stream

PEERS_AT_ONCE = 64  # being sent a piece: 64 MiB if all of them read slowly
URGENT_AT_ONCE = 4  # payloads under way before the next begins: the first arrive early, and members pass them on
BUFFERED_BYTES = 2**19  # of less than this nobody knows when it was read
QUICK_SECONDS = 1.5  # in which a payload is sent for there to be one more at once; one that takes longer halves them
STILL_SECONDS = 2.0  # without a byte: after that a turn keeps no other from beginning
SLOW_SHARE = 16  # so many times slower than the quickest of late is the reader's doing, not that of a shared line
FORGOTTEN_SECONDS = 30.0  # in which that one's speed counts half
PROBE_SECONDS = 8.0  # after which one more begins, though none has ended: it shows whether others would be faster
STRANGERS_AT_ONCE = 16  # on top: they take no place from others, even if they do not read at all
OF_RANGE_AT_ONCE = 8  # of these, from one range of addresses
STRANGERS_BYTES_PER_SECOND = 2**19  # while others wait; with an upload limit, at most 1/STRANGERS_SHARE of it
STRANGERS_SHARE = 8
TURN_SECONDS = 10.0  # that a request waits for its turn
TURNS_MAX = 1_024  # peers whose last turn is remembered
OVERDUE_SECONDS = 8.0  # so even a busy source sends one piece in this time
BACKGROUND_AT_ONCE = 4  # peers being sent a background piece: a payload has to wait for these bytes
BACKGROUND_BYTES_PER_SECOND = 2**22  # 34 Mbit/s from each source; eight saturate a newcomer's link and one core


class BusyError(P2ptrainError):
    """A peer's turn did not come in time."""


@dataclass(slots=True, eq=False)
class Turn:
    """A peer's place in the queue, for one piece or long reply."""

    peer: bytes
    size: int
    is_urgent: bool
    is_admitted: bool
    place: bytes | str  # its range of addresses, whose peers take turns, if that was given; or else the peer
    overdue_at: float
    come: asyncio.Future[None]
    stream: Stream | None = None
    began: float = math.inf
    before: int = 0  # bytes of the stream when it began
    moved: int = 0  # since then
    moved_at: float = math.inf

    def begin(self, now: float) -> None:
        self.began = self.moved_at = now
        self.before = self.stream.moved if self.stream is not None else 0

    def keeps_others(self, now: float, quickest: float) -> bool:
        """Whether its bytes are what a slow line is busy with."""
        moved = self.stream.moved - self.before if self.stream is not None else 0
        if moved != self.moved:
            self.moved, self.moved_at = moved, now
        seconds = now - self.began
        is_slow = seconds > STILL_SECONDS and moved * SLOW_SHARE < quickest * seconds
        return now - self.moved_at < STILL_SECONDS and not is_slow


class Turns:
    """The queue for uploads: one turn at a time per peer, the longest unserved peer first."""

    def __init__(self, upload: TokenBucket) -> None:
        self._upload, self._background = upload, TokenBucket(BACKGROUND_BYTES_PER_SECOND)
        self._waiting: list[Turn] = []  # in order of arrival
        self._going: dict[bytes, Turn] = {}  # by peer
        self._at_once, self._began_at = URGENT_AT_ONCE, -math.inf  # payloads; when the last of them began
        self._quickest, self._quickest_at = 0.0, 0.0  # bytes a second of one payload, and when
        self._payer: Turn | None = None  # the turn that waits for the upload limit
        self._served: OrderedDict[bytes | str, int] = OrderedDict()  # by place and peer: the last turn; the latest last
        self._number = 0
        self._paid_at = 0.0  # when the last piece that did not wait for the limit will be paid for
        self._strangers_at = 0.0  # when the next overdue piece of a stranger may go
        self._timer: asyncio.TimerHandle | None = None  # the next time to look

    @asynccontextmanager
    async def turn(
        self,
        peer: bytes,
        size: int,
        is_urgent: bool = True,
        is_admitted: bool = True,
        stream: Stream | None = None,
        of_range: str | None = None,
    ) -> AsyncIterator[None]:
        """Waits for a turn to send `size` bytes. A call cancelled before that has used up nothing."""
        loop = asyncio.get_running_loop()
        is_urgent = is_urgent and is_admitted
        place, due_at = peer if of_range is None else of_range, loop.time() + OVERDUE_SECONDS
        mine = Turn(peer, size, is_urgent, is_admitted, place, due_at, loop.create_future(), stream)
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
            elif not self._upload.take_now(size):  # overdue: waiting for the limit here would hold up payloads
                self._upload.charge(size)
                self._paid_at = loop.time() + 2 * size / self._upload.rate
            self._number += 1
            for each in (peer, place):
                self._served[each] = self._number
                self._served.move_to_end(each)
            while len(self._served) > TURNS_MAX:
                self._served.popitem(last=False)
            self._payer = None
            mine.begin(loop.time())
            if is_urgent:
                self._began_at = mine.began
            self._advance()
            yield
            if is_urgent and size > BUFFERED_BYTES:
                self._learn(size, loop.time() - mine.began)
        finally:
            timer.cancel()
            if mine in self._waiting:
                self._waiting.remove(mine)
            if self._going.get(peer) is mine:
                del self._going[peer]
            if self._payer is mine:
                self._payer = None
            self._advance()

    def _learn(self, size: int, seconds: float) -> None:
        """Takes in how long a payload took."""
        speed, quickest = size / max(seconds, 0.1), self._quickest_now()
        if speed * SLOW_SHARE >= quickest:
            at_once = self._at_once + 1 if seconds < QUICK_SECONDS else self._at_once // 2
            self._at_once = min(max(at_once, URGENT_AT_ONCE), PEERS_AT_ONCE)
        if speed > quickest:
            self._quickest, self._quickest_at = speed, asyncio.get_running_loop().time()

    def _quickest_now(self) -> float:
        return self._quickest * math.exp2((self._quickest_at - asyncio.get_running_loop().time()) / FORGOTTEN_SECONDS)

    def _advance(self) -> None:
        """Starts the next turn, unless one still waits for the upload limit."""
        if self._payer is not None:
            return
        if (turn := self._next()) is not None:
            self._payer = self._going[turn.peer] = turn
            self._waiting.remove(turn)
            turn.come.set_result(None)

    def _next(self) -> Turn | None:
        loop, served = asyncio.get_running_loop(), self._served
        now, ranges = loop.time(), Counter(each.place for each in self._going.values() if not each.is_admitted)
        strangers = ranges.total()
        has_place = {True: len(self._going) - strangers < PEERS_AT_ONCE, False: strangers < STRANGERS_AT_ONCE}
        quickest, going = self._quickest_now(), self._going.values()
        is_full = sum(each.is_urgent and each.keeps_others(now, quickest) for each in going) >= self._at_once
        is_full = is_full and now < self._began_at + PROBE_SECONDS
        ready = [
            each
            for each in self._waiting
            if each.peer not in self._going and not each.come.done() and has_place[each.is_admitted]
            if ranges[each.place] < OF_RANGE_AT_ONCE
        ]
        if is_full and any(each.is_urgent for each in ready):
            ready = [each for each in ready if not each.is_urgent]
            self._look_in(MOVES_SECONDS)
        ready.sort(key=lambda each: (served.get(each.place, 0), served.get(each.peer, 0)))
        ready.sort(key=lambda each: not each.is_admitted and not self._is_due(each))
        urgent = [each for each in ready if each.is_urgent]
        are_urgent = [each.is_urgent for each in going]
        if urgent or any(are_urgent) or are_urgent.count(False) >= BACKGROUND_AT_ONCE:
            ready = [each for each in ready if each.is_urgent or self._is_due(each)]
        if not ready or ready[0].is_urgent:
            return ready[0] if ready else None
        turn, is_due = ready[0], self._is_due(ready[0])
        wait = self._background.seconds_until(turn.size)
        may_owe = now >= self._paid_at and turn.size <= DEBT_SECONDS * self._upload.rate
        if not is_due or not may_owe:
            wait = max(wait, self._upload.seconds_until(turn.size))
        if wait > 0:
            self._look_in(min(wait, MOVES_SECONDS) if is_full else wait)
            return urgent[0] if urgent else None
        was_taken = self._background.take_now(turn.size)
        assert was_taken, "its wait was zero just now"
        if is_due and not turn.is_admitted:
            rate = STRANGERS_BYTES_PER_SECOND
            if self._upload.rate:
                rate = min(rate, max(1, self._upload.rate // STRANGERS_SHARE))
            self._strangers_at = now + turn.size / rate
            loop.call_at(self._strangers_at, self._advance)
        return turn

    def _look_in(self, seconds: float) -> None:
        if self._timer is not None:  # one timer, because this is called for everyone who comes or goes
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._advance)

    def _is_due(self, turn: Turn) -> bool:
        """Whether a turn has waited so long that it goes before urgent ones."""
        now = asyncio.get_running_loop().time()
        return now >= turn.overdue_at and (turn.is_admitted or now >= self._strangers_at)
