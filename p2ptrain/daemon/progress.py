"""Progress a person can read: one live line on a terminal, one JSON object a round elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

from rich.console import Console
from rich.live import Live
from rich.logging import RichHandler
from rich.text import Text

log = logging.getLogger("p2ptrain.progress")


def count_of(size: float) -> str:
    """A number of bytes, for a person."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1_000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1_000
    raise AssertionError("the last unit takes all")


def line_of(status: dict[str, Any]) -> str:
    """A node in one line."""
    loss = "-" if status["loss"] is None else f"{status['loss']:.3f}"
    traffic = status["bytes"]
    health = f" · {status['health'][0]}" if status["health"] else ""
    return (
        f"round {status['round']} {status['phase']} · loss {loss} · {len(status['peers'])} peers · "
        f"{len(status['roster'])} in the roster · {status['tokens_per_second']:,.0f} tokens/s · "
        f"sent {count_of(traffic.get('bytes sent', 0))}, received {count_of(traffic.get('bytes received', 0))} · "
        f"root {status['state_root'][:12] or '-'}{health}"
    )


class Progress:
    """Tells how it goes."""

    def __init__(self, form: Literal["auto", "text", "json"], status: Callable[[], dict[str, Any]]) -> None:
        self.form, self.status = form, status
        self._console = Console(stderr=True)
        self._live: Live | None = None
        self._told_round = -1

    def start(self) -> None:
        if self.form != "json" and self._console.is_terminal:
            handler = RichHandler(console=self._console, show_path=False, rich_tracebacks=False, markup=False)
            logging.getLogger().handlers = [handler]
            self._live = Live(Text(""), console=self._console, refresh_per_second=4, transient=True)
            self._live.start()

    def tell(self) -> None:
        """Show where the node stands now."""
        status = self.status()
        if self._live is not None:
            self._live.update(Text(line_of(status), no_wrap=True, overflow="ellipsis"))
        elif status["applied_round"] != self._told_round:
            fields = {key: status[key] for key in ("round", "phase", "loss", "tokens_per_second", "state_root")}
            fields |= {"peers": len(status["peers"]), "roster": len(status["roster"])}
            log.info(line_of(status), extra={"fields": fields})
        self._told_round = status["applied_round"]

    def stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def lines_of(status: dict[str, Any]) -> str:
    """A node in some lines, for `p2ptrain status`."""
    tolerance = status["fault_tolerance"]
    loss = "-" if status["loss"] is None else f"{status['loss']:.4f} nats a token"
    rows = {
        "run": f"{status['run_name']}  {status['run_id']}",
        "peer id": status["peer_id"],
        "addresses": "\n".join(status["addresses"]) or "none yet",
        "round": f"{status['round']}, {status['phase']}; {status['applied_round']} applied",
        "state root": status["state_root"] or "none yet",
        "loss": loss,
        "speed": f"{status['tokens_per_second']:,.0f} tokens/s",
        "peers": str(len(status["peers"])),
        "roster": f"{len(status['roster'])} members, of which {status['quorum']} decide; "
        f"{tolerance['crashes']} may crash, {tolerance['liars']} may lie",
        "health": "\n".join(status["health"]) or "good",
        "http": status["http"] or "off",
    }
    lines = [(name if not n else "", part) for name, text in rows.items() for n, part in enumerate(text.split("\n"))]
    return "\n".join(f"{name:<11} {part}" for name, part in lines)
