"""Targets of the network: mail, frames, questions, blobs, p2pd's answers, the DHT, addresses, and HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import msgspec

from benchmarks.fuzz import Target
from benchmarks.fuzz.core_targets import SIGNER, messages
from p2ptrain.core import wire
from p2ptrain.errors import P2ptrainError, RemoteProtocolError
from p2ptrain.identity import Identity, PeerIdError, id_bytes_of, key_of, peer_id_of, verify
from p2ptrain.net import addresses as multiaddrs
from p2ptrain.net import questions
from p2ptrain.net.blobs import server as blobs
from p2ptrain.net.connections import Connections
from p2ptrain.net.libp2p.control import P2pdControl, UnaryCalls, in_bytes, pb, read_opening
from p2ptrain.net.libp2p.dht import (
    DHTID,
    BoundedProtocol,
    DecodeError,
    PeerID,
    Storage,
    dht_pb2,
    place_of,
    sign_record,
    why_invalid,
)
from p2ptrain.net.libp2p.pubsub import Subscription, TopicQueue
from p2ptrain.net.libp2p.streams import FrameStream, length_at, read_length, with_length
from p2ptrain.net.mailbox import Deliver, HistoryBegins, HistoryPart, HistoryQuery, MessageQuery, decode_frame
from p2ptrain.net.transport import TransportError, everyone
from p2ptrain.node.control import Control
from tests.helpers.core import RUN
from tests.helpers.web import site, status_in, until_closed

ME, PEER = Identity(b"m" * 32), SIGNER
PEER_ID = id_bytes_of(PEER.key)
REFUSED = (RemoteProtocolError,)
P2PD = (TransportError, DecodeError)  # p2pd's own messages, which a peer cannot break
KEY = DHTID.generate(source="run")
T = TypeVar("T")


class Bare:
    """A boundary that lets everything through: what it would contain is what is looked for."""

    range_of = staticmethod(lambda peer: "")
    is_admitted = staticmethod(everyone)

    def guard(self, place: str, peer: bytes = b"") -> AbstractContextManager[None]:
        return nullcontext()

    contain = guard

    def is_tired_of(self, peer: bytes) -> bool:
        return False


class Quiet:
    """A transport and its writer, which lead nowhere."""

    def __init__(self) -> None:
        self.transport, self.written = self, bytearray()
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    async def drain(self) -> None: ...

    def set_write_buffer_limits(self, high: int) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    resume_reading = pause_reading

    def abort(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed


def fed(data: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=2**22)
    reader.feed_data(data)
    reader.feed_eof()
    return reader


# ---------------------------------------------------------------------------------------------------
# Streams, and p2pd


async def _frames(data: bytes) -> bytes:
    """Receives frames up to the end, and returns them as they are sent."""
    writer = Quiet()
    stream = FrameStream(PEER.key, "p", fed(data), writer, Counter(), lambda stream: None)
    received = []
    with suppress(TransportError):
        while True:
            received.append(await stream.receive(2**16))
    for frame in received:
        with suppress(TransportError):
            await stream.send(frame)
    assert data.startswith(writer.written)
    return bytes(writer.written)


async def _lengths(data: bytes) -> int:
    """Reads the length of a message of p2pd's in both ways."""
    try:
        found = length_at(data, 0, 2**22)
    except TransportError:
        found = None
    size = await read_length(fed(data), 2**22)
    assert found is not None
    assert found[1] - found[0] == size
    return size


async def _p2pd_said(data: bytes) -> None:
    """Has p2pd give this answer to each request."""

    class Says:
        async def connect(self) -> tuple[asyncio.StreamReader, Quiet]:
            return fed(with_length(data)), Quiet()

    control = P2pdControl(Says())
    await control.identify()
    for peer, addresses in await control.peers():
        assert isinstance(peer, bytes)
        assert all(isinstance(each, str) for each in addresses)
    await control.connect(PEER.key, "/ip4/203.0.113.7/tcp/4001")
    await control.publish("topic", b"data")


def p2pd_answers() -> list[bytes]:
    address = bytes([4, 127, 0, 0, 1, 6, 15, 161])
    quic = bytes([4, 203, 0, 113, 7, 0x91, 2, 15, 161, 0xCD, 3])
    relayed = address + b"\xa5\x03" + with_length(PEER_ID) + b"\xa2\x02"
    identified = pb.IdentifyResponse(id=PEER_ID, addrs=[address, quic, relayed])
    peers = [pb.PeerInfo(id=PEER_ID, addrs=[address]), pb.PeerInfo(id=id_bytes_of(ME.key), addrs=[])]
    answers = [pb.Response(type=pb.Response.OK, identify=identified, peers=peers)]
    return [each.SerializeToString() for each in answers]


async def _opening(data: bytes) -> object:
    peer, protocol = await read_opening(fed(with_length(data)))
    assert isinstance(protocol, str)
    return peer


async def _subscribed(data: bytes) -> int:
    """Hands the bytes of a subscription over in two parts."""
    queue = TopicQueue("t", ME.key, lambda *each: None, everyone, Counter(), Bare())
    subscription = Subscription(queue)
    subscription.connection_made(Quiet())
    half = len(data) // 2
    for part in (data[:half], data[half:]):
        if not subscription.ended.done():
            subscription.data_received(part)
    if subscription.ended.done():
        raise TransportError(subscription.ended.result())
    return len(queue._queue)


def subscriptions() -> list[bytes]:
    said = [{"from": key, "data": b"x" * 20, "topicIDs": ["t"]} for key in (PEER_ID, id_bytes_of(ME.key))]
    messages = [pb.PSMessage(**each).SerializeToString() for each in said]
    answer = pb.Response(type=pb.Response.OK).SerializeToString()
    return [b"".join(map(with_length, (answer, *messages, *messages)))]


async def _called(data: bytes) -> None:
    """Takes a message of the connection that carries the DHT's requests and answers."""
    calls = UnaryCalls(asyncio.StreamReader(), Quiet(), P2pdControl(None), Bare())
    calls._answers = defaultdict(lambda: lambda peer, request: request)
    calls._waiting = {b"c" * 16: asyncio.get_running_loop().create_future()}
    calls._take(pb.PersistentConnectionResponse.FromString(data))
    waiting = calls._waiting.pop(b"c" * 16)
    if waiting.done():
        waiting.exception()
    await calls.close()


def calls_of_p2pd() -> list[bytes]:
    handling = pb.CallUnaryRequest(peer=PEER_ID, proto="a", data=b"request")
    contents: list[dict[str, Any]] = [
        {"requestHandling": handling},
        {"callUnaryResponse": pb.CallUnaryResponse(response=b"answer")},
        {"callUnaryResponse": pb.CallUnaryResponse(error=b"refused")},
        {"daemonError": pb.DaemonError(message="no")},
        {"cancel": pb.Cancel()},
    ]
    return [pb.PersistentConnectionResponse(callId=b"c" * 16, **each).SerializeToString() for each in contents]


# ---------------------------------------------------------------------------------------------------
# The DHT


class _Signed:
    """A validator without a limit of checks in a second."""

    def validate(self, record: Any) -> bool:
        return not why_invalid(record.key, record.subkey, record.value, record.expiration_time, time.time())


class _SaysThis:
    """Calls to peers, all of which answer the same."""

    answer = b""

    async def call(self, peer_id: bytes, name: str, request: bytes, seconds: float) -> bytes:
        return self.answer


def dht_node(calls: _SaysThis) -> Any:
    return BoundedProtocol(calls, ME.key, _Signed(), Storage(64), Counter(), Bare())


def record() -> tuple[bytes, bytes, bytes, float]:
    expires_at = time.time() + 7_000  # fuzzing for longer tries expired ones, too
    packed = msgspec.msgpack.encode(b"a value")
    stored = sign_record(PEER.sign, PEER.key, KEY.to_bytes(), packed, expires_at)
    return KEY.to_bytes(), msgspec.msgpack.encode(PEER.key), stored, expires_at


def dht_requests() -> tuple[list[bytes], list[bytes], list[bytes]]:
    """Returns pings, requests to store and searches."""
    info = dht_pb2.NodeInfo(node_id=place_of(PEER_ID).to_bytes())
    key, subkey, value, expires_at = record()
    fields = {"keys": [key], "subkeys": [subkey], "values": [value], "expiration_time": [expires_at]}
    store = dht_pb2.StoreRequest(in_cache=[False], peer=info, **fields)
    made = dht_pb2.PingRequest(peer=info, validate=True), store, dht_pb2.FindRequest(keys=[key], peer=info)
    ping, store, find = ([each.SerializeToString()] for each in made)
    return ping, store, find


def dht_answers() -> list[bytes]:
    _, _, value, expires_at = record()
    entries = msgspec.msgpack.encode((float("inf"), expires_at, [(PEER.key, value, expires_at)]))
    found = msgspec.msgpack.encode(msgspec.msgpack.Ext(0x50, entries))
    result = {"nearest_node_ids": [bytes(20)], "nearest_peer_ids": [PEER_ID], "expiration_time": expires_at}
    made = [
        dht_pb2.FindResult(type=dht_pb2.FOUND_DICTIONARY, value=found, **result),
        dht_pb2.FindResult(type=dht_pb2.NOT_FOUND, **result),
    ]
    info = dht_pb2.NodeInfo(node_id=place_of(PEER_ID).to_bytes())
    return [dht_pb2.FindResponse(results=[each], peer=info).SerializeToString() for each in made]


def _record_read(data: bytes) -> str:
    """Judges a record whose parts may be of any type."""
    parts = _any_msgpack(data)
    if not isinstance(parts, list) or len(parts) != 4:
        raise RemoteProtocolError("not four parts")
    return why_invalid(*parts, time.time())


def _any_msgpack(data: bytes) -> Any:
    return wire.decode(msgspec.msgpack.Decoder(), data, "msgpack")


# ---------------------------------------------------------------------------------------------------
# Addresses


def _address(data: bytes) -> None:
    address = data.decode(errors="surrogateescape")
    peer, route = multiaddrs.split(address)
    multiaddrs.endpoint_of(address)
    in_bytes(route)
    assert multiaddrs.split(multiaddrs.join(route, peer)) == (peer, route), "one spelling"


def _any_text(data: bytes) -> None:
    """Asks everything that is asked of a text that p2pd or a peer told as an address."""
    text = data.decode(errors="replace")
    multiaddrs.reach_of(text)
    multiaddrs.relay_of(text)
    multiaddrs.worth_telling([text])
    multiaddrs.kind_of_address(text)
    multiaddrs.address_range.__wrapped__(text)
    multiaddrs.met_in([text])
    multiaddrs.is_within(text, multiaddrs.Reach.PRIVATE)
    multiaddrs.reason(text)


def addresses() -> list[bytes]:
    found = [
        multiaddrs.join(route, PEER.key)
        for route in (
            "/ip4/203.0.113.7/tcp/4001", "/ip6/2001:db8::7/udp/4001/quic-v1", "/dns4/a.example/tcp/1",
            f"/ip4/198.51.100.7/tcp/4001/p2p/{peer_id_of(ME.key)}/p2p-circuit", "/ip6/::ffff:127.0.0.1/tcp/9",
            "/ip6/64:ff9b::102:304/tcp/9",
        )
    ]  # fmt: skip
    return [each.encode() for each in found]


def _hint(data: bytes) -> None:
    def tell(peer: bytes, told: list[str]) -> None:
        for each in told:
            with suppress(TransportError):
                multiaddrs.split(each)

    Connections._take_hints(SimpleNamespace(tell=tell), {PEER.key: data})


def _verified(data: bytes) -> bool:
    return verify(data[:32], data[96:], data[32:96])


# ---------------------------------------------------------------------------------------------------
# The owner's side: HTTP, and the control socket


def http_requests() -> list[bytes]:
    browser = "Accept-Encoding: gzip\r\nCookie: a=b; p2ptrain=0123\r\nOrigin: http://127.0.0.1\r\n"
    paths = "/status", "/rounds?last=10", "/peers", "/?token=abc", "/assets/style.css", "/metrics", "/%2e%2e/x"
    told = f"HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\n{browser}Authorization: Bearer 0123456789abcdef\r\n\r\n"
    found = [f"GET {path} {told}" for path in paths]
    found.append("POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n")
    return [each.encode() for each in found]


async def _http(port: int, data: bytes) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data.replace(b"PORT", str(port).encode()))
        writer.write_eof()
        answer = await until_closed(reader)
        assert not answer or answer.startswith(b"HTTP/1."), answer[:100]
        status = status_in(answer)
        assert status != 500, answer[-200:]
        return status
    finally:
        writer.close()


def control_requests() -> list[bytes]:
    asked = [{"do": "status"}, {"do": "sample", "prompt": "once", "tokens": 3}, {"do": "rounds", "last": 5}, {"a": [1]}]
    return [json.dumps(each).encode() for each in asked]


async def _ordered(data: bytes) -> bytes:
    async def answer(request: dict[str, Any]) -> dict[str, Any]:
        if request.get("do") == "sample":
            raise P2ptrainError(str(request.get("prompt")))
        return request

    reply = await Control(Path(), Path(), answer)._reply(data)
    return json.dumps(reply).encode()


def net_targets(stack: ExitStack) -> list[Target]:
    loop = asyncio.new_event_loop()
    stack.callback(loop.close)
    # uvloop and asyncio look for what is left over only when a loop is closed: it runs once more before.
    stack.callback(lambda: loop.run_until_complete(asyncio.sleep(0)))

    def run(work: Callable[[bytes], Coroutine[Any, Any, T]]) -> Callable[[bytes], T]:
        return lambda data: loop.run_until_complete(work(data))

    says = _SaysThis()

    async def begun() -> tuple[Any, Any]:
        return dht_node(says), await served.__aenter__()

    served = site(token=b"0123456789abcdef")
    node, http = loop.run_until_complete(begun())
    stack.callback(lambda: loop.run_until_complete(served.__aexit__(None, None, None)))

    async def found(data: bytes) -> object:
        says.answer = data
        node.met(PEER_ID, place_of(PEER_ID).to_bytes())
        if (answer := await node.call_find(PeerID(PEER_ID), [KEY])) is None:
            raise RemoteProtocolError("not a valid answer")
        return answer

    async def asked_to_store(data: bytes) -> object:  # the storage is empty each time
        node.storage = Storage(64)
        return node._asked_to_store(PEER_ID, data)

    async def looked_up(data: bytes) -> object:
        return node._asked_to_find(PEER_ID, data)

    async def pinged(data: bytes) -> object:
        return node._pinged(PEER_ID, data)

    mail = Deliver(tuple(messages()[:3])), MessageQuery((bytes(16),) * 2), HistoryQuery(RUN, 5)
    frames = [wire.encode(each) for each in (*mail, HistoryBegins(2**20), HistoryPart(b"part"))]
    asked = questions.AskRuns(), questions.AskConfig(RUN), questions.AskStates(RUN), questions.AskPeers(RUN)
    answers = (
        questions.Runs((questions.RunInfo(RUN, "a-run", 3, 4),)), questions.Config(b"{}"), questions.Seen(5, "/ip4/1"),
        questions.States(((1, RUN),)), questions.Peers(tuple(each.decode() for each in addresses())),
    )  # fmt: skip
    wants = blobs.BlobRequest("payload", RUN, True), blobs.Piece(3, False)
    replies = (
        blobs.Have(3 * 2**20, bytes(96), b"\x07", b"\1\0\2", (PEER.key,)), blobs.Given(1, b"piece"), blobs.Later(2),
        blobs.Nothing("not here"),
    )  # fmt: skip
    pings, stores, finds = dht_requests()
    dht = {"errors": (RemoteProtocolError,), "kind": "protobuf"}
    key, subkey, stored, expires_at = record()

    def packed(*each: object) -> tuple[bytes, ...]:
        return tuple(map(wire.encode, each))

    return [
        Target("mail", "msgpack", tuple(frames), decode_frame, REFUSED, wire.encode),
        Target("question", "msgpack", packed(*asked, questions.AskSeen()),
               lambda data: wire.decode(questions._QUESTION, data, "a question"), REFUSED),
        Target("answer", "msgpack", packed(*answers),
               lambda data: wire.decode(questions._ANSWER, data, "an answer"), REFUSED),
        Target("blob-request", "msgpack", packed(*wants), blobs.decode_request, REFUSED, wire.encode),
        Target("blob-reply", "msgpack", packed(*replies), blobs.decode_reply, REFUSED, wire.encode),
        Target("frames", "bytes", (b"\0\0\0\3abc\0\0\0\0\0\0\1\0" + bytes(256),), run(_frames),
               (TransportError, RemoteProtocolError)),
        Target("p2pd-length", "bytes", (b"\x05hello", b"\x80\x01" + bytes(128)), run(_lengths), (TransportError,)),
        Target("p2pd-answer", "protobuf", tuple(p2pd_answers()), run(_p2pd_said), P2PD),
        Target("p2pd-stream", "protobuf", (pb.StreamInfo(peer=PEER_ID, addr=b"", proto="/a").SerializeToString(),),
               run(_opening), P2PD),
        Target("p2pd-gossip", "bytes", tuple(subscriptions()), run(_subscribed), P2PD),
        Target("p2pd-call", "protobuf", tuple(calls_of_p2pd()), run(_called), P2PD),
        Target("dht-ping", seeds=tuple(pings), decode=run(pinged), **dht),
        Target("dht-store", seeds=tuple(stores), decode=run(asked_to_store), **dht),
        Target("dht-find", seeds=tuple(finds), decode=run(looked_up), **dht),
        Target("dht-answer", "protobuf", tuple(dht_answers()), run(found), (RemoteProtocolError, TransportError)),
        Target("dht-record", "msgpack", packed((key, subkey, stored, expires_at)), _record_read, REFUSED),
        Target("dht-hint", "msgpack", packed([each.decode() for each in addresses()]), _hint, ()),
        Target("address", "text", tuple(addresses()), _address, (TransportError,)),
        Target("any-address", "text", (*addresses(), b"dial backoff: no route to host [1]"), _any_text, ()),
        Target("peer-id", "text", (peer_id_of(PEER.key).encode(),), lambda data: key_of(data.decode("latin-1")),
               (PeerIdError,), lambda key: peer_id_of(key).encode()),
        Target("signature", "bytes", (PEER.key + PEER.sign(b"x") + b"x", bytes(128)), _verified, ()),
        Target("http-request", "text", tuple(http_requests()), run(lambda data: _http(http.port, data)), (),
               seconds=0.05, memory=2**21),
        Target("control-request", "json", tuple(control_requests()), run(_ordered), ()),
    ]  # fmt: skip
