"""hivemind's DHT node with bounds and our own signatures; it stores hints about peers' addresses.

The DHT is Kademlia: Maymounkov and Mazieres 2002. dht_protocol.py bounds requests, dht_records.py checks records.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
import time
from collections import Counter
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any, Self

from p2ptrain.identity import Identity, id_bytes_of
from p2ptrain.net.boundary import Boundary
from p2ptrain.net.libp2p.control import P2pdControl
from p2ptrain.net.libp2p.dht_protocol import BoundedProtocol
from p2ptrain.net.libp2p.dht_records import sign_record, strip_record, why_invalid
from p2ptrain.net.libp2p.slim_hivemind import parts_of_hivemind
from p2ptrain.net.libp2p.unary import UnaryCalls

with parts_of_hivemind():
    from hivemind.dht.node import DHTNode
    from hivemind.dht.routing import DHTID
    from hivemind.dht.storage import DHTLocalStorage
    from hivemind.dht.validation import DHTRecord, RecordValidatorBase
    from hivemind.p2p import PeerID
    from hivemind.utils.logging import use_hivemind_log_handler

use_hivemind_log_handler("nowhere")  # hivemind then logs through our handlers
logging.getLogger("hivemind").setLevel(logging.WARNING)
logging.addLevelName(logging.WARNING, "WARNING")  # hivemind renames the level for the whole process
logger = logging.getLogger("p2ptrain.net")

CHECKS_PER_SECOND_MAX = 1_024  # 70 ms of each second
STORED_KEYS_MAX, STORED_ENTRIES_MAX = 64, 256  # stored here for the DHT, 4 KB each: 70 MB under attack


class RecordValidator(RecordValidatorBase):  # type: ignore[misc]  # hivemind has no types
    """Adapts dht_records.py to hivemind's validator interface, with as many checks in a second as we can afford: anyone
    can send megabytes of records."""

    def __init__(self, identity: Identity, counters: Counter[str]) -> None:
        self._identity, self._counters = identity, counters
        self._second, self._checks = 0, 0

    def validate(self, record: DHTRecord) -> bool:
        now = time.time()
        self._second, self._checks = int(now), self._checks + 1 if int(now) == self._second else 1
        why = "too many in a second"
        if self._checks <= CHECKS_PER_SECOND_MAX:
            why = why_invalid(record.key, record.subkey, record.value, record.expiration_time, now)
        if why:
            self._counters["DHT records refused"] += 1
            logger.debug("refused a DHT record: %s", why)
        return not why

    def sign_value(self, record: DHTRecord) -> bytes:
        return sign_record(self._identity.sign, self._identity.key, record.key, record.value, record.expiration_time)

    def strip_value(self, record: DHTRecord) -> bytes:
        return strip_record(record.value)


class Storage(DHTLocalStorage):  # type: ignore[misc]  # hivemind has no types
    """The part of the DHT stored on this node, with bounds: hivemind's own has none, and its expiry heap only grows.

    Anyone can invent enough keys and authors to fill it. So the keys that we use ourselves have reserved room,
    and when it is full a new entry replaces a random one: nobody is kept out for good.
    """

    def __init__(self, keys_max: int) -> None:
        super().__init__()
        self._keys_max = keys_max
        self.used: set[Any] = set()  # the few keys that we announce under or look up

    def use(self, key: str) -> None:
        self.used.add(DHTID.generate(source=key))

    def store_subkey(self, key: Any, subkey: bytes, value: bytes, expiration_time: float) -> bool:
        held = self.get(key)
        old = held.value.get(subkey) if held else None
        if not self._keys_max or (old is not None and old.expiration_time >= expiration_time):
            return False
        if not super().store_subkey(key, subkey, value, expiration_time):
            return False
        if held:
            _draw_out(held.value, held.value.data.keys() - {subkey}, STORED_ENTRIES_MAX - 1)
        if key not in self.used:
            _draw_out(self, self.data.keys() - self.used - {key}, self._keys_max - 1)
        for storage in (self, held.value) if held else (self,):
            if len(storage.expiration_heap) > 2 * len(storage.data) + STORED_ENTRIES_MAX:
                storage.expiration_heap = list(storage.key_to_heap.values())
                heapq.heapify(storage.expiration_heap)
        return True


def _draw_out(storage: Any, others: set[Any], room: int) -> None:
    """Evicts random entries until at most `room` of the others are left."""
    for each in random.SystemRandom().sample(list(others), max(0, len(others) - room)):
        del storage[each]


class Dht:
    """hivemind's DHT node on top of one p2pd."""

    def __init__(self, node: Any, calls: UnaryCalls) -> None:
        self.node, self.calls = node, calls
        self.reading = calls.reading  # answers come only while this runs

    @classmethod
    async def start(
        cls,
        control: P2pdControl,
        me: bytes,
        validator: RecordValidator,
        storage: Storage,
        counters: Counter[str],
        boundary: Boundary,
    ) -> Self:
        calls = await UnaryCalls.start(control, boundary)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(calls.close)
            protocol = BoundedProtocol(calls, me, validator, storage, Storage(keys_max=0), counters, boundary)
            node = await DHTNode.create(
                p2p=SimpleNamespace(peer_id=PeerID(id_bytes_of(me))),
                node_id=protocol.node_id,
                client_mode=True,  # `protocol` answers instead
                cache_locally=False,
                cache_nearest=0,
                cache_on_store=False,
                cache_refresh_before_expiry=0,
                reuse_get_requests=False,
                blacklist_time=0,  # it never forgets a peer; who does not answer leaves the routing table
            )
            node.protocol = protocol
            await protocol.serve()
            stack.pop_all()
        return cls(node, calls)

    async def meet(self, peer: bytes) -> None:
        """Pings a peer: both enter each other's routing tables. hivemind logs failures and raises nothing."""
        await self.node.protocol.call_ping(PeerID(id_bytes_of(peer)))
        await asyncio.sleep(0)  # hivemind records the answer in a separate task

    async def stop(self) -> None:
        self.node.is_alive = False
        await self.calls.close()
