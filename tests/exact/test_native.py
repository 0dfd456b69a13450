"""Unpacking and counting in C: the results of NumPy, which does the same where there is no compiler."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from time import thread_time_ns
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.config import RecipeConfig
from p2ptrain.errors import RemoteProtocolError
from p2ptrain.exact import native
from p2ptrain.exact.aggregate import sum_votes
from p2ptrain.exact.codec import Contribution, Packed, PayloadFormat, pack, unpack
from p2ptrain.exact.scales import Scales, Sizes
from p2ptrain.exact.transform import Layout

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(
    native.library() is None, reason="there was no C compiler when the package was installed"
)


@st.composite
def recipes(draw: st.DrawFn) -> RecipeConfig:
    name, chunk = draw(st.sampled_from(("distro", "demo", "local"))), draw(st.sampled_from((8, 16, 32, 64)))
    bits = draw(st.integers(1, {"distro": 1, "demo": 4, "local": 8}[name]))
    return RecipeConfig(name=name, chunk=chunk, k=draw(st.integers(1, min(chunk * chunk // 2, 300))), value_bits=bits)


def drawn(layout: Layout, form: PayloadFormat, rng: np.random.Generator) -> Contribution:
    order = np.argsort(rng.random((layout.chunks, layout.area)), axis=1)
    sizes = rng.integers(1, (1 << (form.value_bits - 1)) + 1, (layout.chunks, form.k))
    values = (sizes * rng.choice((-1, 1), sizes.shape)).astype(form.value_type)
    exponents = rng.integers(-12, 3, form.groups).astype(np.int8) if form.groups else None
    return Contribution(np.sort(order[:, : form.k], axis=1).astype(np.uint16), values, exponents)


def in_numpy() -> Any:
    return patch.object(native, "library", lambda: None)


def verdict(payload: bytes, form: PayloadFormat) -> Contribution | None:
    try:
        return unpack(payload, form)
    except RemoteProtocolError:
        return None


@given(recipes(), st.integers(0, 2**32 - 1), st.integers(1, 11))
def test_unpacks_and_counts_as_numpy_does(recipe: RecipeConfig, seed: int, rows: int) -> None:
    layout = Layout([(rows * recipe.chunk, recipe.chunk), (recipe.chunk, 2 * recipe.chunk)], recipe.chunk)
    form, rng = PayloadFormat.of(layout, recipe), np.random.default_rng(seed)
    made = [drawn(layout, form, rng) for _ in range(3)]
    payloads = [pack(each, form) for each in made]
    for contribution, payload in zip(made, payloads, strict=True):
        found = unpack(payload, form)
        assert np.array_equal(found.indices, contribution.indices)
        assert np.array_equal(found.values, contribution.values)
        assert found.values.dtype == contribution.values.dtype
    scales = (
        Scales.of([Sizes.of(Packed(each, form), layout) for each in payloads], layout, recipe, None)
        if form.groups
        else None
    )
    quick = sum_votes(layout, recipe, made, 3, scales, CPU)
    with in_numpy():
        slow = sum_votes(layout, recipe, made, 3, scales, CPU)
    assert torch.equal(quick.sums, slow.sums)
    assert quick.sums.any()


@given(recipes(), st.integers(0, 2**32 - 1), st.data())
def test_a_damaged_payload_gets_the_same_verdict(recipe: RecipeConfig, seed: int, data: st.DataObject) -> None:
    layout = Layout([(3 * recipe.chunk, 2 * recipe.chunk)], recipe.chunk)
    form, rng = PayloadFormat.of(layout, recipe), np.random.default_rng(seed)
    payload = bytearray(pack(drawn(layout, form, rng), form))
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(form.groups, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    quick = verdict(bytes(payload), form)
    with in_numpy():
        slow = verdict(bytes(payload), form)
    assert (quick is None) == (slow is None)
    if quick is not None and slow is not None:
        assert np.array_equal(quick.indices, slow.indices)
        assert np.array_equal(quick.values, slow.values)


@pytest.mark.parametrize("content", [b"\x00", b"\xff"])
def test_all_zeros_and_all_ones_are_refused_for_the_same_reason(content: bytes) -> None:
    for recipe in (RecipeConfig(name="local"), RecipeConfig(name="distro")):
        layout = Layout([(256, 128)], recipe.chunk)
        form = PayloadFormat.of(layout, recipe)
        payload = bytes(form.groups) + content * (form.payload_bytes - form.groups)
        told = []
        for context in (in_numpy(), patch.object(native, "ABI", native.ABI)):
            with context, pytest.raises(RemoteProtocolError) as caught:
                unpack(payload, form)
            told.append(caught.value.why)
        assert told[0] == told[1]


def test_a_library_of_another_release_is_not_used() -> None:
    with patch.object(native, "ABI", native.ABI + 1):
        assert native.library.__wrapped__() is None
    assert native.library.__wrapped__() is not None


BUDGETS = {"pack": 2.0, "unpack in NumPy": 3.5, "unpack in C": 1.0}  # times as long as NumPy takes to find the numbers


@pytest.mark.parametrize(("name", "k", "bits"), [("local", 64, 1), ("local", 256, 4), ("distro", 32, 1)])
def test_a_number_costs_a_few_times_what_finding_it_does(name: str, k: int, bits: int) -> None:
    """About 20 ns in NumPy and 5 in C, on any machine as compared with the least that it could take."""
    recipe, layout = RecipeConfig(name=name, k=k, value_bits=bits), Layout([(1024, 1024)], 64)
    form = PayloadFormat.of(layout, recipe)
    contribution = drawn(layout, form, np.random.default_rng(0))
    payload, mask = pack(contribution, form), np.zeros((layout.chunks, layout.area), bool)
    np.put_along_axis(mask, contribution.indices.astype(np.int64), True, 1)

    def in_numpy_unpacked() -> None:
        with in_numpy():
            unpack(payload, form)

    timed: dict[str, Callable[[], object]] = {
        "find": lambda: np.flatnonzero(mask),
        "pack": lambda: pack(contribution, form),
        "unpack in NumPy": in_numpy_unpacked,
        "unpack in C": lambda: unpack(payload, form),
    }
    least = dict.fromkeys(timed, inf)
    for _ in range(20):
        for what, run in timed.items():
            began = thread_time_ns()
            run()
            least[what] = min(least[what], thread_time_ns() - began)
    times = {what: least[what] / least["find"] for what in BUDGETS}
    assert all(times[what] <= most for what, most in BUDGETS.items()), times
