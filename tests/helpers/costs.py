"""Measures what an input costs: processor time of the event loop and of the process, and memory."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

TICK_SECONDS = 0.001


@dataclass(slots=True)
class Costs:
    """The costs of what ran in the context. Processor time, because wall time is that of a busy machine."""

    longest_seconds: float = 0.0  # of the event loop's thread, between two turns of another task
    loop_seconds: float = 0.0  # of the event loop's thread
    process_seconds: float = 0.0  # of all threads of this process
    memory_bytes: int = 0  # growth of the peak of resident memory

    def __str__(self) -> str:
        return (
            f"longest {1e3 * self.longest_seconds:.1f} ms, loop {1e3 * self.loop_seconds:.0f} ms, "
            f"process {1e3 * self.process_seconds:.0f} ms, memory {self.memory_bytes / 2**20:.1f} MiB"
        )


class _Ticker:
    """Looks at the processor time of the event loop's thread again and again."""

    def __init__(self, found: Costs) -> None:
        self._found, self._last = found, time.thread_time()
        self._next = asyncio.get_running_loop().call_soon(self.look)

    def look(self) -> None:
        now = time.thread_time()
        self._found.longest_seconds = max(self._found.longest_seconds, now - self._last)
        self._last = now
        self._next = asyncio.get_running_loop().call_later(TICK_SECONDS, self.look)

    def stop(self) -> None:
        self.look()
        self._next.cancel()


@contextmanager
def costs() -> Iterator[Costs]:
    """Fills in the costs of what runs in the context, in this process; print them for `pytest -s`."""
    if sys.platform != "linux":
        pytest.skip("asks Linux how much memory it takes")
    found = Costs()
    gc.freeze()  # or a collection that falls into the context looks at all that other tests have left: 0.3 s
    ctypes.CDLL(None).malloc_trim(0)  # or what is taken may fit into what other tests have left
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
    memory, process, loop = _peak_bytes(), time.process_time(), time.thread_time()
    ticker = _Ticker(found)
    try:
        yield found
    finally:
        ticker.stop()
        gc.unfreeze()
        found.loop_seconds = time.thread_time() - loop
        found.process_seconds = time.process_time() - process
        found.memory_bytes = max(0, _peak_bytes() - memory)


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1_024 for line in lines if line.startswith("VmHWM:"))
