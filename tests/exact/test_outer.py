"""The outer step of the DiLoCo family: momentum, every weight, no transform, fragments."""

from __future__ import annotations

from contextlib import suppress
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.config import RecipeConfig
from p2ptrain.errors import ConfigError, RemoteProtocolError
from p2ptrain.exact.codec import Contribution, Packed, PayloadFormat, every_index, pack, read_squares, unpack
from p2ptrain.exact.outer import Outer
from p2ptrain.exact.scales import Scales, Sizes
from p2ptrain.exact.transform import Layout
from p2ptrain.train.residual import Residual, quantise_all
from tests.helpers.exact_numbers import contribution, weights
from tests.helpers.golden import FAMILY, SHAPES, family_root, flat_weights, golden, parts

CPU = torch.device("cpu")
DENSE: dict[str, Any] = {"transform": "none", "k": 64**2}


def recipe_of(name: str, **changes: Any) -> RecipeConfig:
    return RecipeConfig(**(FAMILY[name] | changes))


def payloads_of(outer: Outer, number: int, peers: int) -> list[bytes]:
    fragment = outer.fragment_of(number + 1)
    made = (contribution(100 * number + peer, outer.layouts[fragment], outer.recipe) for peer in range(peers))
    return [outer.pack(each, fragment) for each in made]


def state_of(outer: Outer) -> torch.Tensor:
    state = torch.zeros(outer.state_numbers)
    state[: outer.parameters] = flat_weights(3)
    return state


@pytest.mark.parametrize("peers", [1, 7])
@pytest.mark.parametrize("name", FAMILY)
def test_known_roots(name: str, peers: int) -> None:
    assert family_root(name, peers, CPU) == golden()[f"{name} peers={peers}"]


@pytest.mark.parametrize("name", FAMILY)
def test_neither_order_nor_threads_change_a_bit(name: str) -> None:
    outer, states = Outer(recipe_of(name), SHAPES), []
    before = torch.get_num_threads()
    for threads, turn in ((1, 0), (2, 3)):
        torch.set_num_threads(threads)
        state = state_of(outer)
        for number in range(3):
            payloads = payloads_of(outer, number, 5)
            outer.apply(state, number, payloads[turn:] + payloads[:turn])
        states.append(state)
    torch.set_num_threads(before)
    assert torch.equal(*states)


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_momentum_is_that_of_torchs_sgd(nesterov: bool) -> None:
    """With the update as the gradient, at a rate of one."""
    mu = Fraction(1, 2)
    plain = Outer(recipe_of("weights", learning_rate=Fraction(7, 10)), SHAPES)
    outer = Outer(recipe_of("weights", learning_rate=Fraction(7, 10), momentum=mu, nesterov=nesterov), SHAPES)
    state, expected = state_of(outer), torch.nn.Parameter(flat_weights(3))
    sgd = torch.optim.SGD([expected], lr=1.0, momentum=float(mu), nesterov=nesterov)
    for number in range(5):
        payloads, zero = payloads_of(plain, number, 3), torch.zeros(plain.parameters)
        plain.apply(zero, number, payloads)
        expected.grad = -zero
        sgd.step()
        outer.apply(state, number, payloads)
    assert torch.allclose(state[: outer.parameters], expected.detach(), atol=1e-6)
    assert not torch.allclose(state[: outer.parameters], flat_weights(3), atol=1e-3)


def test_a_delayed_momentum_moves_the_weights_only_every_so_many_rounds() -> None:
    """Liu et al., algorithm 3: in between, weights move by the update alone, and the momentum gathers the updates."""
    plain, outer = (
        Outer(recipe_of("weights"), SHAPES),
        Outer(recipe_of("delayed nesterov", **FAMILY["weights"]), SHAPES),
    )
    state, momentum, expected = state_of(outer), torch.zeros(plain.parameters), flat_weights(3)
    for number in range(6):
        payloads, moved = payloads_of(plain, number, 3), torch.zeros(plain.parameters)
        plain.apply(moved, number, payloads)
        update, momentum = -moved, momentum - moved
        if number % 2 == 1:
            momentum = momentum * np.float32(0.9)
            update = update + momentum
        expected = expected - update
        outer.apply(state, number, payloads)
        assert torch.equal(state, torch.cat([expected, momentum]))


@pytest.mark.parametrize("name", FAMILY)
def test_rounds_can_be_taken_back_but_for_rounding(name: str) -> None:
    outer = Outer(recipe_of(name, weight_decay=Fraction(1, 10)), SHAPES)
    state, states, taken = state_of(outer), [], []
    for number in range(5):
        states.append(state.clone())
        taken.append(payloads_of(outer, number, 3) if number != 2 else [])
        outer.apply(state, number, taken[-1])
    moved = state - states[0]
    for number in reversed(range(5)):
        outer.undo(state, number, taken[number])
        assert torch.allclose(state, states[number], atol=1e-4)
    assert moved.abs().max() > 1e-2, "it had moved by far more"


def test_a_round_without_contributions_leaves_the_momentum_alone() -> None:
    outer = Outer(recipe_of("nesterov"), SHAPES)
    state = state_of(outer)
    outer.apply(state, 0, payloads_of(outer, 0, 2))
    before = state.clone()
    outer.apply(state, 1, [])
    assert torch.equal(state, before)
    assert before[outer.parameters :].any()


@pytest.mark.parametrize("value_bits", [1, 2, 4, 5, 8, 9, 16, 17, 24])
def test_every_weight_goes_into_a_payload_and_back(value_bits: int) -> None:
    outer = Outer(RecipeConfig(value_bits=value_bits, **DENSE), SHAPES)
    made = contribution(7, outer.layouts[0], outer.recipe)
    payload = outer.pack(made, 0)
    back = outer.unpack(payload)
    assert np.array_equal(back.values, made.values)
    assert back.values.dtype == made.values.dtype
    assert made.exponents is not None and np.array_equal(back.exponents, made.exponents)
    numbers = sum(layout.chunks * layout.area for layout in outer.layouts)
    assert len(payload) == len(outer.layouts[0].groups) + numbers * value_bits // 8
    squares = np.square(made.values.astype(np.int64)).sum(axis=1)
    assert np.array_equal(read_squares(payload, outer.forms[outer.recipe.k_max][0]), squares)


def test_a_contribution_that_no_announcement_can_name_is_refused() -> None:
    recipe, side = RecipeConfig(value_bits=16, **DENSE), 2**15
    Outer(recipe, [(side, side)])
    with pytest.raises(ConfigError, match="a contribution of 4,294,967,297 bytes, and there is room for"):
        Outer(recipe, [(2 * side, side)])


def test_the_code_without_a_meaning_is_refused() -> None:
    outer = Outer(RecipeConfig(value_bits=4, **DENSE), SHAPES)
    payload = bytearray(outer.pack(contribution(7, outer.layouts[0], outer.recipe), 0))
    payload[-1] = 0xFF
    with pytest.raises(RemoteProtocolError, match="the one code that has no meaning"):
        outer.unpack(bytes(payload))
    for size in (len(payload) - 1, len(payload) + 1):
        with pytest.raises(RemoteProtocolError, match=f"payload of {size} bytes"):
            outer.unpack(bytes(size))


@given(st.integers(2, 24), st.integers(0, 2**32), st.floats(1e-12, 1e4))
def test_a_dense_contribution_is_as_near_as_its_bits_allow(value_bits: int, seed: int, size: float) -> None:
    exact = np.abs(np.random.default_rng(seed).normal(size=(2, 64))).astype(np.float32) * np.float32(size)
    whole, exponents = quantise_all(torch.from_numpy(exact), [1, 1], value_bits)
    integers = whole.numpy()
    top = (1 << (value_bits - 1)) - 1
    assert integers.min() >= 0 and integers.max() <= top
    error = np.abs(exact - np.ldexp(integers.astype(np.float64), exponents[:, None]))
    if value_bits >= 8:  # nothing is cut off, and the unit is at most twice as coarse as it has to be
        assert (error.max(axis=1) <= exact.max(axis=1) / top).all()
    best = min(
        float(np.square(exact[0] - np.ldexp(np.minimum(np.rint(np.ldexp(exact[0], -e)), top), e)).sum())
        for e in range(int(exponents[0]) - 2, int(exponents[0]) + 3)
    )
    assert value_bits >= 8 or float(np.square(error[0]).sum()) <= best * (1 + 1e-6) + 1e-30


def test_what_most_do_not_move_one_cannot_move() -> None:
    recipe = RecipeConfig(value_bits=4, **DENSE)
    layout = Layout.of([(64, 64)], recipe)
    silent = Sizes(np.array([-64], np.int8), np.array([0]))
    liar = Sizes(np.array([15], np.int8), np.array([49 * 4096]))
    scales = Scales.of([silent, silent, silent, liar], layout, recipe, None)
    assert not scales.votes(3, np.full((1, 4096), 7, np.int8)).any()
    removed = np.full((1, 4096), 7 * 2.0**15, np.float32)
    assert np.array_equal(scales.uncounted(3, removed), removed)  # it returns to its author


@pytest.mark.parametrize("value_bits", [2, 4, 8, 16, 24])
def test_one_dense_liar_weighs_no_more_than_twice_the_measure(value_bits: int) -> None:
    recipe = RecipeConfig(value_bits=value_bits, **DENSE)
    layout = Layout.of([(64, 64)], recipe)
    form = PayloadFormat.of(layout, recipe)
    honest = [contribution(seed, layout, recipe) for seed in range(5)]
    spike = np.zeros((1, 4096), honest[0].values.dtype)
    spike[0, 5] = 1
    liar = Contribution(every_index(1, 4096), spike, np.array([15], np.int8))
    offered = [Contribution(each.indices, each.values, np.array([-20], np.int8)) for each in honest] + [liar]
    squares = [read_squares(pack(each, form), form).sum(keepdims=True) for each in offered]
    sizes = [Sizes(np.asarray(each.exponents), own) for each, own in zip(offered, squares, strict=True)]
    scales = Scales.of(sizes, layout, recipe, None)
    votes = [scales.votes(number, each.values).astype(np.float64) for number, each in enumerate(offered)]
    norms = [float(np.linalg.norm(each)) for each in votes]
    assert norms[-1] <= 2 * max(norms[:-1])
    assert norms[-1] > 0


def test_a_round_moves_its_own_fragment_alone_and_in_turn_all_of_the_model() -> None:
    outer = Outer(recipe_of("dense fragments nesterov"), SHAPES)
    state = state_of(outer)
    assert len({len(payload) for number in range(3) for payload in payloads_of(outer, number, 1)}) == 1
    moved = []
    for number in range(3):
        before = state.clone()
        outer.apply(state, number, payloads_of(outer, number, 2))
        changed = [
            {
                place
                for place, (old, new) in enumerate(zip(parts(a), parts(b), strict=True))
                if not torch.equal(old, new)
            }
            for a, b in zip(torch.split(before, outer.parameters), torch.split(state, outer.parameters), strict=True)
        ]
        own = {place for group in outer.layouts[number].groups for place in group.members}
        assert changed == [own, own]
        moved.append(own)
    assert sorted(place for own in moved for place in own) == list(range(len(SHAPES)))


def test_more_fragments_than_matrices_are_refused() -> None:
    with pytest.raises(ConfigError, match="6 fragments, but the model has only 4 groups"):
        Outer(recipe_of("fragments", fragments=6), SHAPES)


def test_an_own_contribution_of_another_fragment_returns_whole() -> None:
    outer = Outer(recipe_of("fragments"), SHAPES)
    counted = outer.apply(state_of(outer), 0, payloads_of(outer, 0, 2))
    uncounted, values = counted.uncounted(payloads_of(outer, 1, 1)[0]), np.ones((2, 3), np.float32)
    assert uncounted is not None
    assert np.array_equal(uncounted(values), values)


def test_fragments_have_about_as_many_chunks() -> None:
    layout = Layout([(256, 64)] * 9 + [(64,)] * 20, 64)
    for count in (2, 3, 5):
        sizes = [part.chunks for part in layout.fragments(count)]
        assert sum(sizes) == layout.chunks
        assert max(sizes) - min(sizes) <= 4


def test_a_contribution_of_another_fragment_moves_nothing() -> None:
    outer = Outer(recipe_of("fragments"), SHAPES)
    honest = payloads_of(outer, 0, 3)
    liar = payloads_of(outer, 1, 1)
    assert len(liar[0]) == len(honest[0])
    outer.unpack(liar[0])
    base = flat_weights(3)
    alone, both = base.clone(), base.clone()
    outer.apply(alone, 0, honest)
    counted = outer.apply(both, 0, liar + honest)
    assert counted.payloads == honest
    assert torch.allclose(both - base, (alone - base) * 0.75, atol=1e-6)


@pytest.mark.parametrize(("place", "value", "why"), [(0, 3, "fragment 3 of 3"), (-1, 1, "padding is not zero")])
def test_a_payload_of_a_fragment_has_one_encoding(place: int, value: int, why: str) -> None:
    outer = Outer(recipe_of("fragments", fragments=3), SHAPES)
    short = min(range(3), key=lambda fragment: outer.forms[outer.recipe.k_max][fragment].payload_bytes)
    payload = bytearray(payloads_of(outer, short, 1)[0])
    payload[place] = value
    with pytest.raises(RemoteProtocolError, match=why):
        outer.unpack(bytes(payload))


def test_what_falls_on_the_padding_leaves_the_residual() -> None:
    recipe = RecipeConfig(value_bits=1, **DENSE)
    layout = Layout.of([(5_000,)], recipe)
    residual = Residual((layout,), CPU)
    for number in range(3):
        residual.add(number, [weights(number, (5_000,))], 1.0)
        assert not residual.coefficients.view(-1)[5_000:].any()
        residual.take(number, recipe)


@pytest.mark.parametrize(("value_bits", "kind"), [(16, np.int16), (24, np.int32)])
def test_without_a_transform_a_contribution_is_what_the_weights_moved(
    value_bits: int, kind: type[np.signedinteger[Any]]
) -> None:
    recipe = RecipeConfig(transform="none", k=64**2, value_bits=value_bits, decay=Fraction(0), inner="adamw")
    outer = Outer(recipe, SHAPES)
    residual, moved = Residual(outer.layouts, CPU), flat_weights(5) / 100
    residual.add(0, parts(moved), 0.0)
    state = torch.zeros(outer.state_numbers)
    outer.apply(state, 0, [outer.pack(residual.take(0, recipe), 0)])
    largest = torch.cat([part.abs().max().expand(part.numel()) for part in parts(moved)])
    assert ((state + moved).abs() <= largest * 2.0 ** (1 - value_bits)).all()
    assert unpack(outer.pack(residual.take(1, recipe), 0), outer.forms[outer.recipe.k_max][0]).values.dtype == kind


def test_sums_of_numbers_of_24_bits_are_exact_beyond_32_and_64_bits() -> None:
    recipe, most, peers = RecipeConfig(value_bits=24, **DENSE), 2**23 - 1, 9
    outer = Outer(recipe, [(64, 64 * 64)])
    full = np.full((64, 4096), most, np.int32)
    full[:, ::2] = most - 1
    made = Contribution(every_index(64, 4096), full, np.array([-20], np.int8))
    form = outer.forms[recipe.k_max][0]
    squares = int(np.square(full.astype(object)).sum())
    assert squares > 2**63
    assert Sizes.of(Packed(pack(made, form), form), outer.layouts[0]).squares.tolist() == [float(squares)]
    spike = np.zeros((64, 4096), np.int32)  # so far above the root mean square that a vote has all its bits
    spike[0, 0] = most
    made = Contribution(every_index(64, 4096), spike, np.array([-20], np.int8))
    state = torch.zeros(outer.state_numbers)
    outer.apply(state, 0, [outer.pack(made, 0)] * peers)
    scales = Scales.of([Sizes.of(Packed(outer.pack(made, 0), form), outer.layouts[0])], outer.layouts[0], recipe, None)
    assert recipe.vote_max * peers > 2**31
    assert float(-state[0]) == pytest.approx(recipe.vote_max * 2.0 ** scales.units[0], rel=1e-6)
    assert not state[1:].any()


# ---------------------------------------------------------------------------------------------------
# Several k

SEVERAL = RecipeConfig(k=(32, 64, 256), value_bits=3)


def one_of_each(outer: Outer, recipe: RecipeConfig, number: int = 0) -> list[bytes]:
    """Makes a payload with each k."""
    made = []
    for k in recipe.ks:
        own = recipe.model_copy(update={"k": k})
        fragment = outer.fragment_of(number + 1)
        made.append(outer.pack(contribution(k, outer.layouts[fragment], own), fragment))
    return made


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_payload_says_which_k_it_has_and_its_length_follows(fragments: int) -> None:
    recipe = SEVERAL.model_copy(update={"fragments": fragments})
    outer, shapes = Outer(recipe, SHAPES), [64, 32, 256]
    assert [*outer.sizes] == [32, 64, 256]
    for place, payload in enumerate(one_of_each(outer, recipe)):
        k = recipe.ks[place]
        assert (payload[0], len(payload)) == (place, outer.sizes[k])
        assert outer.unpack(payload).indices.shape[1] == k
        for other in {0, 1, 2, 3, 255} - {place}:
            with pytest.raises(RemoteProtocolError, match=r"bytes; this run's have|k of number"):
                outer.unpack(bytes([other]) + payload[1:])
    with pytest.raises(RemoteProtocolError, match="k of number None of 3"):
        outer.unpack(b"")
    assert outer.payload_bytes == outer.sizes[max(shapes)]


def test_contributions_of_different_k_move_the_weights_by_their_mean_in_any_order() -> None:
    recipe = RecipeConfig(k=(8, 512), value_bits=8, decay=Fraction(1))
    outer = Outer(recipe, [(128, 64)])
    residuals = [Residual(outer.layouts, torch.device("cpu")) for _ in range(3)]
    given = [weights(number, (128, 64)) for number in range(3)]
    payloads = []
    for residual, moved, k in zip(residuals, given, (8, 512, 512), strict=True):
        residual.add(0, [moved], 1.0)
        residual.set_k(k)
        payloads.append(outer.pack(residual.take(0, recipe), 0))
    states = []
    for order in ((0, 1, 2), (2, 0, 1)):
        states.append(torch.zeros(outer.state_numbers))
        counted = outer.apply(states[-1], 0, [payloads[place] for place in order])
    assert torch.equal(*states)
    assert counted.scales is not None
    told = torch.zeros(128, 64)
    for residual, moved, payload in zip(residuals, given, payloads, strict=True):
        residual.forget(0, counted.uncounted(payload))
        left = torch.zeros(128, 64)
        residual.subtract_from([left], -1.0)
        told += moved - left
    share = counted.scales.effective[0]
    assert 2 < share < 3, "the small one counts as the work in it"
    assert torch.allclose(states[0].view(128, 64) * share, -told, atol=float(told.abs().max()) * 1e-3)


def test_the_same_bytes_with_another_k_are_another_contribution_whether_it_is_kept_or_not() -> None:
    outer = Outer(RecipeConfig(k=(2, 3), chunk=8), [(8, 8)])
    assert len({*outer.sizes.values()}) == 1, "so small a model has as long a payload with both"
    drawn, pairs = np.random.default_rng(1), []
    while len(pairs) < 3:
        content = drawn.bytes(outer.sizes[2] - 2)
        pair = [bytes([place, 64]) + content for place in (0, 1)]
        with suppress(RemoteProtocolError):
            pairs.append((pair, {each: outer.unpack(each) for each in pair}))
    for pair, unpacked in pairs:
        states = [torch.zeros(outer.state_numbers) for _ in range(2)]
        outer.apply(states[0], 0, pair)
        outer.apply(states[1], 0, pair, unpacked)
        assert torch.equal(*states)


@pytest.mark.parametrize("k", [[32], [], [64, 32], [32, 32], [32, 4097], [0, 32], [True, 3], list(range(1, 10)), "32"])
def test_a_list_of_k_rises_and_is_short(k: object) -> None:
    with pytest.raises(ValueError, match="k"):
        RecipeConfig(k=k)  # type: ignore[arg-type]


@pytest.mark.parametrize("more", [{"name": "distro", "chunk": 64}, {"chunk": 8, "k": [8, 64]}])
def test_a_list_of_k_goes_with_scales_and_without_all_of_a_chunk(more: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"k is a list|more than half"):
        RecipeConfig(**{"k": [8, 16], **more})  # type: ignore[arg-type]
