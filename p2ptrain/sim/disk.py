"""The disk of a node: persists records, and returns what the store would at a start.

It keeps the journal that a real store keeps, and a few of the trainer's checkpoints. A checkpoint that is no longer on
the saved history (its branch has lost) is passed over for an older one.
"""

from __future__ import annotations

from typing import NamedTuple

from p2ptrain.core.events import Record, Saved
from p2ptrain.core.journal import Journal
from p2ptrain.core.messages import Message
from p2ptrain.core.state import AgreedState

CHECKPOINTS_KEPT = 4


class SavedState(NamedTuple):
    round: int
    root: bytes
    head: bytes  # the manifest that led to this state; for a fetched state, its certified root


class Disk(Journal):
    """One node's disk."""

    def __init__(
        self, first: SavedState, base: AgreedState, kept: int, staleness: int, is_forgetful: bool = False
    ) -> None:
        super().__init__(base, kept, staleness)
        self.first = first  # the initial weights, which everyone has
        self.is_forgetful = is_forgetful  # the disk before this one was lost, and nothing was written since
        self.checkpoints: list[SavedState] = []

    def write(self, record: Record, message: Message | None) -> None:
        super().write(record, message)
        self.is_forgetful = False

    def save_checkpoint(self, checkpoint: SavedState) -> None:
        self.checkpoints.append(checkpoint)
        del self.checkpoints[:-CHECKPOINTS_KEPT]

    def saved(self) -> Saved:
        """Returns the saved state that a process starts from."""
        judged = ((each, self.judge(each.round, each.head, each.root)) for each in reversed(self.checkpoints))
        newest = next((each for each, verdict in judged if verdict.is_on_history), self.first)
        return self.saved_at(newest.round, newest.root)
