"""The programs for a card, in Triton's interpreter: torch's bits on the exact path, elsewhere about its numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from p2ptrain.config import RecipeConfig
from p2ptrain.exact import aggregate, exactness
from p2ptrain.exact.codec import Contribution, Packed, PayloadFormat, pack
from p2ptrain.exact.exactness import check_kernels
from p2ptrain.exact.kernels import launches
from p2ptrain.exact.kernels.launches import Launches, OnCard, launch
from p2ptrain.exact.outer import Outer
from p2ptrain.exact.root import state_leaves
from p2ptrain.exact.schedule import Terms
from p2ptrain.exact.transform import Layout
from p2ptrain.train.residual import Residual

pytest.importorskip("triton", reason="make test-kernels brings Triton")
pytestmark = pytest.mark.kernels
CPU = torch.device("cpu")
SETTINGS: dict[str, dict[str, Any]] = {
    "distro": {"name": "distro"},
    "distro, many of a chunk": {"name": "distro", "k": 100},
    "demo": {"name": "demo"},
    "demo, four bits": {"name": "demo", "value_bits": 4, "k": 60, "outer": "mean"},
    "local": {"name": "local", "chunk": 32, "k": 40},
    "local, chunks of 64": {"name": "local"},
    "weight decay": {"name": "local", "chunk": 32, "k": 40, "weight_decay": "1/10"},
    "local, eight bits": {"name": "local", "chunk": 32, "k": 40, "value_bits": 8},
    "several k": {"name": "local", "chunk": 32, "k": [8, 20, 100]},
    "momentum": {"name": "local", "chunk": 32, "k": 40, "momentum": "9/10"},
    "Nesterov's": {"name": "local", "chunk": 32, "k": 40, "momentum": "9/10", "nesterov": True, "weight_decay": "1/10"},
    "delayed": {"name": "local", "chunk": 32, "k": 40, "momentum": "9/10", "nesterov": True, "momentum_rounds": 2},
    "no transform": {"name": "local", "chunk": 32, "k": 40, "transform": "none", "value_bits": 2},
}


@st.composite
def recipes(draw: st.DrawFn) -> RecipeConfig:
    """Draws settings with chunks of 32, which are interpreted in a quarter of the time, and a transform of them."""
    name = draw(st.sampled_from(["distro", "demo", "local"]))
    sizes = st.integers(1, 512)
    found: dict[str, Any] = {"name": name, "chunk": 32, "k": draw(sizes), "transform": "dct"}
    found["outer"] = draw(st.sampled_from(["normalised", "mean", "sign"]))
    found["weight_decay"] = draw(st.sampled_from(["0", "1/10"]))
    if name != "distro":
        found["value_bits"] = draw(st.integers(1, 4 if name == "demo" else 8))
        if draw(st.booleans()):
            found["k"] = sorted(draw(st.sets(sizes, min_size=2, max_size=3)))
    if name == "local":
        found["momentum"] = draw(st.sampled_from(["0", "9/10"]))
        found["nesterov"] = found["momentum"] != "0" and draw(st.booleans())
        found["transform"] = "none" if found["outer"] == "mean" and draw(st.booleans()) else "dct"
    return RecipeConfig.model_validate(found)


@pytest.fixture(params=SETTINGS)
def recipe(request: pytest.FixtureRequest) -> RecipeConfig:
    return RecipeConfig.model_validate(SETTINGS[request.param])


@pytest.fixture
def on_card() -> Iterator[None]:
    with patch.object(launches, "is_usable", lambda device: True):
        yield


def shapes_of(c: int) -> list[tuple[int, ...]]:
    """Returns a matrix of whole chunks, one that is partly padding, and vectors."""
    return [(2 * c, c), (c,), (c - 5, 2 * c - 9), (7,), (3, c, c // 3)]


def layout_of(recipe: RecipeConfig) -> Layout:
    return Layout.of(shapes_of(recipe.chunk), recipe)


def size_of(layout: Layout) -> int:
    return sum(int(np.prod(shape)) for shape in layout.shapes)


def parts_of(layout: Layout, flat: Tensor) -> list[Tensor]:
    sizes = [int(np.prod(shape)) for shape in layout.shapes]
    return [part.view(shape) for part, shape in zip(torch.split(flat, sizes), layout.shapes, strict=True)]


def drawn(layout: Layout, form: PayloadFormat, rng: np.random.Generator) -> Contribution:
    order = np.argsort(rng.random((layout.chunks, layout.area)), axis=1)
    sizes = rng.integers(1, (1 << (form.value_bits - 1)) + 1, (layout.chunks, form.k))
    values = (sizes * rng.choice((-1, 1), sizes.shape)).astype(form.value_type)
    exponents = rng.integers(-12, -7, form.groups).astype(np.int8) if form.groups else None
    return Contribution(np.sort(order[:, : form.k], axis=1).astype(np.uint16), values, exponents)


def packed(layout: Layout, recipe: RecipeConfig, count: int, seed: int = 3) -> list[Packed]:
    rng, forms = np.random.default_rng(seed), [PayloadFormat.of(layout, recipe, k) for k in recipe.ks]
    chosen = [forms[number % len(forms)] for number in range(count)]
    return [Packed(pack(drawn(layout, form, rng), form), form) for form in chosen]


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("slab_bytes", [2**26, 3 * 4 * 1024])
def test_an_update_has_the_bits_of_torch(
    recipe: RecipeConfig, count: int, slab_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "SLAB_BYTES", slab_bytes)
    layout = layout_of(recipe)
    payloads, numbers = packed(layout, recipe, count), size_of(layout)
    torch.manual_seed(1)
    first = torch.randn(numbers * recipe.state_copies)
    for terms in (Terms(Fraction(1, 30)), Terms(Fraction(1, 30), carries=False)):
        found = []
        for is_usable in (False, True):
            state = first.clone()
            weights, momenta = (
                parts_of(layout, state[:numbers]),
                parts_of(layout, state[numbers:]) if recipe.momentum else [],
            )
            started = Mock(wraps=launch)
            monkeypatch.setattr(launches, "launch", started)
            with patch.object(launches, "is_usable", lambda device, is_usable=is_usable: is_usable):
                told = aggregate.apply_payloads(layout, recipe, payloads, terms, weights, momenta)
            assert ("update" in {call.args[0] for call in started.call_args_list}) == is_usable
            found.append((state, told[2]))
        assert torch.equal(found[0][0].view(torch.int32), found[1][0].view(torch.int32))
        assert found[0][1] == found[1][1]
        assert not torch.equal(found[0][0], first)


@given(recipe=recipes(), count=st.integers(1, 4), seed=st.integers(0, 99), learning_rate=st.fractions(0, 1))
@settings(max_examples=40, deadline=None, phases=[Phase.generate])  # interpreted, none is made smaller in time
def test_an_update_of_any_settings_has_the_bits_of_torch(
    recipe: RecipeConfig, count: int, seed: int, learning_rate: Fraction
) -> None:
    layout = layout_of(recipe)
    payloads, numbers = packed(layout, recipe, count, seed), size_of(layout)
    first = torch.randn(numbers * recipe.state_copies, generator=torch.Generator().manual_seed(seed))
    found = []
    for is_usable in (False, True):
        state = first.clone()
        momenta = parts_of(layout, state[numbers:]) if recipe.momentum else []
        with patch.object(launches, "is_usable", lambda device, is_usable=is_usable: is_usable):
            told = aggregate.apply_payloads(
                layout, recipe, payloads, Terms(learning_rate), parts_of(layout, state[:numbers]), momenta
            )
        found.append((state.numpy().tobytes(), told[2]))
    assert found[0] == found[1]


def test_a_residual_is_about_that_of_torch(recipe: RecipeConfig) -> None:
    layout = layout_of(recipe)
    torch.manual_seed(2)
    flat, residual = torch.randn(size_of(layout)), torch.randn(layout.chunks, layout.area) / 4
    masks = layout.padding_masks(CPU)
    there = residual.clone()  # a part of which is on padding
    layout.accumulate(parts_of(layout, flat), residual, 0.9)
    layout.project(residual, *masks)
    Launches(layout, CPU).accumulate(flat, there, 0.9)
    assert torch.allclose(
        there, residual, atol=2e-3
    )  # the basis is orthonormal to 1e-4, and torch applies it twice more
    before = flat.clone()
    aggregate.apply_residual(layout, residual, 0.25, parts_of(layout, before))
    Launches(layout, CPU).subtract(flat, residual, 0.25)
    assert torch.allclose(before, flat, atol=1e-4)  # a number is the sum of two of bf16, which the interpreter cuts


def test_a_residual_in_half_precision_is_about_that_of_torch() -> None:
    recipe = RecipeConfig(name="distro")
    layout = layout_of(recipe)
    flat, residual = torch.randn(size_of(layout)), torch.zeros(layout.chunks, layout.area, dtype=torch.bfloat16)
    there = residual.clone()
    layout.accumulate(parts_of(layout, flat), residual, 0.9)
    layout.project(residual, *layout.padding_masks(CPU))
    Launches(layout, CPU).accumulate(flat, there, 0.9)
    assert torch.allclose(there.float(), residual.float(), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_contribution_is_what_torch_makes_of_a_residual(recipe: RecipeConfig, dtype: torch.dtype) -> None:
    layout = layout_of(recipe)
    torch.manual_seed(4)
    numbers = (torch.randn(layout.chunks, layout.area) / 100).to(dtype)
    if dtype == torch.float32:
        numbers[-1] = 0.0
        numbers[-1, :3] = torch.tensor([0.5, -0.25, 0.125])  # all others are zeros, whose signs take turns
    for k, turn in ((recipe.k_max, 7), (recipe.ks[0], 8)):
        torch_side, card_side = (Residual((layout,), CPU, dtype) for _ in range(2))
        torch_side.coefficients.copy_(numbers)
        card_side.coefficients.copy_(numbers)
        torch_side.set_k(k)
        expected = torch_side.take(turn, recipe)
        made, removed = Launches(layout, CPU).take(card_side.coefficients, k, turn, recipe)
        same = slice(0, -1) if dtype == torch.float32 else slice(0, 0)  # of equal magnitudes any may be chosen
        assert np.array_equal(made.indices.numpy().view(np.uint16)[same], expected.indices[same])
        if made.exponents is not None:
            assert np.array_equal(made.exponents.numpy(), expected.exponents)
        assert np.array_equal(made.values.numpy()[same], expected.values[same])
        assert torch.allclose(card_side.coefficients[same].float(), torch_side.coefficients[same].float(), atol=1e-7)
        assert (made.indices.diff(dim=1) > 0).all()
        left, gone = card_side.coefficients.float(), numbers.float().gather(1, made.indices.long())
        assert torch.allclose(left.gather(1, made.indices.long()) + removed, gone, atol=0.01)
        zeros = gone[-1] == 0
        is_odd = (made.indices[-1].long() + turn) % 2 == 1
        assert ((made.values[-1] < 0) == is_odd)[zeros].all()


def test_a_payload_is_packed_to_the_same_bytes(recipe: RecipeConfig) -> None:
    layout = layout_of(recipe)
    for k in recipe.ks:
        form = PayloadFormat.of(layout, recipe, k)
        made = drawn(layout, form, np.random.default_rng(6))
        exponents = None if made.exponents is None else torch.from_numpy(made.exponents)
        on = OnCard(torch.from_numpy(made.indices.view(np.int16)), torch.from_numpy(made.values), exponents)
        assert on.packed(form) == pack(made, form)


def test_pieces_have_the_digests_of_blake3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "LANES", 1_024)  # the interpreter takes as long for one
    state = torch.randn(2 * launches.WORDS + 1_000)
    for size in (len(state), 2 * launches.WORDS, 1_000):
        assert launches.leaves(state[:size]) == state_leaves(state[:size])


@pytest.mark.usefixtures("on_card")
def test_weights_that_are_not_one_tensor_are_left_to_torch() -> None:
    assert launches.flat_of([torch.zeros(3), torch.zeros(3)]) is None
    flat = torch.arange(7.0)
    assert launches.flat_of([flat[1:3], flat[3:7].view(2, 2)]).tolist() == [1, 2, 3, 4, 5, 6]  # type: ignore[union-attr]
    assert launches.flat_of([flat[1:3], flat[4:7]]) is None


@pytest.mark.usefixtures("on_card")
def test_a_contribution_leaves_the_card_as_bytes_and_comes_back_to_the_residual(recipe: RecipeConfig) -> None:
    outer = Outer(recipe, shapes_of(recipe.chunk))
    torch.manual_seed(7)
    residual, flat = Residual(outer.layouts, CPU), torch.randn(outer.parameters) / 100
    residual.add(1, outer.parts(flat), 0.9)
    before = residual.coefficients.clone()
    made = residual.take(1, recipe)
    assert isinstance(made, OnCard)
    payload = outer.pack(made, 0)
    found = outer.unpack(payload)
    assert np.array_equal(found.indices, made.indices.numpy().view(np.uint16))
    assert np.array_equal(found.values, made.values.numpy())
    units = np.float32(1) if found.exponents is None else np.ldexp(np.float32(1), found.exponents.astype(np.int32))
    if found.exponents is not None:
        units = np.repeat(units, [group.chunks for group in outer.layouts[0].groups])[:, None]
        assert np.array_equal(residual.kept[1].removed.numpy(), found.values * units)
    assert not torch.equal(residual.coefficients, before)
    ahead, expected = flat.clone(), flat.clone()
    residual.subtract_own_from(outer.parts(ahead), 0.5)
    with patch.object(launches, "is_usable", lambda device: False):
        residual.subtract_own_from(outer.parts(expected), 0.5)
    assert torch.allclose(ahead, expected, atol=1e-5)
    assert not torch.equal(ahead, flat)
    assert residual.restore(1)
    assert torch.allclose(residual.coefficients, before, atol=1e-6)


@pytest.mark.usefixtures("on_card")
@pytest.mark.parametrize(
    "setting",
    [{"fragments": 2}, {"rule": "krum", "byzantine": 1}, {"momentum": "0.9", "nesterov": True, "momentum_rounds": 4}],
    ids=["all of three", "a rule that chooses", "a late momentum"],
)
def test_a_device_whose_programs_give_other_bits_is_left_to_torch(
    setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launches, "refused", {})
    monkeypatch.setattr(launches, "LANES", 1_024)
    monkeypatch.setattr(exactness, "is_usable", lambda device: True)
    turns, real = itertools.count(), aggregate.launches_of  # torch applies first, then the programs, on one device here
    monkeypatch.setattr(aggregate, "launches_of", lambda *where: real(*where) if next(turns) % 2 else None)
    recipe = RecipeConfig(chunk=32, k=20 if "rule" in setting else (20, 40), warmup_rounds=2, **setting)
    check_kernels(recipe, CPU)
    assert not launches.refused
    monkeypatch.setattr(launches, "limbs", lambda most: 1)
    check_kernels(recipe, CPU)
    assert "in torch" in caplog.text
    assert launches.why_not(CPU) == "the programs for a card give other bits here"
    assert launches.why_not(torch.device("cpu", 0)) is not None, "as its tensors name it"


def test_digits_hold_every_number_up_to_their_most() -> None:
    for count in (1, 2, 3, 5):
        most = 127 * (256**count - 1) // 255
        assert (launches.limbs(most), launches.limbs(most + 1)) == (count, count + 1)
