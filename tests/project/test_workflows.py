"""The workflows for other systems say only what make can do. They have not been run: nothing here can."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = {*re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE)}
VARIABLES = {*re.findall(r"^(?:[a-z-]+: )?([A-Z_]+) [:?]?=", MAKEFILE, re.MULTILINE)}
OTHERS = {"cp", "git"}
# The code of others that a workflow runs: a new one is a decision.
ACTIONS = {"actions/checkout", "actions/setup-python", "Vampire/setup-wsl"}


def jobs() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in WORKFLOWS:
        found |= {f"{path.stem}/{name}": job for name, job in yaml.safe_load(path.read_text())["jobs"].items()}
    return found


def commands(job: dict[str, Any]) -> list[str]:
    return [line for step in job["steps"] for line in step.get("run", "").splitlines()]


def problem(command: str) -> str:
    """Returns what is wrong with a command of a workflow."""
    program, *words = shlex.split(command)
    if program in OTHERS:
        return ""
    if program != "make":
        return f"{program} is no program that a workflow may run"
    if words[:1] == ["-C"]:
        words = words[2:]
    targets = [word for word in words if "=" not in word]
    unknown = {*targets} - TARGETS | {word.partition("=")[0] for word in words if "=" in word} - VARIABLES
    return f"make has no {', '.join(sorted(unknown))}" if unknown or not targets else ""


@pytest.mark.parametrize("name", jobs())
def test_every_command_of_a_workflow_is_one_that_make_has(name: str) -> None:
    job = jobs()[name]
    assert [each for each in map(problem, commands(job)) if each] == []
    assert [re.split("[ =]", each)[-1] for each in commands(job)].count("test") == 1, "each system runs the tests"
    assert {step["uses"].partition("@")[0] for step in job["steps"] if "uses" in step} <= ACTIONS
    assert job["timeout-minutes"] <= 90
    assert set(job.get("env", {})) - {"CI", "WSLENV"} <= VARIABLES


def test_the_three_systems_are_there_with_versions_of_python_that_the_package_takes() -> None:
    systems = jobs()["platforms/unix"]["strategy"]["matrix"]["include"]
    assert {each["system"].rstrip("-.0123456789") for each in systems} == {"macos", "ubuntu-24.04-arm"}
    assert {each["python"] for each in systems} <= {
        *re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    }
    assert jobs()["platforms/wsl"]["runs-on"].startswith("windows")


def test_windows_hands_its_files_to_linux_as_they_are() -> None:
    """Its git adds a carriage return to each line, unless a shell of Windows configures it before the checkout."""
    first, second, linux, *rest = jobs()["platforms/wsl"]["steps"]
    assert first == {"run": "git config --global core.autocrlf false", "shell": "bash"}
    assert second["uses"].startswith("actions/checkout@")
    assert linux["with"]["wsl-version"] == 2, "the other one has no Linux kernel"
    assert all("shell" not in step for step in rest), "the job's, of WSL"


def test_a_workflow_begins_with_changes_and_may_write_nothing() -> None:
    for path in WORKFLOWS:
        workflow = yaml.safe_load(path.read_text())
        assert {"push", "pull_request"} <= set(workflow[True]), "YAML 1.1 reads on as a truth value"
        assert workflow["permissions"] == {"contents": "read"}


@pytest.mark.parametrize(
    "command", ["make tset", "make", "make test RUONDS=3", "pip install p2ptrain", "make -C ~/p2ptrain nonsense"]
)
def test_a_command_that_is_none_would_be_found(command: str) -> None:
    assert problem(command) != ""


def test_other_versions_of_python_are_those_that_the_package_names() -> None:
    (own,) = re.findall(r"^PYTHONS \?= (.*)$", MAKEFILE, re.MULTILINE)
    named = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert ["3.11", *own.split()] == named, "3.11 is what `make setup` is tested with"
