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
the part that falls on the padding; `Layout.project` removes it.

A contribution that no manifest takes has told the swarm nothing. The exact values that left the residual are
therefore kept until a manifest takes the contribution (`forget`) or none can any more (`restore`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from p2ptrain.config import RecipeConfig
from p2ptrain.learn import plugins
from p2ptrain.learn.codec import EXPONENT_MAX, EXPONENT_MIN, Contribution, Indices, Values, value_type
from p2ptrain.learn.inner import INNER_OPTIMIZERS
from p2ptrain.learn.live import LiveModel, StepResult
from p2ptrain.learn.schedule import inner_rate
from p2ptrain.learn.selection import largest
from p2ptrain.learn.shortage import where_it_fits
from p2ptrain.learn.transform import Layout

KEPT_ROUNDS_MAX = 128  # contributions whose fate is open; staleness_rounds_max is at most 64, and overlap adds some


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """The values that left the residual with a contribution whose fate is open."""

    indices: Indices  # [chunks, k]
    removed: NDArray[np.float32]  # [chunks, k]


class Residual:
    """The part of this node's training that it has not yet contributed, as DCT coefficients."""

    def __init__(self, layout: Layout, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.layout = layout
        self.coefficients = torch.zeros(layout.chunks, layout.area, device=device, dtype=dtype)
        self.kept: dict[int, Withdrawal] = {}
        self._padding = layout.padding_masks(device)

    def add(self, tensors: Sequence[Tensor], keep: float) -> None:
        self.layout.accumulate(tensors, self.coefficients, keep)
        self.layout.project(self.coefficients, *self._padding)

    def take(self, round_number: int, recipe: RecipeConfig) -> Contribution:
        """Makes the round's contribution, and subtracts its values from the residual."""
        assert round_number not in self.kept, "one contribution a round"
        assert len(self.kept) < KEPT_ROUNDS_MAX, "every contribution is forgotten or restored in the end"
        indices = largest(self.coefficients, recipe.k)
        chosen = self._at(indices)
        # k coefficients are sent even for a chunk that has fewer: zeros get alternating signs, otherwise all peers
        # would push the same way forever.
        turn = (indices.astype(np.int64) + round_number) % 2 == 1
        signs = np.where((chosen < 0) | ((chosen == 0) & turn), np.int8(-1), np.int8(1))
        if recipe.spec.is_scaled:
            sizes = [group.chunks for group in self.layout.groups]
            magnitudes, exponents = quantise(np.abs(chosen), sizes, recipe.value_bits)
            units = np.repeat(np.ldexp(np.float32(1), exponents), sizes)
            contribution = Contribution(indices, signs * magnitudes, exponents)
            removed = contribution.values * units[:, None]
        else:  # a sign has no size, so the whole coefficient counts as sent
            contribution = Contribution(indices, signs)
            removed = chosen
        self._put(indices, chosen - removed)
        self.kept[round_number] = Withdrawal(indices, removed)
        return contribution

    def forget(
        self, round_number: int, uncounted: Callable[[NDArray[np.float32]], NDArray[np.float32]] | None = None
    ) -> bool:
        """Notes that a manifest took the round's contribution, and puts back the part of it that was not counted; False
        if the node has no such contribution."""
        kept = self.kept.pop(round_number, None)
        if kept is not None and uncounted is not None:
            self._put(kept.indices, self._at(kept.indices) + uncounted(kept.removed))
        return kept is not None

    def restore(self, round_number: int) -> bool:
        """Puts back a contribution that no manifest can take any more; False if the node has no such contribution."""
        kept = self.kept.pop(round_number, None)
        if kept is None:
            return False
        self._put(kept.indices, self._at(kept.indices) + kept.removed)
        return True

    def keep(self, kept: dict[int, Withdrawal]) -> None:
        """Takes up contributions whose fate is open, from a saved state."""
        self.kept = kept

    def clear(self) -> None:
        """Drops the residual and all contributions whose fate is open."""
        self.coefficients.zero_()
        self.kept.clear()

    def _at(self, indices: Indices) -> NDArray[np.float32]:
        def look(device: torch.device) -> NDArray[np.float32]:
            return self.coefficients.to(device).gather(1, places.to(device)).to(torch.float32).cpu().numpy()

        places = torch.from_numpy(indices.astype(np.int64))
        return where_it_fits(look, self.coefficients.device)

    def _put(self, indices: Indices, values: NDArray[np.float32]) -> None:
        def put(device: torch.device) -> None:
            here = self.coefficients.to(device)
            here.scatter_(1, places.to(device), torch.from_numpy(values).to(here))
            if here is not self.coefficients:
                self.coefficients.copy_(here)

        places = torch.from_numpy(indices.astype(np.int64))
        where_it_fits(put, self.coefficients.device)


def quantise(magnitudes: NDArray[np.float32], sizes: Sequence[int], value_bits: int) -> tuple[Values, NDArray[np.int8]]:
    """Returns integers from 1 to 2**(value_bits - 1), and each group's exponent with the least squared error.

    magnitudes: [chunks, k]; sizes: chunks of each group
    """
    top = 1 << (value_bits - 1)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    exact = magnitudes.astype(np.float64)

    def rounded(exponents: NDArray[np.int32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns the integers for these exponents [chunks, k], and each group's squared error [groups]."""
        units = np.repeat(np.ldexp(1.0, exponents), sizes)[:, None]
        integers = np.clip(np.rint(exact / units), 1, top)
        return integers, np.add.reduceat(np.square(exact - integers * units).sum(axis=1), starts)

    means = np.add.reduceat(exact.sum(axis=1), starts) / (np.array(sizes) * magnitudes.shape[1])
    above = np.where(means > 0, np.frexp(means)[1], EXPONENT_MIN)  # 2**above is less than twice the mean
    candidates = [np.clip(above - back, EXPONENT_MIN, EXPONENT_MAX) for back in range(value_bits + 1)]
    best = np.choose(np.argmin([rounded(exponents)[1] for exponents in candidates], axis=0), candidates)
    return rounded(best)[0].astype(value_type(value_bits)), best.astype(np.int8)


class Recipe(Protocol):
    """The interface of a recipe; its constructor takes (config, live, layout), and a plug-in's its settings as well."""

    residual: Residual
    agreed: Tensor  # [parameters] the flat master weights, which the trainer updates in place
    drift: float | None  # norm of what the last round's steps moved, over that of the weights; None: they move nothing

    def begin(self, round_number: int) -> None:
        """Starts a round from the agreed weights."""

    def local_step(self, step: int, batch: Tensor, positions: Sequence[int]) -> StepResult:
        """Takes one local step on `batch`.

        batch: [passes_per_step * sequences_per_pass, length + 1]; positions: its sequences' places in the data
        """

    def end(self) -> None:
        """Ends the round's steps. The agreed weights may change before they are contributed."""

    def contribute(self, round_number: int) -> Contribution:
        """Turns the round's steps into a contribution."""

    def state(self) -> dict[str, Tensor]:
        """Returns, between rounds, the other tensors that the next round depends on, not copied."""


class GradientRecipe:
    """`distro` and `demo`: the residual is a momentum of gradients."""

    def __init__(self, config: RecipeConfig, live: LiveModel, layout: Layout) -> None:
        self.config, self.live = config, live
        self.agreed = live.weights  # only the agreed update ever changes them
        self.drift: float | None = None  # the steps move nothing
        self.residual = Residual(layout, live.weights.device, live.state_type)

    def begin(self, round_number: int) -> None:
        pass

    def end(self) -> None:
        pass

    def local_step(self, step: int, batch: Tensor, positions: Sequence[int]) -> StepResult:
        return self.live.gradient_step(step, batch, positions, self.config)

    def contribute(self, round_number: int) -> Contribution:
        self.residual.add(self.live.parts(self.live.gradient), float(self.config.decay))
        return self.residual.take(round_number, self.config)

    def state(self) -> dict[str, Tensor]:
        return {}


class LocalRecipe:
    """`local`: the residual is how far the inner optimizer has moved the weights, minus everything that was sent."""

    def __init__(self, config: RecipeConfig, live: LiveModel, layout: Layout) -> None:
        self.config, self.live = config, live
        self.agreed = live.weights.clone()
        self.residual = Residual(layout, live.weights.device, live.state_type)
        self.inner = INNER_OPTIMIZERS[config.inner](config, live)
        self.rate = 0.0
        self.drift: float | None = None
        self._is_moved = False  # whether the live weights are how far this round's steps have moved

    def begin(self, round_number: int) -> None:
        self.live.weights.copy_(self.agreed)
        self.rate = float(inner_rate(self.config, round_number))
        self._is_moved = False

    def local_step(self, step: int, batch: Tensor, positions: Sequence[int]) -> StepResult:
        result = self.live.gradient_step(step, batch, positions, self.config)
        self.inner.step(self.rate)
        return result

    def end(self) -> None:
        self.take(torch.sub(self.agreed, self.live.weights, out=self.live.weights))

    def take(self, moved: Tensor) -> None:
        """Takes how far a round's steps have moved the weights, with the sign of a gradient."""
        self.live.weights.copy_(moved)
        self._is_moved = True
        distance, norm = (float(torch.linalg.vector_norm(each)) for each in (self.live.weights, self.agreed))
        self.drift = distance / norm if norm else None

    def contribute(self, round_number: int) -> Contribution:
        assert self._is_moved, "a round's steps end before they are contributed"
        self.residual.add(self.live.parts(self.live.weights), float(self.config.decay))
        return self.residual.take(round_number, self.config)

    def state(self) -> dict[str, Tensor]:
        return self.inner.state()


def make_recipe(config: RecipeConfig, live: LiveModel, layout: Layout) -> Recipe:
    """Makes the run's recipe, or the plug-in's that takes its place: how contributions are applied stays the same."""
    if config.plugin:
        made: Recipe = plugins.make("recipe", config.plugin, config.settings, config, live, layout)
        return made
    return GradientRecipe(config, live, layout) if config.spec.kind == "gradient" else LocalRecipe(config, live, layout)


def copies_of(config: RecipeConfig) -> int:
    """Returns how many copies of the weights the recipe keeps, besides the live ones; a plug-in says what it adds."""
    added = getattr(plugins.load("recipe", config.plugin), "copies", 0) if config.plugin else 0
    return config.spec.copies + int(added)
