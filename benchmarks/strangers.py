"""Floods a topic with junk from a process of its own, through a p2pd for each stranger.

    python benchmarks/strangers.py ADDRESS TOPIC SECONDS RATE STRANGERS

prints "ready" once all are connected, floods once a line comes in, and then prints how many messages p2pd took. It is
part of gossip_flood.py and of tests/hostile.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from p2ptrain.net.libp2p.control import RESPONSE_BYTES_MAX, pb
from p2ptrain.net.libp2p.p2pd import P2pd
from p2ptrain.net.libp2p.streams import read_message, with_length
from tests.helpers.flood import junk_vote
from tests.helpers.p2pd import nodes_in

DIFFERENT = 256  # kinds of junk; each message has a number of its own, so that gossipsub passes all of them on
TURN = 25  # messages that a stranger writes at once
MESH_SECONDS = 2.0


async def flood(node: P2pd, topic: str, rate: float, seconds: float) -> int:
    """Publishes junk on one connection to p2pd, without waiting for each answer; returns how many it took."""
    frames, run_id = [], topic.encode()[-32:].ljust(32)
    for _ in range(DIFFERENT):
        content = pb.PSRequest(type=pb.PSRequest.PUBLISH, topic=topic, data=junk_vote(run_id))
        frames.append(with_length(pb.Request(type=pb.Request.PUBSUB, pubsub=content).SerializeToString()))
    reader, writer = await node.control.opened(pb.Request.IDENTIFY)
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
        await asyncio.sleep(TURN / rate)
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
            await asyncio.sleep(MESH_SECONDS)
            print("ready", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            taken = await asyncio.gather(*(flood(node, topic, rate / strangers, seconds) for node in nodes))
            print(sum(taken), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])))
