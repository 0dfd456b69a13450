"""Catching up among liars: any connected peer may claim to be ahead, without further consequences."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from p2ptrain.core import events as ev
from p2ptrain.core.audits import Measured
from p2ptrain.core.catchup import (
    AHEAD_MAX,
    NEAR_ROUNDS,
    PATIENCE_SECONDS,
    RETRIES_MAX,
    RETRY_SECONDS,
    RETRY_SECONDS_MAX,
    SPLIT_SECONDS,
)
from p2ptrain.core.chain import Chain
from p2ptrain.core.history import Beginning, BranchStart, History
from p2ptrain.core.messages import NUMBER_MAX, JoinRequest
from p2ptrain.core.reputation import Reason
from p2ptrain.digest import digest
from tests.helpers.catchup import extend, followed, meet, on_own_branch, other_line, regroup, shared, steps
from tests.helpers.core import KEYS, RUN, Bench, begun, certified, line_of, plain_manifest, root_of, sent, signed_set

LIAR, HONEST = KEYS[0], KEYS[2]


def strangers(count: int) -> list[bytes]:
    return [digest("core test", b"stranger", number.to_bytes(2, "big")) for number in range(count)]


def asked(effects: list[ev.Effect]) -> list[bytes]:
    return [effect.peer for effect in effects if isinstance(effect, ev.AskHistory)]


# ---------------------------------------------------------------------------------------------------
# Questions without end


def on_second_branch() -> tuple[Bench, tuple[BranchStart, ...]]:
    """A node that has followed five of the others to a new branch."""
    bench = Bench(7)
    members = bench.founders[:5]
    line = Chain(bench.genesis, RUN, 64)
    regroup(line, members)
    meet(bench, line, KEYS[1])
    assert bench.state.members == members
    return bench, tuple(bench.parts.chain.lineage)


def claim(bench: Bench, peer: bytes) -> list[bytes]:
    """Lets a peer claim to be ahead, waits a moment, and returns the peer that the node asks."""
    bench.hear(bench.hello(peer, round=NUMBER_MAX - 1))
    return asked(bench.wait(0.6))


def test_a_liar_whose_lineage_changes_from_answer_to_answer_is_asked_twice_and_another_then() -> None:
    bench, lineage = on_second_branch()
    liar, honest = KEYS[4], KEYS[2]
    assert claim(bench, liar) == [liar]
    bench.hear(bench.hello(honest, round=2))
    short = History(lineage[:1], NUMBER_MAX - 1, (), None, ())
    assert asked(bench.do(ev.HistoryArrived(liar, short))) == [liar]
    assert asked(bench.do(ev.HistoryArrived(liar, History(lineage, NUMBER_MAX - 1, (), None, ())))) == [honest]
    assert bench.node.context.reputation.records[liar].counters == {Reason.UNFETCHABLE: 1}
    assert not bench.parts.catching_up.has_lost(bench.state.branch)


def decide_at_once(bench: Bench) -> None:
    """Decides a round before a request is answered."""
    bench.now -= 9.5
    bench.decide()


def test_a_peer_is_not_to_blame_if_it_is_we_who_went_on_between_two_questions() -> None:
    bench = Bench(4, me=1)
    history = other_line(bench, 9).answer(RUN, 0)
    assert claim(bench, HONEST) == [HONEST]
    decide_at_once(bench)
    assert asked(bench.do(ev.HistoryArrived(HONEST, history))) == [HONEST]
    decide_at_once(bench)
    assert asked(bench.do(ev.HistoryArrived(HONEST, history))) == []
    assert (bench.node.context.reputation.records, bench.parts.catching_up.retries) == ({}, {})
    assert claim(bench, HONEST) == [HONEST]


def test_who_did_not_answer_is_asked_again_after_a_while_that_grows_and_it_is_noted() -> None:
    bench = Bench(4, me=1)
    times: list[float] = []
    while len(times) < 6:
        for effect in bench.hear(bench.hello(KEYS[0], round=2)) + bench.wait(0.5):
            if isinstance(effect, ev.AskHistory):
                times.append(bench.now)
                bench.do(ev.HistoryFailed(KEYS[0], "gone"))
    waits = [round(later - earlier - PATIENCE_SECONDS, 9) for earlier, later in pairwise(times)]
    assert waits == [RETRY_SECONDS * factor for factor in (1, 2, 4, 8)] + [RETRY_SECONDS_MAX]
    assert bench.node.context.reputation.records[KEYS[0]].counters == {Reason.SILENT: 6}


def test_who_answers_in_the_end_is_not_made_to_wait_any_more() -> None:
    bench = Bench(4, me=1)
    bench.hear(bench.hello(KEYS[0], round=2))
    bench.tick()
    bench.do(ev.HistoryFailed(KEYS[0], "gone"))
    assert bench.parts.catching_up.retries == {KEYS[0]: (1, bench.now + RETRY_SECONDS)}
    bench.wait(RETRY_SECONDS)
    line = other_line(bench, 3)
    assert followed(meet(bench, line)) == steps(line)
    assert bench.parts.catching_up.retries == {}


def test_who_is_not_ahead_on_our_branch_and_says_so_again_has_to_wait() -> None:
    bench = Bench(4, me=1)
    nothing = History((BranchStart(RUN, 0),), NUMBER_MAX - 1, (), None, ())
    count = 0
    while bench.now < 70.0:
        for peer in claim(bench, LIAR):
            count += 1
            bench.do(ev.HistoryArrived(peer, nothing))
    assert count == 6  # after 2, 4, 8, 16 and 30 seconds
    assert bench.node.context.reputation.records == {}


# ---------------------------------------------------------------------------------------------------
# Crowds


def test_strangers_never_push_out_members() -> None:
    bench = Bench(4, me=1)
    catching_up = bench.parts.catching_up
    catching_up.notice(HONEST, RUN, 5)
    for key in strangers(2 * AHEAD_MAX):
        catching_up.notice(key, RUN, 5)
    assert HONEST in catching_up.ahead
    assert len(catching_up.ahead) == AHEAD_MAX


def test_strangers_never_make_a_member_that_was_asked_in_vain_forgotten() -> None:
    bench = Bench(4, me=1)
    catching_up = bench.parts.catching_up
    for key in (LIAR, *strangers(RETRIES_MAX + 9)):
        catching_up.ask_at = bench.now
        catching_up.notice(key, RUN, 5)
        bench.tick(bench.now)
        bench.do(ev.HistoryFailed(key, "gone"))
    assert LIAR in catching_up.retries
    assert catching_up.limits()["peers asked in vain"] == (RETRIES_MAX, RETRIES_MAX)


def test_members_are_asked_before_strangers_whatever_their_record() -> None:
    for seed in range(8):
        bench = Bench(4, me=1, seed=seed)
        bench.node.context.reputation.note(HONEST, Reason.LATE, 0.0)
        crowd = strangers(100)
        for key in crowd:
            bench.do(ev.PeerSeen(key))
        bench.hear_all(*(bench.hello(key, round=9) for key in crowd[:50]))
        bench.hear(bench.hello(HONEST, round=9))
        bench.hear_all(*(bench.hello(key, round=9) for key in crowd[50:]))
        assert asked(bench.wait(0.6)) == [HONEST]


def test_a_stranger_is_asked_when_no_member_is_ahead_and_proves_as_much() -> None:
    bench = Bench(4, me=1)
    (stranger,) = strangers(1)
    bench.do(ev.PeerSeen(stranger))
    line = other_line(bench, 3)
    assert followed(meet(bench, line, stranger)) == steps(line)


def test_strangers_that_claim_to_be_ahead_do_not_keep_a_newcomer_from_joining() -> None:
    bench = Bench(4, me=9, peers=False)
    liars = strangers(2)
    for key in (*KEYS[:4], *liars):
        bench.do(ev.PeerSeen(key))
    effects: list[ev.Effect] = []
    for number in range(5, 125):
        for key in liars:
            effects += bench.hear(bench.hello(key, round=number))
        effects += bench.wait(1.0)
    requests = [message for peer, message in sent(effects) if isinstance(message, JoinRequest) and peer == KEYS[0]]
    assert len(requests) >= 3
    assert set(asked(effects)) == set(liars)


def join_requests(claiming: int, ahead: int = 2 * NEAR_ROUNDS) -> list[JoinRequest]:
    """A newcomer's requests among seven members, the first of whom claim to be so far ahead and never answer."""
    bench = Bench(7, me=9, peers=False)
    liars = KEYS[:claiming]
    for key in KEYS[:7]:
        bench.do(ev.PeerSeen(key))
    effects: list[ev.Effect] = []
    for number in range(ahead, ahead + 40):
        for key in liars:
            effects += bench.hear(bench.hello(key, round=number))
        effects += bench.wait(1.0)
    assert asked(effects) != []
    return [message for peer, message in sent(effects) if isinstance(message, JoinRequest) and peer == KEYS[6]]


def test_as_many_members_as_may_lie_do_not_keep_a_newcomer_from_joining() -> None:
    assert len(join_requests(claiming=2)) >= 2


def test_a_newcomer_believes_more_members_than_may_lie() -> None:
    assert join_requests(claiming=7) == []


def test_a_newcomer_that_lacks_a_few_rounds_asks_to_join() -> None:
    """Where they take some milliseconds, it lacks some until they are held open for it."""
    first, *_ = join_requests(claiming=7, ahead=5)
    assert first.round == 1


def test_a_newcomer_that_lags_first_looks_at_what_a_stranger_may_prove() -> None:
    """All peers with the newest state may have joined after the beginning, which is all that a newcomer knows."""
    bench = Bench(4, me=9, peers=False)
    (stranger,) = strangers(1)
    effects = bench.hear(bench.hello(stranger, round=9), sender=stranger) + bench.do(ev.PeerSeen(stranger))
    effects += bench.hear(bench.hello(stranger, round=9)) + bench.wait(0.4)
    assert bench.parts.catching_up.is_behind


def test_a_member_that_is_ahead_is_asked_instead_of_a_stranger_that_keeps_us_waiting() -> None:
    bench = Bench(4, me=1)
    (stranger,) = strangers(1)
    bench.do(ev.PeerSeen(stranger))
    assert claim(bench, stranger) == [stranger]
    bench.hear(bench.hello(HONEST, round=9))
    assert bench.parts.catching_up.deadline == bench.now + PATIENCE_SECONDS
    assert asked(bench.wait(0.6)) == [HONEST]
    assert (stranger in bench.parts.catching_up.ahead, bench.node.context.reputation.records) == (True, {})


def test_members_do_not_keep_a_stranger_from_answering_for_ever() -> None:
    bench = Bench(4, me=1)
    (stranger,) = strangers(1)
    line = other_line(bench, 3)
    bench.do(ev.PeerSeen(stranger))
    assert claim(bench, stranger) == [stranger]
    assert claim(bench, LIAR) == [LIAR]
    assert asked(bench.do(ev.HistoryFailed(LIAR, "gone"))) == [stranger]
    assert claim(bench, HONEST) == []
    assert followed(bench.do(ev.HistoryArrived(stranger, line.answer(RUN, 0)))) == steps(line)


def test_a_member_that_is_asked_is_not_replaced_by_another() -> None:
    bench = Bench(4, me=1)
    assert claim(bench, LIAR) == [LIAR]
    assert claim(bench, HONEST) == []


# ---------------------------------------------------------------------------------------------------
# What has lost, and what is split


def answer(bench: Bench, history: History) -> list[ev.Effect]:
    """Answers every request for history in the same way."""
    effects: list[ev.Effect] = []
    while (question := bench.parts.catching_up.asked) is not None:
        effects += bench.do(ev.HistoryArrived(question.peer, history))
    return effects


def test_a_lineage_that_nobody_has_verified_does_not_make_a_branch_one_that_lost() -> None:
    for start, number in ((0, 1), (0, 9), (1, 9), (3, 9)):
        bench = on_own_branch(rounds=5)
        line = shared(bench)
        regroup(line, (KEYS[0], HONEST, KEYS[3]))
        invented = History((BranchStart(RUN, 0), BranchStart(line.state.branch, start)), number, (), None, ())
        bench.hear(bench.hello(LIAR, branch=line.state.branch, round=2))
        assert asked(bench.wait(0.6)) == [LIAR]
        answer(bench, invented)
        assert not bench.parts.catching_up.has_lost(line.state.branch)
        assert followed(meet(bench, line, HONEST)) == steps(line, 1)


def test_a_branch_that_we_left_is_not_one_that_lost_because_somebody_is_not_on_it_after_all() -> None:
    bench = on_own_branch(rounds=5)
    bench.hear(bench.hello(LIAR, branch=RUN, round=50))
    assert asked(bench.wait(0.6)) == [LIAR]
    answer(bench, History((BranchStart(RUN, 0),), 1, (), None, ()))
    assert not bench.parts.catching_up.has_lost(RUN)


def after_us(bench: Bench, *founders: bytes) -> Chain:
    """The chain of members that regrouped before our second round, which they never saw."""
    bench.decide()
    line = shared(bench)
    bench.decide()
    regroup(line, founders)
    extend(bench, line, 3)
    return line


def test_a_branch_that_shows_that_it_began_before_our_quorum_went_on_has_lost() -> None:
    bench = Bench(4, me=1)
    line = after_us(bench, KEYS[0], HONEST)
    assert followed(meet(bench, line)) == []
    assert bench.parts.catching_up.has_lost(line.state.branch)
    assert (bench.state.branch, bench.node.context.reputation.records) == (RUN, {})


def test_a_branch_that_began_from_one_that_lost_has_lost_too_and_another_has_not() -> None:
    for is_one_of_them in (True, False):
        bench = Bench(4, me=1)
        line = after_us(bench, KEYS[0], HONEST)
        first = line.state.branch
        regroup(line, (KEYS[0],))
        claimed = line.state.branch if is_one_of_them else digest("core test", b"another")
        line.lineage[-1] = BranchStart(claimed, line.lineage[-1].start)
        bench.hear(bench.hello(LIAR, branch=claimed, round=9))
        bench.wait(0.6)
        while (question := bench.parts.catching_up.asked) is not None:
            bench.do(ev.HistoryArrived(question.peer, line.answer(question.branch, question.round)))
        assert bench.parts.catching_up.has_lost(first)
        assert bench.parts.catching_up.has_lost(claimed) == is_one_of_them


def test_a_beginning_that_nobody_signed_makes_no_branch_one_that_lost() -> None:
    bench = Bench(4, me=1)
    line = after_us(bench, KEYS[0], HONEST)
    history = line.answer(RUN, 1)
    first = history.steps[0]
    assert isinstance(first, Beginning)
    forged = msgspec.structs.replace(first, signatures=first.signatures[::-1])
    bench.hear(bench.hello(LIAR, branch=line.state.branch, round=9))
    bench.wait(0.6)
    answer(bench, msgspec.structs.replace(history, steps=(forged,)))
    assert not bench.parts.catching_up.has_lost(line.state.branch)
    assert bench.node.context.reputation.records[LIAR].counters == {Reason.MALFORMED: 1}


def split_from(bench: Bench) -> Chain:
    """A chain that parted from ours too long ago to be settled, though we still have the state at its beginning."""
    line = Chain(next(iter(bench.parts.chain.forks.values())), RUN, 64)
    regroup(line, (HONEST,))
    extend(bench, line, 12)
    return line


def test_a_split_is_over_when_nobody_is_found_on_the_other_side_any_more() -> None:
    bench = on_own_branch(rounds=9, history_rounds=4)
    line = split_from(bench)
    for _ in range(8):
        meet(bench, line, HONEST)
        assert bench.parts.catching_up.is_split
        bench.wait(30.0)
        assert bench.parts.catching_up.is_split
    bench.wait(SPLIT_SECONDS)
    assert not bench.parts.catching_up.is_split
    assert not [why for why in bench.health if why.startswith("split")]


def test_a_split_is_over_when_we_follow_another_line() -> None:
    bench = on_own_branch(rounds=9, history_rounds=4)
    fork = next(iter(bench.parts.chain.forks.values()))
    meet(bench, split_from(bench), HONEST)
    assert bench.parts.catching_up.is_split
    line = Chain(fork, RUN, 64)
    regroup(line, (KEYS[0], HONEST, KEYS[3]))
    extend(bench, line, 2)
    meet(bench, line)
    assert (bench.state, bench.parts.catching_up.is_split) == (line.state, False)


def test_a_stranger_cannot_invent_a_split() -> None:
    (stranger,) = strangers(1)
    for peer, is_split in ((stranger, False), (HONEST, True)):
        bench = on_own_branch(rounds=9, history_rounds=4)
        line = split_from(bench)
        bench.parts.chain.forks.clear()
        bench.do(ev.PeerSeen(peer))
        meet(bench, line, peer)
        assert bench.parts.catching_up.is_split == is_split


# ---------------------------------------------------------------------------------------------------
# Taking over


def parted(rounds: int, size: int = 4) -> tuple[Bench, Chain]:
    """A node after its first round, and a chain that went on from there and keeps only four rounds."""
    bench = Bench(size, me=1)
    bench.decide()
    line = shared(bench)
    line.kept = 4
    extend(bench, line, rounds)
    return bench, line


def test_a_round_that_no_availabilities_lead_to_is_refused_on_whosever_branch() -> None:
    """On a branch that it began alone, a liar's own signature is a quorum's."""
    bench, lineage = on_second_branch()
    liar = KEYS[6]
    start = begun((liar,), (liar,), bench.genesis)
    alone = bench.genesis.regrouped(start.branch, (liar,))
    seats = msgspec.structs.replace(plain_manifest(alone, bench.run), seated=(KEYS[12],))  # which was never admitted
    after = alone.after(seats, bench.run)
    audit = Measured(liar, KEYS[3], 1, 0, 0, is_summoned=False)
    audits = msgspec.structs.replace(seats, round=2, parent=after.head, state=after.digest, seated=(), audits=(audit,))
    theirs = (*lineage[:1], BranchStart(start.branch, 0))
    stranger = KEYS[14]
    bench.do(ev.PeerSeen(stranger))
    bench.hear(bench.hello(stranger, branch=start.branch, round=3))
    assert asked(bench.wait(1)) == [stranger]
    answer = History(theirs, 3, (), None, (start, certified(seats, alone), certified(audits, after)))
    for _ in range(2):
        bench.do(ev.HistoryArrived(stranger, answer))
    assert bench.state.branch == lineage[-1].branch
    assert bench.node.context.counters["histories refused"] == 1


def test_a_liar_does_not_take_over_a_swarm_that_is_well_by_a_jump() -> None:
    """A jump may hide a branch that binds nobody: by the liar alone, from our head or from a later one."""
    for rounds in (0, 2):
        bench, line = parted(rounds)
        regroup(line, (LIAR,))
        extend(bench, line, 20)
        history = line.answer(RUN, 1)
        assert history.base is not None
        assert any(isinstance(change, Beginning) for change in history.changes)
        assert followed(meet(bench, line)) == []
        assert bench.state.branch == RUN


@pytest.mark.parametrize("rounds", [0, 2])
@pytest.mark.parametrize(("heard", "follows"), [((), True), (KEYS[2:4], False)])
def test_who_was_away_follows_the_one_who_is_left_over_a_jump_unless_it_hears_the_others(
    rounds: int, heard: tuple[bytes, ...], follows: bool
) -> None:
    bench, line = parted(rounds)
    regroup(line, (KEYS[0],))
    extend(bench, line, 20)
    for _ in range(10):
        bench.hear_all(*(bench.hello(key) for key in heard))
        meet(bench, line)
        bench.wait(20.0)
    assert (bench.state.branch == line.state.branch) == follows


def test_who_was_away_follows_nobody_whom_it_does_not_know_to_be_left_over_a_jump() -> None:
    """The members were others when the branch began: whether it hears those of its own time says nothing of them."""
    bench, line = parted(0, size=7)
    manifest = plain_manifest(line.state, bench.run, root_round=1, root=root_of(1))
    entry = certified(msgspec.structs.replace(manifest, unseated=(KEYS[6],)), line.state)
    line.append(entry, line.state.after(entry.manifest, bench.run))
    assert (len(line.state.members), line.state.roster.tolerated) == (6, 1)
    regroup(line, (KEYS[0],))
    extend(bench, line, 20)
    for _ in range(10):
        meet(bench, line)
        bench.wait(20.0)
    assert bench.state.branch == RUN


def test_changes_without_a_jump_decide_nothing() -> None:
    """They are unchecked: a round of the old quorum among them would let a smaller branch beat a larger one."""
    bench = Bench(4, me=1)
    bench.decide()
    line, members = shared(bench), (KEYS[1], KEYS[2], KEYS[3])
    bench.hear_all(*(signed_set(members, key, state=bench.state) for key in members[1:]))
    mine = bench.state
    assert mine.members == members
    made_up = line_of(line.state, bench.run, 1)[0][0]
    regroup(line, (LIAR,))
    bench.hear(bench.hello(LIAR, branch=line.state.branch, round=2))
    assert asked(bench.wait(0.6)) == [LIAR]
    bench.do(ev.HistoryArrived(LIAR, line.answer(mine.branch, 1)))
    lie = msgspec.structs.replace(line.answer(RUN, 1), changes=(made_up,))
    assert followed(bench.do(ev.HistoryArrived(LIAR, lie))) == []
    assert bench.state == mine


def test_a_branch_of_a_quorum_is_followed_over_a_jump() -> None:
    for rounds in (0, 2):
        bench, line = parted(rounds)
        members = (KEYS[0], KEYS[2], KEYS[3])
        beginning = begun(members, members, line.state)
        assert regroup(line, members) == beginning
        extend(bench, line, 20)
        meet(bench, line)
        assert bench.state == line.state
