"""Measures how late the event loop runs, and notices that the machine was asleep."""

from __future__ import annotations

import asyncio
import logging
import time

LAG_SECONDS = 0.25  # between measurements of the event loop's lag
LAG_KEPT = 240  # measurements: the worst of the last minute is reported
STOOD_STILL_SECONDS = 10.0  # a longer gap is not lag: the whole process was asleep or stopped

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
            due, looked_at = loop.time() + LAG_SECONDS, _since_boot()
            await asyncio.sleep(LAG_SECONDS)
            self._looks = [*self._looks[-LAG_KEPT + 1 :], max(0.0, loop.time() - due)]
            if (gap := _since_boot() - looked_at) > STOOD_STILL_SECONDS:
                log.warning("nothing ran for %.0f s: the machine slept or the process was stopped; catching up", gap)


def _since_boot() -> float:
    """Returns seconds since boot, including sleep, during which the loop's clock stands still."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
