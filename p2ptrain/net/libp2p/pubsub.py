"""Gossip: subscribes to topics, again after a restart of p2pd, and publishes in them.

p2pd buffers 32 messages for a subscriber and silently drops the rest. So they are read as they come, and a task
delivers them one at a time; what does not fit into the queue meanwhile is dropped and counted.

gossipsub delivers what anyone publishes, and does not say over which connection it came. So a message begins with its
publisher, whose signature p2pd has checked, and the look-up of that key comes before everything else: a message of a
publisher that is not heard is skipped as its bytes arrive, undecoded and never whole in memory. Waking up costs ten
times what that takes, so after such a message the next pile up in the socket for a moment: it holds hundreds."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable
from typing import cast

from p2ptrain.identity import ID_PREFIX, KEY_BYTES
from p2ptrain.net.boundary import Boundary
from p2ptrain.net.libp2p.control import P2pdControl, response_in
from p2ptrain.net.libp2p.slim_hivemind import parts_of_hivemind
from p2ptrain.net.libp2p.streams import length_at, with_length
from p2ptrain.net.tasks import BACKOFF_SECONDS, Tasks
from p2ptrain.net.transport import MESSAGE_BYTES_MAX, STRANGERS, Hear, IsAdmitted, TransportError, everyone

with parts_of_hivemind():
    from hivemind.proto import p2pd_pb2 as pb

MESSAGES_MAX = 1_024  # queued in a topic: one round's, four for each of 256 seats
QUEUED_BYTES_MAX = 2**26  # in a topic: 64 messages of the largest size
BYTES_MAX = 2**22  # from p2pd, which we trust; gossipsub passes on a quarter
BEGINNING = b"\x0a" + bytes([len(ID_PREFIX) + KEY_BYTES]) + ID_PREFIX  # of a PSMessage: field 1, an Ed25519 key's id
KEY_END = len(BEGINNING) + KEY_BYTES
PILE_SECONDS = 0.008  # 40 messages of a flood of 5,000 a second; a unix socket holds 200 small ones, and p2pd 32
PUBLISHING_MAX = 8  # messages being published at a time, each on its own connection
SUBSCRIBE_SECONDS = 10.0  # to wait for p2pd; the subscription is made sooner or later in any case

logger = logging.getLogger("p2ptrain.net")


class TopicQueue:
    """The queue of received messages of one topic, and its listener."""

    def __init__(
        self, topic: str, me: bytes, hear: Hear, is_heard: IsAdmitted, counters: Counter[str], boundary: Boundary
    ) -> None:
        self.topic, self.counters, self.boundary = topic, counters, boundary
        self._me, self._hear, self._is_heard = me, hear, is_heard
        self.is_subscribed = asyncio.Event()
        self._queue: deque[tuple[bytes, bytes]] = deque()
        self._queued_bytes = 0
        self._is_filled = asyncio.Event()

    def hears(self, publisher: bytes) -> bool:
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
                with self.boundary.contain("a gossiped message", publisher):
                    self._hear(publisher, data)
                await asyncio.sleep(0)
            self._is_filled.clear()


class Subscription(asyncio.Protocol):
    """Subscribes to a topic, and puts heard publishers' messages into its queue, until p2pd hangs up."""

    def __init__(self, queue: TopicQueue) -> None:
        self._queue = queue
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._is_answered = False
        self._rest = b""  # the beginning of a message
        self._skip = 0  # bytes still to come of a message that is not heard
        self.ended: asyncio.Future[str] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        content = pb.PSRequest(type=pb.PSRequest.SUBSCRIBE, topic=self._queue.topic)
        request = pb.Request(type=pb.Request.PUBSUB, pubsub=content)
        self._transport.write(with_length(request.SerializeToString()))

    def connection_lost(self, error: Exception | None) -> None:
        self._end(f"p2pd hung up: {error}" if error else "p2pd hung up")

    def data_received(self, data: bytes) -> None:
        if self._skip >= len(data):
            self._skip -= len(data)
            self._pile()
            return
        data, at, junk = self._rest + data[self._skip :] if self._rest or self._skip else data, 0, 0
        self._skip, size = 0, len(data)
        try:
            with self._queue.boundary.guard("gossip as it arrives"):
                while (head := length_at(data, at, BYTES_MAX)) is not None:
                    start, end = head
                    if size < min(end, start + KEY_END):
                        break
                    if self._is_answered and not self._hears(data[start : start + KEY_END]):
                        junk += 1
                        self._skip, at = max(0, end - size), min(end, size)
                        continue
                    if size < end:
                        break
                    self._take(data[start:end])
                    at = end
                self._rest = data[at:]
                if junk:
                    self._queue.counters[STRANGERS] += junk
                    self._pile()
        except TransportError as error:
            self._end(str(error))
            self.abort()

    def _hears(self, beginning: bytes) -> bool:
        return beginning.startswith(BEGINNING) and self._queue.hears(beginning[len(BEGINNING) :])

    def _take(self, message: bytes) -> None:
        if not self._is_answered:
            response_in(message)
            self._queue.is_subscribed.set()
            self._is_answered = True
            return
        publisher = message[len(BEGINNING) : KEY_END]
        with self._queue.boundary.contain("a message of a publisher", publisher):  # its next one may be better
            self._queue.put(publisher, pb.PSMessage.FromString(message).data)

    def _pile(self) -> None:
        """Reads no more for a moment."""
        assert self._transport is not None
        self._transport.pause_reading()
        self._loop.call_later(PILE_SECONDS, self._resume)

    def _resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _end(self, why: str) -> None:
        if not self.ended.done():
            self.ended.set_result(why)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class Gossip:
    """All topics that a node is subscribed to."""

    def __init__(
        self,
        me: bytes,
        control: P2pdControl,
        counters: Counter[str],
        boundary: Boundary,
        tasks: Tasks,
        session: Callable[[], Tasks | None],
    ) -> None:
        """session: returns the tasks that end with this p2pd; None if it is not up"""
        self._me, self._control, self._counters, self._boundary = me, control, counters, boundary
        self._tasks, self._session = tasks, session
        self._queues: dict[str, TopicQueue] = {}
        self._listening: dict[str, asyncio.Task[None]] = {}
        self._delivering: list[asyncio.Task[None]] = []
        self._left: set[str] = set()
        self._publishing = asyncio.Semaphore(PUBLISHING_MAX)

    async def subscribe(self, topic: str, hear: Hear, is_heard: IsAdmitted = everyone) -> None:
        """Subscribes; when p2pd is down, once it is up again."""
        assert topic not in self._queues, f"{topic} already has a listener"
        queue = self._queues[topic] = TopicQueue(topic, self._me, hear, is_heard, self._counters, self._boundary)
        self._delivering.append(self._tasks.spawn(queue.deliver()))
        if session := self._session():
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

    def come_back(self, topic: str) -> None:
        self._left.remove(topic)
        if session := self._session():
            self._listen_to(self._queues[topic], session)

    def end(self) -> None:
        """Leaves all topics for good."""
        for task in (*self._listening.values(), *self._delivering):
            task.cancel()
        self._queues, self._listening, self._delivering, self._left = {}, {}, [], set()

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
