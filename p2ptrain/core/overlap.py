"""Overlap: whether this node trains on while a round is agreed on, by how long exchange takes here.

On a slow line a node that waits for each round to be agreed on rests for a third of its time; on a fast one it rests
hardly at all, and training from weights that lack the last round costs some loss. So each node decides for itself, by
its own clock. Nothing of this has to be agreed: all members accept a contribution to the round after the next.

Exchange of a round lasts from the announcement of the last contribution that the round waited for until its update is
applied: payloads that travel, votes, and applying. Waiting for a slower machine is not part of it, because a fast one
that trains ahead of it gains nothing."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Literal

BEGIN_SHARE = 0.1  # of a round's length, above which a node overlaps
END_SHARE = 0.05  # below which it waits again; in between it does what it did
BEGIN_ROUNDS, END_ROUNDS = 3, 8  # whose median decides: without overlap a slow line costs a third, with it little
TIMED_MAX = 4  # rounds that have begun and are not applied: a node further behind does not train


@dataclass(frozen=True, slots=True)
class Exchanged:
    """How long a round took here."""

    seconds: float  # of exchange
    round_seconds: float  # since the round before was applied


class Exchange:
    def __init__(self) -> None:
        self._heard: dict[int, float] = {}  # by round: when the last contribution that it waited for was announced
        self._applied: tuple[int, float] | None = None  # the last round, and when

    def heard(self, number: int, now: float) -> None:
        """Notes that a round begins, or that a contribution for which it waits is announced."""
        self._heard.pop(number, None)
        self._heard[number] = now
        if len(self._heard) > TIMED_MAX:
            del self._heard[next(iter(self._heard))]

    def applied(self, number: int, now: float) -> Exchanged | None:
        """Notes that a round was applied; returns how long it took, unless it or the one before was not followed."""
        began, heard = self._applied, self._heard.pop(number, None)
        self._applied = number, now
        if began is None or began[0] != number - 1 or heard is None:
            return None
        return Exchanged(now - max(heard, began[1]), now - began[1])

    def limits(self) -> dict[str, tuple[int, int]]:
        return {"rounds timed": (len(self._heard), TIMED_MAX)}


class Overlap:
    """Decides whether this node overlaps. `can`: its steps can go on from weights that change between them."""

    def __init__(self, setting: Literal["auto", 0, 1], can: bool) -> None:
        self.is_on = setting == 1
        self._decides = setting == "auto" and can
        self._shares: deque[float] = deque(maxlen=END_ROUNDS)

    @property
    def share(self) -> float | None:
        """The share of a round that exchange takes, or would take without overlap; None: no round was timed."""
        return median(self._shares) if self._shares else None

    def look(self, took: Exchanged) -> bool:
        """Takes in how long a round took, and returns whether that has changed the decision."""
        without = took.round_seconds + took.seconds * self.is_on  # now training goes on meanwhile
        self._shares.append(took.seconds / without if without else 0.0)
        least = END_ROUNDS if self.is_on else BEGIN_ROUNDS
        if not self._decides or len(self._shares) < least:
            return False
        share = median([*self._shares][-least:])
        has_changed = share < END_SHARE if self.is_on else share > BEGIN_SHARE
        if has_changed:
            self.is_on = not self.is_on
            self._shares.clear()
        return has_changed
