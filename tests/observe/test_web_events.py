"""/events: changes reach the watchers, and a watcher that does not read is dropped."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from p2ptrain.observe import events
from p2ptrain.observe.events import QUEUED_BYTES_MAX, QUEUED_MAX, WATCHERS_MAX, Watcher
from p2ptrain.observe.schema import LogLine
from tests.helpers.web import (
    STATUS,
    Site,
    a_record,
    a_round,
    a_status,
    on_both_loops,
    site,
    status_in,
    until,
    until_closed,
)

LINE = LogLine(at="2026-01-01T00:00:00.000+00:00", level="info", message='a "line"\nof two, ß')


def said(block: str) -> tuple[str, Any]:
    """Parses an event as a browser does."""
    fields = dict(line.partition(": ")[::2] for line in block.splitlines())
    return fields["event"], json.loads(fields["data"])


async def watch(here: Site) -> asyncio.StreamReader:
    reader, writer = await here.connect()
    writer.write(f"GET /events HTTP/1.1\r\nHost: localhost:{here.port}\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    assert status_in(head) == 200
    assert b"\r\nContent-Type: text/event-stream; charset=utf-8\r\n" in head
    assert b"\r\nCache-Control: no-store\r\n" in head
    return reader


async def blocks(reader: asyncio.StreamReader, count: int) -> list[str]:
    """Reads this many events from a chunked HTTP/1.1 stream."""
    text = ""
    while text.count("\n\n") < count:
        size = int(await reader.readline(), 16)
        text += (await reader.readexactly(size)).decode()
        assert await reader.readexactly(2) == b"\r\n"
    return text.split("\n\n")[:-1]


@on_both_loops
async def test_whoever_begins_to_watch_learns_where_the_node_stands_and_what_it_said_lately() -> None:
    async with site() as here:
        here.told.said = [LINE]
        reader = await watch(here)
        retry, status, line = await blocks(reader, 3)
        assert retry == f"retry: {events.RETRY_MILLISECONDS}"
        assert said(status) == ("status", STATUS)
        assert said(line) == ("log", {"version": 1, **LINE.model_dump()})


@on_both_loops
async def test_what_is_published_reaches_all_who_watch_in_order() -> None:
    async with site() as here:
        readers = [await watch(here) for _ in range(3)]
        for reader in readers:
            await blocks(reader, 2)
        here.app.events.publish("round", a_record(a_round(8)))
        here.app.events.publish("status", a_status(STATUS | {"round": 9}))
        for reader in readers:
            first, second = map(said, await blocks(reader, 2))
            assert first == ("round", {"version": 1, **a_round(8)})
            assert second == ("status", STATUS | {"round": 9})


@on_both_loops
async def test_a_stream_on_which_nothing_happens_shows_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "SILENT_SECONDS", 0.05)
    async with site() as here:
        reader = await watch(here)
        assert (await blocks(reader, 4))[2:] == [": still here"] * 2


@on_both_loops
async def test_a_stream_outlasts_the_time_that_others_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2ptrain.observe.sockets.REQUEST_SECONDS", 0.1)
    monkeypatch.setattr("p2ptrain.observe.sockets.ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(events, "SILENT_SECONDS", 0.1)
    async with site() as here:
        reader = await watch(here)
        assert len(await blocks(reader, 8)) == 8


@on_both_loops
async def test_only_so_many_may_watch_and_the_others_can_still_ask() -> None:
    async with site() as here:
        for _ in range(WATCHERS_MAX):
            await watch(here)
        assert await here.refused("/events") == (503, "too many clients are watching already")
        assert (await here.json("/status"))["round"] == 8
        here.hang_up()
        await until(lambda: not here.app.events.watchers)
        await blocks(await watch(here), 2)


@on_both_loops
async def test_who_watches_is_known_and_that_nobody_does() -> None:
    async with site() as here:
        assert not here.app.events.is_watched.is_set()
        await watch(here)
        assert here.app.events.is_watched.is_set()
        here.hang_up()
        await until(lambda: not here.app.events.is_watched.is_set())


@on_both_loops
async def test_a_watcher_that_does_not_read_is_dropped_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "SEND_SECONDS", 0.3)
    async with site() as here:
        deaf, writer = await here.connect()
        writer.transport.pause_reading()
        writer.write(f"GET /events HTTP/1.1\r\nHost: localhost:{here.port}\r\n\r\n".encode())
        await until(lambda: here.app.events.watchers)
        good = await watch(here)
        await blocks(good, 2)
        big = a_status(STATUS | {"run_name": "x" * 200_000})
        count = 0
        while here.app.events.dropped == 0 and len(here.app.events.watchers) == 2:
            here.app.events.publish("status", big)
            assert said((await blocks(good, 1))[0])[0] == "status"
            count += 1
            assert count < 1_000
        await until(lambda: len(here.app.events.watchers) == 1)
        await until(lambda: len(here.server.slots.lines) == 1)  # or else it keeps its place until it reads
        assert len(here.server.slots.open) == 1
        here.app.events.publish("log", LINE)
        assert said((await blocks(good, 1))[0])[0] == "log"
        assert not deaf.at_eof()


@on_both_loops
async def test_what_waits_for_a_watcher_has_a_bound_in_events_and_in_bytes() -> None:
    watcher = Watcher()
    for _ in range(QUEUED_MAX):
        watcher.put(b"x")
    assert (watcher.is_over, watcher.size) == (False, QUEUED_MAX)
    watcher.put(b"x")
    assert (watcher.is_over, len(watcher.queue)) == (True, QUEUED_MAX)
    watcher = Watcher()
    watcher.put(b"x" * QUEUED_BYTES_MAX)
    assert not watcher.is_over
    assert len(watcher.take()) == QUEUED_BYTES_MAX
    watcher.put(b"x")
    assert not watcher.is_over
    watcher.put(b"x" * QUEUED_BYTES_MAX)
    assert watcher.is_over


@on_both_loops
async def test_when_the_node_ends_the_stream_does() -> None:
    async with site() as here:
        reader = await watch(here)
        await here.server.close()
        assert b"event: status" in await until_closed(reader)
