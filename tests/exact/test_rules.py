"""The robust rules: what they choose, computed again from the papers in fractions; ties, blocks and bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.config import RecipeConfig
from p2ptrain.config.recipe import RULES
from p2ptrain.exact import rules
from p2ptrain.exact.codec import Contribution, Packed, PayloadFormat, every_index, pack, unpack, unpack_chunks
from p2ptrain.exact.outer import Outer
from p2ptrain.exact.rules import Offered
from p2ptrain.exact.transform import Layout
from tests.helpers.exact_numbers import contribution
from tests.helpers.golden import FAMILY, RULED, SHAPES, family_root, flat_weights, golden

CPU = torch.device("cpu")
SIGNS = {"name": "distro", "chunk": 8, "k": 8}
DENSE: dict[str, Any] = {"transform": "none", "k": 64**2}
Vectors = list[list[int]]
vectors = st.integers(7, 12).flatmap(
    lambda count: st.lists(st.lists(st.integers(-3, 3), min_size=4, max_size=4), min_size=count, max_size=count)
)


def products_of(found: Vectors) -> list[list[int]]:
    return [[sum(map(int.__mul__, a, b)) for b in found] for a in found]


def recipe_of(rule: str, bad: int, **changes: Any) -> RecipeConfig:
    return RecipeConfig(**({"rule": rule, RULES[rule].setting: bad} | changes))


def distance(a: Sequence[int], b: Sequence[int | Fraction]) -> Fraction:
    return sum(((Fraction(x) - y) ** 2 for x, y in zip(a, b, strict=True)), Fraction(0))


def krum_of(found: Vectors, left: list[int], f: int) -> list[tuple[Fraction, int]]:
    """Returns scores and places, as Blanchard et al. define them, with one neighbour at least."""
    scores = []
    for one in left:
        away = sorted(distance(found[one], found[other]) for other in left if other != one)
        scores.append((sum(away[: max(1, len(left) - f - 2)], Fraction(0)), one))
    return sorted(scores)


@given(found=vectors, f=st.integers(1, 2))
def test_krum_takes_the_contribution_with_the_nearest_neighbours(found: Vectors, f: int) -> None:
    order = [one for _, one in krum_of(found, [*range(len(found))], f)]
    assert rules.selected(recipe_of("krum", f), products_of(found)) == order[:1]
    assert rules.selected(recipe_of("multi_krum", f), products_of(found)) == sorted(order[: len(found) - f])


@given(found=vectors)
def test_bulyan_takes_the_winners_of_one_krum_after_the_other(found: Vectors) -> None:
    left, taken = [*range(len(found))], []
    while len(taken) < len(found) - 2:
        taken.append(krum_of(found, left, 1)[0][1])
        left.remove(taken[-1])
    assert rules.selected(recipe_of("bulyan", 1), products_of(found)) == sorted(taken)


@given(found=vectors, trim=st.integers(1, 3))
def test_trimmed_leaves_out_the_lowest_cosines(found: Vectors, trim: int) -> None:
    """Compared in floating point, where they are far enough from each other."""
    whole, cosines = np.array(found, float), []
    for own in whole:
        others = whole.sum(axis=0) - own
        length = float(np.linalg.norm(own) * np.linalg.norm(others))
        cosines.append(float(own @ others) / length if length else 0.0)
    chosen = rules.selected(recipe_of("trimmed", trim), products_of(found))
    assert len(chosen) == len(found) - trim
    worst = min(cosines[one] for one in chosen)
    assert all(cosines[one] <= worst + 1e-9 for one in range(len(found)) if one not in chosen)


@given(found=vectors, f=st.integers(1, 3))
def test_clipped_halves_until_nobody_is_farther_from_the_mean_than_the_n_minus_f_nearest(
    found: Vectors, f: int
) -> None:
    mean = [Fraction(sum(column), len(found)) for column in zip(*found, strict=True)]
    away = [distance(own, mean) for own in found]
    most = sorted(away)[len(found) - f - 1]
    for own, times in zip(away, rules.halvings(products_of(found), f), strict=True):
        if most:
            assert own / 4**times <= most
            assert times == 0 or own / 4 ** (times - 1) > most
        else:
            assert (times > 100) == (own > 0)


@given(found=vectors, trim=st.integers(1, 3))
def test_by_coordinate_the_extremes_are_left_out(found: Vectors, trim: int) -> None:
    votes = torch.tensor(found, dtype=torch.int32)
    expected = [sum(sorted(column)[trim : len(found) - trim]) for column in zip(*found, strict=True)]
    assert rules.BY_COORDINATE["trimmed_coordinates"](votes, len(found) - 2 * trim).tolist() == expected


@given(found=vectors, left=st.integers(1, 5))
def test_by_coordinate_bulyan_adds_up_what_is_nearest_to_the_median(found: Vectors, left: int) -> None:
    expected = []
    for column in zip(*found, strict=True):
        median = sorted(column)[(len(column) - 1) // 2]
        expected.append(sum(sorted(column, key=lambda vote: (abs(vote - median), vote))[:left]))
    assert rules.BY_COORDINATE["bulyan"](torch.tensor(found, dtype=torch.int32), left).tolist() == expected


@pytest.mark.parametrize("rule", ["krum", "multi_krum", "bulyan", "trimmed"])
def test_of_equals_those_whose_authors_have_the_lower_keys_are_taken(rule: str) -> None:
    chosen = rules.selected(recipe_of(rule, 1), products_of([[1, 2, 3, 4]] * 7))
    assert chosen == [*range(len(chosen))]


# ---------------------------------------------------------------------------------------------------
# Reading payloads


def offered_of(recipe: RecipeConfig, layout: Layout, peers: int, *, are_unpacked: bool = False) -> Offered:
    form = PayloadFormat.of(layout, recipe)
    made = [contribution(peer, layout, recipe) for peer in range(peers)]
    payloads = [Packed(pack(each, form), form) for each in made]
    return Offered.of(
        layout, recipe, payloads, dict(zip(payloads, made, strict=True)) if are_unpacked else {}, reach=None
    )


@pytest.mark.parametrize(
    "settings", [{"k": 32}, {"k": 300, "value_bits": 8}, DENSE | {"value_bits": 6}, SIGNS, {"name": "demo"}], ids=str
)
def test_products_are_those_of_whole_contributions(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = RecipeConfig(**settings)
    layout = Layout.of(SHAPES, recipe)
    offered, whole = offered_of(recipe, layout, 5), []
    for number, payload in enumerate(offered.payloads):
        own = unpack(*payload)
        votes = offered.scales.votes(number, own.values) if offered.scales else own.values
        row = np.zeros((layout.chunks, layout.area), object)
        np.put_along_axis(row, own.indices.astype(np.int64), votes.astype(object), axis=1)
        units = offered.scales.units if offered.scales else (0,) * len(layout.groups)
        for unit, group in zip(units, layout.groups, strict=True):
            row[group.first_chunk : group.first_chunk + group.chunks] *= 2 ** (unit - min(units))
        whole.append(row.reshape(-1))
    expected = [[int(a @ b) for b in whole] for a in whole]
    for block in (2**22, 3 * 5 * layout.area, 1):
        monkeypatch.setattr(rules, "BLOCK_VOTES", block)
        assert rules._products(offered, CPU) == expected
        assert rules._products(offered_of(recipe, layout, 5, are_unpacked=True), CPU) == expected


@pytest.mark.parametrize("value_bits", [1, 3, 8])
@pytest.mark.parametrize(("chunk", "k"), [(64, 8), (64, 300), (16, 5), (8, 32), (64, 4096)])
def test_some_chunks_are_read_as_all_are(chunk: int, k: int, value_bits: int) -> None:
    transform = "none" if k == chunk**2 else "dct"
    recipe = RecipeConfig(chunk=chunk, k=k, value_bits=value_bits, transform=transform)
    layout = Layout.of(SHAPES, recipe)
    form = PayloadFormat.of(layout, recipe)
    payload = pack(contribution(3, layout, recipe), form)
    whole = unpack(payload, form)
    for first, last in combinations((0, 1, 7, 8, 9, layout.chunks - 1, layout.chunks), 2):
        indices, values = unpack_chunks(payload, form, slice(first, last))
        assert np.array_equal(indices, whole.indices[first:last])
        assert np.array_equal(values, whole.values[first:last])


def test_the_largest_votes_are_multiplied_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight bits of every weight, at the top: each vote is 2**12, and a full block is summed in fp64 and then int64."""
    recipe = RecipeConfig(value_bits=8, **DENSE)
    layout = Layout.of([(64, 64 * 64)], recipe)
    offered = offered_of(recipe, layout, 4)
    votes = torch.full((4, 2**20), float(recipe.vote_max), dtype=torch.float64)
    votes[0, 0] -= 1
    monkeypatch.setattr(Offered, "laid_out", lambda *_: votes)
    found = rules._products_of_some(offered, slice(0, 1), CPU)
    assert recipe.vote_max == 2**12
    assert int(found[0, 0]) == 2**44 - 2**13 + 1
    assert int(found[0, 1]) == 2**44 - 2**12
    assert 2**22 // 1 * recipe.vote_max**2 < 2**53, "one contribution alone fills a block"


# ---------------------------------------------------------------------------------------------------
# Rounds


def state_of(outer: Outer) -> torch.Tensor:
    state = torch.zeros(outer.state_numbers)
    state[: outer.parameters] = flat_weights(3)
    return state


def payloads_of(outer: Outer, peers: int, number: int = 0) -> list[bytes]:
    fragment = outer.fragment_of(number + 1)
    recipes = [outer.recipe.model_copy(update={"k": k}) for k in outer.recipe.ks]
    made = (
        contribution(100 * number + peer, outer.layouts[fragment], recipes[peer % len(recipes)])
        for peer in range(peers)
    )
    return [outer.pack(each, fragment) for each in made]


@pytest.mark.parametrize("peers", [7, 11])
@pytest.mark.parametrize("name", RULED)
def test_known_roots(name: str, peers: int) -> None:
    assert family_root(name, peers, CPU) == golden()[f"{name} peers={peers}"]


@pytest.mark.parametrize("name", RULED)
def test_neither_threads_nor_blocks_change_a_bit_nor_what_is_known_already(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer, states = Outer(RecipeConfig(**RULED[name]), SHAPES), []
    before = torch.get_num_threads()
    for threads, block, are_known in ((1, 2**22, False), (2, 1, True)):
        monkeypatch.setattr(rules, "BLOCK_VOTES", block)
        torch.set_num_threads(threads)
        state = state_of(outer)
        for number in range(3):
            payloads = payloads_of(outer, 7, number)
            outer.apply(state, number, payloads, {each: outer.unpack(each) for each in payloads if are_known})
        states.append(state)
    torch.set_num_threads(before)
    assert torch.equal(*states)


@pytest.mark.parametrize("name", RULED)
def test_a_round_with_too_few_moves_nothing_and_all_of_it_returns(name: str) -> None:
    outer = Outer(RecipeConfig(**RULED[name]), SHAPES)
    state = state_of(outer)
    few, enough = (payloads_of(outer, outer.recipe.contributions_min - less) for less in (1, 0))
    counted = outer.apply(state, 0, few)
    removed = np.ones((2, 2), np.float32)
    assert torch.equal(state, state_of(outer))
    assert (counted.payloads, counted.scales, counted.norm) == ([], None, 0.0)
    assert all(counted.uncounted(payload)(removed) is removed for payload in few)
    assert outer.apply(state, 0, enough).payloads
    assert not torch.equal(state, state_of(outer))


@pytest.mark.parametrize("settings", [{"k": 32}, SIGNS | {"outer": "mean"}], ids=str)
@pytest.mark.parametrize("rule", ["trimmed", "krum", "multi_krum"])
def test_what_is_chosen_counts_as_if_there_were_no_others(rule: str, settings: dict[str, Any]) -> None:
    outer, plain = Outer(recipe_of(rule, 2, **settings), SHAPES), Outer(RecipeConfig(**settings), SHAPES)
    made = [contribution(peer, outer.layouts[0], outer.recipe) for peer in range(9)]
    if outer.recipe.spec.is_scaled:  # and all of one size
        made = [replace(each, exponents=np.full(len(outer.layouts[0].groups), -14, np.int8)) for each in made]
    state, expected, payloads = state_of(outer), state_of(outer), [outer.pack(each, 0) for each in made]
    counted = outer.apply(state, 0, payloads)
    assert len(counted.payloads) == {"trimmed": 7, "krum": 1, "multi_krum": 7}[rule]
    alone = plain.apply(expected, 0, counted.payloads)
    assert torch.equal(state, expected)
    assert counted.norm == alone.norm
    removed = np.ones((plain.layouts[0].chunks, plain.recipe.k_max), np.float32)
    for payload in payloads:
        left, expected_left = counted.uncounted(payload)(removed), alone.uncounted(payload)(removed)
        assert (left is None and expected_left is None) or np.array_equal(left, expected_left)


def test_liars_who_are_many_of_the_chosen_weigh_no_more_than_they_did_among_all() -> None:
    """Four large ones of thirteen are ignored in the measure; of nine they are too many for that."""
    recipe = recipe_of("trimmed", 4, value_bits=4, **DENSE)
    layout = Layout.of(SHAPES, recipe)
    form, groups = PayloadFormat.of(layout, recipe), len(layout.groups)
    made = [contribution(peer, layout, recipe) for peer in range(13)]
    sized = [
        replace(each, exponents=np.full(groups, 15 if peer < 4 else -20, np.int8)) for peer, each in enumerate(made)
    ]
    offered = Offered.of(layout, recipe, [Packed(pack(each, form), form) for each in sized], {}, None)
    some = offered.only(range(9))
    assert offered.scales is not None
    assert some.scales is not None
    assert offered.scales.cuts[:4].min() >= 34
    assert (some.scales.cuts[:4] - offered.scales.cuts[:4]).min() >= 0
    assert all(
        chosen <= all_of_them for chosen, all_of_them in zip(some.scales.units, offered.scales.units, strict=True)
    )
    assert all(4 < number <= 9 for number in some.scales.effective)


def test_contributions_of_another_fragment_are_no_part_of_the_roster_that_a_rule_sees() -> None:
    outer = Outer(recipe_of("krum", 1, k=32, fragments=2), SHAPES)
    state, here, elsewhere = state_of(outer), payloads_of(outer, 4, 0), payloads_of(outer, 4, 1)
    assert outer.apply(state, 0, here + elsewhere).payloads == []
    assert torch.equal(state, state_of(outer))
    assert len(outer.apply(state, 0, here + payloads_of(outer, 5)[4:] + elsewhere).payloads) == 1


def equal_ones(outer: Outer, signs: Sequence[int]) -> list[bytes]:
    """Makes dense contributions of ones, or zeros, whose scales are the same."""
    layout = outer.layouts[0]
    shape, exponents = (layout.chunks, layout.area), np.full(len(layout.groups), -14, np.int8)
    own = [np.full(shape, sign, np.int8) for sign in signs]
    return [outer.pack(Contribution(every_index(*shape), each, exponents), 0) for each in own]


@pytest.mark.parametrize(("rule", "signs", "moved"), [
    ("trimmed_coordinates", (1, 1, 1, 1, -1), 1), ("trimmed_coordinates", (1, 1, 1, -1, -1), 1 / 3),
    ("bulyan", (1, 1, 1, 1, 1, 1, -1), 1), ("bulyan", (1, 1, 1, 1, 1, -1, -1), 1),
])  # fmt: skip
def test_by_coordinate_the_mean_is_over_the_votes_that_are_left(
    rule: str, signs: tuple[int, ...], moved: float
) -> None:
    """Of five, the third one of three has a say; of seven, f = 1 leaves five and then three, all alike."""
    outer = Outer(recipe_of(rule, 1, value_bits=4, **DENSE), SHAPES)
    state = torch.zeros(outer.state_numbers)
    outer.apply(state, 0, equal_ones(outer, signs))
    assert state.unique().tolist() == [pytest.approx(-(2.0**-14) * moved, rel=1e-6)]


def test_a_clipped_contribution_gets_back_what_was_halved() -> None:
    outer = Outer(recipe_of("clipped", 1, value_bits=4, **DENSE), SHAPES)
    payloads = equal_ones(outer, (1, 1, 1, 1, -1))
    counted = outer.apply(torch.zeros(outer.state_numbers), 0, payloads)
    assert counted.scales is not None
    assert counted.scales.cuts[:4].max() == 0
    assert counted.scales.cuts[4].min() >= 1
    removed = np.full((outer.layouts[0].chunks, outer.layouts[0].area), -(2.0**-14), np.float32)
    left = counted.uncounted(payloads[4])(removed)
    assert left is not None
    assert (left < 0).all()
    assert counted.uncounted(payloads[0])(-removed) is None


def test_every_rule_has_a_known_root_and_those_of_the_family_are_other_cases() -> None:
    assert {settings["rule"] for settings in RULED.values()} == RULES.keys()
    assert not RULED.keys() & FAMILY.keys()
