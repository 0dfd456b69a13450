"""Progress for people: a live line on a terminal, a JSON line per round elsewhere.

On a terminal, the thread that writes the log also draws the line. It may block (Ctrl-S, a hanging connection), and with
rich's own threads the node would block too.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, Literal

from rich.console import Console
from rich.live import Live
from rich.logging import RichHandler
from rich.text import Text

from p2ptrain.observe.figures import others_of, reasons
from p2ptrain.observe.logs import PlainText, QueuedLines, Unbuffered, plain
from p2ptrain.observe.schema import Status
from p2ptrain.visible import count_of, few

# Figures with a fixed place in `p2ptrain status`.
PLACED = {
    "round", "phase", "view", "applied_round", "loss", "tokens_per_second", "peers", "roster", "quorum",
    "fault_tolerance",
}  # fmt: skip

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
    """Shows the node's progress."""

    def __init__(self, form: Literal["auto", "text", "json"], status: Callable[[], Status]) -> None:
        self.form, self.status = form, status
        self._console = Console(stderr=True)
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
        """Shows the node's current status."""
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


def lines_of(status: dict[str, Any]) -> str:
    """Describes a node in a few lines, for `p2ptrain status`."""
    tolerance = status["fault_tolerance"]
    loss = "-" if status["loss"] is None else f"{status['loss']:.4f} nats a token"
    attempt = f", try {status['view'] + 1}" if status.get("view") else ""
    figures = [each for each in others_of(Status, PLACED) if each.number(status) or each.figure.unit == "is"]
    rows = {
        "run": f"{status['run_name']}  {status['run_id']}",
        "peer id": status["peer_id"],
        "addresses": "\n".join(status["addresses"]) or "none yet",
        "round": f"{status['round']}, {status['phase']}{attempt}; {status['applied_round']} applied",
        "state root": status["state_root"] or "none yet",
        "loss": loss,
        "speed": _speed(status["tokens_per_second"]).removesuffix(" · "),
        "data": status.get("own_data", ""),
        "peers": str(len(status["peers"])),
        "roster": f"{few(len(status['roster']), 'member', 'members')}, "
        f"of which {few(status['quorum'], 'decides', 'decide')}; "
        f"{tolerance['crashes']} may crash, {tolerance['liars']} may lie",
        "figures": "\n".join(f"{each.figure.title} {words}" for each in figures if (words := each.words(status))),
        "health": "\n".join(status["health"]) or "good",
        "http": status["http"] or "off",
    }
    shown = [(name, text) for name, text in rows.items() if text]
    lines = [(name if not n else "", part) for name, text in shown for n, part in enumerate(text.split("\n"))]
    return plain("\n".join(f"{name:<11} {part}" for name, part in lines))
