"""Floods of peers, and of addresses at which nobody answers, take neither time nor slots from the peers we need."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from p2ptrain.identity import peer_id_of
from p2ptrain.net import questions
from p2ptrain.net.address_book import ADDRESSES_MAX, PLACE_SECONDS_MAX, Origin
from p2ptrain.net.connections import (
    DIAL_SECONDS_LIMIT,
    DIALS_AT_ONCE,
    FORGOTTEN_AT_ONCE,
    KNOWN_MAX,
    MEETING_SECONDS,
    MEETINGS_AT_ONCE,
    STEADY_SECONDS,
    Connections,
)
from p2ptrain.net.transport import Stream
from tests.helpers.connections import CONNECT_SECONDS, ME, A, B, C, RecordedConnections, address, key, now, others
from tests.helpers.memory_network import Network
from tests.helpers.net import at, skipping_time, until

MANY = 200


def flood(node: RecordedConnections) -> None:
    """Made-up addresses, told by one peer, at which nobody answers."""
    node.is_silent = lambda address: address.startswith("/ip4/10.")
    for number in range(MANY):
        for port in range(1, ADDRESSES_MAX + 1):
            node.connections.add(address(key(1_000 + number), f"10.{number}.0.1", port))


# ---------------------------------------------------------------------------------------------------
# Dialling


@skipping_time
async def test_hearsay_that_leads_nowhere_delays_no_bootstrap_and_no_member() -> None:
    network = Network()
    node = RecordedConnections(network)
    await others(network, A, B)
    node.connections.roster = lambda: (B,)
    node.connections.add(network.address(A), Origin.USER)
    node.connections.add(network.address(B))
    flood(node)
    async with node.running() as connections:
        await until(lambda: {A, B} <= connections.linked.keys())
        for _ in range(10):
            await at(now() + 2 * STEADY_SECONDS)
            assert len(connections.dialling) == DIALS_AT_ONCE  # all of them in vain
            node.told.clear()
            lost_at = now()
            for peer in (A, B):
                network.unlink(ME, peer, "an outage")
            await until(lambda: {("seen", A), ("seen", B)} <= set(node.told))
            assert now() < lost_at + 3.0


@skipping_time
async def test_at_a_start_those_of_the_last_time_are_dialled_before_all_that_is_hearsay() -> None:
    network = Network()
    node = RecordedConnections(network)
    await others(network, C)
    flood(node)
    node.connections.add(network.address(C), Origin.REMEMBERED)
    async with node.running() as connections:
        await until(lambda: C in connections.linked)
        assert now() < 1.0


@skipping_time
async def test_a_dial_ends_in_time_and_each_address_has_its_turn() -> None:
    network = Network()
    node = RecordedConnections(network)
    node.is_silent = lambda address: True
    addresses = [address(A, port=port) for port in range(1, ADDRESSES_MAX + 1)]
    node.connections.tell(A, addresses)
    best = node.connections.known[A].addresses[0]
    for _ in range(100):
        await at(now() + PLACE_SECONDS_MAX)  # a place that did not answer is left alone for a while
        node.dials.clear()
        began = now()
        await node.connections._dial(A)
        assert now() == began + DIAL_SECONDS_LIMIT
        (_, first), (then, other) = node.dials
        assert (first, then) == (best, began + CONNECT_SECONDS)
        if other in addresses:
            addresses.remove(other)
    assert addresses == [best]


@skipping_time
async def test_of_hearsay_one_address_is_dialled_at_a_time_and_after_what_is_certain() -> None:
    network = Network()
    node = RecordedConnections(network)
    own = address(A)
    heard = [address(A, "10.0.0.1", port) for port in range(1, ADDRESSES_MAX)]
    for each in (own, *heard):
        node.connections.add(each, Origin.ITSELF if each == own else Origin.HEARSAY)
    others: set[str] = set()
    for _ in range(100):
        await at(now() + PLACE_SECONDS_MAX)
        node.dials.clear()
        await node.connections._dial(A)
        (_, first), (_, other) = node.dials
        assert first == own
        others.add(other)
    assert others == set(heard)


# ---------------------------------------------------------------------------------------------------
# Meeting


async def linked_after(node: RecordedConnections, network: Network, number: int) -> float:
    """Returns how long a newcomer waits to be linked."""
    newcomer, began = network.transport(key(number)), now()
    await newcomer.connect(network.address(ME))
    await until(lambda: newcomer.me in node.connections.linked)
    return now() - began


@skipping_time
async def test_strangers_that_never_answer_keep_no_newcomer_waiting() -> None:
    network = Network()
    node = RecordedConnections(network)
    async with node.running():
        for number in range(1_000, 1_000 + MANY):
            await network.transport(key(number)).connect(network.address(ME))
            node.mute.add(key(number))
        await at((MANY / MEETINGS_AT_ONCE + 2) * (MEETING_SECONDS + 1.0))  # each has been asked once
        for number in range(20):
            assert await linked_after(node, network, 100 + number) <= MEETING_SECONDS + 1.5


@skipping_time
async def test_strangers_that_come_again_wait_again() -> None:
    """Whatever they do, a newcomer waits only for peers that came before it."""
    network = Network()
    node = RecordedConnections(network)
    node.mute.update(key(number) for number in range(1_000, 1_060))

    async def come_again() -> None:
        while True:
            gone = node.mute - node.connections.meeting
            for peer in gone:
                network.unlink(ME, peer, "I go")
            node.connections.changed.set()
            await until(lambda: not gone & node.connections.unmet.keys())  # noqa: B023
            for peer in gone:
                network.link(ME, peer)
            await at(now() + 1.0)

    for peer in node.mute:
        network.transport(peer)
    async with node.running():
        coming = asyncio.create_task(come_again())
        await at(30.0)
        for number in range(20):
            rounds = len(node.mute) / MEETINGS_AT_ONCE + 1
            assert await linked_after(node, network, 100 + number) <= rounds * MEETING_SECONDS + 1.5
        coming.cancel()


@skipping_time
async def test_members_and_who_was_there_before_are_met_in_places_of_their_own() -> None:
    network = Network()
    node = RecordedConnections(network)
    await others(network, A, B)
    node.connections.roster = lambda: (A,)
    node.connections.add(address(B), Origin.REMEMBERED)
    async with node.running() as connections:
        for number in range(1_000, 1_000 + MANY):
            await network.transport(key(number)).connect(network.address(ME))
            node.mute.add(key(number))
        await until(lambda: len(connections.meeting) == MEETINGS_AT_ONCE)
        came_at = now()
        for peer in (A, B):
            network.link(ME, peer)
        await until(lambda: {A, B} <= connections.linked.keys())
        assert now() < came_at + 1.5


@skipping_time
async def test_a_peer_that_does_not_answer_questions_takes_up_no_place_once_it_is_linked() -> None:
    network = Network()
    node = RecordedConnections(network)

    async def hang(stream: Stream) -> None:
        await asyncio.get_running_loop().create_future()

    async with node.running() as connections:
        for number in range(1_000, 1_000 + 3 * MEETINGS_AT_ONCE):
            peer = network.transport(key(number))
            await peer.serve(questions.PROTOCOL, hang)
            await peer.connect(network.address(ME))
        await until(lambda: len(connections.linked) == 3 * MEETINGS_AT_ONCE)
        assert now() < 5.0
        assert connections.meeting == set()
    for each in list(network.nodes):
        network.kill(each)


# ---------------------------------------------------------------------------------------------------
# Remembering


async def come(node: RecordedConnections, network: Network, *peers: bytes) -> None:
    """Connects peers that tell us their addresses."""
    for peer in peers:
        await network.transport(peer).connect(network.address(ME))
    node.connections.changed.set()
    await until(lambda: node.connections.linked.keys() >= {*peers})
    for peer in peers:
        node.connections.tell(peer, [address(peer, "203.0.113.7", port) for port in (1, 2)])


def remembered(connections: Connections) -> list[str]:
    """Returns the peers remembered for the next start, in order."""
    return list(dict.fromkeys(each.rpartition("/p2p/")[2] for each in connections.remembered()))


@pytest.mark.parametrize("they_stay", [False, True])
@skipping_time
async def test_keys_without_number_push_out_nobody_who_matters(they_stay: bool) -> None:
    network = Network()
    node = RecordedConnections(network)
    node.connections.roster = lambda: (B,)

    async def call(first: int, they_stay: bool) -> None:
        for start in range(first, first + KNOWN_MAX + 10, MEETINGS_AT_ONCE):
            callers = [key(number) for number in range(start, start + MEETINGS_AT_ONCE)]
            await come(node, network, *callers)
            for caller in () if they_stay else callers:
                network.kill(caller)

    async with node.running() as connections:
        await call(1_000, they_stay=False)
        for peer in (A, B, C):
            await come(node, network, peer)
        connections.add(address(A), Origin.USER)
        for peer in (A, B):
            network.kill(peer)  # a bootstrap and a member that are away for the moment
        await until(lambda: list(connections.linked) == [C])
        assert remembered(connections)[:3] == [peer_id_of(peer) for peer in (A, B, C)]
        await call(10_000, they_stay)
        assert remembered(connections)[:3] == [peer_id_of(peer) for peer in (A, B, C)]
        for kept in (connections.remembered(), connections.known):
            assert KNOWN_MAX - FORGOTTEN_AT_ONCE <= len(kept) <= KNOWN_MAX


@skipping_time
async def test_of_those_that_are_gone_who_was_there_last_is_remembered_first() -> None:
    network = Network()
    node = RecordedConnections(network)
    peers = [key(number) for number in range(10, 20)]
    Random(1).shuffle(peers)
    async with node.running() as connections:
        for peer in peers:
            await come(node, network, peer)
            network.kill(peer)
            await at(now() + 5.0)
        assert remembered(connections) == [peer_id_of(peer) for peer in reversed(peers)]
