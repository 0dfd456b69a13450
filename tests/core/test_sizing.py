"""The size of a contribution follows what its line carries, and leaves a size alone that came too late."""

from __future__ import annotations

import itertools
import random

import pytest

from p2ptrain.core.events import Train
from p2ptrain.core.sizing import AGAIN_ROUNDS, AGAIN_ROUNDS_MAX, GROW_ROUNDS, Sizing
from tests.helpers.core import Bench, announced

KS = (32, 64, 128, 256)


def after(sizing: Sizing, rounds: int, carried: int) -> list[int]:
    """Returns the size of each round on a line that carries contributions of at most `carried`."""
    found = []
    for _ in range(rounds):
        found.append(sizing.k)
        (sizing.taken_in_time if sizing.k <= carried else sizing.came_late)()
    return found


def test_it_grows_from_the_smallest_to_the_largest_within_a_few_rounds() -> None:
    assert after(Sizing(KS), 5, carried=256) == [32, 64, 128, 256, 256]
    assert GROW_ROUNDS == 1


def test_one_k_leaves_no_choice() -> None:
    assert set(after(Sizing((64,)), 20, carried=32)) == {0}


@pytest.mark.parametrize("carried", KS)
def test_nearly_all_contributions_come_in_time_and_have_the_size_that_the_line_carries(
    carried: int,
) -> None:
    found = after(Sizing(KS), 200, carried)
    assert sum(k <= carried for k in found) >= 190
    assert found.count(carried) >= 180


def test_a_size_that_came_late_is_tried_after_more_rounds_each_time() -> None:
    found = after(Sizing((32, 64)), 4 * AGAIN_ROUNDS_MAX, carried=32)
    tried = [number for number, k in enumerate(found) if k == 64]
    waited = [later - earlier - 1 for earlier, later in itertools.pairwise(tried)]
    assert waited == [min(AGAIN_ROUNDS * 2**n, AGAIN_ROUNDS_MAX) for n in range(len(waited))]
    assert waited[-1] == AGAIN_ROUNDS_MAX


def test_a_late_contribution_that_the_next_round_takes_counts_once() -> None:
    sizing = Sizing(KS)
    after(sizing, 40, carried=256)
    sizing.decided(41, ())
    assert sizing.k == 256
    sizing.decided(42, {41})  # that of round 42 waits for its turn
    assert sizing.k == 256
    sizing.decided(43, {43})
    sizing.decided(44, ())
    assert sizing.k == 128


def test_the_core_asks_for_as_much_as_came_in_time() -> None:
    in_time = {"overlap_rounds": 0, "staleness_rounds_max": 0}
    bench = Bench(4, me=1, agreement=in_time, recipe={"name": "local", "k": [8, 32]})
    asked = [*bench.started, *bench.decide(), *bench.decide()]
    assert [each.k for each in asked if isinstance(each, Train)] == [8, 32, 32]
    offers = bench.collect()
    without = bench.agree(tuple(each for each in offers if each.author != bench.me))
    assert [each.k for each in without if isinstance(each, Train)] == [8]


def test_who_announces_last_was_late_with_its_training_and_not_by_its_line() -> None:
    in_time = {"overlap_rounds": 0, "staleness_rounds_max": 0}
    bench = Bench(4, me=1, agreement=in_time, recipe={"name": "local", "k": [8, 32]})
    bench.decide()
    bench.decide()
    others = [announced(key, 3, inline=True, branch=bench.state.branch) for key in bench.others]
    bench.now += 10.0
    for offer in others:
        bench.hear_offer(offer)
    bench.now += 0.5
    bench.train(3)
    asked = [each.k for each in bench.agree(tuple(others)) if isinstance(each, Train)]
    assert asked == [32]


def test_what_the_owner_allows_is_what_was_tried() -> None:
    sizing, found = Sizing(KS), []
    for _ in range(30):
        sizing.sent(min(sizing.k, 64))
        found.append(sizing.k)
        sizing.taken_in_time()
    assert found == [32, *[64] * 29]
    assert after(sizing, 5, carried=64)[-1] == 64, "128 was never sent, so that it is not known to fit"


def test_it_follows_a_line_that_changes() -> None:
    sizing = Sizing(KS)
    after(sizing, 100, carried=256)
    assert after(sizing, 10, carried=64)[-1] == 64
    assert after(sizing, 50, carried=256)[-1] == 256


def test_a_line_that_fails_now_and_then_costs_the_size_little() -> None:
    sizing, rng = Sizing(KS), random.Random(1)
    found = []
    for _ in range(1_000):
        found.append(sizing.k)
        (sizing.came_late if rng.random() < 0.02 else sizing.taken_in_time)()
    assert sum(found) / len(found) > 128
