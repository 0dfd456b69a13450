"""Repair: peers resend messages that were lost.

From time to time, and whenever it waits for votes, a node sends a few peers a `Hello`: its branch, round and view, and
which members' messages it holds. A peer in the same round sends the missing messages on a stream; a peer that is ahead
answers with its own position, so that the node asks for history. Answers are limited per peer, in number and in bytes,
so that nobody can make us send forever."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from p2ptrain.core.context import Context
from p2ptrain.core.messages import Ballot, Hello, Proposal, Received, read
from p2ptrain.core.roster import bitmap, seats_in
from p2ptrain.core.round import Round

PEERS_TOLD = 3  # peers per hello: one of them has what a node lacks, and the swarm's load stays linear
WAITING_SECONDS = 1.0  # between hellos while waiting for messages; a fast round is over by then
HEARTBEAT_SECONDS = 20.0  # without a message of ours, so that we do not look absent during a long training
ANSWER_SECONDS = 0.4  # at most one answer per peer in that time
ANSWERS_MAX = 2_048  # peers whose last answer is remembered
HANDED_MAX = 512  # messages per answer
HANDED_BYTES_MAX = 2**20
QUESTION_BYTES = 1_024  # the cost of any question, because a fruitless lookup is work, too
BURST_BYTES = 2**23  # all availabilities of 256 members with 1,024 contributions, twice
REFILL_BYTES_A_SECOND = 2**20  # a home connection's upload, for one peer; a guess
HISTORIES_BURST = 32.0  # for a peer that catches up: 2,048 rounds at once
HISTORIES_A_SECOND = 4.0  # 256 rounds; nobody applies as many


class Budget(Struct):
    """The amount that we may still send to one peer."""

    at: float  # when it was last refilled
    size: float = BURST_BYTES
    histories: float = HISTORIES_BURST


class Repair:
    def __init__(self, context: Context) -> None:
        self.context = context
        self.next_at: float | None = None  # the next hello while waiting
        self.answered: dict[bytes, float] = {}
        self.budgets: dict[bytes, Budget] = {}  # ordered by last use

    def hello(self, here: Round) -> Received:
        seat = here.roster.seat
        view = here.agreement.views[here.agreement.view]
        offers = here.pools.offers.by_author
        return self.context.signed(
            Hello(
                here.branch,
                here.number,
                here.agreement.view,
                bitmap(seat[key] for key in offers if key in seat),
                bitmap(seat[key] for key in here.available),
                bitmap(seat[key] for key in view.prevotes),
                bitmap(seat[key] for key in view.precommits),
                not self.context.voice.may_speak(here.branch, here.number),
                self.context.me,
            )
        )

    def greet(self, here: Round, *peers: bytes) -> None:
        if peers:
            hello = self.hello(here)
            for peer in peers:
                self.context.send(peer, hello)

    def welcome(self, here: Round) -> None:
        """Tells those whom the last manifest admitted, so that they begin with the others: they were sent no votes."""
        state, peers = here.state, self.context.peers
        self.greet(here, *(each.key for each in state.admitted if each.since == state.round and each.key in peers))

    def tick(self, here: Round, is_waiting: bool) -> None:
        context = self.context
        if not is_waiting:
            self.next_at = None
        elif self.next_at is None:
            self.next_at = context.now + WAITING_SECONDS  # usually everything is on its way already
        elif context.now >= self.next_at:
            self.greet(here, *context.some_peers(PEERS_TOLD))
            self.next_at = context.now + WAITING_SECONDS
        if context.now >= context.published_at + HEARTBEAT_SECONDS:
            if context.me in here.state.place:  # nobody hears the gossip of strangers
                context.publish(self.hello(here))
            else:
                context.published_at = context.now

    @property
    def deadline(self) -> float:
        heartbeat = self.context.published_at + HEARTBEAT_SECONDS
        return heartbeat if self.next_at is None else min(self.next_at, heartbeat)

    def may_answer(self, peer: bytes) -> bool:
        """Whether it is time to answer this peer again; counts as an answer."""
        now = self.context.now
        if now - self.answered.get(peer, -ANSWER_SECONDS) < ANSWER_SECONDS:
            return False
        self.answered.pop(peer, None)
        self.answered[peer] = now
        if len(self.answered) > ANSWERS_MAX:
            del self.answered[next(iter(self.answered))]
        return True

    def hand_over(self, here: Round, hello: Hello) -> None:
        """Sends a peer in the same round the messages that it lacks and we hold."""
        if not self._is_level(here, hello):
            self._send(hello.author, self._lacking(here, hello)[:HANDED_MAX])

    def _send(self, peer: bytes, messages: Iterable[Received]) -> None:
        """Sends messages as far as the bound of an answer and the peer's budget allow."""
        chosen, size = [], 0
        for received in messages:
            size += len(received.envelope)
            if size > HANDED_BYTES_MAX or not self.may_send(peer, len(received.envelope)):
                break
            chosen.append(received)
        if chosen:
            self.context.send(peer, *chosen)

    def _is_level(self, here: Round, hello: Hello) -> bool:
        """Whether a peer obviously lacks nothing, so that the search can be skipped."""
        mine = here.agreement.views[here.agreement.view]
        counts = len(here.available), len(mine.prevotes), len(mine.precommits), len(here.pools.offers.by_author)
        bitmaps = hello.available, hello.prevoted, hello.precommitted, hello.announced
        return hello.view == here.agreement.view and all(
            count == 0 or int.from_bytes(seats, "little").bit_count() == here.roster.size
            for count, seats in zip(counts, bitmaps, strict=True)
        )

    def _lacking(self, here: Round, hello: Hello) -> list[Received]:
        agreement, members = here.agreement, here.roster.members
        lacking: list[Received] = []
        if hello.view in agreement.views:  # the lack of it may keep the peer in that view
            lacking += self._of_view(here, hello.view, hello)
        if hello.view < agreement.view:
            lacking += self._of_view(here, agreement.view, None)
        available, announced = set(seats_in(hello.available)), set(seats_in(hello.announced))
        for seat, key in enumerate(members):
            if seat not in available:
                lacking += here.available.get(key, [])[:2]
            if seat not in announced:
                lacking += [offer.received for offer in here.pools.offers.by_author.get(key, [])[:2]]
        return lacking

    def _of_view(self, here: Round, number: int, hello: Hello | None) -> list[Received]:
        """Returns the messages of a view that a peer lacks: all of them, if there is no hello that says otherwise."""
        agreement, members = here.agreement, here.roster.members
        view = agreement.views[number]
        prevoted = set(seats_in(hello.prevoted)) if hello else set()
        precommitted = set(seats_in(hello.precommitted)) if hello else set()
        found: list[Received] = []
        place = here.roster.seat.get(hello.author, -1) if hello else -1
        if view.proposal is not None and place not in prevoted:
            found.append(view.proposal)
            proposal = read(view.proposal, Proposal)
            if proposal.valid_view >= 0:
                found += agreement.voted(proposal.valid_view, Ballot.PREVOTE, proposal.manifest)
        for votes, known in ((view.prevotes, prevoted), (view.precommits, precommitted)):
            found += [votes[key] for seat, key in enumerate(members) if key in votes and seat not in known]
        return found

    def _budget(self, peer: bytes) -> Budget:
        """Returns a peer's budget, refilled up to now. A peer forgotten long ago starts with a full one."""
        now = self.context.now
        budget = self.budgets.pop(peer, None) or Budget(now)
        elapsed, budget.at = max(0.0, now - budget.at), now
        budget.size = min(BURST_BYTES, budget.size + elapsed * REFILL_BYTES_A_SECOND)
        budget.histories = min(HISTORIES_BURST, budget.histories + elapsed * HISTORIES_A_SECOND)
        self.budgets[peer] = budget
        if len(self.budgets) > ANSWERS_MAX:
            del self.budgets[next(iter(self.budgets))]
        return budget

    def may_send(self, peer: bytes, size_bytes: int) -> bool:
        """Whether a peer's budget allows so many bytes now; if so, they count as sent."""
        budget = self._budget(peer)
        if budget.size < size_bytes:
            self.context.counters["answers refused"] += 1
            return False
        budget.size -= size_bytes
        return True

    def may_tell_history(self, peer: bytes) -> bool:
        """Whether a peer that asks for history gets it now; if so, it is charged to its budget."""
        if self.context.reputation.is_greylisted(peer, self.context.now):
            return False
        budget = self._budget(peer)
        if budget.histories < 1.0:
            self.context.counters["histories refused"] += 1
            return False
        budget.histories -= 1.0
        return True

    def answer(self, here: Round, peer: bytes, names: tuple[bytes, ...]) -> None:
        """Sends a peer the messages that it asks for by name, each once, as far as its budget goes."""
        if peer not in self.context.peers or not self.may_send(peer, QUESTION_BYTES):
            return
        known = {received.name: received for received in here.availabilities.values()}
        offers, requests = here.pools.offers.by_name, here.pools.requests
        found = (
            offers[name].received if name in offers else known.get(name) or requests.received(name)
            for name in dict.fromkeys(names[:HANDED_MAX])
        )
        self._send(peer, filter(None, found))

    def limits(self) -> dict[str, tuple[int, int]]:
        return {
            "peers answered": (len(self.answered), ANSWERS_MAX),
            "peers with a budget": (len(self.budgets), ANSWERS_MAX),
        }
