"""A core whose rounds are recorded, with time and the other members played by the test."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from p2ptrain.core import events as ev
from p2ptrain.core.messages import KEY_BYTES
from p2ptrain.node.work import Figures
from p2ptrain.observe.rounds import Recorder
from p2ptrain.store.records import Batch, Records, SavedRows
from tests.helpers.core import Bench, root_of

NOW = 1_700_000_000.0


class NotedPersistence:
    """Persistence that accepts all records, or none."""

    def __init__(self, directory: Path) -> None:
        self.store = SimpleNamespace(directory=directory, records=Records(directory / "records.sqlite"))
        self.takes, self.batches = True, list[Batch]()

    async def record(self, batch: Batch) -> bool:
        self.batches.append(batch)
        if self.takes:
            self.store.records.write(batch)
        return self.takes


class WatchedCore:
    """A core whose fellow members the test plays, with a recorder."""

    def __init__(self, tmp_path: Path, past: SavedRows | None = None, **changes: Any) -> None:
        self.bench = Bench(4, **changes)
        self.figures = Figures(rates=deque([0.0]))
        outer = SimpleNamespace(sizes={256: 50 - KEY_BYTES})
        replica = SimpleNamespace(gradient_bytes=4_000, outer=outer, update_norm=None)
        self.worker: Any = SimpleNamespace(figures=self.figures, drift=None, replica=replica)
        self.traffic = {"bytes sent": 100, "bytes received": 200}
        self.persistence = NotedPersistence(tmp_path)
        persistence: Any = self.persistence
        self.rounds = Recorder(
            self.bench.node,
            self.worker,
            persistence,
            lambda: dict(self.traffic),
            past or SavedRows(),
            lambda: NOW + self.bench.now,
        )
        handle = self.bench.node.handle

        def handled(event: ev.Event, now: float) -> list[ev.Effect]:
            effects = handle(event, now)
            self.rounds.note(now, event)
            return effects

        self.bench.node.handle = handled  # type: ignore[method-assign]
        self.bench.tick(0.0)

    def round(self) -> None:
        """Runs a round: ten seconds of training, five until it is agreed, two until it is applied."""
        bench = self.bench
        offers = bench.collect()
        bench.tick(bench.now + 5.0)
        bench.agree(offers, apply=False)
        self.apply()

    def apply(self) -> None:
        at = self.bench.state
        self.bench.do(ev.Applied(at.branch, at.round, root_of(at.round)), self.bench.now + 2.0)
