"""The cost of copies: memory of a join, time of a restart, and how often a payload is hashed and unpacked.

    python benchmarks/copies.py [--preset 100m] [--turns 3] [--payloads 8] [--json FILE]

The daemon's own parts, with a real trainer, over the network in memory. Each turn is a process of its own.

- join: a state is fetched from a peer, taken over and saved. `memory` is the most that the process takes beyond what
  it had with its trainer, over the size of the state.
- restart: a node goes on from its newest of four checkpoints, and offers all of them to peers. Their files are dropped
  from the page cache first, and `read` is what came from the disk meanwhile, over the size of the state.
- round: an author makes its payload; a peer fetches and checks so many, and applies them. `hashed` says how often each
  payload was, by its author and by a peer, and `unpacked` how often by a peer.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from random import Random
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from p2ptrain import digest as digests
from p2ptrain.config import DeviceConfig, RunConfig
from p2ptrain.core import events as ev
from p2ptrain.core.state import Taken, genesis
from p2ptrain.daemon.assembly import Workshop, _restore
from p2ptrain.data.corpus import Reading
from p2ptrain.data.dataset import TokenDataset, manifest_digest
from p2ptrain.data.prepare import prepare
from p2ptrain.data.tokenizer import load_tokenizer
from p2ptrain.exact import aggregate, outer
from p2ptrain.net import questions
from p2ptrain.net.blobs.fetch import Fetcher
from p2ptrain.net.blobs.server import Server
from p2ptrain.net.rate_limit import TokenBucket
from p2ptrain.net.transport import everyone
from p2ptrain.node.driver import Driver
from p2ptrain.node.fetching import Fetching
from p2ptrain.node.local_worker import LearnerThread, LocalWorker
from p2ptrain.node.persistence import Persistence
from p2ptrain.node.replica_thread import ReplicaThread, Standing
from p2ptrain.node.served_blobs import SavedStates, ServedBlobs
from p2ptrain.share import Share
from p2ptrain.store.store import Store
from p2ptrain.train.live import StepResult
from tests.helpers.memory_network import Network

HERE, PEER = b"h" * 32, b"p" * 32
CHECKPOINTS = 4


class Node:
    """A store, a workshop that may be shared, and the driver between them."""

    def __init__(self, key: bytes, place: Path, run: RunConfig, data: TokenDataset, workshop: Workshop, net: Network):
        self.workshop, self.transport, run_id = workshop, net.transport(key), run.id
        self.base = genesis(run_id, [HERE, PEER], bytes.fromhex(run.state.initial_root))
        self.store = Store(place, run, self.base, key, place.parent / f"{place.name}.key")
        states, free = SavedStates(), TokenBucket(0)
        fetcher = Fetcher(self.transport, run_id, download=free, blame=lambda *each: None, rng=Random(0))  # noqa: S311  # chance that can be repeated
        self.persistence = Persistence(self.store, states, run.state, 1_000, 1_000, needed=lambda: ())
        library = ServedBlobs(run, self.store, states, data, fetcher)
        self.server = Server(
            self.transport, run_id, library.find, upload=free, blame=lambda *each: None, is_admitted=everyone
        )
        nobody: Any = SimpleNamespace(linked={}, members=())
        where = place / "fetching"
        fetching = Fetching(run, self.transport, nobody, fetcher, data, states, where, lambda *each: None)
        view = SimpleNamespace(run=run, me=key, is_quarantined=False)
        self.told: list[Any] = []
        parts: Any = SimpleNamespace(view=lambda: view)
        intake: Any = SimpleNamespace(
            give=self.told.append, counters=Counter(), refusal=lambda peer, payload: workshop.replica.check(payload)
        )
        edges: Any = SimpleNamespace(
            transport=self.transport,
            gossip=None,
            mailboxes=None,
            fetching=fetching,
            persistence=self.persistence,
            view=view,
        )
        self.driver = Driver(parts, workshop.replica, workshop.worker, intake, edges, lambda *each: None)
        self.states = states

    async def serve(self) -> None:
        self.server._turns._background.set_rate(0)  # a state's limit, which is not what is measured
        await self.server.__aenter__()
        await questions.serve(self.transport, lambda peer, question: questions.States(self.states.places()))

    def close(self) -> None:
        self.persistence.close()
        self.store.close()


def memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def forget_the_most() -> None:
    """Resets the peak `VmHWM`."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def forget_pages(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


async def a_workshop(preset: str, place: Path) -> tuple[RunConfig, TokenDataset, Workshop]:
    text = place / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 1_000)
    tokenizer = load_tokenizer(None)
    prepare(
        place / "data", [text], embedded=False, how=Reading(tokenizer=tokenizer), held_out=0, progress=lambda *_: None
    )
    name = manifest_digest((place / "data" / "manifest.json").read_bytes())
    recipe = {"name": "distro", "sequences_per_pass": 1}
    raw = {"name": "copies", "model": {"preset": preset, "vocab_size": 256}, "recipe": recipe}
    data = TokenDataset.open(place / "data", name)
    thread = await LearnerThread.open(RunConfig.model_validate(raw), DeviceConfig(name="cpu", autocast="off"), data)
    learner, generator = thread.learner, torch.Generator().manual_seed(1)
    learner.replica.weights.normal_(0, 0.02, generator=generator)
    run = learner.run.sealed(
        manifest=name, initial_root=learner.replica.root().hex(), founders=[HERE.hex(), PEER.hex()]
    )
    learner.run = learner.replica.run = run
    worker = LocalWorker(thread, PEER, mock.AsyncMock())
    return run, data, Workshop(thread, worker, ReplicaThread(worker))


def first_of(node: Node) -> Standing:
    return Standing(0, node.base.branch, node.base.head, node.base.root)


async def join(preset: str, place: Path, _: int) -> dict[str, float]:
    run, data, workshop = await a_workshop(preset, place)
    net = Network()
    peer = Node(PEER, place / "peer", run, data, workshop, net)
    await peer.persistence.save_first(workshop.worker, first_of(peer))
    await peer.serve()
    replica = workshop.replica.replica
    replica.state.zero_()
    here = Node(HERE, place / "here", run, data, workshop, net)
    await here.transport.connect(peer.transport.addresses()[0])
    effect = ev.CatchUp(((0, peer.base.root),), (PEER,), 1)
    forget_the_most()
    before, began = memory("VmRSS:"), time.perf_counter()
    await here.driver._fetch_state(effect)
    took, most = time.perf_counter() - began, memory("VmHWM:")
    assert here.told == [ev.CaughtUp(0, peer.base.root, 1)], here.told
    assert replica.root() == here.store.checkpoints.present()[-1].root == peer.base.root
    result = {
        "seconds": took,
        "memory": (most - before) / workshop.replica.replica.state_bytes,
        "bytes": workshop.replica.replica.state_bytes,
    }
    await peer.server.__aexit__(None, None, None)
    here.close()
    peer.close()
    workshop.close()
    return result


async def restart(preset: str, place: Path, _: int) -> dict[str, float]:
    run, data, workshop = await a_workshop(preset, place)
    first = Node(HERE, place / "here", run, data, workshop, Network())
    for _ in range(CHECKPOINTS):
        await first.persistence.save_first(workshop.worker, first_of(first))
    first.close()
    again = Node(HERE, place / "here", run, data, workshop, Network())
    forget_pages(place / "here")
    forget_the_most()
    before, read, began = memory("VmRSS:"), bytes_read(), time.perf_counter()
    await _restore(again.store, workshop, again.persistence, b"")
    took, size = time.perf_counter() - began, workshop.replica.replica.state_bytes
    assert [root for _, root in again.states.places()] == [again.base.root]
    most, came = memory("VmHWM:"), bytes_read() - read
    again.close()
    workshop.close()
    return {"seconds": took, "memory": (most - before) / size, "read": came / size}


@contextmanager
def counted(module: Any, name: str, note: Callable[..., object]) -> Any:
    real = getattr(module, name)

    def counting(*arguments: Any) -> Any:
        note(*arguments)
        return real(*arguments)

    with mock.patch.object(module, name, counting):
        yield


async def a_round(preset: str, place: Path, count: int) -> dict[str, float]:
    run, data, workshop = await a_workshop(preset, place)
    net, trained = Network(), workshop.thread.learner
    author = Node(PEER, place / "peer", run, data, workshop, net)
    here = Node(HERE, place / "here", run, data, workshop, net)
    await author.serve()
    await here.transport.connect(author.transport.addresses()[0])

    def train(share: Share, *_: object) -> list[StepResult]:
        trained.live.gradient.normal_(generator=torch.Generator().manual_seed(share.round))
        trained._trained = share.round
        return [StepResult(1.0, 1, 1.0, 1)]

    counts: Counter[str] = Counter()
    who = ["author"]

    def hashed(domain: str, *parts: bytes) -> None:
        if domain == "leaf":
            counts[f"{who[0]} hashed"] += len(parts[-1])

    def unpacked(*_: object) -> None:
        counts["unpacked"] += 1

    seconds: dict[str, float] = {}
    with (
        mock.patch.object(trained, "train", train),
        mock.patch.object(
            author.driver.edges, "fetching", SimpleNamespace(data=mock.AsyncMock(), ahead=mock.AsyncMock())
        ),
        counted(digests, "digest", hashed),
        counted(outer, "unpack", unpacked),
        counted(aggregate, "unpack", unpacked),
    ):
        async with author.driver.tasks.group:
            for number in range(1, count + 1):
                await author.driver.trainings.train(ev.Train(number, 0, 0, 1))
        made = [each for each in author.told if isinstance(each, ev.TrainingFinished)]
        who[0], began = "peer", time.perf_counter()
        for each in made:
            await here.driver.payloads._beside([], (PEER,), ev.Fetch(each.payload, each.payload_bytes, (PEER,)))
        who[0] = "state"
        seconds["fetch and check"], began = time.perf_counter() - began, time.perf_counter()
        taken = tuple(
            Taken(PEER, each.round, 0, each.payload, each.payload_bytes, each.steps, each.content) for each in made
        )
        manifest = SimpleNamespace(taken=taken, branch=b"", round=1, digest=bytes(32))
        await here.driver._apply(ev.Apply(manifest), 0)  # type: ignore[arg-type]
        seconds["apply"] = time.perf_counter() - began
    assert [each for each in here.told if isinstance(each, ev.Applied)], here.told
    (size,) = workshop.replica.payload_sizes
    await author.server.__aexit__(None, None, None)
    for node in (here, author):
        node.close()
    workshop.close()
    times = {
        name: each / count / (size if name.endswith("hashed") else 1)
        for name, each in counts.items()
        if name != "state hashed"
    }
    return {f"{name} s a payload": each / count for name, each in seconds.items()} | times | {"payload bytes": size}


WAYS = {"join": join, "restart": restart, "round": a_round}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="100m")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--payloads", type=int, default=8)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)  # what one of our own processes measures
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if chosen.way:
        with tempfile.TemporaryDirectory() as directory:
            print(json.dumps(asyncio.run(WAYS[chosen.way](chosen.preset, Path(directory), chosen.payloads))))
        return
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(chosen.turns):
        for way, turns in found.items():
            again = [sys.executable, __file__, "--preset", chosen.preset, "--payloads", str(chosen.payloads)]
            done = subprocess.run([*again, "--way", way], check=True, stdout=subprocess.PIPE)  # noqa: S603
            turns.append(json.loads(done.stdout.splitlines()[-1]))
    for way, turns in found.items():
        told = {name: [each[name] for each in turns] for name in turns[0]}
        shown = (f"{name} {median(each):.3f} ({min(each):.3f} to {max(each):.3f})" for name, each in told.items())
        print(f"{way}: " + "; ".join(shown))
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
