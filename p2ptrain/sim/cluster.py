"""The cluster: many nodes of the production core under one virtual clock."""

from __future__ import annotations

from collections.abc import Sequence

from p2ptrain.core.events import Effect, Event, Started, Tick
from p2ptrain.core.node import Node
from p2ptrain.replay import FAILURES
from p2ptrain.sim.calendar import Gossiped
from p2ptrain.sim.executor import Executor
from p2ptrain.sim.ledger import Checker, Violation
from p2ptrain.sim.machine import HELD_UP_MAX, NEVER, SimNode, ToSome
from p2ptrain.sim.scenario import Scenario
from p2ptrain.sim.topology import Topology
from p2ptrain.sim.watch import Watch
from p2ptrain.sim.world import SimWorld

TICKS_MAX = 200  # ticks in a row that are due at once: more is a busy loop


class Cluster(SimWorld):
    """A swarm of simulated nodes: starts, ends and wakes their processes, and gives them their events."""

    def __init__(
        self, seed: int, scenario: Scenario, checkers: Sequence[Checker] = (), is_sparing: bool = False
    ) -> None:
        super().__init__(seed, scenario)
        self.watch = Watch(checkers, is_sparing)
        self.topology = Topology(self, self.give)
        self.executor = Executor(self, self.watch, self.topology, self.give, self.kill, self.stop)

    def run(self) -> None:
        """Runs until everyone has reached the goal or the time is up."""
        self.calendar.run(self.setup.scenario.seconds, self.nodes, self.hear)
        self.watch.at_end(self)

    # -----------------------------------------------------------------------------------------------
    # Processes

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
        self.give(
            node,
            Started(saved, node.disk.is_forgetful, node.claim, audit_share=self.setup.scenario.training.audit_share),
        )
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
