"""The cluster: many nodes of the production core under one virtual clock.

One heap holds everything that is going to happen. A published message is one entry, however many it reaches: it walks
a list of arrivals, one at a time, and all receivers share one event. That, and decoding and verifying a message once
for everyone, is what makes millions of deliveries a minute possible.

Everything is drawn from generators that are seeded by the scenario's seed and a name, so that the same seed gives the
same run on every machine.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from heapq import heappop, heappush, heapreplace
from itertools import count
from random import Random
from typing import Any, Literal

import msgspec
from blake3 import blake3

from p2ptrain.core.events import Applied, Certified, Effect, Event, MessageReceived, Persist, Started, Tick
from p2ptrain.core.messages import Received, decode
from p2ptrain.core.node import Node
from p2ptrain.core.state import Admitted, AgreedState, genesis
from p2ptrain.digest import digest
from p2ptrain.errors import RemoteProtocolError
from p2ptrain.replay import FAILURES
from p2ptrain.sim.checkers import Checker, Violation
from p2ptrain.sim.connections import Connections
from p2ptrain.sim.disk import Checkpoint, Disk
from p2ptrain.sim.driver import Driver
from p2ptrain.sim.keys import FakeSigner, node_key
from p2ptrain.sim.ledger import are_liars
from p2ptrain.sim.machine import HELD_UP_MAX, NEVER, Device, Lifetime, LocalClock, Shelf, SimNode
from p2ptrain.sim.metrics import Metrics
from p2ptrain.sim.network import Network
from p2ptrain.sim.rewriting import ToSome
from p2ptrain.sim.scenario import Lie, Scenario

DECODED_MAX = 20_000  # messages whose decoded form is kept: those of a few rounds
TICKS_MAX = 200  # in a row that are due at once: more is a busy loop
SWALLOWED_BETWEEN = 512  # messages that a node only takes in, for each that checkers see: a look costs as much as a few

Observer = Callable[[SimNode, Event, Sequence[Effect | ToSome] | None, float], None]  # None: it did not survive

CheckEvery = Literal["event", "round"]


class Flight:
    """A published message on its way: one entry on the heap, one event for all."""

    __slots__ = ("arrivals", "event", "payload")

    def __init__(self, arrivals: list[tuple[float, int]], event: Event, payload: bytes) -> None:
        self.arrivals, self.event = arrivals, event
        self.payload = payload  # that rides along; empty: none


class Timer:
    """Something that one life of a node waits for."""

    __slots__ = ("action", "arguments", "life", "node")

    def __init__(self, node: SimNode, action: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.node, self.life = node, node.life
        self.action, self.arguments = action, arguments


class Decoder:
    """Decodes and verifies a message once for all nodes."""

    def __init__(self, verifier: FakeSigner) -> None:
        self._verifier = verifier
        self._known: dict[bytes, Received] = {}

    def __call__(self, envelope: bytes) -> Received | None:
        """None if nobody takes it."""
        received = self._known.get(envelope)
        if received is None:
            try:
                received = decode(envelope, self._verifier)
            except RemoteProtocolError:
                return None
            if len(self._known) >= DECODED_MAX:
                for old in list(self._known)[: DECODED_MAX // 2]:
                    del self._known[old]
            self._known[envelope] = received
        return received


class Cluster:
    """A swarm of simulated nodes."""

    def __init__(
        self,
        n: int,
        seed: int,
        scenario: Scenario,
        checkers: Sequence[Checker] = (),
        check_every: CheckEvery = "event",
    ) -> None:
        self.seed, self.scenario, self.run_config = seed, scenario, scenario.run(seed)
        self.checkers = tuple(checkers)
        self.is_sparing = check_every == "round" or not checkers  # look only when a round was decided or applied
        self.run_id = digest("simulated run", str(seed).encode())
        self.now = 0.0
        self.heap: list[tuple[float, int, Any]] = []
        self.order = count()
        self.deliveries = 0
        self.log: list[tuple[float, int, bytes]] = []  # everything that honest nodes have said themselves
        self.is_logging = False
        self.observers: list[Observer] = []
        self.trace: blake3 | None = None
        self.rng = self.stream("cluster")
        self.decode = Decoder(FakeSigner(self.run_id, b""))
        self.network = Network(scenario.links, self.stream("network"))
        self.metrics = Metrics()
        self.driver = Driver(self)
        self.nodes: list[SimNode] = []
        self.everyone: list[int] = []
        self.key_index: dict[bytes, int] = {}
        self.roster_size = min(n, self.run_config.admission.seats_max)
        self.genesis = self._genesis(n)
        self.next_look = 0.0
        self.goal = scenario.rounds
        self.is_done = self.is_beyond = False
        self.resumed_at: float | None = None  # when everyone went on after the faults
        self._liars = {
            index for fault in scenario.fault if isinstance(fault, Lie) for index in scenario.pick(fault.nodes)
        }
        for _ in range(n):
            self.add_node()
        self.connections = Connections(self)

    def stream(self, *names: object) -> Random:
        """A generator of its own for each use, so that one more draw here changes nothing there."""
        return Random(" ".join(map(str, (self.seed, *names))))

    def _genesis(self, n: int) -> AgreedState:
        keys = [node_key(self.seed, index) for index in range(n)]
        root = digest("simulated state", self.run_id)
        state = genesis(self.run_id, tuple(keys[: self.roster_size]), root)
        admitted = tuple(Admitted(key, 0, 0, 0) for key in sorted(keys))
        return msgspec.structs.replace(state, admitted=admitted)

    # -----------------------------------------------------------------------------------------------
    # Nodes

    def add_node(self) -> SimNode:
        """One more machine. It is not running yet."""
        index = len(self.nodes)
        draw = self.stream("machine", index)
        training, kept = self.scenario.training, self.run_config.agreement.history_rounds
        pace = 1.0 + training.spread * draw.uniform(-1.0, 1.0)
        for slow in training.slow:
            if index in self.scenario.pick(slow.nodes):
                pace *= slow.times
        device = Device(0, self.genesis.root, self.genesis.head, pace)
        key = node_key(self.seed, index)
        signer = FakeSigner(self.run_id, key)
        clock = LocalClock(draw.uniform(0.0, 10_000.0))
        node = SimNode(index, signer, self._new_disk(), device, Shelf(kept), clock, index not in self._liars)
        self.nodes.append(node)
        self.everyone.append(index)
        self.key_index[key] = index
        return node

    def _new_disk(self) -> Disk:
        start = self.genesis
        return Disk(Checkpoint(0, start.root, start.head), start, self.run_config.agreement.history_rounds)

    def start(self, node: SimNode, forgetful: bool = False) -> None:
        """Start the node's process, with what its disk holds."""
        assert node.core is None, "a process is started once"
        if forgetful:
            node.has_forgotten = True
            for other in self.honest:
                self.roster_came_into_force(other.disk.state)
            node.disk = self._new_disk()
            node.shelf.keep(())
        self.connections.drop(node)
        saved = node.disk.saved()
        node.life += 1
        node.device.kept.clear()
        head = next((each.head for each in node.disk.checkpoints if each.root == saved.applied_root), b"")
        node.device.become(saved.applied_round, saved.applied_root, head, node.disk.kept)
        rng = Random(self.rng_name(node.index, node.life))
        node.process = Lifetime(Node(self.run_config, self.run_id, node.key, node.signer, rng))
        self.give(node, Started(saved, forgetful, node.ticket))
        self.connections.refresh(node)

    def rng_name(self, index: int, life: int) -> str:
        """The seed of a core's own generator."""
        return f"{self.seed} node {index} {life}"

    def kill(self, node: SimNode) -> None:
        """SIGKILL: what was not persisted is gone, and of what was being written, as much as fate leaves."""
        if node.core is None:
            return
        writing, kept = node.process.queue.writing, 0
        while kept < len(writing) and self.rng.random() < self.scenario.disk.kept:
            kept += 1
        self.driver.write(node, writing[:kept])
        self._end(node)
        node.shelf.keep(node.disk.payloads)

    def stop(self, node: SimNode) -> None:
        """The process has ended properly."""
        self._end(node)
        node.has_left = node.is_gone = True

    def _end(self, node: SimNode) -> None:
        node.process.queue.clear()  # it may be at it just now
        node.process = Lifetime()
        node.life += 1
        node.device.training, node.device.busy_until = None, 0.0
        self.connections.refresh(node)

    # -----------------------------------------------------------------------------------------------
    # Time

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        """Do something at a time."""
        heappush(self.heap, (max(time, self.now), next(self.order), (action, arguments)))

    def after(self, low: float, high: float, action: Callable[..., None], *arguments: Any) -> None:
        """Do something after a time between these two."""
        self.at(self.now + self.rng.uniform(low, high), action, *arguments)

    def timer(self, node: SimNode, time: float, action: Callable[..., None], *arguments: Any) -> None:
        """Do something for a node at a time, unless its process ends before, or later if it sleeps."""
        heappush(self.heap, (max(time, self.now), next(self.order), Timer(node, action, arguments)))

    def fly(self, arrivals: list[tuple[float, int]], event: Event, payload: bytes) -> None:
        """Let an event arrive at several nodes; the last arrival comes first in the list."""
        if arrivals:
            self.deliveries += len(arrivals)
            heappush(self.heap, (arrivals[-1][0], next(self.order), Flight(arrivals, event, payload)))

    def run(self) -> None:
        """Until everyone has reached the goal, or the time is over.

        Without the collector of cycles: it would look through millions of messages again and again, and what a
        round leaves behind holds no cycles.
        """
        was_on = gc.isenabled()
        gc.disable()
        try:
            self._run()
        finally:
            if was_on:
                gc.enable()

    def _run(self) -> None:
        heap, nodes, give = self.heap, self.nodes, self.give
        end = self.scenario.seconds
        while heap and not self.is_done:
            time, place, item = heap[0]
            if time > end:
                break
            self.now = time
            if type(item) is Flight:
                arrivals = item.arrivals
                node = nodes[arrivals.pop()[1]]
                if arrivals:
                    heapreplace(heap, (arrivals[-1][0], place, item))
                else:
                    heappop(heap)
                if item.payload and node.core is not None:
                    node.shelf.add(item.payload)
                give(node, item.event)
            else:
                heappop(heap)
                self._fire(item, time)
        self.now = min(self.now, end)
        for checker in () if self.is_beyond else self.checkers:
            checker.at_end(self)

    def _fire(self, item: Timer | tuple[Callable[..., None], tuple[Any, ...]], time: float) -> None:
        if type(item) is not Timer:
            action, arguments = item  # type: ignore[misc]
            action(*arguments)
            return
        node = item.node
        if node.life != item.life:
            return
        if node.process.asleep_until > time:
            heappush(self.heap, (node.process.asleep_until, next(self.order), item))
            return
        item.action(*item.arguments)

    # -----------------------------------------------------------------------------------------------
    # Events

    def give(self, node: SimNode, event: Event) -> None:
        """Give a node an event, carry out what it wants, and see when it wants to be called."""
        process = node.process
        core = process.core
        if core is None:
            return
        if process.asleep_until > self.now:
            if len(process.held_up) < HELD_UP_MAX:
                process.held_up.append(event)
            return
        local = node.clock.local(self.now)
        effects: Sequence[Effect | ToSome]
        try:
            effects = core.handle(event, local)
        except FAILURES:
            self._observe(node, event, None, local)
            raise
        if self.observers:
            self._observe(node, event, effects, local)
        deadline = core.deadline
        if deadline is not None and deadline < process.tick_at:
            self._schedule_tick(node, deadline)
        if effects:
            if node.liar is not None:
                effects = node.liar.rewrite(self, node.index, list(effects))
            self.driver.carry_out(node, effects)
        elif type(event) is MessageReceived:  # only taken in: nothing was said, decided or applied
            process.swallowed += 1
            if process.swallowed % SWALLOWED_BETWEEN:
                return
        if self.checkers and node.honest and not (self.is_sparing and not _is_progress(event, effects)):
            for checker in self.checkers:
                checker.after(self, node.index, event, effects)  # type: ignore[arg-type]

    def _observe(self, node: SimNode, event: Event, effects: Sequence[Effect | ToSome] | None, local: float) -> None:
        for observer in self.observers:
            observer(node, event, effects, local)

    def _schedule_tick(self, node: SimNode, deadline: float) -> None:
        node.process.tick_at = deadline
        time = node.clock.virtual(deadline) + 1e-6  # rounding must not bring it too early
        self.timer(node, time, self._tick, node, deadline)

    def _tick(self, node: SimNode, due: float) -> None:
        process = node.process
        core = process.core
        if core is None or process.tick_at != due:
            return  # another one was scheduled meanwhile
        process.tick_at = NEVER
        deadline = core.deadline
        if deadline is None:
            return
        if deadline > node.clock.local(self.now):
            self._schedule_tick(node, deadline)
            return
        self.metrics.ticks[node.index] += 1
        self.give(node, Tick())
        self.metrics.look_for_stall(node)
        is_busy = core.deadline is not None and core.deadline <= node.clock.local(self.now)
        process.busy = process.busy + 1 if is_busy else 0
        if process.busy > TICKS_MAX:
            raise Violation(f"node {node.index} wanted to be called at once {TICKS_MAX} times in a row: a busy loop")

    def set_clock(self, node: SimNode, jump: float, rate: float) -> None:
        """The node's clock jumps, and goes at this rate from now on."""
        node.clock.set(self.now, jump, rate)
        node.process.tick_at = NEVER
        if node.core is not None and node.core.deadline is not None:
            self._schedule_tick(node, node.core.deadline)

    def wake(self, node: SimNode) -> None:
        """The machine goes on: what waited comes in."""
        node.process.asleep_until = 0.0
        events, life = list(node.process.held_up), node.life
        node.process.held_up.clear()
        for event in events:
            if node.life == life:
                self.give(node, event)
        if node.core is not None and node.core.deadline is not None:
            self._schedule_tick(node, node.core.deadline)

    # -----------------------------------------------------------------------------------------------
    # The end

    @property
    def honest(self) -> list[SimNode]:
        """Honest nodes whose processes run."""
        return [node for node in self.nodes if node.honest and node.alive]

    def look(self) -> None:
        """See whether the goal is reached; called when a round was applied, and at times."""
        if self.is_done or self.now < self.next_look:
            return
        self.next_look = self.now + min(1.0, self.scenario.training.seconds / 4)
        if self.now < self.scenario.end_of_faults:
            return
        waiting = [node for node in self.nodes if node.honest and not node.is_gone]
        if self.resumed_at is None and not self._has_resumed(waiting):
            return
        # With nobody left there is nobody who has reached it.
        self.is_done = bool(waiting) and all(node.alive and node.device.round >= self.goal for node in waiting)

    def _has_resumed(self, waiting: list[SimNode]) -> bool:
        """Whether, since the faults ended, everyone's state has moved on, on one branch."""
        since = self.scenario.end_of_faults
        branches = {node.disk.state.branch for node in waiting}
        if len(branches) > 1 or not all(node.alive and node.moved_at > since for node in waiting):
            return False
        self.resumed_at = self.now
        if self.scenario.fault:
            highest = max((node.device.round for node in waiting), default=0)
            self.goal = max(self.goal, highest + self.scenario.rounds_after)
        return True

    def roster_came_into_force(self, state: AgreedState, was_lost: bool = True) -> None:
        """With more than f faulty members in it, one history is all that is promised any more: the other checkers are
        dismissed. Where two quorums need not share a member without fault, not even that is, and the run ends.

        Faulty are liars, and who has lost its memory: it is silent for as long as it may have spoken. A roster of
        liars alone does not come into force, and whoever believes in one is to be brought back; but where a quorum was
        lost before, there may have been nothing better to follow.
        """
        if not was_lost and are_liars(self, state.members):
            return
        members, roster = [self.nodes[self.key_index[key]] for key in state.members], state.roster
        faulty = sum(not node.honest or node.has_forgotten for node in members)
        if faulty > roster.tolerated:
            self.is_beyond = True
            self.checkers = tuple(checker for checker in self.checkers if checker.holds_beyond)
        if faulty >= 2 * roster.quorum - roster.size:
            self.is_done = True

    def faults_ended(self) -> None:
        """From here on the swarm has to recover."""
        self.next_look = 0.0
        self.look()

    def trace_events(self) -> None:
        """Keep a rolling digest of every event: the same seed has to give the same."""
        self.trace = blake3()
        encoder = msgspec.msgpack.Encoder()

        def note(node: SimNode, event: Event, effects: Sequence[Effect | ToSome] | None, local: float) -> None:
            assert self.trace is not None
            self.trace.update(encoder.encode((self.now, node.index, local, event, len(effects or ()))))

        self.observers.append(note)

    def log_messages(self) -> None:
        self.is_logging = True

    @property
    def rounds(self) -> int:
        """Rounds that the swarm has decided on."""
        return max((node.disk.state.round for node in self.nodes if node.honest), default=0)


def _is_progress(event: Event, effects: Sequence[Effect | ToSome]) -> bool:
    """Whether a round was decided or applied: how often one looks at a large swarm, beside what is only taken in."""
    if type(event) is Applied or (type(event) is MessageReceived and not effects):
        return True
    return any(type(effect) is Persist and type(effect.record) is Certified for effect in effects)
