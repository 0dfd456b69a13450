"""The matched filter: whether a contribution comes from the sequences that its author was given.

The gradient of some sequences, at the weights that the contribution was computed from, is the filter (North 1943). A
contribution answers to it by the cosine between the two. It has learned from its author's own sequences if it answers
to sets of them more than to sets of other sequences: `z` says by how many standard deviations. What the others answer
to a set is taken away first, because a set that shows better where all are going is no evidence that it was used.
`strength` is how far a contribution goes where the other sequences point, as a share of what the median of the others
does. Its author's own part is not in it, so harm that is added to honest work shows here.

No training, residual or optimizer's state is needed, so every member with the weights and the data can compute both.
A set's z is cut off at CUT before the mean is taken: a contribution forged from a few sequences answers to sets that
hold these as nothing else does. docs/explanation/matched-filter.md has the distributions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from torch import Tensor

from p2ptrain.config import RecipeConfig
from p2ptrain.data.assignment import Positions
from p2ptrain.errors import DataError
from p2ptrain.exact.codec import Contribution
from p2ptrain.exact.transform import Layout
from p2ptrain.share import Share
from p2ptrain.train.inner import hidden_batches, orthogonalised
from p2ptrain.train.live import LiveModel

CUT = 2.0  # of a set's z
SET = 8  # sequences of a set
OTHER_SEQUENCES_MIN = 4 * SET  # to compare with, however few steps its author took
OTHER_SETS_MIN = 2  # without which there is no spread to compare with
SHARE_MAX = 2.0  # of what the others answer; where they answer nothing, a quotient says nothing
OTHERS_MIN = 3  # contributions whose median one liar among them does not move
SURE = 2.0  # standard errors of a mean answer in its author's favour
STRENGTH_MAX = 4.0

LENGTH_LEAST = 1e-30  # of what is divided by its length

Answers = NDArray[np.float64]  # [sets, contributions] cosines


def drawn(
    positions_of: Callable[[Share], Positions], share: Share, steps: int, recipe: RecipeConfig, count: int, draw: bytes
) -> tuple[Positions, Positions]:
    """Returns the sequences that an audit reads, the same on all machines: so many of the author's own, from the steps
    that it says it took, but at least a set, and as many others, of its next share. DataError if there are too few."""
    own, after = positions_of(share), positions_of(share.next)
    mine = _in_sets(own[: max(recipe.steps_of(steps) * recipe.step_sequences, SET)], count, draw)
    others = _in_sets(after[~np.isin(after, own)], max(len(mine), OTHER_SEQUENCES_MIN), draw)
    if len(mine) < SET or len(others) < OTHER_SEQUENCES_MIN:
        raise DataError(f"too few sequences: {len(mine)}, and {len(others)} to compare with")
    return mine, others


def _in_sets(positions: Positions, count: int, draw: bytes) -> Positions:
    order = sorted(
        np.unique(positions).tolist(), key=lambda each: blake3(draw + int(each).to_bytes(8, "little")).digest()
    )
    return np.array(order[: min(count, len(order)) // SET * SET], np.int64)


class Match(NamedTuple):
    """How well a contribution matches its author's sequences: z from -CUT to CUT, and strength, about 1 for most."""

    z: float
    strength: float


def audit(
    recipe: RecipeConfig,
    live: LiveModel,
    layout: Layout,
    contributions: Sequence[Contribution],
    own: int,
    sets: Sequence[Tensor],
    others: Sequence[Tensor],
) -> Match:
    """Judges the contribution at place `own`, which was computed from the live model's weights.

    Costs a forward and a backward pass over all sequences of `sets` and `others`, with all contributions read once for
    each of these; 16 contributions are plenty. Overwrites the live gradient.

    sets: of the author's sequences; others: of sequences that it was not given, from the same part of the data, in sets
    as large: at least OTHER_SETS_MIN"""
    assert sets and len(others) >= OTHER_SETS_MIN, f"{len(sets)} own sets and {len(others)} others"
    matched = MatchedFilter(recipe, live, layout)
    own_answers, others_answers = (
        np.stack([matched.answers(batch, contributions) for batch in batches]) for batches in (sets, others)
    )
    return judge(own_answers, others_answers, own)


class MatchedFilter:
    """Compares contributions with the gradient of sequences, at the live model's weights."""

    def __init__(self, recipe: RecipeConfig, live: LiveModel, layout: Layout) -> None:
        self._recipe, self._live, self._layout = recipe, live, layout
        # Local steps move hidden matrices in nearly all of their directions alike, so their filter is orthogonal, too.
        # The embedding moves where a token occurs, whoever trains on it: it does not count.
        self._is_local = recipe.spec.kind == "local"
        counted = live.is_hidden_matrix if self._is_local else [True] * len(live.shapes)
        self._sizes = [group.chunks for group in layout.groups]
        whether = [all(counted[place] for place in group.members) for group in layout.groups]
        self._counts = np.repeat(whether, self._sizes)  # [chunks]

    def answers(self, batch: Tensor, contributions: Sequence[Contribution]) -> NDArray[np.float64]:  # [contributions]
        """Returns the cosine of each contribution with the filter of these sequences."""
        whole, found = self.filter_of(batch), []
        for each in contributions:
            places, values = self.unit(each)
            found.append(float((whole.gather(1, places) * values).sum()))  # fp64, as the values are
        return np.array(found)

    def filter_of(self, batch: Tensor) -> Tensor:  # [chunks, area]
        """Returns the filter of these sequences, of length 1 if their gradient is not zero."""
        live = self._live
        live.gradient_step(0, batch, [], self._recipe)
        parts = live.parts(live.gradient)
        for places in hidden_batches(live) if self._is_local else ():
            whole = orthogonalised([parts[place] for place in places], is_half=live.autocast)
            for place, each in zip(places, whole, strict=True):
                parts[place].copy_(each.T if each.shape != parts[place].shape else each)
        found = torch.zeros(self._layout.chunks, self._layout.area, device=live.weights.device)
        self._layout.accumulate(parts, found, 0.0)
        found[torch.from_numpy(~self._counts).to(found.device)] = 0
        return found.div_(torch.linalg.vector_norm(found, dtype=torch.float64).clamp_min(LENGTH_LEAST))

    def unit(self, contribution: Contribution) -> tuple[Tensor, Tensor]:  # both [chunks, k]
        """Returns where a contribution's coefficients lie in each chunk and what they are, scaled to length 1."""
        exponents = contribution.exponents
        units = np.ones(len(self._sizes)) if exponents is None else np.ldexp(1.0, exponents.astype(np.int64))
        values = contribution.values * (np.repeat(units, self._sizes) * self._counts)[:, None]
        values /= max(math.sqrt(float(np.square(values).sum())), LENGTH_LEAST)
        device = self._live.weights.device
        return torch.from_numpy(contribution.indices.astype(np.int64)).to(device), torch.from_numpy(values).to(device)


def judge(sets: Answers, others: Answers, own: int) -> Match:
    """Judges the contribution at place `own` by how all answer to sets of its author's sequences and to others."""
    count, references = len(sets), [place for place in range(sets.shape[1]) if place != own]
    answers, usual = np.concatenate([sets, others]), others.mean(axis=0)
    shown = _shown(answers[:, references])

    def beyond(place: int, beside: list[int]) -> NDArray[np.float64]:  # [sets and others]
        """Returns how much more a contribution answers than its usual share of what these others answer."""
        middle = float(usual[beside].mean()) if beside else 0.0
        share = float(np.clip(usual[place] / middle, -SHARE_MAX, SHARE_MAX)) if middle else 0.0
        return np.asarray(answers[:, place] - (shown * share * answers[:, beside].mean(axis=1) if share else 0.0))

    judged = beyond(own, references)
    # What contributions answer to sequences that they have nothing to do with is what z is measured in.
    idle = [judged[count:], *(beyond(place, [each for each in references if each != place]) for place in references)]
    squares, freedom = [float(np.square(each - each.mean()).sum()) for each in idle], [len(each) - 1 for each in idle]
    # A contribution in few directions answers less evenly than the others, and gains nothing by that.
    spread = math.sqrt(max(squares[0] / freedom[0], sum(squares) / sum(freedom)))
    z = (judged[:count] - judged[count:].mean()) / (spread or math.inf)
    return Match(float(np.clip(z, -CUT, CUT).mean()), _strength(others, own, references))


def _shown(answers: Answers) -> float:
    """Returns the share of what the mean answers to sets differ by that is not the chance of so few contributions: the
    mean is shrunk to that share (James and Stein 1961)."""
    sets, count = answers.shape
    if count < 2:
        return 0.0
    means = answers.mean(axis=1)
    left = answers - answers.mean(axis=0) - (means - means.mean())[:, None]
    chance = float(np.square(left).sum()) / ((sets - 1) * (count - 1) * count)
    found = float(means.var(ddof=1))
    return max(0.0, 1 - chance / found) if found else 0.0


def _strength(others: Answers, own: int, references: list[int]) -> float:
    """Returns the mean answer to other sequences, and SURE standard errors more, over the median of the other
    contributions' mean answers. Where that median is no larger than chance, or of too few: 1, unless surely below 0."""
    means = others.mean(axis=0)
    error = float(others[:, own].std(ddof=1)) / math.sqrt(len(others))
    middle = float(np.median(means[references])) if len(references) >= OTHERS_MIN else 0.0
    if middle > SURE * error:
        return float(np.clip((means[own] + SURE * error) / middle, -STRENGTH_MAX, STRENGTH_MAX))
    return float(np.clip(1 + SURE + means[own] / (error or math.inf), -1.0, 1.0))
