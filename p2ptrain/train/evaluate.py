"""Measures a model's held-out loss: the mean, in nats, over the tokens that are learned."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from p2ptrain.data.dataset import TokenDataset
from p2ptrain.data.packing import Packing
from p2ptrain.errors import DataError


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A held-out loss, and what it was measured on."""

    loss: float  # nats a token
    error: float  # its standard error, estimated from the passes; nan if there was only one
    tokens: int  # that are learned
    sequences: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


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
        batch = packing.batch(dataset.held_out_batch(positions, length), positions)
        if learned := packing.learned(batch):
            losses.append(float(loss(batch.to(device))))
            weights.append(learned)
        on_pass(start + len(positions), count)
    if not (tokens := sum(weights)):
        fix = "Measure more sequences, or prepare the data with a larger --held-out"
        raise DataError(f"no held-out token is learned. {fix}")
    mean = sum(each * weight for each, weight in zip(losses, weights, strict=True)) / tokens
    return Evaluation(mean, _error(losses, weights, mean), tokens, count)


def _error(losses: list[float], weights: list[int], mean: float) -> float:
    """Returns the standard error of a mean of passes that weigh differently."""
    if len(losses) < 2:
        return math.nan
    spread = sum((weight * (each - mean)) ** 2 for each, weight in zip(losses, weights, strict=True))
    return math.sqrt(spread * len(losses) / (len(losses) - 1)) / sum(weights)
