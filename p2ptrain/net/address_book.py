"""The record of one peer: its addresses with their sources, whether it was ever reached, and its priority. Also bounds
the dials to addresses that peers told, so that nobody makes us knock at doors of their choice.

An address is worth as much as its source (`Origin`): the address that worked is dialled first, then those given by the
user and by the peer itself. Hearsay costs nothing to make up, and is dropped first when there is too much.

A place (an IP address and port) at which a dial failed is left alone for a while, whichever peer is said to be there:
keys cost nothing. And only so many dials a minute may fail, for each priority, so that peers that we need are not kept
waiting by hearsay. Addresses that the user gave, or at which a peer was reached since the start, are not counted."""

from __future__ import annotations

import logging
import math
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from enum import IntEnum
from random import Random

from p2ptrain.net.addresses import address_range, endpoint_of

ADDRESSES_MAX = 8  # per peer; an announcement fits eight of the longest
TELL_SECONDS = 60.0  # between two log lines about the same problem with an address
TOLD_MAX = 64
ANSWERS_KEPT = 5  # latencies kept: few, so that their median covers the last minutes
FAILED_PER_MINUTE_MAX = 30  # for each priority; DIALS_AT_ONCE of connections.py may be on their way besides
PLACE_SECONDS = 2.0  # before a place at which a dial failed is tried again; doubles
PLACE_SECONDS_MAX = 300.0
PLACES_MAX, REACHED_MAX = 4_096, 1_024  # remembered, those of the last dials

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
    release: str = ""  # as it says, as is its owner's name
    owner: str = ""
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

        At most one is hearsay: such addresses cost nothing to invent, and each dial takes seconds."""
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


class ToldDials:
    """Decides which of the told addresses may be dialled now."""

    def __init__(self) -> None:
        self._failed: dict[Priority, deque[float]] = {each: deque() for each in Priority}  # the times, latest last
        self._under_way: Counter[Priority] = Counter()
        # Failures, and when it may be tried again. By priority, so that invented peers close no place to members.
        self._places: OrderedDict[tuple[Priority, str], tuple[int, float]] = OrderedDict()
        self._reached: OrderedDict[str, None] = OrderedDict()  # addresses

    def may_dial(self, address: str, priority: Priority, now: float) -> bool:
        """Whether an address may be dialled; if so, call `ended` afterwards."""
        failed = self._failed[priority]
        while failed and failed[0] <= now - 60.0:
            failed.popleft()
        _, next_at = self._places.get((priority, endpoint_of(address)), (0, now))
        has_room = len(failed) + self._under_way[priority] < FAILED_PER_MINUTE_MAX
        if address in self._reached or (has_room and next_at <= now):
            self._under_way[priority] += 1
            return True
        return False

    def ended(self, address: str, priority: Priority, now: float, *, is_reached: bool) -> None:
        self._under_way[priority] -= 1
        place = priority, endpoint_of(address)
        if is_reached:
            self._places.pop(place, None)
            self._reached[address] = None
            self._reached.move_to_end(address)
            if len(self._reached) > REACHED_MAX:
                self._reached.popitem(last=False)
        elif address not in self._reached:
            tries, _ = self._places.pop(place, (0, now))
            wait = min(PLACE_SECONDS * 2.0 ** min(tries, 16), PLACE_SECONDS_MAX)
            self._places[place] = tries + 1, now + wait
            self._failed[priority].append(now)
            if len(self._places) > PLACES_MAX:
                self._places.popitem(last=False)
