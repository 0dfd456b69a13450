"""Catching up: noticing that others are ahead or elsewhere, asking, and following only proved and preferred
histories."""

from __future__ import annotations

import msgspec
import pytest

from p2ptrain.core import events as ev
from p2ptrain.core.catchup import (
    AHEAD_MAX,
    ANSWER_SECONDS,
    LATE_SECONDS,
    LOST_SECONDS,
    PATIENCE_SECONDS,
    RETRY_SECONDS,
)
from p2ptrain.core.chain import Chain
from p2ptrain.core.history import Beginning, BranchStart, Entry, History
from p2ptrain.core.messages import Ballot, Hello, JoinRequest
from p2ptrain.digest import digest
from tests.helpers.catchup import ME, extend, followed, meet, on_own_branch, other_line, regroup, shared, steps
from tests.helpers.core import (
    KEYS,
    ROOT0,
    RUN,
    Bench,
    MemoryStore,
    announced,
    begun,
    certified,
    name_of,
    plain_manifest,
    root_of,
    sent,
    signed_set,
    voted,
)

replace = msgspec.structs.replace


def of_kind(effects: list[ev.Effect], kind: type) -> list[ev.Effect]:
    return [effect for effect in effects if isinstance(effect, kind)]


# ---------------------------------------------------------------------------------------------------
# Asking


def test_whoever_is_ahead_is_asked_after_a_moment() -> None:
    bench = Bench(4, me=1)
    assert bench.hear(bench.hello(KEYS[0], round=2)) == []
    assert bench.node.deadline == PATIENCE_SECONDS
    assert bench.tick() == [ev.AskHistory(KEYS[0], RUN, 0)]


def test_a_newcomer_asks_a_member_that_is_ahead_at_once_and_anyone_else_after_a_moment() -> None:
    """Nobody sends its votes to a newcomer, so no certificate comes by itself."""
    bench = Bench(4, me=9, peers=False)
    bench.do(ev.PeerSeen(KEYS[0]))
    bench.do(ev.PeerSeen(KEYS[8]))
    assert not of_kind(bench.hear(bench.hello(KEYS[8], round=2)), ev.AskHistory)
    assert bench.parts.catching_up.deadline == PATIENCE_SECONDS
    assert of_kind(bench.hear(bench.hello(KEYS[0], round=2)), ev.AskHistory) == [ev.AskHistory(KEYS[0], RUN, 0)]


def test_whom_a_manifest_admits_is_told_where_the_round_is_and_nobody_else() -> None:
    """Nobody sent it the votes."""
    bench, stranger = Bench(4, me=1), KEYS[9]
    request = JoinRequest(RUN, 1, b"", stranger)
    for newcomer in (stranger, KEYS[8]):
        bench.do(ev.PeerSeen(newcomer))
    bench.hear(request)
    asked = {name_of(request): bench.parts.pools.requests.request(name_of(request))}
    offers = bench.collect()
    named = [bench.available(key, offers, requests=(name_of(request),)) for key in KEYS[:3]]
    proposal, manifest = bench.proposed(named, offers, asked=asked)
    bench.hear_all(named[0], named[2], proposal)
    for ballot in Ballot:
        effects = bench.hear_all(*(voted(key, ballot, manifest.digest) for key in (KEYS[0], KEYS[2])))
    assert stranger in bench.state.place
    told = [(peer, type(message), message.round) for peer, message in sent(effects)]
    assert told == [(stranger, Hello, 2)]


def test_a_certificate_that_comes_by_itself_in_the_meantime_is_enough() -> None:
    bench = Bench(4, me=1)
    offers = bench.collect()
    named = [bench.available(key, offers) for key in bench.founders]
    proposal, manifest = bench.proposed(named[:3], offers)
    bench.hear_all(named[0], named[2], proposal)
    bench.hear(bench.hello(KEYS[0], round=2))
    for ballot in Ballot:
        bench.hear_all(*(voted(key, ballot, manifest.digest) for key in (KEYS[0], KEYS[2])))
    assert bench.state.round == 1
    assert not bench.parts.catching_up.is_behind
    assert not [effect for _ in range(5) for effect in bench.tick() if isinstance(effect, ev.AskHistory)]


def test_who_does_not_answer_in_time_is_replaced_by_another() -> None:
    bench = Bench(4, me=1)
    bench.hear_all(bench.hello(KEYS[0], round=2), bench.hello(KEYS[2], round=2))
    (first,) = bench.tick()
    assert isinstance(first, ev.AskHistory)
    second = bench.wait(ANSWER_SECONDS)
    asked = [effect.peer for effect in second if isinstance(effect, ev.AskHistory)]
    assert sorted([first.peer, *asked]) == [KEYS[0], KEYS[2]]


def test_who_has_no_history_to_give_is_replaced_at_once() -> None:
    bench = Bench(4, me=1)
    bench.hear_all(bench.hello(KEYS[0], round=2), bench.hello(KEYS[2], round=2))
    (first,) = bench.tick()
    assert isinstance(first, ev.AskHistory)
    (second,) = bench.do(ev.HistoryFailed(first.peer, "gone"))
    assert isinstance(second, ev.AskHistory)
    assert {first.peer, second.peer} == {KEYS[0], KEYS[2]}


def test_after_a_failure_the_next_who_is_ahead_is_asked_after_the_same_moment() -> None:
    bench = Bench(4, me=1)
    bench.hear(bench.hello(KEYS[0], round=2))
    bench.tick()
    assert bench.do(ev.HistoryFailed(KEYS[0], "gone")) == []
    bench.hear(bench.hello(KEYS[2], round=2))
    assert bench.node.deadline == bench.now + PATIENCE_SECONDS
    assert bench.tick() == [ev.AskHistory(KEYS[2], RUN, 0)]


def test_an_answer_that_nobody_asked_for_is_ignored() -> None:
    bench = Bench(4, me=1)
    line = other_line(bench, 2)
    assert bench.do(ev.HistoryArrived(KEYS[0], line.answer(RUN, 0))) == []
    bench.hear(bench.hello(KEYS[0], round=3))
    bench.tick()
    assert followed(bench.do(ev.HistoryArrived(KEYS[2], line.answer(RUN, 0)))) == []
    assert bench.state.round == 0


def late_and_another_asked(bench: Bench) -> tuple[bytes, bytes]:
    """Returns a peer that has not answered in time, and the one that is asked instead."""
    bench.hear_all(bench.hello(KEYS[0], round=3), bench.hello(KEYS[2], round=3))
    (first,) = bench.tick()
    assert isinstance(first, ev.AskHistory)
    (second,) = of_kind(bench.wait(ANSWER_SECONDS), ev.AskHistory)
    assert isinstance(second, ev.AskHistory)
    return first.peer, second.peer


def test_an_answer_that_comes_late_is_followed() -> None:
    bench = Bench(4, me=1)
    line = other_line(bench, 2)
    late, _ = late_and_another_asked(bench)
    assert followed(bench.do(ev.HistoryArrived(late, line.answer(RUN, 0)))) == steps(line)
    assert bench.node.context.counters["histories refused"] == 0


def test_while_answers_are_late_the_next_has_longer_for_they_share_our_line() -> None:
    bench = Bench(4, me=1)
    line = other_line(bench, 5)
    _, second = late_and_another_asked(bench)
    bench.hear(bench.hello(KEYS[3], round=3))
    assert of_kind(bench.wait(ANSWER_SECONDS + 5.0), ev.AskHistory) == [], "twice as long"
    assert followed(bench.do(ev.HistoryArrived(second, line.answer(RUN, 0)))) == steps(line)


def test_an_answer_that_never_comes_leaves_the_next_no_longer_for_ever() -> None:
    bench = Bench(4, me=1)
    bench.hear(bench.hello(KEYS[0], round=3))
    bench.wait(1.0)
    bench.do(ev.HistoryFailed(KEYS[0], "no answer"))
    for seconds, times in ((1.0, 2.0), (LATE_SECONDS, 1.0)):
        bench.wait(seconds)
        bench.hear(bench.hello(KEYS[2], round=3))
        bench.wait(PATIENCE_SECONDS)
        asked = bench.parts.catching_up.asked
        assert asked is not None and asked.until == pytest.approx(bench.node.context.now + times * ANSWER_SECONDS)
        bench.do(ev.PeerLost(KEYS[2]))
        bench.do(ev.HistoryFailed(KEYS[2], "gone"))


def test_no_answer_is_waited_for_from_a_peer_that_was_lost() -> None:
    bench = Bench(4, me=1)
    line = other_line(bench, 3)
    bench.hear_all(bench.hello(KEYS[0], round=4), bench.hello(KEYS[2], round=4))
    (first,) = of_kind(bench.wait(1.0), ev.AskHistory)
    bench.do(ev.PeerLost(first.peer))
    (second,) = of_kind(bench.do(ev.HistoryFailed(first.peer, "gone")), ev.AskHistory)
    bench.do(ev.HistoryArrived(second.peer, line.answer(RUN, 0)))
    extend(bench, line, 3)
    bench.wait(3_600.0)
    bench.do(ev.PeerSeen(first.peer))
    bench.hear(bench.hello(first.peer, round=7))
    assert of_kind(bench.wait(1.0), ev.AskHistory) == [ev.AskHistory(first.peer, RUN, 3)]
    assert followed(bench.do(ev.HistoryArrived(first.peer, line.answer(RUN, 3)))) == steps(line, 3)


def test_an_answer_that_comes_after_a_late_one_is_not_lost() -> None:
    bench = Bench(4, me=1)
    line = other_line(bench, 2)
    late, second = late_and_another_asked(bench)
    assert followed(bench.do(ev.HistoryArrived(late, replace(line.answer(RUN, 0), steps=())))) == []
    assert followed(bench.do(ev.HistoryArrived(second, line.answer(RUN, 0)))) == steps(line)


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_peer_that_is_asked_again_is_not_to_blame_for_its_answer_to_the_first_request(has_failed: bool) -> None:
    """The mailbox sends no second request while the first is open, and takes the late answer for that to the second."""
    bench = Bench(4, me=1)
    line = other_line(bench, 4)
    late, other = late_and_another_asked(bench)
    old = line.answer(RUN, 0)
    bench.do(ev.HistoryArrived(other, replace(old, round=2, steps=old.steps[:2])))
    score = bench.node.context.reputation.score(late, bench.now)
    if has_failed:
        bench.do(ev.HistoryFailed(late, "no answer at all"))
    bench.wait(RETRY_SECONDS)
    bench.hear(bench.hello(late, round=5))
    question = ev.AskHistory(late, RUN, 2)
    assert of_kind(bench.wait(1.0), ev.AskHistory) == [question]
    assert of_kind(bench.do(ev.HistoryArrived(late, old)), ev.AskHistory) == [question]
    assert followed(bench.do(ev.HistoryArrived(late, line.answer(RUN, 2)))) == steps(line, 2)
    assert bench.node.context.reputation.score(late, bench.now) <= score
    assert bench.node.context.counters["histories refused"] == 0


def test_a_crowd_that_claims_to_be_ahead_stays_within_its_bounds() -> None:
    bench = Bench(4, me=1)
    for number in range(AHEAD_MAX + 50):
        bench.parts.catching_up.notice(digest("core test", bytes([number])), RUN, 5)
    assert bench.parts.catching_up.limits()["peers ahead"] == (AHEAD_MAX, AHEAD_MAX)


def test_who_only_claims_to_be_ahead_is_asked_once() -> None:
    bench = Bench(4, me=1)
    bench.decide()
    bench.decide()
    line = Chain(bench.genesis, RUN, 64)
    first = bench.parts.chain.steps[0]
    line.append(first.step, first.state)
    assert answered(bench, line.answer(RUN, 2)) == []
    assert not bench.parts.catching_up.is_behind


# ---------------------------------------------------------------------------------------------------
# Following


def test_certified_rounds_are_followed_and_applied_in_order() -> None:
    bench = Bench(4, me=1)
    line = other_line(bench, 3)
    effects = meet(bench, line)
    assert followed(effects) == steps(line)
    assert bench.state == line.state
    fetched = {effect.payload for effect in effects if isinstance(effect, ev.Fetch)}
    first = line.steps[0].step
    assert isinstance(first, Entry)
    assert fetched == {taken.payload for taken in first.manifest.taken}
    arrived = [bench.arrives(each) for each in sorted(fetched)]
    assert arrived[-1][0] == ev.Apply(first.manifest)
    assert bench.node.context.counters["rounds caught up"] == 3


def test_what_follows_a_gap_is_not_followed() -> None:
    bench = Bench(4, me=1)
    line = other_line(bench, 3)
    history = line.answer(RUN, 0)
    effects = answered(bench, replace(history, steps=history.steps[1:]))
    assert (followed(effects), bench.state.round) == ([], 0)
    assert bench.node.context.counters["histories refused"] == 1


def answered(bench: Bench, history: History, peer: bytes = KEYS[0]) -> list[ev.Effect]:
    """The answer of a peer that was one round ahead."""
    while bench.parts.catching_up.asked is None:  # perhaps it has to wait, because it was asked in vain before
        bench.hear(bench.hello(peer, round=bench.state.round + 2))
        bench.tick()
    return bench.do(ev.HistoryArrived(peer, history))


def test_a_history_with_one_wrong_certificate_is_refused_as_a_whole_and_held_against_its_sender() -> None:
    bench = Bench(4, me=1)
    history = other_line(bench, 3).answer(RUN, 0)
    last = history.steps[-1]
    assert isinstance(last, Entry)
    few = replace(last.certificate, seats=b"\5", signatures=last.certificate.signatures[:2])
    wrong = replace(history, steps=(*history.steps[:-1], replace(last, certificate=few)))
    assert followed(answered(bench, wrong)) == []
    assert bench.state.round == 0
    assert bench.node.context.reputation.score(KEYS[0], bench.now) == 1.0


def test_a_history_that_is_cut_is_followed_as_far_as_it_goes() -> None:
    bench = Bench(4, me=1)
    line = other_line(bench, 5)
    history = line.answer(RUN, 0)
    assert followed(answered(bench, replace(history, steps=history.steps[:2]))) == steps(line)[:2]
    assert bench.state == line.steps[1].state


def test_the_history_of_another_run_is_refused() -> None:
    bench = Bench(4, me=1)
    history = replace(other_line(bench, 3).answer(RUN, 0), lineage=(BranchStart(ROOT0, 0),))
    assert followed(answered(bench, history)) == []
    assert bench.node.context.counters["histories refused"] == 1


def test_who_lags_by_more_than_is_kept_jumps_and_fetches_the_state() -> None:
    bench = Bench(4, me=1)
    line = other_line(bench, 20, kept=8)
    effects = meet(bench, line)
    assert followed(effects) == steps(line)
    assert bench.state == line.state
    records = [effect.record for effect in effects if isinstance(effect, ev.Persist)]
    first = next(record for record in records if isinstance(record, ev.Certified))
    assert first.trunk == ev.Trunk((BranchStart(RUN, 0),), (), (), line.base)
    found = [effect for effect in effects if isinstance(effect, ev.CatchUp)]
    assert [effect.roots[0] for effect in found] == [(19, root_of(19))]


def test_who_fetched_a_state_that_is_old_by_now_applies_what_followed_before_it_fetches_another() -> None:
    """Or a fast run whose state takes a minute to fetch could not be joined."""
    bench = Bench(4, me=1)
    line = other_line(bench, 60)
    assert of_kind(meet(bench, line), ev.CatchUp) != []
    effects, applied = bench.do(ev.CaughtUp(10, root_of(10))), 10
    while not of_kind(effects, ev.CatchUp) and applied < line.state.round:
        for wanted in [each for each in effects if isinstance(each, ev.Fetch)]:
            effects += bench.arrives(wanted.payload)
        assert of_kind(effects, ev.Apply) != []
        applied += 1
        effects = bench.do(ev.Applied(bench.state.branch, applied, root_of(applied)))
    assert applied == line.state.round


def test_a_jump_whose_base_nothing_certifies_is_refused() -> None:
    bench = Bench(4, me=1)
    line = other_line(bench, 20, kept=8)
    history = line.answer(RUN, 0)
    assert followed(answered(bench, replace(history, steps=()))) == []
    assert history.base is not None
    wrong = replace(history.base, root=ROOT0)
    assert followed(answered(bench, replace(history, base=wrong))) == []
    assert (bench.state.round, bench.node.context.counters["histories refused"]) == (0, 2)


# ---------------------------------------------------------------------------------------------------
# Settling branches


def test_a_branch_of_which_the_old_quorum_knows_nothing_gives_way_to_it() -> None:
    bench = on_own_branch()
    mine = bench.state
    line = shared(bench)
    extend(bench, line, 1)
    effects = meet(bench, line)
    assert followed(effects) == steps(line, 1)
    assert bench.state == line.state
    silences = [effect.record for effect in effects if isinstance(effect, ev.Persist)][:1]
    assert silences == [ev.Silence(mine.branch, mine.round + 1)]
    assert bench.parts.chain.lineage == line.lineage
    assert bench.node.context.counters["branches left"] == 1


def test_a_parting_older_than_the_kept_rounds_leaves_a_store_from_which_one_can_start() -> None:
    bench = on_own_branch(rounds=9, history_rounds=4)
    store = MemoryStore(bench.parts.chain.base, 4)
    store.history = list(bench.parts.chain.steps)
    line = Chain(next(iter(bench.parts.chain.forks.values())), RUN, 64)
    extend(bench, line, 2)
    store.keep(meet(bench, line))
    assert bench.state == line.state
    assert (store.state, [each.step for each in store.history]) == (line.state, [each.step for each in line.steps])
    again = bench.make()
    again.handle(ev.Started(store.saved()), bench.now)
    assert (again.participant.chain.state, again.participant.chain.lineage) == (line.state, line.lineage)


def test_what_was_applied_on_a_branch_that_lost_is_fetched_anew() -> None:
    bench = on_own_branch()
    line = shared(bench)
    extend(bench, line, 3)
    effects = meet(bench, line)
    found = [effect for effect in effects if isinstance(effect, ev.CatchUp)]
    assert [effect.roots[0] for effect in found] == [(3, root_of(3))]
    assert "catching up" in bench.health
    effects = bench.do(ev.CaughtUp(3, root_of(3)))
    last = line.steps[-1].step
    assert isinstance(last, Entry)
    assert {each.payload for each in effects if isinstance(each, ev.Fetch)} == {
        each.payload for each in last.manifest.taken
    }


def test_a_branch_of_more_members_is_followed_however_short_it_is() -> None:
    bench = on_own_branch(rounds=5)
    line = shared(bench)
    beginning = regroup(line, (KEYS[0], KEYS[2], KEYS[3]))
    effects = meet(bench, line)
    assert followed(effects) == steps(line, 1)
    assert (bench.state.branch, bench.state.round) == (beginning.branch, 1)
    assert not bench.parts.here.is_member


def test_a_branch_of_fewer_members_is_not_followed_however_long_it_is() -> None:
    bench = Bench(4, me=1)
    bench.decide()
    line = shared(bench)
    mine = begun((ME, KEYS[2], KEYS[3]), (ME, KEYS[2], KEYS[3]), bench.state)
    bench.hear_all(*(signed_set(mine.members, key, state=bench.state) for key in (KEYS[2], KEYS[3])))
    assert bench.state.branch == mine.branch
    regroup(line, (KEYS[0],))
    extend(bench, line, 9)
    effects = meet(bench, line)
    assert (followed(effects), bench.state.branch) == ([], mine.branch)
    assert bench.parts.catching_up.has_lost(line.state.branch)


def test_a_branch_that_lost_is_told_where_we_are_and_not_looked_at_for_a_while() -> None:
    bench = Bench(4, me=1)
    bench.decide()
    line = shared(bench)
    regroup(line, (KEYS[0],))
    extend(bench, line, 2)
    bench.parts.catching_up.lost[line.state.branch] = bench.now
    bench.now += 1.0
    hello = bench.hello(KEYS[0], branch=line.state.branch, round=4)
    assert [type(message) for _, message in sent(bench.hear(hello))] == [Hello]
    assert not bench.parts.catching_up.is_behind
    bench.wait(LOST_SECONDS)
    bench.hear(hello)
    assert bench.parts.catching_up.is_behind


def test_a_lone_beginning_from_our_own_head_is_not_followed_while_all_is_well() -> None:
    bench = Bench(4, me=1)
    bench.decide()
    line = shared(bench)
    regroup(line, (KEYS[0],))
    extend(bench, line, 9)
    assert followed(meet(bench, line)) == []
    assert bench.state.branch == RUN


def test_a_branch_that_began_too_long_ago_and_is_level_waits_for_an_operator() -> None:
    bench = on_own_branch(rounds=9, history_rounds=4)
    other = Chain(bench.genesis, RUN, 64)
    fork = next(iter(bench.parts.chain.forks.values()))
    other.base = fork
    beginning = regroup(other, (KEYS[2],))
    extend(bench, other, 12)
    mine = bench.state
    meet(bench, other, KEYS[2])
    assert beginning.branch != mine.branch
    assert (bench.state, bench.parts.catching_up.is_split) == (mine, True)
    assert "split: another branch diverged too long ago, and an operator has to choose" in bench.health


def parted(bench: Bench, rounds: int, *members: bytes) -> Chain:
    """The chain of others that keep only a few rounds, from where the node's branch began."""
    line = Chain(next(iter(bench.parts.chain.forks.values())), RUN, 4)
    if members:
        regroup(line, members)
    extend(bench, line, rounds)
    return line


def test_a_branch_of_more_members_is_followed_over_a_jump() -> None:
    bench = on_own_branch(rounds=9, history_rounds=4)
    line = parted(bench, 20, KEYS[0], KEYS[2], KEYS[3])
    assert isinstance(line.answer(RUN, 1).changes[0], Beginning)
    meet(bench, line)
    assert (bench.state, bench.parts.chain.lineage[1:]) == (line.state, line.lineage[1:])


def test_a_branch_that_began_later_is_followed_over_a_jump() -> None:
    """The old quorum went on without us before it was lost; the jump contains the round that proves it."""
    bench = on_own_branch(rounds=9, history_rounds=4)
    line = parted(bench, 2)
    regroup(line, (KEYS[0], KEYS[2], KEYS[3]))
    extend(bench, line, 20)
    assert isinstance(line.answer(RUN, 1).changes[0], Entry)
    meet(bench, line)
    assert (bench.state, bench.parts.chain.lineage[1:]) == (line.state, line.lineage[1:])


def test_a_level_branch_that_began_too_long_ago_waits_for_an_operator_over_a_jump_too() -> None:
    bench = on_own_branch(rounds=9, history_rounds=4)
    mine = bench.state
    meet(bench, parted(bench, 20, KEYS[2]), KEYS[2])
    assert (bench.state, bench.parts.catching_up.is_split) == (mine, True)


def test_after_a_jump_a_smaller_branch_from_the_same_round_still_loses() -> None:
    bench = on_own_branch(rounds=9, history_rounds=4)
    lines = [parted(bench, 20, *members) for members in ((KEYS[0], KEYS[2]), (KEYS[3],))]
    for line in lines:
        meet(bench, line, KEYS[3])
    assert (bench.state, bench.parts.catching_up.is_split) == (lines[0].state, False)
    assert bench.parts.catching_up.has_lost(lines[1].state.branch)


def test_a_jump_that_beats_us_but_binds_nobody_waits_for_an_operator() -> None:
    """The old quorum went on, and then one member alone: there is nothing to follow, and no reason to stay."""
    bench = on_own_branch(rounds=9, history_rounds=4)
    mine, line = bench.state, parted(bench, 2)
    regroup(line, (KEYS[2],))
    extend(bench, line, 20)
    meet(bench, line, KEYS[2])
    assert (bench.state, bench.parts.catching_up.is_split) == (mine, True)


def test_a_parting_of_which_no_state_is_left_waits_for_an_operator() -> None:
    bench = on_own_branch(rounds=9, history_rounds=4)
    mine, line = bench.state, parted(bench, 20, KEYS[0], KEYS[2], KEYS[3])
    bench.parts.chain.forks.clear()
    meet(bench, line)
    assert (bench.state, bench.parts.catching_up.is_split) == (mine, True)


# ---------------------------------------------------------------------------------------------------
# More than f lies


def test_two_certificates_for_one_round_stop_the_node() -> None:
    bench = Bench(4, me=1)
    bench.decide()
    line = Chain(bench.genesis, RUN, 64)
    extend(bench, line, 2, b"other")
    history = line.answer(RUN, 1)
    effects = answered(bench, history)
    assert followed(effects) == []
    proof = bench.parts.catching_up.proof_of_lies
    assert proof is not None
    assert ev.Persist(proof) in effects
    assert proof == ev.Halted(bench.parts.chain.steps[0].step, line.steps[1].step)
    assert bench.health[0] == "halted: two certificates exist for one round, so more than f members lie"
    bench.now += 10.0
    assert [effect for effect in bench.train(2) if not isinstance(effect, ev.Send)] == [ev.Return(2)]


def test_a_round_that_follows_another_head_but_proves_nothing_is_no_proof_of_lies() -> None:
    bench = Bench(4, me=1)
    bench.decide()
    other = bench.genesis.after(plain_manifest(bench.genesis, bench.run), bench.run)
    forged = certified(plain_manifest(other, bench.run, [announced(KEYS[0], 2)]), other, signers=KEYS[2:4])
    history = History((BranchStart(RUN, 0),), 2, (), None, (forged,))
    assert followed(answered(bench, history)) == []
    assert bench.parts.catching_up.proof_of_lies is None
    assert not bench.node.context.voice.is_halted
