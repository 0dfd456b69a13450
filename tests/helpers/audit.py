"""A history for tests of the audit, from real nodes with real trainers in one process, and ways to damage it.

Whoever spoils a log here writes it anew with its digests right, as somebody would who wants to deceive and not only a
disk that fails: what is left to find him by are the signatures and the arithmetic.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from p2ptrain.config import DeviceConfig, NodeConfig, RunConfig
from p2ptrain.config.node import NetworkConfig, StorageConfig
from p2ptrain.core import events as ev
from p2ptrain.core.history import Entry, Step
from p2ptrain.core.journal import Journal
from p2ptrain.core.messages import Ballot, Certificate, Vote, signed_bytes
from p2ptrain.core.roster import bitmap
from p2ptrain.core.state import AgreedState
from p2ptrain.daemon.assembly import Launch, open_workshop
from p2ptrain.daemon.life import Daemon, save_last
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.identity import Identity
from p2ptrain.net.connections import topic_of
from p2ptrain.node.home import Home
from p2ptrain.node.local_worker import LocalWorker
from p2ptrain.node.work import Done, Task
from p2ptrain.store.log import read_own
from p2ptrain.store.segment import Snapshot, decoded, frame, frames_of, header
from p2ptrain.train.begin import begin
from tests.helpers.memory_network import Network
from tests.helpers.net import SkippingLoop, at, until
from tests.helpers.trainer import TINY

FOUNDERS = 4
ROUNDS = 11  # of the founders, before one comes; with a checkpoint in every third
SINCE = 8  # rounds after it got its seat
KEPT = 4  # rounds, of a log that has forgotten the rest
IDENTITIES = [Identity(bytes([number + 1]) * 32) for number in range(FOUNDERS + 1)]
BY_KEY = {identity.key: identity for identity in IDENTITIES}


def a_run(**changes: Any) -> RunConfig:
    raw: dict[str, Any] = {
        "name": "audited",
        "model": TINY | {"layers": 1},
        "recipe": {"name": "distro", "k": 8, "sequences_per_pass": 1, "learning_rate": "0.002"},
        "agreement": {"inline_bytes_max": 0, "stall_seconds": 600, "staleness_rounds_max": 1},
        "admission": {"probation_rounds": 1},
    }
    return RunConfig.model_validate(raw | changes)


class PacedWorker(LocalWorker):
    """The real worker, slowed down: otherwise rounds would pass before a newcomer can speak."""

    async def train(self, task: Task) -> Done:
        await at(asyncio.get_running_loop().time() + 1.0)
        return await super().train(task)


async def _live(root: Path, run: RunConfig, state: bytes, data: Path, ready: Callable[[list[Any]], bool]) -> None:
    """Runs four founders and a newcomer until `ready` accepts their newest rounds."""
    network = Network(seed=1)
    daemons: list[Any] = []
    async with AsyncExitStack() as stack:
        tasks: list[asyncio.Task[Any]] = []

        async def join(number: int) -> None:
            me = IDENTITIES[number]
            transport = network.transport(me.key)
            stack.push_async_callback(transport.close)
            bootstrap = () if number == 0 else (network.address(IDENTITIES[0].key),)
            config = NodeConfig(
                network=NetworkConfig(bootstrap=bootstrap),
                storage=StorageConfig(directory=str(root / f"node{number}"), checkpoint_every_rounds=3),
                device=DeviceConfig(name="cpu", threads=1, autocast="off"),
            )
            dataset = TokenDataset.open(data, run.data.manifest)
            first = state if number < FOUNDERS else b""
            opened = partial(open_workshop, make=PacedWorker)
            daemon = await Daemon.open(
                stack, Launch(run, Home(config), me, transport, dataset, state=first), opened=opened
            )
            view = daemon.driver.node.view()
            await transport.subscribe(topic_of(daemon.edges.run_id), daemon.driver.intake.hear, view.is_in)
            tasks.append(asyncio.create_task(daemon.edges.connections.run()))
            tasks.append(asyncio.create_task(daemon.driver.run(daemon.started)))
            daemons.append(daemon)
            await until(lambda: daemon.driver.node.view().has_started)

        def is_over() -> bool:
            for task in tasks:
                if task.done():
                    task.result()
            return ready(daemons)

        try:
            for number in range(FOUNDERS):
                await join(number)
            await until(lambda: is_over() or _applied(daemons) >= ROUNDS)
            await join(FOUNDERS)
            await until(is_over)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for daemon in daemons:
            await save_last(daemon)


def _applied(daemons: list[Any]) -> int:
    return min(daemon.driver.node.view().applied_round for daemon in daemons)


def make_history(root: Path, **changes: Any) -> tuple[RunConfig, list[Path]]:
    """Makes a run whose roster has changed; returns each node's directory of the run."""
    begun = begin(a_run(**changes), root / "data", [each.key.hex() for each in IDENTITIES[:FOUNDERS]])
    newcomer = IDENTITIES[FOUNDERS].key

    def ready(daemons: list[Any]) -> bool:
        lines = [daemon.driver.node.participant.chain for daemon in daemons]
        if not all(newcomer in line.state.members for line in lines):
            return False
        return _applied(daemons) >= max(line.changes[-1].manifest.round for line in lines) + SINCE

    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        runner.run(_live(root, begun.run, begun.state, begun.dataset, ready))
    name = begun.run.run_id[:16]
    return begun.run, [root / f"node{number}" / "runs" / name for number in range(FOUNDERS + 1)]


# ---------------------------------------------------------------------------------------------------
# Spoiling it


def log_of(directory: Path) -> tuple[Path, list[Any]]:
    """Returns the newest log segment, with its snapshot and records."""
    path = sorted((directory / "wal").glob("*.log"))[-1]
    bodies, _ = frames_of(path, int(path.name[:8]), path.read_bytes())
    return path, [decoded(path, at, body) for at, body in bodies]


def write_log(path: Path, records: list[Any]) -> None:
    number = int(path.name[:8])
    content = header(number)
    for record in records:
        content += frame(number, len(content), msgspec.msgpack.encode(record))
    path.write_bytes(content)


def rewrite(directory: Path, change: Callable[[Any], Any]) -> None:
    """Rewrites the log's records with `change`; None drops one."""
    path, records = log_of(directory)
    write_log(path, [changed for record in records if (changed := change(record)) is not None])


def ended(directory: Path, number: int) -> None:
    """Cuts the log as if the node had been killed when this round was applied and saved."""

    def change(record: Any) -> Any:
        return None if isinstance(record, ev.Certified) and record.state.round > number else record

    rewrite(directory, change)
    for path in (directory / "checkpoints").iterdir():
        if int(path.name.split("-")[-1]) > number:
            shutil.rmtree(path)


def certified_of(directory: Path) -> list[ev.Certified]:
    """Returns the certified entries in the order of the log."""
    _, (snapshot, *records) = log_of(directory)
    assert isinstance(snapshot, Snapshot)
    return [*snapshot.saved.history, *(record for record in records if isinstance(record, ev.Certified))]


def entries_of(directory: Path) -> list[Entry]:
    return [each.step for each in certified_of(directory) if isinstance(each.step, Entry)]


def forged(run: RunConfig, state: AgreedState, manifest: Any, signers: int | None = None) -> Entry:
    """A certificate by whoever has the keys of the members; by a quorum of them, or so many."""
    roster = state.roster
    seats = list(range(roster.quorum if signers is None else signers))
    where = state.branch, manifest.round, 0
    signatures = []
    for seat in seats:
        key = roster.members[seat]
        vote = Vote(*where, Ballot.PRECOMMIT, manifest.digest, key)
        signatures.append(BY_KEY[key].sign(signed_bytes(run.id, vote)))
    return Entry(manifest, Certificate(*where, manifest.digest, bitmap(seats), tuple(signatures)))


def rewind(directory: Path, run: RunConfig, number: int, change: Callable[[Any], Any]) -> None:
    """Let the log go another way from a round on: its manifest as `change` makes it, and all keys sign for it and for
    the ones after it, whose content stays as far as it can."""
    path, records = log_of(directory)
    snapshot, *rest = records
    states: dict[int, AgreedState] = {snapshot.saved.base.round: snapshot.saved.base}
    made: list[Any] = []
    for record in [*snapshot.saved.history, *rest]:
        if not isinstance(record, ev.Certified) or not isinstance(record.step, Entry):
            made.append(record)
            continue
        manifest, before = record.step.manifest, states[record.step.manifest.round - 1]
        entry: Step = record.step
        if manifest.round >= number:
            fields = {"parent": before.head, "state": before.digest}
            manifest = msgspec.structs.replace(manifest, **fields)
            if manifest.round == number:
                manifest = change(manifest)
            entry = forged(run, before, manifest)
        after = before.after(manifest, run)
        states[manifest.round] = after
        trunk = record.trunk
        if trunk is not None:
            named = {manifest.round: entry}
            changes = [named.get(getattr(step, "manifest", manifest).round, step) for step in trunk.changes]
            trunk = msgspec.structs.replace(trunk, changes=tuple(changes))
        made.append(ev.Certified(entry, after, trunk))
    saved = msgspec.structs.replace(snapshot.saved, history=())
    write_log(path, [msgspec.structs.replace(snapshot, saved=saved), *made])


def compacted(directory: Path) -> None:
    """Compacts the log as after many rounds: a new segment begins after the roster has changed."""
    path, (snapshot, *records) = log_of(directory)
    journal = Journal.restored(snapshot.saved, KEPT, read_own)
    for record in records:
        journal.write(record, read_own(record.envelope) if isinstance(record, ev.Said) else None)
    write_log(path, [Snapshot(journal.saved_at(0, b""), False)])
