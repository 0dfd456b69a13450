"""`p2ptrain doctor`: whether a node can work on this machine, and what to do if not."""

from __future__ import annotations

import json

import typer

from p2ptrain.cli.exits import ExitStatus
from p2ptrain.cli.node import AsJson, Bootstrap, DataDir, Listen, NodeFile, node_config
from p2ptrain.errors import DataError


def doctor(
    bootstrap: Bootstrap = None,
    config: NodeFile = None,
    data_dir: DataDir = None,
    listen: Listen = None,
    as_json: AsJson = False,
) -> None:
    """Look whether a node can work here, also while one does; exit status 1 if it cannot.

    With --bootstrap, that node is asked what its run takes, and for four seconds of its bandwidth.
    """
    node = node_config(config, data_dir, bootstrap, listen)
    try:
        from p2ptrain.doctor.examine import examine
        from p2ptrain.doctor.findings import can_work, json_of, text_of, verdict_of
    except (ImportError, OSError) as error:  # OSError: a library of torch's that the system cannot load
        fix = "Install p2ptrain anew with its dependencies, best in an environment of its own"
        raise DataError(f"something that p2ptrain needs is not there, or broken: {error}. {fix}") from error

    found = []
    for each in examine(node, config, is_asked_outside=bool(bootstrap)):
        found.append(each)
        if not as_json:
            typer.echo(text_of(each))  # at once: all of it may take minutes, and nobody need wait for the end
    typer.echo(json.dumps(json_of(found), indent=2) if as_json else verdict_of(found))
    if not can_work(found):
        raise typer.Exit(ExitStatus.FAILED)
