"""Schedules: their corners, their shape between the corners, and the one rounding at the end."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.config import RecipeConfig
from p2ptrain.exact.schedule import exact_float, learning_rate, reach


def recipe_of(**settings: Any) -> RecipeConfig:
    return RecipeConfig(name="distro", learning_rate=Fraction(1, 1000), **settings)


CONSTANT = recipe_of(warmup_rounds=4)
LINEAR = recipe_of(schedule="linear", warmup_rounds=4, rounds=10, final_ratio=Fraction(1, 10))
WSD = recipe_of(schedule="wsd", warmup_rounds=2, rounds=10, decay_rounds=4, final_ratio=Fraction(0))

rationals = st.builds(Fraction, st.integers(1, 2**53 - 1), st.integers(1, 2**53 - 1))
ratios = st.fractions(0, 1, max_denominator=2**53 - 1)


@st.composite
def recipes(draw: st.DrawFn) -> RecipeConfig:
    schedule = draw(st.sampled_from(["constant", "linear", "wsd"]))
    warmup_rounds = draw(st.integers(0, 50))
    decay_rounds = draw(st.integers(1, 50)) if schedule == "wsd" else 0
    stable_rounds = draw(st.integers(1, 50))
    return RecipeConfig(
        name="distro",
        learning_rate=draw(rationals),
        schedule=schedule,
        warmup_rounds=warmup_rounds,
        decay_rounds=decay_rounds,
        rounds=0 if schedule == "constant" else warmup_rounds + stable_rounds + decay_rounds,
        final_ratio=draw(ratios),
    )


def in_thousandths(recipe: RecipeConfig, count: int) -> list[Fraction]:
    return [learning_rate(recipe, round_number) * 1000 for round_number in range(count)]


# ---------------------------------------------------------------------------------------------------
# Golden values, worked out by hand


def test_constant_rises_and_stays() -> None:
    quarter = Fraction(1, 4)
    assert in_thousandths(CONSTANT, 7) == [quarter, 2 * quarter, 3 * quarter, 1, 1, 1, 1]
    assert learning_rate(CONSTANT, 2**60) == Fraction(1, 1000)


def test_linear_rises_and_falls_in_a_straight_line() -> None:
    rise = [Fraction(1, 4), Fraction(1, 2), Fraction(3, 4), Fraction(1)]
    fall = [Fraction(20, 20), Fraction(17, 20), Fraction(14, 20), Fraction(11, 20), Fraction(8, 20), Fraction(5, 20)]
    assert in_thousandths(LINEAR, 13) == [*rise, *fall, *3 * [Fraction(1, 10)]]
    assert learning_rate(LINEAR, 2**60) == Fraction(1, 10_000)


def test_wsd_rises_stays_and_falls() -> None:
    fall = [Fraction(3, 4), Fraction(1, 2), Fraction(1, 4)]
    assert in_thousandths(WSD, 12) == [Fraction(1, 2), 1, 1, 1, 1, 1, 1, *fall, 0, 0]


def test_without_warmup_the_first_round_has_the_highest_rate() -> None:
    for recipe in (CONSTANT, LINEAR, WSD):
        assert learning_rate(recipe.model_copy(update={"warmup_rounds": 0}), 0) == Fraction(1, 1000)


@pytest.mark.parametrize(
    ("recipe", "round_number", "rate"),
    [
        (CONSTANT, 2, "0x1.89374bc6a7efap-11"),
        (LINEAR, 5, "0x1.bda5119ce075fp-11"),
        (LINEAR, 8, "0x1.a36e2eb1c432dp-12"),
        (WSD, 9, "0x1.0624dd2f1a9fcp-12"),
    ],
)
def test_rates_as_floats_are_golden(recipe: RecipeConfig, round_number: int, rate: str) -> None:
    assert exact_float(learning_rate(recipe, round_number)).hex() == rate


# ---------------------------------------------------------------------------------------------------
# Every schedule


@given(recipes(), st.integers(0, 2**60))
def test_a_rate_is_an_exact_fraction_between_the_final_one_and_the_highest(
    recipe: RecipeConfig, round_number: int
) -> None:
    peak = recipe.learning_rate
    for place in (round_number, round_number % (recipe.rounds + 100)):
        rate = learning_rate(recipe, place)
        assert type(rate) is Fraction
        assert 0 <= rate <= peak
        if place >= recipe.warmup_rounds and recipe.schedule != "constant":
            assert rate >= peak * recipe.final_ratio


@given(recipes())
def test_a_schedule_meets_its_endpoints(recipe: RecipeConfig) -> None:
    peak = recipe.learning_rate
    assert learning_rate(recipe, 0) == peak / max(recipe.warmup_rounds, 1)
    assert learning_rate(recipe, max(recipe.warmup_rounds - 1, 0)) == peak
    assert learning_rate(recipe, recipe.warmup_rounds) == peak  # the fall begins with its first round, at its top
    if recipe.schedule == "wsd":
        assert learning_rate(recipe, recipe.rounds - recipe.decay_rounds) == peak
    final = peak if recipe.schedule == "constant" else peak * recipe.final_ratio
    assert learning_rate(recipe, recipe.rounds + recipe.warmup_rounds) == final
    if recipe.schedule != "constant":
        assert learning_rate(recipe, recipe.rounds) == final


@given(recipes())
def test_a_schedule_has_no_jumps(recipe: RecipeConfig) -> None:
    peak, warmup_rounds = recipe.learning_rate, recipe.warmup_rounds
    rates = [learning_rate(recipe, round_number) for round_number in range(recipe.rounds + warmup_rounds + 5)]
    changes = [after - before for before, after in pairwise(rates)]
    fall_rounds = recipe.decay_rounds or max(recipe.rounds - warmup_rounds, 1)
    steepest = peak * (1 - recipe.final_ratio) / fall_rounds
    for place, change in enumerate(changes, start=1):
        if place < warmup_rounds:
            assert change == peak / warmup_rounds
        elif recipe.schedule == "constant":
            assert change == 0
        else:
            assert change in (0, -steepest)


def test_a_round_before_the_first_is_our_mistake() -> None:
    with pytest.raises(AssertionError):
        learning_rate(CONSTANT, -1)


# ---------------------------------------------------------------------------------------------------
# The one rounding


def nearest_float_by_decimal(fraction: Fraction) -> float:
    """Rounds through 1,200 decimal digits, which represent any float64, and Python's correctly rounded float(str)."""
    with localcontext() as context:
        context.prec = 1_200
        return float(str(Decimal(fraction.numerator) / Decimal(fraction.denominator)))


large_fractions = st.builds(Fraction, st.integers(0, 2**200), st.integers(1, 2**200))


@given(large_fractions)
def test_a_fraction_is_rounded_to_the_nearest_float(fraction: Fraction) -> None:
    rounded = exact_float(fraction)
    assert rounded == nearest_float_by_decimal(fraction)
    # Fractions of floats are exact, so the distances to both neighbours say the same once more.
    error = abs(Fraction(rounded) - fraction)
    for neighbour in (math.nextafter(rounded, math.inf), math.nextafter(rounded, -math.inf)):
        assert error <= abs(Fraction(neighbour) - fraction)


@given(recipes(), st.integers(0, 200))
def test_a_rate_is_rounded_to_the_nearest_float(recipe: RecipeConfig, round_number: int) -> None:
    rate = learning_rate(recipe, round_number)
    assert exact_float(rate) == nearest_float_by_decimal(rate)


def test_ties_go_to_even() -> None:
    assert exact_float(Fraction(2**53 + 1, 2**53)) == 1.0
    assert exact_float(Fraction(2**53 + 3, 2**53)) == 1.0 + 2.0**-51


def test_rounding_three_times_would_not_do() -> None:
    fraction = Fraction(2**53 + 1, 2**53 + 3)
    assert fraction.numerator > 2**53  # it has no common factor to lose
    assert float(fraction.numerator) / float(fraction.denominator) != exact_float(fraction)
    assert exact_float(fraction) == nearest_float_by_decimal(fraction)


def test_a_contribution_reaches_as_far_as_the_rounds_that_it_may_hold() -> None:
    local = RecipeConfig(name="local", local_steps=8, inner_learning_rate=Fraction(1, 2**10))
    assert [reach(local, 20, 0, covered) for covered in (0, 1, 3, 4, 7)] == [-7, -6, -5, -5, -4]
    rising = local.model_copy(update={"warmup_rounds": 32})
    assert reach(rising, 0, 0, covered=15) == reach(rising, 0, 0) + 4, "by the rates of the rounds that there were"
