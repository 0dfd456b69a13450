"""A limit on bytes a second that many share: a token bucket (Turner 1986), first come, first served.

Whoever wants more than a burst holds goes when the bucket is full and leaves it in debt, so that the average holds for
pieces of any size. Time is the event loop's.
"""

from __future__ import annotations

import asyncio

from p2ptrain.digest import PIECE_BYTES

DEBT_SECONDS = 60.0  # of the rate: what is charged beyond it goes uncounted


class TokenBucket:
    """At most so many bytes a second on average, and at once a second's worth or a piece, whichever is larger."""

    def __init__(self, bytes_per_second: int) -> None:
        assert bytes_per_second >= 0, "0 is no limit"
        self._rate = bytes_per_second
        self._level = float(self._burst)
        self._debt = 0.0  # that could not wait: repaid with half of what comes, so that it holds up nobody for long
        self._filled_at: float | None = None  # at the first use: before it no loop may be there
        self._turn = asyncio.Lock()  # whose waiters go in order
        self._changed = asyncio.Event()

    @property
    def rate(self) -> int:
        """Bytes a second; 0: no limit."""
        return self._rate

    @rate.setter
    def rate(self, bytes_per_second: int) -> None:
        """From now on; who waits feels it at once."""
        assert bytes_per_second >= 0, "0 is no limit"
        self._fill()
        was_unlimited, self._rate = not self._rate, bytes_per_second
        self._level = float(self._burst) if was_unlimited else min(self._level, float(self._burst))
        self._changed.set()

    async def take(self, size: int) -> None:
        """Wait for one's turn, and until so many bytes may go. Who is cancelled has taken nothing."""
        async with self._turn:
            while (wait := self._wait(size)) > 0:
                self._changed.clear()
                try:
                    async with asyncio.timeout(wait):
                        await self._changed.wait()
                except TimeoutError:
                    pass
            self._level -= size if self._rate else 0

    def take_now(self, size: int) -> bool:
        """Take without waiting, if that is possible and nobody waits."""
        if self._turn.locked() or self._wait(size) > 0:
            return False
        self._level -= size if self._rate else 0
        return True

    def seconds_until(self, size: int) -> float:
        """When so many may be taken, if nobody else takes any."""
        return self._wait(size)

    def charge(self, size: int) -> None:
        """Count bytes that could not wait: what comes after them goes half as fast until they are paid for."""
        self._fill()
        self._debt = min(self._debt + size, DEBT_SECONDS * self._rate)

    @property
    def _burst(self) -> int:
        return max(self._rate, PIECE_BYTES)

    def _fill(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._filled_at is not None:
            come = (now - self._filled_at) * self._rate
            paid = min(self._debt, come / 2)
            self._debt -= paid
            self._level = min(float(self._burst), self._level + come - paid)
        self._filled_at = now

    def _wait(self, size: int) -> float:
        """Seconds until so many bytes may go."""
        self._fill()
        missing = min(size, self._burst) - self._level
        if not self._rate or missing <= 1e-6:  # less than a byte is rounding
            return 0.0
        return max(missing + min(self._debt, missing), 1e-6) / self._rate
