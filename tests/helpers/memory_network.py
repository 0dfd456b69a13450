"""A `Transport` within one process, for tests: nothing but asyncio and seeded randomness.

`Network` holds the nodes, their connections and the faults: cuts, crashes, lost gossip and latency. Gossip floods over
the subscribers of a topic; streams are pairs of bounded queues whose senders wait for their readers; a DHT record is
stored with every node that could be reached when it was announced.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from random import Random

from p2ptrain.errors import RemoteProtocolError
from p2ptrain.identity import PeerIdError, key_of, peer_id_of
from p2ptrain.net.addresses import address_range
from p2ptrain.net.boundary import Boundary
from p2ptrain.net.transport import (
    FRAME_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    Handler,
    Hear,
    IsAdmitted,
    Stream,
    TransportError,
    everyone,
)

WINDOW_BYTES = 2**22  # in flight in a stream: about what the buffers of sockets and p2pd hold together
WINDOW_FRAMES = 256
WORD_BYTES = 1_000  # frames up to this size take no time on a slow line
TICK_SECONDS = 0.1  # of a slow line


class Network:
    """All nodes of a test, their connections and the faults between them."""

    def __init__(self, seed: int = 0, *, loss: float = 0.0, latency_seconds: float = 0.0) -> None:
        self.rng = Random(seed)
        self.loss = loss  # probability that one node misses a gossiped message
        self.latency_seconds = latency_seconds  # at most, per message or frame; a few milliseconds in a test
        self.sent: Counter[tuple[bytes, bytes]] = Counter()  # bytes in streams, by sender and receiver
        self.nodes: dict[bytes, MemoryTransport] = {}
        self.links: dict[frozenset[bytes], int] = {}  # with its number, which no later one has
        self._made = 0
        self._cuts: set[frozenset[bytes]] = set()
        self.lines: dict[
            bytes, SlowLine
        ] = {}  # of nodes with a slow line, which carries all that they send and receive
        self.hosts: dict[bytes, str] = {}  # hosts of nodes that are not on loopback
        self._ports: dict[bytes, int] = {}

    def transport(self, key: bytes) -> MemoryTransport:
        """Makes a node's transport, at the same address each time. A node that is still alive must be killed first."""
        assert key not in self.nodes, "a key has one node"
        self._ports.setdefault(key, len(self._ports) + 1)
        node = self.nodes[key] = MemoryTransport(self, key)
        return node

    def address(self, key: bytes) -> str:
        host, port = self.hosts.get(key, "127.0.0.1"), self._ports.get(key, 0)  # port 0: it never existed
        return f"/ip4/{host}/tcp/{port}/p2p/{peer_id_of(key)}"

    def cut(self, one: bytes, other: bytes) -> None:
        """Separates two nodes: their connection is lost, and they cannot reconnect before `heal`."""
        self._cuts.add(frozenset((one, other)))
        self.unlink(one, other, "the network is cut")

    def heal(self) -> None:
        """Ends all cuts: nodes may connect again, but are not connected for them."""
        self._cuts.clear()

    def kill(self, key: bytes) -> None:
        """Crashes a node: its connections and streams break, and whatever it still does has no effect."""
        node = self.nodes.pop(key)
        for peer in self.linked(key):
            self.unlink(key, peer, "the peer is gone")
        node.die()

    def link(self, one: bytes, other: bytes) -> None:
        pair = frozenset((one, other))
        if other not in self.nodes:
            raise TransportError("nobody is there")
        if pair in self._cuts:
            raise TransportError("the network is cut")
        if pair not in self.links:
            self._made += 1
            self.links[pair] = self._made

    def unlink(self, one: bytes, other: bytes, why: str) -> None:
        self.links.pop(frozenset((one, other)), None)
        for node, peer in ((one, other), (other, one)):
            if node in self.nodes:
                self.nodes[node].break_streams(peer, why)

    def linked(self, key: bytes) -> list[bytes]:
        """Returns the connected nodes, in a fixed order so that runs repeat."""
        return sorted(other for pair in self.links if key in pair for other in pair - {key})

    def reached(self, key: bytes, topic: str | None = None) -> list[bytes]:
        """Returns all nodes with a path from this one, over the subscribers of a topic or over any nodes."""
        found, edge = {key}, deque([key])
        while edge:
            for peer in self.linked(edge.popleft()):
                if peer not in found and (topic is None or self.nodes[peer].is_in(topic)):
                    found.add(peer)
                    edge.append(peer)
        return sorted(found - {key})

    def latency(self) -> float:
        return self.rng.random() * self.latency_seconds if self.latency_seconds else 0.0


class MemoryTransport:
    """The transport of one node of a `Network`."""

    def __init__(self, network: Network, key: bytes) -> None:
        self.me = key
        self.boundary = Boundary(self.range_of)
        self.heard: dict[str, Hear] = {}
        self._is_heard: dict[str, IsAdmitted] = {}
        self.left: set[str] = set()
        self.kept: frozenset[bytes] = frozenset()  # peers that `keep` was last called with
        self.records: dict[str, dict[bytes, tuple[bytes, float]]] = {}  # by key and author: value and expiry
        self.network = network
        self.handlers: dict[str, Handler] = {}
        self.streams: set[MemoryStream] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.counted: Counter[str] = Counter()
        self._is_dead = False

    def addresses(self) -> list[str]:
        return [self.network.address(self.me)]

    async def connect(self, address: str) -> bytes:
        self._alive()
        place, _, name = address.rpartition("/p2p/")
        try:
            peer = key_of(name)
            if not place or self.network.address(peer) != address:
                raise TransportError("nobody is there")
            self.network.link(self.me, peer)
        except (TransportError, PeerIdError) as error:
            raise TransportError(f"{address}: {error}") from error
        return peer

    async def disconnect(self, peer: bytes) -> None:
        self.network.unlink(self.me, peer, "disconnected")

    async def peers(self) -> dict[bytes, list[str]]:
        return {peer: [self.network.address(peer)] for peer in self.network.linked(self.me)}

    def range_of(self, peer: bytes) -> str:
        return address_range(self.network.address(peer))

    def ends_of(self, peer: bytes) -> frozenset[str]:
        pair = frozenset((self.me, peer))
        return frozenset(f"link {number}" for each, number in self.network.links.items() if each == pair)

    async def keep(self, peers: Collection[bytes]) -> None:
        self.kept = frozenset(peers)

    async def subscribe(self, topic: str, hear: Hear, is_heard: IsAdmitted = everyone) -> None:
        self._alive()
        assert topic not in self.heard, "a topic has one listener"
        self.heard[topic] = hear
        self._is_heard[topic] = is_heard

    def leave(self, topic: str) -> None:
        assert topic in self.heard and topic not in self.left
        self.left.add(topic)

    def come_back(self, topic: str) -> None:
        self.left.remove(topic)

    async def publish(self, topic: str, data: bytes) -> None:
        assert len(data) <= MESSAGE_BYTES_MAX, "libp2p would drop it silently"
        self._alive()
        self.counted.update({"bytes sent": len(data), "sent gossip": len(data), "gossip sent": 1})
        for peer in self.network.reached(self.me, topic):
            if self.network.loss and self.network.rng.random() < self.network.loss:
                self.counted["gossip lost"] += 1
                continue
            hear = partial(self.network.nodes[peer].hear, topic, self.me, data)
            asyncio.get_running_loop().call_later(self.network.latency(), hear)

    async def serve(self, protocol: str, handler: Handler) -> None:
        self._alive()
        self.handlers[protocol] = handler

    def end_run(self) -> None:
        for each in (self.handlers, self.heard, self._is_heard, self.left):
            each.clear()

    def prefer(self, is_admitted: IsAdmitted) -> None:
        """There are slots for everyone."""

    async def open(self, peer: bytes, protocol: str) -> Stream:
        self._alive()
        if frozenset((self.me, peer)) not in self.network.links:
            raise TransportError(f"not connected to {peer_id_of(peer)}")
        await _pass(self.network.latency())
        remote = self.network.nodes.get(peer)
        if remote is None or frozenset((self.me, peer)) not in self.network.links:
            raise TransportError(f"the connection to {peer_id_of(peer)} was lost")
        if protocol not in remote.handlers:
            raise TransportError(f"{peer_id_of(peer)} does not speak {protocol}")
        there, back = Pipe(self.network.latency), Pipe(self.network.latency)
        stream = self._stream(peer, protocol, back, there)
        remote.answer(protocol, self.me, there, back)
        return stream

    async def announce(self, key: str, value: bytes, seconds: float) -> None:
        self._alive()
        until = asyncio.get_running_loop().time() + seconds
        for node in [self.me, *self.network.reached(self.me)]:
            self.network.nodes[node].records.setdefault(key, {})[self.me] = (value, until)

    async def look_up(self, key: str) -> dict[bytes, bytes]:
        self._alive()
        now = asyncio.get_running_loop().time()
        newest: dict[bytes, tuple[bytes, float]] = {}
        for node in [self.me, *self.network.reached(self.me)]:
            for author, (value, until) in self.network.nodes[node].records.get(key, {}).items():
                if until > now and (author not in newest or until > newest[author][1]):
                    newest[author] = (value, until)
        return {author: value for author, (value, _) in newest.items()}

    def counters(self) -> dict[str, int]:
        return dict(self.counted)

    async def close(self) -> None:
        """Leaves the network and waits for the handlers. Raises their errors that are not network failures."""
        tasks = list(self.tasks)
        if self.network.nodes.get(self.me) is self:
            self.network.kill(self.me)
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(error, Exception):
                raise error

    # ---------------------------------------------------------------------------------------------------
    # Called by the network

    def is_in(self, topic: str) -> bool:
        return topic in self.heard and topic not in self.left

    def hear(self, topic: str, author: bytes, data: bytes) -> None:
        if not self._is_dead:
            self.counted.update({"bytes received": len(data), "received gossip": len(data), "gossip received": 1})
            if self.is_in(topic) and self._is_heard.get(topic, everyone)(author):
                self.heard[topic](author, data)

    def break_streams(self, peer: bytes, why: str) -> None:
        for stream in [stream for stream in self.streams if stream.peer == peer]:
            stream.end(why)

    def die(self) -> None:
        self._is_dead = True
        for stream in list(self.streams):
            stream.end("the node has stopped")
        for task in self.tasks:
            task.cancel()

    def _alive(self) -> None:
        if self._is_dead:
            raise TransportError("the node has stopped")

    def _count(self, peer: bytes, protocol: str, size: int) -> None:
        self.network.sent[self.me, peer] += size
        self.counted.update({"bytes sent": size, f"sent {protocol}": size})
        if peer in self.network.nodes:
            self.network.nodes[peer].counted.update({"bytes received": size, f"received {protocol}": size})

    def _stream(self, peer: bytes, protocol: str, incoming: Pipe, outgoing: Pipe) -> MemoryStream:
        self.streams = {stream for stream in self.streams if not stream.is_over()}
        lines = [self.network.lines[node] for node in (self.me, peer) if node in self.network.lines]
        stream = MemoryStream(peer, incoming, outgoing, partial(self._count, peer, protocol), lines)
        self.streams.add(stream)
        return stream

    def answer(self, protocol: str, peer: bytes, incoming: Pipe, outgoing: Pipe) -> None:
        stream = self._stream(peer, protocol, incoming, outgoing)
        task = asyncio.get_running_loop().create_task(self._handle(self.handlers[protocol], stream))
        self.tasks.add(task)
        task.add_done_callback(self._finished)

    async def _handle(self, handler: Handler, stream: MemoryStream) -> None:
        try:
            await handler(stream)
        except (TransportError, RemoteProtocolError):
            stream.abort()
        finally:
            stream.leave()

    def _finished(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is None:  # failed tasks stay for `close`, which raises their errors
            self.tasks.discard(task)


class SlowLine:
    """A slow line, which the frames on it share; some get more of it than others."""

    def __init__(self, rate: float) -> None:
        self.rate, self.carried = rate, 0.0  # bytes a second; bytes
        self._rng, self._weights = Random(1), list[float]()

    async def carry(self, pipe: Pipe, size: int) -> None:
        left, weight = float(size), self._rng.uniform(0.6, 1.4)
        self._weights.append(weight)
        try:
            while left > 0:
                await _pass(TICK_SECONDS)
                if pipe.broken:
                    raise TransportError(pipe.broken)
                part = self.rate * TICK_SECONDS * weight / sum(self._weights)
                self.carried += min(part, left)
                left -= part
                pipe.moved += math.ceil(part)
        finally:
            self._weights.remove(weight)


class Pipe:
    """One direction of a stream."""

    moved = 0  # bytes

    def __init__(self, latency: Callable[[], float]) -> None:
        self.frames: deque[tuple[bytes, float]] = deque()  # with their time of arrival
        self.size = 0
        self.is_ended = False  # the writer has closed it
        self.broken = ""  # the reason
        self._latency = latency
        self._due = 0.0
        self.waiting: list[asyncio.Future[None]] = []

    def is_full(self, size: int) -> bool:
        return bool(self.frames) and (self.size + size > WINDOW_BYTES or len(self.frames) >= WINDOW_FRAMES)

    def put(self, frame: bytes) -> None:
        self._due = max(self._due, asyncio.get_running_loop().time() + self._latency())
        self.frames.append((frame, self._due))
        self.size += len(frame)
        self.moved += len(frame)
        self.changed()

    def take(self) -> bytes:
        frame, _ = self.frames.popleft()
        self.size -= len(frame)
        self.changed()
        return frame

    def destroy(self, why: str) -> None:
        self.broken = self.broken or why
        self.frames.clear()
        self.size = 0
        self.changed()

    def changed(self) -> None:
        for waiting in self.waiting:
            if not waiting.done():
                waiting.set_result(None)

    async def change(self) -> None:
        waiting = asyncio.get_running_loop().create_future()
        self.waiting.append(waiting)
        try:
            await waiting
        finally:
            self.waiting.remove(waiting)


class MemoryStream:
    """One end of a stream."""

    def __init__(
        self, peer: bytes, incoming: Pipe, outgoing: Pipe, count: Callable[[int], None], lines: Sequence[SlowLine] = ()
    ) -> None:
        self.peer, self._lines = peer, lines
        self.incoming, self.outgoing = incoming, outgoing
        self._count = count

    def is_over(self) -> bool:
        """True if both directions have ended, so that nothing can break any more."""
        return all(pipe.broken or (pipe.is_ended and not pipe.frames) for pipe in (self.incoming, self.outgoing))

    async def send(self, frame: bytes | memoryview) -> None:
        assert len(frame) <= FRAME_BYTES_MAX, "anything longer has to be split into frames"
        pipe = self.outgoing
        while not pipe.broken and pipe.is_full(len(frame)):
            await pipe.change()
        if pipe.broken or pipe.is_ended:
            raise TransportError(pipe.broken or "closed from here")
        for line in self._lines if len(frame) > WORD_BYTES else ():
            await line.carry(pipe, len(frame))
        pipe.put(bytes(frame))
        self._count(len(frame))

    @property
    def moved(self) -> int:
        return self.incoming.moved + self.outgoing.moved

    @property
    def is_gone(self) -> bool:
        return bool(self.incoming.broken)

    async def coming(self) -> int:
        pipe = self.incoming
        while True:
            if pipe.broken:
                raise TransportError(pipe.broken)
            if not pipe.frames:
                if pipe.is_ended:
                    raise TransportError("closed by the peer")
                await pipe.change()
            elif (wait := pipe.frames[0][1] - asyncio.get_running_loop().time()) > 0:
                await _pass(wait)
            else:
                return len(pipe.frames[0][0])

    async def skip(self) -> None:
        await self.coming()
        self.incoming.take()

    async def receive(self, bytes_max: int) -> bytes:
        await self.coming()
        frame = self.incoming.take()
        if len(frame) > bytes_max:
            self.abort()
            raise RemoteProtocolError(f"a frame of {len(frame)} bytes; the limit is {bytes_max}")
        return frame

    async def close(self) -> None:
        self._finish()

    def abort(self) -> None:
        self.end("aborted")

    def end(self, why: str) -> None:
        self.incoming.destroy(why)
        self.outgoing.destroy(why)

    def leave(self) -> None:
        """Closes this end after the handler has returned; whatever it wrote still arrives."""
        self._finish()
        self.incoming.destroy("closed by the peer")

    def _finish(self) -> None:
        self.outgoing.is_ended = True
        self.outgoing.changed()


async def _pass(seconds: float) -> None:
    """Lets the latency of a link pass."""
    loop = asyncio.get_running_loop()
    passed = loop.create_future()
    handle = loop.call_later(seconds, lambda: passed.done() or passed.set_result(None))
    try:
        await passed
    finally:
        handle.cancel()
