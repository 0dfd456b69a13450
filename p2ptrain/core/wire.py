"""Strict decoding of data from peers: accepts only the canonical encoding.

msgpack can encode the same value in several ways, and msgspec accepts some that it never produces: so a decoded value
is encoded again and compared. Hostile data may also nest very deeply, or contain invalid text."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from p2ptrain.errors import RemoteProtocolError

WHY_MAX = 200  # characters of msgspec's error message, which may quote the data

T = TypeVar("T")
encode = msgspec.msgpack.Encoder().encode


def decode(decoder: msgspec.msgpack.Decoder[T], data: bytes, what: str) -> T:
    """Decodes leniently: data of a later version may have more fields. `what` names the data in the error."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"not {what}: {str(error)[:WHY_MAX]}") from error


def decode_strictly(decoder: msgspec.msgpack.Decoder[T], data: bytes, what: str) -> T:
    """Decodes data, and raises RemoteProtocolError unless it is exactly as `encode` writes it."""
    found = decode(decoder, data, what)
    if encode(found) != data:
        raise RemoteProtocolError(f"{what} is not in its canonical encoding")
    return found
