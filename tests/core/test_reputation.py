"""Reputation: proof that convicts liars only, and observations that decay and stay within bounds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.core.messages import (
    NOTHING,
    PROVEN_BYTES_MAX,
    Availability,
    Ballot,
    Call,
    Evidence,
    Hello,
    Leave,
    Message,
    Proposal,
    Regroup,
    encode,
)
from p2ptrain.core.reputation import (
    BURST,
    GREYLISTED_FROM,
    HALF_LIFE_SECONDS,
    PARDONED_BELOW,
    PEERS_MAX,
    POINTS,
    REASONS,
    REFILL_A_SECOND,
    SAVED_BYTES_MAX,
    SCORE_MAX,
    Reason,
    Reputation,
    conflict,
    convict,
    prove,
)
from p2ptrain.digest import digest
from p2ptrain.errors import DataError, RemoteProtocolError
from tests.helpers.core import KEYS, ROOT0, RUN, DigestSigner, announced, payload, signed, voted

AUTHOR, OTHER = KEYS[0], KEYS[1]
A, B = digest("reputation test", b"a"), digest("reputation test", b"b")
BRANCH = digest("reputation test", b"branch")
PREVOTE, PRECOMMIT = Ballot.PREVOTE, Ballot.PRECOMMIT
SIGNER = DigestSigner()


def proposal(manifest: bytes = A, **changes: Any) -> Proposal:
    fields: dict[str, Any] = {
        "branch": RUN,
        "round": 1,
        "view": 3,
        "valid_view": -1,
        "availabilities": (A,),
        "author": AUTHOR,
    }
    return Proposal(manifest=manifest, **(fields | changes))


def evidence(first: Message, second: Message) -> Evidence:
    return prove(signed(first).envelope, signed(second).envelope)


# ---------------------------------------------------------------------------------------------------
# Proof

LIES: dict[str, tuple[Message, Message]] = {
    "announcements of two payloads": (announced(AUTHOR), announced(AUTHOR, which=b"another")),
    "announcements of two bases": (announced(AUTHOR, 5), announced(AUTHOR, 5, base_round=3)),
    "announcements of two roots": (announced(AUTHOR), announced(AUTHOR, base_root=A)),
    "prevotes for two manifests": (voted(AUTHOR, PREVOTE, A), voted(AUTHOR, PREVOTE, B)),
    "a prevote for a manifest and one for none": (voted(AUTHOR, PREVOTE, A), voted(AUTHOR, PREVOTE, NOTHING)),
    "precommits for two manifests": (voted(AUTHOR, PRECOMMIT, A, 7, 2), voted(AUTHOR, PRECOMMIT, B, 7, 2)),
    "proposals of two manifests": (proposal(A), proposal(B)),
    "proposals of two sets": (proposal(), proposal(availabilities=tuple(sorted((A, B))))),
    "proposals with two valid views": (proposal(), proposal(valid_view=1)),
}


def available(**changes: Any) -> Availability:
    sets: dict[str, Any] = {"held": (), "refused": (), "requests": (), "heard": b""}
    return Availability(
        **({"branch": RUN, "round": 1, "root_round": 0, "root": ROOT0, "author": AUTHOR} | sets | changes)
    )


def a_hello(view: int) -> Hello:
    return Hello(RUN, 1, view, b"", b"", b"", b"", False, AUTHOR)


HONEST: dict[str, tuple[Message, Message]] = {
    "the same twice": (voted(AUTHOR, PREVOTE, A), voted(AUTHOR, PREVOTE, A)),
    "announcements of two rounds": (announced(AUTHOR, 1), announced(AUTHOR, 2)),
    "announcements by two authors": (announced(AUTHOR), announced(OTHER)),
    "announcements on two branches": (announced(AUTHOR), announced(AUTHOR, which=b"another", branch=BRANCH)),
    "votes in two views": (voted(AUTHOR, PREVOTE, A, 0), voted(AUTHOR, PREVOTE, B, 1)),
    "votes in two rounds": (voted(AUTHOR, PREVOTE, A, 0, 1), voted(AUTHOR, PREVOTE, B, 0, 2)),
    "a prevote and a precommit": (voted(AUTHOR, PREVOTE, A), voted(AUTHOR, PRECOMMIT, NOTHING)),
    "votes by two authors": (voted(AUTHOR, PREVOTE, A), voted(OTHER, PREVOTE, B)),
    "votes on two branches": (voted(AUTHOR, PREVOTE, A), voted(AUTHOR, PREVOTE, B, branch=BRANCH)),
    "proposals in two views": (proposal(A), proposal(B, view=4)),
    "proposals in two rounds": (proposal(A), proposal(B, round=2)),
    "proposals on two branches": (proposal(A), proposal(B, branch=BRANCH)),
    "proposals by two authors": (proposal(A), proposal(B, author=OTHER)),
    "a proposal and a vote": (proposal(A), voted(AUTHOR, PREVOTE, B, 3)),
    "availabilities of one round": (available(), available(held=(bytes(16),))),
    "leaves": (Leave(RUN, 1, AUTHOR), Leave(RUN, 2, AUTHOR)),
    "calls": (Call(RUN, A, 0, AUTHOR), Call(RUN, B, 0, AUTHOR)),
    "regroups": (Regroup(RUN, A, 0, (AUTHOR,), AUTHOR), Regroup(RUN, A, 0, tuple(sorted((AUTHOR, OTHER))), AUTHOR)),
    "hellos": (a_hello(0), a_hello(1)),
}


@pytest.mark.parametrize("lie", LIES)
def test_two_messages_for_one_place_convict_their_author(lie: str) -> None:
    first, second = LIES[lie]
    assert conflict(first, second)
    assert conflict(second, first)
    assert convict(evidence(first, second), SIGNER) == AUTHOR


@pytest.mark.parametrize("pair", HONEST)
def test_what_an_honest_author_may_sign_convicts_nobody(pair: str) -> None:
    first, second = HONEST[pair]
    assert not conflict(first, second)
    assert not conflict(second, first)
    lower, higher = sorted((signed(first).envelope, signed(second).envelope))
    with pytest.raises(RemoteProtocolError, match="an honest author may have signed both"):
        convict(Evidence(lower, higher), SIGNER)


def test_a_lie_has_one_proof_whoever_finds_it_and_whatever_rode_along() -> None:
    first, second = announced(AUTHOR, inline=True), announced(AUTHOR, which=b"another", inline=True)
    whole = [
        signed(first, payload(AUTHOR, 1)).envelope,
        signed(second, payload(AUTHOR, 1, b"another")).envelope,
    ]
    plain = [signed(first).envelope, signed(second).envelope]
    proof = Evidence(*sorted(plain))
    assert whole[0] != plain[0]
    assert [prove(*whole), prove(*whole[::-1]), prove(*plain), prove(whole[1], plain[0])] == [proof] * 4
    assert convict(proof, SIGNER) == AUTHOR


def test_a_proof_with_an_attachment_is_refused() -> None:
    whole = signed(announced(AUTHOR, inline=True), payload(AUTHOR, 1)).envelope
    plain = signed(announced(AUTHOR, which=b"another")).envelope
    with pytest.raises(RemoteProtocolError, match="the evidence contains an attachment"):
        convict(Evidence(*sorted((whole, plain))), SIGNER)


@pytest.mark.parametrize("forged", [0, 1])
def test_a_forged_half_convicts_nobody(forged: int) -> None:
    pair = LIES["prevotes for two manifests"]
    halves = [signed(message).envelope for message in pair]
    halves[forged] = encode(pair[forged], DigestSigner(OTHER).sign(b"something else"))
    with pytest.raises(RemoteProtocolError, match="the vote has an invalid signature"):
        convict(Evidence(*sorted(halves)), SIGNER)


def test_a_lie_in_another_run_convicts_nobody_here() -> None:
    elsewhere = DigestSigner()
    elsewhere.run_id = BRANCH
    with pytest.raises(RemoteProtocolError, match="invalid signature"):
        convict(evidence(*LIES["prevotes for two manifests"]), elsewhere)


def test_the_same_message_under_two_signatures_convicts_nobody() -> None:
    """A signature scheme may allow several signatures; a message's digest does not cover them."""

    class Lax(DigestSigner):
        def __call__(self, key: bytes, signed: bytes, signature: bytes) -> bool:
            return True

    vote = voted(AUTHOR, PREVOTE, A)
    with pytest.raises(RemoteProtocolError, match="an honest author may have signed both"):
        convict(Evidence(encode(vote, bytes(64)), encode(vote, b"\1" * 64)), Lax())


@pytest.mark.parametrize("junk", [b"\0", b"\x93\xc4\0\xc4\0\xc4\0", b"\x91" * PROVEN_BYTES_MAX], ids=len)
def test_halves_that_are_no_messages_convict_nobody(junk: bytes) -> None:
    half = signed(voted(AUTHOR, PREVOTE, A)).envelope
    with pytest.raises(RemoteProtocolError, match="not a message"):
        convict(Evidence(*sorted((junk, half))), SIGNER)


def test_the_largest_lie_fits_its_proof() -> None:
    names = tuple(sorted(digest("reputation test", bytes([seat])) for seat in range(256)))
    proof = evidence(proposal(A, availabilities=names), proposal(B, availabilities=names))
    assert max(len(proof.first), len(proof.second)) < PROVEN_BYTES_MAX
    assert convict(proof, SIGNER) == AUTHOR


# ---------------------------------------------------------------------------------------------------
# Scores


def test_a_stranger_has_no_points_and_is_not_remembered_for_being_asked_about() -> None:
    reputation = Reputation()
    assert (reputation.score(AUTHOR, 0.0), reputation.is_greylisted(AUTHOR, 0.0)) == (0.0, False)
    assert reputation.preferred([AUTHOR], 0.0) == [AUTHOR]
    assert reputation.limits() == {"peers remembered": (0, PEERS_MAX)}


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_has_its_points_and_its_counter(reason: Reason) -> None:
    reputation = Reputation()
    reputation.note(AUTHOR, reason, 5.0)
    assert reputation.score(AUTHOR, 5.0) == POINTS[reason] > 0
    assert reputation.score(OTHER, 5.0) == 0.0
    assert reputation.noted == {reason.value: 1}


def test_what_needs_no_ill_will_weighs_less_than_what_does() -> None:
    innocent = {Reason.LATE, Reason.SILENT, Reason.UNFETCHABLE}
    assert max(POINTS[reason] for reason in innocent) < min(POINTS[each] for each in REASONS if each not in innocent)


def test_half_of_the_points_is_forgotten_in_an_hour_and_new_ones_add_up() -> None:
    reputation = Reputation()
    for _ in range(4):
        reputation.note(AUTHOR, Reason.FLOODING, 100.0)
    hour = HALF_LIFE_SECONDS
    scores = [reputation.score(AUTHOR, 100.0 + hours * hour) for hours in (0.0, 0.5, 1.0, 2.0)]
    assert scores == pytest.approx([8.0, 8.0 * 0.5**0.5, 4.0, 2.0])
    reputation.note(AUTHOR, Reason.FLOODING, 100.0 + hour)
    assert reputation.score(AUTHOR, 100.0 + 2 * hour) == pytest.approx(3.0)
    assert reputation.score(AUTHOR, 0.0) == pytest.approx(6.0)  # a clock that went back forgets nothing


def test_points_have_an_upper_bound() -> None:
    reputation = Reputation()
    for _ in range(2 * int(SCORE_MAX)):
        reputation.note(AUTHOR, Reason.MALFORMED, 0.0)
    assert reputation.score(AUTHOR, 0.0) == SCORE_MAX
    assert reputation.is_greylisted(AUTHOR, 6.5 * HALF_LIFE_SECONDS)
    assert not reputation.is_greylisted(AUTHOR, 7 * HALF_LIFE_SECONDS)


def greylisted(at: float = 0.0) -> Reputation:
    """A reputation in which the author has just been greylisted."""
    reputation = Reputation()
    for _ in range(int(GREYLISTED_FROM / POINTS[Reason.MALFORMED])):
        assert not reputation.is_greylisted(AUTHOR, at)
        reputation.note(AUTHOR, Reason.MALFORMED, at)
    return reputation


def test_who_is_kept_away_stays_away_until_half_is_forgotten() -> None:
    """So no peer flips back and forth."""
    assert PARDONED_BELOW == GREYLISTED_FROM / 2
    reputation = greylisted()
    times = [0.0, 1.0, 0.99 * HALF_LIFE_SECONDS, 1.01 * HALF_LIFE_SECONDS]
    assert [reputation.is_greylisted(AUTHOR, at) for at in times] == [True, True, True, False]


def test_who_is_kept_away_is_not_let_in_by_one_more_offence() -> None:
    reputation = greylisted()
    later = 0.5 * HALF_LIFE_SECONDS
    reputation.note(AUTHOR, Reason.LATE, later)
    assert PARDONED_BELOW < reputation.score(AUTHOR, later) < GREYLISTED_FROM
    assert reputation.is_greylisted(AUTHOR, later)


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_pardon_holds_whether_or_not_anyone_asked_in_between(is_asked: bool) -> None:
    reputation = greylisted()
    later = 1.1 * HALF_LIFE_SECONDS  # 9.3 points
    if is_asked:
        assert not reputation.is_greylisted(AUTHOR, later)
    reputation.note(AUTHOR, Reason.FLOODING, later)
    assert PARDONED_BELOW < reputation.score(AUTHOR, later) < GREYLISTED_FROM
    assert not reputation.is_greylisted(AUTHOR, later)


def test_the_best_come_first_and_those_kept_away_last() -> None:
    reputation = greylisted()
    hour = HALF_LIFE_SECONDS
    bad, worse, fresh = KEYS[2], KEYS[3], KEYS[4]
    reputation.note(bad, Reason.LATE, 0.9 * hour)
    for _ in range(16):
        reputation.note(worse, Reason.MALFORMED, 0.9 * hour)
    assert reputation.score(worse, 0.9 * hour) > reputation.score(AUTHOR, 0.9 * hour)
    assert reputation.preferred([worse, AUTHOR, bad, fresh], 0.9 * hour) == [fresh, bad, worse, AUTHOR]


def test_equals_stay_in_the_order_in_which_they_came() -> None:
    reputation = Reputation()
    reputation.note(KEYS[5], Reason.LATE, 0.0)
    assert reputation.preferred([KEYS[3], KEYS[5], KEYS[1], KEYS[2]], 0.0) == [KEYS[3], KEYS[1], KEYS[2], KEYS[5]]


# ---------------------------------------------------------------------------------------------------
# Floods


def test_a_burst_costs_nothing_and_the_next_message_is_a_flood_noted_once_a_second() -> None:
    reputation = Reputation()
    start = 1_000.0
    assert [reputation.allow(AUTHOR, start) for _ in range(int(BURST) + 3)] == [True] * int(BURST) + [False] * 3
    assert reputation.noted == {"flooding": 1}
    for at in (start + 0.01, start + 0.02, start + 0.04):
        assert not reputation.allow(AUTHOR, at)
    assert reputation.noted == {"flooding": 1}


def test_the_bucket_fills_again_but_not_beyond_the_burst() -> None:
    reputation = Reputation()
    for _ in range(int(BURST)):
        assert reputation.allow(AUTHOR, 0.0)
    seconds = 2.0
    refilled = [reputation.allow(AUTHOR, seconds) for _ in range(int(seconds * REFILL_A_SECOND) + 1)]
    assert refilled == [True] * int(seconds * REFILL_A_SECOND) + [False]
    assert [reputation.allow(AUTHOR, 1e6) for _ in range(int(BURST) + 1)] == [True] * int(BURST) + [False]


def test_who_stays_at_the_refill_is_never_a_flood() -> None:
    reputation = Reputation()
    assert all(reputation.allow(AUTHOR, count / REFILL_A_SECOND) for count in range(10_000))
    assert (reputation.score(AUTHOR, 625.0), reputation.noted) == (0.0, {})


@pytest.mark.parametrize("start", [0.0, -50.0, 1e9])
def test_a_flood_of_ten_seconds_is_kept_away(start: float) -> None:
    """At any starting time of the clock."""
    reputation = Reputation()
    rate = 1_000
    times = [start + count / rate for count in range(13 * rate)]
    first = next(at for at in times if not reputation.allow(AUTHOR, at) and reputation.is_greylisted(AUTHOR, at))
    assert 9.0 <= first - start <= 11.0


def test_a_flood_by_one_leaves_the_others_their_burst() -> None:
    reputation = Reputation()
    for count in range(10_000):
        reputation.allow(AUTHOR, count / 1_000)
    assert [reputation.allow(OTHER, 10.0) for _ in range(int(BURST))] == [True] * int(BURST)
    assert reputation.score(OTHER, 10.0) == 0.0


# ---------------------------------------------------------------------------------------------------
# The bound


def key(number: int) -> bytes:
    return digest("reputation test key", number.to_bytes(4, "little"))


def test_a_flood_of_new_keys_pushes_out_no_bad_record() -> None:
    reputation = greylisted()
    reputation.note(OTHER, Reason.MALFORMED, 0.0)
    for number in range(3 * PEERS_MAX):
        reputation.allow(key(number), 1.0)
        assert len(reputation.records) <= PEERS_MAX
    assert reputation.is_greylisted(AUTHOR, 1.0)
    assert reputation.score(OTHER, 0.0) == POINTS[Reason.MALFORMED]


def test_a_flood_of_keys_that_each_misbehave_a_little_pushes_out_nobody_who_is_kept_away() -> None:
    reputation = greylisted()
    late = 0.99 * HALF_LIFE_SECONDS  # when the one who is kept away has half of its points left
    for number in range(2 * PEERS_MAX):
        for _ in range(11):
            reputation.note(key(number), Reason.MALFORMED, late)
    assert len(reputation.records) <= PEERS_MAX
    assert reputation.score(AUTHOR, late) < 11
    assert reputation.is_greylisted(AUTHOR, late)


def test_of_those_without_points_the_oldest_are_forgotten_first() -> None:
    reputation = Reputation()
    for number in range(PEERS_MAX + 1):
        reputation.allow(key(number), 0.0)
    assert list(reputation.records) == [key(number) for number in range(PEERS_MAX // 16, PEERS_MAX + 1)]


def test_when_all_are_bad_the_least_bad_go() -> None:
    reputation = Reputation()
    for number in range(PEERS_MAX):
        for _ in range(20 + (number >= PEERS_MAX // 16)):
            reputation.note(key(number), Reason.MALFORMED, 0.0)
    reputation.note(AUTHOR, Reason.MALFORMED, 0.0)
    assert list(reputation.records) == [*(key(number) for number in range(PEERS_MAX // 16, PEERS_MAX)), AUTHOR]


# ---------------------------------------------------------------------------------------------------
# Over a restart


def test_scores_and_counters_survive_a_restart_under_another_clock() -> None:
    before, after = greylisted(at=5_000.0), Reputation()
    before.note(OTHER, Reason.LATE, 5_100.0)
    after.restore(before.saved(5_200.0), -7.0)
    for each in (after, before):
        counted = {peer: record.counters for peer, record in each.records.items()}
        assert counted == {AUTHOR: {Reason.MALFORMED: 20}, OTHER: {Reason.LATE: 1}}
    for elapsed in (0.0, 300.0, 4_000.0):
        for peer in (AUTHOR, OTHER, KEYS[2]):
            assert after.score(peer, elapsed - 7.0) == pytest.approx(before.score(peer, 5_200.0 + elapsed))
            assert after.is_greylisted(peer, elapsed - 7.0) == before.is_greylisted(peer, 5_200.0 + elapsed)


def test_a_pardon_survives_a_restart() -> None:
    before, after = greylisted(), Reputation()
    later = 1.1 * HALF_LIFE_SECONDS
    after.restore(before.saved(later), 0.0)
    after.note(AUTHOR, Reason.FLOODING, 0.0)
    assert not after.is_greylisted(AUTHOR, 0.0)


def test_the_largest_record_can_be_saved_and_restored() -> None:
    before, after = Reputation(), Reputation()
    for number in range(PEERS_MAX):
        for reason in REASONS:
            before.note(key(number), reason, 0.1)
        before.records[key(number)].counters = dict.fromkeys(REASONS, 2**62 - 1)
    saved = before.saved(1e9)
    assert len(saved) < SAVED_BYTES_MAX
    after.restore(saved, 0.0)
    assert (after.saved(0.0), len(after.records)) == (saved, PEERS_MAX)


def test_records_are_saved_in_one_order() -> None:
    first, second = Reputation(), Reputation()
    for peer in KEYS:
        first.note(peer, Reason.LATE, 0.0)
    for peer in KEYS[::-1]:
        second.note(peer, Reason.LATE, 0.0)
    assert first.saved(1.0) == second.saved(1.0)


def saved_record(**changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "key": AUTHOR,
        "score": 1.0,
        "age": 0.0,
        "is_greylisted": False,
        "counters": (0, 0, 0, 1, 0),
    } | changes
    return msgspec.msgpack.encode([list(fields.values())])


DAMAGED = {
    "empty": b"",
    "no list": b"\x01",
    "a short key": saved_record(key=AUTHOR[1:]),
    "a negative score": saved_record(score=-0.1),
    "a score beyond the bound": saved_record(score=SCORE_MAX + 1),
    "a score that is no number": saved_record(score=float("nan")),
    "an infinite score": saved_record(score=float("inf")),
    "a negative age": saved_record(age=-1.0),
    "an age that is no number": saved_record(age=float("nan")),
    "a negative counter": saved_record(counters=(-1,)),
    "too many counters": saved_record(counters=(0,) * 6),
    "a word for a flag": saved_record(is_greylisted="yes"),
    "something after it": saved_record() + b"\0",
    "cut off": saved_record()[:-1],
    "too many peers": msgspec.msgpack.encode([msgspec.msgpack.decode(saved_record())[0]] * (PEERS_MAX + 1)),
    "too deep": saved_record()[:1] + b"\x96" + saved_record()[2:] + b"\x91" * 100_000 + b"\x90",
}


def test_the_record_that_is_damaged_below_is_whole() -> None:
    reputation = Reputation()
    reputation.restore(saved_record(), 0.0)
    assert (reputation.score(AUTHOR, 0.0), reputation.records[AUTHOR].counters) == (1.0, {REASONS[3]: 1})


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_record_is_named(damage: str) -> None:
    reputation = Reputation()
    with pytest.raises(DataError, match="saved reputation"):
        reputation.restore(DAMAGED[damage], 0.0)
    assert reputation.records == {}


def test_a_record_that_is_too_long_is_not_even_looked_at() -> None:
    with pytest.raises(DataError, match=f"of {SAVED_BYTES_MAX + 1} bytes; the limit is {SAVED_BYTES_MAX}"):
        Reputation().restore(bytes(SAVED_BYTES_MAX + 1), 0.0)


@given(st.binary(max_size=200) | st.integers(0, len(saved_record()) * 8 - 1))
def test_random_damage_is_named_or_harmless(damage: bytes | int) -> None:
    if isinstance(damage, int):
        octets = bytearray(saved_record())
        octets[damage // 8] ^= 1 << damage % 8
        damage = bytes(octets)
    reputation = Reputation()
    try:
        reputation.restore(damage, 0.0)
    except DataError:
        return
    assert all(0 <= record.score <= SCORE_MAX for record in reputation.records.values())
