"""The loss of a model that predicts tokens: cross entropy, with the output matrix, a block of tokens at a time.

A block's gradient follows directly from its logits (softmax minus one at the target), so the logits are computed only
once, yet need not be kept for the backward pass. The idea is Liger Kernel's (arXiv 2410.10989)."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from p2ptrain.exact.kernels.launches import attempt, is_usable

# Bytes of logits that exist at a time. With a large vocabulary a whole pass's logits would be most of its memory.
# On a CPU 32 MiB was fastest (log/); on an H200 twice as much as here takes 4 % less of the loss's time.
LOGITS_BYTES, DEVICE_LOGITS_BYTES = 2**25, 2**29
LANES, WARPS = 4_096, 8  # of a program; more or fewer made no difference on an H200


def logits_rows(vocab_size: int, device: str, number_bytes: int = 4) -> int:
    """Returns the number of tokens whose logits, kept in numbers of so many bytes, are computed at a time."""
    return max(1, (LOGITS_BYTES if device == "cpu" else DEVICE_LOGITS_BYTES) // (number_bytes * vocab_size))


class FusedLoss(torch.autograd.Function):
    """Mean cross entropy of linear(hidden, weight), whose gradients are computed with it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, with_gradient: bool) -> Tensor:
        """hidden: [tokens, dim]; weight: [vocab, dim] fp32; targets: [tokens] int64"""
        device = hidden.device
        kind = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else hidden.dtype
        work = partial(_computed, hidden, weight, targets, kind, with_gradient)
        with torch.autocast(device.type, enabled=False):
            found = attempt(partial(work, in_program=True), device) if is_usable(device) else None
            loss, *gradients = work(in_program=False) if found is None else found
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        to_hidden, to_weight = ctx.saved_tensors
        of_weight = to_weight * gradient if ctx.needs_input_grad[1] else None  # a frozen weight has none
        return to_hidden * gradient.to(to_hidden.dtype), of_weight, None, None


def _computed(
    hidden: Tensor, weight: Tensor, targets: Tensor, kind: torch.dtype, with_gradient: bool, *, in_program: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the loss and its gradients, computed in type `kind`; empty where there are none."""
    count, is_trained = len(hidden), with_gradient and weight.requires_grad
    step = logits_rows(len(weight), hidden.device.type, kind.itemsize if in_program else 4)
    block_of = _in_program if in_program else _in_torch
    total = torch.zeros((), device=hidden.device)
    to_hidden = torch.empty_like(hidden if with_gradient else hidden[:0])
    to_weight = torch.zeros_like(weight if is_trained else weight[:0])
    cast = weight.to(kind)
    for start in range(0, count, step):
        inputs, wanted = hidden[start : start + step].to(kind), targets[start : start + step]
        loss, gradient = block_of(inputs, cast, wanted, count, with_gradient)
        total += loss
        if with_gradient:
            to_hidden[start : start + step] = gradient @ cast
            if is_trained:
                to_weight += gradient.T @ inputs
        del gradient  # frees the memory before the next block needs it
    return total / max(1, count), to_hidden, to_weight


def _in_torch(
    inputs: Tensor, weight: Tensor, targets: Tensor, count: int, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Returns the sum of a block's losses, and its logits' gradient of the mean over `count` tokens, [rows, vocab].

    inputs: [rows, dim]; weight: [vocab, dim] of the same type; targets: [rows]"""
    wanted = targets[:, None]
    logits = (inputs @ weight.T).float()  # bf16 cannot hold a sum of exponentials
    norms = logits.logsumexp(dim=1, keepdim=True)
    loss = (norms - logits.gather(1, wanted)).sum()
    if with_gradient:
        logits.sub_(norms).exp_().scatter_add_(1, wanted, torch.full_like(norms, -1.0))
        logits = logits.div_(count).to(weight.dtype)
    return loss, logits


def _in_program(
    inputs: Tensor, weight: Tensor, targets: Tensor, count: int, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Does the same on a card."""
    logits, vocabulary = inputs @ weight.T, len(weight)
    losses = torch.empty(len(logits), device=logits.device)
    constants = {"GRADIENT": with_gradient, "BLOCK": min(LANES, 1 << (vocabulary - 1).bit_length())}
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        program()[len(logits),](logits, targets, losses, vocabulary, 1 / count, **constants, num_warps=WARPS)
    return losses.sum(), logits


@cache
def program() -> Any:
    from p2ptrain.models import loss_program  # noqa: PLC0415  # which imports Triton

    return loss_program.cross_entropy


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean cross entropy of linear(hidden, weight).

    hidden: [tokens, dim]; weight: [vocab, dim] fp32; targets: [tokens] int64"""
    loss: Tensor = FusedLoss.apply(hidden, weight, targets, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return loss
