"""A stranger: a connected peer that sends what it likes to a node's p2pd."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from p2ptrain.identity import id_bytes_of
from p2ptrain.net.libp2p.control import UnaryCalls, pb
from p2ptrain.net.libp2p.p2pd import P2pd
from p2ptrain.net.libp2p.streams import with_length
from p2ptrain.net.transport import TransportError

REFUSALS = (TransportError,)


class _Unbounded(UnaryCalls):
    def _send(self, call_id: bytes, **content: Any) -> None:
        message = pb.PersistentConnectionRequest(callId=call_id, **content).SerializeToString()
        self._writer.write(with_length(message))


class Stranger:
    """Calls a node's handlers with any bytes."""

    def __init__(self, calls: UnaryCalls, target: bytes) -> None:
        self._calls, self._target = calls, id_bytes_of(target)

    async def call(self, name: str, request: bytes, seconds: float) -> bytes:
        return await self._calls.call(self._target, name, request, seconds)


@asynccontextmanager
async def stranger_of(node: P2pd, target: bytes) -> AsyncIterator[Stranger]:
    """Speaks through the p2pd of this node, which has to be connected to the target."""
    calls = await _Unbounded.start(node.control, node.boundary)
    try:
        yield Stranger(calls, target)
    finally:
        await calls.close()
