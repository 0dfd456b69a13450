"""The device of a script's node: which round the script trains, from which weights, and when it is missed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from p2ptrain.config import DeviceConfig, RunConfig
from p2ptrain.core.complaints import Code
from p2ptrain.core.messages import content_of
from p2ptrain.errors import ConfigError, DataError, NodeEndedError, PassedError, TrainingError
from p2ptrain.loop import device as module
from p2ptrain.loop.channel import Memory, RoundTrained, make_memory
from p2ptrain.loop.device import LoopDevice
from p2ptrain.node.device import StoppedError
from p2ptrain.train.trainer import Trainer
from tests.helpers.trainer import embedded

OWN = {"kind": "own", "parameters": ["one.weight 40 30", "scale"], "sequence_length": 32}
RUN = RunConfig.model_validate({"name": "own", "model": OWN, "recipe": {"local_steps": 3, "k": 8}})
SIZE = 40 * 30 + 1
TRAINED = RoundTrained(3, 2.5, 700, 0.5)


@pytest.fixture
async def device(tmp_path: Path) -> AsyncIterator[LoopDevice]:
    trainer = Trainer(RUN, DeviceConfig(name="cpu", threads=1), embedded(tmp_path / "data"), initial=False)
    trainer.adopt(0, [torch.arange(SIZE, dtype=torch.float32).numpy().tobytes()])
    made = LoopDevice(trainer, bytes(32), ThreadPoolExecutor(1), 1, Memory(make_memory(SIZE), SIZE))
    yield made
    made.close()


def begun(device: LoopDevice, number: int = 0) -> asyncio.Task[Any]:
    return asyncio.create_task(device.train(number, 0, 1, frozenset()))


async def test_a_round_goes_to_the_script_and_comes_back_as_a_contribution(device: LoopDevice) -> None:
    training = begun(device)
    work = await device.next()
    assert (work.number, len(work.positions)) == (0, 24)
    assert torch.equal(device.memory.base, torch.arange(SIZE, dtype=torch.float32))
    assert await device.next() is work, "asked again after an interrupt"
    device.memory.moved.fill_(0.5)
    device.take(TRAINED)
    _, payload, noted = await training
    assert noted is None, "a script's steps cannot be repeated"
    assert device.trainer.check(content_of(payload)) is None
    assert (device.loss, device.steps, device.tokens, device.training_seconds) == (2.5, 3, 700, 0.5)
    with pytest.raises(ConfigError, match="no round is being trained"):
        device.current()


@pytest.mark.parametrize(("tokens", "speed"), [(700, 1_400.0), (0, None)])
async def test_the_speed_of_a_script_with_a_loader_of_its_own_is_unknown(
    device: LoopDevice, tokens: int, speed: float | None
) -> None:
    assert device.tokens_per_second == 0.0
    training = begun(device)
    await device.next()
    device.take(replace(TRAINED, tokens=tokens))
    await training
    assert device.tokens_per_second == speed


async def test_weights_that_have_moved_on_are_not_handed_out_as_those_before(device: LoopDevice) -> None:
    training = begun(device)
    await asyncio.sleep(0)
    device.adopted += 1  # while the script was elsewhere
    waiting = asyncio.create_task(device.next())
    with pytest.raises(DataError, match="the training loop was elsewhere"):
        await training
    again = begun(device)
    assert (await waiting).base == (0, 1)
    device.stop_training()
    with pytest.raises(StoppedError):
        await again
    with pytest.raises(NodeEndedError, match="the node is ending"):
        device.take(TRAINED)


async def test_who_has_seen_a_round_lets_rounds_pass_without_a_contribution(device: LoopDevice) -> None:
    training = begun(device)
    assert (await device.next()).base == (0, 0)
    waiting = asyncio.create_task(device.next(seen=0))
    await asyncio.sleep(0)
    assert not training.done()
    assert await device.apply(1, [], {}, bytes(32), 0) is not None, "the others have agreed on a round"
    with pytest.raises(PassedError, match="its turn has not come"):
        await training
    training = begun(device, 2)
    work = await waiting
    assert (work.number, work.base) == (2, (1, 0))
    device.memory.moved.fill_(0.5)
    device.take(TRAINED)
    await training
    waiting = asyncio.create_task(device.next(seen=1))
    await asyncio.sleep(0)
    await device.adopt(5, [torch.zeros(SIZE).numpy().tobytes()])
    training = begun(device, 6)
    assert (await waiting).base == (5, 1)
    assert not device.memory.base.any()
    training.cancel()


async def test_steps_taken_again_begin_from_the_same_weights(device: LoopDevice) -> None:
    training = begun(device)
    work = await device.next()
    device.memory.base.zero_()
    device.begin_again()
    assert await device.next() is work
    assert device.memory.base[7] == 7.0
    device.memory.moved.fill_(torch.nan)
    device.take(TRAINED)
    with pytest.raises(TrainingError):
        await training


async def test_a_training_that_was_cancelled_is_no_trouble_to_the_script(device: LoopDevice) -> None:
    training = begun(device)
    await device.next()
    training.cancel()
    await asyncio.gather(training, return_exceptions=True)
    device.take(TRAINED)
    device.stop_training()


async def test_a_contribution_nobody_can_take_returns_to_the_residual(device: LoopDevice) -> None:
    training = begun(device)
    await device.next()
    device.memory.moved.fill_(0.5)
    device.take(TRAINED)
    await training
    assert device.trainer.kept_rounds == (0,)
    training = begun(device, 1)
    await device.next()
    device.take(TRAINED)
    await training
    assert device.trainer.kept_rounds == (1,)


async def test_a_loop_that_is_away_is_missed_only_while_a_round_waits_for_it(
    device: LoopDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert device.complaints == []
    training = begun(device)
    await device.next()
    assert device.complaints == []
    now = module.perf_counter()
    monkeypatch.setattr(module, "perf_counter", lambda: now + 150.0)
    (found,) = device.complaints
    assert (found.code, found.fields) == (Code.LOOP_AWAY, {"minutes": 2})
    device.memory._head[3] = now + 149.0  # a step
    assert device.complaints == []
    training.cancel()


async def test_the_pace_is_told_for_its_round_alone(device: LoopDevice) -> None:
    assert device.memory.pace(4) is None
    device.keep_pace(4, 2.0, 3.0)
    usual, last = device.memory.pace(4) or (0.0, 0.0)
    assert 1.0 < usual <= 2.0 < last <= 3.0
    assert device.memory.pace(5) is None
