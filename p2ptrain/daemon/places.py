"""Where things lie on this machine's disk."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import platformdirs

from p2ptrain.config import NodeConfig
from p2ptrain.errors import ConfigError

PRIVATE_PREFIX = "p2ptrain-"
BASE_MAX = 40  # characters of where sockets lie: a socket's path may have 107, and hivemind's have 63 after this


def data_directory(config: NodeConfig) -> Path:
    """Everything that the node keeps is in here."""
    return Path(config.storage.directory or platformdirs.user_data_dir("p2ptrain"))


def identity_file(config: NodeConfig) -> Path:
    return Path(config.identity.file) if config.identity.file else data_directory(config) / "identity.key"


def run_directory(config: NodeConfig, run_id: bytes) -> Path:
    return data_directory(config) / "runs" / run_id.hex()[:16]


def dataset_directory(config: NodeConfig, manifest: str) -> Path:
    return data_directory(config) / "data" / manifest[:16]


@contextmanager
def private_directory() -> Iterator[Path]:
    """For sockets: short, because their paths may have 107 bytes, and open to nobody else."""
    places = (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp", "/var/tmp")  # noqa: S108  # mkdtemp
    usable = [Path(place) for place in places if place and len(place) <= BASE_MAX and os.access(place, os.W_OK)]
    if not usable:
        fix = f"Name a directory with at most {BASE_MAX} characters where this user may write"
        raise ConfigError("no place for sockets", key="XDG_RUNTIME_DIR", fix=fix)
    base = usable[0]
    _remove_left(base)
    path, lock = _make_locked(base)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _make_locked(base: Path) -> tuple[Path, int]:
    """A new directory, and the lock in it, which is held as long as this process lives."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=PRIVATE_PREFIX, dir=base))  # 0700
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            return path, lock
        os.close(lock)  # another start found it before it was locked, and has removed it


def _remove_left(base: Path) -> None:
    """What processes left that were killed: their locks are free."""
    for path in base.glob(f"{PRIVATE_PREFIX}*/lock"):
        with suppress(OSError):  # another user's, in use, or gone
            lock = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()  # before all else: whoever waits for the lock sees by this that it is gone
                shutil.rmtree(path.parent, ignore_errors=True)
            finally:
                os.close(lock)
