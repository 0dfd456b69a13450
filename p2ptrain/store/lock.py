"""A lock that ends with its process: only one node uses a directory, and only one process uses an identity.

Two processes with one key would contradict each other in public. flock is released however the process ends. The lock
file is never removed, because then two processes could each lock a different file of the same name."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Self

from p2ptrain.errors import ConfigError
from p2ptrain.files import make_directory, trouble

LOCK_NAME = "lock"
LOCK_SUFFIX = ".lock"
PID_BYTES = 20
FIX = "Stop that process first, or give this node another"


class Lock:
    """An exclusive file lock, held until `release` or until the process ends."""

    def __init__(self, path: Path, what: str) -> None:
        """Raises ConfigError if another process holds the lock; `what` names the locked thing in that message."""
        self.path = path
        make_directory(path.parent)
        with trouble(path, "cannot be locked"):
            self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # In place and of constant length, so that it needs no new space on a full disk.
                os.pwrite(self._descriptor, b"%-*d\n" % (PID_BYTES - 1, os.getpid()), 0)
            except BlockingIOError:
                holder = os.pread(self._descriptor, PID_BYTES, 0).decode("ascii", "replace").strip()
                self.release()
                who = f"process {holder}" if holder.isdigit() else "another process"
                raise ConfigError(f"{what} is in use by {who}", source=str(path), fix=FIX) from None
            except OSError:
                self.release()
                raise

    @classmethod
    def of_directory(cls, directory: Path) -> Self:
        """Locks a directory that only one process may write to."""
        return cls(directory / LOCK_NAME, f"the directory {directory}")

    @classmethod
    def of_identity(cls, key_file: Path) -> Self:
        """Locks the use of a key, whatever links lead to its file."""
        return cls(beside(key_file, LOCK_SUFFIX), f"the identity {key_file}")

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def beside(key_file: Path, suffix: str) -> Path:
    """Returns a path beside the key's real file: a key with two names is still one key."""
    file = Path(os.path.realpath(key_file))  # Path.resolve raises where links lead in a circle
    return file.with_name(file.name + suffix)
