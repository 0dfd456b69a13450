"""Processes forked in a nursery behave as if they had been started directly."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.helpers.nursery import SEEDS, Born, born, nurseries

pytestmark = pytest.mark.linux

SECONDS = 60.0


def run(log: Path, *arguments: str, **own: str) -> Born:
    with log.open("ab") as file:
        return born(arguments, {**os.environ, **own}, file)


@pytest.mark.parametrize(
    ("arguments", "status", "said"), [(("--version",), 0, "p2ptrain "), (("nonsense",), 2, "No such command")]
)
def test_it_ends_and_says_what_the_command_does(
    arguments: tuple[str, ...], status: int, said: str, tmp_path: Path
) -> None:
    process = run(tmp_path / "log", *arguments)
    assert process.wait(SECONDS) == process.poll() == process.returncode == status
    assert said in (tmp_path / "log").read_text()
    process.kill()  # who has ended is left alone: its number may be another's


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_is_a_process_that_signals_reach(number: signal.Signals, tmp_path: Path) -> None:
    """It looks for its run for as long as it lives."""
    nobody = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    process = run(tmp_path / "log", "join", "--bootstrap", nobody, P2PTRAIN_STORAGE__DIRECTORY=str(tmp_path / "data"))
    assert (process.poll(), os.getsid(process.pid)) == (None, process.pid)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    try:
        nurseries_seen = {psutil.Process(process.pid).parent().ppid()}
    finally:
        process.send_signal(number)
    assert nurseries_seen <= {each.process.pid for each in nurseries()}
    assert process.wait(SECONDS) in (-number, 130)  # before it listens to signals, and since then
    with suppress(psutil.NoSuchProcess):  # its keeper tells before it lets go of the number
        assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE


def test_nurseries_differ_in_the_order_of_their_sets_and_have_one_thread(tmp_path: Path) -> None:
    """A fork takes one thread along, and whatever lock another one holds."""
    processes = [run(tmp_path / "log", "--version") for _ in SEEDS]
    assert [process.wait(SECONDS) for process in processes] == [0, 0]
    found = [psutil.Process(each.process.pid) for each in nurseries()]
    assert sorted(each.environ()["PYTHONHASHSEED"] for each in found) == sorted(SEEDS)
    assert [each.num_threads() for each in found] == [1, 1]
