"""History: certified rounds and the beginnings of branches, as nodes keep them and hand them to one another.

An `Entry` is a manifest with the certificate of a quorum of the roster that the entries before it lead to. A
`Beginning` is a regroup: a set of members that a quorum of the set itself has signed. Both prove themselves to whoever
knows the state before them, and lead to the state after.

A receiver that is further behind than entries are kept gets a jump: the entries that changed the roster, each
certified by the roster before it, and an agreed state, which the first of the remaining entries names. What is left
out in between cannot be hidden: a roster that has gone cannot certify anything later without its quorum.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from p2ptrain.core import wire
from p2ptrain.core.manifest import Manifest
from p2ptrain.core.messages import (
    SEATS_MAX,
    Ballot,
    Certificate,
    Digest,
    Key,
    Number,
    Regroup,
    Signature,
    Verifier,
    Vote,
    signed_bytes,
)
from p2ptrain.core.roster import Roster, quorum_of, roster_of
from p2ptrain.core.state import AgreedState
from p2ptrain.core.wire import decode_strictly
from p2ptrain.digest import digest
from p2ptrain.errors import RemoteProtocolError

if TYPE_CHECKING:
    from p2ptrain.config import RunConfig

ENTRIES_MAX = 64  # of one answer: at 1,024 contributors 8 MB; who wants more asks again
CHANGES_MAX = 4_096  # that a node keeps and an answer holds; what is older comes from a checkpoint that is trusted
STAGES_MAX = 1_024  # branches one after another
HISTORY_BYTES_MAX = 64 * 2**20  # of an encoded answer, checked before it is decoded


class Entry(Struct, frozen=True, array_like=True, tag="round"):
    """A round that was decided."""

    manifest: Manifest
    certificate: Certificate


class Beginning(Struct, frozen=True, array_like=True, tag="branch"):
    """A branch that was begun, from the state after `round` of the branch `parent_branch`."""

    parent_branch: Digest
    round: Number
    parent: Digest
    attempt: Number
    members: Annotated[tuple[Key, ...], Meta(min_length=1, max_length=SEATS_MAX)]  # rising
    signers: Annotated[tuple[Key, ...], Meta(min_length=1, max_length=SEATS_MAX)]  # rising
    signatures: Annotated[tuple[Signature, ...], Meta(min_length=1, max_length=SEATS_MAX)]  # in the signers' order

    @property
    def branch(self) -> bytes:
        return branch_of(self.parent_branch, self.parent, self.attempt, self.members)


Step: TypeAlias = Entry | Beginning


class Stage(Struct, frozen=True, array_like=True):
    """A branch of somebody's history, and the round after which it began."""

    branch: Digest
    start: Number


class History(Struct, frozen=True, array_like=True):
    """An answer to "what came after this round of this branch?"."""

    lineage: Annotated[tuple[Stage, ...], Meta(min_length=1, max_length=STAGES_MAX)]  # of the one who answers
    round: Number  # of its head
    changes: Annotated[tuple[Step, ...], Meta(max_length=CHANGES_MAX)]  # what leads from there to the base
    base: AgreedState | None  # the state before `steps`, if there is a gap
    steps: Annotated[tuple[Step, ...], Meta(max_length=ENTRIES_MAX)]


_HISTORY = msgspec.msgpack.Decoder(History)


def branch_of(parent_branch: bytes, parent: bytes, attempt: int, members: tuple[bytes, ...]) -> bytes:
    """The id of the branch that a regroup begins: the same for all who sign the same set."""
    return digest("branch", wire.encode((parent_branch, parent, attempt, members)))


def encode_history(history: History) -> bytes:
    return wire.encode(history)


def decode_history(data: bytes) -> History:
    """A history in its one encoding; whether it proves anything is for `follow` to say."""
    if len(data) > HISTORY_BYTES_MAX:
        raise RemoteProtocolError(f"history of {len(data)} bytes, the limit is {HISTORY_BYTES_MAX}")
    return decode_strictly(_HISTORY, data, "a history")


def follow(state: AgreedState, step: Step, run: RunConfig, verifier: Verifier) -> AgreedState:
    """The state that a step leads to; RemoteProtocolError if it does not follow or does not prove itself."""
    if isinstance(step, Beginning):
        check_beginning(step, state, verifier)
        return state.regrouped(step.branch, step.members)
    manifest = step.manifest
    if (manifest.branch, manifest.round, manifest.parent, manifest.state) != (
        state.branch,
        state.round + 1,
        state.head,
        state.digest,
    ):
        raise RemoteProtocolError(f"a manifest of round {manifest.round} that does not follow round {state.round}")
    check_certificate(step, state.roster, verifier)
    return state.after(manifest, run)


def check_certificate(entry: Entry, roster: Roster, verifier: Verifier) -> None:
    """RemoteProtocolError unless a quorum of the roster signed this manifest."""
    certificate, manifest = entry.certificate, entry.manifest
    if (certificate.branch, certificate.round, certificate.manifest) != (
        manifest.branch,
        manifest.round,
        manifest.digest,
    ):
        raise RemoteProtocolError("a certificate of another manifest")
    signers = roster.in_seats(certificate.seats)
    if signers is None or len(signers) != len(certificate.signatures):
        raise RemoteProtocolError("a certificate with seats that nobody has")
    if len(signers) < roster.quorum:
        raise RemoteProtocolError(f"a certificate of {len(signers)} members, the quorum is {roster.quorum}")
    for key, signature in zip(signers, certificate.signatures, strict=True):
        vote = Vote(
            certificate.branch, certificate.round, certificate.view, Ballot.PRECOMMIT, certificate.manifest, key
        )
        if not verifier(key, signed_bytes(verifier.run_id, vote), signature):
            raise RemoteProtocolError("a certificate with a wrong signature")


def check_beginning(beginning: Beginning, state: AgreedState, verifier: Verifier) -> None:
    """RemoteProtocolError unless a quorum of these members, all of the roster, agreed to go on from this state."""
    if (beginning.parent_branch, beginning.round, beginning.parent) != (state.branch, state.round, state.head):
        raise RemoteProtocolError("a branch that begins elsewhere")
    check_regroup(beginning, state.roster, verifier)


def check_regroup(beginning: Beginning, roster: Roster, verifier: Verifier) -> None:
    members, signers = beginning.members, beginning.signers
    if any(first >= second for keys in (members, signers) for first, second in pairwise(keys)):
        raise RemoteProtocolError("a branch whose members or signers do not rise")
    inside = set(members)
    if not inside <= set(roster.members) or not set(signers) <= inside:
        raise RemoteProtocolError("a branch of others than members")
    if len(signers) < quorum_of(len(members)) or len(signers) != len(beginning.signatures):
        raise RemoteProtocolError(f"a branch of {len(members)} members that {len(signers)} signed")
    for key, signature in zip(signers, beginning.signatures, strict=True):
        message = Regroup(beginning.parent_branch, beginning.parent, beginning.attempt, members, key)
        if not verifier(key, signed_bytes(verifier.run_id, message), signature):
            raise RemoteProtocolError("a branch with a wrong signature")


def jump(state: AgreedState, changes: tuple[Step, ...], base: AgreedState, verifier: Verifier) -> None:
    """RemoteProtocolError unless the changes lead from `state` to the roster of `base`.

    That the rest of `base` is agreed is proved by the entry that follows it and names its digest.
    """
    roster, branch, number, head = state.roster, state.branch, state.round, state.head
    for change in changes:
        if isinstance(change, Beginning):
            if (change.parent_branch, change.round, change.parent) != (branch, number, head):
                raise RemoteProtocolError("a branch that begins elsewhere")
            check_regroup(change, roster, verifier)
            roster, branch, head = roster_of(change.members), change.branch, change.branch
            continue
        if change.manifest.branch != branch or change.manifest.round <= number:
            raise RemoteProtocolError("changes of a roster that do not follow one another")
        check_certificate(change, roster, verifier)
        number, head = change.manifest.round, change.manifest.digest
        added, dropped = set(change.manifest.seated), set(change.manifest.unseated)
        roster = roster_of(tuple(sorted((set(roster.members) | added) - dropped)))
    if (base.branch, base.members) != (branch, roster.members) or base.round < number:
        raise RemoteProtocolError("a base that its changes do not lead to")
