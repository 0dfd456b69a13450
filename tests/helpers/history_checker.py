"""A checker for histories that shares no code with the implementation.

It reads the signed envelopes that nodes have sent, in any order, and the rosters as plain data, and reports everything
that a correct protocol would not have allowed. It decodes the wire format independently, from its description: an
envelope is msgpack [body, signature, attachment], a body is the array of the kind's name and its fields, and the author
signs

    "p2ptrain 2 <kind>" | 0 | run id | BLAKE3(body), derived for "p2ptrain 1 message <kind>"

Votes that are not in the log count in the liars' favour: whatever at most f of them could still sign, they are assumed
to have signed. So a history is refused as soon as it could have gone wrong, and not only when it did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from blake3 import blake3

NOTHING = bytes(32)
PREVOTE, PRECOMMIT = 1, 2
FIELDS = {
    "announcement": (
        "branch", "round", "base_round", "base_root", "payload", "payload_bytes", "content", "steps", "loss",
        "held_out", "author",
    ),
    "availability": (
        "branch", "round", "root_round", "root", "held", "refused", "requests", "heard", "author",
    ),
    "proposal": ("branch", "round", "view", "valid_view", "availabilities", "manifest", "author"),
    "vote": ("branch", "round", "view", "ballot", "manifest", "author"),
    "regroup": ("branch", "parent", "attempt", "members", "author"),
}  # fmt: skip
PLACES = {
    "announcement": ("branch", "round"),
    "proposal": ("branch", "round", "view"),
    "vote": ("branch", "round", "view", "ballot"),
    "regroup": ("branch", "parent", "attempt"),
}

Round = tuple[bytes, int]  # branch and number
Verify = Callable[[bytes, bytes, bytes], bool]  # key, what is signed, signature


def quorum(size: int) -> int:
    return 2 * size // 3 + 1 if size >= 4 else size // 2 + 1


@dataclass
class RoundVotes:
    """The votes of one round: the manifest that each honest member voted for, by view."""

    prevotes: dict[int, dict[bytes, bytes]] = field(default_factory=dict)
    precommits: dict[int, dict[bytes, bytes]] = field(default_factory=dict)
    proposals: list[dict[str, Any]] = field(default_factory=list)


def check(
    run_id: bytes,
    envelopes: Iterable[bytes],
    rosters: Mapping[Round, Sequence[bytes]],
    honest: Iterable[bytes],
    verify: Verify,
) -> list[str]:
    """Returns the faults of a history, one sentence each; none if it is sound.

    `rosters` are the members of every round, at most f of whom are not `honest`. Envelopes that honest nodes passed
    on for others may be included.
    """
    trusted = set(honest)
    problems: list[str] = []
    said: dict[tuple[Any, ...], bytes] = {}
    rounds: dict[Round, RoundVotes] = {}
    for body in dict.fromkeys(_opened(envelopes, run_id, trusted, verify, problems)):
        kind, message = _read(body)
        if kind not in FIELDS or message["author"] not in trusted:
            continue
        problems += _said_before(said, kind, message, body)
        if kind not in ("proposal", "vote"):
            continue
        place = message["branch"], message["round"]
        if place not in rosters:
            continue  # of a round that nobody decided
        if message["author"] not in rosters[place]:
            problems.append(f"a {kind} of round {message['round']} by somebody who has no seat")
            continue
        votes = rounds.setdefault(place, RoundVotes())
        if kind == "proposal":
            votes.proposals.append(message)
        else:
            kept = votes.prevotes if message["ballot"] == PREVOTE else votes.precommits
            kept.setdefault(message["view"], {})[message["author"]] = message["manifest"]
    for place in sorted(rounds, key=lambda place: (place[1], place[0])):
        problems += _check_round(run_id, place, rounds[place], rosters[place], trusted)
    return problems


# ---------------------------------------------------------------------------------------------------
# Reading


def _opened(
    envelopes: Iterable[bytes], run_id: bytes, trusted: set[bytes], verify: Verify, problems: list[str]
) -> Iterable[bytes]:
    """Returns the bodies of envelopes with a valid signature; forgeries in an honest member's name are left out."""
    for envelope in envelopes:
        body, signature, _ = msgspec.msgpack.decode(envelope)
        kind, message = _read(body)
        if kind not in FIELDS:
            continue
        if msgspec.msgpack.encode([kind, *message.values()]) != body:
            problems.append(f"a {kind} in another than its canonical encoding")
            continue
        name = blake3(body, derive_key_context=f"p2ptrain 1 message {kind}").digest()
        if verify(message["author"], f"p2ptrain 2 {kind}".encode() + b"\0" + run_id + name, signature):
            yield body
        elif message["author"] in trusted:
            problems.append(f"an honest node passed on a {kind} that its author did not sign")


def _read(body: bytes) -> tuple[str, dict[str, Any]]:
    kind, *values = msgspec.msgpack.decode(body)
    return kind, dict(zip(FIELDS.get(kind, ()), values, strict=kind in FIELDS))


def _said_before(said: dict[tuple[Any, ...], bytes], kind: str, message: dict[str, Any], body: bytes) -> list[str]:
    if kind not in PLACES:
        return []
    place = (kind, message["author"], *(message[name] for name in PLACES[kind]))
    if said.setdefault(place, body) == body:
        return []
    where = ", ".join(f"{name} {message[name]}" for name in PLACES[kind] if isinstance(message[name], int))
    return [f"an honest node signed two {kind}s for one place ({where})"]


# ---------------------------------------------------------------------------------------------------
# One round


def _check_round(
    run_id: bytes, place: Round, votes: RoundVotes, members: Sequence[bytes], trusted: set[bytes]
) -> list[str]:
    liars = sum(member not in trusted for member in members)
    needed = quorum(len(members)) - liars  # so many honest votes may have been a quorum
    return [
        f"round {place[1]}: {problem}"
        for problem in (
            *_proposals_out_of_turn(run_id, place, votes, members),
            *_proposals_unbacked(votes, needed),
            *_proposals_of_another_size(votes, quorum(len(members))),
            *_precommits_unbacked(votes, needed),
            *_locks_broken(votes, needed),
            *_two_decisions(votes, needed),
        )
    ]


def _count(ballots: Mapping[int, Mapping[bytes, bytes]], view: int, manifest: bytes) -> int:
    return sum(choice == manifest for choice in ballots.get(view, {}).values())


def _proposals_out_of_turn(run_id: bytes, place: Round, votes: RoundVotes, members: Sequence[bytes]) -> Iterable[str]:
    prefix = run_id + place[0] + place[1].to_bytes(8, "little")
    order = sorted(members, key=lambda member: blake3(prefix + member).digest())
    for proposal in votes.proposals:
        if order[proposal["view"] % len(order)] != proposal["author"]:
            yield f"an honest member proposed in view {proposal['view']}, which was not its turn"


def _proposals_unbacked(votes: RoundVotes, needed: int) -> Iterable[str]:
    for proposal in votes.proposals:
        backing = proposal["valid_view"]
        if backing >= 0 and _count(votes.prevotes, backing, proposal["manifest"]) < needed:
            yield f"a proposal of view {proposal['view']} rests on view {backing}, in which no quorum prevoted it"


def _proposals_of_another_size(votes: RoundVotes, size: int) -> Iterable[str]:
    for proposal in votes.proposals:
        if len(set(proposal["availabilities"])) != size:
            yield f"a proposal of view {proposal['view']} names {len(proposal['availabilities'])} availabilities"


def _precommits_unbacked(votes: RoundVotes, needed: int) -> Iterable[str]:
    for view, ballots in sorted(votes.precommits.items()):
        for manifest in sorted(set(ballots.values()) - {NOTHING}):
            if _count(votes.prevotes, view, manifest) < needed:
                yield f"a manifest was precommitted in view {view}, in which no quorum prevoted it"


def _locks_broken(votes: RoundVotes, needed: int) -> Iterable[str]:
    """Finds members that precommitted a manifest and prevoted another without a quorum of prevotes for it in
    between."""
    for locked_in, ballots in sorted(votes.precommits.items()):
        for member, locked in sorted(ballots.items()):
            if locked == NOTHING:
                continue
            for view, prevotes in sorted(votes.prevotes.items()):
                choice = prevotes.get(member, NOTHING)
                if view <= locked_in or choice in (locked, NOTHING):
                    continue
                since = range(locked_in, view)
                if not any(_count(votes.prevotes, between, choice) >= needed for between in since):
                    yield f"who precommitted in view {locked_in} prevoted something else in view {view}"


def _two_decisions(votes: RoundVotes, needed: int) -> Iterable[str]:
    decided = {
        manifest
        for view, ballots in votes.precommits.items()
        for manifest in set(ballots.values()) - {NOTHING}
        if _count(votes.precommits, view, manifest) >= needed
    }
    if len(decided) > 1:
        yield f"{len(decided)} manifests could have a certificate"
