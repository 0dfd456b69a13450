"""The benchmarks of daemons and of blobs run, and their figures add up."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from p2ptrain.core.state import Taken
from p2ptrain.observe.schema import RoundRecord
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
    assert row["author_times"] <= row["author_socket_times"] < 1.2 * row["author_times"]
    assert 0 < row["first_seconds"] <= row["seconds"]


def test_phases_are_counted_from_the_last_contribution_that_a_round_took() -> None:
    logs = load("daemon_logs")
    lives = [logs.Life(bytes([number]) * 32) for number in range(2)]
    taken = [Taken(life.key, 7, 6, life.key, 100) for life in lives]
    for number, life in enumerate(lives):
        life.trained[7] = 10.0 + number
        life.held = {taken[0].payload: 11.5, taken[1].payload: 11.25 + number}
        life.steps = {("availability", 7): 12.5, ("prevote", 7): 13.0}
        life.decided[7], life.applied[7] = 13.5, 14.0 + number
        life.manifests[7] = type("Manifest", (), {"taken": tuple(taken)})()
    phases = logs.phases_of(lives, 7)
    assert phases == {
        "held": 1.25, "availability": 1.5, "prevote": 2.0, "decided": 2.5, "applied": 4.0, "taken": 2,
    }  # fmt: skip
    assert logs.phases_of(lives, 8) is None


def record(number: int, at: float, root: bytes = b"") -> RoundRecord:
    return lived(number, applied_at=at, root=root or bytes([number]))


def test_the_benchmark_of_kills_finds_roots_that_differ_and_the_longest_stall_of_those_who_lived_on() -> None:
    kills = load("kills")
    those = [record(number, at) for number, at in enumerate([0, 1, 2, 3, 9, 10, 11, 12, 13])]
    died = [record(number, at) for number, at in [(0, 0), (1, 1), (8, 13)]]
    kill = kills.Kill("node 2", 2.5, 13.0)
    found = kills.judge({"node 1": those, "node 2": died}, [kill])
    assert (found["rounds"], found["compared"], found["differing"], found["kills"]) == (9, 3, [], 1)
    assert (found["round_seconds"], found["stall_rounds"], found["worst"]) == (1, 6, "node 2")
    other = [*those[:8], record(8, 13, b"another")]
    assert kills.judge({"node 1": other, "node 2": died}, [kill])["differing"] == [8]
    before = kills.Kill("node 2", 9.5, 13.0)
    assert kills.judge({"node 1": those, "node 2": died}, [before])["stall_rounds"] == 1


def test_a_kind_of_message_that_nobody_has_heard_yet_is_not_timed() -> None:
    logs = load("daemon_logs")
    author, other = (logs.Life(key=bytes([number]) * 32) for number in (1, 2))
    author.said = {b"one": ("vote", 1.0), b"two": ("hello", 1.5), b"three": ("vote", 0.1)}
    other.heard = {b"one": 1.25, b"three": 0.2}
    assert logs.on_the_way([author, other], 0.5) == {"vote": [0.25]}
