"""What the daemon writes: lines for a person on a terminal, one JSON object a line elsewhere.

A thread writes them. Whoever reads our stderr may stop reading (a pager, Ctrl-S, a log shipper that hangs), and a write
then waits for as long as that takes: the node must not. What finds no room meanwhile is dropped, and counted.
"""

from __future__ import annotations

import io
import json
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from logging.handlers import QueueHandler
from time import monotonic
from typing import Any

import structlog

from p2ptrain.config import LoggingConfig
from p2ptrain.files import write_all

LINE_MAX = 2_000  # characters: what a peer made us write must not fill a disk at once
LINES_MAX = 1_024  # that wait to be written: minutes of them, and a few megabytes
FLUSH_SECONDS = 2.0  # for what was said last, at the end: whoever does not read by then will not


def plain(text: str) -> str:
    """A text that may be a peer's, without what a terminal obeys: control characters (C0, C1), and those that turn the
    direction of writing. As long as before, which `visible` is not: lines are bounded, and tables have columns."""
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text)


class PlainText(logging.Formatter):
    """The message alone, short and plain."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return plain(text[:LINE_MAX])


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
        return json.dumps(line, ensure_ascii=False)  # people read it too, in journals and containers


class Unbuffered(io.TextIOBase):
    """Text to a descriptor. Python's own stderr has a lock, without which the process cannot end: a thread that waits
    for a reader must not hold it."""

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
    """One line after the other to a file."""

    def __init__(self, file: Unbuffered) -> None:
        super().__init__()
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        self._file.write(self.format(record) + "\n")


class QueuedLines(QueueHandler):
    """Hands what is said to `target`, in a thread of its own, in order.

    It takes no lock of the target's, as others would: logging asks for it when the process ends.
    """

    def __init__(self, target: logging.Handler) -> None:
        self._jobs: queue.Queue[Callable[[], object]] = queue.Queue(LINES_MAX)
        super().__init__(self._jobs)
        self._target = target
        self._dropped = 0  # so far; the thread never writes it
        threading.Thread(target=self._work, name="lines", daemon=True).start()

    def enqueue(self, record: logging.LogRecord) -> None:
        if not self.post(partial(self._target.emit, record)):
            self._dropped += 1

    def post(self, job: Callable[[], object]) -> bool:
        """Have something done in the thread, after what it was given before; False if too much waits."""
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            return False
        return True

    def _work(self) -> None:
        told = 0
        while True:
            job = self._jobs.get()
            with suppress(OSError):  # the reader has gone for good: then nobody misses it
                job()
                if (dropped := self._dropped) > told:
                    what = f"{dropped - told} lines were not written: nobody read those before them"
                    told = dropped
                    self._target.emit(logging.LogRecord("p2ptrain", logging.WARNING, "", 0, what, (), None))

    def flush(self) -> None:
        """Wait until what was said before is out, though not for long; logging asks for it when the process ends."""
        deadline, is_out = monotonic() + FLUSH_SECONDS, threading.Event()
        with suppress(queue.Full):
            self._jobs.put(is_out.set, timeout=FLUSH_SECONDS)
            is_out.wait(max(0.0, deadline - monotonic()))


def _in_words(logger: object, name: str, event: MutableMapping[str, Any]) -> str:
    """What the store says, in a line like the others."""
    what = str(event.pop("event"))
    return ": ".join([what, ", ".join(f"{key} {value}" for key, value in event.items())]) if event else what


def set_up(config: LoggingConfig) -> None:
    """Write p2ptrain's own lines to stderr; of what the libraries say, only warnings."""
    form = ("text" if sys.stderr.isatty() else "json") if config.format == "auto" else config.format
    lines = LineHandler(Unbuffered(sys.stderr.fileno()))
    lines.setFormatter(TimedText() if form == "text" else JsonText())
    root = logging.getLogger()
    root.handlers = [QueuedLines(lines)]
    root.setLevel(logging.WARNING)
    structlog.configure(
        processors=[_in_words],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
    )
    logging.getLogger("p2ptrain").setLevel(config.level.upper())
