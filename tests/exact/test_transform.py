"""The DCT against scipy and against integers, the layout against the tensors it covers."""

from __future__ import annotations

from decimal import Decimal, getcontext
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import fft

from p2ptrain.config import BASIS_PEAK, EXACT_MAX
from p2ptrain.exact.transform import (
    COSINES,
    FP32_EXACT_MAX,
    Layout,
    basis_entry,
    first_stage_dtype,
    integer_basis,
    inverse,
    inverse_scale,
    orthonormal_basis,
)
from tests.helpers.exact_numbers import integers, weights

CPU = torch.device("cpu")
SHAPES = [(256, 128), (100, 70), (67,), (128, 64), (13, 3), (5, 9, 64), (1,), (131, 64)]


def cosine(numerator: int, denominator: int) -> Decimal:
    """cos(pi * numerator / denominator) to 50 digits, from its series."""
    getcontext().prec = 60
    pi = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
    x = pi * numerator / denominator
    term, total, n = Decimal(1), Decimal(0), 0
    while abs(term) > Decimal(10) ** -55:
        total += term
        n += 2
        term *= -x * x / (n * (n - 1))
    return total


def test_the_cosine_table_is_rounded_from_cosines_of_fifty_digits() -> None:
    unit = Decimal(2) ** 13 * Decimal(2).sqrt()
    assert tuple(int((unit * cosine(n, 128)).to_integral_value()) for n in range(65)) == COSINES


@pytest.mark.parametrize("chunk", [8, 16, 32, 64])
def test_the_integer_basis_is_the_orthonormal_dct_of_scipy(chunk: int) -> None:
    table = integer_basis(chunk, torch.float64, CPU).numpy()
    expected = fft.dct(np.eye(chunk), axis=0, norm="ortho")
    assert np.abs(table * inverse_scale(chunk) ** 0.5 - expected).max() <= 0.5 * inverse_scale(chunk) ** 0.5
    assert np.abs(table).max() <= BASIS_PEAK
    assert basis_entry(chunk, 0, 0) == 8192


@pytest.mark.parametrize("chunk", [8, 16, 32, 64])
def test_forward_transform_is_scipys_of_every_padded_chunk(chunk: int) -> None:
    layout = Layout([(2 * chunk + 3, 3 * chunk - 5)], chunk)
    tensor = weights(1, (2 * chunk + 3, 3 * chunk - 5))
    residual = torch.ones(layout.chunks, layout.area)
    layout.accumulate([tensor], residual, 0.5)
    padded = np.zeros((3 * chunk, 3 * chunk))
    padded[: tensor.shape[0], : tensor.shape[1]] = tensor.numpy()
    tiles = padded.reshape(3, chunk, 3, chunk).transpose(0, 2, 1, 3).reshape(9, chunk, chunk)
    expected = 0.5 + fft.dctn(tiles, axes=(1, 2), norm="ortho")
    assert np.abs(residual.numpy().reshape(9, chunk, chunk) - expected).max() < 2e-3


@pytest.mark.parametrize("chunk", [8, 16, 32, 64])
def test_inverse_transform_is_exact_in_integers_and_close_to_scipy(chunk: int) -> None:
    votes = (integers(2, 7 * chunk * chunk) % np.uint64(21)).astype(np.int64).reshape(7, chunk, chunk) - 10
    basis = integer_basis(chunk, torch.int64, CPU).numpy()
    exact = (basis.T @ votes @ basis).transpose(1, 0, 2)
    for dtype in (torch.int16, torch.int32):
        whole = inverse(torch.from_numpy(votes.reshape(7, -1)).to(dtype), chunk, torch.float64)
        assert np.array_equal(whole.numpy(), exact)
    expected = fft.idctn(votes.astype(float), axes=(1, 2), norm="ortho").transpose(1, 0, 2)
    assert np.abs(exact * inverse_scale(chunk) - expected).max() < 0.05


@pytest.mark.parametrize("chunk", [8, 64])
def test_both_first_stages_give_the_same_integers_at_the_edge_of_fp32(chunk: int) -> None:
    largest = (FP32_EXACT_MAX - 1) // BASIS_PEAK
    assert first_stage_dtype(largest, CPU) == torch.float32
    assert first_stage_dtype(largest + 1, CPU) == torch.float64
    votes = np.zeros((3, chunk, chunk), np.int64)
    votes[0, 0, 0] = largest  # all of it on one coefficient
    votes[1, :, 1] = largest // chunk  # down a column, which the first product adds up
    votes[2, 1, :] = -(largest // chunk)
    flat = torch.from_numpy(votes.reshape(3, -1)).int()
    assert torch.equal(inverse(flat, chunk, torch.float32), inverse(flat, chunk, torch.float64))


def worst_votes(chunk: int, total: int) -> list[np.ndarray]:
    """Votes whose partial sums come closest to the bound: signs aligned with the basis, at several outputs."""
    basis = integer_basis(chunk, torch.int64, CPU).numpy()
    found = []
    for i, j in ((0, 0), (chunk - 1, 0), (chunk // 2, 3 % chunk)):
        aligned = np.sign(np.outer(basis[:, i], basis[:, j]))
        size = np.abs(np.outer(basis[:, i], basis[:, j]))
        one = np.zeros((chunk, chunk), np.int64)
        top = np.unravel_index(size.argmax(), size.shape)
        one[top] = total * aligned[top]
        found.append(one)
        spread = (aligned * (total // chunk**2)).astype(np.int64)
        spread[top] += aligned[top] * (total - np.abs(spread).sum())
        found.append(spread)
    return found


@pytest.mark.parametrize("chunk", [8, 16, 32, 64])
def test_every_partial_sum_of_65536_contributors_stays_below_two_to_the_53(chunk: int) -> None:
    """k and value are the largest that the config admits: contributors * k * value * peak**2 < 2**53."""
    total = (EXACT_MAX - 1) // BASIS_PEAK**2
    assert total >= 65_536 * 512  # signs of k = 512
    assert total >= 65_536 * 32 * 8  # or values of 4 bits at k = 32
    basis = integer_basis(chunk, torch.int64, CPU).numpy()
    for votes in worst_votes(chunk, total):
        assert np.abs(votes).sum() == total
        # Partial sums of any order are bounded by the sum of magnitudes, in either stage.
        bound = np.abs(basis.T) @ np.abs(votes) @ np.abs(basis)
        assert 0 <= int(bound.max()) < EXACT_MAX
        exact = (basis.T.astype(object) @ votes.astype(object) @ basis.astype(object)).astype(np.int64)
        computed = inverse(torch.from_numpy(votes.reshape(1, -1)).int(), chunk, torch.float64)[:, 0]
        assert np.array_equal(computed.numpy(), exact)


@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=6), st.sampled_from([8, 16]))
@settings(deadline=None, max_examples=60)
def test_every_element_of_every_tensor_has_one_place_and_the_rest_is_padding(
    shapes: list[list[int]], chunk: int
) -> None:
    layout = Layout(shapes, chunk)
    tensors, start = [], 1
    for shape in shapes:
        tensors.append(torch.arange(start, start + prod(shape), dtype=torch.float32).view(shape))
        start += prod(shape)
    seen: list[float] = []
    for group in layout.groups:
        matrix = layout.matrix(tensors, group)
        for strip in layout.strips(group, CPU):
            tiles = layout._tiles(matrix[strip.rows], group, strip)
            assert len(tiles) == strip.chunks.stop - strip.chunks.start
            seen += tiles[tiles != 0].tolist()
    assert sorted(seen) == list(range(1, start))
    assert layout.chunks == sum(group.chunks for group in layout.groups)
    assert sorted(index for group in layout.groups for index in group.members) == list(range(len(shapes)))


def test_vectors_and_thin_matrices_share_chunks() -> None:
    layout = Layout(SHAPES, 64)
    assert [group.members for group in layout.groups] == [(0,), (3,), (7,), (1, 2, 4, 5, 6)]
    assert layout.groups[-1].chunks == 3  # 9,987 elements
    assert (layout.groups[-1].rows, layout.groups[-1].columns) == (157, 64)


def test_blocks_cover_wide_and_tall_groups_once() -> None:
    layout = Layout([(64, 64 * 40), (64 * 70, 64)], 64)
    for group in layout.groups:
        chunks = [
            number for strip in layout.strips(group, CPU) for number in range(strip.chunks.start, strip.chunks.stop)
        ]
        assert chunks == list(range(group.first_chunk, group.first_chunk + group.chunks))


def test_projection_is_what_cropping_the_decoded_tensor_does() -> None:
    layout = Layout([(90, 120)], 64)
    residual = weights(3, (layout.chunks, layout.area)).clone()
    chunks, masks = layout.padding_masks(CPU)
    assert chunks.tolist() == [1, 2, 3]
    basis = orthonormal_basis(64, CPU)
    decoded = (basis.T @ residual.view(2, 2, 64, 64) @ basis).permute(0, 2, 1, 3).reshape(128, 128)
    cropped = decoded[:90, :120].contiguous()
    layout.project(residual, chunks, masks)
    expected = torch.empty_like(residual)
    expected.fill_(0)
    layout.accumulate([cropped], expected, 0.0)
    assert (residual - expected).abs().max() < 2e-3
    again = residual.clone()
    layout.project(again, chunks, masks)
    assert (again - residual).abs().max() < 2e-3
