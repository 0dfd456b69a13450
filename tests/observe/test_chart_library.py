"""The chart library over HTTP: the installed file, compressed if accepted, and cached by browsers."""

from __future__ import annotations

import gzip

import pytest

from p2ptrain.observe import app
from p2ptrain.observe.guard import HEADERS, STYLE_HASH
from tests.helpers.web import site

PATH = f"/assets/{app.LIBRARY}"


async def test_the_library_is_the_installed_one_and_comes_compressed_to_whoever_takes_that() -> None:
    installed = app.library_path()
    assert installed is not None
    content = installed.read_bytes()
    async with site() as here:
        for taken, coding in (("gzip, deflate, br", "gzip"), ("identity", None), ("", None)):
            status, headers, body = await here.get(PATH, headers={"Accept-Encoding": taken}, auto_decompress=False)
            assert (status, headers.get("Content-Encoding")) == (200, coding)
            assert (gzip.decompress(body) if coding else body) == content
            assert headers["Content-Type"] == "text/javascript; charset=utf-8"
            assert headers["Vary"] == "Accept-Encoding"
            assert {name: headers[name] for name in HEADERS} == HEADERS | {"Cache-Control": "no-cache"}


@pytest.mark.parametrize("taken", ["gzip", "identity"])
async def test_a_browser_that_has_the_library_gets_it_no_second_time(taken: str) -> None:
    async with site() as here:
        _, headers, _ = await here.get(PATH, method="HEAD", headers={"Accept-Encoding": taken})
        again = {"Accept-Encoding": taken, "If-None-Match": headers["ETag"]}
        status, headers, body = await here.get(PATH, headers=again)
        assert (status, body) == (304, b"")
        assert headers["Content-Security-Policy"] == HEADERS["Content-Security-Policy"]
        status, _, _ = await here.get(PATH, headers=again | {"If-None-Match": '"another"'})
        assert status == 200


async def test_a_node_without_the_library_answers_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "library_path", lambda: None)
    async with site() as here:
        assert await here.refused(PATH) == (404, "not found")
        assert (await here.get("/"))[0] == 200


def test_the_policy_lets_one_known_style_through_and_no_script() -> None:
    policy = dict(part.strip().split(" ", 1) for part in HEADERS["Content-Security-Policy"].split(";"))
    assert policy["style-src"] == f"'self' {STYLE_HASH}"
    assert (policy["script-src"], policy["default-src"]) == ("'self'", "'none'")
