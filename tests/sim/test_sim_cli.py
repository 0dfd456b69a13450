"""`p2ptrain simulate` and `p2ptrain replay` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.cli import p2ptrain

CLEAN = """sentence = "Nothing happens."
nodes = 4
rounds = 3
"""


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    (tmp_path / "clean.toml").write_text(CLEAN)
    return tmp_path / "clean.toml"


def test_a_scenario_is_summed_up(clean: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = p2ptrain(capsys, "simulate", clean, "--seed", 7, "--nodes", 6)
    lines = out.splitlines()
    assert (status, err) == (0, "")
    assert lines[0] == "scenario    Nothing happens."
    assert lines[1].startswith("nodes       6, seed 7, ")
    assert lines[-2] == "members     6 in the end"
    assert lines[-1] == "audits      0; on trial or suspended in the end: nobody"


def test_what_is_not_as_expected_is_status_1(clean: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clean.write_text(CLEAN + "[expect]\nviews_min = 5\n")
    status, out, err = p2ptrain(capsys, "simulate", clean)
    assert (status, err) == (1, "")
    assert out.splitlines()[-1].startswith("FAILED      the longest round's views")


def test_the_events_of_a_node_are_written_and_replayed(
    clean: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "events.jsonl"
    assert p2ptrain(capsys, "simulate", clean, "--trace-node", 2, "--events", log)[0] == 0
    status, out, err = p2ptrain(capsys, "replay", log)
    assert (status, err) == (0, "")
    assert out.endswith(" events of 1 starts: all effects are the same\n")
    lines = log.read_bytes().splitlines(keepends=True)
    entry = json.loads(lines[5])
    entry[2] = "0" * 64
    log.write_bytes(b"".join([*lines[:5], json.dumps(entry).encode() + b"\n"]))
    status, out, err = p2ptrain(capsys, "replay", log)
    assert (status, err) == (1, "")
    assert "5 events of 1 starts: line 6, " in out


def test_a_swarm_is_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = p2ptrain(capsys, "simulate", "--swarm", 20, "--seed", 0)
    assert (status, err) == (0, "")
    assert out.startswith("seed 0\n")
    assert " rounds of " in out
    assert "nothing found" in out


def test_the_seed_of_a_swarm_is_drawn_from_the_clock_and_told_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("p2ptrain.cli.simulation.time.time", lambda: 1_234.5)
    monkeypatch.setattr("p2ptrain.sim.swarm.run", never)
    _, out, _ = p2ptrain(capsys, "simulate", "--swarm", 1)
    assert out.splitlines()[0] == "seed 1234"


def test_a_swarm_that_finds_something_is_status_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from msgspec.structs import replace

    from p2ptrain.sim import swarm

    run = swarm.run
    monkeypatch.setattr(swarm, "run", lambda scenario, seed: replace(run(scenario, seed), failures=["it is broken"]))
    monkeypatch.setattr(swarm, "SHRINK_SECONDS", 0.0)
    status, out, err = p2ptrain(capsys, "simulate", "--swarm", 20, "--seed", 4)
    assert (status, err) == (1, "")
    assert "one failed" in out
    assert "it is broken\n\nIt is repeated by: p2ptrain simulate --swarm 1 --seed 4\n" in out


def test_a_swarm_that_is_interrupted_says_what_it_has_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from p2ptrain.sim import swarm

    run = swarm.run

    def interrupted(scenario: swarm.sc.Scenario, seed: int) -> swarm.Outcome:
        if seed == 5:
            raise KeyboardInterrupt
        return run(scenario, seed)

    monkeypatch.setattr(swarm, "run", interrupted)
    monkeypatch.setattr("p2ptrain.cli.simulation.TELL_SECONDS", 0.0)
    status, out, err = p2ptrain(capsys, "simulate", "--swarm", 1000, "--seed", 4)
    assert status == 130
    assert " rounds of 1 swarms" in err, "a line of progress"
    assert " rounds of 1 swarms" in out
    assert out.endswith("nothing found; to continue: --seed 5\n")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "Invalid value for FILE: give either a scenario or --swarm"),
        (["FILE", "--swarm", "5"], "Invalid value for FILE: give either a scenario or --swarm"),
        (["--swarm", "5", "--nodes", "5"], "Invalid value for --nodes: only works with a scenario, not with --swarm"),
        (["--swarm", "0"], "Invalid value for '--swarm': "),
        (["FILE", "--seconds", "5"], "Invalid value for --seconds: only works with --swarm"),
        (["FILE", "--trace-node", "1"], "Invalid value for --events: --trace-node and --events must be given together"),
        (
            ["FILE", "--trace-node", "9", "--events", "x.jsonl"],
            "Invalid value for --trace-node: the scenario has no node 9",
        ),
        (["FILE", "--nodes", "many"], "Invalid value for '--nodes': "),
        (["FILE", "--trace-node", "1", "--events", "none/x.jsonl"], "none/x.jsonl: cannot be written: "),
        (["none.toml"], "none.toml: cannot be read: No such file or directory. Check the name"),
    ],
)
def test_a_mistake_is_told_in_a_paragraph_with_status_2(
    arguments: list[str], complaint: str, clean: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = p2ptrain(
        capsys, "simulate", *(str(clean) if argument == "FILE" else argument for argument in arguments)
    )
    assert (status, out) == (2, "")
    assert err.startswith(complaint)
    assert len(err.splitlines()) <= 2


COMPARE = "Compare with the files in scenarios/"


def test_a_typo_in_a_scenario_is_told_with_status_2(clean: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clean.write_text(CLEAN.replace("rounds", "round"))
    status, out, err = p2ptrain(capsys, "simulate", clean)
    assert (status, out, err) == (2, "", f"{clean}: object contains unknown field `round`. {COMPARE}\n")


def test_a_log_that_is_none_is_status_1(clean: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = p2ptrain(capsys, "replay", clean)
    assert (status, out) == (1, "")
    assert err == f"{clean}: line 1: an event before any header\n"
