"""Figures in the files that TensorBoard shows.

Such a file is a row of records, each with its length and two checksums (CRC-32C, masked), and in each an `Event`, a
protobuf of five fields. That is less code than a dependency, so the node needs nothing more to write them: the extra
[tensorboard] brings what shows them, and what the tests read them with.
"""

from __future__ import annotations

import math
import os
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

from p2ptrain.config import RunConfig
from p2ptrain.daemon.tracking import figures_of
from p2ptrain.store.records import RoundRecord

VERSION = b"brain.Event:2"  # what the first event of a file says
POLYNOMIAL = 0x82F63B78  # CRC-32C, Castagnoli et al. 1993, its bits reversed


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
