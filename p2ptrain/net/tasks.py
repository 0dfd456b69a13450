"""Background tasks with an owner: they end with it, and a crash is reported instead of being lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias, TypeVar

BACKOFF_SECONDS, BACKOFF_SECONDS_MAX = 0.2, 5.0

IS_CRASH = "is_crash"  # tells asyncio's exception handler that part of the network is dead
OnCrash: TypeAlias = Callable[[BaseException], None]
T = TypeVar("T")


class Tasks:
    def __init__(self, on_crash: OnCrash) -> None:
        self._on_crash = on_crash
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._on_crash(error)

    async def cancel(self) -> None:
        """Cancels all tasks but the calling one, and waits for them."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def pauses(first: float = BACKOFF_SECONDS, most: float = BACKOFF_SECONDS_MAX) -> Iterator[float]:
    """Yields the seconds to wait between attempts, doubling up to a limit, without end."""
    pause = first
    while True:
        yield pause
        pause = min(2 * pause, most)


def report_crash(error: BaseException) -> None:
    """The default for crashes: asyncio logs them, and a daemon ends because of `IS_CRASH`."""
    asyncio.get_running_loop().call_exception_handler(
        {"message": "the network crashed", "exception": error, IS_CRASH: True}
    )


async def in_daemon_thread(work: Callable[[], T], errors: tuple[type[Exception], ...]) -> T:
    """Runs `work` in a thread that neither the event loop nor the process waits for when it ends.

    It is for calls that may hang in the system: asyncio joins its own threads at the end. `errors` reach the caller;
    any other is a bug, and a RuntimeError for the caller."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(give: Callable[[], None]) -> None:
        if not done.done():
            give()

    def run() -> None:
        give: Callable[[], None] = partial(done.set_exception, RuntimeError(f"a bug in {work}"))
        try:
            give = partial(done.set_result, work())
        except errors as error:
            give = partial(done.set_exception, error)
        finally:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(tell, give)

    threading.Thread(target=run, daemon=True).start()
    return await done
