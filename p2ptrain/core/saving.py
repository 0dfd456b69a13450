"""Saving: what a node's records come to, of all that it has persisted since it began.

A record says what is new; what a start needs is the newest certified rounds, what was said for rounds that are not
decided yet, the branches that were left, and scores. The journal folds the one into the other. The store writes the
records down and folds them again when it is opened, and the simulator keeps a journal for a disk, so that what comes
back after a crash is decided in one place.

It also says what a saved state of the trainer is worth: a checkpoint is written as soon as its round is applied, and
whether its root is right is certified by a manifest of a later round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Self

from p2ptrain.core.events import Certified, Halted, Observed, Record, Said, Saved, Silence, Trunk
from p2ptrain.core.history import Beginning, Entry
from p2ptrain.core.messages import Message, Regroup
from p2ptrain.core.state import AgreedState

SILENCES_KEPT = 64  # branches; as many as the core remembers
REGROUPS_KEPT = 64  # signatures under sets of survivors


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a history says of a saved state, and why it says no more."""

    verdict: Literal["certified", "followed", "open", "refuted"]  # followed: made after a manifest of the history
    why: str

    @property
    def is_certified(self) -> bool:
        return self.verdict == "certified"

    @property
    def is_refuted(self) -> bool:
        return self.verdict == "refuted"

    @property
    def is_on_history(self) -> bool:
        """A start may go on from it. It may not where its branch has lost, where its root is not the certified one, or
        where it is older than the history that is kept."""
        return self.verdict in ("certified", "followed")

    def __str__(self) -> str:
        return self.why if self.is_certified else f"not certified: {self.why}"


@dataclass(slots=True)
class Journal:
    """Of one node."""

    base: AgreedState  # before the history
    kept: int  # rounds of history
    history: list[Certified] = field(default_factory=list)
    said: list[tuple[Message, Said]] = field(default_factory=list)
    trunk: Trunk | None = None
    silences: list[Silence] = field(default_factory=list)
    scores: bytes = b""
    halted: Halted | None = None

    @classmethod
    def restored(cls, saved: Saved, kept: int, read: Callable[[bytes], Message]) -> Self:
        """The journal that `saved_at` was asked of; `read` opens the envelope of what was said."""
        return cls(
            base=saved.base,
            kept=kept,
            history=list(saved.history),
            said=[(read(said.envelope), said) for said in saved.said],
            trunk=saved.trunk,
            silences=list(saved.silences),
            scores=saved.scores,
            halted=saved.halted,
        )

    def copy(self) -> Journal:
        """Another one, to try records on."""
        return Journal(
            self.base,
            self.kept,
            list(self.history),
            list(self.said),
            self.trunk,
            list(self.silences),
            self.scores,
            self.halted,
        )

    @property
    def payloads(self) -> set[bytes]:
        """What has to be on the disk with the history and with what was said."""
        return self.payloads_after(-1)

    def payloads_after(self, number: int) -> set[bytes]:
        """Of these, what a trainer needs that has applied round `number`."""
        steps = [each.step for each in self.history if each.state.round > number]
        taken = {taken.payload for step in steps if isinstance(step, Entry) for taken in step.manifest.taken}
        return taken | {payload for _, said in self.said for payload in said.payloads}

    @property
    def state(self) -> AgreedState:
        return self.history[-1].state if self.history else self.base

    @property
    def states(self) -> list[AgreedState]:
        """All that are kept, the newest at the end."""
        return [self.base, *(certified.state for certified in self.history)]

    @property
    def roots(self) -> dict[int, bytes]:
        """Those that are certified, by round."""
        return {state.root_round: state.root for state in self.states}

    def write(self, record: Record, message: Message | None) -> None:
        """Persist a record; `message` is what is said in a `Said`."""
        match record:
            case Certified():
                self._certify(record)
            case Said():
                assert message is not None, "what was said is a message"
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
        assert self.state.head == parent, "what is certified follows a state that is saved"
        self.history.append(record)
        if len(self.history) > self.kept:
            self.base = self.history.pop(0).state
        number = record.state.round
        regroups = [pair for pair in self.said if isinstance(pair[0], Regroup)][-REGROUPS_KEPT:]
        later = [pair for pair in self.said if getattr(pair[0], "round", -1) > number]
        self.said = regroups + later

    def saved_at(self, applied_round: int, applied_root: bytes) -> Saved:
        """What a start begins with, with the trainer's state of this round and root."""
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

    def judge(self, number: int, head: bytes, root: bytes) -> Judgement:
        """A state of the trainer after round `number`, made after the manifest `head`; empty: that is not known.

        A manifest of a later round certifies its root, so that the newest often has to wait for its proof.
        """
        states, roots = self.states, self.roots
        if number in roots:
            certified = roots[number]
            if certified == root:
                return Judgement("certified", "certified by this node's log")
            what = f"round {number} was certified with the root {certified.hex()[:16]}"
            return Judgement("refuted", f"{what}, and it has {root.hex()[:16]}")
        heads = [state.head for state in states if state.round == number]
        if heads and head and head not in heads:
            return Judgement("refuted", f"it was made after another manifest of round {number} than the log has")
        why, newest = f"the log has no certified root of round {number}", self.state.root_round
        if number > newest:
            why = f"the newest root that the log certifies is of round {newest}, and not yet of {number}"
        return Judgement("followed" if head in heads else "open", why)
