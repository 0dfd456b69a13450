"""Compares this machine's clock with those of a few peers: the DHT refuses a node whose clock is far off. Also measures
how late the event loop runs, and notices that the machine was asleep.

The median decides, as one of the peers may be wrong or lie. The core does not care: it counts seconds of its own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from random import Random

from p2ptrain.core.complaints import Code, Complaint, complaint
from p2ptrain.errors import RemoteProtocolError
from p2ptrain.net.questions import SKEW_SECONDS_MAX, look_from
from p2ptrain.net.transport import Transport, TransportError
from p2ptrain.system import since_boot

LAG_SECONDS = 0.25  # between measurements of the event loop's lag
LAG_KEPT = 240  # measurements: the worst of the last minute is reported
STOOD_STILL_SECONDS = 10.0  # a longer gap is not lag: the whole process was asleep or stopped
ASKED = 5  # peers: two wrong ones are outvoted
ANSWERS_LEAST = 3  # with two it would not be known which is wrong; `p2ptrain doctor` says how far they are apart
FIRST_SECONDS, LOOK_SECONDS = 60.0, 600.0  # clocks drift by a second in a day, and jump when a machine has slept

log = logging.getLogger("p2ptrain.node")


class Lag:
    """Measures how late the event loop runs: work that blocks it belongs in a thread."""

    def __init__(self) -> None:
        self._looks: list[float] = [0.0]

    @property
    def worst(self) -> float:
        return max(self._looks)

    async def watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, looked_at = loop.time() + LAG_SECONDS, since_boot()
            await asyncio.sleep(LAG_SECONDS)
            self._looks = [*self._looks[-LAG_KEPT + 1 :], max(0.0, loop.time() - due)]
            if (gap := since_boot() - looked_at) > STOOD_STILL_SECONDS:
                log.warning("nothing ran for %.0f s: the machine slept or the process was stopped; catching up", gap)


class ClockWatch:
    """Asks peers for the time now and then."""

    def __init__(
        self, transport: Transport, linked: Collection[bytes], rng: Random, clock: Callable[[], float] = time.time
    ) -> None:
        self.complaint: Complaint | None = None
        self._transport, self._linked, self._rng, self._clock = transport, linked, rng, clock

    async def watch(self) -> None:
        await asyncio.sleep(FIRST_SECONDS)
        while True:
            await self.look()
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        peers = self._rng.sample([*self._linked], min(ASKED, len(self._linked)))
        answers = await asyncio.gather(*map(self._offset, peers))
        found = sorted((each for each in answers if each is not None), key=abs)
        self.complaint = None
        if len(found) >= ANSWERS_LEAST and abs(middle := found[(len(found) - 1) // 2]) > SKEW_SECONDS_MAX:
            way, seconds = "behind" if middle > 0 else "ahead of", round(abs(middle))
            self.complaint = complaint(Code.CLOCK_WRONG, seconds=seconds, way=way, peers=len(found))

    async def _offset(self, peer: bytes) -> float | None:
        """Returns how far a peer's clock is ahead of ours; None if it does not answer, or too slowly to tell."""
        try:
            answer = await look_from(self._transport, peer, self._clock)
        except (TransportError, RemoteProtocolError):
            return None
        return answer.offset_seconds if answer.uncertain_seconds < SKEW_SECONDS_MAX / 2 else None
