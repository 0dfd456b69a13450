"""A slow machine takes fewer local steps: the core measures the others' pace, and tells it to the device."""

from __future__ import annotations

from statistics import median_low
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.core import events as ev
from p2ptrain.core.arrivals import GRACE, STRETCH_MAX, Arrivals
from p2ptrain.core.pace import pace_of, takes_another
from tests.helpers.core import KEYS, Bench, announced, root_of

STEPS = 10
TRAINED = 10.0  # seconds, of everybody, for all steps
FEWER = {"name": "local", "local_steps": STEPS, "local_steps_min": 1}


def paces(effects: list[ev.Effect]) -> list[ev.Pace]:
    return [effect for effect in effects if isinstance(effect, ev.Pace)]


def paced(**recipe: Any) -> Bench:
    return Bench(recipe=FEWER | recipe)


def steps_taken(step_seconds: float, usual: float, least: int = 1) -> int:
    """The steps of a machine that knows the pace from the start."""
    done, last = 1, usual * (1 + GRACE)
    while takes_another(done, least, STEPS, step_seconds, usual - done * step_seconds, last - done * step_seconds):
        done += 1
    return done


# ---------------------------------------------------------------------------------------------------
# How many steps


@pytest.mark.parametrize(
    ("times", "steps"),
    [(0.1, 10), (1.0, 10), (1.1, 10), (1.2, 8), (1.3, 7), (2.0, 5), (3.7, 2), (9.9, 1), (10.0, 1), (50.0, 1)],
)
def test_a_machine_takes_all_steps_if_it_is_as_fast_as_others_and_as_many_as_fit_otherwise(
    times: float, steps: int
) -> None:
    assert steps_taken(times * TRAINED / STEPS, TRAINED) == steps


def test_a_machine_takes_the_fewest_steps_of_the_run_however_slow_it_is() -> None:
    assert steps_taken(100.0, TRAINED, least=3) == 3


def test_a_run_without_fewer_steps_takes_all_of_them() -> None:
    assert steps_taken(100.0, TRAINED, least=STEPS) == STEPS


@given(st.lists(st.floats(0.5, 200.0), min_size=3, max_size=9))
def test_members_that_take_fewer_steps_do_not_make_the_pace_faster(times: list[float]) -> None:
    arrivals, others, steps = Arrivals(), KEYS[: len(times)], [STEPS] * len(times)
    for number in range(1, 10):
        arrivals.begin(number, 1_000.0 * number)
        for key, seconds, count in zip(others, times, steps, strict=True):
            arrivals.note(key, number, 1_000.0 * number + seconds * count / STEPS, count)
        usual = arrivals.pace(others, STEPS)
        assert usual == pytest.approx(median_low(times))
        assert usual is not None
        steps = [steps_taken(seconds / STEPS, usual) for seconds in times]
        assert steps.count(STEPS) >= len(times) / 2


@given(st.lists(st.tuples(st.floats(0.001, 1e6), st.integers(0, 2**40)), min_size=2, max_size=2))
def test_less_than_half_of_the_others_move_the_pace_nowhere_by_what_they_claim(lies: list[tuple[float, int]]) -> None:
    arrivals = Arrivals()
    arrivals.begin(1, 100.0)
    for key in KEYS[:3]:
        arrivals.note(key, 1, 110.0, STEPS)
    for key, (offset, steps) in zip(KEYS[3:5], lies, strict=True):
        arrivals.note(key, 1, 100.0 + offset, steps)
    assert arrivals.pace(KEYS[:5], STEPS) == 10.0


def test_the_pace_is_known_once_more_than_half_of_the_others_have_been_heard() -> None:
    arrivals, others = Arrivals(), KEYS[:4]
    arrivals.begin(1, 100.0)
    for key in others[:2]:
        arrivals.note(key, 1, 110.0, STEPS)
    assert arrivals.pace(others, STEPS) is None, "one of five may lie"
    arrivals.note(others[2], 2, 101.0, STEPS)  # of a round that has not begun here: its pace cannot be known
    assert arrivals.pace(others, STEPS) is None
    arrivals.note(others[3], 1, 111.0, STEPS)
    assert arrivals.pace(others, STEPS) == 10.0
    arrivals.missed(others[3])
    assert arrivals.pace(others, STEPS) is None


# ---------------------------------------------------------------------------------------------------
# What the core tells the device


@pytest.mark.parametrize("steps", [1, 3, 10, 65_536])
@pytest.mark.parametrize("most", [10, 65_536])
def test_one_of_two_that_are_heard_sets_no_pace(steps: int, most: int) -> None:
    arrivals, others = Arrivals(), KEYS[:3]
    arrivals.begin(1, 100.0)
    arrivals.note(others[0], 1, 110.0, most)
    arrivals.note(others[1], 1, 110.0, steps)
    assert arrivals.pace(others, most) is None, "one of four may lie, and be one of these two"
    arrivals.missed(others[2])
    assert arrivals.pace(others, most) == 10.0, "it is the one that is gone"


def test_of_an_even_number_the_faster_of_the_middle_two_sets_the_pace() -> None:
    arrivals, others = Arrivals(), KEYS[:4]
    arrivals.begin(1, 100.0)
    for key, seconds in zip(others, (10.0, 11.0, 30.0, 500.0), strict=True):
        arrivals.note(key, 1, 100.0 + seconds, STEPS)
    assert arrivals.pace(others, STEPS) == 11.0


def test_no_claim_stretches_the_time_of_a_contribution_beyond_a_bound() -> None:
    arrivals, others = Arrivals(), KEYS[:3]
    arrivals.begin(1, 100.0)
    for key in others:
        arrivals.note(key, 1, 110.0, 1)
    assert arrivals.pace(others, 65_536) == STRETCH_MAX * 10.0


def test_in_the_first_round_the_pace_is_told_when_most_have_contributed() -> None:
    bench = paced()
    bench.now += TRAINED
    told = [bench.hear_offer(announced(key, 1, inline=True, steps=STEPS)) for key in bench.others]
    assert [paces(effects) for effects in told] == [[], [], [ev.Pace(1, 0.0, GRACE * TRAINED)]]


def test_later_the_pace_is_told_with_the_training_and_counts_from_the_round_s_start() -> None:
    bench = paced()
    bench.decide(apply=False)
    bench.wait(2.0)
    effects = bench.do(ev.Applied(bench.state.branch, 1, root_of(1)))
    assert [type(effect) for effect in effects if isinstance(effect, ev.Train | ev.Pace)] == [ev.Train, ev.Pace]
    (pace,) = paces(effects)
    # The helper's contributions claim one step of ten: whoever takes ten times the time for all of them sets no pace.
    assert pace == pace_of(2, bench.now - 2.0, TRAINED * STEPS, bench.now)
    assert pace.usual == pytest.approx(TRAINED * STEPS - 2.0)


def test_a_training_whose_round_has_passed_ends_after_its_step() -> None:
    bench = paced()
    bench.decide()
    bench.now += TRAINED
    offers = tuple(announced(key, 2, inline=True, branch=bench.state.branch, steps=STEPS) for key in bench.others)
    for offer in offers:
        bench.hear_offer(offer)
    bench.wait(STEPS * TRAINED)
    assert paces(bench.agree(offers, apply=False)) == [ev.Pace(2)]
    assert paces(bench.wait(1.0)) == [], "once is enough"


def test_a_run_whose_rounds_have_a_fixed_number_of_steps_is_told_no_pace() -> None:
    bench = paced(local_steps_min=0)
    effects = bench.decide()
    bench.now += TRAINED
    for key in bench.others:
        effects += bench.hear_offer(announced(key, 2, inline=True, branch=bench.state.branch))
    assert paces(effects) == []


def test_fewer_steps_are_announced_as_they_were_taken() -> None:
    bench = paced()
    bench.now += TRAINED
    bench.do(ev.TrainingFinished(1, bytes(32), 20_000, b"", 3, 2_500_000))
    mine = bench.parts.work.outstanding[1].message
    assert getattr(mine, "steps", None) == 3
    assert bench.parts.work.training_seconds == pytest.approx(TRAINED / 3), "what the next one takes at least"
