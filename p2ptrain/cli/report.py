"""`p2ptrain report`: a page about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from p2ptrain.cli.node import DataDir, NodeFile, Run, node_config

MODE = 0o644  # it is written to be shown


def report(
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.html", help="Where to; else a name made of the run's, here.")
    ] = None,
    run: Run = None,
    config: NodeFile = None,
    data_dir: DataDir = None,
) -> None:
    """Write a page about a run of this node: loss, times, contributors, configuration; it needs no other file."""
    node = node_config(config, data_dir)
    from p2ptrain.daemon.find import choose_run
    from p2ptrain.daemon.places import run_directory
    from p2ptrain.files import replace_file
    from p2ptrain.report.page import page_of, read_lived

    chosen = choose_run(node, run)
    lived = read_lived(chosen, run_directory(node, bytes.fromhex(chosen.run_id)))
    path = out or Path(f"{chosen.name}-{chosen.run_id[:8]}.html")
    replace_file(path, page_of(lived).encode(), mode=MODE)
    typer.echo(path)
