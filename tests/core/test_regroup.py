"""Loss of the quorum: calls, sets of survivors, and the rules for following a regroup."""

from __future__ import annotations

from itertools import pairwise

import pytest

from p2ptrain.core import events as ev
from p2ptrain.core.complaints import Code, complaint
from p2ptrain.core.context import Context
from p2ptrain.core.history import Beginning, BranchStart, History
from p2ptrain.core.messages import Ballot, Call, Message
from p2ptrain.core.node import GAP_SECONDS
from p2ptrain.core.regroup import ATTEMPTS_AHEAD, ATTEMPTS_KEPT, HEARD_SECONDS, PATIENCE_MAX, REPEAT_SECONDS, Regrouping
from p2ptrain.core.reputation import Reputation
from p2ptrain.core.state import genesis
from tests.helpers.core import (
    KEYS,
    ROOT0,
    RUN,
    Bench,
    announced,
    begun,
    envelopes,
    line_of,
    published,
    run_of,
    signed,
    signed_set,
    voted,
)

ME = KEYS[1]
SETTINGS = {"stall_seconds": 30, "settle_seconds": 3}
CLOSED = 30.0  # three times what the training took: of nobody else is anything known
LOST = CLOSED + 30.0


def call(author: bytes, attempt: int = 0) -> Call:
    return Call(RUN, RUN, attempt, author)


def alone(size: int = 4, **settings: object) -> Bench:
    """A node that has closed its round and hears nobody."""
    bench = Bench(size, me=1, agreement=SETTINGS | settings)
    bench.now = 10.0
    bench.train()
    while bench.parts.here.closed_at is None:
        bench.tick()
    assert bench.now == CLOSED
    return bench


def until(bench: Bench, at: float) -> list[Message]:
    """Everything that is published up to this time, except hellos."""
    said: list[Message] = []
    while bench.node.deadline is not None and bench.node.deadline <= at:
        said += [message for message in published(bench.tick()) if not isinstance(message, type(bench.hello(ME)))]
    return said


def called() -> Bench:
    """The same node, after its call."""
    bench = alone()
    assert until(bench, LOST) == [call(ME)]
    assert bench.now == LOST
    return bench


def trunk_of(bench: Bench, beginning: Beginning) -> ev.Trunk:
    """The trunk of a chain with a branch that began before the first round."""
    return ev.Trunk((BranchStart(RUN, 0), BranchStart(beginning.branch, 0)), (beginning,), (bench.genesis,))


def essential(effects: list[ev.Effect]) -> list[ev.Effect]:
    """The effects without hellos, and without the peers' scores, which are saved now and then."""
    scores = [each for each in effects if isinstance(each, ev.Persist) and isinstance(each.record, ev.Observed)]
    return [each for each in effects if not isinstance(each, ev.Send) and each not in scores]


# ---------------------------------------------------------------------------------------------------
# The stall


def test_who_hears_nobody_for_the_time_of_a_stall_calls() -> None:
    bench = alone()
    assert until(bench, LOST - 0.1) == []
    assert bench.health == (complaint(Code.FEW_HEARD, heard=1, members=4, quorum=3, seconds=45).text,)
    assert until(bench, LOST) == [call(ME)]
    assert bench.health == ("stalled: quorum lost",)


def test_who_hears_too_few_says_so_before_the_quorum_counts_as_lost() -> None:
    bench = Bench(5, me=1, agreement={"stall_seconds": 120})
    bench.now = 10.0
    bench.hear_all(*(bench.hello(key) for key in bench.others))
    heard_all = bench.now
    told = complaint(Code.FEW_HEARD, heard=3, members=5, quorum=4, seconds=45)
    for second in range(1, 100):
        bench.wait(heard_all + second - bench.now)
        bench.hear_all(*(bench.hello(key) for key in bench.others[:2]))
        assert bench.health == ((told.text,) if second >= HEARD_SECONDS else ()), second
    bench.hear(bench.hello(bench.others[2]))
    near = complaint(Code.QUORUM_NEAR, heard=4, members=5, quorum=4)
    assert bench.health == (near.text,), "as many as decide, and no more"
    bench.hear(bench.hello(bench.others[3]))
    assert bench.health == ()


def test_who_just_began_or_woke_up_or_is_connected_with_nobody_does_not_say_it_hears_too_few() -> None:
    bench = Bench(5, me=1, agreement={"stall_seconds": 1_000})
    bench.wait(HEARD_SECONDS - 1.0)
    assert bench.health == ()
    bench.do(ev.Tick(), bench.now + 1_000.0)
    bench.wait(HEARD_SECONDS - 1.0)
    assert bench.health == ()
    bench.wait(1.0)
    assert bench.health == (complaint(Code.FEW_HEARD, heard=1, members=5, quorum=4, seconds=45).text,)
    for peer in bench.others:
        bench.do(ev.PeerLost(peer))
    assert bench.health == (complaint(Code.NO_PEERS).text,)
    bench.do(ev.PeerSeen(bench.others[0]))
    assert bench.health == ()


def test_who_has_no_vote_needs_no_quorum() -> None:
    bench = Bench(5, me=9)
    bench.wait(10 * HEARD_SECONDS)
    assert bench.health == (complaint(Code.NOT_ADMITTED).text,)


def test_with_halt_nobody_is_called() -> None:
    bench = alone(on_quorum_loss="halt")
    assert until(bench, 1_000.0) == []
    assert "stalled: quorum lost" in bench.health


def test_as_long_as_a_quorum_is_heard_it_is_only_slow() -> None:
    bench = alone()
    for minute in range(20):
        bench.now = CLOSED + 20.0 * minute
        bench.hear_all(bench.hello(KEYS[0]), bench.hello(KEYS[2]))
        assert until(bench, bench.now + 20.0) == []
    assert not bench.parts.regrouping.is_stalled


def test_before_the_own_availability_no_clock_runs() -> None:
    bench = Bench(4, me=1, agreement=SETTINGS)
    assert until(bench, 2_000.0) == []


def test_sleep_does_not_count() -> None:
    bench = alone()
    bench.do(ev.Tick(), bench.now + 25.0 + GAP_SECONDS)  # the next hello was due after a second
    woken = bench.now
    assert until(bench, woken + 29.9) == []
    assert until(bench, woken + 30.0) == [call(ME)]


def test_without_any_connection_it_is_we_who_are_gone() -> None:
    bench = alone()
    for peer in bench.others:
        bench.do(ev.PeerLost(peer))
    assert until(bench, 1_000.0) == []
    bench.do(ev.PeerSeen(KEYS[0]))
    back = bench.now
    assert until(bench, back + 29.9) == []
    assert until(bench, back + 30.0) == [call(ME)]


def test_of_two_the_last_one_goes_on_even_without_a_connection() -> None:
    bench = alone(size=2)
    bench.do(ev.PeerLost(KEYS[0]))
    mine = signed_set((ME,), ME)
    assert until(bench, LOST + 3.0) == [call(ME), mine, call(ME), mine]
    assert bench.state.members == (ME,)


def test_who_is_called_waits_only_half_as_long() -> None:
    bench = alone()
    bench.now = CLOSED + 1.0
    bench.hear(call(KEYS[2]))
    assert until(bench, CLOSED + 14.9) == []
    bench.do(ev.Tick(), CLOSED + 15.0)
    assert bench.parts.regrouping.attempt == 0


# ---------------------------------------------------------------------------------------------------
# Calling and signing


def test_a_set_is_signed_when_no_new_call_came_for_the_time_it_takes_to_settle() -> None:
    bench = called()
    assert until(bench, LOST + 2.0) == []
    assert bench.hear(call(KEYS[2])) == []
    assert until(bench, LOST + 4.9) == [call(ME)]  # said again
    effects = bench.do(ev.Tick(), LOST + 5.0)
    assert effects[:2] == bench.said(signed_set((ME, KEYS[2]), ME))
    assert bench.state.branch == RUN


def test_a_set_that_a_quorum_of_itself_has_signed_begins_a_branch() -> None:
    bench = called()
    bench.hear(call(KEYS[2]))
    assert until(bench, LOST + 3.0)[:1] == [signed_set((ME, KEYS[2]), ME)]
    beginning = begun((ME, KEYS[2]), (ME, KEYS[2]), bench.genesis)
    after = bench.genesis.regrouped(beginning.branch, beginning.members)
    effects = bench.hear(signed_set((ME, KEYS[2]), KEYS[2]))
    assert essential(effects) == [
        ev.Persist(ev.Silence(RUN, 1)),
        ev.Persist(ev.Certified(beginning, after, trunk_of(bench, beginning))),
        ev.Return(1),  # it was announced on the other branch
        ev.Train(round=1, base_round=0, place=1, places=4),
    ]
    assert (bench.state.branch, bench.state.members, len(bench.state.admitted)) == (beginning.branch, (ME, KEYS[2]), 4)


def test_a_training_ahead_is_not_for_a_branch_that_begins_before_its_round() -> None:
    """Announced there, it would hold the place of the next round, which cannot take it: nobody would train for that."""
    bench = alone(overlap_rounds=1, staleness_rounds_max=1)
    until(bench, LOST)
    bench.hear(call(KEYS[2]))
    until(bench, LOST + 3.0)
    assert bench.parts.work.training is not None and bench.parts.work.training.round == 2
    bench.hear(signed_set((ME, KEYS[2]), KEYS[2]))
    assert bench.state.branch != RUN
    assert essential(bench.train(2)) == [ev.Return(2), ev.Train(round=1, base_round=0, place=1, places=4)]


def test_a_training_ahead_ends_with_a_step_back() -> None:
    bench = alone(overlap_rounds=1, staleness_rounds_max=1)
    bench.parts.work.rewound(0)
    assert bench.parts.work.training is not None and not bench.parts.work.training.is_useful


def test_a_state_that_was_being_fetched_when_the_branch_was_left_is_fetched_anew() -> None:
    """The replica may adopt it yet, and then has what is not of this branch."""
    work = alone().parts.work
    work.catching = {3: bytes(32)}
    work.rewound(0)
    assert work.is_astray and work.catching is None


def test_the_last_one_goes_on_alone() -> None:
    bench = called()
    mine = signed_set((ME,), ME)
    beginning = begun((ME,), (ME,), bench.genesis)
    assert until(bench, LOST + 2.0) == []
    effects = bench.do(ev.Tick(), LOST + 3.0)
    after = bench.genesis.regrouped(beginning.branch, (ME,))
    assert essential(effects) == [
        *bench.said(mine),
        *(ev.Publish(envelope) for envelope in envelopes(call(ME), mine)),
        ev.Persist(ev.Silence(RUN, 1)),
        ev.Persist(ev.Certified(beginning, after, trunk_of(bench, beginning))),
        ev.Return(1),
        ev.Train(1, 0, 1, 4),
    ]


def test_calls_and_signatures_are_said_again() -> None:
    bench = called()
    bench.now = LOST + 1.0
    bench.hear(call(KEYS[2]))
    said = until(bench, LOST + 4.0 * REPEAT_SECONDS)
    mine = signed_set((ME, KEYS[2]), ME)
    assert said == [call(ME), mine, call(ME), mine, call(ME), mine, call(ME), mine]


def test_attempts_follow_after_twice_the_time_up_to_a_cap() -> None:
    bench = called()
    bench.hear_all(call(KEYS[2]), call(KEYS[0]))  # who then say nothing
    began = [bench.now]
    while len(began) < 6:
        attempt = bench.parts.regrouping.attempt
        bench.tick()
        if bench.parts.regrouping.attempt != attempt:
            began.append(bench.now)
            bench.hear_all(*(call(key, bench.parts.regrouping.attempt) for key in (KEYS[0], KEYS[2])))
    waits = [later - earlier for earlier, later in pairwise(began)]
    assert waits == [60.0, 120.0, 240.0, 30.0 * PATIENCE_MAX, 30.0 * PATIENCE_MAX]


def test_a_round_that_is_decided_after_all_ends_the_regroup() -> None:
    bench = called()
    offers = (announced(ME),)
    named = [bench.available(key, offers) for key in bench.founders]
    mine = bench.parts.here.mine
    assert mine is not None
    bench.hear_all(*(each for each in named if each.author != ME))
    proposal, manifest = bench.proposed([named[0], named[2], named[3]], offers)
    bench.hear(proposal)
    bench.hear_all(*(voted(key, Ballot.PRECOMMIT, manifest.digest) for key in bench.others))
    assert bench.state.head == manifest.digest
    assert not bench.parts.regrouping.is_stalled


# ---------------------------------------------------------------------------------------------------
# Who has to follow


@pytest.mark.parametrize("members", [KEYS[2:3], KEYS[:3]])
def test_one_liar_takes_nobody_along_while_all_is_well(members: tuple[bytes, ...]) -> None:
    bench = Bench(4, me=1, agreement=SETTINGS)
    assert bench.hear(signed_set(members, KEYS[2])) == []
    assert bench.state.branch == RUN


def test_a_set_that_an_honest_member_signed_binds_whoever_sees_it() -> None:
    bench = Bench(4, me=1, agreement=SETTINGS)
    members = (KEYS[0], KEYS[2], KEYS[3])
    assert bench.hear(signed_set(members, KEYS[2])) == []
    effects = bench.hear(signed_set(members, KEYS[3]))
    beginning = begun(members, (KEYS[2], KEYS[3]), bench.genesis)
    after = bench.genesis.regrouped(beginning.branch, members)
    assert [effect for effect in effects if isinstance(effect, ev.Persist)] == [
        ev.Persist(ev.Silence(RUN, 1)),
        ev.Persist(ev.Certified(beginning, after, trunk_of(bench, beginning))),
    ]
    assert not bench.parts.here.is_member


def test_with_halt_no_set_binds() -> None:
    bench = Bench(4, me=1, agreement=SETTINGS | {"on_quorum_loss": "halt"})
    members = (KEYS[0], KEYS[2], KEYS[3])
    bench.hear_all(signed_set(members, KEYS[2]), signed_set(members, KEYS[3]))
    assert bench.state.branch == RUN


def while_others_train(seconds: float = 135.0, **settings: object) -> Bench:
    """A node without a seat, in a long round in which all members say hello."""
    bench = Bench(7, me=8, agreement=settings)
    while bench.now < seconds:
        bench.wait(15.0)
        bench.hear_all(*(bench.hello(key) for key in bench.founders))
    return bench


def test_a_liar_leads_nobody_without_a_seat_away_from_a_quorum_that_is_heard() -> None:
    bench = while_others_train(stall_seconds=120)
    bench.hear(signed_set((KEYS[0],), KEYS[0]))
    assert bench.state.branch == RUN


def test_with_halt_no_history_of_a_set_binds_either() -> None:
    bench = while_others_train(stall_seconds=120, on_quorum_loss="halt")
    start = begun((KEYS[0],), (KEYS[0],), bench.genesis)
    ((entry, _),) = line_of(bench.genesis.regrouped(start.branch, (KEYS[0],)), bench.run, 1)
    bench.now += 200.0  # a quorum was not heard for long
    effects = bench.hear(bench.hello(KEYS[0], branch=start.branch, round=2)) + bench.wait(1.0)
    assert [effect.peer for effect in effects if isinstance(effect, ev.AskHistory)] == [KEYS[0]]
    lineage = BranchStart(RUN, 0), BranchStart(start.branch, 0)
    bench.do(ev.HistoryArrived(KEYS[0], History(lineage, 1, (), None, (start, entry))))
    assert bench.state.branch == RUN


def regrouping(size: int = 7, me: int = 1) -> Regrouping:
    """A Regrouping without a node around it."""
    context = Context(run_of(SETTINGS), RUN, KEYS[me], None, None)  # type: ignore[arg-type]
    context.reputation = Reputation()
    return Regrouping(context, genesis(RUN, KEYS[:size], ROOT0))


def test_who_signed_follows() -> None:
    each = regrouping()
    assert each.may_follow(begun((ME,), (ME,), each.state))


def test_f_signers_bind_nobody_and_f_and_one_do() -> None:
    each = regrouping()
    assert not each.may_follow(begun(KEYS[2:4], KEYS[2:4], each.state))
    assert each.may_follow(begun(KEYS[2:5], KEYS[2:5], each.state))


def test_who_has_no_vote_follows_a_few_only_when_nothing_was_decided_for_long() -> None:
    each = regrouping(me=9)
    assert each.may_follow(begun(KEYS[2:5], KEYS[2:5], each.state))
    few = begun(KEYS[2:3], KEYS[2:3], each.state)
    assert not each.may_follow(few)
    each.context.now += each.context.run.agreement.stall_seconds
    assert each.may_follow(few)


def test_one_who_has_not_called_yet_follows_only_most_of_those_who_are_still_heard() -> None:
    """A lone liar was the quickest to sign a set, and took over the rest of a swarm (seed 10225)."""
    each = regrouping()
    each.context.now += each.context.run.agreement.stall_seconds
    lone, pair = begun(KEYS[2:3], KEYS[2:3], each.state), begun(KEYS[2:4], KEYS[2:4], each.state)
    each.context.heard_at = dict.fromkeys(KEYS[3:6], each.context.now)
    assert [each.may_follow(lone), each.may_follow(pair)] == [False, False]
    each.context.heard_at = dict.fromkeys(KEYS[3:5], each.context.now)
    assert [each.may_follow(lone), each.may_follow(pair)] == [False, True]
    each.context.heard_at = {}
    assert each.may_follow(lone)


def test_who_has_lost_the_quorum_follows_more_than_answer_its_own_call() -> None:
    each = regrouping()
    each.attempt = 0
    each.calls[0] = {ME: signed(call(ME))}
    each.last_new_at = each.context.now
    assert not each.may_follow(begun(KEYS[2:4], KEYS[2:4], each.state)), "others may still answer"
    each.context.now += each.context.run.agreement.settle_seconds
    assert each.may_follow(begun(KEYS[2:4], KEYS[2:4], each.state))
    each.calls[0][KEYS[5]] = signed(call(KEYS[5]))
    assert not each.may_follow(begun(KEYS[2:4], KEYS[2:4], each.state))


# ---------------------------------------------------------------------------------------------------
# What is kept


def test_one_call_of_each_member_and_attempt_is_kept() -> None:
    each = regrouping()
    assert [each.hear_call(signed(call(KEYS[2]))) for _ in range(2)] == [True, False]
    assert not each.hear_call(signed(call(KEYS[9])))  # no member
    assert each.hear_call(signed(call(KEYS[2], ATTEMPTS_AHEAD)))
    assert not each.hear_call(signed(call(KEYS[2], ATTEMPTS_AHEAD + 1)))
    each.attempt = ATTEMPTS_KEPT
    assert not each.hear_call(signed(call(KEYS[3], 0)))
    assert each.hear_call(signed(call(KEYS[3], 1)))
    assert sorted(each.calls) == [1, 2]


def test_one_signature_of_each_member_and_attempt_is_kept_and_only_under_members() -> None:
    each = regrouping()
    assert each.hear_regroup(signed(signed_set(KEYS[:3], KEYS[2])))
    assert not each.hear_regroup(signed(signed_set(KEYS[:4], KEYS[2])))
    assert not each.hear_regroup(signed(signed_set((*KEYS[:3], KEYS[9]), KEYS[0])))
    assert {attempt: sorted(kept) for attempt, kept in each.signed.items()} == {0: [KEYS[2]]}


def test_a_flood_of_attempts_stays_within_its_bounds() -> None:
    each = regrouping()
    for attempt in range(50):
        each.attempt = attempt // 2
        for key in KEYS:
            each.hear_call(signed(call(key, attempt)))
            each.hear_regroup(signed(signed_set((key,), key, attempt)))
        assert {name: limit for name, limit in each.limits().items() if limit[0] > limit[1]} == {}


def test_after_a_restart_a_set_that_was_signed_stays_signed() -> None:
    bench = called()
    bench.hear(call(KEYS[2]))
    mine = signed_set((ME, KEYS[2]), ME)
    until(bench, LOST + 3.0)
    again = Bench(4, me=1, agreement=SETTINGS, start=False)
    again.start(said=(ev.Said(envelopes(mine)[0]),))
    assert again.parts.regrouping.attempt == 0
    assert again.parts.regrouping.signed == {0: {ME: signed(mine)}}
    again.hear(signed_set((ME, KEYS[2]), KEYS[2]))
    assert again.state.members == (ME, KEYS[2])
