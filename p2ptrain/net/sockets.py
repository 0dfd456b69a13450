"""Where p2pd and we find each other: sockets in a directory that only we can enter, and that may go while we live.

Logging out removes the user's runtime directory, a cleaner what is old in /tmp. The sockets then have no name any more,
and nobody can connect. So each p2pd is started with sockets that are there: the directory is made again under its name
or, where nothing can be made any more or another user was quicker, under another.
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
from p2ptrain.net.streams import STREAMS_MAX
from p2ptrain.net.transport import TransportError

CONTROL_SOCKET, STREAMS_SOCKET = "p2pd.sock", "streams.sock"  # p2pd's, and ours for the streams that it brings

Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]


class Sockets:
    """Of one node."""

    def __init__(self, directory: Path, accept: Accept) -> None:
        self.directory, self._accept = directory, accept
        self._server: asyncio.Server | None = None
        self._own: list[Path] = []  # directories that were made here, and go with us

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
        """See to it that p2pd has a directory for its socket, and finds ours."""
        try:
            if not _is_or_becomes_ours(self.directory):
                self.directory = Path(tempfile.mkdtemp(prefix="p2ptrain-"))
                self._own.append(self.directory)
            if self._server is None or not self.streams.is_socket():
                await self._serve()
            self.control.unlink(missing_ok=True)
        except OSError as error:
            raise TransportError(f"no sockets in {self.directory}: {error.strerror or error}") from error

    async def _serve(self) -> None:
        if self._server is not None:
            self._server.close()
        self._server = await asyncio.start_unix_server(
            self._accept,
            self.streams,
            limit=BUFFER_BYTES,
            backlog=STREAMS_MAX,
            start_serving=False,  # which can be cancelled, and nobody would know of the socket
        )
        await self._server.start_serving()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for each in self._own:
            shutil.rmtree(each, ignore_errors=True)


def _is_or_becomes_ours(directory: Path) -> bool:
    """Whoever can enter it speaks as this node: a name that was free for a moment may be another's by now."""
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        status = directory.lstat()
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
    except OSError:
        return False
    return True
