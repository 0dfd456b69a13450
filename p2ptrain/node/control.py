"""The control socket: the owner's commands reach the daemon as one JSON object per line, over a Unix socket.

Only the owner can open the socket. It is in the data directory, as a logout removes the user's runtime directory. Where
the file system has no sockets, or the path is longer than a socket's 107 bytes, it is in a private directory elsewhere.
`daemon.json` in the data directory names its path."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from p2ptrain.errors import NoDaemonError, P2ptrainError, SilentDaemonError
from p2ptrain.files import DiskError, replace_file

NAME, SOCKET_NAME = "daemon.json", "control.sock"
REQUEST_BYTES_MAX = 65_536  # a prompt is the longest
REPLY_BYTES_MAX = 2**24  # the status of a swarm of hundreds is below 1 MiB
CONNECTIONS_MAX = 16
CLIENT_SECONDS = 30.0  # for a client to ask, or to read the answer
LOOK_SECONDS = 3.0  # for queries that are answered at once and can be repeated
ANSWER_SECONDS = 30.0  # for an order; an early one waits until the node has started
SAMPLE_SECONDS = 600.0  # for a text sample, a checkpoint or an audit, which wait for the current training to end
SLACK_SECONDS = 5.0  # for a busy machine to answer that it took too long

log = logging.getLogger("p2ptrain.node")
Answer = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class Control:
    """The daemon's end of the control socket."""

    def __init__(self, data_dir: Path, runtime_dir: Path, answer: Answer) -> None:
        self.note, self.socket, self.answer = data_dir / NAME, data_dir.absolute() / SOCKET_NAME, answer
        self._elsewhere = runtime_dir / SOCKET_NAME
        self._server: asyncio.Server | None = None
        self._open = 0

    async def start(self) -> None:
        try:
            bound = _bound(self.socket)
        except OSError:
            self.socket = self._elsewhere
            bound = _bound(self.socket)
        self._server = await asyncio.start_unix_server(self._serve, sock=bound, limit=REQUEST_BYTES_MAX)
        note = json.dumps({"pid": os.getpid(), "socket": str(self.socket)}) + "\n"
        try:
            replace_file(self.note, note.encode(), is_synced=False)
        except DiskError as error:  # the start may make room
            log.warning("%s; until a restart the node takes no commands", error)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for path in (self.note, self.socket):
            path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open > CONNECTIONS_MAX:
                reply: dict[str, Any] = {"error": f"busy: {CONNECTIONS_MAX} commands are waiting already; try again"}
            else:
                async with asyncio.timeout(CLIENT_SECONDS):
                    line = await reader.readline()
                reply = await self._reply(line)
            async with asyncio.timeout(CLIENT_SECONDS):
                writer.write(json.dumps(reply).encode() + b"\n")
                await writer.drain()
        except (TimeoutError, ConnectionError, ValueError, asyncio.LimitOverrunError):
            pass  # the client went away, or did not send a line
        finally:
            self._open -= 1
            writer.close()

    async def _reply(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            return {"error": "not JSON"}
        if not isinstance(request, dict):
            return {"error": "not an object"}
        try:
            async with asyncio.timeout(_answer_seconds(request)):
                return await self.answer(request)
        except TimeoutError:
            return {"error": f"busy: no answer within {_answer_seconds(request):.0f} s"}
        except P2ptrainError as error:
            return {"error": str(error)}


def _bound(path: Path) -> socket.socket:
    """Makes a socket at a path. Nobody can connect before it listens, and then it is its owner's alone."""
    path.unlink(missing_ok=True)
    bound = socket.socket(socket.AF_UNIX)
    try:
        bound.bind(str(path))
        path.chmod(0o600)
    except OSError:
        bound.close()
        raise
    return bound


def _answer_seconds(request: dict[str, Any]) -> float:
    match request.get("do"):
        case "sample" | "checkpoint" | "audit":
            return SAMPLE_SECONDS
        case "status" | "peers" | "rounds" | "agenda":
            return LOOK_SECONDS
    return ANSWER_SECONDS


def _refused(data_dir: Path, error: OSError) -> P2ptrainError:
    what = f"this user may not ask the daemon in {data_dir}, if one runs: {error.strerror}"
    return P2ptrainError(f"{what}. Ask as the user that runs it, such as with sudo")


def ask(data_dir: Path, request: dict[str, Any], seconds: float | None = None) -> dict[str, Any]:
    """Sends a request to the daemon of a data directory and returns its answer."""
    try:
        note = json.loads((data_dir / NAME).read_text())
        path, pid = str(note["socket"]), int(note["pid"])
    except PermissionError as error:
        raise _refused(data_dir, error) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NoDaemonError(f"no daemon is running in {data_dir}") from error
    line = json.dumps(request).encode() + b"\n"
    if len(line) > REQUEST_BYTES_MAX:
        raise P2ptrainError(f"the request has {len(line)} bytes; the limit is {REQUEST_BYTES_MAX}")
    reply = bytearray()
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(_answer_seconds(request) + SLACK_SECONDS if seconds is None else seconds)
            client.connect(path)
            with suppress(ConnectionError):  # beyond the limit, the daemon answers without reading
                client.sendall(line)
            while not reply.endswith(b"\n"):
                part = client.recv(65_536)
                if not part or len(reply) > REPLY_BYTES_MAX:
                    break
                reply += part
    except (TimeoutError, BlockingIOError) as error:  # BlockingIOError: the daemon's backlog is full
        raise SilentDaemonError(f"the daemon in {data_dir} (pid {pid}) does not answer; it may be suspended") from error
    except PermissionError as error:
        raise _refused(data_dir, error) from error
    except OSError as error:
        what = f"no daemon is running in {data_dir}; the last one (pid {pid}) did not shut down cleanly"
        raise NoDaemonError(what) from error
    try:
        answer = json.loads(reply)
    except ValueError as error:
        what = f"the daemon in {data_dir} (pid {pid}) did not finish its answer: it has ended, or its log has an error"
        raise SilentDaemonError(what) from error
    if not isinstance(answer, dict):
        raise NoDaemonError(f"the process that answers in {data_dir} is not a p2ptrain daemon")
    if "error" in answer:
        raise P2ptrainError(str(answer["error"]))
    return answer
