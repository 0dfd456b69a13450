"""Succession in the simulator: what owners do about motions, and whether a run ends as its manifests say.

Owners follow a standing rule: after a while they assent to the motion that most assent to, sometimes to none; a
roll-back they check against the roots that they know. The checker counts motions and assents again, from manifests
alone, and shares no judgement with the core (core/succession.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from p2ptrain.core.events import AssentRequested, Effect, Event, MoveRequested, Stop
from p2ptrain.core.history import Beginning
from p2ptrain.core.manifest import Manifest
from p2ptrain.core.membership import OVER
from p2ptrain.core.messages import NOTHING
from p2ptrain.core.state import AgreedState
from p2ptrain.core.succession import NOTICE_ROUNDS, Motion
from p2ptrain.core.view import NodeView
from p2ptrain.digest import digest
from p2ptrain.sim.ledger import Checker, Guarantee, Ledger, Members, Violation, certified
from p2ptrain.sim.machine import SimNode
from p2ptrain.sim.scenario import OwnersMove
from p2ptrain.sim.world import SimWorld

CHANGE = b'{"eval":{"every_rounds":%d}}'
UPGRADE, UPGRADED = b'{"protocol":3}', 3
FICKLE = 0.1  # how often an owner wants none
OWNER_SECONDS_MIN = 0.2
KNOWN_ROUNDS = 64  # after a round, in which its root is looked for


def motion_for(view: NodeView, fault: OwnersMove, draw: Random) -> MoveRequested:
    state, last = view.state, view.state.round + NOTICE_ROUNDS + draw.randint(1, fault.rounds_ahead_max)
    change = CHANGE % draw.randint(1, 49)  # 50 is the default
    change = draw.choice((change, UPGRADE)) if view.run.protocol < UPGRADED else change
    if fault.back:
        return MoveRequested(last, state.root_round, state.root, draw.choice((b"{}", change)))
    return MoveRequested(last, last, NOTHING, change)


class Owners:
    """Gives nodes their owners' assents, some time after they see what is moved."""

    def __init__(self, world: SimWorld, give: Callable[[SimNode, Event], None]) -> None:
        self.world, self.give = world, give
        self.draw = world.setup.stream("owners")
        self.refusing = world.setup.scenario.pick(world.setup.scenario.refusing)
        self.thinking: dict[int, int] = {}  # by node: the life in which its owner will speak

    def look(self, node: SimNode, state: AgreedState) -> None:
        is_thinking = self.thinking.get(node.index) == node.life
        if state.succession.motions and not is_thinking and node.index not in self.refusing:
            self.thinking[node.index] = node.life
            seconds = max(OWNER_SECONDS_MIN, self.world.setup.scenario.training.seconds)
            at = self.world.calendar.now + self.draw.expovariate(1.0 / seconds)
            self.world.calendar.timer(node, at, self._speak, node)

    def _speak(self, node: SimNode) -> None:
        del self.thinking[node.index]
        assert node.core is not None, "the timer is dropped with the process"
        view = node.core.view()
        here, wanted = view.state.succession, NOTHING
        if not node.honest:
            wanted = self.draw.choice([NOTHING, *(motion.name for motion in here.motions)])
        elif self.draw.random() >= FICKLE:
            good = [motion.name for motion in here.motions if not motion.goes_back or _is_known(motion, view)]
            wanted = max(good, key=lambda name: (here.assents_to(name), name), default=NOTHING)
        if here.motions and wanted != here.assent_of(node.key):
            self.give(node, AssentRequested(wanted))


def _is_known(motion: Motion, view: NodeView) -> bool:
    """Whether a roll-back's root is certified, as far as the node's kept rounds show."""
    state, root = view.state, (motion.weights, motion.root)
    later = range(motion.weights + 1, min(motion.weights + KNOWN_ROUNDS, state.round) + 1)
    kept = [entry.manifest for number in later if (entry := view.entry(number))]
    return root in {(state.root_round, state.root), *((each.root_round, each.root) for each in kept)}


# -- Counted again ----------------------------------------------------------------------------------


class Minutes(Struct, frozen=True):
    """The motions and assents that the manifests of a branch have carried, up to a round."""

    round: int
    root_round: int
    remembers: bool  # what those have said who have lost their seat
    motions: dict[bytes, Motion] = {}  # those that are open, by author
    # By member: the round and the motion of the newest word that a manifest carried; no motion: it has lost its seat.
    words: dict[bytes, tuple[int, bytes]] = {}
    decided: Motion | None = None

    @property
    def is_closing(self) -> bool:
        return self.decided is not None and self.round >= self.decided.last

    @property
    def is_over(self) -> bool:
        last = self.decided
        return last is not None and self.is_closing and (last.weights < last.last or self.root_round >= last.last)

    def assenting(self, name: bytes) -> set[bytes]:
        return {member for member, (_, word) in self.words.items() if word == name}


def name_of(motion: Motion) -> bytes:
    return digest("motion", msgspec.msgpack.encode(motion))


def after(before: Minutes, manifest: Manifest, members: Members) -> Minutes:
    """Returns the minutes after a manifest, which leaves these members."""
    if before.decided is not None:
        return replace(before, round=manifest.round, root_round=manifest.root_round)
    words, motions = dict(before.words), before.motions | {motion.author: motion for motion in manifest.motions}
    said = [(each.member, each.made, each.motion, True) for each in manifest.assents]
    for author, made, word, is_assent in [*said, *((m.author, m.made, name_of(m), False) for m in manifest.motions)]:
        last, known = before.words.get(author, (-1, b""))
        if made < last or (made == last and known and is_assent):
            raise Violation(f"round {manifest.round} carries words of round {made} after others of round {last}")
        if made >= words.get(author, (-1, b""))[0]:
            words[author] = made, word
    gone = words.keys() - set(members)
    words = {key: (made, b"" if key in gone else word) for key, (made, word) in words.items()
             if before.remembers or key not in gone}  # fmt: skip
    motions = {key: motion for key, motion in motions.items() if key in members and motion.last > manifest.round}
    found = Minutes(manifest.round, manifest.root_round, before.remembers, motions, words)
    wanted = [each for each in motions.values() if 3 * len(found.assenting(name_of(each))) > 2 * len(members)]
    return replace(found, motions={}, decided=wanted[0]) if wanted else found


class Successions(Checker):
    """A run ends as more than two thirds of the seats want it, with one manifest, and everyone gets there."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.minutes: dict[bytes, Minutes] = {}  # by manifest, or by the branch that begins
        self.ends: dict[bytes, tuple[bytes, int]] = {}  # by branch: the last manifest, and who decided it first

    def after(self, world: SimWorld, index: int, event: Event, effects: Sequence[Effect]) -> None:
        if not self.minutes:
            self.minutes[world.setup.genesis.head] = Minutes(0, 0, world.setup.run_config.protocol >= UPGRADED)
        for record in certified(effects):
            step, state = record.step, record.state
            before = self.minutes.get(step.parent if isinstance(step, Beginning) else step.manifest.parent)
            if state.head not in self.minutes and before is not None:
                if isinstance(step, Beginning):
                    self.minutes[state.head] = Minutes(step.round, before.root_round, before.remembers)
                else:
                    self._decided(index, step.manifest, before)
            if state.head in self.minutes:
                self._compare(index, state)
        core, ends = world.nodes[index].core, any(type(effect) is Stop and effect.why == OVER for effect in effects)
        if core is not None and ends and core.view().state.head not in self.ledger.ended:
            raise Violation(f"node {index} ends after round {core.view().state.round}, and its run goes on")

    def _decided(self, index: int, manifest: Manifest, before: Minutes) -> None:
        ledger, head = self.ledger, manifest.digest
        if before.is_over:
            raise Violation(f"round {manifest.round} is decided after the end of the run")
        if before.is_closing and manifest.taken:
            raise Violation(f"round {manifest.round} takes contributions after the last round")
        now = self.minutes[head] = after(before, manifest, ledger.rosters[head])
        ledger.closing.update([head] if now.is_closing else [])
        if now.is_over:
            ledger.ended.add(head)
            last, other = self.ends.setdefault(manifest.branch, (head, index))
            if last != head:
                raise Violation(f"nodes {other} and {index} end the same branch with different manifests")

    def _compare(self, index: int, state: AgreedState) -> None:
        minutes, here = self.minutes[state.head], state.succession
        what = f"node {index} has, after round {state.round},"
        if here.decided != minutes.decided:
            raise Violation(f"{what} another decision than more than two thirds of the seats want")
        if {motion.author: motion for motion in here.motions} != minutes.motions:
            raise Violation(f"{what} other motions than are open")
        for name in map(name_of, minutes.motions.values()):
            if {each.member for each in here.assents if each.motion == name} != minutes.assenting(name):
                raise Violation(f"{what} other assents to a motion than its members' newest words")

    def forget(self, before: int) -> None:
        self.minutes = {head: minutes for head, minutes in self.minutes.items() if minutes.round >= before}

    def at_end(self, world: SimWorld) -> None:
        """Looks for nodes whose run goes on, though its end lies ahead of them, or the old roster's quorum went there
        from where their branch began."""
        promises, ended = self.ledger.promises, self.ledger.ended
        states = {node.index: node.disk.state for node in world.honest}
        heads = {at: each.head for at, each in states.items() if promises(each.head) is Guarantee.EVERYTHING}
        for last in ended.intersection(heads.values()):
            way = self._line(last)
            for index, head in heads.items():
                mine = {*self._line(head)}
                fork = next((place for place, each in enumerate(way) if each in mine), 0)
                if head not in ended and fork and (way[fork] == head or way[fork - 1] not in world.metrics.branches):
                    number = states[index].round
                    raise Violation(f"node {index} is in round {number}, and has missed the end of its run")

    def _line(self, head: bytes) -> list[bytes]:
        """Returns what was decided up to a manifest, the latest first."""
        found = [head]
        while parent := self.ledger.parents.get(found[-1], b""):
            found.append(parent)
        return found
