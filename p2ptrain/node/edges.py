"""The edges of a daemon: everything through which its driver reaches disk and network."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from p2ptrain.core.view import NodeView
from p2ptrain.net.blobs.server import Server
from p2ptrain.net.boundary import Boundary
from p2ptrain.net.connections import Connections, topic_of
from p2ptrain.net.mail import Deliver
from p2ptrain.net.mailbox import Mailboxes
from p2ptrain.net.rate_limit import TokenBucket
from p2ptrain.net.transport import STRANGERS, Transport, TransportError
from p2ptrain.node.fetching import Fetching
from p2ptrain.node.persistence import Persistence
from p2ptrain.node.served_blobs import ServedBlobs
from p2ptrain.node.strangers import Topic

UNHEARD_ROUNDS = 2  # after which a member is taken to be away from everyone; a lost message may cost one
OUTBOX_MAX = 1_024
LOST = "messages not published"


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

    def blob_bytes(self) -> Counter[str]:
        """Counts the bytes of blobs by direction and kind, such as "sent payload"."""
        return self.served_blobs.fetcher.traffic + self.server.traffic

    def tell(self, envelope: bytes) -> bool:
        """Sends a message of ours to each admitted peer that we are connected to. Returns whether that is everyone who
        is there; if not, it has to be gossiped as well."""
        place, message, missed = self.view.state.place, Deliver((envelope,)), 0
        for peer in [peer for peer in self.connections.linked if peer in place]:
            is_told = False
            with self.transport.boundary.contain("a message for a peer", peer):
                is_told = self.mailboxes.post(peer, message)
            missed += not is_told
        return not missed and self.reaches_all()

    def reaches_all(self) -> bool:
        """Whether we are connected to all who are admitted, but for those whom nobody has heard lately."""
        linked, me = self.connections.linked, self.view.me
        return all(
            each.key in linked or each.key == me or each.absent >= UNHEARD_ROUNDS for each in self.view.state.admitted
        )

    async def gossip(self, envelope: bytes) -> None:
        await self.transport.publish(topic_of(self.run_id), envelope)

    def topic(self) -> Topic:
        """Returns the watch over the run's topic."""
        counters = self.transport.counters
        return Topic(
            self.transport,
            topic_of(self.run_id),
            junk=lambda: counters().get(STRANGERS, 0),
            heard=lambda: counters().get("gossip received", 0),
            is_needed=lambda: not self.view.has_started or not self.reaches_all(),
        )


class Outbox:
    """Gossips messages one after the other, and counts lost ones in `counters`.

    When it is full, the oldest is dropped; it will be sent again.
    """

    def __init__(self, publish: Callable[[bytes], Awaitable[None]], counters: Counter[str], boundary: Boundary) -> None:
        self._publish, self._counters, self._boundary = publish, counters, boundary
        self._waiting: deque[bytes] = deque()
        self._has_any = asyncio.Event()

    def put(self, envelope: bytes) -> None:
        if len(self._waiting) >= OUTBOX_MAX:
            self._waiting.popleft()
            self._counters[LOST] += 1
        self._waiting.append(envelope)
        self._has_any.set()

    async def run(self) -> None:
        while True:
            await self._has_any.wait()
            self._has_any.clear()
            while self._waiting:
                is_lost = True
                with self._boundary.contain("gossiping a message"), suppress(TransportError):
                    await self._publish(self._waiting[0])
                    is_lost = False
                self._counters[LOST] += is_lost
                self._waiting.popleft()

    async def drain(self, others: Callable[[], int]) -> None:
        """Waits up to a second for the last messages to go out, and for `others`, which returns how many there are."""
        for _ in range(50):
            if not self._waiting and not others():
                return
            await asyncio.sleep(0.02)
