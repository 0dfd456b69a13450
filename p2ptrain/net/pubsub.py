"""Between the network and those who listen: a queue for each topic, with a bound and a count of what did not fit.

p2pd keeps 32 messages for a subscriber and drops the others without a word. So one task reads from it and does nothing
else, and another hands out what was read, one message at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from typing import Protocol

from p2ptrain.identity import PeerIdError, key_of_bytes
from p2ptrain.net.tasks import BACKOFF_SECONDS, Tasks
from p2ptrain.net.transport import MESSAGE_BYTES_MAX, Hear, TransportError

MESSAGES_MAX = 1_024  # waiting in a topic: four for each of 256 seats, which is a round's
QUEUED_BYTES_MAX = 2**26  # of a topic: 64 messages of the largest size
PUBLISHING_MAX = 8  # connections that publish at a time
SUBSCRIBE_SECONDS = 10.0  # to wait for p2pd, which will be told sooner or later

logger = logging.getLogger("p2ptrain.net")


class Mailbox:
    """What has come for one topic, and who hears it."""

    def __init__(self, topic: str, me: bytes, hear: Hear, counters: Counter[str]) -> None:
        self.topic, self._me, self._hear, self._counters = topic, me, hear, counters
        self.is_subscribed = asyncio.Event()
        self._queue: deque[tuple[bytes, bytes]] = deque()
        self._queued_bytes = 0
        self._is_filled = asyncio.Event()

    def put(self, publisher_id: bytes, data: bytes) -> None:
        """What others have published. If it does not fit, it is the newest that gets lost: it builds on the older."""
        try:
            publisher = key_of_bytes(publisher_id)
        except PeerIdError:
            self._counters["gossip of strangers"] += 1
            return
        if publisher == self._me:
            return
        self._counters.update({"bytes received": len(data), "received gossip": len(data), "gossip received": 1})
        if len(data) > MESSAGE_BYTES_MAX:
            self._counters["gossip refused"] += 1
        elif len(self._queue) >= MESSAGES_MAX or self._queued_bytes + len(data) > QUEUED_BYTES_MAX:
            self._counters["gossip dropped"] += 1
        else:
            self._queue.append((publisher, data))
            self._queued_bytes += len(data)
            self._is_filled.set()

    async def deliver(self) -> None:
        """Forever; others get their turn after each message."""
        while True:
            await self._is_filled.wait()
            while self._queue:
                publisher, data = self._queue.popleft()
                self._queued_bytes -= len(data)
                self._hear(publisher, data)
                await asyncio.sleep(0)
            self._is_filled.clear()


class Publisher(Protocol):
    """What p2pd does about topics."""

    async def publish(self, topic: str, data: bytes) -> None: ...
    async def listen(self, mailbox: Mailbox) -> None: ...


class Gossip:
    """All topics of one node."""

    def __init__(self, me: bytes, control: Publisher, counters: Counter[str]) -> None:
        self._me, self._control, self._counters = me, control, counters
        self._mailboxes: dict[str, Mailbox] = {}
        self._publishing = asyncio.Semaphore(PUBLISHING_MAX)

    async def subscribe(self, topic: str, hear: Hear, tasks: Tasks, session: Tasks | None) -> None:
        """Without a session, for p2pd is down, it is subscribed to in the next."""
        assert topic not in self._mailboxes, f"{topic} has its listener"
        mailbox = self._mailboxes[topic] = Mailbox(topic, self._me, hear, self._counters)
        tasks.spawn(mailbox.deliver())
        if session:
            session.spawn(self._listen(mailbox))
        try:
            async with asyncio.timeout(SUBSCRIBE_SECONDS):
                await mailbox.is_subscribed.wait()
        except TimeoutError:
            logger.warning("%s is not heard yet: p2pd is not running", topic)

    def listen(self, session: Tasks) -> None:
        for mailbox in self._mailboxes.values():
            session.spawn(self._listen(mailbox))

    async def _listen(self, mailbox: Mailbox) -> None:
        while True:
            try:
                await self._control.listen(mailbox)
            except TransportError as error:
                logger.debug("the subscription to %s broke: %s", mailbox.topic, error)
            await asyncio.sleep(BACKOFF_SECONDS)

    async def publish(self, topic: str, data: bytes) -> None:
        async with self._publishing:
            await self._control.publish(topic, data)
        self._counters.update({"bytes sent": len(data), "sent gossip": len(data), "gossip sent": 1})
