"""Test helpers for the history: certified rounds, altered certificates, and a long chain whose roster changes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from p2ptrain.core.history import (
    Entry,
    Step,
    follow,
)
from p2ptrain.core.state import AgreedState, genesis
from p2ptrain.digest import digest
from p2ptrain.errors import RemoteProtocolError
from tests.helpers.core import (
    KEYS,
    ROOT0,
    RUN,
    DigestSigner,
    announced,
    begun,
    certified,
    line_of,
    plain_manifest,
    run_of,
)

RUN_CONFIG = run_of(admission={"absence_rounds_max": 3})
SIGNER = DigestSigner()
OTHER = digest("history test", b"other")
START = genesis(RUN, KEYS[:4], ROOT0)
ENTRY = certified(plain_manifest(START, RUN_CONFIG, [announced(key) for key in KEYS[:4]]), START)
BEGINNING = begun(KEYS[:3], KEYS[:2], START)


def refused(state: AgreedState, step: Step, signer: DigestSigner = SIGNER) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        follow(state, step, RUN_CONFIG, signer)
    return caught.value.why


def bent(entry: Entry, **changes: Any) -> Entry:
    """The same manifest with an altered certificate."""
    return Entry(entry.manifest, msgspec.structs.replace(entry.certificate, **changes))


def altered(entry: Entry, **changes: Any) -> Entry:
    """An altered manifest, with a certificate that names it but was signed for the original."""
    manifest = msgspec.structs.replace(entry.manifest, **changes)
    where = {"branch": manifest.branch, "round": manifest.round, "manifest": manifest.digest}
    return Entry(manifest, msgspec.structs.replace(entry.certificate, **where))


def dropping(state: AgreedState, key: bytes) -> tuple[Entry, AgreedState]:
    """A round in which a member loses its seat."""
    entry = certified(msgspec.structs.replace(plain_manifest(state, RUN_CONFIG), leaves=(key,), unseated=(key,)), state)
    return entry, state.after(entry.manifest, RUN_CONFIG)


def long_way() -> tuple[list[Step], AgreedState]:
    """Rounds, two changes of the roster, and a branch with the round before it; returns the changes and the end."""
    state = genesis(RUN, KEYS[:7], ROOT0)
    changes: list[Step] = []
    for gone in KEYS[5:7]:
        _, state = line_of(state, RUN_CONFIG, 3)[-1]
        entry, state = dropping(state, gone)
        changes.append(entry)
    last, state = line_of(state, RUN_CONFIG, 2)[-1]
    beginning = begun(KEYS[1:5], KEYS[1:4], state)
    state = state.regrouped(beginning.branch, beginning.members)
    _, state = line_of(state, RUN_CONFIG, 3)[-1]
    entry, state = dropping(state, KEYS[1])
    _, state = line_of(state, RUN_CONFIG, 3)[-1]
    return [*changes, last, beginning, entry], state


SEVEN = genesis(RUN, KEYS[:7], ROOT0)
CHANGES, END = long_way()
