"""The inbox: routes a verified message to the part that it concerns.

Messages of the current branch and round go to the round. A few per author of the next round are held until it begins.
A later round or another branch means that we have to catch up. A useless message costs its sender a token, and a sender
without tokens is shunned: disconnected, and neither asked nor answered. Messages that count are never dropped for that:
the protocol already bounds how many a member can send in a round."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from p2ptrain.core import messages as msg
from p2ptrain.core.admission import Asking
from p2ptrain.core.catchup import CatchingUp
from p2ptrain.core.chain import Chain
from p2ptrain.core.context import Context
from p2ptrain.core.events import Disconnect, MessageReceived
from p2ptrain.core.manifest import joins_max
from p2ptrain.core.pools import Pools
from p2ptrain.core.regroup import Regrouping
from p2ptrain.core.repair import Repair
from p2ptrain.core.reputation import Reason, prove
from p2ptrain.core.round import Round
from p2ptrain.core.succession import is_over
from p2ptrain.core.tally import Refusal
from p2ptrain.errors import RemoteProtocolError

EARLY_OF_AUTHOR_MAX = 6  # messages for the next round: an availability, a proposal, two votes, and conflicting ones
LATE_SECONDS = 0.25  # after a round began: messages of the last one may be in flight, and their author is not behind


class Inbox:
    def __init__(
        self,
        context: Context,
        pools: Pools,
        chain: Chain,
        catching_up: CatchingUp,
        repair: Repair,
        here: Round,
        regrouping: Regrouping,
    ) -> None:
        self.context, self.pools, self.chain = context, pools, chain
        self.catching_up, self.repair = catching_up, repair
        self.here, self.regrouping = here, regrouping
        self.early: dict[bytes, list[MessageReceived]] = {}
        self.accused: set[bytes] = set()
        self._kinds: dict[type, Callable[[MessageReceived], None]] = {
            **dict.fromkeys((msg.Availability, msg.Proposal, msg.Vote), self._of_round),
            msg.Announcement: self._announcement,
            msg.Hello: self._hello,
            **dict.fromkeys(get_args(Asking), self._request),
            **dict.fromkeys((msg.Call, msg.Regroup), self._of_regroup),
            msg.Certificate: lambda event: self._useless(event.sender),  # never gossiped: they come with history
        }

    def take(self, event: MessageReceived) -> None:
        """Routes a message to its handler. Who has left follows no further; after the end only laggards matter."""
        message, state = event.received.message, self.chain.state
        if self.context.is_out(state) or (is_over(state) and not isinstance(message, msg.Hello)):
            return
        self._kinds[type(message)](event)

    def enter(self, here: Round, regrouping: Regrouping) -> None:
        self.here, self.regrouping = here, regrouping

    def take_early(self) -> None:
        """Takes in the messages that were held for the round that begins, and fetches what it is first to look at."""
        early, self.early = self.early, {}
        self.accused &= self.chain.state.place.keys()
        for events in early.values():
            for event in events:
                self.take(event)
        payloads = self.pools.payloads
        for offer in self.pools.offers.by_name.values():
            said = offer.announcement
            if payloads.checked(said) is None and self.here.looks_at(said.author, said.round):
                payloads.want(said.payload, said.payload_bytes, said.author)

    # -- Availabilities, proposals, votes -----------------------------------------------------------

    def _of_round(self, event: MessageReceived) -> None:
        message = event.received.message
        assert isinstance(message, msg.Vote | msg.Availability | msg.Proposal), "messages are dispatched by kind"
        here, author = self.here, message.author
        if message.round != here.number or message.branch != here.branch:
            self._elsewhere(event, message)
        elif author not in here.roster.seat:
            self._useless(event.sender)
        elif type(message) is msg.Vote:
            self._vote(event.sender, event.received, message)
        elif type(message) is msg.Availability:
            if event.received.digest not in here.availabilities:
                self.context.heard_at[author] = self.context.now
            if not here.hear_availability(event.received):
                self._useless(event.sender)
        else:
            self._heard(here.hear_proposal(event.received), author, event.sender, event.received)

    def _vote(self, sender: bytes, received: msg.Received, vote: msg.Vote) -> None:
        here = self.here
        heard = here.agreement.hear_vote(received)
        self._heard(heard, vote.author, sender, received)
        if heard is msg.Heard.NEW and not here.agreement.is_due and vote.manifest not in here.manifests:
            self._chase(vote)

    def _heard(self, heard: msg.Heard, author: bytes, sender: bytes, received: msg.Received) -> None:
        """Acts on the outcome of a proposal or vote.

        A new one shows that its author is alive, a conflicting one becomes evidence, and any other is useless."""
        if heard is msg.Heard.NEW:
            self.context.heard_at[author] = self.context.now
        elif heard is not msg.Heard.CONFLICT or not self._accuse(self.here.agreement.earlier(received), received):
            self._useless(sender)

    def _chase(self, vote: msg.Vote) -> None:
        """Asks a voter for a proposal that we have not seen, once enough members have voted for it."""
        here = self.here
        view = here.agreement.views.get(vote.view)
        is_unknown = view is not None and view.proposal is None and vote.view == here.agreement.view
        count = here.agreement.count(vote.view, vote.ballot, vote.manifest)
        if is_unknown and any(vote.manifest) and count == here.roster.attesting:
            self.repair.greet(here, vote.author)

    def _elsewhere(self, event: MessageReceived, message: msg.Availability | msg.Proposal | msg.Vote) -> None:
        branch, number, author = message.branch, message.round, message.author
        if author not in self.chain.state.place:
            self._useless(event.sender)
        elif branch != self.here.branch:
            self._on_another_branch(author, branch, number)
        elif number < self.here.number:
            is_late = number == self.here.number - 1 and self.context.now < self.here.began + LATE_SECONDS
            if not is_late:
                self._behind(author)
        else:
            if number == self.here.number + 1:
                self._keep_early(event, author)
            self._ahead(author, branch, number)

    def _keep_early(self, event: MessageReceived, author: bytes) -> None:
        seat = self.here.roster.seat
        others = sum(each not in seat and each != author for each in self.early)
        if author not in seat and others >= joins_max(len(seat)):
            return  # no more get a seat in the round before, and the rest would only fill the memory
        early = self.early.setdefault(author, [])
        is_new = all(each.received.digest != event.received.digest for each in early)
        if is_new and len(early) < EARLY_OF_AUTHOR_MAX:
            early.append(event)
            self.context.heard_at[author] = self.context.now

    def _on_another_branch(self, author: bytes, branch: bytes, number: int) -> None:
        """Handles a peer on another branch: one that lost to ours, one that we went on from, or one to check."""
        end = self.chain.end_of(branch)
        if self.catching_up.has_lost(branch) or (end is not None and number <= end + 1):
            self._behind(author)
        else:
            self._ahead(author, branch, number)

    def _ahead(self, author: bytes, branch: bytes, number: int) -> None:
        catching_up = self.catching_up
        if catching_up.ahead.get(author) != (branch, number):
            catching_up.notice(author, branch, number)

    def _behind(self, peer: bytes) -> None:
        """Tells a lagging peer where we are, so that it can ask for history."""
        if peer in self.context.peers and self.repair.may_answer(peer):
            self.repair.greet(self.here, peer)

    # -- Announcements ------------------------------------------------------------------------------

    def _announcement(self, event: MessageReceived) -> None:
        is_needed = self.here.questions.needs(event.received.name)
        self.announcement(event.sender, event.received, is_needed, event.payload_good)

    def announcement(
        self, sender: bytes, received: msg.Received, is_needed: bool, payload_good: bool | None = None
    ) -> None:
        """Takes in an announcement, if its contribution may be taken now or soon."""
        message = msg.read(received, msg.Announcement)
        author, state = message.author, self.here.state
        overlap = self.context.run.agreement.overlap_rounds_max
        if author not in state.place:
            self._useless(sender)
            return
        if message.branch != state.branch:
            self._on_another_branch(author, message.branch, message.round - overlap)
            return
        self.pools.claims.hear(message)
        if message.round > state.round + 1:
            if message.round > state.round + 1 + overlap:
                self._ahead(author, message.branch, message.round - overlap)
            if message.round > state.round + 2 + overlap:
                return
        elif not state.may_take(message, self.pools.offers.staleness):
            if (author, message.round) not in state.taken:
                arrivals = self.pools.arrivals
                if message.round > arrivals.noted.get(author, 0):  # not just a repetition by a peer
                    self.pools.tallies.of(author).late += 1
                    arrivals.note(author, message.round, self.context.now, message.steps)
                    self.here.heard_late(author)
            return
        self._offer(sender, received, is_needed, payload_good)

    def _offer(self, sender: bytes, received: msg.Received, is_needed: bool, payload_good: bool | None) -> None:
        message = msg.read(received, msg.Announcement)
        payloads = self.pools.payloads
        verdict = self.pools.offers.add(received, is_needed)
        if sender != self.context.me:  # our own were counted before the restart
            self._tally(message.author, verdict)
        if verdict in (msg.Heard.USELESS, msg.Heard.FULL):
            if not self.here.questions.give_up(received.name):
                self._useless(sender)
            return
        if message.author in self.here.roster.seat:
            self.context.heard_at[message.author] = self.context.now
        if verdict is msg.Heard.CONFLICT:
            self._accuse(self.pools.offers.conflicting(received), received)
        is_ripe = message.round <= self.here.number
        if is_ripe and verdict is msg.Heard.NEW:
            self.here.offer_announced(message.author)
        if not self.here.looks_at(message.author, message.round):
            return  # fetched only if enough others attest it
        if payload_good is not None and payloads.came_along(message, payload_good):
            self.payload_came(message.payload, received.name)
        known = payloads.checked(message)
        if known is None:
            payloads.want(message.payload, message.payload_bytes, message.author)
        else:
            self.payload_checked(message, known, is_ripe)

    def _tally(self, author: bytes, verdict: msg.Heard) -> None:
        tallies = self.pools.tallies
        if verdict in (msg.Heard.NEW, msg.Heard.CONFLICT):
            tallies.of(author).offered += 1
        if verdict is msg.Heard.CONFLICT:
            tallies.refuse(author, Refusal.TWO_FOR_ONE_ROUND)
        elif verdict is msg.Heard.FULL:
            tallies.refuse(author, Refusal.TOO_MANY)

    def payload_came(self, payload: bytes, but: bytes = b"") -> None:
        """Checks all announcements of a payload that has arrived, except the one named `but`."""
        for offer in list(self.pools.offers.by_payload.get(payload, ())):
            if offer.name != but:
                self.payload_checked(offer.announcement, self.pools.offers.is_good(offer.announcement))

    def payload_checked(self, message: msg.Announcement, good: bool, is_ripe: bool = False) -> None:
        """Handles an announcement whose payload was found good or bad. `is_ripe`: this round may take it."""
        context = self.context
        if not good:
            context.counters["bad payloads"] += 1
            self.pools.tallies.refuse(message.author, Refusal.BAD_PAYLOAD)
            context.reputation.note(message.author, Reason.MALFORMED, context.now)
            return
        self.pools.arrivals.note(message.author, message.round, context.now, message.steps)
        if is_ripe or self.chain.state.may_take(message, self.pools.offers.staleness):
            self.here.offer_held(message.author)

    # -- Other kinds --------------------------------------------------------------------------------

    def _hello(self, event: MessageReceived) -> None:
        hello = msg.read(event.received, msg.Hello)
        author, here = hello.author, self.here
        if event.sender != author or author == self.context.me:
            self._useless(event.sender)
            return
        if author in here.roster.seat:
            if hello.branch == here.branch and hello.round >= here.number - 1 and not hello.is_silent:
                self.context.heard_at[author] = self.context.now
        elif author not in self.context.peers and author not in self.chain.state.place:
            self._useless(event.sender)
            return
        if (hello.branch, hello.round) != (here.branch, here.number):
            self._standing_elsewhere(hello)
        elif self.repair.may_answer(author) and not self.context.reputation.is_greylisted(author, self.context.now):
            if hello.view > here.agreement.view:
                self.repair.greet(here, author)
            else:
                if author in here.roster.seat:
                    here.help_in(hello.view)
                self.repair.hand_over(here, hello)
        # An earlier roster knows nothing: a founder began alone, and who has joined was in none.
        me, place = self.context.me, here.state.place
        witnesses = place if here.roster.members == (me,) else here.roster.seat
        if author in witnesses and me in place and self.catching_up.is_near:
            self.context.voice.recall(author, hello.round, here.roster, self.chain.kept)

    def _standing_elsewhere(self, hello: msg.Hello) -> None:
        here = self.here
        if hello.branch != here.branch:
            self._on_another_branch(hello.author, hello.branch, hello.round)
        elif hello.round < here.number:
            self._behind(hello.author)
        else:
            self._ahead(hello.author, hello.branch, hello.round)

    def _request(self, event: MessageReceived) -> None:
        name, questions, message = event.received.name, self.here.questions, event.received.message
        asked_for = name in questions.open
        assert isinstance(message, Asking)
        is_second_hand = isinstance(message, msg.JoinRequest) and event.sender != message.author and not asked_for
        if is_second_hand or (not isinstance(message, msg.Evidence) and message.branch != self.here.branch):
            self._useless(event.sender)  # each newcomer needs a connection of its own, or a member that vouches for it
            return
        try:
            is_new = self.pools.requests.add(event.received, self.chain.state, questions.needs(name))
        except RemoteProtocolError:
            is_new = False
        if is_new and asked_for:
            self.here.advance()
        elif not is_new and not questions.give_up(name):
            self._useless(event.sender)

    def _of_regroup(self, event: MessageReceived) -> None:
        message = event.received.message
        assert isinstance(message, msg.Call | msg.Regroup)
        state = self.chain.state
        if message.author not in state.place:
            self._useless(event.sender)
        elif (message.branch, message.parent) == (state.branch, state.head):
            hear = self.regrouping.hear_call if isinstance(message, msg.Call) else self.regrouping.hear_regroup
            if hear(event.received):
                self.context.heard_at[message.author] = self.context.now
            else:
                self._useless(event.sender)
        elif message.branch != state.branch and self.chain.end_of(message.branch) is None:
            self._on_another_branch(message.author, message.branch, 0)
        elif message.branch == state.branch and all(each.state.head != message.parent for each in self.chain.steps):
            self._ahead(message.author, state.branch, state.round + 2)  # it names a certificate that we have not seen
        else:
            self._behind(message.author)

    def _accuse(self, first: msg.Received, second: msg.Received) -> bool:
        """Publishes evidence that an author signed two conflicting messages; returns False if that is not news."""
        context = self.context
        assert isinstance(second.message, msg.Announcement | msg.Proposal | msg.Vote)
        guilty = second.message.author
        if guilty in self.accused or guilty not in self.chain.state.place or guilty == context.me:
            return False
        context.counters["lies proved"] += 1
        evidence = prove(first.envelope, second.envelope)
        received = msg.Received(evidence, msg.message_digest(evidence), msg.encode(evidence), b"")
        if self.pools.requests.add(received, self.chain.state):  # otherwise the next lie is proved
            self.accused.add(guilty)
        context.publish(received)
        return True

    def _useless(self, sender: bytes) -> None:
        """Counts a useless message against its sender."""
        context = self.context
        context.counters["useless messages"] += 1
        if sender != context.me and not context.reputation.allow(sender, context.now):
            self.shun(sender)

    def shun(self, sender: bytes) -> None:
        """Disconnects a peer that is greylisted, and one that only keeps its connection open as well."""
        context = self.context
        if context.reputation.is_to_go(sender, context.now, sender in context.peers):
            context.counters["disconnected"] += 1
            context.peers.pop(sender, None)
            context.emit(Disconnect(sender, "its messages are useless"))

    def limits(self) -> dict[str, tuple[int, int]]:
        admitted = len(self.chain.state.admitted)
        return {
            "early messages of an author": (max(map(len, self.early.values()), default=0), EARLY_OF_AUTHOR_MAX),
            "authors of early messages": (len(self.early), admitted),
            "accused": (len(self.accused), admitted),
        }
