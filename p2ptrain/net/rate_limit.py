"""A rate limit in bytes per second, shared by many tasks: a token bucket (Turner 1986), first come, first served.

A request larger than the bucket goes when the bucket is full and leaves it negative, so that the average holds for
pieces of any size. The clock is the event loop's.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from p2ptrain.digest import PIECE_BYTES

PEERS_MAX = 1_024  # whose budgets are remembered: more than can be connected
DEBT_SECONDS = 60.0  # the maximum debt is the rate times this; charges beyond it are not counted


class TokenBucket:
    """A limit on the average rate, with a burst of a second's worth or `burst` bytes, whichever is larger."""

    def __init__(self, bytes_per_second: int, *, burst: int = PIECE_BYTES) -> None:
        assert bytes_per_second >= 0, "0 means no limit"
        self._rate, self._burst_min = bytes_per_second, burst
        self._level = float(self._burst)
        self._debt = 0.0  # bytes charged without waiting; half of each refill repays it, so nobody is held up long
        self._filled_at: float | None = None  # set at the first use: there may be no event loop before
        self._turn = asyncio.Lock()  # its waiters are served in order
        self._changed = asyncio.Event()

    @property
    def rate(self) -> int:
        """Bytes per second; 0 means no limit."""
        return self._rate

    def set_rate(self, bytes_per_second: int) -> None:
        """Changes the rate, also for tasks that are already waiting."""
        assert bytes_per_second >= 0, "0 means no limit"
        self._fill()
        was_unlimited, self._rate = not self._rate, bytes_per_second
        self._level = float(self._burst) if was_unlimited else min(self._level, float(self._burst))
        self._changed.set()

    async def take(self, size: int) -> None:
        """Waits its turn until `size` bytes may go, and takes them. A cancelled call has taken nothing."""
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
        """Takes `size` bytes if nobody is waiting and they may go at once; returns whether it did."""
        if self._turn.locked() or self._wait(size) > 0:
            return False
        self._level -= size if self._rate else 0
        return True

    def spend(self, size: int) -> None:
        """Takes `size` bytes that cannot wait, even if later ones have to wait until these are paid for; or, if it is
        negative, gives back what was taken and not used."""
        self._fill()
        self._level = min(float(self._burst), self._level - (size if self._rate else 0))

    def seconds_until(self, size: int) -> float:
        """Seconds until `size` bytes may be taken, if nobody else takes any."""
        return self._wait(size)

    def charge(self, size: int) -> None:
        """Counts bytes that could not wait: later ones go half as fast until these are paid for."""
        self._fill()
        self._debt = min(self._debt + size, DEBT_SECONDS * self._rate)

    @property
    def _burst(self) -> int:
        return max(self._rate, self._burst_min)

    def _fill(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._filled_at is not None:
            come = (now - self._filled_at) * self._rate
            paid = min(self._debt, come / 2)
            self._debt -= paid
            self._level = min(float(self._burst), self._level + come - paid)
        self._filled_at = now

    def _wait(self, size: int) -> float:
        """Refills, and returns the seconds until `size` bytes may go."""
        self._fill()
        missing = min(size, self._burst) - self._level
        if not self._rate or missing <= 1e-6:  # less than a byte is rounding
            return 0.0
        return max(missing + min(self._debt, missing), 1e-6) / self._rate


class Shares:
    """Parts of the upload limit: one for all admitted peers, one for all strangers, who have a limit in any case.

    Keys cost nothing, so a limit for each of them would be none.
    """

    def __init__(
        self, upload: TokenBucket, is_admitted: Callable[[bytes], bool], parts: tuple[int, int], strangers_max: int
    ) -> None:
        """`parts` are the denominators for strangers and for admitted peers; `strangers_max` is in bytes per second."""
        self._upload, self._is_admitted = upload, is_admitted
        self._parts, self._strangers_max = parts, strangers_max
        self._limits = {True: TokenBucket(0), False: TokenBucket(strangers_max)}  # for admitted peers, or not

    def of(self, peer: bytes) -> TokenBucket:
        """Returns the limit that this peer shares with all like it."""
        is_admitted, upload = self._is_admitted(peer), self._upload.rate
        rate = max(1, upload // self._parts[is_admitted]) if upload else 0
        if not is_admitted:
            rate = min(rate or self._strangers_max, self._strangers_max)
        limit = self._limits[is_admitted]
        if limit.rate != rate:  # the owner may have changed the limit
            limit.set_rate(rate)
        return limit


class PeerBudgets:
    """A limit for each peer, and one for all strangers together, because keys are free. Members share none."""

    def __init__(self, peer_bytes_per_second: int, strangers_bytes_per_second: int) -> None:
        self._of_peer = peer_bytes_per_second
        self._of_peers: OrderedDict[bytes, TokenBucket] = OrderedDict()  # the one that has been silent longest first
        self._of_strangers = TokenBucket(strangers_bytes_per_second)

    def take_now(self, peer: bytes, size: int, *, is_admitted: bool) -> bool:
        budget = self._of_peers.setdefault(peer, TokenBucket(self._of_peer))
        self._of_peers.move_to_end(peer)
        if len(self._of_peers) > PEERS_MAX:
            self._of_peers.popitem(last=False)
        return budget.take_now(size) and (is_admitted or self._of_strangers.take_now(size))
