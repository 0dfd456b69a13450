"""One contribution counts as one, whatever scale its author gives it, and what is cut returns to its author."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import fft

from p2ptrain.config import RecipeConfig
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.exact.aggregate import apply_payloads
from p2ptrain.exact.codec import Contribution, Packed, PayloadFormat, pack
from p2ptrain.exact.scales import Scales, Sizes
from p2ptrain.exact.schedule import Terms
from p2ptrain.exact.transform import Layout
from p2ptrain.share import Share
from p2ptrain.train.residual import Residual
from tests.helpers.exact_numbers import contribution, weights
from tests.helpers.golden import scales_of
from tests.helpers.trainer import embedded, make

CPU = torch.device("cpu")
TINY = Layout([(8, 8)], 8)
SIGNS = RecipeConfig(name="local", chunk=8, k=1)


def one(exponent: int, value: int = 1, index: int = 0) -> Contribution:
    value_type = np.int8 if abs(value) < 128 else np.int16
    return Contribution(np.array([[index]], np.uint16), np.array([[value]], value_type), np.array([exponent], np.int8))


def counted(offered: list[Contribution], recipe: RecipeConfig = SIGNS, reach: int | None = None) -> list[float]:
    """Returns what each contribution moves its coefficient by."""
    scales = scales_of(TINY, recipe, offered, reach)
    assert scales is not None
    return [float(scales.votes(n, each.values)[0, 0]) * 2.0 ** scales.units[0] for n, each in enumerate(offered)]


def test_signs_count_at_most_as_the_measure_and_smaller_ones_as_they_are() -> None:
    offered = [one(-5), one(-5), one(15), one(-4), one(-7), one(-9), one(-64)]
    assert [math.log2(value) if value else None for value in counted(offered)] == [-5, -5, -5, -5, -7, -9, None]


@pytest.mark.parametrize("extreme", [-64, 15])
@pytest.mark.parametrize("peers", [3, 4, 7, 16])
def test_a_third_cannot_change_what_the_others_count(peers: int, extreme: int) -> None:
    liars = [one(extreme) for _ in range(peers // 3)]
    honest = [one(-10) for _ in range(peers - len(liars))]
    assert counted([*honest, *liars])[: len(honest)] == counted(honest)
    assert max(counted([*honest, *liars])) == 2.0**-10


@pytest.mark.parametrize("slow", [0, 1, 3, 5])
def test_small_contributions_shorten_the_step_of_the_others_by_the_work_in_them_alone(slow: int) -> None:
    offered = [one(-8)] * 3 + [one(-9, index=1)] * slow  # half the amplitude, elsewhere: a quarter of the work
    form, moved = PayloadFormat.of(TINY, SIGNS), torch.zeros(8, 8)
    apply_payloads(TINY, SIGNS, [Packed(pack(each, form), form) for each in offered], Terms(Fraction(1)), [moved])
    assert fft.dctn(moved.double().numpy(), norm="ortho")[0, 0] == pytest.approx(-(2.0**-8) * 3 / (3 + slow / 4))


def test_a_tiny_contribution_of_two_does_not_stop_the_other() -> None:
    assert counted([one(-64), one(-3)]) == [0.0, 2.0**-3]
    assert counted([one(-3), one(-64)]) == [2.0**-3, 0.0]
    assert counted([one(7)]) == [2.0**7]


def test_a_few_with_many_steps_count_in_full_beside_many_with_few() -> None:
    assert counted([*[one(-9)] * 5, *[one(-6)] * 3]) == [*[2.0**-9] * 5, *[2.0**-6] * 3]


@pytest.mark.parametrize("liars", [1, 2, 5])
def test_none_counts_more_than_local_steps_can_move_however_few_there_are(liars: int) -> None:
    furthest = 2.0 * 8 * 2.0**-6  # twice a root mean square of 2**-6, all of it in one of the chunk's 64 coefficients
    assert max(counted([one(15)] * liars, reach=-6)) < furthest
    assert counted([one(15)] * liars)[0] == 2.0**15
    assert counted([one(-8)] * liars, reach=-6) == [2.0**-8] * liars, "honest ones count in full"
    assert counted([one(15), one(-8)], reach=-6)[1] == 2.0**-8


def test_integers_count_in_full_up_to_twice_the_measure() -> None:
    recipe = RecipeConfig(name="local", chunk=8, k=1, value_bits=4)
    assert counted([one(-3, 4), one(-3, 7), one(-3, -7), one(-3, 8), one(0, 1), one(1, -8)], recipe) == [
        0.5,
        0.875,
        -0.875,
        1.0,
        1.0,
        -1.0,  # of 16, halved four times
    ]


def test_no_single_value_counts_more_than_eight_times_the_measures_root_mean_square() -> None:
    recipe = RecipeConfig(name="local", chunk=8, k=32, value_bits=8)
    layout = Layout([(64, 64)], 8)
    even = contribution(1, layout, recipe)
    flat = Contribution(even.indices, np.ones_like(even.values), np.array([0], np.int8))
    spiked = Contribution(even.indices, flat.values.copy(), flat.exponents)
    spiked.values[0, 0] = 64  # its sum of squares stays below four times the others'
    scales = scales_of(layout, recipe, [flat, flat, spiked])
    assert scales is not None
    assert scales.cuts.max() == 0
    assert scales.votes(2, spiked.values).max() * 2.0 ** scales.units[0] == 8.0


@given(
    st.lists(st.tuples(st.integers(-64, 15), st.integers(1, 2**40)), min_size=1, max_size=12),
    st.integers(1, 8),
    st.none() | st.integers(-80, 20),
)
def test_scales_are_those_of_rational_arithmetic(drawn: list[tuple[int, int]], bits: int, reach: int | None) -> None:
    recipe = RecipeConfig(name="local", chunk=8, k=1, value_bits=bits)
    sizes = [Sizes(np.array([exponent], np.int8), np.array([squares])) for exponent, squares in drawn]
    scales = Scales.of(sizes, TINY, recipe, reach)
    exact = [Fraction(squares) * Fraction(4) ** exponent for exponent, squares in drawn]
    measure = sorted(exact)[len(exact) - 1 - len(exact) // 3]
    if reach is not None:
        measure = min(measure, 64 * Fraction(4) ** reach)
    for cut, size in zip(scales.cuts[:, 0].tolist(), exact, strict=True):
        assert size / 4**cut < 4 * measure
        assert cut == 0 or size / 4 ** (cut - 1) >= 4 * measure
    shares = sum(min(size, measure) / measure for size in exact)
    assert 0 <= shares - Fraction(scales.effective[0]) <= len(exact) * Fraction(1, 2**20)
    root = Fraction(2) ** (scales.units[0] + recipe.room_bits)
    assert root**2 <= measure < 4 * root**2


@pytest.mark.parametrize("bits", [1, 3, 8])
def test_votes_stay_within_their_bound_and_are_rounded_half_away_from_zero(bits: int) -> None:
    recipe = RecipeConfig(name="local", value_bits=bits, k=16)
    layout = Layout([(130, 128), (64, 192)], 64)
    offered = [contribution(peer, layout, recipe) for peer in range(9)]
    scales = scales_of(layout, recipe, offered)
    assert scales is not None
    for number, each in enumerate(offered):
        votes = scales.votes(number, each.values)
        assert np.abs(votes).max() <= recipe.vote_max
        shift = (scales.exponents[number] - scales.cuts[number] - np.array(scales.units)).repeat(scales.chunks)
        exact = np.abs(each.values.astype(np.float64)) * 2.0 ** shift[:, None]
        expected = np.sign(each.values) * np.minimum(np.floor(exact + 0.5), recipe.vote_max)
        assert np.array_equal(votes, expected)


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_what_is_cut_from_a_contribution_returns_to_its_authors_residual(bits: int) -> None:
    recipe = RecipeConfig(name="local", k=32, value_bits=bits)
    layout = Layout([(64, 128), (192, 64)], 64)
    form = PayloadFormat.of(layout, recipe)
    residuals = [Residual((layout,), CPU) for _ in range(4)]
    for number, (residual, factor) in enumerate(zip(residuals, (1.0, 1.3, 0.05, 700.0), strict=True)):
        residual.add(0, [weights(number, (64, 128)) * factor, weights(number + 9, (192, 64)) * factor], 0.9)
    before = [residual.coefficients.clone() for residual in residuals]
    offered = [residual.take(0, recipe) for residual in residuals]
    payloads = [pack(each, form) for each in offered]
    flat = [torch.zeros(64, 128), torch.zeros(192, 64)]
    _, scales, _ = apply_payloads(layout, recipe, [Packed(each, form) for each in payloads], Terms(Fraction(1)), flat)
    assert scales is not None
    assert (scales.cuts[3] > 5).all(), "the large one is cut"
    assert not scales.cuts[:3].any()
    moved = torch.zeros(layout.chunks, layout.area, dtype=torch.float64)
    for number, residual in enumerate(residuals):
        assert residual.forget(0, lambda removed, number=number: scales.uncounted(number, removed))
        told = before[number].double() - residual.coefficients.double()
        votes = scales.votes(number, offered[number].values)
        units = np.ldexp(1.0, np.repeat(scales.units, scales.chunks))[:, None]
        expected = torch.zeros_like(moved)
        expected.scatter_(
            1, torch.from_numpy(offered[number].indices.astype(np.int64)), torch.from_numpy(votes * units)
        )
        assert torch.allclose(told, expected, atol=float(before[number].abs().max()) * 1e-6)
        moved += told
    decoded = Residual((layout,), CPU)
    decoded.add(0, flat, 0.0)
    effective = np.repeat(scales.effective, scales.chunks)[:, None]
    furthest = float((decoded.coefficients.double() + moved / torch.from_numpy(effective)).abs().max())
    assert furthest < 1e-3 * float(moved.abs().max()), "what was told and what was applied are the same"


# ---------------------------------------------------------------------------------------------------
# Of trainers


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    return embedded(tmp_path_factory.mktemp("corpus") / "data")


def test_what_is_cut_of_a_contribution_is_its_authors_again_and_replicas_stay_the_same_bits(
    dataset: TokenDataset,
) -> None:
    trainers = [make(dataset, "local", k=256) for _ in range(3)]
    payloads = []
    for place, trainer in enumerate(trainers):
        trainer.train(Share(0, place, 3))
        trainer.live.weights.mul_((1.0, 1.0, 64.0)[place])  # how far its steps have moved
        payloads.append(trainer.contribute(0))
    kept = [trainer.recipe.residual.coefficients.clone() for trainer in trainers]
    sent = [trainer.recipe.residual.kept[0].removed for trainer in trainers]
    for trainer, own in zip(trainers, payloads, strict=True):
        assert [trainer.check(payload) for payload in payloads] == [None] * 3
        trainer.apply(0, payloads[::-1], {0: own})
    assert len({trainer.root() for trainer in trainers}) == 1
    returned = [
        float((trainer.recipe.residual.coefficients - before).norm() / np.linalg.norm(removed))
        for trainer, before, removed in zip(trainers, kept, sent, strict=True)
    ]
    assert max(returned[:2]) < 0.05, "nothing but what rounding to a common unit leaves"
    assert 0.9 < returned[2] < 1.0, "all but what counts as one"


def test_one_that_is_alone_in_a_round_moves_the_weights_no_further_than_local_steps_can(dataset: TokenDataset) -> None:
    trainer = make(dataset, "local", k=256)
    rounds = []
    for number, factor in enumerate((1.0, 1e6)):
        before = trainer.replica.weights.clone()
        trainer.train(Share(number, 0, 1))
        trainer.live.weights.mul_(factor)
        payload = trainer.contribute(number)
        assert trainer.check(payload) is None
        trainer.apply(number, [payload], {number: payload})
        rounds.append(float((trainer.replica.weights - before).square().mean().sqrt()))
    honest, huge = rounds
    assert huge < 2 * 4 * 0.01, "four steps at the rate 1/100"
    assert 2 * honest < huge
