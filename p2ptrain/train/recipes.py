"""Recipes: how a node turns steps into a contribution, and the swarm's votes into an update.

A recipe never communicates. All three keep a residual (residual.py), which holds everything that the swarm has not been
told yet, and contribute its largest DCT coefficients each round:

- `distro` (Peng, Quesnelle, Kingma 2024, arXiv 2411.19870; signs as in Nous' DisTrO): the residual is a
  momentum, which decays slowly and takes one gradient a round. Only signs are sent.
- `demo`: the same with small integers and a power-of-two scale per tensor: like the paper's, at a tenth of the size.
- `local` (DiLoCo, Douillard et al. 2023, arXiv 2311.08105; with top-k and error feedback as in
  SparseLoCo, Sarfi et al. 2025, arXiv 2508.15706): several steps of an inner optimizer a round; the distance they
  moved is added to the residual. Signs or small integers are sent, with a power-of-two scale per tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from p2ptrain.config import RecipeConfig
from p2ptrain.exact.codec import Contribution
from p2ptrain.exact.kernels.launches import OnCard
from p2ptrain.exact.schedule import inner_rate
from p2ptrain.exact.transform import Layout
from p2ptrain.models import plugins
from p2ptrain.train.inner import INNER_OPTIMIZERS
from p2ptrain.train.live import LiveModel, StepResult
from p2ptrain.train.residual import Residual

EARLY_SHARE = 0.5  # of an own contribution, until it is applied (docs/explanation/lateness.md)


class Recipe(Protocol):
    """A recipe's interface; it is made of (config, live, layouts of the fragments), a plug-in's of settings, too."""

    residual: Residual
    base: Tensor  # [parameters] a copy of the agreed weights, renewed before each round
    drift: float | None  # norm of what the last round's steps moved, over that of the weights; None: they move nothing

    def begin(self, round_number: int) -> None:
        """Starts a round, counted from 1, from `base` and what the recipe adds to it."""

    def local_step(self, step: int, batch: Tensor, positions: Sequence[int]) -> StepResult:
        """Takes one local step on `batch`.

        batch: passes_per_step * sequences_per_pass sequences, as `live.packing` makes it; positions: theirs in the data
        """

    def end(self) -> None:
        """Ends the round's steps."""

    def contribute(self, round_number: int) -> Contribution | OnCard:
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

    def contribute(self, round_number: int) -> Contribution | OnCard:
        self.residual.add(round_number, self.live.parts(self.live.gradient), float(self.config.decay))
        return self.residual.take(round_number, self.config)

    def state(self) -> dict[str, Tensor]:
        return {}


class LocalRecipe:
    """`local`: the residual is how far the inner optimizer has moved the weights, minus everything that was sent.

    A round that begins before the last one is agreed on starts with a part of this node's own contribution to it (Eager
    Updates: Kale et al. 2025, arXiv 2502.12996): half, because of what one node moves about half is what all move.
    Every round also starts with a share of the residual applied (`residual_share`), or a node would learn again what it
    has not sent yet. With fragments, what this round does not agree on has moved here alone, and stays (`pending`)."""

    def __init__(self, config: RecipeConfig, live: LiveModel, layouts: Sequence[Layout]) -> None:
        self.config, self.live, self.early_share = config, live, EARLY_SHARE
        self.base = live.weights.clone()
        self.residual = Residual(layouts, live.weights.device, live.state_type)
        self.inner = INNER_OPTIMIZERS[config.inner](config, live)
        self.rate = 0.0
        self.drift: float | None = None
        self.pending = torch.zeros_like(live.weights) if config.fragments > 1 else None
        self._is_moved = False  # whether the live weights are how far this round's steps have moved
        self._share = float(config.residual_share * config.decay)  # decay comes first: only so much is left to send

    def begin(self, round_number: int) -> None:
        self.live.weights.copy_(self.base)
        if self.pending is not None:
            self.live.weights.sub_(self.pending)
        self._start_ahead()
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
        self._start_ahead()
        self.take(self.live.weights)

    def _start_ahead(self) -> None:
        """Applies shares of our open contributions and of the residual to the live weights."""
        self.residual.subtract_ahead_from(self.live.parts(self.live.weights), self._share, self.early_share)

    @contextmanager
    def rebased(self) -> Iterator[None]:
        """Lets `base` change between two steps: the round's steps go on from the new weights."""
        self.live.weights.sub_(self.base)
        try:
            with self.residual.kept_ahead(self.live.parts(self.live.weights), self._share, self.early_share):
                yield
        finally:
            self.live.weights.add_(self.base)

    def take(self, moved: Tensor) -> None:
        """Takes how far a round's steps have moved the weights, with the sign of a gradient."""
        if moved is not self.live.weights:
            self.live.weights.copy_(moved)
        self._is_moved = True
        distance, norm = (float(torch.linalg.vector_norm(each)) for each in (self.live.weights, self.base))
        self.drift = distance / norm if norm else None

    def contribute(self, round_number: int) -> Contribution | OnCard:
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
        return self.inner.state() | ({} if self.pending is None else {"pending": self.pending})


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
