"""The dashboard in the terminal: its keys, and a daemon that comes and goes."""

from __future__ import annotations

import asyncio
import fcntl
import io
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from p2ptrain.errors import NoDaemonError, P2ptrainError
from p2ptrain.node.control import Control
from p2ptrain.observe.rounds import ROUNDS_KEPT
from p2ptrain.observe.schema import LogLine
from p2ptrain.observe.top import KeyReader, Screen, ended_in_order, poll
from tests.helpers.cli import p2ptrain
from tests.helpers.memory_swarm import swarm
from tests.helpers.net import skipping_time
from tests.helpers.top import LINE, Answering, shown

SECONDS = 60  # within which a process draws or ends, also on a busy machine


# ---------------------------------------------------------------------------------------------------
# Coming and going


def test_a_daemon_that_goes_away_and_comes_back_is_waited_for() -> None:
    daemon, times = Answering(), iter(range(100))
    daemon.error = NoDaemonError("no daemon is running in here")
    screen = Screen(daemon, lambda: float(next(times)))

    def text() -> str:
        console = Console(width=100, file=io.StringIO(), color_system=None)
        console.print(screen.frame(100, 40))
        return str(console.file.getvalue())  # type: ignore[attr-defined]

    assert "asking the daemon" in text()
    screen.take()
    assert text() == "no daemon is running in here\n"
    daemon.error = None
    screen.take()
    assert "no answer" not in text()
    assert "round 8" in text()
    daemon.error = P2ptrainError("it is starting")
    screen.take()
    assert "no answer, showing the last one: it is starting" in text()
    assert "round 8" in text()
    daemon.error = None
    screen.take()
    assert "no answer" not in text()


def test_it_looks_again_until_q_is_typed() -> None:
    daemon, now = Answering(), [0.0]
    typed = iter(["", "x", "", "q"])

    class Typing(KeyReader):
        def pressed(self, seconds: float) -> str:
            now[0] += seconds if not (key := next(typed)) else 0.1
            return key

    screen = Screen(daemon, lambda: now[0])
    console = Console(width=80, height=24, file=io.StringIO(), force_terminal=True)
    screen.watch(console, Typing(None, woken=-1), interval=5.0)
    assert now[0] == pytest.approx(10.1)
    assert next(typed, None) is None
    assert console.file.getvalue().endswith("\x1b[?25h\x1b[?1049l")  # type: ignore[attr-defined]


def test_keys_come_one_by_one_and_a_terminal_that_is_gone_ends_it() -> None:
    read, write = os.pipe()
    woken, wakes = os.pipe()
    keys = KeyReader(read, woken)
    assert keys.pressed(0.0) == ""
    os.write(write, b"ab")
    assert (keys.pressed(5.0), keys.pressed(5.0)) == ("a", "b")
    os.close(write)
    assert keys.pressed(5.0) == "q"
    os.close(read)
    assert KeyReader(None, woken).pressed(0.0) == ""
    os.write(wakes, b"!")
    assert KeyReader(None, woken).pressed(60.0) == ""
    os.close(woken)
    os.close(wakes)


def test_a_signal_right_before_a_wait_ends_the_wait() -> None:
    with pytest.raises(SystemExit), ended_in_order() as woken:
        try:
            signal.raise_signal(signal.SIGHUP)
        finally:
            assert select.select([woken], [], [], 0.0)[0] == [woken]


# ---------------------------------------------------------------------------------------------------
# The command


def test_without_a_daemon_one_look_ends_with_its_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert p2ptrain(capsys, "top", "--once", "--data-dir", tmp_path) == (3, "", f"no daemon is running in {tmp_path}\n")


async def test_one_look_is_printed_where_there_is_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = Answering()

    async def answer(request: dict[str, Any]) -> dict[str, Any]:
        return daemon(request)

    with tempfile.TemporaryDirectory(prefix="p2p-") as runtime:
        control = Control(tmp_path, Path(runtime), answer)
        await control.start()
        try:
            for more in ([], ["--once"]):
                status, out, err = await asyncio.to_thread(p2ptrain, capsys, "top", "--data-dir", tmp_path, *more)
                assert (status, err) == (0, "")
                assert "round 8" in out
                assert "\x1b" not in out
        finally:
            await control.close()


async def test_on_a_terminal_it_draws_and_q_ends_it_and_gives_the_terminal_back(tmp_path: Path) -> None:
    daemon = Answering()

    async def answer(request: dict[str, Any]) -> dict[str, Any]:
        return daemon(request)

    with tempfile.TemporaryDirectory(prefix="p2p-") as runtime:
        control = Control(tmp_path, Path(runtime), answer)
        await control.start()
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        before = termios.tcgetattr(theirs)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "p2ptrain", "top", "--data-dir", str(tmp_path), "--interval", "60",
            stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"},
        )  # fmt: skip
        seen = bytearray()
        try:
            async with asyncio.timeout(60):
                while b"round 8" not in seen:
                    seen += await asyncio.to_thread(os.read, ours, 65_536)
                os.write(ours, b"q")
                assert await process.wait() == 0
            assert termios.tcgetattr(theirs) == before
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            await control.close()
            os.close(ours)
            os.close(theirs)


@contextmanager
def on_a_terminal(directory: Path) -> Iterator[tuple[subprocess.Popen[bytes], int, int]]:
    """Starts `top` without a daemon in a pseudo-terminal, and waits for its first frame; returns both ends."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-m", "p2ptrain", "top", "--data-dir", str(directory), "--interval", "60"]
    environment = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=environment) as process:
        try:
            until_shown(ours, b"no daemon")
            yield process, ours, theirs
        finally:
            process.kill()
            for each in (ours, theirs):
                with suppress(OSError):
                    os.close(each)


def until_shown(terminal: int, text: bytes) -> bytes:
    seen = b""
    while text not in seen:
        ready, _, _ = select.select([terminal], [], [], SECONDS)
        assert ready, seen
        seen += os.read(terminal, 65_536)
    return seen


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGQUIT, 131)])
def test_who_is_told_to_end_gives_the_terminal_back(number: signal.Signals, status: int, tmp_path: Path) -> None:
    with on_a_terminal(tmp_path) as (process, ours, theirs):
        assert not termios.tcgetattr(theirs)[3] & termios.ECHO
        process.send_signal(number)
        assert process.wait(SECONDS) == status
        assert termios.tcgetattr(theirs)[3] & termios.ECHO
        assert until_shown(ours, b"\x1b[?25h\x1b[?1049l").endswith(b"\x1b[?25h\x1b[?1049l")
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_a_terminal_that_is_closed_ends_it_without_a_complaint(tmp_path: Path) -> None:
    with on_a_terminal(tmp_path) as (process, ours, theirs):
        os.close(theirs)
        os.close(ours)
        assert process.wait(SECONDS) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""


# ---------------------------------------------------------------------------------------------------
# What the daemon answers


@skipping_time
async def test_the_daemon_tells_its_rounds_and_its_log(tmp_path: Path) -> None:
    async with swarm(tmp_path) as made:
        await made.reach(5)
        daemon = made.nodes[0].daemon
        told = (await daemon.answer({"do": "rounds", "last": 3}))["rounds"]
        assert len(told) == 3
        assert [each["round"] for each in told] == sorted(each["round"] for each in told)
        for wrong in ({}, {"last": 0}, {"last": ROUNDS_KEPT + 1}, {"last": "3"}, {"last": None}):
            assert "1 to" in (await daemon.answer({"do": "rounds", **wrong}))["error"]
        assert await daemon.answer({"do": "log"}) == {"lines": []}
        daemon.lines = lambda: [LogLine.model_validate(LINE)]
        assert (await daemon.answer({"do": "log"}))["lines"] == [{"version": 1, **LINE}]
        answers = {name: await daemon.answer({"do": name, "last": 9}) for name in ("status", "peers", "rounds", "log")}
        text = shown(poll(lambda order: answers[order["do"]], 1.0))
        assert "swarm" in text
        assert "4 members" in text
