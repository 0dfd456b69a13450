"""The program that a card runs between the two products of the loss: a row of logits becomes its gradient in place.

Beside loss.py, which does the same in torch. A row is read once for its norm, and once for the gradient that is
written over it: in bf16 that is a quarter of what torch moves."""

# mypy: ignore-errors
# ruff: noqa: N803  (as Triton reads it)

from __future__ import annotations

import triton
import triton.language as tl

LEAST = tl.constexpr(-3.0e38)  # below all logits but infinite ones, from which it can be subtracted


@triton.jit
def cross_entropy(logits, targets, losses, vocabulary, scale, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    """logits [rows, vocabulary] -> losses [rows]; and over the logits, `scale` of their gradient.

    A loss is not finite if a logit is nan or infinite, or the target is no token."""
    row = tl.program_id(0)
    line = logits + row.to(tl.int64) * vocabulary
    target = tl.load(targets + row)
    wanted = tl.load(line + target, mask=(target >= 0) & (target < vocabulary), other=float("nan")).to(tl.float32)
    lanes = tl.arange(0, BLOCK)
    most, total = tl.full([BLOCK], LEAST, tl.float32), tl.zeros([BLOCK], tl.float32)
    start = 0
    while start < vocabulary:
        x = tl.load(line + start + lanes, mask=start + lanes < vocabulary, other=float("-inf")).to(tl.float32)
        above = tl.maximum(most, x)
        total = total * tl.exp(most - above) + tl.exp(x - above)
        most = above
        start += BLOCK
    largest = tl.max(most, 0)
    norm = largest + tl.log(tl.sum(total * tl.exp(most - largest), 0))
    tl.store(losses + row, norm - wanted)
    if GRADIENT:
        start = 0
        while start < vocabulary:
            place = start + lanes
            x = tl.load(line + place, mask=place < vocabulary, other=0.0).to(tl.float32)
            gradient = (tl.exp(x - norm) - tl.where(place == target, 1.0, 0.0)) * scale
            tl.store(line + place, gradient.to(logits.dtype.element_ty), mask=place < vocabulary)
            start += BLOCK
