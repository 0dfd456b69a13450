"""Liars with valid payloads: the held-out loss with some of them, over the loss with these members absent, and honest.

    python benchmarks/poison.py [--only WORDS] [--liars 3/16] [--rule NAME] [--lie NAME] [--steps 200] [--k 64]
        [--batch 2] [--rate 1/100] [--size 0.1m] [--seeds 1] [--json FILE] [--processes N]

Simulated peers as in benchmarks/learning.py (0.1M or 0.8M parameters, bytes), some of whom tell one of the lies of
benchmarks/attacks.py with payloads that the exact path accepts; by default one of 2, 4, 7 and 16, six lies, no rule.
`--rule` names robust rules (p2ptrain/exact/rules.py), which expect as many liars as there are; swarms that their theory
does not allow are left out. With `--lie honest` nobody lies: what a rule costs. With `--json` a run that was broken off
goes on.

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

import figures
import numpy as np
import torch
from attacks import LIES, TURNS, join_liars, written
from audited import AuditedSwarm
from simulated import Swarm

from p2ptrain.config import ModelConfig, RecipeConfig
from p2ptrain.config.recipe import RULES
from p2ptrain.data.assignment import shard
from p2ptrain.data.corpus import Reading
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.data.prepare import prepare
from p2ptrain.data.tokenizer import load_tokenizer
from p2ptrain.models.built_in import Transformer, initialise
from p2ptrain.train.live import LiveModel

# The figures are about this code, and old when it has changed.
ABOUT = ("p2ptrain/exact/rules.py", "p2ptrain/exact/aggregate.py")
CACHE = Path(tempfile.gettempdir()) / f"p2ptrain-poison-{os.getpid()}"
MODELS = {
    "0.1m": ModelConfig(dim=64, ffn_dim=192, layers=2, heads=4, kv_heads=2, sequence_length=64),
    "0.8m": ModelConfig(dim=128, ffn_dim=384, layers=4, heads=4, kv_heads=2, sequence_length=128),
}
USUAL_LIES = ("against", "away", "noise", "tiny", "spiked", "alone")
HONEST = "honest"  # in the place of a lie
USUAL_SWARMS = ("1/2", "1/4", "1/7", "1/16")
EVALUATED = 64
RATES = {"normalised": "1/1000", "mean": "2/1000", "sign": "1/1000"}  # of the outer rule, where it has a size
KINDS = [(name, outer) for name in ("distro", "demo", "local") for outer in ("normalised", "mean", "sign")]


@dataclass(frozen=True)
class Setting:
    """What all runs of a table have in common."""

    steps: int = 200
    k: int = 0  # 0: 64 of `local`, else 32
    batch: int = 2
    rate: str = "1/100"  # of the local steps
    size: str = "0.1m"


@dataclass(frozen=True)
class Case:
    """A swarm of `peers`, `liars` of which lie; `lie` is empty if they are absent."""

    recipe: str
    outer: str
    rule: str
    peers: int
    liars: int
    lie: str = ""
    seed: int = 0
    setting: Setting = Setting()
    audits: bool = False

    def config(self) -> RecipeConfig:
        is_local, setting = self.recipe == "local", self.setting
        rate = Fraction(RATES[self.outer]) * (5 if is_local else 1)
        robust = {"rule": self.rule, RULES[self.rule].setting: self.liars} if self.rule in RULES else {}
        rounds = setting.steps // (10 if is_local else 1)
        return RecipeConfig.model_validate(
            robust
            | {
                "name": self.recipe,
                "outer": self.outer,
                "k": setting.k or (64 if is_local else 32),
                "local_steps": 10 if is_local else 1,
                "value_bits": 3 if self.recipe == "demo" else 1,
                "inner_learning_rate": Fraction(setting.rate),
                "sequences_per_pass": setting.batch,
                "learning_rate": Fraction(1) if is_local and self.outer == "mean" else rate,
                "schedule": "linear",
                "rounds": rounds,
                "warmup_rounds": max(1, rounds // 15),
                "final_ratio": Fraction(1, 10),
            }
        )

    @property
    def absent(self) -> Case:
        """The same swarm without a rule, and without its liars."""
        return replace(self, lie="", rule="all", audits=False)

    @property
    def honest(self) -> Case:
        """The same swarm without a rule, and all of it honest."""
        return replace(self, lie=HONEST, rule="all", liars=0, audits=False)


def swarm_of(case: Case, live: LiveModel, peers: int) -> Swarm:
    return AuditedSwarm(case.config(), live, peers, case.seed) if case.audits else Swarm(case.config(), live, peers)


def run(case: Case) -> dict[str, Any]:
    torch.set_num_threads(1)
    peers = case.peers - (0 if case.lie else case.liars)
    dataset, sizes = TokenDataset.open(CACHE, (CACHE / "digest").read_text()), MODELS[case.setting.size]
    model = Transformer(sizes)
    initialise(model, case.seed)
    live = LiveModel(model, autocast=False)
    swarm = swarm_of(case, live, peers)
    config, honest = swarm.config, peers - (case.liars if case.lie not in ("", HONEST) else 0)
    liars = join_liars(swarm, case.lie, peers - honest)
    length, sequences = sizes.sequence_length, dataset.sequences(sizes.sequence_length)
    for number in range(config.rounds):
        batches = []
        for peer in range(peers):
            found = shard(11 + case.seed, number, peer, peers, config.round_sequences, sequences)
            batches.append(list(torch.split(torch.from_numpy(dataset.batch(found, length)), config.sequences_per_pass)))
        for place, liar in enumerate(liars):
            batches[honest + place] = liar.sequences(batches[honest + place], batches[place % honest])
        is_alone = case.lie == "alone" and number == config.rounds // 3
        swarm.round(number, batches, alone=peers - 1 if is_alone else None)
    held_out = torch.from_numpy(dataset.held_out_batch(np.arange(EVALUATED), length))
    with torch.no_grad():
        loss = float(live.model.loss(held_out))
        answered = {"written": written(model, held_out)} if case.lie.startswith("backdoor") else {}
    if isinstance(swarm, AuditedSwarm):
        answered |= {"suspended": {str(peer): at for peer, at in swarm.suspended.items()}, "audited": swarm.share}
    return {**asdict(case), "loss": loss if math.isfinite(loss) else None, **answered}


def _use_cache(directory: Path) -> None:
    global CACHE  # noqa: PLW0603  # a worker is told where the corpus lies
    CACHE = directory


def prepare_embedded(directory: Path) -> None:
    """Prepares the text that every Python carries, with a fiftieth held out; `digest` beside it names its manifest."""
    tokenizer, share = load_tokenizer(None), Fraction(2, 100)
    how = Reading(tokenizer=tokenizer)
    made = prepare(directory, [], embedded=True, how=how, held_out=share, progress=lambda *_: None)
    (directory / "digest").write_text(made.digest)


def cases_of(arguments: argparse.Namespace) -> list[Case]:
    """Returns the runs of a table that the rules' theories allow; what the others are compared with comes first."""
    setting = Setting(arguments.steps, arguments.k, arguments.batch, arguments.rate, arguments.size)
    rules, lies = arguments.rule or ["all"], arguments.lie or USUAL_LIES
    found: dict[Case, None] = {}  # in order
    for name, outer in KINDS:
        if not any(word in f"{name} {outer}" for word in arguments.only or [""]):
            continue
        for liars, peers in (map(int, each.split("/")) for each in arguments.liars or USUAL_SWARMS):
            for seed in range(arguments.seeds):
                absent = Case(name, outer, "all", peers, liars, "", seed, setting)
                found |= dict.fromkeys([absent] + [absent.honest] * bool(arguments.rule))
                allowed = [rule for rule in rules if rule not in RULES or RULES[rule].least(liars) <= peers]
                lying = [replace(absent, rule=rule, lie=lie) for rule in allowed for lie in lies]
                found |= dict.fromkeys(lying)
                found |= dict.fromkeys(replace(each, audits=True) for each in lying if arguments.audits)
    return list(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--only", action="append", metavar="WORDS", help="only recipes and outer rules with these words"
    )
    parser.add_argument("--liars", action="append", metavar="N/M", help="so many of so many; may be repeated")
    parser.add_argument("--rule", action="append", choices=["all", *RULES], help="may be repeated")
    parser.add_argument(
        "--lie", action="append", metavar="NAME", choices=[HONEST, *LIES, *(lie + TURNS for lie in LIES)]
    )
    parser.add_argument("--steps", type=int, default=Setting.steps)
    parser.add_argument("--k", type=int, default=Setting.k)
    parser.add_argument("--batch", type=int, default=Setting.batch, help="sequences of a step")
    parser.add_argument("--rate", default=Setting.rate, help="of the local steps, at most")
    parser.add_argument("--size", choices=MODELS, default=Setting.size, help="parameters")
    parser.add_argument(
        "--audits", action="store_true", help="also with members that audit each other; needs 32 sequences a round"
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    prepare_embedded(CACHE)
    cases, start = cases_of(arguments), time.perf_counter()
    kept = figures.rows_of(arguments.json) if arguments.json else []
    usual = asdict(Case("", "", "", 0, 0))  # keys that a kept row, or its setting, may lack
    rows = {}
    for row in kept:
        row["setting"] = usual["setting"] | row.get("setting", {})
        rows[json.dumps({key: row.get(key, usual[key]) for key in usual})] = row
    losses: dict[Case, float] = {}
    missing = [case for case in cases if json.dumps(asdict(case)) not in rows]
    with multiprocessing.get_context("spawn").Pool(arguments.processes, _use_cache, (CACHE,)) as pool:
        made = pool.imap(run, missing)
        for case in cases:
            row = rows.setdefault(key := json.dumps(asdict(case)), {}) or next(made)
            rows[key] = row
            losses[case] = math.inf if row["loss"] is None else row["loss"]
            if case.lie and case.liars:
                tell(case, losses, row)
            if arguments.json:
                figures.save(arguments.json, list(rows.values()), ABOUT)
    print(f"{len(missing)} runs, {time.perf_counter() - start:.0f} s")


def tell(case: Case, losses: dict[Case, float], row: dict[str, Any]) -> None:
    loss, absent = losses[case], losses[case.absent]
    told = f"{loss:7.3f} / {absent:6.3f} = {loss / absent:6.3f}"
    told += f", over {losses[case.honest]:6.3f} = {loss / losses[case.honest]:6.3f}" if case.honest in losses else ""
    told += f"  {case.recipe} {case.outer}, " + ("" if case.rule == "all" else f"{case.rule}, ")
    number = "one" if case.liars == 1 else f"{case.liars}"
    told += f"{number} of {case.peers}: {case.lie}"
    if case.audits:
        liars = [at for peer, at in row["suspended"].items() if int(peer) >= case.peers - case.liars]
        told += f", audited: {len(liars)} suspended by round {max(liars, default=0)}, "
        told += f"{len(row['suspended']) - len(liars)} honest, {row['audited']:.1%} of training"
    print(told + (f", {row['written']:.0%} of the answer" if "written" in row else ""), flush=True)


if __name__ == "__main__":
    main()
