"""The run to show: its plan follows from a seed, and its figures are refused if they are not whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.benchmarks import load
from tests.helpers.docs import ROOT
from tests.helpers.records import lived

FILE = ROOT / "benchmarks" / "figures" / "show.json"


def figures() -> dict[str, Any]:
    found = {
        "runs": [{"run": "aa", "first": 1, "last": 20}, {"run": "bb", "first": 21, "last": 30}],
        "rounds": 30,
        "hours": {"from first to last": 2.0, "slept": 0.5},
        "held-out loss": [[4, 3.5, 0], [20, 3.0, 0], [20, 2.9, 1]],
        "training loss": [[1, 5.5], [2, 4.0]],
        "members": [[1, 1], [2, 4]],
        "events": [{"round": 2, "hours": 0.1, "what": "killed", "node": "node-2"}],
        "counts": {"kills": 1},
        "roots": {"rounds": 30, "told by several nodes": 29, "differ": []},
        "audits": [{"run": "aa", "all holds": True}],
        "totals": {"tokens": 4_096},
    }
    return found | {"digest": load("show_figures").digest_of(found)}


def test_the_plan_follows_from_the_seed_and_each_kind_of_event_comes_early() -> None:
    show = load("show_plan")
    planned = show.plan(1, 2_000)
    assert planned == show.plan(1, 2_000)
    assert show.digest_of(planned) != show.digest_of(show.plan(2, 2_000))
    assert [show.planned_of(each) for each in json.loads(json.dumps(planned))] == planned
    early = {each.what for each in planned if each.round <= show.FIRST}
    assert early == {"kill", "join", "leave", "move", "back"}
    assert {each.lie for each in planned if each.what == "liar"} == set(show.LIES)


@pytest.mark.parametrize("seed", range(1, 6))
def test_only_who_is_there_is_killed_or_leaves_and_a_quorum_of_honest_nodes_stays(seed: int) -> None:
    show = load("show_plan")
    there = set(show.FOUNDERS)
    for each in show.plan(seed, 4_000):
        if each.what in ("join", "liar"):
            assert each.node not in there
            there.add(each.node)
        elif each.what == "leave":
            there.remove(each.node)
        elif each.what == "kill":
            assert each.node in there
        honest = {name for name in there if name.startswith("node")}
        assert show.KEEPER in honest
        assert 4 <= len(honest) <= 6
        assert len(there) <= 7


def test_figures_that_are_whole_are_read(tmp_path: Path) -> None:
    file = tmp_path / "show.json"
    file.write_text(json.dumps({"command": "python ...", **figures()}))
    assert load("show_figures").read(file)["rounds"] == 30


DAMAGE: dict[str, Callable[[dict[str, Any]], object]] = {
    "runs": lambda found: found.update(runs=[]),
    "rounds": lambda found: found.pop("rounds"),
    "hours": lambda found: found["hours"].update(slept=3.0),
    "held-out loss": lambda found: found["held-out loss"].reverse(),
    "training loss": lambda found: found["training loss"].append([3, float("nan")]),
    "events": lambda found: found["events"][0].pop("hours"),
    "counts": lambda found: found["counts"].update(kills=-1),
    "roots": lambda found: found["roots"].update({"told by several nodes": 31}),
    "audits": lambda found: found.update(audits=[{"run": "aa"}]),
    "totals": lambda found: found.update(totals=None),
    "digest": lambda found: found["held-out loss"][0].__setitem__(1, 3.4),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_figures_that_are_damaged_or_lack_something_are_refused(what: str, tmp_path: Path) -> None:
    show, found, file = load("show_figures"), figures(), tmp_path / "show.json"
    DAMAGE[what](found)
    file.write_text(json.dumps(found))
    with pytest.raises(show.WrongFileError, match=what):
        show.read(file)


@pytest.mark.parametrize("text", ["", "[]", '{"rounds": 30', "null"])
def test_a_file_that_holds_no_figures_is_refused(text: str, tmp_path: Path) -> None:
    show, file = load("show_figures"), tmp_path / "show.json"
    file.write_text(text)
    with pytest.raises(show.WrongFileError):
        show.read(file)


def test_a_root_that_differs_between_two_nodes_is_named_with_its_run_and_round() -> None:
    show = load("show_figures")
    those = [lived(number) for number in range(1, 5)]
    other = [*those[:2], lived(3, root=b"another")]
    same = show.compared({("node-1", "aa"): those, ("node-2", "aa"): those[:2], ("node-2", "bb"): other})
    assert (same["rounds"], same["told by several nodes"], same["differ"]) == (7, 2, [])
    assert show.compared({("node-1", "aa"): those, ("node-2", "aa"): other})["differ"] == ["aa 3"]


@pytest.mark.skipif(not FILE.exists(), reason="it is still being made")
def test_the_figures_in_the_repository_are_whole_and_say_that_all_nodes_had_the_same_roots() -> None:
    found = load("show_figures").read(FILE)
    assert found["roots"]["differ"] == []
    assert all(each["all holds"] for each in found["audits"])
