"""Turns a set of contributions into the same new weights on every machine, bit by bit.

This module is the protocol's arithmetic. docs/protocol.md states it line by line and golden roots in the
tests pin it: the order of the operations may not change within a protocol version.

Votes are integers, so no sum depends on its order. The inverse transform stays in integers
(`transform.inverse`). The rest is a fixed sequence of single IEEE operations, each rounded once:
nothing is fused or summed, and the only library function is the square root, which IEEE 754 defines.

If contributions carry scales (powers of two), every group's votes are counted in a common unit, and no contribution
weighs much more than most others do, or than local steps can account for; a mean divides by the number of contributions
of full size that they amount to (exact/scales.py). The votes are summed, not
filtered: medians and trimming destroy a sparse signal, because most peers do not send a given coefficient.

An outer momentum m (Nesterov's, as in DiLoCo, or plain) is agreed state, like the weights w. With u the update, rate
included, and mu rounded to fp32:

    s = m + u;  t = mu * s;  w = w - (u + t with Nesterov, s without);  m = t

Delayed Nesterov (Liu et al. 2024, arXiv 2401.09135) does this in some rounds only; in the others m = s;  w = w - u."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import islice
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from p2ptrain.config import EXACT_MAX, RecipeConfig
from p2ptrain.exact import native
from p2ptrain.exact.codec import Contribution, Packed, unpack
from p2ptrain.exact.kernels.launches import (
    KEPT,
    NESTEROV,
    NO_MOMENTUM,
    PLAIN,
    Move,
    attempt,
    flat_of,
    launches_of,
    to_host,
)
from p2ptrain.exact.rules import BY_COORDINATE, Offered, by_rule, middle_votes
from p2ptrain.exact.scales import Scales
from p2ptrain.exact.schedule import Terms, exact_float
from p2ptrain.exact.shortage import where_it_fits
from p2ptrain.exact.transform import FP32_EXACT_MAX, Group, Layout, Strip

INT16_MAX, INT32_MAX = 2**15 - 1, 2**31 - 1
COUNTED_AT_ONCE = 8  # contributions that are unpacked at a time
CHUNKS_MEASURED = 4  # of a group, at least, for the update's norm: all would take 2 % of the time of an update


@dataclass(frozen=True, slots=True)
class Votes:
    """The sum of a round's contributions."""

    sums: Tensor  # [chunks, area] int16, int32 or int64
    contributions: int
    scales: Scales | None  # None: they have no unit


def apply_payloads(
    layout: Layout,
    recipe: RecipeConfig,
    payloads: Sequence[Packed],
    terms: Terms,
    parameters: Sequence[Tensor],
    momenta: Sequence[Tensor] = (),
    unpacked: Mapping[Packed, Contribution] = MappingProxyType({}),
) -> tuple[Sequence[int], Scales | None, float]:
    """Applies one outer step from payloads, which are unpacked one at a time, except those given as `unpacked`. Returns
    the places of those that count, the scales by which they were counted, if they have any, and the update's norm.

    payloads: in any order, or with a rule in that of their authors' keys, which settles ties
    momenta: one for each parameter, if the recipe has a momentum"""
    device = parameters[0].device
    places, counted = by_rule(Offered.of(layout, recipe, payloads, unpacked, terms.reach), device)
    if (norm := _on_card(layout, recipe, counted, terms, parameters, momenta)) is not None:
        return places, counted.scales, norm

    def votes_on(device: torch.device) -> Votes:
        if recipe.rule in BY_COORDINATE and counted.payloads:
            return Votes(middle_votes(counted, device), len(counted.payloads), counted.scales)
        contributions = (unpacked.get(each) or unpack(*each) for each in counted.payloads)
        return sum_votes(layout, recipe, contributions, len(counted.payloads), counted.scales, device)

    votes = where_it_fits(votes_on, device)
    return places, counted.scales, apply_votes(layout, recipe, votes, terms, parameters, momenta)


def sum_votes(
    layout: Layout,
    recipe: RecipeConfig,
    contributions: Iterable[Contribution],
    count: int,
    scales: Scales | None,
    device: torch.device,
) -> Votes:
    """Adds up `count` contributions, one at a time and in the order of the scales, if there are any. The votes are
    integers, so any order gives the same sums."""
    largest = count * recipe.vote_max
    assert largest < EXACT_MAX, "the config's bound keeps votes in range"
    dtype = torch.int16 if largest <= INT16_MAX else torch.int32 if largest <= INT32_MAX else torch.int64
    sums = torch.zeros(layout.chunks * layout.area, dtype=dtype, device=device)
    if device.type == "cpu" and not recipe.is_dense and dtype != torch.int64 and native.library():
        counted = _count(layout, recipe, iter(contributions), scales, sums)
        assert counted == count
        return Votes(sums.view(layout.chunks, layout.area), count, scales)
    index_type = np.dtype(np.int32) if sums.numel() <= INT32_MAX else np.dtype(np.int64)
    starts = np.arange(layout.chunks, dtype=index_type)[:, None] * layout.area
    added = 0
    for contribution in contributions:
        values = scales.votes(added, contribution.values) if scales else contribution.values
        votes = torch.from_numpy(values).to(device).reshape(-1)
        if recipe.is_dense:
            sums.add_(votes)
        else:
            places = torch.from_numpy(np.add(contribution.indices, starts, dtype=index_type).reshape(-1)).to(device)
            sums.index_add_(0, places, votes.to(dtype))
        added += 1
    assert added == count
    return Votes(sums.view(layout.chunks, layout.area), count, scales)


def _count(
    layout: Layout, recipe: RecipeConfig, contributions: Iterator[Contribution], scales: Scales | None, sums: Tensor
) -> int:
    """Adds contributions to the sums, and returns how many. A few at a time: a chunk's sums stay in a core's cache."""
    added = 0
    while some := list(islice(contributions, COUNTED_AT_ONCE)):
        shifts = [scales.shifts(added + number) for number in range(len(some))] if scales else []
        indices, values = [each.indices for each in some], [each.values for each in some]
        native.count(indices, values, shifts, recipe.vote_max, sums.numpy(), layout.area)
        added += len(some)
        del some, indices, values  # before the next are unpacked
    return added


def apply_votes(
    layout: Layout,
    recipe: RecipeConfig,
    votes: Votes,
    terms: Terms,
    parameters: Sequence[Tensor],
    momenta: Sequence[Tensor] = (),
) -> float:
    """Applies one outer step to the fp32 master weights, in place. Without contributions nothing changes.

    Returns about the norm of the update, before momentum and weight decay, for people. All machines return the same."""
    assert bool(momenta) == bool(recipe.momentum), "a momentum is part of the state of just those runs that have one"
    if not votes.contributions:
        return 0.0
    keep = rounded_fp32(1 - terms.rate * recipe.weight_decay)
    votes_bound = votes.contributions * recipe.k_max * recipe.vote_max
    steps = steps_of(
        layout,
        recipe,
        votes.contributions,
        votes.scales,
        terms.rate,
        lambda number: _sum_of_squares(layout, recipe, votes, layout.groups[number]),
    )
    for step, group in zip(steps, layout.groups, strict=True):
        matrix = layout.matrix(parameters, group)
        carried = layout.matrix(momenta, group) if momenta else None
        for strip in layout.strips(group, matrix.device):
            old = None if carried is None else carried[strip.rows]
            update = new = None
            if step != 0.0 or old is not None:
                sums = votes.sums[strip.chunks]
                compute = partial(_update, layout, recipe, votes_bound, step, group, strip, sums)
                update = where_it_fits(compute, sums.device)
            if old is not None:
                assert update is not None
                update, new = where_it_fits(partial(_with_momentum, recipe, terms, old, update), update.device)
            _move(matrix[strip.rows], keep, update)
            if old is not None and new is not None:
                old.copy_(new)
        layout.store(matrix, parameters, group)
        if carried is not None:
            layout.store(carried, momenta, group)

    def squares() -> list[float]:
        chosen = [votes.sums[chunks] for chunks in measured_chunks(layout)]

        def on(device: torch.device) -> list[float]:  # a few of a group, once in a round
            found: list[float] = torch.cat([each.to(device) for each in chosen]).double().square_().sum(dim=1).tolist()
            return found

        return where_it_fits(on, votes.sums.device)

    return norm_of(layout, recipe, steps, terms.rate, squares)


def _on_card(
    layout: Layout,
    recipe: RecipeConfig,
    counted: Offered,
    terms: Terms,
    parameters: Sequence[Tensor],
    momenta: Sequence[Tensor],
) -> float | None:
    """Does what `sum_votes` and `apply_votes` do in programs of a card; None, with nothing changed, if it cannot."""
    weights, carried = flat_of(parameters), flat_of(momenta) if momenta else None
    if recipe.is_dense or weights is None or not counted.payloads or recipe.rule in BY_COORDINATE:
        return None
    device, kind = weights.device, (NESTEROV if recipe.nesterov else PLAIN) if terms.carries else KEPT
    mu = rounded_fp32(recipe.momentum)
    move = Move(rounded_fp32(1 - terms.rate * recipe.weight_decay), mu, kind if carried is not None else NO_MOMENTUM)
    count, scales = len(counted.payloads), counted.scales
    steps_from = partial(steps_of, layout, recipe, count, scales, terms.rate)

    def update() -> tuple[Sequence[float], Tensor] | None:
        programs = launches_of(layout, device)
        return (
            None
            if programs is None
            else programs.update(recipe, counted.payloads, scales, steps_from, move, weights, carried)
        )

    moved = attempt(update, device)
    if moved is None:
        return None
    steps, squares = moved

    def some() -> list[float]:
        def chosen(where: torch.device) -> Tensor:
            return torch.cat([squares[each].to(where) for each in measured_chunks(layout)])

        found: list[float] = to_host(where_it_fits(chosen, device)).tolist()
        return found

    return norm_of(layout, recipe, steps, terms.rate, some)


def _with_momentum(
    recipe: RecipeConfig, terms: Terms, momentum: Tensor, update: Tensor, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Returns what a strip's weights lose, and its new momentum. Each operation is a kernel of its own, not fused."""
    own = update.to(device)
    total = momentum.to(device).view(own.shape) + own
    if not terms.carries:
        return own, total.reshape(momentum.shape)
    kept = total * rounded_fp32(recipe.momentum)
    return own + kept if recipe.nesterov else total, kept.reshape(momentum.shape)


def apply_own(layout: Layout, indices: Tensor, values: Tensor, share: float, parameters: Sequence[Tensor]) -> None:
    """Decodes a contribution as if it were alone and fully counted, and subtracts `share` of it from the weights.

    indices, values: [chunks, k], int16 and fp32"""

    def spread(chunks: slice) -> Tensor:
        chosen = indices[chunks].long()
        sent = values[chunks].to(chosen.device)
        return torch.zeros(len(chosen), layout.area, device=chosen.device).scatter_(1, chosen, sent)

    programs, flat = launches_of(layout, parameters[0].device), flat_of(parameters)
    if programs and flat is not None:
        work = partial(programs.subtract_sparse, flat, indices, values, share)
        if attempt(work, flat.device):
            return
    _subtract(layout, spread, share, parameters)


def apply_residual(layout: Layout, residual: Tensor, share: float, parameters: Sequence[Tensor]) -> None:
    """Decodes a residual [chunks, area] and subtracts `share` of it from the weights."""
    programs, flat = launches_of(layout, parameters[0].device), flat_of(parameters)
    if programs and flat is not None:
        programs.subtract(flat, residual, share)
    else:
        _subtract(layout, lambda chunks: residual[chunks], share, parameters)


def _subtract(layout: Layout, block: Callable[[slice], Tensor], share: float, parameters: Sequence[Tensor]) -> None:
    for group in layout.groups:
        matrix = layout.matrix(parameters, group)
        for strip in layout.strips(group, matrix.device):
            compute = partial(_share_of, layout, block(strip.chunks), share)
            _move(matrix[strip.rows], 1.0, _cut(layout, group, strip, where_it_fits(compute, matrix.device)))
        layout.store(matrix, parameters, group)


def _share_of(layout: Layout, block: Tensor, share: float, device: torch.device) -> Tensor:
    return layout.approximately(block.to(device)).mul_(share)


def steps_of(
    layout: Layout,
    recipe: RecipeConfig,
    contributions: int,
    scales: Scales | None,
    learning_rate: Fraction,
    squares: Callable[[int], int],
) -> list[float]:
    """Returns for each group the factor between the inverse transform's integers and the update; 0.0 if none are left.

    squares: the sum of a group's squared votes"""
    rate = exact_float(learning_rate)
    if recipe.outer == "sign":
        return [rounded_fp32(learning_rate)] * len(layout.groups)
    if recipe.outer == "mean":
        if scales is None:
            return [rate * math.sqrt(layout.area / recipe.k_max) / contributions * layout.scale] * len(layout.groups)
        units = zip(scales.effective, scales.units, strict=True)
        return [rate / effective * (2.0**unit * layout.scale) for effective, unit in units]
    steps = []
    for number, group in enumerate(layout.groups):
        total = squares(number)
        rms = math.sqrt(total / (group.chunks * layout.area))  # a quotient of integers, rounded once
        steps.append(rate / rms * layout.scale if total else 0.0)
    return steps


def measured_chunks(layout: Layout) -> list[slice]:
    """Returns the chunks of each group that stand for all of it: four to seven."""
    starts = [(group.first_chunk, group.first_chunk + group.chunks) for group in layout.groups]
    return [slice(first, end, max(1, (end - first) // CHUNKS_MEASURED)) for first, end in starts]


def norm_of(
    layout: Layout, recipe: RecipeConfig, steps: Sequence[float], rate: Fraction, squares: Callable[[], list[float]]
) -> float:
    """Returns about the norm of an update: the votes' own, since the transform keeps norms, from some of the chunks.

    squares: the sums of the squared votes of the measured chunks, whole numbers: exact in any order below 2**53"""
    groups = layout.groups
    if recipe.outer != "mean":  # the weights move by the rate, each of them or in the root of the mean square
        moved = sum(each.rows * each.columns for step, each in zip(steps, groups, strict=True) if step)
        return float(f"{exact_float(rate) * math.sqrt(moved):.6g}")
    found, total = iter(squares()), 0.0
    for step, group, chosen in zip(steps, groups, measured_chunks(layout), strict=True):
        count = len(range(*chosen.indices(layout.chunks)))
        factor, mean = step / layout.scale, sum(next(found) for _ in range(count)) / count
        total += factor * factor * group.chunks * mean
    return float(f"{math.sqrt(total):.6g}")  # in the last digits of huge sums machines may differ


def _sum_of_squares(layout: Layout, recipe: RecipeConfig, votes: Votes, group: Group) -> int:
    total = 0
    largest = votes.contributions * recipe.vote_max
    for strip in layout.strips(group, votes.sums.device):
        sums = votes.sums[strip.chunks].reshape(-1)
        if largest**2 * recipe.k_max * (sums.numel() // layout.area) < FP32_EXACT_MAX and sums.device.type == "cpu":
            single = sums.float()
            total += int(torch.dot(single, single))
        else:
            total += where_it_fits(partial(_squares, sums), sums.device)
    return total


def _squares(sums: Tensor, device: torch.device) -> int:
    return int(sums.to(device).long().square_().sum())


def _update(
    layout: Layout,
    recipe: RecipeConfig,
    votes_bound: int,
    step: float,
    group: Group,
    strip: Strip,
    sums: Tensor,
    device: torch.device,
) -> Tensor:  # [rows, columns] fp32, or a view of as many
    """Returns the values that a strip's votes subtract from its weights."""
    whole = layout.decoded(sums.to(device), votes_bound)
    update = whole.sign_().float().mul_(step) if recipe.outer == "sign" else whole.mul_(step).float()
    update.add_(0.0)  # a matrix product may give 0.0 or -0.0; this makes both 0.0
    return _cut(layout, group, strip, update)


def _move(rows: Tensor, keep: float, update: Tensor | None) -> None:
    """Updates a strip in place. It allocates nothing on the device, so a strip is applied whole or not at all."""
    here = rows
    if update is not None and rows.device != update.device:  # one of them is on the CPU, so both go there
        here, update = rows.cpu(), update.cpu()
    if keep != 1.0:
        here.mul_(keep)
    if update is not None:
        here.view(update.shape).sub_(update)
    if here is not rows:
        rows.copy_(here)


def _cut(layout: Layout, group: Group, strip: Strip, update: Tensor) -> Tensor:
    """Returns the update in the order of the strip's rows, without the padding; a view if there is none."""
    c = layout.chunk
    tiles = update.view(c, strip.chunk_rows, group.chunk_columns, c).permute(1, 0, 2, 3)
    rows, columns = strip.rows.stop - strip.rows.start, group.columns
    if (rows, columns) == (strip.chunk_rows * c, group.chunk_columns * c):
        return tiles  # [chunk_rows, c, chunk_columns, c]
    return tiles.reshape(strip.chunk_rows * c, -1)[:rows, :columns]


def rounded_fp32(value: Fraction) -> float:
    """Rounds to fp64, then to fp32."""
    return float(np.float32(exact_float(value)))
