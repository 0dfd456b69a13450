"""A node keeps links to different address ranges whatever else is connected."""

from __future__ import annotations

from p2ptrain.net.address_book import Origin
from p2ptrain.net.connections import KEEP_SECONDS, LINKS_MAX, RANGES_KEPT
from tests.helpers.connections import RecordedConnections, key
from tests.helpers.memory_network import Network
from tests.helpers.net import at, skipping_time, until


def surrounded() -> tuple[Network, RecordedConnections]:
    """Fills all slots with peers of one address range."""
    network = Network()
    node = RecordedConnections(network)
    for number in range(1, LINKS_MAX + 1):
        network.transport(key(number))
        node.connections.add(network.address(key(number)))
    return network, node


def elsewhere(network: Network, number: int, host: str) -> bytes:
    network.hosts[key(number)] = host
    network.transport(key(number))
    return key(number)


@skipping_time
async def test_for_one_peer_of_each_other_range_there_is_a_place_when_all_are_taken() -> None:
    network, node = surrounded()
    async with node.running() as connections:
        await until(lambda: len(connections.linked) == LINKS_MAX)
        for number in range(RANGES_KEPT + 3):
            for each in (2 * number, 2 * number + 1):
                connections.add(network.address(elsewhere(network, 100 + each, f"10.{number}.0.{each}")))
        await at(300.0)
        assert len(connections.linked) == LINKS_MAX + RANGES_KEPT - 1
        assert len(connections.anchors) == RANGES_KEPT
        assert node.transport.kept == frozenset(connections.anchors.values())


@skipping_time
async def test_an_anchor_stays_one_until_it_is_lost_and_is_then_the_one_that_has_lasted_longest() -> None:
    network = Network()
    node = RecordedConnections(network)
    first, second, third = (elsewhere(network, number, f"10.1.0.{number}") for number in (101, 102, 103))
    async with node.running() as connections:
        for peer in (second, first, third):
            connections.add(network.address(peer))
            await until(lambda peer=peer: peer in connections.linked)
            await at(10.0 * (1 + len(connections.linked)))
        assert connections.anchors == {"10.1.0.0/16": second}
        network.kill(second)
        await until(lambda: second not in connections.linked)
        await until(lambda: connections.anchors == {"10.1.0.0/16": first})


@skipping_time
async def test_who_came_by_itself_is_no_anchor_wherever_it_says_that_it_is() -> None:
    network = Network()
    node = RecordedConnections(network)
    peer = elsewhere(network, 101, "10.1.0.1")
    network.link(node.transport.me, peer)
    async with node.running() as connections:
        await until(lambda: peer in connections.linked)
        connections.add(network.address(peer), Origin.ITSELF)
        await at(30.0)
        assert connections.anchors == {}
        assert node.transport.kept == frozenset()


@skipping_time
async def test_bootstraps_and_members_are_kept_and_that_is_said_again() -> None:
    network = Network()
    node = RecordedConnections(network)
    said: list[frozenset[bytes]] = []
    keep = node.transport.keep

    async def noted(peers: set[bytes]) -> None:
        said.append(frozenset(peers))
        await keep(peers)

    node.transport.keep = noted  # type: ignore[method-assign,assignment]
    bootstrap, member, other = (network.transport(key(number)).me for number in (1, 2, 3))
    node.connections.roster = lambda: (member,)
    node.connections.add(network.address(bootstrap), Origin.USER)
    network.link(node.transport.me, member)
    network.link(node.transport.me, other)
    async with node.running() as connections:
        await until(lambda: len(connections.linked) == 3)
        await at(2.5 * KEEP_SECONDS)
    assert said[-1] == {bootstrap, member}
    assert said.count(said[-1]) == 3
