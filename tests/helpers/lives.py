"""A worker with a real learner, alone in its run: what it trains, notes and applies, and how it goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

from safetensors import safe_open

from p2ptrain.core.messages import KEY_BYTES, payload_digest
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.node.local_worker import LearnerThread, LocalWorker
from p2ptrain.node.replica_thread import ReplicaThread
from p2ptrain.node.work import Task
from p2ptrain.share import Share
from p2ptrain.store.diary import Trained
from tests.helpers.trainer import Trainer, make

NONE_OPEN: frozenset[int] = frozenset()


async def fetch(share: Share) -> None:
    """All data is here."""


def manifest(number: int) -> Any:
    return SimpleNamespace(round=number, branch=bytes(32), digest=bytes(32))


class Life:
    """A worker alone in its run; the contribution of round 3 is never taken."""

    def __init__(self, dataset: TokenDataset, name: str, **changes: Any) -> None:
        self.trainer: Trainer = make(dataset, name, **changes)
        self.diary: list[Trained] = []
        self.thread = LearnerThread(self.trainer)
        self.worker = LocalWorker(self.thread, bytes(32), self.note)
        self.replica = ReplicaThread(self.worker)
        self.payloads: dict[int, bytes] = {}

    async def note(self, trained: Trained) -> None:
        self.diary.append(trained)

    async def train(self, number: int) -> None:
        outstanding = frozenset({3}) if number == 4 else NONE_OPEN
        ks = self.trainer.run.recipe.ks
        done = await self.worker.train(Task(Share(number, 0, 1), outstanding, k=ks[number % len(ks)]))
        assert len(done.payload) == KEY_BYTES + self.trainer.outer.sizes[ks[number % len(ks)]]
        self.payloads[number] = done.payload
        assert done.name == payload_digest(done.payload)
        assert done.base == number - 1  # also of one that was trained before a restart

    async def apply(self, number: int, taken: dict[int, bytes] | None = None) -> None:
        """Applies own payloads, by their rounds."""
        if taken is None:
            taken = {} if number == 3 else {number: self.payloads[number]}
        await self.worker.repeat(fetch, is_applying=True)
        adopted = self.replica.replica.adopted
        assert await self.replica.apply(manifest(number), list(taken.values()), taken, adopted) is not None

    async def save(self, path: Path) -> tuple[dict[str, str], dict[str, bytes]]:
        """Saves all that a checkpoint contains."""
        (await self.worker.capture()).write(path)
        with safe_open(path, framework="np") as file:
            return file.metadata(), {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118

    def close(self) -> None:
        self.worker.close()
        self.replica.close()


class LateLife(Life):
    """A worker whose rounds are agreed on while the next one trains, after so many of its steps."""

    def __init__(self, dataset: TokenDataset, after: dict[int, int], **changes: Any) -> None:
        super().__init__(dataset, "local", is_late=True, **changes)
        self.after = after  # by round
        self._step = self.trainer.recipe.local_step

    async def apply(self, number: int, taken: dict[int, bytes] | None = None) -> None:
        await super().apply(number, {number: self.payloads[number]} if taken is None else taken)

    async def train_and_apply_the_last(self, number: int) -> None:
        """Trains a round; the one before it is applied in its middle, or afterwards."""
        loop = asyncio.get_running_loop()

        def step(place: int, *arguments: Any) -> Any:
            result = self._step(place, *arguments)
            if number > 1 and place + 1 == self.after.get(number, 0):
                asyncio.run_coroutine_threadsafe(super(LateLife, self).apply(number - 1, last), loop).result()
            return result

        last = {number - 1: self.payloads[number - 1]} if number > 1 else {}
        self.trainer.recipe.local_step = step  # type: ignore[method-assign]
        done = await self.worker.train(Task(Share(number, 0, 1), frozenset(last)))
        self.trainer.recipe.local_step = self._step  # type: ignore[method-assign]
        self.payloads[number] = done.payload
        assert done.base == (number - 1 if self.after.get(number, 0) else max(0, number - 2))
        if number > 1 and self.replica.replica.round < number - 1:
            await self.apply(number - 1)


def slowed(life: Life) -> tuple[Event, Event]:
    """Has each local step set the first event, and wait for the second."""
    began, gate, take = Event(), Event(), life.trainer.recipe.local_step

    def slow(*arguments: Any) -> Any:
        began.set()
        gate.wait()
        return take(*arguments)

    life.trainer.recipe.local_step = slow  # type: ignore[method-assign]
    return began, gate
