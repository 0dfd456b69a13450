"""The `Transport` by go-libp2p: p2pd in a process of its own, with hivemind's DHT node on top of it (dht.py).

A request to p2pd takes a short connection to its control socket: a protobuf there and one back, each behind its
length. Some connections stay. The guardian is a persistent one with nothing on it: p2pd ends when the last of these
closes, so it ends with us, and hivemind's DHT may close its own. A subscription is a connection on which p2pd sends
messages. A stream is one that, past its first message, belongs to the two peers.

When p2pd dies, hangs, or loses its sockets or its relay, it is started again with the same identity on the same ports,
and is told again what it has to know: whose streams to pass on, which topics to hear, whom to connect to. Whoever asks
meanwhile waits, but not for long.

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

from p2ptrain.identity import Identity, id_bytes_of, peer_id_of
from p2ptrain.net import addresses as multiaddrs
from p2ptrain.net.autorelay import RelayLoss, relays_to_use
from p2ptrain.net.dht import STORED_KEYS_MAX, Dht, RecordValidator, Storage
from p2ptrain.net.frames import BUFFER_BYTES, FrameStream, read_message, write_message
from p2ptrain.net.peers import Peers
from p2ptrain.net.process import Process, make_arguments, with_ports
from p2ptrain.net.pubsub import Gossip, Mailbox
from p2ptrain.net.records import ANNOUNCE_SECONDS_MAX, VALUE_BYTES_MAX
from p2ptrain.net.sockets import Sockets
from p2ptrain.net.spare import parts_of_hivemind
from p2ptrain.net.streams import Streams
from p2ptrain.net.supervisor import Supervisor
from p2ptrain.net.tasks import BACKOFF_SECONDS, OnCrash, Tasks, report_crash
from p2ptrain.net.transport import MESSAGE_BYTES_MAX, Handler, Hear, TransportError
from p2ptrain.node_config import NetworkConfig

with parts_of_hivemind():
    from hivemind.dht.routing import DHTID
    from hivemind.proto import p2pd_pb2 as pb
    from hivemind.utils.logging import use_hivemind_log_handler
    from hivemind.utils.multiaddr import Multiaddr
    from hivemind.utils.multiaddr.exceptions import Error as MultiaddrError

use_hivemind_log_handler("nowhere")  # its lines go where ours go, if they matter
logging.getLogger("hivemind").setLevel(logging.WARNING)
logging.addLevelName(logging.WARNING, "WARNING")  # which it has renamed for the whole process

logger = logging.getLogger("p2ptrain.net")

CONTROL_SECONDS = 15  # for p2pd to answer, and to reach a peer
RESPONSE_BYTES_MAX = 2**22  # of p2pd's, which we trust: a list of 512 connections takes 50 KB
FOUND_MAX = 256  # announcements that one search returns
SEARCH_SECONDS = 20.0
TAG, TAG_WEIGHT = "p2ptrain", 1_000  # beside gossipsub's and the DHT's own, which are below 100


class _RefusedError(TransportError):
    """p2pd has answered that it could not do it."""


class _Control:
    """What p2pd is asked for, each on a connection of its own."""

    def __init__(self, sockets: Sockets) -> None:
        self._sockets = sockets

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            return await asyncio.open_unix_connection(self._sockets.control, limit=BUFFER_BYTES)
        except OSError as error:
            raise TransportError(f"p2pd is gone: {error}") from error

    async def _ask_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: Any) -> Any:
        try:
            async with asyncio.timeout(CONTROL_SECONDS + 1):  # it is told to give up before
                await write_message(writer, request.SerializeToString())
                response = pb.Response.FromString(await read_message(reader, RESPONSE_BYTES_MAX))
        except TimeoutError as error:
            raise TransportError("no answer") from error
        if response.type == pb.Response.ERROR:
            raise _RefusedError(multiaddrs.reason(response.error.msg))
        return response

    async def _ask(self, kind: int, **content: Any) -> Any:
        reader, writer = await self._open()
        try:
            return await self._ask_on(reader, writer, pb.Request(type=kind, **content))
        finally:
            writer.transport.abort()

    @asynccontextmanager
    async def guardian(self) -> AsyncIterator[None]:
        """p2pd lives as long as this connection, or another of the kind."""
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
        """How much its connection is worth when there are too many; 0: as much as any."""
        kind = pb.ConnManagerRequest.TAG_PEER if weight else pb.ConnManagerRequest.UNTAG_PEER
        content = pb.ConnManagerRequest(type=kind, peer=id_bytes_of(peer), tag=TAG, weight=weight)
        await self._ask(pb.Request.CONNMANAGER, connManager=content)

    async def peers(self) -> list[tuple[bytes, list[str]]]:
        """One entry for each connection."""
        return [(each.id, _texts(each.addrs)) for each in (await self._ask(pb.Request.LIST_PEERS)).peers]

    async def publish(self, topic: str, data: bytes) -> None:
        content = pb.PSRequest(type=pb.PSRequest.PUBLISH, topic=topic, data=data)
        await self._ask(pb.Request.PUBSUB, pubsub=content)

    async def listen(self, mailbox: Mailbox) -> None:
        """Read and do nothing else, until p2pd hangs up."""
        content = pb.PSRequest(type=pb.PSRequest.SUBSCRIBE, topic=mailbox.topic)
        reader, writer = await self._open()
        try:
            await self._ask_on(reader, writer, pb.Request(type=pb.Request.PUBSUB, pubsub=content))
            mailbox.is_subscribed.set()
            while True:
                message = pb.PSMessage.FromString(await read_message(reader, RESPONSE_BYTES_MAX))
                mailbox.put(getattr(message, "from"), message.data)
        finally:
            mailbox.is_subscribed.clear()
            writer.transport.abort()

    async def open_stream(self, peer: bytes, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        content = pb.StreamOpenRequest(peer=id_bytes_of(peer), proto=[protocol], timeout=CONTROL_SECONDS)
        reader, writer = await self._open()
        is_open = False
        try:
            await self._ask_on(reader, writer, pb.Request(type=pb.Request.STREAM_OPEN, streamOpen=content))
            is_open = True
        finally:
            if not is_open:
                writer.transport.abort()
        return reader, writer

    async def bring_streams(self, protocol: str) -> None:
        """Have p2pd connect to our socket for each stream that a peer opens under this name."""
        ours = _raw(f"/unix{self._sockets.streams}")
        content = pb.StreamHandlerRequest(addr=ours, proto=[protocol], balanced=False)
        await self._ask(pb.Request.STREAM_HANDLER, streamHandler=content)


async def _read_opening(reader: asyncio.StreamReader) -> tuple[bytes, str]:
    """What p2pd says first when it brings a stream: whose it is and of which protocol."""
    info = pb.StreamInfo.FromString(await read_message(reader, RESPONSE_BYTES_MAX))
    return info.peer, info.proto


def _raw(route: str) -> bytes:
    try:
        return Multiaddr(route).to_bytes()  # type: ignore[no-any-return]  # hivemind has no types
    except MultiaddrError as error:
        raise TransportError(f"not an address: {error}") from error


def _texts(raw: Iterable[bytes]) -> list[str]:
    """Addresses as text, without those of kinds that hivemind does not know."""
    found = []
    for each in raw:
        try:
            found.append(str(Multiaddr(each)))
        except MultiaddrError as error:
            logger.debug("an address of an unknown kind: %s", error)
    return found


class P2pd:
    """One node's access to the network, through a p2pd of its own."""

    def __init__(
        self, identity: Identity, identity_file: Path, network: NetworkConfig, directory: Path, on_crash: OnCrash
    ) -> None:
        self.me = identity.key
        self._identity_file, self._network = identity_file, network
        self._listen = with_ports(network.listen, gives_way=not network.has_chosen_port)
        self._counters: Counter[str] = Counter({"p2pd restarts": 0, "gossip dropped": 0})
        self._validator, self._storage = RecordValidator(identity, self._counters), Storage(STORED_KEYS_MAX)
        self._tasks, self._session_tasks = Tasks(on_crash), Tasks(on_crash)  # the latter are of this p2pd
        self._streams = Streams(self._counters, self._tasks, _read_opening)
        self._sockets = Sockets(directory, self._streams.accept)
        self._control = _Control(self._sockets)
        self._registered: set[str] = set()  # protocols whose streams this p2pd brings
        self._registering = asyncio.Lock()
        self._gossip = Gossip(self.me, self._control, self._counters)
        self._routes: list[str] = []  # to us
        relays = (network.trusted_relays or network.bootstrap) if network.nat and network.relay else ()
        self._relay_loss = RelayLoss(relays)
        self._kept: set[bytes] = set()
        self._supervisor = Supervisor(self._launch, self._counters)
        self._peers = Peers(self.me, self._control, self._meet, self._supervisor.up, self._tasks)
        self._closing = AsyncExitStack()
        self._dht: Dht | None = None

    @classmethod
    async def start(
        cls,
        identity_file: Path,
        network: NetworkConfig,
        directory: Path,
        *,
        on_crash: OnCrash = report_crash,
    ) -> Self:
        """Returns when others can connect. ConfigError if an address cannot be listened on.

        Sockets lie in `directory`, which must be ours alone: whoever can open them speaks as this node.
        """
        self = cls(Identity.load(identity_file), identity_file, network, directory, on_crash)
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
    # p2pd's life

    async def _launch(self, stack: AsyncExitStack) -> Process:
        """Start p2pd and tell it all that it has to know."""
        usable = await relays_to_use(self._relay_loss.first())
        self._relay_loss.p2pd_started()
        await self._sockets.open()
        control = self._sockets.control
        with_ports(self._listen)  # at the last moment: p2pd would share them with another
        process = await Process.start(make_arguments(control, self._identity_file, self._listen, self._network, usable))
        stack.push_async_callback(process.stop)
        stack.push_async_callback(self._leave)
        await stack.enter_async_context(self._control.guardian())
        if (found := await self._identify()) != id_bytes_of(self.me):
            raise TransportError(f"p2pd calls itself {found.hex()} with the key of {peer_id_of(self.me)}")
        self._dht = await Dht.start(control, self._validator, self._storage)
        while missing := self._streams.handlers.keys() - self._registered:  # more may come meanwhile
            await self._register(missing.pop())
        self._gossip.listen(self._session_tasks)
        self._session_tasks.spawn(self._keep_dht(self._dht))
        # First of all, with all subscriptions open: it says goodbye to the mesh of each that ends before it does, and
        # who said that is not let in again for a minute; meanwhile messages come a second late, with the heartbeats.
        stack.push_async_callback(process.stop)
        return process

    async def _leave(self) -> None:
        """Let go of everything that needs this p2pd."""
        self._registered.clear()
        self._streams.abort()
        await self._session_tasks.cancel()
        dht, self._dht = self._dht, None
        if dht:
            await dht.stop()

    async def _keep_dht(self, dht: Dht) -> None:
        """Its connection may break while p2pd lives: an answer that comes just as its question is given up does it."""
        while True:
            await asyncio.wait({dht.reading})
            await asyncio.sleep(BACKOFF_SECONDS)  # if it was p2pd that ended, this task ends here
            logger.warning("the DHT has lost p2pd, and is started again")
            try:
                await dht.stop()
                self._dht = dht = await Dht.start(self._sockets.control, self._validator, self._storage)
                await self._peers.meet_all()
            except TransportError as error:
                logger.warning("%s", error)

    async def _refresh(self) -> None:
        """Our own addresses, and the way back to those who are connected."""
        await self._identify()
        await self._peers.connected()
        await self._relay_loss.look(self._routes)

    def _why_end(self) -> str:
        """Why another p2pd is better than this one; empty: it is not."""
        if not self._sockets.are_there:
            return "its sockets are gone"
        if self._relay_loss.is_mendable:
            return "no relay for a minute, and one answers: a new p2pd has a place there sooner"
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
        return await self._peers.connect(address)

    async def disconnect(self, peer: bytes) -> None:
        await self._peers.disconnect(peer)

    async def peers(self) -> dict[bytes, list[str]]:
        return await self._peers.connected()

    async def keep(self, peers: Collection[bytes]) -> None:
        await self._supervisor.up()
        for peer in self._kept - set(peers):
            await self._control.tag(peer, 0)
            self._kept.discard(peer)
        for peer in peers:  # also those named before: what p2pd knows of a peer goes with its connection
            self._kept.add(peer)
            await self._control.tag(peer, TAG_WEIGHT)

    # -------------------------------------------------------------------------------------------------
    # Traffic

    async def subscribe(self, topic: str, hear: Hear) -> None:
        await self._gossip.subscribe(topic, hear, self._tasks, self._session_tasks if self._supervisor.is_up else None)

    async def publish(self, topic: str, data: bytes) -> None:
        assert len(data) <= MESSAGE_BYTES_MAX, f"{len(data)} bytes, which libp2p would lose"
        await self._supervisor.up()
        await self._gossip.publish(topic, data)

    async def serve(self, protocol: str, handler: Handler) -> None:
        assert protocol not in self._streams.handlers, f"{protocol} has its handler"
        self._streams.handlers[protocol] = handler
        if self._supervisor.is_up:  # or else p2pd is told when it comes up
            await self._register(protocol)

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
            raise TransportError(f"no stream {protocol} to {peer_id_of(peer)}: {error}") from error
        return self._streams.add(peer, protocol, reader, writer)

    # -------------------------------------------------------------------------------------------------
    # Hints

    async def announce(self, key: str, value: bytes, seconds: float) -> None:
        assert len(value) <= VALUE_BYTES_MAX and 0 < seconds <= ANNOUNCE_SECONDS_MAX
        node = await self._node_for(key)
        try:
            async with asyncio.timeout(SEARCH_SECONDS):
                is_stored = await node.store(key, value, time.time() + seconds, subkey=self.me)
        except TimeoutError as error:
            raise TransportError(f"{key} was not announced in {SEARCH_SECONDS:.0f} s") from error
        if not is_stored:
            raise TransportError(f"nobody took the announcement of {key}: perhaps an earlier one holds for longer")

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
