"""Runs the HTTP server in the daemon, and publishes changes to /events.

It answers from the start, before the run is found: the process is alive, but not ready. While a client watches /events,
it checks once a second for changes. A bug in that check must not end training: it is logged and counted, the watchers
are disconnected, and the check starts again a minute later.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from asyncio import Future, Task
from collections import deque
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from p2ptrain import __version__
from p2ptrain.config.node import HttpConfig, is_loopback
from p2ptrain.errors import ConfigError
from p2ptrain.observe.app import App
from p2ptrain.observe.build import Running, peers_of, rounds_of, status_of, unreadiness_of
from p2ptrain.observe.guard import Guard, bracketed, read_token
from p2ptrain.observe.logs import LINE_MAX, plain
from p2ptrain.observe.schema import Level, LogLine, PeerList, RoundRecord, Status
from p2ptrain.observe.sockets import HttpListener

LOOK_SECONDS = 1.0  # between events of the same kind
LOOK_AGAIN_SECONDS = 60.0  # after a bug, which may repeat: the log gets one line a minute
LINES_KEPT = 64  # log lines that a page shows when it opens
LINES_WAITING_MAX = 256  # log lines per second; the oldest are dropped first
ROUNDS_AT_ONCE = 32  # new rounds sent at once; after more, a page should ask for all of them
STARTING = "starting: the node has not found its run yet, or is loading it"
NOT_CHANGES = ("since_applied_seconds", "uptime_seconds", "loop_lag_seconds")  # fields that only show time passing
LEVELS: tuple[tuple[int, Level], ...] = (
    (50, "critical"),
    (40, "error"),
    (30, "warning"),
    (20, "info"),
)  # fixed names, because libraries may rename logging's
PROGRESS = "p2ptrain.progress"  # the logger of lines about rounds, which have their own events

log = logging.getLogger("p2ptrain.observe")


class LogTail(logging.Handler):
    """Keeps the latest log lines for pages. Called from any thread, which deques allow."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lately: deque[LogLine] = deque(maxlen=LINES_KEPT)
        self.waiting: deque[LogLine] = deque(maxlen=LINES_WAITING_MAX)  # to be sent to watchers

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == PROGRESS:
            return
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        text = plain(record.getMessage()[:LINE_MAX])
        level: Level = next((name for least, name in LEVELS if record.levelno >= least), "debug")
        line = LogLine(at=at, level=level, message=text)
        self.lately.append(line)
        self.waiting.append(line)


class HttpFace:
    """Serves the status of a node (Running) over HTTP, from before the node exists."""

    def __init__(self, config: HttpConfig, listener: socket.socket, token: bytes, daemon: Future[Any]) -> None:
        host, port = listener.getsockname()[:2]
        self._daemon, self._lines = daemon, LogTail()
        self._app = App(self, Guard(config.host, port, config.allowed_hosts, token), __version__)
        self._server = HttpListener(self._app.application, self._app.slots)
        self._looking: Task[None] | None = None
        shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  # all addresses: one of them
        self.url = f"http://{bracketed(shown)}:{port}/"

    @classmethod
    async def open(cls, config: HttpConfig, daemon: Future[Any]) -> Self:
        """Starts the server. ConfigError if it cannot listen where the config says."""
        listener, token = await listen(config)
        http = cls(config, listener, token, daemon)
        await http._server.start(listener)
        logging.getLogger("p2ptrain").addHandler(http._lines)
        http._look()
        log.info("open this node in a browser: %s%s", http.url, "?token=..." if token else "")
        return http

    async def close(self) -> None:
        logging.getLogger("p2ptrain").removeHandler(self._lines)
        if self._looking is not None:
            self._looking.cancel()
        await self._server.close()

    # -----------------------------------------------------------------------------------------------
    # What is shown; None while the node starts

    @property
    def _running(self) -> Running | None:
        """The daemon, once its core has started."""
        daemon: Running | None = self._daemon.result() if self._daemon.done() else None
        return daemon if daemon is not None and daemon.driver.has_begun.is_set() else None

    def status(self) -> Status | None:
        return status_of(self._running) if self._running else None

    def peers(self) -> PeerList | None:
        return peers_of(self._running) if self._running else None

    def rounds(self, last: int) -> list[RoundRecord] | None:
        """Returns the last rounds, the oldest first."""
        return rounds_of(self._running, last) if self._running else None

    def complaints(self) -> list[str]:
        """Returns why the node does not take part fully; empty if it does."""
        return unreadiness_of(self._running) if self._running else [STARTING]

    def lines(self) -> list[LogLine]:
        return [*self._lines.lately]

    def _look(self, after_seconds: float = 0.0) -> None:
        self._looking = asyncio.create_task(self._look_for_ever(after_seconds), name="events over HTTP")
        self._looking.add_done_callback(self._look_ended)

    def _look_ended(self, task: asyncio.Task[None]) -> None:
        """Restarts the watch loop after a bug, and disconnects its clients, as a frozen page would hide the problem."""
        if task.cancelled():
            return
        log.error("watching for changes, for /events, has failed", exc_info=task.exception())
        self._app.events.break_off()
        self._look(LOOK_AGAIN_SECONDS)

    async def _look_for_ever(self, after_seconds: float) -> None:
        """Publishes changes while there are watchers."""
        events = self._app.events
        await asyncio.sleep(after_seconds)
        events.go_on()
        while True:
            await events.is_watched.wait()
            self._lines.waiting.clear()
            await self._look_while_watched()

    async def _look_while_watched(self) -> None:
        events, daemon = self._app.events, self._running
        assert daemon is not None, "watchers are refused before"
        told = {each.key for each in daemon.records.last(ROUNDS_AT_ONCE)}
        before: dict[str, Any] = {}
        while events.is_watched.is_set():
            await asyncio.sleep(LOOK_SECONDS)
            lately = daemon.records.last(ROUNDS_AT_ONCE)
            for each in lately:
                if each.key not in told:
                    events.publish("round", each)
            told = {each.key for each in lately}
            status = self.status()
            if status is not None and (now := status.model_dump(exclude={*NOT_CHANGES})) != before:
                events.publish("status", status)
                before = now
            while self._lines.waiting:
                events.publish("log", self._lines.waiting.popleft())


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
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            problem = f"cannot listen on {host}, port {port}: {error.strerror or error}"
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
    family, kind, protocol, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener
