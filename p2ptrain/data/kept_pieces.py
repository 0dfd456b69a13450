"""Keeps the fetched pieces of a data set within a size limit by removing the least recently needed ones.

They are in a directory of their own, so that files which the owner has put into the data set are never removed. Their
order survives a restart in the files' modification times, which are set whenever a piece is needed. Access times are
unreliable, since most systems do not update them (relatime)."""

from __future__ import annotations

import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from pathlib import Path

from p2ptrain.errors import DataError
from p2ptrain.files import PARTIAL_SUFFIX, DiskError, entries, forget, trouble

DEVIATIONS = 4  # standard deviations above the mean: one round in 30,000 needs more


def pieces_of_a_round(sequences: int, share: float) -> int:
    """Returns a number of pieces that is enough for nearly every round, with sequences drawn from all of the data.

    share: the share of a piece that a sequence takes; on average a sequence touches 1 + `share` pieces"""
    part = share % 1
    return math.ceil(sequences * (1 + share) + DEVIATIONS * math.sqrt(sequences * part * (1 - part)))


def size_of(path: Path) -> int:
    """Returns a file's size; -1 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


class KeptPieces:
    """Counts the fetched pieces, and removes the least recently needed ones. Its methods are thread-safe."""

    def __init__(self, directory: Path, room: int, names: Container[str], removed: Callable[[str], None]) -> None:
        """room: bytes for all pieces; names: the data set's pieces, since other files in the directory are left alone;
        `removed` is called for each piece that is removed."""
        self.directory, self.room, self._allowed, self._removed = directory, room, room, removed
        self._held: dict[str, dict[str, int]] = {}  # pieces in use, by user, which are never removed
        self._lock = threading.RLock()
        found = []
        for path in entries(directory):
            if path.name.removesuffix(PARTIAL_SUFFIX) not in names or not path.is_file() or path.is_symlink():
                continue
            if path.name.endswith(PARTIAL_SUFFIX):  # left over from a write that a crash interrupted
                forget(path)
                continue
            with trouble(path, "cannot be read"):
                known = path.stat()
            found.append((known.st_mtime_ns, path.name, known.st_size))
        self._sizes = OrderedDict((name, size) for _, name, size in sorted(found))  # least recently needed first
        self._bytes = sum(self._sizes.values())
        self._make_room(0)

    def hold(self, who: str, needed: Mapping[str, int]) -> None:
        """Keeps these pieces, given with their sizes, until `who` holds others. Raises DataError if they do not fit."""
        with self._lock:
            held = {name: size for each, sizes in self._held.items() if each != who for name, size in sizes.items()}
            if (total := sum((held | dict(needed)).values())) > self.room:
                self.room = self._allowed  # other programs may have given back what they took; `add` finds out
            if total > self.room:
                what = f"{total:,} bytes of training data are needed at once, and there is room for {self.room:,}"
                raise DataError(f"{what}. Allow more with limits.disk_bytes")
            self._held[who] = dict(needed)
            self._touch(needed)

    def fitting(self, wanted: Mapping[str, int]) -> frozenset[str]:
        """Returns the pieces that fit beside all held ones, and marks those already here as recently needed."""
        with self._lock:
            held = {name: size for sizes in self._held.values() for name, size in sizes.items()}
            self._touch(wanted)
            left, fit = self.room - sum(held.values()), set[str]()
            here_first = sorted(wanted.items(), key=lambda each: each[0] not in self._sizes)
            for name, size in here_first:
                left -= 0 if name in held else size
                if left < 0:
                    break
                fit.add(name)
            return frozenset(fit)

    def add(self, name: str, size: int, write: Callable[[], None]) -> None:
        """Makes room for a piece and has it written."""
        with self._lock:
            self._forget(name)  # a replaced file frees its space first
            self._make_room(size)
            try:
                write()
            except DiskError as error:
                if not error.is_full:
                    raise
                self.room = max(size, self._bytes)  # other programs may have filled the disk
                self._make_room(size)
                write()
            self._sizes[name] = size
            self._bytes += size

    def _forget(self, name: str) -> None:
        self._bytes -= self._sizes.pop(name, 0)

    def _touch(self, names: Mapping[str, int]) -> None:
        for name in names:
            if name in self._sizes:
                self._sizes.move_to_end(name)
                with suppress(OSError):  # failing only affects the order after a restart
                    os.utime(self.directory / name)

    def _make_room(self, size: int) -> None:
        if self._bytes + size <= self.room:
            return
        held = {name for sizes in self._held.values() for name in sizes}
        while self._bytes + size > self.room:
            name = next((each for each in self._sizes if each not in held), None)  # held pieces are at the end
            if name is None:
                raise DataError(f"no room for {size:,} bytes of training data beside what is needed now")
            path = self.directory / name
            with trouble(path, "cannot be removed"):
                path.unlink(missing_ok=True)
            self._forget(name)
            self._removed(name)
