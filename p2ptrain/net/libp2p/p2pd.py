"""The `Transport` over go-libp2p: p2pd in a process of its own, with hivemind's DHT node on top (dht.py).

A request to p2pd takes a short connection to its control socket: a protobuf each way, preceded by its length. Some
connections stay open. The guardian is a persistent one that carries nothing: p2pd ends when the last persistent one
closes, so p2pd ends with us, and hivemind's DHT may close its own. A subscription is a connection on which p2pd sends
messages (subscription.py). A stream is one that belongs to the two peers after its first message.

When p2pd dies, hangs, or loses its sockets or its relay, it is restarted with the same identity on the same ports, and
its protocols, topics and connections are set up again. Requests wait for it, but not for long.

gossipsub: Vyzovitis et al. 2020 (arXiv:2007.02754).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Self

from p2ptrain.config.node import NetworkConfig
from p2ptrain.identity import Identity, id_bytes_of, peer_id_of
from p2ptrain.net import addresses as multiaddrs
from p2ptrain.net.boundary import Boundary
from p2ptrain.net.frames import BUFFER_BYTES, FrameStream, read_message, write_message
from p2ptrain.net.libp2p.autorelay import RelayLoss, relays_to_use
from p2ptrain.net.libp2p.dht import STORED_KEYS_MAX, Dht, RecordValidator, Storage
from p2ptrain.net.libp2p.dht_records import ANNOUNCE_SECONDS_MAX, VALUE_BYTES_MAX
from p2ptrain.net.libp2p.process import Ports, Process, make_arguments
from p2ptrain.net.libp2p.pubsub import Gossip, TopicQueue
from p2ptrain.net.libp2p.reconnect import Routes
from p2ptrain.net.libp2p.slim_hivemind import parts_of_hivemind
from p2ptrain.net.libp2p.sockets import Sockets
from p2ptrain.net.libp2p.streams import Streams
from p2ptrain.net.libp2p.subscription import Subscription
from p2ptrain.net.libp2p.supervisor import Supervisor
from p2ptrain.net.tasks import BACKOFF_SECONDS, OnCrash, Tasks, report_crash
from p2ptrain.net.transport import MESSAGE_BYTES_MAX, Handler, Hear, IsAdmitted, TransportError, everyone

with parts_of_hivemind():
    from hivemind.dht.routing import DHTID
    from hivemind.proto import p2pd_pb2 as pb
    from hivemind.utils.logging import use_hivemind_log_handler
    from hivemind.utils.multiaddr import Multiaddr
    from hivemind.utils.multiaddr.exceptions import Error as MultiaddrError

use_hivemind_log_handler("nowhere")  # hivemind then logs through our handlers
logging.getLogger("hivemind").setLevel(logging.WARNING)
logging.addLevelName(logging.WARNING, "WARNING")  # hivemind renames the level for the whole process

logger = logging.getLogger("p2ptrain.net")

CONTROL_SECONDS = 15  # for p2pd to answer or to reach a peer
RESPONSE_BYTES_MAX = 2**22  # from p2pd, which we trust: a list of 512 connections takes 50 KB
FOUND_MAX = 256  # announcements returned by one search
SEARCH_SECONDS = 20.0
TAG, TAG_WEIGHT = "p2ptrain", 1_000  # the tags of gossipsub and the DHT weigh less than 100


class _RefusedError(TransportError):
    """p2pd answered with an error."""


class _Control:
    """Requests to p2pd, each on a connection of its own."""

    def __init__(self, sockets: Sockets, boundary: Boundary) -> None:
        self._sockets, self._boundary = sockets, boundary

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            return await asyncio.open_unix_connection(self._sockets.control, limit=BUFFER_BYTES)
        except OSError as error:
            raise TransportError(f"p2pd is gone: {error}") from error

    async def _ask_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: Any) -> Any:
        try:
            async with asyncio.timeout(CONTROL_SECONDS + 1):  # p2pd itself is told to give up a second earlier
                await write_message(writer, request.SerializeToString())
                response = pb.Response.FromString(await read_message(reader, RESPONSE_BYTES_MAX))
        except TimeoutError as error:
            raise TransportError("no answer") from error
        if response.type == pb.Response.ERROR:
            raise _RefusedError(multiaddrs.reason(_text(response.error.msg)))
        return response

    async def _ask(self, kind: int, **content: Any) -> Any:
        reader, writer = await self._open()
        try:
            return await self._ask_on(reader, writer, pb.Request(type=kind, **content))
        finally:
            writer.transport.abort()

    @asynccontextmanager
    async def guardian(self) -> AsyncIterator[None]:
        """Keeps p2pd alive: it ends when its last connection of this kind closes."""
        reader, writer = await self._open()
        try:
            await self._ask_on(reader, writer, pb.Request(type=pb.Request.PERSISTENT_CONN_UPGRADE))
            yield
        finally:
            writer.transport.abort()

    async def identify(self) -> tuple[bytes, list[str]]:
        found = (await self._ask(pb.Request.IDENTIFY)).identify
        return found.id, _texts(found.addrs)

    async def connect(self, peer: bytes, route: str) -> None:
        content = pb.ConnectRequest(peer=id_bytes_of(peer), addrs=[_raw(route)], timeout=CONTROL_SECONDS)
        await self._ask(pb.Request.CONNECT, connect=content)

    async def disconnect(self, peer: bytes) -> None:
        await self._ask(pb.Request.DISCONNECT, disconnect=pb.DisconnectRequest(peer=id_bytes_of(peer)))

    async def tag(self, peer: bytes, weight: int) -> None:
        """Sets a peer's weight, which decides whose connections are pruned first; 0 removes ours."""
        kind = pb.ConnManagerRequest.TAG_PEER if weight else pb.ConnManagerRequest.UNTAG_PEER
        content = pb.ConnManagerRequest(type=kind, peer=id_bytes_of(peer), tag=TAG, weight=weight)
        await self._ask(pb.Request.CONNMANAGER, connManager=content)

    async def peers(self) -> list[tuple[bytes, list[str]]]:
        """Returns one entry per connection."""
        return [(each.id, _texts(each.addrs)) for each in (await self._ask(pb.Request.LIST_PEERS)).peers]

    async def refuse_unconnected(self, peer_id: bytes) -> None:
        """Raises TransportError if a peer is not connected: p2pd would dial it, at any address that it once told."""
        if not any(each.id == peer_id for each in (await self._ask(pb.Request.LIST_PEERS)).peers):
            raise TransportError("it is not connected")

    async def publish(self, topic: str, data: bytes) -> None:
        content = pb.PSRequest(type=pb.PSRequest.PUBLISH, topic=topic, data=data)
        await self._ask(pb.Request.PUBSUB, pubsub=content)

    async def listen(self, queue: TopicQueue) -> None:
        """Fills a topic's queue until p2pd hangs up."""
        loop = asyncio.get_running_loop()
        subscription = subscription_of(queue, self._boundary)
        try:
            await loop.create_unix_connection(lambda: subscription, str(self._sockets.control))
        except OSError as error:
            raise TransportError(f"p2pd is gone: {error}") from error
        try:
            raise TransportError(await subscription.ended)
        finally:
            queue.is_subscribed.clear()
            subscription.abort()

    async def open_stream(self, peer: bytes, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        content = pb.StreamOpenRequest(peer=id_bytes_of(peer), proto=[protocol], timeout=CONTROL_SECONDS)
        reader, writer = await self._open()
        is_open = False
        try:
            await self.refuse_unconnected(content.peer)
            await self._ask_on(reader, writer, pb.Request(type=pb.Request.STREAM_OPEN, streamOpen=content))
            is_open = True
        finally:
            if not is_open:
                writer.transport.abort()
        return reader, writer

    async def bring_streams(self, protocol: str) -> None:
        """Makes p2pd connect to our socket for each stream that a peer opens for this protocol."""
        ours = _raw(f"/unix{self._sockets.streams}")
        content = pb.StreamHandlerRequest(addr=ours, proto=[protocol], balanced=False)
        await self._ask(pb.Request.STREAM_HANDLER, streamHandler=content)


def subscription_of(queue: TopicQueue, boundary: Boundary) -> Subscription:
    """Returns the subscription that fills a topic's queue."""

    def answered(answer: bytes) -> None:
        response = pb.Response.FromString(answer)
        if response.type == pb.Response.ERROR:
            raise TransportError(f"p2pd refused the subscription: {multiaddrs.reason(_text(response.error.msg))}")
        queue.is_subscribed.set()

    def put(publisher: bytes, message: bytes) -> None:
        queue.put(publisher, pb.PSMessage.FromString(message).data)

    content = pb.PSRequest(type=pb.PSRequest.SUBSCRIBE, topic=queue.topic)
    request = pb.Request(type=pb.Request.PUBSUB, pubsub=content).SerializeToString()
    return Subscription(request, answered, queue.hears, put, queue.counters, boundary)


async def _read_opening(reader: asyncio.StreamReader) -> tuple[bytes, str]:
    """Reads what p2pd sends first on an incoming stream: the peer's id and the protocol."""
    info = pb.StreamInfo.FromString(await read_message(reader, RESPONSE_BYTES_MAX))
    return info.peer, _text(info.proto)


def _text(told: str | bytes) -> str:
    """Returns a string of p2pd's, which quotes peers: protobuf gives the bytes of one that is not UTF-8."""
    return told.decode(errors="replace") if isinstance(told, bytes) else told


def _raw(route: str) -> bytes:
    try:
        return Multiaddr(route).to_bytes()  # type: ignore[no-any-return]  # hivemind has no types
    except MultiaddrError as error:
        raise TransportError(f"not an address: {error}") from error


def _texts(raw: Iterable[bytes]) -> list[str]:
    """Returns addresses as text, without the kinds that hivemind does not know."""
    found = []
    for each in raw:
        try:
            found.append(str(Multiaddr(each)))
        except (MultiaddrError, ValueError, LookupError, TypeError, OverflowError) as error:
            logger.debug("an address of an unknown kind: %s", error)
    return found


class P2pd:
    """One node's access to the network, through a p2pd of its own."""

    def __init__(
        self, identity: Identity, identity_file: Path, network: NetworkConfig, directory: Path, on_crash: OnCrash
    ) -> None:
        self.me = identity.key
        self._identity_file, self._network = identity_file, network
        self._ports = Ports(network.listen, gives_way=not network.has_chosen_port)
        self._counters: Counter[str] = Counter({"p2pd restarts": 0, "gossip dropped": 0})
        self._validator, self._storage = RecordValidator(identity, self._counters), Storage(STORED_KEYS_MAX)
        self._tasks, self._session_tasks = Tasks(on_crash), Tasks(on_crash)  # the second set ends with this p2pd
        self.boundary = Boundary(self.range_of, self._is_admitted)
        self._streams = Streams(self._counters, self._tasks, _read_opening, self.boundary)
        self._sockets = Sockets(directory, self._streams.accept)
        self._control = _Control(self._sockets, self.boundary)
        self._registered: set[str] = set()  # protocols that this p2pd forwards to us
        self._registering = asyncio.Lock()
        self._gossip = Gossip(self.me, self._control, self._counters, self.boundary)
        self._routes: list[str] = []  # routes to us
        relays = (network.trusted_relays or network.bootstrap) if network.nat and network.relay else ()
        self._relay_loss = RelayLoss(relays)
        self._kept: set[bytes] = set()
        self._supervisor = Supervisor(self._launch, self._counters, self.boundary)
        self._peers = Routes(self.me, self._control, self._meet, self._supervisor.up, self._tasks, self.boundary)
        self._closing = AsyncExitStack()
        self._dht: Dht | None = None

    @classmethod
    async def start(
        cls, identity_file: Path, network: NetworkConfig, directory: Path, *, on_crash: OnCrash = report_crash
    ) -> Self:
        """Starts p2pd and returns when others can connect. ConfigError if it cannot listen on an address.

        The sockets are in `directory`, which must be ours alone: anyone who can open them can act as this node.
        """
        self = cls(Identity.load(identity_file), identity_file, network, directory, on_crash)
        self._closing.callback(self._ports.close)
        self._closing.callback(self._sockets.close)
        self._closing.push_async_callback(self._supervisor.close)
        is_up = False
        try:
            await self._supervisor.start()
            self._tasks.spawn(self._supervisor.run(self._peers.come_back))
            self._tasks.spawn(self._supervisor.watch(self._refresh, self._why_end))
            is_up = True
        finally:
            if not is_up:
                await self.close()
        return self

    # -------------------------------------------------------------------------------------------------
    # Life cycle of p2pd

    async def _launch(self, stack: AsyncExitStack) -> Process:
        """Starts p2pd and sets up its protocols, its topics and the DHT."""
        usable = await relays_to_use(self._relay_loss.first())
        self._relay_loss.p2pd_started()
        await self._sockets.open()
        control = self._sockets.control
        self._ports.take_again()  # right before p2pd does
        process = await Process.start(
            make_arguments(control, self._identity_file, self._ports.listen, self._network, usable)
        )
        stack.push_async_callback(process.stop)
        stack.push_async_callback(self._leave)
        await stack.enter_async_context(self._control.guardian())
        if (found := await self._identify()) != id_bytes_of(self.me):
            raise TransportError(f"p2pd reports the id {found.hex()}, not {peer_id_of(self.me)}")
        self._dht = await self._start_dht()
        while missing := self._streams.handlers.keys() - self._registered:  # more may be added meanwhile
            await self._register(missing.pop())
        self._gossip.listen(self._session_tasks)
        self._session_tasks.spawn(self._keep_dht(self._dht))
        # Pushed last so that p2pd stops first, with its subscriptions open: for each that ends earlier it leaves the
        # topic's mesh, and peers keep it out for a minute, in which messages arrive late, with the 1 s heartbeats.
        stack.push_async_callback(process.stop)
        return process

    async def _leave(self) -> None:
        """Closes everything that depends on this p2pd."""
        self._registered.clear()
        self._streams.abort()
        await self._session_tasks.cancel()
        dht, self._dht = self._dht, None
        if dht:
            await dht.stop()

    async def _start_dht(self) -> Dht:
        return await Dht.start(
            self._sockets.control,
            self.me,
            self._validator,
            self._storage,
            self._counters,
            self.boundary,
            self._control.refuse_unconnected,
        )

    def _is_admitted(self, peer: bytes) -> bool:
        return self._streams.is_admitted(peer)

    async def _keep_dht(self, dht: Dht) -> None:
        """Restarts the DHT when it loses its connection to a living p2pd."""
        while True:
            await asyncio.wait({dht.reading})
            await asyncio.sleep(BACKOFF_SECONDS)  # if p2pd itself has ended, this task is cancelled here
            logger.warning("the DHT lost its connection to p2pd and is being restarted")
            with self.boundary.contain("the start of the DHT"):
                try:
                    await dht.stop()
                    self._dht = dht = await self._start_dht()
                    await self._peers.meet_all()
                except TransportError as error:
                    logger.warning("%s", error)

    async def _refresh(self) -> None:
        """Updates our own addresses and the routes to connected peers."""
        await self._identify()
        await self._peers.connected()
        await self._relay_loss.look(self._routes)

    def _why_end(self) -> str:
        """Returns why p2pd should be restarted, or nothing."""
        if not self._sockets.are_there:
            return "its sockets are gone"
        if self._relay_loss.is_mendable:
            return "no relay for a minute, and one answers: a new p2pd gets a slot sooner"
        return ""

    async def _meet(self, peer: bytes) -> None:
        if self._dht:
            await self._dht.meet(peer)

    async def _identify(self) -> bytes:
        found, self._routes = await self._control.identify()
        return found

    async def close(self) -> None:
        try:
            await self._tasks.cancel()
        finally:
            await self._closing.aclose()

    def counters(self) -> dict[str, int]:
        return dict(self._counters)

    # -------------------------------------------------------------------------------------------------
    # Peers

    def addresses(self) -> list[str]:
        return [multiaddrs.join(route, self.me) for route in multiaddrs.worth_telling(self._routes)]

    async def connect(self, address: str) -> bytes:
        with self.boundary.guard("a connection to an address", multiaddrs.split(address)[0]):
            return await self._peers.connect(address)

    async def disconnect(self, peer: bytes) -> None:
        await self._peers.disconnect(peer)

    async def peers(self) -> dict[bytes, list[str]]:
        with self.boundary.guard("a list of the connected peers"):
            return await self._peers.connected()

    def range_of(self, peer: bytes) -> str:
        return self._peers.range_of(peer)

    def ends_of(self, peer: bytes) -> frozenset[str]:
        return self._peers.ends_of(peer)

    async def keep(self, peers: Collection[bytes]) -> None:
        await self._supervisor.up()
        for peer in self._kept - set(peers):
            await self._control.tag(peer, 0)
            self._kept.discard(peer)
        for peer in peers:  # also those tagged before: p2pd forgets a tag with the connection
            self._kept.add(peer)
            await self._control.tag(peer, TAG_WEIGHT)

    # -------------------------------------------------------------------------------------------------
    # Traffic

    async def subscribe(self, topic: str, hear: Hear, is_heard: IsAdmitted = everyone) -> None:
        await self._gossip.subscribe(topic, hear, is_heard, self._tasks, self._session)

    def leave(self, topic: str) -> None:
        self._gossip.leave(topic)

    def come_back(self, topic: str) -> None:
        self._gossip.come_back(topic, self._session)

    @property
    def _session(self) -> Tasks | None:
        """The tasks that end with this p2pd; None if it is not up."""
        return self._session_tasks if self._supervisor.is_up else None

    async def publish(self, topic: str, data: bytes) -> None:
        assert len(data) <= MESSAGE_BYTES_MAX, f"{len(data)} bytes: libp2p would drop them silently"
        await self._supervisor.up()
        with self.boundary.guard("a publication"):
            await self._gossip.publish(topic, data)

    async def serve(self, protocol: str, handler: Handler) -> None:
        assert protocol not in self._streams.handlers, f"{protocol} already has a handler"
        self._streams.handlers[protocol] = handler
        if self._supervisor.is_up:  # otherwise registered when p2pd is up
            await self._register(protocol)

    def prefer(self, is_admitted: IsAdmitted) -> None:
        self._streams.prefer(is_admitted)

    async def _register(self, protocol: str) -> None:
        async with self._registering:
            if protocol not in self._registered:
                await self._control.bring_streams(protocol)
                self._registered.add(protocol)

    async def open(self, peer: bytes, protocol: str) -> FrameStream:
        await self._supervisor.up()
        try:
            reader, writer = await self._control.open_stream(peer, protocol)
        except TransportError as error:
            raise TransportError(f"cannot open a {protocol} stream to {peer_id_of(peer)}: {error}") from error
        return self._streams.add(peer, protocol, reader, writer)

    # -------------------------------------------------------------------------------------------------
    # DHT hints

    async def announce(self, key: str, value: bytes, seconds: float) -> None:
        assert len(value) <= VALUE_BYTES_MAX and 0 < seconds <= ANNOUNCE_SECONDS_MAX
        node = await self._node_for(key)
        try:
            async with asyncio.timeout(SEARCH_SECONDS):
                is_stored = await node.store(key, value, time.time() + seconds, subkey=self.me)
        except TimeoutError as error:
            raise TransportError(f"{key} was not announced in {SEARCH_SECONDS:.0f} s") from error
        if not is_stored:
            raise TransportError(f"nobody accepted the announcement of {key}: perhaps an earlier one expires later")

    async def look_up(self, key: str) -> dict[bytes, bytes]:
        node = await self._node_for(key)
        try:
            async with asyncio.timeout(SEARCH_SECONDS):
                found = await node.get(key, latest=True)
        except TimeoutError as error:
            raise TransportError(f"{key} was not looked up in {SEARCH_SECONDS:.0f} s") from error
        now, entries = time.time(), found.value.items() if found else ()
        records = [(peer, entry.value) for peer, entry in entries if entry.expiration_time > now]
        return dict(random.SystemRandom().sample(records, min(len(records), FOUND_MAX)))

    async def _node_for(self, key: str) -> Any:
        self._storage.used.add(DHTID.generate(source=key))
        await self._supervisor.up()
        await self._peers.met()
        if self._dht is None:
            raise TransportError("p2pd has just ended")
        return self._dht.node
