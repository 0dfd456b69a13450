"""Stores payloads by digest: in memory while a round is being agreed on, and in files once they must last.

Usually a payload that no round takes never touches the disk. But if memory gets short, the least recently used payloads
are written to files without syncing, because the core relies on every payload that was reported to it. Digests are
checked on reading; a damaged file counts as missing."""

from __future__ import annotations

import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable
from pathlib import Path

from p2ptrain.core.messages import payload_digest
from p2ptrain.digest import DIGEST_BYTES, PIECE_BYTES, piece_count
from p2ptrain.files import entries, forget, make_directory, read, read_at, replace_file, sync, trouble

MEMORY_BYTES = 256 * 2**20  # a round of 256 contributions of 1 MB; a guess at what a laptop can spare

_log = logging.getLogger("p2ptrain.store")
_NAME = re.compile(f"[0-9a-f]{{{2 * DIGEST_BYTES}}}")


class PayloadStore:
    """A node's payloads. Threads may share it."""

    def __init__(self, directory: Path, memory_bytes: int = MEMORY_BYTES) -> None:
        self.directory, self.memory_bytes = directory, memory_bytes
        make_directory(directory)
        self._memory: OrderedDict[bytes, bytes] = OrderedDict()  # least recently used first
        self._bytes = 0  # bytes of payloads in memory
        self._lasting: set[bytes] = set()  # written and synced by this process
        self._spilled: set[bytes] = set()  # written by this process, not synced
        self.damaged = 0  # damaged files that were found and removed
        self._lock = threading.RLock()  # protects the tables
        self._writing = threading.Lock()  # held while a file is written; its holder does not take the other lock

    def put(self, name: bytes, content: bytes) -> None:
        """Stores a payload whose digest the caller has checked."""
        with self._lock:
            if name in self._memory or name in self._lasting or name in self._spilled:
                return  # files of earlier processes are written again, as they may be damaged
            self._memory[name] = content
            self._bytes += len(content)
            while self._bytes > self.memory_bytes:
                oldest = next(iter(self._memory))
                if oldest not in self._lasting:
                    with self._writing:
                        replace_file(self._path_of(oldest), self._memory[oldest], is_synced=False)
                    self._spilled.add(oldest)
                self._drop(oldest)

    def keep(self, names: Iterable[bytes]) -> list[bytes]:
        """Makes these payloads durable, and returns those that are missing."""
        missing: list[bytes] = []
        written: list[bytes] = []
        with self._lock:
            fleeting = sorted({*names} - self._lasting)
        for name in fleeting:
            content = self.get(name)
            if content is None:
                missing.append(name)
                continue
            with self._writing:  # spilled files are written again, because a failed sync does not fail twice
                replace_file(self._path_of(name), content)
            written.append(name)
        if written:
            with trouble(self.directory):
                sync(self.directory)
        with self._lock:
            self._lasting.update(written)
            self._spilled.difference_update(written)
        return missing

    def fleeting(self, names: Iterable[bytes]) -> list[bytes]:
        """Returns which of these payloads are here but would not survive a power cut."""
        with self._lock:
            return [
                name for name in names if name in self._spilled or (name in self._memory and name not in self._lasting)
            ]

    def get(self, name: bytes) -> bytes | None:
        with self._lock:
            content = self._memory.get(name)
            if content is not None:
                self._memory.move_to_end(name)
                return content
        path = self._path_of(name)
        content = None
        try:
            content = read(path)
            if content is not None and payload_digest(content) != name:
                content = None
                _log.warning("removed a damaged payload: path %s", path)
                with self._lock:
                    self.damaged += 1
                    forget(path)
        finally:
            if content is None:  # so that `put` takes it again
                with self._lock:
                    self._lasting.discard(name)
                    self._spilled.discard(name)
        return content

    def read_piece(self, name: bytes, index: int) -> bytes | None:
        """Returns a piece for a peer, which will check it; None if it does not exist."""
        size = self.size(name)
        if size is None or not 0 <= index < piece_count(size):
            return None
        start = index * PIECE_BYTES
        content = self._memory.get(name)
        if content is not None:
            return content[start : start + PIECE_BYTES]
        return read_at(self._path_of(name), start, PIECE_BYTES)

    def size(self, name: bytes) -> int | None:
        content = self._memory.get(name)
        if content is not None:
            return len(content)
        path = self._path_of(name)
        with trouble(path, "cannot be read"):
            try:
                return path.stat().st_size
            except FileNotFoundError:
                return None

    def __contains__(self, name: bytes) -> bool:
        return self.size(name) is not None

    def names(self) -> set[bytes]:
        with self._lock:
            return {*self._memory, *self._lasting, *self._spilled}

    def prune(self, keep: Collection[bytes], known: Collection[bytes] | None = None) -> None:
        """Removes all payloads except those in `keep`, and new ones, which were stored but are not in `known`."""
        with self._lock:
            if known is not None:
                keep = {*keep, *self.names().difference(known)}
            for name in [name for name in self._memory if name not in keep]:
                self._drop(name)
            self._lasting.intersection_update(keep)
            self._spilled.intersection_update(keep)
            for path in entries(self.directory):
                if not _NAME.fullmatch(path.name) or bytes.fromhex(path.name) not in keep:
                    forget(path)

    def _drop(self, name: bytes) -> None:
        self._bytes -= len(self._memory.pop(name))

    def _path_of(self, name: bytes) -> Path:
        return self.directory / name.hex()
