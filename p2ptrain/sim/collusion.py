"""Collusion: lies that several nodes tell together.

They share a plan, kept by the first of them, and each signs with its own key only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from blake3 import blake3
from msgspec.structs import replace

from p2ptrain.core.events import Publish, Send
from p2ptrain.core.messages import NOTHING, Announcement, Availability, Ballot, Proposal, Received, Vote
from p2ptrain.core.node import Node
from p2ptrain.core.participant import Participant
from p2ptrain.sim.keys import FakeSigner
from p2ptrain.sim.machine import Rewriter, SimNode, ToSome
from p2ptrain.sim.rewriting import TWINS_MAX, Liar, Proposer, Said, is_here, proposal_in
from p2ptrain.sim.world import SimWorld

MOOD_SECONDS = 15.0  # how long colluders keep up one way of lying
MOODS = (
    "fork", "equivocate votes", "silent prevote", "equivocate proposals", "silent", "two-faced availabilities",
    "fork", "withhold", "silent precommit", "equivocate announcements", "false manifests", "propose anew",
)  # fmt: skip


class Plan:
    """The plan that colluders share: who hears what, secret availabilities, and the manifests to vote for."""

    def __init__(self, salt: bytes) -> None:
        self.salt = salt
        self.secrets: dict[tuple[bytes, int], dict[bytes, Received]] = {}
        self.pairs: dict[tuple[bytes, int, int], tuple[bytes, bytes]] = {}

    def forget(self) -> None:
        """Drops old entries."""
        while len(self.secrets) > TWINS_MAX:
            del self.secrets[next(iter(self.secrets))]
        while len(self.pairs) > TWINS_MAX:
            del self.pairs[next(iter(self.pairs))]


class Forks(Proposer):
    """Each contribution reaches one half; our proposers propose once with it and once without; all vote for both."""

    def __init__(self, rng: Random, signer: FakeSigner, world: SimWorld) -> None:
        super().__init__(rng, signer, world)
        self.plan = Plan(self.salt)
        self.sign = 1
        self.fellows: set[bytes] = set()

    def _join(self) -> None:
        """Adopts the plan of the first colluder."""
        ours = [node for node in self.world.nodes if isinstance(fork_of(node.liar), Forks)]
        first = fork_of(ours[0].liar) if ours else self
        assert isinstance(first, Forks)
        self.plan, self.salt = first.plan, first.plan.salt
        self.fellows = {node.key for node in ours}
        self.plan.forget()

    def say(self, core: Participant, received: Received) -> list[Said]:
        self._join()
        match received.message:
            case Announcement(round=number):
                return [ToSome(received.envelope, self.sides(number)[0])]
            case Availability() as message:
                return self._availabilities(received, message)
            case Proposal() as message if is_here(core, message):
                return self.proposals(core, message)
            case Vote() as message:
                return self.votes(core, message)
            case _:
                return [Publish(received.envelope)]

    def hand_over(self, effect: Send) -> list[Said]:
        """Drops our own messages, because the wrapped core does not know what we sent instead."""
        others = tuple(each for each in effect.envelopes if not self._is_mine(each))
        return [Send(effect.peer, others)] if others else []

    def _is_mine(self, envelope: bytes) -> bool:
        received = self.world.decode(envelope)
        return received is not None and getattr(received.message, "author", b"") == self.me

    def _availabilities(self, received: Received, message: Availability) -> list[Said]:
        poorer = self.signed(replace(message, held=()))
        secrets = self.plan.secrets.setdefault((message.branch, message.round), {})
        secrets[received.digest], secrets[poorer.digest] = received, poorer
        return [Publish(received.envelope)]

    def rank(self, availability: Availability) -> object:
        return self.sign * len(availability.held)

    def proposals(self, core: Participant, message: Proposal) -> list[Said]:
        place = message.branch, message.round, message.view
        pool = {**core.here.availabilities, **self.plan.secrets.get(place[:2], {})}
        made: list[Received] = []
        for self.sign in (-1, 1):
            made += [each for each in [self.propose(core, message, pool.values())] if each is not None]
        if len(made) < 2:
            return [Publish(self.signed(message).envelope)]
        first, second = made
        self.plan.pairs[place] = first.message.manifest, second.message.manifest  # type: ignore[union-attr]
        return [*self._secrets(message), *self.two_faced(message.round, first, second)]

    def _secrets(self, message: Proposal) -> list[Said]:
        """Returns the availabilities that our proposals may name."""
        return [Publish(each.envelope) for each in self.plan.secrets.get((message.branch, message.round), {}).values()]

    def votes(self, core: Participant, message: Vote) -> list[Said]:
        pair = self.plan.pairs.get((message.branch, message.round, message.view))
        pair = pair or (self._proposed(core, message), NOTHING)
        first, second = (self.signed(replace(message, manifest=manifest)) for manifest in pair)
        return self.two_faced(message.round, first, second)

    def _proposed(self, core: Participant, vote: Vote) -> bytes:
        """Returns the manifest proposed in this view, or else the one that we would have voted for."""
        return (proposal_in(core, vote) or vote).manifest


class ProposesAnew(Forks):
    """Lets a few decide on a proposal, and then proposes something else, as if nobody had voted.

    We send everyone a prevote for an honest member's proposal, and only a few the precommit: those may decide, the
    others may not. Our own proposals are for the smallest manifest there is, and all of us vote for it. Our
    contributions reach one other member besides those few, so that there is a smaller manifest.
    """

    def say(self, core: Participant, received: Received) -> list[Said]:
        self._join()
        if isinstance(received.message, Announcement):
            few, rest = self._few(core, received.message.round)
            return [ToSome(received.envelope, (*few, *rest[:1], *sorted(self.fellows)))]
        return super().say(core, received)

    def _few(self, core: Participant, number: int) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Returns the members that the fewest others hear, and all remaining ones but us."""
        others = [node for node in self.world.nodes if node.key not in self.fellows]

        def heard_by(node: SimNode) -> int:
            return sum(self.world.network.is_open(node.index, other.index) for other in others)

        prefix = self.salt + number.to_bytes(8, "little")
        others.sort(key=lambda node: (heard_by(node), blake3(prefix + node.key).digest()))
        keys = tuple(node.key for node in others)
        told = max(1, core.here.roster.tolerated)
        return keys[:told], keys[told:]

    def proposals(self, core: Participant, message: Proposal) -> list[Said]:
        secrets = self.plan.secrets.get((message.branch, message.round), {})
        made = self.propose(core, message, {**core.here.availabilities, **secrets}.values())
        anew = made or self.signed(message)
        assert isinstance(anew.message, Proposal)
        self.plan.pairs[message.branch, message.round, message.view] = anew.message.manifest, NOTHING
        return [*self._secrets(message), Publish(anew.envelope)]

    def votes(self, core: Participant, message: Vote) -> list[Said]:
        ours = self.plan.pairs.get((message.branch, message.round, message.view))
        choice = ours[0] if ours else self._proposed(core, message)
        vote = self.signed(replace(message, manifest=choice))
        if message.ballot is Ballot.PREVOTE or ours:
            return [Publish(vote.envelope)]
        few, rest = self._few(core, message.round)
        nothing = self.signed(replace(message, manifest=NOTHING))
        return [ToSome(vote.envelope, few), ToSome(nothing.envelope, rest)]


class Schedule(Liar):
    """Changes its lie every few seconds, in step with the other colluders."""

    def __init__(self, rng: Random, signer: FakeSigner, world: SimWorld, moods: Mapping[str, Liar]) -> None:
        super().__init__(rng, signer, world)
        self.moods = moods  # by name, "fork" among them

    def _mood(self) -> Liar:
        return self.moods[MOODS[int(self.world.calendar.now // MOOD_SECONDS) % len(MOODS)]]

    def rewrite(self, node: Node, effects: Sequence[Said]) -> list[Said]:
        return self._mood().rewrite(node, effects)

    def serves(self, payload: bytes, key: bytes) -> bool:
        return self._mood().serves(payload, key)


def fork_of(liar: Rewriter | None) -> Rewriter | None:
    """Returns the part of a liar that forks, if it has one."""
    return liar.moods["fork"] if isinstance(liar, Schedule) else liar
