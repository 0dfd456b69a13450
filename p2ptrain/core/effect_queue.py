"""The effect queue: in which order effects are carried out, and what waits for the disk.

Effects are carried out in order, and what follows a `Persist` waits until its record is on the disk. All records that
wait when the disk becomes free go in one write. The daemon and the simulator both run this queue, so that the
simulator tests the order that production has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from p2ptrain.core.events import Persist, Record

E = TypeVar("E")


class EffectQueue(Generic[E]):
    """Effects of one node that wait. A simulated liar's are not only the core's."""

    def __init__(self) -> None:
        self.writing: list[Record] = []  # on their way to the disk
        self._waiting: deque[E] = deque()
        self._on_disk = 0  # records of the first so many `Persist` that wait
        self._is_carrying = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, effects: Iterable[E]) -> None:
        self._waiting.extend(effects)

    def carry_out(self, act: Callable[[E], object]) -> list[Record]:
        """Have all effects carried out that need not wait for the disk; the records that it is to take now.

        None while it is at a write already. `act` may add effects, and gets each `Persist` when it is on the disk.
        """
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
        """The write has succeeded."""
        self._on_disk, self.writing = len(self.writing), []

    def clear(self) -> None:
        """The process has ended."""
        self._waiting.clear()
        self._on_disk, self.writing = 0, []
