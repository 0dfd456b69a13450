"""What comes from others is decoded here, and nothing but its one encoding passes.

msgpack can write the same thing in several ways, and msgspec reads some that it never writes: what it has read is
encoded again and compared. Bytes of a stranger may also nest without end, or be no text where text should be.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from p2ptrain.errors import RemoteProtocolError

WHY_MAX = 200  # characters of what msgspec says, which quotes the data

T = TypeVar("T")
encode = msgspec.msgpack.Encoder().encode


def decode(decoder: msgspec.msgpack.Decoder[T], data: bytes, what: str) -> T:
    """Whatever msgspec takes for it, as from a version that may write more. RemoteProtocolError: it is not `what`."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"not {what}: {str(error)[:WHY_MAX]}") from error


def decode_strictly(decoder: msgspec.msgpack.Decoder[T], data: bytes, what: str) -> T:
    """What has been encoded as `encode` does it, and in no other way."""
    found = decode(decoder, data, what)
    if encode(found) != data:
        raise RemoteProtocolError(f"{what} in another than its canonical encoding")
    return found
