"""The worker with a real learner: it goes on bit for bit after a kill, and no error of it costs the swarm a vote."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from p2ptrain.config import RecipeConfig
from p2ptrain.core.messages import payload_digest
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.errors import MemoryShortError, PassedError, TrainingError
from p2ptrain.node import pacing
from p2ptrain.node.local_worker import FAILED
from p2ptrain.node.work import Task
from p2ptrain.share import PassSlots, Share
from p2ptrain.store.diary import Diary, Trained
from tests.helpers.lives import LateLife, Life, fetch, slowed
from tests.helpers.trainer import FAMILY, RECIPES, embedded

ROUNDS = 7


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    return embedded(tmp_path_factory.mktemp("corpus") / "data")


def full(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("name", [*RECIPES, *FAMILY])
@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize("killed_in", [3, 4, 6])
async def test_a_node_that_was_killed_goes_on_with_the_bits_of_one_that_was_not(
    name: str, is_trained: bool, killed_in: int, dataset: TokenDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    whole = Life(dataset, name)
    checkpoint = tmp_path / "checkpoint"
    for number in range(1, ROUNDS + 1):
        await whole.train(number)
        if number == killed_in and is_trained:
            noted = list(whole.diary)
        if number == killed_in and not is_trained:
            noted = whole.diary[:-1]
        await whole.apply(number)
        if number == 2:
            await whole.save(checkpoint)

    again = Life(dataset, name)
    again.trainer.load(checkpoint)
    again.worker.repeat_all(noted[2:], noted[-1].number)
    again.payloads = dict(whole.payloads)  # they are on the disk, or the swarm has them
    for number in range(3, killed_in):  # what the log has is applied again
        await again.apply(number)
    for number in range(killed_in, ROUNDS + 1):
        await again.worker.repeat(fetch)
        await again.train(number)
        await again.apply(number)
    assert again.payloads == whole.payloads
    assert await again.save(tmp_path / "again") == await whole.save(tmp_path / "whole")
    assert [each.number for each in noted] + [each.number for each in again.diary] == list(range(1, ROUNDS + 1))
    assert caplog.text == ""
    for life in (whole, again):
        life.close()


async def test_a_training_by_capability_is_repeated_on_the_same_sequences(
    dataset: TokenDataset, tmp_path: Path
) -> None:
    life, again, slots = Life(dataset, "local"), Life(dataset, "local"), PassSlots(200, 80, 8, 8)
    done = await life.worker.train(Task(Share(1, 0, 1, slots)))
    for each in life.diary:
        Diary(tmp_path / "diary.jsonl").note(each)
    fetched: list[Share] = []

    async def fetching(asked: Share) -> None:
        fetched.append(asked)

    again.worker.repeat_all(Diary(tmp_path / "diary.jsonl").after(0), 1)
    await again.worker.repeat(fetching)
    assert fetched == [(1, 0, 1, slots)]
    assert await again.worker.train(Task(Share(1, 0, 1, slots))) == done
    assert again.diary == []
    for each in (life, again):
        each.close()


@pytest.mark.parametrize("killed_in", [3, 4])
async def test_a_training_in_whose_middle_a_round_was_applied_is_repeated_bit_for_bit(
    killed_in: int, dataset: TokenDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    whole, checkpoint = LateLife(dataset, {2: 1, 3: 2, 4: 3, 5: 1}), tmp_path / "checkpoint"
    for number in range(1, 6):
        await whole.train_and_apply_the_last(number)
        if number == 2:
            await whole.save(checkpoint)
    assert [each.applied_after for each in whole.diary] == [0, 1, 2, 3, 1]

    again = LateLife(dataset, whole.after)
    again.trainer.load(checkpoint)
    again.worker.repeat_all(whole.diary[2:killed_in], killed_in)
    again.payloads = {number: whole.payloads[number] for number in range(1, killed_in + 1)}
    for number in range(2, killed_in):
        await again.apply(number)
    for number in range(killed_in + 1, 6):
        await again.worker.repeat(fetch)
        await again.train_and_apply_the_last(number)
    assert again.payloads == whole.payloads
    assert await again.save(tmp_path / "again") == await whole.save(tmp_path / "whole")
    assert caplog.text == ""
    for life in (whole, again):
        life.close()


async def test_a_training_that_needs_a_round_in_its_middle_is_not_repeated_without_it(dataset: TokenDataset) -> None:
    life = LateLife(dataset, {2: 1})
    for number in (1, 2):
        await life.train_and_apply_the_last(number)
    again = LateLife(dataset, life.after)
    again.worker.repeat_all(life.diary, 2)
    again.payloads = life.payloads
    await again.worker.repeat(fetch)  # only the first, which needs none
    assert again.trainer.kept_rounds == (1,)
    await again.apply(1)
    await again.worker.repeat(fetch)
    assert again.trainer.kept_rounds == (2,)
    assert again.trainer.root() == life.trainer.root()
    again.close()
    life.close()


@pytest.mark.parametrize("is_adopted", [True, False])
async def test_a_training_that_waits_for_a_round_in_its_middle_ends_when_there_will_be_none(
    is_adopted: bool, dataset: TokenDataset, caplog: pytest.LogCaptureFixture
) -> None:
    life = LateLife(dataset, {2: 1})
    for number in (1, 2):
        await life.train_and_apply_the_last(number)
    again = LateLife(dataset, life.after)
    again.worker.repeat_all(life.diary, 2)
    await again.worker.repeat(fetch, is_applying=True)
    if is_adopted:
        await again.replica.adopt(5, bytes(32), [life.trainer.state_bytes()])
        await again.worker.repeat(fetch)
        assert "another state was adopted" in caplog.text
        done = await again.worker.train(Task(Share(6, 0, 1)))
        assert done.base == 5
    again.worker.stop()
    await again.thread.run(lambda: None)  # after the training
    again.close()
    life.close()
    del again
    gc.collect()
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize("has_begun", [True, False])
async def test_a_state_that_is_adopted_while_a_training_is_repeated_ends_its_wait_for_a_round(
    has_begun: bool, dataset: TokenDataset, caplog: pytest.LogCaptureFixture
) -> None:
    life = LateLife(dataset, {2: 1})
    for number in (1, 2):
        await life.train_and_apply_the_last(number)
    again = LateLife(dataset, life.after)
    again.worker.repeat_all(life.diary, 2)
    await again.worker.repeat(fetch)  # the first, which waits for nothing
    began, gate = slowed(again)
    before = [] if has_begun else [asyncio.ensure_future(again.thread.run(gate.wait))]
    asked = asyncio.Event()

    async def fetching(*_: object) -> None:
        asked.set()  # its job is given to the thread before anything else runs

    repeating = asyncio.ensure_future(again.worker.repeat(fetching, is_applying=True))
    await asked.wait()
    if has_begun:
        await asyncio.to_thread(began.wait)
    await again.replica.adopt(5, bytes(32), [life.trainer.state_bytes()])
    gate.set()
    await asyncio.gather(repeating, *before)
    await again.worker.repeat(fetch)
    assert "another state was adopted" in caplog.text
    again.close()
    life.close()


async def test_what_is_agreed_on_is_applied_while_a_step_takes_long(dataset: TokenDataset) -> None:
    life = Life(dataset, "local")
    await life.train(1)
    began, gate = slowed(life)
    training = asyncio.ensure_future(life.worker.train(Task(Share(2, 0, 1), frozenset({1}))))
    await asyncio.to_thread(began.wait)
    before = life.trainer.root()
    await life.apply(1)
    assert (life.replica.replica.round, life.trainer.round) == (1, 0)
    assert life.trainer.root() != before
    gate.set()
    assert (await training).base == 0, "where contributions have to be in time, no step goes on from other weights"
    life.close()


async def test_an_error_of_a_step_costs_a_contribution_and_no_vote(dataset: TokenDataset) -> None:
    life, other = Life(dataset, "local"), Life(dataset, "local")
    await other.train(1)
    life.trainer.live.model.loss = full  # type: ignore[assignment, method-assign]
    with pytest.raises(MemoryShortError, match="one sequence"):
        await life.train(1)
    assert (life.diary, life.trainer.live.sequences_per_pass) == ([], 1)
    for each in (life, other):
        await each.apply(1, {1: other.payloads[1]})
    assert life.trainer.root() == other.trainer.root()
    life.close()
    other.close()


async def test_agreed_weights_that_find_no_memory_cost_a_contribution_and_no_vote(
    dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    life, again = LateLife(dataset, {2: 1, 4: 2}), Life(dataset, "local")
    await life.train_and_apply_the_last(1)
    with monkeypatch.context() as here:
        here.setattr(life.trainer.recipe.residual, "forget", full)
        with pytest.raises(MemoryShortError, match="taking over the agreed weights"):
            await life.train_and_apply_the_last(2)  # between two of its steps
        del life.trainer.recipe.local_step
        assert [(each.payload == FAILED, each.steps, each.applied_after) for each in life.diary[1:]] == [(True, 1, 1)]
        with pytest.raises(MemoryShortError, match="taking over the agreed weights"):
            await life.worker.train(Task(Share(3, 0, 1)))  # before the first
    assert (life.replica.replica.round, life.trainer.kept_rounds) == (1, (1,))
    await life.worker.train(Task(Share(3, 0, 1)))
    assert life.trainer.kept_rounds == (3,)

    again.worker.repeat_all([each for each in life.diary if not each.applied_after], 3)
    again.payloads = life.payloads
    await again.apply(1)
    monkeypatch.setattr(again.trainer.recipe.residual, "forget", full)
    await again.worker.repeat(fetch)
    assert "the training of round 3 cannot be repeated: out of memory while taking over" in caplog.text
    for each in (life, again):
        each.close()


async def test_rounds_beyond_the_next_one_are_not_taken_in_between_two_steps(dataset: TokenDataset) -> None:
    """The diary says where one was; of two, a training that is repeated could not say which it took."""
    life = LateLife(dataset, {})
    for number in (1, 2):
        await life.train_and_apply_the_last(number)
    began, gate = slowed(life)
    training = asyncio.ensure_future(life.worker.train(Task(Share(3, 0, 1), frozenset({2}))))
    await asyncio.to_thread(began.wait)
    await life.apply(2)
    await life.apply(3, {})
    gate.set()
    assert (await training).base == 1
    assert life.diary[-1].applied_after == 0
    life.close()


@pytest.mark.parametrize("name", ["fragments", "streaming"])
async def test_fragments_move_in_turn_until_all_have_moved(name: str, dataset: TokenDataset) -> None:
    life = Life(dataset, name)
    trainer = life.trainer
    first, moved = [each.clone() for each in trainer.live.parts(trainer.replica.weights)], []
    for number in range(1, trainer.run.recipe.fragments + 1):
        before = [each.clone() for each in trainer.live.parts(trainer.replica.weights)]
        await life.train(number)
        await life.apply(number, {number: life.payloads[number]})
        after = trainer.live.parts(trainer.replica.weights)
        moved.append(sum(not torch.equal(*each) for each in zip(before, after, strict=True)))
    assert all(moved)
    assert sum(moved) == len(first)
    life.close()


async def test_steps_go_on_from_the_weights_that_were_agreed_on_in_their_middle(dataset: TokenDataset) -> None:
    """What a round moves is the sum of its steps, wherever the weights are meanwhile."""
    life = LateLife(dataset, {2: 2}, inner_learning_rate=Fraction(0))
    life.trainer.recipe.residual.coefficients.normal_(generator=torch.Generator().manual_seed(1))
    await life.train_and_apply_the_last(1)
    before = life.trainer.replica.weights.clone()
    await life.train_and_apply_the_last(2)
    assert not torch.equal(life.trainer.replica.weights, before)
    assert life.worker.figures.own_drift == pytest.approx(0.0, abs=1e-6)  # its steps moved nothing
    assert life.worker.drift == pytest.approx(float((life.trainer.replica.weights - before).norm() / before.norm()))
    life.close()


@pytest.mark.parametrize("steps", [1, 3])
async def test_a_training_of_fewer_steps_is_repeated_with_as_many_whatever_the_pace_is_then(
    steps: int, dataset: TokenDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    whole, checkpoint = Life(dataset, "local"), tmp_path / "checkpoint"
    await whole.save(checkpoint)
    for number in (1, 2, 3):
        takes = iter([True] * (steps - 1) + [False])
        if number != 2:
            whole.worker.pacing.takes_another = lambda *_, takes=takes: next(takes)  # type: ignore[method-assign, misc]
        else:
            del whole.worker.pacing.takes_another
            whole.worker.keep_pace(number, 1e6, 1e6)
        await whole.train(number)
        assert whole.worker.figures.steps == (4 if number == 2 else steps)
        if number != 3:  # of which only the training was noted
            await whole.apply(number)
    assert [each.steps for each in whole.diary] == [steps, 0, steps]

    again = Life(dataset, "local")
    again.trainer.load(checkpoint)
    again.worker.repeat_all(whole.diary, 3)
    again.payloads = dict(whole.payloads)
    for number in (1, 2):
        again.worker.keep_pace(number, 0.0, 0.0)
        await again.apply(number)
    again.worker.keep_pace(3, 1e6, 1e6)
    await again.worker.repeat(fetch)
    await again.train(3)
    assert again.worker.figures.steps == steps
    assert again.payloads == whole.payloads
    assert await again.save(tmp_path / "again") == await whole.save(tmp_path / "whole")
    assert caplog.text == ""
    for life in (whole, again):
        life.close()


@pytest.mark.parametrize("inner", ["muon", "adamw"])
@pytest.mark.parametrize("failing", [1, 2, 3])
async def test_a_training_that_failed_midway_is_repeated_as_far_as_it_went(
    inner: str, failing: int, dataset: TokenDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its steps have moved the inner optimizer, from which the next training begins."""
    caplog.set_level(logging.WARNING)
    whole, checkpoint = Life(dataset, "local", inner=inner), tmp_path / "checkpoint"
    await whole.save(checkpoint)
    await whole.train(1)
    await whole.apply(1)
    model, steps = whole.trainer.live.model, iter(range(10))
    real = model.loss
    model.loss = lambda batch: real(batch) * (float("nan") if next(steps) == failing else 1.0)  # type: ignore[method-assign]
    with pytest.raises(TrainingError):
        await whole.train(2)
    failed = whole.diary[-1]
    assert (len(whole.diary), failed.round, failed.steps, failed.payload) == (2, 2, failing, FAILED)
    model.loss = real  # type: ignore[method-assign]
    await whole.apply(2, {})
    await whole.train(3)

    again = Life(dataset, "local", inner=inner)
    again.trainer.load(checkpoint)
    again.worker.repeat_all(whole.diary, 3)
    again.payloads = dict(whole.payloads)
    await again.apply(1)
    await again.apply(2, {})
    await again.worker.repeat(fetch)
    await again.train(3)
    assert again.payloads == whole.payloads
    assert await again.save(tmp_path / "again") == await whole.save(tmp_path / "whole")
    assert (caplog.text, again.diary) == ("", [])
    for life in (whole, again):
        life.close()


@pytest.mark.parametrize("steps", [2, 4])
async def test_after_a_contribution_that_found_no_memory_nothing_is_repeated(
    steps: int, dataset: TokenDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps lie on the residual; a training that is repeated as one that failed midway would leave them out."""
    life = Life(dataset, "local", local_steps_min=2)
    if steps == 2:
        life.worker.keep_pace(1, 0.0, 0.0)
    with monkeypatch.context() as here:
        here.setattr(life.trainer.outer, "pack", full)
        with pytest.raises(MemoryShortError, match="making a contribution"):
            await life.train(1)
    assert (await life.worker.capture()).trained == 1, "what is saved has its steps"
    await life.apply(1, {})
    await life.train(2)
    for each in life.diary:
        Diary(tmp_path / "diary.jsonl").note(each)
    assert [each.number for each in life.diary] == [2]
    assert Diary(tmp_path / "diary.jsonl").after(0) == []
    life.close()


async def test_a_training_that_failed_in_its_first_step_has_moved_nothing_and_is_not_noted(
    dataset: TokenDataset,
) -> None:
    life = Life(dataset, "local")
    life.trainer.live.model.loss = lambda batch: batch.sum() * float("nan")  # type: ignore[method-assign]
    with pytest.raises((TrainingError, RuntimeError)):
        await life.train(1)
    assert (life.diary, (await life.worker.capture()).trained) == ([], 0)
    life.close()


def test_a_diary_that_says_no_steps_is_of_trainings_of_all_of_them(tmp_path: Path) -> None:
    path = tmp_path / "diary.jsonl"
    Diary(path).note(Trained(1, 1, 0, 0, 1, (), payload_digest(b"some").hex(), 1, 4))
    assert b"steps" not in path.read_bytes()
    Diary(path).note(Trained(2, 2, 1, 0, 1, (), payload_digest(b"others").hex(), 1, 4, 3))
    assert [each.steps for each in Diary(path).entries] == [0, 3]


async def test_a_training_ends_after_the_last_step_that_fits_the_pace(dataset: TokenDataset) -> None:
    life = Life(dataset, "local", local_steps_min=2)
    life.worker.keep_pace(2, 0.0, 0.0)  # of another round
    await life.train(1)
    assert (life.worker.figures.steps, life.diary[-1].steps) == (4, 0)
    await life.apply(1)
    life.worker.keep_pace(2, 0.0, 0.0)
    await life.train(2)
    assert (life.worker.figures.steps, life.diary[-1].steps) == (2, 2)
    life.close()


async def test_a_device_that_rests_through_its_round_trains_for_the_next_one(
    dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(dataset, "local", local_steps=1)
    monkeypatch.setattr(pacing, "rest_seconds", lambda worked, percent: 600.0)
    life.worker.set_percent(1)
    await life.train(1)  # and its rest is due
    resting = asyncio.ensure_future(life.train(2))
    for number in (1, 2):
        await life.apply(number, {})
    life.worker.set_percent(100)  # ends the rest
    with pytest.raises(PassedError):
        await resting
    life.worker.set_percent(1)
    await asyncio.wait_for(life.train(3), 5.0)  # of a base that all others have, too; no rest is due
    life.close()


async def test_a_step_on_fewer_sequences_is_repeated_on_as_many(dataset: TokenDataset, tmp_path: Path) -> None:
    life, again = Life(dataset, "local", sequences_per_pass=4), Life(dataset, "local", sequences_per_pass=4)
    life.worker.pacing.step_sequences = 3
    await life.train(1)
    assert life.worker.figures.tokens == 3 * life.trainer.run.model.sequence_length
    assert life.trainer.recipe.rate == pytest.approx(math.sqrt(3 / 4) * float(RecipeConfig().inner_learning_rate))
    for each in life.diary:
        Diary(tmp_path / "diary.jsonl").note(each)
    [noted] = Diary(tmp_path / "diary.jsonl").after(0)
    assert (noted.steps, noted.step_sequences) == (1, 3)
    again.worker.repeat_all([noted], 1)
    await again.worker.repeat(fetch)
    await again.train(1)
    assert again.payloads == life.payloads
    for each in (life, again):
        each.close()


async def test_a_training_that_comes_out_otherwise_is_told(
    dataset: TokenDataset, caplog: pytest.LogCaptureFixture
) -> None:
    life = Life(dataset, "distro")
    life.worker.repeat_all([Trained(1, 1, 0, 0, 1, (), payload_digest(b"another").hex())], 1)
    await life.worker.repeat(fetch)
    assert "the training of round 1 came out differently than before the restart" in caplog.text
    life.close()


async def test_trainings_take_as_many_threads_as_they_are_told_and_are_repeated_with_as_many(
    dataset: TokenDataset,
) -> None:
    life, threads = Life(dataset, "distro"), torch.get_num_threads() + 1
    life.worker.set_threads(threads)  # as `p2ptrain limit --threads` has it
    await life.train(1)
    assert [each.threads for each in life.diary] == [threads]
    again = Life(dataset, "distro")
    again.worker.repeat_all(life.diary, 1)
    await again.worker.repeat(fetch)
    await again.train(1)
    await again.apply(1)
    await again.train(2)
    assert [each.threads for each in again.diary] == [threads]
    for each in (life, again):
        each.close()


async def test_a_training_that_diverges_contributes_nothing_and_is_counted(dataset: TokenDataset) -> None:
    """The steps are so large that the weights overflow: the loss after them is not finite."""
    life = Life(dataset, "local", inner_learning_rate=Fraction(10**15))
    for number in (1, 2):
        with pytest.raises(TrainingError, match="is not finite"):
            await life.train(number)
        assert (life.worker.figures.not_finite, life.worker.figures.loss) == (number, None)
    life.close()


async def test_trainings_are_repeated_with_as_many_sequences_a_pass_as_there_was_memory_for(
    dataset: TokenDataset,
) -> None:
    life = Life(dataset, "distro")
    real = life.trainer.live.model.loss

    def loss(batch: torch.Tensor) -> torch.Tensor:
        if len(batch) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(batch)

    life.trainer.live.model.loss = loss  # type: ignore[method-assign]
    await life.train(1)
    assert [each.sequences_per_pass for each in life.diary] == [2]
    again = Life(dataset, "distro")
    again.worker.repeat_all(life.diary, 1)
    await again.worker.repeat(fetch)
    assert again.trainer.live.sequences_per_pass == 0, "for what comes, what the owner has set"
    await again.train(1)
    assert (again.payloads, again.diary) == (life.payloads, []), "the same bits, not trained again"
    again.close()
    life.close()


async def test_a_state_that_is_taken_over_ends_repeating(dataset: TokenDataset, tmp_path: Path) -> None:
    life = Life(dataset, "distro")
    life.worker.repeat_all([Trained(1, 1, 0, 0, 1, (), "0" * 64)], 1)
    await life.replica.adopt(0, bytes(32), [life.trainer.state_bytes()])
    before = await life.save(tmp_path / "before")
    await life.worker.repeat(fetch)
    assert await life.save(tmp_path / "after") == before
    life.close()
