"""The intake: the queue of events that wait for the core.

Messages from peers are decoded here, and attached payloads are checked before they are queued. Events from peers are
dropped (and counted) when the queue is full or a peer exceeds its share of it: the core asks again for what it misses,
and so do the peers. Events from our own edges are never dropped; there are only as many as the core has asked for. What
strangers say by gossip does not come here (net/libp2p/pubsub.py), and what they send to this node alone has a small
budget (net/mailbox.py takes from it, too, before it reads)."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from p2ptrain.core import events as ev
from p2ptrain.core import messages as msg
from p2ptrain.core.context import Signer
from p2ptrain.core.history import decode_history
from p2ptrain.digest import digest
from p2ptrain.errors import RemoteProtocolError
from p2ptrain.net.boundary import Boundary
from p2ptrain.net.mailbox import Deliver, HistoryQuery, Mail, MessageQuery
from p2ptrain.net.rate_limit import PeerLimits
from p2ptrain.net.transport import IsAdmitted, TransportError
from p2ptrain.node.replica_thread import ReplicaThread

EVENTS_MAX = 4_096  # beyond it, events of peers are dropped: with 100 nodes, a round has 600 messages per node
SHARE_MAX, SHARE_OF_MEMBER_MAX = 256, 2_048  # queued events of one peer; a member may forward those of many
CHECKS_MAX = 4  # announcements of an author, from one sender, whose payloads wait for a check; more go without
KEPT_MAX = 2  # payloads of an author for one round that are stored before the core has looked: enough to prove a lie
PLACES_MAX = 8 * msg.ADMITTED_MAX  # authors and rounds for which that is counted: those of the rounds that are open
COPIES_MAX = 4_096  # messages whose second copy is known as such: seven rounds of 100 nodes
DROPPED_OF_STRANGERS = "messages of strangers dropped"
TIMER_SECONDS = 0.001  # the shortest timer

Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]  # starts a task with a name


class Intake:
    """Queues events for the core. Peers for which `is_admitted` is true get a larger share of the queue, those that
    `strangers` limits are heard less by stream; `keep` stores a payload that came along, if the core `may_take` it."""

    def __init__(
        self,
        signer: Signer,
        replica: ReplicaThread,
        is_admitted: IsAdmitted,
        may_take: Callable[[msg.Announcement], bool],
        strangers: PeerLimits,
        keep: Callable[[bytes, bytes], None],
        boundary: Boundary,
    ) -> None:
        self._boundary = boundary
        self.counters: Counter[str] = Counter()
        self.events: deque[tuple[ev.Event, bytes]] = deque()  # each with the peer that caused it, if any
        self._signer, self._replica = signer, replica
        self._is_admitted, self._strangers, self._keep = is_admitted, strangers, keep
        self._may_take = may_take
        self._kept: dict[tuple[bytes, bytes, int], set[bytes]] = {}  # what may have been, by branch, author and round
        self._has_events = asyncio.Event()
        self._spawn: Spawn | None = None  # set while the driver runs; peers may be heard slightly before and after
        self._checks: dict[bytes, asyncio.Task[bool]] = {}  # of attachments, by payload
        self._checking: Counter[tuple[bytes, bytes]] = Counter()  # what waits for one, by sender and author
        self._waiting = 0  # the sum of these
        self._came_by_gossip: dict[bytes, bool] = {}  # by digest: an author may send a message by stream as well
        self._shares: Counter[bytes] = Counter()  # of `events` and of what waits for a check, by peer

    # -- The queue ----------------------------------------------------------------------------------

    def begin(self, started: ev.Started, spawn: Spawn) -> None:
        """Puts the start event first in the queue, before anything peers have sent already."""
        self.events.appendleft((started, b""))
        self._shares[b""] += 1
        self._has_events.set()
        self._spawn = spawn

    def end(self) -> None:
        self._spawn = None

    def give(self, event: ev.Event, of: bytes = b"") -> None:
        self.events.append((event, of))
        self._shares[of] += 1
        self._has_events.set()

    def take(self) -> ev.Event | None:
        if not self.events:
            return None
        event, peer = self.events.popleft()
        self._free(peer)
        return event

    async def wait(self, deadline: float | None) -> None:
        """Waits for an event or the core's deadline. uvloop counts milliseconds, and may wake us just before it."""
        loop = asyncio.get_running_loop()
        while not self.events and (deadline is None or loop.time() < deadline):
            self._has_events.clear()
            due = deadline if deadline is None else max(deadline, loop.time() + TIMER_SECONDS)
            timer = None if due is None else loop.call_at(due, self._has_events.set)
            try:
                await self._has_events.wait()
            finally:
                if timer is not None:
                    timer.cancel()

    def _give_of_peer(self, peer: bytes, event: ev.Event) -> None:
        """Queues an event that a peer can cause as often as it likes, if there is room."""
        if self._has_room(peer):
            self.give(event, peer)

    def _has_room(self, peer: bytes) -> bool:
        share = SHARE_OF_MEMBER_MAX if self._is_admitted(peer) else SHARE_MAX
        if len(self.events) + self._waiting < EVENTS_MAX and self._shares[peer] < share:
            return True
        self.counters["events dropped"] += 1
        return False

    def _free(self, peer: bytes) -> None:
        """Gives one place of its share back to a peer."""
        self._shares[peer] -= 1
        if self._shares[peer] <= 0:
            del self._shares[peer]

    # -- Messages from peers ------------------------------------------------------------------------

    def hear(self, sender: bytes, data: bytes) -> None:
        """Takes in a message that an admitted peer gossiped."""
        try:
            self._take_in(sender, data, is_stranger=not self._is_admitted(sender), by_gossip=True)
        except RemoteProtocolError as error:
            self.blame(sender, error.why)

    def hear_mail(self, peer: bytes, message: Mail) -> None:
        """Takes in a message that a peer sent to this node alone. Raises RemoteProtocolError if it is malformed."""
        match message:
            case Deliver(envelopes):
                if not self._may_say(peer, len(envelopes) - 1):  # one is paid for
                    return
                is_stranger = self._strangers.is_stranger(peer)
                for envelope in envelopes:
                    self._take_in(peer, envelope, is_stranger)
            case MessageQuery(names):
                self._give_of_peer(peer, ev.Asked(peer, names))
            case HistoryQuery(branch, number):
                self._give_of_peer(peer, ev.HistoryAsked(peer, branch, number))

    def _may_say(self, peer: bytes, count: int) -> bool:
        """Whether a peer may send this node alone so many messages. One that is kept away counts as a stranger."""
        if not self._strangers.is_stranger(peer) or self._strangers.take_now(peer, count):
            return True
        self.counters[DROPPED_OF_STRANGERS] += 1
        return False

    def _take_in(self, sender: bytes, data: bytes, is_stranger: bool, by_gossip: bool = False) -> None:
        copy = digest("copy", sender, data)
        if not self._has_room(sender) or self._came_by_gossip.pop(copy, by_gossip) != by_gossip:
            return  # a second copy came the other way; what comes again the same way was asked for, or is useless
        received = msg.decode(data, self._signer)
        if is_stranger and not self._may_be_of_stranger(sender, received.message):
            self.counters[DROPPED_OF_STRANGERS] += 1
            return
        self._came_by_gossip[copy] = by_gossip
        if len(self._came_by_gossip) > COPIES_MAX:
            del self._came_by_gossip[next(iter(self._came_by_gossip))]
        if not received.attachment:
            self.give(ev.MessageReceived(sender, received), sender)
        elif self._spawn is not None:  # otherwise drop it: it will be sent again
            announcement = received.message
            assert isinstance(announcement, msg.Announcement), "nothing else has an attachment"
            is_right_size = announcement.payload_bytes in self._replica.attachment_sizes
            is_full = self._checking[sender, announcement.author] >= CHECKS_MAX
            if is_full or not is_right_size or not self._may_keep(announcement):
                self.give(ev.MessageReceived(sender, msg.bare(received)), sender)  # its payload can be fetched
            else:
                self._checking[sender, announcement.author] += 1
                self._waiting += 1
                self._shares[sender] += 1
                self._spawn(self._check_attachment(sender, received, announcement), "check")

    def _may_keep(self, said: msg.Announcement) -> bool:
        """Whether to store a payload as soon as it is found good: one key must not fill the disk."""
        if not (self._is_admitted(said.author) and self._may_take(said)):
            return False
        kept = self._kept.setdefault((said.branch, said.author, said.round), set())
        if len(self._kept) > PLACES_MAX:
            del self._kept[next(iter(self._kept))]
        if len(kept) < KEPT_MAX:
            kept.add(said.payload)
        return said.payload in kept

    def _may_be_of_stranger(self, sender: bytes, message: msg.Message) -> bool:
        """Whether a stranger says such things. A member that is kept away says what it signed: a vote counts."""
        is_own = not isinstance(message, msg.Evidence | msg.Certificate) and message.author == sender
        return isinstance(message, msg.Hello | msg.JoinRequest) or (is_own and self._is_admitted(sender))

    async def _check_attachment(self, sender: bytes, received: msg.Received, announcement: msg.Announcement) -> None:
        payload, place = announcement.payload, (sender, announcement.author)
        if (check := self._checks.get(payload)) is None:
            check = self._checks[payload] = asyncio.ensure_future(self._check(sender, payload, received.attachment))
            check.add_done_callback(lambda _: self._checks.pop(payload))
        try:
            is_good = await check
        finally:
            self._waiting -= 1
            self._checking[place] -= 1
            if not self._checking[place]:
                del self._checking[place]
            self._free(sender)
        self.give(ev.MessageReceived(sender, received, is_good), sender)

    async def _check(self, sender: bytes, payload: bytes, content: bytes) -> bool:
        """Checks a payload, once for all copies that come meanwhile."""
        is_good = await self.refusal(sender, content) is None
        if is_good:
            self._keep(payload, content)
        return is_good

    async def refusal(self, peer: bytes, payload: bytes) -> str | None:
        """Returns why a peer's payload is refused, or None if it is good."""
        try:
            with self._boundary.guard("the check of a payload", peer):
                return await self._replica.check(payload)
        except TransportError as error:  # every node comes to the same
            return str(error)

    def blame(self, peer: bytes, why: str) -> None:
        if self._may_say(peer, 1):
            self._give_of_peer(peer, ev.MalformedReceived(peer, why))

    def history_failed(self, peer: bytes, why: str) -> None:
        self.give(ev.HistoryFailed(peer, why))

    def history_came(self, peer: bytes, encoded: bytes) -> None:
        if self._spawn is not None:  # before that, no peer has been asked
            failed = partial(self.history_failed, peer)
            work = self._boundary.contained(
                "the reading of a history", peer, self._read_history, peer, encoded, failed=failed
            )
            self._spawn(work, "history")

    async def _read_history(self, peer: bytes, encoded: bytes) -> None:
        """Decodes a history in a thread: it may have 64 MiB."""
        try:
            self.give(ev.HistoryArrived(peer, await asyncio.to_thread(decode_history, encoded)))
        except RemoteProtocolError as error:
            self.history_failed(peer, error.why)
