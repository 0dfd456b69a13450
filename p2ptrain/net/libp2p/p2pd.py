"""The `Transport` over go-libp2p: p2pd in a process of its own, with hivemind's DHT node on top (dht.py).

When p2pd dies, hangs, or loses its sockets or its relay, it is restarted with the same identity on the same ports, and
its protocols and topics are set up again; who wants connections dials again (connections.py). Requests wait a while.

gossipsub: Vyzovitis et al. 2020 (arXiv:2007.02754)."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Self

from p2ptrain.config.node import NetworkConfig
from p2ptrain.identity import Identity, PeerIdError, id_bytes_of, key_of_bytes, peer_id_of
from p2ptrain.net import addresses as multiaddrs
from p2ptrain.net.boundary import Boundary
from p2ptrain.net.libp2p.autorelay import RelayLoss, relays_to_use
from p2ptrain.net.libp2p.control import TAG_WEIGHT, P2pdControl, Sockets, read_opening
from p2ptrain.net.libp2p.dht import (
    ANNOUNCE_SECONDS_MAX,
    STORED_KEYS_MAX,
    VALUE_BYTES_MAX,
    Dht,
    RecordValidator,
    Storage,
)
from p2ptrain.net.libp2p.process import Ports, Process, Supervisor, make_arguments
from p2ptrain.net.libp2p.pubsub import Gossip
from p2ptrain.net.libp2p.streams import FrameStream, Streams
from p2ptrain.net.tasks import OnCrash, Tasks, pauses, report_crash
from p2ptrain.net.transport import MESSAGE_BYTES_MAX, Handler, TransportError, in_time

MEETING_MAX = 8  # peers that are pinged in the DHT at a time
MEET_SECONDS = 5.0  # for pings in flight before the DHT is used; an answer takes 3 s at most
FOUND_MAX = 256  # announcements returned by one search
SEARCH_SECONDS = 20.0
END_SECONDS = 5.0  # for a p2pd that fails a request to end

logger = logging.getLogger("p2ptrain.net")


class Routes:
    """The routes to peers: connects, and introduces peers to the DHT."""

    def __init__(
        self,
        me: bytes,
        control: P2pdControl,
        meet: Callable[[bytes], Awaitable[None]],
        up: Callable[[], Awaitable[None]],
        tasks: Tasks,
        boundary: Boundary,
    ) -> None:
        self._boundary = boundary
        self._me, self._control, self._introduce, self._up, self._tasks = me, control, meet, up, tasks
        self._meeting = asyncio.Semaphore(MEETING_MAX)
        self._introductions: set[asyncio.Task[None]] = set()
        self._ends: dict[bytes, list[str]] = {}  # where each connected peer is, by p2pd; one of each connection

    async def connect(self, address: str) -> bytes:
        peer, route = multiaddrs.split(address)
        if peer == self._me:
            raise TransportError(f"{address} is this node itself")
        await self._up()
        try:
            with self._boundary.guard("a connection to an address", peer):
                await self._control.connect(peer, route)
        except TransportError as error:
            raise TransportError(f"cannot connect to {address}: {error}") from error
        self._meet(peer)
        return peer

    async def disconnect(self, peer: bytes) -> None:
        await self._up()
        await self._control.disconnect(peer)

    async def connected(self) -> dict[bytes, list[str]]:
        await self._up()
        ends: dict[bytes, list[str]] = {}
        with self._boundary.guard("a list of the connected peers"):
            for peer_id, routes in await self._control.peers():
                with suppress(PeerIdError):  # it belongs to another libp2p network
                    ends.setdefault(key_of_bytes(peer_id), []).extend(routes)
        self._ends = ends
        return {peer: [multiaddrs.join(route, peer) for route in routes] for peer, routes in ends.items()}

    def range_of(self, peer: bytes) -> str:
        return multiaddrs.address_range((self._ends.get(peer) or [""])[-1])

    def ends_of(self, peer: bytes) -> frozenset[str]:
        return frozenset(self._ends.get(peer, ()))

    async def met(self) -> None:
        """Waits, though not for long, until newly connected peers have been added to our DHT routing table."""
        if self._introductions:
            await asyncio.wait(self._introductions, timeout=MEET_SECONDS)

    async def meet_all(self) -> None:
        for peer in await self.connected():
            self._meet(peer)

    def _meet(self, peer: bytes) -> None:
        work = self._boundary.contained("an introduction to the DHT", peer, self._meeting_of, peer)
        self._introductions.add(task := self._tasks.spawn(work))
        task.add_done_callback(self._introductions.discard)

    async def _meeting_of(self, peer: bytes) -> None:
        async with self._meeting:
            await self._introduce(peer)


class P2pd:
    """One node's access to the network, through a p2pd of its own."""

    def __init__(
        self,
        identity: Identity,
        identity_file: Path,
        network: NetworkConfig,
        directory: Path,
        ports_file: Path | None,
        on_crash: OnCrash,
    ) -> None:
        self.me = identity.key
        self._identity_file, self._network = identity_file, network
        self.ports = Ports(network.listen, gives_way=not network.has_chosen_port, file=ports_file)
        self._counters: Counter[str] = Counter({"p2pd restarts": 0, "gossip dropped": 0})
        self._validator, self._storage = RecordValidator(identity, self._counters), Storage(STORED_KEYS_MAX)
        self._tasks, self._session_tasks = Tasks(on_crash), Tasks(on_crash)  # the second set ends with this p2pd
        self.boundary = Boundary(
            lambda peer: self._peers.range_of(peer),  # noqa: PLW0108  # it is made below, as are the streams
            lambda peer: self._streams.is_admitted(peer),  # noqa: PLW0108
        )
        self._streams = Streams(self._counters, self._tasks, read_opening, self.boundary)
        self._sockets = Sockets(directory, self._streams.accept)
        self.control = P2pdControl(self._sockets)
        self._registered: set[str] = set()  # protocols that this p2pd forwards to us
        self._registering = asyncio.Lock()
        self._routes: list[str] = []  # routes to us
        relays = (network.trusted_relays or network.bootstrap) if network.nat and network.relay else ()
        self.relay_loss = RelayLoss(relays)
        self._kept: set[bytes] = set()
        self.supervisor = Supervisor(self._launch, self._counters, self.boundary)
        self._peers = Routes(self.me, self.control, self._meet, self.supervisor.up, self._tasks, self.boundary)
        shared = self.me, self.control, self._counters, self.boundary
        self._gossip = Gossip(*shared, self._tasks, lambda: self._session_tasks if self.supervisor.is_up else None)
        self._closing = AsyncExitStack()
        self.dht: Dht | None = None
        self.connect, self.disconnect, self.peers = self._peers.connect, self._peers.disconnect, self._peers.connected
        self.range_of, self.ends_of = self._peers.range_of, self._peers.ends_of
        self.prefer, self.subscribe = self._streams.prefer, self._gossip.subscribe
        self.leave, self.come_back = self._gossip.leave, self._gossip.come_back

    @classmethod
    async def start(
        cls,
        identity_file: Path,
        network: NetworkConfig,
        directory: Path,
        ports_file: Path | None = None,
        *,
        on_crash: OnCrash = report_crash,
    ) -> Self:
        """Starts p2pd and returns when others can connect. ConfigError if it cannot listen on an address.

        The sockets are in `directory`, which must be ours alone: anyone who can open them can act as this node. The
        ports stay in `ports_file` for the next start."""
        self = cls(Identity.load(identity_file), identity_file, network, directory, ports_file, on_crash)
        async with AsyncExitStack() as closing:
            closing.callback(self.ports.close)
            closing.push_async_callback(self._tasks.cancel)  # of streams that came while it closed
            closing.push_async_callback(self._sockets.close)
            closing.push_async_callback(self.supervisor.close)
            closing.push_async_callback(self._tasks.cancel)
            await self.supervisor.start()
            self._closing = closing.pop_all()
        self._tasks.spawn(self.supervisor.run())
        self._tasks.spawn(self.supervisor.watch(self._refresh, self._why_end))
        return self

    # -- Life cycle of p2pd ---------------------------------------------------------------------------

    async def _launch(self, stack: AsyncExitStack) -> Process:
        """Starts p2pd and sets up its protocols, its topics and the DHT."""
        usable = await relays_to_use(self.relay_loss.first())
        self.relay_loss.p2pd_started()
        await self._sockets.open()
        self.ports.take_again()  # right before p2pd does
        places = self._sockets.control, self._identity_file, self.ports.listen
        process = await Process.start(make_arguments(*places, self._network, usable))
        stack.push_async_callback(process.stop)
        stack.push_async_callback(self._leave)
        await stack.enter_async_context(self.control.guardian())
        if (found := await self._identify()) != id_bytes_of(self.me):
            raise TransportError(f"p2pd reports the id {found.hex()}, not {peer_id_of(self.me)}")
        self.dht = await self._start_dht()
        while missing := self._streams.handlers.keys() - self._registered:  # more may be added meanwhile
            await self._register(missing.pop())
        self._gossip.listen(self._session_tasks)
        self._session_tasks.spawn(self._keep_dht(self.dht))
        # Pushed last so that p2pd stops first, with its subscriptions open: for each that ends earlier it leaves the
        # topic's mesh, and peers keep it out for a minute, in which messages arrive late, with the 1 s heartbeats.
        stack.push_async_callback(process.stop)
        return process

    async def _leave(self) -> None:
        """Closes everything that depends on this p2pd."""
        self._registered.clear()
        self._streams.abort()
        await self._session_tasks.cancel()
        dht, self.dht = self.dht, None
        if dht:
            await dht.stop()

    async def _start_dht(self) -> Dht:
        return await Dht.start(self.control, self.me, self._validator, self._storage, self._counters, self.boundary)

    async def _keep_dht(self, dht: Dht) -> None:
        """Restarts the DHT when it loses its connection to a living p2pd."""
        for pause in pauses():
            await asyncio.wait({dht.reading})
            await asyncio.sleep(pause)  # if p2pd itself has ended, this task is cancelled here
            logger.warning("the DHT lost its connection to p2pd and is being restarted")
            with self.boundary.contain("the start of the DHT"):
                try:
                    await dht.stop()
                    self.dht = dht = await self._start_dht()
                    await self._peers.meet_all()
                except TransportError as error:
                    logger.warning("%s", error)

    async def _refresh(self) -> None:
        """Updates our own addresses and the routes to connected peers."""
        await self._identify()
        await self._peers.connected()
        await self.relay_loss.look(self._routes)

    def _why_end(self) -> str:
        """Returns why p2pd should be restarted, or nothing."""
        if not self._sockets.are_there:
            return "its sockets are gone"
        if self.relay_loss.is_mendable:
            return "no relay for a minute, and one answers: a new p2pd gets a slot sooner"
        return ""

    async def _meet(self, peer: bytes) -> None:
        if self.dht:
            await self.dht.meet(peer)

    async def _identify(self) -> bytes:
        found, self._routes = await self.control.identify()
        return found

    async def close(self) -> None:
        await self._closing.aclose()

    def counters(self) -> dict[str, int]:
        return dict(self._counters)

    # -- Peers ----------------------------------------------------------------------------------------

    def addresses(self) -> list[str]:
        return [multiaddrs.join(route, self.me) for route in multiaddrs.worth_telling(self._routes)]

    async def keep(self, peers: Collection[bytes]) -> None:
        await self.supervisor.up()
        for peer in self._kept - set(peers):
            await self.control.tag(peer, 0)
            self._kept.discard(peer)
        for peer in peers:  # also those tagged before: p2pd forgets a tag with the connection
            self._kept.add(peer)
            await self.control.tag(peer, TAG_WEIGHT)

    # -- Traffic --------------------------------------------------------------------------------------

    async def publish(self, topic: str, data: bytes) -> None:
        assert len(data) <= MESSAGE_BYTES_MAX, f"{len(data)} bytes: libp2p would drop them silently"
        await self.supervisor.up()
        with self.boundary.guard("a publication"):
            await self._gossip.publish(topic, data)

    async def serve(self, protocol: str, handler: Handler) -> None:
        self._streams.handlers[protocol] = handler
        if self.supervisor.is_up:  # otherwise registered when p2pd is up
            process = self.supervisor.process
            try:
                await self._register(protocol)
            except TransportError as error:
                async with in_time(END_SECONDS, str(error)):  # if p2pd has just ended, the next one gets it
                    await process.wait()

    def end_run(self) -> None:
        self._streams.handlers.clear()
        self._gossip.end()

    async def _register(self, protocol: str) -> None:
        async with self._registering:
            if protocol not in self._registered:
                await self.control.bring_streams(protocol)
                self._registered.add(protocol)

    async def open(self, peer: bytes, protocol: str) -> FrameStream:
        await self.supervisor.up()
        try:
            reader, writer = await self.control.open_stream(peer, protocol)
        except TransportError as error:
            raise TransportError(f"cannot open a {protocol} stream to {peer_id_of(peer)}: {error}") from error
        return self._streams.add(peer, protocol, reader, writer)

    # -- DHT hints ------------------------------------------------------------------------------------

    async def announce(self, key: str, value: bytes, seconds: float) -> None:
        assert len(value) <= VALUE_BYTES_MAX and 0 < seconds <= ANNOUNCE_SECONDS_MAX
        node = await self._node_for(key)
        async with in_time(SEARCH_SECONDS, f"{key} was not announced in {SEARCH_SECONDS:.0f} s"):
            is_stored = await node.store(key, value, time.time() + seconds, subkey=self.me)
        if not is_stored:
            raise TransportError(f"nobody accepted the announcement of {key}: perhaps an earlier one expires later")

    async def look_up(self, key: str) -> dict[bytes, bytes]:
        node = await self._node_for(key)
        async with in_time(SEARCH_SECONDS, f"{key} was not looked up in {SEARCH_SECONDS:.0f} s"):
            found = await node.get(key, latest=True)
        now, entries = time.time(), found.value.items() if found else ()
        records = [(peer, entry.value) for peer, entry in entries if entry.expiration_time > now]
        return dict(random.SystemRandom().sample(records, min(len(records), FOUND_MAX)))

    async def _node_for(self, key: str) -> Any:
        self._storage.use(key)
        await self.supervisor.up()
        await self._peers.met()
        if self.dht is None:
            raise TransportError("p2pd has just ended")
        return self.dht.node
