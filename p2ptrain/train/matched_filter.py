"""The matched filter: whether a contribution comes from the sequences that its author was given.

The gradient of some of these sequences, at the weights that the contribution was computed from, is the filter (North
1943). A contribution that has learned from them answers to it more than the other contributions of the round do, which
have learned from others: `z` says by how many of their standard deviations, after what all have in common is taken
away. `strength` is how far it goes where the filter points, as a share of what the median of the others does. No
training, residual or optimizer's state is needed, so every member that has the weights and the data can compute both.

The sequences are read in sets. The z of each is cut off at CUT before they are added up, or who forges a contribution
from a few of its sequences would be taken for one that has learned from all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from p2ptrain.config import RecipeConfig
from p2ptrain.exact.codec import Contribution
from p2ptrain.exact.transform import Layout
from p2ptrain.train.inner import hidden_batches, orthogonalised
from p2ptrain.train.live import LiveModel

CUT = 2.0  # of a set's z
OTHERS_MIN = 4  # contributions without which there is no spread to compare with


class Match(NamedTuple):
    """How well a contribution matches its author's sequences."""

    z: float
    strength: float


class MatchedFilter:
    """Compares contributions with the gradient of sequences, at the live model's weights."""

    def __init__(self, recipe: RecipeConfig, live: LiveModel, layout: Layout) -> None:
        self._recipe, self._live, self._layout = recipe, live, layout
        is_local = recipe.spec.kind == "local"
        hidden = live.is_hidden_matrix if is_local else [True] * len(live.shapes)
        chunks = [slice(group.first_chunk, group.first_chunk + group.chunks)
                  for group in layout.groups if all(hidden[place] for place in group.members)]  # fmt: skip
        # Steps move hidden matrices in nearly all of their directions alike, so their filter is orthogonal, too. The
        # embedding moves where a token occurs, whoever trains on it.
        self._is_orthogonal, self._chunks = is_local, chunks

    def answers(self, batch: Tensor, contributions: Sequence[Contribution]) -> NDArray[np.float64]:  # [contributions]
        """Returns the cosine of each contribution with the filter of these sequences; a zero contribution has none."""
        self._live.gradient_step(0, batch, [], self._recipe)
        filters = self._filter()
        norm = math.sqrt(sum(float(filters[rows].double().square_().sum()) for rows in self._chunks))
        return np.array([self._product(filters, each) / norm if norm else 0.0 for each in contributions])

    @torch.no_grad()
    def _filter(self) -> Tensor:  # [chunks, area]
        live = self._live
        parts = live.parts(live.gradient)
        for places in hidden_batches(live) if self._is_orthogonal else ():
            whole = orthogonalised([parts[place] for place in places], is_half=live.autocast)
            for place, each in zip(places, whole, strict=True):
                parts[place].copy_(each.T if each.shape != parts[place].shape else each)
        found = torch.zeros(self._layout.chunks, self._layout.area, device=live.weights.device)
        self._layout.accumulate(parts, found, 0.0)
        return found

    def likeness(self, contributions: Sequence[Contribution]) -> NDArray[np.float64]:
        """Returns the cosine of each contribution with each other one, [contributions, contributions]."""
        found = np.empty((len(contributions), len(contributions)))
        for place, one in enumerate(contributions):
            whole, values = torch.zeros(self._layout.chunks, self._layout.area), self._values(one)
            whole.scatter_(1, torch.from_numpy(one.indices.astype(np.int64)), values.float())
            norm = math.sqrt(sum(float(values[rows].square().sum()) for rows in self._chunks))
            found[place] = [self._product(whole, each) / norm if norm else 0.0 for each in contributions]
        return found

    def _values(self, contribution: Contribution) -> Tensor:  # [chunks, k] fp64
        sizes, exponents = [group.chunks for group in self._layout.groups], contribution.exponents
        units = np.ones(len(sizes)) if exponents is None else np.ldexp(1.0, exponents.astype(np.int64))
        return torch.from_numpy(contribution.values * np.repeat(units, sizes)[:, None])

    def _product(self, whole: Tensor, contribution: Contribution) -> float:  # whole: [chunks, area]
        """Returns the product of all coefficients with a contribution of unit length."""
        values, places = self._values(contribution), torch.from_numpy(contribution.indices.astype(np.int64))
        product = square = 0.0
        for rows in self._chunks:
            product += float((whole[rows].gather(1, places[rows].to(whole.device)).cpu() * values[rows]).sum())
            square += float(values[rows].square().sum())
        return product / math.sqrt(square) if square else 0.0


def judge(answers: NDArray[np.float64], likeness: NDArray[np.float64], own: int) -> Match:
    """Judges the contribution at place `own` by how all answer to the filters of its author's sets.

    answers: [sets, contributions]; likeness: [contributions, contributions] cosines
    """
    others = [place for place in range(answers.shape[1]) if place != own]
    beyond = np.stack([_beyond_common(answers, likeness, place, [each for each in others if each != place])
                       for place in [own, *others]])  # fmt: skip
    spread = beyond[1:].std(axis=0, ddof=1)
    z = (beyond[0] - beyond[1:].mean(axis=0)) / np.where(spread > 0, spread, np.inf)
    middle = float(np.median(answers[:, others].mean(axis=0)))
    strength = float(answers[:, own].mean()) / middle if middle > 0 else 0.0
    return Match(float(np.clip(z, -CUT, CUT).sum()) / math.sqrt(len(answers)), strength)


def _beyond_common(
    answers: NDArray[np.float64], likeness: NDArray[np.float64], place: int, others: list[int]
) -> NDArray[np.float64]:  # [sets]
    """Returns how much more a contribution answers than by what it has in common with the sum of these others: that sum
    itself, which has the least noise, would answer to any filter better than a member's own work does."""
    along, size = likeness[place, others].sum(), likeness[np.ix_(others, others)].sum()
    common: NDArray[np.float64] = answers[:, others].sum(axis=1) * (along / size if size > 0 else 0.0)
    return answers[:, place] - common
