"""The daemon's status, as far as it can be tested without a swarm."""

from __future__ import annotations

import asyncio
import json
import logging
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from p2ptrain.config.node import HttpConfig
from p2ptrain.core import events as ev
from p2ptrain.core.complaints import Code, complaint
from p2ptrain.core.messages import Ballot, Received, Vote, encode, message_digest, signed_bytes
from p2ptrain.core.reputation import prove
from p2ptrain.core.tally import Ban
from p2ptrain.identity import RunSigner
from p2ptrain.net import questions
from p2ptrain.net.address_book import Origin
from p2ptrain.net.addresses import kind_of_address
from p2ptrain.net.transport import Stream
from p2ptrain.observe import build as status
from p2ptrain.observe.build import rounds_of, traffic_of
from p2ptrain.observe.http import LINES_KEPT, HttpFace, LogTail
from p2ptrain.observe.progress import peer_lines
from p2ptrain.observe.rounds import ROUNDS_KEPT
from p2ptrain.observe.schema import RoundRecord
from tests.helpers import web
from tests.helpers.connections import ME, A, B, RecordedConnections, now
from tests.helpers.memory_network import Network
from tests.helpers.memory_swarm import swarm
from tests.helpers.net import at, skipping_time, until
from tests.helpers.records import lived

ID = "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("/ip4/127.0.0.1/tcp/4001", "loopback"),
        ("/ip6/::1/tcp/4001", "loopback"),
        ("/ip4/192.168.1.7/tcp/4001", "private"),
        ("/ip4/10.0.0.7/udp/4001/quic-v1", "private"),
        ("/ip6/fe80::1/tcp/4001", "private"),
        ("/ip4/8.8.8.8/tcp/4001", "public"),
        ("/ip6/2606:4700::1/udp/4001/quic-v1", "public"),
        ("/dns4/node.example.org/tcp/4001", "name"),
        ("/dns/node.example.org/tcp/4001", "name"),
        (f"/ip4/8.8.8.8/tcp/4001/p2p/{ID}/p2p-circuit", "relay"),
        ("/ip4/nonsense/tcp/1", "unknown"),
        ("/unix/x", "unknown"),
        ("", "unknown"),
    ],
)
def test_an_address_has_a_kind_for_people(address: str, kind: str) -> None:
    assert kind_of_address(f"{address}/p2p/{ID}") == kind


@skipping_time
async def test_the_latency_of_a_peer_is_the_median_of_its_last_answers_while_it_is_connected() -> None:
    network = Network()
    node, asked = RecordedConnections(network), network.transport(A)
    takes = [0.2, 0.2, 0.4, 0.3, 0.1, 9.0]  # seconds; the first is forgotten when the sixth has come

    async def slow(stream: Stream) -> None:
        await stream.receive(questions.QUESTION_BYTES_MAX)
        if takes:
            await at(now() + takes.pop(0))
            await stream.send(msgspec.msgpack.encode(questions.Peers()))

    await asked.serve(questions.PROTOCOL, slow)
    node.connections.add(network.address(A), Origin.USER)
    assert node.connections.latency(A) is None, "it is not known yet"
    assert node.connections.latency(B) is None, "nothing is known of it"
    async with node.running() as connections:
        await until(lambda: A in connections.linked and bool(connections.known[A].answered_in))
        assert connections.latency(A) == 0.2
        await until(lambda: not takes)
        await at(now() + 600.0)  # no answer is no latency
        assert connections.latency(A) == 0.3
        network.cut(ME, A)
        await until(lambda: A not in connections.linked)
        assert connections.latency(A) is None, "it is away"


def record(number: int, contributors: int) -> RoundRecord:
    keys = tuple(each.to_bytes(32, "big") for each in range(contributors))
    return lived(number, contributors=keys)


def daemon_of(records: Sequence[RoundRecord]) -> Any:
    return SimpleNamespace(records=SimpleNamespace(last=lambda count: list(records[-count:])))


def test_rounds_are_told_the_newest_last() -> None:
    found = rounds_of(daemon_of([record(number, 2) for number in range(5)]), 3)
    assert [each.round for each in found] == [2, 3, 4]


def test_an_answer_has_only_so_many_contributors_in_all_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "CONTRIBUTORS_TOLD", 25)
    records = [record(number, 10) for number in range(5)]
    assert [each.round for each in rounds_of(daemon_of(records), 5)] == [3, 4]
    assert [each.round for each in rounds_of(daemon_of([record(7, 100)]), 5)] == [7], "one in any case"


def test_what_the_node_says_is_kept_for_pages_within_bounds_and_rounds_are_not_said_twice() -> None:
    lines = LogTail()

    def say(name: str, level: int, text: str) -> None:
        record = logging.LogRecord(name, level, "", 0, text, (), None)
        if record.levelno >= lines.level:
            lines.handle(record)

    say("p2ptrain.daemon", logging.WARNING, "the \x1b[31mdisk\u202e is full")
    say("p2ptrain.progress", logging.INFO, "round 7")
    say("p2ptrain.daemon", logging.DEBUG, "detail")
    (line,) = lines.lately
    assert (line.level, line.message) == ("warning", "the ?[31mdisk? is full")
    for number in range(1_000):
        say("p2ptrain.daemon", 35, f"{number} {'x' * 10_000}")
    assert len(lines.lately) == LINES_KEPT
    assert (lines.lately[-1].level, len(lines.lately[-1].message)) == ("warning", 2_000)


def test_bytes_are_told_by_what_they_were_for() -> None:
    counted = {
        "bytes sent": 1_000, "bytes received": 2_000, "sent gossip": 100, "received gossip": 200,
        "sent /mail": 60, "received /mail": 70, f"sent {questions.PROTOCOL}": 5, "sent /bulk": 500,
    }  # fmt: skip
    blobs = {"sent payload": 300, "sent state": 100, "sent data": 10, "sent manifest": 20, "received tokenizer": 30}
    edges: Any = SimpleNamespace(
        transport=SimpleNamespace(counters=lambda: counted),
        mailboxes=SimpleNamespace(protocol="/mail", history_bytes=Counter({"sent": 40, "received": 50})),
        blob_bytes=lambda: Counter(blobs),
    )
    found = {purpose: each.model_dump() for purpose, each in traffic_of(edges).items()}
    assert found == {
        "gossip": {"sent": 100, "received": 200},
        "messages": {"sent": 20, "received": 20},
        "histories": {"sent": 40, "received": 50},
        "payloads": {"sent": 300, "received": 0},
        "states": {"sent": 100, "received": 0},
        "data": {"sent": 30, "received": 30},
        "questions": {"sent": 5, "received": 0},
        "other": {"sent": 405, "received": 1_700},
    }


@skipping_time
async def test_the_daemon_tells_its_owner_the_last_rounds(tmp_path: Path) -> None:
    async with swarm(tmp_path) as made:
        await made.reach(5)
        daemon = made.nodes[0].daemon
        told = (await daemon.answer({"do": "rounds", "last": 3}))["rounds"]
        assert len(told) == 3
        assert [each["round"] for each in told] == sorted(each["round"] for each in told)
        for wrong in ({}, {"last": 0}, {"last": ROUNDS_KEPT + 1}, {"last": "3"}, {"last": None}):
            assert "1 to" in (await daemon.answer({"do": "rounds", **wrong}))["error"]


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as response:
        body = response.read()
    return json.loads(body) if body.startswith(b"{") else body.decode()


@skipping_time
async def test_peers_over_http_say_how_soon_each_contributes_and_who_is_banned_and_why(tmp_path: Path) -> None:
    async with swarm(tmp_path) as made:
        await made.reach(5)
        first, *others = made.nodes
        liar, run_id = others[-1], made.run.id
        http = await HttpFace.open(HttpConfig(port=0), lambda: first.daemon)
        try:
            told = await asyncio.to_thread(get, f"{http.url}peers")
            assert {each["peer_id"] for each in told["peers"]} == {node.identity.peer_id for node in others}
            for each in (*told["peers"], told["me"]):
                assert (each["ban"], each["staleness"], each["staleness_mean"]) == ("", 0, 0.0)
                assert 0 < each["arrival_seconds"] < 60 and 0 < each["arrival_seconds_mean"] < 60
                assert each["tokens_per_second"] > 0 and each["tokens_per_second_mean"] > 0
            both = [Vote(run_id, 1, 0, Ballot.PREVOTE, which * 32, liar.key) for which in (b"a", b"b")]
            signer = RunSigner(liar.identity, run_id)
            lies = prove(*(encode(each, signer.sign(signed_bytes(run_id, each))) for each in both))
            proof = Received(lies, message_digest(lies), encode(lies), b"")
            for node in made.nodes[:-1]:
                node.daemon.driver.intake.give(ev.MessageReceived(others[0].key, proof))
            await until(lambda: liar.key in first.daemon.driver.node.view().state.banned)
            await made.reach(made.newest + 2, first, others[0], others[1])
            told = await asyncio.to_thread(get, f"{http.url}peers")
            bans = {each["peer_id"]: each["ban"] for each in told["peers"] if each["ban"]}
            assert bans == {liar.identity.peer_id: Ban.PROVEN.value}
            banned = (await asyncio.to_thread(get, f"{http.url}status"))["banned"]
            assert banned == {Ban.PROVEN.value: 1}
            line = f'p2ptrain_banned_peers{{reason="{Ban.PROVEN.value.replace(" ", "_")}"}} 1.0'
            assert line in (await asyncio.to_thread(get, f"{http.url}metrics")).splitlines()
            assert f"{liar.identity.peer_id}  banned: {Ban.PROVEN.value}" in peer_lines(told["peers"])
        finally:
            await http.close()


LIARS = {"fault_tolerance": {"liars": 1, "crashes": 1, "mode": "byzantine"}, "quorum": 3}
VERDICTS: list[tuple[dict[str, Any], str, str]] = [
    (
        {},
        "same",
        "Yes: at least 2 members signed that their model after round 6 was bit for bit this node's.",
    ),
    (
        LIARS,
        "same",
        "Yes: at least 2 members signed that their model after round 6 was bit for bit this node's, "
        "and at most 1 of them may lie.",
    ),
    (
        {"quorum": 1},
        "same",
        "Yes: at least 1 member signed that their model after round 6 was bit for bit this node's.",
    ),
    (
        {"quorum": 1, "roster": [web.ME]},
        "same",
        "Yes: this node is the only member, and signed its own model after round 6.",
    ),
    ({"certified_round": 0}, "unknown", "Not known yet: the roster has not certified any round."),
    (
        {"certified_round": 1_005},
        "unknown",
        "The roster has certified round 1,005, which this node did not apply, so it cannot compare.",
    ),
    (
        web.told_of(complaint(Code.QUARANTINED), complaint(Code.STALLED)),
        "other",
        "No: this node's model differs from the certified one. It is fetching the right one.",
    ),
]


@pytest.mark.parametrize(("changes", "verdict", "text"), VERDICTS)
def test_the_verdict_says_what_was_signed_and_no_more(changes: dict[str, Any], verdict: str, text: str) -> None:
    found = web.a_status(web.STATUS | changes)
    assert found.same_model.model_dump() == {"verdict": verdict, "text": text}
