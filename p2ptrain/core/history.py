"""History: certified rounds and beginnings of branches, as nodes store them and send them to one another.

An `Entry` is a manifest with a certificate by a quorum of the roster that the earlier entries lead to. A `Beginning` is
a regroup: a set of members, signed by a quorum of the set itself. Anyone who knows the state before either of them can
verify it and compute the state after.

A receiver that is too far behind for the entries that are kept gets a jump: the entries that changed the roster, each
certified by the roster before it, and an agreed state, whose digest the first remaining entry names. Leaving out the
entries in between hides nothing: a former roster cannot certify anything later without its quorum."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from p2ptrain.config import RunConfig
from p2ptrain.core import messages as msg
from p2ptrain.core import wire
from p2ptrain.core.manifest import Manifest, contradiction
from p2ptrain.core.roster import Roster, changed, quorum_of, roster_of
from p2ptrain.core.state import AgreedState
from p2ptrain.core.succession import is_over
from p2ptrain.core.wire import decode_strictly
from p2ptrain.digest import digest
from p2ptrain.errors import RemoteProtocolError

ENTRIES_MAX = 64  # per answer: 8 MB at 1,024 contributors; a peer that needs more asks again
CHANGES_MAX = 4_096  # kept by a node and sent in an answer; anything older needs a trusted checkpoint
STAGES_MAX = 1_024  # successive branches
HISTORY_BYTES_MAX = 64 * 2**20  # of an encoded answer, checked before it is decoded


class Entry(Struct, frozen=True, array_like=True, tag="round"):
    manifest: Manifest
    certificate: msg.Certificate


class Beginning(Struct, frozen=True, array_like=True, tag="branch"):
    """The beginning of a branch, from the state after `round` of the branch `parent_branch`."""

    parent_branch: msg.Digest
    round: msg.Number
    parent: msg.Digest
    attempt: msg.Number
    members: Annotated[tuple[msg.Key, ...], Meta(min_length=1, max_length=msg.SEATS_MAX)]  # ascending
    signers: Annotated[tuple[msg.Key, ...], Meta(min_length=1, max_length=msg.SEATS_MAX)]  # ascending
    signatures: Annotated[
        tuple[msg.Signature, ...], Meta(min_length=1, max_length=msg.SEATS_MAX)
    ]  # in the signers' order

    @property
    def branch(self) -> bytes:
        return branch_of(self.parent_branch, self.parent, self.attempt, self.members)


Step: TypeAlias = Entry | Beginning


class BranchStart(Struct, frozen=True, array_like=True):
    """A branch of a history, and the round after which it began."""

    branch: msg.Digest
    start: msg.Number


class History(Struct, frozen=True, array_like=True):
    """An answer to a request for the history after one round of one branch."""

    lineage: Annotated[tuple[BranchStart, ...], Meta(min_length=1, max_length=STAGES_MAX)]  # all branches of the sender
    round: msg.Number  # of the sender's head
    changes: Annotated[tuple[Step, ...], Meta(max_length=CHANGES_MAX)]  # the steps that lead to the base
    base: AgreedState | None  # the state before `steps`, if there is a gap
    steps: Annotated[tuple[Step, ...], Meta(max_length=ENTRIES_MAX)]


class _Pieces(Struct, frozen=True, array_like=True):
    """A `History` whose steps are still encoded: msgspec lets no other thread run while it encodes or decodes, and a
    long history takes it up to half a second, but a step no more than a few milliseconds."""

    lineage: Annotated[tuple[BranchStart, ...], Meta(min_length=1, max_length=STAGES_MAX)]
    round: msg.Number
    changes: Annotated[tuple[msgspec.Raw, ...], Meta(max_length=CHANGES_MAX)]
    base: AgreedState | None
    steps: Annotated[tuple[msgspec.Raw, ...], Meta(max_length=ENTRIES_MAX)]


_ARRAY_OF = 0x90  # msgpack's first byte of an array of up to 15 values, and their number
_PIECES = msgspec.msgpack.Decoder(_Pieces)
_STEP: msgspec.msgpack.Decoder[Step] = msgspec.msgpack.Decoder(Step)


def branch_of(parent_branch: bytes, parent: bytes, attempt: int, members: tuple[bytes, ...]) -> bytes:
    """Returns the id of the branch that a regroup begins: the same for all who sign the same set."""
    return digest("branch", wire.encode((parent_branch, parent, attempt, members)))


def encode_history(history: History) -> bytearray:
    """Encodes a history step by step, into memory that grows without being copied as a whole: see `_Pieces`."""
    encoded = bytearray([_ARRAY_OF | len(History.__struct_fields__)])
    encoded += wire.encode(history.lineage) + wire.encode(history.round)
    _append_steps(history.changes, encoded)
    encoded += wire.encode(history.base)
    _append_steps(history.steps, encoded)
    return encoded


def _append_steps(steps: Sequence[Step], encoded: bytearray) -> None:
    encoded += wire.encode((None,) * len(steps))[: -len(steps) or None]  # the length alone: each None takes a byte
    for step in steps:
        encoded += wire.encode(step)


def encode_answer(history: History) -> bytearray | None:
    """Encodes a history for a peer; None if it is too long, as thousands of changes to a roster of hundreds are."""
    encoded = encode_history(history)
    return encoded if len(encoded) <= HISTORY_BYTES_MAX else None


def decode_history(data: bytes) -> History:
    """Decodes a history; only `follow` verifies it."""
    if len(data) > HISTORY_BYTES_MAX:
        raise RemoteProtocolError(f"a history of {len(data)} bytes; the limit is {HISTORY_BYTES_MAX}")
    pieces = decode_strictly(_PIECES, data, "a history")
    changes, steps = (
        tuple(decode_strictly(_STEP, bytes(step), "a history") for step in each)
        for each in (pieces.changes, pieces.steps)
    )
    return History(pieces.lineage, pieces.round, changes, pieces.base, steps)


def name_of(step: Step) -> bytes:
    """Returns what the next step names as its parent."""
    return step.branch if isinstance(step, Beginning) else step.manifest.digest


def follow(state: AgreedState, step: Step, run: RunConfig, verifier: msg.Verifier) -> AgreedState:
    """Returns the state after a step; raises RemoteProtocolError if the step does not follow or is not proved."""
    if isinstance(step, Beginning):
        check_beginning(step, state, verifier)
        return state.regrouped(step.branch, step.members)
    manifest = step.manifest
    if is_over(state):
        raise RemoteProtocolError(f"the run has ended with round {state.round}")
    next_place = state.branch, state.round + 1, state.head, state.digest
    if (manifest.branch, manifest.round, manifest.parent, manifest.state) != next_place:
        raise RemoteProtocolError(f"the manifest of round {manifest.round} does not follow round {state.round}")
    check_certificate(step, state.roster, verifier)
    if why := contradiction(manifest, state, run):  # on a branch that one member began, its own word is the quorum's
        raise RemoteProtocolError(f"its manifest is certified, but no availabilities lead to it: {why}")
    return state.after(manifest, run)


def check_certificate(entry: Entry, roster: Roster, verifier: msg.Verifier) -> None:
    """Raises RemoteProtocolError unless a quorum of the roster signed this manifest."""
    certificate, manifest = entry.certificate, entry.manifest
    certified = certificate.branch, certificate.round, certificate.manifest
    if certified != (manifest.branch, manifest.round, manifest.digest):
        raise RemoteProtocolError("the certificate is for another manifest")
    signers = roster.in_seats(certificate.seats)
    if signers is None or len(signers) != len(certificate.signatures):
        raise RemoteProtocolError("the certificate names seats that do not exist")
    if len(signers) < roster.quorum:
        raise RemoteProtocolError(f"the certificate has {len(signers)} signatures; the quorum is {roster.quorum}")
    for key, signature in zip(signers, certificate.signatures, strict=True):
        vote = msg.Vote(
            certificate.branch, certificate.round, certificate.view, msg.Ballot.PRECOMMIT, certificate.manifest, key
        )
        if not verifier(key, msg.signed_bytes(verifier.run_id, vote), signature):
            raise RemoteProtocolError("the certificate has an invalid signature")


def check_beginning(beginning: Beginning, state: AgreedState, verifier: msg.Verifier) -> None:
    """Raises RemoteProtocolError unless a quorum of these roster members agreed to go on from this state."""
    if (beginning.parent_branch, beginning.round, beginning.parent) != (state.branch, state.round, state.head):
        raise RemoteProtocolError("the branch begins elsewhere")
    check_regroup(beginning, state.roster, verifier)


def check_regroup(beginning: Beginning, roster: Roster, verifier: msg.Verifier) -> None:
    members, signers = beginning.members, beginning.signers
    if any(first >= second for keys in (members, signers) for first, second in pairwise(keys)):
        raise RemoteProtocolError("the branch's members or signers are not in ascending order")
    inside = set(members)
    if not inside <= set(roster.members) or not set(signers) <= inside:
        raise RemoteProtocolError("the branch has keys that are not members")
    if len(signers) < quorum_of(len(members)) or len(signers) != len(beginning.signatures):
        raise RemoteProtocolError(f"the branch has {len(members)} members, and {len(signers)} signed it")
    for key, signature in zip(signers, beginning.signatures, strict=True):
        message = msg.Regroup(beginning.parent_branch, beginning.parent, beginning.attempt, members, key)
        if not verifier(key, msg.signed_bytes(verifier.run_id, message), signature):
            raise RemoteProtocolError("the branch has an invalid signature")


def jump(state: AgreedState, changes: tuple[Step, ...], base: AgreedState, verifier: msg.Verifier) -> None:
    """Raises RemoteProtocolError unless the changes lead from `state` to the roster of `base`.

    The rest of `base` is proved by the entry that follows it, which names its digest."""
    roster, branch, number, head = state.roster, state.branch, state.round, state.head
    for change in changes:
        if isinstance(change, Beginning):
            if (change.parent_branch, change.round, change.parent) != (branch, number, head):
                raise RemoteProtocolError("the branch begins elsewhere")
            check_regroup(change, roster, verifier)
            roster, branch, head = roster_of(change.members), change.branch, change.branch
            continue
        if change.manifest.branch != branch or change.manifest.round <= number:
            raise RemoteProtocolError("the roster changes do not follow one another")
        check_certificate(change, roster, verifier)
        number, head = change.manifest.round, change.manifest.digest
        roster = roster_of(changed(roster.members, change.manifest.seated, change.manifest.unseated))
    if (base.branch, base.members) != (branch, roster.members) or base.round < number:
        raise RemoteProtocolError("the roster changes do not lead to the base")
