"""Runs the HTTP server in the daemon, and limits its connections in number and time.

It answers from the start, before the run is found: the process is alive, but not ready.

aiohttp parses and answers requests; this module adds what it lacks. A connection carries one request and is closed
after the answer, or when its time is over. When there are too many, the one that has been without a request longest is
closed. A thousand clients that send nothing (slow loris) therefore cost nobody an answer, because a request that has
arrived is never dropped for another. When the server ends, no connection survives: neither one that was just accepted
nor one whose client does not read."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import select
import socket
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self, cast, get_args

from aiohttp import web
from aiohttp.web_request import BaseRequest

from p2ptrain import __version__
from p2ptrain.config.node import HttpConfig, is_loopback
from p2ptrain.errors import ConfigError
from p2ptrain.observe.app import App
from p2ptrain.observe.build import Running, peers_of, rounds_of, status_of, unreadiness_of
from p2ptrain.observe.guard import Guard, bracketed, read_token, refusal
from p2ptrain.observe.logs import LINE_MAX, plain
from p2ptrain.observe.schema import Level, LogLine, PeerList, RoundRecord, Status

CONNECTIONS_MAX = 64  # loading a dashboard takes six for a moment
CONNECTION_SECONDS = 60.0  # for the request and its answer: the dashboard's largest file through a slow tunnel
FIELDS_MAX = 64  # of a request's head, of 8 kB each
BACKLOG = 1_024  # connections that the kernel queues for us; it drops others, which cost their clients a second
SHUTDOWN_SECONDS = 2.0  # to finish answers when the daemon ends
LINES_KEPT = 64  # log lines in an answer of /log, which a page asks for every few seconds
STARTING = "starting: the node has not found its run yet, or is loading it"
LEVELS: tuple[Level, ...] = get_args(Level)  # logging's 10, 20 and so on, whose names there libraries may change
PROGRESS = "p2ptrain.progress"  # the logger of lines about rounds, which /rounds has

log = logging.getLogger("p2ptrain.observe")


class Connection(web.RequestHandler):
    """A connection, for one request."""

    __slots__ = ("_listener", "_timer")

    def __init__(self, server: web.Server, listener: HttpListener) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # how aiohttp turns it off
            max_headers=FIELDS_MAX,
            lingering_time=0.0,
            tcp_keepalive=False,
        )
        self._listener = listener
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        line = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._timer = self._loop.call_later(CONNECTION_SECONDS, line.abort)
        self._listener.take(self, line)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._listener.open.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Passes on the request; what follows it is dropped, as aiohttp would collect it."""
        if not self.is_asked:
            super().data_received(data)

    @property
    def is_asked(self) -> bool:
        """Whether aiohttp has found a request in the data, even an invalid one."""
        return bool(self._request_count)

    def handle_error(
        self, request: BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Replaces aiohttp's handler, which would echo parts of bad requests and log each of them."""
        if request.writer.output_size > 0:
            raise ConnectionError("the response was interrupted")
        if status == HTTPStatus.BAD_REQUEST:
            return refusal(HTTPStatus.BAD_REQUEST, "that is not HTTP")
        log.error("%s could not be answered", request.path, exc_info=exc)
        return refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "an internal error; see the node's log")


class HttpListener:
    def __init__(self, app: web.Application) -> None:
        self.open: dict[Connection, asyncio.Transport] = {}  # the oldest first; aiohttp forgets the transport too early
        self._most = CONNECTIONS_MAX
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_SECONDS)
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        await self._runner.setup()
        server = self._runner.server
        assert isinstance(server, web.Server)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Connection(server, self), sock=listener, backlog=BACKLOG)

    def take(self, connection: Connection, line: asyncio.Transport) -> None:
        """Counts a connection. If there are too many, one goes: the oldest without a request, or else this one."""
        self.open[connection] = line
        if len(self.open) > self._most:
            self.open.pop(next(filter(self.is_silent, self.open), connection)).abort()

    def is_silent(self, connection: Connection) -> bool:
        """True if there is no request, and the kernel has no unread data that may be one."""
        there = select.poll()
        there.register(self.open[connection].get_extra_info("socket").fileno(), select.POLLIN)
        return not connection.is_asked and not there.poll(0)

    async def close(self) -> None:
        """Stops listening, finishes the answers in progress, and closes all connections."""
        if self._server is not None:
            loop = asyncio.get_running_loop()
            for each in self._server.sockets:
                loop.remove_reader(each.fileno())
            await asyncio.sleep(0)  # let asyncio finish accepted connections, which close() would lose
            self._server.close()
        self._most = 0  # for those that are still on their way
        await self._runner.cleanup()
        for line in [*self.open.values()]:
            line.abort()
        while self.open:  # noqa: ASYNC110  # one or two turns of the loop
            await asyncio.sleep(0)


class LogTail(logging.Handler):
    """Keeps the latest log lines for pages. Called from any thread, which deques allow."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lately: deque[LogLine] = deque(maxlen=LINES_KEPT)

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == PROGRESS:
            return
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        text = plain(record.getMessage()[:LINE_MAX])
        level = LEVELS[min(record.levelno // 10, len(LEVELS)) - 1]
        self.lately.append(LogLine(at=at, level=level, message=text))


Current = Callable[[], Any]  # returns a `Running` node; None while it starts


class HttpFace:
    """Serves the status of a node (Running) over HTTP, from before the node exists."""

    def __init__(self, config: HttpConfig, listener: socket.socket, token: bytes, daemon: Current) -> None:
        host, port = listener.getsockname()[:2]
        self._daemon, self._lines = daemon, LogTail()
        self._app = App(self, Guard(config.host, port, config.allowed_hosts, token), __version__)
        self._server = HttpListener(self._app.application)
        shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  # all addresses: one of them
        self.url = f"http://{bracketed(shown)}:{port}/"

    @classmethod
    async def open(cls, config: HttpConfig, daemon: Current) -> Self:
        """Starts the server. ConfigError if it cannot listen where the config says.

        daemon: returns the one that runs; another takes its place where a run goes on as another"""
        listener, token = await listen(config)
        http = cls(config, listener, token, daemon)
        await http._server.start(listener)
        logging.getLogger("p2ptrain").addHandler(http._lines)
        log.info("open this node in a browser: %s%s", http.url, "?token=..." if token else "")
        return http

    async def close(self) -> None:
        logging.getLogger("p2ptrain").removeHandler(self._lines)
        await self._server.close()

    # -- What is shown; None while the node starts --------------------------------------------------

    @property
    def _running(self) -> Running | None:
        """The daemon, once its core has started."""
        daemon: Running | None = self._daemon()
        return daemon if daemon is not None and daemon.driver.has_begun.is_set() else None

    def status(self) -> Status | None:
        return status_of(self._running) if self._running else None

    def peers(self) -> PeerList | None:
        return peers_of(self._running) if self._running else None

    def rounds(self, last: int) -> list[RoundRecord] | None:
        return rounds_of(self._running, last) if self._running else None

    def complaints(self) -> list[str]:
        return unreadiness_of(self._running) if self._running else [STARTING]

    def lines(self) -> list[LogLine]:
        return [*self._lines.lately]


async def listen(config: HttpConfig) -> tuple[socket.socket, bytes]:
    """Returns a bound socket and the required token. ConfigError if the config does not allow either."""
    token = read_token(Path(config.token_file)) if config.token_file else b""
    listener = await _bind(config)
    host = listener.getsockname()[0]
    if not token and not is_loopback(host):  # the name resolves to an address that the owner may not expect
        listener.close()
        fix = 'Set token_file, or host = "127.0.0.1"'
        raise ConfigError(f"{config.host} is {host} here, which others can reach", key="http.host", fix=fix)
    return listener, token


async def _bind(config: HttpConfig) -> socket.socket:
    """Binds a socket; falls back to any free port if the default is taken, as several nodes may share a machine."""
    host, port = config.host, config.port
    try:
        return await _bound(host, port)
    except UnicodeError as error:
        raise ConfigError(f"{host} is no host name", key="http.host", fix="Give an address of this machine") from error
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
            problem = f"cannot listen on {host}, port {port}: {why}"
            raise ConfigError(problem, key="http.host", fix="Give an address of this machine") from error
        if "port" in config.model_fields_set:
            fix = "Choose another, or 0 for any free one"
            raise ConfigError(f"port {port} of {host} is taken", key="http.port", fix=fix) from error
    listener = await _bound(host, 0)
    log.info("port %d is taken, perhaps by another node: using a free one", port)
    return listener


async def _bound(host: str, port: int) -> socket.socket:
    """Resolves the host, preferring IPv4, and binds a socket."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    listener = socket.create_server(address, family=family)
    listener.setblocking(False)
    return listener
