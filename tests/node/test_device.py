"""The device with a real trainer: trainings lost in a kill are repeated bit for bit."""

from __future__ import annotations

import asyncio
import logging
from fractions import Fraction
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from safetensors import safe_open

from p2ptrain.core.messages import payload_digest
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.errors import MemoryShortError, TrainingError
from p2ptrain.node.device import FAILED, Applying, Device
from p2ptrain.store.diary import Diary, Trained
from tests.helpers.trainer import FAMILY, RECIPES, embedded, make

ROUNDS = 7
NONE_OPEN: frozenset[int] = frozenset()


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    return embedded(tmp_path_factory.mktemp("corpus") / "data")


def applied(device: Device, number: int, taken: dict[int, bytes]) -> bytes | None:
    """Applies own payloads, by their rounds, in this thread."""
    applying = Applying(number, list(taken.values()), taken, bytes(32), device.adopted)
    device._waiting.append(applying)
    device.settle(applying)
    return applying.done.result()


class Life:
    """A device alone in its run; the contribution of round 3 is never taken."""

    def __init__(self, dataset: TokenDataset, name: str, **changes: Any) -> None:
        self.device = Device(make(dataset, name, **changes), bytes(32))
        self.diary: list[Trained] = []
        self.payloads: dict[int, bytes] = {}
        self.saved: dict[int, bytes] = {}

    def train(self, number: int) -> None:
        outstanding = frozenset({3}) if number == 4 else NONE_OPEN
        _, payload, trained = self.device._train(number, 0, 1, outstanding)
        if trained is not None:
            self.diary.append(trained)
        self.payloads[number] = payload
        assert self.device.base_round == number - 1  # also of one that was trained before a restart

    def apply(self, number: int) -> None:
        taken = {} if number == 3 else {number: self.payloads[number]}
        assert applied(self.device, number, taken) is not None

    def save(self, path: Path) -> tuple[dict[str, str], dict[str, bytes]]:
        """Saves all that a checkpoint contains."""
        self.device.trainer.save(path)
        with safe_open(path, framework="np") as file:
            return file.metadata(), {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118

    def close(self) -> None:
        self.device.close()


@pytest.mark.parametrize("name", [*RECIPES, *FAMILY])
@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize("killed_in", [3, 4, 6])
def test_a_node_that_was_killed_goes_on_with_the_bits_of_one_that_was_not(
    name: str, is_trained: bool, killed_in: int, dataset: TokenDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    whole = Life(dataset, name)
    checkpoint = tmp_path / "checkpoint"
    for number in range(1, ROUNDS + 1):
        whole.train(number)
        if number == killed_in and is_trained:
            noted = list(whole.diary)
        if number == killed_in and not is_trained:
            noted = whole.diary[:-1]
        whole.apply(number)
        if number == 2:
            whole.save(checkpoint)

    again = Life(dataset, name)
    again.device.trainer.load(checkpoint)
    again.device.repeat(noted[2:], noted[-1].number)
    again.payloads = dict(whole.payloads)  # they are on the disk, or the swarm has them
    for number in range(3, killed_in):  # what the log has is applied again
        again.apply(number)
    for number in range(killed_in, ROUNDS + 1):
        again.train(number)
        again.apply(number)
    assert again.payloads == whole.payloads
    assert again.save(tmp_path / "again") == whole.save(tmp_path / "whole")
    assert [each.number for each in noted] + [each.number for each in again.diary] == list(range(1, ROUNDS + 1))
    assert caplog.text == ""
    for life in (whole, again):
        life.close()


class LateLife(Life):
    """A device whose rounds are agreed on while the next one trains, after so many of its steps."""

    def __init__(self, dataset: TokenDataset, after: dict[int, int], **changes: Any) -> None:
        super().__init__(dataset, "local", is_late=True, **changes)
        self.after = after  # by round
        self._note_step = self.device._note_step

    def apply(self, number: int) -> None:
        assert applied(self.device, number, {number: self.payloads[number]}) is not None

    def train_and_apply_the_last(self, number: int) -> None:
        """Trains a round; the one before it is applied in its middle, or afterwards."""
        device, open_rounds = self.device, frozenset({number - 1} if number > 1 else ())
        waiting = None
        if number > 1:
            taken = {number - 1: self.payloads[number - 1]}
            waiting = Applying(number - 1, list(taken.values()), taken, bytes(32), device.adopted)

        def noted(*arguments: Any) -> bool:
            if waiting is not None and device.step + 1 == self.after.get(number, 0):
                device._waiting.append(waiting)
            return self._note_step(*arguments)

        device._note_step = noted  # type: ignore[method-assign]
        _, payload, trained = device._train(number, 0, 1, open_rounds)
        assert trained is not None
        self.diary.append(trained)
        self.payloads[number] = payload
        assert device.base_round == (number - 1 if self.after.get(number, 0) else max(0, number - 2))
        if waiting is not None and not waiting.done.done():
            device._waiting.append(waiting)
            device.settle(waiting)


@pytest.mark.parametrize("killed_in", [3, 4])
def test_a_training_in_whose_middle_a_round_was_applied_is_repeated_bit_for_bit(
    killed_in: int, dataset: TokenDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    whole, checkpoint = LateLife(dataset, {2: 1, 3: 2, 4: 3, 5: 1}), tmp_path / "checkpoint"
    for number in range(1, 6):
        whole.train_and_apply_the_last(number)
        if number == 2:
            whole.save(checkpoint)
    assert [each.applied_after for each in whole.diary] == [0, 1, 2, 3, 1]

    again = LateLife(dataset, whole.after)
    again.device.trainer.load(checkpoint)
    again.device.repeat(whole.diary[2:killed_in], killed_in)
    again.payloads = {number: whole.payloads[number] for number in range(1, killed_in + 1)}
    for number in range(2, killed_in):
        again.apply(number)
    for number in range(killed_in + 1, 6):
        again.train_and_apply_the_last(number)
    assert again.payloads == whole.payloads
    assert again.save(tmp_path / "again") == whole.save(tmp_path / "whole")
    assert caplog.text == ""


async def test_a_training_that_needs_a_round_in_its_middle_is_not_repeated_without_it(dataset: TokenDataset) -> None:
    life = LateLife(dataset, {2: 1})
    for number in (1, 2):
        life.train_and_apply_the_last(number)
    again = LateLife(dataset, life.after)
    again.device.repeat(life.diary, 2)
    assert await again.device.repeat_next()  # the first needs none
    assert (await again.device.due()) == life.diary[1]
    assert not await again.device.repeat_next()
    again.payloads = life.payloads
    again.apply(1)
    assert await again.device.due() is None
    assert again.device.trainer.root() == life.device.trainer.root()


async def test_a_round_that_nobody_waits_for_any_more_is_not_applied(dataset: TokenDataset) -> None:
    life = LateLife(dataset, {})
    life.train(1)
    device, before = life.device, life.device.trainer.root()
    gate = Event()
    busy = asyncio.ensure_future(device.run(gate.wait))
    applying = asyncio.ensure_future(device.apply(1, [life.payloads[1]], {1: life.payloads[1]}, bytes(32), 0))
    await asyncio.sleep(0)
    assert device._waiting
    applying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await applying
    gate.set()
    await busy
    await device.run(lambda: None)
    assert (device.trainer.root(), device.trainer.round) == (before, 0)


async def test_a_round_that_cannot_be_applied_between_two_steps_says_so_to_whoever_waits(
    dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = LateLife(dataset, {})
    life.train(1)
    device, trainer, began = life.device, life.device.trainer, Event()
    apply, take = trainer.apply, trainer.recipe.local_step

    def failing(*arguments: Any) -> None:
        raise MemoryShortError("no room")

    def step(*arguments: Any) -> Any:
        began.set()
        while not device._waiting and trainer.apply is not apply and device.step == 0:
            Event().wait(0.001)
        return take(*arguments)

    monkeypatch.setattr(trainer, "apply", failing)
    monkeypatch.setattr(trainer.recipe, "local_step", step)
    training = asyncio.ensure_future(device.train(2, 0, 1, frozenset({1})))
    await asyncio.to_thread(began.wait)
    with pytest.raises(MemoryShortError, match="no room"):
        await device.apply(1, [life.payloads[1]], {1: life.payloads[1]}, bytes(32), 0)
    with pytest.raises(MemoryShortError, match="no room"):
        await training


@pytest.mark.parametrize("name", ["fragments", "streaming"])
def test_fragments_move_in_turn_until_all_have_moved(name: str, dataset: TokenDataset) -> None:
    life = Life(dataset, name)
    trainer = life.device.trainer
    first, moved = [each.clone() for each in trainer.live.parts(trainer.recipe.agreed)], []
    for number in range(1, trainer.run.recipe.fragments + 1):
        before = [each.clone() for each in trainer.live.parts(trainer.recipe.agreed)]
        life.train(number)
        assert applied(life.device, number, {number: life.payloads[number]}) is not None
        after = trainer.live.parts(trainer.recipe.agreed)
        moved.append(sum(not torch.equal(*each) for each in zip(before, after, strict=True)))
    assert all(moved)
    assert sum(moved) == len(first)


def test_steps_go_on_from_the_weights_that_were_agreed_on_in_their_middle(dataset: TokenDataset) -> None:
    """What a round moves is the sum of its steps, wherever the weights are meanwhile."""
    life = LateLife(dataset, {2: 2}, inner_learning_rate=Fraction(0))
    life.device.trainer.recipe.residual.coefficients.normal_(generator=torch.Generator().manual_seed(1))
    life.train_and_apply_the_last(1)
    before = life.device.trainer.recipe.agreed.clone()
    life.train_and_apply_the_last(2)
    assert not torch.equal(life.device.trainer.recipe.agreed, before)
    assert life.device.own_drift == pytest.approx(0.0, abs=1e-6)  # its steps moved nothing


@pytest.mark.parametrize("steps", [1, 3])
def test_a_training_of_fewer_steps_is_repeated_with_as_many_whatever_the_pace_is_then(
    steps: int, dataset: TokenDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    whole, checkpoint = Life(dataset, "local"), tmp_path / "checkpoint"
    whole.device.trainer.save(checkpoint)
    for number in (1, 2, 3):
        takes = iter([True] * (steps - 1) + [False])
        if number != 2:
            whole.device._takes_another = lambda *_, takes=takes: next(takes)  # type: ignore[method-assign, misc]
        else:
            del whole.device._takes_another
            whole.device.keep_pace(number, 1e6, 1e6)
        whole.train(number)
        assert whole.device.steps == (4 if number == 2 else steps)
        if number != 3:  # of which only the training was noted
            whole.apply(number)
    assert [each.steps for each in whole.diary] == [steps, 0, steps]

    again = Life(dataset, "local")
    again.device.trainer.load(checkpoint)
    again.device.repeat(whole.diary, 3)
    again.payloads = dict(whole.payloads)
    for number in (1, 2):
        again.device.keep_pace(number, 0.0, 0.0)
        again.apply(number)
    again.device.keep_pace(3, 1e6, 1e6)
    again.train(3)
    assert again.device.steps == steps
    assert again.payloads == whole.payloads
    assert again.save(tmp_path / "again") == whole.save(tmp_path / "whole")
    assert caplog.text == ""
    for life in (whole, again):
        life.close()


@pytest.mark.parametrize("inner", ["muon", "adamw"])
@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_training_that_failed_midway_is_repeated_as_far_as_it_went(
    inner: str, failing: int, dataset: TokenDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its steps have moved the inner optimizer, from which the next training begins."""
    caplog.set_level(logging.WARNING)
    whole, checkpoint = Life(dataset, "local", inner=inner), tmp_path / "checkpoint"
    whole.device.trainer.save(checkpoint)
    whole.train(1)
    whole.apply(1)
    model, steps = whole.device.trainer.live.model, iter(range(10))
    real = model.loss
    model.loss = lambda batch: real(batch) * (float("nan") if next(steps) == failing else 1.0)  # type: ignore[method-assign]
    with pytest.raises(TrainingError):
        whole.train(2)
    failed = whole.device.take_failed()
    assert failed is not None
    assert whole.device.take_failed() is None
    assert (failed.round, failed.steps, failed.payload) == (2, failing, FAILED)
    whole.diary.append(failed)
    model.loss = real  # type: ignore[method-assign]
    assert applied(whole.device, 2, {}) is not None
    whole.train(3)

    again = Life(dataset, "local", inner=inner)
    again.device.trainer.load(checkpoint)
    again.device.repeat(whole.diary, whole.device.trained)
    again.payloads = dict(whole.payloads)
    again.apply(1)
    assert applied(again.device, 2, {}) is not None
    again.train(3)
    assert again.payloads == whole.payloads
    assert again.save(tmp_path / "again") == whole.save(tmp_path / "whole")
    assert (caplog.text, again.device.trained) == ("", 3)
    for life in (whole, again):
        life.close()


def test_a_training_that_failed_in_its_first_step_has_moved_nothing_and_is_not_noted(dataset: TokenDataset) -> None:
    life = Life(dataset, "local")
    life.device.trainer.live.model.loss = lambda batch: batch.sum() * float("nan")  # type: ignore[method-assign]
    with pytest.raises((TrainingError, RuntimeError)):
        life.train(1)
    assert (life.device.take_failed(), life.device.trained) == (None, 0)
    life.close()


def test_a_diary_that_says_no_steps_is_of_trainings_of_all_of_them(tmp_path: Path) -> None:
    """As releases wrote them in whose runs a round had a fixed number."""
    path = tmp_path / "diary.jsonl"
    Diary(path).note(Trained(1, 1, 0, 0, 1, (), payload_digest(b"some").hex(), 1, 4))
    assert b"steps" not in path.read_bytes()
    Diary(path).note(Trained(2, 2, 1, 0, 1, (), payload_digest(b"others").hex(), 1, 4, 3))
    assert [each.steps for each in Diary(path).entries] == [0, 3]


def test_a_training_ends_after_the_last_step_that_fits_the_pace(dataset: TokenDataset) -> None:
    life = Life(dataset, "local", local_steps_min=2)
    life.device.keep_pace(2, 0.0, 0.0)  # of another round
    life.train(1)
    assert (life.device.steps, life.diary[-1].steps) == (4, 0)
    life.apply(1)
    life.device.keep_pace(2, 0.0, 0.0)
    life.train(2)
    assert (life.device.steps, life.diary[-1].steps) == (2, 2)
    life.close()


@pytest.mark.parametrize(
    ("percent", "rested", "usual", "another"),
    [
        (100, 0.0, 6.0, True),  # a step takes five seconds
        (50, 0.0, 6.0, False),  # and as long a rest follows it
        (50, 0.0, 11.0, True),
        (100, 5.0, 1.0, True),  # the rest that was taken is no work: a step takes none
        (100, 4.0, 0.9, False),
        (50, 3.0, 4.5, True),  # two seconds of work, two of rest
        (50, 3.0, 3.5, False),
    ],
)
def test_a_step_of_a_device_that_rests_takes_its_work_and_the_rest_that_follows(
    percent: int, rested: float, usual: float, another: bool, dataset: TokenDataset
) -> None:
    life = Life(dataset, "local", local_steps_min=1)
    device, now = life.device, 1_005.0
    device.set_percent(percent)
    device.step, device._began, device._rested = 1, now - 5.0, rested
    device._pace = 1, now + usual, now
    assert device._takes_another(1, now) is another
    life.close()


def test_a_training_that_comes_out_otherwise_is_told(dataset: TokenDataset, caplog: pytest.LogCaptureFixture) -> None:
    life = Life(dataset, "distro")
    life.device.repeat([Trained(1, 1, 0, 0, 1, (), payload_digest(b"another").hex())], life.device.trained)
    life.train(1)
    assert "the training of round 1 came out differently than before the restart" in caplog.text
    life.close()


def test_trainings_take_as_many_threads_as_they_are_told_and_are_repeated_with_as_many(dataset: TokenDataset) -> None:
    life, before = Life(dataset, "distro"), torch.get_num_threads()
    try:
        life.device.set_threads(before + 1)  # as `p2ptrain limit --threads` has it
        life.train(1)
        assert [each.threads for each in life.diary] == [before + 1]
        again = Life(dataset, "distro")
        torch.set_num_threads(before)
        again.device.repeat(life.diary, life.device.trained)
        again.device._repeat()
        assert torch.get_num_threads() == before + 1
        again.close()
    finally:
        torch.set_num_threads(before)
    life.close()


def test_a_training_that_diverges_contributes_nothing_and_is_counted(dataset: TokenDataset) -> None:
    """The steps are so large that the weights overflow: the loss after them is not finite."""
    life = Life(dataset, "local", inner_learning_rate=Fraction(10**15))
    for number in (1, 2):
        with pytest.raises(TrainingError, match="is not finite"):
            life.train(number)
        assert (life.device.not_finite, life.device.loss, life.diary) == (number, None, [])
    life.close()


def test_trainings_are_repeated_with_as_many_sequences_a_pass_as_there_was_memory_for(dataset: TokenDataset) -> None:
    life = Life(dataset, "distro")
    real, fails = life.device.trainer.live.model.loss, [True]

    def loss(batch: torch.Tensor) -> torch.Tensor:
        if len(batch) > 2 and fails[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(batch)

    life.device.trainer.live.model.loss = loss  # type: ignore[method-assign]
    life.train(1)
    assert [each.sequences_per_pass for each in life.diary] == [2]
    again = Life(dataset, "distro")
    again.device.repeat(life.diary, life.device.trained)
    again.device._repeat()
    assert again.device.trainer.live.sequences_per_pass == 0, "for what comes, what the owner has set"
    assert again.device._repeated[1][2] == life.payloads[1], "the same bits"
    again.close()
    life.close()


def test_a_training_that_finds_no_memory_contributes_nothing_and_the_next_state_is_applied(
    dataset: TokenDataset,
) -> None:
    life, other = Life(dataset, "local"), Life(dataset, "local")
    other.train(1)
    life.payloads = dict(other.payloads)

    def loss(batch: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    life.device.trainer.live.model.loss = loss  # type: ignore[method-assign]
    with pytest.raises(MemoryShortError, match="one sequence"):
        life.train(1)
    assert (life.diary, life.device.trainer.live.sequences_per_pass) == ([], 1)
    for each in (life, other):
        each.apply(1)
    assert life.device.trainer.root() == other.device.trainer.root()
    life.close()
    other.close()


def test_a_state_that_is_taken_over_ends_repeating(dataset: TokenDataset, tmp_path: Path) -> None:
    life = Life(dataset, "distro")
    life.device.repeat([Trained(1, 1, 0, 0, 1, (), "0" * 64)], life.device.trained)
    life.device._adopt(0, [life.device.trainer.state_bytes()])
    before = life.save(tmp_path / "before")
    life.device._repeat()
    assert life.save(tmp_path / "after") == before
    life.close()
