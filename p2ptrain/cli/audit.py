"""`p2ptrain audit`: verify a run's history offline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from p2ptrain.cli.exits import ExitStatus
from p2ptrain.cli.node import AsJson, Run, node_config
from p2ptrain.node.control import ask


def _measured(found: dict[str, Any]) -> str:
    return (
        f"z         {found['z']:.2f}   of its own work typically {found['typical_z']:.2f}, of a copy or noise 0\n"
        f"strength  {found['strength']:.2f}   of contributions that go the common way 1\n"
        f"from {found['sequences']} of its sequences; the same on all machines but for the last digits"
    )


def audit(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A node's data directory, or a run's inside it.")],
    run: Run = None,
    contribution: Annotated[
        tuple[int, str] | None,
        typer.Option(
            metavar="ROUND PEER",
            help="Measure a contribution instead, with DIR's daemon, as all members do before they suspend somebody.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Verify the history of a run in DIR, offline.

    Checks signatures, payloads and states, and replays the rounds to verify the final state root. The audit only
    reads, so the node may keep running, and DIR may be somebody else's. The exit status is 1 if anything is wrong or
    cannot be checked.
    """
    if contribution is not None:
        number, peer = contribution
        found = ask(directory, {"do": "audit", "round": number, "peer": peer})
        typer.echo(json.dumps(found, indent=2) if as_json else _measured(found))
        return
    from p2ptrain.audit.run import audit as look
    from p2ptrain.audit.run import find_directory

    node_config(None)  # the owner's settings may allow the run's plug-ins
    report = look(find_directory(directory, run))
    typer.echo(json.dumps(report.as_json(), indent=2) if as_json else "\n".join(report.lines()))
    if not report.all_holds:
        raise typer.Exit(ExitStatus.FAILED)
