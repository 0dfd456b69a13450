"""The watch: shows the checkers what honest nodes do and say, and shows observers everything.

Most messages only go into a node and have no effect; of these the checkers see a sample. In a large swarm they see, of
the rest, only what decides or applies a round."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from p2ptrain.core.events import Applied, Effect, Event, MessageReceived
from p2ptrain.core.state import AgreedState
from p2ptrain.replay import FORMAT, EventLog, Header
from p2ptrain.sim.ledger import Checker, are_liars, certified
from p2ptrain.sim.machine import SimNode, ToSome
from p2ptrain.sim.world import Setup, SimWorld

SIMULATED = "simulated"  # the kind of signer in the header of an event log
SWALLOWED_BETWEEN = 512  # messages without effect for each one that checkers see; a check costs several messages

Observer = Callable[[SimNode, Event, Sequence[Effect | ToSome] | None, float], None]  # None: it did not survive


class Watch:
    def __init__(self, checkers: Sequence[Checker], is_sparing: bool) -> None:
        self.checkers = tuple(checkers)
        self.observers: list[Observer] = []
        self.is_beyond = False  # a roster had more than f faulty members: at most one history is promised
        self.is_sparing = is_sparing  # checks only when a round was decided or applied

    def log(self, setup: Setup, index: int, log: EventLog) -> None:
        """Writes the events of one node to a log, for `p2ptrain replay`."""
        life = 0

        def note(node: SimNode, event: Event, effects: Sequence[object] | None, local: float) -> None:
            nonlocal life
            if node.index != index:
                return
            if node.life != life:
                life = node.life
                run, rng = setup.run_config.canonical().decode(), setup.rng_name("node", index, life)
                log.begin(Header(FORMAT, run, setup.run_id, node.key, rng, SIMULATED))
            log.note(local, event, effects)

        self.observers.append(note)

    def observe(self, node: SimNode, event: Event, effects: Sequence[Effect | ToSome] | None, local: float) -> None:
        for observer in self.observers:
            observer(node, event, effects, local)

    def after(self, world: SimWorld, node: SimNode, event: Event, effects: Sequence[Effect | ToSome]) -> None:
        """Shows the checkers what a node has done about an event."""
        is_swallowed = not effects and type(event) is MessageReceived  # nothing was said, decided or applied
        if is_swallowed and node.process.swallow() % SWALLOWED_BETWEEN:
            return
        if self.checkers and node.honest and not (self.is_sparing and not _is_progress(event, effects)):
            for checker in self.checkers:
                checker.after(world, node.index, event, effects)  # type: ignore[arg-type]

    def said(self, world: SimWorld, node: SimNode, envelope: bytes) -> None:
        for checker in self.checkers:
            checker.said(world, node.index, envelope)

    def forget(self, before: int) -> None:
        for checker in self.checkers:
            checker.forget(before)

    def at_end(self, world: SimWorld) -> None:
        for checker in () if self.is_beyond else self.checkers:
            checker.at_end(world)

    def roster_came_into_force(self, world: SimWorld, state: AgreedState, was_lost: bool = True) -> None:
        """Drops the checkers whose promise no longer holds with a new roster.

        With more than f faulty members, only a single history is still promised: the other checkers are dropped. If two
        quorums need not share a member without fault, not even that is promised, and the run ends.

        Liars are faulty, and so is a node that has lost its memory: it stays silent for the rounds in which it may have
        spoken. A roster of liars alone does not come into force, and a node that follows one has to be brought back;
        but if a quorum was lost before, there may have been nothing better to follow."""
        if not was_lost and are_liars(world, state.members):
            return
        members, roster = [world.node_of(key) for key in state.members], state.roster
        faulty = sum(not node.honest or node.has_forgotten for node in members)
        if faulty > roster.tolerated:
            self.is_beyond = True
            self.checkers = tuple(checker for checker in self.checkers if checker.holds_beyond)
        if faulty >= 2 * roster.quorum - roster.size:
            world.calendar.stop()


def _is_progress(event: Event, effects: Sequence[Effect | ToSome]) -> bool:
    """Whether a round was decided or applied, or it is time to sample an event that was only taken in."""
    is_sampled = type(event) is MessageReceived and not effects
    return type(event) is Applied or is_sampled or bool(certified(effects))
