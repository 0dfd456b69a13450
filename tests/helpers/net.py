"""Helpers for network tests: time that skips ahead, peers, and bytes."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Awaitable, Callable, Coroutine
from random import Random
from typing import Any, ParamSpec

from p2ptrain.digest import digest

P = ParamSpec("P")


class SkippingSelector(selectors.DefaultSelector):
    """Skips timed waits by moving the clock; a wait without a timeout means that the test hangs."""

    now = 0.0
    threads = 0  # running threads: while there are any, time is real

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.threads:
            return super().select(timeout)
        ready = super().select(0)
        if not ready and timeout is None and not (ready := super().select(5)):  # an abandoned thread may still end
            raise AssertionError("all tasks wait, and nothing will wake them")
        if not ready and timeout is not None:
            self.now += timeout
        return ready


class SkippingLoop(asyncio.SelectorEventLoop):
    """A loop whose clock stands still while any task is ready, and jumps to the next deadline when none is."""

    def __init__(self) -> None:
        self.clock = SkippingSelector()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now

    def run_in_executor(self, *args: Any) -> Any:  # type: ignore[override]
        self.clock.threads += 1
        future = super().run_in_executor(*args)
        future.add_done_callback(self._thread_done)
        return future

    def _thread_done(self, _future: object) -> None:
        self.clock.threads -= 1

    async def shutdown_default_executor(self, *_: float | None) -> None:
        """Waits for threads in real time: from Python 3.12 on, a Runner gives them 300 s, which would be skipped."""
        await super().shutdown_default_executor()


def skipping_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Runs a test without real waiting; fails if it leaves a task behind."""

    async def watched(*args: P.args, **kwargs: P.kwargs) -> None:
        await test(*args, **kwargs)
        for _ in range(10):  # let cancelled tasks end
            await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"left behind: {left}"

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=SkippingLoop) as runner:
            runner.run(watched(*args, **kwargs))

    return run


async def until(condition: Callable[[], bool]) -> None:
    """Lets other tasks run until a condition holds; a time limit makes a hung test fail."""
    pause = 0.001
    async with asyncio.timeout(10_000):
        while not condition():
            await at(asyncio.get_running_loop().time() + pause)
            pause = min(2 * pause, 0.05)


def at(moment: float) -> Awaitable[None]:
    """Waits until the loop's clock has this time and nothing else is left to do before it."""
    loop = asyncio.get_running_loop()
    come: asyncio.Future[None] = loop.create_future()
    loop.call_at(moment, lambda: None if come.done() else come.set_result(None))
    return come


def key(number: int) -> bytes:
    return digest("test key", bytes([number]))


def some_bytes(size: int, seed: int = 0) -> bytes:
    return Random(seed).randbytes(size)
