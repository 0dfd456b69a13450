"""A node's answers over HTTP contain the daemon's facts, as described, and nothing else."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pydantic
import pytest
from pydantic.json_schema import models_json_schema

from p2ptrain.core.complaints import Code
from p2ptrain.observe import schema as models
from p2ptrain.observe.app import ASSETS, PATHS, ROUNDS_MAX, page_of
from p2ptrain.observe.guard import HEADERS
from p2ptrain.observe.schema import LogLine
from tests.helpers.web import ME, OTHER, PEER, STATUS, a_round, a_status, site, until

PATHS_SERVED = [path for path in PATHS if path != "/assets/{name}"]
# Every field of version 1, by its model.
FIELDS = {
    "FaultTolerance": "liars crashes mode",
    "SameModel": "verdict text",
    "Traffic": "sent received",
    "Limits": (
        "upload_bytes_per_second download_bytes_per_second memory_bytes hours device_percent threads on_battery "
        "on_gpu_busy"
    ),
    "Mine": "applied applied_of_all share tokens swarm_tokens training_seconds energy_joules",
    "Status": (
        "version release run_id run_name peer_id addresses branch head round phase view applied_round "
        "since_applied_seconds state_root certified_round loss step tokens tokens_per_second training_seconds "
        "swarm_tokens_per_second contribution_tokens mine device is_paused peers roster quorum fault_tolerance "
        "admitted is_member is_admitted held waiting_for health http loop_lag_seconds uptime_seconds roots "
        "k payload_bytes state_bytes bytes traffic limits queued_frames disk_free_bytes counters observed "
        "troubles same_model held_out_loss held_out_round perplexity swarm_loss gradient_norm drift "
        "compression_ratio text text_round"
    ),
    "Peer": (
        "peer_id addresses address_kind latency_seconds is_connected is_member is_admitted offered applied late "
        "refused points is_greylisted observed"
    ),
    "PeerList": "version peers me concerns",
    "RoundRecord": (
        "version branch round applied_at root manifest contributors mine_taken views train_seconds collect_seconds "
        "agree_seconds apply_seconds bytes_sent bytes_received loss tokens "
        "tokens_per_second late refused seconds held_out_loss held_out_round perplexity swarm_loss "
        "swarm_tokens gradient_norm drift compression_ratio"
    ),
    "Rounds": "version rounds",
    "Health": "version ok",
    "Readiness": "version ready reasons",
    "LogLine": "at level message",
    "LogLines": "version lines",
    "Error": "version error fix",
}


async def test_the_status_is_what_the_daemon_told() -> None:
    async with site() as here:
        assert await here.json("/status") == STATUS


async def test_the_peers_are_what_the_daemon_told_and_the_node_itself_stands_beside_them() -> None:
    async with site() as here:
        me = {**PEER, "peer_id": ME}
        assert await here.json("/peers") == {"version": 1, "concerns": [], "peers": [PEER], "me": me}


@pytest.mark.parametrize(("query", "numbers"), [("", range(1, 8)), ("?last=2", (6, 7)), ("?last=1000", range(1, 8))])
async def test_the_last_rounds_are_told_the_oldest_first(query: str, numbers: list[int]) -> None:
    async with site() as here:
        found = await here.json(f"/rounds{query}")
        assert found == {"version": 1, "rounds": [{"version": 1, **a_round(number)} for number in numbers]}


async def test_a_large_answer_comes_compressed_to_whoever_takes_that() -> None:
    async with site() as here:
        here.told.lived = [a_round(number) for number in range(1, 1_001)]
        here.told.known = [PEER] * 100
        plain = await here.json("/rounds?last=1000")
        for path, taken, coding in (
            ("/rounds?last=1000", "gzip, deflate, br", "gzip"),
            ("/peers", "gzip, deflate, br", "gzip"),
            ("/rounds?last=1000", "identity", None),
            ("/rounds?last=1", "gzip", None),
        ):
            status, headers, body = await here.get(path, headers={"Accept-Encoding": taken}, auto_decompress=False)
            assert (status, headers.get("Content-Encoding")) == (200, coding), path
            assert headers["Vary"] == "Accept-Encoding"
            assert int(headers["Content-Length"]) == len(body)
            if path == "/rounds?last=1000":
                assert json.loads(gzip.decompress(body) if coding else body) == plain
            elif coding:
                assert len(json.loads(gzip.decompress(body))["peers"]) == 100


@pytest.mark.parametrize(
    "last", ["0", "-1", str(ROUNDS_MAX + 1), "x", "", "1.5", "1e2", "+1", " 1", "٣", "²", "9" * 5_000]
)
async def test_a_number_of_rounds_that_is_none_is_refused(last: str) -> None:
    async with site() as here:
        assert await here.refused("/rounds", params={"last": last}) == (400, "last is not a valid number")
        assert (await here.get("/rounds?last=1&last=2"))[0] == 400


async def test_what_the_models_do_not_describe_does_not_go_out(caplog: pytest.LogCaptureFixture) -> None:
    async with site() as here:
        here.told.now["secret"] = "the owner's"
        status, _, body = await here.get("/status")
        assert (status, b"secret" in body) == (500, False)
        assert json.loads(body)["error"] == "an internal error; see the node's log"
        assert "/status could not be answered" in caplog.text


async def test_while_the_node_starts_it_says_that_it_lives_and_is_not_ready() -> None:
    async with site() as here:
        here.told.is_starting, here.told.reasons = True, ["starting"]
        assert await here.json("/healthz") == {"version": 1, "ok": True}
        status, _, body = await here.get("/readyz")
        assert (status, json.loads(body)) == (503, {"version": 1, "ready": False, "reasons": ["starting"]})
        for path in ("/status", "/peers", "/rounds"):
            assert await here.refused(path) == (503, "the node is starting, or looking for its run")
        here.told.said = [LogLine(at="2026-01-01T00:00:00.000+00:00", level="info", message='a "line"\nof two, ß')]
        assert await here.json("/log") == {"version": 1, "lines": [each.model_dump() for each in here.told.said]}
        status, _, body = await here.get("/metrics")
        assert (status, b"p2ptrain_build_info" in body, b"p2ptrain_round" in body) == (200, True, False)
        here.told.is_starting, here.told.reasons = False, []
        assert await here.json("/readyz") == {"version": 1, "ready": True, "reasons": []}


async def test_every_answer_has_the_headers_that_keep_a_browser_in_check() -> None:
    async with site() as here:
        for path in (*PATHS_SERVED, "/nowhere", "/assets/nothing.js", "/rounds?last=x"):
            _, headers, _ = await here.get(path)
            cached = {"Cache-Control": "no-cache"} if path == "/" else {}
            assert {name: headers[name] for name in HEADERS} == HEADERS | cached, path
            assert headers["Connection"] == "close"
            assert [name for name in headers if name.lower().startswith("access-control")] == []
            assert "aiohttp" not in str(headers)
        policy = HEADERS["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy and "*" not in policy


async def test_head_is_answered_as_get_without_its_body() -> None:
    async with site() as here:
        for path in PATHS_SERVED:
            status, _, body = await here.get(path, method="HEAD")
            assert (status, body) == (200, b""), path


# ---------------------------------------------------------------------------------------------------
# Files


async def test_the_page_and_its_files_are_served_and_nothing_around_them(tmp_path: Path) -> None:
    assets = tmp_path / "assets"
    (assets / "sub").mkdir(parents=True)
    for name, text in {
        "index.html": "<p>hi<!-- data -->",
        "a.js": "1",
        "b.css": "c",
        "key.pem": "s",
        "sub/x.js": "s",
    }.items():
        (assets / name).write_text(text)
    (tmp_path / "secret.js").write_text("s")
    (assets / "link.js").symlink_to(tmp_path / "gone.js")
    async with site(assets=assets) as here:
        for path, kind, text in (
            ("/", "text/html", page_of("<p>hi<!-- data -->").encode()),
            ("/assets/a.js", "text/javascript", b"1"),
        ):
            status, headers, body = await here.get(path)
            assert (status, headers["Content-Type"], body) == (200, f"{kind}; charset=utf-8", text)
            again = {"If-None-Match": headers["ETag"]}
            assert (await here.get(path, headers=again))[0] == 304
        for target in (
            "/assets/key.pem", "/assets/link.js", "/assets/", "/assets", "/assets/sub/x.js", "/assets/sub%2fx.js",
            "/assets/../secret.js", "/assets/%2e%2e/secret.js", "/assets/..%2fsecret.js", "/assets/....//secret.js",
            "/assets/..%5csecret.js", "/assets/%00.js", f"/assets/{tmp_path}/secret.js", "/assets//a.js",
            "//assets/a.js", "/../secret.js", "/assets/a.js%00", "/assets/" + "a" * 4_000,
        ):  # fmt: skip
            answer = await here.raw(f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1:{here.port}\r\n\r\n".encode())
            assert answer.startswith(b"HTTP/1.1 404 "), target
            assert b"secret" not in answer and str(tmp_path).encode() not in answer


async def test_the_shipped_page_needs_nothing_that_its_policy_forbids() -> None:
    page = (ASSETS / "index.html").read_text()
    assert "http://" not in page and "https://" not in page
    assert "<style" not in page and "style=" not in page and "onclick" not in page


# ---------------------------------------------------------------------------------------------------
# The models


async def test_the_table_of_addresses_is_what_the_app_serves() -> None:
    async with site() as here:
        served = {route.resource.canonical for route in here.app.application.router.routes() if route.resource}
        assert PATHS.keys() == served


def test_every_answer_has_a_version_and_every_object_is_closed() -> None:
    answers = models.Answer.__subclasses__()
    schemas = models_json_schema([(each, "serialization") for each in answers])[1]["$defs"]
    assert schemas.pop("Code")["enum"] == [*Code]
    for name, schema in schemas.items():
        assert schema["additionalProperties"] is False, name
        assert set(schema["required"]) == schema["properties"].keys(), name
    for model in answers:
        assert schemas[model.__name__]["properties"]["version"]["const"] == 1


def test_no_field_of_version_1_has_another_name() -> None:
    """Renaming or removing a field needs version 2 and a change of this test. New fields may be added."""
    shown = {name: getattr(models, name).model_json_schema(mode="serialization") for name in FIELDS}
    missing = {name: {*fields.split()} - shown[name]["properties"].keys() for name, fields in FIELDS.items()}
    assert missing == {name: set() for name in FIELDS}
    every = {model for model in every_model(models.Part) if model.__module__ == models.__name__} | {models.Limits}
    described = {model.__name__ for model in every} - {"Answer", "Stored", "PeerRecord"}
    assert described == FIELDS.keys(), "a new one comes into the list"


def every_model(model: type[models.Part]) -> Iterator[type[models.Part]]:
    for each in model.__subclasses__():
        yield each
        yield from every_model(each)


def test_a_model_takes_no_loss_that_is_no_number_into_json() -> None:
    told = a_status({**STATUS, "loss": None, "swarm_tokens_per_second": None})
    assert json.loads(told.model_dump_json())["loss"] is None
    for loss in (math.nan, math.inf, -math.inf):
        text = a_status({**STATUS, "loss": loss}).model_dump_json()
        assert json.loads(text, parse_constant=pytest.fail)["loss"] is None
    with pytest.raises(pydantic.ValidationError):
        a_status({**STATUS, "since_applied_seconds": -1})
    assert OTHER in told.model_dump_json()


# ---------------------------------------------------------------------------------------------------
# The server's life


async def test_when_the_node_ends_those_who_wait_are_let_go() -> None:
    async with site() as here:
        silent, _ = await here.connect()
        await until(lambda: here.server.open)
        async with asyncio.timeout(20):
            await here.server.close()
        assert await silent.read() == b""
        assert here.server.open == {}
