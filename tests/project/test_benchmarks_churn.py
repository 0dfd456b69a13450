"""The benchmarks of churn and of scale: their faults are drawn as they say, and their figures add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.core import manifest
from p2ptrain.core.manifest import attested
from p2ptrain.identity import peer_id_of
from tests.helpers.benchmarks import load
from tests.helpers.records import KEYS, lived


@pytest.fixture(scope="module")
def churn() -> Any:
    return load("churn")


def test_as_many_faults_are_drawn_as_are_expected_and_the_same_again_from_the_same_seed(churn: Any) -> None:
    for segment in churn.SEGMENTS.values():
        for nodes in (16, 64):
            found = churn.faults_of(segment, 1, nodes)
            kills = [fault for fault in found if fault.kind == "kill"]
            mean = segment.kill_seconds * 16 / nodes
            assert len(kills) <= (max(1, round(60 * segment.minutes / mean)) if mean else 0)
            assert len(kills) >= (0.5 * 60 * segment.minutes / mean if mean else 0), "whoever is down is not killed"
            assert not {fault.node for fault in found} & churn.liars_of(segment, nodes).keys()
            assert found == churn.faults_of(segment, 1, nodes)
        assert not segment.kill_seconds or churn.faults_of(segment, 1) != churn.faults_of(segment, 2)


def test_the_simulated_twin_of_a_segment_has_its_faults_and_keeps_every_promise(churn: Any) -> None:
    segment = churn.replace(churn.SEGMENTS["5 liars of three kinds, a kill every 15 s"], minutes=1.0)
    row = churn.of_simulated(segment, 16, 1)
    assert (row["kills"], row["branches"], row["did not catch up"], churn.cut_short(row)) == (4, 1, 0, 0)
    assert row["seconds to catch up"]["count"] == 4
    assert row["rounds"] >= 8
    most = row["rounds"] * row["contributions a round"] * 5 * 8 * 64
    assert 0.5 * most < row["honest tokens"] <= 0.75 * most, "five of sixteen are liars"
    assert 15 < row["nodes at a round's end"] <= 16


def test_a_segment_that_breaks_a_promise_has_no_figures(churn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "attested", lambda fields, least: attested(fields, least)[1:])
    with pytest.raises(AssertionError, match="which every honest member holds"):
        churn.of_simulated(churn.replace(churn.SEGMENTS["no faults"], minutes=0.5), 16, 1)


def test_rounds_decided_before_a_segment_do_not_count_when_a_newcomer_applies_them(churn: Any) -> None:
    segment = churn.replace(churn.SEGMENTS["joins and leaves"], minutes=1.0)
    row = churn.of_simulated(segment, 16, 1)
    assert row["joins"] == 2
    assert row["rounds"] <= 12, "a round takes five seconds"


def test_who_is_killed_again_before_it_has_caught_up_is_counted(churn: Any) -> None:
    kept = json.loads((churn.FIGURES / "churn.json").read_text())
    row = next(row for row in kept["rows"] if (row["segment"], row["swarm"]) == ("a kill every 3.75 s", churn.REAL))
    assert churn.cut_short(row) == 16
    (line,) = (line for line in churn.table([row]).splitlines() if row["segment"] in line)
    assert "| 1.03 min |" in line, "how often a node failed is as measured"
    assert "| 48, 16, 0 |" in line


def test_records_tell_which_rounds_were_new_whose_work_they_took_and_whether_roots_differ(churn: Any) -> None:
    three = tuple(KEYS[:3])
    told = [lived(number, applied_at=10.0 + number, contributors=three, swarm_tokens=300) for number in range(8)]
    other = [lived(number, applied_at=10.5 + number, contributors=three, swarm_tokens=300) for number in range(2, 8)]
    found = churn.judge({"one": told, "other": other}, (12.2, 16.2), {peer_id_of(KEYS[2])})
    assert (found["rounds"], found["seconds"], found["honest tokens"]) == (4, 4.0, 800)
    assert (found["rounds compared"], found["rounds whose roots differ"], found["branches"]) == (4, 0, 1)
    assert found["longest time without a round"] == 1.0
    other[2] = lived(4, applied_at=14.5, contributors=three, swarm_tokens=300, root=b"another")
    assert churn.judge({"one": told, "other": other}, (12.2, 16.2), set())["rounds whose roots differ"] == 1


def test_goodput_is_over_the_segments_without_faults_of_the_same_swarm(churn: Any) -> None:
    rows = [
        {"segment": "no faults", "swarm": "16 daemons", "honest tokens": 1_000, "seconds": 10.0},
        {"segment": "no faults, again", "swarm": "16 daemons", "honest tokens": 600, "seconds": 10.0},
        {"segment": "a", "swarm": "16 daemons, a checkpoint every 1 rounds", "honest tokens": 400, "seconds": 10.0},
        {"segment": "a", "swarm": "64 simulated", "honest tokens": 400, "seconds": 10.0},
        {"segment": "b", "swarm": "16 daemons", "honest tokens": 1_000, "seconds": 10.0},
    ]
    rows[-1]["nodes that compared a round"] = 20.0
    rows[0]["nodes that compared a round"] = 14.0
    found = [row["goodput, percent"] for row in churn.with_goodput(rows)]
    assert found == [125.0, 75.0, 50.0, None, 100.0], "more nodes than at first count for what they are"


def test_the_tables_of_churn_are_those_of_its_rows(churn: Any) -> None:
    kept = json.loads((churn.FIGURES / "churn.json").read_text())
    rows = churn.with_goodput([dict(row) for row in kept["rows"]])
    assert (rows, kept["table"], kept["simulated"]) == (kept["rows"], churn.table(rows), churn.simulated(rows))
    assert all(row["rounds whose roots differ"] == 0 for row in rows if churn.kind_of(row) == churn.REAL)
    assert all({"command", "commit", "date", "seed"} <= row.keys() for row in rows)


def test_the_page_about_scale_has_the_tables_that_the_function_computes() -> None:
    scale, page = load("scale"), Path(__file__).parents[2] / "docs" / "explanation" / "scale.md"
    text, found = page.read_text(encoding="utf-8"), scale.arithmetic()
    kept = json.loads((scale.FIGURES / "scale.json").read_text())
    assert {name: kept[name] for name in found} == json.loads(json.dumps(found)), "python benchmarks/scale.py"
    for name in ("bytes down", "work", "room", "ranks", "main memory", "sums"):
        assert found[name] in text, name


def test_sums_of_contributions_take_as_much_as_they_hold() -> None:
    scale = load("scale")
    assert scale.sum_bytes(256, 1) > 0.95 * scale.need("7B", 256).payload / scale.need("7B", 256).parameters
    assert scale.sum_bytes(4_096, 16) == 6 / 8, "all places, and one of 33 values"
    assert 0.9 < scale.sum_bytes(64, 16) / 16 / scale.sum_bytes(64, 1) < 1.1
    assert scale.down(16, 1.0) == 15
    assert scale.down(256, 1.0, 16, 1.0) == 30
    assert [scale.best_group(nodes) for nodes in scale.NODES] == [4, 8, 16]
