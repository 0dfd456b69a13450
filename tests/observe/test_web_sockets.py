"""The HTTP server with hostile clients, or very many."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest
from aiohttp import web

from p2ptrain.observe import http
from p2ptrain.observe.http import CONNECTIONS_MAX, Connection
from tests.helpers.web import Site, on_both_loops, site, status_in, until, until_closed


def start_of(here: Site, path: str = "/status") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost:{here.port}\r\n".encode()


async def silent(here: Site, count: int, says: bytes = b"") -> list[asyncio.StreamReader]:
    """Opens this many connections without a request."""
    readers = []
    for _ in range(count):
        reader, writer = await here.connect()
        writer.write(says)
        readers.append(reader)
    return readers


@on_both_loops
async def test_a_connection_without_a_request_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "CONNECTION_SECONDS", 0.2)
    async with site() as here:
        for says in (b"", b"GET", start_of(here), start_of(here) + b"X-Slow: "):
            reader, writer = await here.connect()
            writer.write(says)
            assert await until_closed(reader) == b""
        await until(lambda: here.server.open == {})


@on_both_loops
async def test_a_request_that_trickles_in_gains_no_time_by_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "CONNECTION_SECONDS", 0.3)
    async with site() as here:
        reader, writer = await here.connect()
        answer = asyncio.create_task(until_closed(reader))
        while not answer.done():
            writer.write(b"G")
            await asyncio.wait([answer], timeout=0.02)
        assert status_in(answer.result()) in (0, 400)


@on_both_loops
async def test_whoever_does_not_read_the_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "CONNECTION_SECONDS", 0.3)
    async with site() as here:
        here.told.now["counters"] = {f"name {number} {'x' * 1_000}": number for number in range(20_000)}  # 20 MB
        reader, writer = await here.connect()
        writer.transport.pause_reading()
        writer.write(start_of(here) + b"\r\n")
        await until(lambda: here.server.open)
        await until(lambda: not here.server.open)
        assert reader.at_eof() is False


@on_both_loops
async def test_a_full_house_of_silent_clients_makes_room_for_one_that_asks() -> None:
    async with site() as here:
        readers = await silent(here, 3 * CONNECTIONS_MAX, start_of(here))
        assert len(here.server.open) <= CONNECTIONS_MAX
        for _ in range(5):
            assert (await here.json("/status"))["round"] == 8
        assert len(here.server.open) <= CONNECTIONS_MAX
        assert await until_closed(readers[0]) == b""


@on_both_loops
async def test_a_request_that_has_arrived_is_not_the_one_to_go_whether_it_was_read_or_not() -> None:
    async with site() as here:
        whole = start_of(here) + b"\r\n"
        with socket.create_connection(("127.0.0.1", here.port)) as client:
            await until(lambda: here.server.open)
            (connection,) = here.server.open
            assert here.server.is_silent(connection)
            client.sendall(whole)  # and the loop has no turn to read it
            assert not here.server.is_silent(connection)
        await until(lambda: not here.server.open)
        reader, _ = await here.connect()
        await until(lambda: here.server.open)
        (connection,) = here.server.open
        connection.data_received(whole[:10])
        assert here.server.is_silent(connection), "a part of a request is none"
        connection.data_received(whole[10:])  # and the loop has no turn to answer it
        assert not here.server.is_silent(connection)
        assert status_in(await until_closed(reader)) == 200


@on_both_loops
async def test_those_who_have_asked_are_answered_when_the_house_is_full() -> None:
    """Sixty-five come at once, and all but one have asked: that one makes room, though it is not the oldest."""
    async with site() as here:
        readers = []
        for number in range(CONNECTIONS_MAX):
            reader, writer = await here.connect()
            if number != 7:
                writer.write(start_of(here) + b"\r\n")
            readers.append(reader)
        answers = await asyncio.gather(here.json("/status"), *(until_closed(each) for each in readers[:7]))
        assert answers[0]["round"] == 8
        assert [status_in(each) for each in answers[1:]] == [200] * 7


@on_both_loops
async def test_when_all_are_being_answered_the_next_is_closed_at_once() -> None:
    async with site() as here:
        here.told.now["counters"] = {f"name {number} {'x' * 1_000}": number for number in range(5_000)}  # 5 MB
        for _ in range(CONNECTIONS_MAX):
            _, writer = await here.connect()
            writer.transport.pause_reading()
            writer.write(start_of(here) + b"\r\n")
        await until(lambda: len(here.server.open) == CONNECTIONS_MAX)
        await until(lambda: not any(here.server.is_silent(each) for each in here.server.open))
        assert await here.raw(b"") == b""
        assert len(here.server.open) == CONNECTIONS_MAX
        here.hang_up()
        await until(lambda: here.server.open == {})
        here.told.now["counters"] = {}
        assert (await here.json("/status"))["round"] == 8


@on_both_loops
async def test_a_request_that_is_too_long_is_refused_before_it_is_whole() -> None:
    async with site() as here:
        for junk in (b"X: " + b"y" * 8_000 + b"\r\n", b"Cookie: a=b\r\n"):
            reader, writer = await here.connect()
            writer.write(start_of(here))
            try:
                for _ in range(10**7 // len(junk)):
                    writer.write(junk)
                    await writer.drain()
            except ConnectionError:
                pass
            assert status_in(await until_closed(reader)) in (0, 400)
        assert await here.raw_status(start_of(here) + b"X: y\r\n" * 3_000) == 400
        assert (await here.json("/status"))["round"] == 8


@on_both_loops
async def test_a_request_of_a_browser_with_cookies_is_not_too_long() -> None:
    async with site() as here:
        assert await here.raw_status(start_of(here) + b"Cookie: a=" + b"x" * 7_000 + b"\r\n\r\n") == 200
        lines = b"".join(b"X%d: %s\r\n" % (number, b"y" * 4_000) for number in range(4))
        assert await here.raw_status(start_of(here) + lines + b"\r\n") == 200


@pytest.mark.parametrize(
    "junk",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"nonsense\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
        b"\0\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\n b\r\n\r\n", b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\r\n" * 5_000 + b"x\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n", b"GET /" + b"a" * 9_000 + b" HTTP/1.1\r\n\r\n",
    ],
)  # fmt: skip
@on_both_loops
async def test_what_is_not_http_is_told_so_and_not_logged(junk: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with site() as here:
        answer = await here.raw(junk)
        assert status_in(answer) in (400, 421)
        assert set(json.loads(answer.partition(b"\r\n\r\n")[2])) == {"version", "error", "fix"}
        assert caplog.records == []
        assert (await here.json("/status"))["round"] == 8


@on_both_loops
async def test_a_connection_carries_one_answer_whatever_else_is_sent_on_it() -> None:
    async with site() as here:
        answer = await here.raw((start_of(here) + b"\r\n") * 50)
        assert answer.count(b"HTTP/1.") == 1
        smuggled = b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /peers HTTP/1.1\r\n\r\n"
        assert (await here.raw(start_of(here) + smuggled)).count(b"HTTP/1.") == 1
        upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + start_of(here, "/peers") + b"\r\n"
        assert (await here.raw(start_of(here) + upgrade)).count(b"HTTP/1.") == 1


@on_both_loops
async def test_what_follows_a_request_is_not_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed, parse = [], web.RequestHandler.data_received
    monkeypatch.setattr(
        web.RequestHandler, "data_received", lambda self, data: (parsed.append(data), parse(self, data))
    )
    async with site() as here:
        reader, _ = await here.connect()
        await until(lambda: here.server.open)
        (connection,) = here.server.open
        whole = start_of(here) + b"\r\n"
        for data in (whole[:10], whole[10:], whole, b"x" * 100_000):
            connection.data_received(data)
        assert parsed == [whole[:10], whole[10:]]
        assert (await until_closed(reader)).count(b"HTTP/1.") == 1


@on_both_loops
async def test_whoever_sends_only_what_may_stand_before_a_request_can_be_made_to_go() -> None:
    async with site() as here:
        for says in (b"\r\n\r\n", b"\r\n" * 100):
            readers = await silent(here, CONNECTIONS_MAX, says)
            assert (await here.json("/status"))["round"] == 8
            assert await until_closed(readers[0]) == b""
            here.hang_up()
        assert await here.raw_status(b"\r\n\r\n" + start_of(here) + b"\r\n") == 200


@pytest.mark.parametrize(
    ("host", "more", "status"),
    [
        ("localhost", b"", 200),
        ("evil.example", b"", 421),
        ("localhost", b"Content-Length: 1000000\r\n", 413),
        ("localhost", b"Transfer-Encoding: chunked\r\n", 413),
    ],
)
@on_both_loops
async def test_whoever_asks_whether_to_go_on_is_answered_at_once(host: str, more: bytes, status: int) -> None:
    """A client that sends `Expect: 100-continue` never gets one, and so never sends its body."""
    async with site() as here:
        head = f"GET /status HTTP/1.1\r\nHost: {host}:{here.port}\r\nExpect: 100-continue\r\n".encode()
        answer = await here.raw(head + more + b"\r\n")
        assert (status_in(answer), answer.count(b"HTTP/1.")) == (status, 1)


# ---------------------------------------------------------------------------------------------------
# The end


def has_ended(client: socket.socket) -> bool:
    """True if the client sees the end at once, without another turn of the server's loop."""
    client.setblocking(False)
    try:
        while client.recv(2**16):
            pass
    except ConnectionResetError:
        pass
    except BlockingIOError:
        return False
    return True


@pytest.mark.parametrize("turns", range(6))  # of the loop: taken from the kernel, made a connection of, ...
@on_both_loops
async def test_a_connection_that_comes_while_the_server_ends_is_not_left_behind(turns: int) -> None:
    async with site() as here:
        with socket.create_connection(("127.0.0.1", here.port)) as client:
            for _ in range(turns):
                await asyncio.sleep(0)
            await here.server.close()
            assert has_ended(client)


@on_both_loops
async def test_a_connection_that_comes_when_the_server_has_ended_is_not_left_behind() -> None:
    async with site() as here:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            with socket.create_connection(listener.getsockname()) as client:
                late, _ = listener.accept()
                late.setblocking(False)
                await here.server.close()
                loop, unused = asyncio.get_running_loop(), web.Server(pytest.fail)
                await loop.connect_accepted_socket(lambda: Connection(unused, here.server), late)
                assert here.server.open == {}
                await until(lambda: has_ended(client))


@pytest.mark.parametrize("path", ["/status", "/assets/plotly.min.js"])
@on_both_loops
async def test_a_client_that_does_not_read_is_not_left_behind(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "SHUTDOWN_SECONDS", 0.1)
    async with site() as here:
        here.told.now["counters"] = {f"name {number} {'x' * 1_000}": number for number in range(20_000)}  # 20 MB
        with socket.create_connection(("127.0.0.1", here.port)) as client:
            client.sendall(start_of(here, path) + b"\r\n")
            await until(lambda: any(not here.server.is_silent(each) for each in here.server.open))
            await here.server.close()
            assert has_ended(client)
