"""Measures one contribution again from the files that a node has kept: as all members do, without the node.

The weights that it was computed from are those of the nearest checkpoint, with the rounds between applied or, but for
rounding, taken back. The sequences are drawn by the digest of the manifest that took it, so whoever measures reads the
same and finds the same, but for the last digits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from p2ptrain.audit.findings import Grade, Report
from p2ptrain.audit.history import CountingVerifier, ProvedLog, prove, read_log
from p2ptrain.audit.run import read_run
from p2ptrain.audit.weights import PayloadFiles, RunModel, check_checkpoints, found_checkpoints, read_flat
from p2ptrain.capacity import free_memory_bytes
from p2ptrain.config import DeviceConfig
from p2ptrain.core.auditing import BACK_MAX, audit_of, beside
from p2ptrain.core.chain import Chain
from p2ptrain.core.messages import content_of
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.errors import DataError
from p2ptrain.models.adapters import base_file
from p2ptrain.store.backup import is_backup
from p2ptrain.store.checkpoints import STATE_NAME
from p2ptrain.train.learner import Learner
from p2ptrain.train.matched_filter import drawn


def measure(
    directory: Path, number: int, key: bytes, device: DeviceConfig, dataset_of: Callable[[str], Path], bases: Path
) -> dict[str, Any]:
    """Measures a key's contribution to a round; DataError if what that takes is not all here, or wrong.

    dataset_of: where a data set is; bases: where frozen weights are"""
    if is_backup(directory):
        raise DataError("a backup has no contributions", path=directory, fix="Name the directory of a node")
    report = Report(str(directory))
    run = read_run(directory / "run.json", directory.name, report)
    verifier = CountingVerifier(run.id if run else b"")
    log = read_log(directory, run, verifier, report) if run else None
    proved = prove(log, run, verifier, report) if run and log else ProvedLog()
    bad = [str(finding) for finding in report.findings if finding.verdict in (Grade.WRONG, Grade.OPEN)]
    if bad or run is None or log is None:
        raise DataError(bad[0])
    rounds = len(log.journal.history)
    chain = Chain.restored(log.journal.saved_at(0, b""), run.id, rounds)
    order = audit_of(chain, run, number, key, is_summoned=True, back_max=rounds)
    if isinstance(order, str):
        raise DataError(order, path=directory)
    model = RunModel(run)
    if model.memory_bytes > free_memory_bytes():
        raise DataError(f"memory is short here for a state of {model.state_bytes:,} bytes", path=directory)
    files = PayloadFiles(directory / "payloads", model)
    weights, how = _weights(order.taken.base_round, directory, files, proved)
    taken = (order.taken, *beside(order.manifest, order.taken, model.outer.fragment_of))
    payloads = [content_of(content) for each in taken if (content := files.read(each)) is not None]
    if len(payloads) < len(taken):
        raise DataError(f"not all contributions to round {number} are here, or not whole", path=files.directory)
    dataset = TokenDataset.open(dataset_of(run.data.manifest), run.data.manifest)
    base = base_file(bases, run.adapt.base) if run.adapt.is_on else None
    learner = Learner(run, device, dataset, initial=False, base=base)
    draw = order.manifest.digest + key
    own, others = drawn(learner.positions_for, order.share, order.taken.steps, run.recipe, order.sequences, draw)
    if missing := dataset.missing(np.concatenate([own, others]), run.model.sequence_length):
        what = f"{len(missing)} of its pieces are missing, from which the author's sequences are read"
        raise DataError(what, path=dataset.directory, fix="Put a complete data set beside it")
    match = learner.audit(order.share.round, weights, payloads, own, others)
    found = {"z": match.z, "strength": match.strength, "sequences": order.sequences}
    return found | {"typical_z": chain.state.typical / 1_000, "weights": how}


def _weights(base: int, directory: Path, files: PayloadFiles, proved: ProvedLog) -> tuple[Tensor, str]:
    """Returns the weights after round `base`, and how they are known."""
    model, entries, report = files.model, {each.manifest.round: each for each in proved.entries}, Report("")
    states = check_checkpoints(found_checkpoints(directory, model.run, report), directory, model, proved, report)
    for start in sorted(states, key=lambda each: abs(each.round - base)):
        is_before, apart = start.round <= base, abs(start.round - base)
        rounds = range(start.round + 1, base + 1) if is_before else range(start.round, base, -1)
        # An outer momentum is divided by what remains of it, which makes more of the rounding with each round.
        is_too_far = not is_before and model.run.recipe.momentum and apart > BACK_MAX
        if is_too_far or any(each not in entries or files.lacks(entries[each]) for each in rounds):
            continue
        weights = read_flat(start.checkpoint.path / STATE_NAME, model.state_bytes)
        for number in rounds:
            if (contents := files.of(entries[number])) is None:
                raise DataError(f"not all contributions to round {number} are whole", path=files.directory)
            (model.outer.apply if is_before else model.outer.undo)(weights, number - 1, contents)
        how = f"those of round {start.round}, with {apart} rounds {'applied' if is_before else 'taken back'}"
        if is_before and (root := proved.roots.get(base)):
            if model.root(weights, base, entries[base].manifest.digest if apart else start.checkpoint.head) != root:
                raise DataError(f"the weights of round {base} come out with another root than was certified")
            how += "; their root is certified"
        return weights[: model.outer.parameters], how
    fix = "Name the directory of a node that has kept more"
    raise DataError(f"no checkpoint leads to the weights of round {base}", path=directory, fix=fix)
