"""Records of rounds, for tests."""

from __future__ import annotations

from typing import Any

from p2ptrain.observe.schema import RoundRecord
from tests.helpers.store import named_run

KEYS = [bytes([number]) * 32 for number in range(8)]
RUN = named_run("my-run")
RUN_ID = RUN.id


def row(number: int, **changes: Any) -> dict[str, Any]:
    """Makes a row as it is read from the disk."""
    made = {
        "branch": b"b" * 32, "round": number, "applied_at": 1e9 + number, "root": b"r" * 32, "manifest": b"m" * 32,
        "contributors": KEYS[:3], "mine_taken": [number], "views": 1, "train_seconds": 1.5, "collect_seconds": 0.25,
        "agree_seconds": 0.125, "apply_seconds": 0.0625, "bytes_sent": 10, "bytes_received": 20, "loss": 2.5,
        "swarm_tokens_so_far": 192 * number, "tokens_so_far": 64 * number, "staleness_mean": 0.5, "update_norm": 1.25,
        "steps": 1, "own_drift": None, "tokens": 64, "tokens_per_second": 32.0, "late": 1,
        "refused": {"bad payload": 2},
    }  # fmt: skip
    assert changes.keys() <= RoundRecord.model_fields.keys()  # early releases had fewer
    return made | changes


def lived(number: int, **changes: Any) -> RoundRecord:
    return RoundRecord.of(row(number, **changes))


def a_round(number: int, **changes: object) -> RoundRecord:
    """Makes a record of one branch, with a falling loss and round numbers for bytes and times."""
    usual: dict[str, object] = {
        "branch": RUN_ID, "root": bytes([number]) * 32, "loss": 5.0 - number / 4, "applied_at": 1.7e9 + number,
        "contributors": (KEYS[0], KEYS[1]), "bytes_sent": 1_000, "bytes_received": 2_000, "tokens": 512, "views": 1,
        "train_seconds": 4.0, "collect_seconds": 2.0, "agree_seconds": 1.0, "apply_seconds": 1.0, "refused": {},
    }  # fmt: skip
    return lived(number, **(usual | changes))
