"""Helpers for tests with nodes that each have a real p2pd on loopback."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from p2ptrain.config.node import NetworkConfig
from p2ptrain.identity import Identity
from p2ptrain.net.libp2p.p2pd import P2pd
from p2ptrain.net.transport import FRAME_BYTES_MAX, Stream, TransportError

SECONDS = 20.0  # enough for everything, even on a busy machine


class Make:
    """Starts nodes."""

    def __init__(self, keys: Path, runtime: Path) -> None:
        self.keys, self.runtime = keys, runtime
        self.nodes: list[P2pd] = []
        self._count = itertools.count()

    async def __call__(
        self, listen: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",), *, is_chosen: bool = True, **options: Any
    ) -> P2pd:
        identity_file = self.keys / f"{next(self._count)}.key"
        Identity.make(identity_file)
        named = {
            name: options.pop(name)
            for name in ("announce", "nat", "trusted_relays", "relay_for_others")
            if name in options
        }
        network = NetworkConfig(**{"listen": listen, "nat": False, **named})
        if not is_chosen:  # as if this were the default
            network = NetworkConfig.model_construct({*named, "nat"}, **network.model_dump())
        directory = self.runtime / identity_file.stem
        directory.mkdir(mode=0o700)
        self.nodes.append(await P2pd.start(identity_file, network, directory, **options))
        return self.nodes[-1]


@asynccontextmanager
async def nodes_in(tmp_path: Path) -> AsyncIterator[Make]:
    """Makes nodes, and at the end closes them and checks that nothing is left."""
    tasks_before = asyncio.all_tasks()
    with tempfile.TemporaryDirectory(prefix="p2p-") as runtime:  # pytest's paths are too long for sockets
        make = Make(tmp_path, Path(runtime))
        try:
            yield make
        finally:
            children = [node.supervisor.process.pid for node in make.nodes]
            for node in make.nodes:
                await node.close()
        assert [pid for pid in children if psutil.pid_exists(pid)] == []
        assert asyncio.all_tasks() <= tasks_before | {asyncio.current_task()}


async def connected(make: Make, count: int) -> list[P2pd]:
    """Makes nodes that are all connected to the first."""
    nodes = [await make() for _ in range(count)]
    for node in nodes[1:]:
        assert await node.connect(nodes[0].addresses()[0]) == nodes[0].me
    return nodes


class HeardGossip:
    """Records gossip in order of arrival."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue()

    def __call__(self, publisher: bytes, data: bytes) -> None:
        self.queue.put_nowait((publisher, data))

    async def next(self) -> tuple[bytes, bytes]:
        return await asyncio.wait_for(self.queue.get(), SECONDS)

    async def until(self, publisher: P2pd, topic: str, data: bytes) -> float:
        """Publishes until it is heard, since meshes take a while to form; returns the seconds that took."""
        started_at = time.monotonic()
        while True:
            await publisher.publish(topic, data)
            try:
                while await asyncio.wait_for(self.queue.get(), 0.1) != (publisher.me, data):
                    assert time.monotonic() - started_at < SECONDS
                return time.monotonic() - started_at
            except TimeoutError:
                assert time.monotonic() - started_at < SECONDS


async def echo(stream: Stream) -> None:
    while True:
        await stream.send(await stream.receive(FRAME_BYTES_MAX))


async def echoed(node: P2pd, peer: bytes, frame: bytes, protocol: str = "/echo/1") -> bytes:
    stream = await node.open(peer, protocol)
    await stream.send(frame)
    answer = await asyncio.wait_for(stream.receive(FRAME_BYTES_MAX), SECONDS)
    stream.abort()  # whoever gets the last frame hangs up; closing would wait three seconds for the other to do so
    return answer


async def echoed_at_last(node: P2pd, peer: bytes, frame: bytes) -> bytes:
    """A p2pd that tried while the other was away refuses to try again for seconds, or until the other has come."""
    async with asyncio.timeout(SECONDS):
        while True:
            with suppress(TransportError):
                return await echoed(node, peer, frame)
            await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110  # what happens in p2pd sets no event here
            await asyncio.sleep(0)
