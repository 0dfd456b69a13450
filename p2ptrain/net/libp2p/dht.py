"""hivemind's DHT node with bounds and our own signatures; it stores hints about peers' addresses.

The DHT is Kademlia: Maymounkov and Mazieres 2002. Anyone may send its requests, and answer ours. hivemind's own
servicer reads, answers and stores as much as a request names. Our nodes ask for one key and store one record at a time,
so that is all we answer: a request costs a fraction of a millisecond whatever is in it, and an answer that we get costs
no more before others have their turn. A peer's place in the DHT follows from its key, as all nodes choose it: else one
peer could take any number of places, and lead a search on for ever. A search asks connected peers only.

Two things of hivemind's are left out because strangers set them off: records are not handed to a node that has just
come (it gets them within ANNOUNCE_SECONDS), and where there is no room for a newcomer, nobody is pinged to make some.

Under a key, each peer has one value of its own, which nobody else can forge. The DHT stores anything that anyone sends.
So a record carries its author's signature over the key, the author, the time of expiry and the value, and every node
that stores or reads it checks. A record that expires too late is refused too: a newer one replaces it only by expiring
even later, so one dated into the next century would stay for good. On the wire the subkey is the author's public key,
and the value is the announced bytes in msgpack followed by the signature. Each has exactly one valid encoding; anything
else is refused, since the DHT decodes accepted records without further checks."""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
import struct
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import AsyncExitStack
from functools import partial
from types import SimpleNamespace
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta

from p2ptrain.core.wire import decode
from p2ptrain.errors import RemoteProtocolError
from p2ptrain.identity import KEY_BYTES, SIGNATURE_BYTES, Identity, PeerIdError, id_bytes_of, key_of_bytes, verify
from p2ptrain.net.boundary import Boundary
from p2ptrain.net.libp2p.control import P2pdControl, UnaryCalls
from p2ptrain.net.libp2p.slim_hivemind import parts_of_hivemind
from p2ptrain.net.rate_limit import PeerLimits
from p2ptrain.net.transport import TransportError

with parts_of_hivemind():
    from google.protobuf.message import DecodeError
    from hivemind.dht.node import DHTNode
    from hivemind.dht.protocol import DHTProtocol
    from hivemind.dht.routing import DHTID, RoutingTable
    from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
    from hivemind.dht.validation import DHTRecord, RecordValidatorBase
    from hivemind.p2p import PeerID
    from hivemind.proto import dht_pb2
    from hivemind.utils.logging import use_hivemind_log_handler
    from hivemind.utils.timed_storage import ValueWithExpiration, get_dht_time

use_hivemind_log_handler("nowhere")  # hivemind then logs through our handlers
logging.getLogger("hivemind").setLevel(logging.WARNING)
logging.addLevelName(logging.WARNING, "WARNING")  # hivemind renames the level for the whole process
logger = logging.getLogger("p2ptrain.net")

VALUE_BYTES_MAX = 4_096  # per announcement: a few addresses and a ticket take 500
AHEAD_SECONDS_MAX = 7_200  # how far ahead a record may expire
ANNOUNCE_SECONDS_MAX = 3_600  # the longest that we announce for: a clock one hour slow still accepts it
PAST_SECONDS_MAX = 60  # for inaccurate clocks: one stale entry spoils all that come with it
DOMAIN = b"p2ptrain DHT record 1\0"
KEY_BYTES_MAX = 256  # digests of keys in the DHT have 20
PING, STORE, FIND = "DHTProtocol.rpc_ping", "DHTProtocol.rpc_store", "DHTProtocol.rpc_find"
BUCKET_SIZE, DEPTH_MODULO, REPLICAS = 20, 5, 5  # hivemind's defaults
SEARCHING_MAX = 32  # requests to DHT peers in flight
ANSWER_SECONDS = 3.0  # hivemind names it again with each call
REQUEST_BYTES_MAX = VALUE_BYTES_MAX + 1_024  # to store a record of the largest kind
SHORT_BYTES_MAX = 256  # an answer to all but a search
ENTRIES_MAX, ENTRIES_BYTES_MAX = 64, 2**14  # of a key in one answer; drawn by lot if there are more
REPLACEMENTS_MAX = 20  # peers a bucket of the routing table remembers for when it has room again
CHECKS_IN_A_ROW = 8  # of signatures, before others have their turn: 0.6 ms
REQUEST_COST = 2**16  # charged for each request, on top of the bytes of its answer: 0.3 ms of work
PEER_BYTES_PER_SECOND = 2**18  # 4 requests a second, after a first 16; a node asks another a few times a minute
STRANGERS_DHT_BYTES_PER_SECOND = 2**21  # 32 requests a second
DICTIONARY_CODE = 0x50  # hivemind's extension type of msgpack for the entries of a key
CHECKS_PER_SECOND_MAX = 1_024  # 70 ms of each second
STORED_KEYS_MAX, STORED_ENTRIES_MAX = 64, 256  # stored here for the DHT, 4 KB each: 70 MB under attack

_ENTRY = tuple[bytes, bytes, float]  # author, value and signature, time of expiry
_ENCODER = msgspec.msgpack.Encoder()
_EXTENSION = msgspec.msgpack.Decoder(msgspec.msgpack.Ext)
_DICTIONARY = msgspec.msgpack.Decoder(tuple[object, float, Annotated[list[_ENTRY], Meta(max_length=ENTRIES_MAX)]])


def sign_record(sign: Callable[[bytes], bytes], author: bytes, key: bytes, packed: bytes, expires_at: float) -> bytes:
    """Returns a value in stored form: the announced bytes in msgpack, and the signature."""
    return packed + sign(_signed(author, key, packed, expires_at))


def strip_record(stored: bytes) -> bytes:
    """Returns the value of a valid record without its signature."""
    return stored[:-SIGNATURE_BYTES]


def why_invalid(key: object, subkey: object, stored: object, expires_at: object, now: float) -> str:
    """Says why a record is invalid; empty if it is valid. The arguments come from any peer and may have any type."""
    if not (isinstance(key, bytes) and isinstance(subkey, bytes) and isinstance(stored, bytes)):
        return "not bytes"
    if len(key) > KEY_BYTES_MAX or len(subkey) > 2 + KEY_BYTES or len(stored) > VALUE_BYTES_MAX + 3 + SIGNATURE_BYTES:
        return "too long"
    if not (isinstance(expires_at, float) and now - PAST_SECONDS_MAX <= expires_at <= now + AHEAD_SECONDS_MAX):
        return "expires at a time that is not accepted"  # NaN fails this too
    author, packed = _unpacked(subkey), strip_record(stored)
    if author is None or _unpacked(packed) is None:
        return "not bytes in msgpack's one encoding"
    if not verify(author, _signed(author, key, packed, expires_at), stored[-SIGNATURE_BYTES:]):
        return "the signature is not that of the key it stands under"
    return ""


def _signed(author: bytes, key: bytes, packed: bytes, expires_at: float) -> bytes:
    return DOMAIN + struct.pack(">d", expires_at) + author + len(key).to_bytes(2, "big") + key + packed


def _unpacked(packed: bytes) -> bytes | None:
    """Decodes msgpack bytes. None unless they are in the shortest form with nothing after them."""
    try:
        content = msgspec.msgpack.decode(packed, type=bytes)
    except msgspec.MsgspecError:
        return None
    return content if len(content) <= VALUE_BYTES_MAX and msgspec.msgpack.encode(content) == packed else None


def place_of(peer_id: bytes) -> DHTID:
    return DHTID.generate(source=peer_id)


class _Stub:
    """hivemind's interface for calls to one peer."""

    def __init__(self, calls: UnaryCalls, peer: PeerID) -> None:
        self._calls, self._peer = calls, peer.to_bytes()
        self._place = place_of(self._peer).to_bytes()
        self.rpc_ping = partial(self._ask, PING, dht_pb2.PingResponse)
        self.rpc_store = partial(self._ask, STORE, dht_pb2.StoreResponse)
        self.rpc_find = partial(self._ask, FIND, dht_pb2.FindResponse)

    async def _ask(self, name: str, kind: Any, request: Any, **_: float) -> Any:
        raw = await self._calls.call(self._peer, name, request.SerializeToString(), ANSWER_SECONDS)
        if name != FIND and len(raw) > SHORT_BYTES_MAX:
            raise RemoteProtocolError(f"an answer of {len(raw)} bytes")
        answer = _parsed(kind, raw)
        if answer.peer.node_id not in (b"", self._place):
            raise RemoteProtocolError("a place in the DHT that is not the peer's")
        return answer


class BoundedProtocol(DHTProtocol):  # type: ignore[misc]  # hivemind has no types
    """A node's side of the DHT's protocol. hivemind's DHTNode searches and stores with it."""

    def __init__(
        self,
        calls: UnaryCalls,
        me: bytes,
        validator: RecordValidatorBase,
        storage: DHTLocalStorage,
        counters: Counter[str],
        boundary: Boundary,
    ) -> None:
        super().__init__(_initialized_with_create=True)
        self.node_id = place_of(id_bytes_of(me))
        self.bucket_size, self.num_replicas, self.wait_timeout = BUCKET_SIZE, REPLICAS, ANSWER_SECONDS
        self.node_info, self.client_mode = dht_pb2.NodeInfo(node_id=self.node_id.to_bytes()), False
        self.storage, self.cache, self.record_validator = storage, Storage(keys_max=0), validator
        self.routing_table = RoutingTable(self.node_id, BUCKET_SIZE, DEPTH_MODULO)
        self.rpc_semaphore = asyncio.Semaphore(SEARCHING_MAX)
        each, strangers = PEER_BYTES_PER_SECOND, STRANGERS_DHT_BYTES_PER_SECOND
        self._limits = PeerLimits(boundary.is_admitted, boundary.range_of, each=each, strangers=strangers)
        self._calls, self._counters, self._boundary = calls, counters, boundary

    # -- Requests of others -------------------------------------------------------------------------

    async def serve(self) -> None:
        for name, work in ((PING, self._pinged), (STORE, self._asked_to_store), (FIND, self._asked_to_find)):
            await self._calls.serve(name, partial(self._answer, work))

    def _answer(self, work: Callable[[bytes, bytes], Any], peer_id: bytes, request: bytes) -> bytes:
        """Answers a peer's request. RemoteProtocolError or TransportError if it gets no answer."""
        try:
            key = key_of_bytes(peer_id)
        except PeerIdError as error:
            raise RemoteProtocolError(str(error)) from error
        is_refused = len(request) > REQUEST_BYTES_MAX or self._boundary.is_tired_of(key)
        if is_refused or not self._limits.take_now(key, REQUEST_COST):
            self._counters["DHT requests refused"] += 1
            raise RemoteProtocolError("too large or too many")
        with self._boundary.guard("a request of the DHT", key):
            answer: bytes = work(peer_id, request).SerializeToString()
        if not self._limits.take_now(key, len(answer)):
            raise RemoteProtocolError("too much")
        return answer

    def _pinged(self, peer_id: bytes, raw: bytes) -> Any:
        self.met(peer_id, _parsed(dht_pb2.PingRequest, raw).peer.node_id)
        return dht_pb2.PingResponse(peer=self.node_info, dht_time=get_dht_time(), available=False)

    def _asked_to_store(self, peer_id: bytes, raw: bytes) -> Any:
        request = _parsed(dht_pb2.StoreRequest, raw)
        record = _only(request.keys), _only(request.subkeys), _only(request.values), _only(request.expiration_time)
        self.met(peer_id, request.peer.node_id)
        is_stored = len(record[0]) == DHTID.HASH_NBYTES and self.record_validator.validate(DHTRecord(*record))
        if is_stored:
            key, subkey, value, expires_at = record
            is_stored = self.storage.store_subkey(
                DHTID.from_bytes(key), msgspec.msgpack.decode(subkey, type=bytes), value, expires_at
            )
        return dht_pb2.StoreResponse(store_ok=[is_stored], peer=self.node_info)

    def _asked_to_find(self, peer_id: bytes, raw: bytes) -> Any:
        request = _parsed(dht_pb2.FindRequest, raw)
        wanted = _only(request.keys)
        if len(wanted) != DHTID.HASH_NBYTES:
            raise RemoteProtocolError("not a key of the DHT")
        self.met(peer_id, request.peer.node_id)
        key, result = DHTID.from_bytes(wanted), dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)
        if held := self.storage.get(key):
            result.type, result.expiration_time = dht_pb2.FOUND_DICTIONARY, held.expiration_time
            result.value = _encoded(held.value)
        for place, peer in self.routing_table.get_nearest_neighbors(key, BUCKET_SIZE, exclude=place_of(peer_id)):
            result.nearest_node_ids.append(place.to_bytes())
            result.nearest_peer_ids.append(peer.to_bytes())
        return dht_pb2.FindResponse(results=[result], peer=self.node_info)

    def met(self, peer_id: bytes, claimed: bytes) -> None:
        """Adds a peer to the routing table, if it says that it takes part."""
        place = place_of(peer_id)
        if claimed != place.to_bytes():
            return
        table = self.routing_table
        table.add_or_update_node(place, table.get(node_id=place) or PeerID(peer_id))
        replacements = table.buckets[table.get_bucket_index(place)].replacement_nodes
        while len(replacements) > REPLACEMENTS_MAX:
            del table[next(iter(replacements))]

    # -- Our own requests ---------------------------------------------------------------------------

    def get_stub(self, peer: PeerID) -> _Stub:
        return _Stub(self._calls, peer)

    async def update_routing_table(self, node_id: DHTID | None, peer_id: PeerID, responded: bool = True) -> None:
        """Takes note of how a peer answered; hivemind calls it. The place follows from the peer, not from `node_id`."""
        place = place_of(peer_id.to_bytes())
        if responded:
            self.met(peer_id.to_bytes(), place.to_bytes())
        elif place in self.routing_table:
            del self.routing_table[place]

    async def call_find(self, peer: PeerID, keys: Collection[DHTID]) -> dict[DHTID, tuple[Any, Any]] | None:
        """Asks a peer for the entries of a key and the nearest peers that we know. None without a valid answer."""
        [key] = keys
        try:
            with self._boundary.guard("an answer to a search in the DHT", key_of_bytes(peer.to_bytes())):
                async with self.rpc_semaphore:
                    request = dht_pb2.FindRequest(keys=[key.to_bytes()], peer=self.node_info)
                    result = _only((await self.get_stub(peer).rpc_find(request)).results)
                entries = _decoded(result.value) if result.type == dht_pb2.FOUND_DICTIONARY else []
                places, table = map(place_of, result.nearest_peer_ids[:BUCKET_SIZE]), self.routing_table
                nearest = {place: known for place in places if (known := table.get(node_id=place)) is not None}
                found = await self._valid(key.to_bytes(), entries), nearest
        except (TransportError, RemoteProtocolError):
            await self.update_routing_table(None, peer, responded=False)
            return None
        await self.update_routing_table(None, peer, responded=True)
        return {key: found}

    async def _valid(self, key: bytes, entries: list[_ENTRY]) -> Any:
        """Returns the entries up to the first invalid one, which an honest peer would not have stored."""
        found = DictionaryDHTValue()
        for count, (author, value, expires_at) in enumerate(entries, 1):
            if count % CHECKS_IN_A_ROW == 0:
                await asyncio.sleep(0)
            if not self.record_validator.validate(DHTRecord(key, _ENCODER.encode(author), value, expires_at)):
                break
            found.store(author, value, expires_at)
        return ValueWithExpiration(found, found.latest_expiration_time) if found else None


def _parsed(kind: Any, raw: bytes) -> Any:
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise RemoteProtocolError(str(error)) from error


def _only(repeated: Any) -> Any:
    if len(repeated) != 1:
        raise RemoteProtocolError(f"{len(repeated)} of what there should be one")
    return repeated[0]


def _encoded(entries: Any) -> bytes:
    """Encodes entries as hivemind does, no more of them than an answer may have."""
    items = [(author, value, expires_at) for author, (value, expires_at) in entries.items()]
    sent, room = [], ENTRIES_BYTES_MAX
    for item in random.SystemRandom().sample(items, min(len(items), ENTRIES_MAX)):
        room -= len(item[0]) + len(item[1]) + 16
        if room < 0:
            break
        sent.append(item)
    content = _ENCODER.encode((float("inf"), entries.latest_expiration_time, sent))
    return _ENCODER.encode(msgspec.msgpack.Ext(DICTIONARY_CODE, content))


def _decoded(raw: bytes) -> list[_ENTRY]:
    extension = decode(_EXTENSION, raw, "the entries of a key")
    if extension.code != DICTIONARY_CODE:
        raise RemoteProtocolError("not the entries of a key")
    return decode(_DICTIONARY, bytes(extension.data), "the entries of a key")[2]


class RecordValidator(RecordValidatorBase):  # type: ignore[misc]  # hivemind has no types
    """Adapts `why_invalid` to hivemind's validator interface, with as many checks in a second as we can afford."""

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

    Anyone can invent enough keys and authors to fill it. So the keys that we use ourselves have reserved room, and when
    it is full a new entry replaces a random one: nobody is kept out for good."""

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
            protocol = BoundedProtocol(calls, me, validator, storage, counters, boundary)
            node = await DHTNode.create(
                p2p=SimpleNamespace(peer_id=PeerID(id_bytes_of(me))), node_id=protocol.node_id,
                client_mode=True,  # `protocol` answers instead
                cache_locally=False, cache_nearest=0, cache_on_store=False, cache_refresh_before_expiry=0,
                reuse_get_requests=False,
                blacklist_time=0,  # it never forgets a peer; who does not answer leaves the routing table
            )  # fmt: skip
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
