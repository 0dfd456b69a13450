"""Draws a frame of `p2ptrain top`: the dashboard's contents, fitted to the size of the terminal.

On a low screen, the least important parts are left out until the rest fits with a few peers below; the log gets the
remaining rows. Text from peers is stripped of control characters. Figures
without a fixed place are listed below the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from p2ptrain.observe.figures import FigureField, others_of, reasons
from p2ptrain.observe.logs import plain
from p2ptrain.observe.schema import PHASES, RoundRecord, Status
from p2ptrain.visible import count_of, duration, few

NARROW = 70  # columns: narrower screens get fewer table columns
WIDE = 2 * NARROW  # columns: wider screens get two columns of facts, and more table columns
LABEL = 12  # columns, including the space after it
PEERS_LEAST, LINES_SHOWN = 3, 5
TALL = 45  # rows: a screen neither this tall nor WIDE leaves out the figures without a fixed place
COLOURS = {"train": "green", "collect": "blue", "agree": "magenta", "apply": "yellow"}
VERDICTS = {"same": "green", "unknown": "", "other": "red"}
BREVITIES = range(4)  # how much to leave out on a low screen; each part goes at a certain level
STAYS = len(BREVITIES)
LEVELS = " ▁▂▃▄▅▆▇█"
# Figures with a fixed place in the frame.
OF_STATUS = {
    "round", "phase", "view", "loss", "tokens_per_second", "swarm_tokens_per_second", "traffic", "limits", "peers",
    "roster", "quorum", "fault_tolerance", "admitted", "is_member", "is_admitted", "mine", "applied_round",
    "since_applied_seconds", "certified_round", "counters:root mismatches", "uptime_seconds",
    "held_out_loss", "perplexity", "swarm_loss",
}  # fmt: skip
OF_ROUND = {
    "loss", "contributors", "late", "refused", "seconds",
    *(f"{phase}_seconds" for phase in PHASES),
}  # fmt: skip
REST_OF_STATUS, REST_OF_ROUND = others_of(Status, OF_STATUS), others_of(RoundRecord, OF_ROUND)


@dataclass(frozen=True, slots=True)
class Poll:
    """The daemon's answers at one time."""

    at: float
    status: dict[str, Any]
    peers: list[dict[str, Any]] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)  # the newest last
    lines: list[dict[str, Any]] = field(default_factory=list)  # its log


def frame(now: Poll | None, before: Poll | None, trouble: str, width: int, height: int) -> RenderableType:
    """Draws a frame of this size."""
    if now is None:
        return Text(plain(trouble) or "asking the daemon...", style="bold red" if trouble else "")
    few_peers = min(len(now.peers), PEERS_LEAST)
    below = few_peers + (len(now.peers) > PEERS_LEAST) + 2  # plus the table's header and the last line
    for brevity in BREVITIES:
        parts: list[RenderableType] = []
        if trouble:
            parts.append(Text(f"no answer, showing the last one: {plain(trouble)}", style="bold red"))
        parts += [_head(now), *_health(now), _facts(now, before, width, brevity), *_agreement(now)]
        parts += _course(now, width, brevity)
        parts += _rest(now) if brevity < 1 and (width >= WIDE or height >= TALL) else []
        spare = height - below - len(Console(width=width, color_system=None).render_lines(Group(*parts)))
        if spare >= 0:
            break
    spare = max(0, spare)
    lines = now.lines[-min(spare, LINES_SHOWN) :] if spare else []
    parts.append(_peers(now, width, PEERS_LEAST + spare - len(lines)))
    parts += [_line(each) for each in lines]
    parts.append(_foot(now))
    return Group(*parts)


# ---------------------------------------------------------------------------------------------------
# Status


def _head(now: Poll) -> Text:
    status = now.status
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(plain(status["run_name"]), style="bold")
    text.append(f"  round {status['round']}  ")
    for phase in PHASES:
        is_now = phase == status["phase"]
        text.append(f" {phase} ", style=f"reverse {COLOURS[phase]}" if is_now else "dim")
    if status["view"]:
        text.append(f"  try {status['view'] + 1}")
    if status["phase"] == "train":
        text.append(f"  step {status['step']:,}")
    if status["phase"] == "collect" and status["waiting_for"]:
        text.append(f"  waiting for {few(status['waiting_for'], 'contribution', 'contributions')}")
    return text


def _health(now: Poll) -> list[Text]:
    """Shows each complaint on a line."""
    found = troubles(now.status)
    lines = [Text(plain(each["text"]), style="red" if each["severity"] == "error" else "yellow") for each in found]
    return lines or [Text("all is well", style="green")]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _losses(status: dict[str, Any]) -> str:
    """Tells the losses in one line, which an 80-column screen has room for."""
    text = f"{_number(status['loss'])} nats a token, swarm {_number(status['swarm_loss'])}"
    if status["held_out_loss"] is None:
        return text
    return f"{text}, held-out {_number(status['held_out_loss'])}, perplexity {status['perplexity']:,.1f}"


def _facts(now: Poll, before: Poll | None, width: int, brevity: int) -> Table:
    status, mine = now.status, now.status["mine"]
    swarm = status["swarm_tokens_per_second"]
    own_speed, swarm_speed = ("-" if each is None else f"{each:,.0f}" for each in (status["tokens_per_second"], swarm))
    columns = 2 if width >= WIDE else 1
    room = (width - 2 * (columns - 1)) // columns - LABEL
    # Name, text, and the brevity at which it is left out.
    facts: list[tuple[str, str, int]] = [
        ("loss", _losses(status), STAYS),
        ("speed", f"{own_speed} tokens/s here, {swarm_speed} in the swarm", STAYS),
        ("traffic", _traffic(now, before), 3),
        ("out/in", _purposes(status, room), 1),
        ("roster", _roster(status), STAYS),
        ("this node", _seat(status), STAYS),
        ("my share", _share(mine), 3),
        ("my time", _time(mine), 2),
        ("root", _root(status), 2),
    ]
    shown = [(name, text) for name, text, goes_at in facts if text and not (goes_at is not None and brevity >= goes_at)]
    table = Table.grid(padding=(0, 2))
    for _ in range(columns):
        table.add_column(style="dim", min_width=LABEL - 2)
        table.add_column(max_width=max(1, room), no_wrap=True, overflow="ellipsis")
    rows = -(-len(shown) // columns)
    for row in range(rows):
        table.add_row(*(Text(plain(cell)) for pair in shown[row::rows] for cell in pair))
    return table


def _traffic(now: Poll, before: Poll | None) -> str:
    text = f"sending {_rate(now, before, 'sent')}, receiving {_rate(now, before, 'received')}"
    limits = now.status["limits"]
    for way, name in (("upload", "out"), ("download", "in")):
        if rate := limits[f"{way}_bytes_per_second"]:
            text += f"; at most {count_of(rate)}/s {name}"
    return text


def _rate(now: Poll, before: Poll | None, way: str) -> str:
    """Returns the rate since the previous look; only the total if there is none, or the daemon was restarted."""
    total = now.status["bytes"].get(f"bytes {way}", 0)
    if before is not None and now.at > before.at:
        passed = total - before.status["bytes"].get(f"bytes {way}", 0)
        if passed >= 0:
            return f"{count_of(passed / (now.at - before.at))}/s ({count_of(total)})"
    return count_of(total)


def _purposes(status: dict[str, Any], room: int) -> str:
    """Lists bytes sent/received by purpose, the largest first, as many as fit."""
    known = [(name, each["sent"], each["received"]) for name, each in status["traffic"].items()]
    text = ""
    for name, sent, received in sorted(known, key=lambda each: -each[1] - each[2]):
        more = f"{', ' if text else ''}{name} {count_of(sent)}/{count_of(received)}"
        if sent + received == 0 or (text and len(text) + len(more) > room):
            break
        text += more
    return text


def _roster(status: dict[str, Any]) -> str:
    tolerance = status["fault_tolerance"]
    decide = few(status["quorum"], "decides", "decide")
    members = few(len(status["roster"]), "member", "members")
    faults = f"{tolerance['crashes']} may crash, {tolerance['liars']} may lie"
    return f"{members}, {decide}; {faults}; {status['admitted']:,} may contribute"


def _seat(status: dict[str, Any]) -> str:
    seat = "a member" if status["is_member"] else "admitted" if status["is_admitted"] else "not admitted yet"
    device = f"{status['device']}, {status['limits']['device_percent']}% of the time"
    return f"{seat}; {few(len(status['peers']), 'peer', 'peers')}; {device}"


def _share(mine: dict[str, Any]) -> str:
    applied = few(mine["applied"], "contribution", "contributions")
    return f"{applied}, {mine['share']:.1%} of {mine['applied_of_all']:,}; {mine['tokens']:,} tokens"


def _time(mine: dict[str, Any]) -> str:
    joules = mine["energy_joules"]  # only if the device measures it
    energy = "" if joules is None else f"; about {joules / 3.6e6:,.2f} kWh, used by the whole device"
    return f"{hours(mine['training_seconds'])} hours of training{energy}"


def _root(status: dict[str, Any]) -> str:
    text = f"{status['state_root'][:16] or '-'} after round {status['applied_round']:,}"
    if (since := status["since_applied_seconds"]) is not None:
        text += f", {duration(since)} ago"
    if certified := status["certified_round"]:
        text += f"; round {certified:,} is certified"
    return text


def _agreement(now: Poll) -> list[Table]:
    """Shows in full whether all nodes have the same model."""
    told = now.status["same_model"]
    verdict, text = told["verdict"], told["text"]
    if wrong := now.status["counters"].get("root mismatches", 0):
        text += f"{' ' if text else ''}Wrong results of this node: {wrong:,}."
    if not text:
        return []
    table = Table.grid(padding=(0, 2))
    table.add_row(Text("same model", style="dim", no_wrap=True), Text(text, style=VERDICTS[verdict]))
    return [table]


def _course(now: Poll, width: int, brevity: int) -> list[Text]:
    """Shows the loss by rounds and by bytes, and the phases of the last rounds."""
    losses, places, moved = [], [], 0
    for each in now.rounds:
        moved += each["bytes_sent"] + each["bytes_received"]
        if each["loss"] is not None and math.isfinite(each["loss"]):
            losses.append(each["loss"])
            places.append(moved)
    lines = []
    if losses:
        first, last = f"{losses[0]:.3f} ", f" {losses[-1]:.3f}"
        line = sparkline(losses, width - LABEL - len(first) - len(last))
        lines.append(_named("loss", first, (line, "cyan"), last))
        start, end = f"{count_of(places[0])} ", f" {count_of(places[-1])}"
        by_bytes = spread(
            places, losses, min(len(line), width - LABEL - len(start) - len(end))
        )  # the same width, for comparison
        if by_bytes and brevity < 1:
            lines.append(_named("by bytes", start, (sparkline(by_bytes, len(by_bytes)), "cyan"), end))
    if now.rounds and brevity < 3:
        lately = now.rounds[-10:]
        means = {phase: sum(each[f"{phase}_seconds"] for each in lately) / len(lately) for phase in PHASES}
        text = _named("a round", f"{sum(means.values()):.1f} s: ")
        for phase, seconds in means.items():
            text.append(f"{phase} {seconds:.1f}  ", style=COLOURS[phase])
        text.append(_taken(lately))
        lines.append(text)
    return lines


def _rest(now: Poll) -> list[Text]:
    """Lists the figures without a fixed place, of the last round and of the status."""

    def listed(name: str, figures: Sequence[FigureField], told: dict[str, Any]) -> list[Text]:
        found = [f"{each.figure.title} {words}" for each in figures if (words := each.words(told))]
        return [Text.assemble((f"{name:<{LABEL}}", "dim"), plain("; ".join(found)))] if found else []

    last = listed("last round", REST_OF_ROUND, now.rounds[-1]) if now.rounds else []
    return [*last, *listed("figures", REST_OF_STATUS, now.status)]


def _named(name: str, *parts: str | tuple[str, str]) -> Text:
    return Text.assemble((f"{name:<{LABEL}}", "dim"), *parts, no_wrap=True, overflow="ellipsis")


def _taken(lately: Sequence[dict[str, Any]]) -> str:
    """Formats the mean number of contributions per round."""
    sums = {
        "taken": sum(len(each["contributors"]) for each in lately),
        "late": sum(each["late"] for each in lately),
        "refused": sum(sum(each["refused"].values()) for each in lately),
    }
    return ", ".join(f"{number / len(lately):.1f} {name}" for name, number in sums.items() if number)


# ---------------------------------------------------------------------------------------------------
# Peers and the log


def _peers(now: Poll, width: int, room: int) -> RenderableType:
    if not now.peers and not now.status["peers"]:
        return Text("no peers yet", style="dim")
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    table.add_column("peer", no_wrap=True)
    table.add_column("")
    if width >= WIDE:
        table.add_column("offered", justify="right")
    table.add_column("applied", justify="right")
    table.add_column("late", justify="right")
    if width >= NARROW:
        table.add_column("refused", no_wrap=True, overflow="ellipsis", max_width=24)
    table.add_column("points", justify="right")
    if width >= WIDE:
        table.add_column("for", no_wrap=True, overflow="ellipsis", max_width=40)
    if width >= NARROW:
        table.add_column("way")
    order = sorted(now.peers, key=_interest)
    shown = order[:room]
    for each in shown:
        style = "red" if each["is_greylisted"] else "" if each["is_connected"] else "dim"
        table.add_row(*(Text(plain(cell)) for cell in _cells(each, width)), style=style)
    if len(order) > len(shown):
        table.add_row(Text(f"and {len(order) - len(shown)} more", style="dim"))
    return table


def _interest(peer: dict[str, Any]) -> tuple[float, bool, bool, int, str]:
    """The sort key of a peer: those with points first, then members."""
    return -peer["points"], not peer["is_member"], not peer["is_connected"], -peer["applied"], peer["peer_id"]


def _cells(peer: dict[str, Any], width: int) -> list[str]:
    kind = "member" if peer["is_member"] else "admitted" if peer["is_admitted"] else ""
    cells = [peer["peer_id"][-8:] if width < NARROW else peer["peer_id"][-16:], kind]
    if width >= WIDE:
        cells.append(f"{peer['offered']:,}")
    cells += [f"{peer['applied']:,}", f"{peer['late']:,}"]
    if width >= NARROW:
        cells.append(reasons(peer["refused"]) or "-")
    cells.append(f"{peer['points']:.1f}")
    if width >= WIDE:
        cells.append(reasons(peer["observed"]) or "-")
    if width >= NARROW:
        delay = "" if peer["latency_seconds"] is None else f" {peer['latency_seconds'] * 1_000:,.0f} ms"
        cells.append(f"{peer['address_kind']}{delay}" if peer["is_connected"] else "away")
    return cells


def _line(said: dict[str, Any]) -> Text:
    style = {"warning": "yellow", "error": "red", "critical": "red"}.get(said["level"], "")
    time = said["at"][11:19]
    return Text.assemble(
        (f"{time} ", "dim"), (plain(said["message"]).split("\n")[0], style), no_wrap=True, overflow="ellipsis"
    )


def _foot(now: Poll) -> Text:
    """The last line: how to quit, and facts about the daemon that rarely change."""
    status = now.status
    parts = ["q quits; the node keeps running"]
    parts += [f"up {duration(status['uptime_seconds'])}", f"p2ptrain {status['release']}"]
    if status["http"]:
        parts.append(status["http"])
    return Text(plain(" · ".join(parts)), style="dim", no_wrap=True, overflow="ellipsis")


# ---------------------------------------------------------------------------------------------------
# Words


def hours(seconds: float) -> str:
    found = seconds / 3_600
    return f"{found:.2f}" if found < 10 else f"{found:,.1f}"


def troubles(status: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the complaints that are trouble, the worst first."""
    return list(status["troubles"])


# ---------------------------------------------------------------------------------------------------
# Sparklines


def sparkline(values: Sequence[float], width: int) -> str:
    """Draws values as blocks scaled from the least to the largest, averaged to fit the width."""
    return chart(values, width, rows=1)[0]


def chart(values: Sequence[float], width: int, rows: int) -> list[str]:
    """Draws a sparkline that is several rows high; returns the rows from the top."""
    if not values or width < 1:
        return [""] * rows
    each = -(-len(values) // width)
    means = [sum(part) / len(part) for part in (values[i : i + each] for i in range(0, len(values), each))]
    low, high, full = min(means), max(means), len(LEVELS) - 1
    steps = full * rows - 1  # the least has a block, too
    heights = [1 + (round((mean - low) / (high - low) * steps) if high > low else 0) for mean in means]
    below = [full * row for row in reversed(range(rows))]
    return ["".join(LEVELS[min(max(height - start, 0), full)] for height in heights) for start in below]


def spread(places: Sequence[int], values: Sequence[float], width: int) -> list[float]:
    """Resamples values at rising places to even steps; a step without values repeats the one before.

    Empty if all values are at one place.
    """
    steps = min(width, len(values))
    if steps < 1 or places[-1] <= places[0]:
        return []
    found: list[list[float]] = [[] for _ in range(steps)]
    for place, value in zip(places, values, strict=True):
        found[min(steps - 1, (place - places[0]) * steps // (places[-1] - places[0]))].append(value)
    means: list[float] = []
    for each in found:
        means.append(sum(each) / len(each) if each else means[-1])  # the first step always has a value
    return means
