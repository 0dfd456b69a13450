"""Signed records for the DHT: one value for each announcing peer under a key, which nobody else can put there.

The DHT stores what anyone sends it. So a record carries its author's signature over the key, the author, the time at
which it expires and the value; whoever stores or reads it checks. A record that expires too late is refused as well,
for a newer one replaces it only if it expires later still, and one dated into the next century would stay for good.

On the wire, as the DHT hands them to a validator: the subkey is the author's public key, the value is msgpack of the
announced bytes with the signature behind it. Both have one encoding, and all else is refused, since the DHT decodes
what has passed here without further care.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgspec

from p2ptrain.identity import KEY_BYTES, SIGNATURE_BYTES, verify

VALUE_BYTES_MAX = 4_096  # of an announcement: a few addresses and a ticket take 500
AHEAD_SECONDS_MAX = 7_200  # how far ahead a record may expire
ANNOUNCE_SECONDS_MAX = 3_600  # what we announce for at most: a clock that is an hour slow still takes it
PAST_SECONDS_MAX = 60  # for clocks that are not quite right: one stale entry would spoil all that come with it
DOMAIN = b"p2ptrain DHT record 1\0"
KEY_BYTES_MAX = 256  # of a key's digest; the DHT's have 20
CHECKS_PER_SECOND_MAX = 1_024  # 70 ms of each second


def sign_record(sign: Callable[[bytes], bytes], author: bytes, key: bytes, packed: bytes, expires_at: float) -> bytes:
    """A value as it is stored: msgpack of the announced bytes, and the signature."""
    return packed + sign(_signed(author, key, packed, expires_at))


def strip_record(stored: bytes) -> bytes:
    """Without the signature, for a record that is valid."""
    return stored[:-SIGNATURE_BYTES]


def why_invalid(key: object, subkey: object, stored: object, expires_at: object, now: float) -> str:
    """What is wrong with a record that anyone may have sent, of whatever types; nothing if it is valid."""
    if not (isinstance(key, bytes) and isinstance(subkey, bytes) and isinstance(stored, bytes)):
        return "not bytes"
    if len(key) > KEY_BYTES_MAX or len(subkey) > 2 + KEY_BYTES or len(stored) > VALUE_BYTES_MAX + 3 + SIGNATURE_BYTES:
        return "too long"
    if not (isinstance(expires_at, float) and now - PAST_SECONDS_MAX <= expires_at <= now + AHEAD_SECONDS_MAX):
        return "expires at a time that is not taken"  # NaN compares with nothing
    author, packed = _unpacked(subkey), strip_record(stored)
    if author is None or _unpacked(packed) is None:
        return "not bytes in msgpack's one encoding"
    if not verify(author, _signed(author, key, packed, expires_at), stored[-SIGNATURE_BYTES:]):
        return "the signature is not that of the key it stands under"
    return ""


def _signed(author: bytes, key: bytes, packed: bytes, expires_at: float) -> bytes:
    return DOMAIN + struct.pack(">d", expires_at) + author + len(key).to_bytes(2, "big") + key + packed


def _unpacked(packed: bytes) -> bytes | None:
    """Bytes from msgpack, if that is what they are, in the shortest form and with nothing behind."""
    try:
        content = msgspec.msgpack.decode(packed, type=bytes)
    except msgspec.MsgspecError:
        return None
    return content if len(content) <= VALUE_BYTES_MAX and msgspec.msgpack.encode(content) == packed else None


class Validator:
    """Why records are invalid, for no more of them in a second than we can afford: anyone may send megabytes."""

    def __init__(self) -> None:
        self._second, self._checks = 0, 0

    def why_invalid(self, key: object, subkey: object, stored: object, expires_at: object, now: float) -> str:
        if int(now) != self._second:
            self._second, self._checks = int(now), 0
        self._checks += 1
        if self._checks > CHECKS_PER_SECOND_MAX:
            return "too many in a second"
        return why_invalid(key, subkey, stored, expires_at, now)
