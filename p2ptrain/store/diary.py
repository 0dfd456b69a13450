"""What the trainer did since its last checkpoints, so that a restart can do it again.

A checkpoint is made every few rounds, and each training changes what the node still has to tell (the residual). Of a
training only its inputs are written down, before its contribution is announced: round, base, place, and which earlier
contributions could still be taken. Training from the same state on the same data gives the same bits on the same
machine; the payload's digest says whether it did. The agreed updates in between are in the log.

One line for each training, synced. What stands behind a damaged line is not repeated: then a part of what the last
contributions carried is sent twice, and nothing else is lost.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
import structlog
from msgspec import Meta, Struct

from p2ptrain.digest import digest
from p2ptrain.errors import DataError
from p2ptrain.files import read, sync, trouble, write_all, write_atomically
from p2ptrain.store.formats import refuse_newer

ENTRIES_MAX = 1_024  # trainings; of more, the newest
OUTSTANDING_MAX = 128  # contributions whose values the trainer keeps

Count = Annotated[int, Meta(ge=0)]
_log = structlog.get_logger("p2ptrain.store")


class Trained(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One training, and the contribution that it led to."""

    number: Count  # rises by one each time, from 1
    round: Count
    base_round: Count
    place: Count
    places: Count
    outstanding: Annotated[tuple[Count, ...], Meta(max_length=OUTSTANDING_MAX)]  # earlier rounds, still to be taken
    payload: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    # Sums come out otherwise with another number of these; 0: not told, or no limit.
    threads: Count = 0  # of torch
    sequences_per_pass: Count = msgspec.field(default=0, name="sequences")  # at most; 0: not told, or no limit


class _Line(Struct, frozen=True, forbid_unknown_fields=True):
    trained: Trained
    digest: str


class Diary:
    """Of one trainer. One thread writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_damaged = False  # when it was opened
        content = b""
        try:
            content = read(path) or b""
        except DataError as error:
            self.is_damaged = True
            _log.warning("the diary is lost", why=str(error))
        self.entries, whole = read_entries(path, content)
        if whole != content:
            self.is_damaged = True
            _log.warning("the diary was cut off at a damaged line", path=str(path), entries=len(self.entries))
            write_atomically(path, whole)

    def note(self, entry: Trained) -> None:
        """It lasts when this returns."""
        if len(self.entries) >= ENTRIES_MAX:  # what only the oldest checkpoints need makes way
            self.forget(self.entries[ENTRIES_MAX // 2].number)
        with trouble(self.path):
            is_new = not self.path.exists()
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                size = os.fstat(descriptor).st_size
                try:
                    write_all(descriptor, _encoded(entry))
                    os.fsync(descriptor)
                except OSError:
                    os.ftruncate(descriptor, size)  # half a line would hide what follows it
                    raise
            finally:
                os.close(descriptor)
            if is_new:
                sync(self.path.parent)
        self.entries.append(entry)

    def after(self, number: int) -> list[Trained]:
        """The trainings after the one of this number, which a checkpoint has; none if one of them is missing."""
        later = [each for each in self.entries if each.number > number]
        numbers = [each.number for each in later]
        return later if numbers == list(range(number + 1, number + 1 + len(later))) else []

    def forget(self, number: int) -> None:
        """All checkpoints that are kept have the trainings up to this one."""
        kept = [each for each in self.entries if each.number > number]
        if len(kept) < len(self.entries):
            write_atomically(self.path, b"".join(map(_encoded, kept)))
            self.entries = kept


def read_entries(path: Path, content: bytes) -> tuple[list[Trained], bytes]:
    """The trainings in a diary up to the first damaged line, and the lines that they stand in. DataError if a later
    release has written any of the others."""
    entries: list[Trained] = []
    whole = b""
    lines = content.splitlines(keepends=True)
    for at, line in enumerate(lines):
        entry = _read(line)
        if entry is None or (entries and entry.number <= entries[-1].number):
            for other in lines[at:]:
                refuse_newer(path, other)
            break
        entries.append(entry)
        whole += line
    return entries, whole


def _encoded(entry: Trained) -> bytes:
    return msgspec.json.encode(_Line(entry, _digest_of(entry))) + b"\n"


def _digest_of(entry: Trained) -> str:
    return digest("diary", msgspec.json.encode(entry)).hex()


def _read(line: bytes) -> Trained | None:
    try:
        found = msgspec.json.decode(line, type=_Line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return found.trained if _encoded(found.trained) == line else None
