"""How long it takes to measure one contribution again from a node's directory: `p2ptrain audit --contribution`.

    OMP_NUM_THREADS=1 python benchmarks/recheck.py [--rounds 8] [--json FILE]

A directory is made as four nodes would have kept it, with real keys, payloads, roots and the state of round 0, for
`config example tiny` and for 10 million parameters; only nobody has trained, because that changes no time. The
contribution of the last round is measured: all rounds before it are applied first.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
from contextlib import closing, suppress
from pathlib import Path
from time import process_time
from typing import Any

import figures
import torch
from receipts import certified

from p2ptrain.audit.contribution import measure
from p2ptrain.config import DeviceConfig, RunConfig
from p2ptrain.config.load import load_run_config
from p2ptrain.core.events import Certified
from p2ptrain.core.messages import authored, content_name, payload_digest
from p2ptrain.core.origin import first_state
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.errors import RemoteProtocolError
from p2ptrain.exact.outer import Outer
from p2ptrain.identity import Identity
from p2ptrain.store.store import Store
from p2ptrain.train.begin import begin
from p2ptrain.train.learner import Learner
from tests.helpers.core import announced, plain_manifest

ABOUT = ("p2ptrain/audit/contribution.py", "p2ptrain/train/matched_filter.py", "p2ptrain/exact")
IDENTITIES = {each.key: each for each in (Identity(bytes([number]) * 32) for number in range(1, 5))}
DEVICE = DeviceConfig(name="cpu", threads=1)
EXAMPLES = Path(__file__).parents[1] / "examples"


def variants(content: bytes, outer: Outer, count: int) -> list[bytes]:
    """Returns contributions of which each has another bit that the strict decoder takes."""
    found: list[bytes] = []
    for at in range(len(content) - 1, 0, -1):
        changed = bytearray(content)
        changed[at] ^= 1
        with suppress(RemoteProtocolError):
            outer.unpack(bytes(changed))
            found.append(bytes(changed))
        if len(found) == count:
            break
    return found


def kept(run: RunConfig, home: Path, rounds: int) -> tuple[Path, TokenDataset]:
    """Makes a node's directory of a run."""
    keys = sorted(IDENTITIES)
    begun = begin(run, home, [key.hex() for key in keys])
    run, dataset = begun.run, TokenDataset.open(begun.dataset, begun.run.data.manifest)
    learner = Learner(run, DEVICE, dataset, initial=False)
    replica, state, place = learner.replica, first_state(run, None), home / "runs" / run.run_id[:16]
    replica.adopt(0, [begun.state])
    with closing(Store(place, run, state, keys[0], home / "spoken")) as store:
        store.checkpoints.write(0, run.id, run.id, replica.root(), 0, lambda path: path.write_bytes(b""), begun.state)
        for number in range(1, rounds + 1):
            learner.take_steps(number, 1e-3 * torch.randn(replica.outer.parameters))
            contents = variants(learner.contribute(number), replica.outer, len(keys))
            payloads = {key: authored(key, content) for key, content in zip(keys, contents, strict=True)}
            root, offers = replica.root(state.head), []
            for key, each in payloads.items():
                name = payload_digest(each)
                (place / "payloads" / name.hex()).write_bytes(each)
                size, content = len(each), content_name(each)
                said = {"base_root": root, "payload": name, "payload_bytes": size, "content": content, "steps": 10}
                offers.append(announced(key, number, branch=state.branch, **said))
            manifest = plain_manifest(state, run, offers, root_round=number - 1, root=root)
            entry = certified(run, state, manifest, IDENTITIES)
            state = state.after(manifest, run)
            store.log.append([Certified(entry, state, None)])
            replica.apply(number, contents)
    return place, dataset


def measured(run: RunConfig, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as home:
        place, dataset = kept(run, Path(home), rounds)
        key, began = min(IDENTITIES), process_time()
        found = measure(place, rounds, key, DEVICE, lambda name: dataset.directory, Path(home))
        return {
            "run": run.name,
            "processor_seconds": round(process_time() - began, 1),
            "sequences": found["sequences"],
            "sequence_length": run.model.sequence_length,
            "rounds_applied": rounds - 1,
            "weights": found["weights"],
            "most_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1_024,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path)
    chosen, found = parser.parse_args(), []
    ten = RunConfig.model_validate({"name": "10m", "model": {"preset": "10m"}, "recipe": {"name": "local"}})
    for run in (load_run_config(EXAMPLES / "tiny.toml"), ten):
        found.append(measured(run, chosen.rounds))
        print(found[-1], flush=True)
    if chosen.json:
        figures.save(chosen.json, found, ABOUT)


if __name__ == "__main__":
    main()
