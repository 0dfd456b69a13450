"""The spread of a large payload from its author to several peers at once, over real p2pds.

    OMP_NUM_THREADS=1 python benchmarks/blobs.py [--nodes N] [--megabytes N] [--repeats N] [--json FILE]

One process has the author and the others, each with a p2pd of its own on loopback and all connected; all fetch the
payload at the same time, knowing only of the author. What the author sends over the payload's size is counted twice:
by its server (pieces), and by the kernel at its p2pd's sockets. One that everybody fetched from the author would be
sent as often as there are others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from p2ptrain.config.node import NetworkConfig
from p2ptrain.digest import PIECE_BYTES
from p2ptrain.identity import Identity
from p2ptrain.net.blobs.blob import Blob, BlobName
from p2ptrain.net.blobs.fetch import Fetcher
from p2ptrain.net.blobs.server import Server
from p2ptrain.net.libp2p.p2pd import P2pd
from p2ptrain.net.rate_limit import TokenBucket
from p2ptrain.net.transport import everyone
from tests.helpers.blobs import MemoryBlob

RUN = bytes(32)
SECONDS = 300.0


@dataclass
class Node:
    """A node with one blob, complete or being fetched."""

    transport: P2pd
    blobs: dict[BlobName, Blob] = field(default_factory=dict)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.fetcher = Fetcher(self.transport, RUN, download=TokenBucket(0), blame=_nobody)
        self.server = Server(self.transport, RUN, self.find, upload=TokenBucket(0), blame=_nobody, is_admitted=everyone)

    def find(self, name: BlobName, peer: bytes) -> Blob | None:
        return self.blobs.get(name) or self.fetcher.in_progress(name)

    async def fetch(self, name: BlobName, size: int, author: bytes) -> None:
        began = time.perf_counter()
        self.blobs[name] = await self.fetcher.fetch(name, size, [author], failed=_nobody)
        self.seconds = time.perf_counter() - began


def _nobody(peer: bytes, why: str) -> None:
    print(f"{peer.hex()[:8]}: {why}")


async def start(stack: AsyncExitStack, directory: Path, count: int) -> list[Node]:
    nodes: list[Node] = []
    for number in range(count):
        identity = directory / f"{number}.key"
        Identity.make(identity)
        network = NetworkConfig(listen=("/ip4/127.0.0.1/tcp/0",), nat=False)
        sockets = directory / str(number)
        sockets.mkdir(mode=0o700)
        transport = await P2pd.start(identity, network, sockets)
        stack.push_async_callback(transport.close)
        node = Node(transport)
        await stack.enter_async_context(node.server)
        for other in nodes:
            await transport.connect(other.transport.addresses()[0])
        nodes.append(node)
    return nodes


def sent_by(process: int) -> int:
    """Returns the bytes that a node's TCP connections have sent and had acknowledged."""
    listed = subprocess.run(["ss", "-tinpHO"], capture_output=True, text=True, check=True)  # noqa: S607
    mine = [line for line in listed.stdout.splitlines() if f"pid={process}," in line]
    return sum(int(found[1]) for line in mine if (found := re.search(r" bytes_acked:(\d+)", line)))


def p2pd_of(node: Node) -> int:
    process = node.transport.supervisor.process
    assert process is not None
    return process.pid


async def measure(others: int, size: int, seed: int) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="p2ptrain-blobs-")))
        author, *rest = await start(stack, directory, others + 1)
        blob = MemoryBlob.tree(Random(seed).randbytes(size))  # noqa: S311
        name = BlobName("payload", blob.name)
        author.blobs[name] = blob
        before, began = sent_by(p2pd_of(author)), time.perf_counter()
        async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as group:
            for node in rest:
                group.create_task(node.fetch(name, size, author.transport.me))
        seconds = time.perf_counter() - began
        sent = sent_by(p2pd_of(author)) - before
        pieces = -(-size // PIECE_BYTES)
        return {
            "others": others,
            "bytes": size,
            "seconds": seconds,
            "first_seconds": min(node.seconds for node in rest),
            "author_times": author.server.counters.get("pieces", 0) / pieces,
            "author_socket_times": sent / size,
            "put_off": author.server.counters.get("put_off", 0),
            "most_sent_by_another_times": max(node.server.counters.get("pieces", 0) for node in rest) / pieces,
            "insisted": sum(node.fetcher.counters.get("insisted", 0) for node in rest),
            "duplicates": sum(node.fetcher.counters.get("duplicates", 0) for node in rest),
            "megabytes_per_second_each": size / 1e6 / seconds,
            "load": os.getloadavg()[0],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=8, help="that fetch")
    parser.add_argument("--megabytes", type=int, default=64, help="of 2**20 bytes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [
        asyncio.run(measure(arguments.nodes, arguments.megabytes * PIECE_BYTES, seed))
        for seed in range(arguments.repeats)
    ]
    for name in rows[0]:
        values = [row[name] for row in rows]
        print(
            f"{name:<27}"
            + "".join(f"{value:14,.2f}" for value in values)
            + f"   median {statistics.median(values):,.2f}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
