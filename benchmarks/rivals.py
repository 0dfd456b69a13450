"""Other systems with the same model, data and inner optimizers, in floating point, with their published settings.

    diloco      AdamW, H = 30, dense fp32 average, Nesterov .9 at .7 (Douillard et al. 2023, arXiv 2311.08105)
    diloco4     the same with 4-bit values, a scale for each row, and no error feedback
    muloco      Muon, H = 30, 2-bit values (the means of each row's quarters), error feedback .9, Nesterov .6 at .7
                (Thérien et al. 2025, arXiv 2505.23725)
    sparseloco  AdamW, H = 30, chunks of 4096 without a DCT, k = 64, 2-bit values, error feedback .95, plain step of 1
                (Sarfi et al. 2025, arXiv 2508.15706)
    lowrank     Muon, H = 10, what each matrix moved times a random orthonormal matrix that all share (rank 16), in 4
                bits, with error feedback .95: after DiLoCoX (Qi et al. 2025, arXiv 2506.21263), but with factors that
                need no second exchange
    demo32      DeMo with its own fp32 values: one step a round, DCT, k = 32, mean over senders, sign (arXiv 2411.19870)

Where a paper leaves a quantiser open, each gets the levels of least error that its bits allow. Payloads are counted,
not made: 12 bits for each index of 4096, the value's bits, and 2 bytes for each level.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from p2ptrain.config import RecipeConfig
from p2ptrain.exact.schedule import inner_rate, learning_rate
from p2ptrain.exact.transform import Layout, orthonormal_basis
from p2ptrain.train.inner import INNER_OPTIMIZERS
from p2ptrain.train.live import LiveModel

INDEX_BITS = 12
LEVEL_BYTES = 2
RANK = 16


@dataclass(frozen=True)
class Rival:
    """A published method's settings."""

    codec: str
    inner: str
    outer_rate: float = 1.0
    momentum: float = 0.0  # Nesterov's
    error_decay: float = 0.0


RIVALS = {
    "diloco": Rival("dense", "adamw", 0.7, 0.9),
    "diloco4": Rival("four bits", "adamw", 0.7, 0.9),
    "muloco": Rival("two bits", "muon", 0.7, 0.6, 0.9),
    "sparseloco": Rival("sparse", "adamw", error_decay=0.95),
    "lowrank": Rival("low rank", "muon", error_decay=0.95),
}


class LocalRival:
    """Peers that take local steps, compress how far they moved, and step by the mean of what all moved."""

    def __init__(self, rival: Rival, recipe: RecipeConfig, live: LiveModel, peers: int) -> None:
        self.rival, self.config, self.live = rival, recipe, live
        self.agreed, self.momentum = live.weights.clone(), torch.zeros_like(live.weights)
        self.inner = [INNER_OPTIMIZERS[rival.inner](recipe, live) for _ in range(peers)]
        self.errors = [torch.zeros_like(live.weights) for _ in range(peers)]
        self.payload_bytes = sum(part_bytes(rival.codec, part) for part in live.parts(live.weights))

    def round(self, round_number: int, batches: list[list[Any]]) -> None:
        rate, total = float(inner_rate(self.config, round_number)), torch.zeros_like(self.agreed)
        for inner, error, own in zip(self.inner, self.errors, batches, strict=True):
            self.live.weights.copy_(self.agreed)
            for step, batch in enumerate(own):
                self.live.gradient_step(step, batch, [], self.config)
                inner.step(rate)
            error.mul_(self.rival.error_decay).add_(self.agreed - self.live.weights)
            for left, summed in zip(*map(self.live.parts, (error, total)), strict=True):
                sent = compressed(self.rival.codec, left, round_number).clone()
                left.sub_(sent)
                summed.add_(sent, alpha=1 / len(batches))
        self.momentum.mul_(self.rival.momentum).add_(total)
        self.agreed.sub_(total + self.rival.momentum * self.momentum, alpha=self.rival.outer_rate)
        self.live.weights.copy_(self.agreed)


class DeMoWithFloats:
    """DeMo as published, but for its wire: 32 bits a value."""

    def __init__(self, recipe: RecipeConfig, live: LiveModel, peers: int) -> None:
        self.config, self.live = recipe, live
        self.layout = Layout(live.shapes, recipe.chunk)
        self.residuals = [torch.zeros(self.layout.chunks, self.layout.area) for _ in range(peers)]
        self.payload_bytes = self.layout.chunks * recipe.k_max * (INDEX_BITS + 32) // 8

    def round(self, round_number: int, batches: list[list[Any]]) -> None:
        total, senders = torch.zeros_like(self.residuals[0]), torch.zeros_like(self.residuals[0])
        for residual, own in zip(self.residuals, batches, strict=True):
            self.live.gradient_step(0, own[0], [], self.config)
            self.layout.accumulate(self.live.parts(self.live.gradient), residual, float(self.config.decay))
            chosen = residual.abs().topk(self.config.k_max, dim=1).indices
            total.scatter_add_(1, chosen, residual.gather(1, chosen))
            senders.scatter_add_(1, chosen, torch.ones(chosen.shape))
            residual.scatter_(1, chosen, 0.0)
        mean = total / senders.clamp_min(1)
        update = torch.zeros_like(self.live.weights)
        inverse_transform(self.layout, mean, self.live.parts(update))
        self.live.weights.sub_(update.sign(), alpha=float(learning_rate(self.config, round_number)))


def inverse_transform(layout: Layout, coefficients: Tensor, into: list[Tensor]) -> None:
    """Fills the tensors with the inverse transform of coefficients [chunks, area]."""
    c, basis = layout.chunk, orthonormal_basis(layout.chunk, torch.device("cpu"))
    for group in layout.groups:
        own = coefficients[group.first_chunk : group.first_chunk + group.chunks].view(-1, c, c)
        tiles = (basis.T @ own @ basis).view(group.chunk_rows, group.chunk_columns, c, c)
        matrix = layout.matrix(into, group)
        whole = tiles.permute(0, 2, 1, 3).reshape(group.chunk_rows * c, -1)
        matrix.copy_(whole[: group.rows, : group.columns])
        layout.store(matrix, into, group)


def compressed(codec: str, part: Tensor, round_number: int = 0) -> Tensor:
    """Returns what the receivers of a part read."""
    if codec == "low rank":
        if part.dim() < 2 or min(part.shape) <= RANK:
            return compressed("four bits", part)
        generator = torch.Generator().manual_seed(round_number)
        factor, _ = torch.linalg.qr(torch.randn(part.shape[1], RANK, generator=generator))
        return compressed("four bits", part @ factor) @ factor.T
    if codec == "dense":
        return part
    rows = part.reshape(len(part), -1) if part.dim() > 1 else part.reshape(1, -1)
    if codec == "four bits":
        unit = rows.abs().amax(dim=1, keepdim=True).clamp_min(1e-30) / 7
        return ((rows / unit).round() * unit).view_as(part)
    if codec == "two bits":
        return levels(rows, 2).view_as(part)
    assert codec == "sparse"
    blocks = torch.nn.functional.pad(part.reshape(-1), (0, -part.numel() % 4096)).view(-1, 4096)
    chosen = blocks.abs().topk(min(64, part.numel()), dim=1).indices
    values = blocks.gather(1, chosen)
    magnitudes = levels(values.abs().view(1, -1), 1).view_as(values)
    sent = torch.zeros_like(blocks).scatter_(1, chosen, magnitudes * values.sign())
    return sent.view(-1)[: part.numel()].view_as(part)


def levels(rows: Tensor, bits: int) -> Tensor:
    """Rounds each row's values to 2**bits levels of its own, by Lloyd's method from its quantiles."""
    count = 2**bits
    found = rows.quantile((torch.arange(count) + 0.5) / count, dim=1).T.contiguous()  # [rows, levels] rising
    for _ in range(8):
        nearest = torch.searchsorted((found[:, 1:] + found[:, :-1]) / 2, rows)
        sums = torch.zeros_like(found).scatter_add_(1, nearest, rows)
        sizes = torch.zeros_like(found).scatter_add_(1, nearest, torch.ones_like(rows))
        found = torch.where(sizes > 0, sums / sizes.clamp_min(1), found)
    return found.gather(1, nearest)


def part_bytes(codec: str, part: Tensor) -> int:
    """Counts the bytes of a tensor's payload."""
    rows = len(part) if part.dim() > 1 else 1
    if codec == "low rank":
        numbers = rows * RANK if part.dim() > 1 and min(part.shape) > RANK else part.numel()
        return numbers // 2 + LEVEL_BYTES * rows
    if codec == "dense":
        return 4 * part.numel()
    if codec == "four bits":
        return part.numel() // 2 + LEVEL_BYTES * rows
    if codec == "two bits":
        return part.numel() // 4 + 4 * LEVEL_BYTES * rows
    blocks = -(-part.numel() // 4096)
    return blocks * min(64, part.numel()) * (INDEX_BITS + 2) // 8 + 2 * LEVEL_BYTES
