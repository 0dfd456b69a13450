"""Makes numbers that are the same on every machine: integers from splitmix64, and exact floats."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from p2ptrain.config import RecipeConfig
from p2ptrain.exact.codec import Contribution, every_index, value_type
from p2ptrain.exact.transform import Layout


def integers(seed: int, count: int) -> NDArray[np.uint64]:
    """Returns integers from splitmix64 (Steele, Lea, Flood 2014), vectorised."""
    with np.errstate(over="ignore"):
        state = np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(
            0x9E3779B97F4A7C15
        )
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return state ^ (state >> np.uint64(31))


def weights(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns multiples of 2**-24 in [-0.5, 0.5), which are exact in fp32."""
    drawn = integers(seed, int(np.prod(shape))) >> np.uint64(40)
    return torch.from_numpy((drawn.astype(np.float64) / 2**24 - 0.5).astype(np.float32).reshape(shape))


def contribution(seed: int, layout: Layout, recipe: RecipeConfig) -> Contribution:
    """Makes a contribution with k distinct indices per chunk, all value sizes, and scales over a wide range."""
    if recipe.is_dense:
        return _dense(seed, layout, recipe)
    order = integers(seed, layout.chunks * layout.area).reshape(layout.chunks, layout.area)
    indices = np.sort(np.argsort(order, axis=1, kind="stable")[:, : recipe.k_max], axis=1).astype(np.uint16)
    drawn = integers(seed + 10**6, indices.size).reshape(indices.shape)
    sizes = (drawn % np.uint64(1 << (recipe.value_bits - 1))).astype(np.int16) + np.int16(1)
    signed = np.where((drawn >> np.uint64(20)) & np.uint64(1) == 1, -sizes, sizes)
    values = signed.astype(value_type(recipe.value_bits))
    if not recipe.spec.is_scaled:
        return Contribution(indices, values)
    exponents = (integers(seed + 2 * 10**6, len(layout.groups)) % np.uint64(12)).astype(np.int8) - np.int8(16)
    return Contribution(indices, values, exponents)


def _dense(seed: int, layout: Layout, recipe: RecipeConfig) -> Contribution:
    shape, kind = (layout.chunks, layout.area), value_type(recipe.value_bits, is_dense=True)
    drawn, top = integers(seed, layout.chunks * layout.area).reshape(shape), (1 << (recipe.value_bits - 1)) - 1
    if top:
        values = (drawn % np.uint64(2 * top + 1)).astype(np.int32) - top
    else:
        values = 1 - 2 * (drawn & np.uint64(1)).astype(np.int32)
    exponents = (integers(seed + 2 * 10**6, len(layout.groups)) % np.uint64(12)).astype(np.int8) - np.int8(16)
    return Contribution(every_index(*shape), values.astype(kind), exponents)
