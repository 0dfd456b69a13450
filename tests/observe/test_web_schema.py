"""The whole API against its own description, with requests that schemathesis draws from it.

Everything it can check at once: that no answer is a failure of the server, that status, type and content are described,
that what is not allowed is refused. /events has no end, and tests of its own (test_web_events.py).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from p2ptrain.observe.openapi import describe
from tests.helpers.web import Site, site

SCHEMA = schemathesis.openapi.from_dict(describe("1.2.3"))
OPERATIONS = [each.ok() for each in SCHEMA.get_all_operations()]
ENDLESS = "/events"
EXAMPLES = 25


@contextmanager
def in_a_thread(*, token: bytes = b"") -> Iterator[Site]:
    """Runs a server in a thread, for schemathesis' blocking client."""
    loop, ready, found = asyncio.new_event_loop(), threading.Event(), []
    end = asyncio.Event()

    async def serve() -> None:
        async with site(token=token) as here:
            found.append(here)
            ready.set()
            await end.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert ready.wait(30)
        yield found[0]
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()
        loop.close()


def test_all_that_is_described_is_tried() -> None:
    assert {each.path for each in OPERATIONS} == describe("1.2.3")["paths"].keys()
    assert {each.method for each in OPERATIONS} == {"get"}


@pytest.mark.parametrize("is_starting", [False, True], ids=["running", "starting"])
@pytest.mark.parametrize("operation", [each for each in OPERATIONS if each.path != ENDLESS], ids=lambda each: each.path)
def test_answers_are_what_the_description_says(operation: schemathesis.APIOperation, is_starting: bool) -> None:
    with in_a_thread() as here:
        here.told.is_starting = is_starting
        here.told.reasons = ["starting"] * is_starting
        not_checked = [schemathesis.checks.not_a_server_error] * is_starting  # 503 is what is described for that
        modes = [mode for mode in schemathesis.GenerationMode if can(operation, mode)]
        for mode in modes:

            @given(case=operation.as_strategy(generation_mode=mode))
            @settings(
                max_examples=EXAMPLES,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            def ask(case: schemathesis.Case) -> None:
                case.call_and_validate(base_url=here.url, excluded_checks=not_checked)

            ask()


def can(operation: schemathesis.APIOperation, mode: schemathesis.GenerationMode) -> bool:
    """True if requests of this kind exist: without parameters none can be invalid."""
    return mode.is_positive or bool(operation.query)
