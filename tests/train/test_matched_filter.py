"""Whether the matched filter tells a contribution that was computed from its author's sequences from others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from p2ptrain.config import ModelConfig, RecipeConfig
from p2ptrain.exact.aggregate import apply_own
from p2ptrain.exact.codec import Contribution
from p2ptrain.exact.outer import Outer
from p2ptrain.exact.transform import Layout
from p2ptrain.models.built_in import Transformer, initialise
from p2ptrain.share import Share
from p2ptrain.train.live import LiveModel
from p2ptrain.train.matched_filter import CUT, MatchedFilter, judge
from tests.helpers.trainer import Trainer, embedded, make

MEMBERS, ROUNDS, SET = 7, 6, 4


def trained(directory: Path) -> tuple[Trainer, list[Contribution], list[torch.Tensor]]:
    """Returns a member after some rounds, the contributions to the next one, and the sequences that these come from."""
    dataset = embedded(directory)
    members = [make(dataset, "local", inner="muon", k=256, sequences_per_pass=8) for _ in range(MEMBERS)]
    for number in range(ROUNDS):
        payloads = []
        for place, member in enumerate(members):
            member.train(Share(number, place, MEMBERS))
            payloads.append(member.contribute(number))
        if number < ROUNDS - 1:
            for place, member in enumerate(members):
                member.apply(number, payloads, {number: payloads[place]})
    first = members[0]
    shares = [first.positions_for(Share(ROUNDS - 1, place, MEMBERS)) for place in range(MEMBERS)]
    sequences = [torch.from_numpy(dataset.batch(each, first.run.model.sequence_length)) for each in shares]
    first.live.weights.copy_(first.replica.weights)
    return first, [first.outer.unpack(each) for each in payloads], sequences


def filter_of(member: Trainer) -> MatchedFilter:
    return MatchedFilter(member.run.recipe, member.live, member.outer.layouts[0])


def test_a_contribution_answers_to_its_authors_sequences_more_than_those_of_others(tmp_path: Path) -> None:
    member, contributions, sequences = trained(tmp_path)
    matched = filter_of(member)
    likeness = matched.likeness(contributions)
    found = []
    for owner in range(MEMBERS):
        answers = np.stack([matched.answers(each, contributions) for each in torch.split(sequences[owner], SET)])
        found.append([judge(answers, likeness, place).z for place in range(MEMBERS)])
    own, others = np.diagonal(found), np.array(found)[~np.eye(MEMBERS, dtype=bool)]
    assert own.mean() > 1.5
    assert others.mean() < 0.5
    assert own.mean() > others.mean() + 2 * others.std()


def test_who_turns_a_contribution_around_goes_the_other_way(tmp_path: Path) -> None:
    member, contributions, sequences = trained(tmp_path)
    turned = [replace(contributions[0], values=-contributions[0].values), *contributions[1:]]
    matched = filter_of(member)
    answers = np.stack([matched.answers(each, turned) for each in torch.split(sequences[0], SET)])
    found = judge(answers, matched.likeness(turned), 0)
    assert found.z < -CUT
    assert found.strength < -0.5


def test_likeness_and_answers_are_cosines_of_what_contributions_move() -> None:
    """Against the same numbers in the weights' space: the transform keeps angles where there is no padding."""
    recipe = RecipeConfig(name="local", inner="muon", k=256)
    model = Transformer(
        ModelConfig(vocab_size=256, dim=64, layers=1, heads=1, kv_heads=1, ffn_dim=64, sequence_length=16)
    )
    initialise(model, 1)
    live = LiveModel(model, autocast=False)
    outer, generator = Outer(recipe, live.shapes), np.random.default_rng(1)
    [layout] = outer.layouts
    made, moved = [], []
    for _ in range(2):
        draws = generator.random((layout.chunks, layout.area))
        places = np.sort(np.argsort(draws, axis=1)[:, :256], axis=1).astype(np.uint16)
        signs = generator.choice(np.array([-1, 1], np.int8), places.shape)
        made.append(Contribution(places, signs, generator.integers(-9, -5, len(layout.groups)).astype(np.int8)))
        state = torch.zeros(outer.state_numbers)
        apply_own(layout, places, signs * _units(made[-1], layout), 1.0, outer.parts(state))
        moved.append(-_hidden(live, outer.parts(state)))
    matched = MatchedFilter(recipe, live, layout)
    cosine = float(moved[0] @ moved[1] / moved[0].norm() / moved[1].norm())
    assert matched.likeness(made)[0] == pytest.approx([1.0, cosine], abs=1e-6)
    tokens = torch.from_numpy(generator.integers(0, 256, (4, 17)))
    answers = matched.answers(tokens, made)
    direction = _hidden(live, live.parts(live.gradient))  # orthogonal now
    expected = [float(each @ direction / each.norm() / direction.norm()) for each in moved]
    assert answers == pytest.approx(expected, abs=1e-6)


def _units(contribution: Contribution, layout: Layout) -> np.ndarray:
    assert contribution.exponents is not None
    chunks = [group.chunks for group in layout.groups]
    return np.repeat(np.ldexp(np.float32(1), contribution.exponents.astype(np.int32)), chunks)[:, None]


def _hidden(live: LiveModel, parts: list[torch.Tensor]) -> torch.Tensor:
    whole = [part.reshape(-1) for part, is_hidden in zip(parts, live.is_hidden_matrix, strict=True) if is_hidden]
    return torch.cat(whole).double()


def test_one_set_counts_no_more_than_the_cut() -> None:
    draws = np.random.default_rng(1).normal(size=(4, 8))
    draws[0, 0] = 1e6  # forged from the sequences of one set
    draws[1:, 0] = draws[1:, 1:].mean(axis=1)
    assert judge(draws, np.eye(8), 0).z == pytest.approx(CUT / 2, abs=0.5)  # of four sets


def test_the_sum_of_others_is_nobodys_own_work() -> None:
    """Though it answers to each filter better than any member's own contribution does."""
    generator = np.random.default_rng(2)
    common = generator.normal(size=500)
    made = [common + 3 * generator.normal(size=500) for _ in range(8)]
    filters = [common + 3 * generator.normal(size=500) for _ in range(4)]  # of sequences that nobody has learned from
    units = [each / np.linalg.norm(each) for each in (np.sum(made, axis=0), *made)]
    stacked = np.stack(units)
    answers = np.stack([stacked @ each / np.linalg.norm(each) for each in filters])
    likeness = stacked @ stacked.T
    assert answers[:, 0].mean() > answers[:, 1:].mean() + 2 * answers[:, 1:].std()
    assert judge(answers, likeness, 0).z < 0.0


def test_a_contribution_of_zeros_answers_to_nothing() -> None:
    answers, likeness = np.zeros((4, 6)), np.zeros((6, 6))
    assert judge(answers, likeness, 0) == (0.0, 0.0)
