"""Web pages that a browser on this machine has open reach the node's HTTP server, and get nothing from it."""

from __future__ import annotations

import asyncio

import pytest

from p2ptrain.observe.events import WATCHERS_MAX
from tests.helpers.web import Site, on_both_loops, site, status_in, until

FOREIGN = {
    "a foreign origin": {"Origin": "https://evil.example"},
    "no origin to tell": {"Origin": "null"},
    "another port of this machine": {"Origin": "http://localhost:1"},
    "another site": {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    "another host of this site": {"Sec-Fetch-Site": "same-site"},
    "an image that claims nothing else": {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "image"},
    "a word to come": {"Sec-Fetch-Site": "other"},
}


@pytest.mark.parametrize("headers", FOREIGN.values(), ids=FOREIGN)
async def test_a_foreign_pages_request_is_refused(headers: dict[str, str]) -> None:
    async with site() as here:
        for path in ("/", "/status", "/rounds", "/events", "/metrics", "/healthz", "/assets/feed.js"):
            assert await here.refused(path, headers=headers) == (403, "this request is another web page's"), path
        assert not here.app.events.watchers


async def test_the_owners_browser_and_programs_are_answered() -> None:
    async with site() as here:
        own = f"http://127.0.0.1:{here.port}"
        for headers in (
            {},
            {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"},
            {"Sec-Fetch-Site": "same-origin"},
            {"Sec-Fetch-Site": "same-origin", "Origin": own},
        ):
            assert (await here.get("/status", headers=headers))[0] == 200


async def stream(here: Site, more: str = "") -> tuple[int, asyncio.StreamReader]:
    reader, writer = await here.connect()
    writer.write(f"GET /events HTTP/1.1\r\nHost: 127.0.0.1:{here.port}\r\n{more}\r\n".encode())
    return status_in(await reader.readuntil(b"\r\n\r\n")), reader


@on_both_loops
async def test_foreign_pages_take_no_places_at_the_events() -> None:
    async with site() as here:
        for _ in range(2 * WATCHERS_MAX):
            assert (await stream(here, "Origin: https://evil.example\r\n"))[0] == 403
        assert len(here.app.events.watchers) == 0
        assert (await stream(here, "Sec-Fetch-Site: same-origin\r\n"))[0] == 200


@on_both_loops
async def test_the_owners_page_gets_a_place_though_others_have_taken_all() -> None:
    async with site() as here:
        readers = [(await stream(here))[1] for _ in range(WATCHERS_MAX)]
        assert (await stream(here))[0] == 503, "who has most of them gets no more"
        pages = [await stream(here, "Sec-Fetch-Site: same-origin\r\n") for _ in range(3)]
        assert [status for status, _ in pages] == [200, 200, 200]
        await asyncio.gather(*(reader.read() for reader in readers[:3]))  # the oldest of the others have ended
        await until(lambda: len(here.app.events.watchers) == WATCHERS_MAX)
