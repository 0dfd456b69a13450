"""Rate limits: a token bucket (Turner 1986) that many tasks share, and what each peer and all strangers may take.

What is counted is bytes, mostly. A request larger than the bucket goes when the bucket is full and leaves it negative,
so that the average holds for pieces of any size. The clock is the event loop's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from p2ptrain.digest import PIECE_BYTES
from p2ptrain.net.transport import IsAdmitted, Stream, TransportError

PEERS_MAX = 1_024  # peers and address ranges whose limits are remembered: more than can be connected
RANGE_SHARE = 4  # one address range of strangers gets 1/4 while others leave less than half
WAIT_SECONDS = 0.25  # before a stranger's next try: 256 streams that wait take 1% of the event loop
DEBT_SECONDS = 60.0  # the maximum debt is the rate times this; charges beyond it are not counted


class TokenBucket:
    """A limit on the average rate, with a burst of a second's worth or `burst`, whichever is larger."""

    def __init__(self, rate: int, *, burst: int = PIECE_BYTES) -> None:
        assert rate >= 0, "0 means no limit"
        self._rate, self._burst_min = rate, burst
        self._level = float(self.burst)
        self._debt = 0.0  # bytes charged without waiting; half of each refill repays it, so nobody is held up long
        self._filled_at: float | None = None  # set at the first use: there may be no event loop before
        self._turn = asyncio.Lock()  # its waiters are served in order
        self._changed = asyncio.Event()

    @property
    def rate(self) -> int:
        """The limit in a second; 0 means none."""
        return self._rate

    @property
    def burst(self) -> int:
        return max(self._rate, self._burst_min)

    @property
    def level(self) -> float:
        """Bytes that may go now; negative when some have gone that are not paid for."""
        self._fill()
        return self._level

    def set_rate(self, rate: int) -> None:
        """Changes the rate, also for tasks that are already waiting."""
        assert rate >= 0, "0 means no limit"
        if rate == self._rate:
            return
        self._fill()
        was_unlimited, self._rate, debt = not self._rate, rate, DEBT_SECONDS * rate
        self._level = float(self.burst) if was_unlimited else max(-debt, min(self._level, float(self.burst)))
        self._debt = min(self._debt, debt)
        self._changed.set()

    async def take(self, size: int) -> None:
        """Waits its turn until `size` bytes may go, and takes them. A cancelled call has taken nothing."""
        async with self._turn:
            while (wait := self.seconds_until(size)) > 0:
                self._changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        await self._changed.wait()
            self._level -= size if self._rate else 0

    def take_now(self, size: int) -> bool:
        """Takes `size` bytes if nobody is waiting and they may go at once; returns whether it did."""
        if self._turn.locked() or self.seconds_until(size) > 0:
            return False
        self._level -= size if self._rate else 0
        return True

    def spend(self, size: int) -> None:
        """Takes `size` bytes that cannot wait, even if later ones have to wait until these are paid for, a minute at
        most; or, if it is negative, gives back what was taken and not used."""
        self._fill()
        floor = min(self._level, -DEBT_SECONDS * self._rate)
        self._level = min(float(self.burst), max(floor, self._level - (size if self._rate else 0)))

    def charge(self, size: int) -> None:
        """Counts bytes that could not wait: later ones go half as fast until these are paid for."""
        self._fill()
        self._debt = min(self._debt + size, DEBT_SECONDS * self._rate)

    def _fill(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._filled_at is not None:
            come = (now - self._filled_at) * self._rate
            paid = min(self._debt, come / 2)
            self._debt -= paid
            self._level = min(float(self.burst), self._level + come - paid)
        self._filled_at = now

    def seconds_until(self, size: int) -> float:
        """Seconds until `size` bytes may be taken, if nobody else takes any."""
        self._fill()
        missing = min(size, self.burst) - self._level
        if not self._rate or missing <= 1e-6:  # less than a byte is rounding
            return 0.0
        return max(missing + min(self._debt, missing), 1e-6) / self._rate


K = TypeVar("K", bytes, str)


class PeerLimits:
    """Limits for peers: for each of them, for all admitted ones together, and for all strangers together.

    Keys cost nothing, so a limit for each stranger would be none. Addresses cost something: where less than half is
    left for strangers, an address range takes from a share of its own, so that who comes from elsewhere finds the rest.
    """

    def __init__(  # limits of three kinds
        self,
        is_admitted: IsAdmitted,
        range_of: Callable[[bytes], str],
        *,
        strangers: int,
        each: int = 0,
        burst: int = PIECE_BYTES,
        upload: TokenBucket | None = None,
        parts: tuple[int, int] = (1, 1),
    ) -> None:
        """`strangers` and `each` are rates, `parts` what strangers and what admitted peers get of the upload limit, as
        denominators. Strangers have a limit in any case."""
        self._is_admitted, self._range_of, self._upload, self._parts = is_admitted, range_of, upload, parts
        self._strangers, self._each, self._burst = strangers, each, burst
        # By whether they are admitted.
        self._of_all = {True: TokenBucket(0, burst=burst), False: TokenBucket(strangers, burst=burst)}
        self._of_peers: dict[bool, dict[bytes, TokenBucket]] = {True: {}, False: {}}
        self._of_ranges: dict[str, TokenBucket] = {}

    def is_stranger(self, peer: bytes) -> bool:
        """Whether a peer takes from what strangers have."""
        return not self._is_admitted(peer)

    def seconds_until(self, peer: bytes, size: int) -> float:
        """Seconds until a peer may take this much, if nobody else takes any."""
        return max(limit.seconds_until(size) for limit in self._limits(peer, size))

    def take_now(self, peer: bytes, size: int) -> bool:
        """Takes this much if it may go at once; returns whether it did."""
        limits = self._limits(peer, size)
        if any(limit.seconds_until(size) > 0 for limit in limits):
            return False
        for limit in limits:
            limit.spend(size)
        return True

    async def take(self, stream: Stream, size: int) -> None:
        """Waits until the peer of a stream may take this much, and takes it. TransportError if the stream ends here
        first: who waits for nothing would keep its slot from others."""
        while not self.take_now(stream.peer, size):
            if stream.is_gone:
                raise TransportError("the stream was closed")
            await asyncio.sleep(WAIT_SECONDS)

    def spend(self, peer: bytes, size: int) -> None:
        """Takes what cannot wait; later ones wait until it is paid for."""
        for limit in self._limits(peer, size):
            limit.spend(size)

    def _limits(self, peer: bytes, size: int) -> list[TokenBucket]:
        is_admitted = self._is_admitted(peer)
        everyone, upload = self._of_all[is_admitted], self._upload.rate if self._upload else 0
        rate = max(1, upload // self._parts[is_admitted]) if upload else 0
        everyone.set_rate(rate if is_admitted else min(rate or self._strangers, self._strangers))
        limits = [everyone, self._remembered(self._of_peers[is_admitted], peer, self._each, self._burst)]
        if not is_admitted and everyone.seconds_until(size + everyone.burst // 2) > 0:
            share, burst = max(1, everyone.rate // RANGE_SHARE), self._burst // RANGE_SHARE
            limits.append(self._remembered(self._of_ranges, self._range_of(peer), share, burst))
        return limits

    def _remembered(self, limits: dict[K, TokenBucket], key: K, rate: int, burst: int) -> TokenBucket:
        if (limit := limits.get(key)) is None:
            if len(limits) >= PEERS_MAX:  # the fullest say nothing: new keys cost nothing, and must not push out others
                for each in sorted(limits, key=lambda each: limits[each].level, reverse=True)[: PEERS_MAX // 16]:
                    del limits[each]
            limit = limits[key] = TokenBucket(rate, burst=burst)
        limit.set_rate(rate)
        return limit
