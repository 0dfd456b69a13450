"""Brings a round's scaled contributions to a common unit, and bounds the weight of each.

In each group, a contribution scales its integers by a power of two of its own choice, so without a bound its weight
would be unlimited. Its size in a group is the sum of its squared values, scale included. The measure of a round is the
largest size once the largest third is ignored, so a third of the contributions cannot raise it above the sizes of the
others (a quantile, as in Yin et al. 2018, arXiv 1803.01498; where most nodes take one step, the median would cut those
that take ten). A contribution with twice the measure's amplitude or more is halved until it has less; its author
returns the cut part to its residual.

In a round with few contributions, liars may be more than a third of them, or all. So the measure is also bounded by the
distance that local steps can move the weights (`reach` in schedule.py).

A machine that takes few of a round's steps contributes little. If the sum were divided by the number of contributions,
each small one would shorten the step that the others take, and a slow machine would do harm. So a `mean` divides each
group by its effective number: a contribution counts as one if it has the measure's size or more, and else as its size
over the measure. Steps are mostly noise, so a movement's square grows with their number, and a contribution counts as
the work in it. That needs no claim, and a lie counts for one contribution at most.

All of it is exact: sizes are integers times powers of two, halving moves a scale, and the votes are integers in units
of 2**unit, which lies `room_bits` below the measure's root mean square. Values below half a unit count as zero, and a
single vote never counts more than `vote_max`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from p2ptrain.config import RecipeConfig
from p2ptrain.exact.codec import Packed, Values, read_exponents, read_squares
from p2ptrain.exact.transform import Layout

VALUE_MAX, DENSE_VALUE_MAX = 2**15 - 1, 2**23 - 1  # the largest integers in contributions of some and of all weights
NOTHING_BITS = 40  # so many halvings leave no such integer; so many doublings exceed any `vote_max`, within 64 bits
BLOCK_VALUES = 2**18  # worked out at a time: all at once would take several times their memory
SILENCED = 2**10  # halvings that leave zero, whatever the exponents
SHARE_BITS = 20  # of a contribution's share in the effective number, which is a sum of integers
Votes = NDArray[np.int16] | NDArray[np.int32]


class Sizes(NamedTuple):
    """A contribution's exponents, and the sums of its squared integers."""

    exponents: NDArray[np.int8]  # [groups]
    squares: NDArray[np.float64]  # [groups] rounded once

    @classmethod
    def of(cls, payload: Packed, layout: Layout) -> Sizes:
        starts, squares = [group.first_chunk for group in layout.groups], read_squares(*payload)
        # In two halves, for the sum over a group may take more than 64 bits: it is exact, and then rounded once.
        high, low = (np.add.reduceat(half, starts).tolist() for half in (squares >> 32, squares & (2**32 - 1)))
        sums = [float((upper << 32) + lower) for upper, lower in zip(high, low, strict=True)]
        return cls(read_exponents(*payload), np.array(sums))


@dataclass(frozen=True, slots=True)
class Scales:
    """The units of a round's votes, and how often each contribution is halved to fit them."""

    units: tuple[int, ...]  # [groups] votes are in units of 2**unit
    exponents: NDArray[np.int64]  # [contributions, groups]
    cuts: NDArray[np.int64]  # [contributions, groups] halvings
    chunks: tuple[int, ...]  # [groups]
    vote_max: int
    effective: tuple[float, ...]  # [groups] how many contributions of the measure's size these are
    top: int  # the largest of a contribution's integers
    is_dense: bool = False  # whether values may be zero, even all values of a group

    @classmethod
    def of(
        cls,
        sizes: Sequence[Sizes],
        layout: Layout,
        recipe: RecipeConfig,
        reach: int | None,
        everyone: Sequence[Sizes] = (),
    ) -> Scales:
        """Works out the scales of a round from the sizes of its contributions, in their order.

        reach: bounds the measure by that of movements with a root mean square of 2**reach; everyone: the sizes of which
        these were chosen, whose measure is a bound as well"""
        exponents = np.stack([each.exponents for each in sizes]).astype(np.int64)
        squares = np.stack([each.squares for each in sizes])
        weights = np.ldexp(squares, 2 * exponents)
        measure = _measure(sizes)
        if everyone:
            measure = np.minimum(measure, _measure(everyone))
        chunks = tuple(group.chunks for group in layout.groups)
        if reach is not None:
            measure = np.minimum(measure, np.ldexp(np.array(chunks, np.float64) * layout.area, 2 * reach))
        units = _doublings(measure, np.array(chunks, np.float64) * recipe.k_max) // 2 - recipe.room_bits
        cuts = np.maximum(_doublings(weights, measure), 0) // 2
        is_still = measure == 0  # most contributions are zero here, so the group does not move
        cuts[:, is_still] = SILENCED
        shares = np.minimum(weights, measure) / np.where(is_still, 1.0, measure)
        effective = np.ldexp(np.floor(np.ldexp(shares, SHARE_BITS)).sum(axis=0), -SHARE_BITS)
        effective[is_still] = 1.0
        return cls(
            tuple(units.tolist()),
            exponents,
            cuts,
            chunks,
            recipe.vote_max,
            tuple(effective.tolist()),
            1 << (recipe.value_bits - 1),
            recipe.is_dense,
        )

    def shifts(self, number: int) -> NDArray[np.int64]:  # [chunks]
        """Returns by which power of two a contribution's integers are multiplied in the common units."""
        return np.repeat(self.shifts_of_groups(number), self.chunks)

    def shifts_of_groups(self, number: int) -> NDArray[np.int64]:  # [groups]
        shifts: NDArray[np.int64] = self.exponents[number] - self.cuts[number] - np.array(self.units)
        return shifts

    def votes(self, number: int, values: Values, first_chunk: int = 0) -> Votes:  # [chunks, k]
        """Returns a contribution's integers in the common units, rounded half away from zero.

        values: of all chunks, or of some from `first_chunk` on"""
        group = np.searchsorted(np.cumsum(self.chunks), first_chunk + np.arange(len(values)), side="right")
        shifts = self.shifts_of_groups(number)[group][:, None]
        # A group of few non-zero values has a low root mean square, so these values are shifted far to the left.
        wide, most = (np.int64, NOTHING_BITS) if self.is_dense else (np.int32, 15)
        right = np.clip(-shifts, 0, most).astype(wide)  # a larger shift would change nothing
        left = np.clip(shifts, 0, most).astype(wide)
        votes: Votes = np.empty(values.shape, np.int16 if self.vote_max <= np.iinfo(np.int16).max else np.int32)
        for rows in _blocks(values):
            magnitudes = np.abs(values[rows].astype(wide)) << left[rows]
            magnitudes += np.ones((), wide) << right[rows] >> 1
            magnitudes = np.minimum(magnitudes >> right[rows], self.vote_max)
            votes[rows] = np.where(values[rows] < 0, -magnitudes, magnitudes)
        return votes

    def counts_all_of(self, number: int) -> bool:
        return not self._cuts_of(number).any()

    def _cuts_of(self, number: int) -> NDArray[np.bool_]:  # [groups]
        """Returns the groups in which a part of a contribution's values may not have been counted."""
        shifts = self.shifts_of_groups(number)
        cut: NDArray[np.bool_] = (
            (self.cuts[number] > 0) | (shifts < 0) | (np.ldexp(1.0, shifts) * self.top > self.vote_max)
        )
        return cut

    def uncounted(self, number: int, removed: NDArray[np.float32]) -> NDArray[np.float32] | None:  # [chunks, k]
        """Returns the uncounted part of the values that left the author's residual; None if all was counted."""
        cut = self._cuts_of(number)
        if not cut.any():
            return None
        starts, units = np.cumsum([0, *self.chunks]), np.array(self.units)
        # Clipped, because a training that is repeated after a crash may differ from the announced one.
        most = DENSE_VALUE_MAX if self.is_dense else VALUE_MAX
        left = np.zeros_like(removed)
        for group in np.flatnonzero(cut):
            for rows in _blocks(removed, starts[group], starts[group + 1]):
                values = np.clip(np.ldexp(removed[rows], -self.exponents[number][group]), -most, most).astype(np.int32)
                votes = self.votes(number, values, rows.start)
                left[rows] = removed[rows] - np.ldexp(votes.astype(np.float32), units[group])
        return left


def _measure(sizes: Sequence[Sizes]) -> NDArray[np.float64]:  # [groups]
    weights = [np.ldexp(each.squares, 2 * each.exponents.astype(np.int64)) for each in sizes]
    measure: NDArray[np.float64] = np.sort(np.stack(weights), axis=0)[len(sizes) - 1 - len(sizes) // 3]
    return measure


def _blocks(values: Values | NDArray[np.float32], first: int = 0, last: int | None = None) -> Iterator[slice]:
    chunks, k = values.shape
    step, last = max(1, BLOCK_VALUES // k), chunks if last is None else last
    return (slice(start, min(start + step, last)) for start in range(first, last, step))


def _doublings(larger: NDArray[np.float64], smaller: NDArray[np.float64]) -> NDArray[np.int64]:
    """Returns the largest j with larger >= 2**j * smaller."""
    (mantissa, exponent), (other_mantissa, other_exponent) = np.frexp(larger), np.frexp(smaller)
    return (exponent - other_exponent - (mantissa < other_mantissa)).astype(np.int64)
