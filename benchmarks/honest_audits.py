"""Audits of honest contributions: how many fail, and how far honest auditors are from one another.

    python benchmarks/honest_audits.py 30000 [--json FILE]
    python benchmarks/honest_audits.py --auditors

So many audits over batches of 2 to 32 sequences, optimizers, precisions and threads. `--auditors`: how far auditors
with other threads, sizes of a pass and numbers are from one with a thread, whole sets and fp32.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import figures
import numpy as np
import torch
from matched_filter import (
    AUDITORS,
    BATCH,
    CACHE,
    LARGER,
    LOCAL,
    PEERS,
    ROUNDS,
    SET,
    SETS_MAX,
    SHAPE,
    Case,
    Table,
    whole,
)
from numpy.typing import NDArray
from poison import prepare_embedded
from simulated import Swarm
from torch import Tensor

from p2ptrain.config import AUDIT_SEQUENCES, ModelConfig, RecipeConfig
from p2ptrain.core.audits import FAIL, STRENGTH_LEAST, TYPICAL_LEAST
from p2ptrain.data.assignment import shard
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.models.built_in import Transformer, initialise
from p2ptrain.train.live import LiveModel
from p2ptrain.train.matched_filter import Match, MatchedFilter, audit


class RecordingSwarm(Swarm):
    """Remembers what the last round's contributions were, and the weights that they were computed from."""

    def _apply(self, round_number: int, payloads: dict[int, bytes], only: int | None = None) -> None:
        self.base = self.agreed.clone()
        self.contributions = [self.outer.unpack(payload) for payload in payloads.values()]
        super()._apply(round_number, payloads, only)


def compare_auditors() -> None:
    """Prints how far other honest auditors are from the first, in z and strength, over a round's contributions."""
    dataset, case = TokenDataset.open(CACHE, (CACHE / "digest").read_text()), Case("local muon", 0)
    recipe, length = case.config(), case.shape["sequence_length"]
    lives = {}
    for is_half in (False, True):
        model = Transformer(ModelConfig.model_validate(case.shape))
        initialise(model, 0)
        lives[is_half] = LiveModel(model, autocast=is_half)
    swarm = RecordingSwarm(recipe, lives[False], PEERS)
    places, sequences = PEERS + 2, dataset.sequences(length)
    for number in range(ROUNDS):
        shards = [shard(11, number, place, places, BATCH * recipe.local_steps, sequences) for place in range(places)]
        given = [list(torch.split(torch.from_numpy(dataset.batch(each, length)), SET)) for each in shards]
        swarm.round(number, given[:PEERS])
        if number not in (2, ROUNDS // 2, ROUNDS - 1):
            continue
        first: dict[int, NDArray[np.float64]] = {}
        for threads, at_a_time, is_half in AUDITORS:
            torch.set_num_threads(threads)
            live = lives[is_half]
            live.weights.copy_(swarm.base)
            live.set_sequences_per_pass(at_a_time)
            for sets in (4, 10):
                how = recipe, live, swarm.outer.layouts[0], swarm.contributions
                found = np.array(
                    [audit(*how, author, given[author][:sets], given[PEERS][:sets]) for author in range(PEERS)]
                )
                off = np.abs(found - first.setdefault(sets, found)).max(axis=0)
                told = (
                    f"{threads} threads, {at_a_time} at a time, {'bf16' if is_half else 'fp32'}, {sets} + {sets} sets"
                )
                print(f"round {number}, {told}: z {off[0]:.4f}, strength {off[1]:.4f}", flush=True)
        torch.set_num_threads(1)
        lives[False].set_sequences_per_pass(0)
        lives[False].weights.copy_(swarm.agreed)


@dataclass(frozen=True)
class Honest:
    """A swarm in which nobody lies, and how its members measure."""

    batch: int
    inner: str = "muon"
    is_half: bool = False
    threads: int = 1
    is_larger: bool = False

    @property
    def steps(self) -> int:
        return max(10, AUDIT_SEQUENCES // self.batch)


# The figures are about this code, and old when it has changed.
ABOUT = ("p2ptrain/train/matched_filter.py",)
HONEST = [
    *(Honest(batch) for batch in (2, 4, 8, 16, 32)),
    *(Honest(batch, is_half=True) for batch in (4, 8, 32)),
    *(Honest(batch, threads=2) for batch in (4, 16)),
    *(Honest(batch, inner="adamw") for batch in (8, 32)),
    Honest(8, is_larger=True),
]


def measure_honest(wanted: int, path: Path | None) -> None:
    """Measures so many honest contributions, by up to sixteen sets of their author's sequences and by four, and prints
    what would count against their authors. With a path a run that was broken off goes on."""
    kept = figures.rows_of(path) if path else []
    count = sum(line["sparse"][0] + line["decisive"][0] for line in kept)
    for seed, case in product(range(1_000), HONEST):
        if any(line["seed"] == seed and line["case"] == asdict(case) for line in kept):
            continue
        if count >= wanted:
            break
        start, tables = time.perf_counter(), honest_tables(case, seed)
        line: dict[str, Any] = {"case": asdict(case), "seed": seed} | judge_honest(tables)
        count += line["sparse"][0] + line["decisive"][0]
        kept.append(line)
        print(f"{case}, seed {seed}: {line}, {time.perf_counter() - start:.0f} s, {count} audits", flush=True)
        if path:
            figures.save(path, kept, ABOUT)
    for name in ("sparse", "decisive"):
        audited, low, weak = (sum(line[name][place] for line in kept) for place in range(3))
        print(
            f"{name}: {audited} honest audits, {low} with a z that fails or is doubted, {weak} with too little strength"
        )
    print(f"failed twice: {sum(line['twice'] for line in kept)}")


def honest_tables(case: Honest, seed: int) -> list[Table]:
    torch.set_num_threads(case.threads)
    dataset, shape = TokenDataset.open(CACHE, (CACHE / "digest").read_text()), LARGER if case.is_larger else SHAPE
    rate = "1/50" if case.inner == "muon" else "3/1000"
    settings = {"local_steps": case.steps, "inner": case.inner, "inner_learning_rate": rate, "rounds": ROUNDS,
                "sequences_per_pass": case.batch, "schedule": "linear", "final_ratio": "1/10"}  # fmt: skip
    recipe, length = RecipeConfig.model_validate(LOCAL | settings), shape["sequence_length"]
    model = Transformer(ModelConfig.model_validate(shape))
    initialise(model, seed)
    live, tables = LiveModel(model, autocast=case.is_half), list[Table]()
    swarm, places, sequences = RecordingSwarm(recipe, live, PEERS), PEERS + 2, dataset.sequences(length)
    matched = MatchedFilter(recipe, live, swarm.outer.layouts[0])
    for number in range(ROUNDS):
        shards = [
            shard(31 + seed, number, place, places, case.batch * case.steps, sequences) for place in range(places)
        ]
        read = [torch.from_numpy(dataset.batch(each, length)) for each in shards]
        swarm.round(number, [list(torch.split(each, case.batch)) for each in read[:PEERS]])
        live.weights.copy_(swarm.base)
        table, filters = Table(number / ROUNDS), list[Tensor]()
        for author, given in enumerate([*read[:PEERS], torch.cat(read[PEERS:])]):
            for each in torch.split(given[: SETS_MAX * SET], SET):
                if len(each) == SET:
                    table.rows.append((author if author < PEERS else -1, "own"))
                    filters.append(matched.filter_of(each).view(-1))
        table.columns = [(author, "honest") for author in range(PEERS)]
        units = [whole(*matched.unit(each), swarm.outer.layouts[0]).view(-1) for each in swarm.contributions]
        table.answers = (torch.stack(filters) @ torch.stack(units).T).numpy()
        tables.append(table)
        live.weights.copy_(swarm.agreed)
    torch.set_num_threads(1)
    return tables


def judge_honest(tables: list[Table]) -> dict[str, Any]:
    """Returns the number of audits, how many of them have too low a z, and how many too little strength; and how many
    members failed twice in a row."""
    found: dict[str, list[int]] = {"sparse": [0, 0, 0], "decisive": [0, 0, 0]}
    twice, failed, typical = 0, set[int](), 0.0
    for table in tables:
        others, failing, sparse = table.rows_of(-1, "own"), set[int](), list[Match]()
        for author in range(PEERS):
            own, beside = table.rows_of(author, "own"), [each for each in range(PEERS) if each != author]
            some = [own[first : first + 4] for first in range(0, len(own) - 3, 4)]
            cut = [others[4 * place : 4 * place + 4] for place in range(len(others) // 4)]
            sparse += [table.match(author, beside, each, cut[place % len(cut)]) for place, each in enumerate(some)]
            match = table.match(author, beside, own, others)
            is_low = match.z < FAIL / 1_000 and typical >= TYPICAL_LEAST / 1_000
            is_weak = match.strength < STRENGTH_LEAST / 1_000
            found["decisive"] = [a + b for a, b in zip(found["decisive"], (1, is_low, is_weak), strict=True)]
            failing |= {author} if is_low or is_weak else set()
        for match in sparse:
            found["sparse"][0] += 1
            found["sparse"][1] += match.z < typical / 2 and typical >= TYPICAL_LEAST / 1_000
            found["sparse"][2] += match.strength < STRENGTH_LEAST / 1_000
        typical = float(np.median([match.z for match in sparse]))
        twice += len(failing & failed)
        failed = failing
    return found | {"twice": twice}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("audits", type=int, nargs="?", default=30_000)
    parser.add_argument("--auditors", action="store_true", help="compare honest auditors, and nothing else")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    prepare_embedded(CACHE)
    if arguments.auditors:
        compare_auditors()
    else:
        measure_honest(arguments.audits, arguments.json)


if __name__ == "__main__":
    main()
