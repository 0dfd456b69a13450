"""The effect queue: decides the order in which effects are carried out, and which ones wait for the disk.

Effects are carried out in order, and everything after a `Persist` waits until its record is on the disk. All records
that wait when the disk becomes free go into one write. The daemon and the simulator both run this queue, so the
simulator tests the order that production uses."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from p2ptrain.core.events import Persist, Record

E = TypeVar("E")


class EffectQueue(Generic[E]):
    """A queue of pending effects. Generic, because a simulated liar adds effects of its own to the core's."""

    def __init__(self) -> None:
        self.writing: list[Record] = []  # records being written to the disk
        self._waiting: deque[E] = deque()
        self._on_disk = 0  # how many `Persist` effects at the front are on the disk already
        self._is_carrying = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, effects: Iterable[E]) -> None:
        self._waiting.extend(effects)

    def carry_out(self, act: Callable[[E], object]) -> list[Record]:
        """Carries out all effects that need not wait for the disk, and returns the records to write next.

        Returns none while a write is in progress. `act` may add effects, and gets each `Persist` once written."""
        if self._is_carrying or self.writing:
            return []
        waiting, self._is_carrying = self._waiting, True
        while waiting:
            if isinstance(waiting[0], Persist):
                if not self._on_disk:
                    self.writing = [effect.record for effect in waiting if isinstance(effect, Persist)]
                    break
                self._on_disk -= 1
            act(waiting.popleft())
        self._is_carrying = False
        return self.writing

    def written(self) -> None:
        """Records that the write in progress has finished."""
        self._on_disk, self.writing = len(self.writing), []

    def clear(self) -> None:
        """Drops everything, as the end of the process does."""
        self._waiting.clear()
        self._on_disk, self.writing = 0, []
