"""The worker of a script's node: which round the script trains, from which weights, and when it is missed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from p2ptrain.config import DeviceConfig, RunConfig
from p2ptrain.core.complaints import Code
from p2ptrain.core.messages import content_of
from p2ptrain.errors import ConfigError, DataError, NodeEndedError, PassedError, StoppedError, TrainingError
from p2ptrain.loop import worker as module
from p2ptrain.loop.channel import Memory, RoundTrained, make_memory
from p2ptrain.loop.worker import ScriptWorker
from p2ptrain.node.local_worker import LearnerThread
from p2ptrain.node.replica_thread import ReplicaThread
from p2ptrain.node.work import Done, Task
from p2ptrain.share import Share
from tests.helpers.trainer import Trainer, embedded

OWN = {"kind": "own", "parameters": ["one.weight 40 30", "scale"], "sequence_length": 32}
RUN = RunConfig.model_validate({"name": "own", "model": OWN, "recipe": {"local_steps": 3, "k": 8}})
SIZE = 40 * 30 + 1
TRAINED = RoundTrained(3, 2.5, 700, 0.5)


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[ScriptWorker]:
    trainer = Trainer(RUN, DeviceConfig(name="cpu", threads=1), embedded(tmp_path / "data"), initial=False)
    trainer.adopt(0, [torch.arange(SIZE, dtype=torch.float32).numpy().tobytes()])
    made = ScriptWorker(LearnerThread(trainer), bytes(32), Memory(make_memory(SIZE), SIZE))
    yield made
    made.close()


@pytest.fixture
async def replica(worker: ScriptWorker) -> AsyncIterator[ReplicaThread]:
    made = ReplicaThread(worker)
    yield made
    made.close()


def begun(worker: ScriptWorker, number: int = 0) -> asyncio.Task[Done]:
    return asyncio.create_task(worker.train(Task(Share(number, 0, 1))))


async def test_a_round_goes_to_the_script_and_comes_back_as_a_contribution(worker: ScriptWorker) -> None:
    training = begun(worker)
    work = await worker.next()
    assert (work.task.round, len(work.positions)) == (0, 24)
    assert torch.equal(worker.memory.base, torch.arange(SIZE, dtype=torch.float32))
    assert await worker.next() is work, "asked again after an interrupt"
    worker.memory.moved.fill_(0.5)
    worker.take(TRAINED)
    assert worker.replica.check(content_of((await training).payload)) is None
    figures = worker.figures
    assert (figures.loss, figures.steps, figures.tokens, figures.seconds) == (2.5, 3, 700, 0.5)
    with pytest.raises(ConfigError, match="no round is being trained"):
        worker.current()


@pytest.mark.parametrize(("tokens", "speed"), [(700, 1_400.0), (0, None)])
async def test_the_speed_of_a_script_with_a_loader_of_its_own_is_unknown(
    worker: ScriptWorker, tokens: int, speed: float | None
) -> None:
    assert worker.figures.tokens_per_second == 0.0
    training = begun(worker)
    await worker.next()
    worker.take(replace(TRAINED, tokens=tokens))
    await training
    assert worker.figures.tokens_per_second == speed


async def test_weights_that_have_moved_on_are_not_handed_out_as_those_before(worker: ScriptWorker) -> None:
    training = begun(worker)
    await asyncio.sleep(0)
    worker.replica.adopted += 2  # while the script was elsewhere
    waiting = asyncio.create_task(worker.next())
    with pytest.raises(DataError, match="the training loop was elsewhere"):
        await training
    again = begun(worker)
    assert (await waiting).base == (0, 3)
    worker.stop()
    with pytest.raises(StoppedError):
        await again
    with pytest.raises(NodeEndedError, match="the node is ending"):
        worker.take(TRAINED)


async def test_who_has_seen_a_round_lets_rounds_pass_without_a_contribution(
    worker: ScriptWorker, replica: ReplicaThread
) -> None:
    training = begun(worker)
    assert (await worker.next()).base == (0, 1)
    waiting = asyncio.create_task(worker.next(seen=0))
    await asyncio.sleep(0)
    assert not training.done()
    manifest: Any = SimpleNamespace(round=1, branch=bytes(32), digest=bytes(32))
    assert await replica.apply(manifest, [], {}, 1) is not None, "the others have agreed on a round"
    with pytest.raises(PassedError, match="its turn has not come"):
        await training
    training = begun(worker, 2)
    work = await waiting
    assert (work.task.round, work.base) == (2, (1, 1))
    worker.memory.moved.fill_(0.5)
    worker.take(TRAINED)
    await training
    waiting = asyncio.create_task(worker.next(seen=1))
    await asyncio.sleep(0)
    await replica.adopt(5, bytes(32), [torch.zeros(SIZE).numpy().tobytes()])
    training = begun(worker, 6)
    assert (await waiting).base == (5, 2)
    assert not worker.memory.base.any()
    training.cancel()


async def test_a_contribution_that_was_counted_is_not_sent_again(worker: ScriptWorker, replica: ReplicaThread) -> None:
    moved, noise = [], torch.randn(SIZE, generator=torch.Generator().manual_seed(0))
    for number in (1, 2):
        training, before = begun(worker, number), worker.replica.weights.clone()
        await worker.next()
        worker.memory.moved.copy_(noise / 100 * (number == 1))
        worker.take(TRAINED)
        own = (await training).payload
        manifest: Any = SimpleNamespace(round=number, branch=bytes(32), digest=bytes(32))
        assert await replica.apply(manifest, [own], {number: own}, worker.replica.adopted)
        moved.append(worker.replica.weights - before)
    same = torch.nn.functional.cosine_similarity(*moved, dim=0)
    assert abs(same) < 0.5, "the second has what was too small for the first"


async def test_steps_taken_again_begin_from_the_same_weights(worker: ScriptWorker) -> None:
    training = begun(worker)
    work = await worker.next()
    worker.memory.base.zero_()
    worker.begin_again()
    assert await worker.next() is work
    assert worker.memory.base[7] == 7.0
    worker.memory.moved.fill_(torch.nan)
    worker.take(TRAINED)
    with pytest.raises(TrainingError):
        await training


async def test_a_training_that_was_cancelled_is_no_trouble_to_the_script(worker: ScriptWorker) -> None:
    training = begun(worker)
    await worker.next()
    training.cancel()
    await asyncio.gather(training, return_exceptions=True)
    worker.take(TRAINED)
    worker.stop()


async def test_a_contribution_nobody_can_take_returns_to_the_residual(worker: ScriptWorker) -> None:
    training = begun(worker)
    await worker.next()
    worker.memory.moved.fill_(0.5)
    worker.take(TRAINED)
    await training
    assert worker.learner.kept_rounds == (0,)
    training = begun(worker, 1)
    await worker.next()
    worker.take(TRAINED)
    await training
    assert worker.learner.kept_rounds == (1,)


async def test_a_loop_that_is_away_is_missed_only_while_a_round_waits_for_it(
    worker: ScriptWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worker.complaints == []
    training = begun(worker)
    await worker.next()
    assert worker.complaints == []
    now = module.perf_counter()
    monkeypatch.setattr(module, "perf_counter", lambda: now + 150.0)
    (found,) = worker.complaints
    assert (found.code, found.fields) == (Code.LOOP_AWAY, {"minutes": 2})
    worker.memory._head[3] = now + 149.0  # a step
    assert worker.complaints == []
    training.cancel()


async def test_the_pace_is_told_for_its_round_alone(worker: ScriptWorker) -> None:
    assert worker.memory.pace(4) is None
    worker.keep_pace(4, 2.0, 3.0)
    usual, last = worker.memory.pace(4) or (0.0, 0.0)
    assert 1.0 < usual <= 2.0 < last <= 3.0
    assert worker.memory.pace(5) is None
