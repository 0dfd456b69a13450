"""The votes of one round, step by step: proposing, prevoting, precommitting and locking as in Tendermint."""

from __future__ import annotations

import pytest

from p2ptrain.core.agreement import (
    CastVote,
    Judgement,
    Propose,
    Stage,
    ViewEntered,
)
from p2ptrain.core.messages import NOTHING, Heard, Proposal
from tests.helpers.agreement import (
    PRECOMMIT,
    PREVOTE,
    A,
    At,
    B,
    SeatedMember,
    late_of_seven,
    locked_on_a,
    locked_on_a_in_view,
    proposal,
)
from tests.helpers.core import KEYS, ROOT0, RUN

# ---------------------------------------------------------------------------------------------------
# Proposing


def test_before_a_quorum_of_availabilities_nothing_is_said_and_no_time_runs() -> None:
    member = SeatedMember()
    member.hear(proposal(0, A))
    assert member.go_on(100.0) == []
    assert member.at == At(stage=Stage.WAITING)
    assert member.agreement.deadline is None


def test_a_view_begins_once() -> None:
    member = SeatedMember()
    assert member.begin(1.0) == []
    member.agreement.start(2.0)
    assert member.at == At(timer=3.0)
    assert member.agreement.deadline == 3.0


def test_the_proposer_proposes_once_and_prevotes_its_own() -> None:
    member = SeatedMember(seat=0)
    assert member.begin() == [Propose(0, -1, None), CastVote(0, PREVOTE, A)]
    assert member.go_on(1.0) == []
    assert member.at == At(stage=Stage.PREVOTE)


def test_the_proposer_waits_until_it_may() -> None:
    member = SeatedMember(seat=0, may_propose=False)
    assert member.begin() == []
    member.may_propose = True
    assert member.go_on(1.0) == [Propose(0, -1, None), CastVote(0, PREVOTE, A)]


def test_a_proposer_that_may_not_in_time_prevotes_nothing() -> None:
    member = SeatedMember(seat=0, may_propose=False)
    member.begin()
    assert member.go_on(2.0) == [CastVote(0, PREVOTE, NOTHING)]
    member.may_propose = True
    assert member.go_on(2.0) == []


def test_only_the_proposer_of_a_view_is_heard() -> None:
    member = SeatedMember()
    stranger = Proposal(RUN, 1, 0, -1, (ROOT0,), A, KEYS[2])
    assert member.hear(stranger) == [Heard.USELESS]
    assert member.begin() == []


# ---------------------------------------------------------------------------------------------------
# Prevoting


def test_a_held_proposal_is_prevoted() -> None:
    member = SeatedMember()
    member.begin()
    assert member.hear(proposal(0, A)) == [Heard.NEW]
    assert member.go_on(1.0) == [CastVote(0, PREVOTE, A)]
    assert member.at == At(stage=Stage.PREVOTE)


def test_a_bad_proposal_gets_a_vote_for_nothing_at_once() -> None:
    member = SeatedMember(judgements={A: Judgement.BAD})
    member.begin()
    member.hear(proposal(0, A))
    assert member.go_on(1.0) == [CastVote(0, PREVOTE, NOTHING)]
    assert member.at == At(stage=Stage.PREVOTE)


@pytest.mark.parametrize("judgement", [Judgement.UNKNOWN, Judgement.KNOWN])
def test_what_is_not_held_is_waited_for_until_the_timeout(judgement: Judgement) -> None:
    member = SeatedMember(judgements={A: judgement})
    member.begin()
    member.hear(proposal(0, A))
    assert member.go_on(1.99) == []
    assert member.go_on(2.0) == [CastVote(0, PREVOTE, NOTHING)]
    assert member.at == At(stage=Stage.PREVOTE)


def test_without_a_proposal_nothing_is_prevoted_at_the_timeout() -> None:
    member = SeatedMember()
    member.begin()
    assert member.go_on(1.99) == []
    assert member.go_on(2.0) == [CastVote(0, PREVOTE, NOTHING)]


def test_a_proposal_that_becomes_held_in_time_is_prevoted() -> None:
    member = SeatedMember(judgements={A: Judgement.KNOWN})
    member.begin()
    member.hear(proposal(0, A))
    member.go_on(1.0)
    member.judgements[A] = Judgement.HELD
    assert member.go_on(1.5) == [CastVote(0, PREVOTE, A)]


def test_who_lacks_a_payload_of_what_a_quorum_prevoted_still_precommits_it() -> None:
    member = SeatedMember(judgements={A: Judgement.KNOWN})
    member.begin()
    member.hear(proposal(0, A))
    member.hear_votes(PREVOTE, A, 0, 2, 3)
    assert member.go_on(1.0) == [CastVote(0, PREVOTE, NOTHING), CastVote(0, PRECOMMIT, A)]
    assert member.at == At(stage=Stage.PRECOMMIT, locked=A, locked_view=0, valid=A, valid_view=0)


def test_what_nobody_could_work_out_is_not_precommitted_though_a_quorum_prevoted_it() -> None:
    member = SeatedMember(judgements={A: Judgement.UNKNOWN})
    member.begin()
    member.hear(proposal(0, A))
    member.hear_votes(PREVOTE, A, 0, 2, 3)
    assert member.go_on(1.0) == []
    assert member.go_on(2.0) == [CastVote(0, PREVOTE, NOTHING)]
    assert member.at == At(stage=Stage.PREVOTE, timer=4.0)


def test_a_proposal_that_is_bad_is_never_precommitted() -> None:
    member = SeatedMember(judgements={A: Judgement.BAD})
    member.begin()
    member.hear(proposal(0, A))
    member.hear_votes(PREVOTE, A, 0, 2, 3)
    assert member.go_on(0.0) == [CastVote(0, PREVOTE, NOTHING)]
    assert member.go_on(2.0) == [CastVote(0, PRECOMMIT, NOTHING)]
    assert member.at == At(stage=Stage.PRECOMMIT)


# ---------------------------------------------------------------------------------------------------
# Precommitting and locking


def test_a_quorum_of_prevotes_locks_and_is_precommitted() -> None:
    member = SeatedMember()
    member.begin()
    member.hear(proposal(0, A))
    member.hear_votes(PREVOTE, A, 0)
    assert member.go_on(0.5) == [CastVote(0, PREVOTE, A)]  # with its own two, of four
    member.hear_votes(PREVOTE, A, 2)
    assert member.go_on(1.0) == [CastVote(0, PRECOMMIT, A)]
    assert member.at == At(stage=Stage.PRECOMMIT, locked=A, locked_view=0, valid=A, valid_view=0)


def test_a_quorum_for_nothing_is_precommitted_at_once() -> None:
    member = SeatedMember()
    member.begin()
    member.hear_votes(PREVOTE, NOTHING, 0, 2)
    assert member.go_on(1.0) == []
    assert member.go_on(2.0) == [CastVote(0, PREVOTE, NOTHING), CastVote(0, PRECOMMIT, NOTHING)]
    assert member.at == At(stage=Stage.PRECOMMIT)


def test_prevotes_that_do_not_agree_are_waited_out() -> None:
    member = SeatedMember()
    member.begin()
    member.hear(proposal(0, A))
    member.hear_votes(PREVOTE, NOTHING, 2, 3)
    assert member.go_on(0.5) == [CastVote(0, PREVOTE, A)]
    assert member.at == At(stage=Stage.PREVOTE, timer=2.5)
    assert member.go_on(2.49) == []
    assert member.go_on(2.5) == [CastVote(0, PRECOMMIT, NOTHING)]
    assert member.at == At(stage=Stage.PRECOMMIT)


def test_a_quorum_that_shows_after_the_own_precommit_is_valid_but_locks_nothing() -> None:
    member = late_of_seven()
    assert member.go_on(2.1) == []
    assert member.at == At(stage=Stage.PRECOMMIT, valid=A, valid_view=0)


def test_a_locked_member_prevotes_nothing_for_another_manifest() -> None:
    member = locked_on_a_in_view(2)
    member.hear(proposal(2, B))
    assert member.go_on(0.0) == [CastVote(2, PREVOTE, NOTHING)]
    assert member.at == At(view=2, stage=Stage.PREVOTE, locked=A, locked_view=0, valid=A, valid_view=0)


def test_a_locked_member_prevotes_what_it_is_locked_on() -> None:
    member = locked_on_a_in_view(2)
    member.hear(proposal(2, A))
    assert member.go_on(0.0) == [CastVote(2, PREVOTE, A)]


def test_a_quorum_of_prevotes_later_than_the_lock_unlocks() -> None:
    member = locked_on_a()
    member.hear_votes(PRECOMMIT, NOTHING, 0, 2, view=3)
    assert member.go_on(0.0) == [ViewEntered(3)]
    member.hear(proposal(3, B, valid_view=2))
    assert member.go_on(0.0) == []
    member.hear_votes(PREVOTE, B, 0, 2, 3, view=2)
    assert member.go_on(0.0) == [CastVote(3, PREVOTE, B)]
    member.hear_votes(PREVOTE, B, 0, 2, view=3)
    assert member.go_on(0.0) == [CastVote(3, PRECOMMIT, B)]
    assert member.at == At(3, Stage.PRECOMMIT, None, 16.0, locked=B, locked_view=3, valid=B, valid_view=3)


def test_a_quorum_of_prevotes_earlier_than_the_lock_does_not_unlock() -> None:
    member = SeatedMember()
    member.hear_votes(PREVOTE, B, 0, 2, 3)
    member.hear_votes(PREVOTE, A, 0, 2, view=2)
    member.hear(proposal(2, A))
    assert member.go_on(0.0) == [ViewEntered(2), CastVote(2, PREVOTE, A), CastVote(2, PRECOMMIT, A)]
    member.hear_votes(PRECOMMIT, NOTHING, 0, 3, view=4)
    assert member.go_on(0.0) == [ViewEntered(4)]
    member.hear(proposal(4, B, valid_view=0))
    assert member.go_on(0.0) == [CastVote(4, PREVOTE, NOTHING)]
    assert member.at == At(view=4, stage=Stage.PREVOTE, locked=A, locked_view=2, valid=A, valid_view=2)


def test_prevotes_that_back_a_proposal_are_waited_for() -> None:
    member = SeatedMember()
    member.hear_votes(PRECOMMIT, NOTHING, 0, 3, view=2)
    assert member.go_on(0.0) == [ViewEntered(2)]
    member.hear(proposal(2, A, valid_view=0))
    member.hear_votes(PREVOTE, A, 0, 2)
    assert member.go_on(1.0) == []
    member.hear_votes(PREVOTE, A, 3)
    assert member.go_on(2.0) == [CastVote(2, PREVOTE, A)]


def test_a_proposal_whose_backing_never_comes_gets_a_vote_for_nothing_at_the_timeout() -> None:
    member = SeatedMember()
    member.hear_votes(PRECOMMIT, NOTHING, 0, 3, view=2)
    assert member.go_on(0.0) == [ViewEntered(2)]
    member.hear(proposal(2, A, valid_view=0))
    assert member.go_on(7.99) == []
    assert member.go_on(8.0) == [CastVote(2, PREVOTE, NOTHING)]
