"""Workers for tests that need no diary."""

from __future__ import annotations

from p2ptrain.node.local_worker import LearnerThread, LocalWorker
from tests.helpers.trainer import Trainer


def worker_of(trainer: Trainer, me: bytes = bytes(32)) -> LocalWorker:
    async def note(entry: object) -> None: ...

    return LocalWorker(LearnerThread(trainer), me, note)
