"""The write-ahead log: everything that a node must not contradict later is written here before it is sent.

Records are appended with one write and one sync per batch. When a segment (segment.py) has grown too large, a new one
begins with a snapshot of the journal; it is complete before it gets its name. Since each segment begins with a
snapshot, only the newest is read, and older ones are removed.

A power cut can tear only the end of the newest segment, whose records were not sent to anyone: it is cut off."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from p2ptrain import files
from p2ptrain.core.events import Record, Said
from p2ptrain.core.journal import Journal
from p2ptrain.core.messages import Message, decode
from p2ptrain.core.state import AgreedState
from p2ptrain.errors import DataError, RemoteProtocolError
from p2ptrain.store.segment import FRAME_BYTES, Snapshot, damaged, decoded, encoded, frame, frames_of, header
from p2ptrain.system import fsync

SEGMENT_BYTES = (
    16 * 2**20
)  # read in a tenth of a second; must be twice the snapshot, or each append would begin a segment

# For readers other than the node itself:
READ_TIMES = 5  # attempts, in case a running node replaces the segment meanwhile
READ_BYTES_MAX = 2**29  # twice the largest segment that 256 rounds of 1,024 contributors can lead to
NAMES_MAX = 1_024  # files in the directory; a node has two at most
ALL_ROUNDS = 2**31  # more rounds than a segment has, because readers want all of them

_SEGMENT = re.compile(r"[0-9]{8}\.log")

_log = logging.getLogger("p2ptrain.store")


class Log:
    """A node's write-ahead log. Only one process may have it open."""

    def __init__(
        self, directory: Path, base: AgreedState, kept: int, is_forgetful: bool = False, staleness: int = 0
    ) -> None:
        """Opens the log, or begins one from state `base`; `is_forgetful` means that an earlier log has been lost."""
        self.directory = directory
        self.journal = Journal(base, kept, staleness)
        self.is_forgetful = is_forgetful
        self.number = self.size = self.limit = 0  # of the current segment
        self._descriptor = -1
        self._is_torn = False  # a write has failed, and its partial data must be cut off
        self._is_lost = False  # the segment's state on the disk is unknown, so a new segment is needed
        files.make_directory(directory)
        found = [path for path in files.entries(directory) if _SEGMENT.fullmatch(path.name)]
        if found:
            self._open(found[-1])
        else:
            with files.trouble(directory):
                self._begin_segment()

    @property
    def path(self) -> Path:
        return self._path_of(self.number)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    # -- Writing ------------------------------------------------------------------------------------

    def append(self, records: Sequence[Record]) -> None:
        """Appends records durably: once it returns, they survive a power cut; if it raises, none was appended."""
        if not records:
            return
        journal, frames = self.journal.copy(), []
        for record in records:
            journal.write(record, read_own(record.envelope) if isinstance(record, Said) else None)
        with files.trouble(self.path):
            if self._is_lost:
                self._begin_segment()
            elif self._is_torn:
                files.cut(self.path, self.size)
            self._is_torn = False
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
        files.write_all(self._descriptor, content)
        self._is_lost = True  # a later sync would not write the data that this one dropped
        fsync(self._descriptor)
        self._is_torn = self._is_lost = False

    def _compact(self) -> None:
        """Begins a new segment; if that fails, the old one keeps growing."""
        try:
            with files.trouble(self.directory):
                self._begin_segment()
        except files.DiskError as error:
            self.limit = self.size + SEGMENT_BYTES
            _log.warning("log not compacted: %s", error)

    def _begin_segment(self) -> None:
        number = self.number + 1
        path = self._path_of(number)
        head = header(number)
        snapshot = Snapshot(self.journal.saved_at(0, b""), self.is_forgetful)
        content = head + frame(number, len(head), encoded(snapshot))
        partial = path.with_name(path.name + files.PARTIAL_SUFFIX)
        try:
            files.write_file(partial, content)
        except OSError:
            files.forget(partial)
            raise
        # From here on the new segment may have its name and be read instead of the old one: there is no way back.
        self._is_lost, self.number = True, number
        files.rename(partial, path)
        self._use(path, len(content), len(content))
        self._is_lost = False
        self._forget_others()

    def _use(self, path: Path, size: int, snapshot_bytes: int) -> None:
        self.close()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self.size, self.limit = size, max(SEGMENT_BYTES, 2 * snapshot_bytes)

    def _forget_others(self) -> None:
        for path in files.entries(self.directory):
            if _SEGMENT.fullmatch(path.name.removesuffix(files.PARTIAL_SUFFIX)) and path != self.path:
                files.forget(path)

    # -- Reading ------------------------------------------------------------------------------------

    def _path_of(self, number: int) -> Path:
        return self.directory / f"{number:08d}.log"

    def _open(self, path: Path) -> None:
        self.number = int(path.name[:8])
        data = files.read(path) or b""
        segment = _folded(path, data, self.journal.kept, self.journal.staleness)
        self.journal, self.is_forgetful, end = segment.journal, segment.is_forgetful, segment.end
        if end < len(data):
            _log.warning("end of the log cut off: path %s, offset %s, bytes %s", path, end, len(data) - end)
            files.cut(path, end)
        with files.trouble(path):
            self._use(path, end, segment.snapshot_bytes)
        self._forget_others()


@dataclass(frozen=True, slots=True)
class _Segment:
    journal: Journal
    is_forgetful: bool
    end: int  # where the complete frames end
    snapshot_bytes: int


def _folded(path: Path, data: bytes, kept: int, staleness: int = 0) -> _Segment:
    bodies, end = frames_of(path, int(path.name[:8]), data)
    (at, first), *rest = bodies
    snapshot = decoded(path, at, first)
    if not isinstance(snapshot, Snapshot):
        raise damaged(path, at, "the segment does not begin with a snapshot")
    try:
        journal = Journal.restored(snapshot.saved, kept, read_own, staleness)
        for at, body in rest:
            record = decoded(path, at, body)
            if isinstance(record, Snapshot):
                raise damaged(path, at, "the segment has a second snapshot")
            journal.write(record, read_own(record.envelope) if isinstance(record, Said) else None)
    except RemoteProtocolError as error:
        raise damaged(path, at, f"it holds a message that this version would not send: {error}") from error
    return _Segment(journal, snapshot.is_forgetful and not rest, end, FRAME_BYTES + len(first))


def newest_segment(directory: Path) -> tuple[Path, bytes] | None:
    """Reads a node's newest segment without locking, also while the node writes; None if there is no log."""
    for _ in range(READ_TIMES):
        segments = [path for path, _ in files.listed(directory, NAMES_MAX) if _SEGMENT.fullmatch(path.name)]
        if not segments:
            return None
        data = files.read_regular(segments[-1], READ_BYTES_MAX)
        if data is not None:
            return segments[-1], data
    raise DataError("changes faster than it can be read", path=directory, fix="Try again, or stop the node first")


def read_journal(directory: Path) -> Journal | None:
    """Reads the journal of a node's own log without locking; None if there is no log. Signatures are not verified."""
    found = newest_segment(directory)
    return None if found is None else _folded(*found, ALL_ROUNDS).journal


class _AcceptsOwn:
    """Accepts any signature: our own messages were signed here and are protected by the log's digests."""

    run_id = b""

    def __call__(self, key: bytes, signed: bytes, signature: bytes) -> bool:
        return True


def read_own(envelope: bytes) -> Message:
    """Decodes a message that this node has sent."""
    return decode(envelope, _AcceptsOwn()).message
