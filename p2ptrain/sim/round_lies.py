"""Lies about a round: proposals, contributions, availabilities, votes, and silence.

Each class is an honest node that misbehaves in one way; liars.py names them.
"""

from __future__ import annotations

from random import Random

from blake3 import blake3
from msgspec.structs import replace

from p2ptrain.core.events import Publish, Send, SendHistory
from p2ptrain.core.messages import NOTHING, SHORT_BYTES, Announcement, Availability, Proposal, Received, Vote
from p2ptrain.core.participant import Participant
from p2ptrain.sim.keys import FakeSigner
from p2ptrain.sim.machine import ToSome
from p2ptrain.sim.rewriting import Doubles, Liar, Proposer, Said, availability_of, is_here, proposal_in
from p2ptrain.sim.world import SimWorld

# ---------------------------------------------------------------------------------------------------
# Proposals


class EquivocatesProposals(Proposer):
    is_two_faced = True

    def two_faced(self, number: int, first: Received, second: Received | None) -> list[Said]:
        return super().two_faced(number, first, second if second and second.digest != first.digest else None)


class ProposesTheUnavailable(Proposer):
    def say(self, core: Participant, received: Received) -> list[Said]:
        message = received.message
        if not isinstance(message, Proposal) or not is_here(core, message) or core.here.mine is None:
            return [Publish(received.envelope)]
        mine = availability_of(core.here.mine)
        secret = self.signed(replace(mine, held=(), requests=(self.rng.randbytes(SHORT_BYTES),)))
        other = self.twin(received, lambda: self.propose(core, message, [*core.here.availabilities.values(), secret]))
        return [Publish((other or received).envelope)]

    def rank(self, availability: Availability) -> object:
        return availability.author != self.me, len(availability.held)


class Censors(Proposer):
    """Keeps the contributions of the first other member out of manifests where it can."""

    hidden: frozenset[bytes] = frozenset()  # the victim's announcements

    def say(self, core: Participant, received: Received) -> list[Said]:
        message = received.message
        if isinstance(message, Availability | Proposal) and is_here(core, message):
            victim = next((key for key in core.here.roster.members if key != self.me), b"")
            self.hidden = frozenset(offer.name for offer in core.pools.offers.by_author.get(victim, ()))
        if isinstance(message, Availability):
            kept = tuple(name for name in message.held if name not in self.hidden)
            return [Publish(self.signed(replace(message, held=kept)).envelope)]
        return super().say(core, received)

    def rank(self, availability: Availability) -> object:
        return sum(name in self.hidden for name in availability.held)


class FalseManifests(Doubles):
    kind = Proposal

    def second(self, core: Participant, message: Proposal) -> Received:
        return self.signed(replace(message, manifest=self.rng.randbytes(32)))


# ---------------------------------------------------------------------------------------------------
# Announcements, payloads, availabilities


class BadPayloads(Doubles):
    kind = Announcement
    is_good = False

    def second(self, core: Participant, message: Announcement) -> Received:
        node = self.world.nodes[self.world.key_index[self.me]]
        name, payload = self.world.payloads.make(node, message.round, message.base_round, self.is_good)
        node.held_payloads.add(name)
        changed = replace(message, payload=name, payload_bytes=payload.payload_bytes, content=payload.content)
        return self.signed(changed, payload.attachment)


class EquivocatesAnnouncements(BadPayloads):
    is_two_faced = True
    is_good = True


class FalseLengths(Doubles):
    """Announces a payload with a false length: its own, or another's of the same round as its own."""

    kind = Announcement

    def second(self, core: Participant, message: Announcement) -> Received:
        offers = [offer.announcement for each in core.pools.offers.by_author.values() for offer in each]
        payloads = sorted({each.payload for each in offers if each.round == message.round} | {message.payload})
        length = self.rng.choice((1, message.payload_bytes + 1, 2 * message.payload_bytes))
        return self.signed(replace(message, payload=self.rng.choice(payloads), payload_bytes=length))


class Withholds(Liar):
    def say(self, core: Participant, received: Received) -> list[Said]:
        message = received.message
        if not isinstance(message, Announcement):
            return [Publish(received.envelope)]
        left, right = self.sides(0)
        bare = self.signed(message)
        return [ToSome(received.envelope, left[: len(left) // 2]), ToSome(bare.envelope, right + left)]

    def hand_over(self, effect: Send) -> list[Said]:
        return [Send(effect.peer, tuple(each for each in effect.envelopes if not self._has_payload(each)))]

    def _has_payload(self, envelope: bytes) -> bool:
        received = self.world.decode(envelope)
        return received is not None and bool(received.attachment)

    def serves(self, payload: bytes, key: bytes) -> bool:
        left, _ = self.sides(0)
        return key in left[: len(left) // 2]


class TwoFacedAvailabilities(Doubles):
    kind = Availability
    is_two_faced = True

    def second(self, core: Participant, message: Availability) -> Received:
        kept = tuple(name for name in message.held if self.rng.random() < 0.5)
        return self.signed(replace(message, held=kept, requests=(), heard=b""))


class FalseRoots(Liar):
    def say(self, core: Participant, received: Received) -> list[Said]:
        message = received.message
        if isinstance(message, Availability):
            false = blake3(b"a false root" + message.root_round.to_bytes(8, "little")).digest()
            ahead = message.root_round + self.rng.choice((0, 0, 1, 1_000))
            return [Publish(self.signed(replace(message, root_round=ahead, root=false)).envelope)]
        return [Publish(received.envelope)]


# ---------------------------------------------------------------------------------------------------
# Votes


class EquivocatesVotes(Doubles):
    kind = Vote
    is_two_faced = True

    def second(self, core: Participant, message: Vote) -> Received:
        other = NOTHING
        if message.manifest == NOTHING:
            proposal = proposal_in(core, message)
            other = proposal.manifest if proposal else self.rng.randbytes(32)
        return self.signed(replace(message, manifest=other))


class VotesForAll(Doubles):
    """Votes for any proposal, even when locked on another."""

    kind = Vote
    is_of_this_round = True

    def second(self, core: Participant, message: Vote) -> Received | None:
        proposal = proposal_in(core, message)
        if proposal is None or message.manifest == proposal.manifest:
            return None
        return self.signed(replace(message, manifest=proposal.manifest))


# ---------------------------------------------------------------------------------------------------
# Silence


PHASES = ("announce", "avail", "propose", "prevote", "precommit")


class Silent(Liar):
    """Sends no messages of some kinds, neither by gossip nor on a stream."""

    def __init__(self, rng: Random, signer: FakeSigner, world: SimWorld, phase: str = "all") -> None:
        super().__init__(rng, signer, world)
        self.phase = phase

    def _is_silent(self, received: Received | None) -> bool:
        match received.message if received else None:
            case Announcement():
                phase = "announce"
            case Availability():
                phase = "avail"
            case Proposal():
                phase = "propose"
            case Vote(ballot=ballot):
                phase = ballot.name.lower()
            case _:
                phase = "all"
        return self.phase in (phase, "all")

    def say(self, core: Participant, received: Received) -> list[Said]:
        return [] if self._is_silent(received) else [Publish(received.envelope)]

    def hand_over(self, effect: Send) -> list[Said]:
        kept = tuple(each for each in effect.envelopes if not self._is_silent(self.world.decode(each)))
        return [Send(effect.peer, kept)] if kept else []

    def tell(self, core: Participant, effect: SendHistory) -> list[Said]:
        return [] if self.phase == "all" else [effect]

    def serves(self, payload: bytes, key: bytes) -> bool:
        return self.phase != "all"


class SpeaksToSome(Liar):
    def say(self, core: Participant, received: Received) -> list[Said]:
        number = getattr(received.message, "round", 0)
        return [ToSome(received.envelope, self.sides(number)[0])]
