"""Wire messages: the kinds of messages between nodes, each with one encoding and a bound on every length.

A message travels in an envelope, msgpack [body, signature, attachment]; the body is an array of the kind's tag and its
fields in order. There are no maps, floats or optional fields. `decode` encodes its result again and compares, so that a
message has exactly one encoding: an integer in nine bytes, an extra field or a string in place of bytes is refused.
The author signs

    "p2ptrain" | protocol version | run id | kind | digest of the body

so that a signature is worthless in another run, in another version, or as another kind. A message's digest does not
cover the signature: an author may be able to sign the same message in two ways, and it is still the same message.

A `Certificate` has no author but a quorum's signatures, and `Evidence` holds two signed envelopes: anyone can verify
either. Everything that a stranger can send goes through `decode`. Behind it, types guarantee that a message is well
formed; whether it matters in the current round is for the core to decide."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, IntEnum
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Protocol, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from p2ptrain.config import PAYLOAD_BYTES_MAX, PROTOCOL_VERSION
from p2ptrain.config.succession import CHANGE_BYTES_MAX
from p2ptrain.core import wire
from p2ptrain.core.wire import decode_strictly
from p2ptrain.digest import DIGEST_BYTES, digest, leaf_digests, merkle_root
from p2ptrain.errors import RemoteProtocolError

ENVELOPE_BYTES_MAX = 1_000_000  # gossipsub silently drops anything over 1,048,446 bytes
KEY_BYTES = 32
SIGNATURE_BYTES = 64
SHORT_BYTES = 16  # names an announcement within its round: a collision takes one author 2**64 tries
SEATS_MAX = 256  # RunConfig.admission.seats_max
ADMITTED_MAX = 1_024  # RunConfig.admission.contributors_max
HELD_MAX = 2 * ADMITTED_MAX  # per author the oldest untaken announcement, and a second one that proves a lie
REQUESTS_MAX = 512  # joins, leaves and evidence per round; the rest waits for the next
ATTACHMENT_BYTES_MAX = 262_144  # RunConfig.agreement.inline_bytes_max at its largest
CLAIM_BYTES_MAX = 256  # a ticket (signer, bearer, uses, last round, signature), and another signature
PROVEN_BYTES_MAX = 65_536  # per half of evidence; a proposal that names 256 availabilities takes 9 KB
Z_MAX, STRENGTH_MAX = 2_000, 8_000  # thousandths: a set's z is cut off there, and larger strengths say no more
NUMBER_MAX = 2**48  # rounds, views and attempts: one per microsecond for nine years

Number = Annotated[int, Meta(ge=0, lt=NUMBER_MAX)]
Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Z = Annotated[int, Meta(ge=-Z_MAX, le=Z_MAX)]
Strength = Annotated[int, Meta(ge=-STRENGTH_MAX, le=STRENGTH_MAX)]
Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Short = Annotated[bytes, Meta(min_length=SHORT_BYTES, max_length=SHORT_BYTES)]
Signature = Annotated[bytes, Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
# Seat s is bit s % 8 of byte s // 8; no zero byte at the end.
SeatBits = Annotated[bytes, Meta(max_length=SEATS_MAX // 8)]

NOTHING = bytes(DIGEST_BYTES)  # a vote for no manifest
SETS = ("held", "refused", "requests", "availabilities", "members")  # strictly ascending fields
BITMAPS = ("heard", "seats", "announced", "available", "prevoted", "precommitted")


class Verifier(Protocol):
    """Checks signatures for one run."""

    run_id: bytes

    def __call__(self, key: bytes, signed: bytes, signature: bytes) -> bool: ...


class Heard(Enum):
    """The result of taking in an announcement, a proposal or a vote."""

    NEW = "new"
    USELESS = "useless"  # already known, or of a view or round that does not matter
    CONFLICT = "conflict"  # the author has signed a different one for the same view, or the same round
    FULL = "full"  # too many of this author's are waiting already


class Ballot(IntEnum):
    PREVOTE = 1
    PRECOMMIT = 2


# -- The kinds of messages --------------------------------------------------------------------------


class Announcement(Struct, frozen=True, array_like=True, tag="announcement"):
    """Announces a contribution. Its payload may be attached."""

    branch: Digest
    round: Number
    base_round: Number  # the last steps went on from the state after this round, or a later one
    base_root: Digest
    payload: Digest
    payload_bytes: Annotated[int, Meta(ge=1, lt=PAYLOAD_BYTES_MAX)]
    content: Short  # names the payload without its author: the same content counts once, whatever key stands in front
    steps: Number  # a claim: local steps behind it
    loss: Number  # a claim: their mean training loss, in millionths of a nat
    held_out: Number  # a claim: the held-out loss of the base, likewise; 0: not measured
    author: Key


class Availability(Struct, frozen=True, array_like=True, tag="availability"):
    """Lists the contributions that the author holds and has checked, and the members that it heard."""

    branch: Digest
    round: Number
    root_round: Number
    root: Digest
    held: Annotated[tuple[Short, ...], Meta(max_length=HELD_MAX)]  # ascending
    refused: Annotated[tuple[Short, ...], Meta(max_length=HELD_MAX)]  # ascending
    requests: Annotated[tuple[Short, ...], Meta(max_length=REQUESTS_MAX)]  # ascending
    heard: SeatBits
    author: Key


class Proposal(Struct, frozen=True, array_like=True, tag="proposal"):
    """Names the availabilities that a view's manifest is computed from, and the digest of that manifest."""

    branch: Digest
    round: Number
    view: Number
    valid_view: Annotated[int, Meta(ge=-1, lt=NUMBER_MAX)]  # the view whose quorum of prevotes backs it; -1: none
    availabilities: Annotated[tuple[Digest, ...], Meta(min_length=1, max_length=SEATS_MAX)]  # ascending
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
    """The precommits of a quorum for one manifest."""

    branch: Digest
    round: Number
    view: Number
    manifest: Digest
    seats: SeatBits
    signatures: Annotated[tuple[Signature, ...], Meta(min_length=1, max_length=SEATS_MAX)]  # in the seats' order


class Hello(Struct, frozen=True, array_like=True, tag="hello"):
    """Tells a peer the author's position and the messages that it holds, so that the peer can send the missing ones."""

    branch: Digest
    round: Number
    view: Number
    announced: SeatBits  # members whose announcement, availability and votes of this view the author holds
    available: SeatBits
    prevoted: SeatBits
    precommitted: SeatBits
    is_silent: bool  # the author does not know its earlier votes of this round, and does not vote in it
    author: Key


class JoinRequest(Struct, frozen=True, array_like=True, tag="join"):
    branch: Digest
    round: Number
    claim: Annotated[bytes, Meta(max_length=CLAIM_BYTES_MAX)]  # empty where no invitation is needed
    author: Key


class Leave(Struct, frozen=True, array_like=True, tag="leave"):
    branch: Digest
    round: Number
    author: Key


class Call(Struct, frozen=True, array_like=True, tag="call"):
    """Says that the author lost the quorum after this certificate, and asks who else is there."""

    branch: Digest
    parent: Digest
    attempt: Number
    author: Key


class Regroup(Struct, frozen=True, array_like=True, tag="regroup"):
    """Signs a set of members that are to go on from this certificate."""

    branch: Digest
    parent: Digest
    attempt: Number
    members: Annotated[tuple[Key, ...], Meta(min_length=1, max_length=SEATS_MAX)]  # ascending
    author: Key


class Evidence(Struct, frozen=True, array_like=True, tag="evidence"):
    """Two envelopes by one author, of which no honest author would have signed both."""

    first: Annotated[bytes, Meta(min_length=1, max_length=PROVEN_BYTES_MAX)]
    second: Annotated[bytes, Meta(min_length=1, max_length=PROVEN_BYTES_MAX)]


class AuditReport(Struct, frozen=True, array_like=True, tag="audit"):
    """Says what the author has measured of the contribution of `key` that round `round` took (audits.py)."""

    branch: Digest
    round: Number
    key: Key
    z: Z
    strength: Strength
    is_summoned: bool  # it read as many sequences as all are summoned to read
    author: Key


class Moving(Struct, frozen=True, array_like=True, tag="motion"):
    """Moves that the run go on as another (succession.py has the fields' meaning)."""

    branch: Digest
    round: Number
    last: Number
    weights: Number
    root: Digest
    change: Annotated[bytes, Meta(max_length=CHANGE_BYTES_MAX)]
    author: Key


class Assent(Struct, frozen=True, array_like=True, tag="assent"):
    """Assents to a motion, or to none any more."""

    branch: Digest
    round: Number
    motion: Digest  # its name, or NOTHING
    author: Key


Authored: TypeAlias = (
    Announcement | Availability | Proposal | Vote | Hello | JoinRequest | Leave | Call | Regroup | AuditReport | Moving
    | Assent
)  # fmt: skip
Message: TypeAlias = Authored | Certificate | Evidence


class Envelope(Struct, frozen=True, array_like=True):
    body: bytes
    signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)]  # empty for certificates and evidence
    attachment: Annotated[bytes, Meta(max_length=ATTACHMENT_BYTES_MAX)]


class Received(Struct, frozen=True, dict=True):
    """A decoded message with a valid signature."""

    message: Message
    digest: bytes
    envelope: bytes  # as it was received, for evidence and for passing it on
    attachment: bytes

    @cached_property
    def name(self) -> bytes:
        """The short name by which peers ask for the message."""
        return self.digest[:SHORT_BYTES]


M = TypeVar("M", bound=Message)


def read(received: Received, kind: type[M]) -> M:
    """Returns the message as the kind that the caller knows it to be."""
    message = received.message
    assert isinstance(message, kind), "messages are filed by kind"
    return message


_ENVELOPE = msgspec.msgpack.Decoder(Envelope)
_MESSAGE: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def kind_of(message: Message) -> str:
    tag = type(message).__struct_config__.tag
    assert isinstance(tag, str)
    return tag


def encode(message: Message, signature: bytes = b"", attachment: bytes = b"") -> bytes:
    encoded = wire.encode(Envelope(wire.encode(message), signature, attachment))
    assert len(encoded) <= ENVELOPE_BYTES_MAX, "the bounds of the fields keep every message below the limit"
    return encoded


def without_attachment(envelope: bytes) -> bytes:
    """Returns an envelope that was decoded before, without its attachment."""
    opened = _ENVELOPE.decode(envelope)
    return wire.encode(Envelope(opened.body, opened.signature, b""))


def bare(received: Received) -> Received:
    """Returns a message without its attachment."""
    return Received(received.message, received.digest, without_attachment(received.envelope), b"")


def signature_of(received: Received) -> bytes:
    return _ENVELOPE.decode(received.envelope).signature


def message_digest(message: Message) -> bytes:
    return digest(f"message {kind_of(message)}", wire.encode(message))


def authored(author: bytes, content: bytes) -> bytes:
    """Returns the payload of a contribution. It begins with its author's key, so that its digest covers the author, and
    who copies a contribution has to send all of it."""
    return author + content


def author_of(payload: bytes) -> bytes:
    return payload[:KEY_BYTES]


def content_of(payload: bytes) -> bytes:
    return payload[KEY_BYTES:]


def content_name(payload: bytes) -> bytes:
    """Returns the name of a payload's content, the same for every author."""
    return digest("content", content_of(payload))[:SHORT_BYTES]


def contents_by_author(payloads: Iterable[bytes]) -> list[bytes]:
    """Returns the contents of payloads in the order of their authors' keys, which settles ties in an update."""
    return [content_of(payload) for payload in sorted(payloads, key=author_of)]


def payload_digest(payload: bytes) -> bytes:
    """Returns the payload's Merkle root, so that each piece of a large payload can be checked as it arrives."""
    return merkle_root(leaf_digests(payload), len(payload))


def signed_bytes(run_id: bytes, message: Message) -> bytes:
    domain = f"p2ptrain {PROTOCOL_VERSION} {kind_of(message)}".encode()
    return domain + b"\0" + run_id + message_digest(message)


def decode(data: bytes, verifier: Verifier) -> Received:
    """Decodes and verifies an envelope; raises RemoteProtocolError with the reason if no honest node would send it."""
    if len(data) > ENVELOPE_BYTES_MAX:
        raise RemoteProtocolError(f"a message of {len(data)} bytes; the limit is {ENVELOPE_BYTES_MAX}")
    envelope = decode_strictly(_ENVELOPE, data, "a message")
    message = decode_strictly(_MESSAGE, envelope.body, "a message")
    _check_form(message)
    _check_attachment(message, envelope.attachment)
    if isinstance(message, Certificate | Evidence):
        if envelope.signature:
            raise RemoteProtocolError(f"the {kind_of(message)} must not be signed")
    elif len(envelope.signature) != SIGNATURE_BYTES or not verifier(
        message.author, signed_bytes(verifier.run_id, message), envelope.signature
    ):
        raise RemoteProtocolError(f"the {kind_of(message)} has an invalid signature")
    return Received(message, message_digest(message), data, envelope.attachment)


def _check_form(message: Message) -> None:
    """Checks what types cannot express: sets ascend, bitmaps have no trailing zero byte, and fields are consistent."""
    for name in type(message).__struct_fields__:
        value = getattr(message, name)
        if name in SETS and any(first >= second for first, second in pairwise(value)):
            raise RemoteProtocolError(f"{name} are not in ascending order")
        if name in BITMAPS and value[-1:] == b"\0":
            raise RemoteProtocolError(f"{name} ends with a zero byte")
    match message:
        case Proposal(view=view, valid_view=valid_view) if valid_view >= view:
            raise RemoteProtocolError(f"a proposal of view {view} backed by view {valid_view}")
        case Announcement(round=number, base_round=base_round) if base_round > number:
            raise RemoteProtocolError(f"an announcement of round {number} from the later round {base_round}")
        case Certificate(seats=seats, signatures=signatures):
            if sum(octet.bit_count() for octet in seats) != len(signatures):
                raise RemoteProtocolError(f"a certificate whose {len(signatures)} signatures do not match its seats")
            if message.manifest == NOTHING:
                raise RemoteProtocolError("a certificate for no manifest")
        case Regroup(members=members, author=author) if author not in members:
            raise RemoteProtocolError("a regroup whose author is not in the set")
        case Evidence(first=first, second=second) if first >= second:
            raise RemoteProtocolError("evidence whose halves are not in ascending order")
        case _:
            pass


def _check_attachment(message: Message, attachment: bytes) -> None:
    if not attachment:
        return
    if not isinstance(message, Announcement):
        raise RemoteProtocolError(f"the {kind_of(message)} must not have an attachment")
    if len(attachment) != message.payload_bytes or payload_digest(attachment) != message.payload:
        raise RemoteProtocolError("an attachment that is not the announced payload")
    if author_of(attachment) != message.author:
        raise RemoteProtocolError("a payload of another author")
    if content_name(attachment) != message.content:
        raise RemoteProtocolError("a payload with another content than was announced")
