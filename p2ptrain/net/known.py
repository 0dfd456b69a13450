"""What a node knows of one peer: where it may be found and who says so, whether it was reached, what it is to us.

An address is worth as much as whoever says it (`Origin`): the one that worked is dialled first, then what the user and
the peer itself said. Hearsay costs nothing to make up, and is the first to go when there is too much.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from random import Random

ADDRESSES_MAX = 8  # of a peer; as many of the longest fit an announcement
ANSWERS_KEPT = 5  # of which it is known how long they took: the median of so few is of the last minutes


class Origin(IntEnum):
    """Who says where a peer is, the most certain last."""

    HEARSAY = 0
    REMEMBERED = 1
    ITSELF = 2
    USER = 3


class Standing(IntEnum):
    """What a peer is to us. The places of one are not to be had by another."""

    HEARD_OF = 0
    REACHED = 1  # now, once, or in an earlier life
    NEEDED = 2  # a bootstrap, or a member


@dataclass(slots=True)
class Known:
    """A peer whose addresses we know."""

    origins: dict[str, Origin] = field(default_factory=dict)  # by address
    worked: str = ""  # the address under which it was reached last
    is_bootstrap: bool = False
    tries: int = 0
    next_at: float = 0.0
    told: dict[str, float] = field(default_factory=dict)  # what was said of it in the log, and when
    was_reached: bool = False  # in this life or, as we remember, an earlier one
    linked_at: float = -math.inf  # last, in this life
    answered_in: deque[float] = field(default_factory=lambda: deque(maxlen=ANSWERS_KEPT))  # seconds, the last last

    @property
    def addresses(self) -> list[str]:
        """What worked, then the most certain, and of those as certain the newest."""
        found = list(self.origins)[::-1]
        found.sort(key=lambda address: (address != self.worked, -self.origins[address]))
        return found

    def add(self, address: str, origin: Origin) -> None:
        known = self.origins.pop(address, origin)
        self.origins[address] = max(known, origin)
        if len(self.origins) > ADDRESSES_MAX:
            del self.origins[self.addresses[-1]]

    def to_dial(self, rng: Random) -> list[str]:
        """The best; then the others by chance, as the time may not be enough for all. Of hearsay one: it costs nothing
        to make up, and a dial takes seconds."""
        hearsay = [each for each in self.addresses if self.origins[each] is Origin.HEARSAY and each != self.worked]
        certain = [each for each in self.addresses if each not in hearsay]
        rest = certain[1:] + rng.sample(hearsay, min(1, len(hearsay)))
        rng.shuffle(rest)
        return certain[:1] + rest


@dataclass(slots=True)
class Stranger:
    """A peer that is connected, and has not yet shown that it speaks our run's protocol."""

    next_at: float  # when it may be asked again
    tries: int = 0
