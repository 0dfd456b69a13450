"""Tracking: the figures of each round for other tools.

They are always written as JSON lines beside the store (`JsonLines`), and where the owner says so also for TensorBoard
(tensorboard.py) and Weights & Biases (wandb_run.py).

Nothing waits for any of it: records go to a thread of their own, and where what takes them is too slow for rounds, or
takes nothing, figures are lost and said to be. The records of the rounds themselves (store/records.py) are not touched
by that.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Protocol

from p2ptrain.store.records import RoundRecord

WAITING_MAX = 256  # rounds that wait to be written; beyond it they are lost
CLOSE_SECONDS = 10.0  # for the last ones when the node ends; a run of W&B's without a network takes 0.2 s
FIGURES_NAME, OLD_FIGURES_NAME = "figures.jsonl", "figures.old.jsonl"
FIGURES_BYTES_MAX = 2**26  # of one of the two, some 100,000 rounds
LINE_BYTES_MAX = 4_096  # it takes 700

log = logging.getLogger("p2ptrain.daemon")


def figures_of(record: RoundRecord) -> dict[str, float]:
    """By the names under which they are shown; the part before the slash makes a group."""
    phases = ("train", "collect", "agree", "apply")
    found = {
        "round/seconds": record.seconds,
        **{f"round/{phase}_seconds": getattr(record, f"{phase}_seconds") for phase in phases},
        "round/contributors": len(record.contributors),
        "round/tries": record.views,
        "round/late": record.late,
        "round/refused": sum(record.refused.values()),
        "bytes/sent": record.bytes_sent,
        "bytes/received": record.bytes_received,
        "mine/taken": len(record.mine_taken),
        "mine/tokens": record.tokens,
    }
    if record.loss is not None:
        found |= {"mine/loss": record.loss, "mine/tokens_per_second": record.tokens_per_second}
    return {name: float(value) for name, value in found.items()}


# ---------------------------------------------------------------------------------------------------
# The thread


class Writer(Protocol):
    """Where figures go. OSError: they are lost; `kill` ends the others, from another thread."""

    directory: Path

    def write(self, record: RoundRecord) -> None: ...
    def close(self) -> None: ...
    def kill(self) -> None: ...


class Tracking:
    """Of one run, for one tool."""

    def __init__(self, writer: Writer) -> None:
        self.lost = 0  # rounds
        self._writer = writer
        self._waiting, self._lock = 0, threading.Lock()
        self._thread = ThreadPoolExecutor(1, "tracking")

    def close(self) -> None:
        """When what was noted is written, or took too long."""
        ending = self._thread.submit(self._writer.close)
        try:
            ending.result(CLOSE_SECONDS)
        except TimeoutError:
            log.warning("%s: the last figures of rounds took too long, and may be lost", self._writer.directory)
            self._writer.kill()
        except OSError as error:
            log.warning("%s: the last figures of rounds may be lost: %s", self._writer.directory, error)
        self._thread.shutdown()

    def note(self, record: RoundRecord) -> None:
        """A round that was applied. Returns at once."""
        with self._lock:
            if self._waiting >= WAITING_MAX:
                self._lose("what takes them does not keep up")
                return
            self._waiting += 1
        self._thread.submit(self._write, record)

    def _write(self, record: RoundRecord) -> None:
        try:
            self._writer.write(record)
        except OSError as error:
            with self._lock:
                self._lose(error.strerror or str(error))
        finally:
            with self._lock:
                self._waiting -= 1

    def _lose(self, why: str) -> None:
        if not self.lost:
            log.warning("%s: figures of rounds are not tracked: %s; this is said once", self._writer.directory, why)
        self.lost += 1


# ---------------------------------------------------------------------------------------------------
# JSON lines


class JsonLines:
    """A line for each round, in order as it was applied here; a round that is lived again has another line.

    A file that has grown takes the place of the one before.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write(self, record: RoundRecord) -> None:
        figures = {name: value if math.isfinite(value) else None for name, value in figures_of(record).items()}
        told = {"round": record.round, "branch": record.branch.hex(), "root": record.root.hex()}
        line = json.dumps({**told, "applied_at": record.applied_at, **figures}).encode() + b"\n"
        path = self.directory / FIGURES_NAME
        if path.exists():
            if not path.is_file():
                raise OSError(f"{path} is no file")  # a pipe would hold up the end of the node
            if path.stat().st_size + len(line) > FIGURES_BYTES_MAX:
                path.replace(self.directory / OLD_FIGURES_NAME)
        with path.open("a+b") as file:
            _cut_torn(file)
            file.write(line)

    def close(self) -> None:
        """Nothing is open."""

    def kill(self) -> None:
        """Nothing runs."""


def _cut_torn(file: BinaryIO) -> None:
    """The power may have gone, or the disk have been full, while the last line was written."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - LINE_BYTES_MAX, 0))
    end = file.read()
    if not end.endswith(b"\n"):
        file.truncate(size - len(end) + end.rfind(b"\n") + 1)
