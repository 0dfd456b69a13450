"""Addresses that a peer tells so that a node knocks at doors of the peer's choice.

Before they were bounded, one peer's answers caused 771 dials in 40 s: to the node's own services, its router, the
cloud's secrets, a cluster's services, and a name.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from p2ptrain.core import wire
from p2ptrain.identity import id_bytes_of, peer_id_of
from p2ptrain.net import questions
from p2ptrain.net.address_book import FAILED_PER_MINUTE_MAX, PLACES_MAX, Origin
from p2ptrain.net.addresses import Reach, met_in, reach_of
from p2ptrain.net.connections import DIALS_AT_ONCE
from p2ptrain.net.libp2p.p2pd import P2pd
from p2ptrain.net.transport import Stream, TransportError
from tests.helpers.connections import A, B, C, RecordedConnections, address, key, now
from tests.helpers.memory_network import MemoryTransport, Network
from tests.helpers.net import at, skipping_time, until
from tests.helpers.p2pd import SECONDS, connected, echo, echoed, nodes_in

RELAY = f"/tcp/4001/p2p/{peer_id_of(B)}/p2p-circuit"
TARGETS = [
    "/ip4/127.0.0.1/tcp/6379",
    "/ip6/::1/tcp/6379",
    "/ip6/::ffff:127.0.0.1/tcp/6379",
    "/ip6/::ffff:10.0.0.1/tcp/6379",
    "/ip6/2002:7f00:1::/tcp/6379",
    "/ip6/64:ff9b::a00:1/tcp/6379",
    "/ip4/192.168.1.1/tcp/80",
    "/ip4/169.254.169.254/tcp/80",
    "/ip4/10.96.0.1/tcp/443",
    "/ip4/100.64.0.1/tcp/443",
    "/ip4/0.0.0.0/tcp/6379",
    "/ip4/224.0.0.1/tcp/80",
    "/ip6/fe80::1/tcp/80",
    "/ip6/ff02::1/tcp/80",
    "/ip6/fd00::1/tcp/80",
    "/dns4/metadata.google.internal/tcp/80",
    f"/ip4/127.0.0.1{RELAY}",
    f"/ip4/192.168.1.1{RELAY}",
    f"/dns4/metadata.google.internal{RELAY}",
]


async def liar_at(network: Network, host: str, addresses: list[str]) -> MemoryTransport:
    """Makes a peer that tells these addresses whenever it is asked."""
    network.hosts[A] = host
    liar = network.transport(A)

    async def told(stream: Stream) -> None:
        await stream.receive(questions.QUESTION_BYTES_MAX)
        await stream.send(wire.encode(questions.Peers(tuple(addresses[: questions.PEERS_MAX]))))
        addresses.append(addresses.pop(0))

    await liar.serve(questions.PROTOCOL, told)
    return liar


async def dials_after(node: RecordedConnections, network: Network, seconds: float) -> list[str]:
    """Runs a node that was told the liar's address, and returns the other addresses that it dialled."""
    node.connections.add(network.address(A), Origin.USER)
    async with node.running():
        await until(lambda: A in node.connections.linked)
        for _ in range(int(seconds)):
            await node.connections._ask_around(A)
            await at(now() + 1.0)
    return [each for _, each in node.dials if each != network.address(A)]


@skipping_time
async def test_a_public_peer_sends_nobody_to_a_machine_or_a_network_of_its_own() -> None:
    network = Network()
    node = RecordedConnections(network)
    addresses = [f"{each}/p2p/{peer_id_of(key(10 + number))}" for number, each in enumerate(TARGETS)]
    addresses += [f"{each}/p2p/{peer_id_of(A)}" for each in TARGETS[:8]]  # also as its own
    await liar_at(network, "8.8.8.8", addresses)
    assert await dials_after(node, network, 40) == []
    assert set(node.connections.known) == {A}
    node.connections._take_hints({C: wire.encode([f"{TARGETS[0]}/p2p/{peer_id_of(C)}"])})
    assert set(node.connections.known) == {A}


@skipping_time
async def test_dials_to_what_one_peer_tells_are_few_whatever_keys_are_said_to_be_there() -> None:
    network = Network()
    node = RecordedConnections(network)
    count = 3_000
    addresses = [address(key(10 + number), "9.9.9.9", 443) for number in range(count)]
    await liar_at(network, "8.8.8.8", addresses)
    assert 1 <= len(await dials_after(node, network, 60)) <= 8
    node.dials.clear()
    began = now()
    addresses[:] = [address(key(10 + number), f"9.9.{number % 200}.9", 1 + number) for number in range(count)]
    assert len(await dials_after(node, network, 120)) >= FAILED_PER_MINUTE_MAX
    minutes = Counter(int((when - began) // 60) for when, each in node.dials if each != network.address(A))
    assert set(minutes) == {0, 1}
    assert max(minutes.values()) <= FAILED_PER_MINUTE_MAX + DIALS_AT_ONCE
    assert len(node.connections.told_dials._places) <= PLACES_MAX


@skipping_time
async def test_dials_that_succeed_are_not_counted() -> None:
    network = Network()
    node = RecordedConnections(network)
    peers = [key(10 + number) for number in range(40)]
    for number, peer in enumerate(peers):
        network.hosts[peer] = f"9.9.{number}.9"
        network.transport(peer)
    await liar_at(network, "8.8.8.8", [network.address(peer) for peer in peers])
    assert len(await dials_after(node, network, 40)) == len(peers)
    assert set(peers) <= node.connections.linked.keys()


@pytest.mark.parametrize(
    ("teller", "told"),
    [
        ("127.0.0.1", ["127.0.0.1", "192.168.1.9", "9.9.9.9"]),
        ("192.168.1.5", ["192.168.1.9", "9.9.9.9"]),
        ("8.8.8.8", ["9.9.9.9"]),
    ],
)
@skipping_time
async def test_a_peer_tells_addresses_of_its_own_kind_and_wider_ones(teller: str, told: list[str]) -> None:
    network = Network()
    node = RecordedConnections(network)
    hosts = ["127.0.0.1", "192.168.1.9", "9.9.9.9", "169.254.1.1"]
    addresses = [address(key(10 + number), host) for number, host in enumerate(hosts)]
    await liar_at(network, teller, list(addresses))
    dialled = {each.split("/")[2] for each in await dials_after(node, network, 3)}
    assert dialled == set(told)


@skipping_time
async def test_a_name_is_dialled_only_if_the_user_gave_it() -> None:
    network = Network()
    node = RecordedConnections(network)
    names = [f"/dns4/{name}/tcp/4001/p2p/{peer_id_of(C)}" for name in ("Given.example", "other.example")]
    await liar_at(network, "8.8.8.8", list(names))
    node.connections.add(f"/dns4/given.example/tcp/1/p2p/{peer_id_of(B)}", Origin.USER)
    dialled = set(await dials_after(node, network, 3))
    assert names[0] in dialled
    assert names[1] not in dialled


def test_who_comes_through_a_relay_may_be_anyone() -> None:
    assert met_in([f"/ip4/127.0.0.1{RELAY}/p2p/{peer_id_of(C)}"]) is Reach.PUBLIC
    assert met_in([address(C), address(C, "8.8.8.8")]) is Reach.PUBLIC
    assert met_in([address(C)]) is Reach.LOOPBACK
    assert met_in([]) is Reach.PUBLIC
    assert reach_of(f"/ip4/203.0.113.7{RELAY}/p2p/{peer_id_of(C)}") is Reach.PUBLIC


async def _parted(nodes: list[P2pd]) -> None:
    """Disconnects two that have met and no longer ask each other anything."""
    for node in nodes:
        await node.look_up("nothing")  # after the introductions
    while any([await node.peers() for node in nodes]):
        await nodes[1].disconnect(nodes[0].me)


async def _ask_who_has_gone(nodes: list[P2pd]) -> None:
    await nodes[0].serve("/echo/1", echo)
    assert await echoed(nodes[1], nodes[0].me, b"connected") == b"connected"
    await _parted(nodes)
    with pytest.raises(TransportError, match="it is not connected"):
        await nodes[1].open(nodes[0].me, "/echo/1")
    with pytest.raises(TransportError, match="it is not connected"):
        assert nodes[1].dht is not None
        await nodes[1].dht.calls.call(id_bytes_of(nodes[0].me), "DHTProtocol.rpc_ping", b"", SECONDS)
    assert await nodes[1].peers() == {}


async def test_nobody_is_dialled_by_asking(tmp_path: Path) -> None:
    """p2pd would dial whom it is asked to open a stream to, at any address that it was told of."""
    async with nodes_in(tmp_path) as make:
        await _ask_who_has_gone(await connected(make, 2))
