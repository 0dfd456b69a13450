"""/openapi.json: OpenAPI 3.1, generated from the models so that it always matches the answers."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from p2ptrain.observe.guard import OPEN
from p2ptrain.observe.schema import Answer, Error, Health, LogLine, PeerList, Readiness, RoundRecord, Rounds, Status

ROUNDS_DEFAULT, ROUNDS_MAX = 100, 1_000  # in an answer of /rounds: those that the daemon has in memory
MODELS: tuple[type[Answer], ...] = (Status, PeerList, Rounds, RoundRecord, Health, Readiness, LogLine, Error)
EVENTS: dict[str, type[Answer]] = {"status": Status, "round": RoundRecord, "log": LogLine}


def _reference(model: type[Answer]) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def _json(model: type[Answer], description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _reference(model)}}}


def _text(kind: str, description: str) -> dict[str, Any]:
    return {"description": description, "content": {kind: {"schema": {"type": "string"}}}}


ABOUT = "Read-only. The node answers from its own knowledge, without asking others. HEAD works like GET."
TOKEN = {"401": _json(Error, "the node's token is required")}
# The errors that any path may return.
REFUSALS = {
    "400": _json(Error, "the request is malformed"),
    "405": _json(Error, "only GET and HEAD are allowed"),
    "408": _json(Error, "the request did not arrive in time"),
    "413": _json(Error, "the request has a body"),
    "421": _json(Error, "the Host is not one of this node's"),
    "431": _json(Error, "the request is too long"),
    "500": _json(Error, "an internal error"),
    "503": _json(Error, "the node is starting, or all connections are in use"),
}
_LAST = {
    "name": "last",
    "in": "query",
    "description": "how many of the newest rounds to return",
    "schema": {"type": "integer", "minimum": 1, "maximum": ROUNDS_MAX, "default": ROUNDS_DEFAULT},
}
_NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
_STREAM = "; ".join(f"`{event}` with a {model.__name__}" for event, model in EVENTS.items())
_ANY: dict[str, Any] = {"content": {"*/*": {}}}
_THIS = {"description": "this description", "content": {"application/json": {"schema": {"type": "object"}}}}
_FILE = {
    "304": {"description": "not modified"},
    "412": {"description": "the file has changed"},
    "416": {"description": "the file has no such range"},
}
# Of each path: its operation, a summary, the answers besides REFUSALS, and its parameter.
PATHS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any] | None]] = {
    "/status": ("status", "The node's status.", {"200": _json(Status, "the status")}, None),
    "/peers": ("peers", "The node's peers and their standing.", {"200": _json(PeerList, "peers")}, None),
    "/rounds": (
        "rounds", "The last rounds applied by the node, the oldest first.", {"200": _json(Rounds, "rounds")}, _LAST
    ),
    "/events": (
        "events", "Changes, as they happen.",
        {"200": _text("text/event-stream", f"an endless stream of server-sent events: {_STREAM}, as JSON")}, None,
    ),
    "/metrics": ("metrics", "Metrics for Prometheus.", {"200": _text("text/plain", "its text format")}, None),
    "/healthz": ("healthz", "Whether the process is alive.", {"200": _json(Health, "it is")}, None),
    "/readyz": (
        "readyz", "Whether the node takes part fully.",
        {"200": _json(Readiness, "it does"), "503": _json(Readiness, "it does not, with reasons")}, None,
    ),
    "/openapi.json": ("openapi", "This description.", {"200": _THIS}, None),
    "/": (
        "dashboard", "The dashboard.",
        {
            "200": _text("text/html", "the page"),
            "206": _text("text/html", "the requested range"),
            "303": {"description": "the token in the URL was right, and is a cookie now"},
            **_FILE,
        }, None,
    ),
    "/assets/{name}": (
        "asset", "The dashboard's files.",
        {
            "200": {"description": "the file", **_ANY},
            "206": {"description": "the requested range", **_ANY},
            "404": _json(Error, "there is no such file"),
            **_FILE,
        }, _NAME,
    ),
}  # fmt: skip


def _get(
    path: str, operation: str, summary: str, answers: dict[str, Any], parameter: dict[str, Any] | None
) -> dict[str, Any]:
    responses = REFUSALS | answers | ({} if path in OPEN else TOKEN)
    found = {"operationId": operation, "summary": summary, "responses": dict(sorted(responses.items()))}
    found |= {"security": []} if path in OPEN else {}
    return found | ({"parameters": [parameter]} if parameter else {})


def describe(release: str) -> dict[str, Any]:
    """Returns the OpenAPI description of everything that is served."""
    _, schemas = models_json_schema(
        [(model, "serialization") for model in MODELS], ref_template="#/components/schemas/{model}"
    )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "p2ptrain: one node",
            "version": release,
            "description": ABOUT,
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "servers": [{"url": "/"}],
        "security": [{}, {"token": []}, {"cookie": []}],
        "paths": {path: {"get": _get(path, *about)} for path, about in PATHS.items()},
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer", "description": "if http.token_file is set"},
                "cookie": {"type": "apiKey", "in": "cookie", "name": "p2ptrain", "description": "set by /?token=TOKEN"},
            },
        },
    }
