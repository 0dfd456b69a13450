"""Real daemons over HTTP: they show the same as over their control socket, from start to end."""

from __future__ import annotations

import json
import re
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from p2ptrain.config.node import HttpConfig
from p2ptrain.errors import ConfigError
from p2ptrain.identity import Identity
from p2ptrain.observe.http import STARTING, listen
from tests.helpers.daemons import SECONDS, TEST_SECONDS, DaemonSwarm, StartableDaemon, p2ptrain, swarm_in

pytestmark = pytest.mark.timeout(TEST_SECONDS)
# What a moment later is another.
MOVING = {
    "round", "phase", "view", "applied_round", "since_applied_seconds", "state_root", "certified_round", "loss", "step",
    "tokens", "tokens_per_second", "training_seconds", "swarm_tokens_per_second", "mine", "held", "waiting_for",
    "loop_lag_seconds", "uptime_seconds", "roots", "bytes", "traffic", "queued_frames",
    "disk_free_bytes", "counters", "observed", "head", "same_model",
    "held_out_loss", "held_out_round", "perplexity", "swarm_loss", "gradient_norm",
    "drift", "update_norm", "text", "text_round",
}  # fmt: skip


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[DaemonSwarm]:
    with swarm_in(tmp_path) as swarm:
        yield swarm


def get(url: str, **headers: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=SECONDS) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def as_json(url: str, **headers: str) -> Any:
    status, body = get(url, **headers)
    assert status == 200, body
    return json.loads(body)


def url_in(daemon: StartableDaemon) -> str:
    """Waits for the dashboard's URL in the log."""
    daemon.until_says("this node in a browser: http://")
    found = re.search(r"this node in a browser: (http://\S+/)", daemon.text)
    assert found is not None
    return found[1]


def test_a_node_shows_what_it_says_and_what_changes(swarm: DaemonSwarm) -> None:
    first = swarm.first().start()
    url = url_in(first)
    assert get(f"{url}healthz")[0] == 200, "before there is a run"
    first.until_up()
    second = swarm.joiner("second", first.address).start()
    second.until_member()
    first.until_applied(3)
    over_socket, over_http = first.ask(), as_json(f"{url}status")
    assert over_http["http"] == url
    assert {**over_http, **dict.fromkeys(MOVING)} == {**over_socket, **dict.fromkeys(MOVING)}
    assert over_http["traffic"]["messages"]["sent"] > 0
    (peer,) = as_json(f"{url}peers")["peers"]
    assert (peer["peer_id"], peer["is_connected"], peer["address_kind"]) == (second.ask()["peer_id"], True, "loopback")
    assert 0 < peer["latency_seconds"] < SECONDS, "it was asked when they met"
    assert get(f"{url}readyz")[0] == 200
    status, page = get(url)
    assert (status, b"<!doctype html>" in page) == (200, True)
    metrics = {each.name: each for each in text_string_to_metric_families(get(f"{url}metrics")[1].decode())}
    assert metrics["p2ptrain_roster_members"].samples[0].value == 2
    counted = _counted(url)
    assert any("run test, id" in each["message"] for each in as_json(f"{url}log")["lines"])
    _look_at_rounds(url, url_in(second))
    first.until(lambda: first.status().get("disk_free_bytes"))  # which is looked at now and then
    again = _counted(url)
    assert again["p2ptrain_tokens_total", ()] > counted["p2ptrain_tokens_total", ()] > 0
    assert {key: value for key, value in counted.items() if again.get(key, 0) < value} == {}, "a counter never falls"
    _look_at_orders(first, url)
    first.leave()
    with pytest.raises(urllib.error.URLError):
        get(f"{url}healthz")


def _counted(url: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(get(f"{url}metrics")[1].decode())
    return {
        (each.name, tuple(each.labels.items())): each.value
        for family in families
        if family.type == "counter"
        for each in family.samples
    }


def _look_at_rounds(*urls: str) -> None:
    """Checks that two nodes agree about the rounds that both have applied."""
    told = [{each["round"]: each for each in as_json(f"{url}rounds?last=50")["rounds"]} for url in urls]
    both = told[0].keys() & told[1].keys()
    assert both
    for number in both:
        a, b = (each[number] for each in told)
        same = ("branch", "root", "manifest", "contributors")
        assert [a[key] for key in same] == [b[key] for key in same]


def _look_at_orders(daemon: StartableDaemon, url: str) -> None:
    place = ("--data-dir", daemon.directory)
    status, out, _ = p2ptrain("pause", *place)
    assert (status, out.startswith("paused")) == (0, True)
    assert as_json(f"{url}status")["is_paused"] is True
    assert as_json(f"{url}readyz")["ready"] is True
    assert p2ptrain("resume", *place)[0] == 0
    assert as_json(f"{url}status")["is_paused"] is False
    status, out, err = p2ptrain("limit", "--upload", "1000000", *place)
    assert (status, out.splitlines()[:2], err) == (0, ["upload    1,000,000 bytes/s", "download  no limit"], "")
    limits = as_json(f"{url}status")["limits"]
    assert (limits["upload_bytes_per_second"], limits["download_bytes_per_second"]) == (10**6, 0)
    status, out, _ = p2ptrain("limit", "--off", *place)
    assert (status, out.splitlines()[0]) == (0, "upload    no limit")
    assert p2ptrain("limit", "--off", "--upload", "1", *place)[0] == 2
    status, out, _ = p2ptrain("checkpoint", "now", *place)
    assert (status, bool(re.fullmatch(r"saved the state after round \d+\n", out))) == (0, True)


def test_a_node_that_looks_for_its_run_says_that_it_lives_and_is_not_ready(swarm: DaemonSwarm) -> None:
    nobody = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity(bytes(range(32))).peer_id}"
    lost = swarm.joiner("lost", nobody).start()
    url = url_in(lost)
    lost.until_says("the node keeps trying")
    assert as_json(f"{url}healthz") == {"version": 1, "ok": True}
    status, body = get(f"{url}readyz")
    assert (status, json.loads(body)["reasons"]) == (503, [STARTING])
    assert get(f"{url}status")[0] == 503
    lost.signal(signal.SIGTERM)
    lost.until_ended()


async def test_a_host_that_no_resolver_takes_is_the_owners_mistake(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.touch(0o600)
    secret.write_text("s" * 43)
    with pytest.raises(ConfigError, match=r"a\.\.b is no host name") as raised:
        await listen(HttpConfig(host="a..b", token_file=str(secret)))
    assert raised.value.key == "http.host"


def test_a_port_that_was_chosen_and_is_taken_is_an_error_and_the_usual_one_gives_way(swarm: DaemonSwarm) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = swarm.first("refused", P2PTRAIN_HTTP__PORT=str(port)).start()
        assert refused.until_ended() == 2
        assert f"http.port: port {port} of 127.0.0.1 is taken. Choose another, or 0 for any free one" in refused.text
        assert "Traceback" not in refused.text
    with socket.socket() as usual:
        try:
            usual.bind(("127.0.0.1", 8_420))
            usual.listen()
        except OSError:
            pass  # somebody has it: all the better
        second = swarm.first("second", P2PTRAIN_HTTP__PORT="").start()
        url = url_in(second)
        assert "port 8420 is taken, perhaps by another node: using a free one" in second.text
        assert get(f"{url}healthz")[0] == 200
        assert not url.endswith(":8420/")


def test_beyond_loopback_a_node_asks_for_its_token(swarm: DaemonSwarm) -> None:
    token = swarm.directory / "token"
    own = {"P2PTRAIN_HTTP__HOST": "0.0.0.0", "P2PTRAIN_HTTP__TOKEN_FILE": str(token)}
    without = swarm.first("without", P2PTRAIN_HTTP__HOST="0.0.0.0").start()
    assert without.until_ended() == 2
    assert "Name a token_file" in without.text
    open_to_all = swarm.first("careless", **own)
    token.write_text("a-secret-of-many-letters\n")
    token.chmod(0o644)
    assert open_to_all.start().until_ended() == 2
    assert f"{token}: http.token_file: other users can read it (mode 0644). chmod 600 {token}" in open_to_all.text
    token.chmod(0o600)
    first = swarm.first("careful", **own).start().until_up()
    url = url_in(first)
    assert url.startswith("http://127.0.0.1:")
    assert get(f"{url}status")[0] == 401
    assert get(f"{url}status", Authorization="Bearer wrong")[0] == 401
    assert as_json(f"{url}status", Authorization="Bearer a-secret-of-many-letters")["run_name"] == "test"
    assert get(f"{url}status", Host="evil.example")[0] == 421
    assert "a-secret" not in first.text


def test_a_node_that_is_told_to_show_nothing_listens_nowhere(swarm: DaemonSwarm) -> None:
    first = swarm.first(P2PTRAIN_HTTP__ENABLED="false").start().until_up()
    assert first.ask()["http"] is None
    assert "in a browser" not in first.text
