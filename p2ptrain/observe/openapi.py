"""/openapi.json: OpenAPI 3.1, made of the models, so that it cannot say anything else than what is sent."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from p2ptrain.observe.schema import Answer, Error, Health, LogLine, PeerList, Readiness, RoundRecord, Rounds, Status

ROUNDS_DEFAULT, ROUNDS_MAX = 100, 1_000  # that /rounds tells of: what the daemon has in memory
MODELS: tuple[type[Answer], ...] = (Status, PeerList, Rounds, RoundRecord, Health, Readiness, LogLine, Error)
EVENTS: dict[str, type[Answer]] = {"status": Status, "round": RoundRecord, "log": LogLine}


def _reference(model: type[Answer]) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def _json(model: type[Answer], description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _reference(model)}}}


def _text(kind: str, description: str) -> dict[str, Any]:
    return {"description": description, "content": {kind: {"schema": {"type": "string"}}}}


_FILE = {"412": {"description": "it is another by now"}, "416": {"description": "it has no such part"}}


def _refusals(*, is_open: bool = False) -> dict[str, Any]:
    """What any address may answer instead."""
    refusals = {
        "400": _json(Error, "not a request that can be answered"),
        "405": _json(Error, "only GET and HEAD are"),
        "408": _json(Error, "the request did not come in time"),
        "413": _json(Error, "a body, where none belongs"),
        "421": _json(Error, "the Host is not one of this node's"),
        "431": _json(Error, "the request is too long"),
        "500": _json(Error, "it went wrong here"),
        "503": _json(Error, "the node is starting, or all connections are in use"),
    }
    return refusals if is_open else refusals | {"401": _json(Error, "the node asks for its token")}


def _get(operation: str, summary: str, good: dict[str, Any], *, is_open: bool = False, **more: Any) -> dict[str, Any]:
    responses = dict(sorted((_refusals(is_open=is_open) | good).items()))
    security: dict[str, Any] = {"security": []} if is_open else {}
    return {"get": {"operationId": operation, "summary": summary, "responses": responses, **security, **more}}


def describe(release: str) -> dict[str, Any]:
    """All that is served."""
    _, schemas = models_json_schema(
        [(model, "serialization") for model in MODELS], ref_template="#/components/schemas/{model}"
    )
    last = {
        "name": "last",
        "in": "query",
        "description": "how many, the newest of those that are remembered",
        "schema": {"type": "integer", "minimum": 1, "maximum": ROUNDS_MAX, "default": ROUNDS_DEFAULT},
    }
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    events = "; ".join(f"`{event}` with a {model.__name__}" for event, model in EVENTS.items())
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "p2ptrain: one node",
            "version": release,
            "description": "Read only. What is told is what this node knows: no other is asked. HEAD works like GET.",
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "servers": [{"url": "/"}],
        "security": [{}, {"token": []}, {"cookie": []}],
        "paths": {
            "/status": _get("status", "Where the node stands.", {"200": _json(Status, "the status")}),
            "/peers": _get(
                "peers", "Who is connected, and what is thought of them.", {"200": _json(PeerList, "peers")}
            ),
            "/rounds": _get(
                "rounds",
                "The last rounds that were applied here, the oldest first.",
                {"200": _json(Rounds, "rounds")},
                parameters=[last],
            ),
            "/events": _get(
                "events",
                "What changes, as it does.",
                {"200": _text("text/event-stream", f"server-sent events without end: {events}, as JSON in `data`")},
            ),
            "/metrics": _get("metrics", "For Prometheus.", {"200": _text("text/plain", "its text format")}),
            "/healthz": _get("healthz", "Whether it is alive.", {"200": _json(Health, "it is")}, is_open=True),
            "/readyz": _get(
                "readyz",
                "Whether it takes part as it should.",
                {"200": _json(Readiness, "it does"), "503": _json(Readiness, "it does not, and why")},
                is_open=True,
            ),
            "/openapi.json": _get(
                "openapi",
                "This.",
                {"200": {"description": "this", "content": {"application/json": {"schema": {"type": "object"}}}}},
            ),
            "/": _get(
                "dashboard",
                "All of it for a person.",
                {
                    "200": _text("text/html", "the page"),
                    "206": _text("text/html", "the part that was asked for"),
                    "303": {"description": "the token in the address was right, and is a cookie now"},
                    "304": {"description": "as it was"},
                    **_FILE,
                },
            ),
            "/assets/{name}": _get(
                "asset",
                "What the page is made of.",
                {
                    "200": {"description": "the file", "content": {"*/*": {}}},
                    "206": {"description": "the part that was asked for", "content": {"*/*": {}}},
                    "304": {"description": "as it was"},
                    **_FILE,
                    "404": _json(Error, "there is no such file"),
                },
                parameters=[name],
            ),
        },
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer", "description": "where http.token_file is set"},
                "cookie": {"type": "apiKey", "in": "cookie", "name": "p2ptrain", "description": "set by /?token=TOKEN"},
            },
        },
    }
