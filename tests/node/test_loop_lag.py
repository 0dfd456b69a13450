"""The daemon's measurement of the event loop's lag."""

from __future__ import annotations

import asyncio
import logging
import time
from itertools import count

import pytest

from p2ptrain.node import clock
from p2ptrain.node.clock import LAG_SECONDS, STOOD_STILL_SECONDS, Lag
from tests.helpers.net import skipping_time


async def test_what_holds_up_the_event_loop_is_measured() -> None:
    lag = Lag()
    watching = asyncio.create_task(lag.watch())
    await asyncio.sleep(0)  # it waits for its first look
    assert lag.worst == 0.0
    began = time.monotonic()
    while time.monotonic() < began + LAG_SECONDS + 0.4:
        pass  # as something on the loop that should be in a thread
    await asyncio.wait([watching], timeout=LAG_SECONDS)  # it has its turn, and goes on
    assert lag.worst == pytest.approx(0.4, abs=0.35)
    watching.cancel()


@skipping_time
async def test_a_sleep_is_told_also_if_the_clock_of_the_loop_has_slept_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for seconds, told in (
        (STOOD_STILL_SECONDS, []),
        (600.0, ["nothing ran for 600 s: the machine slept or the process was stopped"]),
    ):
        caplog.clear()
        times = count(0.0, seconds)
        monkeypatch.setattr(clock, "since_boot", lambda times=times: next(times))
        with caplog.at_level(logging.WARNING):
            watching = asyncio.create_task(Lag().watch())
            await asyncio.wait([watching], timeout=1.5 * LAG_SECONDS)
            watching.cancel()
        assert [record.message.partition(";")[0] for record in caplog.records] == told
