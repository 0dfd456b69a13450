"""Agreement on one manifest per round: Tendermint (Buchman, Kwon, Milosevic 2018, arXiv 1807.04938).

Each round is one of the paper's heights, and a "view" is the paper's round. In each view one proposer proposes; every
member prevotes the manifest or nil, and precommits what a quorum prevoted. A quorum of precommits in one view decides.
A member that precommits a manifest is locked on it, and prevotes another only if a quorum prevoted that one in a view
after the lock. Any two quorums share an honest member, so two manifests are never decided, under any timing.

There are two deviations, neither of which adds a vote that the paper forbids. A member that lacks a payload when a
quorum has already prevoted prevotes nil at once rather than at the timeout, so that it can precommit. And a quorum of
nil precommits ends the view at once, because nothing can be decided in it any more.

This class only counts votes and says what to do next; the node signs, sends and interprets proposals. Messages outside
the views that may still matter are not kept."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from random import Random
from typing import TypeAlias

from msgspec import Struct

from p2ptrain.core.messages import NOTHING, Ballot, Heard, Proposal, Received, Vote, read
from p2ptrain.core.roster import Roster

VIEWS_AHEAD = 4  # views ahead of ours whose messages are kept; f + 1 members further ahead make us skip to them
VIEWS_BEHIND = 64  # an hour of the longest views: a proposal may refer to prevotes of that time


class Judgement(IntEnum):
    """How far this node could check a proposal."""

    BAD = 0  # its availabilities do not lead to its manifest
    UNKNOWN = 1  # something needed to check it is missing
    KNOWN = 2  # correct, but a payload is missing
    HELD = 3  # correct, and every payload is here and valid


class Stage(IntEnum):
    WAITING = 0  # for the availabilities
    PROPOSE = 1
    PREVOTE = 2
    PRECOMMIT = 3


class CastVote(Struct, frozen=True):
    view: int
    ballot: Ballot
    manifest: bytes


class Propose(Struct, frozen=True):
    """It is our turn to propose: `valid` again if given, backed by the prevotes of `valid_view`."""

    view: int
    valid_view: int
    valid: Proposal | None


class ViewEntered(Struct, frozen=True):
    """A later view has begun: publish again the messages that still hold."""

    view: int


class Decided(Struct, frozen=True):
    view: int
    manifest: bytes


Act: TypeAlias = CastVote | Propose | ViewEntered | Decided


class View:
    __slots__ = ("has_quorum", "others", "precommits", "prevotes", "proposal", "tallies")

    def __init__(self) -> None:
        self.proposal: Received | None = None
        self.prevotes: dict[bytes, Received] = {}
        self.precommits: dict[bytes, Received] = {}
        self.others: dict[tuple[Ballot, bytes, bytes], Received] = {}  # second, conflicting votes
        self.tallies: dict[Ballot, dict[bytes, int]] = {Ballot.PREVOTE: {}, Ballot.PRECOMMIT: {}}
        self.has_quorum = False  # a quorum of prevotes for the proposal was seen

    def votes(self, ballot: Ballot) -> dict[bytes, Received]:
        return self.prevotes if ballot is Ballot.PREVOTE else self.precommits


class Agreement:
    def __init__(
        self,
        roster: Roster,
        order: tuple[bytes, ...],
        me: bytes,
        judge: Callable[[Received], Judgement],
        may_propose: Callable[[], bool],
        view_seconds: tuple[float, float],
    ) -> None:
        self.roster, self.order, self.me = roster, order, me
        self.judge, self.may_propose = judge, may_propose
        self.shortest, self.longest = view_seconds
        self.votes_here = me in roster.seat
        self.view, self.stage = 0, Stage.WAITING
        self.locked_view, self.locked = -1, NOTHING
        self.valid_view = -1
        self.valid: Received | None = None
        self.decided: Decided | None = None
        self.timer: float | None = None  # when the current stage times out
        self.view_timer: float | None = None  # when the view times out, set by a quorum of precommits
        self.views: dict[int, View] = {0: View()}
        self.ahead: dict[bytes, int] = {}  # by member: the highest view beyond ours that it has reached
        self.said: dict[tuple[int, Ballot], bytes] = {}
        self.proposed = -1  # the last view in which we proposed
        self.is_due = False  # something crossed a threshold since the last `advance`

    def release(self) -> None:
        """Breaks the reference cycle with the round, so that its messages are freed without the garbage collector."""
        self.judge, self.may_propose = lambda _: Judgement.UNKNOWN, lambda: False

    # -- Incoming messages --------------------------------------------------------------------------

    def proposer(self, view: int) -> bytes:
        return self.order[view % len(self.order)]

    def hear_proposal(self, received: Received) -> Heard:
        proposal = read(received, Proposal)
        if proposal.author != self.proposer(proposal.view):
            return Heard.USELESS
        self._note_view(proposal.author, proposal.view)
        view = self._at(proposal.view)
        if view is None:
            return Heard.USELESS
        if view.proposal is None:
            view.proposal, self.is_due = received, True
            return Heard.NEW
        return Heard.USELESS if view.proposal.digest == received.digest else Heard.CONFLICT

    def hear_vote(self, received: Received) -> Heard:
        vote = read(received, Vote)
        number, ballot, author = vote.view, vote.ballot, vote.author
        if number > self.view:
            self._note_view(author, number)
        view = self._at(number)
        if view is None:
            return Heard.USELESS
        votes = view.votes(ballot)
        earlier = votes.get(author)
        if earlier is not None:
            if earlier.digest == received.digest or (ballot, author, vote.manifest) in view.others:
                return Heard.USELESS
            if self._is_proposed(vote.manifest):
                view.others[ballot, author, vote.manifest] = received
                self._count(view, votes, vote)
            return Heard.CONFLICT
        votes[author] = received
        self._count(view, votes, vote)
        return Heard.NEW

    def _count(self, view: View, votes: dict[bytes, Received], vote: Vote) -> None:
        """Counts a vote, even a liar's second one: the quorum behind a proposal that we have not seen may include it,
        and two quorums share an honest member anyway."""
        ballot, quorum = vote.ballot, self.roster.quorum
        tally = view.tallies[ballot]
        count = tally[vote.manifest] = tally.get(vote.manifest, 0) + 1
        if count == quorum or len(votes) == quorum:
            self.is_due = True
            if ballot is Ballot.PRECOMMIT and vote.manifest != NOTHING and count == quorum and self.decided is None:
                self.decided = Decided(vote.view, vote.manifest)

    def some_prevote(self, number: int, but: bytes, rng: Random) -> Received | None:
        """Draws a member's prevote to show to a peer, which can prove a lie if it has received a conflicting one.

        Otherwise a member that votes differently towards each half would be caught only by accident, because nobody
        asks for a vote that it already has."""
        prevotes = self.views[number].prevotes
        others = [key for key in self.roster.members if key in prevotes and key not in (but, self.me)]
        return prevotes[rng.choice(others)] if others else None

    def _is_proposed(self, manifest: bytes) -> bool:
        """Whether we have a proposal for this manifest; each view has at most one."""
        return any(
            view.proposal is not None and read(view.proposal, Proposal).manifest == manifest
            for view in self.views.values()
        )

    def earlier(self, received: Received) -> Received:
        match received.message:
            case Proposal(view=number):
                found = self.views[number].proposal
            case Vote(view=number, ballot=ballot, author=author):
                found = self.views[number].votes(ballot).get(author)
            case _:
                found = None
        assert found is not None, "only proposals and votes conflict, and the first one is kept"
        return found

    def _at(self, number: int) -> View | None:
        """Returns the messages of a view, or None if the view no longer matters or is too far ahead."""
        view = self.views.get(number)
        if view is None and self.view - VIEWS_BEHIND <= number <= self.view + VIEWS_AHEAD:
            view = self.views[number] = View()
        return view

    def _note_view(self, author: bytes, number: int) -> None:
        if number > self.ahead.get(author, self.view):
            self.ahead[author] = number
            self.is_due = True

    # -- Next steps ---------------------------------------------------------------------------------

    def start(self, now: float) -> None:
        """Starts the view's timer: a quorum of availabilities is here, or a proposal implies it."""
        if self.stage is Stage.WAITING:
            self.stage, self.timer = Stage.PROPOSE, now + self.seconds(self.view)
            self.is_due = True

    def seconds(self, view: int) -> float:
        return min(self.shortest * 2.0 ** min(view, 32), self.longest)

    @property
    def deadline(self) -> float | None:
        times = (self.timer, self.view_timer) if self.decided is None else ()
        return min((time for time in times if time is not None), default=None)

    def advance(self, now: float) -> Act | None:
        """Returns the next action; the caller performs it, feeds its own message back, and calls again."""
        self.is_due = False
        if self.decided is not None:
            return self.decided
        target = self._followed()
        if target > self.view:
            return self._enter(target, now)
        if self.stage is Stage.WAITING:
            return None
        view = self.views[self.view]
        proposal = view.proposal
        judgement = Judgement.UNKNOWN if proposal is None else self.judge(proposal)
        if self.stage is Stage.PROPOSE:
            act = self._propose_or_prevote(view, judgement, now)
            if act is not None:
                return act
        if self.stage >= Stage.PREVOTE:
            act = self._precommit(view, judgement, now)
            if act is not None:
                return act
        return self._end_of_view(view, now)

    def _followed(self) -> int:
        """Returns the highest view that f + 1 members have reached: at least one of them is honest."""
        beyond = sorted((number for number in self.ahead.values() if number > self.view), reverse=True)
        return beyond[self.roster.tolerated] if len(beyond) > self.roster.tolerated else self.view

    def _propose_or_prevote(self, view: View, judgement: Judgement, now: float) -> Act | None:
        if view.proposal is not None:
            proposal = read(view.proposal, Proposal)
            choice = self._prevote_for(view, proposal, judgement)
            if choice is not None:
                return self._say(Ballot.PREVOTE, choice, now)
        elif self.proposer(self.view) == self.me and self.proposed < self.view and self.may_propose():
            self.proposed = self.view
            valid = read(self.valid, Proposal) if self.valid else None
            return Propose(self.view, self.valid_view, valid)
        if self.timer is not None and now >= self.timer:
            return self._say(Ballot.PREVOTE, NOTHING, now)
        return None

    def _prevote_for(self, view: View, proposal: Proposal, judgement: Judgement) -> bytes | None:
        """Returns the manifest to prevote, or None to wait."""
        manifest, backing = proposal.manifest, proposal.valid_view
        if judgement is Judgement.BAD:
            return NOTHING
        if backing < 0:
            may = self.locked in (NOTHING, manifest)
        elif self.count(backing, Ballot.PREVOTE, manifest) >= self.roster.quorum:
            may = self.locked_view <= backing or self.locked == manifest
        else:
            return None
        if not may:
            return NOTHING
        if judgement is Judgement.HELD:
            return manifest
        has_quorum = view.tallies[Ballot.PREVOTE].get(manifest, 0) >= self.roster.quorum
        return NOTHING if judgement is Judgement.KNOWN and has_quorum else None

    def _precommit(self, view: View, judgement: Judgement, now: float) -> Act | None:
        tally = view.tallies[Ballot.PREVOTE]
        if view.proposal is not None and judgement >= Judgement.KNOWN and not view.has_quorum:
            proposal = read(view.proposal, Proposal)
            if tally.get(proposal.manifest, 0) >= self.roster.quorum:
                view.has_quorum = True
                self.valid, self.valid_view = view.proposal, self.view
                if self.stage is Stage.PREVOTE:
                    self.locked, self.locked_view = proposal.manifest, self.view
                    return self._say(Ballot.PRECOMMIT, proposal.manifest, now)
        if self.stage is not Stage.PREVOTE:
            return None
        if tally.get(NOTHING, 0) >= self.roster.quorum:
            return self._say(Ballot.PRECOMMIT, NOTHING, now)
        if len(view.prevotes) >= self.roster.quorum:
            if self.timer is None:
                self.timer = now + self.seconds(self.view)
            elif now >= self.timer:
                return self._say(Ballot.PRECOMMIT, NOTHING, now)
        return None

    def _end_of_view(self, view: View, now: float) -> Act | None:
        if view.tallies[Ballot.PRECOMMIT].get(NOTHING, 0) >= self.roster.quorum:
            return self._enter(self.view + 1, now)
        if len(view.precommits) >= self.roster.quorum:
            if self.view_timer is None:
                self.view_timer = now + self.seconds(self.view)
            elif now >= self.view_timer:
                return self._enter(self.view + 1, now)
        return None

    def _say(self, ballot: Ballot, manifest: bytes, now: float) -> Act | None:
        self.stage = Stage.PREVOTE if ballot is Ballot.PREVOTE else Stage.PRECOMMIT
        self.timer = None
        self.is_due = True
        place = (self.view, ballot)
        if not self.votes_here:
            return self.advance(now)  # not a member: only watch
        assert place not in self.said, "a member votes once per view and ballot"
        self.said[place] = manifest
        return CastVote(self.view, ballot, manifest)

    def _enter(self, number: int, now: float) -> Act:
        self.view, self.stage = number, Stage.PROPOSE
        self.timer, self.view_timer = now + self.seconds(number), None
        self.is_due = True
        kept = {self.valid_view, self.locked_view}
        self.views = {at: view for at, view in self.views.items() if at >= number - VIEWS_BEHIND or at in kept}
        self.views.setdefault(number, View())
        self.ahead = {author: at for author, at in self.ahead.items() if at > number}
        return ViewEntered(number)

    # -- Queries ------------------------------------------------------------------------------------

    def pass_by(self, number: int) -> list[CastVote]:
        """Returns nil votes for a view that we skipped, to help a member that is still in it.

        That member needs a quorum there to move on. Others may have crashed and their votes be lost, and if the
        remaining members are just enough for a quorum and some have skipped the view, nobody would ever leave it. We
        never vote twice, and nil votes decide nothing."""
        if not self.votes_here or not self.view - VIEWS_BEHIND <= number < self.view:
            return []
        missing = [ballot for ballot in Ballot if (number, ballot) not in self.said]
        self.said |= {(number, ballot): NOTHING for ballot in missing}
        return [CastVote(number, ballot, NOTHING) for ballot in missing]

    def count(self, number: int, ballot: Ballot, manifest: bytes) -> int:
        view = self.views.get(number)
        return view.tallies[ballot].get(manifest, 0) if view else 0

    def voted(self, number: int, ballot: Ballot, manifest: bytes) -> list[Received]:
        """Returns the votes for a manifest, in the order of seats."""
        view = self.views.get(number)
        if view is None:
            return []
        votes = [(key, vote) for key, vote in view.votes(ballot).items() if read(vote, Vote).manifest == manifest]
        votes += [
            (key, vote) for (kind, key, wanted), vote in view.others.items() if (kind, wanted) == (ballot, manifest)
        ]
        return [vote for _, vote in sorted(votes, key=lambda pair: pair[0])]

    def restore(self, said: list[Received], backing: list[Received], now: float) -> None:
        for received in (*backing, *said):
            match received.message:
                case Proposal(view=number, author=author) if author == self.proposer(number):
                    self.views.setdefault(number, View()).proposal = received
                    if author == self.me:
                        self.proposed = max(self.proposed, number)
                        self._resume(number, Stage.PROPOSE, now)
                case Vote(view=number, ballot=ballot, manifest=manifest, author=author):
                    self.views.setdefault(number, View())
                    self.hear_vote(received)
                    if author == self.me and received in said:
                        self.said[number, ballot] = manifest
                        self._resume(number, Stage.PREVOTE if ballot is Ballot.PREVOTE else Stage.PRECOMMIT, now)
                        if ballot is Ballot.PRECOMMIT and manifest != NOTHING and number > self.locked_view:
                            self.locked, self.locked_view = manifest, number
                case _:
                    pass
        if self.locked_view >= 0:
            self.valid = self.views[self.locked_view].proposal
            self.valid_view = self.locked_view if self.valid else -1

    def _resume(self, number: int, stage: Stage, now: float) -> None:
        if (number, stage) > (self.view, self.stage):
            self.view, self.stage = number, stage
            self.timer = now + self.seconds(number) if stage is Stage.PROPOSE else None
            self.is_due = True

    def limits(self) -> dict[str, tuple[int, int]]:
        """Returns each buffer's size and bound. A view holds one proposal and two votes per member."""
        votes = [len(votes) for view in self.views.values() for votes in (view.prevotes, view.precommits)]
        return {
            "views": (len(self.views), VIEWS_BEHIND + VIEWS_AHEAD + 3),
            "votes of a view": (max(votes), self.roster.size),
            "second votes of a view": (
                max(len(view.others) for view in self.views.values()),
                2 * self.roster.size * (VIEWS_BEHIND + VIEWS_AHEAD + 3),
            ),
            "members ahead": (len(self.ahead), self.roster.size),
        }
