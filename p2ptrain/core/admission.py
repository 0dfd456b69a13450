"""Admission: decides which join requests, leaves and evidence a member attests.

A run's policy is `open` (anyone may join; a seat is earned by contributions that were applied), `invite` (a ticket
signed by a key from the run's config, with a serial and a last round, and usable once), or `allowlist`. Every decision
depends only on the message, the agreed state and the run's config, so honest members always agree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from p2ptrain.config import PROTOCOL_VERSION
from p2ptrain.core import wire
from p2ptrain.core.manifest import NO_SERIAL, Join, Request
from p2ptrain.core.messages import (
    TICKET_BYTES_MAX,
    Evidence,
    JoinRequest,
    Key,
    Leave,
    Number,
    Signature,
    Verifier,
)
from p2ptrain.core.reputation import convict
from p2ptrain.core.state import AgreedState, Serial
from p2ptrain.core.wire import decode_strictly
from p2ptrain.digest import digest
from p2ptrain.errors import RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from p2ptrain.config import RunConfig

REQUEST_ROUNDS = 64  # maximum age of a request: long enough for gossip, too short to replay it a year later


class Ticket(Struct, frozen=True, array_like=True):
    """An invitation: the first key that presents it is admitted."""

    signer: Key
    serial: Serial
    last_round: Number  # the last round in which it is valid
    signature: Signature


_TICKET = msgspec.msgpack.Decoder(Ticket)


def ticket_signed_bytes(run_id: bytes, serial: bytes, last_round: int) -> bytes:
    """Returns the bytes that the inviter signs."""
    domain = f"p2ptrain {PROTOCOL_VERSION} ticket".encode()
    return domain + b"\0" + run_id + digest("ticket", serial, last_round.to_bytes(8, "little"))


def make_ticket(signer: bytes, sign: Callable[[bytes], bytes], run_id: bytes, serial: bytes, last_round: int) -> bytes:
    """Creates and encodes an invitation."""
    signature = sign(ticket_signed_bytes(run_id, serial, last_round))
    encoded = wire.encode(Ticket(signer, serial, last_round, signature))
    assert len(encoded) <= TICKET_BYTES_MAX, "a ticket fits into a join request"
    return encoded


def read_ticket(encoded: bytes, run: RunConfig, verifier: Verifier) -> Ticket:
    """Decodes an invitation; raises RemoteProtocolError unless a key from the run's config signed it for this run."""
    ticket = decode_strictly(_TICKET, encoded, "an invitation")
    if ticket.signer.hex() not in run.admission.keys:
        raise RemoteProtocolError("the invitation is signed by a key that may not invite")
    if not verifier(
        ticket.signer, ticket_signed_bytes(verifier.run_id, ticket.serial, ticket.last_round), ticket.signature
    ):
        raise RemoteProtocolError("the invitation has an invalid signature")
    return ticket


def check_request(
    message: JoinRequest | Leave | Evidence, state: AgreedState, run: RunConfig, verifier: Verifier
) -> Request:
    """Returns the change that a request asks for; raises RemoteProtocolError if the request is not allowed."""
    if isinstance(message, Evidence):
        guilty = convict(message, verifier)
        if guilty not in state.place:
            raise RemoteProtocolError("evidence against a key that is not admitted")
        return Request(guilty=guilty)
    if message.branch != state.branch:
        raise RemoteProtocolError("the request is for another branch")
    if not state.round - REQUEST_ROUNDS <= message.round <= state.round + 2:
        raise RemoteProtocolError(f"the request is of round {message.round}, and this is round {state.round + 1}")
    if isinstance(message, Leave):
        place = state.place.get(message.author)
        if place is None or message.round < state.admitted[place].since:
            raise RemoteProtocolError("the author of the leave is not admitted, or has joined again since")
        return Request(leave=message.author, leave_round=message.round)
    return Request(join=_join(message, state, run, verifier))


def _join(message: JoinRequest, state: AgreedState, run: RunConfig, verifier: Verifier) -> Join:
    author, admission = message.author, run.admission
    if author in state.banned:
        raise RemoteProtocolError("the key that asks to join is banned")
    if author in state.place:
        raise RemoteProtocolError("the key that asks to join is already admitted")
    if len(state.admitted) >= admission.contributors_max:
        raise RemoteProtocolError("the run is full")
    if admission.policy == "allowlist" and author.hex() not in admission.keys:
        raise RemoteProtocolError("the key that asks to join is not on the allowlist")
    if admission.policy != "invite":
        return Join(author, NO_SERIAL, 0)
    ticket = read_ticket(message.ticket, run, verifier)
    if ticket.last_round <= state.round:
        raise RemoteProtocolError("the invitation has expired")
    if any(serial == ticket.serial for serial, _ in state.spent):
        raise RemoteProtocolError("the invitation has already been used")
    return Join(author, ticket.serial, ticket.last_round)
