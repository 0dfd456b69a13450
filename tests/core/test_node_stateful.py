"""One node against anyone: three members, whose keys the test holds, and strangers send arbitrary messages.

Far more than f may lie, so nothing is promised about agreement; but the node must not crash, fill up or spin, or ever
send two messages where it may send only one.
"""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from p2ptrain.core import events as ev
from p2ptrain.core.history import Beginning, BranchStart, Entry, History, Step
from p2ptrain.core.messages import (
    NOTHING,
    NUMBER_MAX,
    SHORT_BYTES,
    Announcement,
    Availability,
    Ballot,
    Call,
    Certificate,
    Evidence,
    Hello,
    JoinRequest,
    Leave,
    Message,
    Proposal,
    Regroup,
    Vote,
    authored,
    content_name,
    decode,
    payload_digest,
)
from p2ptrain.core.node import GAP_SECONDS
from p2ptrain.core.reputation import prove
from p2ptrain.core.roster import bitmap
from p2ptrain.core.state import AgreedState
from p2ptrain.digest import digest
from tests.helpers.core import (
    KEYS,
    RUN,
    Bench,
    DigestSigner,
    MemoryStore,
    Restless,
    announced,
    begun,
    line_of,
    payload,
    signed,
    voted,
)

TICKS_AT_ONCE_MAX = 50
PEERS = KEYS[:6]  # four founders, the node among them, and two strangers
replace = msgspec.structs.replace
NOWHERE = digest("core test", b"nowhere")
AGREEMENT = {"stall_seconds": 30, "settle_seconds": 3, "staleness_rounds_max": 1, "history_rounds": 4}

shifts = st.sampled_from((0, 0, 0, 0, 0, 1, 1, 2, -1, -2, 5, 2**40))
views = st.sampled_from((0, 0, 0, 1, 1, 2, 3, 4, 6, 2**40))
peers = st.integers(1, 5)
picks = st.integers(0, 7)


def bounded(number: int) -> int:
    return min(max(0, number), NUMBER_MAX - 1)


class Anyone(RuleBasedStateMachine):
    """The node under test; the rules are everything that may happen to it."""

    @initialize(overlap=st.sampled_from((0, 1, "auto")), halts=st.booleans(), me=st.sampled_from((0, 1, 5)))
    def begin(self, overlap: int | str, halts: bool, me: int) -> None:
        agreement = AGREEMENT | {"overlap_rounds": overlap, "on_quorum_loss": "halt" if halts else "regroup"}
        self.bench = Bench(4, me=me, agreement=agreement, start=False)
        self.disk = MemoryStore(self.bench.genesis, 4)
        self.places: dict[tuple[Any, ...], bytes] = {}  # everything said that may be said once
        self.persisted: set[bytes] = set()
        self.last = 0.0  # the time of the last event
        self.rounds: dict[bytes, int] = {}  # by branch: where the node was
        self.heard: list[tuple[Message, bytes, bool | None]] = []  # to be said again
        self.trains: list[int] = []
        self.applies: list[tuple[bytes, int]] = []
        self.states: list[tuple[int, bytes, int]] = []  # to catch up with
        self.fetches: list[tuple[bytes, tuple[bytes, ...]]] = []
        self.asked: list[tuple[bytes, bytes, int]] = []
        self.do(ev.Started(self.disk.saved()))
        for peer in self.bench.others:
            self.do(ev.PeerSeen(peer))

    # -----------------------------------------------------------------------------------------------
    # What the driver does, and what is watched

    def do(self, event: ev.Event, at: float | None = None) -> None:
        before, ours, last = self.bench.node.deadline, self.bench.node.context.now, self.last
        effects = self.bench.do(event, at)
        if isinstance(event, ev.Started):
            self.twin = Restless(
                self.bench.run, RUN, self.bench.me, DigestSigner(self.bench.me), Random(self.bench.seed)
            )
        assert (self.twin.handle(event, self.bench.now), self.twin.deadline) == (effects, self.bench.node.deadline)
        assert self.bench.node.context.now >= ours, "its own time never goes back"
        for effect in effects:
            self.disk.keep([effect])
            self._carry_out(effect)
        deadline, self.last = self.bench.node.deadline, self.bench.now
        has_jumped = not last <= self.last <= (before or 0.0) + GAP_SECONDS
        is_counted_only = isinstance(event, ev.MessageReceived) and not effects and not has_jumped
        assert is_counted_only or (deadline is not None and deadline >= self.bench.now), "no deadline is in the past"

    def _carry_out(self, effect: ev.Effect) -> None:
        match effect:
            case ev.Persist(record=ev.Said(envelope=envelope)):
                self.persisted.add(envelope)
            case ev.Publish(envelope=envelope):
                self._listen(envelope)
            case ev.Send(envelopes=envelopes):
                for envelope in envelopes:
                    self._listen(envelope)
            case ev.Train(round=number):
                self.trains.append(number)
            case ev.Apply(manifest=manifest):
                self.applies.append((manifest.branch, manifest.round))
            case ev.CatchUp(roots=roots, attempt=attempt):
                self.states.append((*roots[0], attempt))
            case ev.Fetch(payload=wanted, sources=sources):
                self.fetches.append((wanted, sources))
            case ev.AskHistory(peer=peer, branch=branch, round=number):
                self.asked.append((peer, branch, number))
            case _:
                pass

    def _listen(self, envelope: bytes) -> None:
        """Checks the node's messages: each sent once for its place, and only after it is on the disk."""
        received = decode(envelope, DigestSigner())
        message = received.message
        if isinstance(message, Certificate | Evidence) or message.author != self.bench.me:
            return
        match message:
            case Announcement():
                place: tuple[Any, ...] = ("announcement", message.branch, message.round)
            case Proposal():
                place = ("proposal", message.branch, message.round, message.view)
            case Vote():
                place = ("vote", message.branch, message.round, message.view, message.ballot)
            case Regroup():
                place = ("regroup", message.branch, message.parent, message.attempt)
            case _:
                return
        assert self.places.setdefault(place, received.digest) == received.digest, f"two of a {place[0]}"
        assert envelope in self.persisted, "it was on the disk before"

    @invariant()
    def every_buffer_is_within_its_bound(self) -> None:
        if hasattr(self, "bench"):
            beyond = {name: (size, bound) for name, (size, bound) in self.node.limits().items() if size > bound}
            assert beyond == {}

    @invariant()
    def rounds_never_go_back(self) -> None:
        if hasattr(self, "bench"):
            here = self.parts.here
            assert here.number >= self.rounds.get(here.branch, 0)
            self.rounds[here.branch] = here.number
            self.node.view().complaints  # noqa: B018  # it can be asked at any time

    # -----------------------------------------------------------------------------------------------
    # Parts of messages

    @property
    def node(self) -> Any:
        return self.bench.node

    @property
    def parts(self) -> Any:
        return self.bench.parts

    @property
    def state(self) -> AgreedState:
        return self.bench.state

    def author(self, peer: int) -> bytes:
        """Anyone but the node itself, whose signature cannot be forged."""
        return [key for key in PEERS if key != self.bench.me][peer - 1]

    def branch(self, pick: int) -> bytes:
        lineage = [stage.branch for stage in self.parts.chain.lineage]
        return {5: RUN, 6: NOWHERE, 7: lineage[-2] if len(lineage) > 1 else RUN}.get(pick, self.state.branch)

    def manifest(self, pick: int) -> bytes:
        proposed = [
            view.proposal.message.manifest for view in self.parts.here.agreement.views.values() if view.proposal
        ]
        known: list[bytes] = [*proposed, *self.parts.here.manifests, NOWHERE, NOTHING]
        return known[pick % len(known)]

    def hear(self, message: Message, sender: bytes = b"", attachment: bytes = b"", good: bool | None = None) -> None:
        received = decode(signed(message, attachment).envelope, DigestSigner())
        author = self.author(1) if isinstance(message, Certificate | Evidence) else message.author
        self.heard = [*self.heard[-63:], (message, attachment, good)]
        self.do(ev.MessageReceived(sender or author, received, good))

    # -----------------------------------------------------------------------------------------------
    # Anything

    @rule(peer=peers, shift=shifts, pick=picks, back=st.integers(0, 3), which=st.integers(0, 3), good=st.booleans())
    def somebody_offers(self, peer: int, shift: int, pick: int, back: int, which: int, good: bool) -> None:
        number, author = bounded(self.state.round + 1 + shift), self.author(peer)
        body = authored(author, digest("core test", author, bytes([which])))
        inline = which < 2
        offer = Announcement(
            self.branch(pick),
            number,
            bounded(number - back),
            NOWHERE,
            payload_digest(body),
            len(body),
            content_name(body) if inline else payload_digest(body)[:SHORT_BYTES],
            1,
            2,
            which,
            author,
        )
        self.hear(offer, attachment=body if inline else b"", good=good if inline else None)

    @rule(peer=peers, shift=shifts, pick=picks, root=st.integers(0, 3), heard=st.integers(0, 255))
    def somebody_holds(self, peer: int, shift: int, pick: int, root: int, heard: int) -> None:
        offers, requests = sorted(self.parts.pools.offers.by_name), sorted(self.parts.pools.requests.by_name)
        odd = (digest("core test", bytes([pick]))[:16],)
        held = {0: (), 1: odd, 2: tuple(sorted({*offers[:1], *odd}))}.get(pick, tuple(offers))
        refused = odd if pick == 3 else tuple(offers[:1]) if pick == 4 else ()
        roots = [(self.state.root_round, self.state.root), (bounded(self.state.round), NOWHERE)]
        message = Availability(
            self.branch(pick), bounded(self.state.round + 1 + shift), *roots[root % 2], held, refused,
            odd if pick == 1 else tuple(requests), bitmap(place for place in range(8) if heard >> place & 1),
            self.author(peer),
        )  # fmt: skip
        self.hear(message)

    @rule(view=views, shift=shifts, pick=picks, backing=st.integers(-1, 3), is_right=st.booleans(), peer=peers)
    def somebody_proposes(self, view: int, shift: int, pick: int, backing: int, is_right: bool, peer: int) -> None:
        here = self.parts.here
        names = sorted(each[0].digest for each in here.available.values())[: here.roster.quorum - (pick == 0)]
        names = sorted({*names, NOWHERE}) if pick == 1 or not names else names
        found = None
        for node in (self.node, self.twin) if is_right and NOWHERE not in names else ():
            found = node.participant.here._manifest(tuple(names))  # each remembers what it has worked out
            node.context.effects.clear()  # what that has asked for
        proposer = here.agreement.proposer(view)
        author = self.author(peer) if pick == 2 or proposer == self.bench.me else proposer
        manifest = found.digest if found else self.manifest(pick)
        message = Proposal(
            self.branch(pick),
            bounded(here.number + shift),
            view,
            min(backing, view - 1),
            tuple(names),
            manifest,
            author,
        )
        self.hear(message)

    @rule(peer=peers, view=views, shift=shifts, ballot=st.sampled_from(Ballot), pick=picks)
    def somebody_votes(self, peer: int, view: int, shift: int, ballot: Ballot, pick: int) -> None:
        number = bounded(self.state.round + 1 + shift)
        self.hear(voted(self.author(peer), ballot, self.manifest(pick), view, number, self.branch(pick)))

    @rule(view=st.integers(0, 2), ballot=st.sampled_from(Ballot), pick=picks)
    def all_others_vote(self, view: int, ballot: Ballot, pick: int) -> None:
        at, manifest = self.state, self.manifest(pick)
        for key in at.members:
            if key != self.bench.me:
                self.hear(voted(key, ballot, manifest, view, at.round + 1, at.branch))

    @rule(peer=peers, shift=shifts, view=views, pick=picks, bits=st.binary(max_size=2), sender=peers)
    def somebody_greets(self, peer: int, shift: int, view: int, pick: int, bits: bytes, sender: int) -> None:
        number = bounded(self.state.round + 1 + shift)
        bits = bits.rstrip(b"\0")
        hello = Hello(self.branch(pick), number, view, bits, bits, bits, bits, False, self.author(peer))
        self.hear(hello, sender=self.author(sender if pick == 0 else peer))

    @rule(peer=peers, shift=shifts, pick=picks, kind=st.sampled_from((JoinRequest, Leave)))
    def somebody_comes_or_goes(self, peer: int, shift: int, pick: int, kind: type) -> None:
        claim = {"claim": b"?" * pick} if kind is JoinRequest else {}
        self.hear(kind(self.branch(pick), bounded(self.state.round + 1 + shift), author=self.author(peer), **claim))

    @rule(peer=peers, first=picks, second=picks)
    def somebody_is_accused(self, peer: int, first: int, second: int) -> None:
        offers = [announced(self.author(peer), 1, bytes([which])) for which in (first, second)]
        if first != second:
            self.hear(prove(*(signed(offer).envelope for offer in offers)))

    @rule(peer=peers, pick=picks, attempt=st.sampled_from((0, 0, 0, 1, 2, 5, 2**40)), size=st.integers(0, 4))
    def somebody_has_lost_the_quorum(self, peer: int, pick: int, attempt: int, size: int) -> None:
        branch, parent = self.branch(pick), NOWHERE if pick == 4 else self.state.head
        author = self.author(peer)
        if size == 0:
            self.hear(Call(branch, parent, attempt, author))
            return
        members = tuple(sorted({author, *(key for key in PEERS[:size] if key != self.bench.me or pick > 1)}))
        self.hear(Regroup(branch, parent, attempt, members, author))

    @rule(pick=picks)
    def a_certificate_goes_round(self, pick: int) -> None:
        self.hear(Certificate(self.branch(pick), 1, 0, NOWHERE, b"\1", (bytes(64),)))

    @rule(place=st.integers(0, 63), peer=peers)
    def something_is_said_again(self, place: int, peer: int) -> None:
        if self.heard:
            message, attachment, good = self.heard[place % len(self.heard)]
            self.hear(message, self.author(peer), attachment, good)

    @rule(place=st.integers(0, 63), peer=peers)
    def its_own_words_come_back(self, place: int, peer: int) -> None:
        said = sorted(self.persisted)
        if said:
            received = decode(said[place % len(said)], DigestSigner())
            self.do(ev.MessageReceived(self.author(peer), received, True if received.attachment else None))

    # -----------------------------------------------------------------------------------------------
    # What goes well

    @rule(rounds=st.integers(1, 2))
    def a_round_goes_well(self, rounds: int) -> None:
        """As far as the members that the test plays can make it."""
        for _ in range(rounds):
            at = self.state
            for key in at.members:
                if key != self.bench.me:
                    offer = announced(key, at.round + 1, inline=True, branch=at.branch)
                    self.hear(offer, attachment=payload(key, at.round + 1), good=True)
            self.training_ends(True, 1)
            offers = self.parts.pools.offers.attestable(at)[0]
            for key in at.members:
                if key != self.bench.me and self.state is at:
                    self.hear(self.bench.available(key, held=offers))
            self.somebody_proposes(self.parts.here.agreement.view, 0, 3, -1, True, 1)
            for ballot in Ballot:
                self.all_others_vote(self.parts.here.agreement.view, ballot, 0)
            self.a_round_is_applied(True, 0)

    @rule(is_asked=st.booleans(), which=st.integers(0, 9))
    def training_ends(self, is_asked: bool, which: int) -> None:
        number = self.trains.pop(0) if is_asked and self.trains else which
        body = authored(self.node.context.me, digest("core test", bytes([which])))
        inline = which % 2 == 0
        attached = {"attachment": body, "content": content_name(body)} if inline else {}
        self.do(ev.TrainingFinished(number, payload_digest(body), len(body), **attached))  # type: ignore[arg-type]

    @rule(is_asked=st.booleans(), which=st.integers(0, 9))
    def a_round_is_applied(self, is_asked: bool, which: int) -> None:
        branch, number = self.applies.pop(0) if is_asked and self.applies else (self.state.branch, which)
        root = digest("core test root", bytes([number % 256])) if which < 7 else NOWHERE
        if is_asked:
            head = next((each.state.head for each in self.disk.history if each.state.round == number), RUN)
            self.disk.checkpoints.append((head, number, root))
        self.do(ev.Applied(branch, number, root))

    @rule(is_asked=st.booleans(), well=st.booleans(), which=st.integers(0, 9))
    def a_state_is_fetched(self, is_asked: bool, well: bool, which: int) -> None:
        number, root, attempt = self.states.pop(0) if is_asked and self.states else (which, NOWHERE, which)
        self.do(ev.CaughtUp(number, root, attempt) if well else ev.CatchUpFailed("no", attempt))

    @rule(is_asked=st.booleans(), good=st.sampled_from((True, True, False)), which=picks)
    def a_payload_arrives(self, is_asked: bool, good: bool, which: int) -> None:
        wanted = self.fetches.pop(0)[0] if is_asked and self.fetches else digest("core test", bytes([which]))
        known = self.parts.pools.payloads.wanted.get(wanted)
        author, size = next(iter(known.claims.items())) if known else (self.author(0), which)
        self.do(ev.PayloadArrived(wanted, good, author, size))

    @rule(peer=peers)
    def nobody_has_a_payload(self, peer: int) -> None:
        wanted, sources = self.fetches.pop(0) if self.fetches else (NOWHERE, (self.author(peer),))
        for source in sources:
            self.do(ev.FetchFailed(wanted, source, "no"))

    # -----------------------------------------------------------------------------------------------
    # History

    @rule(names=st.integers(0, 3), peer=peers, pick=picks, back=st.integers(0, 4))
    def somebody_asks(self, names: int, peer: int, pick: int, back: int) -> None:
        known = [
            *self.parts.pools.offers.by_name,
            *(each[:16] for each in self.parts.here.availabilities),
            NOWHERE[:16],
        ]
        self.do(ev.Asked(self.author(peer), tuple(known[: names * 3])))
        self.do(ev.HistoryAsked(self.author(peer), self.branch(pick), bounded(self.state.round - back)))

    @rule(rounds=st.integers(0, 6), back=st.integers(0, 5), regroups=st.booleans(), wrong=st.integers(0, 9), peer=peers)
    def history_arrives(self, rounds: int, back: int, regroups: bool, wrong: int, peer: int) -> None:
        """A continuation of one of the states on the node's chain: true, truncated or wrong."""
        peer_asked = self.asked.pop(0)[0] if self.asked else self.author(peer)
        if wrong == 0:
            self.do(ev.HistoryFailed(peer_asked, "no"))
            return
        line = self.parts.chain
        states = [*line.forks.values(), line.base, *(certified.state for certified in line.steps)]
        start = states[max(0, len(states) - 1 - back)]
        lineage = list(line.lineage)
        lineage = lineage[: [stage.branch for stage in lineage].index(start.branch) + 1]
        others = tuple(key for key in start.members if key != self.bench.me)
        steps: list[Step] = []
        if regroups and others:
            beginning = begun(others, others, start)
            steps.append(beginning)
            start = start.regrouped(beginning.branch, beginning.members)
            lineage.append(BranchStart(beginning.branch, beginning.round))
        signers = tuple(key for key in start.members if key != self.bench.me)
        which = b"other" if wrong == 1 else b""
        followed = line_of(start, self.bench.run, rounds, signers, which) if signers else []
        steps += [step for step, _ in followed]
        end = followed[-1][1].round if followed else start.round
        history = History(tuple(lineage), end, (), None, tuple(steps))
        answer = spoiled(history, wrong, followed)
        self.do(ev.HistoryArrived(peer_asked, answer))
        if self.asked and self.asked[-1][0] == peer_asked:  # from where the lines part, please
            self.do(ev.HistoryArrived(self.asked.pop()[0], answer))

    # -----------------------------------------------------------------------------------------------
    # Time and the world

    @rule()
    def the_deadline_comes(self) -> None:
        """The node may ask for another tick at the same instant, but not for ever."""
        deadline = self.node.deadline
        at = max(self.bench.now, deadline)
        for _ in range(TICKS_AT_ONCE_MAX):
            self.do(ev.Tick(), at)
            if self.node.deadline > at:
                return
        raise AssertionError("a busy loop")

    @rule(times=st.integers(2, 20))
    def time_goes_by(self, times: int) -> None:
        for _ in range(times):
            self.the_deadline_comes()

    @rule(has_trained=st.booleans())
    def it_is_left_alone(self, has_trained: bool) -> None:
        """For longer than it takes to call, settle and sign."""
        if has_trained:
            self.training_ends(True, 1)
        until = self.bench.now + 150.0
        while self.bench.now < until:
            self.the_deadline_comes()

    @rule(seconds=st.sampled_from((0.0, 0.01, 0.3, 1.0, 3.0, 20.0, 400.0, 1e6, -0.5, -100.0)))
    def the_clock_jumps(self, seconds: float) -> None:
        """The next event is the first one at the new time."""
        self.bench.now += seconds

    @rule(peer=peers, comes=st.booleans())
    def a_peer_comes_or_goes(self, peer: int, comes: bool) -> None:
        self.do(ev.PeerSeen(self.author(peer)) if comes else ev.PeerLost(self.author(peer)))

    @rule(peer=peers, times=st.sampled_from((1, 30)))
    def somebody_talks_nonsense(self, peer: int, times: int) -> None:
        for _ in range(times):
            self.do(ev.MalformedReceived(self.author(peer), "not a message"))

    @rule(chance=st.integers(0, 9), keeps_place=st.booleans())
    def the_user_wants_to_stop(self, chance: int, keeps_place: bool) -> None:
        if chance == 0:
            self.do(ev.StopRequested(keeps_place))

    @precondition(lambda self: self.persisted)
    @rule(well=st.booleans())
    def it_starts_again(self, well: bool) -> None:
        """Restarts it from its disk, with or without its connections."""
        self.trains, self.applies, self.states, self.fetches, self.asked = [], [], [], [], []
        self.bench.node = self.bench.make()
        self.do(ev.Started(self.disk.saved()))
        if well:
            for peer in self.bench.others:
                self.do(ev.PeerSeen(peer))


def spoiled(history: History, wrong: int, followed: list[tuple[Entry, AgreedState]]) -> History:
    """Damages an answer in one of several ways; usually leaves it intact."""
    steps = history.steps
    if wrong == 1 and steps:
        return replace(history, steps=steps[1:])
    if wrong == 2 and steps and isinstance(steps[-1], Entry):
        entry = steps[-1]
        forged = replace(entry.certificate, signatures=tuple(bytes(64) for _ in entry.certificate.signatures))
        return replace(history, steps=(*steps[:-1], replace(entry, certificate=forged)))
    if wrong == 3:
        return replace(history, lineage=(BranchStart(NOWHERE, 0),))
    if wrong == 4 and len(followed) > 1 and not isinstance(steps[0], Beginning):
        return replace(history, base=followed[0][1], steps=steps[1:])
    if wrong == 5:
        return replace(history, round=bounded(history.round + 3))
    return history


TestAnyone = Anyone.TestCase
TestAnyone.settings = settings(max_examples=40, stateful_step_count=40)
