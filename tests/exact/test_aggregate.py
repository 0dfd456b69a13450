"""The exact path: the same bits in any order, grouping, thread count and device, and the right numbers."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from scipy import fft

from p2ptrain.config import BASIS_PEAK, RecipeConfig, StateConfig
from p2ptrain.digest import PIECE_BYTES, digest, leaf_digest, merkle_root
from p2ptrain.errors import DeviceError
from p2ptrain.exact import aggregate, shortage, transform
from p2ptrain.exact.aggregate import (
    Votes,
    apply_payloads,
    apply_residual,
    apply_votes,
    sum_votes,
)
from p2ptrain.exact.codec import Contribution, Packed, PayloadFormat, pack
from p2ptrain.exact.exactness import check_exactness
from p2ptrain.exact.root import covered_pieces, state_root
from p2ptrain.exact.scales import Scales
from p2ptrain.exact.schedule import Terms
from p2ptrain.exact.transform import Layout, first_stage_dtype
from tests.helpers.exact_numbers import contribution, weights
from tests.helpers.golden import (
    FAMILY,
    RULED,
    SHAPES,
    flat_weights,
    golden,
    golden_cases,
    golden_root,
    parts,
    scales_of,
    updated,
)

CPU = torch.device("cpu")
MIXED = [(256, 128), (100, 70), (67,), (128, 64), (13, 3), (5, 9, 64), (1,), (131, 64)]
COMBINATIONS = list(itertools.product(("distro", "demo", "local"), ("normalised", "mean", "sign")))


@pytest.mark.parametrize("case", golden_cases())
def test_golden_state_roots(case: str) -> None:
    assert golden_root(golden_cases()[case], CPU) == golden()[case]


def test_there_is_a_golden_root_for_every_case_and_no_two_are_equal() -> None:
    family = [f"{name} peers={peers}" for name in FAMILY for peers in (1, 7)]
    ruled = [f"{name} peers={peers}" for name in RULED for peers in (7, 11)]
    assert list(golden()) == [*golden_cases(), *family, *ruled]
    assert len(set(golden().values())) == len(golden())


def written_step(outer: str, *, rate: Fraction, peers: float, squares: int, unit: int | None) -> float:
    """The formula in docs/protocol.md for a group of two chunks of 64 at k = 32, operation by operation."""
    lr = rate.numerator / rate.denominator
    if outer == "sign":
        return float(np.float32(lr))
    if outer == "normalised":
        rms = math.sqrt(squares / 8192)
        return (lr / rms) * (2.0**-26 / 64)
    gain = math.sqrt(4096 / 32) if unit is None else 1.0
    return ((lr * gain) / peers) * ((2.0**unit if unit is not None else 1.0) * (2.0**-26 / 64))


@pytest.mark.parametrize(("name", "outer"), COMBINATIONS)
def test_the_step_is_the_written_formula_to_the_last_bit(name: str, outer: str) -> None:
    """One unit in the last place of a step shows in few elements of few states: golden roots may miss it."""
    recipe = RecipeConfig(chunk=64, k=32, name=name, outer=outer, value_bits=3 if name == "demo" else 1)
    layout = Layout([(128, 64)], 64)
    for peers in (1, 3, 7, 11, 49):
        offered = [contribution(peer, layout, recipe) for peer in range(peers)]
        scales = scales_of(layout, recipe, offered)
        votes = sum_votes(layout, recipe, offered, peers, scales, CPU)
        squares = sum(int(vote) ** 2 for vote in votes.sums.reshape(-1).tolist())
        for rate in (Fraction(1, 1000), Fraction(2, 3), Fraction(7, 300), Fraction(2**53 - 1, 2**53 - 111)):
            unit = scales.units[0] if scales else None
            effective = scales.effective[0] if scales else peers
            expected = written_step(outer, rate=rate, peers=effective, squares=squares, unit=unit)
            (step,) = aggregate.steps_of(layout, recipe, peers, scales, rate, lambda group: squares)  # noqa: B023
            assert step.hex() == expected.hex()


@pytest.mark.parametrize(("name", "outer"), COMBINATIONS)
def test_the_norm_of_an_update_is_how_far_it_moves_the_weights_and_the_same_everywhere(name: str, outer: str) -> None:
    recipe = RecipeConfig(chunk=16, k=32, name=name, outer=outer, value_bits=3 if name == "demo" else 1)
    layout = Layout([(640, 96), (16, 16), (48,), (320, 320)], 16)
    form = PayloadFormat.of(layout, recipe)
    payloads = [Packed(pack(contribution(peer, layout, recipe), form), form) for peer in range(5)]
    norms, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            flat = [torch.zeros(shape) for shape in layout.shapes]
            *_, norm = apply_payloads(layout, recipe, payloads[count:] + payloads[:count], Terms(Fraction(1, 3)), flat)
            norms.append(norm)
    finally:
        torch.set_num_threads(threads)
    moved = math.sqrt(sum(float(each.double().square().sum()) for each in flat))
    assert norms == [norms[0]] * 3
    assert norms[0] == pytest.approx(moved, rel=0.1)  # of drawn numbers; of trained ones it is within two percent


def test_a_momentum_is_no_part_of_the_updates_norm_and_without_contributions_it_is_none() -> None:
    recipe = RecipeConfig(momentum=Fraction(9, 10), nesterov=True)
    layout = Layout.of([(128, 128)], recipe)
    form = PayloadFormat.of(layout, recipe)
    payloads = [Packed(pack(contribution(peer, layout, recipe), form), form) for peer in range(2)]
    flat, carried = [torch.zeros(128, 128)], [torch.full((128, 128), 5.0)]
    *_, norm = apply_payloads(layout, recipe, payloads, Terms(Fraction(1)), flat, carried)
    plain = [torch.zeros(128, 128)]
    *_, alone = apply_payloads(layout, recipe, payloads, Terms(Fraction(1)), plain, [torch.zeros(128, 128)])
    assert norm == alone == pytest.approx(float(plain[0].norm()) / 1.9, rel=0.02)
    assert apply_payloads(layout, recipe, [], Terms(Fraction(1)), flat, carried) == ([], None, 0.0)


@pytest.mark.parametrize("outer", ["normalised", "mean", "sign"])
def test_products_that_leave_negative_zero_are_taken_as_zero(outer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = RecipeConfig(name="distro", chunk=64, k=32, outer=outer)
    layout = Layout([(64, 64)], 64)
    offered = [contribution(1, layout, recipe)]
    flat = torch.full((64, 64), -0.0)
    monkeypatch.setattr(transform, "inverse", lambda votes, chunk, stage: torch.full((64, 1, 64), -0.0).double())
    apply_votes(layout, recipe, sum_votes(layout, recipe, offered, 1, None, CPU), Terms(Fraction(1)), [flat])
    assert torch.signbit(flat).all(), "-0.0 - 0.0 is -0.0, and -0.0 - (-0.0) would be 0.0"


def test_factors_are_rounded_to_fp64_and_then_to_fp32() -> None:
    value = Fraction(2**53 - 1, 2**53 - 3)
    assert aggregate.rounded_fp32(value) == float(np.float32((2**53 - 1) / (2**53 - 3)))
    half = Fraction(2**24 + 1, 2**24) + Fraction(1, 2**70)  # just above the middle of two fp32
    assert aggregate.rounded_fp32(half) == 1.0


def all_at_the_top(count: int, recipe: RecipeConfig) -> Scales:
    """Makes values of 8 count as many votes as one contribution may have at one place."""
    shift = np.full((count, 1), recipe.vote_max.bit_length() - 1 - 3)
    return Scales((0,), shift, np.zeros_like(shift), (1,), recipe.vote_max, (float(count),), top=1)


def test_sums_of_exactly_two_to_the_15_need_32_bits() -> None:
    recipe = RecipeConfig(name="demo", value_bits=4, k=1, chunk=8)
    layout = Layout([(8, 8)], 8)
    top = Contribution(np.array([[0]], np.uint16), np.array([[8]], np.int8), np.array([0], np.int8))
    count = 2**15 // recipe.vote_max
    scales = all_at_the_top(count, recipe)
    votes = sum_votes(layout, recipe, [top] * count, count, scales, CPU)
    assert int(votes.sums[0, 0]) == 2**15
    with pytest.raises(AssertionError):
        sum_votes(layout, recipe, [top] * (count - 1), count, scales, CPU)


@pytest.mark.parametrize("broken", [torch.float32, torch.float64])
def test_each_stage_that_is_not_exact_is_found_alone(broken: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.mm
    rounded = {torch.float32: torch.bfloat16, torch.float64: torch.float32}[broken]

    def coarse(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return real(first.to(rounded).to(first.dtype) if first.dtype == broken else first, second)

    monkeypatch.setattr(torch, "mm", coarse)
    for chunk in (8, 64):
        with pytest.raises(DeviceError, match="does not multiply matrices exactly"):
            check_exactness(RecipeConfig(chunk=chunk, k=8), CPU)


def test_an_update_inside_autocast_is_the_same_bits() -> None:
    recipe = RecipeConfig(name="distro", chunk=64, k=32, outer="mean")
    layout = Layout(SHAPES, 64)
    offered = [contribution(peer, layout, recipe) for peer in range(3)]
    expected = updated(recipe, offered, Fraction(1, 10), flat_weights(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(updated(recipe, offered, Fraction(1, 10), flat_weights(1)), expected)


NEWER_SETTING = """
import torch
from p2ptrain.exact.transform import first_stage_dtype
before = first_stage_dtype(1, torch.device("cpu"))
torch.backends.fp32_precision = "tf32"
assert (before, first_stage_dtype(1, torch.device("cpu"))) == (torch.float32, torch.float64)
"""


def test_torchs_newer_precision_setting_moves_the_first_stage_to_fp64_too() -> None:
    """In a process of its own: once the older setting was used, this one has no effect."""
    subprocess.run([sys.executable, "-c", NEWER_SETTING], check=True)


@pytest.mark.parametrize(("name", "outer"), COMBINATIONS)
def test_any_order_and_any_thread_count_give_the_same_bits(name: str, outer: str) -> None:
    recipe = RecipeConfig(chunk=64, k=32, name=name, outer=outer, value_bits=3 if name == "demo" else 1)
    layout = Layout(SHAPES, recipe.chunk)
    offered = [contribution(peer, layout, recipe) for peer in range(12)]
    flat = flat_weights(5)
    expected = updated(recipe, offered, Fraction(1, 300), flat)
    generator = np.random.default_rng(1)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for _ in range(4):
                shuffled = [offered[index] for index in generator.permutation(len(offered))]
                assert torch.equal(updated(recipe, shuffled, Fraction(1, 300), flat), expected)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["distro", "demo", "local"])
def test_any_grouping_gives_the_same_votes(name: str) -> None:
    recipe = RecipeConfig(chunk=64, k=32, name=name, value_bits=3 if name == "demo" else 1)
    layout = Layout(SHAPES, recipe.chunk)
    offered = [contribution(peer, layout, recipe) for peer in range(9)]
    scales = scales_of(layout, recipe, offered)
    whole = sum_votes(layout, recipe, offered, 9, scales, CPU)
    for cut in (1, 4, 8):
        first = sum_votes(layout, recipe, offered[:cut], cut, scales, CPU)
        rest = scales and replace(scales, exponents=scales.exponents[cut:], cuts=scales.cuts[cut:])
        second = sum_votes(layout, recipe, iter(offered[cut:]), 9 - cut, rest, CPU)
        assert torch.equal(first.sums.int() + second.sums.int(), whole.sums.int())


def test_votes_that_outgrow_16_bits_are_counted_in_32() -> None:
    recipe = RecipeConfig(name="demo", value_bits=4, k=2, chunk=8)
    layout = Layout([(8, 8)], 8)
    top = Contribution(np.array([[0, 5]], np.uint16), np.array([[8, -8]], np.int8), np.array([0], np.int8))
    count = 2**15 // recipe.vote_max + 1
    votes = sum_votes(layout, recipe, [top] * count, count, all_at_the_top(count, recipe), CPU)
    assert votes.sums.dtype == torch.int32
    assert votes.sums[0, [0, 5]].tolist() == [count * recipe.vote_max, -count * recipe.vote_max]


@pytest.mark.parametrize(("name", "outer"), COMBINATIONS)
def test_updates_are_the_formulas_worked_out_in_floating_point(name: str, outer: str) -> None:
    recipe = RecipeConfig(chunk=64, name=name, outer=outer, value_bits=3 if name == "demo" else 1, k=16)
    layout = Layout([(128, 64)], 64)
    offered = [contribution(peer, layout, recipe) for peer in range(5)]
    before = weights(4, (128, 64))
    after = before.clone()
    scales = scales_of(layout, recipe, offered)
    votes = sum_votes(layout, recipe, offered, 5, scales, CPU)
    apply_votes(layout, recipe, votes, Terms(Fraction(1, 100)), [after])

    dense, effective = np.zeros((2, 4096)), 0.0
    for one in offered:
        values = one.values.astype(np.float64)
        if one.exponents is not None:
            sizes = [float(np.linalg.norm(each.values * 2.0 ** float(each.exponents[0]))) for each in offered]  # type: ignore[index]
            size, measure = float(np.linalg.norm(values * 2.0 ** float(one.exponents[0]))), sorted(sizes)[3]
            effective += min(1.0, (size / measure) ** 2)
            values *= 2.0 ** float(one.exponents[0])
            while size >= 2 * measure:
                values, size = values / 2, size / 2
            unit = 2.0 ** (math.floor(math.log2(measure / math.sqrt(32))) - recipe.room_bits)
            values = np.sign(values) * np.floor(np.abs(values) / unit + 0.5) * unit
        np.add.at(dense, (np.arange(2)[:, None], one.indices.astype(int)), values)
    decoded = fft.idctn(dense.reshape(2, 64, 64), axes=(1, 2), norm="ortho").reshape(128, 64)
    if outer == "mean":
        update = decoded / (effective or 5 / math.sqrt(4096 / 16))
    elif outer == "normalised":
        update = decoded / math.sqrt(np.square(dense).mean())
    else:
        update = np.sign(decoded)
    moved = (before.double() - after.double()).numpy()
    close = np.abs(moved - update / 100) <= 1e-6 + 1e-3 * np.abs(update / 100).max()
    assert close.mean() == 1.0 if outer != "sign" else close.mean() > 0.999  # the sign of nearly nothing may differ
    assert np.abs(moved).max() > 0


def test_normalised_steps_have_the_size_of_the_rate_whatever_the_number_of_peers() -> None:
    recipe = RecipeConfig(name="distro", chunk=64, k=32, outer="normalised")
    layout = Layout([(256, 256)], 64)
    for peers in (1, 4, 32):
        flat = torch.zeros(256, 256)
        offered = [contribution(peer, layout, recipe) for peer in range(peers)]
        apply_votes(
            layout, recipe, sum_votes(layout, recipe, offered, peers, None, CPU), Terms(Fraction(1, 10)), [flat]
        )
        assert float(flat.square().mean().sqrt()) == pytest.approx(0.1, rel=1e-3)


def test_without_contributions_nothing_changes_not_even_by_decay() -> None:
    recipe = RecipeConfig(name="distro", chunk=64, k=32, weight_decay=Fraction(1))
    flat = flat_weights(2)
    assert torch.equal(updated(recipe, [], Fraction(1, 2), flat), flat)


def test_votes_that_cancel_leave_only_the_decay() -> None:
    recipe = RecipeConfig(name="distro", chunk=64, k=32, outer="normalised", weight_decay=Fraction(1, 2))
    layout = Layout(SHAPES, 64)
    one = contribution(1, layout, recipe)
    flat = flat_weights(2)
    after = updated(recipe, [one, Contribution(one.indices, -one.values)], Fraction(1, 2), flat)
    assert torch.equal(after, flat * 0.75)


def test_decay_comes_before_the_update_and_is_rounded_on_its_own() -> None:
    recipe = RecipeConfig(name="distro", chunk=64, k=32, outer="sign", weight_decay=Fraction(1, 3))
    layout = Layout(SHAPES, 64)
    offered = [contribution(1, layout, recipe)]
    flat = flat_weights(2)
    rate = Fraction(1, 7)
    plain = RecipeConfig(name="distro", chunk=64, k=32, outer="sign")
    keep = torch.tensor(float(1 - rate * Fraction(1, 3)), dtype=torch.float32)
    assert torch.equal(updated(recipe, offered, rate, flat), updated(plain, offered, rate, flat * keep))


def test_negative_zero_in_the_weights_ends_as_the_same_bits_whatever_the_products_sign() -> None:
    recipe = RecipeConfig(name="distro", chunk=64, outer="mean", k=1)
    layout = Layout([(64, 64)], 64)
    for value in (1, -1):
        one = Contribution(np.array([[2 * 64]], np.uint16), np.array([[value]], np.int8))  # the row u = 2
        other = Contribution(one.indices, -one.values)
        flat = torch.full((64, 64), -0.0)
        apply_votes(layout, recipe, sum_votes(layout, recipe, [one, other], 2, None, CPU), Terms(Fraction(1)), [flat])
        assert torch.signbit(flat).all(), "an update of nothing is 0.0, and -0.0 - 0.0 is -0.0"


def test_a_library_that_rounds_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_exactness(RecipeConfig(), CPU)
    real = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b: real(a.bfloat16().to(a.dtype), b))
    with pytest.raises(DeviceError, match="does not multiply matrices exactly"):
        check_exactness(RecipeConfig(), CPU)


def test_a_mode_that_flushes_small_numbers_is_refused() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush small numbers to zero")
    try:
        with pytest.raises(DeviceError, match="flushes small numbers to zero"):
            check_exactness(RecipeConfig(chunk=8, k=8), CPU)
    finally:
        torch.set_flush_denormal(False)


def test_a_coarser_matmul_precision_moves_the_first_stage_to_fp64() -> None:
    recipe = RecipeConfig(name="distro", chunk=64, k=32)
    layout = Layout(SHAPES, 64)
    offered = [contribution(peer, layout, recipe) for peer in range(3)]
    flat = flat_weights(1)
    expected = updated(recipe, offered, Fraction(1, 10), flat)
    try:
        torch.set_float32_matmul_precision("medium")
        assert first_stage_dtype(1, CPU) == torch.float64
        assert torch.equal(updated(recipe, offered, Fraction(1, 10), flat), expected)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_the_bound_of_the_config_keeps_the_largest_swarm_exact() -> None:
    for name, bits in (("distro", 1), ("demo", 4), ("local", 1), ("local", 8)):
        recipe = RecipeConfig(chunk=64, name=name, value_bits=bits, k=32)
        assert 1024 * recipe.k_max * recipe.vote_max * BASIS_PEAK**2 < 2**53
    assert 65_536 * 32 * RecipeConfig(name="distro", chunk=64, k=32).vote_max * BASIS_PEAK**2 < 2**53


# The state root


def test_the_root_is_the_merkle_root_of_the_bytes_in_memory() -> None:
    state = weights(1, (PIECE_BYTES // 4 * 2 + 5,))
    octets = state.numpy().tobytes()
    leaves = [leaf_digest(n, octets[n * PIECE_BYTES : (n + 1) * PIECE_BYTES]) for n in range(3)]
    assert state_root(state) == merkle_root(leaves, len(octets))
    assert state_root(state, [2]) == digest(
        "partial root", (2).to_bytes(8, "little"), merkle_root(leaves[2:], len(octets))
    )


def test_one_flipped_bit_changes_the_root() -> None:
    state = weights(1, (1000,))
    other = state.clone()
    other.view(torch.int32)[777] ^= 1
    assert state_root(state) != state_root(other)


def test_large_states_are_sampled_by_the_manifest_and_covered_whole_now_and_then() -> None:
    config = StateConfig(full_root_bytes_max=2**20, partial_root_leaves=4, full_root_rounds=10)
    size = 100 * PIECE_BYTES
    assert covered_pieces(2**20, config, 1, bytes(32)) is None
    assert covered_pieces(size, config, 20, bytes(32)) is None
    assert covered_pieces(4 * PIECE_BYTES, config, 1, bytes(32)) is None
    drawn = [covered_pieces(size, config, 1, digest("x", bytes([n]))) for n in range(200)]
    assert all(one == sorted(set(one)) and len(one) == 4 and one[0] >= 0 and one[-1] < 100 for one in drawn if one)
    assert {index for one in drawn for index in one or []} == set(range(100))
    assert covered_pieces(size, config, 1, bytes(range(32))) == [4, 20, 35, 47]


def test_the_size_of_blocks_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU and a GPU work through a matrix in blocks of different sizes."""
    for chunks in (1, 5, 1_024):
        monkeypatch.setattr(transform, "BLOCK_CHUNKS", chunks)
        for case in list(golden_cases())[::20]:
            assert golden_root(golden_cases()[case], CPU) == golden()[case], (chunks, case)


@pytest.mark.parametrize("full", ["_update", "_squares", "every other"])
def test_a_device_without_memory_leaves_the_work_to_the_cpu_and_changes_no_bit(
    full: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of which the device could not hold the update was not touched, and none is applied twice."""
    failed = 0

    def failing(real: Callable[..., Any], often: Iterator[bool]) -> Callable[..., Any]:
        def work(*arguments: Any) -> Any:
            nonlocal failed
            real(*arguments)  # as far as it came
            if next(often):
                failed += 1
                raise torch.OutOfMemoryError("CUDA out of memory")
            return real(*arguments)

        return work

    for name in ("_update", "_squares"):
        if full in (name, "every other"):
            often = itertools.cycle((True, False) if full == name else (True, False, False, True, False))
            monkeypatch.setattr(aggregate, name, failing(getattr(aggregate, name), often))
    for case in list(golden_cases())[::16]:
        assert golden_root(golden_cases()[case], CPU) == golden()[case], case
    assert failed > 20


def test_votes_that_a_device_cannot_hold_are_summed_by_the_cpu_which_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shortage, "short", set())
    recipe = RecipeConfig(name="local")
    layout = Layout(SHAPES, recipe.chunk)
    form = PayloadFormat.of(layout, recipe)
    packed = [Packed(pack(contribution(peer, layout, recipe), form), form) for peer in range(3)]
    states = []
    real = aggregate.sum_votes
    for often in (itertools.repeat(False), iter((True, False)), iter((True, False))):

        def sometimes(*arguments: Any, often: Iterator[bool] = often) -> Votes:
            found = real(*arguments)
            if next(often):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return found

        monkeypatch.setattr(aggregate, "sum_votes", sometimes)
        states.append(flat_weights(3))
        apply_payloads(layout, recipe, packed, Terms(Fraction(1, 3)), parts(states[-1]))
    assert torch.equal(states[0], states[1])
    assert torch.equal(states[0], states[2])
    assert not torch.equal(states[0], flat_weights(3))
    assert caplog.text.count("no memory left for a round's arithmetic") == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_transformed", [True, False])
def test_a_share_of_the_residual_is_subtracted_from_the_weights(is_transformed: bool, dtype: torch.dtype) -> None:
    layout = Layout(MIXED, 64, is_transformed=is_transformed)
    moved = [weights(number, shape) for number, shape in enumerate(MIXED)]
    tensors = [weights(100 + number, shape) for number, shape in enumerate(MIXED)]
    expected = [tensor - 0.25 * each for tensor, each in zip(tensors, moved, strict=True)]
    residual = torch.zeros(layout.chunks, layout.area, dtype=dtype)
    layout.accumulate(moved, residual, 0.0)
    apply_residual(layout, residual, 0.25, tensors)
    tolerance = 1e-3 if dtype == torch.float32 else 1e-2  # the basis is of rounded integers
    for tensor, right in zip(tensors, expected, strict=True):
        assert (tensor - right).abs().max() < tolerance * max(1.0, float(right.abs().max()))


def test_a_fragments_residual_is_subtracted_from_its_own_weights_only() -> None:
    whole = Layout(MIXED, 64)
    one, other = whole.fragments(2)
    tensors = [torch.zeros(shape) for shape in MIXED]
    apply_residual(one, torch.ones(one.chunks, one.area), 1.0, tensors)
    own = {place for group in one.groups for place in group.members}
    assert [bool(tensor.any()) for tensor in tensors] == [place in own for place in range(len(MIXED))]
    assert other.chunks and own != set(range(len(MIXED)))
