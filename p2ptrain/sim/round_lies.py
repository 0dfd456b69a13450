"""Lies about a round: proposals, contributions, availabilities, votes, silence, and work that nobody did."""

from __future__ import annotations

from dataclasses import dataclass

from blake3 import blake3
from msgspec.structs import replace

from p2ptrain.core import messages as msg
from p2ptrain.core.events import Publish, Send, SendHistory
from p2ptrain.core.participant import Participant
from p2ptrain.sim.machine import ToSome
from p2ptrain.sim.rewriting import Doubles, Liar, Proposer, Said, availability_of, is_here, proposal_in

PHASES = ("announce", "avail", "propose", "prevote", "precommit")

# -- Proposals --------------------------------------------------------------------------------------


class EquivocatesProposals(Proposer):
    is_two_faced = True

    def two_faced(self, number: int, first: msg.Received, second: msg.Received | None) -> list[Said]:
        return super().two_faced(number, first, second if second and second.digest != first.digest else None)


class ProposesTheUnavailable(Proposer):
    def say(self, core: Participant, received: msg.Received) -> list[Said]:
        message = received.message
        if not isinstance(message, msg.Proposal) or not is_here(core, message) or core.here.mine is None:
            return [Publish(received.envelope)]
        mine = availability_of(core.here.mine)
        secret = self.signed(replace(mine, held=(), requests=(self.rng.randbytes(msg.SHORT_BYTES),)))
        other = self.twin(received, lambda: self.propose(core, message, [*core.here.availabilities.values(), secret]))
        return [Publish((other or received).envelope)]

    def rank(self, availability: msg.Availability) -> object:
        return availability.author != self.me, len(availability.held)


class Censors(Proposer):
    """Keeps the contributions of the first other member out of manifests where it can."""

    hidden: frozenset[bytes] = frozenset()  # the victim's announcements

    def say(self, core: Participant, received: msg.Received) -> list[Said]:
        message = received.message
        if isinstance(message, msg.Availability | msg.Proposal) and is_here(core, message):
            victim = next((key for key in core.here.roster.members if key != self.me), b"")
            self.hidden = frozenset(offer.name for offer in core.pools.offers.by_author.get(victim, ()))
        if isinstance(message, msg.Availability):
            kept = tuple(name for name in message.held if name not in self.hidden)
            return [Publish(self.signed(replace(message, held=kept)).envelope)]
        return super().say(core, received)

    def rank(self, availability: msg.Availability) -> object:
        return sum(name in self.hidden for name in availability.held)


class FalseManifests(Doubles):
    kind = msg.Proposal

    def second(self, core: Participant, message: msg.Proposal) -> msg.Received:
        return self.signed(replace(message, manifest=self.rng.randbytes(32)))


# -- Announcements, payloads, availabilities --------------------------------------------------------


class BadPayloads(Doubles):
    kind = msg.Announcement
    is_good = False

    def second(self, core: Participant, message: msg.Announcement) -> msg.Received:
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

    kind = msg.Announcement

    def second(self, core: Participant, message: msg.Announcement) -> msg.Received:
        offers = [offer.announcement for each in core.pools.offers.by_author.values() for offer in each]
        payloads = sorted({each.payload for each in offers if each.round == message.round} | {message.payload})
        length = self.rng.choice((1, message.payload_bytes + 1, 2 * message.payload_bytes))
        return self.signed(replace(message, payload=self.rng.choice(payloads), payload_bytes=length))


class Withholds(Liar):
    def say(self, core: Participant, received: msg.Received) -> list[Said]:
        message = received.message
        if not isinstance(message, msg.Announcement):
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
    kind = msg.Availability
    is_two_faced = True

    def second(self, core: Participant, message: msg.Availability) -> msg.Received:
        kept = tuple(name for name in message.held if self.rng.random() < 0.5)
        return self.signed(replace(message, held=kept, requests=(), heard=b""))


class FalseRoots(Liar):
    def say(self, core: Participant, received: msg.Received) -> list[Said]:
        message = received.message
        if isinstance(message, msg.Availability):
            false = blake3(b"a false root" + message.root_round.to_bytes(8, "little")).digest()
            ahead = message.root_round + self.rng.choice((0, 0, 1, 1_000))
            return [Publish(self.signed(replace(message, root_round=ahead, root=false)).envelope)]
        return [Publish(received.envelope)]


# -- Votes ------------------------------------------------------------------------------------------


class EquivocatesVotes(Doubles):
    kind = msg.Vote
    is_two_faced = True

    def second(self, core: Participant, message: msg.Vote) -> msg.Received:
        other = msg.NOTHING
        if message.manifest == msg.NOTHING:
            proposal = proposal_in(core, message)
            other = proposal.manifest if proposal else self.rng.randbytes(32)
        return self.signed(replace(message, manifest=other))


class VotesForAll(Doubles):
    """Votes for any proposal, even when locked on another."""

    kind = msg.Vote
    is_of_this_round = True

    def second(self, core: Participant, message: msg.Vote) -> msg.Received | None:
        proposal = proposal_in(core, message)
        if proposal is None or message.manifest == proposal.manifest:
            return None
        return self.signed(replace(message, manifest=proposal.manifest))


# -- Silence ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class Silent(Liar):
    """Sends no messages of some kinds, neither by gossip nor on a stream."""

    phase: str = "all"

    def _is_silent(self, received: msg.Received | None) -> bool:
        match received.message if received else None:
            case msg.Announcement():
                phase = "announce"
            case msg.Availability():
                phase = "avail"
            case msg.Proposal():
                phase = "propose"
            case msg.Vote(ballot=ballot):
                phase = ballot.name.lower()
            case _:
                phase = "all"
        return self.phase in (phase, "all")

    def say(self, core: Participant, received: msg.Received) -> list[Said]:
        return [] if self._is_silent(received) else [Publish(received.envelope)]

    def hand_over(self, effect: Send) -> list[Said]:
        kept = tuple(each for each in effect.envelopes if not self._is_silent(self.world.decode(each)))
        return [Send(effect.peer, kept)] if kept else []

    def tell(self, core: Participant, effect: SendHistory) -> list[Said]:
        return [] if self.phase == "all" else [effect]

    def serves(self, payload: bytes, key: bytes) -> bool:
        return self.phase != "all"


class SpeaksToSome(Liar):
    def say(self, core: Participant, received: msg.Received) -> list[Said]:
        return [ToSome(received.envelope, self.sides(getattr(received.message, "round", 0))[0])]


PRAISE, BLAME = (1_900, 1_000), (-msg.Z_MAX, -msg.STRENGTH_MAX)


class DoesNotWork(Liar):
    """Contributes well-formed numbers that come from no sequences of its own."""

    works = False


@dataclass(eq=False)
class FalseAudits(DoesNotWork):
    """Says of every contribution that an audit may be of, each round anew, what helps its fellows: all together accuse
    one honest member after the other, and praise themselves."""

    said: tuple[bytes, int] = b"", 0  # branch and round

    def say(self, core: Participant, received: msg.Received) -> list[Said]:
        return [] if isinstance(received.message, msg.AuditReport) else [Publish(received.envelope)]

    def add(self, core: Participant) -> list[Said]:
        state = core.here.state
        if (state.branch, state.round) == self.said or self.me not in state.roster.seat:
            return []
        self.said = state.branch, state.round
        wanted = {(summons.key, summons.round, True) for summons in state.summons}
        honest = [node.key for node in self.world.nodes if node.honest and node.key in state.place]
        victim = honest[state.round // 8 % len(honest)]
        places = {place[:2] for place in state.taken_lately if place[0] == victim or not self._is_honest(place[0])}
        wanted |= {(*place, False) for place in places}
        made = []
        for key, number, is_summoned in sorted(wanted):
            if key != self.me:
                z, strength = BLAME if self._is_honest(key) else PRAISE
                made.append(self.signed(msg.AuditReport(state.branch, number, key, z, strength, is_summoned, self.me)))
        return [Publish(each.envelope) for each in made]

    def _is_honest(self, key: bytes) -> bool:
        return self.world.node_of(key).honest
