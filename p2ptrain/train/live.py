"""The model in training: weights and gradients as two flat tensors, and one checked step.

Flat, because the agreed state is one sequence of bytes: its digest, pieces and copies need no loop over parameters, and
neither does the norm of a gradient or an optimizer."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from p2ptrain.config import RecipeConfig, RunConfig
from p2ptrain.data.packing import PLAIN, Packing
from p2ptrain.digest import digest
from p2ptrain.errors import MemoryShortError, TrainingError
from p2ptrain.exact.kernels.launches import to_card
from p2ptrain.exact.shortage import SETTINGS_THAT_HELP, SMALLER, is_out_of_memory, memory_taken
from p2ptrain.models.built_in import Model
from p2ptrain.share import Share

if TYPE_CHECKING:
    from p2ptrain.train.private import Privacy  # which needs more packages

NOISE_BLOCK = 2**20  # numbers that are drawn at a time

log = logging.getLogger("p2ptrain.train")


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a local step: mean loss in nats per learned token, tokens seen, gradient norm before clipping."""

    loss: float
    tokens: int
    gradient_norm: float
    learned: int  # tokens that count in the loss


def mean_loss(results: Sequence[StepResult]) -> float | None:
    """Returns the mean loss of some steps, in which each learned token counts alike; None if none was learned."""
    learned = sum(result.learned for result in results)
    return sum(result.loss * result.learned for result in results) / learned if learned else None


def pass_sequences(recipe: RecipeConfig, limit: int, device: str) -> int:
    """Returns the number of sequences of a pass: as many as the recipe says, or the device's limit. A card may take
    more of a step at a time than the recipe says: it begins fewer operations."""
    most = recipe.step_sequences if device == "cuda" else recipe.sequences_per_pass
    return min(most, limit or recipe.sequences_per_pass)


def norm_of(flat: Tensor) -> float:
    """Returns the norm. In fp32 that of 20 million numbers comes out 0.6 % too small, and a clip would not hold."""
    return float(torch.linalg.vector_norm(flat, dtype=torch.float64))


def clip_factor(loss: float, norm: float, step: int, positions: Sequence[int], recipe: RecipeConfig) -> float:
    """Returns the factor that clips a gradient of this norm. TrainingError if the norm or the loss is not finite."""
    for what, value in (("the loss", loss), ("the gradient", norm)):
        if not math.isfinite(value):
            raise TrainingError(what, step=step, positions=list(positions))
    clip = float(recipe.clip)
    return clip / norm if clip and norm > clip else 1.0


def _does_not_fit(tokens: int, device: torch.device) -> MemoryShortError:
    what = f"a pass of one sequence of {tokens} tokens does not fit: {memory_taken(device)}"
    return MemoryShortError(f"{what}. {SMALLER}, and so does a run with a smaller model")


@contextmanager
def drawing(
    run: RunConfig, device: torch.device, share: Share, step: int, rank: int = 0, *, is_drawn: bool
) -> Iterator[None]:
    """Seeds what a step draws, if anything: a repeated training gives the same bits, and each rank draws its own."""
    if not is_drawn:
        yield
        return
    seed_of = json.dumps([run.seed, share.round, share.place, step, *([rank] if rank else [])]).encode()
    seed = int.from_bytes(digest("dropout", seed_of)[:8], "little") >> 1
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


class LiveModel:
    """A model whose parameters are views of `weights` and whose gradients are views of `gradient`.

    sequences_per_pass: this device's limit (`pass_sequences`), halved when memory runs out; 0: none
    half_state: whether a recipe keeps what no other node sees in bf16; packing: how a batch is read
    privacy: what a gradient may tell of a sequence"""

    def __init__(
        self,
        model: Model,
        *,
        autocast: bool,
        sequences_per_pass: int = 0,
        half_state: bool = False,
        packing: Packing = PLAIN,
        privacy: Privacy | None = None,
    ) -> None:
        self.model, self.autocast, self.sequences_per_pass, self.packing = model, autocast, sequences_per_pass, packing
        self.privacy = privacy
        self.state_type = torch.bfloat16 if half_state else torch.float32
        parameters = list(model.parameters())
        self.names = [name for name, _ in model.named_parameters()]
        outer = {id(matrix) for matrix in model.vocabulary_matrices()}
        self.is_hidden_matrix = [each.dim() == 2 and id(each) not in outer for each in parameters]
        self.shapes = [tuple(parameter.shape) for parameter in parameters]
        self.weights = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        self.gradient = torch.zeros_like(self.weights)
        flat = self.parts(self.weights), self.parts(self.gradient)
        for parameter, weights, gradient in zip(parameters, *flat, strict=True):
            parameter.data, parameter.grad = weights, gradient

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Splits a flat tensor into views of the parameters' shapes."""
        pieces = torch.split(flat, [math.prod(shape) for shape in self.shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def set_sequences_per_pass(self, count: int) -> None:
        self.sequences_per_pass = count

    def sequences_at_a_time(self, recipe: RecipeConfig) -> int:
        return pass_sequences(recipe, self.sequences_per_pass, self.weights.device.type)

    def loss(self, batch: Tensor) -> Tensor:
        # A pass uses each weight only once, so a cache of cast weights would only take memory.
        with torch.autocast(batch.device.type, dtype=torch.bfloat16, enabled=self.autocast, cache_enabled=False):
            return self.packing.loss(self.model, batch)

    def gradient_step(self, step: int, batch: Tensor, positions: Sequence[int], recipe: RecipeConfig) -> StepResult:
        """Computes the clipped gradient of the mean loss over `batch` in `gradient`.

        batch: what `packing` has made, in main memory or, which waits where it is masked, on the device

        A loss or gradient that is not finite raises TrainingError, which names the step and the sequences; nothing
        computed from it can reach a contribution. If memory runs out, this step is repeated, and all later ones taken,
        with half as many sequences per pass; MemoryShortError if not even one fits."""
        if self.privacy is None:
            numbers = [self.gradient_of(batch, recipe), torch.linalg.vector_norm(self.gradient)]
            total, norm = torch.stack(numbers).tolist()  # a step's one wait: what is not finite must not be learned
        else:
            total = self._private_gradient(batch, self.privacy)
            norm = float(torch.linalg.vector_norm(self.gradient))
        self.clip_gradient(total, norm, step, positions, recipe)
        return StepResult(total, self.packing.tokens(batch), norm, self.packing.learned(batch))

    def clip_gradient(
        self, loss: float, norm: float, step: int, positions: Sequence[int], recipe: RecipeConfig
    ) -> None:
        """Clips the gradient, which has this norm. TrainingError if the norm or the loss is not finite."""
        try:
            factor = clip_factor(loss, norm, step, positions, recipe)
        except TrainingError:
            self.gradient.zero_()
            raise
        if factor < 1:
            self.gradient.mul_(factor)

    def try_pass(self, batch: Tensor, recipe: RecipeConfig) -> None:
        """Takes one pass of a step, which counts for nothing."""
        self.gradient_of(batch[: 1 if self.privacy else self.sequences_at_a_time(recipe)], recipe)

    def gradient_of(self, batch: Tensor, recipe: RecipeConfig) -> Tensor:
        """Leaves the gradient of the mean loss in `gradient`, and returns the loss."""
        sequences = self.sequences_at_a_time(recipe)
        while (total := self._backward(batch, sequences)) is None:
            self.gradient.zero_()
            if sequences == 1:
                raise _does_not_fit(self.packing.tokens(batch[:1]), self.weights.device)
            what = "out of memory in a pass of %d sequences (%s): continuing with %d per pass. %s"
            log.warning(what, sequences, memory_taken(self.weights.device), -(-sequences // 2), SETTINGS_THAT_HELP)
            self.sequences_per_pass = sequences = -(-sequences // 2)
        return total

    def _private_gradient(self, batch: Tensor, privacy: Privacy) -> float:
        """Leaves a noisy mean of the sequences' gradients in `gradient`, each of limited norm; returns their mean loss.

        A gradient that is not finite counts as nothing: whether a step fails would tell of the data."""
        total, losses = torch.zeros_like(self.gradient), []
        for place in range(len(batch)):
            if (found := self._backward(batch[place : place + 1], 1)) is None:
                raise _does_not_fit(self.packing.tokens(batch[:1]), self.weights.device)
            if math.isfinite(loss := float(found)) and (size := privacy.clip(norm_of(self.gradient))):
                total.add_(self.gradient, alpha=size)
                losses.append(loss)
        for block in torch.split(total, NOISE_BLOCK):
            block.add_(torch.from_numpy(privacy.noise(len(block))).to(block))
        torch.div(total, privacy.expected, out=self.gradient)
        return sum(losses) / max(1, len(losses))

    def _backward(self, batch: Tensor, sequences: int) -> Tensor | None:
        """Returns the mean loss and leaves its gradient in `gradient`; None if memory runs out."""
        self.gradient.zero_()
        device = self.weights.device
        try:
            total = torch.zeros((), device=device)
            learned = max(1, self.packing.learned(batch))
            there = batch if batch.device == device else to_card(batch.numpy(), device)
            for part, counted in zip(torch.split(there, sequences), torch.split(batch, sequences), strict=True):
                loss = self.loss(part) * (self.packing.learned(counted) / learned)
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
            return total
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None
