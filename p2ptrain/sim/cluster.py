"""The cluster: many nodes of the production core under one virtual clock.

Decoding and verifying a message once for everyone, and one event for all its receivers (calendar.py), make millions of
deliveries a minute possible.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import lru_cache

from p2ptrain.core.events import Effect, Event, Started, Tick
from p2ptrain.core.messages import Received, decode
from p2ptrain.core.node import Node
from p2ptrain.errors import RemoteProtocolError
from p2ptrain.replay import FAILURES
from p2ptrain.sim.calendar import Calendar, Gossiped
from p2ptrain.sim.checkers import Checker, Violation
from p2ptrain.sim.executor import Executor
from p2ptrain.sim.goal import Goal
from p2ptrain.sim.keys import FakeSigner
from p2ptrain.sim.machine import HELD_UP_MAX, NEVER, SimNode
from p2ptrain.sim.measurements import Measurements
from p2ptrain.sim.network import LinkModel
from p2ptrain.sim.rewriting import ToSome
from p2ptrain.sim.scenario import Scenario
from p2ptrain.sim.setup import Setup
from p2ptrain.sim.topology import Topology
from p2ptrain.sim.watch import Watch

DECODED_MAX = 20_000  # decoded messages kept: those of a few rounds
FORGET_ROUNDS = 64  # between two times that old rounds are forgotten
TICKS_MAX = 200  # ticks in a row that are due at once: more is a busy loop


def decoder(verifier: FakeSigner) -> Callable[[bytes], Received | None]:
    """Makes a function that decodes and verifies each message once for all nodes; it returns None for a bad one."""

    @lru_cache(DECODED_MAX)
    def decoded(envelope: bytes) -> Received | None:
        try:
            return decode(envelope, verifier)
        except RemoteProtocolError:
            return None

    return decoded


class Cluster:
    """A swarm of simulated nodes."""

    def __init__(
        self, seed: int, scenario: Scenario, checkers: Sequence[Checker] = (), is_sparing: bool = False
    ) -> None:
        self.setup = Setup(seed, scenario)
        self.rng = self.setup.stream("cluster")
        self.calendar = Calendar(self.rng)
        self.decode = decoder(FakeSigner(self.setup.run_id, b""))
        self.watch = Watch(checkers, is_sparing)
        self.network = LinkModel(scenario.links, self.setup.stream("network"))
        self.nodes: list[SimNode] = []
        self.key_index: dict[bytes, int] = {}
        self.metrics = Measurements(self.key_index, scenario.expect)
        self._forgets_at = FORGET_ROUNDS  # the round
        for _ in range(scenario.nodes):
            self.add_node()
        self.topology = Topology(self)
        self.goal = Goal(scenario, self.calendar, self.nodes)
        self.executor = Executor(self)

    def run(self) -> None:
        """Runs until everyone has reached the goal or the time is up."""
        self.calendar.run(self.setup.scenario.seconds, self.nodes, self.hear)
        self.watch.at_end(self)

    @property
    def honest(self) -> list[SimNode]:
        """The honest nodes whose processes are running."""
        return [node for node in self.nodes if node.honest and node.alive]

    @property
    def rounds(self) -> int:
        """The number of rounds that the swarm has decided."""
        return max((node.disk.state.round for node in self.nodes if node.honest), default=0)

    # -----------------------------------------------------------------------------------------------
    # Processes

    def add_node(self, claim: bytes = b"") -> SimNode:
        """Adds a machine, whose process is not running yet."""
        node = self.setup.machine(len(self.nodes), claim)
        self.nodes.append(node)
        self.key_index[node.key] = node.index
        return node

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
        self.give(node, Started(saved, node.disk.is_forgetful, node.claim))
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
        node.held_payloads.keep(node.disk.payloads)

    def stop(self, node: SimNode) -> None:
        """Ends the process properly, for good."""
        node.end()
        self.topology.refresh(node)
        node.leave()

    def forget_old(self, number: int) -> None:
        """Forgets, now and then, all rounds that no node can return to: a long simulation needs bounded memory.

        That is a history before the oldest that any disk holds; and processes that have ended, which are cycles.
        """
        if number < self._forgets_at:
            return
        self._forgets_at = number + FORGET_ROUNDS
        oldest = min(node.disk.base.round for node in self.nodes if not node.is_gone)
        before = oldest - self.setup.run_config.agreement.history_rounds
        if before > 0:
            self.executor.payloads.forget(before)
            self.executor.devices.forget(before)
            self.watch.forget(before)
            gc.collect()

    # -----------------------------------------------------------------------------------------------
    # Events

    def hear(self, node: SimNode, event: Gossiped) -> None:
        """Gives a node a gossiped event, unless it is an honest stranger's; that of liars arrives, as if by stream."""
        core, sender = node.process.core, event.sender
        if core is not None and (core.view().is_in(sender) or not self.nodes[self.key_index[sender]].honest):
            self.give(node, event)

    def give(self, node: SimNode, event: Event) -> None:
        """Gives a node an event, carries out its effects, and schedules its next tick."""
        process = node.process
        core = process.core
        if core is None:
            return
        now = self.calendar.now
        if process.asleep_until > now:
            if len(process.held_up) < HELD_UP_MAX:
                process.held_up.append(event)
            return
        local = node.clock.local(now)
        effects: Sequence[Effect | ToSome]
        try:
            effects = core.handle(event, local)
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
                effects = node.liar.rewrite(self, node.index, list(effects))
            self.executor.carry_out(node, effects)
        self.watch.after(self, node, event, effects)

    def _schedule_tick(self, node: SimNode, deadline: float) -> None:
        node.process.expect_tick(deadline)
        time = node.clock.virtual(deadline) + 1e-6  # rounding must not make it fire early
        self.calendar.timer(node, time, self._tick, node, deadline)

    def _tick(self, node: SimNode, due: float) -> None:
        process = node.process
        core = process.core
        if core is None or process.tick_at != due:
            return  # another tick was scheduled meanwhile
        process.expect_tick(NEVER)
        deadline = core.deadline
        if deadline is None:
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
        """Makes the node's clock jump, and then run at this rate."""
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
