"""The chain: the certified rounds that this node follows, as far back as they are kept, and the fork-choice rules.

A chain is a sequence of branches, each begun from a certificate of the one before. Two chains share their first
branches, and fork after a round of the last common one. The choice between them rests on facts that cannot change
afterwards, so that all nodes that know them choose alike, and nobody can win by working faster alone:

1. A chain that went on with the old roster's quorum beats one that regrouped before that round.
2. Of two regroups from the same certificate, the one with more members that are not in the other wins. A set needs the
   signatures of a quorum of itself, so it cannot be inflated; and it is part of the branch's id, whereas the number of
   known signatures differs from node to node.
3. On a tie, the lower branch id wins, provided that the fork lies within the kept rounds; otherwise the run is `split`,
   and an operator has to choose.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice, pairwise

from p2ptrain.core.events import Certified, Saved, Trunk
from p2ptrain.core.history import CHANGES_MAX, ENTRIES_MAX, STAGES_MAX, Beginning, BranchStart, Entry, History, Step
from p2ptrain.core.manifest import Manifest
from p2ptrain.core.state import AgreedState

FORKS_MAX = 64  # states from which branches of the chain began: older forks count as too long ago


class Chain:
    """The steps from `base` to `state`, and the agreed state after each."""

    def __init__(self, base: AgreedState, run_id: bytes, kept: int) -> None:
        self.run_id, self.kept = run_id, kept
        self.base = base
        self.steps: deque[Certified] = deque()
        self.forks: dict[bytes, AgreedState] = {}  # by branch: the state from which it began
        self.beginnings: dict[bytes, Beginning] = {}
        self.changes: list[Step] = []  # rounds that changed the roster, and beginnings, each with the round before it
        self.lineage: list[BranchStart] = [BranchStart(run_id, 0)]
        self.has_new_trunk = False  # the trunk has changed since the last call of `trunk`

    @classmethod
    def restored(cls, saved: Saved, run_id: bytes, kept: int) -> Chain:
        """Restores the chain that the node had before its restart."""
        chain = cls(saved.base, run_id, kept)
        chain.steps.extend(saved.history)
        if saved.trunk is not None:
            chain.lineage, chain.changes = list(saved.trunk.lineage), list(saved.trunk.changes)
            begun = [change for change in chain.changes if isinstance(change, Beginning)]
            chain.beginnings = {change.branch: change for change in begun[-FORKS_MAX:]}
            states = {(state.branch, state.head): state for state in saved.trunk.forks}
            for branch, beginning in chain.beginnings.items():
                fork = states.get((beginning.parent_branch, beginning.parent))
                if fork is not None:
                    chain.forks[branch] = fork
        return chain

    def trunk(self, base: AgreedState | None = None) -> Trunk:
        """Returns the part that is kept forever."""
        self.has_new_trunk = False
        return Trunk(tuple(self.lineage), tuple(self.changes), tuple(self.forks.values()), base)

    @property
    def state(self) -> AgreedState:
        return self.steps[-1].state if self.steps else self.base

    def append(self, step: Step, state: AgreedState) -> None:
        if isinstance(step, Beginning):
            last = self.steps[-1].step if self.steps else None
            if isinstance(last, Entry) and not last.manifest.changes_roster:
                self.changes.append(last)  # it proves where the branch begins
            self._remember_fork(step)
            self.lineage.append(BranchStart(step.branch, step.round))
            del self.lineage[:-STAGES_MAX]
        if isinstance(step, Beginning) or step.manifest.changes_roster:
            self.changes.append(step)
            del self.changes[:-CHANGES_MAX]
            self.has_new_trunk = True
        self.steps.append(Certified(step, state))
        while len(self.steps) > self.kept:
            self.base = self.steps.popleft().state

    def _remember_fork(self, beginning: Beginning) -> None:
        """Keeps the state from which a branch begins, to settle it with other branches from there at any later time."""
        self.forks[beginning.branch] = self.state
        self.beginnings[beginning.branch] = beginning
        if len(self.forks) > FORKS_MAX:
            oldest = next(iter(self.forks))
            del self.forks[oldest], self.beginnings[oldest]

    def end_of(self, branch: bytes) -> int | None:
        """Returns the last round of a branch on this chain, or None if the branch is not on it."""
        for place, stage in enumerate(self.lineage):
            if stage.branch == branch:
                return self.lineage[place + 1].start if place + 1 < len(self.lineage) else self.state.round
        return None

    def successor_of(self, branch: bytes) -> BranchStart | None:
        """Returns the branch that follows another on this chain."""
        for stage, following in pairwise(self.lineage):
            if stage.branch == branch:
                return following
        return None

    def state_at(self, branch: bytes, number: int) -> AgreedState | None:
        """Returns the agreed state after a round of a branch, if it is kept."""
        for candidate in (self.base, *self.forks.values()):
            if (candidate.branch, candidate.round) == (branch, number):
                return candidate
        for certified in self.steps:
            if (certified.state.branch, certified.state.round) == (branch, number):
                return certified.state
        return None

    def recent(self, rounds: int) -> Iterator[Manifest]:
        """Yields the manifests of the last rounds, as far as they are kept, the newest first."""
        for certified in islice(reversed(self.steps), rounds):
            if isinstance(certified.step, Entry):
                yield certified.step.manifest

    def entry(self, number: int) -> Entry | None:
        """Returns the entry of a round, if it is kept."""
        for certified in reversed(self.steps):
            step = certified.step
            if isinstance(step, Entry):
                if step.manifest.round == number:
                    return step
                if step.manifest.round < number:
                    return None
        return None

    def entries_after(self, number: int) -> list[Entry]:
        """Returns the kept entries of the rounds after one, in order."""
        found: list[Entry] = []
        for certified in reversed(self.steps):
            step = certified.step
            if isinstance(step, Entry):
                if step.manifest.round <= number:
                    break
                found.append(step)
        return found[::-1]

    def rewind(self, state: AgreedState) -> None:
        """Goes back to an earlier state of this chain."""
        while self.steps and self.state is not state:
            self.steps.pop()
        if self.state is not state:
            self.base = state
        while self.lineage[-1].branch != state.branch:
            gone = self.lineage.pop().branch
            self.forks.pop(gone, None)
            self.beginnings.pop(gone, None)
        self.changes = [change for change in self.changes if self._precedes(change, state)]
        while self.changes and isinstance(last := self.changes[-1], Entry) and not last.manifest.changes_roster:
            self.changes.pop()  # the branch that began after it is gone
        self.has_new_trunk = True

    def _precedes(self, change: Step, state: AgreedState) -> bool:
        if isinstance(change, Beginning):
            return any(stage.branch == change.branch for stage in self.lineage)
        manifest = change.manifest
        end = self.end_of(manifest.branch)
        return end is not None and manifest.round <= (state.round if manifest.branch == state.branch else end)

    def rebase(self, changes: tuple[Step, ...], base: AgreedState) -> None:
        """Jumps ahead to a state."""
        for change in changes:
            if isinstance(change, Beginning):
                if change.parent == self.state.head:  # the states before later beginnings are unknown
                    self._remember_fork(change)
                self.lineage.append(BranchStart(change.branch, change.round))
        self.changes = (self.changes + list(changes))[-CHANGES_MAX:]
        self.base = base
        self.steps.clear()
        del self.lineage[:-STAGES_MAX]
        self.has_new_trunk = True

    def answer(self, branch: bytes, number: int) -> History:
        """Returns the history after a round of a branch."""
        lineage = tuple(self.lineage)
        head = self.state.round
        end = self.end_of(branch)
        if end is None or number > end or (branch, number) == (self.state.branch, head):
            return History(lineage, head, (), None, ())
        steps = [certified.step for certified in self.steps]
        after = self._place_after(branch, number)
        if after is not None:
            return History(lineage, head, (), None, tuple(steps[after : after + ENTRIES_MAX]))
        base, first = self.base, 0
        while first < len(self.steps) and isinstance(steps[first], Beginning):
            base, first = self.steps[first].state, first + 1
        if first == len(steps):  # nothing certifies the base
            return History(lineage, head, (), None, ())
        changes = [
            change
            for change in self.changes
            if self._position(change) > self._position_of(branch, number)
            and self._position(change) <= self._position_of(base.branch, base.round)
        ]
        return History(lineage, head, tuple(changes), base, tuple(steps[first : first + ENTRIES_MAX]))

    def _place_after(self, branch: bytes, number: int) -> int | None:
        """Returns the index of the step after a round, or None if it is not kept."""
        if (self.base.branch, self.base.round) == (branch, number):
            return 0
        for place, certified in enumerate(self.steps):
            if (certified.state.branch, certified.state.round) == (branch, number):
                return place + 1
        return None

    def _position_of(self, branch: bytes, number: int) -> tuple[int, int]:
        order = [stage.branch for stage in self.lineage]
        return order.index(branch), number

    def _position(self, step: Step) -> tuple[int, int]:
        if isinstance(step, Beginning):
            return self._position_of(step.branch, step.round)
        return self._position_of(step.manifest.branch, step.manifest.round)

    def limits(self) -> dict[str, tuple[int, int]]:
        return {
            "history": (len(self.steps), self.kept),
            "changes of the roster": (len(self.changes), CHANGES_MAX),
            "branches": (len(self.lineage), STAGES_MAX),
            "states at forks": (len(self.forks), FORKS_MAX),
        }


def common_branch(mine: list[BranchStart], theirs: tuple[BranchStart, ...]) -> BranchStart | None:
    """Returns the last branch that two chains share."""
    theirs_too = set(theirs)  # a branch's id covers all that came before it
    return next((stage for stage in reversed(mine) if stage in theirs_too), None)


def wins(other: Beginning, mine: Beginning) -> bool:
    """Whether another branch that began from the same certificate beats ours."""
    theirs, ours = set(other.members), set(mine.members)
    return (len(theirs - ours), _rank(other.branch)) > (len(ours - theirs), _rank(mine.branch))


def are_level(other: Beginning, mine: Beginning) -> bool:
    """Whether only the ids decide between two branches."""
    theirs, ours = set(other.members), set(mine.members)
    return len(theirs - ours) == len(ours - theirs)


def _rank(branch: bytes) -> int:
    return -int.from_bytes(branch, "big")
