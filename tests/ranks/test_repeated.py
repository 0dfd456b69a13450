"""A node with ranks that was killed goes on with the bits of one that was not: it repeats what its diary knows."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any

import pytest

from p2ptrain.config import DeviceConfig
from p2ptrain.data.assignment import Positions
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.errors import RanksLostError
from p2ptrain.node.local_worker import FAILED, LearnerThread, LocalWorker
from p2ptrain.node.replica_thread import ReplicaThread
from p2ptrain.node.work import Task
from p2ptrain.ranks.group import RankGroup, RankWork
from p2ptrain.share import Share
from p2ptrain.store.diary import Diary, Trained
from p2ptrain.train.live import StepResult
from tests.helpers.ranks import SHARDED, ranked
from tests.helpers.trainer import ONE_THREAD, Trainer, embedded, make

pytestmark = pytest.mark.timeout(300)  # each start of processes imports torch


class RankedLife:
    """A worker whose steps ranks take, alone in its run."""

    def __init__(self, trainer: Trainer, diary: Path) -> None:
        self.trainer, self.diary = trainer, Diary(diary)
        self.worker = LocalWorker(LearnerThread(trainer), bytes(32), self.note)
        self.replica, self.payloads = ReplicaThread(self.worker), dict[int, bytes]()

    async def note(self, entry: Trained) -> None:
        self.diary.note(entry)

    async def fetch(self, share: Share) -> None:
        """All data is here."""

    async def train(self, number: int) -> None:
        done = await self.worker.train(Task(Share(number, 0, 1), frozenset(range(1, number))))
        self.payloads[number] = done.payload

    async def apply(self, number: int) -> None:
        """Applies its own contribution alone."""
        await self.worker.repeat(self.fetch, is_applying=True)
        manifest: Any = SimpleNamespace(round=number, branch=bytes(32), digest=bytes(32))
        taken, adopted = {number: self.payloads[number]}, self.replica.replica.adopted
        assert await self.replica.apply(manifest, list(taken.values()), taken, adopted) is not None

    def close(self) -> None:
        self.worker.close()
        self.replica.close()

    def digest(self) -> str:
        """Returns the digest of all that the next round depends on."""
        found = sha256()
        for name, tensor in sorted(self.trainer.capture().tensors.items()):
            found.update(name.encode() + tensor.numpy().tobytes())
        return found.hexdigest()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    return embedded(tmp_path_factory.mktemp("data"))


KILLED = """
import asyncio
import sys
from pathlib import Path
from threading import Event
from tests.helpers.ranks import ranked
from tests.helpers.trainer import ONE_THREAD, embedded
from tests.ranks.test_repeated import RankedLife

data, diary, ranks, shard = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "True"
settings = ONE_THREAD.model_copy(update={"shard": shard})
with ranked(embedded(data), ["cpu"] * ranks, settings=settings, inner="muon") as (trainer, group):
    trainer.live.set_sequences_per_pass(1)  # as if memory had run out
    life = RankedLife(trainer, diary)
    for number in (1, 2):
        asyncio.run(life.train(number))
    print(life.digest(), flush=True)
    Event().wait()
"""


def killed(*arguments: object) -> str:
    """Kills a node once it has announced two contributions; returns its digest then."""
    command = [sys.executable, "-c", KILLED, *map(str, arguments)]
    with subprocess.Popen(command, stdout=PIPE, text=True) as node:
        assert node.stdout is not None
        digest = node.stdout.readline().strip()
        node.kill()
    return digest


@pytest.mark.parametrize(("settings", "ranks"), [(ONE_THREAD, 3), (SHARDED, 2)], ids=["whole", "parts"])
async def test_what_was_announced_but_not_applied_is_repeated_to_the_bit(
    dataset: TokenDataset, settings: DeviceConfig, ranks: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    diary = tmp_path / "diary.jsonl"
    digest = await asyncio.to_thread(killed, tmp_path / "data", diary, ranks, settings.is_sharded)
    with ranked(dataset, ["cpu"] * ranks, settings=settings, inner="muon") as (trainer, _):
        life = RankedLife(trainer, diary)
        assert [each.sequences_per_pass for each in life.diary.entries] == [1, 1]
        life.worker.repeat_all(life.diary.entries, 2)
        await life.worker.repeat(life.fetch)
        assert life.digest() == digest
        assert trainer.live.sequences_per_pass == 0, "what is new is trained as this start has it"
        life.close()
    assert caplog.text == "", "it would say that a training came out differently"


class DyingGroup(RankGroup):
    """In round 2, the round before is applied within step 1, and a rank dies within step 3."""

    def __init__(self, life: RankedLife) -> None:
        trainer = life.trainer
        work = RankWork(trainer.run, ONE_THREAD, trainer.dataset)
        super().__init__(work, ["cpu", "cpu"], trainer.live, trainer.recipe)
        self.life, self.loop, self.number = life, asyncio.get_running_loop(), 0

    def begin(self, number: int, place: int) -> None:
        self.number = number
        super().begin(number, place)

    def step(self, step: int, positions: Positions) -> StepResult:
        if (self.number, step) == (2, 3):
            os.kill(self.figures[0].pid, signal.SIGKILL)
        result = super().step(step, positions)
        if (self.number, step) == (2, 1):
            asyncio.run_coroutine_threadsafe(self.life.apply(1), self.loop).result()
        return result


async def test_steps_before_a_round_was_taken_in_are_repeated_where_those_after_it_are_lost(
    dataset: TokenDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    life = RankedLife(make(dataset, "local", inner="muon", is_late=True), tmp_path / "diary.jsonl")
    life.trainer.elsewhere = group = DyingGroup(life)
    try:
        await life.train(1)
        with pytest.raises(RanksLostError, match="has ended; 2 ranks are started again"):
            await life.train(2)
        await life.train(3)
    finally:
        life.close()
        group.close()
    lost = life.diary.entries[1]
    assert (lost.round, lost.base_round, lost.payload, lost.steps, lost.applied_after) == (2, 0, FAILED, 2, 2)
    with ranked(dataset, ["cpu", "cpu"], inner="muon", is_late=True) as (trainer, _):
        again = RankedLife(trainer, tmp_path / "diary.jsonl")
        again.payloads |= life.payloads
        again.worker.repeat_all(life.diary.entries, 3)
        await again.worker.repeat(again.fetch)
        await again.apply(1)
        await again.worker.repeat(again.fetch)
        assert again.digest() == life.digest()
        again.close()
    assert "came out differently" not in caplog.text
