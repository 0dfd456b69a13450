"""Measures a model's held-out loss: the mean, in nats, over the tokens that are learned. Or runs tasks of EleutherAI's
lm-evaluation-harness on it, in a process of its own.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from p2ptrain.data.dataset import TokenDataset
from p2ptrain.data.packing import Packing
from p2ptrain.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A held-out loss, and what it was measured on."""

    loss: float  # nats a token
    error: float  # its standard error, estimated from the passes; nan if there was only one
    tokens: int  # that are learned
    sequences: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


@torch.no_grad()
def evaluate(
    loss: Callable[[Tensor], Tensor],
    dataset: TokenDataset,
    packing: Packing,
    length: int,
    *,
    sequences: int = 0,
    at_a_time: int = 1,
    device: torch.device = torch.device("cpu"),  # noqa: B008  (it has no state)
    on_pass: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Measures the mean loss of the first `sequences` held-out sequences of `length` tokens; 0: of all."""
    held_out = dataset.held_out_sequences(length)
    count = min(sequences or held_out, held_out)
    if not count:
        what = f"the held-out split is shorter than one sequence of {length + 1} tokens"
        raise DataError(f"{what}. Prepare the data with a larger --held-out")
    losses, weights = [], []
    for start in range(0, count, at_a_time):
        positions = np.arange(start, min(start + at_a_time, count))
        batch = torch.from_numpy(dataset.held_out_batch(positions, length)).to(device)
        if learned := packing.learned(batch):
            losses.append(float(loss(batch)))
            weights.append(learned)
        on_pass(start + len(positions), count)
    tokens = sum(weights)
    if not tokens:
        what = "no held-out token is learned"
        raise DataError(f"{what}. Measure more sequences, or prepare the data with a larger --held-out")
    mean = sum(each * weight for each, weight in zip(losses, weights, strict=True)) / tokens
    return Evaluation(mean, _error(losses, weights, mean), tokens, count)


def _error(losses: list[float], weights: list[int], mean: float) -> float:
    """Returns the standard error of a mean of passes that weigh differently."""
    if len(losses) < 2:
        return math.nan
    spread = sum((weight * (each - mean)) ** 2 for each, weight in zip(losses, weights, strict=True))
    return math.sqrt(spread * len(losses) / (len(losses) - 1)) / sum(weights)


def check_tasks() -> None:
    """Raises ConfigError if the harness is not installed."""
    if find_spec("lm_eval") is None:
        fix = "pip install 'p2ptrain[eval]'"
        raise ConfigError("tasks take EleutherAI's lm-evaluation-harness", key="--tasks", fix=fix)


def run_tasks(model: Path, tasks: str, *, limit: int, first_token: int, device: str) -> None:
    """Runs tasks on an exported model; the harness prints their table.

    tasks: names or files, with commas; limit: examples of each, 0: all; first_token: what a text follows
    """
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--tasks", tasks, "--device", device]
    command += ["--model_args", f"pretrained={model},dtype=float32,prefix_token_id={first_token}"]
    command += ["--limit", str(limit)] if limit else []
    kept = {key: each for key, each in os.environ.items() if key != "HF_HUB_OFFLINE"}  # tasks come from the hub
    status = subprocess.run(command, env=kept, check=False).returncode  # noqa: S603  # our own Python
    if status:
        raise DataError(f"lm-eval ended with status {status}; it says why above")
