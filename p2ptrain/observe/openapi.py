"""/openapi.json: OpenAPI 3.1, generated from the models so that it always matches the answers."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

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


_FILE = {"412": {"description": "the file has changed"}, "416": {"description": "the file has no such range"}}


def _refusals(*, is_open: bool = False) -> dict[str, Any]:
    """The errors that any path may return."""
    refusals = {
        "400": _json(Error, "the request is malformed"),
        "405": _json(Error, "only GET and HEAD are allowed"),
        "408": _json(Error, "the request did not arrive in time"),
        "413": _json(Error, "the request has a body"),
        "421": _json(Error, "the Host is not one of this node's"),
        "431": _json(Error, "the request is too long"),
        "500": _json(Error, "an internal error"),
        "503": _json(Error, "the node is starting, or all connections are in use"),
    }
    return refusals if is_open else refusals | {"401": _json(Error, "the node's token is required")}


def _get(operation: str, summary: str, good: dict[str, Any], *, is_open: bool = False, **more: Any) -> dict[str, Any]:
    responses = dict(sorted((_refusals(is_open=is_open) | good).items()))
    security: dict[str, Any] = {"security": []} if is_open else {}
    return {"get": {"operationId": operation, "summary": summary, "responses": responses, **security, **more}}


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
            "description": "Read-only. The node answers from its own knowledge, without asking others. HEAD works like "
            "GET.",
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "servers": [{"url": "/"}],
        "security": [{}, {"token": []}, {"cookie": []}],
        "paths": _answers() | _pages(),
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer", "description": "if http.token_file is set"},
                "cookie": {"type": "apiKey", "in": "cookie", "name": "p2ptrain", "description": "set by /?token=TOKEN"},
            },
        },
    }


def _answers() -> dict[str, Any]:
    """The paths for programs."""
    last = {
        "name": "last",
        "in": "query",
        "description": "how many of the newest rounds to return",
        "schema": {"type": "integer", "minimum": 1, "maximum": ROUNDS_MAX, "default": ROUNDS_DEFAULT},
    }
    events = "; ".join(f"`{event}` with a {model.__name__}" for event, model in EVENTS.items())
    return {
        "/status": _get("status", "The node's status.", {"200": _json(Status, "the status")}),
        "/peers": _get("peers", "The node's peers and their standing.", {"200": _json(PeerList, "peers")}),
        "/rounds": _get(
            "rounds",
            "The last rounds applied by the node, the oldest first.",
            {"200": _json(Rounds, "rounds")},
            parameters=[last],
        ),
        "/events": _get(
            "events",
            "Changes, as they happen.",
            {"200": _text("text/event-stream", f"an endless stream of server-sent events: {events}, as JSON")},
        ),
        "/metrics": _get("metrics", "Metrics for Prometheus.", {"200": _text("text/plain", "its text format")}),
        "/healthz": _get("healthz", "Whether the process is alive.", {"200": _json(Health, "it is")}, is_open=True),
        "/readyz": _get(
            "readyz",
            "Whether the node takes part fully.",
            {"200": _json(Readiness, "it does"), "503": _json(Readiness, "it does not, with reasons")},
            is_open=True,
        ),
        "/openapi.json": _get(
            "openapi",
            "This description.",
            {
                "200": {
                    "description": "this description",
                    "content": {"application/json": {"schema": {"type": "object"}}},
                }
            },
        ),
    }


def _pages() -> dict[str, Any]:
    """The dashboard and its files."""
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "/": _get(
            "dashboard",
            "The dashboard.",
            {
                "200": _text("text/html", "the page"),
                "206": _text("text/html", "the requested range"),
                "303": {"description": "the token in the URL was right, and is a cookie now"},
                "304": {"description": "not modified"},
                **_FILE,
            },
        ),
        "/assets/{name}": _get(
            "asset",
            "The dashboard's files.",
            {
                "200": {"description": "the file", "content": {"*/*": {}}},
                "206": {"description": "the requested range", "content": {"*/*": {}}},
                "304": {"description": "not modified"},
                **_FILE,
                "404": _json(Error, "there is no such file"),
            },
            parameters=[name],
        ),
    }
