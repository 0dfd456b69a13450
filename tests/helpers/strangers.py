"""A stranger: a connected peer that sends what it likes to a node's p2pd, with hivemind's own client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from p2ptrain.identity import id_bytes_of
from p2ptrain.net.libp2p.p2pd import P2pd
from p2ptrain.net.libp2p.slim_hivemind import parts_of_hivemind

with parts_of_hivemind():
    from hivemind.p2p import PeerID
    from hivemind.p2p.p2p_daemon_bindings.control import ControlClient, DaemonConnector
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError
    from hivemind.utils.multiaddr import Multiaddr

REFUSALS = (P2PDaemonError, P2PHandlerError, TimeoutError)


class Stranger:
    """Calls a node's handlers with any bytes."""

    def __init__(self, control: ControlClient, target: bytes) -> None:
        self._control, self._target = control, PeerID(id_bytes_of(target))

    async def call(self, name: str, request: bytes, seconds: float) -> bytes:
        async with asyncio.timeout(seconds):
            return await self._control.call_unary_handler(self._target, name, request)


@asynccontextmanager
async def stranger_of(node: P2pd, target: bytes) -> AsyncIterator[Stranger]:
    """Speaks through the p2pd of this node, which has to be connected to the target."""
    control = await ControlClient.create(DaemonConnector(Multiaddr(f"/unix{node._sockets.control}")))
    try:
        yield Stranger(control, target)
    finally:
        tasks = [control._read_task, control._write_task, *control._handler_tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
