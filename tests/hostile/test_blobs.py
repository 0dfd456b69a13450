"""Strangers who ask for blobs: neither the event loop nor the memory of the node that serves them grows with that."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2ptrain.core.wire import encode
from p2ptrain.data.dataset import DatasetIndex, Split, TokenDataset, TokenizerName, manifest_digest, piece_digest
from p2ptrain.data.tokenizer import tokenizer_digest
from p2ptrain.digest import PIECE_BYTES
from p2ptrain.net.blobs.blob import BlobName, Kind
from p2ptrain.net.blobs.server import BlobRequest, FetchError, Have, Server, blob_protocol, decode_reply
from p2ptrain.net.rate_limit import TokenBucket
from p2ptrain.net.transport import FRAME_BYTES_MAX, Stream
from p2ptrain.node.served_blobs import SavedStates, ServedBlobs
from tests.helpers.blobs import BLOB, NAME, PIECE, RUN, crowd, download, now, read_nothing, swarm
from tests.helpers.costs import costs
from tests.helpers.memory_network import MemoryTransport, Network
from tests.helpers.net import key, skipping_time, some_bytes

TOKENIZER, TOKEN_PIECE = some_bytes(8 * PIECE_BYTES), some_bytes(PIECE_BYTES)
ASKED = 40  # times each blob


def a_dataset(directory: Path) -> TokenDataset:
    """Makes a data set of 60 GB of tokens, one piece of which is here, with a large tokenizer."""
    pieces = [piece_digest(TOKEN_PIECE), *(number.to_bytes(32, "big").hex() for number in range(60_000))]
    index = DatasetIndex(
        held_out=Split(pieces=(), tokens=0),
        token_bytes=2,
        tokenizer=TokenizerName(digest=tokenizer_digest(TOKENIZER), kind="json", vocab_size=50_000),
        training=Split(pieces=tuple(pieces), tokens=len(pieces) * PIECE_BYTES // 2),
        version=1,
    )
    (directory / "pieces").mkdir(parents=True)
    (directory / "manifest.json").write_bytes(index.encode())
    (directory / "tokenizer.json").write_bytes(TOKENIZER)
    (directory / "pieces" / pieces[0]).write_bytes(TOKEN_PIECE)
    return TokenDataset.open(directory, manifest_digest(index.encode()))


class Attacked:
    """A node that serves a data set."""

    def __init__(self, directory: Path) -> None:
        self.network = Network()
        self.transport = self.network.transport(key(1))
        dataset = a_dataset(directory)
        names = {
            "tokenizer": dataset.tokenizer.digest,
            "manifest": manifest_digest(dataset.manifest_bytes()),
            "data": piece_digest(TOKEN_PIECE),
        }
        self.names: dict[Kind, bytes] = {kind: bytes.fromhex(name) for kind, name in names.items()}  # type: ignore[misc]
        run: Any = SimpleNamespace(
            data=SimpleNamespace(manifest=names["manifest"]), tokenizer=SimpleNamespace(digest=names["tokenizer"])
        )
        nothing: Any = None  # neither payloads nor states are asked for
        blobs = ServedBlobs(run, nothing, SavedStates(), dataset, nothing)
        self.server = Server(
            self.transport,
            RUN,
            blobs.find,
            upload=TokenBucket(0),
            blame=lambda peer, why: None,
            is_admitted=lambda peer: False,
        )

    async def stranger(self, number: int) -> MemoryTransport:
        peer = self.network.transport(key(number))
        await peer.connect(self.transport.addresses()[0])
        return peer


@asynccontextmanager
async def attacked(tmp_path: Path) -> AsyncIterator[Attacked]:
    node = Attacked(tmp_path / "data")
    async with node.server:
        yield node
    for each in list(node.network.nodes.values()):
        await each.close()


async def wants(stream: Stream, name: BlobName) -> Have:
    await stream.send(encode(BlobRequest(name.kind, name.name, leaves=True)))
    reply = decode_reply(await stream.receive(FRAME_BYTES_MAX))
    assert isinstance(reply, Have)
    return reply


@pytest.mark.parametrize("kind", ["tokenizer", "manifest", "data"])
async def test_a_blob_that_is_wanted_again_and_again_does_not_hold_up_the_loop(kind: Kind, tmp_path: Path) -> None:
    async with attacked(tmp_path) as node:
        name = BlobName(kind, node.names[kind])
        stranger = await node.stranger(2)
        with costs() as cost:
            for _ in range(ASKED):
                stream = await stranger.open(node.transport.me, blob_protocol(RUN))
                await wants(stream, name)
                stream.abort()
        print(f"{kind} wanted {ASKED} times: {cost}")
        assert cost.loop_seconds / ASKED < 0.001


async def test_a_blob_that_many_streams_want_is_not_in_memory_for_each(tmp_path: Path) -> None:
    async with attacked(tmp_path) as node:
        name = BlobName("tokenizer", node.names["tokenizer"])
        strangers = [await node.stranger(number) for number in range(2, 18)]
        streams = [await peer.open(node.transport.me, blob_protocol(RUN)) for peer in strangers for _ in range(4)]
        with costs() as cost:
            for stream in streams:
                assert (await wants(stream, name)).size == len(TOKENIZER)
        print(f"{len(streams)} streams that want {len(TOKENIZER) >> 20} MiB: {cost}")
        assert cost.memory_bytes < 16 * 2**20


def crowded(strangers: int, upload: int, seconds: float) -> None:
    """Has a member fetch a payload while strangers ask for the same one on four streams each and read nothing."""

    @skipping_time
    async def test() -> None:
        async with swarm(2, upload=upload) as (network, (server, member)):
            server.strangers = {key(100 + number) for number in range(strangers)}
            async with crowd(network, server, strangers, read_nothing):
                start = now()
                assert await member.fetch(NAME, BLOB.size, server.key) == BLOB.data()
                print(f"six pieces beside {strangers} strangers took {now() - start:.1f} s")
                assert now() - start < seconds

    test()


def test_strangers_who_read_nothing_take_no_place_of_a_member() -> None:
    crowded(100, 0, 2.0)


def test_strangers_leave_most_of_a_limited_upload_to_a_member() -> None:
    crowded(60, PIECE, 6 * 8 / 7 + 2)


@skipping_time
async def test_a_newcomer_gets_what_it_needs_beside_members_who_always_ask() -> None:
    async with swarm(2, upload=4 * PIECE) as (network, (server, newcomer)):
        server.strangers = {newcomer.key}
        async with crowd(network, server, 8, download):
            start = now()
            while NAME not in newcomer.blobs and now() - start < 120.0:
                with suppress(FetchError):
                    await newcomer.fetch(NAME, BLOB.size, server.key)
            print(f"six pieces beside eight members took {now() - start:.1f} s")
            assert NAME in newcomer.blobs
