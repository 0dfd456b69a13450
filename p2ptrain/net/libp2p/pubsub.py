"""Gossip topics: a bounded queue for each, between p2pd and the listener, with a count of dropped messages.

p2pd buffers 32 messages for a subscriber and silently drops the rest. So they are read as they come (subscription.py),
and a task delivers them one at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque

from p2ptrain.net.boundary import Boundary
from p2ptrain.net.libp2p.control import P2pdControl, response_in
from p2ptrain.net.libp2p.slim_hivemind import parts_of_hivemind
from p2ptrain.net.libp2p.subscription import Subscription
from p2ptrain.net.tasks import BACKOFF_SECONDS, Tasks
from p2ptrain.net.transport import MESSAGE_BYTES_MAX, Hear, IsAdmitted, TransportError

with parts_of_hivemind():
    from hivemind.proto import p2pd_pb2 as pb

MESSAGES_MAX = 1_024  # queued in a topic: one round's, four for each of 256 seats
QUEUED_BYTES_MAX = 2**26  # in a topic: 64 messages of the largest size
PUBLISHING_MAX = 8  # messages being published at a time, each on its own connection
SUBSCRIBE_SECONDS = 10.0  # to wait for p2pd; the subscription is made sooner or later in any case

logger = logging.getLogger("p2ptrain.net")


class TopicQueue:
    """The queue of received messages of one topic, and its listener."""

    def __init__(
        self, topic: str, me: bytes, hear: Hear, is_heard: IsAdmitted, counters: Counter[str], boundary: Boundary
    ) -> None:
        self.topic, self.counters, self._boundary = topic, counters, boundary
        self._me, self._hear, self._is_heard = me, hear, is_heard
        self.is_subscribed = asyncio.Event()
        self._queue: deque[tuple[bytes, bytes]] = deque()
        self._queued_bytes = 0
        self._is_filled = asyncio.Event()

    def subscription(self) -> Subscription:
        """Returns the subscription that fills this queue."""
        content = pb.PSRequest(type=pb.PSRequest.SUBSCRIBE, topic=self.topic)
        request = pb.Request(type=pb.Request.PUBSUB, pubsub=content).SerializeToString()
        return Subscription(request, self._answered, self._hears, self._take, self.counters, self._boundary)

    def _answered(self, answer: bytes) -> None:
        response_in(answer)
        self.is_subscribed.set()

    def _take(self, publisher: bytes, message: bytes) -> None:
        self.put(publisher, pb.PSMessage.FromString(message).data)

    def _hears(self, publisher: bytes) -> bool:
        """Whether messages of this publisher are delivered. Our own come back to us, and are not."""
        return publisher == self._me or self._is_heard(publisher)

    def put(self, publisher: bytes, data: bytes) -> None:
        """Queues a message from a peer. If the queue is full, the new one is dropped: it builds on the older ones."""
        if publisher == self._me:
            return
        self.counters.update({"bytes received": len(data), "received gossip": len(data), "gossip received": 1})
        if len(data) > MESSAGE_BYTES_MAX:
            self.counters["gossip refused"] += 1
        elif len(self._queue) >= MESSAGES_MAX or self._queued_bytes + len(data) > QUEUED_BYTES_MAX:
            self.counters["gossip dropped"] += 1
        else:
            self._queue.append((publisher, data))
            self._queued_bytes += len(data)
            self._is_filled.set()

    async def deliver(self) -> None:
        """Delivers messages forever, and yields to other tasks after each."""
        while True:
            await self._is_filled.wait()
            while self._queue:
                publisher, data = self._queue.popleft()
                self._queued_bytes -= len(data)
                with self._boundary.contain("a gossiped message", publisher):
                    self._hear(publisher, data)
                await asyncio.sleep(0)
            self._is_filled.clear()


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
            with self._boundary.contain("a subscription"):
                try:
                    await self._control.listen(queue.subscription())
                except TransportError as error:
                    logger.debug("the subscription to %s broke: %s", queue.topic, error)
                finally:
                    queue.is_subscribed.clear()
            await asyncio.sleep(BACKOFF_SECONDS)

    async def publish(self, topic: str, data: bytes) -> None:
        async with self._publishing:
            await self._control.publish(topic, data)
        self._counters.update({"bytes sent": len(data), "sent gossip": len(data), "gossip sent": 1})
