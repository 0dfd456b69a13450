"""Strangers that speak through another implementation of libp2p (py-libp2p), and answer each protocol wrongly.

The first tests of hostile peers went through p2pd, which sends nothing malformed. What p2pd passes on of a peer that is
not p2pd ended nodes: four bytes in the negotiation of a protocol did, in a second (benchmarks/strangers_end.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.core import wire
from p2ptrain.core.complaints import Code
from p2ptrain.net import questions
from p2ptrain.net.libp2p.p2pd import P2pd
from p2ptrain.net.libp2p.streams import with_length
from p2ptrain.net.transport import TransportError
from tests.helpers.daemons import DaemonSwarm, StartableDaemon, swarm_in
from tests.helpers.foreign import (
    DHT,
    IDENTIFY,
    IP_PING,
    NESTED,
    NOT_UTF8,
    PYTHON,
    Foreign,
    address,
    foreign,
    found,
    frame,
    is_there,
)
from tests.helpers.p2pd import Make, connected, nodes_in

pytestmark = [
    pytest.mark.foreign,
    pytest.mark.skipif(not is_there(), reason=f"no other implementation of libp2p at {PYTHON}: make test-foreign"),
]

FOUR_BYTES = "fffefd0a"
MULTISTREAM = with_length(b"/multistream/1.0.0\n").hex()
PEER = "12D3KooWLMcMZDBwZFqL84k4Vs2p1szRiQaTT7y6NcDSL5YK5DcR"
HASH = "1220" + "ab" * 32
EVERY_KIND = [
    "/ip4/127.0.0.1/tcp/{port}",
    "/ip4/127.0.0.1/udp/{port}/quic-v1",
    "/ip4/127.0.0.1/udp/{port}/quic-v1/webtransport",
    f"/ip4/127.0.0.1/udp/{{port}}/quic-v1/webtransport/certhash/{HASH}/certhash/{HASH}",
    f"/ip4/127.0.0.1/udp/{{port}}/webrtc-direct/certhash/{HASH}",
    "/ip4/127.0.0.1/tcp/{port}/ws",
    "/ip4/127.0.0.1/tcp/{port}/tls/sni/a.invalid/ws",
    "/ip4/127.0.0.1/tcp/{port}/http",
    "/ip6/::1/tcp/{port}",
    "/ip6zone/lo/ip6/::1/tcp/{port}",
    f"/ip4/127.0.0.1/tcp/{{port}}/p2p/{PEER}/p2p-circuit",
    f"/ip4/127.0.0.1/tcp/{{port}}/p2p/{PEER}/p2p-circuit/webrtc",
    "/unix/tmp",
    "/memory/{port}",
    "/none",
]  # no name and no address elsewhere: p2pd would resolve and dial them, and tests stay on this machine
JUNK = bytes(range(256)) * 64
Part = dict[str, Any]


def of_every_kind(count: int) -> list[str]:
    kinds = enumerate(islice(cycle(EVERY_KIND), count))
    return [address(kind.format(port=20_000 + number)).hex() for number, kind in kinds]


def wrongly(whole: bytes) -> dict[str, Part]:
    """Returns the ways not to say something: half of it, slowly, nothing, or without end."""
    return {
        "half-open": {"send": whole[: max(1, len(whole) // 2)].hex(), "then": "hold"},
        "cut off": {"send": whole[: max(1, len(whole) // 2)].hex(), "then": "close"},
        "slow": {"send": whole.hex(), "every": 1.0},
        "silent": {"then": "hold"},
        "endless": {"send": JUNK.hex(), "endless": True},
        "reset": {"then": "reset"},
    }


def negotiating() -> dict[str, Part]:
    found = wrongly(with_length(b"/multistream/1.0.0\n"))
    found["four bytes"] = {"send": FOUR_BYTES, "then": "hold"}
    found["four bytes later"] = {"send": MULTISTREAM + "04" + FOUR_BYTES, "then": "hold"}
    found["endless lines"] = {"send": MULTISTREAM + "036e610a", "endless": True}
    return found


class StrangerStage:
    """Brings strangers onto the stage, each before the first two of three nodes."""

    def __init__(self, strangers: Foreign, nodes: list[StartableDaemon]) -> None:
        self.strangers, self._nodes = strangers, nodes
        self._addresses = [node.address for node in nodes[:2]]
        run = f"/p2ptrain/2/{nodes[0].status()['run_id']}"
        self.line, self.bulk = f"{run}/line", f"{run}/bulk"
        self.cast: list[str] = []

    def bring(self, who: str, answers: dict[str, Part], **told: Any) -> None:
        self.cast.append(who)
        if told:
            self.strangers.order(who, "tell", **told)
        for protocol, part in answers.items():
            self.strangers.order(who, "answer", protocol=protocol, **part)
        for each in self._addresses:
            self.strangers.order(who, "connect", address=each)
        for each in self._addresses:
            self.strangers.until("connected", who=who, peer=each.rpartition("/")[2])

    def open(self, who: str, protocol: str, part: Part) -> None:
        for each in self._addresses:
            self.strangers.open(who, each.rpartition("/")[2], protocol, **part)

    def ping_dht(self, who: str) -> None:
        for each in self._addresses:
            self.strangers.ping_dht(who, each.rpartition("/")[2])


def check(swarm: DaemonSwarm, nodes: list[StartableDaemon], rounds: int = 3) -> None:
    """All nodes run and train, with equal roots, and nothing happened that was not foreseen."""
    number = max(node.applied for node in nodes) + rounds
    for node in nodes:
        node.until_applied(number)
        status = node.status()
        assert [each for each in status["complaints"] if each["code"] == Code.EXCHANGE_FAULT] == []
        assert len(status["roster"]) == len(nodes)
    assert swarm.compared() > 0


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonSwarm]:
    with swarm_in(tmp_path_factory.mktemp("swarm")) as swarm:
        swarm.of(3)
        yield swarm


@pytest.fixture
def stage(swarm: DaemonSwarm) -> Iterator[StrangerStage]:
    with foreign() as strangers:
        yield StrangerStage(strangers, swarm.daemons)
        check(swarm, swarm.daemons)


def test_no_negotiation_of_a_protocol_ends_a_node(stage: StrangerStage, swarm: DaemonSwarm) -> None:
    for what, part in negotiating().items():
        stage.bring(what, {"negotiation": part})
    stage.bring("four bytes for a protocol", {stage.line: {"line": FOUR_BYTES}}, protocols=[])
    stage.strangers.until("asked", who="four bytes for a protocol", protocol=stage.line)
    check(swarm, swarm.daemons)
    for what in negotiating():
        assert stage.strangers.all("negotiating", who=what)


def test_nothing_told_in_identify_ends_a_node(stage: StrangerStage, swarm: DaemonSwarm) -> None:
    takes_part = {stage.line: {"then": "read"}, questions.PROTOCOL: {"then": "hold"}}
    stage.bring("a hundred addresses", takes_part, addresses=of_every_kind(100))
    stage.bring("no text", takes_part, agent=FOUR_BYTES, more=(b"\x1a" + with_length(b"\xff\xfe")).hex())
    stage.bring("no addresses", takes_part, addresses=["", "ff", "04", "ffffffffffffffffffff01"])
    stage.bring("many protocols", takes_part, protocols=[f"/{number}" for number in range(400)])
    stage.bring("too long", {**takes_part, IDENTIFY: {"send": with_length(bytes(2**20)).hex(), "then": "close"}})
    for what, part in wrongly(with_length(JUNK)).items():
        stage.bring(f"{what} identify", {**takes_part, IDENTIFY: part})
    stage.bring("four bytes for identify", {IDENTIFY: {"line": FOUR_BYTES}})
    stage.strangers.until("asked", who="a hundred addresses", protocol=stage.line)
    where = frame(wire.encode(questions.AskSeen())).hex()
    stage.open("a hundred addresses", questions.PROTOCOL, {"send": where, "then": "go on", "after": "frame"})
    answer = bytes.fromhex(stage.strangers.until("played", who="a hundred addresses")["heard"])
    assert b"/ip4/127.0.0.1/tcp/" in answer
    for who in stage.cast:
        stage.strangers.until("asked", who=who, protocol=IDENTIFY)


def test_no_answer_to_a_ping_or_to_the_dht_ends_a_node(stage: StrangerStage) -> None:
    for what, part in wrongly(JUNK[:32]).items():
        stage.bring(f"{what} ping", {IP_PING: part, **dict.fromkeys(DHT, part)})
        stage.ping_dht(f"{what} ping")
    for what, value in {"nested": NESTED, "no text": NOT_UTF8}.items():
        part = {"read": "message", "reply": found(value).hex(), "then": "close"}
        stage.bring(what, dict.fromkeys(DHT, part))
        stage.ping_dht(what)
    stage.bring("four bytes for the DHT", {name: {"line": FOUR_BYTES} for name in DHT})
    stage.ping_dht("four bytes for the DHT")


def test_no_use_of_our_own_protocols_ends_a_node(stage: StrangerStage) -> None:
    for what, part in wrongly(frame(JUNK)).items():
        takes_part: dict[str, Part] = {stage.line: {"then": "read"}, stage.bulk: {"then": "read"}}
        stage.bring(f"{what} answer", {**takes_part, questions.PROTOCOL: part})
        stage.bring(f"{what} mail", {stage.line: part, stage.bulk: part, questions.PROTOCOL: {"then": "hold"}})
        stage.bring(what, {})
        for protocol in (questions.PROTOCOL, stage.line, stage.bulk):
            stage.open(what, protocol, part)
    for what in wrongly(JUNK):
        stage.strangers.until("asked", who=f"{what} answer", protocol=questions.PROTOCOL)
        stage.strangers.until("asked", who=f"{what} mail", protocol=stage.line)
        for protocol in (questions.PROTOCOL, stage.line, stage.bulk):
            stage.strangers.until("opened", who=what, protocol=protocol)


# -----------------------------------------------------------------------------------------------
# One node's p2pd


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    async with nodes_in(tmp_path) as start:
        yield start


async def meet(strangers: Foreign, who: str, node: P2pd) -> str:
    peer = await asyncio.to_thread(strangers.connect, who, node.addresses()[0])
    await asyncio.to_thread(strangers.ping_dht, who, peer)
    return peer


async def test_announcements_and_searches_go_on_whatever_strangers_answer(make: Make) -> None:
    nodes = await connected(make, 2)
    with foreign() as strangers:
        answers: dict[str, Part] = wrongly(with_length(JUNK))
        for what, value in {"nested": NESTED, "no text": NOT_UTF8}.items():
            answers[what] = {"read": "message", "reply": found(value).hex(), "then": "close"}
        answers["four bytes"] = {"line": FOUR_BYTES}
        for who, part in answers.items():
            for name in DHT:
                strangers.order(who, "answer", protocol=name, **part)
            await meet(strangers, who, nodes[0])
        await nodes[1].announce("run", b"here", 60)
        assert await nodes[0].look_up("run") == {nodes[1].me: b"here"}
        for who in answers:
            assert strangers.all("asked", who=who, protocol=DHT[0])
            await meet(strangers, who, nodes[0])  # who answers nothing of use is forgotten
        await nodes[0].announce("run", b"too", 60)
        assert nodes[0].boundary.counts.total() == 0


async def test_a_stranger_that_has_left_is_dialled_at_no_address_that_it_told(make: Make) -> None:
    """Else whoever comes for a moment chooses where a node knocks: p2pd dials a peer that it is to open a stream to."""
    nodes = await connected(make, 2)
    with foreign() as strangers:
        strangers.make("gone")
        port = await asyncio.to_thread(strangers.listen, "gone")
        strangers.order("gone", "tell", addresses=[address(f"/ip4/127.0.0.1/tcp/{port}").hex()], protocols=list(DHT))
        peer = await meet(strangers, "gone", nodes[0])
        [key] = [each for each in await nodes[0].peers() if each != nodes[1].me]
        await nodes[0].look_up("nothing")  # after the introductions: who leaves while it is asked may be dialled
        strangers.order("gone", "leave", peer=peer)
        await asyncio.to_thread(strangers.until, "parted", who="gone")
        while key in await nodes[0].peers():
            await nodes[1].look_up("nothing")
        await nodes[0].look_up("run")
        await nodes[0].announce("run", b"here", 60)
        with pytest.raises(TransportError, match="not connected"):
            await nodes[0].open(key, questions.PROTOCOL)
        assert strangers.all("came") == []
