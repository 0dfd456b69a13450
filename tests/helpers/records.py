"""Records of rounds, for tests."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from p2ptrain.observe.schema import RoundRecord
from p2ptrain.store.records import POINTS, _unpacked

KEYS = [bytes([number]) * 32 for number in range(8)]


def row(number: int, **changes: Any) -> dict[str, Any]:
    """Makes a row as it is read from the disk."""
    made = {
        "branch": b"b" * 32, "round": number, "applied_at": 1e9 + number, "root": b"r" * 32, "manifest": b"m" * 32,
        "contributors": KEYS[:3], "mine_taken": [number], "views": 1, "train_seconds": 1.5, "collect_seconds": 0.25,
        "agree_seconds": 0.125, "apply_seconds": 0.0625, "bytes_sent": 10, "bytes_received": 20, "bulk_bytes_sent": 3,
        "bulk_bytes_received": 4, "loss": 2.5, "tokens": 64, "tokens_per_second": 32.0, "late": 1,
        "refused": {"bad payload": 2},
    }  # fmt: skip
    assert changes.keys() <= made.keys()
    return made | changes


def lived(number: int, **changes: Any) -> RoundRecord:
    return RoundRecord.of(row(number, **changes))


def points_of(path: Path, peer: bytes) -> list[dict[str, Any]]:
    """Reads the rows of a peer's penalty points, oldest first."""
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT record, digest FROM points WHERE peer = ? ORDER BY id", (peer,)).fetchall()
    return [*_unpacked(rows, POINTS, path)]
