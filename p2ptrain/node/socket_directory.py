"""A directory for sockets, which this process alone has, and a network beside the node's own."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path

from p2ptrain.config import NetworkConfig
from p2ptrain.errors import ConfigError
from p2ptrain.identity import Identity
from p2ptrain.net.transport import Transport
from p2ptrain.system import SOCKET_PATH_BYTES_MAX

SOCKETS_PREFIX = ".p2ptrain-"
SOCKETS_LOCK = ".lock"
BASE_MAX = SOCKET_PATH_BYTES_MAX - 67  # characters of the sockets' parent: hivemind adds 64 to this


@contextmanager
def private_directory() -> Iterator[Path]:
    """Makes a directory for sockets, readable by this user only. Its path is short: a socket's is bounded."""
    places = (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp", "/var/tmp")  # noqa: S108  # mkdtemp
    usable = [Path(place) for place in places if place and len(place) <= BASE_MAX and os.access(place, os.W_OK)]
    if not usable:
        fix = f"Name a directory that this user may write to, with a path of at most {BASE_MAX} characters"
        raise ConfigError("no directory for sockets", key="XDG_RUNTIME_DIR", fix=fix)
    base = usable[0]
    for left in base.glob(f"{SOCKETS_PREFIX}*/{SOCKETS_LOCK}"):
        with suppress(OSError):  # another user's, in use, or gone
            _remove_left(left)
    path, lock = _make_locked(base)
    try:
        yield path
    finally:
        with suppress(OSError):  # a cleaner of temporary files was quicker
            _remove(path)
        os.close(lock)


async def open_apart(stack: AsyncExitStack, network: NetworkConfig) -> Transport:
    """Starts a p2pd with a temporary identity, as the node's own may be in use."""
    from p2ptrain.net.libp2p.p2pd import P2pd  # noqa: PLC0415  # hivemind takes three seconds

    sockets = stack.enter_context(private_directory())
    identity = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "identity.key"
    Identity.make(identity)
    transport = await P2pd.start(identity, network, sockets)
    stack.push_async_callback(transport.close)
    return transport


def _make_locked(base: Path) -> tuple[Path, int]:
    """Makes a new directory and takes the lock in it, which is held as long as this process lives."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=SOCKETS_PREFIX, dir=base))  # 0700
        lock = os.open(path / SOCKETS_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            return path, lock
        os.close(lock)  # another node, just starting, has removed it before it was locked


def _remove_left(path: Path) -> None:
    """Removes the directory of a process that was killed; its lock is free."""
    lock = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(path.parent)
    finally:
        os.close(lock)


def _remove(directory: Path) -> None:
    """Removes the sockets, the lock and the directory. If it contains anything else, it is not ours and stays."""
    entries = sorted(directory.iterdir())
    if all(entry.is_socket() or entry.name == SOCKETS_LOCK for entry in entries):
        for entry in entries:  # the lock comes first: a process waiting for it sees that the directory is gone
            entry.unlink(missing_ok=True)
        directory.rmdir()
