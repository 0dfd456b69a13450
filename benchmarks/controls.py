"""Negative controls: beside each claim that bits are equal, one bit is flipped; in which round is it seen, and by whom?

    OMP_NUM_THREADS=1 python benchmarks/controls.py [--json FILE]

`memory`: four real daemons train; in one a patch flips the lowest bit of one weight after a round. That node counts a
wrong state once the others have certified theirs, and takes it over; whether it tells its own root to anybody before is
luck, so whoever compares roots has to ask for this counter as well, as tests of swarms do. `history`: of the history
that one of them has kept, a bit is flipped in a payload, a checkpoint (with its digests made anew), the log, the config
and a receipt, each in a copy; `p2ptrain audit` has to name the round or the file. `arithmetic`: the kept rounds are
applied again, with one bit of a weight or of a contribution flipped in one of them. `simulator`: a whole swarm of it
(scenarios/bit-flip.toml). Exit status 1 if a bit is not seen.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import figures
import torch
from msgspec.structs import replace

from p2ptrain.audit.findings import Grade, Report
from p2ptrain.audit.history import CountingVerifier, prove, read_log
from p2ptrain.audit.receipt import check, decode_receipt, receipt_of
from p2ptrain.audit.run import audit, read_run
from p2ptrain.audit.weights import PayloadFiles, RunModel, read_flat
from p2ptrain.config import RunConfig
from p2ptrain.core.history import Entry
from p2ptrain.core.wire import encode
from p2ptrain.errors import P2ptrainError, RemoteProtocolError
from p2ptrain.files import digest_of
from p2ptrain.sim.checkers import standard
from p2ptrain.sim.outcome import simulate
from p2ptrain.sim.scenario import load_scenario
from p2ptrain.store.checkpoints import STAMP_NAME, STATE_NAME, Checkpoint, Checkpoints, FileStamp
from p2ptrain.store.log import read_journal
from tests.helpers.daemons import DaemonSwarm, StartableDaemon, swarm_in

ABOUT = ["p2ptrain/audit", "p2ptrain/exact", "p2ptrain/core/local_work.py", "p2ptrain/core/history.py"]
NODES = 4  # of which one may compute wrongly
ROUNDS = 8  # before the bit is flipped, and after it is mended
SCENARIO = Path(__file__).parents[1] / "scenarios" / "bit-flip.toml"
# Python runs this before anything else in that node's process. It says in the file after which round it was.
FLIPS = """\
import os
from pathlib import Path

import torch

from p2ptrain.exact.replica import Replica

apply, asked = Replica.apply, Path(os.environ["FLIP_WHEN"])


def flipping(self, number, payloads):
    counted = apply(self, number, payloads)
    if asked.exists() and not asked.read_text():
        self.weights[:1].view(torch.int32).bitwise_xor_(1)
        asked.write_text(str(number))
    return counted


Replica.apply = flipping
"""


# ---------------------------------------------------------------------------------------------------
# In the memory of a real node


def flipped_in_memory(swarm: DaemonSwarm) -> dict[str, Any]:
    """Flips a bit in one of four daemons, and returns what all of them told of the rounds after it."""
    patch, asked = swarm.directory / "patch", swarm.directory / "flip-now"
    patch.mkdir()
    (patch / "sitecustomize.py").write_text(FLIPS)
    first, *others = swarm.of(NODES - 1)
    bent = swarm.joiner("bent", first.address, PYTHONPATH=str(patch), FLIP_WHEN=str(asked)).start()
    nodes = [first, *others, bent]
    for node in nodes:
        node.until(lambda node=node: len(node.status().get("roster", ())) == NODES)
    bent.until_applied(bent.applied + ROUNDS)
    equal_before = swarm.compared()
    asked.touch()
    told: dict[str, dict[int, str]] = {node.name: {} for node in nodes}
    noticed = {node.name: 0 for node in nodes}

    def look() -> None:
        for node in nodes:
            with suppress(P2ptrainError):
                status = node.ask()
                told[node.name] |= {int(number): root for number, root in status["roots"].items()}
                noticed[node.name] = status["counters"].get("root mismatches", 0)

    def is_mended() -> bool:
        look()
        flipped = int(asked.read_text() or 0)
        roots = [told[node.name].get(flipped + 2 * ROUNDS) for node in nodes]
        return bool(flipped) and None not in roots and len({*roots}) == 1

    bent.until(is_mended)
    flipped = int(asked.read_text())
    right = {number: root for number, root in told[first.name].items() if number >= flipped}
    differing = sorted(number for number, root in right.items() if told["bent"].get(number, root) != root)
    try:
        swarm.compare("bent", bent.ask())
        is_refused = False
    except AssertionError:
        is_refused = True
    for node in nodes:
        node.kill()
    (directory,) = (bent.directory / "runs").iterdir()
    return {
        "flipped_after_round": flipped,
        "rounds_compared_before": equal_before,
        "rounds_told_with_another_root": differing,
        "counted_by": {name: count for name, count in noticed.items() if count},
        "noted_for_rounds": json.loads((directory / "mismatches").read_text())["rounds"],
        "certified_by_round": certifying(first, flipped),
        "the_others_agree": all(
            len({told[node.name][number] for node in nodes[:-1] if number in told[node.name]}) == 1 for number in right
        ),
        "refused_by_the_comparison": is_refused,
    }


def certifying(node: StartableDaemon, number: int) -> int:
    """Returns the round whose manifest certifies the root of another, by this node's log."""
    (directory,) = (node.directory / "runs").iterdir()
    journal = read_journal(directory / "wal")
    assert journal is not None
    return min(each.state.round for each in journal.history if each.state.root_round == number)


# ---------------------------------------------------------------------------------------------------
# In a kept history


def flip(path: Path, at: int = -1) -> None:
    """Flips the lowest bit of a byte; by default, of one in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at < 0 else at] ^= 1
    path.write_bytes(content)


def flipped_on_disk(directory: Path) -> dict[str, str]:
    """Flips a bit in copies of a node's kept history; returns what `p2ptrain audit` says first, "" if nothing."""
    assert audit(directory).all_holds, audit(directory).lines()
    return {
        "a payload": found_in(directory, lambda copy: flip(a_payload(copy)[1])),
        "a checkpoint, its digests made anew": found_in(directory, restamp),
        "the log": found_in(directory, lambda copy: flip(next((copy / "wal").iterdir()))),
        "the config": found_in(directory, lambda copy: flip(copy / "run.json")),
        "a receipt": of_a_receipt(directory),
    }


def found_in(directory: Path, spoil: Callable[[Path], None]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / directory.name
        shutil.copytree(directory, copy)
        spoil(copy)
        bad = [each for each in audit(copy).findings if each.verdict in (Grade.WRONG, Grade.OPEN)]
        return "; ".join(str(each).replace(f"{folder}/", "") for each in bad[:2])


def a_payload(directory: Path) -> tuple[int, Path]:
    """Returns a payload in the middle of the kept history, and the round that applied it."""
    journal = read_journal(directory / "wal")
    assert journal is not None
    kept = [
        (each.state.round, directory / "payloads" / taken.payload.hex())
        for each in journal.history
        if isinstance(each.step, Entry)
        for taken in each.step.manifest.counted
    ]
    there = [pair for pair in kept if pair[1].exists()]
    return there[len(there) // 2]


def restamp(directory: Path) -> None:
    """Flips a bit of the weights of the oldest checkpoint, as somebody would who can compute digests."""
    found, model = oldest(directory), RunModel(run_of(directory))
    flip(path := found.path / STATE_NAME)
    root = model.root(read_flat(path, model.state_bytes), found.round, found.head)
    size, digest = digest_of(path)
    stamp = replace(found.stamp, state=FileStamp(size, digest), root=root.hex())
    (found.path / STAMP_NAME).write_bytes(stamp.encoded())


def run_of(directory: Path) -> RunConfig:
    run = read_run(directory / "run.json", directory.name, Report(""))
    assert run is not None
    return run


def oldest(directory: Path) -> Checkpoint:
    return Checkpoints(directory / "checkpoints", run_of(directory).id).present()[0]


def of_a_receipt(directory: Path) -> str:
    run, journal = run_of(directory), read_journal(directory / "wal")
    assert journal is not None
    content = bytearray(encode(receipt_of(run, None, journal, journal.state.members[0])))
    assert check(decode_receipt(bytes(content)), run.run_id)
    content[len(content) // 2] ^= 1
    try:
        check(decode_receipt(bytes(content)), run.run_id)
    except RemoteProtocolError as error:
        return error.why
    return ""


# ---------------------------------------------------------------------------------------------------
# In the arithmetic


def flipped_in_arithmetic(directory: Path) -> dict[str, dict[str, Any]]:
    """Applies the kept rounds again, with a bit flipped in one; returns in which rounds the root is another."""
    run, report = run_of(directory), Report("")
    verifier = CountingVerifier(run.id)
    log = read_log(directory, run, verifier, report)
    assert log is not None
    proved, model, start = prove(log, run, verifier, report), RunModel(run), oldest(directory)
    files = PayloadFiles(directory / "payloads", model)
    entries = [each for each in proved.entries if each.manifest.round > start.round and not files.lacks(each)]
    middle = entries[len(entries) // 2].manifest.round

    def replayed(what: str) -> list[int]:
        weights, wrong = read_flat(start.path / STATE_NAME, model.state_bytes), []
        for entry in entries:
            number, contents = entry.manifest.round, files.of(entry) or []
            if (number, what) == (middle, "a contribution"):
                contents = bent(contents, model, weights, number)
            model.outer.apply(weights, number - 1, contents)
            if (number, what) == (middle, "a weight"):
                weights[:1].view(torch.int32).bitwise_xor_(1)
            root = model.root(weights, number, entry.manifest.digest)
            if proved.roots.get(number, root) != root:
                wrong.append(number)
        return wrong

    assert replayed("nothing") == []
    return {what: {"flipped_in_round": middle, "seen_in": replayed(what)} for what in ("a weight", "a contribution")}


def bent(contents: list[bytes], model: RunModel, weights: torch.Tensor, number: int) -> list[bytes]:
    """Returns a round's contributions with a bit of the first flipped that the strict decoder takes, such as a sign.

    The signs of an update are few bits: one in thirty such flips leaves all of them as they are, and then no weight is
    wrong. The bit is one that changes a weight.
    """
    right = weights.clone()
    model.outer.apply(right, number - 1, contents)
    for at in range(len(contents[0]) - 1, 0, -1):
        changed = bytearray(contents[0])
        changed[at] ^= 1
        wrong, others = weights.clone(), [bytes(changed), *contents[1:]]
        with suppress(RemoteProtocolError):
            model.outer.apply(wrong, number - 1, others)
            if not torch.equal(right, wrong):
                return others
    raise AssertionError("no bit of it changes a weight")


# ---------------------------------------------------------------------------------------------------


def controls(folder: Path) -> dict[str, Any]:
    with swarm_in(folder) as swarm:
        memory = flipped_in_memory(swarm)
        print(json.dumps(memory), file=sys.stderr, flush=True)
        (directory,) = (swarm.daemons[0].directory / "runs").iterdir()
        history, arithmetic = flipped_on_disk(directory), flipped_in_arithmetic(directory)
    outcome = simulate(load_scenario(SCENARIO, None), 0, standard())
    simulated = {"is_as_expected": outcome.is_good, "failures": list(outcome.failures)}
    return {"memory": memory, "history": history, "arithmetic": arithmetic, "simulator": simulated}


def unseen(found: dict[str, Any]) -> list[str]:
    """Returns the controls in which a bit was not seen, or by nobody who should."""
    memory = found["memory"]
    flipped = memory["flipped_after_round"]
    is_seen = {
        "memory": memory["counted_by"] == {"bent": 1} and memory["noted_for_rounds"] == [flipped],
        "memory, by the comparison": memory["refused_by_the_comparison"],
        "the others": memory["the_others_agree"],
        **found["history"],
        **{what: each["seen_in"][:1] == [each["flipped_in_round"]] for what, each in found["arithmetic"].items()},
        "simulator": found["simulator"]["is_as_expected"],
    }
    return [name for name, seen in is_seen.items() if not seen]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        found = controls(Path(folder))
    print(json.dumps(found, indent=2))
    if chosen.json:
        figures.save(chosen.json, found, ABOUT)
    for name in unseen(found):
        print(f"NOT SEEN: {name}")
    return bool(unseen(found))


if __name__ == "__main__":
    sys.exit(main())
