"""The connections of the HTTP server: few, short, and none that only takes a place.

aiohttp parses and answers; what it leaves open is here. A connection carries one request and is closed, so that there
is no idle one to keep. It has some seconds to send that request and some more to read the answer. When all slots are
taken, whoever has waited longest without a request goes: a thousand clients that send nothing (a slow loris) cost
nobody an answer, because a request that has arrived is never the one to go. When the server ends, no connection is left
behind: neither one that came at that very moment, nor one whose client does not read.
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

CONNECTIONS_MAX = 64  # a dashboard takes one that stays, a page load six for a moment
REQUEST_SECONDS = 10.0  # for the request to arrive
ANSWER_SECONDS = 60.0  # for the answer to be read: the largest file of the dashboard through a slow tunnel
REQUEST_BYTES_MAX = 16_384  # a browser's with cookies takes 2,000
FIELD_BYTES_MAX = 8_190  # a line of it
FIELDS_MAX = 64
BACKLOG = 1_024  # connections that the kernel holds until we take them: beyond it it drops them for a second
SHUTDOWN_SECONDS = 2.0  # for answers that are on their way when the daemon ends

BLANK_LINE = b"\r\n\r\n"  # the end of a request without a body
NO_PLACE = refusal_bytes(HTTPStatus.SERVICE_UNAVAILABLE, "all connections are in use")
NO_LONGER = refusal_bytes(HTTPStatus.SERVICE_UNAVAILABLE, "others wait for this connection's place")
TOO_SLOW = refusal_bytes(HTTPStatus.REQUEST_TIMEOUT, f"no request within {REQUEST_SECONDS:.0f} s")
TOO_LONG = refusal_bytes(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"more than {REQUEST_BYTES_MAX} bytes")
NO_HTTP = refusal_bytes(HTTPStatus.BAD_REQUEST, "that is not HTTP")

log = logging.getLogger("p2ptrain.observe")


class Slots:
    """For connections, in the order in which they came."""

    def __init__(self, most: int = CONNECTIONS_MAX) -> None:
        self.most = most
        self.open: dict[Arriving | Connection, None] = {}
        self.turned_away = 0  # connections that had to go for others, or found no place
        self.lines: dict[Arriving | Connection, asyncio.Transport] = {}  # of those too that have left, until they close
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
        """From one that has sent its request to what answers it."""
        del self.open[waiting]
        self.open[connection] = None
        self.lines[connection] = self.lines.pop(waiting)

    def leave(self, connection: Arriving | Connection) -> None:
        self.open.pop(connection, None)

    def forget(self, connection: Arriving | Connection) -> None:
        """It is closed."""
        self.leave(connection)
        del self.lines[connection]
        if not self.lines:
            self._are_closed.set()

    async def close(self) -> None:
        """Whatever they still have to send; nobody else gets in."""
        self.is_over = True
        for line in self.lines.values():
            line.abort()
        if self.lines:
            self._are_closed.clear()
            await self._are_closed.wait()


class Arriving(asyncio.Protocol):
    """A connection whose request is not there yet. There may come thousands a second, so it is light."""

    __slots__ = ("_bytes", "_line", "_make", "_slots", "_timer")

    def __init__(self, slots: Slots, make: Callable[[], Connection]) -> None:
        self._slots, self._make = slots, make
        self._bytes = bytearray()
        self._line: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        line = cast(asyncio.Transport, transport)  # uvloop's is none by name
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
        self._bytes += data if self._bytes else data.lstrip(b"\r\n")  # which may stand before a request
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
        if not connection.is_asked:  # and would hold a place that nobody can take
            transport.write(NO_HTTP)
            connection.force_close()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._end()
        self._slots.forget(self)

    def is_silent(self) -> bool:
        """Nothing of a request lies there unread."""
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
    """A connection whose request is answered."""

    __slots__ = ("_line", "_slots", "_timer", "_unread")

    def __init__(self, server: web.Server, slots: Slots, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(
            server,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]  # aiohttp's own way to have none
            max_line_size=FIELD_BYTES_MAX,
            max_field_size=FIELD_BYTES_MAX,
            max_headers=FIELDS_MAX,
            lingering_time=0.0,
            tcp_keepalive=False,
        )
        self._slots = slots
        self._unread = 0
        self._line: asyncio.Transport | None = None  # aiohttp forgets it before all is sent
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
        """The request; whatever else comes is no question that is answered here."""
        if not self.is_asked:
            super().data_received(data)
            return
        self._unread += len(data)
        if self._unread > REQUEST_BYTES_MAX:
            self._abort()

    @property
    def is_asked(self) -> bool:
        """aiohttp has found a request in what came, or what it takes for one that is wrong."""
        return bool(self._request_count)

    def stays(self) -> None:
        """For as long as the client reads; whoever writes sees to that."""
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
        """aiohttp's would tell what it did not understand, and write every such case into our log."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer broke off")
        if status == HTTPStatus.BAD_REQUEST:
            return refusal(HTTPStatus.BAD_REQUEST, "that is not HTTP")
        log.error("%s could not be answered", request.path, exc_info=exc)
        return refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "this went wrong here; the node's log says what")


class HttpListener:
    """Listens, for an application."""

    def __init__(self, app: web.Application, slots: Slots) -> None:
        self.slots = slots
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_SECONDS)
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        """Serve on a socket that is bound."""
        loop = asyncio.get_running_loop()
        await self._runner.setup()
        server = self._runner.server
        assert isinstance(server, web.Server)
        self._server = await loop.create_server(
            lambda: Arriving(self.slots, lambda: Connection(server, self.slots, loop)), sock=listener, backlog=BACKLOG
        )

    async def close(self) -> None:
        """Answers that are on their way are sent; then no connection is left, and none comes."""
        if self._server is not None:
            loop = asyncio.get_running_loop()
            for each in self._server.sockets:
                loop.remove_reader(each.fileno())
            await asyncio.sleep(0)  # what asyncio has taken from the kernel it makes no connection of after close()
            self._server.close()
        for waiting in [*self.slots.open]:
            if isinstance(waiting, Arriving):
                waiting.turn_away(b"")
        await self._runner.cleanup()
        await self.slots.close()
