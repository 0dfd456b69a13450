"""Bounds the cost of strangers: one budget for the messages of all of them, and a look at how much they gossip.

A peer that is not admitted says little to one node: a hello a second while it catches up, questions for histories, and
now and then a join request. More than that waits, unread (net/mailbox.py): members come first. All share the budget,
because a key costs nothing, and one address range leaves some of it to the others.

Gossip of strangers is not heard at all (net/libp2p/subscription.py), but p2pd passes it on, and when its short queues
are full it drops what members say as well. It has no setting against that. So while strangers flood the topic, members
that are connected speak to each other by stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from p2ptrain.net.rate_limit import PeerLimits
from p2ptrain.net.transport import IsAdmitted

ALL_A_SECOND = 64  # messages; decoding and verifying them takes 10 ms
EACH_A_SECOND = 8  # of one stranger, so that one alone does not keep out the others
FLOOD_A_SECOND = 100  # gossiped messages of strangers; p2pd's queues have 32 places
FLOOD_SECONDS = 1.0  # over which the rate is taken, or longer


def messages_of_strangers(is_admitted: IsAdmitted, range_of: Callable[[bytes], str]) -> PeerLimits:
    """Returns the limits of what strangers send to this node alone, in messages."""
    return PeerLimits(is_admitted, range_of, each=EACH_A_SECOND, strangers=ALL_A_SECOND, burst=1)


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
