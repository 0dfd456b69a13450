"""Real p2pd processes on loopback: gossip, streams, addresses and records."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from p2ptrain.errors import ConfigError, RemoteProtocolError
from p2ptrain.identity import Identity, peer_id_of
from p2ptrain.net.libp2p import dht, p2pd, process, pubsub, streams
from p2ptrain.net.libp2p.dht import sign_record
from p2ptrain.net.libp2p.process import Ports
from p2ptrain.net.transport import FRAME_BYTES_MAX, MESSAGE_BYTES_MAX, Stream, TransportError
from tests.helpers.p2pd import SECONDS, HeardGossip, Make, connected, echo, echoed, echoed_at_last, nodes_in, until

STRANGER = Identity(b"s" * 32)


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    async with nodes_in(tmp_path) as start:
        yield start


# ---------------------------------------------------------------------------------------------------
# Gossip


async def test_all_others_hear_what_one_publishes_and_it_does_not_hear_itself(make: Make) -> None:
    nodes, topic = await connected(make, 3), "p2ptrain/1/a"
    heard = [HeardGossip() for _ in nodes]
    for node, hear in zip(nodes, heard, strict=True):
        await node.subscribe(topic, hear)
    await heard[1].until(nodes[2], topic, b"warm")
    await heard[2].until(nodes[1], topic, b"warm")
    await heard[0].until(nodes[1], topic, b"warm")
    for number in range(30):
        message = number.to_bytes(1_000, "big")
        await nodes[2].publish(topic, message)
        for hear in heard[:2]:
            while await hear.next() != (nodes[2].me, message):
                pass
    largest = bytes(MESSAGE_BYTES_MAX)
    await nodes[2].publish(topic, largest)
    for hear in heard[:2]:
        while await hear.next() != (nodes[2].me, largest):
            pass
    while not heard[2].queue.empty():
        assert heard[2].queue.get_nowait()[0] != nodes[2].me
    assert nodes[2].counters()["sent gossip"] >= 30 * 1_000 + MESSAGE_BYTES_MAX


async def test_nothing_is_published_that_libp2p_would_lose(make: Make) -> None:
    node = await make()
    with pytest.raises(AssertionError, match="1000001 bytes"):
        await node.publish("a", bytes(MESSAGE_BYTES_MAX + 1))
    assert node.counters().get("gossip sent", 0) == 0


async def test_messages_that_nobody_takes_in_time_are_dropped_and_counted(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, heard = await connected(make, 2), HeardGossip()
    await nodes[0].subscribe("a", heard)
    await nodes[1].subscribe("a", HeardGossip())
    await heard.until(nodes[1], "a", b"warm")
    received = nodes[0].counters()["gossip received"]
    monkeypatch.setattr(pubsub, "MESSAGES_MAX", 0)
    for number in range(20):
        await nodes[1].publish("a", bytes([number]))
    await until(lambda: nodes[0].counters()["gossip received"] == received + 20)
    assert nodes[0].counters()["gossip dropped"] == 20


async def test_a_message_that_nobody_foresaw_is_lost_and_the_next_one_is_heard(make: Make) -> None:
    nodes = await connected(make, 2)
    heard: list[bytes] = []

    def hear(publisher: bytes, data: bytes) -> None:
        if data == b"bug":
            raise ZeroDivisionError
        heard.append(data)

    await nodes[0].subscribe("a", hear)
    await nodes[1].subscribe("a", HeardGossip())
    while not nodes[0].boundary.counts:
        await nodes[1].publish("a", b"bug")
    await nodes[1].publish("a", b"good")
    await until(lambda: heard == [b"good"])
    assert [peer for peer, _ in nodes[0].boundary.by_peer] == [nodes[1].me]


# ---------------------------------------------------------------------------------------------------
# Streams


async def test_frames_arrive_in_order_both_ways_and_are_counted(make: Make) -> None:
    nodes = await connected(make, 2)
    await nodes[0].serve("/echo/1", echo)
    stream = await nodes[1].open(nodes[0].me, "/echo/1")
    sent = [b"", b"a", bytes(100_000), memoryview(b"view"), b"\xff" * FRAME_BYTES_MAX]
    for frame in sent:
        await stream.send(frame)
        assert await stream.receive(FRAME_BYTES_MAX) == bytes(frame)
    await stream.close()
    size = sum(len(frame) for frame in sent)
    counters = nodes[1].counters()
    assert [counters[name] for name in ("sent /echo/1", "received /echo/1")] == [size, size]
    with pytest.raises(TransportError, match="was closed"):
        await stream.send(b"more")


async def test_what_was_sent_before_closing_arrives(make: Make) -> None:
    nodes, frame, count = await connected(make, 2), bytes(100_000), 10
    is_closed = asyncio.Event()
    ended: asyncio.Queue[str] = asyncio.Queue()

    async def read_late(stream: Stream) -> None:
        await is_closed.wait()
        for _ in range(count):
            assert await stream.receive(len(frame)) == frame
        try:
            await stream.receive(1)
        except TransportError as error:
            ended.put_nowait(str(error))

    await nodes[0].serve("/read/1", read_late)
    stream = await nodes[1].open(nodes[0].me, "/read/1")
    await _send_all(stream, frame, count)
    is_closed.set()
    assert await asyncio.wait_for(ended.get(), SECONDS) == "the peer closed the stream"


async def test_64_mib_pass_in_frames(make: Make) -> None:
    nodes, frame = await connected(make, 2), os.urandom(2**20)
    received: asyncio.Queue[int] = asyncio.Queue()

    async def read(stream: Stream) -> None:
        received.put_nowait(sum([await stream.receive(2**20) == frame for _ in range(64)]))

    await nodes[0].serve("/read/1", read)
    await _send_all(await nodes[1].open(nodes[0].me, "/read/1"), frame, 64)
    assert await asyncio.wait_for(received.get(), SECONDS) == 64


async def _send_all(stream: Stream, frame: bytes, count: int) -> None:
    for _ in range(count):
        await stream.send(frame)
    await stream.close()


async def test_a_frame_that_is_too_long_is_refused_before_it_is_read(make: Make) -> None:
    nodes = await connected(make, 2)
    refused: asyncio.Queue[str] = asyncio.Queue()

    async def read_little(stream: Stream) -> None:
        try:
            await stream.receive(1_000)
        except RemoteProtocolError as error:
            refused.put_nowait(error.why)
            raise

    await nodes[0].serve("/little/1", read_little)
    for header, named in [((1_001).to_bytes(4, "big"), 1_001), (b"\xff" * 4, 2**32 - 1)]:
        reader, writer = await nodes[1].control.open_stream(nodes[0].me, "/little/1")
        writer.write(header)
        assert await asyncio.wait_for(refused.get(), SECONDS) == f"a frame of {named} bytes; the limit is 1000"
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await asyncio.wait_for(reader.readexactly(1), SECONDS)
        writer.transport.abort()
    stream = await nodes[1].open(nodes[0].me, "/little/1")
    with pytest.raises(AssertionError, match="has to be split"):
        await stream.send(bytes(FRAME_BYTES_MAX + 1))
    stream.abort()


async def test_a_reader_that_is_interrupted_goes_on_where_it_was(make: Make) -> None:
    nodes = await connected(make, 2)
    came: asyncio.Queue[Stream] = asyncio.Queue()
    has_read = asyncio.Event()

    async def wait(stream: Stream) -> None:
        came.put_nowait(stream)
        await has_read.wait()

    await nodes[0].serve("/slow/1", wait)
    _, writer = await nodes[1].control.open_stream(nodes[0].me, "/slow/1")
    writer.write(b"\0\0\0\x04ab")
    stream = await asyncio.wait_for(came.get(), SECONDS)
    assert await asyncio.wait_for(stream.coming(), SECONDS) == 4
    reading = asyncio.create_task(stream.receive(10))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    writer.write(b"cd\0\0\0\x04next")
    for frame in (b"abcd", b"next"):
        assert await asyncio.wait_for(stream.receive(10), SECONDS) == frame
    writer.transport.abort()
    has_read.set()


async def test_streams_that_come_while_a_node_closes_are_closed_too(make: Make) -> None:
    nodes = await connected(make, 2)
    await nodes[0].serve("/echo/1", echo)

    opened = asyncio.Semaphore(0)

    async def keep_opening() -> None:
        with suppress(TransportError, OSError):
            while True:
                _, writer = await nodes[1].control.open_stream(nodes[0].me, "/echo/1")
                writer.transport.abort()
                opened.release()

    opening = [asyncio.create_task(keep_opening()) for _ in range(16)]
    for _ in range(200):
        await asyncio.wait_for(opened.acquire(), SECONDS)
    await nodes[0].close()
    for task in opening:
        task.cancel()
    await asyncio.gather(*opening, return_exceptions=True)
    left = [task for task in asyncio.all_tasks() if "Streams" in repr(task) or "contained" in repr(task)]
    assert left == []
    gc.collect()  # a connection that nobody has closed is a warning, and here an error


async def test_a_stream_that_is_let_go_ends_at_the_other_end(make: Make) -> None:
    nodes = await connected(make, 2)
    ended: asyncio.Queue[str] = asyncio.Queue()

    async def wait(stream: Stream) -> None:
        await stream.send(b"here")
        try:
            await stream.receive(10)
        except TransportError as error:
            ended.put_nowait(str(error))

    await nodes[0].serve("/wait/1", wait)
    stream = await nodes[1].open(nodes[0].me, "/wait/1")
    assert await stream.receive(10) == b"here"
    stream._writer.write(b"\0\0\0\x05abc")
    stream.abort()
    assert "the stream" in await asyncio.wait_for(ended.get(), SECONDS)


async def test_a_protocol_that_nobody_serves_and_a_peer_that_is_not_there_are_named(make: Make) -> None:
    nodes = await connected(make, 2)
    with pytest.raises(
        TransportError, match=rf"cannot open a /none/1 stream to {peer_id_of(nodes[0].me)}: it does not speak"
    ):
        await nodes[1].open(nodes[0].me, "/none/1")
    with pytest.raises(TransportError, match=rf"cannot open a /none/1 stream to {STRANGER.peer_id}: "):
        await nodes[1].open(STRANGER.key, "/none/1")


async def test_a_handler_that_meets_a_surprise_ends_its_stream_and_a_lie_is_no_surprise(make: Make) -> None:
    nodes = await connected(make, 2)
    await nodes[0].peers()

    async def fail(stream: Stream) -> None:
        what = await stream.receive(10)
        raise ZeroDivisionError if what == b"bug" else RemoteProtocolError("no honest peer says that")

    await nodes[0].serve("/fail/1", fail)
    for what in (b"lie", b"bug"):
        stream = await nodes[1].open(nodes[0].me, "/fail/1")
        await stream.send(what)
        with pytest.raises(TransportError):
            await asyncio.wait_for(stream.receive(1), SECONDS)
        stream.abort()
    await until(lambda: bool(nodes[0].boundary.counts))
    assert nodes[0].boundary.counts == {"an incoming stream": 1}
    assert nodes[0].boundary.by_peer == {(nodes[1].me, "127.0.0.0/16"): 1}


async def test_a_peer_has_no_more_streams_than_it_may(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "STREAMS_OF_PEER_MAX", 2)
    nodes = await connected(make, 2)
    await nodes[0].serve("/echo/1", echo)
    held = [await nodes[1].open(nodes[0].me, "/echo/1") for _ in range(2)]
    for stream in held:
        await stream.send(b"a")
        assert await stream.receive(10) == b"a"
    with pytest.raises(TransportError, match=r"the stream|the peer"):
        await echoed(nodes[1], nodes[0].me, b"one too many")
    assert nodes[0].counters()["streams refused"] == 1
    await held.pop().close()
    assert await echoed_at_last(nodes[1], nodes[0].me, b"now") == b"now"
    held[0].abort()


# ---------------------------------------------------------------------------------------------------
# Addresses


async def test_peers_know_one_another_by_addresses_that_can_be_called(make: Make) -> None:
    nodes = [await make(), await make(("/ip6/::1/tcp/0", "/ip4/0.0.0.0/tcp/0"))]
    assert [address.split("/")[1:4:2] for address in nodes[0].addresses()] == [["ip4", "tcp"]]
    assert all("/127.0.0.1/" not in address and "/::1/" not in address for address in nodes[1].addresses())
    by_ip6 = f"{nodes[1].ports.listen[0]}/p2p/{peer_id_of(nodes[1].me)}"
    assert await nodes[0].connect(by_ip6) == nodes[1].me
    assert list(await nodes[1].peers()) == [nodes[0].me]
    assert (await nodes[0].peers())[nodes[1].me][0] == by_ip6
    await nodes[1].serve("/echo/1", echo)
    stream = await nodes[0].open(nodes[1].me, "/echo/1")
    await nodes[0].disconnect(nodes[1].me)  # not a ban: libp2p may reconnect at once
    with pytest.raises(TransportError):
        await asyncio.wait_for(stream.receive(1), SECONDS)
    stream.abort()


async def test_addresses_that_lead_nowhere_are_refused_with_the_reason(make: Make) -> None:
    nodes = [await make(), await make()]
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        refusing = f"/ip4/127.0.0.1/tcp/{closed.getsockname()[1]}/p2p/{STRANGER.peer_id}"
        with pytest.raises(TransportError, match=f"cannot connect to {refusing}: nobody listens there"):
            await nodes[0].connect(refusing)
    route = nodes[1].ports.listen[0]
    with pytest.raises(TransportError, match=rf"another peer answers there, {peer_id_of(nodes[1].me)}"):
        await nodes[0].connect(f"{route}/p2p/{STRANGER.peer_id}")
    for wrong in ["", "nonsense", route, f"/unix/tmp/x/p2p/{STRANGER.peer_id}", "/" * 10_000]:
        with pytest.raises(TransportError, match="is not an address with an id at its end"):
            await nodes[0].connect(wrong)
    with pytest.raises(TransportError, match="is not the id of an Ed25519 key"):
        await nodes[0].connect(f"{route}/p2p/{STRANGER.peer_id[:-1]}")
    with pytest.raises(TransportError, match=r"/999.0.0.1/tcp/1/p2p/.*not an address"):
        await nodes[0].connect(f"/ip4/999.0.0.1/tcp/1/p2p/{STRANGER.peer_id}")
    with pytest.raises(TransportError, match="this node itself"):
        await nodes[0].connect(nodes[0].addresses()[0])
    with pytest.raises(TransportError, match=r"no address to reach: .* it is an address of this node itself"):
        await nodes[0].connect(f"{nodes[0].ports.listen[0]}/p2p/{peer_id_of(nodes[1].me)}")  # which was here before


async def test_a_port_in_use_is_named_with_what_to_do(make: Make) -> None:
    node = await make()
    with pytest.raises(
        ConfigError, match=rf"network.listen: {node.ports.listen[0]} is in use by another program. Stop it"
    ):
        await make(node.ports.listen)
    with pytest.raises(ConfigError, match=r"/ip4/203.0.113.7/tcp/4001 is not an address of this machine"):
        await make(("/ip4/203.0.113.7/tcp/4001",))


async def test_a_port_in_use_that_nobody_chose_gives_way_and_the_other_is_told(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "p2ptrain.net")
    first = await make()
    second = await make((first.ports.listen[0], "/ip4/127.0.0.1/tcp/0"), is_chosen=False)
    assert (first.ports.listen[0] not in second.ports.listen, len(second.ports.listen)) == (True, 2)
    port, other = first.ports.listen[0].rpartition("/")[2], second.ports.listen[0]
    assert f"port {port} is taken, perhaps by another node: this node listens on {other}" in caplog.text
    assert await first.connect(f"{other}/p2p/{peer_id_of(second.me)}") == second.me
    with pytest.raises(ConfigError, match="is not an address of this machine"):
        await make(("/ip4/203.0.113.7/tcp/4001",), is_chosen=False)


def test_a_node_takes_the_configured_port_or_the_one_that_it_had_last_or_a_free_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "p2ptrain.net")
    usual = Ports(("/ip4/127.0.0.1/tcp/0",))
    wanted, file = (usual.listen[0], "/ip4/127.0.0.1/udp/0/quic-v1"), tmp_path / "ports"

    def started() -> tuple[str, ...]:
        caplog.clear()
        ports = Ports(wanted, gives_way=True, file=file)
        ports.close()
        return ports.listen

    had = started()
    assert (had[0] != usual.listen[0], "as it did last" in caplog.text) == (True, False)
    assert started() == had
    assert f"this node listens on {had[0]}, as it did last" in caplog.text
    with pytest.raises(ConfigError, match=rf"{usual.listen[0]} is in use by another program"):
        Ports(wanted, file=file)  # its owner relies on it
    other = Ports(had[:1])
    assert (started()[0] not in (*had, *usual.listen), started()[1]) == (True, had[1])
    other.close()
    usual.close()
    assert started() == (usual.listen[0], had[1])
    assert caplog.text == ""


def test_ports_that_cannot_be_read_or_noted_keep_no_node_from_its_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "ports"
    for content in (b"\xff", b"nonsense\n", b"/ip4/127.0.0.1/tcp/99999\n"):
        file.write_bytes(content)
        Ports(("/ip4/127.0.0.1/tcp/0",), file=file).close()
        assert f"{file}: does not tell the ports of the last start" in caplog.text
        caplog.clear()
    file.unlink()
    file.mkdir()
    Ports(("/ip4/127.0.0.1/tcp/0",), file=file).close()
    assert "the next start may listen on other ports" in caplog.text


async def test_of_nodes_that_start_at_once_only_one_gets_the_default_port(make: Make) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        default = f"/ip4/127.0.0.1/tcp/{free.getsockname()[1]}"
    nodes = await asyncio.gather(*(make((default,), is_chosen=False) for _ in range(3)))
    listen = [node.ports.listen for node in nodes]
    assert len(set(listen)) == 3
    assert (default,) in listen
    assert await nodes[0].connect(nodes[1].addresses()[0]) == nodes[1].me
    assert await nodes[0].connect(nodes[2].addresses()[0]) == nodes[2].me


async def test_others_are_told_what_the_config_announces(make: Make) -> None:
    node = await make(announce=("/dns4/node.example/tcp/4001",))
    assert node.addresses() == [f"/dns4/node.example/tcp/4001/p2p/{peer_id_of(node.me)}"]


async def test_a_node_starts_with_all_that_gets_it_through_a_nat(make: Make) -> None:
    relay = await make()
    node = await make(
        ("/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1"), nat=True, trusted_relays=tuple(relay.addresses())
    )
    assert await node.connect(relay.addresses()[0]) == relay.me
    deaf = await make(())
    assert await deaf.connect(node.addresses()[1]) == node.me
    assert deaf.addresses() == []


# ---------------------------------------------------------------------------------------------------
# Records


async def test_announcements_are_found_by_others_under_their_author(make: Make) -> None:
    nodes = await connected(make, 3)
    await nodes[1].announce("run", b"one", 60)
    await nodes[2].announce("run", b"two", 60)
    await nodes[2].announce("run", b"newer", 61)
    for node in nodes:
        assert await node.look_up("run") == {nodes[1].me: b"one", nodes[2].me: b"newer"}
    assert await nodes[0].look_up("another run") == {}
    with pytest.raises(TransportError, match="nobody accepted the announcement of run"):
        await nodes[2].announce("run", b"older", 30)


async def test_records_that_are_not_their_authors_are_refused(make: Make) -> None:
    nodes = await connected(make, 2)
    await nodes[1].announce("run", b"mine", 60)
    protocol, key = nodes[1].dht.node.protocol, dht.DHTID.generate("run")
    forger, expires_at = Identity(b"f" * 32), time.time() + 600
    packed = protocol.serializer.dumps(b"evil")

    async def is_taken(subkey: object, value: bytes, expires_at: float = expires_at) -> bool:
        target = dht.PeerID(p2pd.id_bytes_of(nodes[0].me))
        answer = await protocol.call_store(target, [key], [value], [expires_at], subkeys=[subkey])
        return bool(answer[0])

    def signed(author: bytes, at: float = expires_at) -> bytes:
        return sign_record(forger.sign, author, key.to_bytes(), packed, at)

    assert not await is_taken(nodes[1].me, signed(nodes[1].me))  # under another's key
    assert not await is_taken(forger.key, packed)  # unsigned
    assert not await is_taken(None, signed(forger.key))  # without a subkey, replacing everyone's records
    assert not await is_taken(forger.key, signed(forger.key, time.time() + 10**9), time.time() + 10**9)
    assert nodes[0].counters()["DHT records refused"] == 4
    assert await nodes[0].look_up("run") == {nodes[1].me: b"mine"}
    assert await is_taken(forger.key, signed(forger.key))
    assert (await nodes[0].look_up("run"))[forger.key] == b"evil"  # a peer may announce anything for itself


async def test_the_dht_keeps_no_more_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht, "STORED_ENTRIES_MAX", 2)
    storage, late = dht.Storage(keys_max=2), time.time() + 60
    assert [storage.store_subkey(1, subkey, b"1", late) for subkey in (b"a", b"b", b"a")] == [True, True, False]
    for number in range(1_000):
        assert storage.store_subkey(1, b"b", b"2", late + number + 1)
        assert not storage.store_subkey(1, b"b", b"2", late)
    assert max(len(storage.expiration_heap), len(storage.get(1).value.expiration_heap)) <= 7
    for number in range(1_000):
        assert storage.store_subkey(1, number.to_bytes(2, "big"), b"1", late)
        assert storage.store_subkey(2 + number, b"a", b"1", late)
        assert len(storage) <= 2
        assert all(len(item.value) <= 2 for _, item in storage.items())
    assert not storage.store_subkey(9_999, b"a", b"1", time.time() - 1)  # expired: evicts nothing
    assert len(storage) == 2
    assert not dht.Storage(keys_max=0).store_subkey(1, b"a", b"1", late)


async def test_nobody_can_keep_others_out_of_the_dht(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and authors cost nothing, and an attacker may fill the storage first."""
    monkeypatch.setattr(dht, "STORED_ENTRIES_MAX", 4)
    storage, late = dht.Storage(keys_max=4), time.time() + 60
    storage.used.add(0)
    for number in range(1, 100):
        storage.store_subkey(number, b"a", b"1", late)
        assert storage.store_subkey(0, b"author %d" % number, b"1", late)
        assert 0 in storage  # keys that we use are never evicted
    assert (len(storage), len(storage.get(0).value)) == (5, 4)
    for subkey in (b"honest", b"honest too"):
        assert storage.store_subkey(0, subkey, b"1", late)
        assert storage.get(0).value.get(subkey).value == b"1"
    assert storage.store_subkey(1_000, b"a", b"1", late)
    assert {0, 1_000} <= storage.data.keys()


async def test_what_a_node_announces_or_looks_up_has_room_in_its_own_dht(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = await connected(make, 2)
    await nodes[0].announce("mine", b"here", 60)
    await nodes[0].look_up("sought")
    storage, late = nodes[0].dht.node.protocol.storage, time.time() + 600
    assert storage.used == {dht.DHTID.generate("mine"), dht.DHTID.generate("sought")}
    for number in range(2 * dht.STORED_KEYS_MAX):
        storage.store_subkey(dht.DHTID.generate(f"junk {number}"), b"a", b"1", late)
    await nodes[1].announce("sought", b"found", 60)
    assert await nodes[0].look_up("sought") == {nodes[1].me: b"found"}
    assert storage.used <= storage.data.keys()


async def test_when_there_are_too_many_connections_those_that_are_kept_stay(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(process, "CONNECTIONS_LOW", 2)
        patched.setattr(process, "CONNECTIONS_HIGH", 3)
        patched.setattr(process, "CONNECTIONS_GRACE_SECONDS", 0)
        node = await make(relay_for_others=False)  # libp2p's own DHT would keep its peers
    others = [await make(relay_for_others=False) for _ in range(6)]
    for each in others:
        await each.connect(node.addresses()[0])
    await node.keep([others[4].me, others[5].me])
    await node.keep([others[0].me, others[1].me])  # replaces the earlier ones
    async with asyncio.timeout(SECONDS):
        while len(connected := await node.peers()) > 2:
            pass
    assert set(connected) == {others[0].me, others[1].me}
