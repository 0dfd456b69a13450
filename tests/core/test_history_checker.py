"""The history checker finds each kind of fault, and none in the histories of honest swarms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from blake3 import blake3

from p2ptrain.digest import digest
from p2ptrain.sim.checkers import standard
from p2ptrain.sim.ledger import Ledger
from p2ptrain.sim.outcome import simulate
from p2ptrain.sim.scenario import scenario_of
from tests.helpers.history_checker import NOTHING, PRECOMMIT, PREVOTE, check
from tests.helpers.sim import MessageLog, judged_simulation

RUN = digest("judged run")
ROUND = 3
MEMBERS = sorted(digest("judged member", bytes([number])) for number in range(4))
ORDER = sorted(MEMBERS, key=lambda member: blake3(RUN + RUN + ROUND.to_bytes(8, "little") + member).digest())
LIAR = MEMBERS[3]
HONEST = MEMBERS[:3]
ONE, OTHER = digest("one manifest"), digest("another manifest")
NAMES = sorted(digest("availability", bytes([number])) for number in range(3))


def sign(key: bytes, signed: bytes) -> bytes:
    return digest("judged signature", key, signed) * 2


def envelope(*body: Any, author: bytes) -> bytes:
    encoded = msgspec.msgpack.encode([*body, author])
    name = blake3(encoded, derive_key_context=f"p2ptrain 1 message {body[0]}").digest()
    signed = f"p2ptrain 2 {body[0]}".encode() + b"\0" + RUN + name
    return msgspec.msgpack.encode([encoded, sign(author, signed), b""])


def vote(author: bytes, view: int, ballot: int, manifest: bytes, number: int = ROUND) -> bytes:
    return envelope("vote", RUN, number, view, ballot, manifest, author=author)


def proposal(
    view: int, backing: int = -1, author: bytes = b"", names: Sequence[bytes] = NAMES, manifest: bytes = ONE
) -> bytes:
    speaker = author or ORDER[view % 4]
    return envelope("proposal", RUN, ROUND, view, backing, names, manifest, author=speaker)


def announcement(author: bytes, payload: bytes, number: int = ROUND) -> bytes:
    return envelope("announcement", RUN, number, number - 1, ONE, payload, 40, payload[:16], 1, 2, 0, author=author)


def judged(*envelopes: bytes, honest: Sequence[bytes] = HONEST) -> list[str]:
    rosters = {(RUN, ROUND): MEMBERS}
    return check(RUN, envelopes, rosters, honest, lambda key, signed, signature: signature == sign(key, signed))


def all_of(authors: Sequence[bytes], view: int, ballot: int, manifest: bytes) -> list[bytes]:
    return [vote(author, view, ballot, manifest) for author in authors]


def honest_proposals(*views: int) -> list[bytes]:
    return [proposal(view) for view in views if ORDER[view % 4] in HONEST]


# ---------------------------------------------------------------------------------------------------
# What is sound


def test_a_round_that_is_decided_at_once_is_sound() -> None:
    votes = all_of(HONEST, 0, PREVOTE, ONE) + all_of(HONEST, 0, PRECOMMIT, ONE)
    assert judged(*honest_proposals(0), *votes) == []


def test_a_lock_that_is_kept_over_views_is_sound() -> None:
    view_0 = [*all_of(HONEST[:2], 0, PREVOTE, ONE), vote(HONEST[2], 0, PREVOTE, NOTHING)]
    locked = [vote(HONEST[0], 0, PRECOMMIT, ONE), *all_of(HONEST[1:], 0, PRECOMMIT, NOTHING)]
    view_1 = [*all_of(HONEST, 1, PREVOTE, ONE), *all_of(HONEST, 1, PRECOMMIT, ONE)]
    assert judged(*view_0, *locked, *view_1) == []


def test_a_lock_gives_way_to_a_quorum_that_came_later() -> None:
    """The liar helps two honest members change to another manifest; the third may follow them."""
    view_0 = [*all_of(HONEST[:2], 0, PREVOTE, ONE), vote(HONEST[2], 0, PREVOTE, NOTHING)]
    locked = [vote(HONEST[0], 0, PRECOMMIT, ONE), *all_of(HONEST[1:], 0, PRECOMMIT, NOTHING)]
    view_1 = [*all_of(HONEST[1:], 1, PREVOTE, OTHER), *all_of(HONEST[1:], 1, PRECOMMIT, NOTHING)]
    view_2 = [*all_of(HONEST, 2, PREVOTE, OTHER), *all_of(HONEST, 2, PRECOMMIT, OTHER)]
    assert judged(*view_0, *locked, *view_1, *view_2) == []


def test_the_same_message_may_be_said_again() -> None:
    assert judged(*[announcement(HONEST[0], ONE)] * 3, *all_of(HONEST, 0, PREVOTE, NOTHING) * 2) == []


def test_liars_may_say_anything() -> None:
    lies = [
        *(vote(LIAR, 0, PREVOTE, manifest) for manifest in (ONE, OTHER, NOTHING)),
        *(announcement(LIAR, payload) for payload in (ONE, OTHER)),
        proposal(0, 7, LIAR),
        msgspec.msgpack.encode([b"\x91\xa5hello", b"", b""]),
    ]
    assert judged(*lies) == []


# ---------------------------------------------------------------------------------------------------
# What is not


def test_two_messages_for_one_place_are_seen() -> None:
    me = HONEST[0]
    regroups = [envelope("regroup", RUN, ONE, 2, members, author=me) for members in (MEMBERS, HONEST)]
    said = [
        announcement(me, ONE),
        announcement(me, OTHER),
        announcement(me, OTHER, ROUND + 1),
        vote(me, 1, PREVOTE, NOTHING),
        vote(me, 1, PREVOTE, ONE),
        *regroups,
    ]
    assert judged(*said) == [
        "an honest node signed two announcements for one place (round 3)",
        "an honest node signed two votes for one place (round 3, view 1, ballot 1)",
        "an honest node signed two regroups for one place (attempt 2)",
    ]


def test_a_prevote_against_a_lock_is_seen() -> None:
    view_0 = [*all_of(HONEST[:2], 0, PREVOTE, ONE), vote(HONEST[2], 0, PREVOTE, NOTHING)]
    locked = [vote(HONEST[0], 0, PRECOMMIT, ONE), *all_of(HONEST[1:], 0, PRECOMMIT, NOTHING)]
    view_1 = [vote(HONEST[0], 1, PREVOTE, OTHER), *all_of(HONEST[1:], 1, PREVOTE, NOTHING)]
    assert judged(*view_0, *locked, *view_1) == [
        "round 3: who precommitted in view 0 prevoted something else in view 1",
    ]


def test_a_quorum_before_the_lock_does_not_open_it() -> None:
    view_0 = [*all_of(HONEST[1:], 0, PREVOTE, OTHER), vote(HONEST[0], 0, PREVOTE, NOTHING)]
    view_1 = [*all_of(HONEST[:2], 1, PREVOTE, ONE), vote(HONEST[0], 1, PRECOMMIT, ONE)]
    view_2 = [vote(HONEST[0], 2, PREVOTE, OTHER)]
    assert judged(*view_0, *view_1, *view_2) == [
        "round 3: who precommitted in view 1 prevoted something else in view 2",
    ]


def test_a_precommit_that_nothing_backs_is_seen() -> None:
    votes = [vote(HONEST[0], 0, PREVOTE, ONE), vote(HONEST[0], 0, PRECOMMIT, ONE)]
    assert judged(*votes) == ["round 3: a manifest was precommitted in view 0, in which no quorum prevoted it"]
    with_a_second = [*votes, vote(HONEST[1], 0, PREVOTE, ONE)]  # and the liar may have made the third
    assert judged(*with_a_second) == []


def test_two_decisions_that_could_have_been_made_are_seen() -> None:
    view_0 = [*all_of(HONEST, 0, PREVOTE, ONE), *all_of(HONEST[:2], 0, PRECOMMIT, ONE)]
    view_1 = [*all_of(HONEST[1:], 1, PREVOTE, OTHER), *all_of(HONEST[1:], 1, PRECOMMIT, OTHER)]
    assert judged(*view_0, *view_1) == [
        "round 3: who precommitted in view 0 prevoted something else in view 1",
        "round 3: 2 manifests could have a certificate",
    ]


def test_a_proposal_out_of_turn_is_seen() -> None:
    first = next(view for view in range(4) if ORDER[view] in HONEST)
    other = next(member for member in HONEST if member != ORDER[first])
    assert judged(proposal(first, author=other)) == [
        f"round 3: an honest member proposed in view {first}, which was not its turn"
    ]


def test_a_proposal_that_rests_on_nothing_is_seen() -> None:
    view = next(view for view in range(1, 5) if ORDER[view % 4] in HONEST)
    assert judged(proposal(view, 0), vote(HONEST[0], 0, PREVOTE, ONE)) == [
        f"round 3: a proposal of view {view} rests on view 0, in which no quorum prevoted it"
    ]
    assert judged(proposal(view, 0), *all_of(HONEST[:2], 0, PREVOTE, ONE)) == []


def test_a_proposal_of_too_few_availabilities_is_seen() -> None:
    view = next(view for view in range(4) if ORDER[view] in HONEST)
    assert judged(proposal(view, names=NAMES[:2])) == [f"round 3: a proposal of view {view} names 2 availabilities"]


def test_a_vote_without_a_seat_is_seen() -> None:
    stranger = digest("judged stranger")
    found = judged(vote(stranger, 0, PREVOTE, ONE), honest=[*HONEST, stranger])
    assert found == ["a vote of round 3 by somebody who has no seat"]


def test_what_is_not_signed_counts_for_nothing() -> None:
    body, _, attachment = msgspec.msgpack.decode(vote(HONEST[0], 0, PREVOTE, ONE))
    forged = msgspec.msgpack.encode([body, sign(LIAR, body), attachment])
    assert judged(forged) == ["an honest node passed on a vote that its author did not sign"]


# ---------------------------------------------------------------------------------------------------
# Whole simulations


@pytest.mark.parametrize("how", ["equivocate votes", "propose anew", "collude"])
def test_the_history_of_a_swarm_with_liars_is_sound(how: str) -> None:
    table = {
        "sentence": "Liars, a bad network and a power cut.",
        "nodes": 7,
        "rounds": 16,
        "links": {"loss": 0.1},
        "fault": [
            {"kind": "liar", "nodes": "f", "how": how, "at": 0.0},
            {"kind": "crash", "nodes": "all", "at": 6.0, "until": 7.0},
            {"kind": "partition", "groups": [[0, 1, 2], [3, 4, 5, 6]], "at": 9.0, "until": 12.0},
        ],
    }
    log, checkers = MessageLog(), standard()
    outcome = simulate(scenario_of(table), 5, [*checkers, log])
    assert outcome.failures == []
    ledger = checkers[0]
    assert isinstance(ledger, Ledger)
    votes = sum(len(envelope) > 0 for _, _, envelope in log.messages)
    assert votes > 500, "there was something to judge"
    assert judged_simulation(outcome.cluster, ledger, log) == []
