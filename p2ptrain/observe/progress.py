"""Progress for people: a live line on a terminal, a JSON line per round elsewhere; and lines about changes.

On a terminal, the thread that writes the log also draws the line. It may block (Ctrl-S, a hanging connection), and with
rich's own threads the node would block too.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from textwrap import wrap
from types import MappingProxyType
from typing import Any, Literal

from rich.console import Console
from rich.live import Live
from rich.logging import RichHandler
from rich.text import Text

from p2ptrain.core.complaints import MEANINGS, Code, Complaint
from p2ptrain.core.state import AgreedState
from p2ptrain.identity import peer_id_of
from p2ptrain.observe.figures import figures_of, reasons
from p2ptrain.observe.logs import PlainText, QueuedLines, Unbuffered, plain
from p2ptrain.observe.schema import BAN_UNKNOWN, Status
from p2ptrain.visible import count_of, duration, few

# Figures with a fixed place in `p2ptrain status`, by name or the first part of their path.
PLACED = {
    "round", "phase", "view", "applied_round", "loss", "tokens_per_second", "peers", "roster", "quorum",
    "fault_tolerance", "motions",
}  # fmt: skip
NAMES_MAX = 8  # peers named per line
LOOKS = 3  # checks in a row that find a complaint before it is logged: some pass within a round
NODES_SHOWN, WIDTH = 20, 80  # in `p2ptrain swarm`: lines, and columns of the narrowest terminal
NODES_HEAD = f"{'node':9} {'seat':9} {'heard':>6} {'speed':>6} {'line':>8} {'taken':>5} {'delay':>5}  look at"

Line = tuple[int, str]  # logging level and text
log = logging.getLogger("p2ptrain.progress")


def line_of(status: Status) -> str:
    """Describes a node in one line. Leaves out the complaint that a run is small."""
    loss = "-" if status.loss is None else f"{status.loss:.3f}"
    health = f" · {status.troubles[0].text}" if status.troubles else ""
    sent, received = (count_of(status.bytes.get(f"bytes {way}", 0)) for way in ("sent", "received"))
    return plain(
        f"round {status.round} {status.phase} · loss {loss} · {len(status.peers)} peers · "
        f"{len(status.roster)} in the roster · {_speed(status.tokens_per_second)}"
        f"sent {sent}, received {received} · root {status.state_root[:12] or '-'}{health}"
    )


class ProgressLine:
    def __init__(self, form: Literal["auto", "text", "json"], status: Callable[[], Status]) -> None:
        self.form, self.status = form, status
        self._console = Console(stderr=True, force_terminal=sys.stderr.isatty())  # whatever FORCE_COLOR says
        self._live: Live | None = None
        self._writer: QueuedLines | None = None
        self._line = ""  # the line to show
        self._is_due = False  # queued to be drawn
        self._told_round = -1

    def start(self) -> None:
        if self.form == "json" or not self._console.is_terminal:
            return
        root = logging.getLogger()
        for before in root.handlers:
            before.flush()
        if self._console.file is sys.stderr:
            self._console.file = Unbuffered(sys.stderr.fileno())  # type: ignore[assignment]  # has all that rich needs
        handler = RichHandler(console=self._console, show_path=False, rich_tracebacks=False, markup=False)
        handler.setFormatter(PlainText())
        self._writer = QueuedLines(handler)
        root.handlers = [self._writer]
        self._live = Live(Text(""), console=self._console, auto_refresh=False, transient=True, redirect_stdout=False)
        self._writer.post(self._live.start)

    def tell(self) -> None:
        status = self.status()
        if self._writer is not None:
            self._line = line_of(status)
            if not self._is_due:  # queue one drawing at a time; it shows the newest line
                self._is_due = True
                if not self._writer.post(self._draw):
                    self._is_due = False
        elif status.applied_round != self._told_round:
            fields = status.model_dump(include={"round", "phase", "loss", "tokens_per_second", "state_root"})
            fields |= {"peers": len(status.peers), "roster": len(status.roster)}
            fields |= {f"bytes_{way}": status.bytes.get(f"bytes {way}", 0) for way in ("sent", "received")}
            log.info(line_of(status), extra={"fields": fields})
        self._told_round = status.applied_round

    def _draw(self) -> None:
        """Draws the line, in the writer's thread."""
        self._is_due = False
        if self._live is not None and self._live.is_started:
            self._live.update(Text(self._line, no_wrap=True, overflow="ellipsis"), refresh=True)

    def stop(self) -> None:
        """Ends the live line, and flushes the log if anybody reads it."""
        if self._writer is not None and self._live is not None:
            self._writer.post(self._live.stop)
        for handler in logging.getLogger().handlers:
            handler.flush()


def _speed(tokens_per_second: float | None) -> str:
    """Describes a node's speed, empty if it is unknown."""
    return "" if tokens_per_second is None else f"{tokens_per_second:,.0f} tokens/s · "


def _peer_line(peer: dict[str, Any]) -> str:
    figures: dict[str, tuple[int, Callable[[Any], str]]] = {
        "latency_seconds": (8, lambda took: f"{1_000 * took:.0f} ms"),
        "tokens_per_second_mean": (16, lambda speed: f"{speed:,.0f} tokens/s"),
        "arrival_seconds_mean": (13, lambda after: f"after {after:,.1f} s"),
        "staleness": (8, lambda late: f"delay {late}"),
    }
    columns = ["" if peer[name] is None else say(peer[name]) for name, (_, say) in figures.items()]
    columns = [text.rjust(width) for text, (width, _) in zip(columns, figures.values(), strict=True)]
    return "  ".join([peer["peer_id"], f"{_role(peer):15}", *columns, "".join(peer["addresses"][:1])])


def _role(peer: dict[str, Any]) -> str:
    member = "member" if peer["is_member"] else ""
    return ", ".join(each for each in (member, peer["standing"]) if each and each != "counted")


def peer_lines(peers: list[dict[str, Any]]) -> str:
    """Describes peers in a line each, for `p2ptrain peers`."""
    connected = [_peer_line(peer) for peer in peers if peer["is_connected"]]
    lines = [f"{peer['peer_id']}  banned: {peer['ban']}" for peer in peers if peer["ban"]]
    away = [peer for peer in peers if peer["is_greylisted"] and not peer["ban"]]
    lines += [f"{peer['peer_id']}  kept away: {reasons(peer['observed'])}" for peer in away]
    return plain("\n".join([*connected, *lines, f"{len(connected)} peers"]))


def agenda_lines(agenda: dict[str, Any]) -> str:
    """Describes what members have moved and decided, for `p2ptrain agenda`."""
    told = [_item_lines(item) for item in agenda["motions"]]
    told += [_item_lines(agenda["successor"], is_decided=True)] if agenda["successor"] else []
    return plain("\n\n".join(told) or "nobody moves that the run go on as another")


def _item_lines(item: dict[str, Any], is_decided: bool = False) -> str:
    name, back = item["motion"][:8], item["weights_round"] < item["last_round"]
    here = "goes along" if is_decided else "assents"
    if not item["is_mine"]:
        here = f"does not: `p2ptrain assent {name}`"
    rows = [
        ("decided" if is_decided else "motion", f"{name}, by {item['author']}"),
        ("after", f"round {item['last_round']:,}, with the weights of round {item['weights_round']:,}"),
        *[("changes", f"{name} from {old} to {new}") for name, (old, new) in item["changes"].items()],
        *([("changes", f"what rounds {item['weights_round'] + 1:,} to {item['last_round']:,} did is undone")] * back),
        *[("costs here", words) for words in item["costs"] or ["not more than now"]],
        ("assents", f"{item['assents']:,} of {few(item['needed'], 'member', 'members')} needed"),
        ("this node", here if item["is_mine"] or not item["obstacle"] else f"cannot assent: {item['obstacle']}"),
    ]
    names = [name if not n or rows[n - 1][0] != name else "" for n, (name, _) in enumerate(rows)]
    return "\n".join(f"{name:<11} {words}" for name, (_, words) in zip(names, rows, strict=True))


def _rank_row(rank: dict[str, Any]) -> str:
    speed = rank["tokens"] / rank["seconds"] if rank["seconds"] else None
    return f"{rank['device']}, process {rank['pid']} · {_speed(speed)}{count_of(rank['memory_bytes'])}"


def _agenda_row(status: dict[str, Any]) -> str:
    moved = [f"{each['motion'][:8]}: that the run {each['text']}" for each in status.get("motions", ())]
    if decided := status.get("successor"):
        here = "this node goes along" if decided["is_mine"] else "this node does not go along"
        moved.append(f"decided: the run is to {decided['text']}; {here}")
    return "\n".join(moved)


def swarm_lines(found: dict[str, Any], everyone: bool = False) -> str:
    """Describes the swarm for `p2ptrain swarm`, in lines of 80 columns: what to look at first, and all members."""
    me = found["me"]
    nodes = [each for each in found["peers"] if each["is_admitted"]]
    bad = sum(bool(each["reasons"]) for each in nodes)
    nodes = [*nodes[:bad], me, *nodes[bad:]] if not me["reasons"] else [me, *nodes]
    shown = nodes if everyone else nodes[:NODES_SHOWN]
    lines = []
    for number, each in enumerate(found["concerns"], 1):
        lines += wrap(f"{number}. {each['text']}", WIDTH, subsequent_indent="   ")
        lines += wrap(each["advice"], WIDTH, initial_indent="   ", subsequent_indent="   ")
    lines = ["look first at", *lines, ""] if lines else ["nothing to look at", ""]
    rest = [f"and {len(nodes) - len(shown)} more: --all"] * (len(shown) < len(nodes))
    members = sum(each["is_member"] for each in nodes)
    count = f"{few(len(nodes), 'node', 'nodes')}, of which {few(members, 'has a seat', 'have a seat')}"
    return plain("\n".join([*lines, NODES_HEAD, *(_node_line(each, me) for each in shown), *rest, count]))


def _node_line(node: dict[str, Any], me: dict[str, Any]) -> str:
    figures: dict[str, tuple[int, Callable[[Any], str]]] = {
        "heard_seconds": (6, lambda ago: " ".join(duration(ago).split()[:2])),
        "tokens_per_second_mean": (6, lambda speed: f"{speed:,.0f}" if speed < 10_000 else f"{speed / 1_000:,.0f}k"),
        "latency_seconds": (8, lambda took: f"{1_000 * took:,.0f} ms"),
        "staleness_mean": (5, lambda delay: f"{delay:.1f}"),
    }
    columns = [f"{'-' if node[name] is None else say(node[name]):>{width}}" for name, (width, say) in figures.items()]
    columns.insert(3, f"{node['taken_lately']}/{node['rounds_lately']}".rjust(5))
    seat = node["standing"] if node["standing"] not in {"", "counted"} else "seat" if node["is_member"] else "no seat"
    why = " ".join([*node["reasons"][:1], *([f"+{len(node['reasons']) - 1}"] if len(node["reasons"]) > 1 else [])])
    name = "this node" if node is me else f"…{node['peer_id'][-8:]}"
    other = node["release"] if node["release"] != me["release"] else ""
    told = ", ".join(each for each in (why, other, node["owner"]) if each)
    return f"{name:9} {seat:9} {' '.join(columns)}  {told}"[:WIDTH].rstrip()


def lines_of(status: dict[str, Any]) -> str:
    """Describes a node in a few lines, for `p2ptrain status`."""
    tolerance = status["fault_tolerance"]
    loss = "-" if status["loss"] is None else f"{status['loss']:.4f} nats a token"
    attempt = f", try {status['view'] + 1}" if status.get("view") else ""
    others = [each for each in figures_of(Status) if not {each.name, each.path[0]} & PLACED]
    figures = [each for each in others if each.number(status) or each.figure.unit == "is"]
    rows = {
        "run": f"{status['run_name']}  {status['run_id']}",
        "peer id": status["peer_id"],
        "addresses": "\n".join(status["addresses"]) or "none yet",
        "round": f"{status['round']}, {status['phase']}{attempt}; {status['applied_round']} applied",
        "state root": status["state_root"] or "none yet",
        "loss": loss,
        "speed": _speed(status["tokens_per_second"]).removesuffix(" · "),
        "ranks": "\n".join(map(_rank_row, status.get("ranks", ()))),
        "data": status.get("own_data", ""),
        "peers": str(len(status["peers"])),
        "roster": f"{few(len(status['roster']), 'member', 'members')}, "
        f"of which {few(status['quorum'], 'decides', 'decide')}; "
        f"{tolerance['crashes']} may crash, {tolerance['liars']} may lie",
        "figures": "\n".join(f"{each.figure.title} {words}" for each in figures if (words := each.words(status))),
        "agenda": _agenda_row(status),
        "health": "\n".join(status["health"]) or "good",
        "http": status["http"] or "off",
    }
    shown = [(name, text) for name, text in rows.items() if text]
    lines = [(name if not n else "", part) for name, text in shown for n, part in enumerate(text.split("\n"))]
    return plain("\n".join(f"{name:<11} {part}" for name, part in lines))


class News:
    """Compares a node's state and complaints with those of the last look."""

    def __init__(self) -> None:
        self._members: frozenset[bytes] | None = None
        self._branch = b""
        self._banned: AbstractSet[bytes] = frozenset()
        self._kept_away: AbstractSet[bytes] = frozenset()
        self._looks: dict[Code, int] = {}  # how many looks in a row have found each complaint
        self._told: set[Code] = set()  # complaints that were logged and have not ended

    def look(
        self,
        state: AgreedState,
        complaints: Sequence[Complaint],
        bans: Mapping[bytes, str] = MappingProxyType({}),
        kept_away: Mapping[bytes, Mapping[str, int]] = MappingProxyType({}),
    ) -> list[Line]:
        """Returns the lines for what has changed since the last look.

        bans: why each key was banned; kept_away: what was observed of each peer that this node keeps away"""
        lines = [*self._of_health(complaints)]
        if self._members is not None:
            lines = [*self._of_roster(state, self._members), *self._of_peers(bans, kept_away), *lines]
        self._members, self._branch = frozenset(state.members), state.branch
        self._banned, self._kept_away = bans.keys(), kept_away.keys()
        return lines

    def _of_roster(self, state: AgreedState, before: frozenset[bytes]) -> Iterable[Line]:
        now = frozenset(state.members)
        count = few(len(now), "member", "members")
        if state.branch != self._branch:
            branch = state.branch.hex()[:16]
            yield logging.WARNING, f"continued from round {state.round + 1} on branch {branch}, {count}"
        if come := now - before:
            yield logging.INFO, f"{_names(come)} got a seat: {count}"
        if gone := before - now:
            yield logging.INFO, f"{_names(gone)} lost a seat or left: {count}"

    def _of_peers(self, bans: Mapping[bytes, str], kept_away: Mapping[bytes, Mapping[str, int]]) -> Iterable[Line]:
        for peer in sorted(bans.keys() - self._banned)[:NAMES_MAX]:
            yield logging.WARNING, f"{peer_id_of(peer)} was banned: {bans[peer] or BAN_UNKNOWN}"
        for peer in sorted(kept_away.keys() - self._kept_away)[:NAMES_MAX]:
            yield logging.WARNING, f"{peer_id_of(peer)} is kept away: {reasons(dict(kept_away[peer]))}"
        if back := self._kept_away - kept_away.keys():
            yield logging.INFO, f"{_names(back)} no longer kept away"

    def _of_health(self, complaints: Sequence[Complaint]) -> Iterable[Line]:
        self._looks = {each.code: self._looks.get(each.code, 0) + 1 for each in complaints}
        for each in complaints:
            if self._looks[each.code] == LOOKS:
                self._told.add(each.code)
                yield logging.WARNING if each.severity == "error" else logging.INFO, each.text
        for code in [code for code in Code if code in self._told and code not in self._looks]:
            self._told.remove(code)
            yield logging.INFO, MEANINGS[code].ended


def _names(peers: Iterable[bytes]) -> str:
    names = sorted(map(peer_id_of, peers))
    rest = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
    return ", ".join(names[:NAMES_MAX]) + rest
