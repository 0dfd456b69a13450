"""The Unix sockets between p2pd and this process, in a private directory that may disappear while they run.

Logging out removes the user's runtime directory, and cleaners remove old files in /tmp. The sockets then have no
name, and nobody can connect. So they are checked before each start of p2pd: a missing directory is made again under
the same name or, if that is impossible or another user was quicker, under a different one.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from p2ptrain.net.frames import BUFFER_BYTES
from p2ptrain.net.libp2p.streams import STREAMS_MAX
from p2ptrain.net.transport import TransportError

CONTROL_SOCKET, STREAMS_SOCKET = "p2pd.sock", "streams.sock"  # p2pd's, and ours for incoming streams

Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]


class Sockets:
    """The directory with p2pd's control socket and our socket for incoming streams."""

    def __init__(self, directory: Path, accept: Accept) -> None:
        self.directory, self._accept = directory, accept
        self._server: asyncio.Server | None = None
        self._own: list[Path] = []  # directories that we made and have to remove

    @property
    def control(self) -> Path:
        return self.directory / CONTROL_SOCKET

    @property
    def streams(self) -> Path:
        return self.directory / STREAMS_SOCKET

    @property
    def are_there(self) -> bool:
        return self.control.is_socket() and self.streams.is_socket()

    async def open(self) -> None:
        """Makes sure that the directory exists and that our socket is in it."""
        try:
            if not _is_or_becomes_ours(self.directory):
                self.directory = Path(tempfile.mkdtemp(prefix="p2ptrain-"))
                self._own.append(self.directory)
            if self._server is None or not self.streams.is_socket():
                await self._serve()
            self.control.unlink(missing_ok=True)
        except OSError as error:
            raise TransportError(f"cannot open sockets in {self.directory}: {error.strerror or error}") from error

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connects to p2pd."""
        try:
            return await asyncio.open_unix_connection(self.control, limit=BUFFER_BYTES)
        except OSError as error:
            raise TransportError(f"p2pd is gone: {error}") from error

    async def _serve(self) -> None:
        if self._server is not None:
            self._server.close()
        self._server = await asyncio.start_unix_server(
            self._accept,
            self.streams,
            limit=BUFFER_BYTES,
            backlog=STREAMS_MAX,
            start_serving=False,  # serving can be cancelled, and would then leak the socket
        )
        await self._server.start_serving()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for each in self._own:
            shutil.rmtree(each, ignore_errors=True)


def _is_or_becomes_ours(directory: Path) -> bool:
    """Makes the directory, or checks that an existing one is ours alone: anyone who can enter it can act as this
    node."""
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        status = directory.lstat()
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
    except OSError:
        return False
    return True
