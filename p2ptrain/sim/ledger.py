"""The ledger: the rosters that came into force, their decisions, and the guarantees that follow.

Quorums, rosters and signed bytes are computed here again, so that the checkers (checkers.py) share no judgement
with the core that they check. What is promised depends on how many members lie. As long as no roster had more than f
liars, everything holds. With more, while any two quorums still share an honest member, honest nodes decide alike, but
nothing else holds. With still more, anything goes."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TypeAlias

import msgspec
from blake3 import blake3

from p2ptrain.core.events import Certified, Effect, Event, Persist
from p2ptrain.core.history import Beginning, Entry
from p2ptrain.core.manifest import Manifest
from p2ptrain.sim.keys import sign_as
from p2ptrain.sim.world import SimWorld

Members: TypeAlias = tuple[bytes, ...]


class Violation(Exception):  # noqa: N818
    """An invariant is broken."""


class TwoHistories(Violation):
    """Honest nodes have decided on different manifests for one round."""


class Checker:
    """Base of all checkers: called for honest nodes only, and raises Violation."""

    holds_beyond = False  # whether it applies even once a roster has more than f faulty members

    def after(self, world: SimWorld, index: int, event: Event, effects: Sequence[Effect]) -> None:
        """Called after an honest node has handled an event."""

    def said(self, world: SimWorld, index: int, envelope: bytes) -> None:
        """Called after an honest node has sent a message in its own name."""

    def forget(self, before: int) -> None:
        """Called now and then: no node can return to a round before this one any more."""

    def at_end(self, world: SimWorld) -> None:
        """Called when the simulation is over."""


# -- Quorums and signatures, computed again ---------------------------------------------------------


def quorum(size: int) -> int:
    return size * 2 // 3 + 1 if size > 3 else size // 2 + 1


def may_lie(size: int) -> int:
    return (size - 1) // 3 if size > 3 else 0


def signature_under(run_id: bytes, body: list[object], key: bytes) -> bytes:
    """Returns this key's signature of a message; `body` is the message's kind and fields."""
    kind = body[0]
    name = blake3(msgspec.msgpack.encode(body), derive_key_context=f"p2ptrain 1 message {kind}").digest()
    return sign_as(run_id, key, f"p2ptrain 2 {kind}".encode() + b"\0" + run_id + name)


# -- Decisions --------------------------------------------------------------------------------------


class Guarantee(IntEnum):
    """The guarantees that a roster gives, given how many liars it and the rosters before it contain."""

    NOTHING = 0
    ONE_HISTORY = 1  # two quorums share an honest member
    EVERYTHING = 2  # at most f lie


class Ledger(Checker):
    """Records rosters and decisions of honest nodes, by the manifest or branch that led to them, for other checkers."""

    holds_beyond = True

    def __init__(self) -> None:
        self.rosters: dict[bytes, Members] = {}
        self.rounds: dict[bytes, int] = {}
        self.parents: dict[bytes, bytes] = {}
        self.guarantees: dict[bytes, Guarantee] = {}
        self.decided: dict[tuple[bytes, int], tuple[bytes, int]] = {}  # manifest, and who decided it first
        self.closing: set[bytes] = set()  # manifests after which no round takes a contribution (succession.py)
        self.ended: set[bytes] = set()  # after which no round follows
        self._by_members: dict[Members, Guarantee] = {}

    def after(self, world: SimWorld, index: int, event: Event, effects: Sequence[Effect]) -> None:
        if not self.rosters:
            self._note(world, world.setup.genesis.head, world.setup.genesis.members, b"", 0)
        for record in certified(effects):
            step = record.step
            if record.trunk is not None and record.trunk.base is not None:
                base = record.trunk.base  # of a branch of liars alone, perhaps, which a node without a seat may follow
                if base.head not in self.rosters and are_liars(world, base.members):
                    self._note(world, base.head, base.members, b"", base.round)
            if isinstance(step, Beginning):
                self._known(step.parent, index, f"a branch after round {step.round}")
                self._note(world, step.branch, step.members, step.parent, step.round)
            else:
                self._entry(world, index, step.manifest)
            head = record.state.head
            if record.state.members != self.rosters[head]:
                raise Violation(f"node {index} has a different roster after round {record.state.round} than was agreed")

    def _entry(self, world: SimWorld, index: int, manifest: Manifest) -> None:
        head = manifest.digest
        self.decided.setdefault((manifest.branch, manifest.round), (head, index))
        if head in self.rosters:
            return
        before = self._known(manifest.parent, index, f"round {manifest.round}")
        members = before
        if manifest.seated or manifest.unseated:
            members = tuple(sorted((set(before) | set(manifest.seated)) - set(manifest.unseated)))
        self._note(world, head, members, manifest.parent, manifest.round)

    def _known(self, parent: bytes, index: int, what: str) -> Members:
        members = self.rosters.get(parent)
        if members is None:
            raise Violation(f"node {index} decided {what}, which follows something that no honest node has decided")
        return members

    def _note(self, world: SimWorld, head: bytes, members: Members, parent: bytes, number: int) -> None:
        if members not in self._by_members:
            self._by_members[members] = _guarantee(world, members)
        self.rosters[head], self.parents[head], self.rounds[head] = members, parent, number
        self.guarantees[head] = min(self._by_members[members], self.guarantees.get(parent, Guarantee.EVERYTHING))

    def forget(self, before: int) -> None:
        """Forgets old rounds. What follows one of them is a violation from then on: its parent is unknown."""
        for head in [head for head, number in self.rounds.items() if number < before]:
            del self.rosters[head], self.parents[head], self.rounds[head], self.guarantees[head]
        self.decided = {place: found for place, found in self.decided.items() if place[1] >= before}
        self._by_members = {members: self._by_members[members] for members in self.rosters.values()}

    def promises(self, head: bytes) -> Guarantee:
        """Returns the guarantee for the round or branch after this manifest."""
        return self.guarantees.get(head, Guarantee.NOTHING)


def are_liars(world: SimWorld, members: Members) -> bool:
    """Whether all members are liars: their decisions bind no honest node."""
    return not any(world.node_of(key).honest for key in members)


def _guarantee(world: SimWorld, members: Members) -> Guarantee:
    liars = sum(not world.node_of(key).honest for key in members)
    if liars <= may_lie(len(members)):
        return Guarantee.EVERYTHING
    return Guarantee.ONE_HISTORY if liars < 2 * quorum(len(members)) - len(members) else Guarantee.NOTHING


def entries(effects: Sequence[Effect]) -> list[Entry]:
    """Returns the rounds that a node has decided on or adopted."""
    return [record.step for record in certified(effects) if isinstance(record.step, Entry)]


def certified(effects: Sequence[object]) -> list[Certified]:
    """Returns the rounds and branches that a node has decided on or adopted."""
    return [effect.record for effect in effects if type(effect) is Persist and type(effect.record) is Certified]
