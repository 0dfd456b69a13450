"""For tests of the network: time that passes by itself, peers, and bytes."""

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
    """Where a loop would wait for a time, the time has come; where it would wait for ever, the test has hung."""

    now = 0.0
    threads = 0  # at work: for them the time is real

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.threads:
            return super().select(timeout)
        ready = super().select(0)
        if not ready and timeout is None and not (ready := super().select(5)):  # a thread that was let go may end
            raise AssertionError("everybody waits, and nobody will come")
        if not ready and timeout is not None:
            self.now += timeout
        return ready


class SkippingLoop(asyncio.SelectorEventLoop):
    """A loop whose clock stands still while anybody works, and jumps to the next deadline when nobody does."""

    def __init__(self) -> None:
        self._clock = SkippingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now

    def run_in_executor(self, *args: Any) -> Any:  # type: ignore[override]
        self._clock.threads += 1
        future = super().run_in_executor(*args)
        future.add_done_callback(self._thread_done)
        return future

    def _thread_done(self, _future: object) -> None:
        self._clock.threads -= 1


def skipping_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test without waiting for anything; it fails if it leaves a task behind."""

    async def watched(*args: P.args, **kwargs: P.kwargs) -> None:
        await test(*args, **kwargs)
        for _ in range(10):  # what was cancelled ends
            await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"left behind: {left}"

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=SkippingLoop) as runner:
            runner.run(watched(*args, **kwargs))

    return run


async def until(condition: Callable[[], bool]) -> None:
    """Let the others work until it is so; a time limit makes a hung test fail."""
    pause = 0.001
    async with asyncio.timeout(10_000):
        while not condition():
            await at(asyncio.get_running_loop().time() + pause)
            pause = min(2 * pause, 0.05)


def at(moment: float) -> Awaitable[None]:
    """When nobody has anything else to do before this time of the loop."""
    loop = asyncio.get_running_loop()
    come: asyncio.Future[None] = loop.create_future()
    loop.call_at(moment, lambda: None if come.done() else come.set_result(None))
    return come


def key(number: int) -> bytes:
    return digest("test key", bytes([number]))


def some_bytes(size: int, seed: int = 0) -> bytes:
    return Random(seed).randbytes(size)
