"""The model as it is being trained: weights and gradients as two flat tensors, and one checked step.

Flat, because the agreed state is one sequence of bytes: its digest, its pieces and its copies need no
walk over parameters, and neither do the norm of a gradient or an optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from p2ptrain.config import RecipeConfig
from p2ptrain.errors import TrainingError
from p2ptrain.learn.model import Transformer


@dataclass(frozen=True, slots=True)
class StepResult:
    """One local step: mean loss in nats a token, tokens seen, norm of the gradient before clipping."""

    loss: float
    tokens: int
    gradient_norm: float


class LiveModel:
    """A model whose parameters are views of `weights` and whose gradients are views of `gradient`."""

    def __init__(self, model: Transformer, *, autocast: bool) -> None:
        self.model, self.autocast = model, autocast
        parameters = list(model.parameters())
        self.names = [name for name, _ in model.named_parameters()]
        self.shapes = [tuple(parameter.shape) for parameter in parameters]
        self.weights = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        self.gradient = torch.zeros_like(self.weights)
        for parameter, weights, gradient in zip(
            parameters, self.parts(self.weights), self.parts(self.gradient), strict=True
        ):
            parameter.data = weights
            parameter.grad = gradient

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat tensor in the parameters' shapes."""
        pieces = torch.split(flat, [math.prod(shape) for shape in self.shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def loss(self, batch: Tensor) -> Tensor:
        with torch.autocast(batch.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            return self.model.loss(batch)

    def gradient_step(self, step: int, batch: Tensor, positions: Sequence[int], recipe: RecipeConfig) -> StepResult:
        """Leave the clipped gradient of the mean loss over `batch` [sequences, length + 1] in `gradient`.

        A loss or gradient that is not finite raises TrainingError: it says which step and which sequences, and
        nothing that was computed from it can reach a contribution.
        """
        self.gradient.zero_()
        passes = torch.split(batch, recipe.sequences_per_pass)
        total = torch.zeros((), device=batch.device)
        for part in passes:
            loss = self.loss(part) / len(passes)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        norm = float(torch.linalg.vector_norm(self.gradient))
        for what, value in (("the loss", float(total)), ("the gradient", norm)):
            if not math.isfinite(value):
                self.gradient.zero_()
                raise TrainingError(what, step=step, positions=list(positions))
        clip = float(recipe.clip)
        if clip and norm > clip:
            self.gradient.mul_(clip / norm)
        return StepResult(float(total), batch.shape[0] * (batch.shape[1] - 1), norm)
