"""The tally: what became of each author's contributions, counted for people. It decides nothing.

A contribution is offered when its announcement is taken in, applied when a manifest takes it that this node follows,
late when it comes after the last round that could have taken it, and refused for a reason. What was offered and is
neither applied nor refused has expired, or may still be taken. Every node counts what it has seen itself, and since it
began: other nodes, which heard other messages, count otherwise, and of rounds that were caught up with only what was
applied is known.
"""

from __future__ import annotations

from collections.abc import Container
from enum import Enum

import msgspec
from msgspec import Struct

from p2ptrain.core.manifest import Manifest
from p2ptrain.core.messages import ADMITTED_MAX

AUTHORS_MAX = 2 * ADMITTED_MAX  # those who are admitted, and as many who were


class Refusal(Enum):
    """Why a contribution does not count."""

    BAD_PAYLOAD = "bad payload"  # the strict decoder refuses it, or it is not as long as announced
    TWO_FOR_ONE_ROUND = "two for one round"
    TOO_MANY = "too many at once"


class Tally(Struct):
    """Of one author."""

    offered: int = 0
    applied: int = 0
    late: int = 0
    refused: dict[str, int] = msgspec.field(default_factory=dict)  # by `Refusal`


class Tallies:
    """Of all authors that were admitted lately."""

    def __init__(self) -> None:
        self.by_author: dict[bytes, Tally] = {}

    def of(self, author: bytes) -> Tally:
        tally = self.by_author.get(author)
        if tally is None:
            tally = self.by_author[author] = Tally()
        return tally

    def refuse(self, author: bytes, why: Refusal) -> None:
        refused = self.of(author).refused
        refused[why.value] = refused.get(why.value, 0) + 1

    def take(self, manifest: Manifest) -> None:
        """This node goes on by a manifest."""
        for taken in manifest.taken:
            self.of(taken.author).applied += 1

    def forget(self, admitted: Container[bytes]) -> None:
        """A round begins, in which only these can be counted: of the others keep as many as leave room for them."""
        many = len(self.by_author) - (AUTHORS_MAX - ADMITTED_MAX)
        for author in [author for author in self.by_author if author not in admitted][: max(0, many)]:
            del self.by_author[author]

    def limits(self) -> dict[str, tuple[int, int]]:
        """Sizes and their bounds."""
        return {"authors tallied": (len(self.by_author), AUTHORS_MAX)}
