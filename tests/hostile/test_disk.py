"""What strangers ask and say costs no disk space, but for a line in the event log of what the core hears."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from p2ptrain.core.messages import Hello, JoinRequest, Message, encode, signed_bytes
from p2ptrain.core.wire import encode as packed
from p2ptrain.identity import Identity
from p2ptrain.net import questions
from p2ptrain.net.blobs.server import BlobRequest, blob_protocol
from p2ptrain.net.mailbox import Deliver, HistoryQuery, MessageQuery
from p2ptrain.net.transport import FRAME_BYTES_MAX, TransportError
from tests.helpers.flood import junk_vote
from tests.helpers.memory_swarm import MemorySwarm
from tests.helpers.net import at, skipping_time

REQUESTS = 100
STRANGER = Identity(b"s" * 32)
LINE_BYTES_MAX = 2_048  # of the event log; one file more makes it forget its oldest of 16 MiB


def inputs(run_id: bytes, manifest: bytes) -> dict[str, tuple[str, Iterator[bytes]]]:
    """Returns kinds of input by name, with the protocol and the frames."""

    def said(message: Message) -> bytes:
        return packed(Deliver((encode(message, STRANGER.sign(signed_bytes(run_id, message))),)))

    def hello(number: int) -> Hello:
        return Hello(run_id, number, 0, b"", b"", b"", b"", False, STRANGER.key)

    line, blobs, numbers = f"/p2ptrain/2/{run_id.hex()}/line", blob_protocol(run_id), range(REQUESTS)
    return {
        "nothing": (line, iter(())),
        "hellos": (line, (said(hello(number)) for number in numbers)),
        "joins": (line, (said(JoinRequest(run_id, 1, bytes([number]), STRANGER.key)) for number in numbers)),
        "junk votes": (line, (packed(Deliver((junk_vote(run_id),))) for _ in numbers)),
        "questions for messages": (line, (packed(MessageQuery((number.to_bytes(16, "big"),) )) for number in numbers)),
        "questions for histories": (line, (packed(HistoryQuery(run_id, number)) for number in numbers)),
        "no messages": (line, (b"no message" for _ in numbers)),
        "frames of 2 MiB": (line, (bytes(FRAME_BYTES_MAX) for _ in numbers[:10])),
        "questions for the config": (questions.PROTOCOL, (packed(questions.AskConfig(run_id)) for _ in numbers)),
        "wants of the list of data": (blobs, (packed(BlobRequest("manifest", manifest, leaves=True)) for _ in numbers)),
    }  # fmt: skip


def used(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def test_what_strangers_ask_and_say_is_not_kept_on_the_disk(tmp_path: Path) -> None:
    grown: dict[str, float] = {}

    @skipping_time
    async def test() -> None:
        made = MemorySwarm(tmp_path, {})
        node = made.nodes[0]
        await node.start()
        edges = node.daemon.edges
        now = asyncio.get_running_loop().time
        stranger = made.network.transport(STRANGER.key)
        manifest = bytes.fromhex(made.run.data.manifest)
        for what, (protocol, frames) in inputs(edges.run_id, manifest).items():
            await at(now() + 30)
            await stranger.connect(made.network.address(node.key))
            before, count = used(node.directory), 0
            for frame in frames:
                with suppress(TransportError):
                    stream = await stranger.open(node.key, protocol)
                    await stream.send(frame)
                    if protocol != f"/p2ptrain/2/{edges.run_id.hex()}/line":
                        await stream.receive(FRAME_BYTES_MAX)
                    await stream.close()
                    count += 1
                await at(now() + 0.2)
            grown[what] = (used(node.directory) - before) / max(1, count)
        await node.crash()
        await stranger.close()

    test()
    print("bytes on the disk for each:", {what: round(size) for what, size in grown.items()})
    assert max(grown.values()) < LINE_BYTES_MAX
    for what in ("frames of 2 MiB", "questions for the config", "wants of the list of data", "junk votes"):
        assert grown[what] <= 64, what  # what the node's clock has done meanwhile
