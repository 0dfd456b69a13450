"""`p2ptrain report`: writes a page about a run, or its figures as JSON lines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from p2ptrain.cli.node import DataDir, NodeFile, Run, home_of, put_out
from p2ptrain.errors import P2ptrainError
from p2ptrain.node.control import ask
from p2ptrain.observe.tracking import line_of


def report(
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="The file to write; by default, named after the run, in this directory."
        ),
    ] = None,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help="Instead of a page, write the figures of each round as a JSON line.")
    ] = False,
    run: Run = None,
    config: NodeFile = None,
    data_dir: DataDir = None,
) -> None:
    """Write an HTML page about a run of this node.

    The page shows loss, times, contributors and configuration, and needs no other files."""
    home = home_of(config, data_dir)
    from p2ptrain.observe.export import exported, read_recorded_run

    chosen = home.run(run)
    recorded_run = read_recorded_run(chosen, home.of_run(chosen.id))
    path = out or Path(f"{chosen.name}-{chosen.run_id[:8]}.{'jsonl' if jsonl else 'html'}")
    if jsonl:
        text = "".join(f"{line_of(each)}\n" for each in recorded_run.rounds)
    else:
        try:
            status = ask(home.directory, {"do": "status"})
        except P2ptrainError:  # the page omits the status if no daemon is running, or it is busy
            status = None
        text = exported(recorded_run, status if status and status["run_id"] == chosen.run_id else None)
    put_out(path, text.encode())
    typer.echo(path)
