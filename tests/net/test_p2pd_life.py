"""A node survives the death of p2pd, and leaves nothing behind when it dies or is closed midway."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random

import psutil
import pytest

from p2ptrain.config.node import NetworkConfig
from p2ptrain.identity import Identity
from p2ptrain.net import addresses
from p2ptrain.net.address_book import Origin
from p2ptrain.net.connections import Connections
from p2ptrain.net.libp2p import control, p2pd, process
from p2ptrain.net.libp2p.control import UnaryCalls
from p2ptrain.net.libp2p.dht import BoundedProtocol
from p2ptrain.net.libp2p.p2pd import P2pd
from p2ptrain.net.libp2p.streams import read_message
from p2ptrain.net.transport import Stream, TransportError
from tests.helpers.p2pd import SECONDS, HeardGossip, Make, connected, echo, echoed, echoed_at_last, nodes_in, until


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    async with nodes_in(tmp_path) as start:
        yield start


@asynccontextmanager
async def kept_connected(node: P2pd, address: str) -> AsyncIterator[None]:
    """Looks after the connection as a node of a run does."""

    async def speaks(peer: bytes) -> bool:
        return True

    heard: list[bytes] = []
    connections = Connections(node, bytes(32), speaks, heard.append, heard.append, Random(1))
    connections.add(address, Origin.USER)
    running = asyncio.create_task(connections.run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_p2pd_that_dies_is_back_with_all_that_it_did(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    nodes = await connected(make, 2)
    async with kept_connected(nodes[1], nodes[0].addresses()[0]):
        await _dies_and_is_back(nodes)
    assert caplog.text.count("p2pd ended (status -9) and is being restarted") == 2


async def _dies_and_is_back(nodes: list[P2pd]) -> None:
    heard = [HeardGossip(), HeardGossip()]
    for node, hear in zip(nodes, heard, strict=True):
        await node.subscribe("a", hear)
        await node.serve("/echo/1", echo)
    await heard[0].until(nodes[1], "a", b"warm")
    for mortal, other in [(0, 1), (1, 0)]:
        addresses, started_at = nodes[mortal].addresses(), time.monotonic()
        stream = await nodes[mortal].open(nodes[other].me, "/echo/1")
        os.kill(nodes[mortal].supervisor.process.pid, signal.SIGKILL)
        with pytest.raises(TransportError):
            await asyncio.wait_for(stream.receive(1), SECONDS)
        await until(lambda mortal=mortal: nodes[mortal].counters()["p2pd restarts"] == 1)
        async with asyncio.timeout(SECONDS):
            while nodes[other].me not in await nodes[mortal].peers():
                pass
        assert nodes[mortal].addresses() == addresses
        assert await echoed_at_last(nodes[other], nodes[mortal].me, b"in") == b"in"
        assert await echoed(nodes[mortal], nodes[other].me, b"out") == b"out"
        await heard[mortal].until(nodes[other], "a", b"heard again")
        await heard[other].until(nodes[mortal], "a", b"speaks again")
        await nodes[mortal].announce("run", bytes([mortal]), 60)
        assert (await nodes[other].look_up("run"))[nodes[mortal].me] == bytes([mortal])
        assert time.monotonic() - started_at < 20  # five on two quiet cores


async def test_who_left_and_comes_again_hears_gossip_at_once(make: Make, tmp_path: Path) -> None:
    """Not only with the heartbeats, as a peer that has left the mesh properly would for a minute."""
    (stays, leaves), heard = await connected(make, 2), HeardGossip()
    await stays.subscribe("a", HeardGossip())
    await leaves.subscribe("a", heard)
    await heard.until(stays, "a", b"warm")
    await leaves.close()
    directory = make.runtime / "again"
    directory.mkdir(mode=0o700)
    again = await P2pd.start(tmp_path / "1.key", NetworkConfig(listen=("/ip4/127.0.0.1/tcp/0",), nat=False), directory)
    make.nodes.append(again)
    assert await again.connect(stays.addresses()[0]) == stays.me
    heard = HeardGossip()
    await again.subscribe("a", heard)
    await heard.until(stays, "a", b"warm again")
    took = []
    for number in range(10):
        began = time.monotonic()
        await stays.publish("a", bytes([number]))
        while (await heard.next())[1] != bytes([number]):
            pass
        took.append(time.monotonic() - began)
    assert sorted(took)[5] < 0.2, took


async def test_a_topic_that_was_left_is_not_heard_until_the_node_comes_back(make: Make) -> None:
    """Also across a restart of p2pd. What the node itself publishes meanwhile is heard."""
    (stays, leaves), of_stays, of_leaves, beside = await connected(make, 2), HeardGossip(), HeardGossip(), HeardGossip()
    await stays.subscribe("a", of_leaves)
    await leaves.subscribe("a", of_stays)
    await leaves.subscribe("b", beside)

    async def is_heard(word: bytes) -> bool:
        """Whether what is published in the topic comes before what is published in another one afterwards."""
        await beside.until(stays, "b", b"before " + word)
        for number in range(10):
            await stays.publish("a", word + bytes([number]))
        await beside.until(stays, "b", b"after " + word)
        return not of_stays.queue.empty()

    await of_stays.until(stays, "a", b"first")
    leaves.leave("a")
    await of_leaves.until(leaves, "a", b"from outside")
    assert not await is_heard(b"left")
    os.kill(leaves.supervisor.process.pid, signal.SIGKILL)
    await until(lambda: leaves.counters()["p2pd restarts"] == 1)
    assert await leaves.connect(stays.addresses()[0]) == stays.me
    await of_leaves.until(leaves, "a", b"from outside, again")
    assert not await is_heard(b"restarted")
    leaves.come_back("a")
    await of_stays.until(stays, "a", b"last")


class HeardRun(HeardGossip):
    """A run whose node hears a topic and serves a protocol."""

    async def serve(self, stream: Stream) -> None:
        await echo(stream)


async def test_a_transport_keeps_nothing_of_a_run_that_has_ended_and_serves_the_next(make: Make) -> None:
    """Also across a restart of p2pd."""
    node, other = await connected(make, 2)
    await other.subscribe("a", HeardGossip())
    ended: list[weakref.ref[HeardRun]] = []
    for _ in range(2):
        heard = HeardRun()
        await node.serve("/echo/1", heard.serve)
        await node.subscribe("a", heard)
        await heard.until(other, "a", b"gossip")
        assert await echoed(other, node.me, b"frame") == b"frame"
        ended.append(weakref.ref(heard))
        del heard
        node.end_run()
        await _no_echo(other, node.me)
        gc.collect()
        assert [run() for run in ended] == [None] * len(ended)
    assert node.boundary.counts == {}
    os.kill(node.supervisor.process.pid, signal.SIGKILL)
    await until(lambda: node.counters()["p2pd restarts"] == 1)
    await node.connect(other.addresses()[0])
    await _no_echo(other, node.me)


async def _no_echo(node: P2pd, peer: bytes) -> None:
    with pytest.raises(TransportError):
        await echoed(node, peer, b"frame")


async def test_a_p2pd_that_cannot_be_started_again_is_tried_until_it_can(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    node = await make()
    _, _, host, _, port = node.ports.listen[0].split("/")
    os.kill(node.supervisor.process.pid, signal.SIGSTOP)
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        thief.bind((host, int(port)))
        thief.listen()
        os.kill(node.supervisor.process.pid, signal.SIGKILL)
        await until(lambda: caplog.text.count("p2pd cannot be started, will retry: network.listen") >= 2)
        assert node.counters()["p2pd restarts"] == 0
    assert await node.peers() == {}  # the call waits for p2pd
    assert node.counters()["p2pd restarts"] == 1


async def test_a_p2pd_that_has_lost_its_relay_for_good_is_started_again(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "LOOK_SECONDS", 0.01)
    node, other = await connected(make, 2)
    looked_at: list[list[str]] = []

    async def look(routes: list[str]) -> None:
        looked_at.append(routes)
        node.relay_loss.is_mendable = True

    monkeypatch.setattr(node.relay_loss, "look", look)
    await until(lambda: node.counters()["p2pd restarts"] == 1)
    assert "a new p2pd gets a slot sooner" in caplog.text
    assert node.addresses() and {*node.addresses()} <= {addresses.join(each, node.me) for each in looked_at[0]}
    monkeypatch.undo()
    await until(lambda: not node.relay_loss.is_mendable)
    assert other.counters()["p2pd restarts"] == 0


async def test_a_p2pd_that_hangs_is_ended_and_started_again(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "LOOK_SECONDS", 0.01)
    nodes = await connected(make, 2)
    for node in nodes:
        await node.serve("/echo/1", echo)
    with monkeypatch.context() as patch:
        patch.setattr(control, "CONTROL_SECONDS", 0)  # plus one second
        os.kill(nodes[1].supervisor.process.pid, signal.SIGSTOP)
        await until(lambda: "to restart it: no answer to 3 requests in a row; the last: no answer" in caplog.text)
    await until(lambda: nodes[1].counters()["p2pd restarts"] == 1)
    assert await _meet_again(nodes[1], nodes[0]) == [b"out", b"in"]
    assert nodes[0].counters()["p2pd restarts"] == 0


@pytest.mark.parametrize("what", ["directory", "streams.sock"])
async def test_a_p2pd_whose_sockets_were_removed_is_started_again_with_new_ones(
    make: Make, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(process, "LOOK_SECONDS", 0.01)
    nodes = await connected(make, 2)
    for node in nodes:
        await node.serve("/echo/1", echo)
    place = make.runtime / "1"
    if what == "directory":
        shutil.rmtree(place)
    else:
        (place / what).unlink()
    await until(lambda: nodes[1].counters()["p2pd restarts"] == 1)
    assert ((place / "streams.sock").is_socket(), stat.S_IMODE(place.stat().st_mode)) == (True, 0o700)
    assert await _meet_again(nodes[1], nodes[0]) == [b"out", b"in"]
    assert nodes[1].counters()["p2pd restarts"] == 1


async def _meet_again(node: P2pd, other: P2pd) -> list[bytes]:
    """Connects them, as `Connections` does after a restart."""
    async with asyncio.timeout(SECONDS):
        await node.connect(other.addresses()[0])
    return [await echoed(node, other.me, b"out"), await echoed(other, node.me, b"in")]


async def test_a_dht_that_has_lost_p2pd_is_started_again(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    nodes = await connected(make, 2)
    broken = nodes[0].dht
    broken.reading.cancel()
    await until(lambda: nodes[0].dht is not broken)
    await nodes[1].connect(nodes[0].addresses()[0])
    await nodes[0].announce("run", b"here", 60)
    assert await nodes[1].look_up("run") == {nodes[0].me: b"here"}
    assert nodes[0].counters()["p2pd restarts"] == 0


async def test_a_dht_that_cannot_be_started_leaves_no_connection_behind(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node, closed, waits = await make(), list[UnaryCalls](), list[float]()
    close, serve = UnaryCalls.close, BoundedProtocol.serve

    async def closing(calls: UnaryCalls) -> None:
        closed.append(calls)
        waits.append(asyncio.get_running_loop().time())
        await close(calls)

    async def broken(protocol: BoundedProtocol) -> None:
        raise TransportError("not now")

    monkeypatch.setattr(UnaryCalls, "close", closing)
    monkeypatch.setattr(BoundedProtocol, "serve", broken)
    first = node.dht
    first.reading.cancel()
    await until(lambda: len({*closed} - {first.calls}) >= 3)
    monkeypatch.setattr(BoundedProtocol, "serve", serve)
    assert all(each.reading.done() for each in closed[:-1])
    assert waits[-1] - waits[0] > 0.4 + 0.8  # it is tried ever less often
    await until(lambda: node.dht is not first)
    assert caplog.text.count("not now") >= 3


async def test_a_protocol_that_is_served_just_as_p2pd_ends_is_there_once_it_is_back(make: Make) -> None:
    nodes = await connected(make, 2)
    pid = nodes[0].supervisor.process.pid
    os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):  # asyncio's thread was quicker
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222  # our loop must not notice
    assert nodes[0].supervisor.is_up
    await nodes[0].serve("/echo/1", echo)
    await until(lambda: nodes[0].counters()["p2pd restarts"] == 1)
    await nodes[0].connect(nodes[1].addresses()[0])
    assert await echoed_at_last(nodes[1], nodes[0].me, b"frame") == b"frame"


async def test_what_is_asked_of_the_dht_just_as_p2pd_ends_fails(make: Make) -> None:
    node = await make()
    dht, node.dht = node.dht, None
    with pytest.raises(TransportError, match="p2pd has just ended"):
        await node.look_up("run")
    node.dht = dht


CHILD = """
import asyncio, sys
from pathlib import Path
from p2ptrain.net.libp2p.p2pd import P2pd
from p2ptrain.config.node import NetworkConfig

async def main():
    network = NetworkConfig(listen=("/ip4/127.0.0.1/tcp/0",), nat=False)
    node = await P2pd.start(Path(sys.argv[1]), network, Path(sys.argv[2]))
    print(node.supervisor.process.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_no_p2pd_outlives_a_node_that_is_killed(make: Make, tmp_path: Path) -> None:
    Identity.make(tmp_path / "key")
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CHILD, str(tmp_path / "key"), str(make.runtime)), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        orphan = psutil.Process(int(await asyncio.wait_for(child.stdout.readline(), 60)))
        assert orphan.name() == "p2pd"
        assert os.getsid(orphan.pid) == orphan.pid  # Ctrl-C in our terminal does not reach it
    finally:
        child.kill()
        await child.wait()
    await until(lambda: not orphan.is_running())


@pytest.mark.linux
async def test_a_node_that_is_killed_takes_its_p2pd_along_before_its_subscriptions_end(make: Make) -> None:
    """p2pd says goodbye to the mesh of a topic whose subscription ends, and peers keep it out for a minute then."""
    before = {each.fd for each in psutil.Process().net_connections("unix")}
    node = await make()
    await node.subscribe("a", HeardGossip())
    process = node.supervisor.process
    lifeline = process.lifeline.fileno()
    opened = {each.fd for each in psutil.Process().net_connections("unix")} - before
    assert len(opened) > 3
    assert lifeline == max(opened)  # the kernel closes the highest first
    process.lifeline.close()
    assert await asyncio.wait_for(process.wait(), SECONDS) == -signal.SIGKILL


async def test_it_starts_where_few_descriptors_are_allowed(make: Make) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        node = await make()
        assert node.supervisor.process.lifeline.fileno() < 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_closing_ends_what_is_in_use_and_later_calls_fail(make: Make) -> None:
    nodes = await connected(make, 2)
    await nodes[0].serve("/echo/1", echo)
    stream = await nodes[1].open(nodes[0].me, "/echo/1")
    await stream.send(b"a")
    reading = asyncio.create_task(_fails(stream))
    await nodes[1].close()
    await asyncio.wait_for(reading, SECONDS)
    with pytest.raises(TransportError, match="the network was closed"):
        await nodes[1].publish("a", b"")
    await nodes[1].close()


async def _fails(stream: Stream) -> None:
    with pytest.raises(TransportError):
        while True:
            await stream.receive(10)


def told_relays(node: P2pd) -> list[str]:
    """Returns the relays on the command line of the running p2pd."""
    command = psutil.Process(node.supervisor.process.pid).cmdline()
    assert "-relayDiscovery=false" in command
    told = [part.removeprefix("-trustedRelays=") for part in command if part.startswith("-trustedRelays=")]
    assert ("-autoRelay=true" in command) == bool(told)
    return told[0].split(",") if told else []


async def test_p2pd_is_told_of_the_relays_that_answer_at_each_of_its_starts(make: Make) -> None:
    one, other = [await make() for _ in range(2)]
    with socket.socket() as closed:  # bound, but not listening
        closed.bind(("127.0.0.1", 0))
        gone = f"/ip4/127.0.0.1/tcp/{closed.getsockname()[1]}/p2p/{Identity(bytes(32)).peer_id}"
        relays = (gone, *one.addresses(), *other.addresses())
        node = await make(nat=True, trusted_relays=relays)
        assert told_relays(node) == [*one.addresses(), *other.addresses()]
        await one.close()
        os.kill(node.supervisor.process.pid, signal.SIGKILL)
        await until(lambda: node.counters()["p2pd restarts"] == 1)
        assert told_relays(node) == other.addresses()
        assert told_relays(await make(nat=False, trusted_relays=relays)) == []


async def test_nobody_can_take_a_port_while_relays_are_tried_or_p2pd_is_started_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = []

    async def trying(_: object) -> list[str]:
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
            refused.append(port)
        return []

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(p2pd, "relays_to_use", trying)
    node = await make((f"/ip4/127.0.0.1/tcp/{port}",))
    os.kill(node.supervisor.process.pid, signal.SIGKILL)
    await until(lambda: node.counters()["p2pd restarts"] == 1)
    assert refused == [port, port]


async def test_a_start_that_is_cancelled_leaves_nothing(make: Make) -> None:
    await make()
    others = [child for child in psutil.Process().children() if child.name() != "p2pd"]  # from other tests
    starting = asyncio.create_task(make())
    await until(lambda: len(list(make.runtime.glob("*/streams.sock"))) == 2)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert [child.name() for child in psutil.Process().children() if child not in others] == ["p2pd"]


async def test_a_p2pd_that_does_not_start_says_why(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p2pd, "make_arguments", lambda *arguments, **options: ["-no-such-option"])
    with pytest.raises(TransportError, match=r"p2pd did not start: .*flag provided but not defined: -no-such-option"):
        await make()


def test_importing_hivemind_leaves_logging_as_it_was() -> None:
    assert logging.getLevelName(logging.WARNING) == "WARNING"
    assert logging.getLogger("hivemind").handlers == []


def test_of_hivemind_only_the_parts_are_imported_that_are_used() -> None:
    def printed(code: str) -> str:
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert "scipy" not in printed("import sys, p2ptrain.net.libp2p.p2pd; print(*sys.modules)").split()
    from_whole = (
        "import p2ptrain.net.libp2p.p2pd, hivemind, sys; print(hivemind.DHT is sys.modules['hivemind.dht'].DHT)"
    )
    assert printed(from_whole) == "True\n"


async def test_a_message_from_p2pd_that_is_too_long_is_not_read() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(b"\xff\xff\xff\xff\x7f")
    with pytest.raises(TransportError, match="sent a message of"):
        await read_message(reader, 1_000)
