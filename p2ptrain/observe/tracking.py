"""Tracking: the figures of each round for TensorBoard (tensorboard.py) and Weights & Biases (wandb_run.py).

Nothing waits for a tracker: a thread writes the records, and if the tracker is too slow or fails, figures are lost and
a warning is logged. The node's own records (rounds.py) are unaffected, and `p2ptrain report --jsonl` prints the same
figures from them.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from p2ptrain.observe.figures import figures_of
from p2ptrain.observe.schema import RoundRecord

WAITING_MAX = 256  # rounds waiting to be written; more are lost
CLOSE_SECONDS = 10.0  # for the last ones when the node ends; W&B without a network takes 0.2 s

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
    """Formats a round as a line of JSON."""
    told = {"round": record.round, "branch": record.branch.hex(), "root": record.root.hex()}
    figures = {name: value if math.isfinite(value) else None for name, value in tracked_of(record).items()}
    return json.dumps({**told, "applied_at": record.applied_at, **figures})


# ---------------------------------------------------------------------------------------------------
# The thread


class Tracker(Protocol):
    """A destination for figures. On an OSError they are lost; `kill` ends a blocked call from another thread."""

    directory: Path

    def write(self, record: RoundRecord) -> None: ...
    def close(self) -> None: ...
    def kill(self) -> None: ...


class Tracking:
    """Hands the rounds of a run to one tracker."""

    def __init__(self, tracker: Tracker) -> None:
        self.lost = 0  # rounds
        self._tracker = tracker
        self._waiting, self._lock = 0, threading.Lock()
        self.thread = ThreadPoolExecutor(1, "tracking")

    def close(self) -> None:
        """Waits until everything is written, but not for long."""
        ending = self.thread.submit(self._tracker.close)
        try:
            ending.result(CLOSE_SECONDS)
        except TimeoutError:
            log.warning("%s: writing the last figures took too long; they may be lost", self._tracker.directory)
            self._tracker.kill()
        except OSError as error:
            log.warning("%s: the last figures may be lost: %s", self._tracker.directory, error)
        self.thread.shutdown()

    def note(self, record: RoundRecord) -> None:
        """Queues the record of an applied round."""
        with self._lock:
            if self._waiting >= WAITING_MAX:
                self._lose("the tracker does not keep up")
                return
            self._waiting += 1
        self.thread.submit(self._write, record)

    def _write(self, record: RoundRecord) -> None:
        try:
            self._tracker.write(record)
        except OSError as error:
            with self._lock:
                self._lose(error.strerror or str(error))
        finally:
            with self._lock:
                self._waiting -= 1

    def _lose(self, why: str) -> None:
        if not self.lost:
            log.warning("%s: figures are not tracked: %s (logged only once)", self._tracker.directory, why)
        self.lost += 1
