"""Inner optimizers: how a node of recipe `local` moves its own weights between two contributions.

They are private. Nothing of them is on the exact path, no peer sees their state, and two nodes may round differently.

- `adamw` (Loshchilov and Hutter 2017, arXiv 1711.05101), in torch.optim's order.
- `muon` (Jordan et al. 2024, kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv 2502.16982): the momentum of a
  hidden matrix is replaced by the nearest orthogonal matrix, which five Newton-Schulz steps approximate, so all of its
  directions are learned equally fast. Embeddings and vectors take AdamW. An orthogonal matrix's elements have a root
  mean square of 1/sqrt(longer side), AdamW's updates one of about 0.2: scaled to that, one rate serves both."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw as adamw_of_torch

from p2ptrain.config import RecipeConfig
from p2ptrain.train.live import LiveModel

ADAM_EPSILON = 1e-8
MUON_MOMENTUM = 0.95
MUON_RMS = 0.2  # of an update at rate 1, like AdamW's
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan's: they push every singular value to between 0.7 and 1.2
NEWTON_SCHULZ_STEPS = 5
NORM_LEAST = 1e-7
BLOCK = 2**22  # numbers of a flat tensor at a time
# Matrices of one shape are orthogonalised together up to this size: small products are slow, and on a GPU each takes
# longer to begin than to compute.
BATCH_ELEMENTS, DEVICE_BATCH_ELEMENTS = 2**20, 2**25


class AdamW:
    """AdamW on all weights at once."""

    def __init__(self, config: RecipeConfig, live: LiveModel) -> None:
        self.config, self.live = config, live
        self.mean = torch.zeros_like(live.weights, dtype=live.state_type)
        self.square = torch.zeros_like(live.weights)
        self.steps = torch.zeros((), dtype=torch.int64)

    def step(self, rate: float) -> None:
        self.steps += 1
        live = self.live
        # In blocks, of which bf16 takes a copy.
        block = live.weights.numel() if is_fused(self.mean) and self.mean.dtype == torch.float32 else BLOCK
        flat = (torch.split(each, block) for each in (live.weights, live.gradient, self.mean, self.square))
        for weights, gradient, mean, square in zip(*flat, strict=True):
            adamw([weights], [gradient], [mean], [square], int(self.steps), rate, self.config)

    def state(self) -> dict[str, Tensor]:
        return {"inner_mean": self.mean, "inner_square": self.square, "inner_steps": self.steps}


class Muon:
    """Muon on hidden matrices, AdamW on everything else."""

    def __init__(self, config: RecipeConfig, live: LiveModel) -> None:
        self.config, self.live = config, live
        sizes = [part.numel() for part in live.parts(live.weights)]
        self.others = [place for place, is_hidden in enumerate(live.is_hidden_matrix) if not is_hidden]
        self.batches = list(hidden_batches(live))
        self.mean = torch.zeros_like(live.weights, dtype=live.state_type)
        self.parts = [live.parts(flat) for flat in (live.weights, live.gradient, self.mean)]
        self.squares = [torch.zeros(sizes[place], device=live.weights.device) for place in self.others]
        self.steps = torch.zeros((), dtype=torch.int64)

    def step(self, rate: float) -> None:
        self.steps += 1
        live, config = self.live, self.config
        weights, gradients, means = ([each[place].view(-1) for place in self.others] for each in self.parts)
        if self.others:  # adapters are all matrices
            adamw(weights, gradients, means, self.squares, int(self.steps), rate, config)
        keep = 1 - rate * float(config.inner_weight_decay)
        for places in self.batches:
            weights, gradients, means = ([each[place] for place in places] for each in self.parts)
            torch._foreach_lerp_(means, [each.to(means[0].dtype) for each in gradients], 1 - MUON_MOMENTUM)
            ahead = [each.to(torch.float32) for each in means]  # Nesterov's look
            torch._foreach_lerp_(gradients, ahead, MUON_MOMENTUM)
            whole = orthogonalised(gradients, is_half=live.autocast)
            torch._foreach_mul_(weights, keep)
            wide = sum(not is_tall(each.shape) for each in weights)  # which come first
            for some, update in ((weights[:wide], whole[:wide]), (weights[wide:], whole[wide:].mT)):
                if some:
                    turned = list(update.to(torch.float32, memory_format=torch.contiguous_format))
                    torch._foreach_sub_(some, turned, alpha=rate * MUON_RMS * max(some[0].shape) ** 0.5)

    def state(self) -> dict[str, Tensor]:
        squares = {f"inner_square.{place}": each for place, each in zip(self.others, self.squares, strict=True)}
        return {"inner_mean": self.mean, "inner_steps": self.steps} | squares


def adamw(
    weights: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    steps: int,
    rate: float,
    config: RecipeConfig,
) -> None:
    """Takes AdamW's step number `steps`; on a card in torch's own kernel, which leaves the gradients as they are."""
    beta1, beta2, decay = float(config.inner_beta1), float(config.inner_beta2), float(config.inner_weight_decay)
    if is_fused(means[0]):
        exact = [mean.to(torch.float32) for mean in means]  # no copy where they are: it takes one type
        before = torch.full((len(weights),), float(steps - 1), device=weights[0].device)  # it counts this one itself
        adamw_of_torch(
            weights, gradients, exact, squares, [], list(before), fused=True, amsgrad=False, maximize=False,
            beta1=beta1, beta2=beta2, lr=rate, weight_decay=decay, eps=ADAM_EPSILON,
        )  # fmt: skip
        if exact[0] is not means[0]:
            torch._foreach_copy_(means, exact)
        return
    bias1, bias2 = 1 - beta1**steps, 1 - beta2**steps
    for weight, gradient, mean, square in zip(weights, gradients, means, squares, strict=True):
        mean.lerp_(gradient.to(mean.dtype), 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        # Overwrites the gradient: in fp32 this allocates nothing, so no step can fail halfway.
        denominator = torch.sqrt(square, out=gradient).div_(bias2**0.5).add_(ADAM_EPSILON)
        weight.mul_(1 - rate * decay)
        weight.addcdiv_(mean, denominator, value=-rate / bias1)


def is_fused(mean: Tensor) -> bool:
    """Whether a step is one kernel: on a card, where each operation takes longer to begin than to compute."""
    return mean.device.type == "cuda"


def orthogonalised(matrices: Sequence[Tensor], *, is_half: bool) -> Tensor:  # [matrices, shorter, longer]
    """Returns the nearest orthogonal matrices, about, of matrices that have one shape but for a transposition."""
    x = torch.stack([matrix.T if is_tall(matrix.shape) else matrix for matrix in matrices])
    x = x.bfloat16() if is_half else x
    x /= torch.linalg.matrix_norm(x, dtype=torch.float32)[:, None, None].clamp_min(NORM_LEAST).to(x.dtype)
    a, b, c = NEWTON_SCHULZ
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def is_tall(shape: Sequence[int]) -> bool:
    return shape[0] > shape[1]


def batch_elements(device: str) -> int:
    return BATCH_ELEMENTS if device == "cpu" else DEVICE_BATCH_ELEMENTS


def hidden_batches(live: LiveModel) -> Iterator[list[int]]:
    """Yields the places of hidden matrices that are orthogonalised together, tall ones after the others."""
    hidden = [place for place, is_hidden in enumerate(live.is_hidden_matrix) if is_hidden]
    return batches_of(live.shapes, hidden, live.weights.device.type)


def batches_of(shapes: Sequence[tuple[int, ...]], hidden: Iterable[int], device: str) -> Iterator[list[int]]:
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    for place in hidden:
        alike[min(shapes[place]), max(shapes[place])].append(place)
    for (short, long), places in alike.items():
        at_once = max(1, batch_elements(device) // (short * long))
        for start in range(0, len(places), at_once):
            yield sorted(places[start : start + at_once], key=lambda place: is_tall(shapes[place]))


INNER_OPTIMIZERS: dict[str, type[AdamW] | type[Muon]] = {"adamw": AdamW, "muon": Muon}
