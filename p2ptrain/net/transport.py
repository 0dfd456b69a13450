"""The network interface of a node, independent of its implementation.

Everywhere a peer is its Ed25519 public key of 32 bytes; its libp2p id is another encoding of that key (identity.py). An
address is a multiaddr as text with the peer's id at the end: /ip4/203.0.113.7/tcp/4001/p2p/12D3...

There are two kinds of traffic. Streams go to one peer, in order, and carry frames, whose length comes first and is
checked against the reader's limit before anything is allocated. Gossip reaches every subscriber of a topic, also those
that we are not connected to; it comes in several copies, and may get lost.

net/libp2p/p2pd.py implements it with go-libp2p, tests/helpers/memory_network.py within one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol, TypeAlias

from p2ptrain.errors import P2ptrainError

if TYPE_CHECKING:
    from p2ptrain.net.boundary import Boundary

MESSAGE_BYTES_MAX = 1_000_000  # of a gossip message: above 1,048,446 libp2p silently drops it and everything after it
STRANGERS = "gossip of strangers"  # the counter of messages by publishers that are not heard
FRAME_BYTES_MAX = 2**21  # of a stream: fits a piece of 1 MiB with its header; anything longer is split
MOVES_SECONDS = 1.0  # between looks whether bytes move


class TransportError(P2ptrainError):
    """A network failure, such as an unreachable peer or a broken stream. Worth another try later."""


@asynccontextmanager
async def in_time(seconds: float, why: str) -> AsyncIterator[None]:
    """Ends what takes longer, with a TransportError."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise TransportError(why) from error


class Stream(Protocol):
    """A stream to or from one peer. Both ends may send."""

    peer: bytes

    @property
    def moved(self) -> int:
        """How many bytes have come and gone, also of frames that are under way."""

    @property
    def is_gone(self) -> bool:
        """Whether it was closed from here, by whomever."""

    async def send(self, frame: bytes | memoryview) -> None:
        """Sends a frame; returns when there is room for the next. TransportError if the stream is gone."""

    async def coming(self) -> int:
        """Returns the size of the next frame once it comes, unread. TransportError if the stream is gone or closed."""

    async def skip(self) -> None:
        """Reads over the next frame, of which only a part is in memory at a time."""

    async def receive(self, bytes_max: int) -> bytes:
        """Returns the next frame; RemoteProtocolError if it is too long, TransportError if the stream is gone."""

    async def close(self) -> None:
        """Closes the stream after delivering everything that was sent."""

    def abort(self) -> None:
        """Closes the stream at once; data in flight may be lost."""


@asynccontextmanager
async def while_it_moves(stream: Stream, seconds: float, seconds_max: float) -> AsyncIterator[None]:
    """Ends what takes longer than `seconds` without a byte, or `seconds_max` in all, with a TimeoutError."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds_max
    timer: asyncio.TimerHandle

    def look(moved: int) -> None:
        nonlocal timer
        if stream.moved != moved and not limit.expired():
            limit.reschedule(min(end, loop.time() + seconds))
        timer = loop.call_later(MOVES_SECONDS, look, stream.moved)

    async with asyncio.timeout(seconds) as limit:
        timer = loop.call_later(MOVES_SECONDS, look, stream.moved)
        try:
            yield
        finally:
            timer.cancel()


Handler: TypeAlias = Callable[[Stream], Awaitable[None]]  # serves an incoming stream, which is closed when it returns
Hear: TypeAlias = Callable[[bytes, bytes], None]  # gets the publisher and data of a gossiped message; must not block
IsAdmitted: TypeAlias = Callable[[bytes], bool]  # whether a peer is admitted to the run; asked each time


def everyone(publisher: bytes) -> bool:
    return True


class Transport(Protocol):
    """A node's access to the network."""

    me: bytes
    boundary: Boundary  # around every exchange with a peer

    def addresses(self) -> list[str]:
        """Returns the known addresses at which others may reach this node, with its id."""

    async def connect(self, address: str) -> bytes:
        """Connects to an address, and returns the peer. TransportError names the address and the reason."""

    async def disconnect(self, peer: bytes) -> None: ...

    async def peers(self) -> dict[bytes, list[str]]:
        """Returns the connected peers and their known addresses, with ids."""

    def range_of(self, peer: bytes) -> str:
        """Returns the range of addresses that a peer is connected from; empty if that is not known."""

    def ends_of(self, peer: bytes) -> frozenset[str]:
        """Returns the far ends of the connections with a peer at the last listing of peers."""

    async def keep(self, peers: Collection[bytes]) -> None:
        """Sets the peers whose connections are pruned last when there are too many; replaces the previous set."""

    async def subscribe(self, topic: str, hear: Hear, is_heard: IsAdmitted = everyone) -> None:
        """Subscribes to a topic, once, also across restarts of the network. Who is not heard is dropped undecoded."""

    def leave(self, topic: str) -> None:
        """Leaves a topic until `come_back`, also across restarts of the network. We can still publish in it."""

    def come_back(self, topic: str) -> None:
        """Subscribes again to a topic that was left."""

    async def publish(self, topic: str, data: bytes) -> None:
        """Sends to the other subscribers of a topic. `data` longer than MESSAGE_BYTES_MAX fails an assertion."""

    async def serve(self, protocol: str, handler: Handler) -> None:
        """Sets the handler for the streams that peers open for this protocol, in place of an earlier one."""

    def end_run(self) -> None:
        """Leaves all topics and serves no protocol from now on: a transport serves one run at a time."""

    def prefer(self, is_admitted: IsAdmitted) -> None:
        """Sets which peers' incoming streams take the slots of all others. Until then, no peer's."""

    async def open(self, peer: bytes, protocol: str) -> Stream:
        """Opens a stream to a connected peer. TransportError if it does not speak the protocol."""

    async def announce(self, key: str, value: bytes, seconds: float) -> None:
        """Publishes a hint in the DHT under this key, signed by this node."""

    async def look_up(self, key: str) -> dict[bytes, bytes]:
        """Returns the values that peers announced under this key: hints, with valid signatures."""

    def counters(self) -> dict[str, int]:
        """Returns at least "bytes sent" and "bytes received", "gossip sent" and "gossip received"."""

    async def close(self) -> None: ...
