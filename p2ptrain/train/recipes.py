"""Recipes: how a node turns steps into a contribution, and the swarm's votes into an update.

A recipe never communicates. All three keep a residual, which holds everything that the swarm has not been told yet,
and contribute its largest DCT coefficients each round:

- `distro` (Peng, Quesnelle, Kingma 2024, arXiv 2411.19870; signs as in Nous' DisTrO): the residual is a
  momentum, which decays slowly and takes one gradient a round. Only signs are sent.
- `demo`: the same with small integers and a power-of-two scale per tensor: like the paper's values, at
  a tenth of the size.
- `local` (DiLoCo, Douillard et al. 2023, arXiv 2311.08105; with top-k and error feedback as in
  SparseLoCo, Sarfi et al. 2025, arXiv 2508.15706): several steps of an inner optimizer a round; the distance they
  moved is added to the residual. Signs or small integers are sent, with a power-of-two scale per tensor.

The residual is kept as coefficients. The DCT is linear and orthonormal, so the momentum of the
coefficients is the coefficients of the momentum, and a contribution leaves the residual by k
subtractions per chunk instead of an inverse transform. The two differ only in chunks that are partly padding, by
the part that falls on the padding; `Layout.project` removes it (a test compares with a DeMo in parameter space).

A chunk that has fewer than k coefficients sends k all the same, and one of exactly zero gets a sign by turns, so that
peers do not push the same way for ever. Of signs the whole coefficient leaves the residual, of scaled values the value;
what the swarm cuts from a taken contribution (exact/scales.py) returns to it.

A contribution that no manifest takes has told the swarm nothing. The exact values that left the residual are
therefore kept until a manifest takes the contribution (`forget`) or none can any more (`restore`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from p2ptrain.config import RecipeConfig
from p2ptrain.exact.aggregate import apply_own, apply_residual
from p2ptrain.exact.codec import EXPONENT_MAX, EXPONENT_MIN, Contribution, Indices, every_index, value_type
from p2ptrain.exact.outer import Uncounted
from p2ptrain.exact.schedule import inner_rate
from p2ptrain.exact.selection import largest
from p2ptrain.exact.shortage import where_it_fits
from p2ptrain.exact.transform import Layout, fragment_of
from p2ptrain.models import plugins
from p2ptrain.train.inner import INNER_OPTIMIZERS
from p2ptrain.train.live import LiveModel, StepResult

EXACT_BITS = 8  # with so many, no search for a better unit of the numbers is worth its time
EARLY_SHARE = 0.5  # of an own contribution, until it is applied (docs/explanation/lateness.md)
KEPT_ROUNDS_MAX = 128  # contributions whose fate is open; staleness_rounds_max is at most 64, and overlap adds some


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """The values that left the residual with a contribution whose fate is open."""

    indices: Indices  # [chunks, k]
    removed: NDArray[np.float32]  # [chunks, k]


class Residual:
    """Holds what this node has learned and not contributed, a row a chunk: DCT coefficients, or weights without a DCT.

    With fragments each has rows of its own, and a round touches only those of its fragment.
    """

    def __init__(self, layouts: Sequence[Layout], device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.layouts = layouts
        chunks = [layout.chunks for layout in layouts]
        self.coefficients = torch.zeros(sum(chunks), layouts[0].area, device=device, dtype=dtype)
        self.kept: dict[int, Withdrawal] = {}
        self._k = 0  # numbers of each chunk in the next contribution; 0: the most that the run allows
        self._by_fragment = torch.split(self.coefficients, chunks)
        self._padding = [layout.padding_masks(device) for layout in layouts]

    def fragment_of(self, round_number: int) -> int:
        return fragment_of(round_number, len(self.layouts))

    def add(self, round_number: int, tensors: Sequence[Tensor], keep: float) -> None:
        fragment = self.fragment_of(round_number)
        self.layouts[fragment].accumulate(tensors, self._by_fragment[fragment], keep)
        self.layouts[fragment].project(self._by_fragment[fragment], *self._padding[fragment])

    @torch.no_grad()
    def subtract_from(self, weights: Sequence[Tensor], share: float) -> None:
        """Subtracts a share of the residual, which has the sign of a gradient, from the weights."""
        for layout, coefficients in zip(self.layouts, self._by_fragment, strict=True):
            apply_residual(layout, coefficients, share, weights)

    def set_k(self, k: int) -> None:
        """Sets how many numbers of each chunk the next contribution has; 0: the most that the run allows."""
        self._k = k

    def take(self, round_number: int, recipe: RecipeConfig) -> Contribution:
        """Makes the round's contribution, and subtracts its values from the residual."""
        assert round_number not in self.kept, "one contribution a round"
        assert len(self.kept) < KEPT_ROUNDS_MAX, "every contribution is forgotten or restored in the end"
        fragment = self.fragment_of(round_number)
        coefficients = self._by_fragment[fragment]
        k = self._k or recipe.k_max
        indices = every_index(*coefficients.shape) if recipe.is_dense else largest(coefficients, k)
        sizes = [group.chunks for group in self.layouts[fragment].groups]

        def encode(device: torch.device) -> tuple[Contribution, NDArray[np.float32], Tensor]:
            """Returns the contribution, the values that it takes from the coefficients, and what these are then."""
            chosen, places = _at(coefficients.to(device), indices)
            # k coefficients are sent even for a chunk that has fewer: zeros get alternating signs, otherwise all peers
            # would push the same way forever.
            is_odd = (places + round_number) % 2 == 1
            signs = 1 - 2 * ((chosen < 0) | ((chosen == 0) & is_odd)).to(torch.int8)
            if not recipe.spec.is_scaled:  # a sign has no size, so the whole coefficient counts as sent
                return Contribution(indices, signs.cpu().numpy()), chosen.cpu().numpy(), torch.zeros_like(chosen)
            rounded = quantise_all if recipe.is_dense and recipe.value_bits > 1 else quantise
            magnitudes, exponents = rounded(chosen.abs(), sizes, recipe.value_bits)
            values = magnitudes.mul_(signs)
            units = np.ldexp(np.float32(1), _of_rows(exponents, sizes))
            contribution = Contribution(indices, values.cpu().numpy(), exponents)
            left = chosen.sub_(values * torch.from_numpy(units).to(device))
            return contribution, contribution.values.astype(np.float32) * units, left

        contribution, removed, left = where_it_fits(encode, coefficients.device)
        _put(coefficients, indices, left)
        self.kept[round_number] = Withdrawal(indices, removed)
        return contribution

    def forget(self, round_number: int, uncounted: Uncounted = lambda removed: None) -> bool:
        """Notes that a manifest took the round's contribution, and puts back the part of it that was not counted; False
        if the node has no such contribution."""
        kept = self.kept.pop(round_number, None)
        if kept is not None and (values := uncounted(kept.removed)) is not None:
            self._give_back(round_number, kept.indices, values)
        return kept is not None

    def restore(self, round_number: int) -> bool:
        """Puts back a contribution that no manifest can take any more; False if the node has no such contribution."""
        return self.forget(round_number, lambda removed: removed)

    def _give_back(self, round_number: int, indices: Indices, values: NDArray[np.float32]) -> None:
        coefficients = self._by_fragment[self.fragment_of(round_number)]

        def given_back(device: torch.device) -> Tensor:
            return _at(coefficients.to(device), indices)[0].add_(torch.from_numpy(values).to(device))

        _put(coefficients, indices, where_it_fits(given_back, coefficients.device))

    def keep(self, kept: dict[int, Withdrawal]) -> None:
        """Takes up contributions whose fate is open, from a saved state."""
        self.kept = kept

    def clear(self) -> None:
        """Drops the residual and all contributions whose fate is open."""
        self.coefficients.zero_()
        self.kept.clear()


def _places(indices: Indices, device: torch.device) -> Tensor:  # [chunks, k] int64
    return torch.from_numpy(indices.astype(np.int16)).to(device).long()  # a chunk has fewer than 2**15 numbers


def _at(coefficients: Tensor, indices: Indices) -> tuple[Tensor, Tensor]:  # [chunks, k] fp32, [chunks or 1, k] int64
    """Returns a copy of the coefficients at these places, and the places in each chunk."""
    if indices.shape == coefficients.shape:  # all of them
        return coefficients.to(torch.float32, copy=True), torch.arange(indices.shape[1], device=coefficients.device)[
            None
        ]
    places = _places(indices, coefficients.device)
    return coefficients.gather(1, places).to(torch.float32), places


def _put(coefficients: Tensor, indices: Indices, values: Tensor) -> None:
    def put(device: torch.device) -> None:
        here = coefficients.to(device)
        here.scatter_(1, _places(indices, device), values.to(here))
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

    magnitudes: [chunks, k]; sizes: chunks of each group
    """
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
    return rounded(best)[0].to(_tensor_type(value_bits)), best.astype(np.int8)


def quantise_all(magnitudes: Tensor, sizes: list[int], value_bits: int) -> tuple[Tensor, NDArray[np.int8]]:
    """Returns integers from 0 to 2**(value_bits - 1) - 1, and each group's exponent: the least that cuts nothing off,
    or with few bits the one with the least squared error.

    magnitudes: [chunks, area]; sizes: chunks of each group
    """
    top = (1 << (value_bits - 1)) - 1
    integers = torch.empty_like(magnitudes, dtype=_tensor_type(value_bits, is_dense=True))
    exponents = np.empty(len(sizes), np.int8)
    for number, (rows, whole) in enumerate(
        zip(torch.split(magnitudes, sizes), torch.split(integers, sizes), strict=True)
    ):
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


def _tensor_type(value_bits: int, *, is_dense: bool = False) -> torch.dtype:
    return {1: torch.int8, 2: torch.int16, 4: torch.int32}[value_type(value_bits, is_dense=is_dense).itemsize]


class Recipe(Protocol):
    """The interface of a recipe; its constructor takes (config, live, layouts of the run's fragments), and a plug-in's
    its settings as well."""

    residual: Residual
    base: Tensor  # [parameters] a copy of the agreed weights, renewed before each round
    drift: float | None  # norm of what the last round's steps moved, over that of the weights; None: they move nothing

    def begin(self, round_number: int) -> None:
        """Starts a round, counted from 1, from `base` and what the recipe adds to it."""

    def local_step(self, step: int, batch: Tensor, positions: Sequence[int]) -> StepResult:
        """Takes one local step on `batch`.

        batch: passes_per_step * sequences_per_pass sequences, as `live.packing` makes it; positions: their places in
        the data
        """

    def end(self) -> None:
        """Ends the round's steps."""

    def contribute(self, round_number: int) -> Contribution:
        """Turns the round's steps into a contribution."""

    def state(self) -> dict[str, Tensor]:
        """Returns, between rounds, the other tensors that the next round depends on, not copied."""


class GradientRecipe:
    """`distro` and `demo`: the residual is a momentum of gradients."""

    def __init__(self, config: RecipeConfig, live: LiveModel, layouts: Sequence[Layout]) -> None:
        self.config, self.live = config, live
        self.base = live.weights  # no step moves them
        self.drift: float | None = None  # the steps move nothing
        self.residual = Residual(layouts, live.weights.device, live.state_type)

    def begin(self, round_number: int) -> None:
        pass

    def end(self) -> None:
        pass

    def local_step(self, step: int, batch: Tensor, positions: Sequence[int]) -> StepResult:
        return self.live.gradient_step(step, batch, positions, self.config)

    def contribute(self, round_number: int) -> Contribution:
        self.residual.add(round_number, self.live.parts(self.live.gradient), float(self.config.decay))
        return self.residual.take(round_number, self.config)

    def state(self) -> dict[str, Tensor]:
        return {}


class LocalRecipe:
    """`local`: the residual is how far the inner optimizer has moved the weights, minus everything that was sent.

    A round that begins before the last one is agreed on starts with a part of this node's own contribution to it (Eager
    Updates: Kale et al. 2025, arXiv 2502.12996): half, because of what one node moves about half is what all move.
    Every round also starts with a share of the residual applied (`residual_share`), or a node would learn again what it
    has not sent yet. With fragments, what this round does not agree on has moved here alone: training goes on from
    there (`pending`).
    """

    def __init__(self, config: RecipeConfig, live: LiveModel, layouts: Sequence[Layout]) -> None:
        self.config, self.live, self.early_share = config, live, EARLY_SHARE
        self.base = live.weights.clone()
        self.residual = Residual(layouts, live.weights.device, live.state_type)
        self.inner = INNER_OPTIMIZERS[config.inner](config, live)
        self.rate = 0.0
        self.drift: float | None = None
        self.pending = torch.zeros_like(live.weights) if config.fragments > 1 else None
        self._is_moved = False  # whether the live weights are how far this round's steps have moved

    def begin(self, round_number: int) -> None:
        self.live.weights.copy_(self.base)
        if self.pending is not None:
            self.live.weights.sub_(self.pending)
        self._start_ahead(1)
        self.rate = float(inner_rate(self.config, max(0, round_number - 1)))  # the schedule counts from 0
        self._is_moved = False

    def shorten(self, share: float) -> None:
        """Makes the steps of a round that has begun shorter, because they take only this share of their sequences: what
        they move, squared, is then as the work in them."""
        self.rate *= math.sqrt(share)

    def local_step(self, step: int, batch: Tensor, positions: Sequence[int]) -> StepResult:
        result = self.live.gradient_step(step, batch, positions, self.config)
        self.inner.step(self.rate)
        return result

    def end(self) -> None:
        torch.sub(self.base, self.live.weights, out=self.live.weights)
        if self.pending is not None:
            self.live.weights.sub_(self.pending)
        self._start_ahead(1)
        self.take(self.live.weights)

    def _start_ahead(self, sign: int) -> None:
        """Applies shares of our open contributions and of the residual to the live weights; -1 takes them back."""
        weights = self.live.parts(self.live.weights)
        for number, kept in sorted(self.residual.kept.items()):
            layout = self.residual.layouts[self.residual.fragment_of(number)]
            apply_own(layout, kept.indices, kept.removed, sign * self.early_share, weights)
        if share := self.config.residual_share * self.config.decay:  # decay comes first: only so much is left to send
            self.residual.subtract_from(weights, sign * float(share))

    @contextmanager
    def rebased(self) -> Iterator[None]:
        """Lets `base` change between two steps: the round's steps go on from the new weights."""
        self._start_ahead(-1)
        self.live.weights.sub_(self.base)
        try:
            yield
        finally:
            self.live.weights.add_(self.base)
            self._start_ahead(1)

    def take(self, moved: Tensor) -> None:
        """Takes how far a round's steps have moved the weights, with the sign of a gradient."""
        if moved is not self.live.weights:
            self.live.weights.copy_(moved)
        self._is_moved = True
        distance, norm = (float(torch.linalg.vector_norm(each)) for each in (self.live.weights, self.base))
        self.drift = distance / norm if norm else None

    def contribute(self, round_number: int) -> Contribution:
        assert self._is_moved, "a round's steps end before they are contributed"
        moved = self.live.weights if self.pending is None else self.pending.add_(self.live.weights)
        parts = self.live.parts(moved)
        self.residual.add(round_number, parts, float(self.config.decay))
        if self.pending is not None:
            for group in self.residual.layouts[self.residual.fragment_of(round_number)].groups:
                for place in group.members:
                    parts[place].zero_()
        return self.residual.take(round_number, self.config)

    def state(self) -> dict[str, Tensor]:
        pending = {} if self.pending is None else {"pending": self.pending}
        return self.inner.state() | pending


def make_recipe(config: RecipeConfig, live: LiveModel, layouts: Sequence[Layout]) -> Recipe:
    """Makes the run's recipe, or the plug-in's that takes its place: how contributions are applied stays the same."""
    if config.plugin:
        made: Recipe = plugins.make("recipe", config.plugin, config.settings, config, live, layouts)
        return made
    return (GradientRecipe if config.spec.kind == "gradient" else LocalRecipe)(config, live, layouts)


def copies_of(config: RecipeConfig) -> int:
    """Returns how many copies of the weights the recipe keeps, besides the live ones; a plug-in says what it adds."""
    added = getattr(plugins.load("recipe", config.plugin), "copies", 0) if config.plugin else 0
    return config.spec.copies + int(added)
