"""Signed DHT records: under a key, each peer has one value of its own, which nobody else can forge.

The DHT stores anything that anyone sends. So a record carries its author's signature over the key, the author, the time
of expiry and the value, and every node that stores or reads it checks. A record that expires too late is refused too:
a newer one replaces it only by expiring even later, so one dated into the next century would stay for good.

On the wire, as the DHT hands them to a validator, the subkey is the author's public key, and the value is the announced
bytes in msgpack followed by the signature. Each has exactly one valid encoding; anything else is refused, since the DHT
decodes accepted records without further checks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgspec

from p2ptrain.identity import KEY_BYTES, SIGNATURE_BYTES, verify

VALUE_BYTES_MAX = 4_096  # per announcement: a few addresses and a ticket take 500
AHEAD_SECONDS_MAX = 7_200  # how far ahead a record may expire
ANNOUNCE_SECONDS_MAX = 3_600  # the longest that we announce for: a clock one hour slow still accepts it
PAST_SECONDS_MAX = 60  # for inaccurate clocks: one stale entry spoils all that come with it
DOMAIN = b"p2ptrain DHT record 1\0"
KEY_BYTES_MAX = 256  # digests of keys in the DHT have 20


def sign_record(sign: Callable[[bytes], bytes], author: bytes, key: bytes, packed: bytes, expires_at: float) -> bytes:
    """Returns a value in stored form: the announced bytes in msgpack, and the signature."""
    return packed + sign(_signed(author, key, packed, expires_at))


def strip_record(stored: bytes) -> bytes:
    """Returns the value of a valid record without its signature."""
    return stored[:-SIGNATURE_BYTES]


def why_invalid(key: object, subkey: object, stored: object, expires_at: object, now: float) -> str:
    """Says why a record is invalid; empty if it is valid. The arguments come from any peer and may have any type."""
    if not (isinstance(key, bytes) and isinstance(subkey, bytes) and isinstance(stored, bytes)):
        return "not bytes"
    if len(key) > KEY_BYTES_MAX or len(subkey) > 2 + KEY_BYTES or len(stored) > VALUE_BYTES_MAX + 3 + SIGNATURE_BYTES:
        return "too long"
    if not (isinstance(expires_at, float) and now - PAST_SECONDS_MAX <= expires_at <= now + AHEAD_SECONDS_MAX):
        return "expires at a time that is not accepted"  # NaN fails this too
    author, packed = _unpacked(subkey), strip_record(stored)
    if author is None or _unpacked(packed) is None:
        return "not bytes in msgpack's one encoding"
    if not verify(author, _signed(author, key, packed, expires_at), stored[-SIGNATURE_BYTES:]):
        return "the signature is not that of the key it stands under"
    return ""


def _signed(author: bytes, key: bytes, packed: bytes, expires_at: float) -> bytes:
    return DOMAIN + struct.pack(">d", expires_at) + author + len(key).to_bytes(2, "big") + key + packed


def _unpacked(packed: bytes) -> bytes | None:
    """Decodes msgpack bytes. None unless they are in the shortest form with nothing after them."""
    try:
        content = msgspec.msgpack.decode(packed, type=bytes)
    except msgspec.MsgspecError:
        return None
    return content if len(content) <= VALUE_BYTES_MAX and msgspec.msgpack.encode(content) == packed else None
