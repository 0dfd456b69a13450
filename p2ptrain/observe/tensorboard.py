"""Writes figures as TensorBoard event files, with the tensorboard package.

Only its framing of events is used, not its writer, which has its own thread and ends for good on a disk error.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import socket
from pathlib import Path
from typing import Any

from p2ptrain.config import RunConfig
from p2ptrain.errors import ConfigError
from p2ptrain.observe.schema import RoundRecord
from p2ptrain.observe.tracking import tracked_of

VERSION = "brain.Event:2"  # in the first event of a file


class TensorBoard:
    """Writes an event file for each start of the node; TensorBoard shows them as one run."""

    def __init__(self, directory: Path, run: RunConfig) -> None:
        """ConfigError if the package is not installed."""
        if importlib.util.find_spec("tensorboard") is None:
            fix = "Run: pip install 'p2ptrain[tensorboard]', or remove the key"
            raise ConfigError("needs tensorboard", key="tracking.tensorboard", fix=fix)
        self.directory = directory / f"{run.name}-{run.run_id[:8]}"
        self._path: Path | None = None

    def write(self, record: RoundRecord) -> None:
        figures = {name: value for name, value in tracked_of(record).items() if math.isfinite(value)}
        summary = {"value": [{"tag": name, "simple_value": value} for name, value in figures.items()]}
        events: list[dict[str, Any]] = [{"step": record.round, "summary": summary}]
        path = self._path
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

    def close(self) -> None:
        """Does nothing: no file is kept open."""

    def kill(self) -> None:
        """Does nothing: there is no process."""
