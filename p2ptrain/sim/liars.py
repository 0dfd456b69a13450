"""The liars: those that lie together, and the class of every lie that a scenario names.

With up to f liars in a roster, no lie may make honest nodes apply different manifests or stop them for good. With more,
nothing is promised. Colluders share a plan, kept by the first of them, and each signs with its own key only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TypeAlias

from blake3 import blake3
from msgspec.structs import replace

from p2ptrain.core.events import Publish, Send
from p2ptrain.core.messages import NOTHING, Announcement, Availability, Ballot, Proposal, Received, Vote
from p2ptrain.core.node import Node
from p2ptrain.core.participant import Participant
from p2ptrain.sim import branch_lies, noise, round_lies
from p2ptrain.sim.keys import FakeSigner
from p2ptrain.sim.machine import Rewriter, SimNode, ToSome
from p2ptrain.sim.rewriting import TWINS_MAX, Liar, Proposer, Said, is_here, proposal_in
from p2ptrain.sim.world import SimWorld

MOOD_SECONDS = 15.0  # how long colluders keep up one way of lying
MOODS = (
    "fork", "equivocate votes", "silent prevote", "equivocate proposals", "silent", "two-faced availabilities",
    "fork", "withhold", "silent precommit", "equivocate announcements", "false manifests", "propose anew",
)  # fmt: skip


@dataclass
class Plan:
    """The plan that colluders share: who hears what, secret availabilities, and the manifests to vote for."""

    salt: bytes
    secrets: dict[tuple[bytes, int], dict[bytes, Received]] = field(default_factory=dict)
    pairs: dict[tuple[bytes, int, int], tuple[bytes, bytes]] = field(default_factory=dict)


@dataclass(eq=False)
class Forks(Proposer):
    """Each contribution reaches one half; our proposers propose once with it and once without; all vote for both."""

    sign: int = 1
    fellows: set[bytes] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.plan = Plan(self.salt)

    def _join(self) -> None:
        ours = [node for node in self.world.nodes if isinstance(fork_of(node.liar), Forks)]
        first = fork_of(ours[0].liar) if ours else self
        assert isinstance(first, Forks)
        self.plan, self.salt = first.plan, first.plan.salt
        self.fellows = {node.key for node in ours}
        while len(self.plan.secrets) > TWINS_MAX:
            del self.plan.secrets[next(iter(self.plan.secrets))]
        while len(self.plan.pairs) > TWINS_MAX:
            del self.plan.pairs[next(iter(self.plan.pairs))]

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
    contributions reach one other member besides those few, so that there is a smaller manifest."""

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
        vote = self.signed(replace(message, manifest=ours[0] if ours else self._proposed(core, message)))
        if message.ballot is Ballot.PREVOTE or ours:
            return [Publish(vote.envelope)]
        few, rest = self._few(core, message.round)
        nothing = self.signed(replace(message, manifest=NOTHING))
        return [ToSome(vote.envelope, few), ToSome(nothing.envelope, rest)]


@dataclass(eq=False)
class Schedule(Liar):
    """Changes its lie every few seconds, in step with the other colluders."""

    moods: Mapping[str, Liar]  # by name, "fork" among them

    def _mood(self) -> Liar:
        return self.moods[MOODS[int(self.world.calendar.now // MOOD_SECONDS) % len(MOODS)]]

    def rewrite(self, node: Node, effects: Sequence[Said]) -> list[Said]:
        return self._mood().rewrite(node, effects)

    def serves(self, payload: bytes, key: bytes) -> bool:
        return self._mood().serves(payload, key)


def fork_of(liar: Rewriter | None) -> Rewriter | None:
    """Returns the part of a liar that forks, if it has one."""
    return liar.moods["fork"] if isinstance(liar, Schedule) else liar


Make: TypeAlias = Callable[[Random, FakeSigner, SimWorld], Liar]


def _schedule(rng: Random, signer: FakeSigner, world: SimWorld) -> Liar:
    return Schedule(rng, signer, world, {name: KINDS[name](rng, signer, world) for name in MOODS})


KINDS: dict[str, Make] = {  # by its name in a scenario
    "equivocate announcements": round_lies.EquivocatesAnnouncements,  # offers each half a different contribution
    "equivocate votes": round_lies.EquivocatesVotes,  # votes for a manifest towards one half, and nil towards the other
    "equivocate proposals": round_lies.EquivocatesProposals,  # proposes different availabilities to each half
    "false lengths": round_lies.FalseLengths,
    "withhold": round_lies.Withholds,  # announces payloads, but serves them to a quarter of the swarm only
    "bad payloads": round_lies.BadPayloads,  # announces payloads that the strict decoder refuses
    "propose the unavailable": round_lies.ProposesTheUnavailable,  # names an availability that nobody else has
    "censor": round_lies.Censors,
    "false manifests": round_lies.FalseManifests,  # proposes a digest that the availabilities do not lead to
    "two-faced availabilities": round_lies.TwoFacedAvailabilities,  # tells each half that it holds other contributions
    "false roots": round_lies.FalseRoots,  # claims a state root that is not its own
    "votes for all": round_lies.VotesForAll,
    "replay": noise.Replays,  # repeats old messages, its own and others'
    "keep the dead": noise.KeepsTheDead,
    "ask": noise.Asks,
    "no work": round_lies.DoesNotWork,
    "false audits": round_lies.FalseAudits,  # accuses honest members, and praises its fellows, which do not work
    "flood": noise.Floods,
    "flood quietly": partial(noise.Floods, quietly=True),
    "crowd": noise.Crowds,
    "forge": noise.Forges,  # sends messages in others' names, and garbage
    **{f"silent {phase}": partial(round_lies.Silent, phase=phase) for phase in round_lies.PHASES},
    "silent": round_lies.Silent,
    "speaks to some": round_lies.SpeaksToSome,  # sends its messages to half of the swarm only
    "double calls": branch_lies.DoubleCalls,  # calls for many attempts at once, and signs two sets
    "coup": branch_lies.Coup,  # signs a branch of which it is the only member
    "false histories": branch_lies.FalseHistories,  # answers with histories that are cut, reversed or unsigned
    "claim to be ahead": branch_lies.ClaimsToBeAhead,
    "endless histories": branch_lies.EndlessHistories,
    "false jumps": branch_lies.FalseJumps,
    "false succession": branch_lies.FalseSuccession,  # impossible motions, two words for one, false ends
    "fork": Forks,
    "propose anew": ProposesAnew,
    "collude": _schedule,
}
