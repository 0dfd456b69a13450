"""Where a round of local steps starts: ahead of the agreed weights, by shares of what is not agreed on yet."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from p2ptrain.config import ModelConfig, RecipeConfig
from p2ptrain.exact.aggregate import apply_own
from p2ptrain.exact.outer import Uncounted
from p2ptrain.exact.transform import Layout
from p2ptrain.models.built_in import Transformer, initialise
from p2ptrain.train.live import LiveModel
from p2ptrain.train.recipes import LocalRecipe
from p2ptrain.train.residual import Residual
from tests.helpers.exact_numbers import integers

CPU = torch.device("cpu")
TINY = ModelConfig(vocab_size=256, dim=32, layers=1, heads=2, kv_heads=1, ffn_dim=48, sequence_length=16)


def live_model() -> LiveModel:
    model = Transformer(TINY)
    initialise(model, 1)
    return LiveModel(model, autocast=False)


def batch(seed: int) -> torch.Tensor:
    drawn = integers(seed, 4 * 17) % np.uint64(256)
    return torch.from_numpy(drawn.astype(np.int64).reshape(4, 17))


def one_round(local: LocalRecipe, number: int) -> None:
    """Takes a step and contributes it."""
    local.begin(number)
    local.local_step(0, batch(number), [])
    local.end()
    local.contribute(number)


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("share", ["0", "1/4"])
def test_a_round_starts_with_its_share_of_the_residual_which_does_not_count_as_moved(
    share: str, fragments: int
) -> None:
    live = live_model()
    layouts = Layout(live.shapes, 64).fragments(fragments)
    local = LocalRecipe(RecipeConfig(k=32, residual_share=Fraction(share), fragments=fragments), live, layouts)
    one_round(local, 1)
    local.residual.forget(1)
    unsent = Residual(layouts, CPU)
    unsent.coefficients.copy_(local.residual.coefficients)
    local.begin(2)
    ahead = local.base - live.weights
    if local.pending is not None:
        ahead -= local.pending
    expected = torch.zeros_like(ahead)
    unsent.subtract_from(live.parts(expected), -0.95 * float(Fraction(share)))  # after the decay
    assert torch.allclose(ahead, expected, atol=1e-6)
    assert bool(ahead.any()) == (share != "0")
    local.end()
    assert local.drift is not None
    assert local.drift < 1e-6, "no step was taken"


def test_a_round_also_starts_with_half_of_an_open_contribution() -> None:
    live = live_model()
    local = LocalRecipe(RecipeConfig(k=32), live, (Layout(live.shapes, 64),))
    one_round(local, 1)
    local.begin(2)
    ahead = local.base - live.weights
    expected, parts = torch.zeros_like(ahead), live.parts
    kept = local.residual.kept[1]
    apply_own(local.residual.layouts[0], kept.indices, kept.removed, -0.5, parts(expected))
    local.residual.subtract_from(parts(expected), -0.95 / 4)
    assert torch.allclose(ahead, expected, atol=1e-6)


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("share", ["0", "1/4"])
@pytest.mark.parametrize("counted", [lambda removed: removed / 2, lambda removed: None])
def test_a_round_that_is_applied_between_two_steps_moves_where_they_start_and_not_what_they_moved(
    share: str, fragments: int, counted: Uncounted
) -> None:
    live = live_model()
    layouts = Layout(live.shapes, 64).fragments(fragments)
    local = LocalRecipe(RecipeConfig(k=32, residual_share=Fraction(share), fragments=fragments), live, layouts)
    for number in range(1, 4):
        one_round(local, number)
    unsent = local.residual.coefficients.clone()
    local.begin(4)
    assert torch.equal(local.residual.coefficients, unsent)
    before = live.weights.clone()
    local.local_step(0, batch(4), [])
    moved = before - live.weights
    with local.rebased():
        local.base.add_(0.5)
        for number in (1, 3):  # of the same numbers; what was not counted is unsent again
            assert local.residual.forget(number, counted)
    assert list(local.residual.kept) == [2]
    local.end()
    assert torch.allclose(live.weights, moved, atol=1e-5)
