"""`p2ptrain join` on a terminal shows what the run asks, and waits for an answer before anything is fetched."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic

import pytest

from p2ptrain.node.consent import DECLINED, QUESTION
from tests.helpers.daemons import (
    LISTEN,
    LOOK_SECONDS,
    OWN,
    SECONDS,
    STOP_SECONDS,
    TEST_SECONDS,
    DaemonSwarm,
    StartableDaemon,
)

pytestmark = pytest.mark.timeout(TEST_SECONDS)
# Makes its stdin the terminal of a session of its own, where Ctrl-C is for it alone, and becomes p2ptrain.
IN_A_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "p2ptrain", *sys.argv[1:]])
"""


class Terminal:
    """A terminal in which a person has typed `p2ptrain join`."""

    def __init__(self, node: StartableDaemon, *options: str) -> None:
        self.seen = b""
        self.ours, theirs = os.openpty()
        arguments = [*node.arguments, "--data-dir", str(node.directory), "--listen", LISTEN, *options]
        self.process = subprocess.Popen(
            [sys.executable, "-c", IN_A_TERMINAL, *arguments],
            stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, **OWN},
        )  # fmt: skip
        node.process = self.process  # so that the swarm ends it, whatever happens here
        os.close(theirs)

    def types(self, keys: bytes) -> None:
        os.write(self.ours, keys)

    def until(self, condition: Callable[[], object], seconds: float = SECONDS) -> None:
        """Waits, and reads what is shown: a terminal that nobody reads from holds up who writes to it."""
        began = monotonic()
        while not condition():
            self._read(LOOK_SECONDS)
            assert monotonic() - began < seconds, self.seen.decode()

    def until_seen(self, text: bytes) -> None:
        self.until(lambda: text in self.seen)

    def until_ended(self) -> int:
        self.until(lambda: self.process.poll() is not None, STOP_SECONDS)
        while self._read(0.0):
            pass
        return self.process.returncode

    def _read(self, seconds: float) -> bool:
        if not select.select([self.ours], [], [], seconds)[0]:
            return False
        with suppress(OSError):  # nobody has the other end any more
            self.seen += (part := os.read(self.ours, 65_536))
            return bool(part)
        return False


@contextmanager
def terminal(node: StartableDaemon, *options: str) -> Iterator[Terminal]:
    made = Terminal(node, *options)
    try:
        yield made
    finally:
        os.close(made.ours)


def has_nothing(node: StartableDaemon) -> bool:
    return not (node.directory / "data").exists() and not (node.directory / "runs").exists()


def test_at_a_terminal_nothing_is_fetched_before_a_yes_and_it_is_asked_once(swarm: DaemonSwarm) -> None:
    first = swarm.first().start().until_up()
    run_id = first.status()["run_id"].encode()
    node = swarm.joiner("second", first.address)
    with terminal(node) as screen:
        screen.until_seen(QUESTION)
        for line in (b"run       test, " + run_id, b"model     builtin, ", b"memory    ", b"disk      ", b"traffic   "):
            assert line in screen.seen, screen.seen.decode()
        assert b" an hour each way: 1 contribution of " in screen.seen
        assert has_nothing(node)
        screen.types(b"n\n")
        assert screen.until_ended() == 0
        assert DECLINED.strip() in screen.seen and b"Traceback" not in screen.seen
    assert has_nothing(node)
    with terminal(node) as screen:
        screen.until_seen(QUESTION)
        screen.types(b"\n")
        screen.until(lambda: node.status().get("addresses"))
        screen.until(lambda: node.applied >= 1)
        screen.types(b"\x03")
        assert screen.until_ended() == 0
    with terminal(node) as screen:
        screen.until_seen(b"in a browser")
        screen.until(lambda: node.status().get("addresses"))
        assert QUESTION not in screen.seen
        node.signal(signal.SIGTERM)
        assert screen.until_ended() == 0


def test_a_question_is_ended_by_ctrl_c_a_signal_and_leave_and_yes_skips_it(swarm: DaemonSwarm) -> None:
    first = swarm.first().start().until_up()
    node = swarm.joiner("second", first.address)
    with terminal(node) as screen:
        screen.until_seen(QUESTION)
        screen.types(b"\x03")
        assert screen.until_ended() == 130
    with terminal(node) as screen:
        screen.until_seen(QUESTION)
        node.signal(signal.SIGTERM)
        assert screen.until_ended() == 130
        assert b"Fatal" not in screen.seen
    with terminal(node) as screen:
        screen.until_seen(QUESTION)
        assert node.ask("leave") == {"leaving": True}  # the node answers its owner while it waits
        assert screen.until_ended() == 130
    assert has_nothing(node)
    with terminal(node, "--yes") as screen:
        screen.until(lambda: node.status().get("addresses"))
        assert QUESTION not in screen.seen
        assert b"what the run asks: run test, " in screen.seen
    by_itself = swarm.joiner("third", first.address).start().until_up()  # without a terminal
    assert by_itself.text.count("what the run asks: run test, ") == 1
