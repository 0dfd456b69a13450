"""The HTTP application: routes requests and renders the daemon's facts."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable, Iterator
from hashlib import sha256
from http import HTTPStatus
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from p2ptrain.observe.events import Events, client_of
from p2ptrain.observe.figures import figures_of
from p2ptrain.observe.guard import Guard, refusal, secured
from p2ptrain.observe.metrics import MetricsPage
from p2ptrain.observe.schema import Answer, Health, LogLine, Readiness, RoundRecord, Rounds, Status
from p2ptrain.observe.sockets import Connection, Slots

if TYPE_CHECKING:
    from p2ptrain.observe.http import HttpFace

ASSETS = Path(str(files("p2ptrain.observe"))) / "assets"
INDEX, DATA, LIBRARY = "index.html", "<!-- data -->", "plotly.min.js"
ROUNDS_DEFAULT, ROUNDS_MAX = 100, 1_000  # in an answer of /rounds: those that the daemon has in memory
# The paths, the errors that any of them may return, and the events of /events, for docs/reference/http.md.
PATHS = {
    "/status": "The node's status.",
    "/peers": "The node's peers and their standing.",
    "/rounds": "The last rounds applied by the node, the oldest first. "
    f"`?last=`: how many of the newest, 1 to {ROUNDS_MAX:,}; {ROUNDS_DEFAULT} without it.",
    "/events": "Changes, as they happen: an endless stream of server-sent events with JSON.",
    "/metrics": "Metrics for Prometheus, in its text format.",
    "/healthz": "Whether the process is alive.",
    "/readyz": "Whether the node takes part fully: 200 if it does; if it does not, 503 with the reasons.",
    "/": "The dashboard.",
    "/assets/{name}": "The dashboard's files.",
}
REFUSALS = {
    400: "the request is malformed",
    401: "the node's token is required",
    404: "there is nothing at this address",
    405: "only GET and HEAD are allowed",
    408: "the request did not arrive in time",
    413: "the request has a body",
    421: "the Host is not one of this node's",
    431: "the request is too long",
    500: "an internal error",
    503: "the node is starting, or all connections are in use",
}
EVENTS: dict[str, type[Answer]] = {"status": Status, "round": RoundRecord, "log": LogLine}
PACKING_LEVEL = 6  # of gzip: higher ones take three times as long to save another 2 %
PACKED_BYTES_MIN = 16_384  # larger answers are compressed: a thousand rounds shrink to a fifth, in 15 ms
KINDS = {  # files of other types are not served
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def answer(model: Answer, status: HTTPStatus = HTTPStatus.OK) -> web.Response:
    return web.Response(status=status, text=model.model_dump_json(), content_type="application/json")


def library_path() -> Path | None:
    """Returns the path of the chart library, or None. Its Python package is not imported: it is not needed."""
    spec = find_spec("plotly")
    places = spec.submodule_search_locations if spec is not None else None
    found = Path(places[0]) / "package_data" / LIBRARY if places else None
    return found if found is not None and found.is_file() else None


def takes_gzip(request: web.Request) -> bool:
    return "gzip" in request.headers.get("Accept-Encoding", "").lower()


def packed(request: web.Request, response: web.Response) -> web.Response:
    """Has a large response compressed in a thread for clients that accept it, for the sake of slow links.

    Its size cannot leak a secret (BREACH): no answer contains the token, or anything from a request.
    """
    response.headers["Vary"] = "Accept-Encoding"
    if (response.content_length or 0) >= PACKED_BYTES_MIN and takes_gzip(request):
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
        # Kept in memory (5 MB): aiohttp leaks an open file if the client hangs up while the file is being opened.
        kept = [path for path in assets.iterdir() if path.suffix in KINDS and path.is_file()]
        bodies = {path.name: path.read_bytes() for path in (*kept, library_path()) if path is not None}
        bodies[INDEX] = page_of(bodies[INDEX].decode()).encode()
        self._files = {name: (body, sha256(body).hexdigest()[:32]) for name, body in bodies.items()}
        self._packed: dict[str, asyncio.Task[bytes]] = {}
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
        return starting() if found is None else packed(request, answer(found))

    async def _rounds(self, request: web.Request) -> web.StreamResponse:
        given = request.query.getall("last", [str(ROUNDS_DEFAULT)])
        is_number = len(given) == 1 and len(given[0]) <= len(str(ROUNDS_MAX)) and given[0].isascii()
        last = int(given[0]) if is_number and given[0].isdigit() else 0
        if not 1 <= last <= ROUNDS_MAX:
            return refusal(HTTPStatus.BAD_REQUEST, "last is not a valid number", f"Give one from 1 to {ROUNDS_MAX}")
        found = self.facts.rounds(last)
        return starting() if found is None else packed(request, answer(Rounds(rounds=found)))

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

    # -----------------------------------------------------------------------------------------------
    # The dashboard

    async def _page(self, request: web.Request) -> web.StreamResponse:
        return await self._file(request, INDEX)

    async def _asset(self, request: web.Request) -> web.StreamResponse:
        return await self._file(request, request.match_info["name"])

    async def _file(self, request: web.Request, name: str) -> web.StreamResponse:
        """Serves one of the files loaded at the start: no path is ever built from a request."""
        if name not in self._files:
            return refusal(HTTPStatus.NOT_FOUND, "not found")
        body, tag = self._files[name]
        is_packed = len(body) >= PACKED_BYTES_MIN and takes_gzip(request)
        tag += "-gzip" if is_packed else ""
        headers = {
            "Content-Type": KINDS[Path(name).suffix],
            "Cache-Control": "no-cache",  # may be cached, but must be revalidated
            "ETag": f'"{tag}"',
            "Vary": "Accept-Encoding",
        }
        if any(each.value in (tag, "*") for each in request.if_none_match or ()):
            return web.Response(status=HTTPStatus.NOT_MODIFIED, headers=headers)
        if is_packed:
            if name not in self._packed:  # once: of the charts' library that takes 0.2 s
                work = asyncio.to_thread(gzip.compress, body, PACKING_LEVEL, mtime=0)
                self._packed[name] = asyncio.create_task(work, name="packing a file")
            body = await asyncio.shield(self._packed[name])
            headers["Content-Encoding"] = "gzip"
        return web.Response(body=body, headers=headers)


async def _expect_nothing(request: web.Request) -> None:
    """Leaves the answer to the guard: aiohttp would send "100 Continue" before the request is checked."""
