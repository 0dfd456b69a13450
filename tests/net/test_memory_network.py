"""The in-memory network delivers traffic, and fails as told."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from p2ptrain.errors import RemoteProtocolError
from p2ptrain.net.transport import FRAME_BYTES_MAX, MESSAGE_BYTES_MAX, Stream, Transport, TransportError
from tests.helpers.memory_network import WINDOW_BYTES, MemoryTransport, Network
from tests.helpers.net import key, skipping_time, until

A, B, C, D = (key(number) for number in range(4))


async def line_of(network: Network, *keys: bytes) -> list[MemoryTransport]:
    """Makes a chain of nodes, each connected to the next."""
    nodes = [network.transport(each) for each in keys]
    for node, following in pairwise(nodes):
        await node.connect(following.addresses()[0])
    return nodes


async def echo(stream: Stream) -> None:
    while True:
        await stream.send(await stream.receive(FRAME_BYTES_MAX))


def heard_by(node: MemoryTransport, into: list[tuple[bytes, bytes, bytes]]) -> None:
    node.heard["topic"] = lambda author, data: into.append((node.me, author, data))


@skipping_time
async def test_gossip_reaches_every_subscriber_once_over_any_path() -> None:
    network = Network()
    nodes = await line_of(network, A, B, C, D)
    await nodes[3].connect(nodes[0].addresses()[0])
    heard: list[tuple[bytes, bytes, bytes]] = []
    for node in nodes:
        heard_by(node, heard)
    await nodes[0].publish("topic", b"news")
    assert heard == []  # listeners are not called from within publish
    await until(lambda: len(heard) >= 3)
    assert sorted(heard) == sorted((peer, A, b"news") for peer in (B, C, D))


@skipping_time
async def test_gossip_does_not_pass_over_those_who_did_not_subscribe() -> None:
    network = Network()
    a, _b, c = await line_of(network, A, B, C)
    heard: list[tuple[bytes, bytes, bytes]] = []
    heard_by(c, heard)
    await a.publish("topic", b"news")
    await c.publish("topic", b"news")
    assert a.counters() == {"bytes sent": 4, "sent gossip": 4, "gossip sent": 1}
    assert heard == []


@skipping_time
async def test_an_overlong_message_is_our_own_mistake() -> None:
    (a,) = await line_of(Network(), A)
    with pytest.raises(AssertionError):
        await a.publish("topic", bytes(MESSAGE_BYTES_MAX + 1))


@skipping_time
async def test_gossip_is_lost_as_often_as_it_is_told_to_and_the_same_way_each_time() -> None:
    async def arrived(seed: int) -> list[bytes]:
        network = Network(seed, loss=0.5, latency_seconds=0.002)
        a, b = await line_of(network, A, B)
        heard: list[tuple[bytes, bytes, bytes]] = []
        heard_by(b, heard)
        for number in range(200):
            await a.publish("topic", bytes([number]))
        await until(lambda: len(heard) + a.counters()["gossip lost"] == 200)
        return [data for _, _, data in heard]

    first, again, other = await arrived(1), await arrived(1), await arrived(2)
    assert 60 < len(first) < 140
    assert first == again != other


@skipping_time
async def test_frames_arrive_in_order_and_whole_in_spite_of_latency() -> None:
    network = Network(3, latency_seconds=0.004)
    a, b = await line_of(network, A, B)
    await b.serve("echo", echo)
    stream = await a.open(B, "echo")
    frames = [bytes([number]) * number for number in range(100)]
    for frame in frames:
        await stream.send(memoryview(frame))
    assert [await stream.receive(100) for _ in frames] == frames
    assert stream.peer == B
    assert network.sent == {(A, B): 4950, (B, A): 4950}
    both = ("bytes sent", "bytes received", "sent echo", "received echo")
    assert a.counters() == dict.fromkeys(both, 4950)
    stream.abort()


@skipping_time
async def test_a_sender_waits_for_its_reader() -> None:
    a, b = await line_of(Network(), A, B)
    got: list[bytes] = []
    go = asyncio.Event()

    async def slow(stream: Stream) -> None:
        await go.wait()
        while True:
            got.append(await stream.receive(FRAME_BYTES_MAX))

    await b.serve("slow", slow)
    stream = await a.open(B, "slow")
    sent = 0

    async def flood() -> None:
        nonlocal sent
        for _ in range(64):
            await stream.send(bytes(2**18))
            sent += 1
        await stream.close()

    async with asyncio.TaskGroup() as group:
        group.create_task(flood())
        await until(lambda: sent == WINDOW_BYTES // 2**18)
        go.set()
    assert sent == len(got) + WINDOW_BYTES // 2**18 or sent == 64
    await until(lambda: len(got) == 64)


@skipping_time
async def test_what_was_sent_before_a_close_arrives_and_then_the_stream_is_gone() -> None:
    a, b = await line_of(Network(), A, B)

    async def answer(stream: Stream) -> None:
        await stream.receive(10)
        await stream.send(b"bye")

    await b.serve("answer", answer)
    stream = await a.open(B, "answer")
    await stream.send(b"hi")
    await stream.close()
    assert await stream.receive(10) == b"bye"
    with pytest.raises(TransportError, match="closed by the peer"):
        await stream.receive(10)
    with pytest.raises(TransportError):
        await stream.send(b"more")


@skipping_time
async def test_a_frame_over_the_limit_is_the_peers_fault() -> None:
    a, b = await line_of(Network(), A, B)
    await b.serve("echo", echo)
    stream = await a.open(B, "echo")
    await stream.send(bytes(11))
    with pytest.raises(RemoteProtocolError, match="11 bytes; the limit is 10"):
        await stream.receive(10)
    with pytest.raises(AssertionError):
        await stream.send(bytes(FRAME_BYTES_MAX + 1))


@skipping_time
async def test_streams_break_with_the_node_the_connection_and_the_cable() -> None:
    network = Network()
    a, b = await line_of(network, A, B)
    await b.serve("echo", echo)
    for end in (lambda: a.disconnect(B), lambda: b.disconnect(A), lambda: None):
        stream = await a.open(B, "echo")
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(_failure(stream))
            await asyncio.sleep(0)
            if (ending := end()) is not None:
                await ending
            else:
                network.cut(A, B)
        assert waiting.result() in ("disconnected", "the network is cut")
        assert await a.peers() == {}
        with pytest.raises(TransportError, match="not connected"):
            await a.open(B, "echo")
        network.heal()
        await a.connect(b.addresses()[0])
    stream = await a.open(B, "echo")
    network.kill(B)
    assert await _failure(stream) == "the peer is gone"
    with pytest.raises(TransportError, match="the node has stopped"):
        await b.publish("topic", b"from the dead")


async def _failure(stream: Stream) -> str:
    with pytest.raises(TransportError) as caught:
        await stream.receive(10)
    return str(caught.value)


@skipping_time
async def test_a_connection_that_cannot_be_says_why() -> None:
    network = Network()
    a, b = network.transport(A), network.transport(B)
    address = b.addresses()[0]
    assert address.startswith("/ip4/127.0.0.1/tcp/2/p2p/12D3KooW")
    network.cut(A, B)
    with pytest.raises(TransportError, match=r"/p2p/12D3KooW.*: the network is cut"):
        await a.connect(address)
    network.heal()
    assert await a.connect(address) == B
    assert await a.peers() == {B: [address]}
    network.kill(B)
    with pytest.raises(TransportError, match="nobody is there"):
        await a.connect(address)
    for bad in ("", "/ip4/127.0.0.1/tcp/2/p2p/x0x", address.replace("tcp/2", "tcp/3")):
        with pytest.raises(TransportError):
            await a.connect(bad)
    again = network.transport(B)
    assert again.addresses() == [address]
    with pytest.raises(TransportError, match="does not speak"):
        await a.open(await a.connect(address), "echo")


@skipping_time
async def test_a_record_is_found_until_it_expires_and_only_where_it_was_left() -> None:
    network = Network()
    a, b, c = await line_of(network, A, B, C)
    await a.announce("run", b"one", 10)
    await c.announce("run", b"three", 20)
    assert await b.look_up("run") == {A: b"one", C: b"three"}
    await a.announce("run", b"two", 15)
    network.cut(B, C)
    await b.announce("run", b"late", 15)
    assert await c.look_up("run") == {A: b"two", C: b"three"}
    await asyncio.wait([asyncio.ensure_future(_later(15))])
    assert await a.look_up("run") == {C: b"three"}
    assert await a.look_up("other") == {}


async def _later(seconds: float) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.Event().wait()


@skipping_time
async def test_what_a_handler_runs_into_is_raised_at_the_end() -> None:
    a, b = await line_of(Network(), A, B)

    async def wrong(stream: Stream) -> None:
        raise KeyError("a bug")

    await b.serve("wrong", wrong)
    stream = await a.open(B, "wrong")
    assert await _failure(stream) == "closed by the peer"
    with pytest.raises(KeyError, match="a bug"):
        await b.close()
    await a.close()


def test_the_transport_is_one() -> None:
    transport: Transport = MemoryTransport(Network(), A)
    assert transport.me == A
