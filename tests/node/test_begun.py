"""Which run a start goes on with: the one that the same file has begun, whatever the defaults are now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from p2ptrain.config import NodeConfig, RunConfig
from p2ptrain.errors import UnusableError
from p2ptrain.node.home import Home, begun_here, note_begun

ME = "3" * 64
SAID: dict[str, Any] = {"name": "x", "recipe": {"name": "demo", "k": 4}}


def meant(said: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(said)


class RunDirectories:
    """A data directory in which runs are begun."""

    def __init__(self, tmp_path: Path) -> None:
        self.config = NodeConfig.model_validate({"storage": {"directory": str(tmp_path)}})

    def directory(self, run: RunConfig) -> Path:
        return Home(self.config).of_run(run.id)

    def begin(self, said: dict[str, Any], **other_defaults: Any) -> RunConfig:
        """Begins a run as a release with other defaults for the recipe does it."""
        wanted = meant({**said, "recipe": {**other_defaults, **said.get("recipe", {})}})
        run = wanted.sealed(manifest="1" * 64, initial_root="2" * 64, founders=[ME])
        note_begun(run, wanted, said, Home(self.config))
        self.directory(run).mkdir(parents=True, exist_ok=True)
        (self.directory(run) / "run.json").write_bytes(run.canonical())
        return run

    def found(self, said: dict[str, Any], me: str = ME) -> RunConfig | None:
        return begun_here(meant(said), said, Home(self.config), me)


def test_the_same_file_goes_on_with_its_run_though_defaults_have_changed(tmp_path: Path) -> None:
    machine = RunDirectories(tmp_path)
    run = machine.begin(SAID, chunk=16)
    assert meant(SAID).recipe.chunk != 16
    assert machine.found(SAID) == run
    assert machine.found({"recipe": SAID["recipe"], "name": "x"}) == run, "the order of keys means nothing"
    assert machine.found(SAID, me="4" * 64) is None


@pytest.mark.parametrize(
    "other",
    [
        {"name": "x"},
        {"name": "x", "recipe": {"name": "demo"}},
        {"name": "x", "recipe": {"name": "demo", "k": 4, "chunk": 16}},
        {"name": "x", "recipe": {"name": "demo", "k": 8}},
        {"name": "y", "recipe": {"name": "demo", "k": 4}},
    ],
)
def test_a_file_that_says_anything_else_begins_another_run(tmp_path: Path, other: dict[str, Any]) -> None:
    machine = RunDirectories(tmp_path)
    machine.begin(SAID, chunk=16)
    assert machine.found(other) is None


def test_of_two_runs_of_one_file_the_one_with_todays_defaults_goes_on(tmp_path: Path) -> None:
    machine = RunDirectories(tmp_path)
    machine.begin(SAID, chunk=16)
    today = machine.begin(SAID)
    machine.begin(SAID, chunk=32)
    assert machine.found(SAID) == today


def test_a_file_that_says_the_same_in_other_words_is_noted_anew(tmp_path: Path) -> None:
    machine = RunDirectories(tmp_path)
    run = machine.begin(SAID)
    other = {**SAID, "data": {"manifest": "embedded"}}
    assert machine.found(other) is None, "then the run that it means is this one anyway"
    note_begun(run, meant(other), other, Home(machine.config))
    assert machine.found(other) == run


def test_a_run_that_cannot_be_read_is_not_begun_a_second_time(tmp_path: Path) -> None:
    machine = RunDirectories(tmp_path)
    place = machine.directory(machine.begin(SAID))
    later = (place / "run.json").read_bytes().replace(b'"protocol":2', b'"protocol":9')
    (place / "run.json").write_bytes(later)
    what = (
        rf"^{place}: begun from this file, and not readable here: run config: protocol: .*\. Start it with the release"
    )
    with pytest.raises(UnusableError, match=what):
        machine.found(SAID)
    (place / "successor").write_text("5" * 64 + "\n")
    with pytest.raises(UnusableError, match=rf"It has gone on: `p2ptrain join --run {'5' * 64}`$"):
        machine.found(SAID)
    assert machine.found({"name": "y"}) is None
    again = machine.begin(SAID, chunk=16)
    assert machine.found(SAID) == again
