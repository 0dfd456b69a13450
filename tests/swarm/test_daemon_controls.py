"""A flipped bit is seen, wherever it is: without that, that no roots have differed would say nothing."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from tests.helpers.benchmarks import load
from tests.helpers.daemons import TEST_SECONDS

pytestmark = pytest.mark.timeout(TEST_SECONDS)


def test_a_flipped_bit_in_a_node_s_memory_its_history_or_its_arithmetic_is_seen_in_its_round(tmp_path: Path) -> None:
    controls = load("controls")
    found = controls.controls(tmp_path)
    assert controls.unseen(found) == [], found
    flipped = found["memory"]["flipped_after_round"]
    assert {*found["memory"]["rounds_told_with_another_root"]} <= {flipped}, (
        "the next one is computed from the right state"
    )
    assert flipped < found["memory"]["certified_by_round"] <= flipped + 2
    blind = copy.deepcopy(found)
    blind["memory"]["noted_for_rounds"] = []
    blind["history"]["the log"] = ""
    blind["arithmetic"]["a weight"]["seen_in"] = [flipped + 1_000]
    assert controls.unseen(blind) == ["memory", "the log", "a weight"]
