"""The inbox: what a message means here and now.

Messages of our branch and round go to the round; those of the next round wait for it, a few of each author; a later
round or another branch means that we have something to catch up with. What is of no use costs the sender a
token, and a sender that runs out of them is shunned: neither asked nor answered, and disconnected. Nothing that
counts is ever dropped for that: what a member may say in a round is bounded by its places.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2ptrain.core.agreement import Heard
from p2ptrain.core.events import Disconnect, MessageReceived
from p2ptrain.core.messages import (
    Announcement,
    Availability,
    Call,
    Certificate,
    Evidence,
    Hello,
    JoinRequest,
    Leave,
    Proposal,
    Received,
    Regroup,
    Vote,
    encode,
    message_digest,
)
from p2ptrain.core.offers import Verdict
from p2ptrain.core.reputation import Reason, prove
from p2ptrain.errors import RemoteProtocolError

if TYPE_CHECKING:
    from p2ptrain.core.node import Node

OF_A_ROUND = (Availability, Proposal, Vote)
EARLY_OF_AUTHOR_MAX = 6  # messages for the next round: an availability, a proposal, two votes, and what is wrong
LATE_SECONDS = 0.25  # after a round has begun: what is said in the one before was on its way, and nobody is behind


class Inbox:
    """Of one node."""

    def __init__(self, node: Node) -> None:
        self.node, self.context = node, node.context
        self.early: dict[bytes, list[MessageReceived]] = {}
        self.accused: set[bytes] = set()
        self._kinds = {
            Announcement: self._announcement,
            Hello: self._hello,
            JoinRequest: self._request,
            Leave: self._request,
            Evidence: self._request,
            Call: self._of_regroup,
            Regroup: self._of_regroup,
            Certificate: self._certificate,
        }

    def take(self, event: MessageReceived) -> bool:
        """Take in a message; True if it was only counted."""
        message = event.received.message
        if isinstance(message, OF_A_ROUND):
            return self._of_round(event, message)
        return self._kinds[type(message)](event)

    def begin_round(self) -> None:
        """A round begins: what came early is on time."""
        early, self.early = self.early, {}
        self.accused &= self.node.line.state.place.keys()
        for events in early.values():
            for event in events:
                self.take(event)

    # -----------------------------------------------------------------------------------------------
    # Availabilities, proposals, votes

    def _of_round(self, event: MessageReceived, message: Availability | Proposal | Vote) -> bool:
        here = self.node.here
        if message.round != here.number or message.branch != here.branch:
            return self._elsewhere(event, message)
        author = message.author
        if author not in here.roster.seat:
            return self._useless(event.sender)
        if type(message) is Vote:
            return self._vote(event.sender, event.received, message)
        if type(message) is Availability:
            return self._availability(event, author)
        heard = here.hear_proposal(event.received)
        if heard is Heard.NEW:
            self.context.heard_at[author] = self.context.now
        return self._unless_useless(heard, event.sender, event.received)

    def _vote(self, sender: bytes, received: Received, vote: Vote) -> bool:
        here = self.node.here
        agreement = here.agreement
        heard = agreement.hear_vote(received)
        if heard is not Heard.NEW:
            return self._unless_useless(heard, sender, received)
        self.context.heard_at[vote.author] = self.context.now
        if agreement.is_due:
            here.advance()
            return False
        return vote.manifest in here.manifests or self._chase(vote)

    def _availability(self, event: MessageReceived, author: bytes) -> bool:
        here, agreement = self.node.here, self.node.here.agreement
        before = here.closed_at, agreement.stage, agreement.view
        if event.received.digest not in here.availabilities:
            self.context.heard_at[author] = self.context.now
        if not here.hear_availability(event.received):
            return self._useless(event.sender)
        is_quiet = (here.closed_at, agreement.stage, agreement.view) == before and not self.context.effects
        return is_quiet and agreement.decided is None and len(here.available) != here.roster.quorum

    def _unless_useless(self, heard: Heard, sender: bytes, received: Received) -> bool:
        """What is left to do after a proposal or a vote was taken in."""
        if heard is Heard.CONFLICT and self._accuse(self.node.here.agreement.earlier(received), received):
            return False
        return heard is not Heard.NEW and self._useless(sender)

    def _chase(self, vote: Vote) -> bool:
        """Members prevote a proposal that we have not seen: one of them hands it over."""
        here = self.node.here
        view = here.agreement.views.get(vote.view)
        is_unknown = view is not None and view.proposal is None and vote.view == here.agreement.view
        count = here.agreement.count(vote.view, vote.ballot, vote.manifest)
        if is_unknown and any(vote.manifest) and count == here.roster.attesting:
            self.node.repair.greet(here, vote.author)
            return False
        return True

    def _elsewhere(self, event: MessageReceived, message: Availability | Proposal | Vote) -> bool:
        """Of another round, or another branch."""
        node = self.node
        branch, number, author = message.branch, message.round, message.author
        if author not in node.line.state.place:
            return self._useless(event.sender)
        if branch != node.here.branch:
            return self._on_another_branch(author, branch, number)
        if number < node.here.number:
            is_late = number == node.here.number - 1 and self.context.now < node.here.began + LATE_SECONDS
            return is_late or self._behind(author)
        if number == node.here.number + 1:
            early = self.early.setdefault(author, [])
            is_new = all(each.received.digest != event.received.digest for each in early)
            if is_new and len(early) < EARLY_OF_AUTHOR_MAX:
                early.append(event)
                self.context.heard_at[author] = self.context.now
        return self._ahead(author, branch, number)

    def _on_another_branch(self, author: bytes, branch: bytes, number: int) -> bool:
        """A peer is in a round of another branch: one that lost to ours, one we went on from, or one to look at."""
        node = self.node
        end = node.line.end_of(branch)
        if node.catching_up.has_lost(branch) or (end is not None and number <= end + 1):
            return self._behind(author)
        return self._ahead(author, branch, number)

    def _ahead(self, author: bytes, branch: bytes, number: int) -> bool:
        catching_up = self.node.catching_up
        if catching_up.ahead.get(author) == (branch, number):
            return True
        is_quiet = bool(catching_up.ahead) and catching_up.ask_at is not None  # the question is on its way already
        catching_up.notice(author, branch, number)
        return is_quiet

    def _behind(self, peer: bytes) -> bool:
        """Tell a peer that lags where we are; it asks for the rest."""
        if peer in self.context.peers and self.node.repair.may_answer(peer):
            self.node.repair.greet(self.node.here, peer)
            return False
        return True

    # -----------------------------------------------------------------------------------------------
    # Announcements

    def _announcement(self, event: MessageReceived) -> bool:
        asked_for = event.received.name in self.node.here.questions.open
        return self.announcement(event.sender, event.received, asked_for, event.payload_good)

    def announcement(
        self, sender: bytes, received: Received, asked_for: bool = False, payload_good: bool | None = None
    ) -> bool:
        """An announcement, of a contribution that may still be taken or soon will be."""
        node = self.node
        message = received.message
        assert isinstance(message, Announcement)
        author, state = message.author, node.here.state
        overlap = self.context.run.agreement.overlap_rounds
        if author not in state.place:
            return self._useless(sender)
        if message.branch != state.branch:
            return self._on_another_branch(author, message.branch, message.round - overlap)
        if message.round > state.round + 1:
            if message.round > state.round + 1 + overlap:
                self._ahead(author, message.branch, message.round - overlap)
            if message.round > state.round + 2 + overlap:
                return False
        elif not state.may_take(message, node.parts.offers.staleness):
            if (author, message.round) not in state.taken:
                node.parts.arrivals.note(author, message.round, self.context.now)
            return True
        return self._offer(sender, received, asked_for, payload_good)

    def _offer(self, sender: bytes, received: Received, asked_for: bool, payload_good: bool | None) -> bool:
        node, message = self.node, received.message
        assert isinstance(message, Announcement)
        payloads = node.parts.payloads
        verdict = node.parts.offers.add(received, asked_for)
        if verdict in (Verdict.USELESS, Verdict.FULL):
            return self._useless(sender)
        if message.author in node.here.roster.seat:
            self.context.heard_at[message.author] = self.context.now
        if verdict is Verdict.CONFLICT:
            self._accuse(node.parts.offers.conflicting(received), received)
        if payload_good is not None:
            payloads.came_along(message.payload, payload_good)
        known = payloads.held.get(message.payload)
        if known is None:
            payloads.want(message.payload, message.payload_bytes, message.author)
            return False
        was_quiet = node.here.has_any and node.here.closed_at is None and not asked_for
        collect_at = node.here.collect_at
        self.payload_checked(message, known, message.round <= node.here.number)
        is_quiet = node.here.closed_at is None and node.here.collect_at == collect_at and not self.context.effects
        return was_quiet and is_quiet and verdict is Verdict.NEW

    def payload_checked(self, message: Announcement, good: bool, is_ripe: bool = False) -> None:
        """The payload of an announcement is here, and good or bad. `is_ripe`: this round may take it."""
        node, context = self.node, self.context
        if not good:
            context.counters["bad payloads"] += 1
            context.reputation.note(message.author, Reason.MALFORMED, context.now)
            return
        node.parts.arrivals.note(message.author, message.round, context.now)
        if is_ripe or node.line.state.may_take(message, node.parts.offers.staleness):
            node.here.offer_held(message.author)

    # -----------------------------------------------------------------------------------------------
    # The rest

    def _hello(self, event: MessageReceived) -> bool:
        node, hello = self.node, event.received.message
        assert isinstance(hello, Hello)
        author, here = hello.author, node.here
        if event.sender != author or author == self.context.me:
            return self._useless(event.sender)
        if author in here.roster.seat:
            if hello.branch == here.branch and hello.round >= here.number - 1:
                self.context.heard_at[author] = self.context.now
            if node.recalled is not None:
                node.recall(author, hello.round)
        elif author not in self.context.peers and author not in node.line.state.place:
            return self._useless(event.sender)
        if (hello.branch, hello.round) != (here.branch, here.number):
            return self._standing_elsewhere(hello)
        if not node.repair.may_answer(author) or self.context.reputation.is_greylisted(author, self.context.now):
            return True
        if hello.view > here.agreement.view:
            node.repair.greet(here, author)
        else:
            node.repair.hand_over(here, hello)
        return False

    def _standing_elsewhere(self, hello: Hello) -> bool:
        here = self.node.here
        if hello.branch != here.branch:
            return self._on_another_branch(hello.author, hello.branch, hello.round)
        if hello.round < here.number:
            return self._behind(hello.author)
        return self._ahead(hello.author, hello.branch, hello.round)

    def _request(self, event: MessageReceived) -> bool:
        node = self.node
        asked_for = event.received.name in node.here.questions.open
        message = event.received.message
        assert isinstance(message, JoinRequest | Leave | Evidence)
        if not isinstance(message, Evidence) and message.branch != node.here.branch:
            return self._useless(event.sender)
        try:
            is_new = node.parts.requests.add(event.received, node.line.state, asked_for)
        except RemoteProtocolError:
            return self._useless(event.sender)
        if is_new and asked_for:
            node.here.advance()
        return not is_new and self._useless(event.sender)

    def _of_regroup(self, event: MessageReceived) -> bool:
        node, message = self.node, event.received.message
        assert isinstance(message, Call | Regroup)
        state = node.line.state
        if message.author not in state.place:
            return self._useless(event.sender)
        if (message.branch, message.parent) == (state.branch, state.head):
            hear = node.regrouping.hear_call if isinstance(message, Call) else node.regrouping.hear_regroup
            is_new = hear(event.received)
            if is_new:
                self.context.heard_at[message.author] = self.context.now
            return not is_new and self._useless(event.sender)
        if message.branch != state.branch and node.line.end_of(message.branch) is None:
            return self._on_another_branch(message.author, message.branch, 0)
        if any(certified.state.head == message.parent for certified in node.line.steps):
            return self._behind(message.author)
        if message.branch == state.branch:  # since a certificate that we have not seen
            return self._ahead(message.author, state.branch, state.round + 2)
        return self._behind(message.author)

    def _certificate(self, event: MessageReceived) -> bool:
        """Certificates are never gossiped: they come with history."""
        return self._useless(event.sender)

    def _accuse(self, first: Received, second: Received) -> bool:
        """Two messages for one place: keep the proof, and tell everyone; False if there is nothing to tell."""
        node, context = self.node, self.context
        assert isinstance(second.message, Announcement | Proposal | Vote)
        guilty = second.message.author
        if guilty in self.accused or guilty not in node.line.state.place or guilty == context.me:
            return False
        self.accused.add(guilty)
        context.counters["lies proved"] += 1
        evidence = prove(first.envelope, second.envelope)
        received = Received(evidence, message_digest(evidence), encode(evidence), b"")
        node.parts.requests.add(received, node.line.state)
        context.publish(received)
        return True

    def _useless(self, sender: bytes) -> bool:
        """Count a message that was of no use."""
        context = self.context
        context.counters["useless messages"] += 1
        if sender == context.me or context.reputation.allow(sender, context.now):
            return True
        return not self.shun(sender)

    def shun(self, sender: bytes) -> bool:
        """Disconnect a peer whose record is too bad; True if that was done now."""
        context = self.context
        if sender not in context.peers or not context.reputation.is_greylisted(sender, context.now):
            return False
        context.counters["disconnected"] += 1
        context.emit(Disconnect(sender, "its messages are of no use"))
        return True

    def limits(self) -> dict[str, tuple[int, int]]:
        """Sizes and their bounds."""
        admitted = len(self.node.line.state.admitted)
        return {
            "early messages of an author": (max(map(len, self.early.values()), default=0), EARLY_OF_AUTHOR_MAX),
            "authors of early messages": (len(self.early), admitted),
            "accused": (len(self.accused), admitted),
        }
