"""Helpers for tests of connections: a recorded node among peers and addresses that do not answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random

from p2ptrain.digest import digest
from p2ptrain.identity import peer_id_of
from p2ptrain.net.connections import Connections
from p2ptrain.net.transport import TransportError
from tests.helpers.memory_network import MemoryTransport, Network
from tests.helpers.net import at

RUN = bytes(32)
CONNECT_SECONDS = 15.0  # before p2pd gives up on an address at which nobody answers


def key(number: int) -> bytes:
    return digest("test key", number.to_bytes(4, "big"))


ME, A, B, C = (key(number) for number in range(4))


def address(peer: bytes, host: str = "127.0.0.1", port: int = 9) -> str:
    return f"/ip4/{host}/tcp/{port}/p2p/{peer_id_of(peer)}"


def now() -> float:
    return asyncio.get_running_loop().time()


class RecordedConnections:
    """A node's connections and a record of their callbacks."""

    def __init__(self, network: Network, me: bytes = ME) -> None:
        self.told: list[tuple[str, bytes]] = []
        self.dials: list[tuple[float, str]] = []
        self.mute: set[bytes] = set()  # peers that never say whether they speak our protocol
        self.is_silent: Callable[[str], bool] = lambda address: False  # addresses that do not even refuse
        self.transport = network.transport(me)
        rng = Random(int.from_bytes(me[:4], "big"))
        self.connections = Connections(self.transport, RUN, self._speaks, self._seen, self._lost, rng)
        connect = self.transport.connect

        async def dialled(address: str) -> bytes:
            self.dials.append((now(), address))
            if self.is_silent(address):
                await at(now() + CONNECT_SECONDS)
                raise TransportError(f"{address}: no answer")
            return await connect(address)

        self.transport.connect = dialled  # type: ignore[method-assign]

    async def _speaks(self, peer: bytes) -> bool:
        if peer in self.mute:
            await asyncio.get_running_loop().create_future()
        return True

    def _seen(self, peer: bytes) -> None:
        self.told.append(("seen", peer))

    def _lost(self, peer: bytes) -> None:
        self.told.append(("lost", peer))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Connections]:
        task = asyncio.create_task(self.connections.run())
        try:
            yield self.connections
            assert not task.done(), "it runs for ever"
        finally:
            task.cancel()
            await asyncio.wait([task])


async def others(network: Network, *keys: bytes) -> list[MemoryTransport]:
    return [network.transport(each) for each in keys]
