"""How long a round collects: no minority makes it end alone, and no straggler or stranger makes it long."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from p2ptrain.core.arrivals import GRACE, SLACK, STRANGERS
from p2ptrain.core.messages import Availability, JoinRequest
from p2ptrain.core.state import Admitted
from tests.helpers.core import KEYS, RUN, Bench, announced

LOCAL = {"name": "local"}
# A contribution counts in its own round alone: one that is late is not on offer in the next.
IN_TIME = {"overlap_rounds": 0}
TRAINED = 10.0  # seconds, of everyone


def contribute(bench: Bench, *authors: bytes) -> None:
    number = bench.state.round + 1
    for author in authors:
        if author == bench.me:
            bench.train(number)
        else:
            bench.hear_offer(announced(author, number, inline=True, branch=bench.state.branch))


def is_collecting(bench: Bench) -> bool:
    return bench.parts.here.mine is None


def after_rounds(size: int = 4, rounds: int = 2) -> Bench:
    """A node that has seen everyone contribute after ten seconds in each round."""
    bench = Bench(size, recipe=LOCAL)
    for _ in range(rounds):
        bench.decide()
    return bench


@pytest.mark.parametrize("size", [4, 7, 16])
def test_the_fastest_of_the_first_round_is_not_alone_in_it(size: int) -> None:
    bench = Bench(size, recipe=LOCAL)
    liars = bench.others[: bench.genesis.roster.tolerated]
    bench.now = 0.02
    contribute(bench, *liars)
    bench.wait(TRAINED)
    assert is_collecting(bench)
    contribute(bench, *bench.others[len(liars) :], bench.me)
    mine = bench.parts.here.mine
    assert mine is not None
    assert isinstance(mine.message, Availability)
    assert len(mine.message.held) == size


def test_the_early_and_the_late_of_one_round_are_in_it_together() -> None:
    bench = after_rounds()
    liar, *honest = bench.others
    bench.wait(0.1)
    contribute(bench, liar)
    bench.wait(1.3 * TRAINED)
    assert is_collecting(bench), "everyone usually takes ten seconds"
    contribute(bench, *honest)
    assert is_collecting(bench), "we are not much later than they"
    contribute(bench, bench.me)
    assert not is_collecting(bench)


def test_a_majority_that_liars_cannot_make_is_not_held_up() -> None:
    bench = after_rounds()
    bench.wait(TRAINED)
    contribute(bench, *bench.others)
    bench.wait(SLACK * TRAINED)
    assert not is_collecting(bench)


def test_a_round_whose_members_are_gone_is_over_after_a_multiple_of_the_usual_time_and_the_next_in_time() -> None:
    bench = after_rounds(7)
    alive = bench.founders[:4]  # of seven, two of which may lie
    for number, seconds in ((3, STRANGERS * TRAINED), (4, TRAINED)):
        bench.wait(TRAINED)
        contribute(bench, *alive)
        bench.wait(seconds - TRAINED - 0.1)
        assert is_collecting(bench) is (number == 3)
        bench.wait(0.2)
        assert not is_collecting(bench)
        bench.agree(tuple(announced(key, number, inline=key != bench.me) for key in alive))


def test_where_nobody_is_known_one_contribution_waits_as_long_as_a_lost_quorum() -> None:
    bench = Bench(4, recipe=LOCAL, agreement={"stall_seconds": 40})
    bench.now = 0.02
    contribute(bench, bench.others[0])
    bench.wait(39.0)
    assert is_collecting(bench)
    bench.wait(2.0)
    assert not is_collecting(bench)


@pytest.mark.parametrize("is_contributed", [True, False])
def test_a_request_ends_a_round_early_only_if_it_has_no_contribution(is_contributed: bool) -> None:
    bench = Bench(4, recipe=LOCAL, agreement={"stall_seconds": 200, "idle_round_seconds": 60})
    bench.now = 0.02
    if is_contributed:
        contribute(bench, bench.others[0])
    bench.hear(JoinRequest(RUN, 1, b"", KEYS[9]))
    bench.wait(70.0)
    assert is_collecting(bench) == is_contributed


def test_a_request_ends_no_round_in_which_members_of_a_known_pace_may_still_train() -> None:
    bench = Bench(4, recipe=LOCAL, agreement={"idle_round_seconds": 2})
    for _ in range(2):
        bench.decide()
    bench.hear(JoinRequest(RUN, bench.state.round + 1, b"", KEYS[9]))
    bench.wait(STRANGERS * TRAINED - 0.1)
    assert is_collecting(bench)
    bench.wait(0.2)
    assert not is_collecting(bench), "if nobody trains, the request is decided nevertheless"


def test_a_round_ends_when_enough_others_have_ended_it() -> None:
    bench = Bench(4, recipe=LOCAL)
    bench.now = 0.02
    offer = announced(bench.others[0], inline=True)
    bench.hear_offer(offer)
    for key in bench.others[: bench.genesis.roster.attesting]:
        assert is_collecting(bench)
        bench.hear(bench.available(key, (offer,)))
    assert not is_collecting(bench)


@pytest.mark.parametrize("size", [2, 3])
def test_of_two_or_three_members_one_contribution_is_enough(size: int) -> None:
    bench = after_rounds(size)
    bench.wait(TRAINED)
    contribute(bench, bench.me)
    bench.wait(SLACK * TRAINED)
    assert not is_collecting(bench)


def rounds_with(bench: Bench, late: bytes, seconds: float, rounds: int = 4) -> list[float]:
    """Everyone takes ten seconds and one author this many, or until the round is over. Returns how long each lasts."""
    prompt, lengths = [key for key in bench.founders if key != late], []
    for _ in range(rounds):
        number, began = bench.state.round + 1, bench.now
        bench.wait(TRAINED)
        contribute(bench, *prompt)
        while is_collecting(bench) and bench.now < began + seconds:
            bench.wait(0.01)
        if is_collecting(bench):
            contribute(bench, late)
        lengths.append(bench.now - began)
        assert not is_collecting(bench)
        bench.wait(max(0.0, began + seconds - bench.now))
        bench.hear_offer(announced(late, number, inline=True, branch=bench.state.branch))
        bench.agree(tuple(announced(key, number, inline=key != bench.me) for key in prompt))
    return lengths[1:]  # in the first, nobody is known


def with_stranger(size: int) -> tuple[Bench, bytes]:
    bench, stranger = Bench(size, recipe=LOCAL, agreement=IN_TIME, start=False), KEYS[15]
    bench.genesis = replace(bench.genesis, admitted=(*bench.genesis.admitted, Admitted(stranger, 0, 0, 0)))
    bench.start()
    return bench, stranger


@pytest.mark.parametrize("seconds", [11.6, 12.4, 40.0])
def test_a_key_without_a_seat_that_always_comes_last_makes_no_round_longer(seconds: float) -> None:
    bench, stranger = with_stranger(7)
    assert rounds_with(bench, stranger, seconds) == pytest.approx([TRAINED] * 3, abs=0.02)


@pytest.mark.parametrize(("seconds", "length"), [(12.4, TRAINED), (11.9, TRAINED), (11.2, 11.2)])
def test_a_member_that_always_comes_last_makes_rounds_an_eighth_longer_at_most(seconds: float, length: float) -> None:
    bench = Bench(7, recipe=LOCAL, agreement=IN_TIME)
    assert rounds_with(bench, bench.others[0], seconds) == pytest.approx([length] * 3, abs=0.02)


def test_who_is_late_and_brings_more_than_the_wait_costs_is_waited_for() -> None:
    bench = Bench(4, recipe=LOCAL, agreement=IN_TIME)
    assert rounds_with(bench, bench.others[0], 12.4) == pytest.approx([12.4] * 3, abs=0.02)


@pytest.mark.parametrize("is_early", [True, False])
def test_a_key_without_a_seat_is_waited_for_as_long_as_the_last_member_usually_takes(is_early: bool) -> None:
    bench, stranger = with_stranger(7)
    *most, last = bench.founders
    bench.wait(TRAINED - 2.0)
    if is_early:
        contribute(bench, stranger)
    bench.wait(1.0)
    contribute(bench, *most)
    bench.wait(1.0)
    contribute(bench, last)
    bench.agree(tuple(announced(key, 1, inline=key != bench.me) for key in bench.founders))
    bench.wait(TRAINED - 1.0)
    contribute(bench, *bench.founders)
    assert is_collecting(bench) is is_early
    bench.wait(1.0 + (GRACE + 0.01) * TRAINED)
    assert not is_collecting(bench)
