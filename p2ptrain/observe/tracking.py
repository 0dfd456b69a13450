"""Tracking: the figures of each round for TensorBoard and Weights & Biases.

Nothing waits for a tracker: a thread writes the records, and if the tracker is too slow or fails, figures are lost and
a warning is logged. The node's own records (rounds.py) are unaffected: `p2ptrain report --jsonl` prints them.

Of the tensorboard package only its framing of events is used, not its writer, which has its own thread and ends for
good on a disk error. The wandb package runs in a child process (wandb_child.py). Its run is written to a directory,
from which `wandb sync` can upload it; it is uploaded at once only if the environment has WANDB_API_KEY. Each start of
the node creates a W&B run, all in one project."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import math
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from p2ptrain.config import RunConfig
from p2ptrain.errors import ConfigError
from p2ptrain.observe.figures import figures_of
from p2ptrain.observe.schema import RoundRecord

WAITING_MAX = 256  # rounds waiting to be written; more are lost
CLOSE_SECONDS = 10.0  # for the last ones when the node ends; W&B without a network takes 0.2 s
KILL_SECONDS = 5.0  # for a tracker that was killed; a call to a file server that is away never returns
VERSION = "brain.Event:2"  # in the first event of a file
PROGRAM = Path(__file__).with_name("wandb_child.py")
OWN = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}  # no error reports to W&B
WORDS_BYTES_MAX = 2_000  # kept of the end of its output, to find the last line
WORDS_SECONDS = 1.0  # to hear the last ones of a child that has ended; its service may have the pipe for longer
READ_BYTES = 65_536  # of its output at a time

log = logging.getLogger("p2ptrain.observe")


def tracked_of(record: RoundRecord) -> dict[str, float]:
    """Returns a record's figures by their names in trackers, which group them by the part before the slash."""
    found = {}
    for each in figures_of(RoundRecord):
        value = each.number(record)
        if value is not None and not (each.figure.skips_zero and value == 0.0):
            found[each.figure.tracked or f"round/{each.name}"] = value
    return found


def line_of(record: RoundRecord) -> str:
    told = {"round": record.round, "branch": record.branch.hex(), "root": record.root.hex()}
    figures = {name: value if math.isfinite(value) else None for name, value in tracked_of(record).items()}
    return json.dumps({**told, "applied_at": record.applied_at, **figures})


class Tracker:
    """A destination for figures. On an error they are lost; `kill` ends a blocked call from another thread."""

    directory: Path

    def write(self, record: RoundRecord) -> None:
        raise NotImplementedError

    def close(self) -> None: ...
    def kill(self) -> None: ...


def require(package: str) -> None:
    """ConfigError if the package of a tracker is not installed."""
    if importlib.util.find_spec(package) is None:
        fix = f"Run: pip install 'p2ptrain[{package}]', or remove the key"
        raise ConfigError(f"needs {package}", key=f"tracking.{package}", fix=fix)


class Tracking:
    """Hands the rounds of a run to one tracker."""

    def __init__(self, tracker: Tracker) -> None:
        self.lost = 0  # rounds
        self._tracker = tracker
        self._room, self._lock = threading.Semaphore(WAITING_MAX), threading.Lock()
        self.jobs = SimpleQueue[Callable[[], object]]()  # for the thread, in order
        self._is_over = threading.Event()
        threading.Thread(target=self._work, name="tracking", daemon=True).start()  # Python's exit does not wait for it

    def _work(self) -> None:
        while not self._is_over.is_set():
            self.jobs.get()()

    def close(self) -> None:
        """Waits until everything is written, but not for long."""
        self.jobs.put(self._end)
        if not self._is_over.wait(CLOSE_SECONDS):
            log.warning("%s: writing the last figures took too long; they may be lost", self._tracker.directory)
            self._tracker.kill()
            self._is_over.wait(KILL_SECONDS)

    def _end(self) -> None:
        try:
            self._tracker.close()
        except OSError as error:
            log.warning("%s: the last figures may be lost: %s", self._tracker.directory, error)
        finally:
            self._is_over.set()

    def note(self, record: RoundRecord) -> None:
        if self._room.acquire(blocking=False):
            self.jobs.put(partial(self._write, record))
        else:
            self._lose("the tracker does not keep up")

    def _write(self, record: RoundRecord) -> None:
        try:
            self._tracker.write(record)
        except (OSError, ImportError, TypeError, ValueError) as error:  # the package is not the one that we know
            self._lose(getattr(error, "strerror", None) or str(error))
        finally:
            self._room.release()

    def _lose(self, why: str) -> None:
        with self._lock:
            if not self.lost:
                log.warning("%s: figures are not tracked: %s (logged only once)", self._tracker.directory, why)
            self.lost += 1


class TensorBoard(Tracker):
    """Writes an event file for each start of the node; TensorBoard shows them as one run."""

    def __init__(self, directory: Path, run: RunConfig) -> None:
        require("tensorboard")
        self.directory = directory / f"{run.name}-{run.run_id[:8]}"
        self._path: Path | None = None

    def write(self, record: RoundRecord) -> None:
        figures = {name: value for name, value in tracked_of(record).items() if math.isfinite(value)}
        summary = {"value": [{"tag": name, "simple_value": value} for name, value in figures.items()]}
        events: list[dict[str, Any]] = [{"step": record.round, "summary": summary}]
        path, self._path = self._path, None  # after an error a new file begins: this one may end amid an event
        if path is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{record.applied_at:.0f}.{socket.gethostname()}.{os.getpid()}"
            path = self.directory / name
            events.insert(0, {"file_version": VERSION})
        protobuf = importlib.import_module(
            "tensorboard.compat.proto.event_pb2"
        )  # imported by name, for mypy where the extra is missing
        framed = importlib.import_module("tensorboard.summary.writer.record_writer").RecordWriter
        with path.open("ab") as file:
            for event in events:
                framed(file).write(protobuf.Event(wall_time=record.applied_at, **event).SerializeToString())
        self._path = path


class WandbRun(Tracker):
    """Writes to a W&B run, in one thread; `kill` may be called from any."""

    def __init__(self, directory: Path, run: RunConfig, project: str = "") -> None:
        require("wandb")
        self.directory = directory.absolute()
        self._project = project or f"{run.name}-{run.run_id[:8]}"
        self._config = {"name": run.name, "run_id": run.run_id}
        self.child: subprocess.Popen[bytes] | None = None
        self._words = b""  # the end of its output
        self._listening = threading.Thread(target=self._listen, name="wandb output", daemon=True)

    def write(self, record: RoundRecord) -> None:
        """Writes a round's figures. OSError if the child has ended; a restart would take seconds each round."""
        if self.child is None:
            self.child = self._start()
            self._listening.start()
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
        return subprocess.Popen(  # noqa: S603
            [sys.executable, "-P", str(PROGRAM), json.dumps(told)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, **OWN},
            start_new_session=True,  # Ctrl-C in the terminal is for the node alone
        )

    def close(self) -> None:
        """Waits until the child has written everything. OSError if it failed."""
        if self.child is None:
            return
        assert self.child.stdin is not None
        with suppress(OSError):
            self.child.stdin.close()
        if self.child.wait():
            raise OSError(self._last_words())

    def kill(self) -> None:
        if self.child is not None:
            self.child.kill()

    def _listen(self) -> None:
        assert self.child is not None
        assert self.child.stderr is not None
        with self.child.stderr as said:
            while part := os.read(said.fileno(), READ_BYTES):
                self._words = (self._words + part)[-WORDS_BYTES_MAX:]

    def _last_words(self) -> str:
        self._listening.join(WORDS_SECONDS)
        lines = [line.strip() for line in self._words.decode(errors="replace").splitlines() if line.strip()]
        return f"wandb ended: {lines[-1]}" if lines else "wandb ended"
