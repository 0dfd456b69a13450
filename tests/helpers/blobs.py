"""Helpers for tests of blob transfer: nodes that serve and fetch, and peers that lie."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from random import Random

from p2ptrain.core.wire import encode
from p2ptrain.digest import PIECE_BYTES, leaf, leaf_digests, merkle_root, piece_count
from p2ptrain.errors import RemoteProtocolError
from p2ptrain.net.blobs.blob import Blob, BlobName, Kind, all_pieces
from p2ptrain.net.blobs.fetch import Fetcher
from p2ptrain.net.blobs.server import (
    STREAMS_PER_PEER_MAX,
    BlobRequest,
    Given,
    Have,
    Piece,
    Reply,
    Request,
    Server,
    blob_protocol,
    decode_reply,
    decode_request,
)
from p2ptrain.net.rate_limit import TokenBucket
from p2ptrain.net.transport import FRAME_BYTES_MAX, Stream, TransportError
from tests.helpers.memory_network import MemoryTransport, Network
from tests.helpers.net import at, key, some_bytes

RUN = bytes(32)
PIECE = 2**20


class MemoryBlob:
    """A complete blob in memory."""

    def __init__(self, data: bytes, *, is_tree: bool = False) -> None:
        self._data, self._is_tree = data, is_tree
        self.size, self.held = len(data), all_pieces(len(data))

    @classmethod
    def tree(cls, data: bytes) -> MemoryBlob:
        return cls(data, is_tree=True)

    @cached_property
    def leaves(self) -> bytes:
        return b"".join(leaf_digests(self._data)) if self._is_tree else b""

    @property
    def name(self) -> bytes:
        """The Merkle root, for a tree."""
        return merkle_root([leaf(self.leaves, index) for index in range(piece_count(self.size))], self.size)

    def read(self, index: int) -> bytes:
        return self._data[index * PIECE_BYTES : (index + 1) * PIECE_BYTES]

    def data(self) -> bytes:
        return self._data


@dataclass
class BlobNode:
    """A node that serves its blobs and fetches others."""

    key: bytes
    transport: MemoryTransport
    upload: TokenBucket
    download: TokenBucket
    blobs: dict[BlobName, Blob] = field(default_factory=dict)
    blamed: list[tuple[bytes, str]] = field(default_factory=list)
    failed: list[tuple[bytes, str]] = field(default_factory=list)
    strangers: set[bytes] = field(default_factory=set)
    asked: list[BlobName] = field(default_factory=list)  # by others

    def __post_init__(self) -> None:
        rng = Random(int.from_bytes(self.key[:4], "big"))
        self.fetcher = Fetcher(self.transport, RUN, download=self.download, blame=self.blame, rng=rng)
        self.server = Server(
            self.transport,
            RUN,
            lambda name, peer: self.find(name, peer),  # noqa: PLW0108  # a test may replace it
            upload=self.upload,
            blame=self.blame,
            is_admitted=lambda peer: peer not in self.strangers,
        )

    def find(self, name: BlobName, peer: bytes) -> Blob | None:
        self.asked.append(name)
        return self.blobs.get(name) or self.fetcher.in_progress(name)

    def blame(self, peer: bytes, why: str) -> None:
        self.blamed.append((peer, why))

    def fail(self, peer: bytes, why: str) -> None:
        self.failed.append((peer, why))

    async def fetch(self, name: BlobName, size: int, *sources: bytes) -> bytes:
        """Fetches a blob and serves it from then on."""
        sink = await self.fetcher.fetch(name, size, sources, failed=self.fail)
        self.blobs[name] = sink
        return sink.data()


@asynccontextmanager
async def swarm(
    count: int, *, latency: float = 0.002, upload: int = 0, download: int = 0
) -> AsyncIterator[tuple[Network, list[BlobNode]]]:
    """Makes fully connected nodes."""
    network = Network(latency_seconds=latency)
    async with AsyncExitStack() as stack:
        nodes = [
            BlobNode(key(number), network.transport(key(number)), TokenBucket(upload), TokenBucket(download))
            for number in range(count)
        ]
        for node in nodes:
            await stack.enter_async_context(node.server)
            for other in nodes[: nodes.index(node)]:
                await node.transport.connect(other.transport.addresses()[0])
        yield network, nodes
    for each in list(network.nodes.values()):  # including liars
        await each.close()


def tree(size: int, kind: Kind = "payload", seed: int = 0) -> tuple[BlobName, MemoryBlob]:
    blob = MemoryBlob.tree(some_bytes(size, seed))
    return BlobName(kind, blob.name), blob


def account(blob: MemoryBlob, **changes: object) -> Have:
    """The `Have` of an honest server that has not given out any piece."""
    pieces = -(-blob.size // PIECE)
    fields = {
        "size": blob.size,
        "leaves": blob.leaves,
        "held": blob.held.to_bytes(-(-pieces // 8), "little"),
        "given": bytes(pieces),
        "holders": (),
    }
    return Have(**(fields | changes))  # type: ignore[arg-type]


def given(blob: MemoryBlob, index: int) -> Given:
    return Given(index, blob.read(index))


Answer = Callable[[Request], Awaitable[Reply | bytes | None]]  # None: no answer


async def lie(network: Network, number: int, nodes: list[BlobNode], answer: Answer) -> bytes:
    """Connects a peer that answers requests with any function."""
    peer = network.transport(key(number))
    for node in nodes:
        await peer.connect(node.transport.addresses()[0])

    async def serve(stream: Stream) -> None:
        try:
            while True:
                reply = await answer(decode_request(await stream.receive(128)))
                if reply is not None:
                    await stream.send(reply if isinstance(reply, bytes) else encode(reply))
        except (TransportError, RemoteProtocolError):
            stream.abort()

    await peer.serve(blob_protocol(RUN), serve)
    return peer.me


def honest(blob: MemoryBlob, **changes: object) -> Answer:
    """Answers like an honest server, except for the given changes to its `Have`."""

    async def answer(request: Request) -> Reply:
        return account(blob, **changes) if isinstance(request, BlobRequest) else given(blob, request.index)

    return answer


NAME, BLOB = tree(6 * PIECE - 100)


async def said(stream: Stream, request: Request) -> Reply:
    await stream.send(encode(request))
    return decode_reply(await stream.receive(FRAME_BYTES_MAX))


@asynccontextmanager
async def crowd(
    network: Network, server: BlobNode, keys: int, use: Callable[[Stream], Awaitable[None]]
) -> AsyncIterator[None]:
    """Peers that use four streams each in a given way and reopen each as soon as it ends."""

    async def hold(peer: MemoryTransport) -> None:
        while True:
            with suppress(TransportError):
                stream = await peer.open(server.key, blob_protocol(RUN))
                try:
                    await said(stream, BlobRequest("payload", NAME.name, False))
                    await use(stream)
                finally:
                    stream.abort()
            await at(now() + 0.05)

    server.blobs[NAME] = BLOB
    tasks = []
    for number in range(keys):
        peer = network.transport(key(100 + number))
        await peer.connect(server.transport.addresses()[0])
        tasks += [asyncio.create_task(hold(peer)) for _ in range(STREAMS_PER_PEER_MAX)]
    await at(now() + 1)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def download(stream: Stream) -> None:
    while isinstance(await said(stream, Piece(0, True)), Given):
        pass


async def read_nothing(stream: Stream) -> None:
    for _ in range(10):
        await stream.send(encode(Piece(0, True)))
    await at(now() + 1_000)


async def wrong_piece(request: Request) -> Reply:
    return (
        account(BLOB) if isinstance(request, BlobRequest) else Given(request.index, BLOB.read((request.index + 1) % 6))
    )


def now() -> float:
    return asyncio.get_running_loop().time()
