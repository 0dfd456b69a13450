"""Lies about a round: proposals, contributions, availabilities, votes, and silence.

Each class is an honest node that misbehaves in one way; liars.py names them.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from blake3 import blake3
from msgspec.structs import replace

from p2ptrain.core.events import Publish, Send, SendHistory
from p2ptrain.core.messages import NOTHING, SHORT_BYTES, Announcement, Availability, Proposal, Received, Vote
from p2ptrain.sim.keys import FakeSigner
from p2ptrain.sim.rewriting import Liar, Proposer, Said, ToSome, availability_of, is_here

if TYPE_CHECKING:
    from p2ptrain.core.node import Node
    from p2ptrain.sim.cluster import Cluster

# ---------------------------------------------------------------------------------------------------
# Proposals


class EquivocatesProposals(Proposer):
    is_two_faced = True

    def say(self, cluster: Cluster, core: Node, received: Received) -> list[Said]:
        message = received.message
        if not isinstance(message, Proposal) or not is_here(core, message):
            return [Publish(received.envelope)]
        other = self.twin(received, lambda: self.propose(core, message, core.here.availabilities.values()))
        if other is None or other.digest == received.digest:
            return [Publish(received.envelope)]
        return self.two_faced(cluster, message.round, received, other)


class ProposesTheUnavailable(Proposer):
    def say(self, cluster: Cluster, core: Node, received: Received) -> list[Said]:
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

    def say(self, cluster: Cluster, core: Node, received: Received) -> list[Said]:
        message = received.message
        if isinstance(message, Availability | Proposal) and is_here(core, message):
            victim = next((key for key in core.here.roster.members if key != self.me), b"")
            self.hidden = frozenset(offer.name for offer in core.context.offers.by_author.get(victim, ()))
        if isinstance(message, Availability):
            kept = tuple(name for name in message.held if name not in self.hidden)
            return [Publish(self.signed(replace(message, held=kept)).envelope)]
        if not isinstance(message, Proposal) or not is_here(core, message):
            return [Publish(received.envelope)]
        other = self.twin(received, lambda: self.propose(core, message, core.here.availabilities.values()))
        return [Publish((other or received).envelope)]

    def rank(self, availability: Availability) -> object:
        return sum(name in self.hidden for name in availability.held)


class FalseManifests(Liar):
    def say(self, cluster: Cluster, core: Node, received: Received) -> list[Said]:
        message = received.message
        if not isinstance(message, Proposal):
            return [Publish(received.envelope)]
        false = self.twin(received, lambda: self.signed(replace(message, manifest=self.rng.randbytes(32))))
        return [Publish((false or received).envelope)]


# ---------------------------------------------------------------------------------------------------
# Announcements, payloads, availabilities


class EquivocatesAnnouncements(Liar):
    is_two_faced = True

    def say(self, cluster: Cluster, core: Node, received: Received) -> list[Said]:
        message = received.message
        if not isinstance(message, Announcement):
            return [Publish(received.envelope)]
        other = self.twin(received, lambda: self._another(cluster, message))
        return self.two_faced(cluster, message.round, received, other)

    def _another(self, cluster: Cluster, message: Announcement, good: bool = True) -> Received:
        node = cluster.nodes[cluster.key_index[self.me]]
        name, payload = cluster.executor.payloads.make(node, message.round, message.base_round, good)
        node.held_payloads.add(name)
        return self.signed(replace(message, payload=name, payload_bytes=payload.payload_bytes), payload.attachment)


class BadPayloads(EquivocatesAnnouncements):
    is_two_faced = False

    def say(self, cluster: Cluster, core: Node, received: Received) -> list[Said]:
        message = received.message
        if not isinstance(message, Announcement):
            return [Publish(received.envelope)]
        bad = self.twin(received, lambda: self._another(cluster, message, good=False))
        return [Publish((bad or received).envelope)]


class FalseLengths(Liar):
    """Announces a payload with a false length: its own, or another's of the same round as its own."""

    def say(self, cluster: Cluster, core: Node, received: Received) -> list[Said]:
        message = received.message
        if not isinstance(message, Announcement):
            return [Publish(received.envelope)]
        false = self.twin(received, lambda: self._false(core, message))
        return [Publish((false or received).envelope)]

    def _false(self, core: Node, message: Announcement) -> Received:
        offers = [offer.announcement for each in core.context.offers.by_author.values() for offer in each]
        payloads = sorted({each.payload for each in offers if each.round == message.round} | {message.payload})
        length = self.rng.choice((1, message.payload_bytes + 1, 2 * message.payload_bytes))
        return self.signed(replace(message, payload=self.rng.choice(payloads), payload_bytes=length))


class Withholds(Liar):
    def say(self, cluster: Cluster, core: Node, received: Received) -> list[Said]:
        message = received.message
        if not isinstance(message, Announcement):
            return [Publish(received.envelope)]
        left, right = self.sides(cluster, 0)
        bare = self.signed(message)
        return [ToSome(received.envelope, left[: len(left) // 2]), ToSome(bare.envelope, right + left)]

    def hand_over(self, cluster: Cluster, effect: Send) -> list[Said]:
        return [Send(effect.peer, tuple(each for each in effect.envelopes if not self._has_payload(cluster, each)))]

    def _has_payload(self, cluster: Cluster, envelope: bytes) -> bool:
        received = cluster.decode(envelope)
        return received is not None and bool(received.attachment)

    def serves(self, cluster: Cluster, index: int, payload: bytes, key: bytes) -> bool:
        left, _ = self.sides(cluster, 0)
        return key in left[: len(left) // 2]


class TwoFacedAvailabilities(Liar):
    is_two_faced = True

    def say(self, cluster: Cluster, core: Node, received: Received) -> list[Said]:
        message = received.message
        if not isinstance(message, Availability):
            return [Publish(received.envelope)]
        other = self.twin(received, lambda: self._poorer(message))
        return self.two_faced(cluster, message.round, received, other)

    def _poorer(self, message: Availability) -> Received:
        kept = tuple(name for name in message.held if self.rng.random() < 0.5)
        return self.signed(replace(message, held=kept, requests=(), heard=b""))


class FalseRoots(Liar):
    def say(self, cluster: Cluster, core: Node, received: Received) -> list[Said]:
        message = received.message
        if isinstance(message, Availability):
            false = blake3(b"a false root" + message.root_round.to_bytes(8, "little")).digest()
            ahead = message.root_round + self.rng.choice((0, 0, 1, 1_000))
            return [Publish(self.signed(replace(message, root_round=ahead, root=false)).envelope)]
        return [Publish(received.envelope)]


# ---------------------------------------------------------------------------------------------------
# Votes


class EquivocatesVotes(Liar):
    is_two_faced = True

    def say(self, cluster: Cluster, core: Node, received: Received) -> list[Said]:
        message = received.message
        if not isinstance(message, Vote):
            return [Publish(received.envelope)]
        other = self.twin(received, lambda: self.signed(replace(message, manifest=self._another(core, message))))
        return self.two_faced(cluster, message.round, received, other)

    def _another(self, core: Node, vote: Vote) -> bytes:
        if vote.manifest != NOTHING:
            return NOTHING
        view = core.here.agreement.views.get(vote.view) if is_here(core, vote) else None
        proposal = view.proposal.message if view and view.proposal else None
        return proposal.manifest if isinstance(proposal, Proposal) else self.rng.randbytes(32)


class VotesForAll(Liar):
    """Votes for any proposal, even when locked on another."""

    def say(self, cluster: Cluster, core: Node, received: Received) -> list[Said]:
        message = received.message
        if not isinstance(message, Vote) or not is_here(core, message):
            return [Publish(received.envelope)]
        view = core.here.agreement.views.get(message.view)
        proposal = view.proposal.message if view and view.proposal else None
        if not isinstance(proposal, Proposal) or message.manifest == proposal.manifest:
            return [Publish(received.envelope)]
        other = self.twin(received, lambda: self.signed(replace(message, manifest=proposal.manifest)))
        return [Publish((other or received).envelope)]


# ---------------------------------------------------------------------------------------------------
# Silence


class Silent(Liar):
    """Sends no messages of some kinds, neither by gossip nor on a stream."""

    def __init__(self, rng: Random, signer: FakeSigner, phase: str = "all") -> None:
        super().__init__(rng, signer)
        self.phase = phase

    def _is_silent(self, received: Received | None) -> bool:
        match received.message if received else None:
            case Announcement():
                return self.phase in ("announce", "all")
            case Availability():
                return self.phase in ("avail", "all")
            case Proposal():
                return self.phase in ("propose", "all")
            case Vote(ballot=ballot):
                return self.phase in (ballot.name.lower(), "all")
            case _:
                return self.phase == "all"

    def say(self, cluster: Cluster, core: Node, received: Received) -> list[Said]:
        return [] if self._is_silent(received) else [Publish(received.envelope)]

    def hand_over(self, cluster: Cluster, effect: Send) -> list[Said]:
        kept = tuple(each for each in effect.envelopes if not self._is_silent(cluster.decode(each)))
        return [Send(effect.peer, kept)] if kept else []

    def tell(self, cluster: Cluster, core: Node, effect: SendHistory) -> list[Said]:
        return [] if self.phase == "all" else [effect]

    def serves(self, cluster: Cluster, index: int, payload: bytes, key: bytes) -> bool:
        return self.phase != "all"


class SpeaksToSome(Liar):
    def say(self, cluster: Cluster, core: Node, received: Received) -> list[Said]:
        number = getattr(received.message, "round", 0)
        return [ToSome(received.envelope, self.sides(cluster, number)[0])]
