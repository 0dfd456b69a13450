"""Requests to p2pd, each on a connection of its own to its control socket.

A request is a protobuf each way, preceded by its length. Some connections stay open: the guardian's, that of the DHT's
calls (unary.py), a subscription (subscription.py), and a stream, which belongs to the two peers after its first
message.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

from p2ptrain.address import AddressError, from_bytes, to_bytes
from p2ptrain.identity import id_bytes_of
from p2ptrain.net.addresses import reason
from p2ptrain.net.frames import read_message, write_message
from p2ptrain.net.libp2p.slim_hivemind import parts_of_hivemind
from p2ptrain.net.libp2p.sockets import Sockets
from p2ptrain.net.transport import TransportError, in_time

with parts_of_hivemind():
    from hivemind.proto import p2pd_pb2 as pb

CONTROL_SECONDS = 15  # for p2pd to answer or to reach a peer
RESPONSE_BYTES_MAX = 2**22  # from p2pd, which we trust: a list of 512 connections takes 50 KB
SOCKET = bytes.fromhex("9003")  # the code of a Unix socket in a multiaddr, a varint: 400
TAG, TAG_WEIGHT = "p2ptrain", 1_000  # the tags of gossipsub and the DHT weigh less than 100

Ends: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]
logger = logging.getLogger("p2ptrain.net")


class P2pdControl:
    """Requests to p2pd."""

    def __init__(self, sockets: Sockets) -> None:
        self._sockets = sockets

    async def opened(self, kind: int, **content: Any) -> Ends:
        """Makes a request on a connection that stays open, and returns its two ends."""
        reader, writer = await self._sockets.connect()
        with ExitStack() as stack:
            stack.callback(writer.transport.abort)
            await self._ask_on(reader, writer, kind, **content)
            stack.pop_all()
        return reader, writer

    async def _ask(self, kind: int, **content: Any) -> Any:
        reader, writer = await self._sockets.connect()
        try:
            return await self._ask_on(reader, writer, kind, **content)
        finally:
            writer.transport.abort()

    async def _ask_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: int, **content: Any
    ) -> Any:
        async with in_time(CONTROL_SECONDS + 1, "no answer"):  # p2pd itself is told to give up a second earlier
            await write_message(writer, pb.Request(type=kind, **content).SerializeToString())
            return response_in(await read_message(reader, RESPONSE_BYTES_MAX))

    @asynccontextmanager
    async def guardian(self) -> AsyncIterator[None]:
        """Keeps p2pd alive: it ends when its last connection of this kind closes."""
        _, writer = await self.opened(pb.Request.PERSISTENT_CONN_UPGRADE)
        try:
            yield
        finally:
            writer.transport.abort()

    async def identify(self) -> tuple[bytes, list[str]]:
        found = (await self._ask(pb.Request.IDENTIFY)).identify
        return found.id, _texts(found.addrs)

    async def connect(self, peer: bytes, route: str) -> None:
        content = pb.ConnectRequest(peer=id_bytes_of(peer), addrs=[in_bytes(route)], timeout=CONTROL_SECONDS)
        await self._ask(pb.Request.CONNECT, connect=content)

    async def disconnect(self, peer: bytes) -> None:
        await self._ask(pb.Request.DISCONNECT, disconnect=pb.DisconnectRequest(peer=id_bytes_of(peer)))

    async def tag(self, peer: bytes, weight: int) -> None:
        """Sets a peer's weight, which decides whose connections are pruned first; 0 removes ours."""
        kind = pb.ConnManagerRequest.TAG_PEER if weight else pb.ConnManagerRequest.UNTAG_PEER
        content = pb.ConnManagerRequest(type=kind, peer=id_bytes_of(peer), tag=TAG, weight=weight)
        await self._ask(pb.Request.CONNMANAGER, connManager=content)

    async def peers(self) -> list[tuple[bytes, list[str]]]:
        """Returns one entry per connection."""
        return [(each.id, _texts(each.addrs)) for each in (await self._ask(pb.Request.LIST_PEERS)).peers]

    async def refuse_unconnected(self, peer_id: bytes) -> None:
        """Raises TransportError if a peer is not connected: p2pd would dial it, at any address that it once told."""
        if not any(each.id == peer_id for each in (await self._ask(pb.Request.LIST_PEERS)).peers):
            raise TransportError("it is not connected")

    async def publish(self, topic: str, data: bytes) -> None:
        content = pb.PSRequest(type=pb.PSRequest.PUBLISH, topic=topic, data=data)
        await self._ask(pb.Request.PUBSUB, pubsub=content)

    async def attach(self, protocol: asyncio.Protocol) -> None:
        """Connects a protocol that does the rest itself, such as a subscription."""
        loop = asyncio.get_running_loop()
        try:
            await loop.create_unix_connection(lambda: protocol, str(self._sockets.control))
        except OSError as error:
            raise TransportError(f"p2pd is gone: {error}") from error

    async def open_stream(self, peer: bytes, protocol: str) -> Ends:
        content = pb.StreamOpenRequest(peer=id_bytes_of(peer), proto=[protocol], timeout=CONTROL_SECONDS)
        await self.refuse_unconnected(content.peer)
        return await self.opened(pb.Request.STREAM_OPEN, streamOpen=content)

    async def bring_streams(self, protocol: str) -> None:
        """Makes p2pd connect to our socket for each stream that a peer opens for this protocol."""
        ours = socket_in_bytes(self._sockets.streams)
        content = pb.StreamHandlerRequest(addr=ours, proto=[protocol], balanced=False)
        await self._ask(pb.Request.STREAM_HANDLER, streamHandler=content)


def response_in(message: bytes) -> Any:
    """Returns p2pd's answer to a request. TransportError if it refuses."""
    response = pb.Response.FromString(message)
    if response.type == pb.Response.ERROR:
        raise TransportError(reason(response.error.msg))
    return response


async def read_opening(reader: asyncio.StreamReader) -> tuple[bytes, str]:
    """Reads what p2pd sends first on an incoming stream: the peer's id and the protocol."""
    info = pb.StreamInfo.FromString(await read_message(reader, RESPONSE_BYTES_MAX))
    return info.peer, str(info.proto)


def in_bytes(route: str) -> bytes:
    try:
        return to_bytes(route)
    except AddressError as error:
        raise TransportError(f"not an address: {error}") from error


def socket_in_bytes(path: Path) -> bytes:
    """Writes the multiaddr of a socket, as go-libp2p does: multiaddr would leave out the first slash of the path."""
    name = os.fsencode(path)
    assert len(name) < 2**7, "Linux has no longer ones, and the length is a varint"
    return SOCKET + bytes([len(name)]) + name


def _texts(raw: Iterable[bytes]) -> list[str]:
    """Returns addresses as text, without the kinds that multiaddr does not know."""
    found = []
    for each in raw:
        try:
            found.append(from_bytes(each))
        except AddressError as error:
            logger.debug("an address of an unknown kind: %s", error)
    return found
