"""`p2ptrain propose`, `agenda` and `assent`: what they ask of the daemon, and what they show."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cli import p2ptrain
from tests.helpers.web import OTHER, STATUS

ANSWERS: dict[str, dict[str, Any]] = {
    "propose": {"motion": "3f" * 32, "text": "go on after round 40", "needed": 5},
    "agenda": {"motions": STATUS["motions"], "successor": None},
    "assent": {"text": "it counts"},
    "withdraw": {"text": "it counts no more"},
}


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the daemon is asked for."""
    found: list[dict[str, Any]] = []

    def ask(_: Path, order: dict[str, Any]) -> dict[str, Any]:
        found.append(json.loads(json.dumps(order)))
        return deepcopy(ANSWERS[order["do"]])

    monkeypatch.setattr("p2ptrain.cli.control.ask", ask)
    return found


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("0.005", "0.005"),
        ("5e-3", "0.005"),
        ("1/200", "1/200"),
        ("20", 20),
        ("true", True),
        ("wsd", "wsd"),
        ('"wsd"', "wsd"),
        ("[64, 256]", [64, 256]),
        ('["abcd", "ef"]', ["abcd", "ef"]),
        ("nan", "nan"),
        ("1e999999999", "1e999999999"),
        ("[0.5]", "[0.5]"),
        ("2026-01-01", "2026-01-01"),
        ("{", "{"),
    ],
)
def test_a_setting_is_written_as_in_a_run_file(
    written: str, value: object, orders: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = p2ptrain(capsys, "propose", "--set", f"recipe.x = {written}", "--after", 40, "--back-to", 30)
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "moved: that the run go on after round 40",
        "motion 3f3f3f3f needs the assent of 5 members; this node assents",
    ]
    assert orders == [{"do": "propose", "settings": {"recipe.x": value}, "after": 40, "back_to": 30, "data": ""}]


def test_of_a_run_file_only_what_it_says_is_wanted(
    orders: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('name = "mine"\n[recipe]\ninner_learning_rate = 0.005\nlocal_steps = 20\n[model]\npreset = "10m"\n')
    assert p2ptrain(capsys, "propose", file, "--set", "recipe.local_steps=30")[0] == 0
    said = {"name": "mine", "recipe.inner_learning_rate": "1/200", "recipe.local_steps": 30, "model.preset": "10m"}
    assert orders == [{"do": "propose", "settings": said, "after": None, "back_to": None, "data": ""}]
    file.write_text('name = "mine"\n[recipe]\nlocal_step = 20\n')
    status, out, err = p2ptrain(capsys, "propose", file)
    assert (status, out, len(orders)) == (2, "", 1)
    assert err == f"{file}: recipe.local_step: unknown key. Did you mean local_steps?\n"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("propose",), "--set: nothing to move"),
        (("propose", "--after", "40"), "--set: nothing to move"),
        (("propose", "--set", "recipe.k"), "--set: 'recipe.k' is no setting"),
        (("propose", "--set", "=3"), "--set: '=3' is no setting"),
        (("assent",), "MOTION: give one or the other"),
        (("assent", "3f", "--withdraw"), "MOTION: give one or the other"),
    ],
)
def test_a_mistake_asks_the_daemon_for_nothing(
    arguments: tuple[str, ...], why: str, orders: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = p2ptrain(capsys, *arguments)
    assert (status, out, orders) == (2, "", [])
    assert err.startswith(why)


def test_an_assent_names_a_motion_or_is_withdrawn(
    orders: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert p2ptrain(capsys, "assent", "3f") == (0, "it counts\n", "")
    assert p2ptrain(capsys, "assent", "--withdraw") == (0, "it counts no more\n", "")
    assert orders == [{"do": "assent", "motion": "3f"}, {"do": "withdraw"}]


def test_the_agenda_says_what_changes_what_it_costs_and_who_assents(
    orders: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, out, err = p2ptrain(capsys, "agenda")
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        f"motion      3f3f3f3f, by {OTHER}",
        "after       round 40, with the weights of round 40",
        "changes     recipe.k from 256 to 128",
        "costs here  a contribution has 0.55 times the bytes: 550 at most",
        "assents     1 of 2 members needed",
        "this node   does not: `p2ptrain assent 3f3f3f3f`",
    ]
    assert json.loads(p2ptrain(capsys, "agenda", "--json")[1]) == ANSWERS["agenda"]
    (item,) = STATUS["motions"]
    back = item | {"weights_round": 30, "changes": {}, "costs": [], "obstacle": "this node does not keep round 30: why"}
    done = item | {"assents": 2, "is_mine": True}
    monkeypatch.setitem(ANSWERS, "agenda", {"motions": [back], "successor": done})
    lines = p2ptrain(capsys, "agenda")[1].splitlines()
    assert lines[1:6] == [
        "after       round 40, with the weights of round 30",
        "changes     what rounds 31 to 40 did is undone",
        "costs here  not more than now",
        "assents     1 of 2 members needed",
        "this node   cannot assent: this node does not keep round 30: why",
    ]
    assert (lines[7], lines[-1]) == (f"decided     3f3f3f3f, by {OTHER}", "this node   goes along")
    monkeypatch.setitem(ANSWERS, "agenda", {"motions": [], "successor": None})
    assert p2ptrain(capsys, "agenda")[1] == "nobody moves that the run go on as another\n"


def test_a_link_in_a_circle_is_a_directory_for_the_daemon_to_refuse(
    orders: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    assert p2ptrain(capsys, "propose", "--data", "loop")[0] == 0
    assert orders[0]["data"] == f"{tmp_path}/loop"
