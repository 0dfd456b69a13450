"""How the matched filter tells contributions that come from their author's own sequences from others.

    python benchmarks/matched_filter.py [--only WORDS] [--seeds 1] [--tables DIRECTORY [--kept]] [--json FILE]

A swarm of nine as in benchmarks/learning.py (0.1M parameters, bytes) runs 20 rounds, or 200 of `distro` and `demo`. In
20 of them, or six with the larger model (0.8M), every real payload is audited before it is applied, as
p2ptrain/train/matched_filter.py does it, and beside the honest ones there are others that an author could send in their
place:

    copy        another author's of the same round    resend      its own of the round before
    other data  learned from other sequences          noise       random places and signs
    mean        the mean of all others                minus       the same with the sign turned
    flip        its own with the sign turned          little      the others' mean less 1.5 of their deviations
    one tensor  a copy, of one tensor alone           quarter     of each batch
    1, 2, 5 steps of ten                              ascent      from own sequences, up the gradient
    own-2       own work less 2 means of the others   own-5       less 5 of them
    forged N    the filter of N percent of its        backdoor    half as many poisoned sequences in each batch
                sequences, with no training

What each contribution answers to each set is kept (`--tables`, from which a later run goes on), so audits with fewer
members or sets are computed from the same numbers. `--seats`: how often forged ones pass, as core/audits.py counts
passes, beside honest ones.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import figures
import numpy as np
import torch
from numpy.typing import NDArray
from poison import prepare_embedded
from simulated import Swarm
from torch import Tensor

from p2ptrain.config import ModelConfig, RecipeConfig
from p2ptrain.config.adapt import AdaptConfig
from p2ptrain.core.auditing import ALLOWANCE
from p2ptrain.core.audits import PASS, STRENGTH_LEAST
from p2ptrain.data.assignment import shard
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.exact.codec import EXPONENT_MIN, Contribution
from p2ptrain.exact.selection import largest
from p2ptrain.exact.transform import Layout
from p2ptrain.models.adapters import AdaptedModel
from p2ptrain.models.built_in import Transformer, initialise
from p2ptrain.train.inner import INNER_OPTIMIZERS
from p2ptrain.train.live import LiveModel
from p2ptrain.train.matched_filter import Match, MatchedFilter, judge
from p2ptrain.train.recipes import Recipe
from p2ptrain.train.residual import quantise

# The figures are about this code, and old when it has changed.
ABOUT = ("p2ptrain/train/matched_filter.py",)
CACHE = Path(tempfile.gettempdir()) / f"p2ptrain-filter-{os.getpid()}"
SHAPE = {"dim": 64, "ffn_dim": 192, "layers": 2, "heads": 4, "kv_heads": 2, "sequence_length": 64}
LARGER = {"dim": 128, "ffn_dim": 384, "layers": 4, "heads": 4, "kv_heads": 2, "sequence_length": 64}
PEERS, BATCH, SET, SETS_MAX = 9, 8, 8, 16
ROUNDS, JUDGED, JUDGED_LARGER = 20, 20, 6
# Peers beside the nine, whose contributions are judged and not applied; each has the sequences of one of the nine.
EXTRA = ("1 steps", "2 steps", "5 steps", "quarter", "other data", "ascent", "backdoor")
LIARS = (0, 3, 6)  # for whom the lies that need no training are made
FORGED = {"forged 6": 1 / 16, "forged 10": 0.1, "forged 12": 1 / 8, "forged 25": 0.25}  # shares of the sequences
PARTS = {"early": 0.2, "middle": 0.6, "late": 1.0}  # of the run, by their ends
AUDITORS = ((1, 8, False), (2, 8, False), (4, 8, False), (1, 4, False), (1, 1, False), (1, 8, True))
# Own sets and others, where the author has so many, and the bar: the z below which a sparse audit doubts, and a
# decisive one fails.
AUDITS = {"sparse": (4, 4, 0.5), "decisive": (16, 16, 0.3)}
SEAT_DRAWS = 20
DRAWS = 3  # of sets and of the members beside, from the same answers
FEW = {"honest", "copy", "flip", "own-2"}  # kinds that are told of all audits
LOCAL = {"name": "local", "k": 256, "local_steps": 10, "inner": "muon", "inner_learning_rate": "1/50", "decay": "19/20"}
RECIPES: dict[str, dict[str, Any]] = {
    "local muon": LOCAL,
    "local muon, batch 32": LOCAL,
    "local adamw": LOCAL | {"inner": "adamw", "inner_learning_rate": "3/1000"},
    "distro": {"name": "distro", "k": 32, "decay": "999/1000", "outer": "sign", "learning_rate": "1/500"},
    "demo": {"name": "demo", "k": 32, "value_bits": 3, "decay": "999/1000", "outer": "normalised",
             "learning_rate": "1/1000"},
    "local muon, data in parts": LOCAL,
    "local muon, adapters": LOCAL,
    "local muon, larger model": LOCAL,
    "local muon, bf16": LOCAL,
    "local muon, momentum": LOCAL | {"momentum": "1/2"},
    "local muon, 2 fragments": LOCAL | {"fragments": 2, "local_steps": 5},
    "local muon, no DCT": LOCAL | {"transform": "none"},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    recipe: str
    seed: int

    @property
    def batch(self) -> int:
        return 32 if "batch 32" in self.recipe or RECIPES[self.recipe]["name"] != "local" else BATCH

    @property
    def shape(self) -> dict[str, int]:
        return LARGER if "larger" in self.recipe else SHAPE

    @property
    def judged(self) -> int:
        return JUDGED_LARGER if "larger" in self.recipe else JUDGED

    def config(self) -> RecipeConfig:
        given = RECIPES[self.recipe]
        rounds = ROUNDS if given["name"] == "local" else 10 * ROUNDS
        ends = {"schedule": "linear", "rounds": rounds, "warmup_rounds": max(1, rounds // 15), "final_ratio": "1/10"}
        return RecipeConfig.model_validate({"sequences_per_pass": self.batch} | ends | given)


@dataclass
class Table:
    """What each column, a contribution, answers to each row, a set of sequences. Both have an author and a kind."""

    progress: float
    rows: list[tuple[int, str]] = field(default_factory=list)
    columns: list[tuple[int, str]] = field(default_factory=list)
    answers: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))  # [rows, columns]

    def match(self, own: int, references: list[int], sets: list[int], others: list[int]) -> Match:
        columns = [own, *references]
        answers = [self.answers[np.ix_(rows, columns)].astype(np.float64) for rows in (sets, others)]
        return judge(answers[0], answers[1], 0)

    def rows_of(self, author: int, kind: str) -> list[int]:
        return [place for place, row in enumerate(self.rows) if row == (author, kind)]


@dataclass
class Given:
    """A round's sequences: of each of the nine, of nobody, and with data in parts those beside each member's own."""

    own: list[Tensor]
    nobody: Tensor
    beside: list[Tensor]


class ClimbingModel(LiveModel):
    """A model whose gradients can be turned around, for peers that climb."""

    sign = 1

    def loss(self, batch: Tensor) -> Tensor:
        return self.sign * super().loss(batch)


class Climber:
    """A peer that goes up the gradient."""

    def __init__(self, peer: Recipe, live: ClimbingModel) -> None:
        self.peer, self.live = peer, live
        self.begin, self.end, self.contribute, self.residual = peer.begin, peer.end, peer.contribute, peer.residual
        self.base = peer.base

    def local_step(self, step: int, batch: Tensor, positions: Any) -> None:
        self.live.sign = -1
        self.peer.local_step(step, batch, positions)
        self.live.sign = 1


class JudgedSwarm(Swarm):
    """A swarm whose contributions are compared with filters before some rounds; the extra peers' are not applied."""

    def __init__(self, case: Case, live: ClimbingModel) -> None:
        super().__init__(case.config(), live, PEERS + len(EXTRA))
        climber = PEERS + EXTRA.index("ascent")
        self.peers[climber] = Climber(self.peers[climber], live)  # type: ignore[call-overload]
        self.generator = np.random.default_rng(case.seed)
        self.given = Given([], torch.empty(0), [])
        self.before: list[tuple[list[Contribution], list[Tensor]]] = []  # the last two rounds, the newest first
        self.tables: list[Table] = []
        rounds = int(self.config.rounds)
        self.judged = {int(number) for number in np.linspace(1, rounds - 1, case.judged)}

    def _apply(self, round_number: int, payloads: dict[int, bytes], only: int | None = None) -> None:
        made = [self.outer.unpack(payloads[number]) for number in range(PEERS + len(EXTRA))]
        if round_number in self.judged:
            self._judge(round_number, made)
        self.before = [(made, self.given.own), *self.before[:1]]
        super()._apply(round_number, {number: payloads[number] for number in range(PEERS)})
        for number in range(PEERS, PEERS + len(EXTRA)):
            self.peers[number].residual.forget(round_number + 1)

    def _judge(self, round_number: int, made: list[Contribution]) -> None:
        fragment = self.outer.fragment_of(round_number + 1)
        self.live.weights.copy_(self.agreed)
        matched = MatchedFilter(self.config, self.live, self.outer.layouts[fragment])
        table = Table(round_number / int(self.config.rounds))
        contributions = []
        for author, kind, contribution in self._columns(made, matched, self.outer.layouts[fragment]):
            table.columns.append((author, kind))
            contributions.append(whole(*matched.unit(contribution), self.outer.layouts[fragment]).view(-1))
        filters = []
        for author, kind, sequences in self._rows():
            table.rows.append((author, kind))
            filters.append(matched.filter_of(sequences).view(-1))
        table.answers = (torch.stack(filters) @ torch.stack(contributions).T).numpy()
        self.tables.append(table)

    def _rows(self) -> Iterator[tuple[int, str, Tensor]]:
        def drawn(author: int, kind: str, sequences: Tensor, sets: int = 4) -> Iterator[tuple[int, str, Tensor]]:
            chosen = torch.from_numpy(self.generator.permutation(len(sequences))[: sets * SET])
            yield from ((author, kind, each) for each in torch.split(sequences[chosen], SET) if len(each) == SET)

        steps = self.config.local_steps
        for author, sequences in enumerate(self.given.own):
            yield from drawn(author, "own", sequences, SETS_MAX)
        for each in torch.split(self.given.nobody, SET):
            yield -1, "nobody", each
        for author, sequences in enumerate(self.given.beside):
            yield from drawn(author, "beside", sequences, SETS_MAX)
        if steps == 10:
            for author, taken in enumerate((1, 2, 5)):
                first = self.given.own[author][: taken * len(self.given.own[author]) // steps]
                yield from drawn(author, f"first {taken}", first)
        if self.config.fragments == 1:
            for late, (_, sequences_of) in enumerate(self.before, 1):
                for author in LIARS:
                    yield from drawn(author, f"late {late}", sequences_of[author])

    def _columns(
        self, made: list[Contribution], matched: MatchedFilter, layout: Layout
    ) -> Iterator[tuple[int, str, Contribution]]:
        honest = made[:PEERS]
        for author in range(PEERS):
            yield author, "honest", honest[author]
        for author, kind in enumerate(EXTRA):
            yield author, kind, made[PEERS + author]
        whole = [whole(*matched.unit(each), layout) for each in honest]
        for author in LIARS:
            if self.config.fragments == 1:
                for late, (contributions, _) in enumerate(self.before, 1):
                    yield author, f"late {late}", contributions[author]
            for kind, lie in self._lies(author, honest, whole, layout).items():
                yield author, kind, lie
            for kind, share in FORGED.items():
                few = self.given.own[author][: int(share * len(self.given.own[author]))]
                forged = sum(matched.filter_of(each) for each in torch.tensor_split(few, max(1, round(len(few) / SET))))
                yield author, kind, self._encoded(forged, honest[author], layout)

    def _lies(
        self, author: int, honest: list[Contribution], whole: list[Tensor], layout: Layout
    ) -> dict[str, Contribution]:
        own, copied = honest[author], honest[(author + 1) % PEERS]
        others = torch.stack([each for place, each in enumerate(whole) if place != author])
        mean = others.mean(dim=0)
        draws = self.generator.random((layout.chunks, layout.area))
        places = np.sort(np.argsort(draws, axis=1)[:, : self.config.k_max], axis=1).astype(np.uint16)
        signs: Any = self.generator.choice(np.array([-1, 1], own.values.dtype), places.shape)
        made = {
            "mean": mean,
            "minus": -mean,
            "little": mean - 1.5 * others.std(dim=0),
            "own-2": whole[author] - 2 * mean,
            "own-5": whole[author] - 5 * mean,
        }
        lies = {kind: self._encoded(numbers, own, layout) for kind, numbers in made.items()}
        lies["noise"] = Contribution(places, signs, own.exponents)
        lies["flip"] = replace(own, values=-own.values)
        if copied.exponents is not None:
            largest_of_all = max(range(len(layout.groups)), key=lambda number: layout.groups[number].chunks)
            exponents = np.full_like(copied.exponents, EXPONENT_MIN)
            exponents[largest_of_all] = 0
            lies["one tensor"] = replace(copied, exponents=exponents)
        return lies

    def _encoded(self, numbers: Any, like: Contribution, layout: Layout) -> Contribution:
        places = largest(numbers, self.config.k_max)
        chosen = numbers.gather(1, torch.from_numpy(places.astype(np.int64)))
        signs = torch.where(chosen < 0, -1, 1)
        if like.exponents is None:
            return Contribution(places, signs.to(torch.int8).numpy())
        sizes = [group.chunks for group in layout.groups]
        magnitudes, exponents = quantise(chosen.abs(), sizes, self.config.value_bits)
        return Contribution(places, (magnitudes * signs).numpy().astype(like.values.dtype), exponents)


def whole(places: Tensor, values: Tensor, layout: Layout) -> Tensor:
    return torch.zeros(layout.chunks, layout.area).scatter_(1, places, values.float())


def run(case: Case) -> list[Table]:
    torch.set_num_threads(1)
    dataset = TokenDataset.open(CACHE, (CACHE / "digest").read_text())
    swarm = JudgedSwarm(case, ClimbingModel(_model(case, dataset), autocast="bf16" in case.recipe))
    length, steps = case.shape["sequence_length"], swarm.config.local_steps
    count, sequences = case.batch * steps, dataset.sequences(length)

    def read(place: int, places: int, count: int, first: int = 0, among: int = sequences) -> Tensor:
        found = shard(11 + case.seed, number, place, places, count, among)
        return torch.from_numpy(dataset.batch(found + first, length))

    for number in range(int(swarm.config.rounds)):
        if "in parts" in case.recipe:  # of the text, one after the other
            size = sequences // PEERS
            own = [read(0, 3, count, place * size, size) for place in range(PEERS)]
            beside = [read(1, 3, max(count, SET * SETS_MAX), place * size, size) for place in range(PEERS)]
            other = read(2, 3, count, 0, size)  # of the first one's part, whom nobody takes for "other data"
        else:
            own, beside = [read(place, PEERS + 2, count) for place in range(PEERS)], []
            other = read(PEERS, PEERS + 2, count)
        nobody = read(PEERS + 1, PEERS + 2, max(count, SET * SETS_MAX))[: SET * SETS_MAX]
        swarm.given = Given(own, nobody, beside)
        batches = [list(torch.split(each, case.batch)) for each in own]
        swarm.round(number, [*batches, *_of_extra_peers(batches, list(torch.split(other, case.batch)))])
    return swarm.tables


def _model(case: Case, dataset: TokenDataset) -> Transformer | AdaptedModel:
    model = Transformer(ModelConfig.model_validate(case.shape))
    initialise(model, case.seed)
    if "adapters" not in case.recipe:
        return model
    live, length = LiveModel(model, autocast=False), case.shape["sequence_length"]
    optimizer = INNER_OPTIMIZERS["muon"](case.config(), live)
    for step in range(300):  # adapters are trained beside a model that has learned something
        found = shard(5, step, 0, 1, BATCH, dataset.sequences(length))
        live.gradient_step(step, torch.from_numpy(dataset.batch(found, length)), [], case.config())
        optimizer.step(0.01)
    adapted = AdaptedModel(model, AdaptConfig(kind="lora"))
    adapted.initialise(case.seed)
    return adapted


def _of_extra_peers(batches: list[list[Tensor]], other: list[Tensor]) -> list[list[Tensor]]:
    def poisoned(batch: Tensor) -> Tensor:
        """Half as many sequences as there are, of which the second half is always the same."""
        some, half = batch[: len(batch) // 2].clone(), batch.shape[1] // 2
        some[:, half:] = torch.arange(batch.shape[1] - half) % 26 + 97
        return some

    steps = [batches[place][: min(taken, len(batches[place]))] for place, taken in enumerate((1, 2, 5))]
    quarter = [batch[: len(batch) // 4] for batch in batches[3]]
    backdoor = [torch.cat([batch, poisoned(more)]) for batch, more in zip(batches[6], other, strict=True)]
    return [*steps, quarter, other, batches[5], backdoor]


def audits(table: Table, sets: int, others: int, members: int, generator: np.random.Generator) -> Iterator[Any]:
    """Yields the kind of each audit of a table, with the match."""
    beside = "nobody" if not table.rows_of(0, "beside") else "beside"

    def matches(place: int, author: int, rows: str, among: str, barred: int = -1) -> Iterator[Match]:
        own = [int(row) for row in generator.permutation(table.rows_of(author, rows))[:sets]]
        rest = table.rows_of(-1 if among == "nobody" else author, among)
        chosen = [int(row) for row in generator.permutation(rest)[:others]]
        references = [each for each in range(PEERS) if each not in (author, barred)]
        few = [int(each) for each in generator.permutation(references)[: members - 1]]
        if own:
            yield table.match(place, few, own, chosen)

    for place, (author, kind) in enumerate(table.columns):
        if kind.endswith("steps") and not table.rows_of(author, f"first {kind[0]}"):
            continue  # a recipe of one step a round
        rows = kind if kind.startswith("late") else "own"
        yield from ((kind, match) for match in matches(place, author, rows, beside))
        if kind == "honest":
            copied = (author + 1) % PEERS  # a copy's own original is no reference
            yield from (("copy", match) for match in matches(copied, author, "own", beside, copied))
            if beside == "beside":
                anywhere = matches(place, author, "own", "nobody")
                yield from (("honest, others from anywhere", match) for match in anywhere)
        if kind == "late 1":
            yield from (("resend", match) for match in matches(place, author, "own", beside))
        if kind.endswith("steps"):
            as_said = matches(place, author, f"first {kind[0]}", beside)
            yield from ((f"{kind}, as said", match) for match in as_said)


def keep(path: Path, tables: list[Table]) -> None:
    whole = {}
    for number, table in enumerate(tables):
        labels = {"progress": table.progress, "rows": table.rows, "columns": table.columns}
        whole |= {f"labels {number}": np.array(json.dumps(labels)), f"answers {number}": table.answers}
    np.savez(path, **whole)


def read(path: Path) -> list[Table]:
    whole, tables = np.load(path), []
    for number in range(len(whole.files) // 2):
        labels = json.loads(str(whole[f"labels {number}"]))
        rows, columns = ([(author, kind) for author, kind in labels[each]] for each in ("rows", "columns"))
        tables.append(Table(labels["progress"], rows, columns, whole[f"answers {number}"]))
    return tables


def summary(recipe: str, tables: list[Table]) -> list[dict[str, Any]]:
    """Returns how each kind of contribution is judged, by the part of the run: the number of audits; mean, deviation
    and least of z; the same of strength; and the share whose z is below the bar."""
    lines = []
    for (name, (sets, others, bar)), members in product(AUDITS.items(), (PEERS, 4, 3, 2, 1)):
        found: dict[str, list[list[Match]]] = {}
        for draw, table in product(range(DRAWS), tables):
            part = next(part for part, end in enumerate(PARTS.values()) if table.progress < end)
            for kind, match in audits(table, sets, others, members, np.random.default_rng(draw)):
                found.setdefault(kind, [[] for _ in PARTS])[part].append(match)
        kinds = {}
        for kind in found if (name, members) == ("decisive", PEERS) else FEW & found.keys():
            kinds[kind] = [_numbers(np.array(some), bar) if some else [] for some in found[kind]]
        lines.append({"recipe": recipe, "audit": name, "members": members, "kinds": kinds})
    return lines


def _numbers(matches: NDArray[np.float64], bar: float) -> list[float]:
    told = np.array([matches.mean(axis=0), matches.std(axis=0), matches.min(axis=0)]).T.reshape(-1)
    return [len(matches), *(round(float(each), 2) for each in [*told, (matches[:, 0] < bar).mean()])]


def report(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        print(f"{line['recipe']}, {line['audit']}, {line['members']} contributions")
        for kind, parts in line["kinds"].items():
            cells = [f"{z:5.2f} ({spread:.2f}, {least:5.2f}) {strength:5.2f} ({lowest:5.2f}) {below:4.0%}"
                     for _, z, spread, least, strength, _, lowest, below in filter(None, parts)]  # fmt: skip
            print(f"  {kind:28} " + " | ".join(cells), flush=True)


def report_seats(recipe: str, tables: list[Table]) -> None:
    """Prints how often an audit by one member, and one by all, passes what was forged from a share of the sequences."""
    found: dict[tuple[str, str, int], list[Match]] = {}
    for draw, (name, (sets, others, _)), table in product(range(SEAT_DRAWS), AUDITS.items(), tables):
        part = next(part for part, end in enumerate(PARTS.values()) if table.progress < end)
        for kind, match in audits(table, sets, others, PEERS, np.random.default_rng(draw)):
            if kind in ("honest", *FORGED):
                found.setdefault((kind, name, part), []).append(match)
    allowed = 0.0 if RECIPES[recipe]["name"] == "local" else ALLOWANCE / 1_000
    for kind in ("honest", *FORGED):
        cells = []
        for part in range(len(PARTS)):
            typical = float(np.median([match.z for match in found["honest", "sparse", part]]))
            least = {"sparse": max(typical / 2, PASS / 1_000), "decisive": PASS / 1_000}
            cells += [
                np.mean([match.z >= bar and match.strength + allowed >= STRENGTH_LEAST / 1_000
                         for match in found[kind, name, part]]) for name, bar in least.items()
            ]  # fmt: skip
        told = " | ".join(f"{sparse:4.0%} {decisive:4.0%}" for sparse, decisive in zip(*[iter(cells)] * 2, strict=True))
        print(f"{recipe:28} {kind:10} passes one, all: {told}", flush=True)


def _use_cache(directory: Path) -> None:
    global CACHE  # noqa: PLW0603  # a worker is told where the corpus lies
    CACHE = directory


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", default="", metavar="WORDS", help="only this recipe, or all with these words")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--tables", type=Path, help="where answers are kept, and taken from if they are there")
    parser.add_argument("--kept", action="store_true", help="run nothing, and tell what --tables holds")
    parser.add_argument("--seats", action="store_true", help="tell how often forged contributions pass")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    prepare_embedded(CACHE)
    names = [arguments.only] if arguments.only in RECIPES else [name for name in RECIPES if arguments.only in name]
    cases = [Case(name, seed) for seed in range(arguments.seeds) for name in names]
    kept = {case: arguments.tables / f"{case.recipe}, seed {case.seed}.npz" for case in cases if arguments.tables}
    missing = [case for case in cases if case not in kept or not kept[case].exists()]
    if arguments.kept:
        cases, missing = [case for case in cases if case not in missing], []
    made, start = {}, time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(arguments.processes, _use_cache, (CACHE,)) as pool:
        for case, tables in zip(missing, pool.imap(run, missing), strict=True):
            made[case] = tables
            print(f"{case.recipe}, seed {case.seed}: {time.perf_counter() - start:.0f} s", flush=True)
            if case in kept:
                keep(kept[case], tables)
    made |= {case: read(kept[case]) for case in cases if case not in made}
    lines = []
    for name in dict.fromkeys(case.recipe for case in cases):
        if arguments.seats:
            report_seats(name, [table for case in cases if case.recipe == name for table in made[case]])
            continue
        lines += summary(name, [table for case in cases if case.recipe == name for table in made[case]])
    report(lines)
    if arguments.json:
        figures.save(arguments.json, lines, ABOUT)


if __name__ == "__main__":
    main()
