"""Keeps p2pd running: restarts it whenever it ends, however long that takes, and kills it if it hangs or if a new one
would work better."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from p2ptrain.errors import P2ptrainError
from p2ptrain.net.boundary import Boundary
from p2ptrain.net.libp2p.process import Process
from p2ptrain.net.tasks import pauses
from p2ptrain.net.transport import TransportError, in_time

WAIT_SECONDS = 10.0  # for p2pd to come back before a request fails
STEADY_SECONDS = 60.0  # a p2pd that ran this long is restarted without growing pauses
LAUNCH_SECONDS = 60.0  # it takes half a second; requests to p2pd have their own limits, but the DHT's start has none
LOOK_SECONDS = 10.0  # between checks of a p2pd
LOOKS_MAX = 3  # failed checks in a row, of 16 s each: even a busy machine answers within a minute

logger = logging.getLogger("p2ptrain.net")


class Supervisor:
    """Restarts p2pd forever. `launch` starts and sets up a p2pd, and pushes the cleanup onto the stack."""

    def __init__(
        self, launch: Callable[[AsyncExitStack], Awaitable[Process]], counters: Counter[str], boundary: Boundary
    ) -> None:
        self._launch, self._counters, self._boundary = launch, counters, boundary
        self._session = AsyncExitStack()
        self._is_up = asyncio.Event()
        self._is_closed = False
        self._is_ended = False  # killed by us, and already logged

    @property
    def is_up(self) -> bool:
        return self._is_up.is_set()

    async def start(self) -> None:
        async with AsyncExitStack() as stack:
            async with in_time(LAUNCH_SECONDS, f"p2pd was not ready in {LAUNCH_SECONDS:.0f} s"):
                self.process = await self._launch(stack)
            self._is_up.set()
            stack.callback(self._is_up.clear)
            self._session = stack.pop_all()

    async def run(self, came_back: Callable[[], None]) -> None:
        waits, started_at = pauses(), time.monotonic()
        while True:
            status = await self.process.wait()
            if not self._is_ended:
                logger.warning("p2pd ended (status %d) and is being restarted: %s", status, self.process.last_words())
            self._is_ended = False
            with self._boundary.contain("the end of p2pd"):
                await self._session.aclose()
            if time.monotonic() - started_at > STEADY_SECONDS:
                waits = pauses()
            for pause in waits:
                await asyncio.sleep(pause)
                try:
                    with self._boundary.guard("another start of p2pd"):
                        await self.start()
                    break
                except (P2ptrainError, TimeoutError) as error:
                    logger.warning("p2pd cannot be started, will retry: %s", error)
            started_at = time.monotonic()
            self._counters["p2pd restarts"] += 1
            with self._boundary.contain("the reconnections after a start of p2pd"):
                came_back()

    async def watch(self, look: Callable[[], Awaitable[None]], why_end: Callable[[], str]) -> None:
        """Kills a p2pd that hangs, or one for whose end `why_end` gives a reason; `run` then restarts it.

        `look` sends it a request; only a p2pd that hangs leaves several in a row unanswered.
        """
        failed = 0
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            process, was_up, why = self.process, self.is_up, ""
            with self._boundary.contain("a watch over p2pd"):
                try:
                    await look()
                    failed = 0
                except TransportError as error:
                    logger.debug("cannot ask p2pd for addresses: %s", error)
                    failed, why = failed + 1, f"no answer to {LOOKS_MAX} requests in a row; the last: {error}"
                if not (was_up and self.is_up and process is self.process):
                    failed = 0  # it has ended on its own
                elif reason := why_end() or (why if failed >= LOOKS_MAX else ""):
                    failed = 0
                    self._end(reason)

    def _end(self, why: str) -> None:
        logger.warning("killing p2pd to restart it: %s", why)
        self._is_ended = True
        self.process.kill()

    async def up(self) -> None:
        """Waits for p2pd, though not for long."""
        try:
            async with asyncio.timeout(0 if self._is_closed else WAIT_SECONDS):
                await self._is_up.wait()
        except TimeoutError as error:
            what = "the network was closed" if self._is_closed else "p2pd is not running; it is being restarted"
            raise TransportError(what) from error

    async def close(self) -> None:
        """Ends p2pd. Call it after `run` has been cancelled."""
        self._is_closed = True
        await self._session.aclose()
