"""The dashboard in the terminal: what its frames say, how it takes a daemon that comes and goes, and its keys."""

from __future__ import annotations

import asyncio
import fcntl
import io
import os
import pty
import struct
import sys
import tempfile
import termios
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from net_known import skipping_time
from rich.console import Console
from test_cli import p2ptrain
from test_memory_swarm import swarm
from web_known import OTHER, PEER, STATUS, a_round

from p2ptrain.daemon.control import Control
from p2ptrain.daemon.rounds import ROUNDS_KEPT
from p2ptrain.daemon.top import Keys, Look, Screen, frame, look, sparkline
from p2ptrain.errors import NoDaemonError, P2ptrainError
from p2ptrain.web.models import LogLine

LINE = {"at": "2026-03-29T12:34:56.789+00:00", "level": "warning", "message": "a line\nand more"}
ANSWERS: dict[str, dict[str, Any]] = {
    "status": STATUS,
    "peers": {"peers": [PEER]},
    "rounds": {"rounds": [a_round(number) | {"loss": 5.0 - number / 2} for number in range(1, 8)]},
    "log": {"lines": [LINE]},
}


class Answering:
    """A daemon that says what a test wants."""

    def __init__(self) -> None:
        self.answers = deepcopy(ANSWERS)
        self.error: P2ptrainError | None = None

    def __call__(self, order: dict[str, Any]) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        if order["do"] not in self.answers:
            raise P2ptrainError("unknown request")
        return self.answers[order["do"]]


def shown(now: Look | None, before: Look | None = None, trouble: str = "", width: int = 100, height: int = 40) -> str:
    console = Console(width=width, height=height, file=io.StringIO(), color_system=None)
    console.print(frame(now, before, trouble, width, height))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in text.splitlines()), text
    return str(text)


# ---------------------------------------------------------------------------------------------------
# Frames


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [
        ([], 10, ""),
        ([1.0], 0, ""),
        ([3.0, 3.0], 10, "▁▁"),
        ([0.0, 7.0], 10, "▁█"),
        ([float(n) for n in range(8)], 8, "▁▂▃▄▅▆▇█"),
        ([float(n // 2) for n in range(16)], 8, "▁▂▃▄▅▆▇█"),
        ([7.0, 0.0, 3.0], 2, "█▁"),
    ],
)
def test_a_sparkline_goes_from_the_least_to_the_largest(values: list[float], width: int, line: str) -> None:
    assert sparkline(values, width) == line


def test_a_frame_says_what_the_daemon_says() -> None:
    text = shown(look(Answering(), 1.0))
    for part in (
        "test", "round 8", "agree", "try 2", "2.5000 nats", "123 tokens/s", "457", "5 contributions, 25.0%", "9,000",
        "2 members", "cdcdcdcdcdcdcdcd", "after round 7", "4.500", "1.500", "train 1.0", "collect 0.2", OTHER[-16:],
        "member", "bad payload 1", "private", "12:34:56 a line", "all is as it should be", "cpu, 100% of the time",
    ):  # fmt: skip
        assert part in text, part
    assert "and more" not in text  # of a line of the log its first


def test_complaints_and_pauses_are_told_each_on_a_line() -> None:
    daemon = Answering()
    daemon.answers["status"]["health"] = ["degraded: the disk is full", "paused by its owner", "crash-only: small"]
    text = shown(look(daemon, 1.0))
    assert "degraded: the disk is full\n" in text.replace(" \n", "\n")
    assert "paused by its owner" in text
    assert "crash-only" not in text
    assert "all is as it should be" not in text


def test_bandwidth_is_what_went_between_two_looks() -> None:
    daemon = Answering()
    before = look(daemon, 10.0)
    daemon.answers = deepcopy(daemon.answers)
    daemon.answers["status"]["bytes"] = {"bytes sent": 10_010, "bytes received": 20}
    assert "sends 5.0 KB/s (10.0 KB), receives 0 B/s (20 B)" in shown(look(daemon, 12.0), before)
    daemon.answers = deepcopy(daemon.answers)
    daemon.answers["status"]["bytes"] = {"bytes sent": 5, "bytes received": 5}  # it has begun anew
    assert "sends 5 B, receives 5 B" in shown(look(daemon, 14.0), look(Answering(), 12.0))


@pytest.mark.parametrize("width", [20, 40, 69, 80, 140, 300])
@pytest.mark.parametrize("peers", [0, 1, 200])
def test_any_width_holds_a_frame_and_many_peers_fit_the_height(width: int, peers: int) -> None:
    daemon = Answering()
    daemon.answers["peers"]["peers"] = [PEER | {"peer_id": f"12D3KooW{number:044}"} for number in range(peers)]
    text = shown(look(daemon, 1.0), width=width, height=30)
    if width >= 40:
        assert len(text.splitlines()) <= 32
    assert ("more" in text) == (peers == 200)
    assert "round 8" in text or width < 40


def test_a_young_node_has_a_frame() -> None:
    daemon = Answering()
    daemon.answers["status"] |= {"loss": None, "swarm_tokens_per_second": None, "state_root": "", "is_member": False}
    daemon.answers["rounds"]["rounds"] = []
    assert "- nats a token" in shown(look(daemon, 1.0))
    daemon.answers["rounds"]["rounds"] = [a_round(1) | {"loss": None}]
    shown(look(daemon, 1.0))


def test_what_a_terminal_would_obey_does_not_reach_it() -> None:
    daemon = Answering()
    daemon.answers["status"]["health"] = ["split: \x1b[2Jgone"]
    daemon.answers["peers"]["peers"][0] |= {"refused": {"\x1b]0;x\x07": 1}}
    daemon.answers["log"]["lines"] = [LINE | {"message": "[bold]\x1b[31m"}]
    text = shown(look(daemon, 1.0))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[bold]?[31m" in text  # and rich's marks are text


def test_an_older_daemon_that_knows_its_status_alone_has_a_frame() -> None:
    daemon = Answering()
    for name in ("peers", "rounds", "log"):
        del daemon.answers[name]
    assert "round 8" in shown(look(daemon, 1.0))


# ---------------------------------------------------------------------------------------------------
# Coming and going


def test_a_daemon_that_goes_away_and_comes_back_is_waited_for() -> None:
    daemon, times = Answering(), iter(range(100))
    daemon.error = NoDaemonError("no daemon runs in here")
    screen = Screen(daemon, lambda: float(next(times)))

    def text() -> str:
        console = Console(width=100, file=io.StringIO(), color_system=None)
        console.print(screen.frame(100, 40))
        return str(console.file.getvalue())  # type: ignore[attr-defined]

    assert "asking the daemon" in text()
    screen.take()
    assert text() == "no daemon runs in here\n"
    daemon.error = None
    screen.take()
    assert "no answer" not in text()
    assert "round 8" in text()
    daemon.error = P2ptrainError("it is starting")
    screen.take()
    assert "no answer, this is how it was: it is starting" in text()
    assert "round 8" in text()
    daemon.error = None
    screen.take()
    assert "no answer" not in text()


def test_it_looks_again_until_q_is_typed() -> None:
    daemon, now = Answering(), [0.0]
    typed = iter(["", "x", "", "q"])

    class Typing(Keys):
        def pressed(self, seconds: float) -> str:
            now[0] += seconds if not (key := next(typed)) else 0.1
            return key

    screen = Screen(daemon, lambda: now[0])
    console = Console(width=80, height=24, file=io.StringIO(), force_terminal=True)
    screen.watch(console, Typing(None), interval=5.0)
    assert now[0] == pytest.approx(10.1)
    assert next(typed, None) is None
    assert console.file.getvalue().endswith("\x1b[?25h\x1b[?1049l")  # type: ignore[attr-defined]


def test_keys_come_one_by_one_and_a_terminal_that_is_gone_ends_it() -> None:
    read, write = os.pipe()
    keys = Keys(read)
    assert keys.pressed(0.0) == ""
    os.write(write, b"ab")
    assert (keys.pressed(5.0), keys.pressed(5.0)) == ("a", "b")
    os.close(write)
    assert keys.pressed(5.0) == "q"
    os.close(read)
    assert Keys(None).pressed(0.0) == ""


# ---------------------------------------------------------------------------------------------------
# The command


def test_without_a_daemon_one_look_ends_with_its_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert p2ptrain(capsys, "top", "--once", "--data-dir", tmp_path) == (3, "", f"no daemon runs in {tmp_path}\n")


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
        text = shown(look(lambda order: answers[order["do"]], 1.0))
        assert "swarm" in text
        assert "4 members" in text
