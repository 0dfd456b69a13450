"""`p2ptrain top`: the dashboard in a terminal, from what the daemon answers over its control socket.

A frame (top_frame.py) is made of one look, and of the look before for what flows. The daemon may go away and come back:
what was seen last stays on the screen, under a line that says so.
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
from p2ptrain.observe.top_frame import Look, frame

ROUNDS_LOOKED_AT = 120  # as wide as most terminals
ASK_SECONDS = 2.0  # for an answer; longer, and a key that is pressed would seem to do nothing
ENDINGS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # each would end the process where it is

Ask = Callable[[dict[str, Any]], dict[str, Any]]


def look(question: Ask, now: float) -> Look:
    """P2ptrainError: it has no status to tell. An older daemon may not know the other questions."""
    status = question({"do": "status"})

    def more(order: dict[str, Any], key: str) -> list[dict[str, Any]]:
        try:
            return list(question(order)[key])
        except (P2ptrainError, KeyError):
            return []

    return Look(
        now,
        status,
        more({"do": "peers"}, "peers"),
        more({"do": "rounds", "last": ROUNDS_LOOKED_AT}, "rounds"),
        more({"do": "log"}, "lines"),
    )


# ---------------------------------------------------------------------------------------------------
# The screen


class Keys:
    """What is typed, letter by letter, while the terminal lends itself to it."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor  # None: nobody types

    def pressed(self, seconds: float) -> str:
        """The next key within this time; nothing if none is."""
        if self._descriptor is None:
            select.select([], [], [], seconds)
            return ""
        ready, _, _ = select.select([self._descriptor], [], [], seconds)
        if not ready:
            return ""
        key = os.read(self._descriptor, 1).decode(errors="replace")
        return key or "q"  # the terminal is gone


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Who is told to end puts the screen and the terminal back first, and ends as a shell says of that signal."""

    def end(number: int, _: object) -> None:
        for each in ENDINGS:
            signal.signal(each, signal.SIG_IGN)  # a second one would come in between
        raise SystemExit(128 + number)

    before = {each: signal.signal(each, end) for each in ENDINGS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def keys_of(file: Any = sys.stdin) -> Iterator[Keys]:
    """The terminal is given back as it was, if it is still there."""
    descriptor = file.fileno() if file.isatty() else None
    if descriptor is None:
        yield Keys(None)
        return
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)  # Ctrl-C stays a signal
        yield Keys(descriptor)
    finally:
        with suppress(termios.error):  # it is gone
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


class Screen:
    """What was seen last, and what is to be shown of it."""

    def __init__(self, question: Ask, clock: Callable[[], float] = monotonic) -> None:
        self._question, self._clock = question, clock
        self._now: Look | None = None
        self._before: Look | None = None
        self._trouble = ""

    def take(self) -> None:
        try:
            found = look(self._question, self._clock())
        except P2ptrainError as error:
            self._trouble = str(error)
            return
        self._before, self._now, self._trouble = self._now, found, ""

    def frame(self, width: int, height: int) -> RenderableType:
        return frame(self._now, self._before, self._trouble, width, height)

    def watch(self, console: Console, keys: Keys, interval: float) -> None:
        """Until q is typed."""
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
    """For pipes, and to look once. NoDaemonError if none answers."""
    screen = Screen(question_of(data_dir))
    screen.take()
    if screen._now is None:
        raise NoDaemonError(screen._trouble)
    console.print(screen.frame(console.width, 1_000))


def show(data_dir: Path, interval: float) -> None:
    console = Console()
    try:
        with ended_in_order(), keys_of() as keys:
            Screen(question_of(data_dir)).watch(console, keys, interval)
    except KeyboardInterrupt:
        pass  # as good as q
    except OSError as error:
        if error.errno != errno.EIO:
            raise  # else the terminal is gone, and with it whoever looked
