"""What the daemon writes: lines for a person on a terminal, one JSON object a line elsewhere."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import MutableMapping
from datetime import UTC, datetime
from typing import Any

import structlog

from p2ptrain.config import LoggingConfig

LINE_MAX = 2_000  # characters: what a peer made us write must not fill a disk at once


class TextLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        mark = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        return f"{at} {mark}{_message(self, record)}"


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": _message(self, record),
            **getattr(record, "fields", {}),
        }
        return json.dumps(line)


def _message(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    text = record.getMessage()
    if record.exc_info:
        text += "\n" + formatter.formatException(record.exc_info)
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text)[:LINE_MAX]


def _in_words(logger: object, name: str, event: MutableMapping[str, Any]) -> str:
    """What the store says, in a line like the others."""
    what = str(event.pop("event"))
    return ": ".join([what, ", ".join(f"{key} {value}" for key, value in event.items())]) if event else what


def set_up(config: LoggingConfig) -> None:
    """Write p2ptrain's own lines to stderr; of what the libraries say, only warnings."""
    form = ("text" if sys.stderr.isatty() else "json") if config.format == "auto" else config.format
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextLines() if form == "text" else JsonLines())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    structlog.configure(
        processors=[_in_words],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
    )
    logging.getLogger("p2ptrain").setLevel(config.level.upper())
