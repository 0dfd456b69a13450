"""Requests to p2pd, each on a connection of its own to its control socket.

A request is a protobuf each way, preceded by its length. Some connections stay open: the guardian's, that of the DHT's
calls (`UnaryCalls`), a subscription (pubsub.py), and a stream, which belongs to the two peers after its first message.

The sockets are in a private directory that may disappear meanwhile. Logging out removes the user's runtime directory,
and cleaners remove old files in /tmp. The sockets then have no name, and nobody can connect. So they are checked before
each start of p2pd: a missing directory is made again under the same name or, if that is impossible or another user was
quicker, under a different one.

Unary calls are small requests to peers and their answers, which p2pd carries over one connection. Each has an id of its
own. Messages beyond UNARY_BYTES_MAX are thrown away as they come, those beyond CONTROL_BYTES_MAX by p2pd already.
Incoming requests are answered as they are read, one at a time: no task is made for one, so that nothing grows with
their number. While p2pd does not read, answers are dropped: nobody waits for them."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self, TypeAlias

from p2ptrain.address import AddressError, from_bytes, to_bytes
from p2ptrain.errors import RemoteProtocolError
from p2ptrain.identity import id_bytes_of
from p2ptrain.net.addresses import reason
from p2ptrain.net.boundary import Boundary
from p2ptrain.net.libp2p.slim_hivemind import parts_of_hivemind
from p2ptrain.net.libp2p.streams import (
    BUFFER_BYTES,
    STREAMS_MAX,
    read_bytes,
    read_length,
    read_message,
    with_length,
    write_message,
)
from p2ptrain.net.transport import TransportError, in_time

with parts_of_hivemind():
    from hivemind.proto import p2pd_pb2 as pb

CONTROL_SOCKET, STREAMS_SOCKET = "p2pd.sock", "streams.sock"  # p2pd's, and ours for incoming streams
CONTROL_SECONDS = 15  # for p2pd to answer or to reach a peer
RESPONSE_BYTES_MAX = 2**22  # from p2pd, which we trust: a list of 512 connections takes 50 KB
SOCKET = bytes.fromhex("9003")  # the code of a Unix socket in a multiaddr, a varint: 400
TAG, TAG_WEIGHT = "p2ptrain", 1_000  # the tags of gossipsub and the DHT weigh less than 100
UNARY_BYTES_MAX = 24 * 1_024  # of a message: parsing the worst takes half a millisecond
CONTROL_BYTES_MAX = 2**20  # of a message that p2pd takes from us or a peer: it has to fit gossip
CALL_ID_BYTES = 16
CALL_ID_START = bytes([0x0A, CALL_ID_BYTES])  # in protobuf: field 1, 16 bytes
DISCARD_BYTES = 2**16  # read and thrown away at a time

Answer: TypeAlias = Callable[[bytes, bytes], bytes]  # gets the peer's id and its request
Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]
Ends: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]
logger = logging.getLogger("p2ptrain.net")


class Sockets:
    """The directory with p2pd's control socket and our socket for incoming streams."""

    def __init__(self, directory: Path, accept: Accept) -> None:
        self.directory, self._accept = directory, accept
        self._server: asyncio.Server | None = None
        self._own: list[Path] = []  # directories that we made and have to remove

    @property
    def control(self) -> Path:
        return self.directory / CONTROL_SOCKET

    @property
    def streams(self) -> Path:
        return self.directory / STREAMS_SOCKET

    @property
    def are_there(self) -> bool:
        return self.control.is_socket() and self.streams.is_socket()

    async def open(self) -> None:
        """Makes sure that the directory exists and that our socket is in it."""
        try:
            if not _is_or_becomes_ours(self.directory):
                self.directory = Path(tempfile.mkdtemp(prefix="p2ptrain-"))
                self._own.append(self.directory)
            if self._server is None or not self.streams.is_socket():
                await self._serve()
            self.control.unlink(missing_ok=True)
        except OSError as error:
            raise TransportError(f"cannot open sockets in {self.directory}: {error.strerror or error}") from error

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            return await asyncio.open_unix_connection(self.control, limit=BUFFER_BYTES)
        except OSError as error:
            raise TransportError(f"p2pd is gone: {error}") from error

    async def _serve(self) -> None:
        if self._server is not None:
            self._server.close()
        self._server = await asyncio.start_unix_server(
            self._accept, self.streams, limit=BUFFER_BYTES, backlog=STREAMS_MAX,
            start_serving=False,  # serving can be cancelled, and would then leak the socket
        )  # fmt: skip
        await self._server.start_serving()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await asyncio.sleep(0)  # what was accepted by now is told to us
        for each in self._own:
            shutil.rmtree(each, ignore_errors=True)


def _is_or_becomes_ours(directory: Path) -> bool:
    """Makes the directory, or checks that an existing one is ours alone: who can enter it can act as this node."""
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        status = directory.lstat()
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
    except OSError:
        return False
    return True


class P2pdControl:
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


class UnaryCalls:
    """Calls to peers, and theirs to us. Make it with `start`."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, control: P2pdControl, boundary: Boundary
    ) -> None:
        self._reader, self._writer, self._control, self._boundary = reader, writer, control, boundary
        self._answers: dict[str, Answer] = {}
        self._waiting: dict[bytes, asyncio.Future[bytes]] = {}  # by call id
        self._is_closed = False
        self.reading = asyncio.create_task(self._read())  # answers come only while this runs

    @classmethod
    async def start(cls, control: P2pdControl, boundary: Boundary) -> Self:
        return cls(*await control.opened(pb.Request.PERSISTENT_CONN_UPGRADE), control, boundary)

    async def serve(self, name: str, answer: Answer) -> None:
        """Takes the calls of peers to this name. `answer` may raise RemoteProtocolError or TransportError."""
        self._answers[name] = answer
        await self._ask(addUnaryHandler=pb.AddUnaryHandlerRequest(proto=name, balanced=False))

    async def call(self, peer_id: bytes, name: str, request: bytes, seconds: float) -> bytes:
        """Returns a peer's answer. TransportError if there is none, or the peer refuses."""
        async with in_time(seconds, f"no answer within {seconds:.0f} s"):
            await self._control.refuse_unconnected(peer_id)
            return await self._ask(callUnary=pb.CallUnaryRequest(peer=peer_id, proto=name, data=request))

    async def _ask(self, **content: Any) -> bytes:
        call_id = os.urandom(CALL_ID_BYTES)
        waiting: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = waiting
        try:
            self._send(call_id, **content)
            return await waiting
        finally:
            del self._waiting[call_id]
            if waiting.cancelled() and not self._is_closed:
                self._send(call_id, cancel=pb.Cancel())

    def _send(self, call_id: bytes, **content: Any) -> None:
        if self._is_closed:
            raise TransportError("closing")
        message = pb.PersistentConnectionRequest(callId=call_id, **content).SerializeToString()
        assert len(message) <= UNARY_BYTES_MAX, f"{len(message)} bytes: p2pd would hang up"
        self._writer.write(with_length(message))

    async def _read(self) -> None:
        with self._boundary.contain("the DHT's connection"):
            try:
                while True:
                    if (size := await read_length(self._reader, CONTROL_BYTES_MAX)) > UNARY_BYTES_MAX:
                        await self._discard(size)
                        continue
                    message = await read_bytes(self._reader, size)
                    with self._boundary.contain("a message of the DHT's connection"):
                        self._take(pb.PersistentConnectionResponse.FromString(message))
                    await asyncio.sleep(0)  # what has arrived is read without waiting, and others need the loop too
            except TransportError as error:
                logger.debug("calls end: %s", error)
            finally:
                self._end()

    async def _discard(self, size: int) -> None:
        """Throws a message away and fails its call."""
        head = await read_bytes(self._reader, len(CALL_ID_START) + CALL_ID_BYTES)
        size -= len(head)
        while size:
            size -= len(await read_bytes(self._reader, min(size, DISCARD_BYTES)))
        call_id = head.removeprefix(CALL_ID_START)
        if waiting := self._waiting.get(call_id):
            if not waiting.done():
                waiting.set_exception(TransportError("too long an answer"))
        elif len(call_id) == CALL_ID_BYTES:
            self._respond(call_id, pb.CallUnaryResponse(error=b"too long"))

    def _take(self, response: Any) -> None:
        kind = response.WhichOneof("message")
        if kind == "requestHandling":
            self._handle(response.callId, response.requestHandling)
            return
        waiting = self._waiting.get(response.callId)
        if waiting is None or waiting.done():
            return  # its caller has given up
        if kind == "callUnaryResponse" and response.callUnaryResponse.HasField("response"):
            waiting.set_result(response.callUnaryResponse.response)
        elif kind in ("callUnaryResponse", "daemonError"):
            waiting.set_exception(TransportError("refused, or not to be reached"))
        else:
            waiting.set_result(b"")

    def _handle(self, call_id: bytes, request: Any) -> None:
        response = pb.CallUnaryResponse(error=b"refused")
        with suppress(RemoteProtocolError, TransportError):
            response = pb.CallUnaryResponse(response=self._answers[request.proto](request.peer, request.data))
        self._respond(call_id, response)

    def _respond(self, call_id: bytes, response: Any) -> None:
        if not self._is_closed and self._writer.transport.get_write_buffer_size() <= BUFFER_BYTES:
            self._send(call_id, unaryResponse=response)

    def _end(self) -> None:
        self._is_closed = True
        self._writer.transport.abort()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(TransportError("p2pd hung up"))

    async def close(self) -> None:
        self._end()
        self.reading.cancel()
        await asyncio.gather(self.reading, return_exceptions=True)
