"""Putting a daemon together: store, trainer, core and edges, and bringing back what an earlier life has saved."""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import AsyncExitStack
from dataclasses import dataclass
from random import Random, SystemRandom

from p2ptrain.config import NodeConfig, RunConfig
from p2ptrain.core import events as ev
from p2ptrain.core.node import Node
from p2ptrain.core.state import genesis
from p2ptrain.daemon.daemon import Daemon
from p2ptrain.daemon.device import Device
from p2ptrain.daemon.driver import Driver
from p2ptrain.daemon.edges import Edges
from p2ptrain.daemon.events import EventFile
from p2ptrain.daemon.fetching import Fetching
from p2ptrain.daemon.keeping import Keeping
from p2ptrain.daemon.library import Library
from p2ptrain.daemon.places import identity_file, run_directory
from p2ptrain.errors import ConfigError
from p2ptrain.identity import Identity, RunSigner
from p2ptrain.learn.data import TokenDataset
from p2ptrain.net import inquiry
from p2ptrain.net.bulk import Server
from p2ptrain.net.connections import Connections, Origin
from p2ptrain.net.fetch import Fetcher
from p2ptrain.net.limits import TokenBucket
from p2ptrain.net.line import Lines
from p2ptrain.net.transport import Transport, TransportError
from p2ptrain.replay import FORMAT, REAL, Header, NotingSigner
from p2ptrain.store.checkpoints import Checkpoint
from p2ptrain.store.store import Store

log = logging.getLogger("p2ptrain.daemon")


@dataclass(slots=True)
class Launch:
    """What a daemon begins with."""

    run: RunConfig
    config: NodeConfig
    identity: Identity
    transport: Transport
    data: TokenDataset
    state: bytes = b""  # the first weights, of whoever begins the run
    ticket: bytes = b""

    @property
    def run_id(self) -> bytes:
        return bytes.fromhex(self.run.run_id)


async def assemble(stack: AsyncExitStack, launch: Launch, device: Device | None = None) -> tuple[Daemon, ev.Started]:
    """A daemon that is about to start, and the event that it starts with; `stack` takes it apart again.

    It trains with `device` if it is given one, and then leaves closing it to who did.
    """
    run, run_id, config, transport = launch.run, launch.run_id, launch.config, launch.transport
    me = launch.identity.key
    store = _open_store(stack, launch)
    if device is None:
        device = await Device.open(run, config.device, launch.data)
        stack.callback(device.close)
    signer, rng = NotingSigner(RunSigner(launch.identity, run_id)), SystemRandom()
    seed = secrets.token_hex(16)
    node = Node(run, run_id, me, signer, Random(seed))
    driver = Driver(node, signer, device)
    limits = config.limits
    upload, download = (
        TokenBucket(rate) for rate in (limits.upload_bytes_per_second, limits.download_bytes_per_second)
    )
    lines = Lines(
        transport,
        run_id,
        driver.hear_line,
        malformed=driver.blame,
        history=driver.history_came,
        no_history=driver.history_failed,
        upload=upload,
    )
    fetcher = Fetcher(transport, run_id, download=download, blame=driver.blame)
    library = Library(run, store, launch.data, fetcher)
    server = Server(transport, run_id, library, upload=upload, blame=driver.blame)
    connections = Connections(
        transport,
        run_id,
        lines.is_spoken_by,
        driver.peer_seen,
        driver.peer_lost,
        rng,
        roster=lambda: node.line.state.members if driver.has_begun.is_set() else (),
    )
    if config.network.bootstrap and not store.peers():  # by which this run is known again, if they are away next time
        store.remember_peers(config.network.bootstrap)
    for address in store.peers():
        _add(connections, address, Origin.REMEMBERED)
    for address in config.network.bootstrap:
        _add(connections, address, Origin.USER)
    fetching = Fetching(run, transport, connections, fetcher, launch.data, library, store.directory / "fetching")
    every = min(config.storage.checkpoint_every_rounds, max(1, run.agreement.history_rounds // 2))
    keeping = Keeping(store, library, every, needed=lambda: node.parts.payloads.held)
    stack.callback(keeping.close)
    driver.edges = edges = Edges(run_id, transport, connections, lines, fetching, keeping, library)
    header = Header(FORMAT, run.canonical().decode(), run_id, me, seed, REAL)
    events = EventFile(store.directory / "events", signer, header)
    stack.callback(events.close)
    driver.on_event = events.note
    daemon = Daemon(run, driver, edges)
    started = ev.Started(await _restore(store, device, keeping, launch.state), store.is_forgetful, launch.ticket)
    await stack.enter_async_context(lines)
    await stack.enter_async_context(server)
    await inquiry.serve(transport, daemon.ask_by_peer)
    return daemon, started


def _open_store(stack: AsyncExitStack, launch: Launch) -> Store:
    """What the node has on its disk."""
    run, run_id = launch.run, launch.run_id
    founders = tuple(sorted(bytes.fromhex(key) for key in run.admission.founders))
    beginning = genesis(run_id, founders, bytes.fromhex(run.state.initial_root))
    directory, key_file = run_directory(launch.config, run_id), identity_file(launch.config)
    kept = launch.config.storage.checkpoints_kept
    store = Store(directory, run, beginning, launch.identity.key, key_file, checkpoints_kept=kept)
    stack.callback(store.close)
    return store


def _add(connections: Connections, address: str, origin: Origin) -> None:
    try:
        connections.add(address, origin)
    except TransportError as error:
        if origin is Origin.USER:
            raise ConfigError(str(error), key="--bootstrap", fix="Check that it was copied whole") from error


def _repeat_since(checkpoint: Checkpoint, store: Store, device: Device) -> None:
    """Have the trainings that the checkpoint lacks repeated, if all of them were noted; and count on behind them."""
    trainings, last = store.diary.after(checkpoint.stamp.trained), checkpoint.stamp.trained
    if store.diary.entries:
        last = max(last, store.diary.entries[-1].number)
    if not trainings:
        store.diary.forget(last)
    device.repeat(trainings)
    device.trained = last


async def _restore(store: Store, device: Device, keeping: Keeping, state: bytes) -> ev.Saved:
    """Bring the trainer to where the disk says it was; the core brings it to the present."""
    checkpoint = await asyncio.to_thread(store.newest_checkpoint)
    if checkpoint is not None:
        await device.run(device.trainer.load, checkpoint.trainer_path)
        _repeat_since(checkpoint, store, device)
        for each in store.checkpoints.present():
            await asyncio.to_thread(keeping.offer, each)
        log.info("going on from the checkpoint of round %d", checkpoint.round)
        return store.saved(checkpoint)
    if state:
        root = store.genesis.root
        await device.run(device.trainer.adopt, 0, state)
        await device.run(keeping.checkpoint_first, device, state, root)
        return store.saved(None)
    return store.journal.saved_at(store.genesis.round, b"")
