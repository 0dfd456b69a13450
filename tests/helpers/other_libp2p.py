"""A host of another implementation of libp2p (py-libp2p) that answers each protocol as ordered: well, wrongly or never.

    out/other-libp2p/bin/python -P tests/helpers/other_libp2p.py

It runs in an environment of its own (`make test-foreign`), imports nothing of p2ptrain, and is led by foreign.py: an
order is a line of JSON on stdin, an event one on stdout. TCP, noise and yamux are py-libp2p's; the negotiation of
protocols (multistream) and identify are written here, since py-libp2p offers no way to get them wrong.

One process plays many strangers, each with a key of its own (`who`). Orders:

    listen   host, port; with `as` "count" (accepts, and hangs up) or "hang" (accepts, and is silent) it is no host
    connect  address of a peer, `source`: an address of this machine to come from
    tell     identify: `addresses` (hex), `protocols`, `agent` (hex), `more` (hex, appended), or a part in its place
    answer   protocol and a part: what is played when a peer opens a stream of it; `negotiation` is a part, too
    open     peer, protocol, a part, and a `number` that comes back with what was read
    leave    closes the connection with a peer

A part is {"read": "message" | "frame" | bytes, "send": hex, "times": 1, "every": seconds between bytes, "reply": hex of
an answer to p2pd's unary call, "endless": true, "then": "hold" | "close" | "reset" | "echo" | "read"}.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.exceptions import BaseLibp2pError
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.security.noise.transport import Transport as Noise
from libp2p.stream_muxer.yamux.yamux import Yamux

MULTISTREAM, NOISE, YAMUX = b"/multistream/1.0.0\n", b"/noise\n", b"/yamux/1.0.0\n"
IDENTIFY, PUSH, PING = "/ipfs/id/1.0.0", "/ipfs/id/push/1.0.0", "/ipfs/ping/1.0.0"
BROKEN = BaseLibp2pError, OSError, EOFError, ValueError, trio.BrokenResourceError, trio.ClosedResourceError
READ_MAX = 2**16
DIAL_SECONDS = 10.0

Part = dict[str, Any]
Read = Callable[[int], Awaitable[bytes]]


def say(event: str, **content: object) -> None:
    sys.stdout.write(json.dumps({"event": event, **content}) + "\n")
    sys.stdout.flush()


# -----------------------------------------------------------------------------------------------
# Bytes


def varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def delimited(message: bytes) -> bytes:
    return varint(len(message)) + message


def field(number: int, content: bytes) -> bytes:
    """Encodes a field of protobuf."""
    return varint(number << 3 | 2) + delimited(content)


def field_of(message: bytes, wanted: int) -> bytes:
    """Returns a field of a message that has only bytes in its fields up to that one."""
    at = 0
    while at < len(message):
        number, size = message[at] >> 3, message[at + 1]
        if number == wanted:
            return message[at + 2 : at + 2 + size]
        at += 2 + size
    return b""


async def exactly(stream: Any, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = await stream.read(size - len(found))
        if not part:
            raise EOFError(f"{len(found)} of {size} bytes")
        found += part
    return found


async def message_from(stream: Any) -> bytes:
    size = shift = 0
    while True:
        byte = (await exactly(stream, 1))[0]
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return await exactly(stream, size)


async def frame_from(stream: Any) -> bytes:
    return await exactly(stream, int.from_bytes(await exactly(stream, 4), "big"))


# -----------------------------------------------------------------------------------------------
# Streams


async def play(stream: Any, part: Part) -> bytes:
    """Plays a part on a stream. Returns what it has read."""
    heard = await heard_by(stream, part["read"]) if "read" in part else b""
    said = bytes.fromhex(part.get("send", ""))
    if "reply" in part:  # p2pd sends its client's request as it is, and takes an answer of the same kind
        answer = field(1, bytes.fromhex(part["reply"]))
        said += delimited(field(1, field_of(heard, 1)) + field(4, answer))
    said *= part.get("times", 1)
    if part.get("every"):
        for byte in said:
            await stream.write(bytes([byte]))
            with trio.move_on_after(part["every"]):  # its pace, unless the peer ends the stream
                await read_all(stream)
    elif said:
        await stream.write(said)
    while part.get("endless"):
        with suppress(BaseLibp2pError):  # nobody has read for five seconds
            await stream.write(said)
        if stream.closed or stream.reset_received:
            break
    await LAST[part.get("then", "hold")](stream)
    if "after" in part:
        heard += await heard_by(stream, part["after"])
    return heard


async def heard_by(stream: Any, what: str | int) -> bytes:
    if what == "message":
        return await message_from(stream)
    return await (frame_from(stream) if what == "frame" else exactly(stream, int(what)))


async def hold(stream: Any) -> None:
    await trio.sleep_forever()


async def echo(stream: Any) -> None:
    while said := await stream.read(32):
        await stream.write(said)


async def read_all(stream: Any) -> None:
    while await stream.read(READ_MAX):
        pass


async def go_on(stream: Any) -> None:
    pass


LAST = {
    "hold": hold,
    "close": lambda stream: stream.close(),
    "reset": lambda stream: stream.reset(),
    "echo": echo,
    "read": read_all,
    "go on": go_on,
}


async def propose(stream: Any, protocol: bytes) -> None:
    await stream.write(delimited(MULTISTREAM) + delimited(protocol))
    if await message_from(stream) != MULTISTREAM or await message_from(stream) != protocol:
        raise EOFError("the peer does not speak that")


async def accept_only(stream: Any, protocol: bytes) -> None:
    """Answers whoever proposes protocols for a whole connection."""
    await message_from(stream)
    await stream.write(delimited(MULTISTREAM))
    while await message_from(stream) != protocol:
        await stream.write(delimited(b"na\n"))
    await stream.write(delimited(protocol))


# -----------------------------------------------------------------------------------------------
# Strangers


class ForeignHost:
    """A libp2p host with a key of its own."""

    def __init__(self, who: str, seed: bytes | None, nursery: trio.Nursery) -> None:
        self.who, self._nursery = who, nursery
        self._keys = create_new_key_pair(seed)
        self.id = ID.from_pubkey(self._keys.public_key)
        self._told: Part = {}
        self._answers: dict[str, Part] = {}
        self._connections: dict[str, list[Yamux]] = {}

    def say(self, event: str, **content: object) -> None:
        say(event, who=self.who, **content)

    def _noise(self) -> Noise:
        return Noise(self._keys, create_noise_key_pair().private_key)

    # ---------------------------------------------------------------------------------------------
    # Connections

    async def listen(self, host: str, port: int = 0, **options: Any) -> None:
        family = trio.socket.AF_INET6 if ":" in host else trio.socket.AF_INET
        listening = trio.socket.socket(family, trio.socket.SOCK_STREAM)
        listening.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_REUSEADDR, 1)
        await listening.bind((host, port))
        listening.listen(64)
        port = listening.getsockname()[1]
        role = options.get("as", "host")

        async def come(socket: trio.SocketStream) -> None:
            self.say("came", host=host, port=port)
            if role == "hang":
                await trio.sleep_forever()
            elif role == "host":
                with suppress(*BROKEN):
                    await self._upgrade_inbound(socket)

        self._nursery.start_soon(trio.serve_listeners, come, [trio.SocketListener(listening)])
        self.say("listening", host=host, port=port, id=self.id.to_string())

    async def _upgrade_inbound(self, socket: trio.SocketStream) -> None:
        raw = RawConnection(TrioTCPStream(socket), False)
        await accept_only(raw, NOISE)
        secure = await self._noise().secure_inbound(raw)
        await accept_only(secure, YAMUX)
        await self._run(Yamux(secure, secure.get_remote_peer(), is_initiator=False))

    async def connect(self, address: str, source: str = "") -> None:
        _, kind, host, _, port, _, peer = address.split("/")
        family = trio.socket.AF_INET6 if kind == "ip6" else trio.socket.AF_INET
        try:
            with trio.fail_after(DIAL_SECONDS):
                dialling = trio.socket.socket(family, trio.socket.SOCK_STREAM)
                if source:
                    await dialling.bind((source, 0))
                await dialling.connect((host, int(port)))
                raw = RawConnection(TrioTCPStream(trio.SocketStream(dialling)), True)
                await propose(raw, NOISE)
                secure = await self._noise().secure_outbound(raw, ID.from_string(peer))
                await propose(secure, YAMUX)
        except (*BROKEN, trio.TooSlowError) as error:
            self.say("not connected", peer=peer, why=repr(error))
            return
        await self._run(Yamux(secure, ID.from_string(peer), is_initiator=True))

    async def _run(self, connection: Yamux) -> None:
        peer = connection.peer_id.to_string()
        self._connections.setdefault(peer, []).append(connection)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.start)
            await connection.event_started.wait()
            self.say("connected", peer=peer)
            with suppress(*BROKEN):
                while True:
                    nursery.start_soon(self._answer, peer, await connection.accept_stream())
            nursery.cancel_scope.cancel()
        self._connections[peer].remove(connection)
        self.say("parted", peer=peer)

    async def leave(self, peer: str) -> None:
        for connection in list(self._connections.get(peer, [])):
            await connection.close()

    # ---------------------------------------------------------------------------------------------
    # What peers ask

    def tell(self, **told: Any) -> None:
        self._told = told

    def answer(self, protocol: str, **part: Any) -> None:
        self._answers[protocol] = part

    async def _answer(self, peer: str, stream: Any) -> None:
        try:
            if (part := self._answers.get("negotiation")) is not None:
                self.say("negotiating", peer=peer)
                await play(stream, part)
                return
            await message_from(stream)
            await stream.write(delimited(MULTISTREAM))
            while True:
                line = await message_from(stream)
                protocol = line.decode().rstrip("\n")
                self.say("asked", peer=peer, protocol=protocol)
                part = self._part_for(protocol)
                if part is not None:
                    break
                await stream.write(delimited(b"na\n"))
            if "line" in part:  # instead of the acceptance
                await stream.write(delimited(bytes.fromhex(part["line"])))
            else:
                await stream.write(delimited(line))
            await play(stream, part)
        except BROKEN:
            pass

    def _part_for(self, protocol: str) -> Part | None:
        if protocol in self._answers:
            return self._answers[protocol]
        if protocol == IDENTIFY:
            return {"send": self._identify().hex(), "then": "close"}
        return {PUSH: {"then": "read"}, PING: {"then": "echo"}}.get(protocol)

    def _identify(self) -> bytes:
        told = self._told
        spoken = [each for each in self._answers if each != "negotiation"]
        message = field(1, self._keys.public_key.serialize())
        message += b"".join(field(2, bytes.fromhex(each)) for each in told.get("addresses", ()))
        message += b"".join(field(3, each.encode()) for each in told.get("protocols", [*spoken, IDENTIFY, PING]))
        message += field(5, b"ipfs/0.1.0") + field(6, bytes.fromhex(told.get("agent", b"py-libp2p".hex())))
        return delimited(message + bytes.fromhex(told.get("more", "")))

    # ---------------------------------------------------------------------------------------------
    # What it asks

    async def open(self, peer: str, protocol: str, part: Part, number: int = 0) -> None:
        try:
            stream = await self._connections[peer][-1].open_stream()
            await propose(stream, protocol.encode() + b"\n")
            self.say("opened", peer=peer, protocol=protocol, number=number)
            heard = await play(stream, part)
            self.say("played", peer=peer, protocol=protocol, number=number, heard=heard.hex())
        except (*BROKEN, LookupError) as error:
            self.say("refused", peer=peer, protocol=protocol, number=number, why=repr(error))


async def main() -> None:
    strangers: dict[str, ForeignHost] = {}
    async with trio.open_nursery() as nursery:
        waiting = b""
        async for read in trio.lowlevel.FdStream(os.dup(0)):
            *lines, waiting = (waiting + read).split(b"\n")
            for line in lines:
                order = json.loads(line)
                who, do, seed = order.pop("who", "a"), order.pop("do"), bytes.fromhex(order.pop("seed", ""))
                if who not in strangers:
                    strangers[who] = ForeignHost(who, seed or None, nursery)
                    strangers[who].say("made", id=strangers[who].id.to_string())
                if do != "make":
                    doing = getattr(strangers[who], do)
                    if do in ("tell", "answer"):
                        doing(**order)
                    else:
                        nursery.start_soon(_do, doing, order)
        nursery.cancel_scope.cancel()


async def _do(doing: Callable[..., Awaitable[None]], order: dict[str, Any]) -> None:
    await doing(**order)


if __name__ == "__main__":
    trio.run(main)
