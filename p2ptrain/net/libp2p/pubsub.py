"""Gossip: subscribes to topics, again after a restart of p2pd, and publishes in them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from p2ptrain.net.boundary import Boundary
from p2ptrain.net.libp2p.control import P2pdControl
from p2ptrain.net.libp2p.subscription import Subscription, TopicQueue
from p2ptrain.net.tasks import BACKOFF_SECONDS, Tasks
from p2ptrain.net.transport import Hear, IsAdmitted, TransportError

PUBLISHING_MAX = 8  # messages being published at a time, each on its own connection
SUBSCRIBE_SECONDS = 10.0  # to wait for p2pd; the subscription is made sooner or later in any case

logger = logging.getLogger("p2ptrain.net")


class Gossip:
    """All topics that a node is subscribed to."""

    def __init__(self, me: bytes, control: P2pdControl, counters: Counter[str], boundary: Boundary) -> None:
        self._me, self._control, self._counters, self._boundary = me, control, counters, boundary
        self._queues: dict[str, TopicQueue] = {}
        self._listening: dict[str, asyncio.Task[None]] = {}
        self._left: set[str] = set()
        self._publishing = asyncio.Semaphore(PUBLISHING_MAX)

    async def subscribe(
        self, topic: str, hear: Hear, is_heard: IsAdmitted, tasks: Tasks, session: Tasks | None
    ) -> None:
        """Subscribes. Without a session, when p2pd is down, the topic is subscribed to in the next session."""
        assert topic not in self._queues, f"{topic} already has a listener"
        queue = self._queues[topic] = TopicQueue(topic, self._me, hear, is_heard, self._counters, self._boundary)
        tasks.spawn(queue.deliver())
        if session:
            self._listen_to(queue, session)
        try:
            async with asyncio.timeout(SUBSCRIBE_SECONDS):
                await queue.is_subscribed.wait()
        except TimeoutError:
            logger.warning("not subscribed to %s yet: p2pd is not running", topic)

    def listen(self, session: Tasks) -> None:
        """Subscribes to all topics but those that were left."""
        for topic, queue in self._queues.items():
            if topic not in self._left:
                self._listen_to(queue, session)

    def leave(self, topic: str) -> None:
        assert topic not in self._left
        self._left.add(topic)
        if (listening := self._listening.pop(topic, None)) is not None:
            listening.cancel()

    def come_back(self, topic: str, session: Tasks | None) -> None:
        """Subscribes again. Without a session, that happens in the next one."""
        self._left.remove(topic)
        if session:
            self._listen_to(self._queues[topic], session)

    def _listen_to(self, queue: TopicQueue, session: Tasks) -> None:
        self._listening[queue.topic] = session.spawn(self._listen(queue))

    async def _listen(self, queue: TopicQueue) -> None:
        while True:
            subscription = Subscription(queue)
            with self._boundary.contain("a subscription"):
                try:
                    await self._control.attach(subscription)
                    why = await subscription.ended
                except TransportError as error:
                    why = str(error)
                finally:
                    queue.is_subscribed.clear()
                    subscription.abort()
                logger.debug("the subscription to %s broke: %s", queue.topic, why)
            await asyncio.sleep(BACKOFF_SECONDS)

    async def publish(self, topic: str, data: bytes) -> None:
        async with self._publishing:
            await self._control.publish(topic, data)
        self._counters.update({"bytes sent": len(data), "sent gossip": len(data), "gossip sent": 1})
