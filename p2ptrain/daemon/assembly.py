"""Builds a node from store, trainer, core and edges, and restores what was saved before a restart."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from random import Random, SystemRandom

from p2ptrain.config import NodeConfig, RunConfig
from p2ptrain.core import events as ev
from p2ptrain.core.node import Node
from p2ptrain.core.state import genesis
from p2ptrain.core.trust import is_on
from p2ptrain.core.view import NodeView
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.errors import ConfigError, DataError, UnusableError
from p2ptrain.files import DiskError, read, write_atomically
from p2ptrain.identity import Identity, RunSigner
from p2ptrain.models.adapters import FrozenBase
from p2ptrain.net.address_book import Origin
from p2ptrain.net.blobs.fetch import Fetcher
from p2ptrain.net.blobs.server import Server
from p2ptrain.net.connections import Connections
from p2ptrain.net.mailbox import Mailboxes
from p2ptrain.net.rate_limit import PeerLimits, TokenBucket
from p2ptrain.net.transport import Transport, TransportError
from p2ptrain.node.driver import Driver
from p2ptrain.node.edges import Edges
from p2ptrain.node.event_log import EventFile
from p2ptrain.node.fetching import Fetching
from p2ptrain.node.home import Home
from p2ptrain.node.intake import Intake
from p2ptrain.node.local_worker import LearnerThread, LocalWorker, Note
from p2ptrain.node.persistence import Persistence
from p2ptrain.node.replica_thread import ReplicaThread, Standing
from p2ptrain.node.served_blobs import SavedStates, ServedBlobs
from p2ptrain.node.strangers import messages_of_strangers
from p2ptrain.node.work import Worker
from p2ptrain.region.world import WorldLink
from p2ptrain.replay import FORMAT, REAL, Header, NotingSigner
from p2ptrain.store.checkpoints import Checkpoint
from p2ptrain.store.store import Store
from p2ptrain.train.own_data import OwnData

TRUST_NAME = "trust"  # the file in the run's directory with the head that this node was told to trust

Watch = Callable[[float, ev.Event], None]

log = logging.getLogger("p2ptrain.node")


@dataclass(slots=True)
class Launch:
    """The inputs that a node is built from."""

    run: RunConfig
    home: Home
    identity: Identity
    transport: Transport
    data: TokenDataset  # what all nodes of the run share
    base: FrozenBase | None = None  # the frozen weights, if adapters train
    state: bytes = b""  # the first weights, on the node that starts the run
    claim: bytes = b""
    trust: bytes = b""  # a head that a history must contain to be adopted
    own: OwnData | None = None  # what this node alone trains on; nothing but its trainer may have it

    @property
    def config(self) -> NodeConfig:
        return self.home.config


@dataclass(frozen=True, slots=True)
class Workshop:
    """Where a node trains and applies."""

    thread: LearnerThread
    worker: Worker
    replica: ReplicaThread

    def close(self) -> None:
        self.worker.close()
        self.replica.close()


MakeWorker = Callable[[LearnerThread, bytes, Note], Worker]  # of this node's key
OpenWorkshop = Callable[[Launch, Note], Awaitable[Workshop]]
Attach = Callable[[Edges], AbstractAsyncContextManager[None]]  # a worker to the network, while the node lives


@dataclass(slots=True)
class Assembled:
    """A node about to start, before its driver, because the driver's observer is built from it first."""

    launch: Launch
    node: Node
    replica: ReplicaThread
    worker: Worker
    intake: Intake
    edges: Edges
    events: EventFile
    started: ev.Started  # the event that it starts with

    def drive(self, watch: Watch) -> Driver:
        """Builds the driver; `watch` is called for each event that the core has handled without crashing."""

        def note(now: float, event: ev.Event, effects: Sequence[ev.Effect] | None) -> None:
            self.events.note(now, event, effects)
            if effects is not None:
                watch(now, event)

        return Driver(self.node, self.replica, self.worker, self.intake, self.edges, note)


def own_worker(launch: Launch) -> tuple[MakeWorker, Attach]:
    """Returns how to make the worker of a node that takes its steps itself; in a region it follows the world's run."""
    if not launch.run.world.run:
        return LocalWorker, lambda edges: nullcontext()
    world = WorldLink(launch.run, launch.config, launch.identity.key)
    return world.worker, world.attached


async def open_workshop(launch: Launch, note: Note, make: MakeWorker = LocalWorker) -> Workshop:
    """Makes a learner, a replica with its weights, and the worker that `make` returns; `note` writes the diary."""
    thread = await LearnerThread.open(launch.run, launch.config.device, launch.data, own=launch.own, base=launch.base)
    worker = make(thread, launch.identity.key, note)
    return Workshop(thread, worker, ReplicaThread(worker, thread.threads))


async def assemble(stack: AsyncExitStack, launch: Launch, opened: OpenWorkshop = open_workshop) -> Assembled:
    """Builds a node; closing `stack` closes all of its parts."""
    run, run_id, config = launch.run, launch.run.id, launch.config
    me = launch.identity.key
    store = _open_store(stack, launch)
    signer = NotingSigner(RunSigner(launch.identity, run_id))
    seed = secrets.token_hex(16)
    node = Node(run, run_id, me, signer, Random(seed))
    view, states = node.view(), SavedStates()
    every = min(config.storage.checkpoint_every_rounds, max(1, run.agreement.history_rounds // 2))
    persistence = Persistence(store, states, every, run.agreement.history_rounds, needed=lambda: view.payloads)
    stack.push_async_callback(asyncio.to_thread, persistence.close)  # in a thread, so that signals are still handled
    workshop = await opened(launch, persistence.note)
    stack.callback(workshop.close)
    replica, worker = workshop.replica, workshop.worker
    strangers = messages_of_strangers(view.is_welcome, launch.transport.range_of)
    intake = Intake(signer, replica, view.is_in, strangers, persistence.put, launch.transport.boundary)
    edges = await _connect(launch, store, states, persistence, intake, view, strangers)
    header = Header(FORMAT, run.canonical().decode(), run_id, me, seed, REAL)
    events = EventFile(store.directory / "events", signer, header, lambda: view.state.round)
    stack.callback(events.close)
    trust = trusted_head(store, launch.trust)
    saved = await _restore(store, workshop, persistence, launch.state)
    started = ev.Started(
        saved,
        store.is_forgetful,
        launch.claim,
        trust,
        audit_share=float(config.audit.share),
        can_overlap=worker.can_overlap,
    )
    return Assembled(launch, node, replica, worker, intake, edges, events, started)


async def _connect(
    launch: Launch,
    store: Store,
    states: SavedStates,
    persistence: Persistence,
    intake: Intake,
    view: NodeView,
    strangers: PeerLimits,
) -> Edges:
    """Builds the network's side, which feeds the intake."""
    run, run_id, config, transport = launch.run, launch.run.id, launch.config, launch.transport
    transport.prefer(view.is_in)
    limits = config.limits
    upload, download = (
        TokenBucket(rate) for rate in (limits.upload_bytes_per_second, limits.download_bytes_per_second)
    )
    mailboxes = Mailboxes(
        transport,
        run_id,
        intake.hear_mail,
        malformed=intake.blame,
        history=intake.history_came,
        no_history=intake.history_failed,
        upload=upload,
        download=download,
        is_admitted=view.is_welcome,
        strangers=strangers,
    )

    def peer_lost(peer: bytes) -> None:
        mailboxes.forget(peer)
        intake.give(ev.PeerLost(peer))

    connections = Connections(
        transport,
        run_id,
        mailboxes.is_spoken_by,
        lambda peer: intake.give(ev.PeerSeen(peer)),
        peer_lost,
        SystemRandom(),
        roster=lambda: view.state.members if view.has_started else (),
    )
    remembered = store.records.addresses()
    for address in remembered:
        _add(connections, address, Origin.REMEMBERED)
    for address in config.network.bootstrap:
        _add(connections, address, Origin.USER)
    if config.network.bootstrap and not remembered:  # so that the next start can identify the run by them
        await persistence.remember(config.network.bootstrap)
    fetcher = Fetcher(transport, run_id, download=download, blame=intake.blame)
    served_blobs = ServedBlobs(run, store, states, launch.data, fetcher, launch.base)
    server = Server(transport, run_id, served_blobs.find, upload=upload, blame=intake.blame, is_admitted=view.is_in)
    place = store.directory / "fetching"
    fetching = Fetching(run, transport, connections, fetcher, launch.data, states, place, intake.blame)
    return Edges(
        run_id, transport, connections, mailboxes, fetching, persistence, served_blobs, server, upload, download, view
    )


@contextmanager
def _for_the_owner() -> Iterator[None]:
    """Turns damage in the node's own files into an UnusableError: unlike a disk error, it survives a restart."""
    try:
        yield
    except DiskError:
        raise
    except DataError as error:
        raise UnusableError(str(error)) from error


@_for_the_owner()
def _open_store(stack: AsyncExitStack, launch: Launch) -> Store:
    """Opens the node's store."""
    run, run_id = launch.run, launch.run.id
    founders = tuple(sorted(bytes.fromhex(key) for key in run.admission.founders))
    beginning = genesis(run_id, founders, bytes.fromhex(run.state.initial_root))
    directory, key_file = launch.home.of_run(run_id), launch.home.identity_file
    kept = launch.config.storage.checkpoints_kept
    store = Store(directory, run, beginning, launch.identity.key, key_file, checkpoints_kept=kept)
    stack.callback(store.close)
    store.mismatches.refuse()
    return store


@_for_the_owner()
def trusted_head(store: Store, given: bytes) -> bytes:
    """Returns the head that the core has to wait for: the one given now, or given before a history was adopted.

    It is stored beside the log, so that a node killed while waiting still requires it at the next start. Once a history
    that contains it has been adopted, it is not required any more.
    """
    path, journal = store.directory / TRUST_NAME, store.journal
    content = read(path)
    if content is not None and not re.fullmatch(rb"[0-9a-f]{64}\n", content):
        fix = "Remove it, and give the head again with --trust"
        raise DataError(f"{path}: damaged: it does not hold the head that this node was told to trust. {fix}")
    noted = bytes.fromhex(content.decode()) if content is not None else b""
    wanted = given or noted
    is_new = journal.state.digest == store.genesis.digest
    if wanted != noted and not is_new:
        changes = journal.trunk.changes if journal.trunk is not None else ()
        if not is_on(wanted, journal.base, (*changes, *(each.step for each in journal.history))):
            fix = f"If you are sure of it, move {store.directory} away and join again; otherwise omit the option"
            what = f"the history that this node has adopted and kept does not contain the head {wanted.hex()}"
            raise ConfigError(what, key="--trust", fix=fix)
    if wanted != noted:
        write_atomically(path, wanted.hex().encode() + b"\n")
    return wanted if is_new else b""


def _add(connections: Connections, address: str, origin: Origin) -> None:
    try:
        connections.add(address, origin)
    except TransportError as error:
        if origin is Origin.USER:
            raise ConfigError(str(error), key="--bootstrap", fix="Check that it was copied completely") from error


def _repeat_since(checkpoint: Checkpoint, store: Store, worker: Worker) -> None:
    """Schedules the trainings after the checkpoint to be repeated, if all were recorded; continues their numbers."""
    trainings, last = store.diary.after(checkpoint.stamp.trained), checkpoint.stamp.trained
    if store.diary.entries:
        last = max(last, store.diary.entries[-1].number)
    if not trainings:
        store.diary.forget(last)
    worker.repeat_all(trainings, last)


async def _restore(store: Store, workshop: Workshop, persistence: Persistence, state: bytes) -> ev.Saved:
    """Restores replica and learner from the disk; the core then brings them up to date."""
    thread, replica, worker = workshop.thread, workshop.replica, workshop.worker
    with _for_the_owner():
        checkpoint = await asyncio.to_thread(store.newest_checkpoint)
    if checkpoint is not None:
        await thread.run(thread.learner.load, checkpoint.trainer_path)
        replica.begin(Standing(checkpoint.round, checkpoint.branch, checkpoint.head, checkpoint.root))
        _repeat_since(checkpoint, store, worker)
        for each in store.checkpoints.present():
            await asyncio.to_thread(persistence.offer, each)
        log.info("continuing from the checkpoint of round %d", checkpoint.round)
        return store.saved(checkpoint)
    if state:
        genesis = store.genesis
        await replica.adopt(0, genesis.root, [state])
        await persistence.save_first(worker, Standing(0, genesis.branch, genesis.head, genesis.root))
        return store.saved(None)
    return store.journal.saved_at(store.genesis.round, b"")
