"""The device of a region's node: it starts from what the world has agreed on, and says so."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from p2ptrain.config import WorldConfig
from p2ptrain.core.complaints import Code
from p2ptrain.core.messages import author_of, content_of
from p2ptrain.errors import PassedError
from p2ptrain.exact.outer import TAIL_BYTES, Tail
from p2ptrain.node import region as module
from p2ptrain.node.region import RegionDevice
from p2ptrain.train.region import Region, World
from p2ptrain.train.trainer import Trainer
from tests.helpers.trainer import ONE_THREAD, embedded, make


@pytest.fixture
def told() -> list[Tensor]:
    return []


@pytest.fixture
def device(tmp_path: Path, told: list[Tensor]) -> Iterator[RegionDevice]:
    run = make(data := embedded(tmp_path / "data"), "sixteen bits", residual_share=0).run
    region_run = run.model_copy(update={"world": WorldConfig(run="ab" * 32, rounds=2)})
    trainer = Trainer(region_run, ONE_THREAD, data)
    made = RegionDevice(trainer, ME, ThreadPoolExecutor(1), 1, Region(ME, 2, 1.0), told.append)
    yield made
    made.close()


ME = bytes([1]) * 32


async def applied(device: RegionDevice, number: int, payload: bytes) -> None:
    root = await device.apply(number, [payload], {number: payload}, bytes(32), device.adopted)
    assert root == device.trainer.root(bytes(32))


async def test_what_the_world_has_agreed_on_becomes_part_of_the_next_contribution(
    device: RegionDevice, told: list[Tensor]
) -> None:
    trainer, region = device.trainer, device.region
    first = trainer.recipe.agreed.clone()
    device.hear(World(0, first))
    _, payload, noted = await device.train(1, 0, 1, frozenset())
    assert noted is None, "it could not be repeated without the world's weights"
    assert Tail.of(payload) == Tail(0, is_shifted=True)
    assert trainer.check(content_of(payload)) is None
    assert trainer.check(content_of(payload)[:-1] + b"\x08") == "a tail of 010000000000000008"
    await applied(device, 1, payload)
    assert told == [], "one of two rounds"
    _, payload, noted = await device.train(2, 0, 1, frozenset())
    assert noted is not None
    assert (noted.number, noted.tail) == (2, payload[-TAIL_BYTES:].hex()), "so a restart sees that one is missing"
    assert Tail.of(payload) == Tail(0, is_aware=True)
    await applied(device, 2, payload)
    (moved,) = told
    assert torch.equal(moved, first - trainer.recipe.agreed)
    there = first + 0.1  # further than the steps of one round could move it
    device.hear(World(1, there))
    _, payload, noted = await device.train(3, 0, 1, frozenset())
    assert noted is None
    assert Tail.of(payload) == Tail(1, is_shifted=True, is_aware=True, has_told=True)
    await applied(device, 3, payload)
    ahead = (trainer.recipe.agreed - there).square().mean().sqrt()
    assert ahead < 0.05, "it went on from there"
    assert region.world_round == 1


async def test_a_killed_node_repeats_what_it_had_contributed_with_its_tail(device: RegionDevice) -> None:
    device.hear(World(0, device.trainer.recipe.agreed.clone()))
    _, payload, _ = await device.train(1, 0, 1, frozenset())
    await applied(device, 1, payload)
    capture = device.trainer.state_bytes()
    _, payload, noted = await device.train(2, 0, 1, frozenset())
    assert noted is not None
    again = RegionDevice(device.trainer, ME, ThreadPoolExecutor(1), 1, Region(ME, 2, 1.0), lambda moved: None)
    device.trainer.restore(2)
    device.trainer.adopt(1, [capture])
    again.repeat([noted], 2)
    assert await again.repeat_next()
    assert Tail.of(again._repeated[2][2]) == Tail.of(payload) == Tail(0, is_aware=True)
    again.close()


async def test_nothing_is_trained_before_the_world_is_known(device: RegionDevice) -> None:
    training = asyncio.create_task(device.train(1, 0, 1, frozenset()))
    await asyncio.sleep(0)
    await device.run(lambda: None)  # behind any training in its thread
    assert (device.step, training.done()) == (0, False)
    device.hear(World(0, device.trainer.recipe.agreed.clone()))
    assert author_of((await training)[1]) == ME


async def test_a_round_that_passed_while_the_world_was_unknown_is_not_trained(device: RegionDevice) -> None:
    training = asyncio.create_task(device.train(1, 0, 1, frozenset()))
    await asyncio.sleep(0)
    device.trainer.round = 2  # others were let in
    device.hear(World(0, device.trainer.recipe.agreed.clone()))
    with pytest.raises(PassedError):
        await training


async def test_a_region_that_has_begun_trains_without_the_world(device: RegionDevice) -> None:
    device.trainer.round = 1
    _, payload, noted = await device.train(2, 0, 1, frozenset())
    assert noted is not None
    assert Tail.of(payload) == Tail()


async def test_a_state_that_was_adopted_tells_nothing_of_the_rounds_before(device: RegionDevice) -> None:
    device.hear(World(0, device.trainer.recipe.agreed.clone()))
    _, payload, _ = await device.train(1, 0, 1, frozenset())
    await applied(device, 1, payload)
    assert device.region.world_round == 0
    await device.adopt(7, [device.trainer.state_bytes()])
    assert device.region.world_round is None
    _, payload, _ = await device.train(8, 0, 1, frozenset())
    assert Tail.of(payload) == Tail(0)


def test_the_worlds_absence_is_told_once_it_has_lasted(device: RegionDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.complaints == []
    monkeypatch.setattr(module, "AWAY_SECONDS", 0.0)
    device.lose("nobody answers")
    (found,) = device.complaints
    assert (found.code, found.fields) == (Code.WORLD_AWAY, {"why": "nobody answers"})
    device.hear(World(0, device.trainer.recipe.agreed.clone()))
    assert device.complaints == []
