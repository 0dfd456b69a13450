"""The doctor's checks of the network, passing and failing, and one run beside a real daemon."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest

from p2ptrain.config import HttpConfig, NetworkConfig
from p2ptrain.doctor import network
from p2ptrain.doctor.findings import Diagnosis
from p2ptrain.net import questions
from p2ptrain.net.questions import PROTOCOL, QUESTION_BYTES_MAX, PeerAnswer, Runs, Seen
from p2ptrain.net.transport import Stream
from tests.helpers.daemons import TEST_SECONDS, p2ptrain, swarm_in
from tests.helpers.memory_network import MemoryTransport, Network
from tests.helpers.net import key, skipping_time

A, B, C = key(1), key(2), key(3)
ROUTER, MINE, HOME = "203.0.113.7", "198.51.100.9", "192.168.1.5"
OWN_ID, OTHER_ID = (
    "12D3KooWM87ULyCQ4p5uagyH3ypi1uA1kM2paeTuzQhvQtzAb3C9",
    "12D3KooWQdmF9Sfk1q4Mn2yYtcg7XnQ1LQTwXSQbP9nCH7jLoMpy",
)


def sight(seen_at: str = "", offset: float = 0.0, uncertain: float = 0.01) -> PeerAnswer:
    return PeerAnswer(offset, uncertain, seen_at)


def at(host: str, port: int = 4001) -> PeerAnswer:
    return sight(f"/ip4/{host}/tcp/{port}/p2p/{OWN_ID}")


@pytest.fixture(autouse=True)
def _documentation_is_global(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets addresses reserved for documentation count as public ones."""
    real = network._is_global
    monkeypatch.setattr(network, "_is_global", lambda host: host in (ROUTER, MINE) or real(host))


# ---------------------------------------------------------------------------------------------------
# Ports


def test_a_port_is_free_or_in_use_by_another_or_by_the_node_itself() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        address = f"/ip4/0.0.0.0/tcp/{port}"
        (found,) = network.check_listen((address,), is_running=False)
        assert (found.level, "in use" in found.result, bool(found.fix)) == ("failed", True, True)
        (found,) = network.check_listen((address,), is_running=True)
        assert found.level == "good"
        (found,) = network.check_listen((address,), is_running=False, gives_way=True)
        assert (found.level, found.result.startswith(f"{address} is in use, perhaps by another")) == ("good", True)
        config = HttpConfig(port=port)
        assert network.check_http(config, None).level == "failed"
        assert network.check_http(config, f"http://127.0.0.1:{port}/").level == "good"
        assert network.check_http(HttpConfig(port=port, enabled=False), None).level == "good"
        unchosen = HttpConfig.model_construct({"host", "enabled"}, host="127.0.0.1", port=port, enabled=True)
        assert network.check_http(unchosen, None).level == "good"  # it takes another
    (found,) = network.check_listen((address,), is_running=False)
    assert (found.level, found.result) == ("good", f"{address} is free")
    assert network.check_http(config, None).level == "good"


def test_the_page_is_shown_as_the_start_would_show_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = tmp_path / "token"
    config = HttpConfig(host="0.0.0.0", port=0, token_file=str(token))

    def told() -> tuple[str, bool, bool]:
        found = network.check_http(config, None)
        return found.level, str(token) in found.result + found.fix, bool(found.fix)

    assert told() == ("failed", True, True)
    token.write_text("a" * 32)
    token.chmod(0o644)
    assert told() == ("failed", True, True)
    token.chmod(0o600)
    assert told() == ("good", False, False)
    monkeypatch.setattr("p2ptrain.observe.http.is_loopback", lambda host: False)  # a name may lead anywhere
    found = network.check_http(HttpConfig(port=0), None)
    assert (found.level, "which others can reach" in found.result, bool(found.fix)) == ("failed", True, True)


def test_listening_nowhere_or_on_loopback_alone_or_elsewhere_is_told() -> None:
    assert [each.level for each in network.check_listen((), is_running=False)] == ["warning"]
    found = network.check_listen(("/ip4/127.0.0.1/tcp/0",), is_running=False)
    assert [each.level for each in found] == ["good", "warning"]
    (found_one,) = network.check_listen((f"/ip4/{ROUTER}/tcp/0",), is_running=True)
    assert (found_one.level, "not an address of this machine" in found_one.result) == ("failed", True)
    assert network.check_http(HttpConfig(host=ROUTER, token_file="x"), None).level == "failed"


# ---------------------------------------------------------------------------------------------------
# The clock


@pytest.mark.parametrize(
    ("offsets", "uncertain", "level"),
    [
        ([0.0], 0.01, "good"),
        ([-0.9], 0.01, "good"),
        ([1.2], 0.01, "warning"),
        ([-2.9], 0.01, "warning"),
        ([3.2], 0.01, "failed"),
        ([-60.0], 0.01, "failed"),
        ([3.2], 0.5, "warning"),  # the answer took so long that it may be less
        ([1.2], 0.5, "good"),
        ([0.0, 0.1, 3_600.0], 0.01, "good"),  # it is that peer's clock
        ([9.0, 9.1, 0.0], 0.01, "failed"),
    ],
)
def test_a_clock_that_the_dht_refuses_fails(offsets: list[float], uncertain: float, level: str) -> None:
    found = network.judge_clock([sight(offset=each, uncertain=uncertain) for each in offsets])
    assert (found.level, bool(found.fix)) == (level, level != "good")
    if len(offsets) == 1 and level != "good":
        assert ("behind" in found.result) == (offsets[0] > 0)


def test_a_clock_that_nobody_tells_is_a_warning() -> None:
    assert network.judge_clock([]).level == "warning"


async def two() -> tuple[MemoryTransport, MemoryTransport]:
    net = Network(latency_seconds=0.2)
    asking, asked = net.transport(A), net.transport(B)
    await asking.connect(asked.addresses()[0])
    return asking, asked


@skipping_time
async def test_a_peer_tells_its_time_and_where_it_sees_us() -> None:
    asking, asked = await two()
    await questions.serve(asked, lambda peer, question: Runs())
    loop = asyncio.get_running_loop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(questions.time, "time", lambda: 1_000_007.5 + loop.time())  # theirs
        found = await questions.look_from(asking, B, clock=lambda: 1_000_000.0 + loop.time())
    assert found.offset_seconds == pytest.approx(7.5, abs=found.uncertain_seconds + 0.001)
    assert 0 < found.uncertain_seconds < 0.5
    assert found.seen_at == asking.addresses()[0]
    await asked.close()


@skipping_time
async def test_a_node_that_does_not_know_the_question_closes_and_goes_on() -> None:
    asking, asked = await two()

    async def closing(stream: Stream) -> None:
        question = await stream.receive(QUESTION_BYTES_MAX)
        if b"seen" in question:
            stream.abort()
        else:
            await stream.send(questions.wire.encode(Runs()))

    await asked.serve(PROTOCOL, closing)
    answers, trouble, reached = await network.ask_peers(asking, asked.addresses())
    assert (answers, reached) == ([], [B])
    assert [(each.what, each.level) for each in trouble] == [("peers", "warning")]
    assert trouble[0].result.startswith(f"{asked.addresses()[0]} does not answer")
    assert await questions.ask_runs(asking, B) == ()
    await asked.close()


@pytest.mark.parametrize("address", ["x" * 10_000, "/ip4/1.2.3.4\x1b[2J", "/ip4/1 2"])
@skipping_time
async def test_an_address_that_a_terminal_would_obey_is_not_taken(address: str) -> None:
    asking, asked = await two()

    async def lie(stream: Stream) -> None:
        await stream.receive(QUESTION_BYTES_MAX)
        await stream.send(questions.wire.encode(Seen(0, address)))

    await asked.serve(PROTOCOL, lie)
    answers, trouble, _ = await network.ask_peers(asking, asked.addresses())
    assert answers == []
    assert "sent an invalid answer" in trouble[0].result
    await asked.close()


@skipping_time
async def test_peers_that_cannot_be_reached_or_do_not_answer_take_no_longer_than_their_deadline() -> None:
    asking, asked = await two()
    released = asyncio.Event()

    async def silent(stream: Stream) -> None:
        await released.wait()

    await asked.serve(PROTOCOL, silent)
    gone = asking.network.address(C)
    answers, trouble, reached = await network.ask_peers(asking, [*asked.addresses(), gone])
    assert (answers, reached, len(trouble)) == ([], [B], 2)
    assert asyncio.get_running_loop().time() < network.ASK_SECONDS + 1
    assert network.judge_peers(2, 1, trouble)[-1] == Diagnosis("peers", "good", "1 of 2 answered")
    assert network.judge_peers(2, 0, trouble)[-1].level == "failed"
    assert network.judge_peers(2, 0, trouble, is_named=False)[-1].level == "warning"
    released.set()
    await asked.close()


# ---------------------------------------------------------------------------------------------------
# NAT and reachability


@pytest.mark.parametrize(
    ("answers", "level", "says"),
    [
        ([at(MINE), at(MINE)], "good", "none: peers see"),
        ([at(HOME)], "good", "not on the internet"),
        ([at(ROUTER, 4001), at(ROUTER, 4001)], "good", "hole punching works"),
        ([at(ROUTER, 4001)], "good", "at this machine's own port"),
        ([at(ROUTER, 5000), at(ROUTER, 5000)], "good", "at the same port for all"),
        ([at(ROUTER, 5000), at(ROUTER, 5001)], "warning", "symmetric"),
        ([at(ROUTER, 5000)], "warning", "two peers are needed"),
        ([at(HOME, 4001), at(ROUTER, 4001)], "good", "hole punching works"),  # one of them is at home, too
        ([sight(f"/ip4/{ROUTER}/tcp/4001/p2p/{OTHER_ID}/p2p-circuit")], "warning", "relay"),
        ([sight("/p2p/12D3KooW/p2p-circuit")], "warning", "relay"),
        ([sight()], "warning", "unknown"),
        ([sight("/ip4/999.1.1.1/tcp/1"), sight("/ip4/::/udp/99999999")], "warning", "unknown"),
        ([], "warning", "unknown"),
    ],
)
def test_the_kind_of_nat_follows_from_where_peers_see_us(answers: list[PeerAnswer], level: str, says: str) -> None:
    found = network.judge_nat(answers, [MINE, HOME, "127.0.0.1"], [4001])
    assert (found.level, says in found.result) == (level, True), found


@pytest.mark.parametrize(
    ("told", "level"),
    [
        ([f"/ip4/8.8.8.8/tcp/4001/p2p/{OWN_ID}"], "good"),
        ([f"/dns4/node.example.org/tcp/4001/p2p/{OWN_ID}"], "good"),
        ([f"/ip4/8.8.8.8/tcp/4001/p2p/{OTHER_ID}/p2p-circuit/p2p/{OWN_ID}"], "warning"),
        ([f"/ip4/192.168.1.5/tcp/4001/p2p/{OWN_ID}"], "warning"),
        ([], "warning"),
        (None, "warning"),
    ],
)
def test_whether_others_can_call_first_follows_from_what_p2pd_tells(told: list[str] | None, level: str) -> None:
    found = network.judge_reach(told)
    assert (found.level, bool(found.fix)) == (level, level == "warning")


def test_the_p2pd_that_asks_takes_ports_of_its_own_and_changes_no_router() -> None:
    config = NetworkConfig(listen=("/ip4/0.0.0.0/tcp/4001", "/ip4/0.0.0.0/udp/4001/quic-v1"), announce=())
    asking = network.asking_network(config)
    assert asking.listen == ("/ip4/0.0.0.0/tcp/0", "/ip4/0.0.0.0/udp/0/quic-v1")
    assert not asking.nat
    assert asking.bootstrap == ()
    assert network.asking_network(NetworkConfig(listen=())).listen == ("/ip4/127.0.0.1/tcp/0",)


# ---------------------------------------------------------------------------------------------------
# A real daemon


@pytest.mark.timeout(TEST_SECONDS)
def test_it_looks_at_a_real_daemon_and_its_run_and_leaves_it_alone(tmp_path: Path) -> None:
    with swarm_in(tmp_path) as swarm:
        node = swarm.first().start().until_up()
        node.until_applied(9)  # there is a state to give
        before = node.status()
        status, out, err = p2ptrain("doctor", "--data-dir", node.directory, "--json")
        assert status == 0, out + err
        beside = {each["what"]: each for each in json.loads(out)["checks"]}
        assert beside["daemon"]["level"] == "good"
        assert str(node.pid) in beside["locks"]["result"]
        assert beside["memory"]["level"] == "good"
        assert beside["run"]["result"].startswith("test, ")
        listen = ("P2PTRAIN_NETWORK__LISTEN", "/ip4/127.0.0.1/tcp/0")
        status, out, err = p2ptrain(
            "doctor", "--data-dir", tmp_path / "new", "--bootstrap", node.address, "--json", **dict([listen])
        )
        assert status == 0, out + err
        outside = {each["what"]: each for each in json.loads(out)["checks"]}
        assert outside["peers"]["result"] == "1 of 1 answered"
        assert (outside["clock"]["level"], outside["nat"]["level"]) == ("good", "good")
        assert outside["run"]["result"].startswith("test, ")
        assert "contributions" in outside["disk space"]["result"]
        assert not (tmp_path / "new").exists()
        node.until_applied(before["applied_round"] + 2)
        node.leave()
        gone = f"/ip4/127.0.0.1/tcp/1/p2p/{before['peer_id']}"
        status, out, _ = p2ptrain("doctor", "--data-dir", tmp_path / "new", "--bootstrap", gone, **dict([listen]))
        assert (status, "none of 1 could be reached" in out) == (1, True)
