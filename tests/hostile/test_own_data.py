"""Whoever knows the digests of a node's own data gets none of it, whatever it calls itself and whatever it asks for."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from fractions import Fraction
from pathlib import Path
from typing import get_args

import pytest

from p2ptrain.config import DeviceConfig, NodeConfig, RunConfig
from p2ptrain.config.node import StorageConfig
from p2ptrain.core.wire import encode
from p2ptrain.daemon.assembly import Launch
from p2ptrain.daemon.life import Daemon
from p2ptrain.data.dataset import TokenDataset, manifest_digest, read_manifest
from p2ptrain.digest import leaf_digests, merkle_root
from p2ptrain.identity import Identity
from p2ptrain.net.blobs.blob import Kind
from p2ptrain.net.blobs.server import BlobRequest, Have, Nothing, blob_protocol, decode_reply
from p2ptrain.net.transport import FRAME_BYTES_MAX
from p2ptrain.node.home import Home
from p2ptrain.train.begin import begin
from p2ptrain.train.own_data import open_own
from tests.helpers.memory_network import MemoryTransport, Network
from tests.helpers.tokenizers import prepared, written
from tests.helpers.trainer import TINY

ME, FRIEND, STRANGER = (Identity(bytes([number]) * 32) for number in (1, 2, 3))


def names_of(own: TokenDataset) -> list[bytes]:
    """Returns all that somebody could call the own data by: its manifest, its pieces, and their roots as blobs."""
    names = [bytes.fromhex(manifest_digest(own.manifest_bytes()))]
    for name in own.manifest.training.pieces:
        piece = own.piece(bytes.fromhex(name))
        assert piece is not None
        names += [bytes.fromhex(name), merkle_root(list(leaf_digests(piece)), len(piece))]
    return names


async def asked(peer: MemoryTransport, run_id: bytes, kind: Kind, name: bytes) -> object:
    stream = await peer.open(ME.key, blob_protocol(run_id))
    await stream.send(encode(BlobRequest(kind, name, leaves=True)))
    reply = decode_reply(await stream.receive(FRAME_BYTES_MAX))
    stream.abort()
    return reply


@pytest.mark.parametrize("who", [FRIEND, STRANGER], ids=["member", "stranger"])
async def test_own_data_is_sent_to_nobody_by_any_name(who: Identity, tmp_path: Path) -> None:
    text = "".join(f"line {n} that stays here\n" for n in range(120_000))
    made = prepared(tmp_path / "own", written(tmp_path / "text.txt", text), held_out=Fraction(1, 20))
    raw = {
        "name": "own",
        "model": TINY,
        "data": {"source": "own"},
        "admission": {"policy": "allowlist", "keys": [ME.key.hex(), FRIEND.key.hex()]},
    }
    place = tmp_path / "node" / "data" / "embedded"
    run, directory, state, _ = begin(RunConfig.model_validate(raw), place, [ME.key.hex(), FRIEND.key.hex()], made.path)
    shared, own = TokenDataset.open(directory, run.data.manifest), open_own(run, made.path, ME.key)
    assert len(own.dataset.manifest.training.pieces) > 2
    network = Network()
    transport, peer = network.transport(ME.key), network.transport(who.key)
    config = NodeConfig(
        device=DeviceConfig(name="cpu", threads=1), storage=StorageConfig(directory=str(tmp_path / "node"))
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(transport.close)
        stack.push_async_callback(peer.close)
        daemon = await Daemon.open(stack, Launch(run, Home(config), ME, transport, shared, state=state, own=own))
        assert daemon.driver.worker.learner.trained_on is own.dataset
        running = asyncio.create_task(daemon.driver.run(daemon.started))
        await daemon.driver.has_begun.wait()
        await peer.connect(transport.addresses()[0])
        run_id = run.id
        for kind in get_args(Kind):
            for name in names_of(own.dataset):
                assert isinstance(await asked(peer, run_id, kind, name), Nothing), (kind, name.hex())
        held_out = bytes.fromhex(shared.manifest.held_out.pieces[0])
        assert isinstance(await asked(peer, run_id, "data", held_out), Have)
        told = bytes.fromhex(manifest_digest(read_manifest(directory)))
        assert isinstance(await asked(peer, run_id, "manifest", told), Have)
        running.cancel()
        await asyncio.wait([running])
