"""Writes figures to Weights & Biases, through the wandb package in a child process (wandb_child.py).

The W&B run is written to a directory, from which `wandb sync` can upload it. It is uploaded at once only if the
environment has WANDB_API_KEY. Each start of the node creates a W&B run, all in one project.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from p2ptrain.config import RunConfig
from p2ptrain.errors import ConfigError
from p2ptrain.observe.schema import RoundRecord
from p2ptrain.observe.tracking import tracked_of

PROGRAM = Path(__file__).with_name("wandb_child.py")
OWN = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}  # no error reports to W&B
WORDS_BYTES_MAX = 2_000  # at the end of its output, to find the last line
SAID_BYTES_MAX = 2**20  # of its output on disk; beyond that only the end is kept
LOOK_SECONDS = 1.0  # between checks of its size


def require_wandb() -> None:
    """ConfigError if the wandb package is not installed."""
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError("needs wandb", key="tracking.wandb", fix="Run: pip install 'p2ptrain[wandb]'")


class WandbRun:
    """Writes to a W&B run, in one thread; `kill` may be called from any."""

    def __init__(self, directory: Path, run: RunConfig, project: str = "") -> None:
        require_wandb()
        self.directory = directory.absolute()
        self._project = project or f"{run.name}-{run.run_id[:8]}"
        self._config = {"name": run.name, "run_id": run.run_id}
        self.child: subprocess.Popen[bytes] | None = None
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the child
        fcntl.fcntl(self._said, fcntl.F_SETFL, os.O_APPEND)  # also for the child, so that it continues after truncation
        self._kept = b""  # the end of what was cut off
        self._is_closed, self._cutting = threading.Event(), threading.Lock()
        self._bounding = threading.Thread(target=self._bound, name="wandb output", daemon=True)

    def write(self, record: RoundRecord) -> None:
        """Writes a round's figures. OSError if the child has ended; a restart would take seconds each round."""
        if self.child is None:
            self.child = self._start()
        figures = {name: value for name, value in tracked_of(record).items() if math.isfinite(value)}
        line = json.dumps({"round": record.round, **figures}).encode() + b"\n"
        assert self.child.stdin is not None
        try:
            self.child.stdin.write(line)
            self.child.stdin.flush()
        except (OSError, ValueError) as error:  # the pipe is closed
            raise OSError(self._last_words()) from error

    def _start(self) -> subprocess.Popen[bytes]:
        self.directory.mkdir(parents=True, exist_ok=True)
        told = {"directory": str(self.directory), "project": self._project, "config": self._config}
        child = subprocess.Popen(  # noqa: S603
            [sys.executable, "-P", str(PROGRAM), json.dumps(told)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._said,
            env={**os.environ, **OWN},
            start_new_session=True,  # Ctrl-C in the terminal is for the node alone
        )
        self._bounding.start()
        return child

    def close(self) -> None:
        """Waits until the child has written everything. OSError if it failed."""
        try:
            if self.child is None:
                return
            assert self.child.stdin is not None
            with suppress(OSError):
                self.child.stdin.close()
            if self.child.wait():
                raise OSError(self._last_words())
        finally:
            self._is_closed.set()
            if self._bounding.is_alive():
                self._bounding.join()
            self._said.close()

    def kill(self) -> None:
        if self.child is not None:
            self.child.kill()

    def _bound(self) -> None:
        """Keeps the child's output from filling the disk."""
        while not self._is_closed.wait(LOOK_SECONDS):
            if os.fstat(self._said.fileno()).st_size > SAID_BYTES_MAX:
                with self._cutting, suppress(OSError):  # a full disk cannot hold the end either
                    self._kept = self._end()  # not written back: the child may have written more in between
                    os.ftruncate(self._said.fileno(), 0)

    def _end(self) -> bytes:
        size = os.fstat(self._said.fileno()).st_size
        return os.pread(self._said.fileno(), WORDS_BYTES_MAX, max(size - WORDS_BYTES_MAX, 0))

    def _last_words(self) -> str:
        with self._cutting:
            text = (self._kept + self._end()).decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return f"wandb ended: {lines[-1]}" if lines else "wandb ended"
