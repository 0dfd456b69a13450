"""Blobs: large content-addressed objects, cut into pieces of 1 MiB.

A payload, a state or a base (frozen weights) is a tree (digest.py): its name is a Merkle root, and each piece can be
checked as it arrives and forwarded before the next one. The other kinds are checked as a whole by who requested them.

Sets of pieces are integers: piece i is bit i. So a union or a difference of sixty thousand pieces takes microseconds.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeAlias, TypeVar, get_args

from p2ptrain.digest import DIGEST_BYTES, PIECE_BYTES, is_piece, leaf_digests, piece_bytes, piece_count
from p2ptrain.errors import DataError
from p2ptrain.system import fsync

Kind: TypeAlias = Literal["payload", "state", "data", "manifest", "tokenizer", "base", "origin"]
TREES = ("payload", "state", "base")
Check: TypeAlias = Callable[[bytes], bool]
T = TypeVar("T")
PIECES_MAX = 60_000  # per blob, 63 GB: their digests and counts still fit one frame


@dataclass(frozen=True, slots=True)
class BlobName:
    """A blob's kind, and its 32-byte name among blobs of that kind."""

    kind: Kind
    name: bytes

    def __post_init__(self) -> None:
        assert self.kind in get_args(Kind) and len(self.name) == DIGEST_BYTES, "checked when it was decoded"

    def __str__(self) -> str:
        return f"{self.kind} {self.name.hex()[:16]}"

    @property
    def is_tree(self) -> bool:
        return self.kind in TREES


class Blob(Protocol):
    """A blob that can be served, complete or in part."""

    @property
    def size(self) -> int: ...

    @property
    def leaves(self) -> bytes:
        """The concatenated digests of the pieces; empty if the blob is checked as a whole."""

    @property
    def held(self) -> int:
        """The set of pieces that this node has."""

    def read(self, index: int) -> bytes:
        """Returns a piece that is held. DataError if it cannot be read."""


class Sink(Blob, Protocol):
    """The destination of a blob that is being fetched. Pieces are checked before they are written."""

    @property
    def is_quick(self) -> bool:
        """True if it is in memory; otherwise it is read and written in a thread."""

    def begin(self, size: int, leaves: bytes) -> None:
        """Makes room. Pieces left from an earlier fetch of the same size stay `held`; the fetcher rechecks them."""

    def write(self, index: int, piece: bytes) -> None:
        """Stores a piece. DataError if there is no room for it."""

    def drop(self, index: int) -> None:
        """Forgets a damaged piece."""

    def finish(self) -> None:
        """Moves the complete blob to its final place."""


def all_pieces(size: int) -> int:
    return (1 << piece_count(size)) - 1


async def aside(sink: Sink, work: Callable[..., T], *args: object) -> T:
    """Runs work on a sink, in a thread if it may wait for a disk."""
    return work(*args) if sink.is_quick else await asyncio.to_thread(work, *args)


def verified(blob: Blob) -> Iterator[bytes]:
    """Yields the pieces of a tree, each checked against its digest, because a disk may return wrong data."""
    for index in range(piece_count(blob.size)):
        piece = blob.read(index)
        if not is_piece(blob.leaves, blob.size, index, piece):
            raise DataError(f"piece {index} is damaged on the disk")
        yield piece


class MemorySink:
    """A blob being fetched into memory, which is allocated piece by piece instead of by the claimed size."""

    is_quick = True

    def __init__(self) -> None:
        self.size, self.leaves, self.held = 0, b"", 0
        self._pieces: dict[int, bytes] = {}

    def begin(self, size: int, leaves: bytes) -> None:
        if size != self.size:
            self._pieces, self.held = {}, 0
        self.size, self.leaves = size, leaves

    def write(self, index: int, piece: bytes) -> None:
        self._pieces[index] = piece
        self.held |= 1 << index

    def drop(self, index: int) -> None:
        del self._pieces[index]
        self.held &= ~(1 << index)

    def finish(self) -> None:
        assert self.held == all_pieces(self.size)

    def read(self, index: int) -> bytes:
        return self._pieces[index]

    def data(self) -> bytes:
        return b"".join(self._pieces[index] for index in range(piece_count(self.size)))


class FileSink:
    """A blob being fetched into a file. It is written to a partial file first, with a list of its pieces, so that a
    fetch continues after an interruption, even a crash. The list is only a hint: pieces are checked again."""

    is_quick = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self._part = path.with_name(path.name + ".part")
        self._list = path.with_name(path.name + ".held")
        self.size, self.leaves, self.held = 0, b"", 0
        self._lock = threading.Lock()  # several sources deliver at once

    def begin(self, size: int, leaves: bytes) -> None:
        self.size, self.leaves, self.held = size, leaves, 0
        with _writing(self._part):
            if self._part.exists() and self._part.stat().st_size == size and self._list.exists():
                listed = self._list.read_bytes()[: PIECES_MAX // 8]
                self.held = int.from_bytes(listed, "little") & all_pieces(size)
                return
            self._list.unlink(missing_ok=True)
            with self._part.open("wb") as file:
                file.truncate(size)  # a sparse file: it takes up disk space as pieces arrive

    def write(self, index: int, piece: bytes) -> None:
        with _writing(self._part), self._lock:
            with self._part.open("r+b") as file:
                file.seek(index * PIECE_BYTES)
                file.write(piece)
            self.held |= 1 << index
            self._list.write_bytes(self.held.to_bytes(-(-piece_count(self.size) // 8), "little"))

    def drop(self, index: int) -> None:
        self.held &= ~(1 << index)

    def finish(self) -> None:
        assert self.held == all_pieces(self.size)
        with _writing(self.path):
            with self._part.open("r+b") as file:
                fsync(file.fileno())
            self._part.replace(self.path)
            self._list.unlink(missing_ok=True)

    def read(self, index: int) -> bytes:
        return _read(self._part if self._part.exists() else self.path, index, self.size)


class WholeFile:
    """A file of this node that peers check as a whole.

    The first read checks it and keeps the digests of its pieces, against which each piece is checked from then on: so
    nothing is read twice for one piece, and nothing but digests stays in memory."""

    leaves = b""

    def __init__(self, path: Path, size: int, is_right: Check) -> None:
        self.size, self.held = size, all_pieces(size)
        self._path, self._is_right = path, is_right
        self._leaves: bytes | None = None  # of the right file; empty if this one is damaged
        self._checking = threading.Lock()

    def read(self, index: int) -> bytes:
        with self._checking:
            if self._leaves is None:
                whole = b"".join(_read(self._path, each, self.size) for each in range(piece_count(self.size)))
                self._leaves = b"".join(leaf_digests(whole)) if self._is_right(whole) else b""
        if not self._leaves:
            raise DataError(f"{self._path} is damaged")
        return _read_checked(self._path, index, self.size, self._leaves)


class TreeFile:
    """A file of this node that is a tree: each piece is checked when it is read."""

    def __init__(self, path: Path, size: int, leaves: bytes) -> None:
        self.size, self.leaves, self.held = size, leaves, all_pieces(size)
        self._path = path

    def read(self, index: int) -> bytes:
        return _read_checked(self._path, index, self.size, self.leaves)


def _read_checked(path: Path, index: int, size: int, leaves: bytes) -> bytes:
    piece = _read(path, index, size)
    if not is_piece(leaves, size, index, piece):
        raise DataError(f"{path} is damaged: piece {index}")
    return piece


def _read(path: Path, index: int, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(index * PIECE_BYTES)
            piece = file.read(piece_bytes(size, index))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if len(piece) != piece_bytes(size, index):
        raise DataError(f"{path} is shorter than it was")
    return piece


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}") from error
