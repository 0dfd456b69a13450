"""Leads strangers of another implementation of libp2p: other_libp2p.py, in a process and an environment of its own."""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Self

from p2ptrain.identity import id_bytes_of, key_of
from p2ptrain.net.libp2p.control import pb
from p2ptrain.net.libp2p.dht import FIND, PING, STORE, dht_pb2, place_of
from p2ptrain.net.libp2p.streams import with_length

HERE = Path(__file__).resolve().parent
PYTHON = Path(os.environ.get("OTHER_LIBP2P", HERE.parents[1] / "out/other-libp2p")) / "bin/python"
SECONDS = 30.0
EVENTS_MAX = 100_000  # kept; a test has a few thousand
IDENTIFY, IP_PING = "/ipfs/id/1.0.0", "/ipfs/ping/1.0.0"
KINDS = {
    "ip4": 4, "tcp": 6, "ip6": 41, "ip6zone": 42, "dns": 53, "dns4": 54, "dns6": 55, "dnsaddr": 56, "udp": 273,
    "webrtc-direct": 280, "webrtc": 281, "p2p-circuit": 290, "unix": 400, "p2p": 421, "tls": 448, "sni": 449,
    "quic-v1": 461, "webtransport": 465, "certhash": 466, "ws": 477, "http": 480, "memory": 777, "none": 3_000,
}  # fmt: skip
WITHOUT_VALUE = {"webrtc-direct", "webrtc", "p2p-circuit", "tls", "quic-v1", "webtransport", "ws", "http", "none"}


def is_there() -> bool:
    return PYTHON.exists()


# -----------------------------------------------------------------------------------------------
# What strangers say


def varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def address(text: str) -> bytes:
    """Encodes a multiaddr, also one of a kind that hivemind does not know."""
    raw, parts = b"", iter(text.split("/")[1:])
    for kind in parts:
        raw += varint(KINDS[kind])
        if kind not in WITHOUT_VALUE:
            raw += _value(kind, next(parts))
    return raw


def _value(kind: str, text: str) -> bytes:
    if kind in ("ip4", "ip6"):
        return ipaddress.ip_address(text).packed
    if kind in ("tcp", "udp"):
        return int(text).to_bytes(2, "big")
    if kind == "memory":
        return int(text).to_bytes(8, "big")
    if kind == "p2p":
        return with_length(id_bytes_of(key_of(text)))
    return with_length(bytes.fromhex(text) if kind == "certhash" else text.encode())


def frame(content: bytes) -> bytes:
    return len(content).to_bytes(4, "big") + content


def call(target: str, name: str, request: bytes) -> dict[str, Any]:
    """Plays one of p2pd's unary calls, and reads the answer."""
    content = pb.CallUnaryRequest(peer=id_bytes_of(key_of(target)), proto=name, data=request)
    message = pb.PersistentConnectionRequest(callId=os.urandom(16), callUnary=content).SerializeToString()
    return {"send": with_length(message).hex(), "then": "go on", "after": "message"}


def dht_ping(me: str, target: str) -> dict[str, Any]:
    """Plays a ping of hivemind's DHT, after which the target has this stranger in its routing table."""
    node = dht_pb2.NodeInfo(node_id=place_of(id_bytes_of(key_of(me))).to_bytes())
    return call(target, PING, dht_pb2.PingRequest(peer=node).SerializeToString())


def found(value: bytes) -> bytes:
    """Encodes an answer to a search in the DHT."""
    result = dht_pb2.FindResult(type=dht_pb2.FOUND_DICTIONARY, value=value)
    return bytes(dht_pb2.FindResponse(results=[result]).SerializeToString())


def entries(first: bytes) -> bytes:
    """Encodes the entries of a key, beginning with any bytes of msgpack."""
    content = b"\x93" + first + b"\xcb" + bytes(8) + b"\x90"
    return b"\xc8" + len(content).to_bytes(2, "big") + b"\x50" + content


NESTED = entries(b"\x91" * 4_000 + b"\xc0")
NOT_UTF8 = entries(b"\xa1\xff")
DHT = FIND, PING, STORE


# -----------------------------------------------------------------------------------------------
# The process


class Foreign:
    """The strangers of one process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [PYTHON, "-P", HERE / "other_libp2p.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.events: list[dict[str, Any]] = []
        self._heard = threading.Condition()
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._heard:
                self.events.append(json.loads(line))
                del self.events[:-EVENTS_MAX]
                self._heard.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listening.join()
        self._process.stdout.close()

    def order(self, who: str, do: str, **content: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"who": who, "do": do, **content}).encode() + b"\n")
        self._process.stdin.flush()

    def all(self, event: str, **content: Any) -> list[dict[str, Any]]:
        """Returns the events of this name that have all of this content."""
        with self._heard:
            return [each for each in self.events if each["event"] == event and content.items() <= each.items()]

    def until(self, event: str, seconds: float = SECONDS, **content: Any) -> dict[str, Any]:
        """Waits for an event, unless it has been; returns the last one."""
        end = monotonic() + seconds
        with self._heard:
            while not (happened := self.all(event, **content)):
                assert self._heard.wait(max(0.0, end - monotonic())), f"no {event} {content}: {self.events[-20:]}"
        return happened[-1]

    def make(self, who: str, seed: bytes = b"") -> str:
        """Makes a stranger; returns its id."""
        self.order(who, "make", seed=seed.hex())
        return str(self.until("made", who=who)["id"])

    def listen(self, who: str, host: str = "127.0.0.1", port: int = 0, role: str = "host") -> int:
        """Makes a stranger listen; returns the port."""
        before = len(self.all("listening", who=who, host=host))
        self.order(who, "listen", host=host, port=port, **{"as": role})
        end = monotonic() + SECONDS
        with self._heard:
            while len(listening := self.all("listening", who=who, host=host)) == before:
                assert self._heard.wait(max(0.0, end - monotonic())), f"{who} does not listen"
        return int(listening[-1]["port"])

    def connect(self, who: str, where: str, source: str = "") -> str:
        """Connects a stranger to a node's address; returns the node's id."""
        peer = where.rpartition("/")[2]
        before = len(self.all("connected", who=who, peer=peer))
        self.order(who, "connect", address=where, source=source)
        end = monotonic() + SECONDS
        with self._heard:
            while len(self.all("connected", who=who, peer=peer)) == before:
                assert self._heard.wait(max(0.0, end - monotonic())), f"{who}: {self.all('not connected', who=who)}"
        return peer

    def open(self, who: str, peer: str, protocol: str, number: int = 0, **part: Any) -> None:
        self.order(who, "open", peer=peer, protocol=protocol, part=part, number=number)

    def ping_dht(self, who: str, peer: str) -> None:
        """Brings a stranger into a node's routing table."""
        before = len(self.all("played", who=who, peer=peer, protocol=PING))
        self.open(who, peer, PING, **dht_ping(self.make(who), peer))
        end = monotonic() + SECONDS
        with self._heard:
            while len(self.all("played", who=who, peer=peer, protocol=PING)) == before:
                assert self._heard.wait(max(0.0, end - monotonic())), f"{who}: {self.all('refused', who=who)}"


@contextmanager
def foreign() -> Iterator[Foreign]:
    with Foreign() as strangers:
        yield strangers
