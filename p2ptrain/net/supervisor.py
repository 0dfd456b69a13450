"""Keeps one p2pd running: starts it again whenever it ends, for as long as that takes, and ends it when it hangs or
another one is better.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from p2ptrain.errors import ConfigError
from p2ptrain.net.process import Process
from p2ptrain.net.tasks import pauses
from p2ptrain.net.transport import TransportError

WAIT_SECONDS = 10.0  # for p2pd to come back before a request fails
STEADY_SECONDS = 60.0  # after which a p2pd that ends has not just been started in vain
LAUNCH_SECONDS = 60.0  # it takes half a second; each question to p2pd has its own limit, those of the DHT's start none
LOOK_SECONDS = 10.0  # between looks at a p2pd
LOOKS_MAX = 3  # in a row without an answer, of 16 s each: a machine may be busy, but not so busy for a minute

logger = logging.getLogger("p2ptrain.net")


class Supervisor:
    """`launch` starts a p2pd, tells it what it has to know, and leaves on the stack how all of that is undone."""

    def __init__(self, launch: Callable[[AsyncExitStack], Awaitable[Process]], counters: Counter[str]) -> None:
        self._launch, self._counters = launch, counters
        self._session = AsyncExitStack()
        self._is_up = asyncio.Event()
        self._is_closed = False
        self._is_ended = False  # on purpose, which has been said

    @property
    def is_up(self) -> bool:
        return self._is_up.is_set()

    async def start(self) -> None:
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(LAUNCH_SECONDS):
                    self.process = await self._launch(stack)
            except TimeoutError as error:
                raise TransportError(f"p2pd was not ready in {LAUNCH_SECONDS:.0f} s") from error
            self._is_up.set()
            stack.callback(self._is_up.clear)
            self._session = stack.pop_all()

    async def run(self, came_back: Callable[[], None]) -> None:
        waits, started_at = pauses(), time.monotonic()
        while True:
            status = await self.process.wait()
            if not self._is_ended:
                logger.warning("p2pd ended (status %d) and is started again: %s", status, self.process.last_words())
            self._is_ended = False
            await self._session.aclose()
            if time.monotonic() - started_at > STEADY_SECONDS:
                waits = pauses()
            for pause in waits:
                await asyncio.sleep(pause)
                try:
                    await self.start()
                    break
                except (TransportError, ConfigError) as error:
                    logger.warning("p2pd cannot be started, and will be tried again: %s", error)
            started_at = time.monotonic()
            self._counters["p2pd restarts"] += 1
            came_back()

    async def watch(self, look: Callable[[], Awaitable[None]], why_end: Callable[[], str]) -> None:
        """End a p2pd that hangs, or for the reason that `why_end` gives: `run` starts it again.

        `look` asks it something, which only one that hangs fails to answer for several looks in a row.
        """
        failed = 0
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            process, was_up, why = self.process, self.is_up, ""
            try:
                await look()
                failed = 0
            except TransportError as error:
                logger.debug("cannot ask p2pd for addresses: %s", error)
                failed, why = failed + 1, f"no answer to {LOOKS_MAX} questions in a row; the last: {error}"
            if not (was_up and self.is_up and process is self.process):
                failed = 0  # it has ended by itself
            elif reason := why_end():
                failed = 0
                self._end(reason)
            elif failed >= LOOKS_MAX:
                failed = 0
                self._end(why)

    def _end(self, why: str) -> None:
        logger.warning("p2pd is ended, to be started again: %s", why)
        self._is_ended = True
        self.process.kill()

    async def up(self) -> None:
        """Wait for p2pd, though not for long."""
        try:
            async with asyncio.timeout(0 if self._is_closed else WAIT_SECONDS):
                await self._is_up.wait()
        except TimeoutError as error:
            what = "the network was closed" if self._is_closed else "p2pd is not running; it is being started again"
            raise TransportError(what) from error

    async def close(self) -> None:
        """Once `run` has been cancelled."""
        self._is_closed = True
        await self._session.aclose()
