"""The executor of simulated nodes: carries out effects, as the daemon does with the real world.

The effect queue decides the order and what waits for the disk, here as there (core/effect_queue.py). Effects that
take their time are in devices.py.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from p2ptrain.core import events as ev
from p2ptrain.core.history import History, decode_history, encode_answer
from p2ptrain.core.messages import Message
from p2ptrain.errors import RemoteProtocolError
from p2ptrain.sim.calendar import Gossiped
from p2ptrain.sim.devices import Devices
from p2ptrain.sim.ledger import Violation
from p2ptrain.sim.machine import SimNode, ToSome
from p2ptrain.sim.topology import DIAL_SECONDS, REQUEST_BYTES, Topology
from p2ptrain.sim.watch import Watch
from p2ptrain.sim.world import SimWorld

HISTORY_SECONDS = 8.0  # how long to wait for an answer
FORGET_ROUNDS = 64  # between two times that old rounds are forgotten
REDIAL_SECONDS = 20.0  # until a disconnected peer is connected again
Actions = dict[type, Callable[[SimNode, Any], None]]


class Executor:
    """Carries out the effects of all nodes."""

    def __init__(
        self,
        world: SimWorld,
        watch: Watch,
        topology: Topology,
        give: Callable[[SimNode, ev.Event], None],
        kill: Callable[[SimNode], None],
        stop: Callable[[SimNode], None],
    ) -> None:
        self.world, self.watch, self.topology = world, watch, topology
        self.give, self.kill = give, kill
        self.rng = world.setup.stream("driver")  # the saved seeds depend on this name
        self.devices = Devices(world, self.rng, give)
        self._forgets_at = FORGET_ROUNDS  # the round
        self._slow_disks: dict[int, float] = {}  # by node: mean seconds of an fsync
        self._questions = count()
        self._actions: Actions = {
            ev.Publish: self._publish,
            ToSome: self._publish_to_some,
            ev.Send: self._send,
            ev.Ask: self._ask,
            ev.Fetch: self.devices.fetch,
            ev.Train: self.devices.train,
            ev.Pace: self.devices.keep_pace,
            ev.Audit: self.devices.audit,
            ev.Apply: self.devices.apply,
            ev.Return: lambda node, effect: world.metrics.returned.update([node.index]),
            ev.Persist: lambda node, effect: None,  # already written by the queue
            ev.NoteWrongState: lambda node, effect: world.metrics.mismatches.update([node.index]),
            ev.CatchUp: self.devices.catch_up,
            ev.AskHistory: self._ask_history,
            ev.SendHistory: self._send_history,
            ev.Disconnect: self._disconnect,
            ev.Stop: lambda node, effect: stop(node),
        }

    # -----------------------------------------------------------------------------------------------
    # The order of effects, and the disk

    def carry_out(self, node: SimNode, effects: Sequence[ev.Effect | ToSome]) -> None:
        node.process.queue.add(effects)
        self._go_on(node)

    def _go_on(self, node: SimNode) -> None:
        """Carries out queued effects until one has to wait for the disk."""
        process = node.process

        def act(effect: ev.Effect | ToSome) -> None:
            self._actions[type(effect)](node, effect)
            if process.fuse is not None and process.burn():
                self.kill(node)

        if records := process.queue.carry_out(act):
            calendar = self.world.calendar
            mean = self._slow_disks.get(node.index, self.world.setup.scenario.disk.fsync_seconds)
            seconds = self.rng.expovariate(1.0 / mean) if mean else 0.0
            calendar.timer(node, calendar.now + seconds, self._written, node, records)

    def slow_disk(self, node: SimNode, fsync_seconds: float) -> None:
        """Sets the mean fsync time of this node's disk."""
        self._slow_disks[node.index] = fsync_seconds

    def mend_disk(self, node: SimNode) -> None:
        self._slow_disks.pop(node.index, None)

    def _written(self, node: SimNode, records: Sequence[ev.Record]) -> None:
        self.write(node, records)
        node.process.queue.written()
        self._go_on(node)

    def write(self, node: SimNode, records: Sequence[ev.Record]) -> None:
        """Writes records to the disk."""
        for record in records:
            message: Message | None = None
            if type(record) is ev.Said:
                received = self.world.decode(record.envelope)
                message = received.message if received else None
            members = node.disk.state.members
            node.disk.write(record, message)
            if type(record) is ev.Certified:
                if node.honest and record.state.members != members:
                    was_lost = any(map(self._has_lost_the_quorum, self.world.honest))
                    self.watch.roster_came_into_force(self.world, record.state, was_lost)
                self.world.metrics.certified(node, record)
                node.held_payloads.turn(record.state.round)
                if node.honest:
                    self._forget_old(record.state.round)

    def _has_lost_the_quorum(self, node: SimNode) -> bool:
        """Whether the node ever lost the quorum: if so, others may have had reason to follow the remaining members."""
        counters = node.core.view().counters if node.core else {}
        return bool(self.world.metrics.stalls[node.index] or counters.get("calls") or counters.get("regroups"))

    def _forget_old(self, number: int) -> None:
        """Forgets, now and then, all rounds that no node can return to: a long simulation needs bounded memory.

        That is a history before the oldest that any disk holds; and processes that have ended, which are cycles.
        """
        if number < self._forgets_at:
            return
        self._forgets_at = number + FORGET_ROUNDS
        oldest = min(node.disk.base.round for node in self.world.nodes if not node.is_gone)
        before = oldest - self.world.setup.run_config.agreement.history_rounds
        if before > 0:
            for each in (self.world.payloads, self.devices, self.watch):
                each.forget(before)
            gc.collect()

    # -----------------------------------------------------------------------------------------------
    # Messages

    def _publish(self, node: SimNode, effect: ev.Publish) -> None:
        self._spread(node, effect.envelope, range(len(self.world.nodes)))

    def _publish_to_some(self, node: SimNode, effect: ToSome) -> None:
        self._spread(node, effect.envelope, [self.world.key_index[key] for key in effect.recipients])

    def _spread(self, node: SimNode, envelope: bytes, targets: Sequence[int]) -> None:
        event, payload = self._event_of(node, envelope)
        if type(event) is ev.MessageReceived:
            message = event.received.message
            self.world.metrics.published(node, message, len(envelope), len(targets) - 1)
            if self.world.network.losing and self.world.network.loses(node.index, message):
                return
        arrivals = self.world.network.spread(node.index, targets, self.world.calendar.now, len(envelope))
        self.world.calendar.fly(arrivals, event, payload)

    def _event_of(self, node: SimNode, envelope: bytes) -> tuple[Gossiped, bytes]:
        """Returns the event that a node's message becomes at its receivers, and the digest of the attached payload."""
        received = self.world.decode(envelope)
        if received is None:
            if node.honest:
                raise Violation(f"node {node.index} is honest and said what nobody can decode: {envelope[:80]!r}")
            return ev.MalformedReceived(node.key, "not a message"), b""
        if node.honest and getattr(received.message, "author", node.key) == node.key:
            self.watch.said(self.world, node, envelope)
        if not received.attachment:
            return ev.MessageReceived(node.key, received), b""
        name = received.message.payload  # type: ignore[union-attr]
        return ev.MessageReceived(node.key, received, self.world.payloads.is_good(name)), name

    def _send(self, node: SimNode, effect: ev.Send) -> None:
        size = sum(map(len, effect.envelopes))
        for envelope in effect.envelopes:
            self.world.metrics.sent(node, "sent to one", len(envelope))
        reached = self.world.reach(node, effect.peer, size)
        if reached:
            peer, at = reached
            events = [self._event_of(node, each) for each in effect.envelopes]
            self.world.calendar.timer(peer, at, self._arrive, peer, events)

    def _arrive(self, peer: SimNode, events: list[tuple[ev.Event, bytes]]) -> None:
        life = peer.life
        for event, payload in events:
            if peer.life == life:
                if payload:
                    peer.held_payloads.add(payload)
                self.give(peer, event)

    def _ask(self, node: SimNode, effect: ev.Ask) -> None:
        self.world.metrics.sent(node, "asked", REQUEST_BYTES + 16 * len(effect.names))
        self.topology.tell(node, effect.peer, ev.Asked(node.key, effect.names))

    # -----------------------------------------------------------------------------------------------
    # Histories

    def _ask_history(self, node: SimNode, effect: ev.AskHistory) -> None:
        self.world.metrics.sent(node, "asked", REQUEST_BYTES)
        index = self.world.key_index.get(effect.peer, -1)
        question = node.process.questions[index] = next(self._questions)
        is_there = self.topology.tell(node, effect.peer, ev.HistoryAsked(node.key, effect.branch, effect.round))
        seconds = HISTORY_SECONDS if is_there else DIAL_SECONDS
        calendar = self.world.calendar
        calendar.timer(node, calendar.now + seconds, self._give_up, node, index, question, effect.peer)

    def _give_up(self, node: SimNode, index: int, question: int, peer: bytes) -> None:
        if node.process.questions.get(index) == question:
            del node.process.questions[index]
            self.give(node, ev.HistoryFailed(peer, "no answer"))

    def _send_history(self, node: SimNode, effect: ev.SendHistory) -> None:
        encoded = encode_answer(effect.history)
        if encoded is None:
            return
        self.world.metrics.sent(node, "history", len(encoded))
        reached = self.world.reach(node, effect.peer, len(encoded))
        if reached:
            peer, at = reached
            self.world.calendar.timer(peer, at, self._history_came, peer, node, bytes(encoded))

    def _history_came(self, node: SimNode, peer: SimNode, encoded: bytes) -> None:
        if node.process.questions.pop(peer.index, None) is None:
            return  # it was never asked for
        event: ev.Event
        try:
            history: History = decode_history(encoded)
            event = ev.HistoryArrived(peer.key, history)
        except RemoteProtocolError as error:
            event = ev.HistoryFailed(peer.key, error.why)
        self.give(node, event)

    # -----------------------------------------------------------------------------------------------
    # The rest

    def _disconnect(self, node: SimNode, effect: ev.Disconnect) -> None:
        self.world.metrics.disconnects[node.index] += 1
        peer, calendar = self.world.node_of(effect.peer), self.world.calendar
        calendar.at(calendar.now, self.topology.disconnect, node, peer, REDIAL_SECONDS)
