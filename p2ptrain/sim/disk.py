"""The disk of a node: what was persisted, and what the store would give back at a start.

It keeps what a real store keeps, and no more: the newest certified rounds, what was said for rounds that are not
decided yet, the branches that were left, scores, and a few of the trainer's checkpoints. A checkpoint that is not on
the saved history any more (its branch has lost) is passed over for an older one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from p2ptrain.core.events import Certified, Halted, Observed, Record, Said, Saved, Silence, Trunk
from p2ptrain.core.history import Beginning, Entry
from p2ptrain.core.messages import Message, Regroup
from p2ptrain.core.state import AgreedState

CHECKPOINTS_KEPT = 4
SILENCES_KEPT = 64  # branches; as many as the core remembers
REGROUPS_KEPT = 64  # signatures under sets of survivors


class Checkpoint(NamedTuple):
    round: int
    root: bytes
    head: bytes  # the manifest after which it was made; of one that was fetched, its certified root stands for it


@dataclass(slots=True)
class Disk:
    """Of one node."""

    first: Checkpoint  # the first weights: everyone has them
    base: AgreedState  # before the history
    kept: int  # rounds of history
    history: list[Certified] = field(default_factory=list)
    said: list[tuple[Message, Said]] = field(default_factory=list)
    trunk: Trunk | None = None
    silences: list[Silence] = field(default_factory=list)
    scores: bytes = b""
    halted: Halted | None = None
    checkpoints: list[Checkpoint] = field(default_factory=list)

    @property
    def payloads(self) -> set[bytes]:
        """What is on the disk with the history and with what was said."""
        certified = [
            taken for each in self.history if isinstance(each.step, Entry) for taken in each.step.manifest.taken
        ]
        return {taken.payload for taken in certified} | {payload for _, said in self.said for payload in said.payloads}

    @property
    def state(self) -> AgreedState:
        return self.history[-1].state if self.history else self.base

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

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        self.checkpoints.append(checkpoint)
        del self.checkpoints[:-CHECKPOINTS_KEPT]

    def saved(self) -> Saved:
        """What a start begins with."""
        checkpoint = self._newest_checkpoint()
        return Saved(
            base=self.base,
            history=tuple(self.history),
            said=tuple(said for _, said in self.said),
            applied_round=checkpoint.round,
            applied_root=checkpoint.root,
            trunk=self.trunk,
            silences=tuple(self.silences),
            scores=self.scores,
            halted=self.halted,
        )

    def _newest_checkpoint(self) -> Checkpoint:
        heads = {certified.state.head for certified in self.history} | {self.base.head}
        roots = {certified.state.root for certified in self.history} | {self.base.root}
        for checkpoint in reversed(self.checkpoints):
            if checkpoint.head in heads or checkpoint.root in roots:
                return checkpoint
        return self.first
