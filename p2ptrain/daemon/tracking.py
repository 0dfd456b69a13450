"""Tracking: the figures of each round for other tools, and here the files that TensorBoard shows.

Such a file is a row of records, each with its length and two checksums (CRC-32C, masked), and in each an `Event`, a
protobuf of five fields. That is less code than a dependency, so the node needs nothing more to write them: the extra
[tensorboard] brings what shows them, and what the tests read them with. Weights & Biases are in wandb_run.py.

Nothing waits for any of it: records go to a thread of their own, and where what takes them is too slow for rounds, or
takes nothing, figures are lost and said to be. The records of the rounds themselves (store/records.py) are not touched
by that.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import struct
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from p2ptrain.config import RunConfig
from p2ptrain.store.records import RoundRecord

WAITING_MAX = 256  # rounds that wait to be written; beyond it they are lost
CLOSE_SECONDS = 10.0  # for the last ones when the node ends; a run of W&B's without a network takes 0.2 s
VERSION = b"brain.Event:2"  # what the first event of a file says
POLYNOMIAL = 0x82F63B78  # CRC-32C, Castagnoli et al. 1993, its bits reversed

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
# The format


def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (POLYNOMIAL if byte & 1 else 0)  # noqa: PLW2901
        table.append(byte)
    return table


_TABLE = _table()


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def _masked(data: bytes) -> bytes:
    """As TensorFlow keeps a checksum, so that one of data with checksums in it is no trouble."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def framed(event: bytes) -> bytes:
    length = struct.pack("<Q", len(event))
    return length + _masked(length) + event + _masked(event)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _part(field: int, content: bytes) -> bytes:
    """Bytes, text or a message within one."""
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def event_of(at: float, step: int, figures: Iterable[tuple[str, float]]) -> bytes:
    """An `Event` with a `Summary` of simple values."""
    values = b"".join(
        _part(1, _part(1, name.encode()) + b"\x15" + struct.pack("<f", value))
        for name, value in figures
        if math.isfinite(value)
    )
    return b"\x09" + struct.pack("<d", at) + b"\x10" + _varint(step) + _part(5, values)


def first_event(at: float) -> bytes:
    return b"\x09" + struct.pack("<d", at) + _part(3, VERSION)


# ---------------------------------------------------------------------------------------------------
# The file


class TensorBoard:
    """Of one run; a file for each start of the node, which are shown as one."""

    def __init__(self, directory: Path, run: RunConfig) -> None:
        self.directory = directory / f"{run.name}-{run.run_id[:8]}"
        self._path: Path | None = None

    def write(self, record: RoundRecord) -> None:
        content = framed(event_of(record.applied_at, record.round, figures_of(record).items()))
        if self._path is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{record.applied_at:.0f}.{socket.gethostname()}.{os.getpid()}"
            content = framed(first_event(record.applied_at)) + content
            path = self.directory / name
        else:
            path = self._path
        with path.open("ab") as file:
            file.write(content)
        self._path = path

    def close(self) -> None:
        """Nothing is open."""

    def kill(self) -> None:
        """Nothing runs."""


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
