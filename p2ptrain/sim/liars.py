"""The liars: the class of every lie that a scenario names.

With up to f liars in a roster, no lie may make honest nodes apply different manifests or stop them for good. With more,
nothing is promised.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import TypeAlias

from p2ptrain.sim import audit_lies, branch_lies, collusion, noise, round_lies
from p2ptrain.sim.keys import FakeSigner
from p2ptrain.sim.rewriting import Liar
from p2ptrain.sim.world import SimWorld

Make: TypeAlias = Callable[[Random, FakeSigner, SimWorld], Liar]


def _schedule(rng: Random, signer: FakeSigner, world: SimWorld) -> Liar:
    moods = {name: KINDS[name](rng, signer, world) for name in collusion.MOODS}
    return collusion.Schedule(rng, signer, world, moods)


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
    "no work": audit_lies.DoesNotWork,
    "false audits": audit_lies.FalseAudits,  # accuses honest members, and praises its fellows, which do not work
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
    "fork": collusion.Forks,
    "propose anew": collusion.ProposesAnew,
    "collude": _schedule,
}
