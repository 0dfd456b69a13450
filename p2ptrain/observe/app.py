"""The HTTP application: routes requests and renders the daemon's facts."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from hashlib import sha256
from http import HTTPStatus
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from p2ptrain.observe import plotly_asset
from p2ptrain.observe.events import Events, client_of
from p2ptrain.observe.figures import figures_of
from p2ptrain.observe.guard import Guard, refusal, secured
from p2ptrain.observe.metrics import MetricsPage
from p2ptrain.observe.openapi import ROUNDS_DEFAULT, ROUNDS_MAX, describe
from p2ptrain.observe.schema import Answer, Health, Readiness, RoundRecord, Rounds, Status
from p2ptrain.observe.sockets import Connection, Slots

if TYPE_CHECKING:
    from p2ptrain.observe.http import HttpFace

ASSETS = Path(str(files("p2ptrain.observe"))) / "assets"
INDEX, DATA = "index.html", "<!-- data -->"
PACKED_BYTES_MIN = 16_384  # larger JSON is compressed: a thousand rounds shrink to a fifth, in 15 ms
KINDS = {  # files of other types are not served
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

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def answer(model: Answer, status: HTTPStatus = HTTPStatus.OK) -> web.Response:
    return web.Response(status=status, text=model.model_dump_json(), content_type="application/json")


def packed(request: web.Request, model: Answer) -> web.Response:
    """A response that, if large, is compressed in a thread for clients that accept it, for the sake of slow links.

    Its size cannot leak a secret (BREACH): no answer contains the token, or anything from a request.
    """
    response = answer(model)
    response.headers["Vary"] = "Accept-Encoding"
    if (response.content_length or 0) >= PACKED_BYTES_MIN and "gzip" in request.headers.get("Accept-Encoding", ""):
        response.enable_compression(web.ContentCoding.gzip)
    return response


def starting() -> web.Response:
    fix = "Try again later; /readyz says when it is ready"
    return refusal(HTTPStatus.SERVICE_UNAVAILABLE, "the node is starting, or looking for its run", fix)


def page_of(index: str, **data: object) -> str:
    """Returns the dashboard's HTML with `data` embedded for its scripts."""
    data["figures"] = {
        name: [
            {"name": each.name, "path": each.path, "key": each.figure.key, "title": each.figure.title}
            | {"unit": each.figure.unit}
            for each in figures_of(model)
        ]
        for name, model in (("status", Status), ("round", RoundRecord))
    }
    blocks = []
    for name, each in data.items():
        text = json.dumps(each).replace("<", "\\u003c")  # nothing in it can close the script element
        blocks.append(f'<script type="application/json" id="{name}">{text}</script>')
    assert DATA in index
    return index.replace(DATA, "\n".join(blocks))


class App:
    """The HTTP application of one server."""

    def __init__(self, facts: HttpFace, guard: Guard, release: str, assets: Path = ASSETS) -> None:
        self.facts, self.guard, self.events = facts, guard, Events()
        self.slots = Slots()
        # Kept in memory (70 kB): aiohttp leaks an open file if the client hangs up while the file is being opened.
        kept = [path for path in sorted(assets.iterdir()) if path.suffix in KINDS and path.is_file()]
        self._files = {path.name: path.read_bytes() for path in kept}
        self._files[INDEX] = page_of(self._files[INDEX].decode()).encode()
        found = plotly_asset.path_of()
        self._library = plotly_asset.PlotlyAsset(found) if found is not None else None
        self._openapi = describe(release)
        self._metrics = MetricsPage(release, facts.status, facts.rounds, self._own_metrics)
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
    # Middleware

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        refused = self.guard.refuse(request)
        if refused is not None:
            # Only the token in the header is missing, so it may be in the URL.
            admitted = self.guard.admit(request) if refused.status == HTTPStatus.UNAUTHORIZED else None
            return secured(admitted or refused)
        try:
            response = self.guard.admit(request) or await handler(request)
        except web.HTTPException as error:  # from the router
            return refusal(HTTPStatus(error.status), HTTPStatus(error.status).phrase.lower())
        return response if response.prepared else secured(response)

    # -----------------------------------------------------------------------------------------------
    # Answers

    async def _status(self, request: web.Request) -> web.StreamResponse:
        status = self.facts.status()
        return starting() if status is None else answer(status)

    async def _peers(self, request: web.Request) -> web.StreamResponse:
        found = self.facts.peers()
        return starting() if found is None else packed(request, found)

    async def _rounds(self, request: web.Request) -> web.StreamResponse:
        given = request.query.getall("last", [str(ROUNDS_DEFAULT)])
        is_number = len(given) == 1 and len(given[0]) <= len(str(ROUNDS_MAX)) and given[0].isascii()
        last = int(given[0]) if is_number and given[0].isdigit() else 0
        if not 1 <= last <= ROUNDS_MAX:
            return refusal(HTTPStatus.BAD_REQUEST, "last is not a valid number", f"Give one from 1 to {ROUNDS_MAX}")
        found = self.facts.rounds(last)
        return starting() if found is None else packed(request, Rounds(rounds=found))

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        status = self.facts.status()
        if status is None:
            return starting()
        if self.events.is_broken:
            fix = "The node's log says why; use /status, or retry in a minute"
            return refusal(HTTPStatus.SERVICE_UNAVAILABLE, "watching for changes has failed", fix)
        if not self.events.make_room(client_of(request)):
            fix = "Close a dashboard, or use /status"
            return refusal(HTTPStatus.SERVICE_UNAVAILABLE, "too many clients are watching already", fix)
        if isinstance(request.protocol, Connection):
            request.protocol.stays()
        first: list[tuple[str, Answer]] = [("status", status), *(("log", line) for line in self.facts.lines())]
        return await self.events.watch(request, first)

    async def _tell_metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    def _own_metrics(self) -> Iterator[Metric]:
        slots = self.slots
        yield GaugeMetricFamily(
            "p2ptrain_http_connections", "Open connections to the HTTP server.", value=len(slots.open)
        )
        yield CounterMetricFamily(
            "p2ptrain_http_connections_turned_away",
            "Idle connections closed to make room, and connections refused for lack of room.",
            value=slots.turned_away,
        )
        yield GaugeMetricFamily(
            "p2ptrain_http_watchers", "Clients connected to /events.", value=len(self.events.watchers)
        )
        yield CounterMetricFamily(
            "p2ptrain_http_watchers_dropped",
            "Clients of /events dropped because they did not read.",
            value=self.events.dropped,
        )
        yield CounterMetricFamily(
            "p2ptrain_http_looks_broken",
            "Times that a bug in p2ptrain ended the watch for changes, and clients of /events were disconnected.",
            value=self.events.broken,
        )

    async def _healthz(self, request: web.Request) -> web.StreamResponse:
        return answer(Health(ok=True))

    async def _readyz(self, request: web.Request) -> web.StreamResponse:
        reasons = self.facts.complaints()
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
        if name == plotly_asset.NAME and self._library is not None:
            return await self._library.answer(request)
        return self._file(request, name)

    def _file(self, request: web.Request, name: str) -> web.StreamResponse:
        """Serves one of the files loaded at the start: no path is ever built from a request."""
        body = self._files.get(name)
        if body is None:
            return refusal(HTTPStatus.NOT_FOUND, "not found")
        headers = {
            "Content-Type": KINDS[Path(name).suffix],
            "Cache-Control": "no-cache",  # may be cached, but must be revalidated
        }
        return plotly_asset.tagged(request, body, sha256(body).hexdigest()[:32], headers)


async def _expect_nothing(request: web.Request) -> None:
    """Leaves the answer to the guard: aiohttp would send "100 Continue" before the request is checked."""
