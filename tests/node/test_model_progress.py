"""A node looks at the agreed weights when the core asks, within its share of the time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from p2ptrain.core.events import Train
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.errors import ConfigError, DataError, MemoryShortError, StoppedError
from p2ptrain.models.sample import SampleRequest
from p2ptrain.node.trainings import (
    TEXT_LENGTH_MAX,
    TIME_SHARE,
    TOKENS_MAX,
    TOKENS_MIN,
    TRAINING_SHARE,
    ModelProgress,
    evaluated_sequences,
)
from p2ptrain.node.work import Figures
from p2ptrain.share import Share
from p2ptrain.visible import one_line
from tests.helpers.trainer import RECIPES, embedded, make, swarm_round
from tests.helpers.worker import worker_of

SEQUENCES = 8  # a tenth of the ten steps of eight sequences of the data set below
BOTH = Train(1, 0, 0, 1, (), samples=True, evaluates=True)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    return embedded(tmp_path_factory.mktemp("corpus") / "data")


class FakeTrainer:
    """A trainer whose looks take time of a clock that the test moves."""

    def __init__(self, sequence_seconds: float, token_seconds: float) -> None:
        self.round, self.now = 0, 0.0
        self.sequence_seconds, self.token_seconds = sequence_seconds, token_seconds
        self.counts: list[tuple[str, int]] = []
        self.text, self.loss = "text", 2.5
        self.trouble: Exception | None = None
        self.on_token: Callable[[], None] = lambda: None
        self.worker = FakeWorker(self)

    def evaluate(self, count: int) -> float:
        if self.trouble is not None:
            raise self.trouble
        self.counts.append(("sequences", count))
        self.now += count * self.sequence_seconds
        return self.loss

    def sample(self, request: Any, on_token: Callable[[], None]) -> str:
        on_token()
        self.counts.append(("tokens", request.tokens))
        self.now += request.tokens * self.token_seconds
        return self.text


class Data:
    """A data set of this many held-out sequences, which may have to be fetched first."""

    def __init__(self, trainer: FakeTrainer, sequences: int = 1_000, fetch_seconds: float | None = None) -> None:
        self.trainer, self.sequences, self.fetch_seconds = trainer, sequences, fetch_seconds
        self.is_missing, self.fetches = fetch_seconds is not None, 0
        recipe = SimpleNamespace(round_sequences=80)
        self.run = SimpleNamespace(recipe=recipe, model=SimpleNamespace(kind="builtin", sequence_length=256))
        self.dataset = self

    def held_out_sequences(self, length: int) -> int:
        return self.sequences

    def need_held_out(self, count: int, length: int) -> list[bytes]:
        return self.missing_held_out(count, length)

    def missing_held_out(self, count: int, length: int) -> list[bytes]:
        return [b"piece"] if self.is_missing else []

    async def held_out(self, count: int) -> None:
        self.fetches += 1
        assert self.fetch_seconds is not None
        self.trainer.now += self.fetch_seconds
        if self.fetch_seconds > 10.0:
            raise TimeoutError
        self.is_missing = False


class FakeWorker:
    """Looks by a fake trainer, if it has the weights that are asked for."""

    def __init__(self, trainer: FakeTrainer) -> None:
        self.trainer, self.figures, self.is_stopping = trainer, Figures(), False

    async def evaluate(self, number: int, sequences: int) -> float | None:
        return self.trainer.evaluate(sequences) if number == self.trainer.round else None

    async def sample(self, request: SampleRequest, go_on: Callable[[], None], number: int | None = None) -> str | None:
        return self.trainer.sample(request, go_on) if number == self.trainer.round else None


def progress_of(trainer: FakeTrainer, data: Data | None = None) -> ModelProgress:
    fetching: Any = data or Data(trainer)
    worker: Any = trainer.worker
    return ModelProgress(worker, fetching, clock=lambda: trainer.now)


def look(progress: ModelProgress, effect: Train = BOTH) -> int:
    found = asyncio.run(progress.look(effect))
    asyncio.run(progress.write(effect))
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_looking_at_the_weights_changes_nothing_and_says_what_evaluate_says(name: str, dataset: TokenDataset) -> None:
    looked, other = (make(dataset, name) for _ in range(2))
    worker = worker_of(looked)
    fetching: Any = SimpleNamespace(dataset=dataset, run=looked.run)
    progress = ModelProgress(worker, fetching, clock=lambda: 0.0)
    for number in range(3):
        found = look(progress, Train(number + 1, number, 0, 1, (), samples=True, evaluates=True))
        assert found == round(1e6 * other.evaluate(evaluated_sequences(looked.run)))
        assert progress.text_round == number
        assert swarm_round([looked], number) == swarm_round([other], number)
    assert looked.root() == other.root()
    assert progress.text.isprintable()
    worker.close()


@pytest.mark.parametrize("name", RECIPES)
def test_looking_at_the_weights_needs_no_memory_for_others(
    name: str, dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = make(dataset, name)
    size, clone = looked.live.weights.numel(), torch.Tensor.clone

    def small(tensor: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        assert tensor.numel() < size, "a copy of the whole model"
        return clone(tensor, *arguments, **named)

    monkeypatch.setattr(torch.Tensor, "clone", small)
    looked.evaluate(1)
    looked.sample(SampleRequest("a", 3, 1))


@pytest.mark.parametrize("name", RECIPES)
def test_drift_is_how_far_a_round_moved_the_weights_over_their_norm(name: str, dataset: TokenDataset) -> None:
    trainer = make(dataset, name)
    assert trainer.drift is None
    for number in range(2):
        before = trainer.replica.weights.clone()
        swarm_round([trainer], number)
        expected = (trainer.replica.weights - before).norm() / before.norm()
        assert trainer.drift == pytest.approx(float(expected), rel=1e-5)
        assert float(expected) > 0
    trainer.apply(2, [])
    assert trainer.drift == 0.0


def rounds_of(progress: ModelProgress, trainer: FakeTrainer, training: float, every: int, count: int) -> list[float]:
    """Trains and looks at the weights every so many rounds. Returns the seconds of each look before a training."""
    looks = []
    for number in range(count):
        trainer.round, began = number, trainer.now
        effect = Train(number + 1, number, 0, 1, (), samples=True, evaluates=True)
        asyncio.run(progress.look(effect))
        looks.append(trainer.now - began)
        trainer.now += training
        trainer.worker.figures.last_seconds = training
        asyncio.run(progress.write(effect))
        trainer.now += (every - 1) * training
    return looks


@pytest.mark.parametrize(("sequence_seconds", "token_seconds"), [(0.001, 0.001), (0.02, 0.003), (0.4, 0.1)])
@pytest.mark.parametrize("every", [1, 10, 50])
@pytest.mark.parametrize("times", [1.0, 1.3, 3.0])
def test_looks_take_one_percent_of_the_time(
    sequence_seconds: float, token_seconds: float, every: int, times: float
) -> None:
    """A training takes this many times as long for a sequence as a measurement."""
    trainer = FakeTrainer(sequence_seconds, token_seconds)
    progress, training = progress_of(trainer), 80 * times * sequence_seconds
    looks = rounds_of(progress, trainer, training, every, 2_000 // every)
    assert progress.seconds <= TIME_SHARE * trainer.now
    assert max(looks) <= TRAINING_SHARE * training
    assert {count for what, count in trainer.counts if what == "sequences"} == {SEQUENCES}, "curves of one text"
    assert len([what for what, _ in trainer.counts if what == "sequences"]) > 3
    assert all(TOKENS_MIN <= count <= TOKENS_MAX for what, count in trainer.counts if what == "tokens")


def test_text_is_written_after_the_training_within_what_the_measurement_left() -> None:
    trainer = FakeTrainer(0.1, 0.01)
    progress, training = progress_of(trainer), 8.0
    rounds_of(progress, trainer, training, 100, 5)
    assert [what for what, _ in trainer.counts] == ["sequences", "tokens"] * 5
    first, *later = [count for what, count in trainer.counts if what == "tokens"]
    assert first == TOKENS_MIN
    assert set(later) <= {19, 20}, "0.8 of the one second that an eighth of a training is have gone into the loss"


def test_only_the_first_look_is_taken_where_there_is_no_time() -> None:
    trainer = FakeTrainer(10.0, 10.0)
    progress = progress_of(trainer)
    assert [look(progress) for _ in range(3)] == [2_500_000, 0, 0]
    assert trainer.counts == [("sequences", SEQUENCES), ("tokens", TOKENS_MIN)]
    trainer.now += SEQUENCES * 10.0 * 10 / TIME_SHARE
    assert look(progress) == 2_500_000


def test_a_first_measurement_that_was_slow_is_not_the_last() -> None:
    trainer = FakeTrainer(10.0, 0.001)
    progress = progress_of(trainer)
    rounds_of(progress, trainer, 8.0, 500, 1)
    trainer.sequence_seconds = 0.1
    looks = rounds_of(progress, trainer, 8.0, 500, 20)
    assert sum(seconds > 0 for seconds in looks) >= 10


def test_every_node_of_a_run_measures_the_same_sequences(dataset: TokenDataset) -> None:
    first, second = (make(dataset, "local", seed=seed) for seed in (1, 2))
    assert evaluated_sequences(first.run) == evaluated_sequences(second.run) >= 1


def test_what_the_core_does_not_ask_for_is_not_done() -> None:
    trainer = FakeTrainer(0.001, 0.001)
    progress = progress_of(trainer)
    assert look(progress, Train(1, 0, 0, 1)) == 0
    assert trainer.counts == []
    assert look(progress, Train(1, 0, 0, 1, (), samples=True)) == 0
    assert trainer.counts == [("tokens", TOKENS_MIN)]


def test_weights_of_another_round_are_not_looked_at() -> None:
    trainer = FakeTrainer(0.001, 0.001)
    trainer.round = 7  # a state was adopted
    assert look(progress_of(trainer)) == 0
    assert trainer.counts == []


def test_missing_pieces_are_fetched_first() -> None:
    trainer = FakeTrainer(0.001, 0.001)
    data = Data(trainer, fetch_seconds=1.0)
    progress = progress_of(trainer, data)
    assert look(progress) == 2_500_000
    assert data.fetches == 1
    assert progress.seconds > 1.0


def test_pieces_that_nobody_sends_cost_one_percent_of_the_time() -> None:
    trainer = FakeTrainer(0.001, 0.001)
    data = Data(trainer, fetch_seconds=10.5)
    progress = progress_of(trainer, data)
    for _ in range(100):
        assert look(progress) == 0
        trainer.now += 100.0
    assert data.fetches == 10
    assert progress.seconds <= TIME_SHARE * trainer.now + 10.5


def test_a_data_set_without_a_held_out_part_is_not_measured() -> None:
    trainer = FakeTrainer(0.001, 0.001)
    assert look(progress_of(trainer, Data(trainer, sequences=0))) == 0
    assert look(progress_of(trainer, Data(trainer, sequences=2))) == 2_500_000
    assert [count for what, count in trainer.counts if what == "sequences"] == [2]


@pytest.mark.parametrize("trouble", [DataError("damaged"), MemoryShortError("short")])
def test_trouble_while_looking_costs_the_look_and_not_the_training(
    trouble: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    trainer = FakeTrainer(0.001, 0.001)
    trainer.trouble = trouble
    assert look(progress_of(trainer)) == 0
    assert "cannot look at the weights of round 0" in caplog.text


def test_a_loss_that_is_no_number_or_beyond_all_bounds_is_not_said_as_it_is() -> None:
    trainer = FakeTrainer(0.001, 0.001)
    found = []
    for trainer.loss in (float("nan"), float("inf"), 1e30, 0.0):
        found.append(look(progress_of(trainer)))
    assert found == [0, 0, 100_000_000, 1]


def test_a_plug_ins_model_that_cannot_be_looked_at_costs_no_training() -> None:
    trainer = FakeTrainer(0.001, 0.001)

    def fail(*_: object) -> float:
        raise ConfigError("the model of a plug-in failed: it needs two tokens")

    trainer.evaluate = trainer.sample = fail  # type: ignore[method-assign, assignment]
    assert look(progress_of(trainer)) == 0


def test_a_node_that_ends_writes_no_more() -> None:
    trainer = FakeTrainer(0.001, 0.001)
    progress = progress_of(trainer)
    trainer.worker.is_stopping = True
    with pytest.raises(StoppedError):
        look(progress)
    assert progress.text == ""


def test_what_the_model_writes_is_one_bounded_line_of_what_is_printed() -> None:
    trainer = FakeTrainer(0.001, 0.001)
    trainer.text = "a\x1b[31m\u202eb\u2066c\u200f\r\n\n\td \x00\x07e\ud800<script>\u2028" + "x" * 500
    progress = progress_of(trainer)
    look(progress)
    assert progress.text.startswith("a[31mbc d e<script> xxx")
    assert len(progress.text) == TEXT_LENGTH_MAX
    assert one_line("", 5) == ""


def test_text_is_written_by_the_agreed_weights_alone(dataset: TokenDataset) -> None:
    first, second = (make(dataset, "local", seed=seed) for seed in (1, 1))
    second.train(Share(0, 0, 1))  # its live weights are elsewhere now
    second.contribute(0)
    texts = []
    for trainer in (first, second):
        worker = worker_of(trainer)
        fetching: Any = SimpleNamespace(dataset=dataset, run=trainer.run)
        progress = ModelProgress(worker, fetching)
        look(progress)
        texts.append(progress.text)
        worker.close()
    assert texts[0] == texts[1]
