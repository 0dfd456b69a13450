"""Wire messages: one encoding each, bounded, and signed for one run, version and kind."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from p2ptrain.core import messages as wire
from p2ptrain.core.messages import (
    NOTHING,
    Announcement,
    Assent,
    AuditReport,
    Availability,
    Ballot,
    Call,
    Certificate,
    Evidence,
    Hello,
    JoinRequest,
    Leave,
    Message,
    Moving,
    Proposal,
    Regroup,
    Vote,
    authored,
    content_name,
    contents_by_author,
    decode,
    encode,
    kind_of,
    message_digest,
    payload_digest,
    signed_bytes,
)
from p2ptrain.digest import digest
from p2ptrain.errors import RemoteProtocolError

RUN = digest("test run")


class FakeKeys:
    """Fake signatures, made of digests over the key: sufficient where only their binding to key and data matters."""

    def __init__(self, run_id: bytes = RUN) -> None:
        self.run_id = run_id

    def __call__(self, key: bytes, signed: bytes, signature: bytes) -> bool:
        return signature == self.sign(key, signed)

    @staticmethod
    def sign(key: bytes, signed: bytes) -> bytes:
        return digest("test signature", key, signed) * 2


KEYS = FakeKeys()
keys = st.binary(min_size=32, max_size=32)
shorts = st.lists(st.binary(min_size=16, max_size=16), max_size=6, unique=True).map(lambda items: tuple(sorted(items)))
rising_keys = st.lists(keys, min_size=1, max_size=5, unique=True).map(lambda items: tuple(sorted(items)))
numbers = st.integers(0, wire.NUMBER_MAX - 1)
seats = st.binary(max_size=32).map(lambda octets: octets.rstrip(b"\0"))


@st.composite
def certificates(draw: st.DrawFn) -> Certificate:
    chosen = draw(st.binary(min_size=1, max_size=4).map(lambda octets: octets.rstrip(b"\0")).filter(len))
    signatures = tuple(bytes([seat]) * 64 for seat in range(sum(octet.bit_count() for octet in chosen)))
    return Certificate(draw(keys), draw(numbers), draw(numbers), draw(keys.filter(any)), chosen, signatures)


@st.composite
def regroups(draw: st.DrawFn) -> Regroup:
    members = draw(rising_keys)
    return Regroup(draw(keys), draw(keys), draw(numbers), members, draw(st.sampled_from(members)))


@st.composite
def proposals(draw: st.DrawFn) -> Proposal:
    view = draw(numbers)
    valid_view = draw(st.integers(-1, view - 1))
    return Proposal(draw(keys), draw(numbers), view, valid_view, draw(rising_keys), draw(keys), draw(keys))


@st.composite
def announcements(draw: st.DrawFn) -> Announcement:
    number = draw(numbers)
    base, size = draw(st.integers(0, number)), draw(st.integers(1, 2**32 - 1))
    return Announcement(
        draw(keys),
        number,
        base,
        draw(keys),
        draw(keys),
        size,
        draw(st.binary(min_size=16, max_size=16)),
        *draw(st.tuples(numbers, numbers, numbers)),
        draw(keys),
    )


halves = st.lists(st.binary(min_size=1, max_size=50), min_size=2, max_size=2, unique=True).map(sorted)
KINDS: dict[str, st.SearchStrategy[Any]] = {
    "announcement": announcements(),
    "availability": st.builds(Availability, keys, numbers, numbers, keys, shorts, shorts, shorts, seats, keys),
    "proposal": proposals(),
    "vote": st.builds(Vote, keys, numbers, numbers, st.sampled_from(Ballot), st.one_of(keys, st.just(NOTHING)), keys),
    "certificate": certificates(),
    "hello": st.builds(Hello, keys, numbers, numbers, seats, seats, seats, seats, st.booleans(), keys),
    "join": st.builds(JoinRequest, keys, numbers, st.binary(max_size=256), keys),
    "leave": st.builds(Leave, keys, numbers, keys),
    "call": st.builds(Call, keys, keys, numbers, keys),
    "regroup": regroups(),
    "evidence": halves.map(lambda pair: Evidence(*pair)),
    "audit": st.builds(
        AuditReport, keys, numbers, keys, st.integers(-2_000, 2_000), st.integers(-8_000, 8_000), st.booleans(), keys
    ),
    "motion": st.builds(Moving, keys, numbers, numbers, numbers, keys, st.binary(max_size=1_024), keys),
    "assent": st.builds(Assent, keys, numbers, keys, keys),
}


def enveloped(message: Message, attachment: bytes = b"", run_id: bytes = RUN) -> bytes:
    if isinstance(message, Certificate | Evidence):
        return encode(message, b"", attachment)
    return encode(message, KEYS.sign(message.author, signed_bytes(run_id, message)), attachment)


def test_every_kind_is_tried() -> None:
    assert {kind.__struct_config__.tag for kind in get_args(wire.Message)} == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_a_message_decodes_to_itself(kind: str, data: st.DataObject) -> None:
    message = data.draw(KINDS[kind])
    envelope = enveloped(message)
    received = decode(envelope, KEYS)
    assert received.message == message
    assert received.envelope == envelope
    assert received.digest == message_digest(message)
    assert kind_of(message) == kind


def drawn(kind: str, seed: int) -> Message:
    """Draws a message of a kind without hypothesis, whose examples cannot be drawn in a loop."""
    generator = random.Random(seed)

    def key() -> bytes:
        return generator.randbytes(32)

    def rising(size: int, count: int) -> tuple[bytes, ...]:
        return tuple(sorted(generator.randbytes(size) for _ in range(count)))

    def bits() -> bytes:
        return generator.randbytes(3) + b"\1"

    members = rising(32, 4)
    made: dict[str, Callable[[], Message]] = {
        "announcement": lambda: Announcement(
            key(), 70_000, 69_999, key(), key(), 98_829, generator.randbytes(16), 500, 3_141_592, 3_200_000, key()
        ),
        "availability": lambda: Availability(key(), 9, 8, key(), rising(16, 5), rising(16, 2), (), bits(), key()),
        "proposal": lambda: Proposal(key(), 5, 4, 2, rising(32, 3), key(), key()),
        "vote": lambda: Vote(key(), 5, 200, Ballot.PRECOMMIT, key(), key()),
        "certificate": lambda: Certificate(key(), 5, 0, key(), b"\x07", tuple(bytes([n]) * 64 for n in range(3))),
        "hello": lambda: Hello(key(), 5, 1, bits(), bits(), b"", bits(), generator.random() < 0.5, key()),
        "join": lambda: JoinRequest(key(), 3, generator.randbytes(100), key()),
        "leave": lambda: Leave(key(), 3, key()),
        "call": lambda: Call(key(), key(), 3, key()),
        "regroup": lambda: Regroup(key(), key(), 1, members, members[2]),
        "evidence": lambda: Evidence(*rising(40, 2)),
        "motion": lambda: Moving(key(), 3, 70_000, 60_000, key(), b'{"recipe":{"clip":"2"}}', key()),
        "assent": lambda: Assent(key(), 3, key(), key()),
        "audit": lambda: AuditReport(key(), 70_000, key(), -1_234, 950, generator.random() < 0.5, key()),
    }
    return made[kind]()


@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_thousand_malformed_messages_are_refused_or_canonical(kind: str) -> None:
    """Bit flips, cuts, growth, splices and noise: whatever is accepted is canonical and has a valid signature."""
    generator = random.Random(kind)
    good = [enveloped(drawn(kind, seed)) for seed in range(8)]
    assert all(decode(one, KEYS).envelope == one for one in good)
    accepted, slowest_seconds = 0, 0.0
    for turn in range(100_000):
        data = bytearray(good[turn % 8])
        at = generator.randrange(len(data))
        match turn % 6:
            case 0:
                data[at] ^= 1 << generator.randrange(8)
            case 1:
                del data[at:]
            case 2:
                data[at:at] = generator.randbytes(1 + turn % 5)
            case 3:
                data[at:] = good[(turn + 1) % 8][at:]
            case 4:
                data[at] = generator.choice((0x00, 0x7F, 0x80, 0xC0, 0xC1, 0xC6, 0xCB, 0xCF, 0xD9, 0xDD, 0xDF, 0xFF))
            case _:
                data = bytearray(generator.randbytes(at))
        start = time.perf_counter()
        try:
            received = decode(bytes(data), KEYS)
        except RemoteProtocolError as error:
            assert error.why
            assert len(error.why) < 300
        else:
            accepted += 1
            message = received.message
            assert enveloped(message) == data
        slowest_seconds = max(slowest_seconds, time.perf_counter() - start)
    assert slowest_seconds < 1.0  # microseconds, unless the machine takes a break
    if kind in ("certificate", "evidence"):
        assert accepted > 100  # their bytes are not signed as a whole
    else:
        assert accepted < 12_000  # a splice at the start is the other message, whole


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"certificate", "evidence"}))
def test_a_signature_holds_for_one_run_one_kind_and_one_author(kind: str) -> None:
    message = drawn(kind, 1)
    with pytest.raises(RemoteProtocolError, match=f"the {kind} has an invalid signature"):
        decode(enveloped(message, run_id=digest("another run")), KEYS)
    with pytest.raises(RemoteProtocolError, match=f"the {kind} has an invalid signature"):
        decode(enveloped(message), FakeKeys(digest("another run")))
    with pytest.raises(RemoteProtocolError, match=f"the {kind} has an invalid signature"):
        decode(encode(message, bytes(64)), KEYS)
    with pytest.raises(RemoteProtocolError, match=f"the {kind} has an invalid signature"):
        decode(encode(message), KEYS)


def test_what_is_signed_differs_between_kinds_with_the_same_fields() -> None:
    one, other = bytes(32), bytes([1]) * 32
    signed = {signed_bytes(RUN, message) for message in (Leave(one, 3, other), JoinRequest(one, 3, b"", other))}
    assert len(signed) == 2
    assert all(text.startswith(b"p2ptrain 2 ") and RUN in text for text in signed)


def test_a_digest_leaves_the_signature_and_the_attachment_out() -> None:
    payload = authored(bytes(32), b"payload")
    content = content_name(payload)
    message = Announcement(
        bytes(32), 1, 0, bytes(32), payload_digest(payload), len(payload), content, 1, 2, 0, bytes(32)
    )
    assert decode(enveloped(message), KEYS).digest == decode(enveloped(message, payload), KEYS).digest


def test_an_attachment_is_the_announced_payload_or_refused() -> None:
    payload = authored(bytes(32), b"p" * 468)
    content = content_name(payload)
    message = Announcement(bytes(32), 1, 0, bytes(32), payload_digest(payload), 500, content, 1, 2, 0, bytes(32))
    assert decode(enveloped(message, payload), KEYS).attachment == payload
    with pytest.raises(RemoteProtocolError, match="another content than was announced"):
        decode(enveloped(replace(message, content=bytes(16)), payload), KEYS)
    for other in (payload[:-1], payload + b"p", b"q" * 500):
        with pytest.raises(RemoteProtocolError, match="an attachment that is not the announced payload"):
            decode(enveloped(message, other), KEYS)
    with pytest.raises(RemoteProtocolError, match="the leave must not have an attachment"):
        decode(enveloped(drawn("leave", 1), payload), KEYS)


FORMS: dict[str, tuple[Message, str]] = {
    "falling held": (
        Availability(bytes(32), 1, 0, bytes(32), (b"b" * 16, b"a" * 16), (), (), b"", bytes(32)),
        "held are not in ascending order",
    ),
    "doubled refused": (
        Availability(bytes(32), 1, 0, bytes(32), (), (b"a" * 16, b"a" * 16), (), b"", bytes(32)),
        "refused are not in ascending order",
    ),
    "a bitmap with a spare byte": (
        Availability(bytes(32), 1, 0, bytes(32), (), (), (), b"\1\0", bytes(32)),
        "heard ends with a zero byte",
    ),
    "a proposal backed by its own view": (
        Proposal(bytes(32), 1, 3, 3, (bytes(32),), bytes(32), bytes(32)),
        "a proposal of view 3 backed by view 3",
    ),
    "trained on the future": (
        Announcement(bytes(32), 1, 2, bytes(32), bytes(32), 5, bytes(16), 1, 2, 0, bytes(32)),
        "an announcement of round 1 from the later round 2",
    ),
    "signatures without seats": (
        Certificate(bytes(32), 1, 0, b"m" * 32, b"\7", (bytes(64),)),
        "a certificate whose 1 signatures do not match its seats",
    ),
    "a certificate of nothing": (Certificate(bytes(32), 1, 0, NOTHING, b"\1", (bytes(64),)), "for no manifest"),
    "a regroup of others": (
        Regroup(bytes(32), bytes(32), 0, (b"a" * 32,), b"b" * 32),
        "whose author is not in the set",
    ),
    "one statement twice": (Evidence(b"same", b"same"), "evidence whose halves are not in ascending order"),
}


@pytest.mark.parametrize("case", FORMS)
def test_what_types_cannot_say_is_checked_too(case: str) -> None:
    message, reason = FORMS[case]
    with pytest.raises(RemoteProtocolError, match=reason):
        decode(enveloped(message), KEYS)


def test_other_encodings_of_the_same_message_are_refused() -> None:
    message = Leave(bytes(32), 3, bytes(32))
    body = msgspec.msgpack.encode(message)
    signature = KEYS.sign(message.author, signed_bytes(RUN, message))
    assert body.count(b"\x03") == 1
    for other in (
        body.replace(b"\x03", b"\xcc\x03"),  # an integer in two bytes
        body.replace(b"\x03", b"\xcf" + (3).to_bytes(8, "big")),  # in nine
        body.replace(b"\x03", b"\xcb" + bytes.fromhex("4008000000000000")),  # a float
        b"\x95" + body[1:] + b"\xc0",  # a field more
        msgspec.msgpack.encode(msgspec.to_builtins(message, builtin_types=(bytes,))[1:]),  # no tag
    ):
        with pytest.raises(RemoteProtocolError, match=r"not a message|canonical"):
            decode(msgspec.msgpack.encode([other, signature, b""]), KEYS)
    with pytest.raises(RemoteProtocolError, match="canonical"):
        decode(msgspec.msgpack.encode([body, signature, b"", 1]), KEYS)


def test_the_largest_message_of_every_kind_fits_an_envelope() -> None:
    key, top = b"\xff" * 32, wire.NUMBER_MAX - 1
    names = tuple(number.to_bytes(16, "big") for number in range(wire.HELD_MAX))
    requests = names[: wire.REQUESTS_MAX]
    many = (*(number.to_bytes(32, "big") for number in range(255)), key)
    full = b"\xff" * 32
    proven = bytes(wire.PROVEN_BYTES_MAX)
    largest: list[Message] = [
        Announcement(key, top, top, key, key, 2**32 - 1, names[0], top, top, top, key),
        Availability(key, top, top, key, names, names, requests, full, key),
        Proposal(key, top, top, top - 1, many, key, key),
        Certificate(key, top, top, key, full, (bytes(64),) * 256),
        Regroup(key, key, top, many, key),
        Evidence(proven, proven[:-1] + b"\1"),
    ]
    for message in largest:
        received = decode(enveloped(message), KEYS)
        assert received.message == message
        assert len(received.envelope) < 200_000
    payload = authored(key, bytes(wire.ATTACHMENT_BYTES_MAX - len(key)))
    announced = Announcement(key, 1, 0, key, payload_digest(payload), len(payload), content_name(payload), 1, 2, 0, key)
    assert len(enveloped(announced, payload)) < wire.ENVELOPE_BYTES_MAX


def test_lengths_past_their_bound_are_refused_before_anything_is_read() -> None:
    start = time.perf_counter()
    with pytest.raises(RemoteProtocolError, match="message of 50000000 bytes; the limit is 1000000"):
        decode(bytes(50_000_000), KEYS)
    assert time.perf_counter() - start < 1.0
    names = tuple(number.to_bytes(16, "big") for number in range(wire.HELD_MAX + 1))
    long = Availability(bytes(32), 1, 0, bytes(32), names, (), (), b"", bytes(32))
    with pytest.raises(RemoteProtocolError, match="not a message"):
        decode(enveloped(long), KEYS)
    for vote in (
        Vote(bytes(31), 1, 0, Ballot.PREVOTE, bytes(32), bytes(32)),
        Vote(bytes(32), wire.NUMBER_MAX, 0, Ballot.PREVOTE, bytes(32), bytes(32)),
        Vote(bytes(32), -1, 0, Ballot.PREVOTE, bytes(32), bytes(32)),
    ):
        with pytest.raises(RemoteProtocolError, match="not a message"):
            decode(enveloped(vote), KEYS)


@pytest.mark.parametrize("depth", [100, 3_000, 400_000])
def test_nesting_without_end_is_refused(depth: int) -> None:
    """A recursive decoder must not crash the process."""
    nested = b"\x91" * depth + b"\xc0"
    body = b"\x95\xa5leave" + b"\xc4\x20" + bytes(32) + b"\x01" + b"\xc4\x20" + bytes(32) + nested
    for data in (nested, b"\x93" + nested, msgspec.msgpack.encode((body, bytes(64), b""))):
        with pytest.raises(RemoteProtocolError):
            decode(data, KEYS)


def test_contents_come_in_the_order_of_their_authors_whatever_they_are() -> None:
    keys = [digest(f"author {number}") for number in range(9)]
    payloads = [authored(key, bytes([number])) for number, key in enumerate(keys)]
    expected = [bytes([keys.index(key)]) for key in sorted(keys)]
    assert contents_by_author(payloads) == contents_by_author(payloads[::-1]) == expected
    assert expected != sorted(expected)
