"""Signed DHT records, including those that hostile peers would send."""

from __future__ import annotations

import math
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.identity import Identity
from p2ptrain.net.libp2p import dht
from p2ptrain.net.libp2p.dht import sign_record, strip_record, why_invalid

NOW = 1_800_000_000.0
KEY = bytes(range(20))
AUTHOR, OTHER = Identity(b"a" * 32), Identity(b"b" * 32)
SUBKEY = msgspec.msgpack.encode(AUTHOR.key)
NOT_TAKEN = "expires at a time that is not accepted"
NOT_MSGPACK = "not bytes in msgpack's one encoding"
FORGED = "the signature is not that of the key it stands under"


def stored(value: object = b"hint", author: Identity = AUTHOR, expires_at: float = NOW + 60, key: bytes = KEY) -> bytes:
    return sign_record(author.sign, author.key, key, msgspec.msgpack.encode(value), expires_at)


@pytest.mark.parametrize("value", [b"", b"hint", bytes(4_096)])
@pytest.mark.parametrize("seconds", [-60.0, 0.0, 1.0, 7_200.0])
def test_a_signed_record_is_valid_and_gives_its_value_back(value: bytes, seconds: float) -> None:
    record = stored(value, expires_at=NOW + seconds)
    assert why_invalid(KEY, SUBKEY, record, NOW + seconds, NOW) == ""
    assert msgspec.msgpack.decode(strip_record(record)) == value


@pytest.mark.parametrize("expires_at", [NOW - 61, NOW + 7_201, 0.0, -math.inf, math.inf, math.nan, 2**70, "soon", None])
def test_a_record_for_another_time_is_refused(expires_at: object) -> None:
    signed_for = expires_at if isinstance(expires_at, float) else NOW
    assert why_invalid(KEY, SUBKEY, stored(expires_at=signed_for), expires_at, NOW) == NOT_TAKEN


def test_a_record_holds_only_where_and_as_it_was_signed() -> None:
    assert why_invalid(KEY[::-1], SUBKEY, stored(), NOW + 60, NOW) == FORGED
    assert why_invalid(KEY, SUBKEY, stored(), NOW + 61, NOW) == FORGED
    assert why_invalid(KEY, SUBKEY, stored(author=OTHER), NOW + 60, NOW) == FORGED
    assert why_invalid(KEY, msgspec.msgpack.encode(OTHER.key), stored(), NOW + 60, NOW) == FORGED
    swapped = msgspec.msgpack.encode(b"evil") + stored()[-64:]
    assert why_invalid(KEY, SUBKEY, swapped, NOW + 60, NOW) == FORGED


def test_an_unsigned_record_is_refused() -> None:
    assert why_invalid(KEY, SUBKEY, msgspec.msgpack.encode(b"hint"), NOW + 60, NOW) == NOT_MSGPACK
    assert why_invalid(KEY, SUBKEY, b"", NOW + 60, NOW) == NOT_MSGPACK
    assert why_invalid(KEY, SUBKEY, msgspec.msgpack.encode(b"hint") + bytes(64), NOW + 60, NOW) == FORGED


@pytest.mark.parametrize("subkey", [b"\xc0", b"", AUTHOR.key, msgspec.msgpack.encode("text"), SUBKEY[:-1]])
def test_a_record_under_no_key_is_refused(subkey: bytes) -> None:
    assert why_invalid(KEY, subkey, stored(), NOW + 60, NOW) == NOT_MSGPACK


def test_a_record_under_a_short_key_is_refused() -> None:
    assert why_invalid(KEY, msgspec.msgpack.encode(AUTHOR.key[:31]), stored(), NOW + 60, NOW) == FORGED


@pytest.mark.parametrize("value", [None, 1, "text", [b"hint"], {"a": 1}, msgspec.Raw(b"\xc5\x00\x01x")])
def test_a_signed_value_that_the_dht_would_choke_on_is_refused(value: object) -> None:
    assert why_invalid(KEY, SUBKEY, stored(value), NOW + 60, NOW) == NOT_MSGPACK


def test_what_is_too_long_or_not_bytes_is_refused() -> None:
    assert why_invalid(KEY, SUBKEY, stored(bytes(4_097)), NOW + 60, NOW) == "too long"
    assert why_invalid(bytes(257), SUBKEY, stored(key=bytes(257)), NOW + 60, NOW) == "too long"
    for parts in [(None, SUBKEY, b""), (KEY, 1, b""), (KEY, SUBKEY, ["x"]), (KEY, SUBKEY, memoryview(stored()))]:
        assert why_invalid(*parts, NOW + 60, NOW) == "not bytes"


@given(st.binary(max_size=40), st.binary(max_size=40), st.binary(max_size=200), st.floats() | st.integers() | st.none())
def test_no_bytes_make_the_check_raise(key: bytes, subkey: bytes, record: bytes, expires_at: object) -> None:
    assert why_invalid(key, subkey, record, expires_at, NOW) != ""


def test_no_more_records_are_checked_in_a_second_than_we_can_afford(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht, "CHECKS_PER_SECOND_MAX", 2)
    counters, times = Counter[str](), iter(NOW + seconds for seconds in (0.0, 0.1, 0.9, 1.0, 1.1, 1.2))
    monkeypatch.setattr(dht.time, "time", lambda: next(times))
    validator = dht.RecordValidator(AUTHOR, counters)
    found = [validator.validate(dht.DHTRecord(KEY, SUBKEY, stored(), NOW + 60)) for _ in range(6)]
    assert (found, counters) == ([True, True, False] * 2, {"DHT records refused": 2})
