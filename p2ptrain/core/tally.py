"""Tallies: count the fate of each author's contributions, only for display.

A contribution counts as offered when its announcement is accepted, applied when a manifest on this node's chain takes
it, late when it arrives after the last round that could have taken it, and refused for a reason. One that was offered
but neither applied nor refused has expired or may still be taken. Each node counts its own observations since its
start: other nodes receive other messages and get other counts, and for rounds that a node caught up with it only knows
what was applied.
"""

from __future__ import annotations

from collections.abc import Collection, Container
from enum import Enum

import msgspec
from msgspec import Struct

from p2ptrain.core.manifest import Manifest
from p2ptrain.core.messages import ADMITTED_MAX
from p2ptrain.core.state import Taken

AUTHORS_MAX = 2 * ADMITTED_MAX  # admitted authors, and as many former ones
STALENESS_MAX = 64  # rounds that are told apart; more count as these


class Refusal(Enum):
    """Reasons for refusing a contribution."""

    BAD_PAYLOAD = "bad payload"  # the strict decoder refuses it, or it is not as long as announced
    TWO_FOR_ONE_ROUND = "two for one round"
    TOO_MANY = "too many at once"


class Ban(Enum):
    """Reasons for which a manifest bans a key."""

    PROVEN = "two messages that contradict each other"
    BAD_PAYLOAD = Refusal.BAD_PAYLOAD.value
    TWO_FOR_ONE_ROUND = Refusal.TWO_FOR_ONE_ROUND.value


class Tally(Struct):
    """The counts of one author."""

    offered: int = 0
    applied: int = 0
    late: int = 0
    refused: dict[str, int] = msgspec.field(default_factory=dict)  # by `Refusal`
    staleness: int | None = None  # rounds between the base and the round of the contribution that was applied last
    ban: str = ""  # why it was banned (`Ban`), if that was seen here


def staleness_of(taken: Taken, manifest: Manifest) -> int:
    """Returns how many rounds lie between the state that a contribution began from and the round that takes it."""
    return max(0, manifest.round - 1 - taken.base_round)


class Tallies:
    """The tallies of all authors that are or recently were admitted."""

    def __init__(self) -> None:
        self.by_author: dict[bytes, Tally] = {}
        self.staleness: dict[int, int] = {}  # contributions applied, by the rounds between their base and their round

    def of(self, author: bytes) -> Tally:
        tally = self.by_author.get(author)
        if tally is None:
            tally = self.by_author[author] = Tally()
        return tally

    def refuse(self, author: bytes, why: Refusal) -> None:
        refused = self.of(author).refused
        refused[why.value] = refused.get(why.value, 0) + 1

    def take(self, manifest: Manifest) -> None:
        """Counts the contributions that a manifest applies."""
        for taken in manifest.taken:
            author = self.of(taken.author)
            author.applied += 1
            author.staleness = rounds = min(staleness_of(taken, manifest), STALENESS_MAX)
            self.staleness[rounds] = self.staleness.get(rounds, 0) + 1

    def ban(self, manifest: Manifest, guilty: Collection[bytes | None], refused: Collection[bytes | None]) -> None:
        """Notes why a manifest bans keys: evidence convicts the `guilty`, and `refused` have sent a bad payload. None
        stands for one that is not known here, because this node was away."""
        rest = "" if None in {*guilty, *refused} else Ban.TWO_FOR_ONE_ROUND.value
        for key in manifest.banned:
            self.of(key).ban = Ban.PROVEN.value if key in guilty else Ban.BAD_PAYLOAD.value if key in refused else rest

    def forget(self, admitted: Container[bytes]) -> None:
        """Drops enough authors that are no longer admitted to leave room for those that are."""
        many = len(self.by_author) - (AUTHORS_MAX - ADMITTED_MAX)
        for author in [author for author in self.by_author if author not in admitted][: max(0, many)]:
            del self.by_author[author]

    def limits(self) -> dict[str, tuple[int, int]]:
        return {
            "authors tallied": (len(self.by_author), AUTHORS_MAX),
            "staleness counted": (len(self.staleness), STALENESS_MAX + 1),
        }
