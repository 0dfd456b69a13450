"""The liars: every kind of lie by name.

With up to f liars in a roster, no lie may make honest nodes apply different manifests or stop them for good. With more,
nothing is promised.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple

from p2ptrain.sim import branch_lies, collusion, noise, round_lies
from p2ptrain.sim.keys import FakeSigner
from p2ptrain.sim.rewriting import Liar, ToSome

__all__ = ["KINDS", "Kind", "Liar", "ToSome", "make"]


class Kind(NamedTuple):
    sentence: str
    make: Callable[[Random, FakeSigner], Liar]


def _silent(phase: str) -> Callable[[Random, FakeSigner], Liar]:
    return lambda rng, signer: round_lies.Silent(rng, signer, phase)


def _schedule(rng: Random, signer: FakeSigner) -> Liar:
    return collusion.Schedule(rng, signer, {name: KINDS[name].make(rng, signer) for name in collusion.MOODS})


KINDS: dict[str, Kind] = {
    "equivocate announcements": Kind(
        "offers half of the swarm a different contribution", round_lies.EquivocatesAnnouncements
    ),
    "equivocate votes": Kind(
        "votes for a manifest towards one half, and nil towards the other", round_lies.EquivocatesVotes
    ),
    "equivocate proposals": Kind("proposes different availabilities to each half", round_lies.EquivocatesProposals),
    "false lengths": Kind("announces payloads, its own and others', with a false length", round_lies.FalseLengths),
    "withhold": Kind("announces payloads, but serves them to a quarter of the swarm only", round_lies.Withholds),
    "bad payloads": Kind("announces payloads that the strict decoder refuses", round_lies.BadPayloads),
    "propose the unavailable": Kind("names an availability that nobody else has", round_lies.ProposesTheUnavailable),
    "censor": Kind("keeps the first member's contributions out of manifests", round_lies.Censors),
    "false manifests": Kind("proposes a digest that the availabilities do not lead to", round_lies.FalseManifests),
    "two-faced availabilities": Kind(
        "tells each half that it holds other contributions", round_lies.TwoFacedAvailabilities
    ),
    "false roots": Kind("claims a state root that is not its own", round_lies.FalseRoots),
    "votes for all": Kind("votes for every proposal, whatever it voted for before", round_lies.VotesForAll),
    "replay": Kind("repeats old messages, its own and others'", noise.Replays),
    "keep the dead": Kind(
        "repeats messages of members that are gone, so that they keep their seats", noise.KeepsTheDead
    ),
    "ask": Kind("asks one member for messages and histories as often as it can", noise.Asks),
    "flood": Kind("signs messages of all kinds with absurd rounds and views, as many as it can", noise.Floods),
    "flood quietly": Kind(
        "the same, but never two messages for one place", lambda rng, key: noise.Floods(rng, key, True)
    ),
    "crowd": Kind("asks for admission with ever new keys, which announce others' payloads", noise.Crowds),
    "forge": Kind("sends messages in others' names, and garbage", noise.Forges),
    "silent announce": Kind("announces nothing", _silent("announce")),
    "silent avail": Kind("never says what it holds", _silent("avail")),
    "silent propose": Kind("proposes nothing when it is its turn", _silent("propose")),
    "silent prevote": Kind("never prevotes", _silent("prevote")),
    "silent precommit": Kind("never precommits", _silent("precommit")),
    "silent": Kind("listens, sends nothing and serves nobody", _silent("all")),
    "speaks to some": Kind("sends its messages to half of the swarm only", round_lies.SpeaksToSome),
    "double calls": Kind("calls for many attempts at once, and signs two sets", branch_lies.DoubleCalls),
    "coup": Kind("signs a branch of which it is the only member", branch_lies.Coup),
    "false histories": Kind("answers with histories that are cut, reversed or unsigned", branch_lies.FalseHistories),
    "claim to be ahead": Kind(
        "says that it is ahead, or on another branch, without proof", branch_lies.ClaimsToBeAhead
    ),
    "endless histories": Kind("answers so that every answer needs another question", branch_lies.EndlessHistories),
    "false jumps": Kind("answers with a jump to a branch of its own, which binds nobody", branch_lies.FalseJumps),
    "fork": Kind(
        "proposes two manifests with the other colluders, and votes for each towards a different half", collusion.Forks
    ),
    "propose anew": Kind("lets a few decide, and then proposes something else", collusion.ProposesAnew),
    "collude": Kind("changes its lie every few seconds, together with all colluders", _schedule),
}


def make(name: str, rng: Random, signer: FakeSigner) -> Liar:
    """Makes a liar of this kind."""
    return KINDS[name].make(rng, signer)
