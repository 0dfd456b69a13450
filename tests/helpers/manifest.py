"""Test helpers for the manifest: states, and the availabilities of a quorum."""

from __future__ import annotations

from typing import Any

import msgspec

from p2ptrain.config import RunConfig
from p2ptrain.core.manifest import (
    Manifest,
    Request,
    manifest_of,
)
from p2ptrain.core.messages import (
    SHORT_BYTES,
    Announcement,
    Availability,
)
from p2ptrain.core.roster import bitmap
from p2ptrain.core.state import Admitted, AgreedState, Taken, genesis
from p2ptrain.digest import digest
from tests.helpers.core import KEYS, ROOT0, RUN, name_of, run_of

MEMBERS, NEWCOMER, LATECOMER = KEYS[:4], KEYS[8], KEYS[9]
OPEN = run_of()
STALE = run_of({"staleness_rounds_max": 2})
SIZES = range(1, 17)
ASKED = tuple(digest("manifest test request", bytes([number]))[:SHORT_BYTES] for number in range(8))
BEARER = b"\1" * 32


def start(size: int = 4, **changes: Any) -> AgreedState:
    return msgspec.structs.replace(genesis(RUN, KEYS[:size], ROOT0), **changes)


def admitting(*entries: Admitted, size: int = 4, **changes: Any) -> AgreedState:
    """A state with these entries added to those of its members, or in place of them."""
    given = {entry.key for entry in entries}
    members = (Admitted(key, 0, 0, 0) for key in KEYS[:size] if key not in given)
    return start(size, admitted=tuple(sorted((*members, *entries), key=lambda entry: entry.key)), **changes)


def said(state: AgreedState, author: bytes, **changes: Any) -> Availability:
    """An availability of the next round by a member that holds nothing and hears everyone."""
    fields: dict[str, Any] = {"root_round": state.root_round, "root": state.root}
    fields |= {"held": (), "refused": (), "requests": (), "heard": bitmap(range(state.roster.size))}
    return Availability(state.branch, state.round + 1, author=author, **(fields | changes))


def quorum(state: AgreedState, times: int | None = None, **changes: Any) -> list[Availability]:
    """The availabilities of a quorum, of which the given number (or all) have the given content."""
    named = state.members[: state.roster.quorum]
    return [said(state, key, **(changes if times is None or seat < times else {})) for seat, key in enumerate(named)]


def names(*offers: Announcement) -> tuple[bytes, ...]:
    return tuple(sorted(name_of(offer) for offer in offers))


def decide(
    state: AgreedState,
    named: list[Availability],
    offers: tuple[Announcement, ...] = (),
    requests: dict[bytes, Request] | None = None,
    run: RunConfig = OPEN,
) -> Manifest:
    manifest = manifest_of(state, run, named, {name_of(offer): offer for offer in offers}.get, (requests or {}).get)
    assert isinstance(manifest, Manifest)
    return manifest


def all_hold(state: AgreedState, *offers: Announcement, run: RunConfig = OPEN, **changes: Any) -> Manifest:
    return decide(state, quorum(state, held=names(*offers), **changes), offers, run=run)


def all_ask(state: AgreedState, *requests: Request, run: RunConfig = OPEN) -> Manifest:
    asked = dict(zip(ASKED, requests, strict=False))
    return decide(state, quorum(state, requests=tuple(sorted(asked))), (), asked, run)


def taken(offer: Announcement) -> Taken:
    return Taken(
        offer.author, offer.round, offer.base_round, offer.payload, offer.payload_bytes, offer.steps, offer.content
    )


def empty(state: AgreedState, **changes: Any) -> Manifest:
    fields: dict[str, Any] = {"root_round": state.root_round, "root": state.root, "absent": b""}
    fields |= dict.fromkeys(("taken", "refused", "evidence", "joins", "leaves", "banned", "seated", "unseated"), ())
    return Manifest(state.branch, state.round + 1, state.head, state.digest, **(fields | changes))


def nobody(name: bytes) -> None:
    """A lookup that finds nothing."""
