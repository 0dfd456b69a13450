"""Starts daemons in a nursery (nursery_process.py), with the interface of subprocess.Popen."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import IO

NURSERY = "tests.helpers.nursery_process"  # as a module: of this checkout, and so is what it imports
SEEDS = ("1", "2")  # of hashes: nodes that differ in the order of their sets have to agree all the same
BORN_SECONDS = 120.0  # the first one waits until everything is imported


class Born:
    """A daemon's process, which is not our child."""

    def __init__(self, line: socket.socket, request: bytes, log: IO[bytes]) -> None:
        self._told, told = os.pipe()
        self.returncode: int | None = None
        self._heard = b""
        with ExitStack() as stack:  # should we be interrupted, whoever is born later has nobody to tell, and ends
            stack.callback(os.close, self._told)
            try:
                socket.send_fds(line, [request], [log.fileno(), told])
            finally:
                os.close(told)
            assert self._hear(1, BORN_SECONDS), "nothing is born"
            stack.pop_all()
        self.pid = int(self._heard.split()[0])

    def _hear(self, lines: int, seconds: float | None) -> bool:
        while self._heard.count(b"\n") < lines:
            readable, _, _ = select.select([self._told], [], [], seconds)
            if not readable:
                return False
            part = os.read(self._told, 64)
            assert part, "its keeper has ended before it"
            self._heard += part
        return True

    def poll(self) -> int | None:
        if self.returncode is None and self._hear(2, 0):
            self.returncode = int(self._heard.split()[1])
            os.close(self._told)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not self._hear(2, timeout):
            raise subprocess.TimeoutExpired("p2ptrain", timeout or 0.0)
        status = self.poll()
        assert status is not None
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """A process that forks daemons. It ends with us at the latest, since only we hold the other end of its socket."""

    def __init__(self, seed: str) -> None:
        self.line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", NURSERY, str(theirs.fileno())],
                stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True,
                cwd=Path(__file__).parents[2], env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": seed},
            )  # fmt: skip
        atexit.register(self._close)

    def _close(self) -> None:
        self.line.close()
        self.process.wait()


@cache
def nurseries() -> tuple[Nursery, ...]:
    return tuple(map(Nursery, SEEDS))


_turns = itertools.count()


def born(arguments: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> Born | subprocess.Popen[bytes]:
    """Starts a daemon in the next nursery; by itself where there is none: macOS sends no packets between processes, and
    what has imported torch does not fork there."""
    if sys.platform != "linux":
        command = [sys.executable, "-m", "p2ptrain", *arguments]
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    request = {"arguments": list(arguments), "environment": dict(environment), "directory": str(Path.cwd())}
    nursery = nurseries()[next(_turns) % len(SEEDS)]
    return Born(nursery.line, json.dumps(request).encode(), log)
