"""Liars with valid payloads: the held-out loss with one of them, over the loss with that member absent.

    python benchmarks/poison.py [--only WORDS] [--steps 200] [--json FILE] [--processes N]

Simulated peers as in benchmarks/learning.py (0.1M parameters, bytes), one of which sends, in every round, a payload
that the exact path accepts:

    against   the negative of what the others agreed on in the round before, at the largest scale
    away      the negative of its own honest contribution, at the largest scale
    noise     random places and signs, at the largest scale
    tiny      its own honest contribution at the smallest scale
    spiked    like `away`, with one coefficient of sixteen at the largest value and the others at the smallest
    alone     like `away`, and in the round after a third of them its contribution is the only one

Wanted: at most 1.05 with one of 16. The rest is reported as it is: below four members nothing is promised.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from simulated import Swarm

from p2ptrain.config import ModelConfig, RecipeConfig
from p2ptrain.data.assignment import shard
from p2ptrain.data.corpus import Reading
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.data.prepare import prepare
from p2ptrain.data.tokenizer import load_tokenizer
from p2ptrain.exact.codec import EXPONENT_MAX, EXPONENT_MIN, Contribution
from p2ptrain.exact.selection import largest
from p2ptrain.models.built_in import Transformer, initialise
from p2ptrain.train.live import LiveModel
from p2ptrain.train.recipes import Recipe

CACHE = Path(tempfile.gettempdir()) / f"p2ptrain-poison-{os.getpid()}"
MODEL = ModelConfig(dim=64, ffn_dim=192, layers=2, heads=4, kv_heads=2, sequence_length=64)
LIES = ("against", "away", "noise", "tiny", "spiked", "alone")
PEERS = (2, 4, 7, 16)
EVALUATED = 64
RATES = {"normalised": "1/1000", "mean": "2/1000", "sign": "1/1000"}  # of the outer rule, where it has a size
INNER_RATE = "1/100"
RULES = [(name, outer) for name in ("distro", "demo", "local") for outer in ("normalised", "mean", "sign")]


@dataclass(frozen=True)
class Case:
    """A swarm of `peers` honest peers, and a liar if there is a lie."""

    recipe: str
    outer: str
    peers: int
    lie: str = ""
    steps: int = 200

    def config(self) -> RecipeConfig:
        is_local = self.recipe == "local"
        rate = Fraction(RATES[self.outer]) * (5 if is_local else 1)
        return RecipeConfig(
            name=self.recipe,
            outer=self.outer,  # type: ignore[arg-type]
            k=64 if is_local else 32,
            local_steps=10 if is_local else 1,
            value_bits=3 if self.recipe == "demo" else 1,
            inner_learning_rate=Fraction(INNER_RATE),
            sequences_per_pass=2,
            learning_rate=Fraction(1) if is_local and self.outer == "mean" else rate,
            schedule="linear",
            rounds=self.steps // (10 if is_local else 1),
            warmup_rounds=max(1, self.steps // (150 if is_local else 15)),
            final_ratio=Fraction(1, 10),
        )


class Liar:
    """A member whose valid payloads do harm; it also trains, to know where an honest one would go."""

    def __init__(self, honest: Recipe, lie: str, swarm: Swarm) -> None:
        self.honest, self.lie, self.swarm = honest, lie, swarm
        self.residual = honest.residual
        self.agreed = swarm.agreed
        self.before = swarm.agreed.clone()
        self.generator = np.random.default_rng(7)

    def begin(self, round_number: int) -> None:
        self.moved = self.swarm.agreed - self.before  # what the others agreed on
        self.before = self.swarm.agreed.clone()
        self.honest.begin(round_number)

    def local_step(self, step: int, batch: Any, positions: Any) -> Any:
        return self.honest.local_step(step, batch, positions)

    def end(self) -> None:
        self.honest.end()

    def contribute(self, round_number: int) -> Contribution:
        own, config = self.honest.contribute(round_number), self.swarm.config
        self.residual.restore(round_number)  # it has told nothing of its own
        top: Any = 1 << (config.value_bits - 1)
        if self.lie == "tiny":
            exponents = None if own.exponents is None else np.full_like(own.exponents, EXPONENT_MIN)
            return replace(own, exponents=exponents)
        exponents = None if own.exponents is None else np.full_like(own.exponents, EXPONENT_MAX)
        indices, signs = own.indices, -np.sign(own.values)
        if self.lie == "noise":
            draws = self.generator.random((len(indices), self.swarm.outer.layouts[0].area))
            indices = np.sort(np.argsort(draws, axis=1)[:, : config.k_max], axis=1).astype(np.uint16)
            signs = self.generator.choice(np.array([-1, 1], np.int8), indices.shape)
        elif self.lie == "against" and self.moved.any():
            wanted = torch.zeros(self.swarm.outer.layouts[0].chunks, self.swarm.outer.layouts[0].area)
            self.swarm.outer.layouts[0].accumulate(self.swarm.live.parts(self.moved), wanted, 0.0)
            indices = largest(wanted, config.k_max)
            found = wanted.gather(1, torch.from_numpy(indices.astype(np.int64))).numpy()
            signs = np.where(found < 0, np.int8(-1), np.int8(1))  # subtracted, it undoes the move
        if self.lie == "spiked":
            top = np.where(self.generator.random(signs.shape) < 1 / 16, top, 1)
        return Contribution(indices, (signs * top).astype(own.values.dtype), exponents)

    def state(self) -> dict[str, torch.Tensor]:
        return {}


def run(case: Case) -> dict[str, Any]:
    torch.set_num_threads(1)
    config, peers = case.config(), case.peers + bool(case.lie)
    dataset = TokenDataset.open(CACHE, (CACHE / "digest").read_text())
    model = Transformer(MODEL)
    initialise(model, 0)
    live = LiveModel(model, autocast=False)
    swarm = Swarm(config, live, peers)
    if case.lie:
        swarm.peers[-1] = Liar(swarm.peers[-1], case.lie, swarm)  # type: ignore[assignment]
    length, sequences = MODEL.sequence_length, dataset.sequences(MODEL.sequence_length)
    for number in range(config.rounds):
        batches = []
        for peer in range(peers):
            found = shard(11, number, peer, peers, config.sequences_per_pass * config.local_steps, sequences)
            batches.append(list(torch.split(torch.from_numpy(dataset.batch(found, length)), config.sequences_per_pass)))
        is_alone = case.lie == "alone" and number == config.rounds // 3
        swarm.round(number, batches, alone=peers - 1 if is_alone else None)
    held_out = torch.from_numpy(dataset.held_out_batch(np.arange(EVALUATED), length))
    with torch.no_grad():
        loss = float(live.model.loss(held_out))
    return {**asdict(case), "loss": loss if math.isfinite(loss) else None}


def _use_cache(directory: Path) -> None:
    global CACHE  # noqa: PLW0603  # a worker is told where the corpus lies
    CACHE = directory


def prepare_embedded(directory: Path) -> None:
    """Prepares the text that every Python carries, with a fiftieth held out; `digest` beside it names its manifest."""
    tokenizer, share = load_tokenizer(None), Fraction(2, 100)
    how = Reading(tokenizer=tokenizer)
    made = prepare(directory, [], embedded=True, how=how, held_out=share, progress=lambda *_: None)
    (directory / "digest").write_text(made.digest)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", action="append", metavar="WORDS", help="only recipes and rules with these words")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    prepare_embedded(CACHE)
    rules = [each for each in RULES if any(word in " ".join(each) for word in arguments.only or [""])]
    swarms = [(name, outer, peers - 1) for name, outer in rules for peers in PEERS]
    cases = [Case(*swarm, lie, arguments.steps) for swarm in swarms for lie in ("", *LIES)]
    results: dict[Case, float] = {}
    start = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(arguments.processes, _use_cache, (CACHE,)) as pool:
        for case, found in zip(cases, pool.imap(run, cases), strict=True):
            results[case] = found["loss"] if found["loss"] is not None else math.inf
            if case.lie:
                absent = results[replace(case, lie="")]
                told = f"{results[case]:7.3f} / {absent:6.3f} = {results[case] / absent:6.3f}"
                print(f"{told}  {case.recipe} {case.outer}, one of {case.peers + 1}: {case.lie}", flush=True)
    print(f"{len(cases)} runs, {time.perf_counter() - start:.0f} s")
    if arguments.json:
        arguments.json.write_text(
            json.dumps([asdict(case) | {"loss": loss} for case, loss in results.items()], indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
