"""Agreements with f liars under random delivery, loss and timing: never two decisions, and one in the end."""

from __future__ import annotations

from functools import lru_cache
from random import Random

import pytest

from p2ptrain.core.agreement import Agreement, CastVote, Decided, Judgement, Propose, ViewEntered
from p2ptrain.core.messages import NOTHING, Ballot, Proposal, Received, Vote
from p2ptrain.core.roster import Roster
from p2ptrain.digest import digest
from tests.helpers.agreement import A, B, SeatedMember, proposal
from tests.helpers.core import KEYS, RUN, signed

WILD_STEPS = 700  # in which anything happens; enough for a dozen views
CALM_STEPS = 40_000  # in which nothing is lost any more; far more than they need


@lru_cache(maxsize=100_000)
def sealed(message: Proposal | Vote) -> Received:
    return signed(message)


class WithoutLock(Agreement):
    """A mutant whose members forget their precommits."""

    def _enter(self, number: int, now: float) -> ViewEntered:
        self.locked, self.locked_view, self.valid, self.valid_view = NOTHING, -1, None, -1
        super()._enter(number, now)
        return ViewEntered(number)


class WithSmallQuorums(Agreement):
    """A mutant in which a simple majority decides."""

    def __init__(self, roster: Roster, *rest: object) -> None:
        smaller = Roster(roster.members)
        smaller.quorum = roster.size // 2 + (roster.size % 2)
        super().__init__(smaller, *rest)  # type: ignore[arg-type]


class VirtualMembers:
    """Members on one virtual clock; the seed chooses every delivery."""

    def __init__(self, seed: int, size: int, kind: type[Agreement] = Agreement) -> None:
        self.rng = Random(seed)
        self.members = KEYS[:size]
        self.roster = Roster(self.members)
        self.liars = set(self.rng.sample(range(size), self.roster.tolerated))
        self.honest = [seat for seat in range(size) if seat not in self.liars]
        self.losses = [self.rng.choice((0.0, 0.1, 0.3, 0.6)) for _ in range(size)]  # of what each hears
        self.haste = self.rng.choice((0.02, 0.2, 0.5))  # how often time passes while messages are under way
        self.is_two_faced = self.rng.random() < 0.5
        self.now = 0.0
        self.is_calm = False
        self.mail: list[tuple[int, Received]] = []
        self.manifests = [digest("core test", b"manifest", key) for key in self.members]
        self.lacking = {
            (seat, manifest) for seat in self.honest for manifest in self.manifests if self.rng.random() < 0.2
        }
        self.agreements = {seat: self._agreement(seat, kind) for seat in self.honest}

    def _agreement(self, seat: int, kind: type[Agreement]) -> Agreement:
        def judge(received: Received) -> Judgement:
            assert isinstance(received.message, Proposal)
            is_lacking = not self.is_calm and (seat, received.message.manifest) in self.lacking
            return Judgement.KNOWN if is_lacking else Judgement.HELD

        return kind(self.roster, self.members, self.members[seat], judge, lambda: True, (2.0, 60.0))

    @property
    def decisions(self) -> set[bytes]:
        return {agreement.decided.manifest for agreement in self.agreements.values() if agreement.decided}

    def run(self) -> set[bytes]:
        """Runs the swarm and returns its decisions."""
        for agreement in self.agreements.values():
            agreement.start(self.now)
        for _ in range(WILD_STEPS):
            self._step()
        self.is_calm = True
        for _ in range(CALM_STEPS):
            if self.decisions:  # whoever has decided hands the certificate to the rest
                break
            self._step()
        return self.decisions

    def _step(self) -> None:
        rng = self.rng
        if not self.is_calm and self.liars and rng.random() < 0.3:
            self._lie()
        if self.mail and (self.is_calm or rng.random() >= self.haste):
            place = rng.randrange(len(self.mail))
            self.mail[place], self.mail[-1] = self.mail[-1], self.mail[place]
            seat, received = self.mail.pop()
            self._deliver(seat, received)
            return
        deadlines = [agreement.deadline for agreement in self.agreements.values()]
        self.now = max(self.now, min((time for time in deadlines if time is not None), default=self.now))
        for seat in self.honest:
            self._go_on(seat)
            if rng.random() < 0.05 or self.is_calm:  # a hello, and what a peer hands over
                self._say_again(seat)

    def _deliver(self, seat: int, received: Received) -> None:
        agreement = self.agreements[seat]
        hear = agreement.hear_vote if isinstance(received.message, Vote) else agreement.hear_proposal
        hear(received)
        self._go_on(seat)

    def _go_on(self, seat: int) -> None:
        agreement = self.agreements[seat]
        while (act := agreement.advance(self.now)) is not None:
            match act:
                case CastVote(view=view, ballot=ballot, manifest=manifest):
                    vote = sealed(Vote(RUN, 1, view, ballot, manifest, self.members[seat]))
                    agreement.hear_vote(vote)
                    self._send(vote)
                case Propose(view=view, valid_view=valid_view, valid=valid):
                    manifest = valid.manifest if valid else self.manifests[seat]
                    proposal = sealed(Proposal(RUN, 1, view, valid_view, (manifest,), manifest, self.members[seat]))
                    agreement.hear_proposal(proposal)
                    self._send(proposal, *agreement.voted(valid_view, Ballot.PREVOTE, manifest))
                case ViewEntered():
                    self._say_again(seat)
                case Decided():
                    return

    def _say_again(self, seat: int) -> None:
        agreement, key = self.agreements[seat], self.members[seat]
        numbers = sorted(agreement.views) if self.is_calm else (agreement.view - 1, agreement.view)
        for view in [agreement.views[number] for number in numbers if number in agreement.views]:
            if view.proposal is not None and read_author(view.proposal) == key:
                self._send(view.proposal)
            self._send(*(votes[key] for votes in (view.prevotes, view.precommits) if key in votes))
            if self.is_calm:
                self._send(*view.prevotes.values(), *view.precommits.values())

    def _send(self, *messages: Received) -> None:
        for received in messages:
            for seat in self.honest:
                if self.is_calm or self.rng.random() >= self.losses[seat]:
                    self.mail.append((seat, received))

    def _lie(self) -> None:
        """Sends a vote for a manifest that some member wants, a nil vote or any proposal, to some members before
        anything else."""
        rng = self.rng
        liar = self.members[rng.choice(sorted(self.liars))]
        seat = rng.choice(self.honest)
        views = self.agreements[seat].views
        number = rng.choice(sorted(views)[-3:])
        proposal = views[number].proposal
        if number % len(self.members) == self.members.index(liar) and rng.random() < 0.5:
            manifest, backing = rng.choice(self.manifests), rng.randint(-1, number - 1)
            message = Proposal(RUN, 1, number, backing, (manifest,), manifest, liar)
            self._deliver(seat, sealed(message))
            return
        wanted = proposal.message.manifest if proposal and isinstance(proposal.message, Proposal) else NOTHING
        if self.is_two_faced:  # helps one to a decision, and tells the rest that there is none
            for each in self.honest:
                choices = {Ballot.PREVOTE: wanted, Ballot.PRECOMMIT: wanted if each == self.honest[0] else NOTHING}
                for ballot, manifest in choices.items():
                    self._deliver(each, sealed(Vote(RUN, 1, number, ballot, manifest, liar)))
            return
        manifest = rng.choice((wanted, wanted, NOTHING, rng.choice(self.manifests)))
        self._deliver(seat, sealed(Vote(RUN, 1, number, rng.choice(tuple(Ballot)), manifest, liar)))


def read_author(received: Received) -> bytes:
    assert isinstance(received.message, Proposal | Vote)
    return received.message.author


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 10])
def test_one_manifest_is_decided_whatever_liars_and_the_network_do(size: int) -> None:
    for seed in range(60 if size <= 5 else 10):
        swarm = VirtualMembers(seed, size)
        assert len(swarm.run()) == 1, f"seed {seed}"


def test_the_model_sees_what_smaller_quorums_lead_to() -> None:
    def is_broken(seed: int) -> bool:
        return len(VirtualMembers(seed, 4, WithSmallQuorums).run()) > 1

    assert any(is_broken(seed) for seed in range(100))


@pytest.mark.parametrize(("kind", "decided"), [(Agreement, A), (WithoutLock, B)])
def test_without_locks_one_liar_brings_about_two_decisions(kind: type[Agreement], decided: bytes) -> None:
    """Seat 3 lies: it precommits nil towards two members that have not seen each other's third precommit."""
    members = [SeatedMember(seat, draft=(A, B, A)[seat], kind=kind) for seat in range(3)]
    for member in members:
        member.begin()
        member.hear(proposal(0, A))
        member.hear_votes(Ballot.PREVOTE, A, *({0, 1, 2} - {member.seat}))
        member.go_on(0.0)
    members[2].hear_votes(Ballot.PRECOMMIT, A, 0, 1)
    assert members[2].go_on(0.0) == [Decided(0, A)]
    for member, other in ((members[0], 1), (members[1], 0)):
        member.hear_votes(Ballot.PRECOMMIT, A, other)
        member.hear_votes(Ballot.PRECOMMIT, NOTHING, 3)
        member.go_on(0.0)
        assert ViewEntered(1) in member.go_on(2.0)
        member.hear(proposal(1, decided, valid_view=0 if decided == A else -1))
        member.hear_votes(Ballot.PREVOTE, decided, other, 3, view=1)
        member.go_on(2.0)
        member.hear_votes(Ballot.PRECOMMIT, decided, other, 3, view=1)
        assert member.go_on(2.0)[-1] == Decided(1, decided)
