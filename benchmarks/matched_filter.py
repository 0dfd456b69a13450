"""How the matched filter tells contributions that come from their author's own sequences from others.

    python benchmarks/matched_filter.py [--only WORDS] [--seeds 2] [--rounds 20] [--json FILE] [--processes N]

A swarm of nine as in benchmarks/learning.py (0.1M parameters, bytes), whose real payloads are judged before they are
applied, early, in the middle and late in the run: z and strength of p2ptrain/train/matched_filter.py, from 32 of the
author's sequences in sets of eight. Beside the honest contributions there are others that an author could send in
their place:

    copy       another author's of the same round     resend     its own of the round before
    other data what it learned from other sequences   noise      random places and signs
    mean       the mean of all others                 minus      the same with the sign turned
    flip       its own with the sign turned           little     the others' mean less 1.5 of their deviations
    steps      a quarter of the steps                 batch      a quarter of each batch
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from poison import prepare_embedded
from simulated import Swarm

from p2ptrain.config import ModelConfig, RecipeConfig
from p2ptrain.data.assignment import shard
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.exact.codec import Contribution
from p2ptrain.exact.selection import largest
from p2ptrain.models.built_in import Transformer, initialise
from p2ptrain.train.live import LiveModel
from p2ptrain.train.matched_filter import MatchedFilter, judge
from p2ptrain.train.recipes import quantise

CACHE = Path(tempfile.gettempdir()) / f"p2ptrain-filter-{os.getpid()}"
SHAPE = {"dim": 64, "ffn_dim": 192, "layers": 2, "heads": 4, "kv_heads": 2, "sequence_length": 64}
PEERS, BATCH, SETS, SET = 9, 8, 4, 8
EXTRA = ("steps", "batch", "other data")  # peers beside the nine, whose contributions are judged and not applied
LOCAL = {"name": "local", "k": 256, "local_steps": 10, "inner": "muon", "inner_learning_rate": "1/50", "decay": "19/20"}
RECIPES: dict[str, dict[str, Any]] = {
    "local muon": LOCAL,
    "local muon, batch 32": LOCAL,
    "local muon, momentum": LOCAL | {"momentum": "1/2"},
    "local muon, 2 fragments": LOCAL | {"fragments": 2, "local_steps": 5},
    "local muon, no DCT": LOCAL | {"transform": "none"},
    "local adamw": LOCAL | {"inner": "adamw", "inner_learning_rate": "3/1000"},
    "distro": {"name": "distro", "k": 32, "decay": "999/1000", "outer": "sign", "learning_rate": "1/500"},
    "demo": {"name": "demo", "k": 32, "value_bits": 3, "decay": "999/1000", "outer": "normalised",
             "learning_rate": "1/1000"},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    recipe: str
    seed: int
    rounds: int

    @property
    def batch(self) -> int:
        return 32 if "batch 32" in self.recipe else BATCH

    def config(self) -> RecipeConfig:
        given = RECIPES[self.recipe]
        rounds = self.rounds if given["name"] == "local" else 10 * self.rounds
        ends = {"schedule": "linear", "rounds": rounds, "warmup_rounds": max(1, rounds // 15), "final_ratio": "1/10"}
        return RecipeConfig.model_validate({"sequences_per_pass": self.batch} | ends | given)


class JudgedSwarm(Swarm):
    """A swarm whose contributions are judged before some rounds; the extra peers' are not applied."""

    def __init__(self, case: Case, live: LiveModel) -> None:
        super().__init__(case.config(), live, PEERS + len(EXTRA))
        self.case = case
        self.generator = np.random.default_rng(case.seed)
        self.filters = [MatchedFilter(self.config, live, layout) for layout in self.outer.layouts]
        self.sequences: list[torch.Tensor] = []  # of this round, by peer
        self.before: list[Contribution] = []
        self.rows: list[dict[str, Any]] = []
        self.parts: dict[int, str] = {}  # of the run, by rounds that are judged

    def _apply(self, round_number: int, payloads: dict[int, bytes], only: int | None = None) -> None:
        made = [self.outer.unpack(payloads[number]) for number in range(PEERS + len(EXTRA))]
        if round_number in self.parts:
            self._judge(round_number, made)
        self.before = made
        super()._apply(round_number, {number: payloads[number] for number in range(PEERS)})
        for number in range(PEERS, PEERS + len(EXTRA)):
            self.peers[number].residual.forget(round_number + 1)

    def _judge(self, round_number: int, made: list[Contribution]) -> None:
        fragment = self.outer.fragment_of(round_number + 1)
        self.live.weights.copy_(self.agreed)
        honest = made[:PEERS]
        for author in range(PEERS):
            lies = self._lies(author, honest, fragment)
            if author < len(EXTRA):  # the extra peers have sequences of the first three, but for "other data"
                lies[EXTRA[author]] = made[PEERS + author]
            if self.before and self.config.fragments == 1:
                lies["resend"] = self.before[author]
            chosen = self.generator.permutation(len(self.sequences[author]))[: SETS * SET]
            sets = torch.split(self.sequences[author][torch.from_numpy(chosen)], SET)
            # "other data" was learned from sequences that its author was not given: those of the filter are others.
            filters, everything = self.filters[fragment], [*honest, *lies.values()]
            answers = np.stack([filters.answers(each, everything) for each in sets])
            likeness = filters.likeness(everything)
            others = [place for place in range(PEERS) if place != author]
            for place, name in ((author, "honest"), *enumerate(lies, PEERS)):
                # A copy's own original is no reference.
                places = [place, *(each for each in others if (name, each) != ("copy", (author + 1) % PEERS))]
                self._note(round_number, name, judge(answers[:, places], likeness[np.ix_(places, places)], 0))

    def _note(self, round_number: int, kind: str, found: tuple[float, float]) -> None:
        self.rows.append(
            {"round": round_number, "part": self.parts[round_number], "kind": kind, "z": found[0], "strength": found[1]}
        )

    def _lies(self, author: int, honest: list[Contribution], fragment: int) -> dict[str, Contribution]:
        layout, own = self.outer.layouts[fragment], honest[author]
        sizes = [group.chunks for group in layout.groups]

        def whole(contribution: Contribution) -> torch.Tensor:
            units = np.ones(layout.chunks)
            if contribution.exponents is not None:
                units = np.repeat(np.ldexp(1.0, contribution.exponents.astype(np.int64)), sizes)
            values = torch.from_numpy(contribution.values * units[:, None]).float()
            places = torch.from_numpy(contribution.indices.astype(np.int64))
            return torch.zeros(layout.chunks, layout.area).scatter_(1, places, values)

        def encoded(numbers: torch.Tensor) -> Contribution:
            places = largest(numbers, self.config.k_max)
            chosen = numbers.gather(1, torch.from_numpy(places.astype(np.int64)))
            signs = torch.where(chosen < 0, -1, 1)
            if own.exponents is None:
                return Contribution(places, signs.to(torch.int8).numpy())
            magnitudes, exponents = quantise(chosen.abs(), sizes, self.config.value_bits)
            return Contribution(places, (magnitudes * signs).numpy().astype(own.values.dtype), exponents)

        others = torch.stack([whole(each) for place, each in enumerate(honest) if place != author])
        mean = others.mean(dim=0)
        draws = self.generator.random((layout.chunks, layout.area))
        places = np.sort(np.argsort(draws, axis=1)[:, : self.config.k_max], axis=1).astype(np.uint16)
        signs: Any = self.generator.choice(np.array([-1, 1], own.values.dtype), places.shape)
        return {
            "copy": honest[(author + 1) % PEERS],
            "noise": Contribution(places, signs, own.exponents),
            "mean": encoded(mean),
            "minus": encoded(-mean),
            "little": encoded(mean - 1.5 * others.std(dim=0)),
            "flip": replace(own, values=-own.values),
        }


def run(case: Case) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    dataset = TokenDataset.open(CACHE, (CACHE / "digest").read_text())
    model = Transformer(ModelConfig.model_validate(SHAPE))
    initialise(model, case.seed)
    live = LiveModel(model, autocast=False)
    swarm = JudgedSwarm(case, live)
    config, length = swarm.config, model.config.sequence_length
    steps, rounds = config.local_steps, int(config.rounds)
    swarm.parts = {
        number: part
        for part, first in (("early", rounds // 10), ("middle", rounds // 2), ("late", rounds - 2))
        for number in (first, first + 1)
    }
    count = case.batch if steps > 1 else max(case.batch, SETS * SET)  # of a step: at least as many as the filter's
    share = PEERS + 1, count * steps, dataset.sequences(length)
    for number in range(rounds):
        shards = [shard(11 + case.seed, number, place, *share) for place in range(PEERS + 1)]
        given = [torch.from_numpy(dataset.batch(positions, length)) for positions in shards]
        swarm.sequences = given[:PEERS]
        batches = [list(torch.split(sequences, count)) for sequences in given]
        few = batches[0][: max(1, steps // 4)], [step[: max(1, count // 4)] for step in batches[1]], batches[PEERS]
        swarm.round(number, [*batches[:PEERS], *few])
    return [row | {"recipe": case.recipe, "seed": case.seed} for row in swarm.rows]


def _use_cache(directory: Path) -> None:
    global CACHE  # noqa: PLW0603  # a worker is told where the corpus lies
    CACHE = directory


def report(rows: list[dict[str, Any]]) -> None:
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        print(f"{recipe}: mean z (spread), strength")
        for kind in dict.fromkeys(row["kind"] for row in rows):
            cells = []
            for part in ("early", "middle", "late"):
                some = [row for row in rows if (row["recipe"], row["kind"], row["part"]) == (recipe, kind, part)]
                z, strength = [row["z"] for row in some], [row["strength"] for row in some]
                if some:
                    cells.append(
                        f"{statistics.mean(z):5.1f} ({statistics.pstdev(z):.1f}) {statistics.mean(strength):5.2f}"
                    )
            print(f"  {kind:10} " + " | ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", default="", metavar="WORDS", help="only recipes with these words")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20, help="of ten steps")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    prepare_embedded(CACHE)
    names = [name for name in RECIPES if arguments.only in name]
    cases = [Case(name, seed, arguments.rounds) for name in names for seed in range(arguments.seeds)]
    rows, start = [], time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(arguments.processes, _use_cache, (CACHE,)) as pool:
        for found in pool.imap(run, cases):
            rows += found
    report(rows)
    print(f"{len(cases)} runs, {time.perf_counter() - start:.0f} s")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
