"""The share of a round's data that a node trains on: by its place, or by slots where members share by their capability.

The agreed state counts the slots that all rounds have given out; a slot is the place of a sequence in the order of
the pass (data/assignment.py). A node's slots follow those of the nodes before it in the order of their keys."""

from __future__ import annotations

from typing import NamedTuple


class PassSlots(NamedTuple):
    """The slots of one node in one round."""

    start: int  # slots that earlier rounds gave out
    total: int  # of this round
    first: int  # within the round
    size: int

    @property
    def next(self) -> PassSlots:
        """The slots of the next round, if nothing changes until then."""
        return self._replace(start=self.start + self.total)


class Share(NamedTuple):
    """The data that a node trains on in a round."""

    round: int
    place: int  # of this node, among
    places: int
    slots: PassSlots | None = None  # where the place does not say it

    @property
    def next(self) -> Share:
        """The share of the next round, if nothing changes until then."""
        return self._replace(round=self.round + 1, slots=self.slots and self.slots.next)
