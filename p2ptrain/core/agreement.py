"""How the members decide on one manifest a round: Tendermint (Buchman, Kwon, Milosevic 2018, arXiv 1807.04938).

One height a round, and "view" for the paper's round. In view v its proposer proposes; each member prevotes the
manifest or nothing, and precommits what a quorum prevoted. A quorum of precommits in one view decides. Who precommits
a manifest is locked on it, and prevotes another only if a quorum prevoted that one in a later view than the lock's; two
quorums share an honest member, so no two manifests are ever decided, under any timing.

Two liberties, neither of which adds a vote that the paper would forbid. Who lacks a payload when a quorum has prevoted
already prevotes nothing at once, rather than at the timeout, and so gets to precommit. And a quorum that precommits
nothing ends the view at once, because nothing can be decided in it any more.

This class only counts and says what to do next; signing, sending and what a proposal means are the node's. It keeps
no message that is outside the views it may still need.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, IntEnum
from random import Random
from typing import TypeAlias

from msgspec import Struct

from p2ptrain.core.messages import NOTHING, Ballot, Proposal, Received, Vote, read
from p2ptrain.core.roster import Roster

VIEWS_AHEAD = 4  # whose messages are kept before we are there; f + 1 members beyond make us follow them
VIEWS_BEHIND = 64  # an hour of views at their longest: a proposal may refer to what was prevoted then


class Judgement(IntEnum):
    """What we can say of a proposal so far."""

    BAD = 0  # its availabilities do not lead to its manifest
    UNKNOWN = 1  # something is missing to work that out
    KNOWN = 2  # it is right, but a payload is missing
    HELD = 3  # and every payload is here and good


class Heard(Enum):
    """What a message told us."""

    NEW = "new"
    USELESS = "useless"  # known, or of a view that does not matter
    CONFLICT = "conflict"  # the author has signed another for the same place


class Stage(IntEnum):
    WAITING = 0  # for the availabilities
    PROPOSE = 1
    PREVOTE = 2
    PRECOMMIT = 3


class Say(Struct, frozen=True):
    """Vote so, as a member."""

    view: int
    ballot: Ballot
    manifest: bytes


class Propose(Struct, frozen=True):
    """It is our turn. `valid`: propose this again, backed by the prevotes of `valid_view`."""

    view: int
    valid_view: int
    valid: Proposal | None


class Entered(Struct, frozen=True):
    """A later view has begun: send again what is still true."""

    view: int


class Decided(Struct, frozen=True):
    view: int
    manifest: bytes


Act: TypeAlias = Say | Propose | Entered | Decided


class View:
    """The messages of one view."""

    __slots__ = ("has_quorum", "others", "precommits", "prevotes", "proposal", "tallies")

    def __init__(self) -> None:
        self.proposal: Received | None = None
        self.prevotes: dict[bytes, Received] = {}
        self.precommits: dict[bytes, Received] = {}
        self.others: dict[tuple[Ballot, bytes, bytes], Received] = {}  # of members that have voted otherwise, too
        self.tallies: dict[Ballot, dict[bytes, int]] = {Ballot.PREVOTE: {}, Ballot.PRECOMMIT: {}}
        self.has_quorum = False  # of prevotes for the proposal, seen for the first time

    def votes(self, ballot: Ballot) -> dict[bytes, Received]:
        return self.prevotes if ballot is Ballot.PREVOTE else self.precommits


class Agreement:
    """One round's votes, as one node sees them."""

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
        self.timer: float | None = None  # of the stage
        self.view_timer: float | None = None  # of the view, from a quorum of precommits on
        self.views: dict[int, View] = {0: View()}
        self.ahead: dict[bytes, int] = {}  # the highest view beyond ours in which a member said something
        self.said: dict[tuple[int, Ballot], bytes] = {}
        self.proposed = -1  # the last view in which we proposed
        self.is_due = False  # something crossed a threshold since the last `advance`

    def release(self) -> None:
        """The round is over: let go of it, so that its messages do not wait for the garbage collector."""
        self.judge, self.may_propose = lambda _: Judgement.UNKNOWN, lambda: False

    # -----------------------------------------------------------------------------------------------
    # What is heard

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
        votes = view.prevotes if ballot is Ballot.PREVOTE else view.precommits
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
        """Count a vote, also the second one of a liar: the quorum behind a proposal, which we have not seen alone,
        may rest on it, and two quorums share an honest member all the same."""
        ballot, quorum = vote.ballot, self.roster.quorum
        tally = view.tallies[ballot]
        count = tally[vote.manifest] = tally.get(vote.manifest, 0) + 1
        if count == quorum or len(votes) == quorum:
            self.is_due = True
            if ballot is Ballot.PRECOMMIT and vote.manifest != NOTHING and count == quorum and self.decided is None:
                self.decided = Decided(vote.view, vote.manifest)

    def some_prevote(self, number: int, but: bytes, rng: Random) -> Received | None:
        """A member's prevote, drawn for showing it to a peer: if that one has heard another, there is proof of a lie.

        Who votes one way before one half, and another way before the other, would else be found out by accident only,
        as nobody asks for what it holds.
        """
        prevotes = self.views[number].prevotes
        others = [key for key in self.roster.members if key in prevotes and key not in (but, self.me)]
        return prevotes[rng.choice(others)] if others else None

    def _is_proposed(self, manifest: bytes) -> bool:
        """Whether a proposal that is here names this manifest; there is one a view at most."""
        return any(
            view.proposal is not None and read(view.proposal, Proposal).manifest == manifest
            for view in self.views.values()
        )

    def earlier(self, received: Received) -> Received:
        """What a message is in conflict with."""
        match received.message:
            case Proposal(view=number):
                found = self.views[number].proposal
            case Vote(view=number, ballot=ballot, author=author):
                found = self.views[number].votes(ballot).get(author)
            case _:
                found = None
        assert found is not None, "only proposals and votes conflict, with something that is here"
        return found

    def _at(self, number: int) -> View | None:
        """The messages of a view, if it is one that may still matter."""
        view = self.views.get(number)
        if view is None and self.view - VIEWS_BEHIND <= number <= self.view + VIEWS_AHEAD:
            view = self.views[number] = View()
        return view

    def _note_view(self, author: bytes, number: int) -> None:
        if number > self.ahead.get(author, self.view):
            self.ahead[author] = number
            self.is_due = True

    # -----------------------------------------------------------------------------------------------
    # What follows

    def start(self, now: float) -> None:
        """A quorum of availabilities is here, or somebody says so: the view's time runs."""
        if self.stage is Stage.WAITING:
            self.stage, self.timer = Stage.PROPOSE, now + self.seconds(self.view)
            self.is_due = True

    def seconds(self, view: int) -> float:
        return min(self.shortest * 2.0 ** min(view, 32), self.longest)

    @property
    def deadline(self) -> float | None:
        if self.decided is not None:
            return None
        if self.timer is None or self.view_timer is None:
            return self.view_timer if self.timer is None else self.timer
        return min(self.timer, self.view_timer)

    def advance(self, now: float) -> Act | None:
        """The next thing to do; the caller does it, tells us of its own message, and asks again."""
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
        """The highest view that f + 1 members have reached: one of them is honest."""
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
        """What to prevote; None: wait."""
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
            return self.advance(now)  # we only watch
        assert place not in self.said, "nothing is said twice"
        self.said[place] = manifest
        return Say(self.view, ballot, manifest)

    def _enter(self, number: int, now: float) -> Act:
        self.view, self.stage = number, Stage.PROPOSE
        self.timer, self.view_timer = now + self.seconds(number), None
        self.is_due = True
        kept = {self.valid_view, self.locked_view}
        self.views = {at: view for at, view in self.views.items() if at >= number - VIEWS_BEHIND or at in kept}
        self.views.setdefault(number, View())
        self.ahead = {author: at for author, at in self.ahead.items() if at > number}
        return Entered(number)

    # -----------------------------------------------------------------------------------------------
    # What others ask

    def pass_by(self, number: int) -> list[Say]:
        """Votes for nothing in a view that we have left without votes, because a member is in it still.

        It gets on with a quorum there. What others had said may be lost with them, and those that are left are just
        enough: if some have passed the view by, nobody leaves it any more. Nothing is said twice, and nothing is
        decided by it.
        """
        if not self.votes_here or not self.view - VIEWS_BEHIND <= number < self.view:
            return []
        missing = [ballot for ballot in Ballot if (number, ballot) not in self.said]
        self.said |= {(number, ballot): NOTHING for ballot in missing}
        return [Say(number, ballot, NOTHING) for ballot in missing]

    def count(self, number: int, ballot: Ballot, manifest: bytes) -> int:
        view = self.views.get(number)
        return view.tallies[ballot].get(manifest, 0) if view else 0

    def voted(self, number: int, ballot: Ballot, manifest: bytes) -> list[Received]:
        """The votes for a manifest, in the order of seats."""
        view = self.views.get(number)
        if view is None:
            return []
        votes = [(key, vote) for key, vote in view.votes(ballot).items() if read(vote, Vote).manifest == manifest]
        votes += [
            (key, vote) for (kind, key, wanted), vote in view.others.items() if (kind, wanted) == (ballot, manifest)
        ]
        return [vote for _, vote in sorted(votes, key=lambda pair: pair[0])]

    def restore(self, said: list[Received], backing: list[Received], now: float) -> None:
        """After a restart: what we said holds, and so does our lock."""
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
        """Sizes and their bounds. A view holds one proposal and two votes of each member."""
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
