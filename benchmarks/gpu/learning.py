"""Eight simulated peers at 124M parameters on real text, for as long as there is time: AdamW, Muon, distro, local.

Held-out loss, in nats a byte, over time, steps and a peer's bytes. The text is what every machine with torch and
transformers has: their sources and Python's, byte by byte, with a fiftieth held out. AdamW and Muon synchronise fully,
each step; their bytes are fp32 gradients. One device does the work of all eight, so seconds compare methods, not
swarms. Of the rounds that fit into the time, a tenth warm up; `local` does not, which takes few rounds.
"""

from __future__ import annotations

import sysconfig
import tempfile
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import Report, model_config, run_part, wait_for
from benchmarks.simulated import FullySynchronised, Swarm
from p2ptrain.config import RECIPES, RecipeConfig
from p2ptrain.data.assignment import shard
from p2ptrain.data.corpus import Reading
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.data.prepare import prepare
from p2ptrain.data.tokenizer import load_tokenizer
from p2ptrain.models.built_in import Transformer, initialise
from p2ptrain.train.live import LiveModel

PEERS, PEERS_SMALL = 8, 3
TEXT_BYTES, TEXT_BYTES_SMALL = 48 * 2**20, 2**20
FILE_BYTES_MAX = 2**19  # of one source file: the largest are tables
SOURCES = ("transformers", "torch", "numpy")
EVALUATED = 32  # held-out sequences
WARM_UP_SHARE = 0.1  # of the rounds
METHODS: dict[str, dict[str, Any]] = {
    "adamw": {"inner_learning_rate": Fraction(6, 10_000)},
    "muon": {"inner": "muon", "inner_learning_rate": Fraction(2, 1_000)},
    "distro": {"learning_rate": Fraction(4, 10_000)},
    "local": {
        "warmup_rounds": 0,
        "local_steps": 10,
        "k": 256,
        "inner_learning_rate": Fraction(2, 1_000),
    },
}


def text_files(size: int) -> list[Path]:
    """Picks source files of Python, torch and transformers, spread evenly, up to `size` bytes."""
    library, packages = Path(sysconfig.get_path("stdlib")), Path(torch.__file__).parents[1]
    found = sorted({*library.glob("*.py"), *(each for name in SOURCES for each in (packages / name).rglob("*.py"))})
    chosen, total = [], 0
    for path in np.random.default_rng(0).permutation(np.array(found, dtype=object)):
        if path.is_file() and 0 < (bytes_ := path.stat().st_size) <= FILE_BYTES_MAX and total + bytes_ <= size:
            chosen.append(path)
            total += bytes_
    return chosen


def text(folder: Path, size: int) -> TokenDataset:
    """Makes each file a document, the unit of the held-out split."""
    copies = folder / "text"
    copies.mkdir()
    files = []
    for number, path in enumerate(text_files(size)):
        files.append(copies / f"{number}.txt")
        files[-1].write_text(path.read_text(errors="replace"))
    made = prepare(
        folder / "data",
        files,
        embedded=False,
        how=Reading(tokenizer=load_tokenizer(None)),
        held_out=Fraction(1, 50),
        progress=lambda *_: None,
    )
    return TokenDataset.open(folder / "data", made.digest)


class Peers:
    """A model, reset for each method, and the data of its peers."""

    def __init__(self, report: Report, dataset: TokenDataset) -> None:
        # Of 256 tokens a model of GPT-2's 124M parameters has more layers.
        config = model_config("tiny") if report.small else model_config("124m", layers=18)
        self.device, self.dataset, self.length = report.device, dataset, config.sequence_length
        self.count = PEERS_SMALL if report.small else PEERS
        model = Transformer(config)
        initialise(model, 0)
        self.live = LiveModel(model.to(self.device), autocast=self.device.type == "cuda")
        self.first = self.live.weights.clone()
        chosen = np.arange(min(EVALUATED, dataset.held_out_sequences(self.length)))
        self.held_out = torch.from_numpy(dataset.held_out_batch(chosen, self.length)).to(self.device)

    def swarm(self, method: str, warmup_rounds: int) -> Swarm | FullySynchronised:
        recipe = RecipeConfig.model_validate(
            {"name": method if method in RECIPES else "distro", "sequences_per_pass": 4, "warmup_rounds": warmup_rounds}
            | METHODS[method]
        )
        self.live.weights.copy_(self.first)
        if method not in RECIPES:
            return FullySynchronised(recipe, self.live)
        return Swarm(recipe, self.live, self.count)

    @torch.no_grad()
    def loss(self, sequences: int) -> float:
        parts = torch.split(self.held_out, sequences)
        return float(sum(self.live.loss(part) * len(part) for part in parts) / len(self.held_out))

    def round_seconds(self, swarm: Swarm | FullySynchronised, number: int) -> float:
        """Runs a round, and returns its duration."""
        start, each = time.perf_counter(), swarm.config.sequences_per_pass
        batches = []
        for peer in range(self.count):
            sequences = self.dataset.sequences(self.length)
            found = shard(1, number, peer, self.count, each * swarm.config.local_steps, sequences)
            whole = torch.from_numpy(self.dataset.batch(found, self.length)).to(self.device)
            batches.append(list(torch.split(whole, each)))
        swarm.round(number, batches)
        wait_for(self.device)
        return time.perf_counter() - start

    def warmup_rounds(self, method: str, seconds: float) -> int:
        """Chooses the warm-up from the time of two trial rounds; a recipe with its own warm-up keeps it."""
        if "warmup_rounds" in METHODS[method]:
            return METHODS[method]["warmup_rounds"]
        swarm = self.swarm(method, 0)
        each = [self.round_seconds(swarm, number) for number in range(2)][1]
        return max(1, int(WARM_UP_SHARE * seconds / each))


def learn(report: Report, peers: Peers, method: str, seconds: float) -> None:
    """Trains, and reports after each point of the curve, so that a run that is cut off has reported its figures."""
    warmup_rounds = peers.warmup_rounds(method, seconds)
    swarm = peers.swarm(method, warmup_rounds)
    recipe = swarm.config
    curve: list[list[float]] = []  # steps, seconds, bytes of a peer, held-out loss
    spent, last, number, told = 0.0, 0.0, 0, 0

    def tell() -> None:
        loss = round(peers.loss(recipe.sequences_per_pass), 4)
        curve.append([number * recipe.local_steps, round(spent, 2), number * swarm.payload_bytes, loss])
        figures = {
            "parameters": peers.live.weights.numel(),
            "peers": peers.count,
            "tokens_a_step": peers.count * recipe.sequences_per_pass * peers.length,
            "bytes_a_step": swarm.payload_bytes / recipe.local_steps,
            "rounds": number,
            "warmup_rounds": warmup_rounds,
            "loss": loss,
            "curve": curve,
        }
        report.add(method, figures)

    tell()
    while not number or spent + last < seconds:
        last = peers.round_seconds(swarm, number)
        spent += last
        number += 1
        if number >= 1.4 * max(1, told) or spent + last >= seconds:
            told = number
            tell()


def main(report: Report) -> None:
    if report.device.type == "cpu":
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dataset = text(Path(folder), TEXT_BYTES_SMALL if report.small else TEXT_BYTES)
        report.add("text_bytes", dataset.manifest.training.tokens)
        peers, left = Peers(report, dataset), len(METHODS)
        for method in METHODS:
            seconds = (report.seconds_left - 5 * left) / left if not report.small else 2.0
            learn(report, peers, method, max(1.0, seconds))
            left -= 1


if __name__ == "__main__":
    run_part(__doc__ or "", main)
