"""Limits the HTTP server's connections in number and time.

aiohttp parses and answers requests; this module adds what it lacks. A connection carries one request and is then
closed, so none is idle. The client has some seconds to send the request, and some more to read the answer. When all
slots are taken, the connection that has been without a request longest is closed. A thousand clients that send
nothing (slow loris) therefore cost nobody an answer, because a request that has arrived is never dropped for another.
When the server ends, no connection survives: neither one that was just accepted nor one whose client does not read.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import cast

from aiohttp import web
from aiohttp.web_request import BaseRequest

from p2ptrain.observe.guard import refusal, refusal_bytes

CONNECTIONS_MAX = 64  # a dashboard keeps one open, and loading it takes six for a moment
REQUEST_SECONDS = 10.0  # for the request to arrive
ANSWER_SECONDS = 60.0  # for the client to read the answer: the dashboard's largest file through a slow tunnel
REQUEST_BYTES_MAX = 16_384  # a browser's with cookies has 2,000
FIELD_BYTES_MAX = 8_190  # a header line
FIELDS_MAX = 64
BACKLOG = 1_024  # connections that the kernel queues for us; it drops others, which cost their clients a second
SHUTDOWN_SECONDS = 2.0  # to finish answers when the daemon ends

BLANK_LINE = b"\r\n\r\n"  # the end of a request without a body
NO_PLACE = refusal_bytes(HTTPStatus.SERVICE_UNAVAILABLE, "all connections are in use")
NO_LONGER = refusal_bytes(HTTPStatus.SERVICE_UNAVAILABLE, "other clients need this connection")
TOO_SLOW = refusal_bytes(HTTPStatus.REQUEST_TIMEOUT, f"no request within {REQUEST_SECONDS:.0f} s")
TOO_LONG = refusal_bytes(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"more than {REQUEST_BYTES_MAX} bytes")
NO_HTTP = refusal_bytes(HTTPStatus.BAD_REQUEST, "that is not HTTP")

log = logging.getLogger("p2ptrain.observe")


class Slots:
    """The open connections, the oldest first, up to a maximum."""

    def __init__(self, most: int = CONNECTIONS_MAX) -> None:
        self.most = most
        self.open: dict[Arriving | Connection, None] = {}
        self.turned_away = 0  # connections closed to make room, or refused
        self.lines: dict[
            Arriving | Connection, asyncio.Transport
        ] = {}  # includes connections without a slot until they are closed
        self.is_over = False
        self._are_closed = asyncio.Event()

    def take(self, connection: Arriving) -> bool:
        if len(self.open) >= self.most and not self._make_room():
            self.turned_away += 1
            return False
        self.open[connection] = None
        return True

    def _make_room(self) -> bool:
        for each in self.open:
            if isinstance(each, Arriving) and each.is_silent():
                each.turn_away(NO_LONGER)
                self.turned_away += 1
                return True
        return False

    def hand_over(self, waiting: Arriving, connection: Connection) -> None:
        """Passes a slot from a connection whose request has arrived to the one that answers it."""
        del self.open[waiting]
        self.open[connection] = None
        self.lines[connection] = self.lines.pop(waiting)

    def leave(self, connection: Arriving | Connection) -> None:
        self.open.pop(connection, None)

    def forget(self, connection: Arriving | Connection) -> None:
        """Removes a connection that is closed."""
        self.leave(connection)
        del self.lines[connection]
        if not self.lines:
            self._are_closed.set()

    async def close(self) -> None:
        """Aborts all connections, and refuses new ones."""
        self.is_over = True
        for line in self.lines.values():
            line.abort()
        if self.lines:
            self._are_closed.clear()
            await self._are_closed.wait()


class Arriving(asyncio.Protocol):
    """A connection whose request has not arrived yet. Kept small, because thousands may come per second."""

    __slots__ = ("_bytes", "_line", "_make", "_slots", "_timer")

    def __init__(self, slots: Slots, make: Callable[[], Connection]) -> None:
        self._slots, self._make = slots, make
        self._bytes = bytearray()
        self._line: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        line = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._slots.lines[self] = line
        if self._slots.is_over:
            line.abort()
            return
        self._line = line
        if not self._slots.take(self):
            self.turn_away(NO_PLACE)
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(REQUEST_SECONDS, self.turn_away, TOO_SLOW)

    def data_received(self, data: bytes) -> None:
        if self._line is None:
            return
        self._bytes += data if self._bytes else data.lstrip(b"\r\n")  # allowed before a request
        if len(self._bytes) > REQUEST_BYTES_MAX:
            self.turn_away(TOO_LONG)
        elif self._bytes and not self._bytes[:1].isalpha():  # every method begins with a letter
            self.turn_away(NO_HTTP)
        elif BLANK_LINE in self._bytes:
            self._hand_over(self._line)

    def _hand_over(self, transport: asyncio.Transport) -> None:
        self._end()
        connection = self._make()
        self._slots.hand_over(self, connection)
        transport.set_protocol(connection)
        connection.connection_made(transport)
        connection.data_received(bytes(self._bytes))
        if not connection.is_asked:  # aiohttp found no request, and the slot would stay taken
            transport.write(NO_HTTP)
            connection.force_close()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._end()
        self._slots.forget(self)

    def is_silent(self) -> bool:
        """True if the kernel has no unread data from the client."""
        if self._line is None:
            return False
        there = select.poll()
        there.register(self._line.get_extra_info("socket").fileno(), select.POLLIN)
        return not there.poll(0)

    def turn_away(self, answer: bytes) -> None:
        self._slots.leave(self)
        if self._line is not None:
            self._line.write(answer)
            self._line.close()
        self._end()

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._line = None


class Connection(web.RequestHandler):
    """A connection whose request is being answered."""

    __slots__ = ("_line", "_slots", "_timer", "_unread")

    def __init__(self, server: web.Server, slots: Slots, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(
            server,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]  # how aiohttp turns it off
            max_line_size=FIELD_BYTES_MAX,
            max_field_size=FIELD_BYTES_MAX,
            max_headers=FIELDS_MAX,
            lingering_time=0.0,
            tcp_keepalive=False,
        )
        self._slots = slots
        self._unread = 0
        self._line: asyncio.Transport | None = None  # aiohttp drops its own reference before everything is sent
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._line = cast(asyncio.Transport, transport)
        super().connection_made(transport)
        self._timer = self._loop.call_later(ANSWER_SECONDS, self._abort)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._slots.forget(self)
        self.stays()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Passes on the request; more data after it is only counted, up to a limit."""
        if not self.is_asked:
            super().data_received(data)
            return
        self._unread += len(data)
        if self._unread > REQUEST_BYTES_MAX:
            self._abort()

    @property
    def is_asked(self) -> bool:
        """True if aiohttp has found a request in the data, even an invalid one."""
        return bool(self._request_count)

    def stays(self) -> None:
        """Lifts the time limit for a long answer; its writer checks that the client keeps reading."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _abort(self) -> None:
        self._slots.leave(self)
        if self._line is not None:
            self._line.abort()

    def handle_error(
        self,
        request: BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Replaces aiohttp's handler, which would echo parts of bad requests and log each of them."""
        if request.writer.output_size > 0:
            raise ConnectionError("the response was interrupted")
        if status == HTTPStatus.BAD_REQUEST:
            return refusal(HTTPStatus.BAD_REQUEST, "that is not HTTP")
        log.error("%s could not be answered", request.path, exc_info=exc)
        return refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "an internal error; see the node's log")


class HttpListener:
    """Accepts connections for an application."""

    def __init__(self, app: web.Application, slots: Slots) -> None:
        self.slots = slots
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_SECONDS)
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        """Serves on a bound socket."""
        loop = asyncio.get_running_loop()
        await self._runner.setup()
        server = self._runner.server
        assert isinstance(server, web.Server)
        self._server = await loop.create_server(
            lambda: Arriving(self.slots, lambda: Connection(server, self.slots, loop)), sock=listener, backlog=BACKLOG
        )

    async def close(self) -> None:
        """Stops listening, finishes the answers in progress, and closes all connections."""
        if self._server is not None:
            loop = asyncio.get_running_loop()
            for each in self._server.sockets:
                loop.remove_reader(each.fileno())
            await asyncio.sleep(0)  # let asyncio finish accepted connections, which close() would lose
            self._server.close()
        for waiting in [*self.slots.open]:
            if isinstance(waiting, Arriving):
                waiting.turn_away(b"")
        await self._runner.cleanup()
        await self.slots.close()
