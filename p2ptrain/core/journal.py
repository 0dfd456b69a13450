"""The journal: folds all records that a node has persisted into the state that it needs at startup.

Each record is an increment. At startup a node needs the newest certified rounds, its messages for undecided rounds, the
branches that it left, and the scores. The store writes the records and folds them when it is opened; the simulator uses
a journal as its disk. So one module decides what survives a crash.

The journal also tells whether a saved state of the trainer can be trusted: a checkpoint is written as soon as its round
is applied, but its root is only certified by the manifest of a later round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, Self

from p2ptrain.core.chain import grown
from p2ptrain.core.events import Certified, Halted, Observed, Record, Said, Saved, Silence, Trunk
from p2ptrain.core.history import Beginning, Entry
from p2ptrain.core.messages import Announcement, Message, Regroup
from p2ptrain.core.state import AgreedState

SILENCES_KEPT = 64  # branches; as many as the core remembers
REGROUPS_KEPT = 64  # own signatures under regroups


@dataclass(frozen=True, slots=True)
class HistoryVerdict:
    """A verdict on a saved state by the history, with the reason."""

    verdict: Literal["certified", "followed", "open", "refuted"]  # followed: it follows a manifest of the history
    why: str

    @property
    def is_certified(self) -> bool:
        return self.verdict == "certified"

    @property
    def is_refuted(self) -> bool:
        return self.verdict == "refuted"

    @property
    def is_on_history(self) -> bool:
        """Whether a node may start from this state: not if its branch has lost, its root is not the certified one, or
        it is older than the kept history."""
        return self.verdict in ("certified", "followed")

    def __str__(self) -> str:
        return self.why if self.is_certified else f"not certified: {self.why}"


@dataclass(slots=True)
class Journal:
    base: AgreedState  # the state before the history
    kept: int  # rounds of history
    staleness: int = 0  # of the run: non-empty manifests that may lie between a contribution's base and its round
    history: list[Certified] = field(default_factory=list)
    said: list[tuple[Message, Said]] = field(default_factory=list)
    trunk: Trunk | None = None
    silences: list[Silence] = field(default_factory=list)
    scores: bytes = b""
    halted: Halted | None = None

    @classmethod
    def restored(cls, saved: Saved, kept: int, read: Callable[[bytes], Message], staleness: int = 0) -> Self:
        """Restores the journal from the output of `saved_at`; `read` decodes the envelope of a message."""
        return cls(
            saved.base, kept, staleness, [*saved.history], [(read(said.envelope), said) for said in saved.said],
            saved.trunk, [*saved.silences], saved.scores, saved.halted,
        )  # fmt: skip

    def copy(self) -> Journal:
        """Returns a copy, to try records on."""
        return replace(self, history=[*self.history], said=[*self.said], silences=[*self.silences])

    def payloads(self, after: int = -1) -> set[bytes]:
        """Returns the payloads that the history after a round and the node's own messages need on the disk."""
        steps = [each.step for each in self.history if each.state.round > after]
        taken = {taken.payload for step in steps if isinstance(step, Entry) for taken in step.manifest.taken}
        return taken | {payload for _, said in self.said for payload in said.payloads}

    @property
    def state(self) -> AgreedState:
        return self.history[-1].state if self.history else self.base

    @property
    def states(self) -> list[AgreedState]:
        """All kept states, the newest last."""
        return [self.base, *(certified.state for certified in self.history)]

    @property
    def roots(self) -> dict[int, bytes]:
        """The certified roots, by round."""
        return {state.root_round: state.root for state in self.states}

    def write(self, record: Record, message: Message | None) -> None:
        """Adds a record; `message` is the decoded message of a `Said`."""
        match record:
            case Certified():
                self._certify(record)
            case Said():
                assert message is not None, "a Said record contains a message"
                self.said.append((message, record))
            case Silence():
                kept = [each for each in self.silences if each.branch != record.branch]
                self.silences = [*kept, record][-SILENCES_KEPT:]
            case Observed(scores=scores):
                self.scores = scores
            case Halted():
                self.halted = record

    def _certify(self, record: Certified) -> None:
        step = record.step
        parent = step.parent if isinstance(step, Beginning) else step.manifest.parent
        if record.trunk is not None:
            self.trunk = record.trunk
            if record.trunk.base is not None:
                self.base, self.history = record.trunk.base, []
        while self.history and self.history[-1].state.head != parent:
            self.history.pop()
        assert self.state.head == parent, "a certified step follows a saved state"
        if record.trunk is None and self.trunk is not None:
            self.trunk = grown(self.trunk, step, self.state, self.history[-1].step if self.history else None)
        self.history.append(record)
        if len(self.history) > self.kept:
            self.base = self.history.pop(0).state
        number = record.state.round
        regroups = [pair for pair in self.said if isinstance(pair[0], Regroup)][-REGROUPS_KEPT:]
        later = [pair for pair in self.said if getattr(pair[0], "round", -1) > number]
        on_offer = [
            pair
            for pair in self.said
            if isinstance(said := pair[0], Announcement)
            and said.round <= number
            and record.state.may_take(said, self.staleness)
        ]
        self.said = regroups + on_offer + later

    def saved_at(self, applied_round: int, applied_root: bytes) -> Saved:
        """Returns the state for a startup, with the trainer's state of this round and root."""
        return Saved(
            base=self.base,
            history=tuple(self.history),
            said=tuple(said for _, said in self.said),
            applied_round=applied_round,
            applied_root=applied_root,
            trunk=self.trunk,
            silences=tuple(self.silences),
            scores=self.scores,
            halted=self.halted,
        )

    def judge(self, number: int, head: bytes, root: bytes) -> HistoryVerdict:
        """Judges a state of the trainer after round `number` and the manifest `head` (empty if unknown).

        Its root is certified by the manifest of a later round, so the newest state often has no proof yet."""
        states, roots = self.states, self.roots
        if number in roots:
            certified = roots[number]
            if certified == root:
                return HistoryVerdict("certified", "certified by this node's log")
            what = f"round {number} was certified with the root {certified.hex()[:16]}"
            return HistoryVerdict("refuted", f"{what}, but this state has {root.hex()[:16]}")
        heads = [state.head for state in states if state.round == number]
        if heads and head and head not in heads:
            return HistoryVerdict("refuted", f"it follows another manifest of round {number} than the one in the log")
        why, newest = f"the log has no certified root for round {number}", self.state.root_round
        if number > newest:
            why = f"the newest certified root in the log is of round {newest}, before round {number}"
        return HistoryVerdict("followed" if head in heads else "open", why)
