"""The write-ahead log: what a node may say only once is here before anyone hears it.

A record follows the last with one write and one sync, however many come at once. When the segment (segment.py) has
grown, its journal begins a new one, which is written whole before it gets its name; since each segment begins with all
that counts, the newest is all that is read, and older ones are only in the way.

What a power cut tears is the end of the newest segment, of which nobody was told: it is cut off.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from p2ptrain.core.events import Record, Said
from p2ptrain.core.journal import Journal
from p2ptrain.core.messages import Message, decode
from p2ptrain.core.state import AgreedState
from p2ptrain.errors import DataError, RemoteProtocolError
from p2ptrain.files import (
    PARTIAL_SUFFIX,
    DiskError,
    cut,
    entries,
    forget,
    listed,
    make_directory,
    read,
    read_regular,
    rename,
    trouble,
    write_all,
    write_file,
)
from p2ptrain.store.segment import FRAME_BYTES, Snapshot, damaged, decoded, encoded, frame, frames_of, header

SEGMENT_BYTES = 16 * 2**20  # read in a tenth of a second; and twice the snapshot, or each append would make another

READ_TIMES = 5  # by who only looks, while a running node begins a new segment and removes the one that was seen
READ_BYTES_MAX = 2**29  # by who only looks: twice what 256 rounds of 1,024 contributors can make a segment grow to
NAMES_MAX = 1_024  # in the directory, by who only looks: a node leaves two
ALL_ROUNDS = 2**31  # more than a segment has: who only looks wants all of it, and not only what a node would keep

_SEGMENT = re.compile(r"[0-9]{8}\.log")

_log = structlog.get_logger("p2ptrain.store")


class Log:
    """Of one node. Only one process may have it open."""

    def __init__(self, directory: Path, base: AgreedState, kept: int, is_forgetful: bool = False) -> None:
        """Open it, or begin it from this state; `is_forgetful` if one that begins now is not the first there was."""
        self.directory = directory
        self.journal = Journal(base, kept)
        self.is_forgetful = is_forgetful
        self.number = self.size = self.limit = 0  # of the segment
        self._descriptor = -1
        self._is_torn = False  # a write has failed, and what it left behind has to go
        self._is_lost = False  # of this segment nothing can be said any more: only a new one will do
        make_directory(directory)
        found = self._segments()
        if found:
            self._open(found)
        else:
            with trouble(directory):
                self._begin_segment()

    @property
    def path(self) -> Path:
        return self._path_of(self.number)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    # -----------------------------------------------------------------------------------------------
    # Writing

    def append(self, records: Sequence[Record]) -> None:
        """When this returns the records survive a power cut; if it raises, they are as if they had never been."""
        if not records:
            return
        journal, frames = self.journal.copy(), []
        for record in records:
            journal.write(record, read_own(record.envelope) if isinstance(record, Said) else None)
        with trouble(self.path):
            self._mend()
            at = self.size
            for record in records:
                frames.append(frame(self.number, at, encoded(record)))
                at += len(frames[-1])
            self._write(b"".join(frames))
        self.size, self.journal, self.is_forgetful = at, journal, False
        if self.size > self.limit:
            self._compact()

    def _write(self, content: bytes) -> None:
        self._is_torn = True
        write_all(self._descriptor, content)
        self._is_lost = True  # what a failed sync has dropped, no later one writes: this end is not to be built on
        os.fsync(self._descriptor)
        self._is_torn = self._is_lost = False

    def _mend(self) -> None:
        """Get rid of what an append that failed has left behind."""
        if self._is_lost:
            self._begin_segment()
        elif self._is_torn:
            cut(self.path, self.size)
        self._is_torn = False

    def _compact(self) -> None:
        """Begin a new segment; if that cannot be, the old one grows on."""
        try:
            with trouble(self.directory):
                self._begin_segment()
        except DiskError as error:
            self.limit = self.size + SEGMENT_BYTES
            _log.warning("log not compacted", why=str(error))

    def _begin_segment(self) -> None:
        number = self.number + 1
        path = self._path_of(number)
        head = header(number)
        snapshot = Snapshot(self.journal.saved_at(0, b""), self.is_forgetful)
        content = head + frame(number, len(head), encoded(snapshot))
        partial = path.with_name(path.name + PARTIAL_SUFFIX)
        try:
            write_file(partial, content)
        except OSError:
            forget(partial)
            raise
        # From here on the new one may have its name, and would be read instead of the old: there is no way back.
        self._is_lost, self.number = True, number
        rename(partial, path)
        self._use(path, len(content), len(content))
        self._is_lost = False
        self._forget_others()

    def _use(self, path: Path, size: int, snapshot_bytes: int) -> None:
        self.close()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self.size, self.limit = size, max(SEGMENT_BYTES, 2 * snapshot_bytes)

    def _forget_others(self) -> None:
        for path in entries(self.directory):
            if _SEGMENT.fullmatch(path.name.removesuffix(PARTIAL_SUFFIX)) and path != self.path:
                forget(path)

    # -----------------------------------------------------------------------------------------------
    # Reading

    def _path_of(self, number: int) -> Path:
        return self.directory / f"{number:08d}.log"

    def _segments(self) -> list[int]:
        names = [path.name for path in entries(self.directory)]
        return [int(name[:8]) for name in names if _SEGMENT.fullmatch(name)]

    def _open(self, found: list[int]) -> None:
        self.number = found[-1]
        data = read(self.path) or b""
        segment = _folded(self.path, data, self.journal.kept)
        self.journal, self.is_forgetful, end = segment.journal, segment.is_forgetful, segment.end
        if end < len(data):
            _log.warning("end of the log cut off", path=str(self.path), offset=end, bytes=len(data) - end)
            cut(self.path, end)
        with trouble(self.path):
            self._use(self.path, end, segment.snapshot_bytes)
        self._forget_others()


@dataclass(frozen=True, slots=True)
class _Segment:
    """What a segment comes to."""

    journal: Journal
    is_forgetful: bool
    end: int  # of what is whole
    snapshot_bytes: int


def _folded(path: Path, data: bytes, kept: int) -> _Segment:
    bodies, end = frames_of(path, int(path.name[:8]), data)
    (at, first), *rest = bodies
    snapshot = decoded(path, at, first)
    if not isinstance(snapshot, Snapshot):
        raise damaged(path, at, "the segment does not begin with a snapshot")
    try:
        journal = Journal.restored(snapshot.saved, kept, read_own)
        for at, body in rest:
            record = decoded(path, at, body)
            if isinstance(record, Snapshot):
                raise damaged(path, at, "a second snapshot")
            journal.write(record, read_own(record.envelope) if isinstance(record, Said) else None)
    except RemoteProtocolError as error:
        raise damaged(path, at, f"holds what this version would not say: {error}") from error
    return _Segment(journal, snapshot.is_forgetful and not rest, end, FRAME_BYTES + len(first))


def newest_segment(directory: Path) -> tuple[Path, bytes] | None:
    """For who only looks, also while a node writes: its newest segment as it is now; None if there is no log."""
    for _ in range(READ_TIMES):
        segments = [path for path, _ in listed(directory, NAMES_MAX) if _SEGMENT.fullmatch(path.name)]
        if not segments:
            return None
        data = read_regular(segments[-1], READ_BYTES_MAX)
        if data is not None:
            return segments[-1], data
    raise DataError(f"{directory}: it changes faster than it can be read. Try again, or stop the node first")


def read_journal(directory: Path) -> Journal | None:
    """For who only looks: what a node's own log comes to; None if there is none. No signature is verified."""
    found = newest_segment(directory)
    return None if found is None else _folded(*found, ALL_ROUNDS).journal


class _OwnWords:
    """Takes signatures for good: what was said was signed here, and lay under a digest."""

    run_id = b""

    def __call__(self, key: bytes, signed: bytes, signature: bytes) -> bool:
        return True


def read_own(envelope: bytes) -> Message:
    """What we have said ourselves."""
    return decode(envelope, _OwnWords()).message
