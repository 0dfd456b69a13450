"""The command that verifies a run's history without asking anybody."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from p2ptrain.cli.exits import ExitStatus
from p2ptrain.cli.node import AsJson, Run


def audit(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A node's data directory, or one of a run in it.")],
    run: Run = None,
    as_json: AsJson = False,
) -> None:
    """Verify a run's history in DIR: signatures, payloads, states, and by replaying them the final state root.

    It only reads, also while the node runs, and DIR may come from somebody else. Exit status 1 if anything is wrong or
    cannot be checked.
    """
    from p2ptrain.audit.run import audit as look
    from p2ptrain.audit.run import find_directory

    report = look(find_directory(directory, run))
    typer.echo(json.dumps(report.as_json(), indent=2) if as_json else "\n".join(report.lines()))
    if not report.all_holds:
        raise typer.Exit(ExitStatus.FAILED)
