"""`p2ptrain top`: the dashboard in a terminal, over the daemon's control socket.

A frame (top_frame.py) shows one poll at the daemon; rates come from the difference to the previous one. If the daemon
goes away, the last frame stays on the screen under a line that says so, until the daemon is back.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live

from p2ptrain.errors import NoDaemonError, P2ptrainError
from p2ptrain.node.control import ask
from p2ptrain.observe.top_frame import Poll, frame

ROUNDS_LOOKED_AT = 120  # as many as most terminals are wide
ASK_SECONDS = 2.0  # for an answer; with more, keys would seem to do nothing
ENDINGS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # would end the process without restoring the terminal

Ask = Callable[[dict[str, Any]], dict[str, Any]]


def poll(question: Ask, now: float) -> Poll:
    """Asks the daemon for everything in a frame."""
    return Poll(
        now,
        question({"do": "status"}),
        question({"do": "peers"})["peers"],
        question({"do": "rounds", "last": ROUNDS_LOOKED_AT})["rounds"],
        question({"do": "log"})["lines"],
    )


# ---------------------------------------------------------------------------------------------------
# The screen


class KeyReader:
    """Reads single keys from the terminal."""

    def __init__(self, descriptor: int | None, woken: int) -> None:
        """`descriptor` is None without a terminal. A wait also ends once `woken` can be read."""
        self._descriptor, self._woken = descriptor, woken

    def pressed(self, seconds: float) -> str:
        """Waits for a key; returns an empty string if none is pressed in time."""
        keys = [] if self._descriptor is None else [self._descriptor]
        ready, _, _ = select.select([*keys, self._woken], [], [], seconds)
        if self._descriptor not in ready:
            return ""
        key = os.read(self._descriptor, 1).decode(errors="replace")
        return key or "q"  # the terminal is gone


@contextmanager
def ended_in_order() -> Iterator[int]:
    """On a signal, restores the screen and the terminal first, and exits with 128 + its number.

    Yields a descriptor that can be read after a signal. One that arrives right before a wait does not interrupt it.
    """

    def end(number: int, _: object) -> None:
        for each in ENDINGS:
            signal.signal(each, signal.SIG_IGN)  # a second signal must not interrupt the cleanup
        raise SystemExit(128 + number)

    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    woken_before = signal.set_wakeup_fd(wakes)
    before = {each: signal.signal(each, end) for each in ENDINGS}
    try:
        yield woken
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        signal.set_wakeup_fd(woken_before)
        os.close(woken)
        os.close(wakes)


@contextmanager
def keys_of(woken: int, file: Any = sys.stdin) -> Iterator[KeyReader]:
    """Puts the terminal into single-key mode, and restores it at the end if it still exists."""
    descriptor = file.fileno() if file.isatty() else None
    if descriptor is None:
        yield KeyReader(None, woken)
        return
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)  # Ctrl-C still sends a signal
        yield KeyReader(descriptor, woken)
    finally:
        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


class Screen:
    """Keeps the last two looks, and draws frames from them."""

    def __init__(self, question: Ask, clock: Callable[[], float] = monotonic) -> None:
        self._question, self._clock = question, clock
        self._now: Poll | None = None
        self._before: Poll | None = None
        self._trouble = ""

    def take(self) -> None:
        try:
            found = poll(self._question, self._clock())
        except P2ptrainError as error:
            self._trouble = str(error)
            return
        self._before, self._now, self._trouble = self._now, found, ""

    def frame(self, width: int, height: int) -> RenderableType:
        return frame(self._now, self._before, self._trouble, width, height)

    def watch(self, console: Console, keys: KeyReader, interval: float) -> None:
        """Updates the screen until q is pressed."""
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                self.take()
                live.update(self.frame(*console.size), refresh=True)
                until = self._clock() + interval
                while (left := until - self._clock()) > 0:
                    if keys.pressed(left) in ("q", "Q"):
                        return


def question_of(data_dir: Path) -> Ask:
    return lambda order: ask(data_dir, order, seconds=ASK_SECONDS)


def show_once(data_dir: Path, console: Console) -> None:
    """Prints a single frame. NoDaemonError if no daemon answers."""
    screen = Screen(question_of(data_dir))
    screen.take()
    if screen._now is None:
        raise NoDaemonError(screen._trouble)
    console.print(screen.frame(console.width, 1_000))


def show(data_dir: Path, interval: float) -> None:
    console = Console()
    try:
        with ended_in_order() as woken, keys_of(woken) as keys:
            Screen(question_of(data_dir)).watch(console, keys, interval)
    except KeyboardInterrupt:
        pass  # the same as q
    except OSError as error:
        if error.errno != errno.EIO:
            raise  # EIO: the terminal is gone
