"""One round on one node: collects contributions, publishes the availability, proposes, votes and decides.

Collecting ends when every contribution worth waiting for is held, at a deadline that follows the members' own pace
(arrivals.py), or when q - f members have stopped collecting. Then each member publishes once which contributions it
holds. The manifest is a function of q such availabilities (manifest.py), and agreement.py decides which q. Messages
that a proposal names and we lack are requested, first from its proposer, then from members that prevoted it."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

from p2ptrain.core import messages as msg
from p2ptrain.core.agreement import Agreement, CastVote, Decided, Judgement, Propose, Stage, ViewEntered
from p2ptrain.core.collecting import Collecting
from p2ptrain.core.context import Context
from p2ptrain.core.history import Entry
from p2ptrain.core.manifest import Manifest, Missing, joins_max, manifest_of
from p2ptrain.core.newcomers import looked_at
from p2ptrain.core.pools import Pools
from p2ptrain.core.questions import NAMES_MAX, Questions
from p2ptrain.core.reputation import Reason
from p2ptrain.core.roster import bitmap, proposers
from p2ptrain.core.state import AgreedState
from p2ptrain.core.succession import is_closing

JUDGED_MAX = 128  # checked proposals kept per round: one per view
MANIFESTS_MAX = 2 * JUDGED_MAX  # per round: those of proposals, and our drafts, which change with each availability
OF_MEMBER_MAX = 16  # availabilities per member: two, one after each restart, and those that proposals name
EARLY_SPREAD = 3.0  # a proposer waits this many times as long for the rest as the first q took; a guess
WAIT_SHARE = 0.25  # of the first view, at most: the others' timers run, and messages may be a second on their way


@dataclass(slots=True)
class ProposalCheck:
    manifest: Manifest | None = None
    is_bad: bool = False
    is_held: bool = False


class Round:
    """The round that follows `state`, from collecting contributions to the decision."""

    def __init__(
        self,
        context: Context,
        pools: Pools,
        state: AgreedState,
        heard_since: float,
        own_root: Callable[[], tuple[int, bytes]],
    ) -> None:
        self.context, self.pools, self.state = context, pools, state
        self.branch, self.number, self.roster = state.branch, state.round + 1, state.roster
        self.is_member = context.me in self.roster.seat
        self.began = context.now
        context.voice.enter(self.branch, self.number)
        self.heard_since = heard_since  # the start of the round before: who was heard since then is present
        self.own_root = own_root  # the newest root that we attest, and its round
        self.closed_at: float | None = None  # when collecting ended
        self.mine: msg.Received | None = None  # our availability
        self.mine_held = 0  # how many contributions it names
        # by the round of a contribution, with the peers at that time
        self._looked_at: dict[int, tuple[dict[bytes, str], Container[bytes]]] = {}
        self.availabilities: dict[bytes, msg.Received] = {}  # by digest
        self.available: dict[bytes, list[msg.Received]] = {}  # by member
        self.known_held: tuple[bytes, ...] | None = None  # of an availability; all that it names is here
        self.first_available_at: float | None = None
        self.propose_at: float | None = None
        self.judged: dict[bytes, ProposalCheck] = {}  # by the digest of the proposal
        self.manifests: dict[bytes, Manifest] = {}  # computed manifests, by digest
        self.questions = Questions(context)
        self.draft: tuple[tuple[bytes, ...], Manifest] | None = None
        agreement = context.run.agreement
        self.agreement = Agreement(
            self.roster,
            proposers(context.run_id, self.branch, self.number, self.roster.members),
            context.me,
            self._judge,
            self._may_propose,
            (float(agreement.view_seconds), float(agreement.view_seconds_max)),
        )
        self.pools.arrivals.begin(self.number, context.now)
        self.pools.exchange.heard(self.number, context.now)
        self.collecting = Collecting(context, pools, state, self.looks_at)

    # -- Collect ------------------------------------------------------------------------------------

    def heard_late(self, author: bytes) -> None:
        if self.closed_at is None:
            self.collecting.heard_late(author)

    def looks_at(self, author: bytes, number: int) -> bool:
        """Whether we take in an author's contribution to this or a later round; an earlier one counts as this."""
        peers, number = self.context.peers, max(number, self.number)
        before, keys = self._looked_at.get(number, (None, ()))
        if before != peers:
            keys = looked_at(self.state, self.context.run, peers, number)
            self._looked_at[number] = {**peers}, keys
        return author == self.context.me or author in keys

    def offer_announced(self, author: bytes) -> None:
        """Notes that a contribution is announced that this round may take."""
        if self.closed_at is None and (author == self.context.me or self.collecting.waits_for(author)):
            self.pools.exchange.heard(self.number, self.context.now)

    def offer_held(self, author: bytes) -> None:
        """Notes that a good contribution is here that this round may take."""
        if self.closed_at is None:
            self.collecting.held(author)
            self.collect()

    def collect(self) -> None:
        if self.closed_at is not None:
            return
        decided = self.state.succession.decided
        if decided and is_closing(self.state):  # it takes nothing: it certifies the root that the run ends with
            if self.own_root()[0] >= decided.last or self.context.now >= self._closing_at:
                self._close()
            return
        collecting = self.collecting
        if collecting.is_blind:
            heard = collecting.waiting & self.available.keys()
            collecting.let_pass({author for author in heard if self._lets_pass(author)})
        others_closed = len(self.available) >= self.roster.attesting
        idle_over = self._is_idle and self.context.now >= self._idle_at()
        if others_closed or idle_over or collecting.is_over():
            self._close()

    def _lets_pass(self, author: bytes) -> bool:
        """Whether a member's availability shows that it has no contribution of its own."""
        return self.pools.offers.are_of_others(msg.read(self.available[author][0], msg.Availability).held, author)

    @property
    def _closing_at(self) -> float:
        return self.began + self.context.run.agreement.avail_seconds

    @property
    def _is_idle(self) -> bool:
        """Whether requests wait in a round without a contribution."""
        return bool(self.pools.requests.by_name) and not self.collecting.has_any

    def _idle_at(self) -> float:
        """When an idle round ends: not while members whose pace is known may still be training."""
        return max(self.began + self.context.run.agreement.idle_round_seconds, self.collecting.longest_at)

    def _close(self) -> None:
        context = self.context
        self.closed_at = context.now
        self.pools.newcomers.took(self.collecting.seconds_for_newcomers)
        missing, is_late = self.collecting.missing()
        for author in missing:
            self.pools.arrivals.missed(author)
            if is_late:
                is_silent = author in self.roster.seat and not context.has_heard(author, self.began)
                context.reputation.note(author, Reason.SILENT if is_silent else Reason.LATE, context.now)
        if self.is_member and self.mine is None and context.voice.may_speak(self.branch, self.number):
            held, refused = self.pools.offers.attestable(self.state, self.looks_at)
            message = msg.Availability(
                self.branch,
                self.number,
                *self.own_root(),
                held[: msg.HELD_MAX],
                refused[: msg.HELD_MAX],
                self.pools.requests.names(self.state),
                bitmap(at for at, key in enumerate(self.roster.members) if context.has_heard(key, self.heard_since)),
                context.me,
            )
            self.mine, self.mine_held = context.signed(message), len(message.held)
            context.publish(self.mine)
            self.hear_availability(self.mine)
        self.advance()

    # -- Availabilities -----------------------------------------------------------------------------

    def hear_availability(self, received: msg.Received) -> bool:
        """Takes in a member's availability; returns False if it is useless."""
        message = msg.read(received, msg.Availability)
        digest, author = received.digest, message.author
        if digest in self.availabilities:
            return False
        asked_for = received.name in self.questions.open
        mine = self.available.setdefault(author, [])
        if len(mine) >= 2 and not (asked_for and self._has_room(mine)):
            return False
        if asked_for:
            self.questions.close(received.name)
        self.availabilities[digest] = received
        mine.append(received)
        self._ask_for_what_it_holds(message)
        if len(mine) == 1:
            self._count_availabilities()
        if asked_for or len(mine) > 1:  # the member has restarted, and may now attest what is still here
            self.advance()
        return True

    def _has_room(self, mine: list[msg.Received]) -> bool:
        """Whether there is room for another availability of a member; drops the oldest unused one if needed.

        Availabilities named by a proposal that may still be voted on stay: our lock and others' precommits need them.
        """
        if len(mine) < OF_MEMBER_MAX:
            return True
        at = self.agreement
        kept = [view.proposal for number, view in at.views.items() if number >= at.view or number == at.valid_view]
        named = {name for each in kept if each is not None for name in msg.read(each, msg.Proposal).availabilities}
        old = next((each for each in mine[2:] if each.digest not in named), None)
        if old is not None:
            mine.remove(old)
            del self.availabilities[old.digest]
        return old is not None

    def _count_availabilities(self) -> None:
        now, count = self.context.now, len(self.available)
        if self.first_available_at is None:
            self.first_available_at = now
        if self.collecting.is_blind and count == self.roster.tolerated + 1:
            # One of these is honest, and has waited for the rest as long as its pace demands: they may be dead.
            self.collecting.hurry(now + self.context.run.agreement.avail_seconds)
        if self.closed_at is None and (self.collecting.is_blind or count >= self.roster.attesting):
            self.collect()
        if count == self.roster.quorum:
            spread = EARLY_SPREAD * (now - self.first_available_at) + 0.1
            bound = min(self.context.run.agreement.avail_seconds, WAIT_SHARE * self.agreement.seconds(0))
            self.propose_at = now + min(spread, bound)
            self.agreement.start(now)
        is_mine = self.agreement.proposer(self.agreement.view) == self.context.me
        if self.closed_at is not None and (count == self.roster.quorum or (count > self.roster.quorum and is_mine)):
            self.advance()  # others wait for our proposal

    def _ask_for_what_it_holds(self, message: msg.Availability) -> None:
        by_name, payloads = self.pools.offers.by_name, self.pools.payloads
        if (
            self.mine is not None
            and len(message.held) <= self.mine_held
            and not payloads.wanted
            and not message.requests
        ):
            return  # we hold as many; if they differ, the proposal will show it
        unknown: list[bytes] = []
        if message.held is not self.known_held:  # the same object: as others' in a simulation
            unknown = [name for name in message.held if name not in by_name]
            self.known_held = self.known_held if unknown else message.held
        if payloads.wanted:
            for name in message.held:
                if name in by_name:
                    payloads.add_source(by_name[name].announcement.payload, message.author)
        asked = [name for name in message.requests if name not in self.pools.requests.by_name]
        most = joins_max(self.roster.size)  # of those that nobody may need, few of each member
        unknown += asked if len(asked) <= most else self.context.rng.sample(asked, most)
        unknown += [name for name in message.refused if name not in by_name]
        if unknown and message.author != self.context.me:
            self.questions.ask(unknown[:NAMES_MAX], [message.author])

    # -- Proposals and votes ------------------------------------------------------------------------

    def _may_propose(self) -> bool:
        if not self.context.voice.may_speak(self.branch, self.number):
            return False
        if self.agreement.valid is not None:
            return True
        if len(self.available) < self.roster.quorum:
            return False
        waiting = self.agreement.view == 0 and not self._everyone_is_here()
        if waiting and self.propose_at is not None and self.context.now < self.propose_at:
            return False
        return self._make_draft()

    def _everyone_is_here(self) -> bool:
        """Whether we have the availability of every member that was heard in this round."""
        if len(self.available) == self.roster.size:
            return True
        heard_at = self.context.heard_at  # the vote that ended the last round was heard just when this one began
        return all(key in self.available or heard_at.get(key, self.began) <= self.began for key in self.roster.members)

    def _make_draft(self) -> bool:
        """Chooses the q availabilities that attest most of what we hold; returns True if their manifest is complete."""
        by_name, requests = self.pools.offers.by_name, self.pools.requests.by_name
        lacking: dict[tuple[bytes, ...], int] = {}

        def rank(received: msg.Received) -> tuple[int, int, bytes]:
            message = msg.read(received, msg.Availability)
            if message.held not in lacking:
                lacking[message.held] = sum(
                    (offer := by_name.get(name)) is None or not self.pools.offers.is_good(offer.announcement)
                    for name in message.held
                )
            lacks = lacking[message.held] + sum(name not in requests for name in message.requests)
            return lacks, -len(message.held) - len(message.requests), message.author

        # A member that restarted has sent several: the payloads of its first may be gone, if all restarted at once.
        best = (min(of_one, key=rank) for of_one in self.available.values())
        chosen = sorted(best, key=rank)[: self.roster.quorum]
        names = tuple(sorted(received.digest for received in chosen))
        if self.draft is None or self.draft[0] != names:
            manifest = self._manifest(names)
            if manifest is None:
                return False
            self.draft = names, manifest
        return self._payloads_are_here(self.draft[1])

    def _manifest(self, names: tuple[bytes, ...]) -> Manifest | None:
        """Computes the manifest of these availabilities; if messages are missing, asks for them and returns None."""
        context = self.context
        named = [msg.read(self.availabilities[name], msg.Availability) for name in names]
        found = manifest_of(self.state, context.run, named, self.pools.offers.announcement, self.pools.requests.request)
        if isinstance(found, Missing):
            self.questions.ask(found.names, [each.author for each in named], is_needed=True)
            return None
        if len(self.manifests) >= MANIFESTS_MAX:  # only those of proposals and our draft are needed again
            kept = [judged.manifest for judged in self.judged.values()] + [self.draft[1] if self.draft else None]
            self.manifests = {each.digest: each for each in kept if each is not None}
        return self.manifests.setdefault(found.digest, found)

    def _payloads_are_here(self, manifest: Manifest) -> bool:
        payloads, holders = self.pools.payloads, self.pools.offers.holders
        missing = [taken for taken in manifest.taken if not payloads.is_good(taken.payload)]
        for taken in missing:
            payloads.want(taken.payload, taken.payload_bytes, taken.author, holders(taken.payload, self.available))
        return not missing

    def _judge(self, received: msg.Received) -> Judgement:
        judged = self.judged.get(received.digest)
        if judged is None:
            while len(self.judged) >= JUDGED_MAX:
                del self.judged[next(iter(self.judged))]
            judged = self.judged[received.digest] = ProposalCheck()
        if judged.is_held:
            return Judgement.HELD
        if judged.is_bad:
            return Judgement.BAD
        if judged.manifest is None:
            self._work_out(received, judged)
        if judged.manifest is None:
            return Judgement.BAD if judged.is_bad else Judgement.UNKNOWN
        judged.is_held = self._payloads_are_here(judged.manifest)
        return Judgement.HELD if judged.is_held else Judgement.KNOWN

    def _work_out(self, received: msg.Received, judged: ProposalCheck) -> None:
        proposal = msg.read(received, msg.Proposal)
        if len(proposal.availabilities) != self.roster.quorum:
            judged.is_bad = True
            return
        missing = [name for name in proposal.availabilities if name not in self.availabilities]
        if missing:
            voters = self.agreement.voted(proposal.view, msg.Ballot.PREVOTE, proposal.manifest)
            sources = [proposal.author, *(msg.read(vote, msg.Vote).author for vote in voters)]
            self.questions.ask([name[: msg.SHORT_BYTES] for name in missing], sources, is_needed=True)
            return
        authors = {msg.read(self.availabilities[name], msg.Availability).author for name in proposal.availabilities}
        manifest = self._manifest(proposal.availabilities) if len(authors) == self.roster.quorum else None
        if len(authors) != self.roster.quorum or (manifest is not None and manifest.digest != proposal.manifest):
            judged.is_bad = True
            return
        judged.manifest = manifest

    def hear_proposal(self, received: msg.Received) -> msg.Heard:
        heard = self.agreement.hear_proposal(received)
        if heard is msg.Heard.NEW:
            self.agreement.start(self.context.now)
            self.advance()
        return heard

    def advance(self) -> None:
        agreement, context = self.agreement, self.context
        while True:
            match agreement.advance(context.now):
                case CastVote(view=view, ballot=ballot, manifest=manifest):
                    self._vote(view, ballot, manifest)
                case Propose(view=view, valid_view=valid_view, valid=valid):
                    self._propose(view, valid_view, valid)
                case ViewEntered():
                    self.say_again()
                case Decided() | None:
                    return

    def help_in(self, view: int) -> None:
        """Helps a member that is still in an earlier view, by voting nil there."""
        for vote in self.agreement.pass_by(view):
            self._vote(vote.view, vote.ballot, vote.manifest)
        self.advance()

    def _vote(self, view: int, ballot: msg.Ballot, manifest: bytes) -> None:
        if not self.context.voice.may_speak(self.branch, self.number):
            return
        vote = self.context.signed(msg.Vote(self.branch, self.number, view, ballot, manifest, self.context.me))
        backing: tuple[bytes, ...] = ()
        payloads: tuple[bytes, ...] = ()
        if manifest != msg.NOTHING:
            if ballot is msg.Ballot.PRECOMMIT:
                backing = self._backing(view, manifest)
            else:
                payloads = tuple(taken.payload for taken in self.manifests[manifest].taken)
        self.context.voice.publish_once(vote, backing, payloads)
        self.agreement.hear_vote(vote)
        for peer in self.context.some_peers(1) if ballot is msg.Ballot.PRECOMMIT else ():
            if shown := self.agreement.some_prevote(view, peer, self.context.rng):
                self.context.send(peer, shown)

    def _backing(self, view: int, manifest: bytes) -> tuple[bytes, ...]:
        """Returns the envelopes that we need after a restart to propose our locked manifest again."""
        received = self.agreement.views[view].proposal
        assert received is not None, "a precommit follows a proposal"
        proposal = msg.read(received, msg.Proposal)
        named = [self.availabilities[name] for name in proposal.availabilities]
        contents = [msg.read(each, msg.Availability) for each in named]
        lists = dict.fromkeys(names for each in contents for names in (each.held, each.refused))  # few differ
        wanted = sorted({name for names in lists for name in names})
        asked = sorted({name for names in dict.fromkeys(each.requests for each in contents) for name in names})
        offers, requests = self.pools.offers.by_name, self.pools.requests.by_name
        backing = [received, *named]
        backing += [offers[name].received for name in wanted if name in offers]
        backing += [requests[name].received for name in asked if name in requests]
        backing += self.agreement.voted(view, msg.Ballot.PREVOTE, manifest)
        return tuple(each.envelope for each in backing)

    def _propose(self, view: int, valid_view: int, valid: msg.Proposal | None) -> None:
        context = self.context
        if valid is None:
            assert self.draft is not None, "a proposal needs a draft"
            names, manifest = self.draft[0], self.draft[1].digest
        else:
            names, manifest = valid.availabilities, valid.manifest
        proposal = context.signed(
            msg.Proposal(self.branch, self.number, view, valid_view if valid else -1, names, manifest, context.me)
        )
        context.voice.publish_once(proposal)
        if valid is not None:
            context.publish(*self.agreement.voted(valid_view, msg.Ballot.PREVOTE, manifest))
        self.agreement.hear_proposal(proposal)

    def say_again(self) -> None:
        """Publishes our messages of this round again, as far as they still hold, because gossip may have lost them."""
        agreement, me = self.agreement, self.context.me
        again = [self.mine] if self.mine else []
        for number in sorted({agreement.view - 1, agreement.view}):
            if (view := agreement.views.get(number)) is None:
                continue
            if view.proposal is not None and agreement.proposer(number) == me:
                again.append(view.proposal)
            again += [votes[me] for votes in (view.prevotes, view.precommits) if me in votes]
        if again:
            self.context.publish(*again)

    # -- Deciding -----------------------------------------------------------------------------------

    def decision(self) -> Entry | None:
        """Returns the manifest with its certificate, once both are here."""
        decided = self.agreement.decided
        if decided is None:
            return None
        if decided.manifest not in self.manifests:  # it may be in a proposal that we have not checked
            for view in self.agreement.views.values():
                if view.proposal and msg.read(view.proposal, msg.Proposal).manifest == decided.manifest:
                    self._judge(view.proposal)
        manifest = self.manifests.get(decided.manifest)
        if manifest is None:
            return None
        votes = self.agreement.voted(decided.view, msg.Ballot.PRECOMMIT, decided.manifest)[: self.roster.quorum]
        seats = bitmap(self.roster.seat[msg.read(vote, msg.Vote).author] for vote in votes)
        signatures = tuple(msg.signature_of(vote) for vote in votes)
        return Entry(
            manifest, msg.Certificate(self.branch, self.number, decided.view, manifest.digest, seats, signatures)
        )

    @property
    def deadline(self) -> float | None:
        times = [self.agreement.deadline]
        if self.closed_at is None:
            times.append(self._closing_at if is_closing(self.state) else self.collecting.deadline)
            if self._is_idle:
                times.append(self._idle_at())
        elif self.propose_at is not None and self.propose_at > self.context.now:
            times.append(self.propose_at)
        times.append(self.questions.deadline)
        return min((time for time in times if time is not None), default=None)

    def tick(self) -> None:
        self.collect()
        if self.questions.open:
            self.questions.tick(self._is_known)
        self.advance()

    def _is_known(self, name: bytes) -> bool:
        return name in self.pools.offers.by_name or name in self.pools.requests.by_name

    @property
    def needs_every_message(self) -> bool:
        """Whether any message may advance this round, and not only one that changes `counted`."""
        agreement = self.agreement
        if agreement.is_due or agreement.decided is not None or self.questions.open:
            return True
        proposal = agreement.views[agreement.view].proposal
        if proposal is not None:
            judged = self.judged.get(proposal.digest)
            return judged is None or not (judged.is_held or judged.is_bad)
        may_propose = agreement.stage is Stage.PROPOSE and agreement.proposed < agreement.view
        return may_propose and agreement.proposer(agreement.view) == self.context.me

    @property
    def counted(self) -> tuple[object, ...]:
        """Whatever may let the node advance and a message can change without an effect."""
        agreement = self.agreement
        return (
            (self.collecting.deadline, self.collecting.has_any) if self.closed_at is None else self.closed_at,
            self.propose_at,
            len(self.questions.open),
            agreement.is_due,
            agreement.decided,
            agreement.stage,
            agreement.timer,
            agreement.views[agreement.view].proposal,
        )

    def limits(self) -> dict[str, tuple[int, int]]:
        """Returns each buffer's size and bound. Restored backing of our lock is in no member's list."""
        size = self.roster.size
        return {
            "availabilities": (len(self.availabilities), (OF_MEMBER_MAX + 1) * size),
            "availabilities of a member": (max(map(len, self.available.values()), default=0), OF_MEMBER_MAX),
            "manifests": (len(self.manifests), MANIFESTS_MAX),
            **self.questions.limits(),
            "judged proposals": (len(self.judged), JUDGED_MAX),
            **self.agreement.limits(),
        }
