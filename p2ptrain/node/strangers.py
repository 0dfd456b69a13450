"""The budget for the messages of strangers: one for all of them, because a key costs nothing.

A peer that is not admitted says little to one node: a hello a second while it catches up, questions for histories, and
now and then a join request. More than that is dropped before it is decoded, and costs no points: members come first.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from p2ptrain.net.mailbox import Deliver, Mail

ALL_A_SECOND = 64  # messages; decoding and verifying them takes 10 ms
EACH_A_SECOND = 8  # of one stranger, so that one alone does not keep out the others
ENVELOPE_BYTES_MAX = 4_096  # a join request with its invitation, or a hello in the largest run, takes a few hundred


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
