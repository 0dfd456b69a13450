"""Who is connected, how each was reached, and the way back to them when p2pd had to be started again."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol

from p2ptrain.identity import PeerIdError, key_of_bytes
from p2ptrain.net import addresses as multiaddrs
from p2ptrain.net.tasks import Tasks, pauses
from p2ptrain.net.transport import TransportError

KNOWN_MAX, ROUTES_MAX = 256, 4  # peers that are remembered, as many as may be connected; and routes to each
MEETING_MAX = 8  # peers that are connected to again, or asked for their place in the DHT, at a time
MEET_SECONDS = 5.0  # to wait for those who are being asked before the DHT is used; an answer takes 3 s at most
RECONNECTS_MAX = 4  # tries for each peer after a restart; those who know us will also try

logger = logging.getLogger("p2ptrain.net")


class Connector(Protocol):
    """What p2pd does about connections."""

    async def connect(self, peer: bytes, route: str) -> None: ...
    async def disconnect(self, peer: bytes) -> None: ...
    async def peers(self) -> list[tuple[bytes, list[str]]]: ...


class Peers:
    """The connections of one node."""

    def __init__(
        self,
        me: bytes,
        control: Connector,
        meet: Callable[[bytes], Awaitable[None]],
        up: Callable[[], Awaitable[None]],
        tasks: Tasks,
    ) -> None:
        self._me, self._control, self._introduce, self._up, self._tasks = me, control, meet, up, tasks
        self._meeting = asyncio.Semaphore(MEETING_MAX)
        self._unmet = 0
        self._all_met = asyncio.Event()
        self._all_met.set()
        self._routes: dict[bytes, list[str]] = {}  # to each peer; the one heard of longest ago is forgotten first

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
        """Those connected now, with the addresses at which they are known."""
        await self._up()
        found = {}
        for peer_id, routes in await self._control.peers():
            try:
                peer = key_of_bytes(peer_id)
            except PeerIdError:
                continue  # of some other libp2p network
            self._remember(peer, [*self._routes.get(peer, []), *routes])  # the latter may lead only from there to us
            found[peer] = [multiaddrs.join(route, peer) for route in self._routes[peer]]
        return found

    def come_back(self) -> None:
        """Connect again to everyone known."""
        for peer, routes in self._routes.items():
            self._tasks.spawn(self._reach([multiaddrs.join(route, peer) for route in routes]))

    async def _reach(self, addresses: list[str]) -> None:
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
        """Wait until those who have been connected to have their place in our DHT, if they want one."""
        with suppress(TimeoutError):
            async with asyncio.timeout(MEET_SECONDS):
                await self._all_met.wait()

    async def meet_all(self) -> None:
        for peer in await self.connected():
            self._meet(peer)

    def _meet(self, peer: bytes) -> None:
        self._unmet += 1
        self._all_met.clear()
        self._tasks.spawn(self._meeting_of(peer))

    async def _meeting_of(self, peer: bytes) -> None:
        try:
            async with self._meeting:
                await self._introduce(peer)
        finally:
            self._unmet -= 1
            if not self._unmet:
                self._all_met.set()

    def _remember(self, peer: bytes, routes: list[str]) -> None:
        self._routes.pop(peer, None)
        self._routes[peer] = list(dict.fromkeys(routes))[:ROUTES_MAX]
        if len(self._routes) > KNOWN_MAX:
            del self._routes[next(iter(self._routes))]
