"""The votes of one round, step by step: changes of view, decisions, lies, bounds and restarts."""

from __future__ import annotations

import pytest

from p2ptrain.core.agreement import (
    VIEWS_AHEAD,
    VIEWS_BEHIND,
    CastVote,
    Decided,
    Judgement,
    Propose,
    Stage,
    ViewEntered,
)
from p2ptrain.core.messages import NOTHING, Ballot, Heard, Proposal, Received, Vote
from tests.helpers.agreement import (
    PRECOMMIT,
    PREVOTE,
    A,
    At,
    B,
    SeatedMember,
    late_of_seven,
    locked_on_a,
    proposal,
)
from tests.helpers.core import KEYS, signed, voted

# ---------------------------------------------------------------------------------------------------
# The next view


def test_a_quorum_that_precommits_nothing_ends_the_view_at_once() -> None:
    member = SeatedMember(seat=3)
    member.begin()
    member.hear_votes(PRECOMMIT, NOTHING, 0, 1, 2)
    assert member.go_on(1.0) == [ViewEntered(1)]
    assert member.at == At(view=1, timer=5.0)


def test_precommits_that_do_not_agree_are_waited_out() -> None:
    member = SeatedMember(seat=3)
    member.begin()
    member.hear_votes(PRECOMMIT, NOTHING, 0, 1)
    member.hear_votes(PRECOMMIT, A, 2)
    assert member.go_on(1.0) == []
    assert member.at == At(timer=2.0, view_timer=3.0)
    assert member.go_on(2.0) == [CastVote(0, PREVOTE, NOTHING)]
    assert member.agreement.deadline == 3.0
    assert member.go_on(3.0) == [ViewEntered(1)]
    assert member.at == At(view=1, timer=7.0)


def test_more_than_the_tolerated_number_of_members_ahead_are_followed() -> None:
    member = SeatedMember(seat=3)
    member.begin()
    member.hear(voted(KEYS[0], PREVOTE, A, view=9))
    assert member.go_on(1.0) == []
    member.hear(voted(KEYS[2], PRECOMMIT, NOTHING, view=6))
    member.hear(voted(KEYS[0], PRECOMMIT, NOTHING, view=8))  # what it said before is no step back
    assert member.go_on(1.0) == [ViewEntered(6)]  # the highest that an honest one has reached
    assert member.at == At(view=6, timer=61.0)
    assert member.agreement.ahead == {KEYS[0]: 9}


def test_a_proposal_counts_as_being_ahead() -> None:
    member = SeatedMember(seat=3)
    member.begin()
    assert member.hear(proposal(5, A)) == [Heard.USELESS]  # too far to be kept
    member.hear(voted(KEYS[0], PREVOTE, A, view=4))
    assert member.go_on(0.0) == [ViewEntered(4)]


def test_one_liar_ahead_is_not_followed_however_much_it_says() -> None:
    member = SeatedMember(seat=3)
    member.begin()
    for view in (5, 50, 2**40):
        member.hear(voted(KEYS[0], PREVOTE, A, view=view), voted(KEYS[0], PRECOMMIT, NOTHING, view=view))
    assert member.go_on(1.0) == []
    assert member.agreement.ahead == {KEYS[0]: 2**40}
    assert sorted(member.agreement.views) == [0]


def test_in_a_crash_only_roster_one_member_ahead_is_followed() -> None:
    member = SeatedMember(seat=2, size=3)
    member.hear(voted(KEYS[0], PREVOTE, NOTHING, view=2))
    assert member.go_on(0.0)[:1] == [ViewEntered(2)]


def test_a_member_is_followed_even_before_the_availabilities_are_here() -> None:
    member = SeatedMember(seat=3)
    member.hear(voted(KEYS[0], PREVOTE, NOTHING, view=1), voted(KEYS[1], PREVOTE, NOTHING, view=1))
    assert member.go_on(4.0) == [ViewEntered(1)]
    assert member.at == At(view=1, timer=8.0)


def test_the_valid_manifest_is_proposed_again_with_its_view() -> None:
    member = locked_on_a()
    member.hear_votes(PRECOMMIT, NOTHING, 0, 2, 3)
    assert member.go_on(1.0) == [ViewEntered(1), Propose(1, 0, proposal(0, A)), CastVote(1, PREVOTE, A)]
    assert member.at == At(view=1, stage=Stage.PREVOTE, locked=A, locked_view=0, valid=A, valid_view=0)


def test_what_a_quorum_prevoted_is_proposed_again_though_not_locked() -> None:
    member = late_of_seven()
    member.hear_votes(PRECOMMIT, NOTHING, 0, 2, 3, 4)
    assert member.go_on(2.5) == [ViewEntered(1), Propose(1, 0, proposal(0, A, size=7)), CastVote(1, PREVOTE, A)]


def test_views_double_up_to_their_longest() -> None:
    agreement = SeatedMember().agreement
    assert [agreement.seconds(view) for view in range(7)] == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert agreement.seconds(2**40) == 60.0


# ---------------------------------------------------------------------------------------------------
# Deciding


def test_a_quorum_of_precommits_decides_and_stops_the_clock() -> None:
    member = locked_on_a()
    member.hear_votes(PRECOMMIT, A, 0, 3)
    assert member.go_on(1.0) == [Decided(0, A)]
    assert member.agreement.decided == Decided(0, A)
    assert member.agreement.deadline is None
    assert [vote.message for vote in member.agreement.voted(0, PRECOMMIT, A)] == [
        voted(KEYS[seat], PRECOMMIT, A) for seat in (0, 1, 3)
    ]


def test_one_precommit_less_than_a_quorum_decides_nothing() -> None:
    member = locked_on_a()
    member.hear_votes(PRECOMMIT, A, 0)
    assert member.go_on(1.0) == []
    assert member.agreement.decided is None


@pytest.mark.parametrize("view", [0, 2, VIEWS_AHEAD])
def test_a_quorum_decides_in_any_view_whatever_the_stage(view: int) -> None:
    member = SeatedMember(seat=3)  # has heard no availability, and no proposal
    member.hear_votes(PRECOMMIT, A, 0, 1, 2, view=view)
    assert member.go_on(0.0) == [Decided(view, A)]


def test_an_earlier_view_may_still_decide() -> None:
    member = SeatedMember(seat=6, size=7)
    member.hear_votes(PRECOMMIT, NOTHING, 0, 1, 2, view=3)
    assert member.go_on(0.0) == [ViewEntered(3)]
    member.hear_votes(PRECOMMIT, A, 0, 1, 2, 3, 4)
    assert member.go_on(0.0) == [Decided(0, A)]


def test_in_a_view_that_was_left_without_votes_they_are_cast_for_nothing_when_a_member_is_still_in_it() -> None:
    member = SeatedMember(seat=6, size=7)
    member.hear_votes(PRECOMMIT, NOTHING, 0, 1, 2, view=3)
    assert member.go_on(0.0) == [ViewEntered(3)]
    assert [member.agreement.pass_by(view) for view in (3, 4)] == [[], []]  # not left yet
    assert member.agreement.pass_by(1) == [CastVote(1, PREVOTE, NOTHING), CastVote(1, PRECOMMIT, NOTHING)]
    assert member.agreement.pass_by(1) == [], "a member votes once per view and ballot"
    assert member.agreement.said == {(1, PREVOTE): NOTHING, (1, PRECOMMIT): NOTHING}


def test_where_a_vote_was_cast_only_the_other_is_missing() -> None:
    member = SeatedMember(seat=6, size=7)
    member.hear_votes(PRECOMMIT, NOTHING, 0, 1, 2, view=3)
    member.go_on(0.0)
    member.agreement.said[1, PREVOTE] = A
    assert member.agreement.pass_by(1) == [CastVote(1, PRECOMMIT, NOTHING)]
    assert member.agreement.said[1, PREVOTE] == A


def test_who_only_watches_casts_no_votes_in_passing() -> None:
    member = SeatedMember(seat=9, size=7)
    member.hear_votes(PRECOMMIT, NOTHING, 0, 1, 2, view=3)
    member.go_on(0.0)
    assert member.agreement.pass_by(1) == []


def test_precommits_of_different_views_do_not_add_up() -> None:
    member = SeatedMember(seat=3)
    member.hear_votes(PRECOMMIT, A, 0, 1)
    member.hear_votes(PRECOMMIT, A, 2, view=1)
    assert member.agreement.decided is None


def test_nothing_is_never_decided() -> None:
    member = SeatedMember(seat=3)
    member.hear_votes(PRECOMMIT, NOTHING, 0, 1, 2)
    assert member.agreement.decided is None


# ---------------------------------------------------------------------------------------------------
# Lies, strangers, bounds


def test_two_votes_for_one_place_are_reported_and_the_first_counts() -> None:
    member = SeatedMember()
    first, second = voted(KEYS[0], PREVOTE, A), voted(KEYS[0], PREVOTE, B)
    assert member.hear(first, first, second, second) == [Heard.NEW, Heard.USELESS, Heard.CONFLICT, Heard.CONFLICT]
    assert member.agreement.earlier(signed(second)) == signed(first)
    assert member.agreement.count(0, PREVOTE, A) == 1
    assert member.agreement.count(0, PREVOTE, B) == 0


def test_two_proposals_for_one_view_are_reported_and_the_first_counts() -> None:
    member = SeatedMember()
    first, second = proposal(0, A), proposal(0, B)
    assert member.hear(first, first, second) == [Heard.NEW, Heard.USELESS, Heard.CONFLICT]
    assert member.agreement.earlier(signed(second)) == signed(first)
    assert member.begin() == [CastVote(0, PREVOTE, A)]


def test_votes_of_other_ballots_and_views_are_no_conflict() -> None:
    member = SeatedMember()
    votes = [voted(KEYS[0], ballot, manifest, view) for view, ballot, manifest in
             ((0, PREVOTE, A), (0, PRECOMMIT, NOTHING), (1, PREVOTE, B), (1, PRECOMMIT, B))]  # fmt: skip
    assert member.hear(*votes) == [Heard.NEW] * 4


def test_who_has_no_seat_follows_without_a_word() -> None:
    member = SeatedMember(seat=5)
    member.begin()
    member.hear(proposal(0, A))
    member.hear_votes(PREVOTE, A, 0, 1, 2)
    assert member.go_on(0.0) == []
    assert member.agreement.said == {}
    member.hear_votes(PRECOMMIT, NOTHING, 0, 1, 3)
    assert member.go_on(0.5) == [ViewEntered(1)]
    member.hear_votes(PRECOMMIT, A, 0, 1, 2, view=1)
    assert member.go_on(1.0) == [Decided(1, A)]


def test_views_far_ahead_and_far_behind_are_not_kept() -> None:
    member = SeatedMember(seat=3)
    ahead = [voted(KEYS[0], PREVOTE, A, view) for view in (VIEWS_AHEAD, VIEWS_AHEAD + 1)]
    assert member.hear(*ahead) == [Heard.NEW, Heard.USELESS]
    far = VIEWS_BEHIND + 20
    member.hear(*(voted(KEYS[seat], PREVOTE, NOTHING, far) for seat in (0, 1)))
    assert member.go_on(0.0) == [ViewEntered(far)]
    behind = [voted(KEYS[0], PREVOTE, A, view) for view in (far - VIEWS_BEHIND - 1, far - VIEWS_BEHIND)]
    assert member.hear(*behind) == [Heard.USELESS, Heard.NEW]


def test_the_views_of_lock_and_valid_manifest_are_kept_however_long_ago() -> None:
    member = locked_on_a()
    member.hear(*(voted(KEYS[seat], PREVOTE, NOTHING, 501) for seat in (0, 2)))
    assert member.go_on(0.0) == [ViewEntered(501), Propose(501, 0, proposal(0, A)), CastVote(501, PREVOTE, A)]
    assert sorted(member.agreement.views) == [0, 501]


def test_everything_that_two_hundred_views_bring_stays_within_its_bounds() -> None:
    member = locked_on_a()
    for view in range(1, 200):
        for ahead in range(VIEWS_AHEAD + 2):
            member.hear(proposal(view + ahead, B))
            member.hear_votes(PREVOTE, NOTHING, 0, 2, 3, view=view + ahead)
        member.hear_votes(PRECOMMIT, NOTHING, 0, 2, 3, view=view - 1)
        member.go_on(0.0)
        assert {name: size for name, (size, bound) in member.agreement.limits().items() if size > bound} == {}
    assert len(member.agreement.views) > VIEWS_BEHIND


# ---------------------------------------------------------------------------------------------------
# After a restart


def said(*messages: Proposal | Vote) -> list[Received]:
    return [signed(message) for message in messages]


def test_after_a_restart_the_lock_holds_and_nothing_is_said_twice() -> None:
    prevotes = [voted(KEYS[seat], PREVOTE, A) for seat in (0, 1, 2)]
    precommit = voted(KEYS[1], PRECOMMIT, A)
    member = SeatedMember()
    member.agreement.restore(said(prevotes[1], precommit), said(proposal(0, A), *prevotes), now=50.0)
    assert member.at == At(stage=Stage.PRECOMMIT, locked=A, locked_view=0, valid=A, valid_view=0)
    assert member.agreement.said == {(0, PREVOTE): A, (0, PRECOMMIT): A}
    assert member.begin(50.0) == []
    member.hear_votes(PRECOMMIT, NOTHING, 0, 2, 3)
    assert member.go_on(51.0) == [ViewEntered(1), Propose(1, 0, proposal(0, A)), CastVote(1, PREVOTE, A)]


def test_after_a_restart_a_prevote_alone_locks_nothing() -> None:
    member = SeatedMember()
    member.agreement.restore(said(voted(KEYS[1], PREVOTE, A)), [], now=50.0)
    assert member.at == At(stage=Stage.PREVOTE)
    member.hear(proposal(0, B))
    member.hear_votes(PREVOTE, B, 0, 2, 3)
    assert member.go_on(50.0) == [CastVote(0, PRECOMMIT, B)]


def test_after_a_restart_a_proposer_waits_for_the_rest_of_its_view() -> None:
    member = SeatedMember()
    member.agreement.restore(said(proposal(1, A)), [], now=50.0)
    assert member.at == At(view=1, timer=54.0)
    assert member.go_on(50.0) == [CastVote(1, PREVOTE, A)]


def test_after_a_restart_a_proposer_does_not_propose_again() -> None:
    member = SeatedMember(judgements={A: Judgement.UNKNOWN})
    member.agreement.restore(said(proposal(1, A)), [], now=50.0)
    assert member.go_on(50.0) == []
    assert member.agreement.proposed == 1


def test_after_a_restart_the_newest_place_counts() -> None:
    votes = [voted(KEYS[1], ballot, NOTHING, view) for view in (3, 1, 2) for ballot in Ballot]
    member = SeatedMember()
    member.agreement.restore(said(*votes[:-1]), [], now=0.0)
    assert member.at == At(view=3, stage=Stage.PRECOMMIT)
    member.hear_votes(PRECOMMIT, NOTHING, 0, 2, 3, view=3)
    assert member.go_on(0.0) == [ViewEntered(4)]


def test_a_lie_about_a_prevote_does_not_hide_the_quorum_behind_a_proposal() -> None:
    """A liar towards some of three honest members must not keep them apart for ever."""
    member = SeatedMember()
    member.begin()
    member.hear(proposal(0, A))
    member.hear_votes(PREVOTE, NOTHING, 2)  # but A towards somebody who is locked on it now
    member.hear_votes(PREVOTE, A, 0)
    assert member.go_on(0.0) == [CastVote(0, PREVOTE, A)]
    member.hear_votes(PRECOMMIT, NOTHING, 0, 2, view=3)
    member.go_on(3.0)
    assert member.agreement.view == 3
    member.hear(proposal(3, A, valid_view=0))
    assert member.hear(voted(KEYS[2], PREVOTE, A)) == [Heard.CONFLICT]
    assert member.go_on(3.0) == [CastVote(3, PREVOTE, A)]
