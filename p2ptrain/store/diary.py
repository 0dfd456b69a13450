"""The diary: the trainings since the last checkpoints, so that a restart can repeat them.

A checkpoint is made every few rounds, but each training changes the residual, which the node has not sent yet. For
each training only the inputs are recorded, before its contribution is announced: round, base, place, how many steps it
took, and which earlier contributions could still be taken. Training from the same state on the same data gives the same
bits on the same machine; the payload's digest shows whether it did. The agreed updates in between are in the log. A
training that was not announced is not repeated.

Each training is one line, synced. Trainings after a damaged line are not repeated: then a part of the last
contributions is sent twice, and nothing else is lost."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from p2ptrain.digest import digest
from p2ptrain.errors import DataError
from p2ptrain.files import opened, read, sync, trouble, write_all, write_atomically
from p2ptrain.share import PassSlots, Share
from p2ptrain.store.formats import refuse_newer
from p2ptrain.system import fsync

ENTRIES_MAX = 1_024  # trainings; beyond it, the older half is dropped
OUTSTANDING_MAX = 128  # contributions whose exact values the trainer keeps

Count = Annotated[int, Meta(ge=0)]
_log = logging.getLogger("p2ptrain.store")


class Trained(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The inputs of one training, and the digest of its contribution."""

    number: Count  # rises by one each time, from 1
    round: Count
    base_round: Count
    place: Count
    places: Count
    outstanding: Annotated[tuple[Count, ...], Meta(max_length=OUTSTANDING_MAX)]  # rounds, still to be taken
    # All zeros, with `steps` set: the training failed after that many steps.
    payload: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    # Both change the order of sums, and therefore the bits.
    threads: Count = 0  # torch's threads; 0: not recorded
    sequences_per_pass: Count = msgspec.field(default=0, name="sequences")  # the limit; 0: not recorded, or no limit
    steps: Count = 0  # steps taken; 0: all local steps
    applied_after: Count = 0  # if a round was applied during the training: the steps before it, else 0
    tail: Annotated[str, Meta(pattern=r"\A([0-9a-f]{18})?\Z")] = ""  # the contribution's tail, in a region
    k: Count = 0  # numbers of each chunk in the contribution; 0: the most that the run allows
    slots: PassSlots | None = None  # what it trained on, where the place does not say it
    step_sequences: Count = 0  # that each step took; 0: all

    @property
    def share(self) -> Share:
        return Share(self.round, self.place, self.places, self.slots)


class _Line(Struct, frozen=True, forbid_unknown_fields=True):
    trained: Trained
    digest: str


class Diary:
    """The diary of one trainer. Only one thread may write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_damaged = False  # whether it was damaged when it was opened
        content = b""
        try:
            content = read(path) or b""
        except DataError as error:
            self.is_damaged = True
            _log.warning("cannot read the diary: %s", error)
        self.entries, whole = read_entries(path, content)
        if whole != content:
            self.is_damaged = True
            _log.warning("the diary was cut off at a damaged line: path %s, entries %s", path, len(self.entries))
            write_atomically(path, whole)

    def note(self, entry: Trained) -> None:
        if len(self.entries) >= ENTRIES_MAX:  # the older half matters only to the oldest checkpoints
            self.forget(self.entries[ENTRIES_MAX // 2].number)
        with trouble(self.path):
            is_new = not self.path.exists()
            with opened(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as descriptor:
                size = os.fstat(descriptor).st_size
                try:
                    write_all(descriptor, _encoded(entry))
                    fsync(descriptor)
                except OSError:
                    os.ftruncate(descriptor, size)  # half a line would hide the lines after it
                    raise
            if is_new:
                sync(self.path.parent)
        self.entries.append(entry)

    def after(self, number: int) -> list[Trained]:
        """Returns the trainings after this number, which is a checkpoint's last; none if one of them is missing."""
        later = [each for each in self.entries if each.number > number]
        numbers = [each.number for each in later]
        return later if numbers == list(range(number + 1, number + 1 + len(later))) else []

    def forget(self, number: int) -> None:
        """Removes the trainings up to this number, which all kept checkpoints include."""
        kept = [each for each in self.entries if each.number > number]
        if len(kept) < len(self.entries):
            write_atomically(self.path, b"".join(map(_encoded, kept)))
            self.entries = kept


def read_entries(path: Path, content: bytes) -> tuple[list[Trained], bytes]:
    """Returns the trainings before the first damaged line, and their lines as bytes.

    Raises DataError if a later release wrote any of the other lines."""
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
