"""`p2ptrain top`: the dashboard in the terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from p2ptrain.cli.node import DataDir, NodeFile, data_dir_of
from p2ptrain.observe.top import show, show_once

Interval = Annotated[float, typer.Option(metavar="SECONDS", min=0.2, max=3_600, help="Time between updates.")]


def top(
    interval: Interval = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit, as in a pipe.")] = False,
    config: NodeFile = None,
    data_dir: DataDir = None,
) -> None:
    """Watch the local daemon in the terminal.

    Shows rounds, loss, whether all nodes have the same model, peers, traffic and health. Press q to quit.
    """
    directory = data_dir_of(data_dir, config)

    if once or not sys.stdout.isatty():
        show_once(directory, Console())
        return
    show(directory, interval)
