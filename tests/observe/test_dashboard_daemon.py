"""The dashboard with a real daemon: its numbers, its rounds, and a daemon that goes away and comes back."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from playwright.sync_api import Page

from tests.helpers.daemons import TEST_SECONDS, p2ptrain, swarm_in
from tests.helpers.dashboard import (
    GONE,
    REFUSED,
    SECONDS,
    a_browser,
    a_page,
    in_a_browser,
    numbers_in,
    numbers_on,
    until_shown,
    until_text,
)

pytestmark = [*in_a_browser, pytest.mark.timeout(TEST_SECONDS)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until_round(page: Page, least: int) -> int:
    """Waits until the page shows that this round or a later one was applied."""
    page.wait_for_function(
        "(least) => Number(document.getElementById('main').dataset.round) >= least", arg=least, timeout=SECONDS * 3_000
    )
    return int(page.locator("#main").get_attribute("data-round") or 0)


def until_the_same(page: Page, url: str) -> None:
    """Waits until the page has the numbers of /status, which may change between the two reads."""
    for _ in range(50):
        before = json.loads(page.request.get(f"{url}status").text())
        shown = numbers_on(page)
        after = json.loads(page.request.get(f"{url}status").text())
        if numbers_in(before) == shown == numbers_in(after):
            return
        until_round(page, after["applied_round"])
    assert shown == numbers_in(after)


def test_a_real_node_shows_its_numbers_and_is_found_again_after_it_was_away(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/"
    with swarm_in(tmp_path) as swarm, a_browser() as browser:
        node = swarm.first(P2PTRAIN_HTTP__PORT=str(port)).start().until_up()
        with a_page(browser, url, expected=(*GONE, *REFUSED)) as page:
            until_shown(page)
            page.evaluate("() => { window.mine = 'still here' }")
            first = until_round(page, 1)
            assert until_round(page, first + 2) >= first + 2, "it goes on by itself"
            until_text(page, "shown", "on this page")
            assert page.locator("#run-name").inner_text() == "test"
            assert page.locator("#rounds tbody tr").count() >= 2
            until_text(page, "log", "run test, id")
            assert p2ptrain("pause", "--data-dir", node.directory)[0] == 0
            until_text(page, "health", "Paused by its owner")
            until_the_same(page, url)
            node.kill()
            until_text(page, "banner", "The node does not answer")
            assert page.locator("#state-text").inner_text() == "Away"
            last = int(page.locator("#main").get_attribute("data-round") or 0)
            node.start().until_up()
            until_round(page, last + 1)
            page.wait_for_function("() => document.getElementById('banner').textContent === ''")
            assert page.evaluate("() => window.mine") == "still here"
            numbers = [int(each) for each in page.locator("#rounds tbody th").all_inner_texts()]
            assert numbers == sorted(set(numbers), reverse=True), "none is lost and none is twice"
