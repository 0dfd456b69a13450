"""Builds a node from store, trainer, core and edges, and restores what was saved before a restart."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from random import Random, SystemRandom

from p2ptrain.config import NodeConfig, RunConfig
from p2ptrain.core import events as ev
from p2ptrain.core.node import Node
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
from p2ptrain.net.mailbox import Mailboxes, messages_of_strangers
from p2ptrain.net.rate_limit import PeerLimits, TokenBucket
from p2ptrain.net.transport import Transport, TransportError
from p2ptrain.node.driver import Driver
from p2ptrain.node.edges import Edges
from p2ptrain.node.fetching import Fetching
from p2ptrain.node.heirs import forget_saved_before
from p2ptrain.node.home import Home
from p2ptrain.node.intake import Intake
from p2ptrain.node.local_worker import LearnerThread, LocalWorker, Note
from p2ptrain.node.persistence import EventFile, Persistence
from p2ptrain.node.replica_thread import ReplicaThread, Standing
from p2ptrain.node.served_blobs import SavedStates, ServedBlobs
from p2ptrain.node.work import Worker
from p2ptrain.observe.rounds import ROUNDS_KEPT, Recorder
from p2ptrain.observe.schema import RoundRecord
from p2ptrain.ranks.devices import devices_of
from p2ptrain.ranks.group import RankGroup, RankWork
from p2ptrain.ranks.machines import token_in
from p2ptrain.region.world import WorldLink
from p2ptrain.replay import FORMAT, REAL, Header, NotingSigner
from p2ptrain.store.diary import ENTRIES_MAX
from p2ptrain.store.store import EVENTS_NAME, Store, beginning
from p2ptrain.train.learner import MakeElsewhere
from p2ptrain.train.own_data import OwnData

TRUST_NAME = "trust"  # the file in the run's directory with the head that this node was told to trust

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


def own_worker(launch: Launch) -> tuple[MakeWorker, Attach]:
    """Returns how to make the worker of a node that takes its steps itself; in a region it follows the world's run."""
    if not launch.run.world.run:
        return LocalWorker, lambda edges: nullcontext()
    world = WorldLink(launch.run, launch.config, launch.identity.key)
    return world.worker, world.attached


async def open_workshop(launch: Launch, note: Note, make: MakeWorker = LocalWorker) -> Workshop:
    """Makes a learner, a replica with its weights, and the worker that `make` returns; `note` writes the diary."""
    run, device, base = launch.run, launch.config.device, launch.base
    ranks = _ranks_of(launch)
    thread = await LearnerThread.open(run, device, launch.data, own=launch.own, base=base, elsewhere=ranks)
    worker = make(thread, launch.identity.key, note)
    return Workshop(thread, worker, ReplicaThread(worker, thread.threads))


def _ranks_of(launch: Launch) -> MakeElsewhere | None:
    """Returns how to start the processes that take the steps; None if the node itself has the one device."""
    run, config = launch.run, launch.config
    devices, device = devices_of(run, config), config.device
    if len(devices) == device.nnodes == 1 and devices != ["mps"] and not device.is_sharded:
        return None
    data, base = launch.own.dataset if launch.own else launch.data, launch.base.path if launch.base else None
    token = token_in(launch.home.directory, device) if device.nnodes > 1 else b""
    return partial(RankGroup, RankWork(run, device, data, base, config.plugins.allow, token), devices)


async def assemble(
    stack: AsyncExitStack, launch: Launch, opened: OpenWorkshop, hears: Sequence[Callable[[RoundRecord], None]]
) -> tuple[Driver, Recorder, ev.Started]:
    """Builds a node, what records its rounds for `hears`, and the event that it starts with; `stack` closes it all."""
    run, run_id, config = launch.run, launch.run.id, launch.config
    me = launch.identity.key
    store = _open_store(stack, launch)
    signer = NotingSigner(RunSigner(launch.identity, run_id))
    seed = secrets.token_hex(16)
    node = Node(run, run_id, me, signer, Random(seed))
    view, states = node.view(), SavedStates()
    kept = min(run.agreement.history_rounds, ENTRIES_MAX // 2)  # the diary keeps the newer half of its trainings
    every = min(config.storage.checkpoint_every_rounds, max(1, kept // 2))
    before = partial(forget_saved_before, launch.home, run, store)
    persistence = Persistence(store, states, run.state, every, kept, lambda: view.payloads, before)
    stack.push_async_callback(asyncio.to_thread, persistence.close)  # in a thread, so that signals are still handled
    workshop = await opened(launch, persistence.note)
    stack.callback(workshop.close)
    replica, worker = workshop.replica, workshop.worker
    strangers = messages_of_strangers(view.is_welcome, launch.transport.range_of)
    intake = Intake(signer, replica, view.is_in, view.may_take, strangers, persistence.put, launch.transport.boundary)
    edges = await _connect(launch, store, states, persistence, intake, view, strangers)
    header = Header(FORMAT, run.canonical().decode(), run_id, me, seed, REAL)
    events = EventFile(store.directory / EVENTS_NAME, signer, header, lambda: view.state.round)
    stack.callback(events.close)
    trust = trusted_head(store, launch.trust)
    saved = await _restore(store, workshop, persistence, launch.state)
    started = ev.Started(
        saved, store.is_forgetful, launch.claim, trust,
        audit_share=float(config.audit.share), can_overlap=worker.can_overlap,
    )  # fmt: skip
    past = await persistence.on_disk(store.records.past, ROUNDS_KEPT)
    records = Recorder(node, worker, persistence, launch.transport.counters, past, hears=hears)

    def note(now: float, event: ev.Event, effects: Sequence[ev.Effect] | None) -> None:
        events.note(now, event, effects)
        if effects is not None:  # the core has not crashed
            records.note(now, event)

    return Driver(node, replica, worker, intake, edges, note), records, started


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
        transport, run_id, intake.hear_mail,
        malformed=intake.blame, history=intake.history_came, no_history=intake.history_failed,
        upload=upload, download=download, is_admitted=view.is_welcome, strangers=strangers,
    )  # fmt: skip

    def peer_lost(peer: bytes) -> None:
        mailboxes.forget(peer)
        intake.give(ev.PeerLost(peer))

    connections = Connections(
        transport, run_id, mailboxes.is_spoken_by,
        lambda peer: intake.give(ev.PeerSeen(peer, transport.range_of(peer))), peer_lost,
        SystemRandom(), roster=lambda: view.state.members if view.has_started else (),
    )  # fmt: skip
    remembered = store.records.addresses()
    for address in remembered:
        _add(connections, address, Origin.REMEMBERED)
    for address in config.network.bootstrap:
        _add(connections, address, Origin.USER)
    if config.network.bootstrap and not remembered:  # so that the next start can identify the run by them
        await persistence.remember(config.network.bootstrap)
    fetcher = Fetcher(transport, run_id, download=download, blame=intake.blame)
    follows = launch.home.ancestors(run)
    served_blobs = ServedBlobs(run, store, states, launch.data, fetcher, launch.base, follows)
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
    directory, key_file = launch.home.of_run(run_id), launch.home.identity_file
    kept = launch.config.storage.checkpoints_kept
    store = Store(directory, run, beginning(directory, run), launch.identity.key, key_file, checkpoints_kept=kept)
    stack.callback(store.close)
    store.mismatches.refuse()
    store.checkpoints.prune(kept, store.journal)  # a full disk may need it, and fewer are wanted than before
    return store


@_for_the_owner()
def trusted_head(store: Store, given: bytes) -> bytes:
    """Returns the head that the core has to wait for: the one given now, or given before a history was adopted.

    It is stored beside the log, so that a node killed while waiting still requires it at the next start. Once a history
    that contains it has been adopted, it is not required any more."""
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


async def _restore(store: Store, workshop: Workshop, persistence: Persistence, state: bytes) -> ev.Saved:
    """Restores replica and learner from the disk; the core then brings them up to date."""
    thread, replica, worker = workshop.thread, workshop.replica, workshop.worker
    with _for_the_owner():
        checkpoint = await asyncio.to_thread(store.newest_checkpoint)
    if checkpoint is not None:
        await thread.run(thread.learner.load, checkpoint.trainer_path)
        replica.begin(Standing(checkpoint.round, checkpoint.branch, checkpoint.head, checkpoint.root))
        # The trainings since are repeated, if all were recorded, and their numbers go on.
        trainings = store.diary.after(checkpoint.stamp.trained)
        last = max([checkpoint.stamp.trained, *(each.number for each in store.diary.entries[-1:])])
        if not trainings:
            store.diary.forget(last)
        worker.repeat_all(trainings, last)
        for each in store.checkpoints.present():
            await asyncio.to_thread(persistence.offer, each)
        log.info("continuing from the checkpoint of round %d", checkpoint.round)
        return store.saved(checkpoint)
    if state:
        genesis = store.genesis
        await replica.adopt(genesis.round, genesis.root, [state])
        await persistence.save_first(worker, Standing(genesis.round, genesis.branch, genesis.head, genesis.root))
        return store.saved(None)
    return store.journal.saved_at(store.genesis.round, b"")
