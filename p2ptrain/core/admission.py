"""Admission: which join requests, leaves and evidence a member attests.

A run is `open` (anyone, after probation: a seat comes with contributions that were taken), by `invite` (a ticket that
a key of the run's config signed, with a serial and a last round, spent once by a manifest), or has an `allowlist`.
Everything here follows from the message, the agreed state and the run's config, so that honest members never differ.
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

REQUEST_ROUNDS = 64  # how old a request may be: old enough for gossip, too young to be dug out a year later


class Ticket(Struct, frozen=True, array_like=True):
    """An invitation. Whoever shows it first is admitted."""

    signer: Key
    serial: Serial
    last_round: Number  # after it, the ticket is worth nothing
    signature: Signature


_TICKET = msgspec.msgpack.Decoder(Ticket)


def ticket_signed_bytes(run_id: bytes, serial: bytes, last_round: int) -> bytes:
    """What the one who invites signs."""
    domain = f"p2ptrain {PROTOCOL_VERSION} ticket".encode()
    return domain + b"\0" + run_id + digest("ticket", serial, last_round.to_bytes(8, "little"))


def make_ticket(signer: bytes, sign: Callable[[bytes], bytes], run_id: bytes, serial: bytes, last_round: int) -> bytes:
    """An invitation, encoded."""
    signature = sign(ticket_signed_bytes(run_id, serial, last_round))
    encoded = wire.encode(Ticket(signer, serial, last_round, signature))
    assert len(encoded) <= TICKET_BYTES_MAX, "a ticket fits its place in a request"
    return encoded


def read_ticket(encoded: bytes, run: RunConfig, verifier: Verifier) -> Ticket:
    """The invitation; RemoteProtocolError unless a key of the run's config signed it for this run."""
    ticket = decode_strictly(_TICKET, encoded, "an invitation")
    if ticket.signer.hex() not in run.admission.keys:
        raise RemoteProtocolError("an invitation by a key that may not invite")
    if not verifier(
        ticket.signer, ticket_signed_bytes(verifier.run_id, ticket.serial, ticket.last_round), ticket.signature
    ):
        raise RemoteProtocolError("an invitation with a wrong signature")
    return ticket


def check_request(
    message: JoinRequest | Leave | Evidence, state: AgreedState, run: RunConfig, verifier: Verifier
) -> Request:
    """What a request asks of the agreed state; RemoteProtocolError if it may not."""
    if isinstance(message, Evidence):
        guilty = convict(message, verifier)
        if guilty not in state.place:
            raise RemoteProtocolError("evidence against a key that is not admitted")
        return Request(guilty=guilty)
    if message.branch != state.branch:
        raise RemoteProtocolError("a request to another branch")
    if not state.round - REQUEST_ROUNDS <= message.round <= state.round + 2:
        raise RemoteProtocolError(f"a request of round {message.round} in round {state.round + 1}")
    if isinstance(message, Leave):
        place = state.place.get(message.author)
        if place is None or message.round < state.admitted[place].since:
            raise RemoteProtocolError("a leave of somebody who is not here, or has come back since")
        return Request(leave=message.author, leave_round=message.round)
    return Request(join=_join(message, state, run, verifier))


def _join(message: JoinRequest, state: AgreedState, run: RunConfig, verifier: Verifier) -> Join:
    author, admission = message.author, run.admission
    if author in state.banned:
        raise RemoteProtocolError("a banned key wants to join")
    if author in state.place:
        raise RemoteProtocolError("an admitted key wants to join")
    if len(state.admitted) >= admission.contributors_max:
        raise RemoteProtocolError("the run is full")
    if admission.policy == "allowlist" and author.hex() not in admission.keys:
        raise RemoteProtocolError("a key that is not on the allowlist wants to join")
    if admission.policy != "invite":
        return Join(author, NO_SERIAL, 0)
    ticket = read_ticket(message.ticket, run, verifier)
    if ticket.last_round <= state.round:
        raise RemoteProtocolError("an invitation that has expired")
    if any(serial == ticket.serial for serial, _ in state.spent):
        raise RemoteProtocolError("an invitation that was spent")
    return Join(author, ticket.serial, ticket.last_round)
