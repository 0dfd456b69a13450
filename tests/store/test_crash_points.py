"""Whenever the power fails, or the disk fails once, a restarted node ends with the same bits.

It is a swarm by itself (tests/helpers/lone_node.py).
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from p2ptrain.data.dataset import TokenDataset
from p2ptrain.errors import DataError
from tests.helpers.driver import a_dataset
from tests.helpers.lone_node import ROUNDS, Bits, lived
from tests.helpers.store import Power


def changes_of(tmp_path: Path, dataset: TokenDataset) -> tuple[int, dict[int, Bits]]:
    """Returns how many changes to the disk a whole run makes, and its final bits."""
    root = tmp_path / "whole"
    root.mkdir()
    power = Power(root, -1, Random(0))
    with power.on():
        bits = lived(root, dataset)
    return power.changes, bits


def interrupted(tmp_path: Path, dataset: TokenDataset, at: int, fails: bool, expected: dict[int, Bits]) -> None:
    root, after = tmp_path / f"{at}", tmp_path / f"{at} after"
    root.mkdir()
    power = Power(root, at, Random(at), fails)
    bits: dict[int, Bits] = {}
    with power.on():
        try:
            bits = lived(root, dataset)
        except DataError:  # a start that the disk does not let through says so, and is tried again
            assert fails
            bits = lived(root, dataset)
    if power.is_off:
        power.disk_after(after)
        bits = lived(after, dataset)
    else:
        power.close()
    found = {number: found for number, found in bits.items() if found != expected.get(number, found)}
    assert found == {}, f"at change {at}"
    assert ROUNDS in bits


@pytest.mark.timeout(600)  # a minute on two quiet cores
@pytest.mark.parametrize("fails", [False, True])
def test_wherever_it_is_interrupted_it_ends_with_the_same_bits(fails: bool, tmp_path: Path) -> None:
    dataset = a_dataset(tmp_path / "data")
    changes, expected = changes_of(tmp_path, dataset)
    assert changes > 200
    for at in range(Random(int(fails)).randrange(12), changes, 12):
        interrupted(tmp_path, dataset, at, fails, expected)


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_at_every_point_of_a_run_it_may_be_interrupted(fails: bool, tmp_path: Path) -> None:
    dataset = a_dataset(tmp_path / "data")
    changes, expected = changes_of(tmp_path, dataset)
    for at in range(changes):
        interrupted(tmp_path, dataset, at, fails, expected)
