"""Heirs: the runs that follow runs of this disk (core/succession.py), and the way of a node from one to the next.

A run's directory has `origin`, how the run before ended, if it follows one, and `successor`, the id of the run that
follows, once this node has gone over. What goes along is written before that, so a node that is killed in between does
it again at its next start. A node that was away asks the nodes of the successor, which say what it follows: it goes
over with what the members have certified, whoever hands it on.

What a run has saved goes once the next one has a certified state of its own: until then a node that is killed may have
to begin it again. Of the run before the newest state stays, and the one that the successor began with, for an owner who
wants to look at them or to begin another run from there, and the payloads from there on; log and origins stay."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from p2ptrain.config import RunConfig
from p2ptrain.core import wire
from p2ptrain.core.origin import ORIGIN_BYTES_MAX, Descent, decode_origin, first_state, follows, succeed
from p2ptrain.core.state import AgreedState
from p2ptrain.digest import leaves_of
from p2ptrain.errors import DataError, RemoteProtocolError
from p2ptrain.files import forget, make_directory, read, write_atomically
from p2ptrain.identity import Identity, RunVerifier
from p2ptrain.net.blobs.blob import BlobName
from p2ptrain.net.blobs.fetch import Fetcher
from p2ptrain.net.blobs.server import FetchError
from p2ptrain.net.rate_limit import TokenBucket
from p2ptrain.net.transport import Transport, TransportError
from p2ptrain.node.fetching import ignore
from p2ptrain.node.home import GENERATIONS_MAX, SUCCESSOR_NAME, Home
from p2ptrain.node.saved import LOG_NAME
from p2ptrain.store.checkpoints import STATE_NAME, Checkpoint, Checkpoints
from p2ptrain.store.log import read_journal
from p2ptrain.store.payloads import PayloadStore
from p2ptrain.store.records import remembered_peers
from p2ptrain.store.store import CHECKPOINTS_NAME, EVENTS_NAME, ORIGIN_NAME, PAYLOADS_NAME, Store, origin_in
from p2ptrain.train.saved_state import as_of_another_run

SEARCHED_BYTES_MAX = 64 * 2**20  # of origins in one search: who makes runs makes as many as it likes

log = logging.getLogger("p2ptrain.node")


def go_over(home: Home, origins: Sequence[Descent], identity: Identity) -> RunConfig:
    """Makes this node's part of the run that follows, from that of the run before, and returns its config. Of several
    runs, one after the other, it takes part in the last."""
    *_, origin = origins
    run, first = succeed(origin)
    before = RunConfig.from_canonical(origin.config)
    keep_origin(home, run, origin)
    with Store(home.of_run(run.id), run, first, identity.key, home.identity_file) as store:
        if not store.checkpoints.present() and (found := _checkpoint(before, run, home)) is not None:
            _copy(found, store.checkpoints, run, first)
        if not store.records.addresses():
            store.records.remember(remembered_peers(home.of_run(RunConfig.from_canonical(origins[0].config).id)))
    for each in origins:
        directory = home.of_run(RunConfig.from_canonical(each.config).id)
        make_directory(directory)
        write_atomically(directory / SUCCESSOR_NAME, succeed(each)[0].run_id.encode() + b"\n")
    return run


def _checkpoint(before: RunConfig, run: RunConfig, home: Home) -> Checkpoint | None:
    """Returns this node's state with the weights that the successor begins with, if it is saved."""
    kept = Checkpoints(home.of_run(before.id) / CHECKPOINTS_NAME, before.id)
    root = bytes.fromhex(run.state.initial_root)
    for each in reversed(kept.present()):  # a root that covers only a part is another for the same weights
        is_it = each.root == root or bool(leaves_of(read(each.path / STATE_NAME) or b"", root))
        if is_it and kept.verify(each) is None:
            return each
    return None


def _copy(found: Checkpoint, target: Checkpoints, run: RunConfig, first: AgreedState) -> None:
    state = (found.path / STATE_NAME).read_bytes()
    save = as_of_another_run(found.trainer_path, run, first.round).write
    leaves = leaves_of(state, first.root)
    target.write(first.round, first.branch, first.head, first.root, 0, save, state, leaves)


def forget_saved_before(home: Home, run: RunConfig, store: Store) -> bool:
    """Removes what the runs before have saved, once this one has a certified state of its own; returns whether."""
    if not (before := home.ancestors(run)):
        return True
    own = [each for each in store.checkpoints.present() if each.round > store.genesis.round]
    if not any(each.judged_by(store.journal).is_certified for each in own):
        return False
    for place, run_id in enumerate(before):
        directory = home.of_run(run_id)
        if home.heir_of(run_id) != run.id:
            continue  # this node was not there, or has taken another way
        try:
            for name in (EVENTS_NAME, *((PAYLOADS_NAME, CHECKPOINTS_NAME) if place else ())):
                forget(directory / name)
            if not place and (journal := read_journal(directory / LOG_NAME)) is not None:
                kept = Checkpoints(directory / CHECKPOINTS_NAME, run_id)
                kept.prune(1, journal)
                first = min((each.round for each in kept.present()), default=0)
                PayloadStore(directory / PAYLOADS_NAME).prune(journal.payloads(first))
        except DataError as error:
            log.warning("what the run before has saved stays: %s", error)
    return True


# -- From peers -------------------------------------------------------------------------------------


async def fetch_origin(fetcher: Fetcher, run: RunConfig, sources: Sequence[bytes]) -> Descent:
    """Fetches where a run comes from, which its id proves."""

    def check(data: bytes) -> bool:
        try:
            first_state(run, decode_origin(data))
        except RemoteProtocolError:
            return False
        return True

    sink = await fetcher.fetch(BlobName("origin", run.id), ORIGIN_BYTES_MAX, sources, check=check, failed=ignore)
    return await asyncio.to_thread(decode_origin, bytes(sink.data()))  # it has up to 16 MB


async def find_heir(
    transport: Transport, home: Home, run_id: bytes, heir: RunConfig, sources: Sequence[bytes]
) -> list[Descent]:
    """Returns how the runs from one on to its heir have ended, the earliest first; empty if their members have not
    certified each next one, or peers do not show it."""
    rate = TokenBucket(home.config.limits.download_bytes_per_second)
    fetcher, at = Fetcher(transport, heir.id, download=rate, blame=ignore), heir
    found: list[Descent] = []
    try:
        with transport.boundary.guard("where a run comes from"):
            size = 0
            while at.id != run_id and at.predecessor.run and len(found) < GENERATIONS_MAX and size < SEARCHED_BYTES_MAX:
                found.insert(0, await fetch_origin(fetcher, at, sources))
                size += len(wire.encode(found[0]))
                at = RunConfig.from_canonical(found[0].config)
            if at.id != run_id:
                return []
            known = origin_in(home.of_run(at.id))
            if at.predecessor.run and known is None:
                known = await fetch_origin(fetcher, at, sources)
            await asyncio.to_thread(_check_certificates, found, first_state(at, known))
    except (FetchError, TransportError, DataError, RemoteProtocolError) as error:
        log.warning("run %s, said to follow %s, is not proved to: %s", heir.run_id[:16], run_id.hex()[:16], error)
        return []
    return found


def _check_certificates(origins: Sequence[Descent], first: AgreedState) -> None:
    for origin in origins:
        run = RunConfig.from_canonical(origin.config)
        follows(origin, first, RunVerifier(run.id))
        _, first = succeed(origin)


def keep_origin(home: Home, run: RunConfig, origin: Descent) -> None:
    """Stores where a run comes from that this node joins."""
    directory = home.of_run(run.id)
    make_directory(directory)
    if read(directory / ORIGIN_NAME) is None:
        write_atomically(directory / ORIGIN_NAME, wire.encode(origin))
