"""Bounds the dials to addresses that peers told, so that nobody makes us knock at doors of their choice.

A place (an IP address and port) at which a dial failed is left alone for a while, whichever peer is said to be there:
keys cost nothing. And only so many dials a minute may fail, for each priority, so that peers that we need are not kept
waiting by hearsay. Addresses that the user gave, or at which a peer was reached since the start, are not counted.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque

from p2ptrain.net.address_book import Priority
from p2ptrain.net.addresses import endpoint_of

FAILED_PER_MINUTE_MAX = 30  # for each priority; DIALS_AT_ONCE of connections.py may be on their way besides
PLACE_SECONDS = 2.0  # before a place at which a dial failed is tried again; doubles
PLACE_SECONDS_MAX = 300.0
PLACES_MAX, REACHED_MAX = 4_096, 1_024  # remembered, those of the last dials


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
