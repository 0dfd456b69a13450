"""The pace of one worker's trainings: how many steps it takes, and on how many sequences."""

from __future__ import annotations

import pytest

from p2ptrain.config import RecipeConfig
from p2ptrain.core.pace import sequences_that_fit
from p2ptrain.node import pacing
from p2ptrain.node.pacing import Pacing


@pytest.mark.parametrize(
    ("percent", "worked", "usual", "another"),
    [
        (100, 5.0, 6.0, True),  # a step takes five seconds
        (50, 5.0, 6.0, False),  # and as long a rest follows it
        (50, 5.0, 11.0, True),
        (100, 1.0, 0.9, False),
        (50, 2.0, 4.5, True),  # two seconds of work, two of rest
        (50, 2.0, 3.5, False),
    ],
)
def test_a_step_of_a_device_that_rests_takes_its_work_and_the_rest_that_follows(
    percent: int, worked: float, usual: float, another: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1_000.0]
    monkeypatch.setattr(pacing, "perf_counter", lambda: now[0])
    monkeypatch.setattr(pacing, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    made = Pacing(RecipeConfig())
    made.percent = percent
    made.begin()
    now[0] += worked
    made.step()
    made.rest()  # is no work, and the next step takes as long
    now[0] += worked
    made.step()
    made.keep(1, usual, 0.0)
    assert made.takes_another(1, 2) is another
    assert made.worked == pytest.approx(2 * worked)


def test_a_machine_that_takes_no_whole_step_in_a_round_takes_one_on_fewer_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, taken = [1_000.0], []
    monkeypatch.setattr(pacing, "perf_counter", lambda: now[0])
    made = Pacing(RecipeConfig(sequences_per_pass=8))
    for number in range(1, 13):
        made.begin()
        sequences, has_pace = made.step_sequences or 8, number < 9
        if has_pace:
            made.keep(number, 25.0, 28.0)
        now[0] += sequences * 10.0
        made.step()
        taken.append((sequences, made.takes_another(number, 1)))
        if has_pace:
            made.keep(number, 0.0, 0.0)  # the round is over, which says nothing of the time that there was
        made.end(number, 1)
    # With the ninth round the others are gone, and there is no pace to keep.
    assert taken == [(8, False), *[(2, False)] * 8, (4, False), (8, True), (8, True)]


@pytest.mark.parametrize(
    ("before", "seconds", "usual", "last", "fit"),
    [
        (8, 80.0, 25.0, 28.0, 2),
        (8, 800.0, 25.0, 28.0, 1),
        (8, 26.0, 25.0, 28.0, 8),  # the others still wait
        (2, 20.0, 25.0, 28.0, 2),
        (2, 16.0, 25.0, 28.0, 3),
        (2, 1.0, 25.0, 28.0, 8),
        (8, 5.0, -2.0, -0.9, 8),  # it began too late, for another reason
        (2, 30.0, 25.0, 28.0, 1),
    ],
)
def test_a_step_takes_as_many_sequences_as_fit_a_round_by_the_last_one(
    before: int, seconds: float, usual: float, last: float, fit: int
) -> None:
    assert sequences_that_fit(before, 8, seconds, usual, last) == fit
