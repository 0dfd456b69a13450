"""What a node keeps of a run of months: its log, chain and proofs after 100,000 rounds, and what they cost a newcomer.

    OMP_NUM_THREADS=1 nice python benchmarks/history.py [--rounds 100000] [--members 16] [--churn 25] [--json FILE]

A chain of certified rounds is written to a real store, as a node would write it, with a contribution by each member;
every `--churn` rounds a member leaves and another takes its seat. Signatures are real (Ed25519) where the roster
changes, because these are kept and verified; those of other rounds are only as long.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from time import perf_counter

import figures
import psutil
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace

from p2ptrain.config import RunConfig
from p2ptrain.core.chain import Chain
from p2ptrain.core.events import Certified
from p2ptrain.core.history import Entry, History, decode_history, encode_history, jump
from p2ptrain.core.manifest import Manifest, manifest_of
from p2ptrain.core.messages import Announcement, Availability, Ballot, Certificate, Vote, message_digest, signed_bytes
from p2ptrain.core.roster import bitmap
from p2ptrain.core.state import Admitted, AgreedState, genesis
from p2ptrain.digest import digest
from p2ptrain.errors import RemoteProtocolError
from p2ptrain.files import below
from p2ptrain.identity import RunVerifier
from p2ptrain.store.store import Store

# The figures are about this code, and old when it has changed.
ABOUT = ("p2ptrain/core/history.py", "p2ptrain/core/chain.py", "p2ptrain/store")
WRITTEN_AT_ONCE = 64  # rounds between two fsyncs, which are not what is measured


class Keys:
    """Members' keys, made when they are needed."""

    def __init__(self) -> None:
        self.made: dict[bytes, Ed25519PrivateKey] = {}

    def new(self) -> bytes:
        private = Ed25519PrivateKey.from_private_bytes(digest("history key", len(self.made).to_bytes(8, "little")))
        public = private.public_key().public_bytes_raw()
        self.made[public] = private
        return public


def certified(manifest: Manifest, state: AgreedState, run_id: bytes, keys: Keys) -> Entry:
    signers = state.members[: state.roster.quorum]
    is_kept = manifest.changes_roster
    signatures = []
    for key in signers:
        vote = Vote(manifest.branch, manifest.round, 0, Ballot.PRECOMMIT, manifest.digest, key)
        signatures.append(keys.made[key].sign(signed_bytes(run_id, vote)) if is_kept else bytes(64))
    seats = bitmap(state.roster.seat[key] for key in signers)
    certificate = Certificate(manifest.branch, manifest.round, 0, manifest.digest, seats, tuple(signatures))
    return Entry(manifest, certificate)


def manifest_after(state: AgreedState, run: RunConfig) -> Manifest:
    """Returns the manifest of a round that takes a contribution of each member."""
    number = state.round + 1
    offers: dict[bytes, Announcement] = {}
    for key in state.members:
        content = digest("history", key, number.to_bytes(8, "little"))
        offer = Announcement(state.branch, number, state.round, state.root, content, 200, content[:16], 10, 0, 0, key)
        offers[message_digest(offer)[:16]] = offer
    root = digest("history root", number.to_bytes(8, "little"))
    named = [
        Availability(state.branch, number, state.round, root, tuple(sorted(offers)), (), (), b"", key)
        for key in state.members[: state.roster.quorum]
    ]
    heard = bitmap(range(state.roster.size))
    found = manifest_of(state, run, [replace(each, heard=heard) for each in named], offers.get, lambda name: None)
    assert isinstance(found, Manifest), "all offers are here"
    return found


def exchanged(manifest: Manifest, state: AgreedState, keys: Keys) -> tuple[Manifest, AgreedState]:
    """Lets a member leave in this round, and gives its seat to another, who is admitted for it."""
    newcomer, gone = keys.new(), state.members[manifest.round % len(state.members)]
    entry = Admitted(newcomer, state.round, 9, 0)
    admitted = tuple(sorted((*state.admitted, entry), key=lambda each: each.key))
    before = replace(state, admitted=admitted)
    taken = tuple(each for each in manifest.taken if each.author != gone)
    changed = replace(manifest, state=before.digest, leaves=(gone,), unseated=(gone,), seated=(newcomer,), taken=taken)
    return changed, before


def write(store: Store, chain: Chain, run: RunConfig, keys: Keys, rounds: int, churn: int) -> None:
    records: list[Certified] = []
    for number in range(1, rounds + 1):
        state = chain.state
        manifest = manifest_after(state, run)
        if churn and number % churn == 0:
            manifest, state = exchanged(manifest, state, keys)
            if chain.steps:
                chain.steps[-1] = Certified(chain.steps[-1].step, state)
        step = certified(manifest, state, run.id, keys)
        after = state.after(manifest, run)
        chain.append(step, after)
        records.append(Certified(step, after, chain.trunk() if chain.has_new_trunk else None))
        if len(records) == WRITTEN_AT_ONCE or number == rounds:
            store.log.append(records)
            records.clear()


def verdict_on(first: AgreedState, read: History, run_id: bytes) -> str:
    assert read.base is not None, "a newcomer is far behind"
    try:
        jump(first, read.changes, read.base, RunVerifier(run_id))
    except RemoteProtocolError as error:  # with more changes than are kept nothing leads there
        return f"not: {error}"
    return "from the first members on"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100_000)
    parser.add_argument("--members", type=int, default=16)
    parser.add_argument("--churn", type=int, default=25, help="rounds between two changes of the roster")
    parser.add_argument("--json", type=Path)
    asked, keys = parser.parse_args(), Keys()
    members = tuple(sorted(keys.new() for _ in range(asked.members)))
    raw = {"name": "history", "admission": {"policy": "allowlist", "keys": [key.hex() for key in members]}}
    founders = [key.hex() for key in members]
    run = RunConfig.model_validate(raw).sealed(manifest="0" * 64, initial_root="0" * 64, founders=founders)
    first, kept, began = genesis(run.id, members, bytes(32)), run.agreement.history_rounds, perf_counter()
    with tempfile.TemporaryDirectory() as place:
        opening = Path(place) / "run", run, first, members[0], Path(place) / "identity.key"
        with Store(*opening) as store:
            write(store, Chain(first, run.id, kept), run, keys, asked.rounds, asked.churn)
        made_seconds = perf_counter() - began
        size = sum(file.st_size for _, file in below(Path(place)))
        before, began = psutil.Process().memory_info().rss, perf_counter()
        with Store(*opening) as store:
            opened = Chain.restored(store.journal.saved_at(0, b""), run.id, kept)
        start_seconds, memory = perf_counter() - began, psutil.Process().memory_info().rss - before
    encoded = bytes(encode_history(opened.answer(run.id, 0)))
    began = perf_counter()
    read = decode_history(encoded)
    verdict = verdict_on(first, read, run.id)
    found = {
        "rounds": asked.rounds,
        "members": asked.members,
        "changes of the roster": asked.rounds // asked.churn if asked.churn else 0,
        "changes kept": len(read.changes),
        "MB on the disk": round(size / 1e6, 2),
        "MB more in memory after a start": round(memory / 1e6, 1),
        "seconds of a start": round(start_seconds, 2),
        "MB that a newcomer fetches": round(len(encoded) / 1e6, 2),
        "seconds in which it verifies them": round(perf_counter() - began, 2),
        "verified": verdict,
        "seconds to make all this": round(made_seconds, 1),
    }
    for name, value in found.items():
        print(f"{name:36} {value}")
    if asked.json:
        figures.save(asked.json, found, ABOUT)


if __name__ == "__main__":
    main()
