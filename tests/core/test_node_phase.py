"""A node that is late once does not stay late: it skips a round, and begins the next one together with the others."""

from __future__ import annotations

import pytest

from p2ptrain.core import events as ev
from p2ptrain.core.arrivals import SLACK
from p2ptrain.core.local_work import PASSED_TIMES
from p2ptrain.core.messages import Announcement
from tests.helpers.core import BYTES, ROOT0, Bench, announced, root_of

TRAINED = 10.0  # seconds, of everybody
LATE = 8.0


def trains(effects: list[ev.Effect]) -> list[int]:
    return [effect.round for effect in effects if isinstance(effect, ev.Train)]


def applied_late(bench: Bench, seconds: float = LATE) -> list[ev.Effect]:
    """The first round, applied long after the others have begun the second."""
    bench.decide(apply=False)
    bench.wait(seconds)
    return bench.do(ev.Applied(bench.state.branch, 1, root_of(1)))


def offers_of_others(bench: Bench) -> tuple[Announcement, ...]:
    number = bench.state.round + 1
    offers = tuple(announced(key, number, inline=True, branch=bench.state.branch) for key in bench.others)
    for offer in offers:
        bench.hear_offer(offer)
    return offers


def round_without_me(bench: Bench, at: float) -> list[ev.Effect]:
    """The others' contributions arrive and are agreed on; returns the effects of the decision and of applying it."""
    number, effects = bench.state.round + 1, bench.wait(at - bench.now)
    offers = offers_of_others(bench)
    effects += bench.wait(TRAINED)  # nobody waits longer than this for mine
    return (
        effects + bench.agree(offers, apply=False) + bench.do(ev.Applied(bench.state.branch, number, root_of(number)))
    )


def test_who_would_come_too_late_lets_the_round_pass_and_begins_the_next_in_time() -> None:
    bench = Bench()
    assert trains(applied_late(bench)) == []
    assert bench.node.view().counters["rounds let pass"] == 1
    assert trains(round_without_me(bench, at=TRAINED + TRAINED)) == [3]


def test_who_begins_a_little_late_trains() -> None:
    assert trains(applied_late(Bench(), 2.0)) == [2]


def test_a_late_contribution_that_may_still_be_taken_is_worth_its_training() -> None:
    assert trains(applied_late(Bench(agreement={"staleness_rounds_max": 1}))) == [2]


def test_who_is_slow_and_not_late_trains() -> None:
    bench = Bench()
    bench.now += 3 * TRAINED
    offers = (*offers_of_others(bench), announced(bench.me, 1))
    bench.train(1)  # its own training takes as long as everything before
    bench.parts.work.training_seconds = 10 * TRAINED
    bench.agree(offers, apply=False)
    bench.wait(LATE)
    assert trains(bench.do(ev.Applied(bench.state.branch, 1, root_of(1)))) == [2]


def test_while_nobody_contributes_nobody_lets_pass_for_ever() -> None:
    bench = Bench()
    assert trains(applied_late(bench)) == []
    assert bench.parts.work.deadline == TRAINED + PASSED_TIMES * (1 + SLACK) * TRAINED
    assert trains(bench.wait(3 * TRAINED)) == [2]


def test_no_two_rounds_in_a_row_are_let_pass() -> None:
    bench = Bench()
    applied_late(bench)
    bench.wait(2.0)
    offers = offers_of_others(bench)
    bench.wait(TRAINED)
    bench.agree(offers, apply=False)
    bench.wait(LATE)
    assert trains(bench.do(ev.Applied(bench.state.branch, 2, root_of(2)))) == [3]


@pytest.mark.parametrize(("early", "trained"), [(1, [1]), (4, [1]), (5, [])])
def test_only_a_pace_that_ends_the_round_lets_it_pass(early: int, trained: list[int]) -> None:
    """After a power cut those who had contributed say so at once, and the rest begin to train once they have their
    state. Whoever lets the round pass must not be waited for as long as until a quorum counts as lost."""
    bench = Bench(7, start=False)  # two may lie, so the deadline follows five
    bench.start(applied_root=b"")
    bench.now = 0.02
    for key in bench.others[:early]:
        bench.hear_offer(announced(key, 1, inline=True))
    bench.now = 0.1
    effects = bench.do(ev.CaughtUp(0, ROOT0, 0))
    assert trains(effects) == trained
    bench.wait(1.0)
    assert (bench.parts.here.closed_at is None) is bool(trained)


def test_a_training_is_told_which_contributions_are_not_settled() -> None:
    """Contributions taken meanwhile are settled once applied, not before: otherwise they would be reported twice."""
    bench = Bench(agreement={"staleness_rounds_max": 1, "overlap_rounds": 1})
    bench.now += 10.0
    assert bench.train(1)[-1] == ev.Train(2, 0, 0, 4, unsettled=(1,))
    others = tuple(announced(key, 1, inline=True) for key in bench.others)
    for offer in others:
        bench.hear_offer(offer)
    bench.agree((*others, announced(bench.me)))
    assert bench.train(2)[-1] == ev.Train(3, 1, 0, 4, unsettled=(2,))


OVERLAP = {"staleness_rounds_max": 1, "overlap_rounds": 1}


def test_who_was_late_with_overlap_trains_for_the_round_that_takes_nothing_else_of_it() -> None:
    """A round takes one contribution of each: one that is late takes the next round's place. With another one for that
    round, the node would be one contribution behind for ever, and rest while two are on offer."""
    bench = Bench(agreement=OVERLAP)
    bench.agree(offers_of_others(bench))
    assert trains(bench.train(1)) == [3]
    bench.agree((*offers_of_others(bench), announced(bench.me)))
    assert trains(bench.train(3)) == [4]
    assert bench.node.view().counters["contributions taken"] == 1


@pytest.mark.parametrize(
    ("said", "base"),
    [({}, 0), ({"base_round": 1}, 1), ({"base_round": 2}, 0), ({"base_round": 1, "held_out": 3_000_000}, 0)],
    ids=["unknown", "later", "of no known root", "measured before"],
)
def test_a_training_in_which_a_round_was_applied_is_announced_with_that_base(said: dict[str, int], base: int) -> None:
    """It can be taken for one round more: its last steps went on from the newer weights."""
    bench = Bench(agreement=OVERLAP)
    bench.train(1)
    bench.agree((*offers_of_others(bench), announced(bench.me)))
    name = announced(bench.me, 2).payload
    bench.do(ev.TrainingFinished(2, name, BYTES, **said))
    offer = next(each for each in bench.parts.pools.offers.by_author[bench.me] if each.announcement.round == 2)
    assert (offer.announcement.base_round, offer.announcement.base_root) == (base, root_of(base))


def test_a_base_that_may_be_of_a_state_before_another_was_adopted_is_not_named() -> None:
    bench = Bench(agreement=OVERLAP)
    bench.train(1)
    bench.agree((*offers_of_others(bench), announced(bench.me)))
    bench.parts.work.catching = {1: root_of(1)}
    bench.do(ev.CaughtUp(1, root_of(1), bench.parts.work.attempt))
    bench.do(ev.TrainingFinished(2, announced(bench.me, 2).payload, BYTES, base_round=1))
    offer = next(each for each in bench.parts.pools.offers.by_author[bench.me] if each.announcement.round == 2)
    assert (offer.announcement.base_round, offer.announcement.base_root) == (0, ROOT0)


def test_a_base_is_never_later_than_its_round() -> None:
    bench = Bench(agreement={"staleness_rounds_max": 3})
    for _ in range(2):
        bench.agree(offers_of_others(bench))
    bench.do(ev.TrainingFinished(1, announced(bench.me).payload, BYTES, base_round=2))
    (offer,) = bench.parts.pools.offers.by_author[bench.me]
    assert (offer.announcement.base_round, offer.announcement.base_root) == (1, root_of(1))


def test_who_missed_a_round_by_little_is_waited_for_in_the_next() -> None:
    """Its announcement arrives after the next round began and counts for it; otherwise it would miss that one as
    well."""
    bench = Bench()
    *early, late = bench.others

    def others_offer(number: int) -> tuple[Announcement, ...]:
        bench.wait(TRAINED)
        offers = tuple(announced(key, number, inline=True, branch=bench.state.branch) for key in early)
        for offer in offers:
            bench.hear_offer(offer)
        bench.train(number)
        return offers

    offers = bench.collect()
    bench.parts.pools.arrivals.missed(late)
    bench.agree(offers)
    offers = (*others_offer(2), announced(bench.me, 2, branch=bench.state.branch))
    bench.agree(offers)  # at once: nobody waits for it
    bench.wait(SLACK * TRAINED / 2)
    bench.hear(announced(late, 2, branch=bench.state.branch))
    others_offer(3)
    assert bench.parts.here.closed_at is None
    bench.hear_offer(announced(late, 3, inline=True, branch=bench.state.branch))
    assert bench.parts.here.closed_at == bench.now
