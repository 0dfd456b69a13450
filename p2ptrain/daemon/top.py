"""`p2ptrain top`: the dashboard in a terminal, from what the daemon answers over its control socket.

A frame is made of one look, and of the look before for what flows. The daemon may go away and come back: what was seen
last stays on the screen, under a line that says so. Whatever came from peers is made plain before a terminal sees it.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from p2ptrain.daemon.control import ask
from p2ptrain.daemon.logs import plain
from p2ptrain.daemon.progress import count_of
from p2ptrain.errors import NoDaemonError, P2ptrainError

ROUNDS_LOOKED_AT = 120  # as wide as most terminals
ASK_SECONDS = 2.0  # for an answer; longer, and a key that is pressed would seem to do nothing
LEVELS = " ▁▂▃▄▅▆▇█"
NARROW = 70  # columns: below it a table has fewer
PEERS_LEAST, LINES_SHOWN = 3, 5
PHASES = ("train", "collect", "agree", "apply")
COLOURS = {"train": "green", "collect": "blue", "agree": "magenta", "apply": "yellow"}

Ask = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Look:
    """What the daemon said, and when."""

    at: float
    status: dict[str, Any]
    peers: list[dict[str, Any]] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)  # the newest last
    lines: list[dict[str, Any]] = field(default_factory=list)  # of its log


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
# A frame


def sparkline(values: Sequence[float], width: int) -> str:
    """The last values as blocks, from their least to their largest; several to a block where there are more."""
    if not values or width < 1:
        return ""
    each = -(-len(values) // width)
    means = [sum(part) / len(part) for part in (values[i : i + each] for i in range(0, len(values), each))]
    low, high = min(means), max(means)
    steps = len(LEVELS) - 2
    return "".join(LEVELS[1 + (round((mean - low) / (high - low) * steps) if high > low else 0)] for mean in means)


def frame(now: Look | None, before: Look | None, trouble: str, width: int, height: int) -> RenderableType:
    """What is to be seen in so many columns and rows."""
    if now is None:
        return Text(plain(trouble) or "asking the daemon...", style="bold red" if trouble else "")
    parts: list[RenderableType] = []
    if trouble:
        parts.append(Text(f"no answer, this is how it was: {plain(trouble)}", style="bold red"))
    parts += [_head(now), *_health(now), _facts(now, before, width), *_course(now, width)]
    used = len(Console(width=width, color_system=None).render_lines(Group(*parts)))
    lines = now.lines[-LINES_SHOWN:]
    room = max(PEERS_LEAST, height - used - len(lines) - 4)
    parts.append(_peers(now, width, room))
    parts += [_line(each) for each in lines]
    parts.append(Text("q ends this, and not the node", style="dim"))
    return Group(*parts)


def _head(now: Look) -> Text:
    status = now.status
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(plain(status["run_name"]), style="bold")
    text.append(f"  round {status['round']}  ")
    for phase in PHASES:
        is_now = phase == status["phase"]
        text.append(f" {phase} ", style=f"reverse {COLOURS[phase]}" if is_now else "dim")
    if status["view"]:
        text.append(f"  try {status['view'] + 1}")
    return text


def _health(now: Look) -> list[Text]:
    """A line each; that a run is small is no complaint."""
    found = [each for each in now.status["health"] if not each.startswith("crash-only")]
    lines = [Text(plain(each), style="yellow" if each.startswith("paused") else "red") for each in found]
    return lines or [Text("all is as it should be", style="green")]


def _facts(now: Look, before: Look | None, width: int) -> Table:
    status, mine = now.status, now.status["mine"]
    tolerance = status["fault_tolerance"]
    loss = "-" if status["loss"] is None else f"{status['loss']:.4f}"
    swarm = status["swarm_tokens_per_second"]
    swarm_speed = "-" if swarm is None else f"{swarm:,.0f}"
    seat = "a member" if status["is_member"] else "admitted" if status["is_admitted"] else "not admitted yet"
    pairs = [
        ("loss", f"{loss} nats a token"),
        ("speed", f"{status['tokens_per_second']:,.0f} tokens/s here, {swarm_speed} in the swarm"),
        ("device", f"{status['device']}, {status['limits'].get('device_percent', 100)}% of the time"),
        ("traffic", f"sends {_rate(now, before, 'sent')}, receives {_rate(now, before, 'received')}"),
        ("roster", f"{len(status['roster'])} members; {tolerance['crashes']} may crash, {tolerance['liars']} may lie"),
        ("this node", f"{seat}; {len(status['peers'])} peers"),
        ("my share", f"{mine['applied']:,} contributions, {mine['share']:.1%}; {mine['tokens']:,} tokens"),
        ("my time", f"{mine['training_seconds'] / 3_600:,.1f} hours of training"),
        ("root", f"{status['state_root'][:16] or '-'} after round {status['applied_round']}"),
    ]
    table = Table.grid(padding=(0, 2))
    columns = 1 if width < 2 * NARROW else 2
    rows = -(-len(pairs) // columns)
    for row in range(rows):
        cells: list[Text] = []
        for name, text in pairs[row::rows]:
            cells += [Text(name, style="dim"), Text(plain(text), no_wrap=True, overflow="ellipsis")]
        table.add_row(*cells)
    return table


def _rate(now: Look, before: Look | None, way: str) -> str:
    """Bytes a second since the look before; the total, where there is none, or the daemon has begun anew since."""
    total = now.status["bytes"].get(f"bytes {way}", 0)
    if before is not None and now.at > before.at:
        passed = total - before.status["bytes"].get(f"bytes {way}", 0)
        if passed >= 0:
            return f"{count_of(passed / (now.at - before.at))}/s ({count_of(total)})"
    return count_of(total)


def _course(now: Look, width: int) -> list[Text]:
    """The loss over the rounds, and where the time of the last ones went."""
    losses = [each["loss"] for each in now.rounds if each["loss"] is not None]
    lines = []
    if losses:
        first, last = f"{losses[0]:.3f} ", f" {losses[-1]:.3f}"
        line = sparkline(losses, width - len(first) - len(last) - 7)
        lines.append(Text.assemble(("loss   ", "dim"), first, (line, "cyan"), last, no_wrap=True))
    if now.rounds:
        lately = now.rounds[-10:]
        means = {phase: sum(each[f"{phase}_seconds"] for each in lately) / len(lately) for phase in PHASES}
        text = Text.assemble(("round  ", "dim"), f"{sum(means.values()):.1f} s: ", no_wrap=True, overflow="ellipsis")
        for phase, seconds in means.items():
            text.append(f"{phase} {seconds:.1f}  ", style=COLOURS[phase])
        lines.append(text)
    return lines


def _peers(now: Look, width: int, room: int) -> Table:
    is_narrow = width < NARROW
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    table.add_column("peer", no_wrap=True)
    table.add_column("")
    table.add_column("applied", justify="right")
    table.add_column("late", justify="right")
    table.add_column("points", justify="right")
    if not is_narrow:
        table.add_column("refused", no_wrap=True, overflow="ellipsis", max_width=24)
        table.add_column("way")
    order = sorted(now.peers, key=lambda each: (-each["is_member"], -each["is_connected"], -each["applied"]))
    for each in order[:room]:
        kind = "member" if each["is_member"] else "admitted" if each["is_admitted"] else ""
        style = "red" if each["is_greylisted"] else "" if each["is_connected"] else "dim"
        name = each["peer_id"][-8:] if is_narrow else each["peer_id"][-16:]
        cells = [name, kind, f"{each['applied']:,}", f"{each['late']:,}", f"{each['points']:.1f}"]
        if not is_narrow:
            refused = ", ".join(f"{why} {count}" for why, count in each["refused"].items())
            delay = "" if each["latency_seconds"] is None else f" {each['latency_seconds'] * 1_000:,.0f} ms"
            cells += [refused or "-", f"{each['address_kind']}{delay}" if each["is_connected"] else "away"]
        table.add_row(*(Text(plain(cell)) for cell in cells), style=style)
    if len(order) > room:
        table.add_row(Text(f"and {len(order) - room} more", style="dim"))
    return table


def _line(said: dict[str, Any]) -> Text:
    style = {"warning": "yellow", "error": "red", "critical": "red"}.get(said["level"], "")
    time = said["at"][11:19]
    return Text.assemble(
        (f"{time} ", "dim"), (plain(said["message"]).split("\n")[0], style), no_wrap=True, overflow="ellipsis"
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
def keys_of(file: Any = sys.stdin) -> Iterator[Keys]:
    """The terminal is given back as it was, whatever happens."""
    descriptor = file.fileno() if file.isatty() else None
    if descriptor is None:
        yield Keys(None)
        return
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)  # Ctrl-C stays a signal
        yield Keys(descriptor)
    finally:
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
        with keys_of() as keys:
            Screen(question_of(data_dir)).watch(console, keys, interval)
    except KeyboardInterrupt:
        pass  # as good as q
