"""The edges of a daemon: everything through which its driver reaches disk and network."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from p2ptrain.net.blobs.server import Server
from p2ptrain.net.connections import Connections, topic_of
from p2ptrain.net.mailbox import Mailboxes
from p2ptrain.net.rate_limit import TokenBucket
from p2ptrain.net.transport import Transport
from p2ptrain.node.fetching import Fetching
from p2ptrain.node.persistence import Persistence
from p2ptrain.node.served_blobs import ServedBlobs


@dataclass(slots=True)
class Edges:
    """A node's access to disk and network. assembly.py builds it; the exit stack of the caller closes it."""

    run_id: bytes
    transport: Transport
    connections: Connections
    mailboxes: Mailboxes
    fetching: Fetching
    persistence: Persistence
    served_blobs: ServedBlobs
    server: Server
    upload: TokenBucket
    download: TokenBucket

    def blob_bytes(self) -> Counter[str]:
        """Counts the bytes of blobs by direction and kind, such as "sent payload"."""
        return self.served_blobs.fetcher.traffic + self.server.traffic

    async def publish(self, envelope: bytes) -> None:
        await self.transport.publish(topic_of(self.run_id), envelope)
