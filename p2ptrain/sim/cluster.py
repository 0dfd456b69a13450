"""The cluster: many nodes of the production core under one virtual clock, and the executor of their effects.

The effect queue decides the order of effects and what waits for the disk, here as in the daemon (core/effect_queue.py).
Effects that take their time are in devices.py."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from p2ptrain.core import events as ev
from p2ptrain.core.events import Effect, Event, Started, Tick
from p2ptrain.core.history import decode_history, encode_answer
from p2ptrain.core.membership import OVER
from p2ptrain.core.node import Node
from p2ptrain.errors import RemoteProtocolError
from p2ptrain.replay import FAILURES
from p2ptrain.sim.calendar import Gossiped
from p2ptrain.sim.devices import Devices
from p2ptrain.sim.ledger import Checker, Violation
from p2ptrain.sim.machine import HELD_UP_MAX, NEVER, SimNode, ToSome
from p2ptrain.sim.network import name_of
from p2ptrain.sim.scenario import Scenario
from p2ptrain.sim.succession import Owners
from p2ptrain.sim.topology import DIAL_SECONDS, REQUEST_BYTES, Topology
from p2ptrain.sim.watch import Watch
from p2ptrain.sim.world import SimWorld

HISTORY_SECONDS = 8.0  # how long to wait for an answer
FORGET_ROUNDS = 64  # between two times that old rounds are forgotten
REDIAL_SECONDS = 20.0  # until a disconnected peer is connected again
Actions = dict[type, Callable[[SimNode, Any], None]]
TICKS_MAX = 200  # ticks in a row that are due at once: more is a busy loop


class Executor:
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
        self.give, self.kill, self.stop = give, kill, stop
        self.rng = world.setup.stream("driver")  # the saved seeds depend on this name
        self.devices = Devices(world, self.rng, give)
        self.owners = Owners(world, give)
        self._forgets_at = FORGET_ROUNDS  # the round
        self._slow_disks: dict[int, float | None] = {}  # by node: mean seconds of an fsync, while it is slow
        self._questions = count()
        self._actions: Actions = {
            ev.Publish: lambda node, effect: self._spread(node, effect.envelope, range(len(world.nodes))),
            ToSome: lambda node, effect: self._spread(
                node, effect.envelope, [world.key_index[key] for key in effect.recipients]
            ),
            ev.Send: self._send,
            ev.Ask: self._ask,
            ev.Fetch: self.devices.fetch,
            ev.Train: self.devices.train,
            ev.Pace: self.devices.keep_pace,
            ev.Audit: self.devices.audit,
            ev.Apply: self.devices.apply,
            ev.Return: lambda node, effect: None,  # its device keeps no residual
            ev.Persist: lambda node, effect: None,  # already written by the queue
            ev.NoteWrongState: lambda node, effect: world.metrics.mismatches.update([node.index]),
            ev.CatchUp: self.devices.catch_up,
            ev.AskHistory: self._ask_history,
            ev.SendHistory: self._send_history,
            ev.Disconnect: self._disconnect,
            ev.Stop: self._stop,
        }

    # -- The order of effects, and the disk ---------------------------------------------------------

    def carry_out(self, node: SimNode, effects: Sequence[ev.Effect | ToSome]) -> None:
        node.process.queue.add(effects)
        self._go_on(node)

    def _go_on(self, node: SimNode) -> None:
        process = node.process

        def act(effect: ev.Effect | ToSome) -> None:
            self._actions[type(effect)](node, effect)
            if process.fuse is not None and process.burn():
                self.kill(node)

        if records := process.queue.carry_out(act):
            calendar = self.world.calendar
            slow, usual = self._slow_disks.get(node.index), self.world.setup.scenario.disk.fsync_seconds
            mean = usual if slow is None else slow
            seconds = self.rng.expovariate(1.0 / mean) if mean else 0.0
            calendar.timer(node, calendar.now + seconds, self._written, node, records)

    def slow_disk(self, node: SimNode, fsync_seconds: float | None) -> None:
        self._slow_disks[node.index] = fsync_seconds

    def _written(self, node: SimNode, records: Sequence[ev.Record]) -> None:
        self.write(node, records)
        node.process.queue.written()
        self._go_on(node)

    def write(self, node: SimNode, records: Sequence[ev.Record]) -> None:
        for record in records:
            received = self.world.decode(record.envelope) if type(record) is ev.Said else None
            members = node.disk.state.members
            node.disk.write(record, received.message if received else None)
            if type(record) is ev.Certified:
                if node.honest and record.state.members != members:
                    was_lost = any(map(self._has_lost_the_quorum, self.world.honest))
                    self.watch.roster_came_into_force(self.world, record.state, was_lost)
                self.world.metrics.certified(node, record)
                self.owners.look(node, record.state)
                node.held_payloads.turn(record.state.round)
                if node.honest:
                    self._forget_old(record.state.round)

    def _has_lost_the_quorum(self, node: SimNode) -> bool:
        """Whether the node ever lost the quorum: if so, others may have had reason to follow the remaining members."""
        counters = node.core.view().counters if node.core else {}
        return bool(self.world.metrics.stalls[node.index] or counters.get("calls") or counters.get("regroups"))

    def _forget_old(self, number: int) -> None:
        """Forgets, now and then, all rounds that no node can return to: a long simulation needs bounded memory.

        That is a history before the oldest that any disk holds; and processes that have ended, which are cycles."""
        if number < self._forgets_at:
            return
        self._forgets_at = number + FORGET_ROUNDS
        oldest = min(node.disk.base.round for node in self.world.nodes if not node.is_gone)
        before = oldest - self.world.setup.run_config.agreement.history_rounds
        if before > 0:
            for each in (self.world.payloads, self.devices, self.watch):
                each.forget(before)
            gc.collect()

    # -- Messages -----------------------------------------------------------------------------------

    def _spread(self, node: SimNode, envelope: bytes, targets: Sequence[int]) -> None:
        event, payload = self._event_of(node, envelope)
        if type(event) is ev.MessageReceived:
            message = event.received.message
            self.world.metrics.sent(name_of(message), len(envelope), len(targets) - 1)
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
            self.world.metrics.sent("sent to one", len(envelope))
        if reached := self.world.reach(node, effect.peer, size):
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
        self.world.metrics.sent("asked", REQUEST_BYTES + 16 * len(effect.names))
        self.topology.tell(node, effect.peer, ev.Asked(node.key, effect.names))

    # -- Histories ----------------------------------------------------------------------------------

    def _ask_history(self, node: SimNode, effect: ev.AskHistory) -> None:
        self.world.metrics.sent("asked", REQUEST_BYTES)
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
        self.world.metrics.sent("history", len(encoded))
        if reached := self.world.reach(node, effect.peer, len(encoded)):
            peer, at = reached
            self.world.calendar.timer(peer, at, self._history_came, peer, node, bytes(encoded))

    def _history_came(self, node: SimNode, peer: SimNode, encoded: bytes) -> None:
        if node.process.questions.pop(peer.index, None) is None:
            return  # it was never asked for
        event: ev.Event
        try:
            event = ev.HistoryArrived(peer.key, decode_history(encoded))
        except RemoteProtocolError as error:
            event = ev.HistoryFailed(peer.key, error.why)
        self.give(node, event)

    def _disconnect(self, node: SimNode, effect: ev.Disconnect) -> None:
        self.world.metrics.disconnects[node.index] += 1
        peer, calendar = self.world.node_of(effect.peer), self.world.calendar
        calendar.at(calendar.now, self.topology.disconnect, node, peer, REDIAL_SECONDS)

    def _stop(self, node: SimNode, effect: ev.Stop) -> None:
        """Ends a process, unless its run has ended: it stands for the successor's nodes, which answer for that run."""
        if effect.why == OVER:
            self.world.goal.look(at_once=True)
        else:
            self.stop(node)


class Cluster(SimWorld):
    def __init__(
        self, seed: int, scenario: Scenario, checkers: Sequence[Checker] = (), is_sparing: bool = False
    ) -> None:
        super().__init__(seed, scenario)
        self.watch = Watch(checkers, is_sparing)
        self.topology = Topology(self, self.give)
        self.executor = Executor(self, self.watch, self.topology, self.give, self.kill, self.stop)

    def run(self) -> None:
        self.calendar.run(self.setup.scenario.seconds, self.nodes, self.hear)
        self.watch.at_end(self)

    # -- Processes ----------------------------------------------------------------------------------

    def start(self, node: SimNode, forgetful: bool = False) -> None:
        """Starts the node's process from its disk; `forgetful`: from an empty one."""
        assert node.core is None, "a process is started once"
        setup = self.setup
        if forgetful:
            node.forget(setup.new_disk(is_forgetful=True))
            for other in self.honest:
                self.watch.roster_came_into_force(self, other.disk.state)
        self.topology.drop(node)
        saved = node.disk.saved()
        node.state.kept.clear()
        head = next((each.head for each in node.disk.checkpoints if each.root == saved.applied_root), b"")
        node.state.become(saved.applied_round, saved.applied_root, head, node.disk.kept)
        rng = setup.stream("node", node.index, node.life + 1)
        node.begin(Node(setup.run_config, setup.run_id, node.key, node.signer, rng))
        share = setup.scenario.training.audit_share
        self.give(node, Started(saved, node.disk.is_forgetful, node.claim, audit_share=share))
        self.topology.refresh(node)

    def kill(self, node: SimNode) -> None:
        """Kills a process as SIGKILL does: queued records are lost; a random number of those being written survives."""
        if node.core is None:
            return
        writing, kept = node.process.queue.writing, 0
        while kept < len(writing) and self.rng.random() < self.setup.scenario.disk.kept:
            kept += 1
        self.executor.write(node, writing[:kept])
        node.end()
        self.topology.refresh(node)
        node.held_payloads.keep(node.disk.payloads())

    def stop(self, node: SimNode) -> None:
        node.end()
        self.topology.refresh(node)
        node.leave()

    # -- Events -------------------------------------------------------------------------------------

    def hear(self, node: SimNode, event: Gossiped) -> None:
        """Gives a node a gossiped event, unless it is an honest stranger's; that of liars arrives, as if by stream."""
        core, sender = node.process.core, event.sender
        if core is not None and (core.view().is_in(sender) or not self.nodes[self.key_index[sender]].honest):
            self.give(node, event)

    def give(self, node: SimNode, event: Event) -> None:
        """Gives a node an event, carries out its effects, and schedules its next tick."""
        process, core, now = node.process, node.process.core, self.calendar.now
        if core is None:
            return
        if process.asleep_until > now:
            if len(process.held_up) < HELD_UP_MAX:
                process.held_up.append(event)
            return
        local = node.clock.local(now)
        try:
            effects: Sequence[Effect | ToSome] = core.handle(event, local)
        except FAILURES:
            self.watch.observe(node, event, None, local)
            raise
        if self.watch.observers:
            self.watch.observe(node, event, effects, local)
        deadline = core.deadline
        if deadline is not None and deadline < process.tick_at:
            self._schedule_tick(node, deadline)
        if effects:
            if node.liar is not None:
                effects = node.liar.rewrite(core, effects)
            self.executor.carry_out(node, effects)
        self.watch.after(self, node, event, effects)

    def _schedule_tick(self, node: SimNode, deadline: float) -> None:
        node.process.expect_tick(deadline)
        time = node.clock.virtual(deadline) + 1e-6  # rounding must not make it fire early
        self.calendar.timer(node, time, self._tick, node, deadline)

    def _tick(self, node: SimNode, due: float) -> None:
        process, core = node.process, node.process.core
        if core is None or process.tick_at != due:
            return  # another tick was scheduled meanwhile
        process.expect_tick(NEVER)
        if (deadline := core.deadline) is None:
            return
        if deadline > node.clock.local(self.calendar.now):
            self._schedule_tick(node, deadline)
            return
        self.metrics.ticks[node.index] += 1
        self.give(node, Tick())
        self.metrics.look_for_stall(node)
        is_busy = core.deadline is not None and core.deadline <= node.clock.local(self.calendar.now)
        if process.ticks_in_a_row(is_busy) > TICKS_MAX:
            raise Violation(f"node {node.index} wanted to be called at once {TICKS_MAX} times in a row: a busy loop")

    def set_clock(self, node: SimNode, jump: float, rate: float) -> None:
        node.clock.set(self.calendar.now, jump, rate)
        node.process.expect_tick(NEVER)
        if node.core is not None and node.core.deadline is not None:
            self._schedule_tick(node, node.core.deadline)

    def wake(self, node: SimNode) -> None:
        """Wakes a sleeping machine, and hands it the events that waited."""
        life = node.life
        for event in node.process.wake():
            if node.life == life:
                self.give(node, event)
        if node.core is not None and node.core.deadline is not None:
            self._schedule_tick(node, node.core.deadline)
