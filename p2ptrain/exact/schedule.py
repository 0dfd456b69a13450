"""The learning rate of a round, as an exact fraction.

Every node multiplies the agreed update by the same rate, so the rate must be the same to the last bit. A
cosine would come from each machine's own libm, whose last bits differ; so schedules are straight
lines between rational numbers, computed in integers and rounded once, at the very end.

All rise linearly over `warmup_rounds`, as (round + 1) / warmup_rounds so that round 0 moves too, and then:

    constant    stays at the highest rate
    linear      falls in a straight line to `final_ratio` of it at `rounds`; a line to zero does at least as
                well as a cosine (Bergsma et al., arXiv 2502.15938)
    wsd         stays, then falls in a straight line over the last `decay_rounds` before `rounds`, so that the
                length of a run need not be known at its start (MiniCPM, arXiv 2404.06395)

From `rounds` on, the rate stays at its final value.

With recipe `local` the schedule shapes the rate of the local steps, which no other node sees; their movement is
applied at a constant rate, as in DiLoCo."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from p2ptrain.config import RecipeConfig

REST = Fraction(1, 16)  # of the highest inner rate: lets the residual drain after a schedule has reached zero


@dataclass(frozen=True, slots=True)
class Terms:
    """The settings for applying a round's contributions that differ from round to round."""

    rate: Fraction
    reach: int | None = None  # a contribution's root mean square counts as 2**reach at most
    carries: bool = True  # whether the outer momentum, if there is one, moves the weights and decays


def terms_of(recipe: RecipeConfig, round_number: int, rounds_late: int, covered: int = 0) -> Terms:
    """Returns the terms of `round_number`, counted from 0.

    rounds_late: how old a contribution may be; covered: how many more rounds of movement it may hold"""
    return Terms(
        learning_rate(recipe, round_number),
        reach(recipe, round_number, rounds_late, covered),
        (round_number + 1) % recipe.momentum_rounds == 0,
    )


def learning_rate(recipe: RecipeConfig, round_number: int) -> Fraction:
    """Returns the rate at which the update of `round_number`, counted from 0, is applied."""
    return recipe.learning_rate * (1 if recipe.spec.kind == "local" else _height(recipe, round_number))


def inner_rate(recipe: RecipeConfig, round_number: int) -> Fraction:
    """Returns the rate of the local steps of `round_number`, counted from 0."""
    return recipe.inner_learning_rate * _height(recipe, round_number)


def reach(recipe: RecipeConfig, round_number: int, rounds_late: int, covered: int = 0) -> int | None:
    """Returns the largest g for which local steps can move a weight by 2**g; None if contributions are not movements.

    Each step moves a weight by its full rate, in every round that a contribution may cover: late rounds, one round for
    each fragment, and in a region the rounds of the world's round.

    The root mean square of honest contributions was measured at a fifth of that, and at 2.6 times it at most (log/)."""
    if recipe.spec.kind != "local" or not recipe.inner_learning_rate:
        return None
    rounds = recipe.fragments + covered
    first = max(0, round_number - rounds_late - rounds + 1)
    rates = [inner_rate(recipe, number) for number in range(first, round_number + 1)]
    furthest = recipe.local_steps * rounds * max(*rates, recipe.inner_learning_rate * REST)
    exponent = furthest.numerator.bit_length() - furthest.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= furthest else exponent - 1


def _height(recipe: RecipeConfig, round_number: int) -> Fraction:
    """Returns the rate of `round_number` as a share of the highest rate."""
    assert round_number >= 0
    if round_number < recipe.warmup_rounds:
        return Fraction(round_number + 1, recipe.warmup_rounds)
    if recipe.schedule == "constant":
        return Fraction(1)
    fall_rounds = recipe.rounds - recipe.warmup_rounds if recipe.schedule == "linear" else recipe.decay_rounds
    left_rounds = min(max(recipe.rounds - round_number, 0), fall_rounds)
    return recipe.final_ratio + (1 - recipe.final_ratio) * Fraction(left_rounds, fall_rounds)  # 1 at first, then less


def exact_float(fraction: Fraction) -> float:
    """Returns the float64 nearest to a fraction, ties to even: the same value on every machine.

    Python divides two ints of any size with a single, correct rounding. float(n) / float(d) rounds three
    times once n or d passes 2**53, which a schedule's products soon do, and is then off by an ulp at times."""
    return fraction.numerator / fraction.denominator
