"""The record of one peer: its addresses with their sources, whether it was ever reached, and its priority.

An address is worth as much as its source (`Origin`): the address that worked is dialled first, then those given by the
user and by the peer itself. Hearsay costs nothing to make up, and is dropped first when there is too much.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from random import Random

from p2ptrain.net.addresses import address_range

ADDRESSES_MAX = 8  # per peer; an announcement fits eight of the longest
TELL_SECONDS = 60.0  # between two log lines about the same problem with an address
TOLD_MAX = 64
ANSWERS_KEPT = 5  # latencies kept: few, so that their median covers the last minutes

log = logging.getLogger("p2ptrain.net")


class Origin(IntEnum):
    """The source of an address, the most certain last."""

    HEARSAY = 0
    REMEMBERED = 1
    ITSELF = 2
    USER = 3


class Priority(IntEnum):
    """How much we want a peer. Each level has slots of its own, which the others cannot take."""

    HEARD_OF = 0
    REACHED = 1  # now or at any time before, also before a restart
    NEEDED = 2  # a bootstrap or a member


@dataclass(slots=True)
class KnownPeer:
    """The record of a peer: its addresses and how dialling them went."""

    origins: dict[str, Origin] = field(default_factory=dict)  # by address
    worked: str = ""  # the address at which it was last reached
    is_bootstrap: bool = False
    tries: int = 0
    next_at: float = 0.0
    told: dict[str, float] = field(default_factory=dict)  # when each problem was logged
    was_reached: bool = False  # also before a restart, as remembered
    linked_at: float = -math.inf  # the last time since our start
    answered_in: deque[float] = field(default_factory=lambda: deque(maxlen=ANSWERS_KEPT))  # seconds, the newest last

    @property
    def addresses(self) -> list[str]:
        """All addresses: the one that worked, then by certainty, the newest first among equals."""
        found = list(self.origins)[::-1]
        found.sort(key=lambda address: (address != self.worked, -self.origins[address]))
        return found

    @property
    def best(self) -> str:
        """The best address; empty if none is known."""
        return next(iter(self.addresses), "")

    @property
    def range(self) -> str:
        """The range of the best address; empty if that is not known."""
        return address_range(self.best)

    def add(self, address: str, origin: Origin) -> None:
        known = self.origins.pop(address, origin)
        self.origins[address] = max(known, origin)
        if len(self.origins) > ADDRESSES_MAX:
            del self.origins[self.addresses[-1]]

    def to_dial(self, rng: Random) -> list[str]:
        """Returns the best address, then the others shuffled, because there may not be time for all of them.

        At most one is hearsay: such addresses cost nothing to invent, and each dial takes seconds.
        """
        hearsay = [each for each in self.addresses if self.origins[each] is Origin.HEARSAY and each != self.worked]
        certain = [each for each in self.addresses if each not in hearsay]
        rest = certain[1:] + rng.sample(hearsay, min(1, len(hearsay)))
        rng.shuffle(rest)
        return certain[:1] + rest


@dataclass(slots=True)
class Unmet:
    """A connected peer that has not yet shown that it speaks our run's protocol."""

    next_at: float  # when it may be asked again
    tries: int = 0


def tell(told: dict[str, float], problem: str, now: float) -> None:
    """Logs a problem: at once if it is new, and then from time to time."""
    if now < told.get(problem, now):
        return
    told[problem] = now + TELL_SECONDS
    while len(told) > TOLD_MAX:
        del told[next(iter(told))]
    log.warning("%s; the node keeps trying", problem)
