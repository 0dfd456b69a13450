"""Connections through one p2pd: remembers the routes to peers, and reconnects after a restart of p2pd."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable

from p2ptrain.identity import PeerIdError, key_of_bytes
from p2ptrain.net import addresses as multiaddrs
from p2ptrain.net.boundary import Boundary
from p2ptrain.net.libp2p.control import P2pdControl
from p2ptrain.net.tasks import Tasks, pauses
from p2ptrain.net.transport import TransportError

KNOWN_MAX, ROUTES_MAX = 256, 4  # peers remembered, as many as can be connected; routes per peer
MEETING_MAX = 8  # peers that are redialled, or pinged in the DHT, at a time
MEET_SECONDS = 5.0  # for pings in flight before the DHT is used; an answer takes 3 s at most
RECONNECTS_MAX = 4  # tries per peer after a restart; peers that know us try too

logger = logging.getLogger("p2ptrain.net")


class Routes:
    """The routes to peers: connects, reconnects, and introduces peers to the DHT."""

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
        self._routes: dict[bytes, list[str]] = {}  # to each peer, the least recently seen first
        self._ends: dict[bytes, list[str]] = {}  # where each connected peer is, by p2pd; one of each connection

    async def connect(self, address: str) -> bytes:
        peer, route = multiaddrs.split(address)
        if peer == self._me:
            raise TransportError(f"{address} is this node itself")
        await self._up()
        try:
            await self._control.connect(peer, route)
        except TransportError as error:
            raise TransportError(f"cannot connect to {address}: {error}") from error
        self._remember(peer, [route, *self._routes.get(peer, [])])
        self._meet(peer)
        return peer

    async def disconnect(self, peer: bytes) -> None:
        self._routes.pop(peer, None)
        await self._up()
        await self._control.disconnect(peer)

    async def connected(self) -> dict[bytes, list[str]]:
        """Returns the connected peers with their known addresses."""
        await self._up()
        found: dict[bytes, list[str]] = {}
        ends: dict[bytes, list[str]] = {}
        for peer_id, routes in await self._control.peers():
            try:
                peer = key_of_bytes(peer_id)
            except PeerIdError:
                continue  # it belongs to another libp2p network
            # p2pd's routes come last: they may lead only from there to us.
            self._remember(peer, [*self._routes.get(peer, []), *routes])
            found[peer] = [multiaddrs.join(route, peer) for route in self._routes[peer]]
            ends.setdefault(peer, []).extend(routes)
        self._ends = ends
        return found

    def range_of(self, peer: bytes) -> str:
        """Returns the address range that a peer is connected from; empty if unknown."""
        return multiaddrs.address_range((self._ends.get(peer) or [""])[-1])

    def ends_of(self, peer: bytes) -> frozenset[str]:
        """Returns the far ends of the connections with a peer at the last listing."""
        return frozenset(self._ends.get(peer, ()))

    def come_back(self) -> None:
        """Reconnects to all known peers."""
        for peer, routes in self._routes.items():
            self._tasks.spawn(self._boundary.contained("a reconnection", peer, self._reach, peer, routes))

    async def _reach(self, peer: bytes, routes: list[str]) -> None:
        addresses = [multiaddrs.join(route, peer) for route in routes]
        for pause in itertools.islice(pauses(), RECONNECTS_MAX):
            for address in addresses:
                try:
                    async with self._meeting:
                        await self.connect(address)
                    return
                except TransportError as error:
                    logger.debug("%s", error)
            await asyncio.sleep(pause)

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

    def _remember(self, peer: bytes, routes: list[str]) -> None:
        self._routes.pop(peer, None)
        self._routes[peer] = list(dict.fromkeys(routes))[:ROUTES_MAX]
        if len(self._routes) > KNOWN_MAX:
            del self._routes[next(iter(self._routes))]
