"""The HTTP application: routes requests and renders the daemon's facts, also in Prometheus' format.

Everything is read on request. Label values of metrics come from lists in the code, never from a peer, so that no peer
can create time series at will. Counters restart with the process, as Prometheus expects, except for energy, which is
counted over all starts. A counter never decreases while the node runs; values that do are gauges."""

from __future__ import annotations

import json
import platform
from collections.abc import Awaitable, Callable, Iterable, Iterator
from hashlib import sha256
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from pydantic import BaseModel

from p2ptrain.core.complaints import Code
from p2ptrain.observe.figures import figures_of
from p2ptrain.observe.guard import Guard, refusal, secured
from p2ptrain.observe.schema import Answer, Health, LogLines, Readiness, RoundRecord, Rounds, Status

if TYPE_CHECKING:
    from p2ptrain.observe.http import HttpFace

OF_ROUND = "last_round_"  # prefix of the metrics of a round
ASSETS = Path(__file__).with_name("assets")
INDEX, DATA, LIBRARY = "index.html", "<!-- data -->", "plotly.min.js"
ROUNDS_DEFAULT, ROUNDS_MAX = 100, 1_000  # in an answer of /rounds: those that the daemon has in memory
# The paths and the errors that any of them may return, for docs/reference/http.md.
PATHS = {
    "/status": "The node's status.",
    "/peers": "The node's peers and their standing.",
    "/rounds": "The last rounds applied by the node, the oldest first. "
    f"`?last=`: how many of the newest, 1 to {ROUNDS_MAX:,}; {ROUNDS_DEFAULT} without it.",
    "/log": "The node's last log lines, the oldest first, without those about rounds.",
    "/metrics": "Metrics for Prometheus, in its text format.",
    "/healthz": "Whether the process is alive.",
    "/readyz": "Whether the node takes part fully: 200 if it does; if it does not, 503 with the reasons.",
    "/": "The dashboard.",
    "/assets/{name}": "The dashboard's files.",
}
REFUSALS = {
    400: "the request is malformed",
    401: "the node's token is required",
    403: "another web page asks for more than to open the dashboard",
    404: "there is nothing at this address",
    405: "only GET and HEAD are allowed",
    413: "the request has a body",
    421: "the Host is not one of this node's",
    500: "an internal error",
    503: "the node is starting",
}
PACKED_BYTES_MIN = 16_384  # larger answers are compressed: a thousand rounds shrink to a fifth, in 15 ms
KINDS = {  # files of other types are not served
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def of_figures(model: type[BaseModel], told: Any, prefix: str = "") -> Iterable[Metric]:
    """Returns the metrics of a model's figures, except of those without a value yet."""
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for each in figures_of(model):
        figure, name = each.figure, f"p2ptrain_{each.figure.metric or prefix + each.name.replace('.', '_')}"
        title, described = figure.title[:1].upper() + figure.title[1:], each.description.replace("null:", "absent:")
        about = figure.text or f"{title}: {described or figure.unit}."
        labels = [label for label, _ in figure.labels] + ([figure.label] if figure.label else [])
        samples = [*each.samples(told)]
        if name not in families and (samples or figure.label):
            kind = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
            families[name] = kind(name, about, labels=labels)
        for sample, value in samples:
            families[name].add_metric([sample[label] for label in labels], value)
    return families.values()


def of_health(status: Status) -> Metric:
    codes = {each.code for each in status.complaints}
    health = GaugeMetricFamily("p2ptrain_health", "1 for each current complaint of the node.", labels=["kind"])
    for each in Code:
        health.add_metric([each.value], each in codes)
    return health


class MetricsPage(Collector):
    """Collects a node's metrics."""

    def __init__(self, release: str, facts: HttpFace) -> None:
        self._release, self._facts = release, facts
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        build = GaugeMetricFamily(
            "p2ptrain_build_info", "Always 1; the labels have the versions.", labels=["version", "python"]
        )
        build.add_metric([self._release, platform.python_version()], 1)
        yield build
        if (status := self._facts.status()) is not None:
            yield from of_figures(Status, status)
            yield of_health(status)
        for each in self._facts.rounds(1) or ():
            yield from of_figures(RoundRecord, each, OF_ROUND)


def answer(model: Answer, status: HTTPStatus = HTTPStatus.OK) -> web.Response:
    return web.Response(status=status, text=model.model_dump_json(), content_type="application/json")


def library_path() -> Path | None:
    """Returns the path of the chart library, or None. Its Python package is not imported: it is not needed."""
    spec = find_spec("plotly")
    places = spec.submodule_search_locations if spec is not None else None
    found = Path(places[0]) / "package_data" / LIBRARY if places else None
    return found if found is not None and found.is_file() else None


def told(request: web.Request, model: Answer | None) -> web.Response:
    """Answers with what the daemon shows; None: it is starting."""
    if model is None:
        fix = "Try again later; /readyz says when it is ready"
        return refusal(HTTPStatus.SERVICE_UNAVAILABLE, "the node is starting, or looking for its run", fix)
    return packed(request, answer(model))


def packed(request: web.Request, response: web.Response) -> web.Response:
    """Has a large response compressed in a thread for clients that accept it, for the sake of slow links.

    Its size cannot leak a secret (BREACH): no answer contains the token, or anything from a request."""
    response.headers["Vary"] = "Accept-Encoding"
    takes_gzip = "gzip" in request.headers.get("Accept-Encoding", "").lower()
    if takes_gzip and (response.content_length or 0) >= PACKED_BYTES_MIN:
        response.enable_compression(web.ContentCoding.gzip)
    return response


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
    def __init__(self, facts: HttpFace, guard: Guard, release: str, assets: Path = ASSETS) -> None:
        self.facts, self.guard = facts, guard
        # Kept in memory (5 MB): aiohttp leaks an open file if the client hangs up while the file is being opened.
        kept = [path for path in assets.iterdir() if path.suffix in KINDS and path.is_file()]
        bodies = {path.name: path.read_bytes() for path in (*kept, library_path()) if path is not None}
        bodies[INDEX] = page_of(bodies[INDEX].decode()).encode()
        self._files = {name: (body, sha256(body).hexdigest()[:32]) for name, body in bodies.items()}
        self._metrics = MetricsPage(release, facts)
        self.application = web.Application(middlewares=[self._middleware])
        text = {"Content-Type": CONTENT_TYPE_PLAIN_0_0_4}
        routes: dict[str, Callable[[web.Request], web.Response]] = {
            "/": self._file,
            "/assets/{name}": self._file,
            "/status": lambda request: told(request, facts.status()),
            "/peers": lambda request: told(request, facts.peers()),
            "/rounds": self._rounds,
            "/log": lambda request: told(request, LogLines(lines=facts.lines())),
            "/metrics": lambda request: web.Response(body=self._metrics.text(), headers=text),
            "/healthz": lambda request: answer(Health(ok=True)),
            "/readyz": self._readyz,
        }
        for path, respond in routes.items():
            self.application.router.add_get(path, _handler(respond), expect_handler=_expect_nothing)

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
        return secured(response)

    def _rounds(self, request: web.Request) -> web.Response:
        given = request.query.getall("last", [str(ROUNDS_DEFAULT)])
        is_number = len(given) == 1 and len(given[0]) <= len(str(ROUNDS_MAX)) and given[0].isascii()
        last = int(given[0]) if is_number and given[0].isdigit() else 0
        if not 1 <= last <= ROUNDS_MAX:
            return refusal(HTTPStatus.BAD_REQUEST, "last is not a valid number", f"Give one from 1 to {ROUNDS_MAX}")
        found = self.facts.rounds(last)
        return told(request, None if found is None else Rounds(rounds=found))

    def _readyz(self, request: web.Request) -> web.Response:
        reasons = self.facts.complaints()
        told = reasons if self.guard.may_read(request) else []
        status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
        return answer(Readiness(ready=not reasons, reasons=told), status)

    def _file(self, request: web.Request) -> web.Response:
        """Serves one of the files loaded at the start: no path is ever built from a request."""
        name = request.match_info.get("name", INDEX)
        if name not in self._files:
            return refusal(HTTPStatus.NOT_FOUND, "not found")
        body, tag = self._files[name]
        headers = {
            "Content-Type": KINDS[Path(name).suffix],
            "Cache-Control": "no-cache",  # may be cached, but must be revalidated
            "ETag": f'W/"{tag}"',
        }
        if any(each.value in (tag, "*") for each in request.if_none_match or ()):
            return web.Response(status=HTTPStatus.NOT_MODIFIED, headers=headers)
        return packed(request, web.Response(body=body, headers=headers))


def _handler(respond: Callable[[web.Request], web.Response]) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        return respond(request)

    return handle


async def _expect_nothing(request: web.Request) -> None:
    """Leaves the answer to the guard: aiohttp would send "100 Continue" before the request is checked."""
