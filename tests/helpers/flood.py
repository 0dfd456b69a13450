"""Floods a topic with junk from a process of its own, through a p2pd for each stranger.

    python -m tests.helpers.flood ADDRESS TOPIC SECONDS RATE STRANGERS

prints "ready" once all are connected, floods once a line comes in, and then prints how many messages p2pd took.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from p2ptrain.core.messages import Ballot, Vote, encode, signed_bytes
from p2ptrain.identity import Identity
from p2ptrain.net.frames import prefixed, read_message
from p2ptrain.net.libp2p.p2pd import RESPONSE_BYTES_MAX, P2pd, pb
from tests.helpers.p2pd import nodes_in

DIFFERENT = 256  # kinds of junk; each message has a number of its own, so that gossipsub passes all of them on
TURN_SECONDS = 0.005


def junk_vote(run_id: bytes) -> bytes:
    """Returns the vote of a throw-away key with a valid signature, which costs the most to decode."""
    stranger = Identity(os.urandom(32))
    vote = Vote(run_id, 1, 0, Ballot.PREVOTE, os.urandom(32), stranger.key)
    return encode(vote, stranger.sign(signed_bytes(run_id, vote)))


async def flood(node: P2pd, topic: str, rate: float, seconds: float) -> int:
    """Publishes junk on one connection to p2pd, without waiting for each answer; returns how many it took."""
    frames, run_id = [], topic.encode()[-32:].ljust(32)
    for _ in range(DIFFERENT):
        content = pb.PSRequest(type=pb.PSRequest.PUBLISH, topic=topic, data=junk_vote(run_id))
        frames.append(prefixed(pb.Request(type=pb.Request.PUBSUB, pubsub=content).SerializeToString()))
    reader, writer = await node._control._open()
    taken = 0

    async def count() -> None:
        nonlocal taken
        while True:
            await read_message(reader, RESPONSE_BYTES_MAX)
            taken += 1

    counting = asyncio.create_task(count())
    loop = asyncio.get_running_loop()
    began, sent = loop.time(), 0
    while (passed := loop.time() - began) < seconds:
        due = int(passed * rate)
        writer.write(b"".join(frames[number % DIFFERENT] for number in range(sent, due)))
        sent = due
        await writer.drain()
        await asyncio.sleep(TURN_SECONDS)
    counting.cancel()
    writer.transport.abort()
    return taken


async def main(address: str, topic: str, seconds: float, rate: float, strangers: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        async with nodes_in(Path(directory)) as make:
            nodes = [await make() for _ in range(strangers)]
            for node in nodes:
                await node.connect(address)
                await node.subscribe(topic, lambda publisher, data: None, lambda publisher: False)
            await asyncio.sleep(2.0)  # for the mesh
            print("ready", flush=True)  # noqa: T201
            await asyncio.to_thread(sys.stdin.readline)
            taken = await asyncio.gather(*(flood(node, topic, rate / strangers, seconds) for node in nodes))
            print(sum(taken), flush=True)  # noqa: T201


class Flooders:
    """The process with the strangers, ready to flood."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    @asynccontextmanager
    async def ready(
        cls, address: str, topic: str, *, seconds: float, rate: float, strangers: int = 1
    ) -> AsyncIterator[Flooders]:
        arguments = [address, topic, str(seconds), str(rate), str(strangers)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.helpers.flood", *arguments,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            assert process.stdout is not None and await process.stdout.readline() == b"ready\n"
            yield cls(process)
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()

    async def flood(self) -> int:
        """Floods, and returns how many messages the strangers' p2pd took."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(b"\n")
        return int(await self._process.stdout.readline())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])))
