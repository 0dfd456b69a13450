"""Privacy: what steps cost, what they pay, what they draw and add, and that a sequence cannot be told from others."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant

from p2ptrain.config import PrivacyConfig, RunConfig
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.errors import ConfigError, DataError, PrivacySpentError
from p2ptrain.share import Share
from p2ptrain.train.live import LiveModel, norm_of
from p2ptrain.train.own_data import OwnData, share_held_out
from p2ptrain.train.private import (
    LEDGER_NAME,
    Privacy,
    SpentSteps,
    epsilon_of,
    gaussian,
    open_privacy,
    refuse_without_own_steps,
)
from tests.helpers.tokenizers import prepared, written
from tests.helpers.trainer import ONE_THREAD, TINY, Trainer

ME = b"m" * 32
LENGTH = TINY["sequence_length"]
LETTERS = "abcdefghijklmnopqrstuvwxyz "
SEQUENCES = 255
RAW: dict[str, Any] = {
    "name": "test",
    "model": TINY,
    "recipe": {"name": "local", "k": 256, "sequences_per_pass": 8, "local_steps": 4, "inner_learning_rate": "1/200"},
    "data": {"source": "own"},
    "admission": {"policy": "allowlist", "keys": [ME.hex()]},
}
RUN = RunConfig.model_validate(RAW)


def config_of(epsilon: float = 1_000, noise: float = 1, **changes: Any) -> PrivacyConfig:
    return PrivacyConfig(epsilon=Fraction(epsilon), noise=Fraction(str(noise)), **changes)


def privacy_of(directory: Path, config: PrivacyConfig, expected: int = 8, sequences: int = SEQUENCES) -> Privacy:
    return Privacy(config, expected, sequences, SpentSteps(directory / LEDGER_NAME, LENGTH))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    """Letters in no order, so that a model can only know a sequence by heart."""
    directory = tmp_path_factory.mktemp("private")
    letters = np.random.default_rng(5).choice(list(LETTERS), (512, LENGTH))
    file = written(directory / "text.txt", "\n".join("".join(line) for line in letters))
    made = prepared(directory / "own", file, held_out=Fraction(1, 2))
    return TokenDataset.open(made.path, made.digest)


def a_trainer(own: TokenDataset, directory: Path, privacy: Privacy | None, **recipe: Any) -> Trainer:
    run = RunConfig.model_validate(RAW | {"recipe": RAW["recipe"] | recipe})
    return Trainer(run, ONE_THREAD, share_held_out(own, directory), own=OwnData(own, ME, privacy))


# ---------------------------------------------------------------------------------------------------
# The price


def test_the_price_is_that_of_a_published_example_and_no_less_than_the_tighter_bound() -> None:
    # Abadi et al. (2016), their moments accountant: q = 0.01, noise 4, 10,000 steps: 1.26 at delta 1e-5.
    assert epsilon_of({(600, 60_000, 4.0): 10_000}, 1e-5) == pytest.approx(1.15, abs=0.12)  # ours is a little tighter
    accountant = PLDAccountant()
    accountant.compose(PoissonSampledDpEvent(0.05, GaussianDpEvent(1.1)), 300)
    tight = accountant.get_epsilon(1e-6)
    assert tight <= epsilon_of({(5, 100, 1.1): 300}, 1e-6) <= 1.25 * tight


def test_a_step_on_all_sequences_costs_what_the_gaussian_mechanism_does() -> None:
    # Balle and Wang (2018): the exact delta of one release with noise s at epsilon.
    def delta_of(epsilon: float, noise: float) -> float:
        normal = torch.distributions.Normal(0.0, 1.0)
        ends = [torch.tensor(sign / (2 * noise) - epsilon * noise, dtype=torch.float64) for sign in (1, -1)]
        above, below = (float(normal.cdf(end)) for end in ends)
        return above - math.exp(epsilon) * below

    epsilon = epsilon_of({(10, 10, 2.0): 1}, 1e-5)
    assert delta_of(epsilon, 2.0) <= 1e-5 < delta_of(0.8 * epsilon, 2.0)


def test_steps_of_all_runs_and_settings_add_up_and_survive_a_restart(tmp_path: Path) -> None:
    first = privacy_of(tmp_path, config_of())
    first.spend(40)
    assert first.spent == pytest.approx(epsilon_of({(8, SEQUENCES, 1.0): 40}, 1e-6))
    other = privacy_of(tmp_path, config_of(noise=0.5), expected=4)
    other.spend(10)
    both = epsilon_of({(8, SEQUENCES, 1.0): 40, (4, SEQUENCES, 0.5): 10}, 1e-6)
    assert other.spent == pytest.approx(both) == privacy_of(tmp_path, config_of()).spent
    assert both > first.spent


def test_no_step_is_taken_beyond_the_budget(tmp_path: Path) -> None:
    privacy = privacy_of(tmp_path, config_of(2))
    left = privacy.steps_left()
    assert privacy.epsilon(left) <= 2 < privacy.epsilon(left + 1)
    with pytest.raises(PrivacySpentError, match=r"epsilon 0\.00 of 2"):
        privacy.spend(left + 1)
    privacy.spend(left)
    with pytest.raises(PrivacySpentError):
        privacy.spend(1)
    assert json.loads((tmp_path / LEDGER_NAME).read_text()) == {
        "length": LENGTH,
        "steps": [{"expected": 8, "sequences": SEQUENCES, "noise": 1.0, "steps": left}],
    }


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[1]", "\xff", "[" * 5_000] + ['{"length":64,"steps":[' + each + "]}" for each in [
        '{"expected":1,"sequences":1,"noise":1,"steps":-1}', '{"expected":2,"sequences":1,"noise":1,"steps":1}',
        '{"expected":1,"sequences":1,"noise":1e-300,"steps":1}',
        ",".join(['{"expected":1,"sequences":1,"noise":1,"steps":1}'] * 2),
    ]],
)  # fmt: skip
def test_a_damaged_ledger_never_counts_as_an_empty_one(tmp_path: Path, content: str) -> None:
    (tmp_path / LEDGER_NAME).write_text(content, "latin-1")
    with pytest.raises(DataError, match=r"privacy\.json: .*Restore the file"):
        SpentSteps(tmp_path / LEDGER_NAME, LENGTH)


def test_a_ledger_that_cannot_be_written_takes_no_step(own: TokenDataset, tmp_path: Path) -> None:
    trainer = a_trainer(own, tmp_path, privacy_of(tmp_path / "gone", config_of()))
    with pytest.raises(DataError, match=r"privacy\.json"):
        trainer.train(Share(0, 0, 1))
    assert not trainer.live.gradient.any()


# ---------------------------------------------------------------------------------------------------
# A step


def test_each_sequence_is_drawn_by_itself(tmp_path: Path) -> None:
    privacy = privacy_of(tmp_path, config_of())
    draws = [privacy.draw() for _ in range(2_000)]
    counts = np.array([len(draw) for draw in draws])
    assert all(len(set(draw.tolist())) == len(draw) for draw in draws)
    assert counts.mean() == pytest.approx(8, abs=0.5)
    assert counts.var() == pytest.approx(8 * (1 - 8 / SEQUENCES), rel=0.25), "a batch of fixed size has another price"
    often = np.bincount(np.concatenate(draws), minlength=SEQUENCES)
    assert often.mean() == pytest.approx(2_000 * 8 / SEQUENCES, rel=0.05)
    assert 0.7 < often.var() / often.mean() < 1.3


def test_noise_is_normal_and_new_each_time() -> None:
    drawn = gaussian(200_001)
    assert len(drawn) == 200_001
    assert (drawn.mean(), drawn.std()) == (pytest.approx(0, abs=0.01), pytest.approx(1, abs=0.01))
    assert np.mean(np.abs(drawn) > 3) == pytest.approx(0.0027, abs=0.0008)
    assert abs(np.corrcoef(drawn[:100_000], drawn[100_000:200_000])[0, 1]) < 0.02
    assert not np.array_equal(drawn[:10], gaussian(10))


def live_of(own: TokenDataset, directory: Path, privacy: Privacy | None) -> LiveModel:
    return a_trainer(own, directory, privacy).live


def test_each_gradient_is_clipped_by_itself_before_noise_is_added(own: TokenDataset, tmp_path: Path) -> None:
    recipe = RUN.recipe.model_copy(update={"clip": Fraction(0)})
    batch = torch.from_numpy(own.batch(np.arange(5), LENGTH))
    plain = live_of(own, tmp_path, None)
    single = []
    for place in range(5):
        plain.gradient_step(0, batch[place : place + 1], [place], recipe)
        single.append(plain.gradient.clone())
    norms = [float(torch.linalg.vector_norm(each)) for each in single]
    clip = sorted(norms)[2]  # two are shorter
    wanted = sum(each * min(1, clip / norm) for each, norm in zip(single, norms, strict=True)) / 8

    def private(noise: float) -> torch.Tensor:
        live = live_of(own, tmp_path, privacy_of(tmp_path, config_of(clip=Fraction(clip), noise=noise)))
        result = live.gradient_step(0, batch, [0, 1, 2, 3, 4], recipe)
        assert result.loss == pytest.approx(float(plain.loss(batch).detach()), rel=1e-4)
        return live.gradient - wanted

    quiet, loud = private(0.01), private(3)
    assert float(quiet.std()) == pytest.approx(0.01 * clip / 8, rel=0.05)
    assert float(loud.std()) == pytest.approx(3 * clip / 8, rel=0.05)
    assert abs(float(loud.mean())) < 0.1 * clip


def test_a_step_that_draws_no_sequence_is_noise_alone(own: TokenDataset, tmp_path: Path) -> None:
    live = live_of(own, tmp_path, privacy_of(tmp_path, config_of()))
    batch = torch.from_numpy(own.batch(np.empty(0, np.int64), LENGTH))
    result = live.gradient_step(0, batch, [], RUN.recipe.model_copy(update={"clip": Fraction(0)}))
    assert (result.loss, result.tokens, result.learned) == (0, 0, 0)
    assert float(live.gradient.std()) == pytest.approx(1 / 8, rel=0.05)


def test_a_gradient_that_is_not_finite_counts_as_nothing(
    own: TokenDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = live_of(own, tmp_path, privacy_of(tmp_path, config_of(noise=0.01)))
    usual = live.model.packed_loss
    bad = torch.from_numpy(own.batch(np.array([3]), LENGTH))[:, :-1]
    monkeypatch.setattr(
        live.model,
        "packed_loss",
        lambda inputs, *rest: usual(inputs, *rest) * (math.nan if torch.equal(inputs, bad) else 1),
    )
    monkeypatch.setattr(live.model, "loss", lambda batch: live.model.packed_loss(batch[:, :-1], batch[:, 1:], None))
    batch = torch.from_numpy(own.batch(np.array([1, 3]), LENGTH))
    without = live.gradient_step(0, batch[:1], [1], RUN.recipe)
    gradient = live.gradient.clone()
    result = live.gradient_step(0, batch, [1, 3], RUN.recipe)
    assert result.loss == without.loss
    assert torch.allclose(live.gradient, gradient, atol=0.02)


def test_the_same_round_is_never_trained_with_the_same_noise(own: TokenDataset, tmp_path: Path) -> None:
    privacy = privacy_of(tmp_path, config_of())
    made = []
    for _ in range(2):
        trainer = a_trainer(own, tmp_path, privacy)
        trainer.train(Share(0, 0, 1))
        made.append(trainer.contribute(0))
    assert made[0] != made[1]
    assert privacy.ledger.steps == 8, "each is paid for"


def test_steps_that_the_pace_leaves_out_are_paid_back(own: TokenDataset, tmp_path: Path) -> None:
    privacy = privacy_of(tmp_path, config_of())
    trainer = a_trainer(own, tmp_path, privacy)
    paid: list[int] = []
    trainer.train(Share(0, 0, 1), lambda result: paid.append(privacy.ledger.steps) or len(paid) < 3)  # type: ignore[func-returns-value]
    assert paid == [4, 4, 4], "before they are taken"
    assert privacy.ledger.steps == 3


# ---------------------------------------------------------------------------------------------------
# The attack


def advantage(own: TokenDataset, directory: Path, config: PrivacyConfig | None) -> float:
    """Returns the chance that a trained model has a lower loss on a member than on a sequence it has never seen."""
    members = 32
    privacy = privacy_of(directory, config, expected=8, sequences=members) if config else None
    trainer = a_trainer(own, directory, privacy, sequences_per_pass=8, local_steps=10, inner_learning_rate="1/100")
    live = trainer.live
    generator = np.random.default_rng(1)
    trainer.recipe.begin(0)
    for step in range(300):
        drawn = privacy.draw() if privacy else generator.choice(members, 8, replace=False)
        trainer.recipe.local_step(step, torch.from_numpy(own.batch(drawn, LENGTH)), drawn.tolist())
    if privacy:
        privacy.spend(300)  # as many as were drawn
    with torch.no_grad():
        losses = np.array([float(live.loss(torch.from_numpy(own.batch(np.array([at]), LENGTH)))) for at in range(160)])
    known, unknown = losses[:members], losses[members:]
    return float(np.mean(known[:, None] < unknown[None, :]) + np.mean(known[:, None] == unknown[None, :]) / 2)


def test_members_are_told_from_others_without_noise_and_by_chance_alone_with_it(
    own: TokenDataset, tmp_path: Path
) -> None:
    assert advantage(own, tmp_path, None) > 0.99
    guessed = advantage(own, tmp_path, config_of(noise=40))
    assert privacy_of(tmp_path, config_of()).spent < 0.6
    assert guessed < 0.73, "four standard errors of 32 members and 128 others, which are drawn anew in each run"


# ---------------------------------------------------------------------------------------------------
# What the owner gets wrong


def test_a_budget_that_allows_no_round_names_its_price(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^privacy\.epsilon: 0\.1 allows no round: 4 steps .* take 1\.\d\d\. Raise it"
    ):
        open_privacy(RUN, PrivacyConfig(epsilon=Fraction(1, 10)), tmp_path, SEQUENCES)
    spent = privacy_of(tmp_path, config_of(3))
    spent.spend(spent.steps_left())
    later = open_privacy(RUN, config_of(3), tmp_path, SEQUENCES)
    assert later is not None
    assert later.steps_left() == 0, "a budget that was spent ends the training, not the node"


def test_settings_without_privacy_are_refused_where_there_is_a_budget(tmp_path: Path) -> None:
    privacy_of(tmp_path, config_of()).spend(1)
    with pytest.raises(ConfigError, match=r"^privacy: .*privacy\.json says that .* has a privacy budget"):
        open_privacy(RUN, PrivacyConfig(), tmp_path, SEQUENCES)


def test_sequences_of_another_length_are_not_added_up(tmp_path: Path) -> None:
    privacy_of(tmp_path, config_of()).spend(1)
    with pytest.raises(ConfigError, match=r"sequences of 64 tokens, and this run's have 128"):
        SpentSteps(tmp_path / LEDGER_NAME, 128)


def test_a_budget_too_small_for_these_settings_is_told_also_after_cheaper_ones(tmp_path: Path) -> None:
    privacy_of(tmp_path, config_of(noise=100)).spend(1)
    with pytest.raises(ConfigError, match="allows no round"):
        open_privacy(RUN, config_of(1, noise=0.1), tmp_path, SEQUENCES)


def test_what_was_trained_without_privacy_is_dropped_when_it_begins(own: TokenDataset, tmp_path: Path) -> None:
    plain = a_trainer(own, tmp_path, None)
    plain.train(Share(0, 0, 1))
    plain.contribute(0)
    plain.save(tmp_path / "plain")
    private = a_trainer(own, tmp_path, privacy_of(tmp_path, config_of()))
    private.load(tmp_path / "plain")
    assert torch.equal(private.replica.weights, plain.replica.weights)
    assert not private.kept_rounds
    assert not any(
        bool(each.any()) for each in [private.recipe.residual.coefficients, *private.recipe.state().values()]
    )
    private.train(Share(0, 0, 1))
    private.save(tmp_path / "private")
    again = a_trainer(own, tmp_path, privacy_of(tmp_path, config_of()))
    again.load(tmp_path / "private")
    assert any(bool(each.any()) for each in again.recipe.state().values())


def test_a_disk_that_cannot_be_written_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    privacy = privacy_of(tmp_path, config_of())

    def full(path: Path, content: bytes) -> None:
        raise DataError("full")

    with monkeypatch.context() as patched:
        patched.setattr("p2ptrain.train.private.write_atomically", full)
        with pytest.raises(DataError, match="full"):
            privacy.spend(30)
    privacy.spend(30)
    assert privacy_of(tmp_path, config_of()).ledger.steps == 30


def test_the_norm_of_a_large_gradient_is_not_taken_too_small() -> None:
    large = torch.randn(20_000_000, generator=torch.Generator().manual_seed(1))
    large[::100] *= 30
    exact = float(np.linalg.norm(large.numpy().astype(np.float64)))
    assert norm_of(large) == pytest.approx(exact, rel=1e-9)
    assert float(torch.linalg.vector_norm(large)) < 0.999 * exact, "else there is nothing to take care of"


def test_privacy_where_it_means_nothing_is_refused(tmp_path: Path) -> None:
    assert open_privacy(RUN, PrivacyConfig(), tmp_path, SEQUENCES) is None
    shared = RunConfig.model_validate({"name": "test"})
    with pytest.raises(ConfigError, match=r"^privacy: the training data of run test is shared"):
        open_privacy(shared, config_of(), tmp_path, SEQUENCES)
    with pytest.raises(ConfigError, match=r"^privacy: a script takes its own steps"):
        refuse_without_own_steps(RUN, config_of(), has_loop=True)
    refuse_without_own_steps(shared, PrivacyConfig(), has_loop=True)
    recipe = RUN.recipe.model_copy(update={"plugin": "some-recipe 1.0"})
    with pytest.raises(ConfigError, match=r"^privacy: the plug-in some-recipe 1.0 may keep or send more"):
        open_privacy(RUN.model_copy(update={"recipe": recipe}), config_of(), tmp_path, SEQUENCES)


def test_a_delta_that_allows_to_give_a_sequence_away_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^privacy\.delta: 0\.01 would allow .* Set it to \"1/2550\" or less"):
        open_privacy(RUN, config_of(delta=Fraction(1, 100)), tmp_path, SEQUENCES)


@pytest.mark.parametrize(
    "changes",
    [{"epsilon": -1}, {"epsilon": 1_001}, {"epsilon": 1, "delta": 0}, {"epsilon": 1, "delta": 1},
     {"epsilon": 1, "clip": 0}, {"epsilon": 1, "noise": "1/1000"}, {"noise": 2}, {"epsilon": float("nan")}],
)  # fmt: skip
def test_impossible_settings_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="validation error for PrivacyConfig"):
        PrivacyConfig(**changes)
