"""Processor time of an inner step, AdamW's and Muon's, beside that of the gradient it follows.

    OMP_NUM_THREADS=1 python benchmarks/inner_steps.py [--sizes 1m 10m 100m] [--sequences 4] [--turns 5] [--half]

One thread, the presets' sequence lengths. The gradient's time grows with the sequences of a step and Muon's does
not: at the batch sizes of real training its share vanishes. Medians of turns, in which all are measured once.
"""

from __future__ import annotations

import argparse
from statistics import median
from time import process_time

import torch

from p2ptrain.config import ModelConfig, RecipeConfig
from p2ptrain.data.packing import Packing
from p2ptrain.models.built_in import Transformer, initialise
from p2ptrain.train.inner import INNER_OPTIMIZERS
from p2ptrain.train.live import LiveModel


def measure(preset: str, sequences: int, turns: int, is_half: bool) -> dict[str, float]:
    """Returns the seconds of a gradient, and of a step of each inner optimizer."""
    config = ModelConfig(preset=preset)
    model = Transformer(config)
    initialise(model, 0)
    live = LiveModel(model, autocast=is_half)
    recipe = RecipeConfig(sequences_per_pass=sequences)
    batch = torch.randint(256, (sequences, config.sequence_length + 1), generator=torch.Generator().manual_seed(1))
    other = Transformer(config)
    initialise(other, 0)
    apart = LiveModel(other, autocast=is_half, packing=Packing(document_end=0))
    seconds: dict[str, list[float]] = {"gradient": [], "apart": [], "adamw": [], "muon": []}
    optimizers = {name: kind(recipe, live) for name, kind in INNER_OPTIMIZERS.items()}
    for turn in range(turns + 1):
        for name, found in seconds.items():
            start = process_time()
            if name == "gradient":
                live.gradient_step(0, batch, [], recipe)
            elif name == "apart":
                apart.gradient_step(0, batch, [], recipe)
            else:
                optimizers[name].step(1e-4)
            if turn:  # the first one warms up
                found.append(process_time() - start)
            live.gradient_step(0, batch, [], recipe)  # the optimizers overwrite it
    return {name: median(found) for name, found in seconds.items()} | {"parameters": live.weights.numel()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--sizes", nargs="+", default=["1m", "10m", "100m"])
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--half", action="store_true", help="in bf16")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for preset in arguments.sizes:
        found = measure(preset, arguments.sequences, arguments.turns, arguments.half)
        gradient = found["gradient"]
        print(
            f"{found['parameters']:12,} parameters, {arguments.sequences} sequences: "
            f"gradient {1e3 * gradient:,.0f} ms, documents apart {found['apart'] / gradient:.2f}, "
            f"AdamW {1e3 * found['adamw']:,.1f} ms ({found['adamw'] / gradient:.2f}), "
            f"Muon {1e3 * found['muon']:,.1f} ms ({found['muon'] / gradient:.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
