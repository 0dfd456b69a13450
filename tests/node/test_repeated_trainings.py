"""Trainings that are repeated after a restart: what a checkpoint says of them, and that none holds up the others."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from p2ptrain.data.dataset import TokenDataset
from p2ptrain.errors import StoppedError
from tests.helpers.lives import LateLife, Life, fetch, slowed
from tests.helpers.trainer import embedded


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    return embedded(tmp_path_factory.mktemp("corpus") / "data")


async def test_a_checkpoint_amid_repeated_trainings_says_how_far(dataset: TokenDataset, tmp_path: Path) -> None:
    whole, again, third = lives = [Life(dataset, "local") for _ in range(3)]
    [await step(number) for number in (1, 2, 3) for step in (whole.train, whole.apply)]
    again.payloads = third.payloads = whole.payloads
    again.worker.repeat_all(whole.diary, 3)
    await again.apply(1)
    await again.worker.repeat(fetch)
    capture = await again.worker.capture()
    assert (capture.round, capture.trained) == (1, 2)
    capture.write(tmp_path / "checkpoint")
    third.trainer.load(tmp_path / "checkpoint")
    third.worker.repeat_all([each for each in whole.diary if each.number > capture.trained], 3)
    for number in (2, 3):
        await third.apply(number)
    assert await third.save(tmp_path / "third") == await whole.save(tmp_path / "whole")
    for life in lives:
        life.close()


async def test_a_state_that_is_adopted_while_a_training_is_repeated_includes_all_of_them(dataset: TokenDataset) -> None:
    """None of them is repeated any more."""
    whole, again = Life(dataset, "local"), Life(dataset, "local")
    for number in (1, 2, 3):
        await whole.train(number)
        await whole.apply(number)
    again.worker.repeat_all(whole.diary, 3)
    began, gate = slowed(again)
    repeating = asyncio.ensure_future(again.worker.repeat(fetch))
    await asyncio.to_thread(began.wait)
    await again.replica.adopt(5, bytes(32), [whole.trainer.state_bytes()])
    gate.set()
    await repeating
    assert (await again.worker.capture()).trained == 3
    for life in (whole, again):
        life.close()


async def test_a_repeated_training_that_ended_in_its_middle_holds_up_nothing(
    dataset: TokenDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, again, third = (LateLife(dataset, {2: 1}) for _ in range(3))
    for number in (1, 2):
        await whole.train_and_apply_the_last(number)
    again.worker.repeat_all(whole.diary, 2)
    again.payloads = whole.payloads
    await again.worker.repeat(fetch)
    await again.apply(1)  # with which the second begins, and goes on
    again.worker.stop()
    with pytest.raises(StoppedError):
        await again.worker.repeat(fetch)
    capture = await again.worker.capture()
    assert (capture.round, capture.trained) == (1, 1)
    capture.write(tmp_path / "checkpoint")
    third.trainer.load(tmp_path / "checkpoint")
    third.worker.repeat_all(whole.diary[1:], 2)
    await third.worker.repeat(fetch)
    assert "the training of round 2 cannot be repeated: its base has passed" in caplog.text
    assert (await third.worker.capture()).trained == 2
    for life in (whole, again, third):
        life.close()
