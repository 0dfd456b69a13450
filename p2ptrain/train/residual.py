"""The residual: what a node has learned and not contributed yet.

It is kept as coefficients. The DCT is linear and orthonormal, so the momentum of the coefficients is the coefficients
of the momentum, and a contribution leaves the residual by k subtractions per chunk instead of an inverse transform. The
two differ only in chunks that are partly padding, by the part that falls on the padding; `Layout.project` removes it (a
test compares with a DeMo in parameter space).

A chunk that has fewer than k coefficients sends k all the same, and one of exactly zero gets a sign by turns, so that
peers do not push the same way for ever. Of signs the whole coefficient leaves the residual, of scaled values the value;
what the swarm cuts from a taken contribution (exact/scales.py) returns to it.

A contribution that no manifest takes has told the swarm nothing. The exact values that left the residual are
therefore kept until a manifest takes the contribution (`forget`) or none can any more (`restore`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from p2ptrain.config import RecipeConfig
from p2ptrain.exact.aggregate import apply_own, apply_residual
from p2ptrain.exact.codec import EXPONENT_MAX, EXPONENT_MIN, Contribution, every_index
from p2ptrain.exact.kernels.launches import OnCard, attempt, flat_of, launches_of, tensor_type
from p2ptrain.exact.outer import Uncounted, all_counted
from p2ptrain.exact.selection import largest
from p2ptrain.exact.shortage import where_it_fits
from p2ptrain.exact.transform import Layout, fragment_of

EXACT_BITS = 8  # with so many, no search for a better unit of the numbers is worth its time
KEPT_ROUNDS_MAX = 128  # contributions whose fate is open; staleness_rounds_max is at most 64, and overlap adds some


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """The values that left the residual with a contribution whose fate is open, where the residual is."""

    indices: Tensor  # [chunks, k] int16
    removed: Tensor  # [chunks, k] fp32


class Residual:
    """Holds what this node has learned and not contributed, a row a chunk: DCT coefficients, or weights without a DCT.
    With fragments each has rows of its own, and a round touches only those of its fragment."""

    def __init__(self, layouts: Sequence[Layout], device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.layouts = layouts
        chunks = [layout.chunks for layout in layouts]
        self.coefficients = torch.zeros(sum(chunks), layouts[0].area, device=device, dtype=dtype)
        self.kept: dict[int, Withdrawal] = {}
        self._settled: list[tuple[int, Withdrawal, Tensor | None]] | None = None  # in `kept_ahead`
        self._k = 0  # numbers of each chunk in the next contribution; 0: the most that the run allows
        self._by_fragment = torch.split(self.coefficients, chunks)
        self._padding = [layout.padding_masks(device) for layout in layouts]

    def fragment_of(self, round_number: int) -> int:
        return fragment_of(round_number, len(self.layouts))

    def add(self, round_number: int, tensors: Sequence[Tensor], keep: float) -> None:
        fragment = self.fragment_of(round_number)
        layout, coefficients = self.layouts[fragment], self._by_fragment[fragment]
        programs, flat = launches_of(layout, coefficients.device), flat_of(tensors)
        if programs and flat is not None:
            programs.accumulate(flat, coefficients, keep)
            return
        layout.accumulate(tensors, coefficients, keep)
        layout.project(coefficients, *self._padding[fragment])

    @torch.no_grad()
    def subtract_from(self, weights: Sequence[Tensor], share: float) -> None:
        """Subtracts a share of the residual, which has the sign of a gradient, from the weights."""
        for layout, coefficients in zip(self.layouts, self._by_fragment, strict=True):
            apply_residual(layout, coefficients, share, weights)

    @torch.no_grad()
    def subtract_own_from(self, weights: Sequence[Tensor], share: float) -> None:
        """Subtracts a share of the contributions whose fate is open from the weights."""
        for number, kept in sorted(self.kept.items()):
            apply_own(self.layouts[self.fragment_of(number)], kept.indices, kept.removed, share, weights)

    @torch.no_grad()
    def subtract_ahead_from(self, weights: Sequence[Tensor], share: float, early_share: float) -> None:
        """Subtracts both from the weights, by one transform: meanwhile our open contributions lie on the residual."""
        if not share:
            self.subtract_own_from(weights, early_share)
            return
        before: list[tuple[Tensor, Tensor, Tensor]] = []
        try:
            for number, kept in sorted(self.kept.items()):
                coefficients = self._by_fragment[self.fragment_of(number)]
                there, _ = _at(coefficients, kept.indices)
                before.append((coefficients, kept.indices, there))
                _put(coefficients, kept.indices, there + kept.removed.to(there) * (early_share / share))
            self.subtract_from(weights, share)
        finally:
            for each in reversed(before):
                _put(*each)

    @contextmanager
    def kept_ahead(self, weights: Sequence[Tensor], share: float, early_share: float) -> Iterator[None]:
        """Keeps in the weights what `subtract_ahead_from` has subtracted, while the block settles contributions."""
        settled = self._settled = []
        try:
            yield
        finally:
            self._settled = None
            for number, kept, back in settled:
                moved = kept.removed * -early_share
                if back is not None:
                    moved.add_(back.to(moved), alpha=share)
                apply_own(self.layouts[self.fragment_of(number)], kept.indices, moved, 1.0, weights)

    def set_k(self, k: int) -> None:
        """Sets how many numbers of each chunk the next contribution has; 0: the most that the run allows."""
        self._k = k

    @torch.no_grad()
    def take(self, round_number: int, recipe: RecipeConfig) -> Contribution | OnCard:
        """Makes the round's contribution, and subtracts its values from the residual."""
        assert round_number not in self.kept, "one contribution a round"
        assert len(self.kept) < KEPT_ROUNDS_MAX, "every contribution is forgotten or restored in the end"
        fragment = self.fragment_of(round_number)
        layout, coefficients, k = self.layouts[fragment], self._by_fragment[fragment], self._k or recipe.k_max

        def take() -> tuple[OnCard, Tensor] | None:
            programs = None if recipe.is_dense else launches_of(layout, coefficients.device)
            return None if programs is None else programs.take(coefficients, k, round_number, recipe)

        found = attempt(take, coefficients.device)
        if found:
            made, removed = found
            self.kept[round_number] = Withdrawal(made.indices, removed)
            return made
        contribution, indices, removed, left = _taken(layout, coefficients, k, round_number, recipe)
        _put(coefficients, indices, left)
        self.kept[round_number] = Withdrawal(indices, removed)
        return contribution

    def forget(self, round_number: int, uncounted: Uncounted = all_counted) -> bool:
        """Notes that a manifest took the contribution, and puts back what was not counted; False if there is none."""
        kept = self.kept.get(round_number)
        if kept is not None:
            values = None if uncounted is all_counted else uncounted(kept.removed.cpu().numpy())
            self._settle(round_number, kept, None if values is None else torch.from_numpy(values))
        return kept is not None

    def restore(self, round_number: int) -> bool:
        """Puts back a contribution that no manifest can take any more; False if the node has no such contribution."""
        kept = self.kept.get(round_number)
        if kept is not None:
            self._settle(round_number, kept, kept.removed)
        return kept is not None

    def _settle(self, round_number: int, kept: Withdrawal, back: Tensor | None) -> None:
        if back is not None:
            self._give_back(round_number, kept.indices, back)
        del self.kept[round_number]  # only now: there may have been no memory
        if self._settled is not None:
            self._settled.append((round_number, kept, back))

    def _give_back(self, round_number: int, indices: Tensor, values: Tensor) -> None:
        coefficients = self._by_fragment[self.fragment_of(round_number)]

        def given_back(device: torch.device) -> Tensor:
            return _at(coefficients.to(device), indices)[0].add_(values.to(device))

        _put(coefficients, indices, where_it_fits(given_back, coefficients.device))

    def keep(self, kept: dict[int, Withdrawal]) -> None:
        """Takes up contributions whose fate is open, from a saved state."""
        self.kept = kept


def _taken(
    layout: Layout, coefficients: Tensor, k: int, round_number: int, recipe: RecipeConfig
) -> tuple[Contribution, Tensor, Tensor, Tensor]:
    """Returns a contribution, its indices, the values that it takes from the coefficients, and what these are then."""
    sizes, device = [group.chunks for group in layout.groups], coefficients.device
    if recipe.is_dense:
        named, indices = every_index(*coefficients.shape), torch.arange(k, dtype=torch.int16).expand(layout.chunks, k)
    else:
        named = largest(coefficients, k)
        indices = torch.from_numpy(named.view(np.int16))

    def encode(device: torch.device) -> tuple[Contribution, Tensor, Tensor]:
        chosen, places = _at(coefficients.to(device), indices)
        # k coefficients are sent even for a chunk that has fewer: zeros get alternating signs, or all peers would push
        # the same way for ever.
        is_odd = (places + round_number) % 2 == 1
        signs = 1 - 2 * ((chosen < 0) | ((chosen == 0) & is_odd)).to(torch.int8)
        if not recipe.spec.is_scaled:  # a sign has no size, so the whole coefficient counts as sent
            return Contribution(named, signs.cpu().numpy()), chosen, torch.zeros_like(chosen)
        rounded = quantise_all if recipe.is_dense and recipe.value_bits > 1 else quantise
        magnitudes, exponents = rounded(chosen.abs(), sizes, recipe.value_bits)
        values = magnitudes.mul_(signs)
        units = torch.from_numpy(np.ldexp(np.float32(1), _of_rows(exponents, sizes))).to(device)
        removed = values * units
        return Contribution(named, values.cpu().numpy(), exponents), removed, chosen.sub_(removed)

    contribution, removed, left = where_it_fits(encode, device)
    return contribution, indices, removed, left


def _at(coefficients: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:  # [chunks, k] fp32, [chunks or 1, k] int64
    """Returns a copy of the coefficients at these places, and the places in each chunk."""
    if indices.shape == coefficients.shape:  # all of them
        every = torch.arange(indices.shape[1], device=coefficients.device)[None]
        return coefficients.to(torch.float32, copy=True), every
    places = indices.to(coefficients.device).long()  # a chunk has fewer than 2**15 numbers
    return coefficients.gather(1, places).to(torch.float32), places


def _put(coefficients: Tensor, indices: Tensor, values: Tensor) -> None:
    def put(device: torch.device) -> None:
        here = coefficients.to(device)
        here.scatter_(1, indices.to(device).long(), values.to(here))
        if here is not coefficients:
            coefficients.copy_(here)

    if indices.shape == coefficients.shape:
        coefficients.copy_(values)
    else:
        where_it_fits(put, coefficients.device)


def _of_rows(exponents: NDArray[Any], sizes: Sequence[int]) -> NDArray[Any]:  # [chunks, 1]
    return np.repeat(exponents, sizes)[:, None]


def quantise(magnitudes: Tensor, sizes: list[int], value_bits: int) -> tuple[Tensor, NDArray[np.int8]]:
    """Returns integers from 1 to 2**(value_bits - 1), and each group's exponent with the least squared error.

    magnitudes: [chunks, k]; sizes: chunks of each group"""
    top, exact, device = 1 << (value_bits - 1), magnitudes.double(), magnitudes.device
    group = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes)).to(device)

    def sums(numbers: Tensor) -> NDArray[np.float64]:  # [chunks, k] -> [groups]
        whole = torch.zeros(len(sizes), dtype=torch.float64, device=device).index_add_(0, group, numbers.sum(dim=1))
        return whole.cpu().numpy()

    def rounded(exponents: NDArray[np.int32]) -> tuple[Tensor, NDArray[np.float64]]:
        """Returns the integers for these exponents [chunks, k], and each group's squared error [groups]."""
        rows = _of_rows(exponents, sizes)
        up, down = (torch.from_numpy(np.ldexp(1.0, sign * rows)).to(device) for sign in (1, -1))
        integers = (exact * down).round_().clamp_(1, top)
        return integers, sums((integers * up).sub_(exact).square_())

    means = sums(exact) / (np.array(sizes) * magnitudes.shape[1])
    above = np.where(means > 0, np.frexp(means)[1], EXPONENT_MIN)  # 2**above is less than twice the mean
    candidates = [np.clip(above - back, EXPONENT_MIN, EXPONENT_MAX) for back in range(value_bits + 1)]
    best = np.choose(np.argmin([rounded(exponents)[1] for exponents in candidates], axis=0), candidates)
    return rounded(best)[0].to(tensor_type(value_bits)), best.astype(np.int8)


def quantise_all(magnitudes: Tensor, sizes: list[int], value_bits: int) -> tuple[Tensor, NDArray[np.int8]]:
    """Returns integers from 0 to 2**(value_bits - 1) - 1, and each group's exponent: the least that cuts nothing off,
    or with few bits the one with the least squared error.

    magnitudes: [chunks, area]; sizes: chunks of each group"""
    top = (1 << (value_bits - 1)) - 1
    integers = torch.empty_like(magnitudes, dtype=tensor_type(value_bits, is_dense=True))
    exponents = np.empty(len(sizes), np.int8)
    groups = zip(torch.split(magnitudes, sizes), torch.split(integers, sizes), strict=True)
    for number, (rows, whole) in enumerate(groups):
        largest_of_all = float(rows.max())
        _, above = math.frexp(largest_of_all / (top + 0.5))
        highest = min(max(above, EXPONENT_MIN), EXPONENT_MAX) if largest_of_all else EXPONENT_MIN
        tried = range(highest, max(highest - (value_bits + 1 if value_bits < EXACT_BITS else 1), EXPONENT_MIN - 1), -1)
        best = min(tried, key=partial(_error, rows, top)) if len(tried) > 1 else highest
        whole.copy_(_multiples(rows, top, best))
        exponents[number] = best
    return integers, exponents


def _multiples(magnitudes: Tensor, top: int, exponent: int) -> Tensor:
    """Returns the nearest multiples of 2**exponent, as integers of at most `top`."""
    return magnitudes.mul(2.0**-exponent).round_().clamp_(max=top)


def _error(magnitudes: Tensor, top: int, exponent: int) -> float:
    off = _multiples(magnitudes, top, exponent).mul_(2.0**exponent).sub_(magnitudes)
    return float(off.square_().sum(dtype=torch.float64))
