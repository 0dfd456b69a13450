"""A node's connections over the in-memory network: which addresses it trusts, and which peers it waits for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random

import pytest

from p2ptrain.identity import Identity, peer_id_of
from p2ptrain.net import questions
from p2ptrain.net.address_book import ADDRESSES_MAX, Origin
from p2ptrain.net.connections import Connections
from tests.helpers.memory_network import MemoryTransport, Network

RUN, OTHER_RUN = bytes(32), bytes(range(32))
KEYS = [Identity(bytes([number]) * 32).key for number in range(6)]
SECONDS = 20.0


class ConnectedNode:
    """A transport with its connections and its answers to questions."""

    def __init__(self, network: Network, key: bytes, run_id: bytes = RUN) -> None:
        self.network, self.key, self.run_id = network, key, run_id
        self.transport: MemoryTransport = network.transport(key)
        self.seen: list[bytes] = []
        self.lost: list[bytes] = []
        seen, lost = self.seen.append, self.lost.append
        self.connections = Connections(self.transport, run_id, self.opens, seen, lost, Random(1))

    @property
    def protocol(self) -> str:
        return f"/line/{self.run_id.hex()}"

    async def opens(self, peer: bytes) -> bool:
        try:
            (await self.transport.open(peer, self.protocol)).abort()
        except questions.TransportError:
            return False
        return True

    async def take_part(self) -> None:
        async def listen(stream: questions.Stream) -> None:
            stream.abort()

        await self.transport.serve(self.protocol, listen)

    async def answer_questions(self) -> None:
        await questions.serve(self.transport, self.answer)

    def answer(self, peer: bytes, question: questions.Question) -> questions.Answer:
        if isinstance(question, questions.AskPeers) and question.run_id == self.run_id:
            self.connections.takes_part(peer)
            return questions.Peers(self.connections.reachable(but=peer))
        if isinstance(question, questions.AskRuns):
            return questions.Runs((questions.RunInfo(self.run_id, "elsewhere", 1, 1),))
        return questions.Peers()

    @property
    def address(self) -> str:
        return self.network.address(self.key)


@asynccontextmanager
async def running(*nodes: ConnectedNode) -> AsyncIterator[None]:
    for node in nodes:
        await node.take_part()
        await node.answer_questions()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(node.connections.run()) for node in nodes]
        yield
        for task in tasks:
            task.cancel()
    for node in nodes:
        await node.transport.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110  # nothing tells
            await asyncio.sleep(0)


def at(port: int, key: bytes) -> str:
    return f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer_id_of(key)}"


async def test_newcomers_find_all_the_others_through_one_address_at_once() -> None:
    network = Network()
    nodes = [ConnectedNode(network, key) for key in KEYS[:4]]
    for node in nodes[1:]:
        node.connections.add(nodes[0].address, Origin.USER)
    async with running(*nodes):
        began = asyncio.get_running_loop().time()
        await until(lambda: all(len(node.connections.linked) == 3 for node in nodes))
        assert asyncio.get_running_loop().time() - began < 5.0
        assert all(sorted(node.seen) == sorted({*KEYS[:4]} - {node.key}) for node in nodes)


async def test_where_a_call_came_from_is_no_address() -> None:
    network = Network()
    first, second = ConnectedNode(network, KEYS[0]), ConnectedNode(network, KEYS[1])
    second.connections.add(first.address, Origin.USER)

    async def with_a_port_of_the_moment() -> dict[bytes, list[str]]:
        return {peer: [at(50_000, peer)] for peer in network.linked(first.key)}

    first.transport.peers = with_a_port_of_the_moment  # type: ignore[method-assign]
    async with running(first, second):
        await until(lambda: second.key in first.connections.linked)
        await until(lambda: first.connections.known[second.key].addresses == [second.address])
    assert first.connections.remembered() == [second.address]
    assert first.connections.reachable(but=KEYS[2]) == (first.address, second.address)


async def test_what_others_tell_displaces_nothing_that_is_more_certain() -> None:
    node = ConnectedNode(Network(), KEYS[0])
    add = node.connections.add
    add(at(1, KEYS[1]), Origin.USER)
    for port in range(100, 100 + 2 * ADDRESSES_MAX):
        add(at(port, KEYS[1]))
    addresses = node.connections.known[KEYS[1]].addresses
    newest = [at(port, KEYS[1]) for port in reversed(range(100 + ADDRESSES_MAX + 1, 100 + 2 * ADDRESSES_MAX))]
    assert addresses == [at(1, KEYS[1]), *newest]
    add(at(2, KEYS[1]), Origin.ITSELF)
    add(at(101, KEYS[1]), Origin.ITSELF)
    assert node.connections.known[KEYS[1]].addresses == [at(1, KEYS[1]), at(101, KEYS[1]), at(2, KEYS[1]), *newest[:-2]]


async def test_an_address_that_no_longer_works_makes_way_for_a_new_one() -> None:
    network = Network()
    first, second = ConnectedNode(network, KEYS[0]), ConnectedNode(network, KEYS[1])
    first.connections.add(at(999, KEYS[1]))
    first.connections.known[KEYS[1]].worked = at(999, KEYS[1])
    first.connections.add(second.address)
    async with running(first, second):
        await until(lambda: second.key in first.connections.linked)
        assert first.connections.known[KEYS[1]].addresses[0] == second.address


async def test_a_peer_that_does_not_answer_holds_up_nobody() -> None:
    network = Network()
    first, second, mute = (ConnectedNode(network, key) for key in KEYS[:3])

    async def speaks(peer: bytes) -> bool:
        if peer == mute.key:
            await asyncio.get_running_loop().create_future()
        return await first.opens(peer)

    first.connections.speaks = speaks
    async with running(first):
        network.link(first.key, mute.key)
        await until(lambda: mute.key in first.connections.meeting)
        await second.take_part()
        network.link(first.key, second.key)
        await until(lambda: second.key in first.connections.linked)
        network.unlink(first.key, second.key, "gone")
        await until(lambda: first.lost == [second.key])
    assert mute.key not in first.connections.linked


async def test_a_peer_that_is_still_starting_is_linked_as_soon_as_it_takes_part() -> None:
    network = Network()
    first, second = ConnectedNode(network, KEYS[0]), ConnectedNode(network, KEYS[1])
    second.connections.add(first.address, Origin.USER)
    async with running(first):
        network.link(first.key, second.key)  # its network is up before it takes part
        await until(lambda: second.key in first.connections.unmet and not first.connections.meeting)
        first.connections.unmet[second.key].next_at += 1_000.0  # for long it was not worth asking
        async with running(second):
            await until(lambda: second.key in first.connections.linked and first.key in second.connections.linked)


async def test_a_bootstrap_of_another_run_is_told_apart_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    network = Network()
    first, other = ConnectedNode(network, KEYS[0]), ConnectedNode(network, KEYS[1], OTHER_RUN)
    first.connections.add(other.address, Origin.USER)
    with caplog.at_level(logging.WARNING):
        async with running(first, other):
            await until(lambda: "is reachable, but" in caplog.text)
    told = f"{other.address} is reachable, but takes part in another run: elsewhere ({OTHER_RUN.hex()[:16]})"
    assert [record.message for record in caplog.records] == [told]
    assert (first.seen, other.seen) == ([], [])
