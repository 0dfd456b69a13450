"""Whether the matched filter tells a contribution that was computed from its author's sequences from others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from p2ptrain.config import ModelConfig, RecipeConfig
from p2ptrain.exact.aggregate import apply_own
from p2ptrain.exact.codec import EXPONENT_MIN, Contribution
from p2ptrain.exact.outer import Outer
from p2ptrain.exact.selection import largest
from p2ptrain.exact.transform import Layout
from p2ptrain.models.built_in import Transformer, initialise
from p2ptrain.share import Share
from p2ptrain.train.live import LiveModel
from p2ptrain.train.matched_filter import CUT, Match, MatchedFilter, audit, drawn, judge
from p2ptrain.train.residual import quantise
from tests.helpers.trainer import Trainer, embedded, make

MEMBERS, ROUNDS, SET = 7, 6, 8


class PlayedRound:
    """A round's contributions, the sequences that they come from, others, and a member that can audit them."""

    def __init__(self, directory: Path) -> None:
        dataset = embedded(directory)
        members = [make(dataset, "local", inner="muon", k=256, sequences_per_pass=8) for _ in range(MEMBERS)]
        payloads: list[bytes] = []
        for number in range(ROUNDS):
            payloads = []
            for place, member in enumerate(members):
                member.train(Share(number, place, MEMBERS))
                payloads.append(member.contribute(number))
            if number < ROUNDS - 1:
                for place, member in enumerate(members):
                    member.apply(number, payloads, {number: payloads[place]})
        self.member: Trainer = members[0]
        self.member.live.weights.copy_(self.member.replica.weights)
        self.contributions = [self.member.outer.unpack(each) for each in payloads]

        def sets(number: int, place: int) -> list[Tensor]:
            positions = self.member.positions_for(Share(number, place, MEMBERS))
            return list(torch.split(torch.from_numpy(dataset.batch(positions, length)), SET))

        length = self.member.run.model.sequence_length
        self.sets = [sets(ROUNDS - 1, place) for place in range(MEMBERS)]  # by author
        self.others = [each for place in range(4) for each in sets(ROUNDS, place)]  # nobody was given these yet
        matched = self.matched

        def answers(batches: list[Tensor]) -> NDArray[np.float64]:
            return np.stack([matched.answers(batch, self.contributions) for batch in batches])

        self.answers, self.other_answers = [answers(each) for each in self.sets], answers(self.others)

    @property
    def matched(self) -> MatchedFilter:
        return MatchedFilter(self.member.run.recipe, self.member.live, self.layout)

    @property
    def layout(self) -> Layout:
        return self.member.outer.layouts[0]

    def audit(self, author: int, contribution: Contribution) -> Match:
        """Audits a contribution in the author's place."""
        listed = [*self.contributions]
        listed[author] = contribution
        recipe, live = self.member.run.recipe, self.member.live
        return audit(recipe, live, self.layout, listed, author, self.sets[author], self.others[:8])

    def judged(self, author: int, place: int, references: int) -> Match:
        """Judges an honest contribution as if it were the author's, beside so many others."""
        beside = [each for each in range(MEMBERS) if each not in (author, place)][:references]
        columns = [place, *beside]
        return judge(self.answers[author][:, columns], self.other_answers[:, columns], 0)

    def whole(self, contribution: Contribution) -> Tensor:
        places, values = self.matched.unit(contribution)
        return torch.zeros(self.layout.chunks, self.layout.area).scatter_(1, places, values.float())

    def encoded(self, numbers: Tensor) -> Contribution:
        recipe, sizes = self.member.run.recipe, [group.chunks for group in self.layout.groups]
        places = largest(numbers, recipe.k_max)
        chosen = numbers.gather(1, torch.from_numpy(places.astype(np.int64)))
        magnitudes, exponents = quantise(chosen.abs(), sizes, recipe.value_bits)
        signs = torch.where(chosen < 0, -1, 1)
        return Contribution(places, (magnitudes * signs).numpy().astype(np.int8), exponents)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> PlayedRound:
    return PlayedRound(tmp_path_factory.mktemp("matched filter"))


@pytest.mark.parametrize("references", [0, 1, 2, MEMBERS - 2])
def test_a_contribution_answers_to_its_authors_sequences_more_than_to_others(
    played: PlayedRound, references: int
) -> None:
    """With as many or as few other contributions as there are."""
    found = np.array([[played.judged(author, place, references).z for place in range(MEMBERS)]
                      for author in range(MEMBERS)])  # fmt: skip
    own, copied = np.diagonal(found), found[~np.eye(MEMBERS, dtype=bool)]
    assert own.mean() > 0.7
    assert abs(copied.mean()) < 0.4
    assert own.mean() > copied.mean() + 3 * copied.std() / MEMBERS**0.5


def test_who_turns_a_contribution_around_goes_the_other_way(played: PlayedRound) -> None:
    honest = [played.audit(author, played.contributions[author]) for author in range(MEMBERS)]
    turned = [played.audit(author, replace(made, values=-made.values))
              for author, made in enumerate(played.contributions)]  # fmt: skip
    for before, after in zip(honest, turned, strict=True):
        assert after.z == pytest.approx(-before.z, abs=1e-6)
        assert after.strength < -0.5
    assert min(match.strength for match in honest) > 0.8


def test_harm_beside_own_work_has_little_strength_and_still_a_z(played: PlayedRound) -> None:
    whole = [played.whole(each) for each in played.contributions]
    honest, less_two, less_five = [], [], []
    for author in range(MEMBERS):
        mean = torch.stack([each for place, each in enumerate(whole) if place != author]).mean(dim=0)
        honest.append(played.audit(author, played.contributions[author]))
        less_two.append(played.audit(author, played.encoded(whole[author] - 2 * mean)))
        less_five.append(played.audit(author, played.encoded(whole[author] - 5 * mean)))
    assert np.mean([match.z for match in less_two]) > 0.5 * np.mean([match.z for match in honest])
    assert min(match.strength for match in honest) > 0.8
    assert max(match.strength for match in less_two) < 0.7
    assert max(match.strength for match in less_five) < 0.0


def test_the_sum_of_others_is_nobodys_own_work(played: PlayedRound) -> None:
    """Though it answers to each filter better than any member's own contribution does."""
    whole = [played.whole(each) for each in played.contributions]
    found = []
    for author in range(MEMBERS):
        total = torch.stack([each for place, each in enumerate(whole) if place != author]).sum(dim=0)
        found.append(played.audit(author, played.encoded(total)))
    assert abs(np.mean([match.z for match in found])) < 0.4
    assert min(match.strength for match in found) > 1.1


def test_a_copy_in_one_tensor_alone_gains_nothing(played: PlayedRound) -> None:
    """It answers less evenly than the others do, and its own spread is what z is measured in."""
    found = []
    for author in range(3):
        copied = played.contributions[author + 1]
        assert copied.exponents is not None
        for lone in range(len(copied.exponents)):
            exponents = np.full_like(copied.exponents, EXPONENT_MIN)
            exponents[lone] = copied.exponents[lone]
            found.append(played.audit(author, replace(copied, exponents=exponents)).z)
    assert abs(np.mean(found)) < 0.3
    assert np.std(found) < 0.8


def test_the_scale_of_a_contribution_changes_nothing(played: PlayedRound) -> None:
    honest = played.contributions[2]
    assert honest.exponents is not None
    larger = replace(honest, exponents=honest.exponents + np.int8(3))
    assert played.audit(2, larger) == pytest.approx(played.audit(2, honest), abs=1e-9)


def test_two_honest_auditors_differ_by_what_rounding_does(played: PlayedRound) -> None:
    """They may read a set in parts of another size; threads and devices change no more than that."""
    live = played.member.live
    found = []
    for count in (1, 2, 0):
        live.set_sequences_per_pass(count)
        found.append([played.audit(author, played.contributions[author]) for author in range(2)])
    spread = np.ptp(np.array(found), axis=0)
    assert spread.max() < 0.005


def test_answers_are_cosines_of_what_contributions_move() -> None:
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
        moves = torch.from_numpy((signs * _units(made[-1], layout)).astype(np.float32))
        apply_own(layout, torch.from_numpy(places.view(np.int16)), moves, 1.0, outer.parts(state))
        moved.append(-_hidden(live, outer.parts(state)))
    matched = MatchedFilter(recipe, live, layout)
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


def test_z_without_other_contributions_is_that_of_the_sets() -> None:
    generator = np.random.default_rng(3)
    sets, others = generator.normal(1.0, 1.0, (6, 1)), generator.normal(0.0, 1.0, (9, 1))
    expected = np.clip((sets - others.mean()) / others.std(ddof=1), -CUT, CUT).mean()
    assert judge(sets, others, 0).z == pytest.approx(expected)


def test_one_set_counts_no_more_than_the_cut() -> None:
    draws = np.random.default_rng(1).normal(size=(20, 8))
    draws[0, 0] = 1e6  # forged from the sequences of one set
    draws[1:4, 0] = 0.0
    assert judge(draws[:4], draws[4:], 0).z == pytest.approx(CUT / 4, abs=0.3)


def test_a_set_that_shows_the_common_way_better_is_no_evidence() -> None:
    """Own sets may happen to lie along it; the other contributions answer to them more, too."""
    generator = np.random.default_rng(4)
    common = np.concatenate([np.full(16, 5.0), generator.normal(3.0, 0.5, 16)])
    answers = common[:, None] * generator.uniform(0.8, 1.2, 9) + generator.normal(0.0, 0.3, (32, 9))
    found = [judge(answers[:16], answers[16:], place).z for place in range(9)]
    assert np.abs(found).max() < 1.5
    assert judge(answers[:16, :1], answers[16:, :1], 0).z == CUT  # alone it cannot be told


def test_chance_alone_is_centred_and_within_the_cut() -> None:
    generator = np.random.default_rng(5)
    for members in (1, 2, 3, 9):
        found = [judge(*generator.normal(size=(2, 16, members)), 0).z for _ in range(400)]
        assert abs(np.mean(found)) < 0.06
        assert np.std(found) < 0.4


def test_strength_is_beside_the_median_which_one_liar_does_not_move() -> None:
    others = np.tile([1.0, 0.9, 1.1, -1.5], (4, 1)) + np.random.default_rng(6).normal(0.0, 0.01, (4, 4))
    assert judge(others, others, 0).strength == pytest.approx(1.0 / 0.9, abs=0.03)
    assert judge(others, others, 3).strength == pytest.approx(-1.5, abs=0.03)
    for few in ([0], [0, 3]):  # one alone, or beside a liar: only whether it goes there
        assert judge(others[:, few], others[:, few], 0).strength == 1.0
    assert judge(others[:, [3, 0]], others[:, [3, 0]], 0).strength == -1.0


def test_strength_is_no_reproach_where_chance_is_as_large_as_what_all_have_in_common() -> None:
    generator = np.random.default_rng(7)
    found = []
    for _ in range(300):
        others = 0.1 + generator.normal(size=(16, 9))
        found.append(judge(others, others, 0).strength)
    assert np.quantile(found, 0.02) > 0.3
    against = -1.0 + generator.normal(size=(16, 9))  # where all go the other way, it is no reproach either
    assert judge(-against, -against, 0).strength > 0.5


def test_a_contribution_of_zeros_answers_to_nothing() -> None:
    for members in (1, 2, 6):
        assert judge(np.zeros((4, members)), np.zeros((4, members)), 0) == (0.0, 1.0)


@pytest.mark.parametrize(("each", "steps", "read"), [(2, 1, 8), (2, 3, 8), (2, 4, 8), (4, 4, 16), (16, 1, 16)])
def test_few_small_steps_are_measured_with_others_of_their_round(each: int, steps: int, read: int) -> None:
    """Or whoever says that it took one small step would never be measured."""
    recipe = RecipeConfig(local_steps=20, sequences_per_pass=each)
    shard = np.arange(recipe.round_sequences)
    mine, others = drawn(lambda share: shard + share.round * shard.size, Share(5, 0, 4), steps, recipe, 32, b"draw")
    assert sorted({*mine} & {*shard[:read] + 5 * shard.size}) == sorted(mine) and (len(mine), len(others)) == (read, 32)
