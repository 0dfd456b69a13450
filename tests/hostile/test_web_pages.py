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
    "a frame": {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
    "a form": {
        "Sec-Fetch-Site": "cross-site",
        "Sec-Fetch-Mode": "navigate",
        "Sec-Fetch-Dest": "document",
        "Origin": "https://evil.example",
    },
    "a word to come": {"Sec-Fetch-Site": "other"},
}


@pytest.mark.parametrize("headers", FOREIGN.values(), ids=FOREIGN)
async def test_a_foreign_pages_request_is_refused(headers: dict[str, str]) -> None:
    async with site() as here:
        for path in ("/", "/status", "/rounds", "/log", "/metrics", "/healthz", "/assets/feed.js"):
            assert await here.refused(path, headers=headers) == (403, "this request is another web page's"), path


async def test_a_link_on_another_site_opens_the_dashboard_and_nothing_else() -> None:
    """As in a README on a code host. The page that has the link sees nothing of what opens, nor may frame it."""
    followed = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    async with site() as here:
        status, headers, _ = await here.get("/", headers=followed)
        assert (status, headers["X-Frame-Options"]) == (200, "DENY")
        assert headers["Cross-Origin-Opener-Policy"] == "same-origin"
        for path in ("/status", "/log", "/healthz", "/assets/feed.js"):
            assert (await here.get(path, headers=followed))[0] == 403, path
        assert (await here.get("/", method="POST", headers=followed))[0] == 403


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
