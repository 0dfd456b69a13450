"""Selects the k coefficients of largest magnitude in every chunk, sorted by index.

The k largest coefficients of a chunk are in the k groups with the largest maxima. So the k-th largest
group maximum is a threshold that keeps all k and, with groups of eight, few others; only these are
compared. On a CPU, reading everything once and partitioning an eighth is four times as fast as
partitioning everything. Ties may be broken either way, because the choice is not part of the protocol."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from p2ptrain.exact.codec import Indices
from p2ptrain.exact.shortage import where_it_fits
from p2ptrain.exact.transform import block_chunks

GROUP = 8  # coefficients per group; smaller groups leave more to partition, larger ones more candidates
BLOCK_CHUNKS = 64  # chunks at a time: 1 MiB of fp32 magnitudes stays in a core's cache


def largest(coefficients: Tensor, k: int) -> Indices:
    """Returns the indices [chunks, k] of the largest of `coefficients` [chunks, area], which are finite."""
    chunks, area = coefficients.shape
    if coefficients.device.type != "cpu" or k > area // GROUP:
        return _largest_by_topk(coefficients, k, block_chunks(coefficients.device))
    indices = np.empty((chunks, k), np.uint16)
    for start in range(0, chunks, BLOCK_CHUNKS):
        magnitudes = coefficients[start : start + BLOCK_CHUNKS].to(torch.float32).abs()
        indices[start : start + BLOCK_CHUNKS] = _largest_of_block(magnitudes, k)
    return indices


def _largest_by_topk(coefficients: Tensor, k: int, at_a_time: int) -> Indices:
    """Selects in blocks, because all magnitudes together would take as much memory as the model."""

    def chosen(block: Tensor, device: torch.device) -> Tensor:
        return block.to(device).abs().topk(k, dim=1, sorted=False).indices.sort(dim=1).values.short()

    found = [where_it_fits(partial(chosen, block), block.device) for block in torch.split(coefficients, at_a_time)]
    return torch.cat([each.cpu() for each in found]).numpy().view(np.uint16)


def _largest_of_block(magnitudes: Tensor, k: int) -> Indices:
    chunks, area = magnitudes.shape
    maxima = torch.amax(magnitudes.view(chunks, GROUP, area // GROUP), dim=1).numpy()
    thresholds = np.partition(maxima, -k, axis=1)[:, -k]
    flat = magnitudes.numpy()
    candidates = np.flatnonzero(flat >= thresholds[:, None])  # ascending, at least k per chunk
    counts = np.bincount(candidates // area, minlength=chunks)
    if (counts == k).all():
        return (candidates % area).astype(np.uint16).reshape(chunks, k)
    # Lays each chunk's candidates out as a row, and drops the smallest ones from rows that have too many.
    starts = np.concatenate([[0], counts.cumsum()[:-1]])
    rows = candidates // area
    columns = np.arange(candidates.size) - starts[rows]
    table = np.full((chunks, counts.max()), -1.0, np.float32)
    table[rows, columns] = flat.reshape(-1)[candidates]
    chosen = np.sort(np.argpartition(table, -k, axis=1)[:, -k:], axis=1)
    return (candidates[starts[:, None] + chosen] % area).astype(np.uint16)
