"""The daemon's own parts: what watches the event loop."""

from __future__ import annotations

import asyncio
import time

import pytest

from p2ptrain.daemon.daemon import LAG_SECONDS, Lag


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
