"""Test helpers for the agreement: a single member, its incoming and outgoing messages, and its state."""

from __future__ import annotations

from dataclasses import dataclass, field

from p2ptrain.core.agreement import (
    Act,
    Agreement,
    CastVote,
    Decided,
    Judgement,
    Propose,
    Stage,
)
from p2ptrain.core.messages import NOTHING, Ballot, Heard, Proposal, Received, Vote
from p2ptrain.core.roster import Roster
from p2ptrain.digest import digest
from tests.helpers.core import KEYS, ROOT0, RUN, signed, voted

A, B = digest("core test", b"manifest a"), digest("core test", b"manifest b")
PREVOTE, PRECOMMIT = Ballot.PREVOTE, Ballot.PRECOMMIT


def proposal(view: int, manifest: bytes, valid_view: int = -1, which: bytes = ROOT0, size: int = 4) -> Proposal:
    """A proposal by the view's proposer."""
    return Proposal(RUN, 1, view, valid_view, (which,), manifest, KEYS[view % size])


@dataclass(frozen=True)
class At:
    """The decisions and timers that make up a member's state."""

    view: int = 0
    stage: Stage = Stage.PROPOSE
    timer: float | None = None
    view_timer: float | None = None
    locked: bytes = NOTHING
    locked_view: int = -1
    valid: bytes | None = None  # the manifest
    valid_view: int = -1
    decided: Decided | None = None


@dataclass
class SeatedMember:
    """One of four members; seat s proposes in view s. Its own messages are fed back to it, as in a node."""

    seat: int = 1
    size: int = 4
    may_propose: bool = True
    draft: bytes = A  # what it proposes, when nothing is valid
    kind: type[Agreement] = Agreement
    judgements: dict[bytes, Judgement] = field(default_factory=dict)  # by manifest; the rest is held

    def __post_init__(self) -> None:
        members = KEYS[: self.size]
        self.agreement = self.kind(
            Roster(members), members, KEYS[self.seat], self.judge, lambda: self.may_propose, (2.0, 60.0)
        )

    def judge(self, received: Received) -> Judgement:
        assert isinstance(received.message, Proposal)
        return self.judgements.get(received.message.manifest, Judgement.HELD)

    def hear(self, *messages: Proposal | Vote) -> list[Heard]:
        hear = {Proposal: self.agreement.hear_proposal, Vote: self.agreement.hear_vote}
        return [hear[type(message)](signed(message)) for message in messages]

    def hear_votes(self, ballot: Ballot, manifest: bytes, *seats: int, view: int = 0) -> None:
        self.hear(*(voted(KEYS[seat], ballot, manifest, view) for seat in seats))

    def go_on(self, now: float) -> list[Act]:
        """Carries out all actions that the agreement returns."""
        acts: list[Act] = []
        while (act := self.agreement.advance(now)) is not None and not isinstance(act, Decided):
            acts.append(act)
            if isinstance(act, CastVote):
                self.hear(voted(KEYS[self.seat], act.ballot, act.manifest, act.view))
            elif isinstance(act, Propose):
                self.hear(
                    proposal(act.view, act.valid.manifest if act.valid else self.draft, act.valid_view, size=self.size)
                )
        return acts if act is None else [*acts, act]

    def begin(self, now: float = 0.0) -> list[Act]:
        self.agreement.start(now)
        return self.go_on(now)

    @property
    def at(self) -> At:
        agreement = self.agreement
        valid = agreement.valid.message if agreement.valid else None
        return At(
            agreement.view,
            agreement.stage,
            agreement.timer,
            agreement.view_timer,
            agreement.locked,
            agreement.locked_view,
            valid.manifest if isinstance(valid, Proposal) else None,
            agreement.valid_view,
            agreement.decided,
        )


def locked_on_a() -> SeatedMember:
    """A member that precommitted A in view 0."""
    member = SeatedMember()
    member.begin()
    member.hear(proposal(0, A))
    member.hear_votes(PREVOTE, A, 0, 2)
    assert member.go_on(0.0) == [CastVote(0, PREVOTE, A), CastVote(0, PRECOMMIT, A)]
    return member


def locked_on_a_in_view(view: int) -> SeatedMember:
    """The same member after the others precommitted nil in view 0 and in all views up to this one."""
    member = locked_on_a()
    for number in range(view):
        member.hear_votes(PREVOTE, NOTHING, 0, 2, 3, view=number)
        member.hear_votes(PRECOMMIT, NOTHING, 0, 2, 3, view=number)
        member.go_on(0.0)
    assert member.agreement.view == view
    return member


def late_of_seven() -> SeatedMember:
    """One of seven members that precommitted nil at the timeout, and then learns of a quorum of prevotes for A."""
    member = SeatedMember(size=7)
    member.begin()
    member.hear(proposal(0, A, size=7))
    member.hear_votes(PREVOTE, A, 0, 2)
    member.hear_votes(PREVOTE, NOTHING, 3, 4)
    assert member.go_on(0.0) == [CastVote(0, PREVOTE, A)]
    assert member.go_on(2.0) == [CastVote(0, PRECOMMIT, NOTHING)]
    member.hear_votes(PREVOTE, A, 5, 6)
    return member
