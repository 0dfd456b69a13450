"""Bounds the cost of strangers: one budget for the messages of all of them, and a look at how much they gossip.

A peer that is not admitted says little to one node: a hello a second while it catches up, questions for histories, and
now and then a join request. More than that waits, unread (net/mailbox.py): members come first. All share the budget,
because a key costs nothing, and one address range leaves some of it to the others.

Gossip of strangers is not heard at all (net/libp2p/subscription.py), but p2pd checks its signatures and passes it on,
and has no setting against that: 2,300 messages a second take 0.2 of a core. It ignores, unchecked, what comes in a
topic that it has left. Members hear one another by stream (edges.py), so while strangers flood the topic a node leaves
it, unless it is needed: by this node, because it is not connected to everyone, or by a member that gossips.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from random import SystemRandom

from p2ptrain.net.rate_limit import PeerLimits
from p2ptrain.net.transport import IsAdmitted, Transport

ALL_A_SECOND = 64  # messages; decoding and verifying them takes 10 ms
EACH_A_SECOND = 8  # of one stranger, so that one alone does not keep out the others
FLOOD_A_SECOND = 100  # gossiped messages of strangers; p2pd's queues have 32 places
LOOK_SECONDS = 1.0  # over which the rate is taken: with it, each look at a flood lasts as long
PAUSE_SECONDS, PAUSE_SECONDS_MAX = 10.0, 300.0  # out of a flooded topic; doubles: a long flood is looked at 1/300 of it
CALM_SECONDS = 60.0  # in the topic without a flood, after which the next pause is short again
USED_SECONDS = 30.0  # after a member gossiped: one that has nothing to say gossips a hello every 20 s

log = logging.getLogger("p2ptrain.node")


def messages_of_strangers(is_admitted: IsAdmitted, range_of: Callable[[bytes], str]) -> PeerLimits:
    """Returns the limits of what strangers send to this node alone, in messages."""
    return PeerLimits(is_admitted, range_of, each=EACH_A_SECOND, strangers=ALL_A_SECOND, burst=1)


class Topic:
    """The run's topic: left while strangers flood it and nobody needs it, and looked at again after growing pauses."""

    def __init__(
        self,
        transport: Transport,
        name: str,
        *,
        junk: Callable[[], int],
        heard: Callable[[], int],
        is_needed: Callable[[], bool],
    ) -> None:
        """`junk` and `heard` return how many messages of strangers and of members have come by gossip."""
        self._transport, self._name = transport, name
        self._junk, self._heard, self._is_needed = junk, heard, is_needed
        self._rng = SystemRandom()

    async def watch(self) -> None:
        """Runs until cancelled."""
        loop, pause = asyncio.get_running_loop(), PAUSE_SECONDS
        while True:
            calm_at = loop.time() + CALM_SECONDS
            await self._until_flooded()
            if loop.time() >= calm_at:
                pause = PAUSE_SECONDS
            seconds = pause * self._rng.uniform(0.5, 1.5)
            log.info("strangers flood the topic: left for %.0f s; members are heard by stream", seconds)
            self._transport.leave(self._name)
            until = loop.time() + seconds
            while loop.time() < until and not self._is_needed():  # noqa: ASYNC110  # connections tell no event
                await asyncio.sleep(LOOK_SECONDS)
            self._transport.come_back(self._name)
            pause = min(2 * pause, PAUSE_SECONDS_MAX)

    async def _until_flooded(self) -> None:
        """Returns when strangers flood the topic and nobody needs it."""
        loop = asyncio.get_running_loop()
        junk, heard, looked_at, heard_at = self._junk(), self._heard(), loop.time(), -math.inf
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now, junk_now, heard_now = loop.time(), self._junk(), self._heard()
            heard_at = heard_at if heard_now == heard else now
            is_used = now < heard_at + USED_SECONDS or self._is_needed()
            if junk_now - junk > FLOOD_A_SECOND * (now - looked_at) and not is_used:
                return
            junk, heard, looked_at = junk_now, heard_now, now
