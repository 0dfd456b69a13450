"""The supervisor, tested without a p2pd: when it kills one, and when it leaves one alone."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial

import pytest

from p2ptrain.net.boundary import Boundary
from p2ptrain.net.libp2p import process
from p2ptrain.net.libp2p.process import Supervisor
from p2ptrain.net.transport import TransportError


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LOOK_SECONDS", 0)
    monkeypatch.setattr(process, "pauses", lambda: itertools.repeat(0))


class FakeProcess:
    def __init__(self) -> None:
        self.has_ended = asyncio.Event()
        self.why_end = ""

    async def wait(self) -> int:
        await self.has_ended.wait()
        return -9

    def kill(self) -> None:
        self.has_ended.set()

    def last_words(self) -> str:
        return "it said nothing"


class WatchedSupervisor:
    """A supervisor whose checks find what a string says: o is an answer, x is none."""

    def __init__(self, looks: str) -> None:
        self._looks = iter(looks)
        self._is_done = asyncio.Event()
        self.launched: list[FakeProcess] = []
        self.counters: Counter[str] = Counter()
        self.supervisor = Supervisor(self._launch, self.counters, Boundary())
        self.on_look: Callable[[], Awaitable[None]] = partial(asyncio.sleep, 0)

    async def _launch(self, stack: AsyncExitStack) -> FakeProcess:
        self.launched.append(FakeProcess())
        return self.launched[-1]

    async def _look(self) -> None:
        await self.on_look()
        found = next(self._looks, "")
        if not found:
            self._is_done.set()
            await asyncio.Event().wait()
        if found == "x":
            raise TransportError("no answer")

    async def run(self) -> int:
        """Runs all checks and returns the number of restarts."""
        await self.supervisor.start()
        tasks = [
            asyncio.create_task(self.supervisor.run()),
            asyncio.create_task(self.supervisor.watch(self._look, lambda: self.launched[-1].why_end)),
        ]
        await self._is_done.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.supervisor.close()
        return self.counters["p2pd restarts"]


STARTING = "o" * 8  # loop iterations that a restart takes


@pytest.mark.parametrize(
    ("looks", "restarts"),
    [("oooo", 0), ("xxo" * 5, 0), ("oxoxxoxoxx", 0), ("xxx" + STARTING, 1), (("xxx" + STARTING) * 3, 3)],
)
async def test_a_p2pd_that_hangs_is_ended_and_one_that_is_slow_is_not(
    looks: str, restarts: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert await WatchedSupervisor(looks).run() == restarts
    assert caplog.text.count("killing p2pd to restart it: no answer to 3 requests") == restarts
    assert len(caplog.records) == restarts  # a slow p2pd is not logged


async def test_a_p2pd_that_is_of_no_use_is_ended_at_once(caplog: pytest.LogCaptureFixture) -> None:
    watched = WatchedSupervisor("oo" + STARTING)

    async def lose() -> None:
        watched.launched[0].why_end = "its sockets are gone"

    watched.on_look = lose
    assert await watched.run() == 1
    assert "killing p2pd to restart it: its sockets are gone" in caplog.text


async def test_looks_at_a_p2pd_that_ends_by_itself_do_not_count_for_the_next() -> None:
    watched = WatchedSupervisor("xxx" + STARTING)
    looks = itertools.count(1)

    async def end() -> None:
        if next(looks) == 2:
            watched.launched[0].has_ended.set()
            while len(watched.launched) < 2 or not watched.supervisor.is_up:  # noqa: ASYNC110
                await asyncio.sleep(0)

    watched.on_look = end
    assert await watched.run() == 1


async def test_a_start_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LAUNCH_SECONDS", 0)
    undone: list[str] = []

    async def launch(stack: AsyncExitStack) -> FakeProcess:
        stack.callback(undone.append, "undone")
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(TransportError, match="p2pd was not ready"):
        await Supervisor(launch, Counter(), Boundary()).start()
    assert undone == ["undone"]
