"""My line: the history that I follow, as far back as it is kept, and the rules by which branches are settled.

A line is a sequence of branches, each begun from a certificate of the one before. When two lines meet, they share
some branches from the run's beginning on, and go apart after a round of the last common one. Facts that cannot grow
afterwards decide which one goes on, so that everyone who knows them decides alike, and nobody can win by working
faster alone:

1. A line that went on with the old roster's quorum beats one that regrouped before that round.
2. Of two regroups from the same certificate, the one with more members of its own wins; who is in both counts for
   neither. A set needs the signatures of a quorum of itself, so it cannot be made larger than it is; and it is part of
   the branch's id, while how many signatures one knows of differs from node to node.
3. On a tie, the lower branch id. Only while the parting lies within what is kept; else it is `split`, and an operator
   chooses.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise

from p2ptrain.core.events import Certified, Saved, Trunk
from p2ptrain.core.history import CHANGES_MAX, ENTRIES_MAX, STAGES_MAX, Beginning, Entry, History, Stage, Step
from p2ptrain.core.state import AgreedState

FORKS_MAX = 64  # states from which branches of my line began: beyond, a parting counts as too long ago


class Line:
    """States and steps from `base` to `state`."""

    def __init__(self, base: AgreedState, run_id: bytes, kept: int) -> None:
        self.run_id, self.kept = run_id, kept
        self.base = base
        self.steps: deque[Certified] = deque()
        self.forks: dict[bytes, AgreedState] = {}  # by branch: the state from which it began
        self.beginnings: dict[bytes, Beginning] = {}
        self.changes: list[Step] = []  # rounds that changed the roster, and beginnings with the round before them
        self.lineage: list[Stage] = [Stage(run_id, 0)]
        self.has_new_trunk = False  # something that is kept for ever has changed since `trunk` was asked for

    @classmethod
    def restored(cls, saved: Saved, run_id: bytes, kept: int) -> Line:
        """The line that a node had before its restart."""
        line = cls(saved.base, run_id, kept)
        line.steps.extend(saved.history)
        if saved.trunk is not None:
            line.lineage, line.changes = list(saved.trunk.lineage), list(saved.trunk.changes)
            begun = [change for change in line.changes if isinstance(change, Beginning)]
            line.beginnings = {change.branch: change for change in begun[-FORKS_MAX:]}
            states = {(state.branch, state.head): state for state in saved.trunk.forks}
            for branch, beginning in line.beginnings.items():
                fork = states.get((beginning.parent_branch, beginning.parent))
                if fork is not None:
                    line.forks[branch] = fork
        return line

    def trunk(self, base: AgreedState | None = None) -> Trunk:
        """What is kept for ever."""
        self.has_new_trunk = False
        return Trunk(tuple(self.lineage), tuple(self.changes), tuple(self.forks.values()), base)

    @property
    def state(self) -> AgreedState:
        return self.steps[-1].state if self.steps else self.base

    def append(self, step: Step, state: AgreedState) -> None:
        if isinstance(step, Beginning):
            last = self.steps[-1].step if self.steps else None
            if isinstance(last, Entry) and not last.manifest.changes_roster:
                self.changes.append(last)  # which proves where the branch begins
            self._remember_fork(step)
            self.lineage.append(Stage(step.branch, step.round))
            del self.lineage[:-STAGES_MAX]
        if isinstance(step, Beginning) or step.manifest.changes_roster:
            self.changes.append(step)
            del self.changes[:-CHANGES_MAX]
            self.has_new_trunk = True
        self.steps.append(Certified(step, state))
        while len(self.steps) > self.kept:
            self.base = self.steps.popleft().state

    def _remember_fork(self, beginning: Beginning) -> None:
        """A branch begins from our head: by this it is settled with others that began there, however late we meet."""
        self.forks[beginning.branch] = self.state
        self.beginnings[beginning.branch] = beginning
        if len(self.forks) > FORKS_MAX:
            oldest = next(iter(self.forks))
            del self.forks[oldest], self.beginnings[oldest]

    def end_of(self, branch: bytes) -> int | None:
        """The last round of a branch that lies on this line; None if none does."""
        for place, stage in enumerate(self.lineage):
            if stage.branch == branch:
                return self.lineage[place + 1].start if place + 1 < len(self.lineage) else self.state.round
        return None

    def successor_of(self, branch: bytes) -> Stage | None:
        """The branch that this line goes on with after another."""
        for stage, following in pairwise(self.lineage):
            if stage.branch == branch:
                return following
        return None

    def state_at(self, branch: bytes, number: int) -> AgreedState | None:
        """The agreed state after a round of a branch, if it is kept."""
        for candidate in (self.base, *self.forks.values()):
            if (candidate.branch, candidate.round) == (branch, number):
                return candidate
        for certified in self.steps:
            if (certified.state.branch, certified.state.round) == (branch, number):
                return certified.state
        return None

    def entry(self, number: int) -> Entry | None:
        """The entry of a round on this line."""
        for certified in reversed(self.steps):
            step = certified.step
            if isinstance(step, Entry):
                if step.manifest.round == number:
                    return step
                if step.manifest.round < number:
                    return None
        return None

    def entries_after(self, number: int) -> list[Entry]:
        """The entries of the rounds after one, as far as they are kept, in order."""
        found: list[Entry] = []
        for certified in reversed(self.steps):
            step = certified.step
            if isinstance(step, Entry):
                if step.manifest.round <= number:
                    break
                found.append(step)
        return found[::-1]

    def rewind(self, state: AgreedState) -> None:
        """Go back to a state of this line."""
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
            self.changes.pop()  # what began after it is not on this line any more
        self.has_new_trunk = True

    def _precedes(self, change: Step, state: AgreedState) -> bool:
        if isinstance(change, Beginning):
            return any(stage.branch == change.branch for stage in self.lineage)
        manifest = change.manifest
        end = self.end_of(manifest.branch)
        return end is not None and manifest.round <= (state.round if manifest.branch == state.branch else end)

    def rebase(self, changes: tuple[Step, ...], base: AgreedState) -> None:
        """Jump to a state that lies ahead."""
        for change in changes:
            if isinstance(change, Beginning):
                if change.parent == self.state.head:  # of the branches that begin later the state is not known
                    self._remember_fork(change)
                self.lineage.append(Stage(change.branch, change.round))
        self.changes = (self.changes + list(changes))[-CHANGES_MAX:]
        self.base = base
        self.steps.clear()
        del self.lineage[:-STAGES_MAX]
        self.has_new_trunk = True

    def answer(self, branch: bytes, number: int) -> History:
        """What came after a round of a branch."""
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
        """The index of the step that follows a place; None if it is not kept."""
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
        """Sizes and their bounds."""
        return {
            "history": (len(self.steps), self.kept),
            "changes of the roster": (len(self.changes), CHANGES_MAX),
            "branches": (len(self.lineage), STAGES_MAX),
            "states at forks": (len(self.forks), FORKS_MAX),
        }


def common_branch(mine: list[Stage], theirs: tuple[Stage, ...]) -> Stage | None:
    """The last branch that two lines share."""
    theirs_too = set(theirs)  # a branch's id covers all that came before it
    return next((stage for stage in reversed(mine) if stage in theirs_too), None)


def wins(other: Beginning, mine: Beginning) -> bool:
    """Whether another branch, begun from the same certificate, beats mine."""
    theirs, ours = set(other.members), set(mine.members)
    return (len(theirs - ours), _rank(other.branch)) > (len(ours - theirs), _rank(mine.branch))


def are_level(other: Beginning, mine: Beginning) -> bool:
    """Whether nothing but their names tells two branches apart."""
    theirs, ours = set(other.members), set(mine.members)
    return len(theirs - ours) == len(ours - theirs)


def _rank(branch: bytes) -> int:
    return -int.from_bytes(branch, "big")
