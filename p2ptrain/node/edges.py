"""The edges of a daemon: everything through which its driver reaches disk and network, and says what the core says."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from p2ptrain.core import events as ev
from p2ptrain.core.history import HISTORY_BYTES_MAX, encode_answer
from p2ptrain.core.messages import author_of
from p2ptrain.core.state import Taken
from p2ptrain.core.view import NodeView
from p2ptrain.identity import peer_id_of
from p2ptrain.net.blobs.server import FetchError, Server
from p2ptrain.net.connections import Connections, topic_of
from p2ptrain.net.mail import Deliver, TellHistory
from p2ptrain.net.mailbox import Mailboxes
from p2ptrain.net.rate_limit import TokenBucket
from p2ptrain.net.transport import STRANGERS, Transport, TransportError
from p2ptrain.node.fetching import Fetching, ignore
from p2ptrain.node.intake import Intake, Spawn
from p2ptrain.node.persistence import DISK_SECONDS, Persistence
from p2ptrain.node.replica_thread import ReplicaThread
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
        log.info("disconnecting from %s: %s", peer_id_of(effect.peer), effect.why)
        self._edges.connections.shun(effect.peer, asyncio.get_running_loop().time() + SHUN_SECONDS)
        work = self._boundary.contained("parting from a peer", effect.peer, self._let_go, effect.peer)
        self._spawn(work, "disconnect")

    async def _let_go(self, peer: bytes) -> None:
        try:
            await self._edges.transport.disconnect(peer)
        except TransportError as error:
            log.debug("cannot disconnect: %s", error)


class PayloadFetches:
    """Fetches payloads from peers, each of them once, and checks them."""

    def __init__(self, replica: ReplicaThread, intake: Intake, edges: Edges, spawn: Spawn) -> None:
        self.running: dict[bytes, dict[asyncio.Task[None], Sequence[bytes]]] = {}  # by payload: who is asked by each
        self._replica, self._intake, self._edges, self._spawn = replica, intake, edges, spawn
        self._boundary = edges.transport.boundary

    def fetch_payload(self, effect: ev.Fetch) -> None:
        if effect.payload_bytes not in self._replica.payload_sizes:
            for source in effect.sources:
                why = f"no contribution has {effect.payload_bytes} bytes"
                self._intake.give(ev.FetchFailed(effect.payload, source, why))
            return
        fetches = self.running.setdefault(effect.payload, {})
        asked = {source for sources in fetches.values() for source in sources}
        fresh = tuple(source for source in effect.sources if source not in asked)
        task = self._spawn(self._beside(list(fetches), fresh, effect), "fetch")
        fetches[task] = fresh
        task.add_done_callback(lambda task: self._forget(effect.payload, task))

    def _forget(self, payload: bytes, task: asyncio.Task[None]) -> None:
        del self.running[payload][task]
        if not self.running[payload]:
            del self.running[payload]

    async def _beside(self, others: list[asyncio.Task[None]], fresh: Sequence[bytes], effect: ev.Fetch) -> None:
        """Fetches a payload from those who are not being asked for it: another announcement of it may be a lie, whose
        author holds up what is fetched from it. If there are none, the other fetches may make this one unnecessary."""
        if others and not fresh:
            await asyncio.wait(others)
            others, fresh = [], effect.sources
        payload = await self._edges.persistence.payload(effect.payload)
        if payload is None:
            failed = dict.fromkeys(effect.sources, "")

            def tell(peer: bytes, why: str) -> None:
                failed.pop(peer, None)
                self._intake.give(ev.FetchFailed(effect.payload, peer, why))

            try:
                with self._boundary.guard("the fetch of a payload"):
                    payload = await self._edges.fetching.payload(effect.payload, effect.payload_bytes, fresh, tell)
            except (FetchError, TransportError) as error:
                if others:
                    await asyncio.wait(others)
                for source in failed:
                    self._intake.give(ev.FetchFailed(effect.payload, source, str(error)))
                return
            for other in others:
                other.cancel()
            self._edges.persistence.put(effect.payload, payload)
        why = await self._intake.refusal(author_of(payload), payload)
        if why is not None:
            log.info("contribution rejected: %s", why)
        self._intake.give(ev.PayloadArrived(effect.payload, why is None, author_of(payload), len(payload)))

    async def fetch_lost(self, name: bytes, payload_bytes: int = 0) -> None:
        """Fetches a payload that was stored here but has been lost. Any connected peer may still have it.

        payload_bytes: its size; 0: one of those that there are
        """
        sources = list(self._edges.connections.linked)
        for size in (payload_bytes,) if payload_bytes else sorted(self._replica.payload_sizes):
            try:
                with self._boundary.guard("the fetch of a lost payload"):
                    payload = await self._edges.fetching.payload(name, size, sources, ignore)
            except (FetchError, TransportError) as error:
                log.warning("%s; trying again", error)
            else:
                self._edges.persistence.put(name, payload)
                return
        await asyncio.sleep(DISK_SECONDS)

    async def agreed(self, taken: Taken, adopted: int) -> bytes | None:
        """Returns a payload of an agreed round, and fetches it again if the disk has lost it.

        None if another state has been adopted meanwhile, and the payload is no longer needed.
        """
        store, held = self._edges.persistence, self._replica.replica
        while (payload := await store.payload(taken.payload)) is None and held.adopted == adopted:
            log.warning("payload %s of an agreed round is lost; fetching it again", taken.payload.hex()[:16])
            await self.fetch_lost(taken.payload, taken.payload_bytes)
        return payload
