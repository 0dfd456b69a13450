"""Helpers for tests of the driver and its edges: a scripted core, and a trainer whose state is a chain of hashes.

The driver, its edges, the store and the worker are the real ones. Only the jobs of worker and replica are done on the
loop and take time of the loop, so that nothing depends on threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from threading import RLock
from types import SimpleNamespace
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch

from p2ptrain.config import RecipeConfig, RunConfig
from p2ptrain.core import events as ev
from p2ptrain.core.manifest import Manifest as RoundManifest
from p2ptrain.core.messages import KEY_BYTES, Hello, content_name, content_of, payload_digest
from p2ptrain.core.state import AgreedState, Taken, genesis
from p2ptrain.daemon.assembly import Workshop
from p2ptrain.data.assignment import Positions, shard, shard_in_window, shard_of_slots
from p2ptrain.data.dataset import DatasetIndex, Split, TokenDataset, TokenizerName, manifest_digest, piece_digest
from p2ptrain.data.dataset import store_manifest as store_data_manifest
from p2ptrain.digest import digest, leaf_digests, merkle_root
from p2ptrain.errors import DataError
from p2ptrain.models.sample import SampleRequest
from p2ptrain.net.blobs.fetch import Fetcher
from p2ptrain.net.blobs.server import Server
from p2ptrain.net.connections import Connections
from p2ptrain.net.mailbox import messages_of_strangers
from p2ptrain.net.rate_limit import TokenBucket
from p2ptrain.net.transport import everyone
from p2ptrain.node.driver import Driver
from p2ptrain.node.edges import Edges
from p2ptrain.node.fetching import Fetching
from p2ptrain.node.intake import Intake
from p2ptrain.node.local_worker import LearnerThread, LocalWorker, Note
from p2ptrain.node.persistence import Persistence
from p2ptrain.node.replica_thread import ReplicaThread
from p2ptrain.node.served_blobs import SavedStates, ServedBlobs
from p2ptrain.node.work import Worker
from p2ptrain.share import Share
from p2ptrain.store.store import Store
from p2ptrain.train.live import StepResult
from p2ptrain.train.saved_state import Capture
from tests.helpers.blobs import RUN, BlobNode
from tests.helpers.core import KEYS, DigestSigner, plain_manifest, run_of, signed
from tests.helpers.memory_network import MemoryTransport, Network
from tests.helpers.net import at, until

T = TypeVar("T")
PAYLOAD_BYTES = 1_000  # with the author's key
SEQUENCE = 256  # tokens, as in a run that says nothing else
WINDOW = 10  # sequences
STATE_BYTES = 2**20 + 64  # two pieces
STATE = Random(0).randbytes(STATE_BYTES)
DATA = Random(1).randbytes(20_000)
ME, PEER, OTHER, THIRD = KEYS[:4]


def root_of(state: bytes) -> bytes:
    return merkle_root(leaf_digests(state), len(state))


class ChainTrainer:
    """A fake learner, and its own replica: its state hashes all applied payloads, its residual all that was trained and
    restored."""

    def __init__(self, dataset: TokenDataset | None = None, seed: int = 0, run: RunConfig | None = None) -> None:
        self.dataset = self.trained_on = dataset
        self.replica, self.elsewhere = self, None
        self.lock, self.weights, self.adopted = RLock(), torch.zeros(1), 0
        self.round, self.state = 0, STATE
        self.device = torch.device("cpu")
        self.run = run or RunConfig(name="chain", recipe=RecipeConfig(name="distro"))
        self.used: dict[int, list[int]] = {}  # sequences of each round
        self.own_drift = 0.25
        self.drift: float | None = None
        self.update_norm: float | None = 0.5
        self.live = SimpleNamespace(sequences_per_pass=0, privacy=None, set_sequences_per_pass=lambda count: None)
        self.residual = digest("test residual", seed.to_bytes(8, "little"))
        self.kept: set[int] = set()
        self.made: dict[int, bytes] = {}  # contributions since the start
        self.outer = SimpleNamespace(
            sizes={self.run.recipe.k_max: PAYLOAD_BYTES - KEY_BYTES},
            parameters=len(STATE) // 4,
            shapes=[(len(STATE) // 4, 1)],
        )
        self.can_overlap, self.audit = False, None  # it measures nothing
        self.done: list[tuple[Any, ...]] = []  # what was asked for, in order
        self.returned: list[int] = []

    @property
    def state_bytes(self) -> int:
        return len(self.state)

    @property
    def gradient_bytes(self) -> int:
        return len(self.state)

    @property
    def kept_rounds(self) -> tuple[int, ...]:
        return tuple(sorted(self.kept))

    def positions_for(self, share: Share) -> Positions:
        if self.dataset is None:
            return np.zeros(0, dtype=np.int64)
        number, place, places, slots = share
        if slots is not None:
            return shard_of_slots(0, slots, self.dataset.sequences(SEQUENCE))
        if self.run.data.assignment == "window":
            return shard_in_window(0, number, place, places, 2, self.dataset.sequences(SEQUENCE), WINDOW)
        return shard(0, number, place, places, 2, self.dataset.sequences(SEQUENCE))

    # A learner's part

    def wait(self) -> bool:
        return False

    def catch_up(self) -> None:
        pass

    def train(
        self,
        share: Share,
        on_step: Callable[[StepResult], object],
        shifted: Callable[[Any], Any] = lambda weights: None,
        sequences: int = 0,
    ) -> list[StepResult]:
        number, place, places, _ = share
        if self.dataset is not None:
            positions = self.positions_for(share)
            self.used[number] = positions.tolist()
            self.dataset.batch(positions, SEQUENCE)  # DataError if it is not here
        self.done.append(("train", number, place, places))
        shifted(self.weights)
        words = (each.to_bytes(8, "little") for each in (number, place, places))
        self.residual = digest("test training", self.residual, self.state[:32], *words)
        result = StepResult(loss=1.0, tokens=64, gradient_norm=1.0, learned=64)
        on_step(result)
        return [result]

    def contribute(self, number: int, k: int = 0) -> bytes:
        assert number not in self.kept
        self.kept.add(number)
        self.made[number] = Random(self.residual).randbytes(PAYLOAD_BYTES - KEY_BYTES)
        return self.made[number]

    def settle(self, number: int, uncounted: object) -> None:
        if uncounted is None:
            self.returned.append(number)
        else:
            self.kept.discard(number)
            self.done[-1] += (number,)

    def restore_all_but(self, outstanding: Collection[int]) -> None:
        returned, self.returned = self.returned, []
        for number in (*returned, *(kept for kept in self.kept_rounds if kept not in outstanding)):
            self.restore(number)

    def restore(self, number: int) -> bool:
        self.done.append(("restore", number))
        was_kept = number in self.kept
        if was_kept:
            self.residual = digest("test restored", self.residual, number.to_bytes(8, "little"))
        self.kept.discard(number)
        return was_kept

    def evaluate(self, sequences: int) -> float:
        return 1.0 + self.state[0] / 256

    def sample(self, request: SampleRequest, on_token: Callable[[], None]) -> str:
        on_token()
        return f"{self.round} rounds"

    def capture(self) -> Capture:
        kept = b"".join(number.to_bytes(8, "little") for number in self.kept_rounds)
        counts = self.round.to_bytes(8, "little") + len(self.kept).to_bytes(8, "little")
        return ChainCapture(self.round, counts + kept + self.residual + self.state, memoryview(self.state))  # type: ignore[return-value]

    def load(self, path: Path) -> None:
        content = path.read_bytes()
        numbers = [int.from_bytes(content[start : start + 8], "little") for start in range(0, len(content), 8)[:64]]
        self.round, count = numbers[:2]
        rest = content[16 + 8 * count :]
        self.kept, self.residual, self.state = set(numbers[2 : 2 + count]), rest[:32], rest[32:]

    # A replica's part

    def check(self, payload: bytes) -> str | None:
        return "it says so itself" if payload.startswith(b"bad") else None

    def apply(self, number: int, payloads: Sequence[bytes]) -> Any:
        assert number == self.round + 1
        link = digest("test chain", self.state[:32], *payloads)
        self.state, self.round = link + self.state[32:], number
        self.done.append(("apply", number, len(payloads)))
        return SimpleNamespace(uncounted=lambda payload: lambda removed: None)

    def root(self, manifest: bytes = b"") -> bytes:
        return root_of(self.state)

    def as_bytes(self) -> bytes:
        return self.state

    def leaves(self) -> list[bytes]:
        return leaf_digests(self.state)

    def adopt(self, number: int, pieces: Iterable[bytes | memoryview]) -> None:
        self.round, self.state, self.adopted = number, b"".join(pieces), self.adopted + 1
        self.done.append(("adopt", number))


@dataclass(frozen=True)
class ChainCapture:
    """What a ChainTrainer saves."""

    round: int
    content: bytes
    state: memoryview
    trained: int = 0

    def write(self, path: Path) -> None:
        path.write_bytes(self.content)


class LoopThread(LearnerThread):
    """Runs a learner's jobs on the loop, one after the other, which takes the loop's time."""

    def __init__(self, trainer: ChainTrainer, train_seconds: float = 1.0) -> None:
        super().__init__(trainer)  # type: ignore[arg-type]
        self.train_seconds = train_seconds
        self._turn = asyncio.Lock()

    async def run(self, job: Callable[..., T], *arguments: object) -> T:
        async with self._turn:
            is_training = getattr(job, "__name__", "") == "_train"
            await at(asyncio.get_running_loop().time() + (self.train_seconds if is_training else 0.001))
            return job(*arguments)


class LoopReplica(ReplicaThread):
    """Runs a replica's jobs on the loop, one after the other."""

    def __init__(self, worker: Worker, chain: ChainTrainer) -> None:
        super().__init__(worker)
        self.chain = chain
        self.checked: list[bytes] = []
        self.gate: Callable[[], Awaitable[None]] | None = None  # in the way of checks
        self._turn = asyncio.Lock()

    async def run(self, job: Callable[..., T], *arguments: object) -> T:
        async with self._turn:
            await at(asyncio.get_running_loop().time() + 0.001)
            return job(*arguments)

    async def check(self, payload: bytes) -> str | None:
        if self.gate is not None:
            await self.gate()
        self.checked.append(payload)
        return self.chain.check(content_of(payload))


def loop_workshop(trainer: ChainTrainer, note: Note, me: bytes = ME, train_seconds: float = 1.0) -> Workshop:
    """Returns what a node with this trainer trains and applies with."""
    thread = LoopThread(trainer, train_seconds)
    worker = LocalWorker(thread, me, note)
    return Workshop(thread, worker, LoopReplica(worker, trainer))


class LoopPersistence(Persistence):
    """Persistence with a disk that takes the loop's time and may fail."""

    writes: list[list[ev.Record]]
    trouble: list[str]  # why the next writes fail, one after the other
    disk_seconds: float

    async def on_disk(self, job: Callable[..., T], *arguments: object) -> T:
        is_write = job == self.store.write
        await at(asyncio.get_running_loop().time() + self.disk_seconds)
        if is_write:
            self.writes.append(list(arguments[0]))  # type: ignore[call-overload]
            if self.trouble:
                raise DataError(self.trouble.pop(0))
        return job(*arguments)


class ScriptedNode:
    """Replaces the core: records its events and answers as the test says."""

    def __init__(self, run: RunConfig) -> None:
        self.seen = SimpleNamespace(
            me=ME,
            run=run,
            is_in=self.is_in,
            is_welcome=self.is_welcome,
            is_stopping=False,
            is_quarantined=False,
            may_take=lambda said: self.is_in(said.author) and said.round < 4,
        )
        self.deadline: float | None = None
        self.has_started = False
        self.kept_away: set[bytes] = set()
        self.handled: list[tuple[float, ev.Event]] = []
        self.answer: Callable[[ev.Event], list[ev.Effect]] = lambda event: []

    @property
    def events(self) -> list[ev.Event]:
        """Returns the events that the core has heard, except start and stop."""
        return [event for _, event in self.handled if not isinstance(event, ev.Started | ev.StopRequested)]

    def is_in(self, peer: bytes) -> bool:
        return self.has_started and peer in KEYS[:4]

    def is_welcome(self, peer: bytes) -> bool:
        return self.is_in(peer) and peer not in self.kept_away

    def view(self) -> SimpleNamespace:
        return self.seen

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        self.handled.append((now, event))
        self.has_started = True
        return [ev.Stop("the test is over")] if isinstance(event, ev.StopRequested) else self.answer(event)


class RecordedMailboxes:
    """Mailboxes that record the messages to each peer."""

    queued_frames = 0

    def __init__(self, done: list[tuple[Any, ...]]) -> None:
        self.done = done
        self.full: set[bytes] = set()  # peers for whom there is no more room

    def post(self, peer: bytes, message: Any) -> bool:
        if peer not in self.full:
            self.done.append(("post", peer, message))
        return peer not in self.full

    def may_tell(self, peer: bytes) -> bool:
        return peer not in self.full

    def tell_history(self, peer: bytes, history: bytes) -> bool:
        self.done.append(("tell history", peer, history))
        return True

    def ask_history(self, peer: bytes, branch: bytes, number: int) -> None:
        self.done.append(("ask history", peer, branch, number))

    def counters(self) -> dict[str, int]:
        return {}


@dataclass
class DriverBench:
    """A driver with its edges, and helpers to control them."""

    network: Network
    transport: MemoryTransport
    run: RunConfig
    genesis: AgreedState
    store: Store
    node: ScriptedNode
    workshop: Workshop
    edges: Edges
    persistence: LoopPersistence
    driver: Driver
    started: ev.Started
    done: list[tuple[Any, ...]]  # what was said, in order
    handled: list[tuple[ev.Event, Any]]  # events, and the effects that the core answered with
    blamed: list[tuple[bytes, str]] = field(default_factory=list)
    servers: list[BlobNode] = field(default_factory=list)

    @property
    def replica(self) -> LoopReplica:
        assert isinstance(self.workshop.replica, LoopReplica)
        return self.workshop.replica

    @property
    def trainer(self) -> ChainTrainer:
        return self.replica.chain

    async def serve(self, key: bytes, connected: bool = True) -> BlobNode:
        """Makes a peer that serves these blobs."""
        peer = BlobNode(key, self.network.transport(key), TokenBucket(0), TokenBucket(0))
        await peer.server.__aenter__()
        self.servers.append(peer)
        if connected:
            await self.transport.connect(peer.transport.addresses()[0])
            self.edges.connections.linked[key] = None
        return peer

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[str]]:
        task = asyncio.create_task(self.driver.run(self.started))
        try:
            await until(lambda: bool(self.node.handled))
            yield task
            if not task.done():
                self.driver.intake.give(ev.StopRequested())
            await task
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def heard(self, event: ev.Event) -> None:
        """Waits until the core has heard this event."""
        await until(lambda: event in self.node.events)


@asynccontextmanager
async def bench(tmp_path: Path, dataset: TokenDataset | None = None) -> AsyncIterator[DriverBench]:
    network = Network(latency_seconds=0.002)
    transport = network.transport(ME)
    data = a_dataset(tmp_path / "data") if dataset is None else dataset
    run = run_of().sealed(
        manifest=manifest_digest(data.manifest_bytes()),
        initial_root=root_of(STATE).hex(),
        founders=[key.hex() for key in KEYS[:4]],
    )
    base = genesis(RUN, KEYS[:4], root_of(STATE))
    store = Store(tmp_path / "run", run, base, ME, tmp_path / "key")
    node = ScriptedNode(run)
    node.seen.state = base
    blamed: list[tuple[bytes, str]] = []
    done: list[tuple[Any, ...]] = []
    fetcher = Fetcher(transport, RUN, download=TokenBucket(0), blame=lambda *each: blamed.append(each), rng=Random(0))
    states = SavedStates()
    served_blobs = ServedBlobs(run, store, states, data, fetcher)

    async def speaks(peer: bytes) -> bool:
        return True

    connections = Connections(transport, RUN, speaks, lambda peer: None, lambda peer: None, Random(0))
    mailboxes: Any = RecordedMailboxes(done)
    place = tmp_path / "fetching"
    fetching = Fetching(run, transport, connections, fetcher, data, states, place, lambda *each: blamed.append(each))
    persistence = LoopPersistence(store, states, run.state, 4, run.agreement.history_rounds, needed=lambda: ())
    persistence.writes, persistence.trouble, persistence.disk_seconds = [], [], 0.01
    workshop = loop_workshop(ChainTrainer(), persistence.note)
    free = TokenBucket(0)
    server = Server(transport, RUN, served_blobs.find, upload=free, blame=lambda *each: None, is_admitted=everyone)
    edges = Edges(
        RUN, transport, connections, mailboxes, fetching, persistence, served_blobs, server, free, free,
        node.view(),
    )  # fmt: skip
    publish = transport.publish

    async def published(topic: str, data: bytes) -> None:
        done.append(("publish", data))
        await publish(topic, data)

    transport.publish = published  # type: ignore[method-assign]
    strangers = messages_of_strangers(node.view().is_welcome, transport.range_of)
    replica = workshop.replica
    whom = node.view().is_in, node.view().may_take, strangers
    intake = Intake(DigestSigner(ME), replica, *whom, persistence.put, transport.boundary)
    handled: list[tuple[ev.Event, Any]] = []
    watch = lambda now, *each: handled.append(each)  # noqa: E731
    driver = Driver(node, replica, workshop.worker, intake, edges, watch)  # type: ignore[arg-type]
    started = ev.Started(store.saved(None))
    made = DriverBench(
        network, transport, run, base, store, node, workshop, edges, persistence, driver, started, done, handled, blamed
    )
    try:
        yield made
    finally:
        for server in made.servers:
            await server.server.__aexit__(None, None, None)
        for each in list(network.nodes.values()):
            await each.close()
        workshop.close()
        persistence.close()
        store.close()


def doing(each: DriverBench, *effects: ev.Effect) -> None:
    """Queues effects for the driver, as if the core had returned them."""
    each.driver.effects.add(effects)


def of_kind(each: DriverBench, *kinds: type) -> list[ev.Event]:
    return [event for event in each.node.events if isinstance(event, kinds)]


def a_dataset(directory: Path, data: bytes = DATA, is_whole: bool = True) -> TokenDataset:
    """Makes a data set of bytes, in one piece."""
    stream = Split((piece_digest(data),), len(data))
    tokenizer = TokenizerName(digest="", kind="bytes", vocab_size=256)
    encoded = DatasetIndex(
        held_out=Split((), 0), token_bytes=1, tokenizer=tokenizer, training=stream, version=1
    ).encode()
    made = store_data_manifest(directory, encoded, manifest_digest(encoded))
    if is_whole:
        made.add_piece(bytes.fromhex(piece_digest(data)), data)
    return made


def a_manifest(state: AgreedState, number: int, payloads: Sequence[bytes], **changes: Any) -> RoundManifest:
    """Makes a manifest with the fields that a driver reads."""
    taken = tuple(
        Taken(author, number, number - 1, payload_digest(payload), len(payload), 1, content_name(payload))
        for author, payload in zip(KEYS, payloads, strict=False)
    )
    fields: dict[str, Any] = {"round": number, "taken": taken} | changes
    return msgspec.structs.replace(plain_manifest(state, run_of()), **fields)


def a_message(author: bytes = PEER, number: int = 1) -> bytes:
    bitmaps: dict[str, Any] = dict.fromkeys(("announced", "available", "prevoted", "precommitted"), b"")
    return signed(Hello(author=author, branch=RUN, round=number, view=0, is_silent=False, **bitmaps)).envelope


async def spin(condition: Callable[[], bool]) -> None:
    """Lets other tasks run until a condition holds, without any time passing."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it does not come to be so")
