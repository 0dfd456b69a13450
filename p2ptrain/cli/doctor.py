"""`p2ptrain doctor`: checks whether a node can work on this machine, and says what to do if not."""

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
    """Check whether a node can work on this machine.

    A node may be running meanwhile. With --bootstrap, that node is asked what its run needs, and the bandwidth to it is
    measured for four seconds. The exit status is 1 if a node cannot work here.
    """
    node = node_config(config, data_dir, bootstrap, listen)
    try:
        from p2ptrain.doctor.examine import examine
        from p2ptrain.doctor.findings import can_work, json_of, text_of, verdict_of
    except (ImportError, OSError) as error:  # OSError: the system cannot load one of torch's libraries
        fix = "Reinstall p2ptrain with its dependencies, preferably in its own virtual environment"
        raise DataError(f"a dependency of p2ptrain is missing or broken: {error}. {fix}") from error

    found = []
    for each in examine(node, config, is_asked_outside=bool(bootstrap)):
        found.append(each)
        if not as_json:
            typer.echo(text_of(each))  # printed one by one, because all checks together may take minutes
    typer.echo(json.dumps(json_of(found), indent=2) if as_json else verdict_of(found))
    if not can_work(found):
        raise typer.Exit(ExitStatus.FAILED)
