"""The chain: the certified rounds that this node follows, as far back as they are kept, and the fork-choice rules.

A chain is a sequence of branches, each begun from a certificate of the one before. Two chains share their first
branches, and fork after a round of the last common one. The choice between them rests on facts that cannot change
afterwards, so that all nodes that know them choose alike, and nobody can win by working faster alone:

1. A chain that went on with the old roster's quorum beats one that regrouped before that round.
2. Of two regroups from the same certificate, the one with more members that are not in the other wins. A set needs the
   signatures of a quorum of itself, so it cannot be inflated; and it is part of the branch's id, whereas the number of
   known signatures differs from node to node.
3. On a tie, the lower branch id wins, provided that the fork lies within the kept rounds; otherwise the run is `split`,
   and an operator has to choose."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice, pairwise, takewhile

from p2ptrain.core.events import Certified, Saved, Trunk
from p2ptrain.core.history import CHANGES_MAX, ENTRIES_MAX, STAGES_MAX, Beginning, BranchStart, Entry, History, Step
from p2ptrain.core.manifest import Manifest
from p2ptrain.core.state import AgreedState

FORKS_MAX = 64  # states from which branches of the chain began: older forks count as too long ago


class Chain:
    """The steps from `base` to `state`, and the agreed state after each."""

    def __init__(self, base: AgreedState, run_id: bytes, kept: int, start: int = 0) -> None:
        """start: the round before the run's first one, which is not 0 if the run follows another"""
        self.run_id, self.kept = run_id, kept
        self.base = base
        self.steps: deque[Certified] = deque()
        self.forks: dict[bytes, AgreedState] = {}  # by branch: the state from which it began
        self.beginnings: dict[bytes, Beginning] = {}
        self.changes: list[Step] = []  # rounds that changed the roster, and beginnings, each with the round before it
        self.lineage: list[BranchStart] = [BranchStart(run_id, start)]
        self.has_new_trunk = False  # the trunk has changed since the last call of `trunk`, otherwise than by `grown`

    @classmethod
    def restored(cls, saved: Saved, run_id: bytes, kept: int, start: int = 0) -> Chain:
        chain = cls(saved.base, run_id, kept, start)
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
        self.has_new_trunk = False
        return Trunk(tuple(self.lineage), tuple(self.changes), tuple(self.forks.values()), base)

    @property
    def state(self) -> AgreedState:
        return self.steps[-1].state if self.steps else self.base

    @property
    def states(self) -> list[AgreedState]:
        """All that are kept, the newest last."""
        return [self.base, *(certified.state for certified in self.steps)]

    def append(self, step: Step, state: AgreedState) -> None:
        if isinstance(step, Beginning):
            self._remember_fork(step)
        is_first = not self.changes  # whoever stores the steps has no trunk to add to
        if _grow(self.lineage, self.changes, step, self.steps[-1].step if self.steps else None) and is_first:
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
        return next((following for stage, following in pairwise(self.lineage) if stage.branch == branch), None)

    def state_at(self, branch: bytes, number: int) -> AgreedState | None:
        """Returns the agreed state after a round of a branch, if it is kept."""
        kept = (*self.states, *self.forks.values())
        return next((state for state in kept if (state.branch, state.round) == (branch, number)), None)

    def recent(self, rounds: int) -> Iterator[Manifest]:
        """Yields the manifests of the last rounds, as far as they are kept, the newest first."""
        for certified in islice(reversed(self.steps), rounds):
            if isinstance(certified.step, Entry):
                yield certified.step.manifest

    def entry(self, number: int) -> Entry | None:
        """Returns the entry of a round, if it is kept."""
        found = next((each for each in self._entries() if each.manifest.round <= number), None)
        return found if found is not None and found.manifest.round == number else None

    def entries_after(self, number: int) -> list[Entry]:
        """Returns the kept entries of the rounds after one, in order."""
        return [*takewhile(lambda entry: entry.manifest.round > number, self._entries())][::-1]

    def _entries(self) -> Iterator[Entry]:
        """Yields the kept entries, the newest first."""
        return (each.step for each in reversed(self.steps) if isinstance(each.step, Entry))

    def rewind(self, state: AgreedState) -> None:
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
        lineage = tuple(self.lineage)
        head = self.state.round
        end = self.end_of(branch)
        if end is None or number > end or (branch, number) == (self.state.branch, head):
            return History(lineage, head, (), None, ())
        steps = [certified.step for certified in self.steps]
        places = (place for place, state in enumerate(self.states) if (state.branch, state.round) == (branch, number))
        if (after := next(places, None)) is not None:
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

    def _position_of(self, branch: bytes, number: int) -> tuple[int, int]:
        order = [stage.branch for stage in self.lineage]
        return order.index(branch) if branch in order else -1, number  # -1: it is no longer remembered

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


def grown(trunk: Trunk, step: Step, before: AgreedState, last: Step | None) -> Trunk:
    """Returns the part that is kept forever after one more step, which follows this state and step."""
    lineage, changes, forks = [*trunk.lineage], [*trunk.changes], trunk.forks
    if not _grow(lineage, changes, step, last):
        return trunk
    if isinstance(step, Beginning):
        forks = (*forks, before)[-FORKS_MAX:]
    return Trunk(tuple(lineage), tuple(changes), forks)


def _grow(lineage: list[BranchStart], changes: list[Step], step: Step, last: Step | None) -> bool:
    """Adds a step that changes the roster or begins a branch; returns whether it does."""
    if isinstance(step, Beginning):
        if isinstance(last, Entry) and not last.manifest.changes_roster:
            changes.append(last)  # it proves where the branch begins
        lineage.append(BranchStart(step.branch, step.round))
        del lineage[:-STAGES_MAX]
    elif not step.manifest.changes_roster:
        return False
    changes.append(step)
    del changes[:-CHANGES_MAX]
    return True


def common_branch(mine: list[BranchStart], theirs: tuple[BranchStart, ...]) -> BranchStart | None:
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
