"""The benchmarks of daemons and of blobs run, and their figures add up."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from tests.helpers.benchmarks import load
from tests.helpers.records import lived


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_the_daemons_benchmark_tells_where_a_round_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemons, out = load("daemons"), tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["daemons.py", "apply", "--quick", "--json", str(out)])
    daemons.main()
    found = json.loads(out.read_text())["apply"]
    assert found["rounds"] >= 3
    middles = [found["phases"][phase]["median"] for phase in load("daemon_logs").PHASES]
    assert 0 < middles[-1] == max(middles) < found["round"][0]
    assert {"announcement", "availability", "proposal", "prevote", "precommit"} <= set(found["messages"])
    assert all(0 < share <= 1.05 for share in found["training_shares"])


def test_the_benchmark_of_blobs_counts_what_the_author_sends_twice() -> None:
    row = asyncio.run(load("blobs").measure(2, 2 * 2**20, 1))
    assert (row["others"], row["bytes"]) == (2, 2 * 2**20)
    assert 1 <= row["author_times"] <= 2


def test_the_benchmark_of_kills_finds_roots_that_differ_and_the_longest_stall_of_those_who_lived_on() -> None:
    kills = load("kills")
    those = [lived(number, applied_at=at) for number, at in enumerate([0, 1, 2, 3, 9, 10, 11, 12, 13])]
    died = [lived(number, applied_at=at) for number, at in [(0, 0), (1, 1), (8, 13)]]
    kill = kills.Kill("node 2", 2.5, 13.0)
    found = kills.judge({"node 1": those, "node 2": died}, [kill])
    assert (found["rounds"], found["compared"], found["differing"], found["kills"]) == (9, 3, [], 1)
    assert (found["round_seconds"], found["stall_rounds"], found["worst"]) == (1, 6, "node 2")
    other = [*those[:8], lived(8, applied_at=13, root=b"another")]
    assert kills.judge({"node 1": other, "node 2": died}, [kill])["differing"] == [8]
