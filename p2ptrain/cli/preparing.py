"""The progress bar of `data prepare`, and the list of documents that it left out."""

from __future__ import annotations

from time import monotonic
from types import TracebackType

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from p2ptrain.errors import ConfigError
from p2ptrain.visible import visible

NAMED_MAX = 20  # documents named as left out; the rest is counted


class Preparing:
    """Shows the progress, and names the documents that are left out."""

    def __init__(self) -> None:
        self._terminal = Console(stderr=True)
        columns = (BarColumn(), DownloadColumn(), TextColumn("{task.fields[pace]}"), TimeRemainingColumn())
        self._bar = Progress(*columns, console=self._terminal, transient=True, disable=not self._terminal.is_terminal)
        self._task = self._bar.add_task("reading", total=None, pace="")
        self._began: tuple[float, int] | None = None
        self._named: set[str] = set()
        self._skipped, self._done = 0, 0

    def __enter__(self) -> Preparing:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._bar.stop()
        if self._skipped > len(self._named):
            typer.echo(f"{self._skipped - len(self._named)} more were left out", err=True)

    def progress(self, done: int, total: int, tokens: int) -> None:
        now = monotonic()
        if done < self._done:  # a second reading has begun, because a split was empty
            self._skipped = 0
        self._done = done
        began, before = self._began = self._began or (now, tokens)
        pace = f"{(tokens - before) / (now - began):,.0f} tokens/s" if now > began else ""
        self._bar.update(self._task, completed=done, total=total, pace=pace)

    def skip(self, error: ConfigError) -> None:
        text = f"{error.source}: {error.problem}"
        if text not in self._named and len(self._named) < NAMED_MAX:
            self._named.add(text)
            self._bar.console.print(visible(f"left out: {text}"), markup=False, highlight=False, soft_wrap=True)
        self._skipped += 1
