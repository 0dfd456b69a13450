"""Receipts with signatures made of digests, for tests that alter what is signed."""

from __future__ import annotations

from p2ptrain.audit.history import CountingVerifier
from p2ptrain.audit.receipt import Receipt
from p2ptrain.config import RunConfig
from p2ptrain.core.history import Entry, Step
from p2ptrain.core.origin import Descent
from p2ptrain.core.state import AgreedState, genesis
from tests.helpers.core import KEYS, ROOT0, RUN, DigestSigner, begun, line_of, run_of

CONFIG = run_of(recipe={"name": "local"}).sealed(
    manifest="0" * 64, initial_root=ROOT0.hex(), founders=[key.hex() for key in KEYS[:4]]
)
FIRST = genesis(CONFIG.id, KEYS[:4], ROOT0)


class CountingSigner(CountingVerifier):
    """Verifies signatures that are made of digests, whatever run they are of."""

    def __init__(self, run_id: bytes) -> None:
        super().__init__(RUN)

    def __call__(self, key: bytes, signed: bytes, signature: bytes) -> bool:
        return DigestSigner()(key, signed, signature)


def receipt_after(state: AgreedState, run: RunConfig, *before: Step, origin: Descent | None = None) -> Receipt:
    """Returns a receipt of three more rounds after a state, and of these steps before it."""
    line = line_of(state, run, 3)
    entries: list[Entry] = [entry for entry, _ in line]
    return Receipt(run.canonical(), origin, KEYS[0], (*before, *entries), line[-2][1])


def with_a_branch() -> Receipt:
    """Returns a receipt of a run in which three of four members went on after the first round."""
    entry, state = line_of(FIRST, CONFIG, 1)[0]
    beginning = begun(KEYS[:3], KEYS[:3], state)
    return receipt_after(state.regrouped(beginning.branch, beginning.members), CONFIG, entry, beginning)
