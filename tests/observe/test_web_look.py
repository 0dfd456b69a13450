"""The watch for changes: a bug in it ends nothing else, and is reported."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from p2ptrain.config.node import HttpConfig
from p2ptrain.observe import http as module
from p2ptrain.observe.http import HttpFace
from p2ptrain.observe.schema import Status
from tests.helpers.web import SECONDS, STATUS, a_status, until_closed


class ChangingNode:
    """A node that changes with every look; the `bad`th look finds an invalid value."""

    def __init__(self, bad: int) -> None:
        self.bad, self.looks = bad, 0
        has_begun = asyncio.Event()
        has_begun.set()
        self.driver = SimpleNamespace(has_begun=has_begun)
        self.records = SimpleNamespace(last=lambda count: [])

    def status(self) -> Status:
        self.looks += 1
        return a_status(STATUS | {"step": self.looks if self.looks != self.bad else -1})


@asynccontextmanager
async def shown(node: Any) -> AsyncIterator[HttpFace]:
    running: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    running.set_result(node)
    http = await HttpFace.open(HttpConfig(port=0), running)
    try:
        yield http
    finally:
        await http.close()


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(module, "status_of", ChangingNode.status)


async def watch(http: HttpFace) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    assert http.url is not None
    port = int(http.url.rsplit(":", 1)[1].strip("/"))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /events HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
    return reader, writer


async def count_of(http: HttpFace, name: str) -> float:
    async with aiohttp.ClientSession() as session, session.get(f"{http.url}metrics") as response:
        found = {each.name: each for each in text_string_to_metric_families(await response.text())}
    return found[name].samples[0].value


async def test_a_look_that_goes_wrong_is_told_and_lets_go_of_those_who_watch(caplog: pytest.LogCaptureFixture) -> None:
    async with shown(ChangingNode(bad=4)) as http:
        reader, writer = await watch(http)
        told = await until_closed(reader)
        writer.close()
        assert told.count(b"event: status") == 3, "and then no silence, but an end"
        (line,) = [each for each in caplog.records if "watching for changes" in each.getMessage()]
        assert line.levelname == "ERROR" and line.exc_info is not None and "step" in str(line.exc_info[1])
        reader, writer = await watch(http)
        refused = await until_closed(reader)
        writer.close()
        assert refused.startswith(b"HTTP/1.1 503 ") and b"watching for changes has failed" in refused
        assert await count_of(http, "p2ptrain_http_looks_broken") == 1


async def test_after_a_while_it_is_looked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_AGAIN_SECONDS", 0.0)
    node = ChangingNode(bad=4)
    async with shown(node) as http:
        reader, writer = await watch(http)
        await until_closed(reader)
        writer.close()
        async with asyncio.timeout(SECONDS):
            reader, writer = await watch(http)
            for _ in range(6):
                await reader.readuntil(b"event: status")
        writer.close()
        assert await count_of(http, "p2ptrain_http_looks_broken") == 1
