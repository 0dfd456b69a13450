"""The daemon's log: text on a terminal, JSON lines elsewhere.

A thread writes the lines, because the reader of stderr may stall (a pager, Ctrl-S, a log shipper that hangs) and block
the write, which must not block the node. Lines that do not fit in the queue meanwhile are dropped and counted."""

from __future__ import annotations

import io
import json
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from logging.handlers import QueueHandler
from time import monotonic

from p2ptrain.config import LoggingConfig
from p2ptrain.files import write_all

LINE_MAX = 2_000  # characters, and as many of a traceback: text from a peer must not fill the disk
LINES_MAX = 1_024  # waiting to be written: some minutes of lines, and a few megabytes
FLUSH_SECONDS = 2.0  # for the last lines at exit: a reader that has not read by then never will


def plain(text: str) -> str:
    """Replaces characters that control a terminal (C0, C1, text direction) in text that may come from a peer.

    Unlike `visible`, it keeps the length, because lines are bounded and tables have columns."""
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text)


class PlainText(logging.Formatter):
    """Formats the message alone, shortened and without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()[:LINE_MAX]
        if record.exc_info:  # the error is at the end of a traceback
            text += "\n" + self.formatException(record.exc_info)[-LINE_MAX:]
        return plain(text)


class TimedText(PlainText):
    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        mark = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        return f"{at} {mark}{super().format(record)}"


class JsonText(PlainText):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": super().format(record),
            **getattr(record, "fields", {}),
        }
        return json.dumps(line, ensure_ascii=False)  # people read it too, in the journal or a container's log


class Unbuffered(io.TextIOBase):
    """Writes text to a descriptor without a lock.

    Python takes the lock of its own stderr at exit, so a thread that is blocked on a reader must not hold that."""

    encoding = "utf-8"

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, text: str) -> int:
        write_all(self._descriptor, text.encode("utf-8", "replace"))
        return len(text)

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)


class LineHandler(logging.Handler):
    """Writes records to a file, one per line."""

    def __init__(self, file: Unbuffered) -> None:
        super().__init__()
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        self._file.write(self.format(record) + "\n")


class QueuedLines(QueueHandler):
    """Passes records to `target` in its own thread, in order.

    It does not take the target's lock as other handlers do, because logging takes that at exit."""

    def __init__(self, target: logging.Handler) -> None:
        self._jobs: queue.Queue[Callable[[], object]] = queue.Queue(LINES_MAX)
        super().__init__(self._jobs)
        self._target = target
        self._dropped = 0  # total; not written by the thread
        threading.Thread(target=self._work, name="lines", daemon=True).start()

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Fixes the message now; a traceback stays apart, since only its end is kept."""
        record.msg, record.args = record.getMessage(), None
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        if not self.post(partial(self._target.emit, record)):
            self._dropped += 1

    def post(self, job: Callable[[], object]) -> bool:
        """Queues a job for the thread; False if the queue is full."""
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            return False
        return True

    def _work(self) -> None:
        told = 0
        while True:
            job = self._jobs.get()
            with suppress(OSError):  # the reader is gone for good
                job()
                if (dropped := self._dropped) > told:
                    what = f"{dropped - told} lines were dropped, because the reader of the log did not keep up"
                    told = dropped
                    self._target.emit(logging.LogRecord("p2ptrain", logging.WARNING, "", 0, what, (), None))

    def flush(self) -> None:
        """Waits a short time until all queued lines are written; called by logging at exit."""
        deadline, is_out = monotonic() + FLUSH_SECONDS, threading.Event()
        with suppress(queue.Full):
            self._jobs.put(is_out.set, timeout=FLUSH_SECONDS)
            is_out.wait(max(0.0, deadline - monotonic()))


def set_up(config: LoggingConfig) -> None:
    """Sets up logging to stderr: p2ptrain's lines at the configured level, and warnings of libraries."""
    form = ("text" if sys.stderr.isatty() else "json") if config.format == "auto" else config.format
    lines = LineHandler(Unbuffered(sys.stderr.fileno()))
    lines.setFormatter(TimedText() if form == "text" else JsonText())
    root = logging.getLogger()
    root.handlers = [QueuedLines(lines)]
    root.setLevel(logging.WARNING)
    logging.getLogger("p2ptrain").setLevel(config.level.upper())
