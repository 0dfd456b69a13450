"""The seam to the network: what the daemon needs of it, and nothing of how it is done.

A peer is its Ed25519 public key, 32 bytes, everywhere; its libp2p id is the same key in other clothes (identity.py).
An address is a multiaddr as a person writes it, with the peer's id at its end: /ip4/203.0.113.7/tcp/4001/p2p/12D3...

Two kinds of traffic. Gossip goes to everyone who has subscribed to a topic, a few times over, and may get lost; it
is for small messages. Streams go to one peer, keep their order, and carry frames: the length comes first and is
checked against the reader's limit before anything is allocated.

net/p2pd.py does this with go-libp2p, net/memory.py in one process, for tests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Protocol, TypeAlias

from p2ptrain.errors import P2ptrainError

MESSAGE_BYTES_MAX = 1_000_000  # of gossip: above 1,048,446 libp2p loses it without a word, and what follows with it
FRAME_BYTES_MAX = 2**21  # of a stream: a piece of 1 MiB and its header fit; what is longer goes in several


class TransportError(P2ptrainError):
    """The network did not do what was asked: a peer that cannot be reached, a stream that broke. Try again later."""


class Stream(Protocol):
    """To one peer, or from one. Both ends may send."""

    peer: bytes

    async def send(self, frame: bytes | memoryview) -> None:
        """Send a frame; returns when there is room for the next. TransportError if the stream is gone."""
        ...

    async def receive(self, bytes_max: int) -> bytes:
        """The next frame. RemoteProtocolError if it is longer than `bytes_max`, TransportError if the stream is gone
        or was closed by the peer."""
        ...

    async def close(self) -> None:
        """No more from here; what was sent still arrives."""
        ...

    def abort(self) -> None:
        """Let go at once."""
        ...


Handler: TypeAlias = Callable[[Stream], Awaitable[None]]  # of an incoming stream, which is closed when it returns
Hear: TypeAlias = Callable[[bytes, bytes], None]  # a gossiped message: the publisher and the data; must not block


class Transport(Protocol):
    """One node's access to the network."""

    me: bytes

    def addresses(self) -> list[str]:
        """Under which others may reach this node, with its id; as far as is known."""
        ...

    async def connect(self, address: str) -> bytes:
        """Connect to an address with an id at its end; the peer. TransportError names the address and the reason."""
        ...

    async def disconnect(self, peer: bytes) -> None: ...

    async def peers(self) -> dict[bytes, list[str]]:
        """Who is connected, and from which addresses they are known (with the id)."""
        ...

    async def keep(self, peers: Collection[bytes]) -> None:
        """When there are too many connections, these are given up last; said again, they replace those said before."""
        ...

    async def subscribe(self, topic: str, hear: Hear) -> None:
        """Hear what others publish on this topic from now on, also after the network had to be restarted. Once."""
        ...

    async def publish(self, topic: str, data: bytes) -> None:
        """Not to oneself. An assertion holds `data` to MESSAGE_BYTES_MAX."""
        ...

    async def serve(self, protocol: str, handler: Handler) -> None:
        """Answer streams that peers open under this name. Once for each name."""
        ...

    async def open(self, peer: bytes, protocol: str) -> Stream:
        """A stream to a connected peer. TransportError if it does not speak the protocol."""
        ...

    async def announce(self, key: str, value: bytes, seconds: float) -> None:
        """Publish a hint in the DHT under this key, signed as this node's."""
        ...

    async def look_up(self, key: str) -> dict[bytes, bytes]:
        """What peers have announced under this key, by peer; signatures hold, the rest is a hint."""
        ...

    def counters(self) -> dict[str, int]:
        """At least "bytes sent" and "bytes received", "gossip sent" and "gossip received"."""
        ...

    async def close(self) -> None: ...
