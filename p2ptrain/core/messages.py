"""Wire messages: what nodes say to one another, each with one encoding and a bound on every length.

A message travels in an envelope, msgpack [body, signature, attachment]; the body is an array of the kind's tag
and its fields in order. There are no maps, no floats and no optional fields. `decode` encodes again what it
read and compares, so that a message has exactly one encoding: an integer in nine bytes, a field too many or a
string in place of bytes is refused. The signature is the author's, over

    "p2ptrain" | protocol version | run id | kind | digest of the body

so that it says nothing in another run, in another version, or as another kind. A message's digest leaves the
signature out: whoever can sign may be able to sign the same thing in two ways, and it is still the same thing.

A `Certificate` has no author, but a quorum's signatures, and `Evidence` two envelopes: both prove themselves
to anyone. Whatever a stranger can send passes `decode`. Past it, types say that a message is well formed;
whether it means anything here and now is the core's to decide.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Protocol, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from p2ptrain.config import PROTOCOL_VERSION
from p2ptrain.core import wire
from p2ptrain.core.wire import decode_strictly
from p2ptrain.digest import DIGEST_BYTES, digest, leaf_digests, merkle_root
from p2ptrain.errors import RemoteProtocolError

ENVELOPE_BYTES_MAX = 1_000_000  # gossipsub drops what passes 1,048,446 bytes without a word to anyone
KEY_BYTES = 32
SIGNATURE_BYTES = 64
SHORT_BYTES = 16  # names an announcement within its round: two that share it take 2**64 tries, and are of one author
SEATS_MAX = 256  # RunConfig.admission.seats_max
ADMITTED_MAX = 1_024  # RunConfig.admission.contributors_max
HELD_MAX = 2 * ADMITTED_MAX  # an author's oldest untaken announcement, and the second one that proves it lied
REQUESTS_MAX = 512  # joins, leaves and evidence of a round; what does not fit waits for the next
ATTACHMENT_BYTES_MAX = 262_144  # RunConfig.agreement.inline_bytes_max at its largest
PAYLOAD_BYTES_MAX = 2**32  # a billion parameters at k = 512 take a tenth of it
TICKET_BYTES_MAX = 256  # an invitation: key, serial, last round, signature
PROVEN_BYTES_MAX = 65_536  # each half of evidence; a proposal that names 256 availabilities takes 9 KB
NUMBER_MAX = 2**48  # rounds, views and attempts: one a microsecond for nine years
PROTOCOLS_MAX = 8  # protocol versions that a daemon speaks: the current one and the one before

Number = Annotated[int, Meta(ge=0, lt=NUMBER_MAX)]
Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Short = Annotated[bytes, Meta(min_length=SHORT_BYTES, max_length=SHORT_BYTES)]
Signature = Annotated[bytes, Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
# Seat s is bit s % 8 of byte s // 8; no zero byte at the end.
SeatBits = Annotated[bytes, Meta(max_length=SEATS_MAX // 8)]

NOTHING = bytes(DIGEST_BYTES)  # a vote for no manifest
SETS = ("held", "refused", "requests", "availabilities", "members", "protocols")  # fields that rise strictly
BITMAPS = ("heard", "seats", "announced", "available", "prevoted", "precommitted")


class Verifier(Protocol):
    """Checks signatures for one run."""

    run_id: bytes

    def __call__(self, key: bytes, signed: bytes, signature: bytes) -> bool: ...


class Ballot(IntEnum):
    PREVOTE = 1
    PRECOMMIT = 2


# ---------------------------------------------------------------------------------------------------
# The kinds


class Announcement(Struct, frozen=True, array_like=True, tag="announcement"):
    """A contribution exists. Its payload may ride along as the attachment."""

    branch: Digest
    round: Number
    base_round: Number  # trained from the state after this round
    base_root: Digest
    payload: Digest
    payload_bytes: Annotated[int, Meta(ge=1, lt=PAYLOAD_BYTES_MAX)]
    author: Key


class Availability(Struct, frozen=True, array_like=True, tag="availability"):
    """What the author holds and has checked, and whom it heard."""

    branch: Digest
    round: Number
    root_round: Number
    root: Digest
    held: Annotated[tuple[Short, ...], Meta(max_length=HELD_MAX)]  # rising
    refused: Annotated[tuple[Short, ...], Meta(max_length=HELD_MAX)]  # rising
    requests: Annotated[tuple[Short, ...], Meta(max_length=REQUESTS_MAX)]  # rising
    heard: SeatBits
    author: Key


class Proposal(Struct, frozen=True, array_like=True, tag="proposal"):
    """The availabilities that a view's manifest is a function of, and the digest of that manifest."""

    branch: Digest
    round: Number
    view: Number
    valid_view: Annotated[int, Meta(ge=-1, lt=NUMBER_MAX)]  # the view whose quorum of prevotes backs it; -1: none
    availabilities: Annotated[tuple[Digest, ...], Meta(min_length=1, max_length=SEATS_MAX)]  # rising
    manifest: Digest
    author: Key


class Vote(Struct, frozen=True, array_like=True, tag="vote"):
    branch: Digest
    round: Number
    view: Number
    ballot: Ballot
    manifest: Digest  # or NOTHING
    author: Key


class Certificate(Struct, frozen=True, array_like=True, tag="certificate"):
    """A quorum's precommits for one manifest."""

    branch: Digest
    round: Number
    view: Number
    manifest: Digest
    seats: SeatBits
    signatures: Annotated[tuple[Signature, ...], Meta(min_length=1, max_length=SEATS_MAX)]  # in the seats' order


class Hello(Struct, frozen=True, array_like=True, tag="hello"):
    """Where the author stands, so that a peer can hand over what it lacks."""

    protocols: Annotated[tuple[Annotated[int, Meta(ge=1, lt=2**16)], ...], Meta(min_length=1, max_length=PROTOCOLS_MAX)]
    branch: Digest
    round: Number
    view: Number
    announced: SeatBits  # members whose announcement, availability and votes of this view the author holds
    available: SeatBits
    prevoted: SeatBits
    precommitted: SeatBits
    is_silent: bool  # the author does not know what it has said in this round, and takes no part in deciding it
    author: Key


class JoinRequest(Struct, frozen=True, array_like=True, tag="join"):
    branch: Digest
    round: Number
    ticket: Annotated[bytes, Meta(max_length=TICKET_BYTES_MAX)]
    author: Key


class Leave(Struct, frozen=True, array_like=True, tag="leave"):
    branch: Digest
    round: Number
    author: Key


class Call(Struct, frozen=True, array_like=True, tag="call"):
    """I have lost the quorum since this certificate; who is there?"""

    branch: Digest
    parent: Digest
    attempt: Number
    author: Key


class Regroup(Struct, frozen=True, array_like=True, tag="regroup"):
    """With these members I go on from this certificate."""

    branch: Digest
    parent: Digest
    attempt: Number
    members: Annotated[tuple[Key, ...], Meta(min_length=1, max_length=SEATS_MAX)]  # rising
    author: Key


class Evidence(Struct, frozen=True, array_like=True, tag="evidence"):
    """Two envelopes that no honest author would have signed both."""

    first: Annotated[bytes, Meta(min_length=1, max_length=PROVEN_BYTES_MAX)]
    second: Annotated[bytes, Meta(min_length=1, max_length=PROVEN_BYTES_MAX)]


Authored: TypeAlias = Announcement | Availability | Proposal | Vote | Hello | JoinRequest | Leave | Call | Regroup
Message: TypeAlias = Authored | Certificate | Evidence


class Envelope(Struct, frozen=True, array_like=True):
    body: bytes
    signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)]  # empty for what proves itself
    attachment: Annotated[bytes, Meta(max_length=ATTACHMENT_BYTES_MAX)]


class Received(Struct, frozen=True, dict=True):
    """A message that was decoded, whose signature holds."""

    message: Message
    digest: bytes
    envelope: bytes  # as it came: what evidence and handing over repeat
    attachment: bytes

    @cached_property
    def name(self) -> bytes:
        """By which others ask for it."""
        return self.digest[:SHORT_BYTES]


M = TypeVar("M", bound=Message)


def read(received: Received, kind: type[M]) -> M:
    """The message, of which the caller knows the kind."""
    message = received.message
    assert isinstance(message, kind), "filed under its kind"
    return message


_ENVELOPE = msgspec.msgpack.Decoder(Envelope)
_MESSAGE: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def kind_of(message: Message) -> str:
    tag = type(message).__struct_config__.tag
    assert isinstance(tag, str)
    return tag


def encode(message: Message, signature: bytes = b"", attachment: bytes = b"") -> bytes:
    """The envelope of a message."""
    encoded = wire.encode(Envelope(wire.encode(message), signature, attachment))
    assert len(encoded) <= ENVELOPE_BYTES_MAX, "the limits of the fields keep a message in an envelope"
    return encoded


def open_envelope(envelope: bytes) -> tuple[bytes, bytes, bytes]:
    """Body, signature and attachment of an envelope that was decoded before."""
    opened = _ENVELOPE.decode(envelope)
    return opened.body, opened.signature, opened.attachment


def seal_envelope(body: bytes, signature: bytes) -> bytes:
    """An envelope without an attachment."""
    return wire.encode(Envelope(body, signature, b""))


def signature_of(received: Received) -> bytes:
    """The author's signature, as it stands in the envelope."""
    return _ENVELOPE.decode(received.envelope).signature


def message_digest(message: Message) -> bytes:
    return digest(f"message {kind_of(message)}", wire.encode(message))


def payload_digest(payload: bytes) -> bytes:
    """A Merkle root, so that above a piece's size each piece is checked as it arrives."""
    return merkle_root(leaf_digests(payload), len(payload))


def signed_bytes(run_id: bytes, message: Message) -> bytes:
    """What the author signs."""
    domain = f"p2ptrain {PROTOCOL_VERSION} {kind_of(message)}".encode()
    return domain + b"\0" + run_id + message_digest(message)


def decode(data: bytes, verifier: Verifier) -> Received:
    """The message in an envelope; RemoteProtocolError with the reason if there is none that an honest node sends."""
    if len(data) > ENVELOPE_BYTES_MAX:
        raise RemoteProtocolError(f"message of {len(data)} bytes, the limit is {ENVELOPE_BYTES_MAX}")
    envelope = decode_strictly(_ENVELOPE, data, "a message")
    message = decode_strictly(_MESSAGE, envelope.body, "a message")
    _check_form(message)
    _check_attachment(message, envelope.attachment)
    if isinstance(message, Certificate | Evidence):
        if envelope.signature:
            raise RemoteProtocolError(f"a signature on a {kind_of(message)}, which proves itself")
    elif len(envelope.signature) != SIGNATURE_BYTES or not verifier(
        message.author, signed_bytes(verifier.run_id, message), envelope.signature
    ):
        raise RemoteProtocolError(f"a {kind_of(message)} with a wrong signature")
    return Received(message, message_digest(message), data, envelope.attachment)


def _check_form(message: Message) -> None:
    """What types cannot say: sets rise, bitmaps end with a set bit, and parts agree with one another."""
    for name in type(message).__struct_fields__:
        value = getattr(message, name)
        if name in SETS and any(first >= second for first, second in pairwise(value)):
            raise RemoteProtocolError(f"{name} do not rise")
        if name in BITMAPS and value[-1:] == b"\0":
            raise RemoteProtocolError(f"{name} ends with a byte of no seats")
    match message:
        case Proposal(view=view, valid_view=valid_view) if valid_view >= view:
            raise RemoteProtocolError(f"a proposal of view {view} backed by view {valid_view}")
        case Announcement(round=number, base_round=base_round) if base_round > number:
            raise RemoteProtocolError(f"an announcement of round {number} from the later round {base_round}")
        case Certificate(seats=seats, signatures=signatures):
            if sum(octet.bit_count() for octet in seats) != len(signatures):
                raise RemoteProtocolError(f"a certificate with {len(signatures)} signatures for other seats")
            if message.manifest == NOTHING:
                raise RemoteProtocolError("a certificate of no manifest")
        case Regroup(members=members, author=author) if author not in members:
            raise RemoteProtocolError("a regroup without its author")
        case Evidence(first=first, second=second) if first >= second:
            raise RemoteProtocolError("evidence whose halves do not rise")
        case _:
            pass


def _check_attachment(message: Message, attachment: bytes) -> None:
    if not attachment:
        return
    if not isinstance(message, Announcement):
        raise RemoteProtocolError(f"an attachment to a {kind_of(message)}")
    if len(attachment) != message.payload_bytes or payload_digest(attachment) != message.payload:
        raise RemoteProtocolError("an attachment that is not the announced payload")
