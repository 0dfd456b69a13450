"""The measured frontier: its model of an exchange, its paced steps, and its figures, which say what the model says."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.sim.scenario import Line
from tests.helpers.benchmarks import load

POINTS = [{"seconds": 60.0, "steps": 200, "loss": 5.0}, {"seconds": 120.0, "steps": 600, "loss": 3.0}]


@pytest.fixture(scope="module")
def frontier() -> Any:
    return load("frontier")


def costs_of(frontier: Any) -> Any:
    sizes = {"weights": 120_000_000, "payloads": {64: 500_000, 256: 1_600_000}}
    return frontier.Costs(**sizes, make=1.0, rebase=0.5, apply=2.0, dense=0.5, half=0.25, cores=2)


def test_a_round_takes_the_steps_the_bytes_over_the_rate_the_trips_and_the_work(frontier: Any) -> None:
    costs, centre = costs_of(frontier), frontier.CENTRE
    headers = load("frontier_model").HEADERS
    dense = frontier.predict(dataclasses.replace(centre, system="torchft", k=0, overlaps=False), costs)
    assert dense["bytes"] == pytest.approx(1.5 * 120e6 * headers), "a ring of four sends 2 * 3/4 of the weights"
    assert dense["round_seconds"] == pytest.approx(32 + 180e6 * headers * 8 / 50e6 + 5 * 0.025 + 0.5 * 2)
    overlapped = dataclasses.replace(centre, system="torchft", k=0)
    assert frontier.predict(overlapped, costs)["round_seconds"] == pytest.approx(32 + 0.5 * 2), "32 s of training"
    slower = dataclasses.replace(overlapped, megabits=25.0)
    exchange = 180e6 * headers * 8 / 25e6 + 5 * 0.025
    assert frontier.predict(slower, costs)["round_seconds"] == pytest.approx(0.25 + exchange + 0.5 * 2)
    half = frontier.predict(dataclasses.replace(centre, system="hivemind", k=0, overlaps=False), costs)
    assert half["bytes"] == pytest.approx(dense["bytes"] / 2)
    alone = frontier.predict(dataclasses.replace(centre, overlaps=False), costs)
    exchange = 1.5e6 * headers * 8 / 50e6 + 4 * 0.025
    assert alone == pytest.approx(
        {"bytes": 1.5e6 * headers, "round_seconds": 32 + 2 + exchange + 4, "share": 32 / (38 + exchange)}
    )
    assert frontier.predict(centre, costs)["round_seconds"] == 35, (
        "with overlap the exchange takes no time from training"
    )
    slow = dataclasses.replace(centre, megabits=0.05)
    assert frontier.predict(slow, costs)["round_seconds"] > 240, "unless it takes longer than a round's steps"


def test_a_cells_losses_are_read_from_its_own_curve_alone(frontier: Any) -> None:
    curve = [POINTS[0], {"seconds": 240.0, "steps": 600, "loss": 3.0}]
    assert frontier.losses_from(curve) == {
        "loss at equal time": pytest.approx(3.667, abs=1e-3),
        "loss at equal steps": pytest.approx(4.08),
    }
    assert frontier.losses_from(POINTS)["loss at equal time"] is None, "the curve ends before"
    unknown = frontier.losses_from([each | {"steps": None} for each in curve])
    assert unknown["loss at equal steps"] is None, "steps are not known"
    cells = [frontier.CENTRE, dataclasses.replace(frontier.CENTRE, megabits=20.0)]
    rows = [{"name": cell.name} | dataclasses.asdict(cell) | {"share": 0.5} for cell in cells]
    curves = [{"name": cells[0].name, "points": curve}]
    found = frontier.with_losses({"cells": rows, "curves": curves})
    assert [row["loss at equal steps"] for row in found] == [pytest.approx(4.08), None], "another line has none"


def test_a_share_is_steps_times_pace_over_time(frontier: Any) -> None:
    assert frontier.share_of([(100.0, 128), (140.0, 256), (180.0, 384)], 0.25) == pytest.approx(0.8)
    assert frontier.steps_at([[(10.0, 0), (20.0, 100)], [(12.0, 0), (32.0, 100)]], 5.0) == pytest.approx(37.5)


def test_of_paced_steps_some_are_real_and_their_time_is_taken_from_later_ones(tmp_path: Path) -> None:
    paced, real = load("paced"), list[int]()
    pace = paced.Pace(0.0, 4)
    for step in range(9):
        pace.step(lambda step=step: real.append(step))
    assert real == [0, 4, 8]
    assert pace.owed > 0, "a real step took longer than none"
    notes = paced.Notes(tmp_path / "notes")
    notes.add(0)
    notes.add(8)
    with notes.path.open("a") as file:
        file.write("[12")  # is being written
    assert [steps for _, steps in paced.read_notes(notes.path)] == [0, 8]


def test_hosts_can_be_given_other_lines() -> None:
    relay = load("relay").Relay([0, 1, 2], [Line(1.0, 1.0, 0.1)], 1)
    assert relay.way(0, 1)[0] == Line(1.0, 1.0, 0.1)
    relay.set_lines([Line(5.0, 5.0, 0.1), Line(7.0, 7.0, 0.1)])
    assert [relay.way(place, 1 - place)[0].up_megabits for place in (0, 1)] == [5.0, 7.0]
    assert relay.way(2, 0)[0].up_megabits == 5.0


def test_torchft_is_measured_without_and_with_its_own_overlap(frontier: Any) -> None:
    chosen = {"systems": ["torchft"], "steps": [128], "ks": [], "lines": [(20.0, 100.0)], "pace": 0.25, "extra": ""}
    names = [
        [cell.name for cells in frontier.chosen_cells(Namespace(**chosen, overlap=overlap)) for cell in cells]
        for overlap in ([0], [1], [1, 0])
    ]
    plain = "torchft, 20 Mbit/s, 100 ms, 128 steps"
    assert names == [[plain], [f"{plain}, overlap"], [plain, f"{plain}, overlap"]]


def test_the_figures_are_cells_of_the_plan_with_the_models_words_on_them(frontier: Any) -> None:
    file = frontier.Figures(frontier.JSON)
    cells = [frontier.cell_of(row) for row in file.found["cells"]]
    assert [cell.name for cell in cells] == [row["name"] for row in file.found["cells"]]
    assert len(set(cells)) == len(cells)
    assert all(file.has(cell) for cell in cells)
    assert not file.has(dataclasses.replace(frontier.CENTRE, megabits=3.0))
    for cell, row in zip(cells, file.found["cells"], strict=True):
        assert row["predicted"] == pytest.approx(frontier.predict(cell, file.costs)), cell.name
        assert row["share"] == pytest.approx(sum(row["shares"]) / frontier.NODES)
    assert file.found["table"] == frontier.table_of(file.found), "what the page tells"
    marker, *lines = frontier.as_table(file.found).splitlines()
    assert marker == "<!-- figures frontier: table -->"
    assert len(lines) == len(cells) + 2
    assert len({line.count("|") for line in lines}) == 1


def test_the_goal_compares_when_each_first_had_the_rivals_lowest_loss(frontier: Any) -> None:
    theirs = dataclasses.replace(frontier.CENTRE, system="hivemind", k=0, overlaps=False)
    cells = [{"name": cell.name} | dataclasses.asdict(cell) for cell in (frontier.CENTRE, theirs)]
    late = [{"seconds": 300.0, "steps": 300, "loss": 3.5}]  # its lowest
    curves = [{"name": frontier.CENTRE.name, "points": POINTS}, {"name": theirs.name, "points": late}]
    found = frontier.goal_of({"cells": cells, "curves": curves})
    expected = {"loss": 3.5, "after s": 300.0, "ours after s": 105.0, "of its time": 0.35, "our lowest": 3.0}
    assert found == {theirs.name: expected}
    late.insert(0, {"seconds": 120.0, "steps": 120, "loss": 3.5})
    late[1]["loss"] = 3.6  # it had it earlier, and lost it again
    found = frontier.goal_of({"cells": cells, "curves": curves})
    assert found == {theirs.name: expected | {"after s": 120.0, "of its time": 0.875}}
    late[0]["loss"] = 2.0
    assert frontier.goal_of({"cells": cells, "curves": curves})[theirs.name]["of its time"] is None, "not yet had"
