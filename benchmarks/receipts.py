"""How large a receipt is, and how long a stranger takes to verify it: `p2ptrain receipt`, `p2ptrain audit --receipt`.

    OMP_NUM_THREADS=1 python benchmarks/receipts.py [--rounds 1000] [--members 16 64 256] [--json FILE]

A chain of certified rounds, each with a contribution of every member, signed with real keys by as many as decide.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from time import process_time
from typing import Any

import figures

from p2ptrain.audit.receipt import Receipt, check, decode_receipt
from p2ptrain.config import RunConfig
from p2ptrain.core.history import Entry
from p2ptrain.core.messages import Ballot, Certificate, Vote, signed_bytes
from p2ptrain.core.roster import bitmap
from p2ptrain.core.state import AgreedState, genesis
from p2ptrain.core.wire import encode
from p2ptrain.identity import Identity
from tests.helpers.core import ROOT0, announced, plain_manifest, root_of

ABOUT = ["p2ptrain/audit/receipt.py", "p2ptrain/core/manifest.py", "p2ptrain/core/history.py"]


def measured(members: int, rounds: int) -> dict[str, Any]:
    identities = {each.key: each for each in (Identity(number.to_bytes(32, "big")) for number in range(1, members + 1))}
    keys = sorted(identities)
    run = RunConfig.model_validate({"name": "receipts", "recipe": {"name": "local"}}).sealed(
        manifest="0" * 64, initial_root=ROOT0.hex(), founders=[key.hex() for key in keys]
    )
    state, before, entries = genesis(run.id, tuple(keys), ROOT0), None, []
    for number in range(1, rounds + 1):
        offers = [announced(key, number, branch=state.branch) for key in keys]
        manifest = plain_manifest(state, run, offers, root_round=number - 1, root=root_of(number - 1))
        entries.append(certified(run, state, manifest, identities))
        before, state = state, state.after(manifest, run)
    assert before is not None
    content = encode(Receipt(run.canonical(), None, keys[0], tuple(entries), before))
    began = process_time()
    found = check(decode_receipt(content), run.run_id)
    seconds = process_time() - began
    assert len(found["rounds"]) == rounds
    return {
        "members": members,
        "rounds": rounds,
        "bytes": len(content),
        "bytes_a_round": round(len(content) / rounds),
        "signatures": found["signatures"],
        "processor_seconds_to_verify": round(seconds, 2),
    }


def certified(run: RunConfig, state: AgreedState, manifest: Any, identities: dict[bytes, Identity]) -> Entry:
    where, seats = (state.branch, manifest.round, 0), range(state.roster.quorum)
    signatures = tuple(
        identities[key].sign(signed_bytes(run.id, Vote(*where, Ballot.PRECOMMIT, manifest.digest, key)))
        for key in state.members[: state.roster.quorum]
    )
    return Entry(manifest, Certificate(*where, manifest.digest, bitmap(seats), signatures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1_000)
    parser.add_argument("--members", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    found = []
    for members in chosen.members:
        found.append(measured(members, chosen.rounds))
        print(found[-1], flush=True)
    if chosen.json:
        figures.save(chosen.json, found, ABOUT)


if __name__ == "__main__":
    main()
