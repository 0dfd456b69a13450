"""Mail: the small messages between two peers of a run, and the frames in which they travel.

Messages deliver envelopes, ask for messages by name, and ask for histories by branch and round. A history may be longer
than a frame: its length comes first, then its parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from p2ptrain.core import wire
from p2ptrain.core.history import HISTORY_BYTES_MAX
from p2ptrain.core.messages import ENVELOPE_BYTES_MAX, Digest, Number, Short
from p2ptrain.core.wire import decode_strictly
from p2ptrain.net.transport import FRAME_BYTES_MAX

NAMES_MAX = 1_024  # in a `MessageQuery`: as many messages as a round of the largest run has
ENVELOPES_MAX = 64  # in a `Deliver`: verifying their signatures takes 10 ms
ENVELOPE_ROOM = 8  # overhead in bytes of an envelope in a frame; msgpack takes five
PART_BYTES = 2**19  # of a history: a vote may have to wait for one, 40 ms at 100 Mbit/s


class Deliver(Struct, frozen=True, array_like=True, tag="deliver"):
    """Hands over sealed envelopes, our own or forwarded."""

    envelopes: Annotated[
        tuple[Annotated[bytes, Meta(min_length=1, max_length=ENVELOPE_BYTES_MAX)], ...],
        Meta(min_length=1, max_length=ENVELOPES_MAX),
    ]


class MessageQuery(Struct, frozen=True, array_like=True, tag="ask"):
    """Asks for the messages with these names."""

    names: Annotated[tuple[Short, ...], Meta(min_length=1, max_length=NAMES_MAX)]


class HistoryQuery(Struct, frozen=True, array_like=True, tag="ask history"):
    """Asks for the history after this round of this branch."""

    branch: Digest
    round: Number


class TellHistory(Struct, frozen=True, array_like=True):
    """Answers `HistoryQuery`; on the wire it is a `HistoryBegins` and its parts."""

    history: bytes | bytearray


class HistoryBegins(Struct, frozen=True, array_like=True, tag="history"):
    """Announces a history and its size in bytes."""

    size: Annotated[int, Meta(ge=1, le=HISTORY_BYTES_MAX)]


class HistoryPart(Struct, frozen=True, array_like=True, tag="part"):
    """A part of a history; all but the last have PART_BYTES."""

    data: Annotated[bytes, Meta(min_length=1, max_length=PART_BYTES)]


Mail: TypeAlias = Deliver | MessageQuery | HistoryQuery
Frame: TypeAlias = Deliver | MessageQuery | HistoryQuery | HistoryBegins | HistoryPart

_FRAME: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def decode_frame(data: bytes) -> Frame:
    return decode_strictly(_FRAME, data, "a mailbox message")


def frames_of(message: Mail) -> Iterator[bytes]:
    """Yields the frames of a message; envelopes that do not fit one frame are spread over several."""
    if not isinstance(message, Deliver):
        yield wire.encode(message)
        return
    waiting: list[bytes] = []
    size = 0
    for envelope in message.envelopes:
        assert 1 <= len(envelope) <= ENVELOPE_BYTES_MAX, "envelopes are checked when they are sealed"
        if waiting and (size + len(envelope) + ENVELOPE_ROOM > FRAME_BYTES_MAX - 64 or len(waiting) == ENVELOPES_MAX):
            yield wire.encode(Deliver(tuple(waiting)))
            waiting, size = [], 0
        waiting.append(envelope)
        size += len(envelope) + ENVELOPE_ROOM
    yield wire.encode(Deliver(tuple(waiting)))
