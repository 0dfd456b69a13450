"""The meter of the other tests in this folder."""

from __future__ import annotations

import asyncio
import gc
import time

from tests.helpers.costs import costs


async def test_the_meter_sees_what_holds_up_the_loop_and_what_takes_memory() -> None:
    with costs() as idle:
        for _ in range(100):
            await asyncio.sleep(0)
    with costs() as busy:
        until = time.thread_time() + 0.2
        while time.thread_time() < until:
            pass
        await asyncio.sleep(0)
        taken = b"1" * (64 * 2**20)
        del taken
    assert busy.longest_seconds >= 0.2 > 4 * idle.longest_seconds
    assert busy.process_seconds >= busy.loop_seconds >= 0.2
    assert busy.memory_bytes >= 60 * 2**20 > 4 * idle.memory_bytes


async def test_a_collection_of_garbage_looks_only_at_what_the_input_made() -> None:
    left: list[list[object]] = [[] for _ in range(2_000_000)]  # by the tests before
    with costs() as old:
        gc.collect()
    with costs() as new:
        left = [[] for _ in left]
        gc.collect()
    assert new.longest_seconds > 4 * old.longest_seconds
    assert old.longest_seconds < 0.05
