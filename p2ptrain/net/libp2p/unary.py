"""Small requests to peers and their answers (unary calls), which p2pd carries over one connection.

Each call has an id of its own. Messages beyond UNARY_BYTES_MAX are thrown away as they come, those beyond
CONTROL_BYTES_MAX by p2pd already. Incoming requests are answered as they are read, one at a time: no task is made for
one, so that nothing grows with their number. While p2pd does not read, answers are dropped: nobody waits for them.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self, TypeAlias

from p2ptrain.errors import RemoteProtocolError
from p2ptrain.net.boundary import Boundary
from p2ptrain.net.frames import BUFFER_BYTES, read_bytes, read_length, with_length
from p2ptrain.net.libp2p.control import P2pdControl
from p2ptrain.net.libp2p.slim_hivemind import parts_of_hivemind
from p2ptrain.net.transport import TransportError, in_time

with parts_of_hivemind():
    from hivemind.proto import p2pd_pb2 as pb

UNARY_BYTES_MAX = 24 * 1_024  # of a message: parsing the worst takes half a millisecond
CONTROL_BYTES_MAX = 2**20  # of a message that p2pd takes from us or a peer: it has to fit gossip
CALL_ID_BYTES = 16
CALL_ID_START = bytes([0x0A, CALL_ID_BYTES])  # in protobuf: field 1, 16 bytes
DISCARD_BYTES = 2**16  # read and thrown away at a time

Answer: TypeAlias = Callable[[bytes, bytes], bytes]  # gets the peer's id and its request
logger = logging.getLogger("p2ptrain.net")


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
        """Connects to p2pd."""
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
