"""The edges of a daemon: everything through which it reaches disk and network, and how it says what the core says.

Gossip of strangers is not heard (net/libp2p/pubsub.py), but p2pd checks its signatures and passes it on, and has no
setting against that: 2,300 messages a second take 0.2 of a core. It ignores, unchecked, what comes in a topic that it
has left. Members hear one another by stream, so while strangers flood the topic a node leaves it, unless it is needed:
by this node, because it is not connected to everyone, or by a member that gossips."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from random import SystemRandom

from p2ptrain.core import events as ev
from p2ptrain.core.history import HISTORY_BYTES_MAX, encode_answer
from p2ptrain.core.view import NodeView
from p2ptrain.identity import peer_id_of
from p2ptrain.net.blobs.server import Server
from p2ptrain.net.connections import Connections, topic_of
from p2ptrain.net.mailbox import Deliver, Mailboxes
from p2ptrain.net.rate_limit import TokenBucket
from p2ptrain.net.transport import STRANGERS, Transport, TransportError
from p2ptrain.node.fetching import Fetching
from p2ptrain.node.intake import Spawn
from p2ptrain.node.persistence import Persistence
from p2ptrain.node.served_blobs import ServedBlobs

UNHEARD_ROUNDS = 2  # after which a member is taken to be away from everyone; a lost message may cost one
OUTBOX_MAX = 1_024
HISTORIES_MAX = 16  # being encoded, or waiting for that, a second for all; beyond it only for members
SHUN_SECONDS = 60.0  # before a peer that we disconnected from is dialled again
FLOOD_A_SECOND = 100  # gossiped messages of strangers; p2pd's queues have 32 places
LOOK_SECONDS = 1.0  # over which the rate is taken: with it, each look at a flood lasts as long
PAUSE_SECONDS, PAUSE_SECONDS_MAX = 10.0, 300.0  # out of a flooded topic; doubles: a long flood is looked at 1/300 of it
CALM_SECONDS = 60.0  # in the topic without a flood, after which the next pause is short again
USED_SECONDS = 30.0  # after a member gossiped: one that has nothing to say gossips a hello every 20 s
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


class Telling:
    """Publishes messages, sends histories and parts from peers, as the core asks for it. Messages are gossiped one
    after the other. When too many wait, the oldest is dropped; it will be sent again."""

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
                    await self._edges.transport.publish(topic_of(self._edges.run_id), self._waiting[0])
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
            if not self._edges.mailboxes.may_tell(effect.peer):  # there was room when it asked
                return
            encoded = await asyncio.to_thread(encode_answer, effect.history)
        if encoded is None:
            self._counters["histories too long to send"] += 1
            log.warning(
                "a history has more than %d bytes and is not sent; the peer has to ask another node", HISTORY_BYTES_MAX
            )
            return
        self._edges.mailboxes.tell_history(effect.peer, encoded)

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


class Topic:
    """The run's topic: left while strangers flood it and nobody needs it, and looked at again after growing pauses."""

    def __init__(self, edges: Edges) -> None:
        self._edges, self._transport, self._name = edges, edges.transport, topic_of(edges.run_id)
        self._rng = SystemRandom()

    @property
    def _is_needed(self) -> bool:
        return not self._edges.view.has_started or not self._edges.reaches_all()

    async def watch(self) -> None:
        loop, pause = asyncio.get_running_loop(), PAUSE_SECONDS
        while True:
            calm_at = loop.time() + CALM_SECONDS
            await self._until_flooded()
            if loop.time() >= calm_at:
                pause = PAUSE_SECONDS
            seconds = pause * self._rng.uniform(0.5, 1.5)
            log.info("strangers flood the topic: left for %.0f s; members are heard by stream", seconds)
            self._transport.leave(self._name)
            try:
                until = loop.time() + seconds
                while loop.time() < until and not self._is_needed:  # noqa: ASYNC110  # connections tell no event
                    await asyncio.sleep(LOOK_SECONDS)
            finally:  # a node that ends leaves it itself
                self._transport.come_back(self._name)
            pause = min(2 * pause, PAUSE_SECONDS_MAX)

    async def _until_flooded(self) -> None:
        """Returns when strangers flood the topic and nobody needs it."""
        loop, before = asyncio.get_running_loop(), Counter(self._transport.counters())
        looked_at, heard_at = loop.time(), -math.inf
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now, counts = loop.time(), Counter(self._transport.counters())
            if counts["gossip received"] != before["gossip received"]:
                heard_at = now
            is_used = now < heard_at + USED_SECONDS or self._is_needed
            if counts[STRANGERS] - before[STRANGERS] > FLOOD_A_SECOND * (now - looked_at) and not is_used:
                return
            before, looked_at = counts, now
