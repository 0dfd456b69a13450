"""Intake: what the core is to hear of, in order, until the driver takes it.

What peers say is decoded here, and what came attached to it is checked by the device, before it gets its place in the
queue. It may be dropped when the queue is full, or one of them has more than its share of it (and is counted): the core
asks for what it misses, and so do they. What our own edges report is never dropped; of that there is only as much as
the core has asked for.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from typing import Any

from p2ptrain.core import events as ev
from p2ptrain.core.context import Signer
from p2ptrain.core.history import decode_history
from p2ptrain.core.messages import Announcement, Received, decode
from p2ptrain.errors import RemoteProtocolError
from p2ptrain.net.mailbox import Deliver, HistoryQuery, Mail, MessageQuery
from p2ptrain.node.device import Device

EVENTS_MAX = 4_096  # beyond it, gossip is dropped: at 100 nodes a round has 600 messages a node
SHARE_MAX, SHARE_OF_MEMBER_MAX = 256, 2_048  # events of one peer; a member may hand over what many have said
TIMER_SECONDS = 0.001  # the shortest that a timer is set to

Spawn = Callable[[Coroutine[Any, Any, None], str], object]  # a task, and its name


class Intake:
    """Takes in what a node hears. `is_admitted` says of whom more is heard, `keep` takes a payload that came with its
    announcement.
    """

    def __init__(
        self,
        signer: Signer,
        device: Device,
        is_admitted: Callable[[bytes], bool],
        keep: Callable[[bytes, bytes], None],
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.events: deque[tuple[ev.Event, bytes]] = deque()  # and the peer that brought it about, if one did
        self.dropped_last = b""  # the peer that last brought an event for which there was no room
        self._signer, self._device = signer, device
        self._is_admitted, self._keep = is_admitted, keep
        self._has_events = asyncio.Event()
        self._spawn: Spawn | None = None  # while the driver runs: peers can be heard a little earlier and later
        self._checking = 0  # attachments that wait for the device, or are at it
        self._shares: Counter[bytes] = Counter()  # of `events` and `_checking`, by peer

    # -----------------------------------------------------------------------------------------------
    # The queue

    def begin(self, started: ev.Started, spawn: Spawn) -> None:
        """With this first: peers may have said something already."""
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
        """The next, if there is one."""
        if not self.events:
            return None
        event, peer = self.events.popleft()
        self._free(peer)
        return event

    async def wait(self, deadline: float | None) -> None:
        """For an event, or for the core's deadline. uvloop counts milliseconds, and may wake us up just before it."""
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
        """What a peer brings about by itself, and might as often as it likes."""
        if self._has_room(peer):
            self.give(event, peer)

    def _has_room(self, peer: bytes) -> bool:
        share = SHARE_OF_MEMBER_MAX if self._is_admitted(peer) else SHARE_MAX
        if len(self.events) + self._checking < EVENTS_MAX and self._shares[peer] < share:
            return True
        self.counters["events dropped"] += 1
        self.dropped_last = peer
        return False

    def _free(self, peer: bytes) -> None:
        """A place in its share."""
        self._shares[peer] -= 1
        if self._shares[peer] <= 0:
            del self._shares[peer]

    # -----------------------------------------------------------------------------------------------
    # What peers say

    def hear(self, sender: bytes, data: bytes) -> None:
        """A gossiped message."""
        try:
            self._take_in(sender, data)
        except RemoteProtocolError as error:
            self.blame(sender, error.why)

    def hear_line(self, peer: bytes, message: Mail) -> None:
        """What a peer says to us alone; RemoteProtocolError if it is nothing that an honest one says."""
        match message:
            case Deliver(envelopes):
                for envelope in envelopes:
                    self._take_in(peer, envelope)
            case MessageQuery(names):
                self._give_of_peer(peer, ev.Asked(peer, names))
            case HistoryQuery(branch, number):
                self._give_of_peer(peer, ev.HistoryAsked(peer, branch, number))

    def _take_in(self, sender: bytes, data: bytes) -> None:
        if not self._has_room(sender):
            return
        received = decode(data, self._signer)
        if not received.attachment:
            self.give(ev.MessageReceived(sender, received), sender)
        elif self._spawn is not None:  # otherwise it will be said again
            announcement = received.message
            assert isinstance(announcement, Announcement), "nothing else has an attachment"
            is_right_size = announcement.payload_bytes == self._device.payload_bytes
            if not self._is_admitted(announcement.author) or not is_right_size:
                self.give(ev.MessageReceived(sender, received), sender)  # nothing that is worth the device's time
                return
            self._checking += 1
            self._shares[sender] += 1
            self._spawn(self._check_attachment(sender, received), "check")

    async def _check_attachment(self, sender: bytes, received: Received) -> None:
        assert isinstance(received.message, Announcement), "nothing else has an attachment"
        try:
            why = await self._device.check(received.attachment)
        finally:
            self._checking -= 1
            self._free(sender)
        if why is None:
            self._keep(received.message.payload, received.attachment)
        self.give(ev.MessageReceived(sender, received, why is None), sender)

    def blame(self, peer: bytes, why: str) -> None:
        self._give_of_peer(peer, ev.MalformedReceived(peer, why))

    def history_failed(self, peer: bytes, why: str) -> None:
        self.give(ev.HistoryFailed(peer, why))

    def history_came(self, peer: bytes, encoded: bytes) -> None:
        if self._spawn is not None:  # nobody is asked before
            self._spawn(self._read_history(peer, encoded), "history")

    async def _read_history(self, peer: bytes, encoded: bytes) -> None:
        """In a thread: it may have 64 MiB."""
        try:
            self.give(ev.HistoryArrived(peer, await asyncio.to_thread(decode_history, encoded)))
        except RemoteProtocolError as error:
            self.history_failed(peer, error.why)
