"""The agent for macOS: launchd would take it, and it starts a node. launchd itself is not here to say so."""

from __future__ import annotations

import plistlib
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from p2ptrain.cli import app
from p2ptrain.system import OPEN_FILES
from tests.helpers.deploy import DEPLOY, TOOL_SECONDS
from tests.helpers.sandbox import settings

AGENT = DEPLOY / "launchd/p2ptrain.node.plist"
SERVICE = settings((DEPLOY / "systemd/p2ptrain.service").read_text())
# By launchd.plist(5): the keys that are used, and what their values are.
KEYS = {
    "Label": str,
    "ProgramArguments": list,
    "RunAtLoad": bool,
    "ExitTimeOut": int,
    "KeepAlive": dict,
    "ThrottleInterval": int,
    "Nice": int,
    "LowPriorityIO": bool,
    "SoftResourceLimits": dict,
    "Umask": int,
}
NODE = """#!/bin/sh
echo "arguments: $*"
trap 'echo leaves; exit 0' TERM
while :; do sleep 0.05; done
"""


@pytest.fixture
def agent() -> dict[str, Any]:
    with AGENT.open("rb") as file:
        found: dict[str, Any] = plistlib.load(file)
    return found


def script_of(agent: dict[str, Any]) -> str:
    shell, option, script = agent["ProgramArguments"]
    assert (shell, option) == ("/bin/sh", "-c"), "launchd puts neither ~ nor variables into arguments"
    return str(script)


def test_it_has_launchds_keys_with_values_of_their_kind(agent: dict[str, Any]) -> None:
    assert {key: type(value) for key, value in agent.items()} == KEYS
    assert f"{agent['Label']}.plist" == AGENT.name, "launchctl names it by its label"
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert agent["SoftResourceLimits"] == {"NumberOfFiles": OPEN_FILES}


def test_it_is_as_patient_and_as_polite_as_the_service_of_systemd(agent: dict[str, Any]) -> None:
    assert agent["ExitTimeOut"] == int(SERVICE["TimeoutStopSec"][0])
    assert agent["ThrottleInterval"] == int(SERVICE["RestartSec"][0])
    assert agent["Nice"] == int(SERVICE["Nice"][0])
    assert agent["Umask"] == int(SERVICE["UMask"][0], 8), "launchd reads a number as a decimal one"


def test_its_command_is_one_of_p2ptrain_with_options_that_it_has(agent: dict[str, Any]) -> None:
    words = shlex.split(script_of(agent).partition(">>")[0])
    assert words[:2] == ["exec", "$HOME/.local/bin/p2ptrain"], "pipx and uv put it there; exec: it gets the signals"
    command = vars(typer.main.get_command(app))["commands"][words[2]]
    context = command.make_context(words[2], words[3:], resilient_parsing=True)
    assert context.params["config"] is not None


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Makes a home with a blank in its path, in which p2ptrain only says how it was called."""
    place = tmp_path / "a user"
    for name in (".local/bin", "Library/Logs", ".config/p2ptrain"):
        (place / name).mkdir(parents=True)
    program = place / ".local/bin/p2ptrain"
    program.write_text(NODE)
    program.chmod(0o755)
    return place


def lines_of(log: Path, process: subprocess.Popen[bytes]) -> Iterator[str]:
    """Yields the lines of a log, as they come, until its process has ended."""
    seen = 0
    while True:
        is_over = process.poll() is not None
        lines = log.read_text().splitlines() if log.exists() else []
        yield from lines[seen:]
        seen = len(lines)
        if is_over:
            return


def test_it_becomes_the_node_whose_words_are_in_the_log(agent: dict[str, Any], home: Path) -> None:
    with subprocess.Popen(agent["ProgramArguments"], env={"HOME": str(home), "PATH": "/usr/bin:/bin"}) as process:
        said = lines_of(home / "Library/Logs/p2ptrain.log", process)
        assert next(said) == f"arguments: join --config {home}/.config/p2ptrain/node.toml"
        process.send_signal(signal.SIGTERM)
        assert process.wait(TOOL_SECONDS) == 0
        assert list(said) == ["leaves"]


def test_the_page_names_the_files_of_the_agent(agent: dict[str, Any]) -> None:
    page = (DEPLOY.parent / "docs/how-to/macos.md").read_text()
    for path in re.findall(r'"\$HOME/([^"]+)"', script_of(agent)):
        assert f"~/{path}" in page
    assert f"deploy/launchd/{AGENT.name}" in page
    assert page.count(f"/{agent['Label']}") >= 2, "to start and to stop it"
