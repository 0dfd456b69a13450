"""Robust rules: which of a round's contributions count, or which of their votes; chosen alike on every machine.

By default all contributions count, each bounded by its scale (exact/scales.py). A run may name a rule instead
(`recipe.rule`), with f the number of liars that it expects (`byzantine`), or with `trim`:

    trimmed              leaves out the `trim` contributions with the lowest cosine to the sum of the others
    trimmed_coordinates  leaves out the `trim` largest and smallest votes on each coordinate (Yin et al. 2018, arXiv
                         1803.01498)
    krum, multi_krum     takes the contribution that is nearest to its n - f - 2 nearest others, or the n - f first in
                         that order (Blanchard et al. 2017, arXiv 1703.02757)
    bulyan               takes n - 2f by repeated Krum, and on each coordinate those n - 4f of their votes that are
                         nearest to the median (El Mhamdi et al. 2018, arXiv 1802.07927)
    clipped              halves what is farther from the mean of all than n - f contributions are, once for each factor
                         of 2 by which it is, towards zero (after Karimireddy et al. 2021, arXiv 2012.10333)

They compare votes: integers in common units, cut as they would be counted. Products of two contributions are integers,
distances and cosines follow from these exactly, and of equals the one whose author has the lower key comes first. The
transform keeps norms, so coefficients are as good as weights. Chosen contributions are then counted as if there were no
others, but weigh no more than they would have. A round with fewer than the rule's theory asks for moves nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import islice
from typing import Self

import numpy as np
import torch
from torch import Tensor

from p2ptrain.config import RecipeConfig
from p2ptrain.exact.codec import Contribution, Indices, Packed, Values, unpack_chunks
from p2ptrain.exact.scales import SILENCED, Scales, Sizes
from p2ptrain.exact.schedule import exact_float
from p2ptrain.exact.shortage import where_it_fits
from p2ptrain.exact.transform import Layout

# Votes laid out at a time, 32 MiB. With at most 2**12 a vote, the largest that rules accept, products stay below 2**53.
BLOCK_VOTES = 2**22


@dataclass(frozen=True, slots=True)
class Offered:
    """The contributions of a round, in the order of their authors' keys, and the scales by which they are counted.

    reach: bounds the scales; unpacked: those that need not be unpacked again"""

    layout: Layout
    recipe: RecipeConfig
    payloads: Sequence[Packed]
    unpacked: Mapping[Packed, Contribution]
    reach: int | None
    sizes: Sequence[Sizes]  # empty if they have no scales
    scales: Scales | None

    @classmethod
    def of(
        cls,
        layout: Layout,
        recipe: RecipeConfig,
        payloads: Sequence[Packed],
        unpacked: Mapping[Packed, Contribution],
        reach: int | None,
    ) -> Self:
        sizes = [Sizes.of(each, layout) for each in payloads] if recipe.spec.is_scaled else []
        scales = Scales.of(sizes, layout, recipe, reach) if sizes else None
        return cls(layout, recipe, payloads, unpacked, reach, sizes, scales)

    def only(self, numbers: Sequence[int]) -> Self:
        """Returns some of the contributions, as if there were no others.

        The measure of all bounds theirs: otherwise liars could set it, who are more of these than they were of all."""
        payloads = [self.payloads[number] for number in numbers]
        sizes = [self.sizes[number] for number in numbers if self.sizes]
        scales = Scales.of(sizes, self.layout, self.recipe, self.reach, self.sizes) if sizes else None
        return replace(self, payloads=payloads, sizes=sizes, scales=scales)

    def blocks(self) -> Iterator[list[slice]]:
        """Yields the chunks of each group, as many at a time as fit a block."""
        step = max(1, BLOCK_VOTES // (len(self.payloads) * self.layout.area))
        for group in self.layout.groups:
            end = group.first_chunk + group.chunks
            yield [slice(first, min(first + step, end)) for first in range(group.first_chunk, end, step)]

    def laid_out(self, chunks: slice, dtype: torch.dtype, device: torch.device) -> Tensor:  # [contributions, votes]
        """Returns every contribution's votes on all coordinates of some chunks."""
        shape = len(self.payloads), chunks.stop - chunks.start, self.layout.area
        whole = torch.zeros(shape, dtype=dtype, device=device)
        for number, own in enumerate(whole):
            indices, values = self._read(self.payloads[number], chunks)
            votes = self.scales.votes(number, values, chunks.start) if self.scales else values
            places = torch.from_numpy(indices.astype(np.int16)).to(device).long()  # a chunk has at most 2**12 numbers
            own.scatter_(1, places, torch.from_numpy(votes).to(device, dtype))
        return whole.view(len(whole), -1)

    def _read(self, payload: Packed, chunks: slice) -> tuple[Indices, Values]:  # [chunks, k]
        known = self.unpacked.get(payload)
        return (known.indices[chunks], known.values[chunks]) if known else unpack_chunks(*payload, chunks)


def by_rule(offered: Offered, device: torch.device) -> tuple[Sequence[int], Offered]:
    """Returns which contributions count, by their places, and those with their scales."""
    recipe, everyone = offered.recipe, range(len(offered.payloads))
    if len(everyone) < recipe.contributions_min:
        return [], offered.only([])
    if recipe.rule in ("all", "trimmed_coordinates"):
        return everyone, _thinned(offered)
    products = _products(offered, device)
    if recipe.rule == "clipped":
        assert offered.scales is not None, "the config refuses it otherwise"
        cuts = offered.scales.cuts + np.array(halvings(products, recipe.byzantine))[:, None]
        return everyone, replace(offered, scales=replace(offered.scales, cuts=cuts))
    chosen = selected(recipe, products)
    return chosen, _thinned(offered.only(chosen))


def votes_left(recipe: RecipeConfig, count: int) -> int:
    """Returns how many votes on each coordinate a rule leaves of these."""
    spare = {"trimmed_coordinates": recipe.trim, "bulyan": recipe.byzantine}.get(recipe.rule, 0)
    return count - 2 * spare


def _thinned(offered: Offered) -> Offered:
    """Returns contributions whose effective number is a share of what it was, as large as that of the votes left."""
    count = len(offered.payloads)
    left = votes_left(offered.recipe, count)
    if offered.scales is None or left == count:
        return offered
    effective = tuple(exact_float(Fraction(each) * left / count) for each in offered.scales.effective)
    return replace(offered, scales=replace(offered.scales, effective=effective))


def middle_votes(offered: Offered, device: torch.device) -> Tensor:  # [chunks, area] int32
    """Adds up the votes that a rule by coordinate leaves."""
    sums = torch.empty(offered.layout.chunks, offered.layout.area, dtype=torch.int32, device=device)
    middle = BY_COORDINATE[offered.recipe.rule]
    for blocks in offered.blocks():
        for chunks in blocks:
            votes = offered.laid_out(chunks, torch.int32, device)
            sums[chunks].view(-1).copy_(middle(votes, votes_left(offered.recipe, len(votes))))
    return sums


def _without_extremes(votes: Tensor, left: int) -> Tensor:  # [contributions, n] -> [n]
    trim = (len(votes) - left) // 2
    return votes.sort(dim=0).values[trim : trim + left].sum(dim=0)


def _nearest_to_median(votes: Tensor, left: int) -> Tensor:  # [contributions, n] -> [n]
    """Adds up those nearest to the lower median; of two that are equally near, the smaller comes first."""
    median = votes.sort(dim=0).values[(len(votes) - 1) // 2]
    away = votes - median
    ranked = (2 * away.abs() + (away > 0)).sort(dim=0).values[:left]  # odd if it lies above the median
    return (ranked // 2 * (ranked % 2 * 2 - 1)).sum(dim=0) + left * median


BY_COORDINATE = {"trimmed_coordinates": _without_extremes, "bulyan": _nearest_to_median}

# -- Comparing whole contributions. Products are Python's integers, for they may take more than 64 bits. ---


def _products(offered: Offered, device: torch.device) -> list[list[int]]:
    """Multiplies every two contributions with each other, in the square of the smallest unit."""
    count = len(offered.payloads)
    units = offered.scales.units if offered.scales else (0,) * len(offered.layout.groups)
    total = np.zeros((count, count), object)
    for unit, blocks in zip(units, offered.blocks(), strict=True):
        of_group = np.zeros((count, count), np.int64)
        for chunks in blocks:
            of_group += where_it_fits(partial(_products_of_some, offered, chunks), device).numpy()
        total += of_group.astype(object) * 4 ** (unit - min(units))
    products: list[list[int]] = total.tolist()
    return products


def _products_of_some(offered: Offered, chunks: slice, device: torch.device) -> Tensor:  # [n, n] int64
    votes = offered.laid_out(chunks, torch.float64, device)
    return torch.mm(votes, votes.T).long().cpu()


def selected(recipe: RecipeConfig, products: Sequence[Sequence[int]]) -> list[int]:
    """Returns the places of the contributions that a rule takes; they rise."""
    count, f = len(products), recipe.byzantine
    if recipe.rule == "trimmed":
        cosines = _cosines(products)
        return sorted(sorted(range(count), key=lambda one: -cosines[one])[: count - recipe.trim])
    order = _by_krum(products, f, count - 2 * f if recipe.rule == "bulyan" else 1)
    return sorted(order[: {"krum": 1, "multi_krum": count - f, "bulyan": count - 2 * f}[recipe.rule]])


def _cosines(products: Sequence[Sequence[int]]) -> list[Fraction]:
    """Returns the square of each contribution's cosine to the sum of the others, with the cosine's sign."""
    rows = [sum(row) for row in products]
    found = []
    for place, row in enumerate(rows):
        own = products[place][place]
        others = sum(rows) - 2 * row + own  # the square of their sum
        found.append(Fraction((row - own) * abs(row - own), own * others or 1))
    return found


def _by_krum(products: Sequence[Sequence[int]], f: int, rounds: int) -> list[int]:
    """Returns all places, the best first: one by each round of Krum, and in the last one the others in their order."""
    count, order = len(products), []
    distances = [[products[a][a] + products[b][b] - 2 * products[a][b] for b in range(count)] for a in range(count)]
    nearest = [sorted(range(count), key=distances[one].__getitem__) for one in range(count)]
    left = set(range(count))

    def score(one: int) -> int:
        neighbours = (distances[one][other] for other in nearest[one] if other != one and other in left)
        return sum(islice(neighbours, max(1, len(left) - f - 2)))

    for _ in range(rounds - 1):
        order.append(min(sorted(left), key=score))
        left.remove(order[-1])
    return order + sorted(sorted(left), key=score)


def halvings(products: Sequence[Sequence[int]], f: int) -> list[int]:
    """Returns how often each distance from the mean has to be halved until it is no farther than n - f are."""
    count, rows = len(products), [sum(row) for row in products]
    # Squared distances from the mean, times n * n.
    away = [count * (count * products[one][one] - 2 * rows[one]) + sum(rows) for one in range(count)]
    most = sorted(away)[count - f - 1]
    return [next((each for each in range(SILENCED) if own <= most << 2 * each), SILENCED) for own in away]
