"""The edges of one daemon: all through which its driver reaches disk and network."""

from __future__ import annotations

from dataclasses import dataclass

from p2ptrain.daemon.fetching import Fetching
from p2ptrain.daemon.keeping import Keeping
from p2ptrain.daemon.library import Library
from p2ptrain.net.connections import Connections, topic_of
from p2ptrain.net.line import Lines
from p2ptrain.net.transport import Transport


@dataclass(slots=True)
class Edges:
    """Made by assembly.py, closed by whoever had them made."""

    run_id: bytes
    transport: Transport
    connections: Connections
    lines: Lines
    fetching: Fetching
    keeping: Keeping
    library: Library

    async def publish(self, envelope: bytes) -> None:
        await self.transport.publish(topic_of(self.run_id), envelope)
