"""History: jumps over rounds that are left out, and the one encoding."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.core import history as module
from p2ptrain.core import wire
from p2ptrain.core.history import (
    CHANGES_MAX,
    ENTRIES_MAX,
    HISTORY_BYTES_MAX,
    Beginning,
    BranchStart,
    History,
    Step,
    check_regroup,
    decode_history,
    encode_answer,
    encode_history,
    follow,
    jump,
)
from p2ptrain.core.state import AgreedState, genesis
from p2ptrain.errors import RemoteProtocolError
from tests.helpers.core import (
    KEYS,
    ROOT0,
    RUN,
    begun,
    certified,
    line_of,
    plain_manifest,
)
from tests.helpers.history import (
    BEGINNING,
    CHANGES,
    END,
    OTHER,
    RUN_CONFIG,
    SEVEN,
    SIGNER,
    START,
    bent,
    refused,
)

# ---------------------------------------------------------------------------------------------------
# Jumps


def jump_refused(changes: list[Step], base: AgreedState = END, start: AgreedState = SEVEN) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        jump(start, tuple(changes), base, SIGNER)
    return caught.value.why


def test_the_changes_of_the_roster_lead_over_what_is_left_out() -> None:
    jump(SEVEN, tuple(CHANGES), END, SIGNER)
    assert (END.members, END.round) == (KEYS[2:5], 17)


def test_without_a_change_a_jump_stays_with_the_same_roster() -> None:
    _, later = line_of(START, RUN_CONFIG, 4)[-1]
    jump(START, (), later, SIGNER)
    jump(START, (), START, SIGNER)


@pytest.mark.parametrize("place", range(len(CHANGES)))
def test_no_change_can_be_left_out(place: int) -> None:
    assert jump_refused(CHANGES[:place] + CHANGES[place + 1 :]) in (
        "the certificate names seats that do not exist",
        "the certificate has an invalid signature",
        "the certificate has 3 signatures; the quorum is 4",
        "the certificate has 4 signatures; the quorum is 5",
        "the branch begins elsewhere",
        "the branch has keys that are not members",
        "the roster changes do not follow one another",
        "the roster changes do not lead to the base",
    )


def test_changes_come_in_their_order() -> None:
    first, second, last, beginning, third = CHANGES
    assert jump_refused([second, first, last, beginning, third]) != ""
    assert jump_refused([first, first, second, last, beginning, third]) == (
        "the roster changes do not follow one another"
    )
    assert jump_refused([first, second, last, beginning, beginning, third]) == "the branch begins elsewhere"
    assert jump_refused([first, second, last, third, beginning]) == "the roster changes do not follow one another"


def test_a_branch_begins_where_the_changes_before_it_end() -> None:
    beginning = CHANGES[3]
    assert isinstance(beginning, Beginning)
    where = {"branch": beginning.parent_branch, "round": beginning.round, "head": beginning.parent}
    state = msgspec.structs.replace(SEVEN, **where)
    assert begun(beginning.members, beginning.signers, state) == beginning
    for changes in ({"branch": OTHER}, {"round": 1}, {"head": OTHER}):
        elsewhere = begun(beginning.members, beginning.signers, msgspec.structs.replace(state, **changes))
        assert jump_refused([*CHANGES[:3], elsewhere, CHANGES[4]]) == "the branch begins elsewhere"


def test_a_jump_leads_over_two_branches_in_one_round() -> None:
    middle = SEVEN.regrouped((first := begun(KEYS[:5], KEYS[:4], SEVEN)).branch, KEYS[:5])
    end = middle.regrouped((second := begun(KEYS[:3], KEYS[:2], middle)).branch, KEYS[:3])
    jump(SEVEN, (first, second), end, SIGNER)
    assert jump_refused([second], end) == "the branch begins elsewhere"


def test_a_jump_leads_to_who_got_a_seat_and_needs_its_vote() -> None:
    manifest = msgspec.structs.replace(plain_manifest(START, RUN_CONFIG), seated=(KEYS[9],))
    entry = certified(manifest, START)
    larger = msgspec.structs.replace(START, round=2, members=(*KEYS[:4], KEYS[9]))
    jump(START, (entry,), larger, SIGNER)
    assert jump_refused([], larger, START) == "the roster changes do not lead to the base"
    assert jump_refused([entry], START, START) == "the roster changes do not lead to the base"


def test_a_change_needs_the_quorum_of_the_roster_before_it() -> None:
    """The members that remain after the first change are too few to have made it."""
    state = genesis(RUN, KEYS[:4], ROOT0)
    takeover = msgspec.structs.replace(plain_manifest(state, RUN_CONFIG), unseated=KEYS[1:4])
    entry = certified(takeover, state, signers=KEYS[:1])
    following = state.after(takeover, RUN_CONFIG)
    assert jump_refused([entry], following, state) == "the certificate has 1 signatures; the quorum is 3"
    assert jump_refused([], following, state) == "the roster changes do not lead to the base"


def test_a_wrong_signature_anywhere_spoils_a_jump() -> None:
    for place, change in enumerate(CHANGES):
        if isinstance(change, Beginning):
            spoiled: Step = msgspec.structs.replace(change, signatures=(bytes(64), *change.signatures[1:]))
        else:
            spoiled = bent(change, signatures=(bytes(64), *change.certificate.signatures[1:]))
        assert "invalid signature" in jump_refused([*CHANGES[:place], spoiled, *CHANGES[place + 1 :]])


@pytest.mark.parametrize(
    "changes", [{"branch": OTHER}, {"members": KEYS[2:6]}, {"members": KEYS[2:4]}, {"round": 13}], ids=str
)
def test_a_base_is_where_its_changes_lead(changes: dict[str, Any]) -> None:
    base = msgspec.structs.replace(END, **changes)
    assert jump_refused(CHANGES, base) == "the roster changes do not lead to the base"


def test_what_else_a_base_says_is_proved_by_the_round_that_follows_it() -> None:
    """A lie about anything but the roster passes the jump, and fails at the next round."""
    entry = certified(plain_manifest(END, RUN_CONFIG), END)
    assert follow(END, entry, RUN_CONFIG, SIGNER).round == 18
    for changes in ({"bans": (KEYS[0],)}, {"head": OTHER}, {"root": OTHER}, {"round": 18}, {"window": ()}):
        false = msgspec.structs.replace(END, **changes)
        jump(SEVEN, tuple(CHANGES), false, SIGNER)
        assert "does not follow" in refused(false, entry)
        forged = bent(certified(plain_manifest(false, RUN_CONFIG), false), signatures=(bytes(64),) * 2)
        assert refused(false, forged) == "the certificate has an invalid signature"


def test_regroups_are_checked_against_the_roster_that_they_leave() -> None:
    check_regroup(BEGINNING, START.roster, SIGNER)
    with pytest.raises(RemoteProtocolError, match="the branch has keys that are not members"):
        check_regroup(BEGINNING, genesis(RUN, KEYS[1:5], ROOT0).roster, SIGNER)


# ---------------------------------------------------------------------------------------------------
# Encoding

WHOLE = History(
    (BranchStart(RUN, 0), BranchStart(OTHER, 7)),
    17,
    tuple(CHANGES),
    END,
    (certified(plain_manifest(END, RUN_CONFIG), END), BEGINNING),
)
ENCODED = encode_history(WHOLE)
PLAIN: list[Any] = msgspec.msgpack.decode(ENCODED)


def not_a_history(data: bytes) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        decode_history(data)
    return caught.value.why


def test_a_history_is_what_was_encoded() -> None:
    for history in (WHOLE, History((BranchStart(RUN, 0),), 0, (), None, ())):
        assert decode_history(encode_history(history)) == history
    assert msgspec.msgpack.encode(PLAIN) == ENCODED


@pytest.mark.parametrize("count", [0, 1, 15, 16, 300, 4_096])
def test_a_history_is_encoded_step_by_step_as_it_would_be_at_once(count: int) -> None:
    history = History((BranchStart(RUN, 0),), 17, (BEGINNING,) * count, END, WHOLE.steps * (count % 20))
    assert encode_history(history) == msgspec.msgpack.encode(history)


def test_a_history_that_was_decoded_proves_as_much() -> None:
    history = decode_history(ENCODED)
    assert history.base is not None
    jump(SEVEN, history.changes, history.base, SIGNER)
    assert follow(history.base, history.steps[0], RUN_CONFIG, SIGNER).round == 18


def with_field(place: int, value: Any) -> bytes:
    return msgspec.msgpack.encode([*PLAIN[:place], value, *PLAIN[place + 1 :]])


STEP = PLAIN[3 + 1][0]
NOT_HISTORIES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "not a history"),
    "cut off": (ENCODED[:-1], "not a history"),
    "something after it": (ENCODED + b"\0", "not a history"),
    "a field too few": (msgspec.msgpack.encode(PLAIN[:-1]), "not a history"),
    "a field too many": (msgspec.msgpack.encode([*PLAIN, 0]), "canonical"),
    "no lineage": (with_field(0, []), "not a history"),
    "a short branch": (with_field(0, [[RUN[1:], 0]]), "not a history"),
    "a negative round": (with_field(1, -1), "not a history"),
    "a round beyond all": (with_field(1, 2**48), "not a history"),
    "a round with a fraction": (with_field(1, 17.0), ""),
    "a map for a base": (with_field(3, {}), "not a history"),
    "a step of no kind": (with_field(4, [["other", *STEP[1:]]]), "not a history"),
    "too many steps": (with_field(4, [STEP] * (ENTRIES_MAX + 1)), "not a history"),
    "too many changes": (with_field(2, [STEP] * (CHANGES_MAX + 1)), "not a history"),
    "a round in nine bytes": (ENCODED.replace(b"\x11", b"\xcf" + bytes(7) + b"\x11", 1), "canonical"),
    "too deep": (msgspec.msgpack.encode(PLAIN)[:1].replace(b"\x95", b"\x96") + ENCODED[1:] + b"\x91" * 9_999 + b"\0",
                 "not a history"),
}  # fmt: skip


@pytest.mark.parametrize("what", NOT_HISTORIES)
def test_what_is_not_a_history_is_refused(what: str) -> None:
    data, why = NOT_HISTORIES[what]
    assert why in not_a_history(data)


def test_the_longest_lists_are_accepted() -> None:
    history = msgspec.structs.replace(WHOLE, steps=(BEGINNING,) * ENTRIES_MAX, changes=(BEGINNING,) * CHANGES_MAX)
    assert decode_history(encode_history(history)) == history


def test_a_history_that_is_too_long_is_not_even_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(ENCODED) <= HISTORY_BYTES_MAX
    monkeypatch.setattr(module, "HISTORY_BYTES_MAX", len(ENCODED) - 1)
    limit = len(ENCODED) - 1
    assert not_a_history(ENCODED) == f"a history of {len(ENCODED)} bytes; the limit is {limit}"
    assert encode_answer(WHOLE) is None  # nor sent
    monkeypatch.setattr(module, "HISTORY_BYTES_MAX", len(ENCODED))
    assert decode_history(ENCODED) == WHOLE
    assert encode_answer(WHOLE) == ENCODED


def test_the_steps_of_a_history_are_decoded_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else in the process runs while one is."""
    decoded: list[bytes] = []

    def noted(decoder: Any, data: bytes, what: str) -> Any:
        decoded.append(data)
        return wire.decode_strictly(decoder, data, what)

    monkeypatch.setattr(module, "decode_strictly", noted)
    assert decode_history(ENCODED) == WHOLE
    assert decoded == [ENCODED, *(wire.encode(step) for step in (*WHOLE.changes, *WHOLE.steps))]


def test_a_step_in_another_encoding_is_refused() -> None:
    number = ENCODED.rindex(b"\xa6branch")
    assert "canonical" in not_a_history(ENCODED[:number] + b"\xd9\x06" + ENCODED[number + 1 :])


@given(st.binary(max_size=300))
def test_noise_is_no_history(data: bytes) -> None:
    not_a_history(data)


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_random_damage_never_proves_anything_new(seed: int) -> None:
    """Flips a bit, a byte or a stretch of bytes: whatever still decodes fails a check or leads to the same states."""
    rng = random.Random(seed)
    for _ in range(100):
        octets = bytearray(ENCODED)
        place = rng.randrange(len(octets))
        kind = rng.randrange(3)
        if kind == 0:
            octets[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            octets[place : place + rng.randrange(1, 9)] = rng.randbytes(rng.randrange(9))
        else:
            there = rng.randrange(len(octets))
            octets[place : place + 32] = octets[there : there + 32]
        try:
            history = decode_history(bytes(octets))
            assert encode_history(history) == bytes(octets)
            if history.base is None:
                continue
            jump(SEVEN, history.changes, history.base, SIGNER)
            following = follow(history.base, history.steps[0], RUN_CONFIG, SIGNER)
        except RemoteProtocolError:
            continue
        assert history.base == END
        assert following == END.after(WHOLE.steps[0].manifest, RUN_CONFIG)  # type: ignore[union-attr]
