"""The liars: the class of every lie that a scenario names.

With up to f liars in a roster, no lie may make honest nodes apply different manifests or stop them for good. With more,
nothing is promised.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import TypeAlias

from p2ptrain.sim import branch_lies, collusion, noise, round_lies
from p2ptrain.sim.keys import FakeSigner
from p2ptrain.sim.rewriting import Liar
from p2ptrain.sim.world import SimWorld

Make: TypeAlias = Callable[[Random, FakeSigner, SimWorld], Liar]


def _schedule(rng: Random, signer: FakeSigner, world: SimWorld) -> Liar:
    moods = {name: KINDS[name](rng, signer, world) for name in collusion.MOODS}
    return collusion.Schedule(rng, signer, world, moods)


KINDS: dict[str, Make] = {  # by its name in a scenario, which says what it does
    "equivocate announcements": round_lies.EquivocatesAnnouncements,
    "equivocate votes": round_lies.EquivocatesVotes,
    "equivocate proposals": round_lies.EquivocatesProposals,
    "false lengths": round_lies.FalseLengths,
    "withhold": round_lies.Withholds,
    "bad payloads": round_lies.BadPayloads,
    "propose the unavailable": round_lies.ProposesTheUnavailable,
    "censor": round_lies.Censors,
    "false manifests": round_lies.FalseManifests,
    "two-faced availabilities": round_lies.TwoFacedAvailabilities,
    "false roots": round_lies.FalseRoots,
    "votes for all": round_lies.VotesForAll,
    "replay": noise.Replays,
    "keep the dead": noise.KeepsTheDead,
    "ask": noise.Asks,
    "flood": noise.Floods,
    "flood quietly": partial(noise.Floods, quietly=True),
    "crowd": noise.Crowds,
    "forge": noise.Forges,
    **{f"silent {phase}": partial(round_lies.Silent, phase=phase) for phase in round_lies.PHASES},
    "silent": round_lies.Silent,
    "speaks to some": round_lies.SpeaksToSome,
    "double calls": branch_lies.DoubleCalls,
    "coup": branch_lies.Coup,
    "false histories": branch_lies.FalseHistories,
    "claim to be ahead": branch_lies.ClaimsToBeAhead,
    "endless histories": branch_lies.EndlessHistories,
    "false jumps": branch_lies.FalseJumps,
    "fork": collusion.Forks,
    "propose anew": collusion.ProposesAnew,
    "collude": _schedule,
}
