"""When collecting stops: medians of the observed arrivals, and the authors worth waiting for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.core.arrivals import DEVIATIONS, SILENT, SLACK, STARTS_MAX, STRANGERS, Arrivals
from p2ptrain.core.messages import ADMITTED_MAX
from tests.helpers.catchup import extend, meet, on_own_branch, shared
from tests.helpers.core import KEYS

MEMBERS = KEYS[:5]


def seen(*offsets: float, number: int = 1) -> Arrivals:
    """A round that began at 100, with the given arrivals."""
    arrivals = Arrivals()
    arrivals.begin(number, 100.0)
    for key, offset in zip(KEYS, offsets, strict=False):
        arrivals.note(key, number, 100.0 + offset)
    return arrivals


def test_before_the_first_arrival_nothing_is_known() -> None:
    assert Arrivals().patience(MEMBERS) == (None, SILENT)


def test_arrivals_that_look_alike_leave_a_quarter_for_a_hiccup() -> None:
    usual, strangers = seen(10.0, 10.0, 10.0).patience(MEMBERS)
    assert (usual, strangers) == (10.0 * (1.0 + SLACK), 10.0 * STRANGERS)


def test_arrivals_that_differ_are_given_a_multiple_of_their_median_deviation() -> None:
    usual, _ = seen(8.0, 9.0, 10.0, 11.0, 12.0).patience(MEMBERS)
    assert usual == 10.0 + DEVIATIONS * 1.0


def test_nobody_is_waited_for_longer_than_a_multiple_of_the_median() -> None:
    usual, _ = seen(1.0, 10.0, 100.0).patience(MEMBERS)
    assert usual == 10.0 * STRANGERS


def test_rounds_that_come_again_on_another_branch_are_timed_anew() -> None:
    arrivals = seen(1.0)
    for number in range(2, STARTS_MAX + 10):
        arrivals.begin(number, 100.0 + number)
        arrivals.note(KEYS[1], number, 101.0 + number)
    arrivals.rewound(3)
    arrivals.begin(4, 1_000.0)
    arrivals.note(KEYS[1], 4, 1_002.0)
    assert (arrivals.starts[4], arrivals.offsets[KEYS[1]]) == (1_000.0, 2.0)


def test_who_leaves_its_branch_times_the_rounds_of_the_other_anew() -> None:
    bench = on_own_branch(5)
    line, arrivals = shared(bench), bench.parts.pools.arrivals
    alone = dict(arrivals.starts)
    extend(bench, line, 1)
    came = bench.now
    meet(bench, line)
    number = bench.state.round + 1
    assert bench.state.branch == line.state.branch and number in alone
    assert arrivals.starts[number] >= came > alone[number]


@given(st.lists(st.floats(0.001, 1e6), min_size=2, max_size=2))
def test_fewer_than_half_of_the_members_move_the_bound_only_so_far(lies: list[float]) -> None:
    """Three of five members are honest and take ten seconds."""
    usual, _ = seen(10.0, 10.0, 10.0, *lies).patience(MEMBERS)
    assert usual == 12.5


@given(st.floats(0.01, 1_000.0))
def test_rounds_are_paced_by_work_whatever_it_takes(scale: float) -> None:
    usual, strangers = seen(scale, scale, scale).patience(MEMBERS)
    assert (usual, strangers) == pytest.approx((1.25 * scale, 3.0 * scale))


def test_only_members_set_the_pace() -> None:
    arrivals = seen(10.0, 10.0, 10.0, 10.0, 10.0, 500.0, 500.0, 500.0, 500.0, 500.0, 500.0)
    assert arrivals.patience(MEMBERS)[0] == 12.5


def test_who_was_in_time_is_waited_for_and_so_are_members_nobody_knows() -> None:
    arrivals = seen(10.0, 10.0, 50.0)
    assert arrivals.expected(MEMBERS, 20.0) == {KEYS[0], KEYS[1], KEYS[3], KEYS[4]}


def test_who_was_missing_last_time_is_not_waited_for_until_it_is_heard_again() -> None:
    arrivals = seen(10.0, 10.0, 10.0)
    arrivals.missed(KEYS[2])
    assert KEYS[2] not in arrivals.expected(MEMBERS, 20.0)
    assert arrivals.patience(KEYS[:3])[0] == 12.5
    arrivals.begin(2, 200.0)
    arrivals.note(KEYS[2], 2, 211.0)
    assert KEYS[2] in arrivals.expected(MEMBERS, 20.0)


def test_a_contribution_that_came_too_late_counts_with_its_true_time() -> None:
    arrivals = Arrivals()
    for number in range(1, 6):
        arrivals.begin(number, 10.0 * number)
    arrivals.note(KEYS[0], 1, 52.0)
    assert arrivals.offsets == {KEYS[0]: 42.0}


def test_of_a_round_that_has_not_begun_here_we_know_only_that_it_was_early() -> None:
    arrivals = seen()
    arrivals.note(KEYS[0], 2, 107.0)
    assert arrivals.offsets == {KEYS[0]: 0.0}


def test_of_a_round_long_ago_we_know_only_that_it_took_at_least_so_long() -> None:
    arrivals = Arrivals()
    for number in range(1, STARTS_MAX + 50):
        arrivals.begin(number, float(number))
    arrivals.note(KEYS[0], 3, 200.0)
    assert arrivals.offsets == {KEYS[0]: 200.0 - min(arrivals.starts)}


def test_a_round_begins_once() -> None:
    arrivals = seen()
    arrivals.begin(1, 500.0)
    assert arrivals.starts == {1: 100.0}


def test_who_is_no_longer_admitted_is_forgotten() -> None:
    arrivals = seen(1.0, 2.0, 3.0)
    arrivals.forget(KEYS[1:2])
    assert arrivals.offsets == {KEYS[1]: 2.0}


def test_a_thousand_rounds_stay_within_their_bounds() -> None:
    arrivals = Arrivals()
    for number in range(1_000):
        arrivals.begin(number, float(number))
        arrivals.note(KEYS[number % 16], number, number + 0.5)
        assert {name: limit for name, limit in arrivals.limits().items() if limit[0] > limit[1]} == {}
    assert arrivals.limits() == {"round starts": (64, STARTS_MAX + 1), "arrivals": (16, 2 * ADMITTED_MAX)}


def test_who_says_again_what_came_in_time_does_not_make_its_author_late() -> None:
    arrivals = seen(10.0, 10.0, 10.0)
    arrivals.note(KEYS[0], 1, 500.0)
    assert arrivals.offsets[KEYS[0]] == 10.0
