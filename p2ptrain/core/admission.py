"""Admission: decides which join requests, leaves, evidence and audits a member attests.

A run's policy is `open` (anyone may join; a seat is earned by contributions that were applied), `invite` or
`allowlist`. Every decision depends only on the message, the agreed state and the run's config, so honest members always
agree.

An invitation is a ticket, signed by a key from the run's config, and the secret key of the bearer that the ticket
names. The secret never travels: a join request carries the ticket and the bearer's signature over the joiner's own key.
So a request that is overheard is of no use to another key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec
from msgspec import Struct

from p2ptrain.config import PROTOCOL_VERSION, RunConfig
from p2ptrain.core import wire
from p2ptrain.core.audits import Measured, Tier, may_report
from p2ptrain.core.manifest import NO_BEARER, Join, Request
from p2ptrain.core.messages import (
    CLAIM_BYTES_MAX,
    AuditReport,
    Evidence,
    JoinRequest,
    Key,
    Leave,
    Number,
    Signature,
    Verifier,
)
from p2ptrain.core.reputation import convict
from p2ptrain.core.state import AgreedState, Uses
from p2ptrain.core.wire import decode_strictly
from p2ptrain.digest import digest
from p2ptrain.errors import RemoteProtocolError

REQUEST_ROUNDS = 64  # maximum age of a request: long enough for gossip, too short to replay it a year later


class Ticket(Struct, frozen=True, array_like=True):
    """Admits as many keys as its bearer signs for, up to `uses`."""

    signer: Key
    bearer: Key
    uses: Uses
    last_round: Number  # the last round in which it is valid
    signature: Signature


class Claim(Struct, frozen=True, array_like=True):
    """A ticket, and the bearer's signature for the key that wants to join with it."""

    ticket: Ticket
    signature: Signature


class Invitation(Struct, frozen=True, array_like=True):
    """A ticket with the seed of its bearer's secret key: the text that is given to friends."""

    ticket: Ticket
    seed: Key


Sign = Callable[[bytes], bytes]
Asking: TypeAlias = JoinRequest | Leave | Evidence | AuditReport

_CLAIM = msgspec.msgpack.Decoder(Claim)
_INVITATION = msgspec.msgpack.Decoder(Invitation)


def make_ticket(signer: bytes, sign: Sign, run_id: bytes, bearer: bytes, uses: int, last_round: int) -> Ticket:
    return Ticket(signer, bearer, uses, last_round, sign(_ticket_signed_bytes(run_id, bearer, uses, last_round)))


def make_claim(ticket: Ticket, sign: Sign, run_id: bytes, joiner: bytes) -> bytes:
    """Encodes what a join request shows; `sign` is the bearer's."""
    encoded = wire.encode(Claim(ticket, sign(_claim_signed_bytes(run_id, ticket.bearer, joiner))))
    assert len(encoded) <= CLAIM_BYTES_MAX, "a claim fits into a join request"
    return encoded


def encode_invitation(ticket: Ticket, seed: bytes) -> str:
    return wire.encode(Invitation(ticket, seed)).hex()


def decode_invitation(text: str) -> Invitation:
    """Decodes an invitation; raises RemoteProtocolError if it is damaged."""
    try:
        encoded = bytes.fromhex(text.strip())
    except ValueError as error:
        raise RemoteProtocolError("an invitation consists of hexadecimal digits") from error
    return decode_strictly(_INVITATION, encoded, "an invitation")


def decode_claim(encoded: bytes) -> Claim:
    """Decodes a claim without verifying it."""
    return decode_strictly(_CLAIM, encoded, "an invitation")


def read_claim(encoded: bytes, joiner: bytes, run: RunConfig, verifier: Verifier) -> Ticket:
    """Decodes a claim; raises RemoteProtocolError unless its ticket is signed by a key from the run's config, for this
    run, and its bearer has signed for the joiner.
    """
    claim = decode_claim(encoded)
    ticket, run_id = claim.ticket, verifier.run_id
    if ticket.signer.hex() not in run.admission.keys:
        raise RemoteProtocolError("the invitation is signed by a key that may not invite")
    signed = _ticket_signed_bytes(run_id, ticket.bearer, ticket.uses, ticket.last_round)
    if not verifier(ticket.signer, signed, ticket.signature):
        raise RemoteProtocolError("the invitation has an invalid signature")
    if not verifier(ticket.bearer, _claim_signed_bytes(run_id, ticket.bearer, joiner), claim.signature):
        raise RemoteProtocolError("the bearer of the invitation has not signed for this key")
    return ticket


def _ticket_signed_bytes(run_id: bytes, bearer: bytes, uses: int, last_round: int) -> bytes:
    return _signed_bytes("ticket", run_id, bearer, uses.to_bytes(8, "little"), last_round.to_bytes(8, "little"))


def _claim_signed_bytes(run_id: bytes, bearer: bytes, joiner: bytes) -> bytes:
    return _signed_bytes("claim", run_id, bearer, joiner)


def _signed_bytes(kind: str, run_id: bytes, *parts: bytes) -> bytes:
    return f"p2ptrain {PROTOCOL_VERSION} {kind}".encode() + b"\0" + run_id + digest(kind, *parts)


def check_request(message: Asking, state: AgreedState, run: RunConfig, verifier: Verifier) -> Request:
    """Returns the change that a request asks for; raises RemoteProtocolError if the request is not allowed."""
    if isinstance(message, Evidence):
        guilty = convict(message, verifier)
        if guilty not in state.place:
            raise RemoteProtocolError("evidence against a key that is not admitted")
        return Request(guilty=guilty)
    if message.branch != state.branch:
        raise RemoteProtocolError("the request is for another branch")
    if isinstance(message, AuditReport):
        measured = Measured(
            message.author, message.key, message.round, message.z, message.strength, message.is_summoned
        )
        if not run.is_audited:
            raise RemoteProtocolError("nobody but the author has the data of this run's contributions")
        if not may_report(state, measured):
            raise RemoteProtocolError("the audit is of nothing that its author may audit now")
        return Request(measured=measured)
    if not state.round - REQUEST_ROUNDS <= message.round <= state.round + 2:
        raise RemoteProtocolError(f"the request is of round {message.round}, and this is round {state.round + 1}")
    if isinstance(message, Leave):
        place = state.place.get(message.author)
        if place is None or message.round < state.admitted[place].since:
            raise RemoteProtocolError("the author of the leave is not admitted, or has joined again since")
        conduct = state.admitted[place].conduct
        if conduct.tier is Tier.SUSPENDED or conduct.muted > state.round:
            raise RemoteProtocolError("who is suspended, or may not audit, would come back as if nothing had been")
        return Request(leave=message.author, leave_round=message.round)
    return Request(join=_join(message, state, run, verifier))


def _join(message: JoinRequest, state: AgreedState, run: RunConfig, verifier: Verifier) -> Join:
    author, admission = message.author, run.admission
    if author in state.banned:
        raise RemoteProtocolError("the key that asks to join is banned")
    if author in state.place:
        raise RemoteProtocolError("the key that asks to join is already admitted")
    if len(state.admitted) >= admission.contributors_max and not state.idle(run):
        raise RemoteProtocolError("the run is full")
    if admission.policy == "allowlist" and author.hex() not in admission.keys:
        raise RemoteProtocolError("the key that asks to join is not on the allowlist")
    if admission.policy != "invite":
        return Join(author, NO_BEARER, 0, 0)
    ticket = read_claim(message.claim, author, run, verifier)
    if ticket.last_round <= state.round:
        raise RemoteProtocolError("the invitation has expired")
    if sum(bearer == ticket.bearer for bearer, _ in state.spent) >= ticket.uses:
        raise RemoteProtocolError("the invitation has been used up")
    return Join(author, ticket.bearer, ticket.uses, ticket.last_round)
