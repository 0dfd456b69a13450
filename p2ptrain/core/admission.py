"""Admission: keeps join requests, leaves, evidence, audits, motions and assents, and decides which a member attests.

A run's policy is `open` (anyone may join; a seat is earned by contributions that were applied), `invite` or
`allowlist`. Every decision depends only on the message, the agreed state and the run's config, so honest members agree.

An invitation is a ticket, signed by a key from the run's config, and the secret key of the bearer that the ticket
names. The secret never travels: a join request carries the ticket and the bearer's signature over the joiner's own key.
So a request that is overheard is of no use to another key.

At most two requests per author wait for a manifest, and joins may fill only part of the pool, so that a crowd of
newcomers cannot keep out evidence and leaves. Each round begins with room for new joins, so that nobody keeps the
others out; newcomers ask again later. Evidence is counted separately: otherwise a liar with two pending leaves could
not be convicted, and a crowd that leaves would keep out all evidence. A join from before its author was last admitted
or removed is not attested: a member that repeats it would bring back who has left, and use up an invitation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import msgspec
from msgspec import Struct

from p2ptrain.config import PROTOCOL_VERSION, RunConfig
from p2ptrain.core import messages as msg
from p2ptrain.core import wire
from p2ptrain.core.audits import SUMMONS_MAX, Measured, may_leave, may_report
from p2ptrain.core.context import Context
from p2ptrain.core.manifest import NO_BEARER, Join, Manifest, Request, joins_max
from p2ptrain.core.newcomers import few_of_each_range
from p2ptrain.core.reputation import convict
from p2ptrain.core.state import AgreedState, Uses
from p2ptrain.core.succession import Assented, Motion, may_assent, why_not_moved
from p2ptrain.core.wire import decode_strictly
from p2ptrain.digest import digest
from p2ptrain.errors import RemoteProtocolError

REQUEST_ROUNDS = 64  # maximum age of a request: long enough for gossip, too short to replay it a year later
JOINS_MAX = msg.REQUESTS_MAX // 2
EVIDENCE_MAX = msg.REQUESTS_MAX // 2  # apart from joins and leaves; three times the number of tolerated liars
OF_AUTHOR_MAX = 2
AUDITS_OF_MEMBER_MAX = SUMMONS_MAX + 2  # one for each summons, and those of two rounds
AUDITS_MAX = msg.SEATS_MAX * AUDITS_OF_MEMBER_MAX


class Ticket(Struct, frozen=True, array_like=True):
    """Admits as many keys as its bearer signs for, up to `uses`."""

    signer: msg.Key
    bearer: msg.Key
    uses: Uses
    last_round: msg.Number  # the last round in which it is valid
    signature: msg.Signature


class Claim(Struct, frozen=True, array_like=True):
    """A ticket, and the bearer's signature for the key that wants to join with it."""

    ticket: Ticket
    signature: msg.Signature


class Invitation(Struct, frozen=True, array_like=True):
    """A ticket with the seed of its bearer's secret key: the text that is given to friends."""

    ticket: Ticket
    seed: msg.Key


Sign = Callable[[bytes], bytes]
Asking: TypeAlias = msg.JoinRequest | msg.Leave | msg.Evidence | msg.AuditReport | msg.Moving | msg.Assent

_CLAIM = msgspec.msgpack.Decoder(Claim)
_INVITATION = msgspec.msgpack.Decoder(Invitation)


def make_ticket(signer: bytes, sign: Sign, run_id: bytes, bearer: bytes, uses: int, last_round: int) -> Ticket:
    return Ticket(signer, bearer, uses, last_round, sign(_ticket_signed_bytes(run_id, bearer, uses, last_round)))


def make_claim(ticket: Ticket, sign: Sign, run_id: bytes, joiner: bytes) -> bytes:
    """Encodes what a join request shows; `sign` is the bearer's."""
    encoded = wire.encode(Claim(ticket, sign(_claim_signed_bytes(run_id, ticket.bearer, joiner))))
    assert len(encoded) <= msg.CLAIM_BYTES_MAX, "a claim fits into a join request"
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


def read_claim(encoded: bytes, joiner: bytes, run: RunConfig, verifier: msg.Verifier) -> Ticket:
    """Decodes a claim; raises RemoteProtocolError unless its ticket is signed by a key from the run's config, for this
    run, and its bearer has signed for the joiner."""
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


def check_request(message: Asking, state: AgreedState, run: RunConfig, verifier: msg.Verifier) -> Request:
    """Returns the change that a request asks for; raises RemoteProtocolError if the request is not allowed."""
    if isinstance(message, msg.Evidence):
        guilty = convict(message, verifier)
        if guilty not in state.place:
            raise RemoteProtocolError("evidence against a key that is not admitted")
        return Request(guilty=guilty)
    if message.branch != state.branch:
        raise RemoteProtocolError("the request is for another branch")
    if isinstance(message, msg.AuditReport):
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
    if isinstance(message, msg.Moving | msg.Assent):
        return _of_succession(message, state, run)
    if isinstance(message, msg.Leave):
        place = state.place.get(message.author)
        if place is None or message.round < state.admitted[place].since:
            raise RemoteProtocolError("the author of the leave is not admitted, or has joined again since")
        if not may_leave(state, message.author):
            raise RemoteProtocolError("who is suspected or suspended, or may not audit, cannot give up its admission")
        return Request(leave=message.author, leave_round=message.round)
    return Request(join=_join(message, state, run, verifier))


def _of_succession(message: msg.Moving | msg.Assent, state: AgreedState, run: RunConfig) -> Request:
    if isinstance(message, msg.Assent):
        assent = Assented(message.author, message.round, message.motion)
        if not may_assent(assent, state):
            raise RemoteProtocolError("the assent changes nothing")
        return Request(assent=assent)
    made = Motion(message.author, message.round, message.last, message.weights, message.root, message.change)
    if why := why_not_moved(made, state, run):
        raise RemoteProtocolError(why)
    return Request(motion=made)


def _join(message: msg.JoinRequest, state: AgreedState, run: RunConfig, verifier: msg.Verifier) -> Join:
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


class Waiting(Struct):
    received: msg.Received
    request: Request
    about: bytes  # the key that it concerns
    since: int  # the last round that was decided when it came


class Requests:
    def __init__(self, context: Context) -> None:
        self.context = context
        self.by_name: dict[bytes, Waiting] = {}
        self.settled: dict[bytes, int] = {}  # by key: the last recent round that admitted or removed it

    def add(self, received: msg.Received, state: AgreedState, is_needed: bool = False) -> bool:
        """Adds a request; returns False if it is useless or does not fit, raises RemoteProtocolError if it is invalid.

        One that a proposal needs fits up to a bound, if need be in the place of the oldest join."""
        name = received.name
        if name in self.by_name:
            return False
        message = received.message
        assert isinstance(message, Asking)
        joins = self._joins()
        proofs = sum(bool(waiting.request.guilty) for waiting in self.by_name.values())
        is_proof = isinstance(message, msg.Evidence)
        audits = [waiting for waiting in self.by_name.values() if waiting.request.measured]
        if isinstance(message, msg.AuditReport):
            mine = sum(each.about == message.author for each in audits)
            is_full = len(audits) >= AUDITS_MAX or mine >= AUDITS_OF_MEMBER_MAX
        elif is_proof:
            is_full = proofs >= EVIDENCE_MAX
        else:
            is_full = len(self.by_name) - proofs - len(audits) >= msg.REQUESTS_MAX
            is_full = is_full or (isinstance(message, msg.JoinRequest) and len(joins) >= JOINS_MAX)
        room = 2 * msg.REQUESTS_MAX - (0 if is_proof else EVIDENCE_MAX - min(proofs, EVIDENCE_MAX))
        is_audit = isinstance(message, msg.AuditReport)
        is_over = len(audits) >= 2 * AUDITS_MAX if is_audit else len(self.by_name) - len(audits) >= room
        if (is_full and not is_needed) or (is_over and (is_audit or not joins)):
            self.context.counters["requests without room"] += 1
            return False
        request = check_request(message, state, self.context.run, self.context.signer)
        if request.measured:
            self.by_name[name] = Waiting(received, request, request.measured.author, state.round)
            return True
        about = request.guilty or request.leave or (request.join.key if request.join else _subject_of(request))
        same = [
            each
            for each in self.by_name.values()
            if each.about == about and bool(each.request.guilty) == is_proof and not each.request.measured
        ]
        waiting = Waiting(received, request, about, state.round)
        if not is_needed and (len(same) >= OF_AUTHOR_MAX or self._is_repeated(waiting)):
            return False
        if is_over:
            del self.by_name[joins[0]]
        self.by_name[name] = waiting
        return True

    def _is_repeated(self, waiting: Waiting) -> bool:
        """Whether it is a join that has counted already."""
        message = waiting.received.message
        return isinstance(message, msg.JoinRequest) and message.round <= self.settled.get(message.author, -1)

    def _joins(self) -> list[bytes]:
        return [name for name, waiting in self.by_name.items() if waiting.request.join is not None]

    def request(self, name: bytes) -> Request | None:
        waiting = self.by_name.get(name)
        return waiting.request if waiting else None

    def received(self, name: bytes) -> msg.Received | None:
        waiting = self.by_name.get(name)
        return waiting.received if waiting else None

    def names(self, state: AgreedState) -> tuple[bytes, ...]:
        """Returns the names for an availability, ascending; if there are too many, evidence and audits go first.

        The last manifest draws which joins are granted. If that matters, joins that came in its round or later wait,
        because their keys may have been made to be drawn: its digest is known when it is proposed. And of the keys from
        one range of addresses only as many are named as it grants, which its digest draws, too."""
        joins = self._joins()
        known, most = {*self.by_name}, joins_max(state.roster.size)
        if len(joins) > most:
            early = {name: self.by_name[name].about for name in joins if self.by_name[name].since < state.round - 1}
            head = int.from_bytes(state.head[:8], "little")
            few = {*few_of_each_range({*early.values()}, self.context.peers, head, most)}
            known = known - {*joins} | {name for name, key in early.items() if key in few}
        fresh = [name for name in known if not self._is_repeated(self.by_name[name])]

        def rank(name: bytes) -> tuple[bool, bool, bool, bytes]:  # a crowd of newcomers keeps out nothing of members
            request = self.by_name[name].request
            return not request.guilty, not request.measured, request.join is not None, name

        chosen = self._one_audit_each(sorted(fresh, key=rank))[: msg.REQUESTS_MAX]
        return tuple(sorted(chosen))

    def _one_audit_each(self, names: list[bytes]) -> list[bytes]:
        """Leaves out audits of which only one can count: of a member one, and one for each summons."""
        found: dict[object, bytes] = {}
        for name in names:
            measured = self.by_name[name].request.measured
            place = (measured.author, measured.is_summoned and (measured.key, measured.round)) if measured else name
            found.setdefault(place, name)
        return list(found.values())

    def prune(self, state: AgreedState, recent: Iterable[Manifest]) -> None:
        """Forgets requests that were granted or have become invalid, and of too many joins some at random. `recent` are
        the manifests in which a request that is still valid may have counted, the newest first."""
        self.settled = {}
        for manifest in recent:
            for key in (*(join.key for join in manifest.joins), *manifest.leaves, *manifest.banned):
                self.settled.setdefault(key, manifest.round)
        self.by_name = {name: waiting for name, waiting in self.by_name.items() if self._still(waiting, state)}
        joins = self._joins()
        for name in self.context.rng.sample(joins, max(0, len(joins) - JOINS_MAX // 2)):
            del self.by_name[name]

    def _still(self, waiting: Waiting, state: AgreedState) -> bool:
        """Whether a request is still valid, by the same test that others apply to what we attest."""
        message = waiting.received.message
        assert isinstance(message, Asking)
        if isinstance(message, msg.Evidence):
            return waiting.about in state.place  # a proof stays valid
        try:
            check_request(message, state, self.context.run, self.context.signer)
        except RemoteProtocolError:
            return False
        return True

    def limits(self) -> dict[str, tuple[int, int]]:
        audits = sum(waiting.request.measured is not None for waiting in self.by_name.values())
        return {"requests": (len(self.by_name) - audits, 2 * msg.REQUESTS_MAX), "audits": (audits, 2 * AUDITS_MAX)}


def _subject_of(request: Request) -> bytes:
    """Names what a motion or an assent is about, apart from a member's leave."""
    if request.motion:
        return b"motion" + request.motion.author
    return b"assent" + request.assent.member if request.assent else b""
