"""The edges of a daemon: everything through which its driver reaches disk and network."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from p2ptrain.core.view import NodeView
from p2ptrain.net.blobs.server import Server
from p2ptrain.net.connections import Connections, topic_of
from p2ptrain.net.mail import Deliver
from p2ptrain.net.mailbox import Mailboxes
from p2ptrain.net.rate_limit import TokenBucket
from p2ptrain.net.transport import Transport
from p2ptrain.node.fetching import Fetching
from p2ptrain.node.persistence import Persistence
from p2ptrain.node.served_blobs import ServedBlobs
from p2ptrain.node.strangers import GossipFlood

DIRECT_BYTES_MAX = 2**20  # for all copies of one message; one with a large attachment goes by gossip


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
    view: NodeView
    flood: GossipFlood

    def blob_bytes(self) -> Counter[str]:
        """Counts the bytes of blobs by direction and kind, such as "sent payload"."""
        return self.served_blobs.fetcher.traffic + self.server.traffic

    async def publish(self, envelope: bytes) -> None:
        """Gossips a message of ours; while strangers flood the topic, it goes by stream to those who are connected."""
        peers = self._connected_quorum() if self.flood.is_on else []
        if not peers or len(peers) * len(envelope) > DIRECT_BYTES_MAX:
            await self.transport.publish(topic_of(self.run_id), envelope)
            return
        for peer in peers:
            self.mailboxes.post(peer, Deliver((envelope,)))

    def _connected_quorum(self) -> list[bytes]:
        """Returns the connected admitted peers, if these and we have a quorum; the rest asks them."""
        state, linked = self.view.state, self.connections.linked
        seats = sum(key in linked or key == self.view.me for key in state.members)
        return [key for key in state.place if key in linked] if seats >= state.roster.quorum else []
