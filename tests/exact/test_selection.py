"""The largest coefficients, against a sort."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from p2ptrain.exact.selection import _largest_by_topk, largest
from tests.helpers.exact_numbers import weights


@pytest.mark.parametrize(
    ("chunks", "area", "k"), [(3, 64, 8), (3, 64, 9), (130, 4096, 32), (70, 4096, 1), (5, 4096, 512)]
)
def test_the_k_largest_of_every_chunk_are_found_in_rising_order(chunks: int, area: int, k: int) -> None:
    coefficients = weights(chunks, (chunks, area))
    found = largest(coefficients, k)
    assert found.shape == (chunks, k)
    assert (np.diff(found.astype(int), axis=1) > 0).all()
    expected = np.sort(np.sort(np.abs(coefficients.numpy()), axis=1)[:, -k:], axis=1)
    assert np.array_equal(
        np.sort(np.abs(np.take_along_axis(coefficients.numpy(), found.astype(int), 1)), axis=1), expected
    )


@pytest.mark.parametrize("k", [1, 32, 300, 600])
def test_equal_magnitudes_still_give_k_different_indices(k: int) -> None:
    flat = torch.zeros(3, 4096)
    flat[1] = 1.0
    flat[2, ::2] = -1.0
    found = largest(flat, k)
    assert found.shape == (3, k)
    assert (np.diff(found.astype(int), axis=1) > 0).all()
    assert (found[2] % 2 == 0).all()


def test_large_values_in_one_group_are_all_kept() -> None:
    flat = torch.ones(2, 4096) * 0.5
    flat[:, 5::512] = -9.0  # a group is what lies 512 apart
    assert largest(flat, 8).tolist() == [list(range(5, 4096, 512))] * 2


@pytest.mark.parametrize("at_a_time", [1, 7, 1_024])
def test_a_device_chooses_the_same_as_a_cpu(at_a_time: int) -> None:
    coefficients = weights(9, (20, 4096))
    assert np.array_equal(_largest_by_topk(coefficients, 32, at_a_time), largest(coefficients, 32))
