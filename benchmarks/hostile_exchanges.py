"""What 100,000 hostile exchanges of drawn kinds do to one of three daemons.

    OMP_NUM_THREADS=1 nice python benchmarks/hostile_exchanges.py [--exchanges 100000] [--minutes 10] [--strangers 4]
        [--percent 4] [--seed 1] [--json FILE]

Strangers with a p2pd each are connected to the first node: questions, mail, requests for blobs and of the DHT that are
altered or random, whole, cut off, too long or without end, unknown protocols, gossip, connections that come and go. As
in gossip_flood.py the nodes train a small share of the time, and the strangers have the lowest priority; first comes a
turn in which the same strangers do the same to a p2pd of their own, and the pace compares the two. Wanted: no node
ends, 0.9 of the pace, memory and descriptors where they were.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

import psutil
from daemons import TINY, Swarm, p2pd_of, recipe, swarm_of
from gossip_flood import AUTOGROUP_SECONDS, LOWEST, ROOT

from p2ptrain.core import wire
from p2ptrain.net import questions
from p2ptrain.net.blobs.server import BlobRequest, blob_protocol
from p2ptrain.net.connections import topic_of
from p2ptrain.net.libp2p.dht import FIND, PING, STORE, dht_pb2
from p2ptrain.net.libp2p.p2pd import P2pd
from p2ptrain.net.mailbox import HistoryQuery, MessageQuery
from p2ptrain.net.transport import Stream, TransportError
from p2ptrain.node.control import ask
from tests.helpers.p2pd import nodes_in
from tests.helpers.strangers import Stranger, stranger_of

CALM_SECONDS = 60.0  # after which memory and descriptors are looked at again
LONG_BYTES = 200_000
ANSWER_SECONDS = 0.5  # for which a stranger waits for an answer
AT_ONCE = 6  # exchanges of a stranger

# ---------------------------------------------------------------------------------------------------
# Strangers, in a process of their own


class Crowd:
    """Strangers that do drawn things to one target."""

    def __init__(self, run_id: bytes, target: bytes, address: str, seed: int) -> None:
        self.run_id, self.target, self.address, self.rng = run_id, target, address, Random(seed)  # noqa: S311  # repeats
        self.line, self.bulk = f"/p2ptrain/2/{run_id.hex()}/line", blob_protocol(run_id)
        self.done: Counter[str] = Counter()
        self.kinds: dict[str, Callable[[P2pd, Stranger], Awaitable[None]]] = {
            "question": lambda node, _: self._speak(node, questions.PROTOCOL, self._question()),
            "mail": lambda node, _: self._speak(node, self.line, self._mail()),
            "blob": lambda node, _: self._speak(node, self.bulk, self._blob()),
            "unknown protocol": lambda node, _: self._speak(node, f"/{self.rng.random()}/1", b""),
            "DHT": self._ask_the_dht,
            "gossip": lambda node, _: node.publish(topic_of(self.run_id), self._junk(400)),
            "connection": lambda node, _: self._come_and_go(node),
        }

    def _junk(self, most: int) -> bytes:
        return self.rng.randbytes(self.rng.randrange(1, most))

    def _altered(self, encoded: bytes) -> bytes:
        found = bytearray(encoded)
        for _ in range(self.rng.choice((0, 1, 1, 3))):
            found[self.rng.randrange(len(found))] = self.rng.randrange(256)
        return bytes(found[: self.rng.choice((len(found), len(found), self.rng.randrange(1, len(found) + 1)))])

    def _question(self) -> bytes:
        asked = (
            questions.AskRuns(),
            questions.AskConfig(self.run_id),
            questions.AskPeers(self.run_id),
            questions.AskSeen(),
        )
        return self._junk(300) if self.rng.random() < 0.2 else self._altered(wire.encode(self.rng.choice(asked)))

    def _mail(self) -> bytes:
        mail = MessageQuery((self.rng.randbytes(16),)), HistoryQuery(self.run_id, self.rng.randrange(2**20))
        if self.rng.random() < 0.1:
            return b"\x91" * self.rng.choice((100, 4_000))
        return self._junk(LONG_BYTES) if self.rng.random() < 0.05 else self._altered(wire.encode(self.rng.choice(mail)))

    def _blob(self) -> bytes:
        kind = self.rng.choice(("payload", "state", "data", "manifest", "tokenizer", "base"))
        return self._altered(wire.encode(BlobRequest(kind, self.rng.randbytes(32), leaves=True)))

    async def _speak(self, node: P2pd, protocol: str, frame: bytes) -> None:
        stream: Any = await node.open(self.target, protocol)
        try:
            match self.rng.randrange(5):
                case 0:  # half open
                    stream._writer.write(len(frame).to_bytes(4, "big") + frame[: len(frame) // 2])
                case 1:  # a length that is a lie
                    stream._writer.write(self.rng.randbytes(4) + frame)
                case _:
                    await self._say_and_hear(stream, frame)
        finally:
            stream.abort()

    async def _say_and_hear(self, stream: Stream, frame: bytes) -> None:
        await stream.send(frame)
        async with asyncio.timeout(ANSWER_SECONDS):
            await stream.receive(2**21)

    async def _ask_the_dht(self, node: P2pd, stranger: Stranger) -> None:
        name = self.rng.choice((PING, STORE, FIND))
        whole = dht_pb2.FindRequest(keys=[self.rng.randbytes(20)]).SerializeToString()
        request = self._altered(whole) if self.rng.random() < 0.5 else self._junk(2_000)
        await stranger.call(name, request, ANSWER_SECONDS)

    async def _come_and_go(self, node: P2pd) -> None:
        await node.disconnect(self.target)
        await node.connect(self.address)

    async def at_work(self, node: P2pd, stranger: Stranger, count: int, seconds: float) -> None:
        """Does so many exchanges in this time, or as many as it can."""
        began, loop = asyncio.get_running_loop().time(), asyncio.get_running_loop()
        for number in range(count):
            await asyncio.sleep(max(0.0, began + seconds * number / count - loop.time()))
            if loop.time() > began + seconds:
                return
            kind = self.rng.choices(tuple(self.kinds), weights=(4, 4, 4, 1, 4, 2, 0.05))[0]
            with suppress(TransportError, TimeoutError):
                await self.kinds[kind](node, stranger)
            self.done[kind] += 1


async def strangers(address: str, run_id: bytes, count: int, exchanges: int, seconds: float, seed: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        async with nodes_in(Path(directory)) as make:
            nodes = [await make() for _ in range(count)]
            if address == "elsewhere":
                target = await make()
                address = target.addresses()[0]
            for node in nodes:
                peer = await node.connect(address)
            crowd = Crowd(run_id, peer, address, seed)
            print("ready", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            each = exchanges // (count * AT_ONCE)
            async with asyncio.TaskGroup() as group:
                for node in nodes:
                    group.create_task(_with_calls(crowd, node, peer, each, seconds))
            print(json.dumps(crowd.done), flush=True)


async def _with_calls(crowd: Crowd, node: P2pd, peer: bytes, count: int, seconds: float) -> None:
    async with stranger_of(node, peer) as stranger, asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(crowd.at_work(node, stranger, count, seconds))


# ---------------------------------------------------------------------------------------------------
# The swarm


def state_of(swarm: Swarm) -> dict[str, float]:
    """Returns memory and descriptors of the node that is attacked, and of its p2pd."""
    node = swarm.nodes[0]
    assert node.process is not None
    found = {}
    for name, pid in (("node", node.process.pid), ("p2pd", p2pd_of(node))):
        process = psutil.Process(pid)
        found |= {f"{name} MB": round(process.memory_info().rss / 1e6, 1), f"{name} descriptors": process.num_fds()}
    return found


def attack(swarm: Swarm, address: str, options: argparse.Namespace, exchanges: int, seconds: float) -> dict[str, Any]:
    run_id = swarm.nodes[0].status["run_id"]
    words = [address, run_id, options.strangers, exchanges, seconds, options.seed]
    command = [sys.executable, str(Path(__file__)), "--as-strangers", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"}
    process = subprocess.Popen(  # noqa: S603  # this program
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
    )
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == b"ready\n"
    for each in (psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)):
        each.nice(int(LOWEST))
        with suppress(OSError):
            Path(f"/proc/{each.pid}/autogroup").write_text(LOWEST)
        swarm.until(lambda: True, AUTOGROUP_SECONDS)
    swarm.look()
    first, began = swarm.round, monotonic()
    process.stdin.write(b"\n")
    process.stdin.flush()
    swarm.until(lambda: monotonic() >= began + seconds, seconds + 60)
    took, rounds = monotonic() - began, swarm.round - first
    done = json.loads(process.stdout.readline())
    process.wait()
    return {"exchanges": done, "seconds": round(took, 1), "rounds_a_minute": round(60 * rounds / took, 1)}


def main() -> None:
    if sys.argv[1:2] == ["--as-strangers"]:
        address, run_id, count, exchanges, seconds, seed = sys.argv[2:]
        work = strangers(address, bytes.fromhex(run_id), int(count), int(exchanges), float(seconds), int(seed))
        asyncio.run(work)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exchanges", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--strangers", type=int, default=4)
    parser.add_argument("--percent", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seconds = 60.0 * options.minutes
    with swarm_of(3, options.keep, model=TINY, recipe=recipe(1)) as swarm:
        swarm.start()
        for node in swarm.nodes:
            ask(node.directory, {"do": "limit", "percent": options.percent})
        swarm.pass_rounds(3)
        short = min(seconds, 120.0)
        elsewhere = attack(swarm, "elsewhere", options, int(options.exchanges * short / seconds), short)
        before = state_of(swarm)
        here = attack(swarm, swarm.nodes[0].status["addresses"][0], options, options.exchanges, seconds)
        right_after, calm = state_of(swarm), monotonic() + CALM_SECONDS
        swarm.until(lambda: monotonic() >= calm, CALM_SECONDS + 60)
        swarm.look()
        told = {
            "elsewhere": elsewhere,
            "here": here,
            "pace": round(here["rounds_a_minute"] / max(elsewhere["rounds_a_minute"], 1e-9), 3),
            "before": before,
            "right after": right_after,
            "after a minute": state_of(swarm),
            "complaints": [each["code"] for each in swarm.nodes[0].status["complaints"]],
        }
    for name, figure in told.items():
        print(f"{name}: {figure}")
    if options.json:
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
