"""What a node beside a script costs it: the time of a step, and memory.

    OMP_NUM_THREADS=1 python benchmarks/library.py [--sizes 1m 10m] [--rounds 12] [--json FILE]

The built-in model in a plain loop with AdamW on one thread, and the same loop with `swarm.step`, alone in its run, in
turns of a round of ten steps. Told are the medians of a round's time divided by its steps, and their ratio: what is
more is copying the weights both ways, the contribution, its agreement and its application: the last step of a round
waits for them, which is told as well, because it is steadier where other programs want the cores. The memory is that of
the node's process and its p2pd; the script's own grows by the weights that both share.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
import torch

import p2ptrain
from p2ptrain.config import MODEL_PRESETS, ModelConfig
from p2ptrain.models.built_in import Transformer

STEPS, SEQUENCES = 10, 8


def measure(size: str, rounds: int) -> dict[str, Any]:
    """Returns the figures of one size."""
    config = ModelConfig.model_validate({"preset": size})
    model, plain = Transformer(config), Transformer(config)
    for each in (model, plain):
        each.initialise(1)
    batch = torch.randint(256, (SEQUENCES, config.sequence_length + 1))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-4) for each in (model, plain)]
    script = psutil.Process()
    run = {"name": size, "model": {"sequence_length": config.sequence_length}, "recipe": {"local_steps": STEPS}}

    def of_a_round(net: Transformer, end: Callable[[torch.Tensor], object]) -> tuple[float, float]:
        """Returns the seconds of a step, and of the last one's end."""
        began = perf_counter()
        for _ in range(STEPS):
            loss = net.loss(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            before = perf_counter()
            end(loss)
        now = perf_counter()
        return (now - began) / STEPS, now - before

    def end_plainly(loss: torch.Tensor) -> None:
        optimizers[1].step()
        optimizers[1].zero_grad(set_to_none=True)

    with tempfile.TemporaryDirectory() as folder:
        options = {"run": run, "directory": Path(folder) / "node", "listen": ["/ip4/127.0.0.1/tcp/0"]}
        with p2ptrain.start(model, optimizers[0], **options) as swarm:  # type: ignore[arg-type]
            turns = [(of_a_round(plain, end_plainly), of_a_round(model, swarm.step)) for _ in range(rounds)][2:]
            node = [each for each in script.children(recursive=True) if each.is_running()]
            memory = {each.name(): each.memory_info().rss / 2**20 for each in node}
    plain_steps, plain_ends, steps, ends = zip(*((*one, *other) for one, other in turns), strict=True)
    end_seconds = statistics.median(ends) - statistics.median(plain_ends)
    return {
        "parameters": sum(each.numel() for each in model.parameters()),
        "step_seconds": statistics.median(plain_steps),
        "step_seconds_with_node": statistics.median(steps),
        "ratio": statistics.median(one / other for one, other in zip(steps, plain_steps, strict=True)),
        "end_seconds": end_seconds,
        "memory_mib": memory,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=[*MODEL_PRESETS], default=["1m", "10m"])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    os.environ |= {"P2PTRAIN_NETWORK__NAT": "false", "P2PTRAIN_HTTP__PORT": "0", "P2PTRAIN_DEVICE__THREADS": "1"}
    found = {size: measure(size, chosen.rounds) for size in chosen.sizes}
    for size, each in found.items():
        memory = ", ".join(f"{name} {mib:.0f} MiB" for name, mib in each["memory_mib"].items())
        alone, beside = 1e3 * each["step_seconds"], 1e3 * each["step_seconds_with_node"]
        share = each["end_seconds"] / each["step_seconds"] / STEPS
        print(f"{size}: {alone:.1f} ms a step alone, {beside:.1f} with a node, ratio {each['ratio']:.3f}; ", end="")
        print(f"a round's end takes {1e3 * each['end_seconds']:.0f} ms, {share:.1%} of it; {memory}")
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
