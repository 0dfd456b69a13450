"""The edges of a daemon: everything through which it reaches disk and network, and how it says what the core says."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from p2ptrain.core import events as ev
from p2ptrain.core.history import HISTORY_BYTES_MAX, encode_answer
from p2ptrain.core.view import NodeView
from p2ptrain.identity import peer_id_of
from p2ptrain.net.blobs.server import Server
from p2ptrain.net.connections import Connections, topic_of
from p2ptrain.net.mail import Deliver, TellHistory
from p2ptrain.net.mailbox import Mailboxes
from p2ptrain.net.rate_limit import TokenBucket
from p2ptrain.net.transport import STRANGERS, Transport, TransportError
from p2ptrain.node.fetching import Fetching
from p2ptrain.node.intake import Spawn
from p2ptrain.node.persistence import Persistence
from p2ptrain.node.served_blobs import ServedBlobs
from p2ptrain.node.strangers import Topic

UNHEARD_ROUNDS = 2  # after which a member is taken to be away from everyone; a lost message may cost one
OUTBOX_MAX = 1_024
HISTORIES_MAX = 16  # being encoded, or waiting for that, a second for all; beyond it only for members
SHUN_SECONDS = 60.0  # before a peer that we disconnected from is dialled again
LOST = "messages not published"

log = logging.getLogger("p2ptrain.node")


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


class Telling:
    """Publishes messages, sends histories and parts from peers, as the core asks for it.

    Messages are gossiped one after the other. When too many wait, the oldest is dropped; it will be sent again.
    """

    def __init__(self, edges: Edges, counters: Counter[str], spawn: Spawn) -> None:
        self._edges, self._counters, self._spawn = edges, counters, spawn
        self._boundary = edges.transport.boundary
        self._waiting: deque[bytes] = deque()  # messages to be gossiped
        self._has_any = asyncio.Event()
        self._told: set[bytes] = set()  # peers for whom a history is being encoded
        self._encoding = asyncio.Lock()

    def publish(self, effect: ev.Publish) -> None:
        """Sends a message of the core to all who are there, by stream or else by gossip."""
        if self._edges.tell(effect.envelope):
            return
        if len(self._waiting) >= OUTBOX_MAX:
            self._waiting.popleft()
            self._counters[LOST] += 1
        self._waiting.append(effect.envelope)
        self._has_any.set()

    async def run(self) -> None:
        """Gossips what waits, for ever."""
        while True:
            await self._has_any.wait()
            self._has_any.clear()
            while self._waiting:
                is_lost = True
                with self._boundary.contain("gossiping a message"), suppress(TransportError):
                    await self._edges.gossip(self._waiting[0])
                    is_lost = False
                self._counters[LOST] += is_lost
                self._waiting.popleft()

    async def drain(self) -> None:
        """Waits up to a second for the last messages to go out, by gossip and by stream."""
        for _ in range(50):
            if not self._waiting and not self._edges.mailboxes.queued_frames:
                return
            await asyncio.sleep(0.02)

    def tell_history(self, effect: ev.SendHistory) -> None:
        """Sends a history to a peer, unless one is on its way there."""
        is_member = self._edges.view.is_in(effect.peer)
        if effect.peer not in self._told and (is_member or len(self._told) < HISTORIES_MAX):
            self._told.add(effect.peer)
            told = partial(self._told.discard, effect.peer)
            work = self._boundary.contained(
                "the history for a peer", effect.peer, self._send_history, effect, ended=told
            )
            self._spawn(work, "history")

    async def _send_history(self, effect: ev.SendHistory) -> None:
        """Encodes a history in a thread, one at a time: it may have 64 MiB."""
        async with self._encoding:
            encoded = await asyncio.to_thread(encode_answer, effect.history)
        if encoded is None:
            self._counters["histories too long to send"] += 1
            log.warning(
                "a history has more than %d bytes and is not sent; the peer has to ask another node", HISTORY_BYTES_MAX
            )
            return
        self._edges.mailboxes.post(effect.peer, TellHistory(encoded))

    def disconnect(self, effect: ev.Disconnect) -> None:
        """Parts from a peer, and dials it again after a while at the earliest."""
        log.info("disconnecting from %s: %s", peer_id_of(effect.peer), effect.why)
        self._edges.connections.shun(effect.peer, asyncio.get_running_loop().time() + SHUN_SECONDS)
        work = self._boundary.contained("parting from a peer", effect.peer, self._let_go, effect.peer)
        self._spawn(work, "disconnect")

    async def _let_go(self, peer: bytes) -> None:
        try:
            await self._edges.transport.disconnect(peer)
        except TransportError as error:
            log.debug("cannot disconnect: %s", error)
