"""Eight simulated peers at 124M parameters on real text, for as long as there is time: AdamW, distro, local.

Held-out loss, in nats a byte, over time, steps and a peer's bytes. The text is what every machine with torch and
transformers has: their sources and Python's, byte by byte, with a fiftieth held out. AdamW synchronises fully, each
step; its bytes are fp32 gradients. One device does the work of all eight, so seconds compare methods, not swarms.
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
from p2ptrain.config import RecipeConfig
from p2ptrain.learn.assignment import shard
from p2ptrain.learn.data import TokenDataset
from p2ptrain.learn.live import LiveModel
from p2ptrain.learn.model import Transformer, initialise
from p2ptrain.learn.prepare import prepare
from p2ptrain.learn.tokenizer import load_tokenizer

PEERS, PEERS_SMALL = 8, 3
TEXT_BYTES, TEXT_BYTES_SMALL = 48 * 2**20, 2**20
FILE_BYTES_MAX = 2**19  # of one source file: the largest are tables
SOURCES = ("transformers", "torch", "numpy")
EVALUATED = 32  # held-out sequences
WARM_UP_ROUNDS = 10
METHODS: dict[str, dict[str, Any]] = {
    "adamw": {"learning_rate": Fraction(6, 10_000)},
    "distro": {"learning_rate": Fraction(4, 10_000)},
    "local": {"local_steps": 10, "inner_learning_rate": Fraction(6, 10_000), "learning_rate": Fraction(1)},
}


def text_files(size: int) -> list[Path]:
    """Source files of Python, torch and transformers, spread over all of them, up to `size` bytes."""
    library, packages = Path(sysconfig.get_path("stdlib")), Path(torch.__file__).parents[1]
    found = sorted({*library.glob("*.py"), *(each for name in SOURCES for each in (packages / name).rglob("*.py"))})
    chosen, total = [], 0
    for path in np.random.default_rng(0).permutation(np.array(found, dtype=object)):
        if path.is_file() and 0 < (bytes_ := path.stat().st_size) <= FILE_BYTES_MAX and total + bytes_ <= size:
            chosen.append(path)
            total += bytes_
    return chosen


def text(folder: Path, size: int) -> TokenDataset:
    """As one document a file, which is what decides what is held out."""
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
        tokenizer=load_tokenizer(None),
        held_out=Fraction(1, 50),
        progress=lambda done, all_: None,
    )
    return TokenDataset.open(folder / "data", made.digest)


def learn(report: Report, dataset: TokenDataset, method: str, seconds: float) -> dict[str, Any]:
    # Of 256 tokens a model of GPT-2's 124M parameters has more layers.
    config = model_config("tiny") if report.small else model_config("124m", layers=18)
    peers = PEERS_SMALL if report.small else PEERS
    recipe = RecipeConfig.model_validate(
        {"name": "distro" if method == "adamw" else method, "sequences_per_pass": 4, "warmup_rounds": WARM_UP_ROUNDS}
        | METHODS[method]
    )
    model = Transformer(config)
    initialise(model, 0)
    live = LiveModel(model.to(report.device), autocast=report.device.type == "cuda")
    swarm = FullySynchronised(recipe, live) if method == "adamw" else Swarm(recipe, live, peers)
    length, count = config.sequence_length, recipe.sequences_per_pass * recipe.local_steps
    held_out = dataset.held_out_batch(np.arange(min(EVALUATED, dataset.held_out_sequences(length))), length)

    @torch.no_grad()
    def loss() -> float:
        parts = torch.split(torch.from_numpy(held_out).to(report.device), recipe.sequences_per_pass)
        return float(sum(live.loss(part) * len(part) for part in parts) / len(held_out))

    def batches(number: int, peer: int) -> list[torch.Tensor]:
        found = shard(1, number, peer, peers, count, dataset.sequences(length))
        whole = torch.from_numpy(dataset.batch(found, length)).to(report.device)
        return list(torch.split(whole, recipe.sequences_per_pass))

    curve, spent, number = [[0, 0.0, 0, round(loss(), 4)]], 0.0, 0
    while spent < seconds:
        start = time.perf_counter()
        swarm.round(number, [batches(number, peer) for peer in range(peers)])
        wait_for(report.device)
        spent += time.perf_counter() - start
        number += 1
        if number >= 1.4 * max(1, curve[-1][0] // recipe.local_steps) or spent >= seconds:
            sent = number * swarm.payload_bytes
            curve.append([number * recipe.local_steps, round(spent, 2), sent, round(loss(), 4)])
    return {
        "parameters": live.weights.numel(),
        "peers": peers,
        "tokens_a_step": peers * recipe.sequences_per_pass * length,
        "bytes_a_step": swarm.payload_bytes / recipe.local_steps,
        "loss": curve[-1][3],
        "curve": curve,  # steps, seconds, bytes of a peer, held-out loss
    }


def main(report: Report) -> None:
    if report.device.type == "cpu":
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dataset = text(Path(folder), TEXT_BYTES_SMALL if report.small else TEXT_BYTES)
        report.add("text_bytes", dataset.manifest.training.tokens)
        left = len(METHODS)
        for method in METHODS:
            seconds = (report.seconds_left - 5 * left) / left if not report.small else 4.0
            report.add(method, learn(report, dataset, method, max(1.0, seconds)))
            left -= 1


if __name__ == "__main__":
    run_part(__doc__ or "", main)
