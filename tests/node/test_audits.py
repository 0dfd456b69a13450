"""An audit ends in a measurement or in a reason, whatever its contribution is made of."""

from __future__ import annotations

import asyncio
from math import inf, nan
from threading import RLock
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from p2ptrain.core import events as ev
from p2ptrain.core.state import Taken
from p2ptrain.errors import DataError, TrainingError
from p2ptrain.net.boundary import Boundary
from p2ptrain.node import audits
from p2ptrain.node.audits import Audits
from p2ptrain.share import Share
from p2ptrain.train.matched_filter import OTHER_SEQUENCES_MIN, Match
from tests.helpers.core import KEYS, run_of

RUN = run_of(recipe={"name": "local", "local_steps": 10, "sequences_per_pass": 8})
AUTHOR = KEYS[3]
FOUND = Match(1.25, 0.5)


class AuditsBench:
    """Audits with a worker, a replica and edges that do what a test says."""

    def __init__(
        self, error: Exception | None = None, round_now: int = 5, kept: bool = True, match: Match = FOUND
    ) -> None:
        self.error, self.given, self.read, self.match = error, list[ev.Audited](), list[int](), match
        self.fetched: list[int] = []
        self.kept = b"k" * 32 + b"payload" if kept else None
        replica = SimpleNamespace(
            round=round_now, lock=RLock(), weights_before=lambda rounds: "weights",
            outer=SimpleNamespace(fragment_of=lambda number: 0),
        )  # fmt: skip
        self.boundary = Boundary()
        self.edges = SimpleNamespace(
            transport=SimpleNamespace(boundary=self.boundary),
            view=SimpleNamespace(run=RUN),
            fetching=SimpleNamespace(ahead=self.ahead, run=RUN, dataset=SimpleNamespace(batch=self.batch)),
            persistence=SimpleNamespace(payload=self.payload),
        )
        thread: Any = SimpleNamespace(replica=replica, run=self.run)
        self.worker: Any = SimpleNamespace(positions=self.positions, measure=self.measure)
        self.audits = Audits(self.worker, thread, self.edges, self.given.append, lambda: True)  # type: ignore[arg-type]

    async def ahead(self, positions: Any, goes_on: Any) -> None:
        self.fetched = positions.tolist()

    def batch(self, positions: Any, length: int) -> Any:
        assert positions.tolist() == self.fetched, "little room holds no other set"
        self.read += self.fetched
        return np.zeros((len(positions), length + 1), np.int64)

    async def payload(self, name: bytes) -> bytes | None:
        return self.kept

    async def run(self, job: Any, *arguments: Any) -> Any:
        return job(*arguments)

    def positions(self, share: Share) -> Any:
        return np.arange(80) + 80 * share.round

    async def measure(self, number: int, weights: Any, payloads: Any, own: Any, others: Any) -> Match:
        assert [position for part, _ in (*own, *others) for position in part.tolist()] == self.read
        if self.error is not None:
            raise self.error
        return self.match


def order(base_round: int = 3, steps: int = 10) -> ev.Audit:
    taken = Taken(AUTHOR, 4, base_round, bytes(32), 99, steps, bytes(16))
    other = Taken(KEYS[4], 4, 3, bytes(32), 99, 10, bytes(16))
    manifest: Any = SimpleNamespace(round=4, digest=b"m" * 32, taken=(taken, other), counted=(taken, other))
    last: Any = SimpleNamespace(round=5, digest=b"n" * 32, taken=(), counted=())
    return ev.Audit(manifest, (manifest, last), taken, Share(4, 1, 4), 32)


async def test_what_is_measured_is_told_in_thousandths() -> None:
    bench = AuditsBench()
    await bench.audits.audit(order())
    assert bench.given == [ev.Audited(4, AUTHOR, 1_250, 500)]
    assert (bench.audits.done, bench.audits.seconds > 0) == (1, True)
    own = {*bench.positions(Share(4, 1, 4)).tolist()}
    assert (len(own & {*bench.read}), len(bench.read)) == (32, 32 + OTHER_SEQUENCES_MIN)


async def test_all_who_measure_read_the_same_and_only_of_the_steps_that_were_taken() -> None:
    first, second, few = AuditsBench(), AuditsBench(), AuditsBench()
    await first.audits.audit(order())
    await second.audits.audit(order())
    await few.audits.audit(order(steps=1))
    assert first.read == second.read
    assert {*few.read[:8]} == set(range(320, 328))
    assert few.given == [ev.Audited(4, AUTHOR, 1_250, 500)]


@pytest.mark.parametrize("error", [DataError("no data"), TrainingError("the loss", step=0, positions=[]), IndexError()])
async def test_whatever_a_contribution_sets_off_drops_the_audit_and_ends_nothing(error: Exception) -> None:
    bench = AuditsBench(error)
    await bench.audits.audit(order())
    [told] = bench.given
    assert (told.round, told.key, bool(told.why)) == (4, AUTHOR, True)
    assert bool(bench.boundary.counts) is isinstance(error, IndexError), "what nobody foresaw is a bug, and shown"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"round_now": 6}, "other rounds were applied meanwhile"),
        ({"kept": False}, "is not kept here"),
        ({"match": Match(nan, 0.5)}, "not finite"),
        ({"match": Match(1.0, inf)}, "not finite"),
    ],
)
async def test_an_audit_that_cannot_be_done_now_says_why(changes: dict[str, Any], why: str) -> None:
    bench = AuditsBench(**changes)
    await bench.audits.audit(order())
    assert why in bench.given[0].why


async def test_a_measurement_waits_for_a_training_however_long_that_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, is_over = AuditsBench(), asyncio.Event()

    async def behind(*arguments: Any) -> Match:
        await is_over.wait()
        return FOUND

    monkeypatch.setattr(bench.worker, "measure", behind)
    monkeypatch.setattr(audits, "FETCH_SECONDS", 0.05)
    waiting = asyncio.ensure_future(bench.audits.audit(order()))
    await asyncio.wait([waiting], timeout=0.2)
    assert not waiting.done()
    is_over.set()
    await waiting
    assert bench.given == [ev.Audited(4, AUTHOR, 1_250, 500)]


async def test_data_that_do_not_come_in_time_end_an_audit_with_that_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = AuditsBench()
    monkeypatch.setattr(bench.edges.fetching, "ahead", lambda *arguments: asyncio.Event().wait())
    monkeypatch.setattr(audits, "FETCH_SECONDS", 0.01)
    await bench.audits.audit(order())
    assert [each.why for each in bench.given] == ["its data did not come within 0 s"]
