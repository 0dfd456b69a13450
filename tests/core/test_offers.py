"""Offers and requests: how many per author are kept, and for how long."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from p2ptrain.core import admission as module
from p2ptrain.core import messages
from p2ptrain.core.admission import OF_AUTHOR_MAX, Requests
from p2ptrain.core.context import Context
from p2ptrain.core.manifest import JOINS_MIN, NO_BEARER, Join
from p2ptrain.core.messages import SEATS_MAX, Announcement, Evidence, Heard, JoinRequest, Leave
from p2ptrain.core.offers import OFFERS_OF_AUTHOR_MAX, ROUNDS_KEPT, Offers
from p2ptrain.core.payloads import Payloads
from p2ptrain.core.reputation import prove
from p2ptrain.core.state import genesis
from p2ptrain.digest import digest
from p2ptrain.errors import RemoteProtocolError
from tests.helpers.core import (
    KEYS,
    ROOT0,
    RUN,
    DigestSigner,
    announced,
    line_of,
    name_of,
    plain_manifest,
    run_of,
    signed,
)

STATE = genesis(RUN, KEYS[:4], ROOT0)
LATER = msgspec.structs.replace(STATE, round=1)
AUTHOR = KEYS[2]


def context(**admission: object) -> Context:
    return Context(run_of(admission=admission), RUN, KEYS[0], DigestSigner(KEYS[0]), Random(0))


def apart(count: int) -> Context:
    """Connected to so many newcomers, each in a range of addresses of its own."""
    made = context()
    made.peers.update({joining(each).author: f"10.{each}" for each in range(count)})
    return made


def offers(staleness: int = 0) -> Offers:
    return Offers(staleness, Payloads(context()))


def held(made: Offers, offer: Announcement, good: bool = True) -> bytes:
    """Adds an announcement whose payload is here; returns its name."""
    made.add(signed(offer))
    made.payloads.came_along(offer, good)
    return name_of(offer)


# ---------------------------------------------------------------------------------------------------
# Offers


def test_of_a_round_two_announcements_are_kept_so_that_a_lie_stays_visible() -> None:
    made = offers()
    lies = [announced(AUTHOR, which=bytes([which])) for which in range(3)]
    verdicts = [made.add(signed(offer)) for offer in (lies[0], lies[0], lies[1], lies[2])]
    assert verdicts == [Heard.NEW, Heard.USELESS, Heard.CONFLICT, Heard.USELESS]
    assert sorted(made.by_name) == sorted(map(name_of, lies[:2]))
    assert made.conflicting(signed(lies[1])) == signed(lies[0])


def test_of_an_author_only_a_few_rounds_are_kept() -> None:
    made = offers()
    verdicts = [made.add(signed(announced(AUTHOR, number))) for number in range(1, ROUNDS_KEPT + 2)]
    assert verdicts == [Heard.NEW] * ROUNDS_KEPT + [Heard.FULL]
    assert made.add(signed(announced(KEYS[3]))) is Heard.NEW


def test_what_members_attest_finds_room_up_to_a_bound() -> None:
    made = offers()
    for number in range(1, ROUNDS_KEPT + 1):
        for which in (b"a", b"b"):
            made.add(signed(announced(AUTHOR, number, which)))
    asked = [
        announced(AUTHOR, which=digest("core test", bytes([each % 256, each // 256])))
        for each in range(2 * SEATS_MAX + 1)
    ]
    verdicts = [made.add(signed(offer), is_needed=True) for offer in asked]
    assert verdicts == [Heard.CONFLICT] * (2 * SEATS_MAX) + [Heard.FULL]
    assert made.limits()["offers of an author"] == (OFFERS_OF_AUTHOR_MAX, OFFERS_OF_AUTHOR_MAX)


def test_of_each_author_the_oldest_round_is_attested_and_the_good_apart_from_the_bad() -> None:
    made = offers(staleness=3)
    old = announced(AUTHOR, 1)
    names = [held(made, old), held(made, announced(KEYS[3], 1), good=False)]
    state = line_of(STATE, run_of({"staleness_rounds_max": 3}), 1)[0][1]
    state = msgspec.structs.replace(state, window=())
    held(made, announced(AUTHOR, 2))
    made.add(signed(announced(KEYS[1], 2)))  # whose payload is not here
    held(made, announced(KEYS[9], 2))  # who is not admitted
    assert made.attestable(state) == ((names[0],), (names[1],))
    assert [made.has_from(key, state) for key in (AUTHOR, KEYS[3], KEYS[1])] == [True, False, False]


def test_both_announcements_of_a_liar_are_attested() -> None:
    made = offers()
    names = [held(made, announced(AUTHOR, which=which)) for which in (b"a", b"b")]
    assert made.attestable(STATE) == (tuple(sorted(names)), ())


def test_what_can_no_longer_be_taken_is_forgotten() -> None:
    made = offers()
    for offer in (announced(AUTHOR, 1), announced(AUTHOR, 2), announced(AUTHOR, 3), announced(KEYS[3], 1)):
        made.add(signed(offer))
    after = line_of(STATE, run_of(), 1)[0][1]
    made.prune(after)
    assert sorted(made.by_name) == sorted(name_of(announced(AUTHOR, number)) for number in (2, 3))
    assert list(made.by_author) == [AUTHOR]
    assert sorted(made.by_payload) == sorted(announced(AUTHOR, number).payload for number in (2, 3))


# ---------------------------------------------------------------------------------------------------
# Requests


def joining(number: int) -> JoinRequest:
    return JoinRequest(RUN, 1, b"", digest("core test", b"newcomer", number.to_bytes(4, "big")))


def test_of_one_author_at_most_two_requests_wait() -> None:
    made = Requests(context())
    asked = [JoinRequest(RUN, number, b"", KEYS[9]) for number in range(3)]
    assert [made.add(signed(each), STATE) for each in (asked[0], asked[0], asked[1], asked[2])] == [
        True,
        False,
        True,
        False,
    ]
    assert len(made.names(STATE)) == OF_AUTHOR_MAX
    assert made.add(signed(asked[2]), STATE, is_needed=True)


def test_a_crowd_at_the_door_keeps_neither_leaves_nor_evidence_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "JOINS_MAX", 5)
    monkeypatch.setattr(messages, "REQUESTS_MAX", 8)
    monkeypatch.setattr(module, "EVIDENCE_MAX", 4)
    made = Requests(context())
    assert [made.add(signed(joining(each)), STATE) for each in range(7)] == [True] * 5 + [False] * 2
    proof = prove(*(signed(announced(KEYS[3], which=which)).envelope for which in (b"a", b"b")))
    assert made.add(signed(Leave(RUN, 1, KEYS[1])), STATE)
    assert made.add(signed(proof), STATE)
    assert made.context.counters["requests without room"] == 2


def test_a_full_pool_takes_only_what_others_attest_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "REQUESTS_MAX", 8)
    monkeypatch.setattr(module, "EVIDENCE_MAX", 4)
    monkeypatch.setattr(module, "JOINS_MAX", 100)
    made = Requests(apart(14))
    assert [made.add(signed(joining(each)), STATE) for each in range(9)] == [True] * 8 + [False]
    assert all(made.add(signed(joining(each)), STATE, is_needed=True) for each in range(9, 14))
    kept = {waiting.about for waiting in made.by_name.values()}
    assert kept == {joining(each).author for each in (*range(1, 8), *range(9, 14))}, "the oldest made room"
    proofs = [proof_against(key) for key in KEYS[1:4]]
    assert [made.add(signed(each), STATE) for each in proofs] == [True] * 3, "evidence has room of its own"
    assert made.limits()["requests"] == (15, 16)
    assert len(made.names(msgspec.structs.replace(STATE, round=2))) == 8


def test_too_many_joins_wait_for_a_manifest_that_their_keys_were_not_made_for() -> None:
    made = Requests(apart(JOINS_MIN + 2))
    for each in range(JOINS_MIN):
        assert made.add(signed(joining(each)), STATE)
    assert len(made.names(STATE)) == JOINS_MIN
    assert made.add(signed(joining(JOINS_MIN)), STATE)
    assert made.add(signed(Leave(RUN, 1, KEYS[1])), STATE)
    assert made.names(STATE) == (name_of(Leave(RUN, 1, KEYS[1])),)
    assert len(made.names(LATER)) == 1, "the last manifest was proposed when they came"
    later = msgspec.structs.replace(STATE, round=2)
    assert made.add(signed(joining(JOINS_MIN + 1)), LATER)
    assert len(made.names(later)) == JOINS_MIN + 2


def test_of_a_crowd_from_one_range_of_addresses_as_many_joins_are_attested_as_a_manifest_grants() -> None:
    made, later = Requests(apart(2)), msgspec.structs.replace(STATE, round=2)
    assert all(made.add(signed(joining(each)), STATE) for each in range(20))
    named = made.names(later)
    assert len(named) == 2 + JOINS_MIN
    assert {name_of(joining(each)) for each in range(2)} <= {*named}
    rounds = [msgspec.structs.replace(later, head=digest("head", bytes([number]))) for number in range(20)]
    assert len({name for each in rounds for name in made.names(each)}) == 20, "others after each manifest"
    known = msgspec.structs.replace(later, round=3)
    assert made.names(known) == made.names(later), "a round's number is known when keys are made"


def test_of_a_key_in_a_crowd_all_joins_are_attested_because_members_may_have_heard_them_in_another_order() -> None:
    first, second = joining(0), msgspec.structs.replace(joining(0), round=2)
    later, named = msgspec.structs.replace(STATE, round=2), list[tuple[bytes, ...]]()
    for order in ((first, second), (second, first)):
        made = Requests(apart(20))
        assert all(made.add(signed(each), STATE) for each in (*order, *(joining(each) for each in range(1, 20))))
        named.append(made.names(later))
    assert named[0] == named[1]
    assert {name_of(first), name_of(second)} <= {*named[0]}


def test_of_a_crowd_at_the_door_half_is_forgotten_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "JOINS_MAX", 8)
    made = Requests(context())
    left = set()
    for _ in range(20):
        made.by_name.clear()
        assert [made.add(signed(joining(each)), STATE) for each in range(9)] == [True] * 8 + [False]
        made.prune(STATE, ())
        assert len(made.by_name) == 4
        left |= {*made.by_name}
    assert len(left) == 8


def test_a_wrong_request_is_refused_with_a_reason() -> None:
    made = Requests(context())
    with pytest.raises(RemoteProtocolError, match="the key that asks to join is already admitted"):
        made.add(signed(JoinRequest(RUN, 1, b"", KEYS[2])), STATE)
    assert made.by_name == {}


def test_what_was_granted_or_has_lost_its_meaning_is_forgotten() -> None:
    made = Requests(context())
    proof = prove(*(signed(announced(KEYS[3], which=which)).envelope for which in (b"a", b"b")))
    stays: list[Leave | Evidence] = [Leave(RUN, 1, KEYS[1]), proof]
    waiting: list[Leave | Evidence | JoinRequest] = [*stays, JoinRequest(RUN, 1, b"", KEYS[9])]
    assert all(made.add(signed(message), STATE) for message in waiting)
    made.prune(genesis(RUN, (*KEYS[:4], KEYS[9]), ROOT0), ())
    assert made.names(STATE) == tuple(sorted(map(name_of, stays)))
    made.prune(genesis(RUN, KEYS[2:3], ROOT0), ())
    assert made.names(STATE) == ()


def test_a_join_that_counted_is_not_attested_again_whoever_repeats_it() -> None:
    """A member could bring back who has left, and use up an invitation once more."""
    made, run, newcomer = Requests(context()), run_of(), KEYS[9]
    joins = [JoinRequest(RUN, number, b"", newcomer) for number in range(1, 5)]
    admits = msgspec.structs.replace(plain_manifest(STATE, run), joins=(Join(newcomer, NO_BEARER, 0, 0),))
    inside = STATE.after(admits, run)
    removes = msgspec.structs.replace(plain_manifest(inside, run), leaves=(newcomer,))
    left = inside.after(removes, run)
    made.prune(left, (removes, admits))
    assert [made.add(signed(each), left) for each in joins] == [False, False, True, True]
    assert made.names(left) == tuple(sorted(map(name_of, joins[2:])))
    assert made.add(signed(joins[0]), left, is_needed=True)  # a manifest may depend on it
    assert made.names(left) == tuple(sorted(map(name_of, joins[2:])))
    made.prune(left, (admits,))  # no memory of the leave: the join has counted all the same
    assert name_of(joins[0]) not in made.names(left)


def proof_against(key: bytes, which: int = 0) -> Evidence:
    lies = [announced(key, which=bytes([which, half])) for half in range(2)]
    return prove(*(signed(lie).envelope for lie in lies))


def test_a_liar_that_asks_to_leave_keeps_out_no_evidence_against_it() -> None:
    made = Requests(context())
    leaves = [Leave(RUN, number, KEYS[3]) for number in range(1, OF_AUTHOR_MAX + 1)]
    proofs = [proof_against(KEYS[3], which) for which in range(OF_AUTHOR_MAX + 1)]
    assert [made.add(signed(each), STATE) for each in leaves] == [True] * OF_AUTHOR_MAX
    assert [made.add(signed(each), STATE) for each in proofs] == [True] * OF_AUTHOR_MAX + [False]
    other = Requests(context())
    assert all(other.add(signed(each), STATE) for each in (*proofs[:OF_AUTHOR_MAX], *leaves))


def test_a_crowd_keeps_out_no_evidence_which_is_named_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "REQUESTS_MAX", 4)
    monkeypatch.setattr(module, "EVIDENCE_MAX", 2)
    made = Requests(context())
    crowd = [Leave(RUN, number, key) for key in KEYS[1:4] for number in (1, 2)]
    proofs = [proof_against(key) for key in KEYS[1:4]]
    assert [made.add(signed(each), STATE) for each in crowd] == [True] * 4 + [False] * 2
    assert [made.add(signed(each), STATE) for each in proofs] == [True] * 2 + [False]
    named = made.names(STATE)
    assert (len(named), list(named)) == (4, sorted(named))
    assert {name_of(proof) for proof in proofs[:2]} <= {*named}
    assert made.limits()["requests"] == (6, 8)
