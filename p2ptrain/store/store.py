"""The store: all data of one identity in one run, in one locked directory.

    run.json       the run's config, in its canonical encoding
    said.json      what the file of a run begun here said (node/home.py)
    origin         how the run before ended, if this one follows another (core/origin.py)
    successor      the id of the run to which this node has gone over (node/heirs.py)
    identity       the public key of the node that owns the directory
    wal/           the write-ahead log (log.py)
    payloads/      contributions that the history or our own messages refer to (payloads.py)
    diary.jsonl    the trainings since the checkpoints (diary.py)
    checkpoints/   the trainer's state (checkpoints.py)
    records.sqlite history for people, and addresses that worked (records.py)
    mismatches     rounds in which this node computed a wrong state (mismatches.py)

A file beside the key records that the identity has sent messages in a run: if the key is moved to another machine, or
the directory is lost, the node knows that it has forgotten its messages, and does not return as a newcomer."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from p2ptrain.config import RunConfig
from p2ptrain.core.events import Certified, Record, Said, Saved
from p2ptrain.core.history import Entry
from p2ptrain.core.journal import Journal
from p2ptrain.core.origin import ORIGIN_BYTES_MAX, Descent, decode_origin, first_state
from p2ptrain.core.state import AgreedState
from p2ptrain.errors import DataError, RemoteProtocolError
from p2ptrain.files import make_directory, read, read_regular, write_atomically
from p2ptrain.store.checkpoints import Checkpoint, Checkpoints
from p2ptrain.store.diary import Diary
from p2ptrain.store.lock import Lock, beside
from p2ptrain.store.log import Log
from p2ptrain.store.mismatches import Mismatches
from p2ptrain.store.payloads import PayloadStore
from p2ptrain.store.records import RECORDS_NAME, Records

CHECKPOINTS_NAME, EVENTS_NAME, ORIGIN_NAME, PAYLOADS_NAME = "checkpoints", "events", "origin", "payloads"
ORIGIN_FIX = "Move it away: at the next start it comes from a peer"
SPOKEN_SUFFIX = ".spoken"  # suffix of a directory beside the key, with a file for each run

_log = logging.getLogger("p2ptrain.store")


def origin_in(directory: Path) -> Descent | None:
    """Returns where the run of a directory comes from; None if that is not there."""
    path = directory / ORIGIN_NAME
    if (encoded := read_regular(path, ORIGIN_BYTES_MAX)) is None:
        return None
    try:
        return decode_origin(encoded)
    except RemoteProtocolError as error:
        raise DataError(error.why, path=path, fix=ORIGIN_FIX) from error


def beginning(directory: Path, run: RunConfig) -> AgreedState:
    try:
        return first_state(run, origin_in(directory))
    except RemoteProtocolError as error:
        raise DataError(error.why, path=directory / ORIGIN_NAME, fix=ORIGIN_FIX) from error


class PayloadLostError(DataError):
    """A message about to be sent depends on a payload that has been lost."""

    def __init__(self, name: bytes) -> None:
        self.name = name
        super().__init__(f"payload {name.hex()} is no longer here, so what depends on it cannot be sent")


class Store:
    """The data of one identity in one run. Only one thread may write."""

    def __init__(
        self,
        directory: Path,
        run: RunConfig,
        genesis: AgreedState,
        me: bytes,
        key_file: Path,
        *,
        checkpoints_kept: int = 4,
    ) -> None:
        """Opens or creates the directory; `genesis` is the state before the first round."""
        self.directory, self.genesis, self.me, self.checkpoints_kept = directory, genesis, me, checkpoints_kept
        self.lock = Lock.of_directory(directory)
        with ExitStack() as failed:
            failed.callback(self.lock.release)
            self._claim("run.json", run.canonical(), f"of run {run.name} ({run.run_id[:16]})")
            self._claim("identity", me.hex().encode() + b"\n", f"of the identity {me.hex()[:16]}")
            spoken = beside(key_file, SPOKEN_SUFFIX) / run.run_id
            has_spoken = read(spoken) is not None
            self.log = Log(
                directory / "wal", genesis, run.agreement.history_rounds, has_spoken, run.agreement.staleness_rounds_max
            )
            failed.callback(self.log.close)
            if not has_spoken:  # written after the log, so that a crash in between does not make a newcomer forgetful
                make_directory(spoken.parent)
                write_atomically(spoken, b"")
            self.payloads = PayloadStore(directory / PAYLOADS_NAME)
            self.diary = Diary(directory / "diary.jsonl")
            self.checkpoints = Checkpoints(directory / CHECKPOINTS_NAME, run.id)
            self.checkpoints.tidy()
            self.mismatches = Mismatches(directory / "mismatches")
            self.records = Records(directory / RECORDS_NAME)
            failed.pop_all()

    def _claim(self, name: str, content: bytes, what: str) -> None:
        """Writes a file at the first start, and checks that it is unchanged at later ones."""
        path = self.directory / name
        found = read(path)
        if found is None:
            write_atomically(path, content)
        elif found != content:
            fix = f"Use another directory, or move {self.directory} away if nothing in it is needed"
            raise DataError(f"damaged, or the directory is not {what}", path=path, fix=fix)

    @property
    def damaged_files(self) -> int:
        """The number of damaged files that this process has found and removed, cut off or skipped."""
        return self.payloads.damaged + len(self.checkpoints.damaged) + self.diary.is_damaged

    def close(self) -> None:
        self.records.close()
        self.log.close()
        self.lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_forgetful(self) -> bool:
        """Whether this identity has sent messages in this run, has lost them, and has persisted nothing since."""
        return self.log.is_forgetful

    @property
    def journal(self) -> Journal:
        return self.log.journal

    def newest_checkpoint(self) -> Checkpoint | None:
        """Returns the checkpoint to continue from, after reading it completely; None for the first weights."""
        return self.checkpoints.newest(self.journal)

    def saved(self, checkpoint: Checkpoint | None) -> Saved:
        """Returns the saved state for `Started`, once the trainer has loaded this checkpoint.

        Logs the payloads that are missing; the node waits until a peer sends them."""
        begun = checkpoint or self.genesis
        lost = sorted(name for name in self.journal.payloads(begun.round) if name not in self.payloads)
        if lost:
            what = "payloads needed to continue are missing; peers may have them: count %s, first %s"
            _log.warning(what, len(lost), self.payloads.directory / lost[0].hex())
        return self.journal.saved_at(begun.round, begun.root)

    def write(self, records: Sequence[Record]) -> None:
        """Writes records durably, after the payloads that they depend on. Raises DataError if none was written."""
        spoken = {name for record in records if isinstance(record, Said) for name in record.payloads}
        missing = self.payloads.keep(spoken)
        if missing:
            raise PayloadLostError(missing[0])
        # A payload may still be on its way if others decided the round; applying or `prune` writes it later.
        steps = [record.step for record in records if isinstance(record, Certified)]
        taken = [taken.payload for step in steps if isinstance(step, Entry) for taken in step.manifest.taken]
        self.payloads.keep(self.payloads.fleeting(taken))
        self.log.append(records)

    def prune(
        self, payloads: Collection[bytes] = (), known: Collection[bytes] | None = None, fetched: Collection[Path] = ()
    ) -> None:
        """Removes old checkpoints, and payloads that neither the history, our messages nor `payloads` need, every few
        rounds. Then, as the disk may have been full, writes out payloads that arrived after their round was decided."""
        needed = self.journal.payloads()
        self.payloads.prune(needed.union(payloads), known)
        self.checkpoints.prune(self.checkpoints_kept, self.journal, fetched)
        self.payloads.keep(self.payloads.fleeting(needed))
        self.diary.forget(min((each.stamp.trained for each in self.checkpoints.present()), default=0))
