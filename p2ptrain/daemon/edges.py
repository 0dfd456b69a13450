"""The edges of one daemon: all through which its driver reaches disk and network."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from p2ptrain.daemon.fetching import Fetching
from p2ptrain.daemon.keeping import Keeping
from p2ptrain.daemon.library import Library
from p2ptrain.net.bulk import Server
from p2ptrain.net.connections import Connections, topic_of
from p2ptrain.net.limits import TokenBucket
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
    server: Server
    upload: TokenBucket
    download: TokenBucket

    def bulk_bytes(self) -> Counter[str]:
        """What went over the streams of blobs, by way and kind, such as "sent payload"."""
        return self.library.fetcher.traffic + self.server.traffic

    async def publish(self, envelope: bytes) -> None:
        await self.transport.publish(topic_of(self.run_id), envelope)
