"""Replay: the same events give the same effects, and the first differing line is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.errors import ConfigError, DataError
from p2ptrain.replay import EventLog, Replayed
from p2ptrain.replay import replay as replay_any
from p2ptrain.sim.keys import FakeSigner
from p2ptrain.sim.outcome import simulate
from p2ptrain.sim.scenario import load_scenario, scenario_of
from p2ptrain.sim.watch import SIMULATED


def replay(path: Path) -> Replayed:
    return replay_any(path, {SIMULATED: lambda header: FakeSigner(header.run_id, header.me)})


FOLDER = Path(__file__).parents[2] / "scenarios"


def write(path: Path, name: str, index: int, seed: int = 3) -> list[bytes]:
    with path.open("wb") as file:
        simulate(
            load_scenario(FOLDER / f"{name}.toml"), seed, (), lambda c: c.watch.log(c.setup, index, EventLog(file))
        )
    return path.read_bytes().splitlines(keepends=True)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Returns the events of a node that is killed and comes back."""
    return write(tmp_path_factory.mktemp("log") / "events.jsonl", "disks-lost", 2)


def saved(tmp_path: Path, lines: list[bytes]) -> Path:
    (tmp_path / "events.jsonl").write_bytes(b"".join(lines))
    return tmp_path / "events.jsonl"


def test_a_log_is_played_again_with_the_same_effects(lines: list[bytes], tmp_path: Path) -> None:
    starts = sum(line.startswith(b"{") for line in lines)
    assert starts == 2
    assert replay(saved(tmp_path, lines)) == Replayed(len(lines) - starts, starts, "")


@pytest.mark.parametrize(
    ("name", "index"), [("partition-regroup", 12), ("joins", 8), ("liar-fork", 0), ("overlap-by-itself", 3)]
)
def test_newcomers_losers_of_a_branch_and_who_overlaps_are_played_again(name: str, index: int, tmp_path: Path) -> None:
    count = len(write(tmp_path / "events.jsonl", name, index))
    assert replay(tmp_path / "events.jsonl") == Replayed(count - 1, 1, "")


def test_the_first_difference_is_told(lines: list[bytes], tmp_path: Path) -> None:
    entry: list[Any] = json.loads(lines[20])
    entry[2] = "0" * 64
    changed = [*lines[:20], json.dumps(entry).encode() + b"\n", *lines[21:]]
    replayed = replay(saved(tmp_path, changed))
    assert replayed.events == 20
    kind = entry[1]["type"]
    assert replayed.difference.startswith(f"line 21, {kind} at {entry[0]:.6f} s: the effects differ and are now: ")


@pytest.mark.parametrize("cut", [1, 9, 40])
def test_a_last_line_that_a_kill_cut_off_is_left_out(cut: int, lines: list[bytes], tmp_path: Path) -> None:
    replayed = replay(saved(tmp_path, [*lines[:30], lines[30][:-cut]]))
    assert (replayed.events, replayed.difference) == (29, "")


def test_an_event_that_is_missing_makes_a_difference(lines: list[bytes], tmp_path: Path) -> None:
    training = next(place for place, line in enumerate(lines) if b"TrainingFinished" in line)
    replayed = replay(saved(tmp_path, lines[:training] + lines[training + 1 :]))
    assert "the effects differ" in replayed.difference


def test_an_event_that_a_node_did_not_survive_is_played_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from p2ptrain.core.events import TrainingFinished
    from p2ptrain.core.node import Node

    handle = Node.handle

    def fatal(self: Node, event: Any, now: float) -> Any:
        if isinstance(event, TrainingFinished) and event.round == 3:
            raise AssertionError("round three is too much")
        return handle(self, event, now)

    monkeypatch.setattr(Node, "handle", fatal)
    scenario = scenario_of({"sentence": "One.", "nodes": 1, "rounds": 5})
    with (tmp_path / "events.jsonl").open("wb") as file:
        outcome = simulate(scenario, 1, (), lambda c: c.watch.log(c.setup, 0, EventLog(file)))
    assert ", AssertionError: round three is too much (test_sim_replay.py, line " in outcome.failures[0]
    assert replay(tmp_path / "events.jsonl").difference.endswith(" s: AssertionError: round three is too much")
    monkeypatch.undo()
    assert "the effects differ" in replay(tmp_path / "events.jsonl").difference  # it is mended


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda lines: lines[1:], "line 1: an event before any header"),
        (lambda lines: [], "contains no events"),
        (lambda lines: lines[:1], "contains no events"),
        (lambda lines: [lines[0], lines[1][:-9] + b"\n"], "line 2 is damaged or from another version"),
        (lambda lines: [lines[0], b'[1.0, {"type": "Slept"}, ""]\n'], "line 2 is damaged or from another version"),
        (lambda lines: [lines[0].replace(b'"format":1', b'"format":9')], "format 9, and this release reads format 1"),
        (lambda lines: [lines[0].replace(b'simulated"}', b'dsa"}')], "signatures of kind 'dsa'"),
        (lambda lines: [lines[0].replace(b"protocol", b"protokol")], "the event log is from another version"),
    ],
)
def test_a_log_that_cannot_be_played_is_refused(
    lines: list[bytes], change: Any, complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=complaint):
        replay(saved(tmp_path, change(lines)))


def test_a_log_that_is_not_there_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        replay(tmp_path / "none.jsonl")
