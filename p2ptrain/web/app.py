"""The application: addresses to answers. It renders what the daemon hands it, and decides nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from hashlib import sha256
from http import HTTPStatus
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol, TypeVar

from aiohttp import web
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from p2ptrain.web import library
from p2ptrain.web.events import Events
from p2ptrain.web.guard import Guard, refusal, secured
from p2ptrain.web.metrics import Metrics
from p2ptrain.web.models import Answer, Health, LogLine, Peers, Readiness, Round, Rounds, Status
from p2ptrain.web.openapi import ROUNDS_DEFAULT, ROUNDS_MAX, describe
from p2ptrain.web.sockets import Connection, Places

ASSETS = Path(str(files("p2ptrain.web"))) / "assets"
INDEX = "index.html"
PACKED_BYTES_MIN = 16_384  # of JSON, from which on it is compressed: a thousand rounds become a fifth, in 15 ms
KINDS = {  # of files; no other is served
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".json": "application/json",
    ".txt": "text/plain; charset=utf-8",
}

A = TypeVar("A", bound=Answer)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Data = dict[str, Any]


class Source(Protocol):
    """Whoever knows: the daemon. All of it answers at once, on the event loop; None: it is starting."""

    def status(self) -> Data | None: ...
    def peers(self) -> Data | None: ...
    def rounds(self, last: int) -> list[Data] | None: ...

    def complaints(self) -> list[str]:
        """Why it does not take part as it should; nothing: it does."""
        ...

    def lines(self) -> list[LogLine]:
        """What it has said lately."""
        ...


def answer(model: Answer, status: HTTPStatus = HTTPStatus.OK) -> web.Response:
    return web.Response(status=status, text=model.model_dump_json(), content_type="application/json")


def packed(request: web.Request, model: Answer) -> web.Response:
    """An answer that may be large: compressed, in a thread, for those who take that and come through a slow line.

    No secret is in it that its size could tell (BREACH): the token is in no answer, and nothing of a request either.
    """
    response = answer(model)
    response.headers["Vary"] = "Accept-Encoding"
    if (response.content_length or 0) >= PACKED_BYTES_MIN and "gzip" in request.headers.get("Accept-Encoding", ""):
        response.enable_compression(web.ContentCoding.gzip)
    return response


def starting() -> web.Response:
    fix = "Ask again; /readyz says when it is ready"
    return refusal(HTTPStatus.SERVICE_UNAVAILABLE, "the node is starting, or looks for its run", fix)


class App:
    """Of one node."""

    def __init__(self, source: Source, guard: Guard, release: str, assets: Path = ASSETS) -> None:
        self.source, self.guard, self.events = source, guard, Events()
        self.places = Places()  # for the connections of its server
        # In memory, all 70 kB: aiohttp leaves a file open when who asked for it hangs up as it is being opened.
        kept = [path for path in sorted(assets.iterdir()) if path.suffix in KINDS and path.is_file()]
        self._files = {path.name: path.read_bytes() for path in kept}
        found = library.path_of()
        self._library = library.Library(found) if found is not None else None
        self._openapi = describe(release)
        self._metrics = Metrics(release, self.status, self._own_metrics)
        self.application = web.Application(middlewares=[self._middleware])
        routes: dict[str, Handler] = {
            "/": self._page,
            "/assets/{name}": self._asset,
            "/status": self._status,
            "/peers": self._peers,
            "/rounds": self._rounds,
            "/events": self._watch,
            "/metrics": self._tell_metrics,
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/openapi.json": self._describe,
        }
        for path, handler in routes.items():
            self.application.router.add_get(path, handler, expect_handler=_expect_nothing)
        self.application.on_shutdown.append(self._end)

    async def _end(self, application: web.Application) -> None:
        self.events.close()

    # -----------------------------------------------------------------------------------------------
    # What the daemon says, checked

    def status(self) -> Status | None:
        found = self.source.status()
        return None if found is None else Status.model_validate(found)

    def rounds(self, last: int) -> list[Round] | None:
        """The oldest first."""
        found = self.source.rounds(last)
        return None if found is None else [Round.model_validate(each) for each in found]

    # -----------------------------------------------------------------------------------------------
    # What every request goes through

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        refused = self.guard.refuse(request)
        if refused is not None:
            # Of the right host and method, and without the token in its header: perhaps it is in the address.
            admitted = self.guard.admit(request) if refused.status == HTTPStatus.UNAUTHORIZED else None
            return secured(admitted or refused)
        try:
            response = self.guard.admit(request) or await handler(request)
        except web.HTTPException as error:  # the router's
            return refusal(HTTPStatus(error.status), HTTPStatus(error.status).phrase.lower())
        return response if response.prepared else secured(response)

    # -----------------------------------------------------------------------------------------------
    # Answers

    async def _status(self, request: web.Request) -> web.StreamResponse:
        status = self.status()
        return starting() if status is None else answer(status)

    async def _peers(self, request: web.Request) -> web.StreamResponse:
        found = self.source.peers()
        return starting() if found is None else packed(request, Peers.model_validate(found))

    async def _rounds(self, request: web.Request) -> web.StreamResponse:
        given = request.query.getall("last", [str(ROUNDS_DEFAULT)])
        is_number = len(given) == 1 and len(given[0]) <= len(str(ROUNDS_MAX)) and given[0].isascii()
        last = int(given[0]) if is_number and given[0].isdigit() else 0
        if not 1 <= last <= ROUNDS_MAX:
            return refusal(HTTPStatus.BAD_REQUEST, "last is no such number", f"Give one from 1 to {ROUNDS_MAX}")
        found = self.rounds(last)
        return starting() if found is None else packed(request, Rounds(rounds=found))

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        status = self.status()
        if status is None:
            return starting()
        if self.events.is_broken:
            fix = "The node's log says why; ask /status, and here again in a minute"
            return refusal(HTTPStatus.SERVICE_UNAVAILABLE, "the look at what changes went wrong here", fix)
        if not self.events.has_room:
            fix = "Close a dashboard, or ask /status"
            return refusal(HTTPStatus.SERVICE_UNAVAILABLE, "too many are watching already", fix)
        if isinstance(request.protocol, Connection):
            request.protocol.stays()
        first: list[tuple[str, Answer]] = [("status", status), *(("log", line) for line in self.source.lines())]
        return await self.events.watch(request, first)

    async def _tell_metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    def _own_metrics(self) -> Iterator[Metric]:
        places = self.places
        yield GaugeMetricFamily(
            "p2ptrain_http_connections", "Open connections to the HTTP server.", value=len(places.open)
        )
        yield CounterMetricFamily(
            "p2ptrain_http_connections_turned_away",
            "Connections without a request that had to make room, and those that found none.",
            value=places.turned_away,
        )
        yield GaugeMetricFamily("p2ptrain_http_watchers", "Who reads /events.", value=len(self.events.watchers))
        yield CounterMetricFamily(
            "p2ptrain_http_watchers_dropped", "Watchers that did not read.", value=self.events.dropped
        )
        yield CounterMetricFamily(
            "p2ptrain_http_looks_broken",
            "Times that the look at what changes ended by a mistake of p2ptrain's, and those who watched were let go.",
            value=self.events.broken,
        )

    async def _healthz(self, request: web.Request) -> web.StreamResponse:
        return answer(Health(ok=True))

    async def _readyz(self, request: web.Request) -> web.StreamResponse:
        reasons = self.source.complaints()
        told = reasons if self.guard.may_read(request) else []
        status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
        return answer(Readiness(ready=not reasons, reasons=told), status)

    async def _describe(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self._openapi)

    # -----------------------------------------------------------------------------------------------
    # The dashboard

    async def _page(self, request: web.Request) -> web.StreamResponse:
        return self._file(request, INDEX)

    async def _asset(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name == library.NAME and self._library is not None:
            return await self._library.answer(request)
        return self._file(request, name)

    def _file(self, request: web.Request, name: str) -> web.StreamResponse:
        """One of those that were there at the start: no path is made of what a request says."""
        body = self._files.get(name)
        if body is None:
            return refusal(HTTPStatus.NOT_FOUND, "not found")
        headers = {
            "Content-Type": KINDS[Path(name).suffix],
            "Cache-Control": "no-cache",
        }  # kept, if it is still the same
        return library.tagged(request, body, sha256(body).hexdigest()[:32], headers)


async def _expect_nothing(request: web.Request) -> None:
    """No body is taken, and what is not admitted is not encouraged: the guard answers, and not aiohttp."""
