"""Bounds the cost of strangers: one budget for the messages of all of them, and a look at how much they gossip.

A peer that is not admitted says little to one node: a hello a second while it catches up, questions for histories, and
now and then a join request. More than that is dropped before it is decoded, and costs no points: members come first.
All share the budget, because a key costs nothing.

Gossip of strangers is not heard at all (net/libp2p/subscription.py), but p2pd passes it on, and when its short queues
are full it drops what members say as well. It has no setting against that. So while strangers flood the topic, members
that are connected speak to each other by stream.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from p2ptrain.net.mailbox import Deliver, Mail

ALL_A_SECOND = 64  # messages; decoding and verifying them takes 10 ms
EACH_A_SECOND = 8  # of one stranger, so that one alone does not keep out the others
ENVELOPE_BYTES_MAX = 4_096  # a join request with its invitation, or a hello in the largest run, takes a few hundred
FLOOD_A_SECOND = 100  # gossiped messages of strangers; p2pd's queues have 32 places
FLOOD_SECONDS = 1.0  # over which the rate is taken, or longer


class StrangersBudget:
    """Counts what strangers say in a second."""

    def __init__(self) -> None:
        self._second = 0
        self._used: Counter[bytes] = Counter()  # by peer, in this second; at most ALL_A_SECOND
        self._left = ALL_A_SECOND

    def allows(self, peer: bytes, message: Mail | None = None) -> bool:
        """Whether a stranger may say this now; if so, it counts."""
        second = int(asyncio.get_running_loop().time())
        if second != self._second:
            self._second, self._left = second, ALL_A_SECOND
            self._used.clear()
        cost = 1
        if isinstance(message, Deliver):
            cost = len(message.envelopes)
            if max(map(len, message.envelopes)) > ENVELOPE_BYTES_MAX:
                return False
        if self._left < cost or self._used[peer] + cost > EACH_A_SECOND:
            return False
        self._used[peer] += cost
        self._left -= cost
        return True


class GossipFlood:
    """Tells whether strangers flood the topic. `count` returns how many of their messages have come."""

    def __init__(self, count: Callable[[], int]) -> None:
        self._count = count
        self._counted, self._at = 0, -FLOOD_SECONDS
        self._is_on = False

    @property
    def is_on(self) -> bool:
        now = asyncio.get_running_loop().time()
        if now - self._at >= FLOOD_SECONDS:
            count = self._count()
            self._is_on = count - self._counted > FLOOD_A_SECOND * (now - self._at)
            self._counted, self._at = count, now
        return self._is_on
