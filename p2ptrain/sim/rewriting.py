"""Rewriting: a Byzantine node is an honest one whose effects are rewritten before they are carried out.

The honest core inside is what makes a liar dangerous: it keeps up with the run, holds payloads, knows whose turn it
is. Its messages are then doubled, altered, held back or sent to some only. A liar has its own signing key and no
other, may know everything (the simulation included), and may agree with other liars on what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias

from blake3 import blake3
from msgspec.structs import replace

from p2ptrain.core import messages as msg
from p2ptrain.core.events import Effect, Publish, Send, SendHistory
from p2ptrain.core.manifest import Manifest, Missing, manifest_of
from p2ptrain.core.node import Node
from p2ptrain.core.participant import Participant
from p2ptrain.sim.keys import FakeSigner
from p2ptrain.sim.machine import ToSome
from p2ptrain.sim.world import SimWorld

TWINS_MAX = 256  # second versions remembered, so that a message sent again is the same

Said: TypeAlias = Effect | ToSome
OfRound: TypeAlias = msg.Announcement | msg.Availability | msg.Proposal | msg.Vote


def sign_with(signer: FakeSigner, message: msg.Authored, attachment: bytes = b"") -> msg.Received:
    signature = signer.sign(msg.signed_bytes(signer.run_id, message))
    return msg.Received(message, msg.message_digest(message), msg.encode(message, signature, attachment), attachment)


@dataclass(eq=False)
class Liar:
    """Base of all liars: passes the honest core's effects on unchanged."""

    rng: Random
    signer: FakeSigner
    world: SimWorld

    is_two_faced = False  # whether its second versions go to one half of the swarm only
    works = True  # whether its contributions come from its own sequences

    def __post_init__(self) -> None:
        self.me, self.salt = self.signer.key, self.rng.randbytes(16)
        self.twins: dict[bytes, msg.Received] = {}  # by the digest of the first version

    def rewrite(self, node: Node, effects: Sequence[Said]) -> list[Said]:
        core, said = node.participant, list[Said]()
        assert core is not None, "a node that is down has no effects"
        for effect in effects:
            if isinstance(effect, Publish):
                received = self.world.decode(effect.envelope)
                assert received is not None, "the core inside a liar is honest"
                said += self.say(core, received)
            elif isinstance(effect, Send):
                said += self.hand_over(effect)
            elif isinstance(effect, SendHistory):
                said += self.tell(core, effect)
            else:
                said.append(effect)
        return [*said, *self.add(core)]

    def say(self, core: Participant, received: msg.Received) -> list[Said]:
        return [Publish(received.envelope)]

    def hand_over(self, effect: Send) -> list[Said]:
        """Replaces messages to one peer, which gets the version meant for its half of the swarm."""
        if not self.twins:
            return [effect]
        return [Send(effect.peer, tuple(self._version(effect.peer, each) for each in effect.envelopes))]

    def _version(self, peer: bytes, envelope: bytes) -> bytes:
        received = self.world.decode(envelope)
        twin = self.twins.get(received.digest) if received else None
        if received is None or twin is None:
            return envelope
        is_first = self.is_two_faced and peer in self.sides(getattr(received.message, "round", 0))[0]
        return envelope if is_first else twin.envelope

    def tell(self, core: Participant, effect: SendHistory) -> list[Said]:
        return [effect]

    def add(self, core: Participant) -> list[Said]:
        """Returns additional effects, which the honest core did not ask for."""
        return []

    def serves(self, payload: bytes, key: bytes) -> bool:
        """Whether to serve a payload or a state to this peer."""
        return True

    # -- Tools --------------------------------------------------------------------------------------

    def signed(self, message: msg.Authored, attachment: bytes = b"") -> msg.Received:
        """Signs a message; the signature is invalid if the message is in another's name."""
        return sign_with(self.signer, message, attachment)

    def twin(self, received: msg.Received, make: Callable[[], msg.Received | None]) -> msg.Received | None:
        """Returns the second version of a message; it is made only once."""
        known = self.twins.get(received.digest)
        if known is None and (known := make()) is not None:
            self.twins[received.digest] = known
            while len(self.twins) > TWINS_MAX:
                del self.twins[next(iter(self.twins))]
        return known

    def sides(self, number: int) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Returns two halves of the swarm, drawn afresh for each round."""
        keys = [node.key for node in self.world.nodes if node.key != self.me]
        prefix = self.salt + number.to_bytes(8, "little")
        left = {key for key in keys if blake3(prefix + key).digest()[0] & 1}
        return tuple(key for key in keys if key in left), tuple(key for key in keys if key not in left)

    def two_faced(self, number: int, first: msg.Received, second: msg.Received | None) -> list[Said]:
        """Publishes one version to one half of the swarm, and the other to the rest."""
        if second is None:
            return [Publish(first.envelope)]
        left, right = self.sides(number)
        return [ToSome(first.envelope, left), ToSome(second.envelope, right)]


# -- Proposals: which availabilities to name --------------------------------------------------------


def choose(
    core: Participant, pool: Iterable[msg.Received], rank: Callable[[msg.Availability], object]
) -> tuple[msg.Received, ...]:
    """Returns the first q availabilities by rank, one from each member, or all if there are fewer."""
    one_each: dict[bytes, msg.Received] = {}
    for received in sorted(pool, key=lambda received: (rank(availability_of(received)), received.digest)):
        one_each.setdefault(availability_of(received).author, received)
    return tuple(sorted(list(one_each.values())[: core.here.roster.quorum], key=lambda received: received.digest))


def manifest_from(core: Participant, named: Iterable[msg.Received]) -> Manifest | None:
    """Returns the manifest that these availabilities lead to; None if we lack something that they name."""
    availabilities, pools = [availability_of(received) for received in named], core.pools
    if len(availabilities) != core.here.roster.quorum:
        return None
    run, announcement, request = core.context.run, pools.offers.announcement, pools.requests.request
    found = manifest_of(core.here.state, run, availabilities, announcement, request)
    return None if isinstance(found, Missing) else found


def availability_of(received: msg.Received) -> msg.Availability:
    assert isinstance(received.message, msg.Availability)
    return received.message


def is_here(core: Participant, message: OfRound) -> bool:
    return (message.branch, message.round) == (core.here.branch, core.here.number)


def proposal_in(core: Participant, vote: msg.Vote) -> msg.Proposal | None:
    view = core.here.agreement.views.get(vote.view) if is_here(core, vote) else None
    message = view.proposal.message if view and view.proposal else None
    return message if isinstance(message, msg.Proposal) else None


class Doubles(Liar):
    """Base of the liars that replace one kind of message by a `second` version: for all, or for half of the swarm."""

    kind: type[OfRound]
    is_of_this_round = False  # whether it lies about its core's current round only

    def say(self, core: Participant, received: msg.Received) -> list[Said]:
        message = received.message
        if not isinstance(message, self.kind) or (self.is_of_this_round and not is_here(core, message)):
            return [Publish(received.envelope)]
        other = self.twin(received, lambda: self.second(core, message))
        if self.is_two_faced:
            return self.two_faced(message.round, received, other)
        return [Publish((other or received).envelope)]

    def second(self, core: Participant, message: Any) -> msg.Received | None:
        """Makes the second version; None if there is none."""
        raise NotImplementedError


class Proposer(Doubles):
    """Base of the liars that alter proposals: `rank` orders the availabilities to name."""

    kind = msg.Proposal
    is_of_this_round = True

    def second(self, core: Participant, message: msg.Proposal) -> msg.Received | None:
        return self.propose(core, message, core.here.availabilities.values())

    def propose(self, core: Participant, proposal: msg.Proposal, pool: Iterable[msg.Received]) -> msg.Received | None:
        """Returns our proposal with other availabilities; None if there are none."""
        named = choose(core, pool, self.rank)
        manifest = manifest_from(core, named)
        if manifest is None:
            return None
        names = tuple(received.digest for received in named)
        return self.signed(replace(proposal, valid_view=-1, availabilities=names, manifest=manifest.digest))

    def rank(self, availability: msg.Availability) -> object:
        return len(availability.held)
