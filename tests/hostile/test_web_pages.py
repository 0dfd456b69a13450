"""Web pages that a browser on this machine has open reach the node's HTTP server, and get nothing from it."""

from __future__ import annotations

import pytest

from tests.helpers.web import site

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
        for path in ("/", "/status", "/rounds", "/log", "/metrics", "/healthz", "/assets/feed.js"):
            assert await here.refused(path, headers=headers) == (403, "this request is another web page's"), path


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
