"""Receipts: what the contributions of one key did in which rounds, in a file that a stranger verifies offline.

A receipt has the run's config, whose digest is the run's id, the manifests that took a contribution of the key or audit
one, and those that changed the roster, each with its certificate. The founders are in the config, so every certificate
is checked against the roster to which the ones before it lead, as a newcomer does (core/history.py: `jump`). The last
manifest names the agreed state before it, which goes along: the key's standing cannot be chosen as its rounds can.

Every bit is covered by a signature, by a digest that one covers, or by the run's id, which the stranger has to know. A
receipt proves what is in it, and not that nothing was left out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from p2ptrain.audit.history import CountingVerifier
from p2ptrain.config import CONFIG_BYTES_MAX, RunConfig
from p2ptrain.core.audits import PASS, STRENGTH_LEAST, Tier
from p2ptrain.core.history import HISTORY_BYTES_MAX, Beginning, Entry, Step, check_certificate, follow, jump, name_of
from p2ptrain.core.journal import Journal
from p2ptrain.core.messages import Key
from p2ptrain.core.origin import Descent, check_branches, first_state
from p2ptrain.core.state import AgreedState
from p2ptrain.core.wire import decode_strictly
from p2ptrain.errors import DataError, RemoteProtocolError
from p2ptrain.identity import peer_id_of

STEPS_MAX = 2**17  # more than fit


class Receipt(Struct, frozen=True, array_like=True, tag="p2ptrain receipt 1"):
    config: Annotated[bytes, Meta(max_length=CONFIG_BYTES_MAX)]  # in its canonical encoding
    origin: Descent | None  # where the run comes from, if it follows another
    key: Key
    # Rounds that name the key, all changes of the roster, and a last round; in their order.
    steps: Annotated[tuple[Step, ...], Meta(min_length=1, max_length=STEPS_MAX)]
    state: AgreedState  # before the last round


def decode_receipt(data: bytes) -> Receipt:
    """Decodes a receipt; only `check` verifies it."""
    if len(data) > HISTORY_BYTES_MAX:  # 256 rounds of 1,024 contributors take 43 MB
        raise RemoteProtocolError(f"a receipt of {len(data):,} bytes; the limit is {HISTORY_BYTES_MAX:,}")
    return decode_strictly(msgspec.msgpack.Decoder(Receipt), data, "a receipt")


def check(
    receipt: Receipt, run_id: str = "", verifier_of: Callable[[bytes], CountingVerifier] = CountingVerifier
) -> dict[str, Any]:
    """Verifies a receipt and returns what it proves; RemoteProtocolError if that is nothing.

    run_id: of the run that the stranger means, or how it begins"""
    run, key, origin, steps = RunConfig.from_canonical(receipt.config), receipt.key, receipt.origin, receipt.steps
    if not run.is_sealed or not run.run_id.startswith(run_id):
        which = run.run_id if run.is_sealed else "which never began"
        raise RemoteProtocolError(f"it is of run {run.name}, {which}, and not of {run_id or 'one that did'}")
    verifier, first = verifier_of(run.id), first_state(run, origin)
    if origin is not None:  # the config has the digest of its last manifest, but not that one's certificate
        check_certificate(origin.last, origin.before.roster, verifier_of(bytes.fromhex(run.predecessor.run)))
        if origin.changes or not run.predecessor.run:
            raise RemoteProtocolError("it has more than where the run comes from")
    check_branches(first, steps)
    jump(first, steps[:-1], receipt.state, verifier)
    after = follow(receipt.state, steps[-1], run, verifier)
    entries = [each for each in steps if isinstance(each, Entry)]
    needed = {*map(name_of, _needed(steps, key)), name_of(steps[-1])}
    if isinstance(steps[-1], Beginning) or {*map(name_of, steps)} - needed:
        raise RemoteProtocolError("it has rounds that neither name the key nor change the roster, or ends with none")
    rounds = [
        {
            "round": entry.manifest.round,
            "payload": taken.payload.hex(),
            "bytes": taken.payload_bytes,
            "sequences": min(taken.steps or run.recipe.local_steps, run.recipe.local_steps) * run.recipe.step_sequences,
            "share": 1 / len(entry.manifest.counted) if taken.counts else 0.0,
        }
        for entry in entries
        for taken in entry.manifest.taken
        if taken.author == key
    ]
    if not rounds:
        raise RemoteProtocolError("none of its rounds took a contribution of the key")
    audits = [each for entry in entries for each in entry.manifest.audits if each.key == key]
    return {
        "peer": peer_id_of(key),
        "run": {"id": run.run_id, "name": run.name},
        "rounds": rounds,
        "audits": len(audits),
        "audits_passed": sum(each.z >= PASS and each.strength >= STRENGTH_LEAST for each in audits),
        "standing": f"{_standing(after, key)} after round {after.round}",
        "root": {"round": after.root_round, "root": after.root.hex()},
        "signatures": verifier.count,
    }


def _standing(state: AgreedState, key: bytes) -> str:
    if key not in state.place:
        return "banned" if key in state.banned else "not admitted any more"
    tier = Tier(state.admitted[state.place[key]].conduct.tier).name.lower().replace("_", " ")
    return f"{tier}, {'with' if key in state.roster.seat else 'without'} a seat"


def _needed(steps: Sequence[Step], key: bytes) -> list[Step]:
    """Returns the steps that name the key, and those that a stranger needs to know the roster."""
    return [
        step
        for step, following in zip(steps, (*steps[1:], None), strict=True)
        if isinstance(step, Beginning)
        or isinstance(following, Beginning)  # the round before a branch proves where it begins
        or step.manifest.changes_roster
        or key in {each.author for each in step.manifest.taken} | {each.key for each in step.manifest.audits}
    ]


def receipt_of(run: RunConfig, origin: Descent | None, journal: Journal, key: bytes) -> Receipt:
    """Makes a receipt from a node's log; DataError if no round is certified yet."""
    kept = [each.step for each in journal.history]
    while kept and isinstance(kept[-1], Beginning):
        kept.pop()  # no round of the branch is certified yet
    if not kept:
        raise DataError("no round is certified yet", fix="Wait for a few rounds")
    inside = {*map(name_of, kept)}
    before = [each for each in (journal.trunk.changes if journal.trunk else ()) if name_of(each) not in inside]
    steps = (*_needed([*before, *kept[:-1]], key), kept[-1])
    origin = replace(origin, changes=()) if origin else None
    return Receipt(run.canonical(), origin, key, steps, journal.states[len(kept) - 1])
