"""`p2ptrain doctor`: checks whether a node can work on this machine, and says what to do if not."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from p2ptrain.cli.exits import ExitStatus
from p2ptrain.cli.node import AsJson, Bootstrap, DataDir, Listen, NodeFile, home_of
from p2ptrain.config import NodeConfig
from p2ptrain.errors import ConfigError, DataError

if TYPE_CHECKING:
    from p2ptrain.doctor.findings import Diagnosis


def doctor(
    bootstrap: Bootstrap = None,
    config: NodeFile = None,
    data_dir: DataDir = None,
    listen: Listen = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Measure the device instead, in a minute: what it could train, what a round would cost."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check whether a node can work on this machine.

    A node may be running meanwhile. With --bootstrap, that node is asked what its run needs, and where it sees this
    machine. The exit status is 1 if a node cannot work here."""
    node = home_of(config, data_dir, bootstrap, listen).config
    if measure and (bootstrap or data_dir or listen):
        what = "measures the device alone, without a network or a node's data"
        raise ConfigError(what, key="--measure", fix="Leave out --bootstrap, --data-dir and --listen")
    try:
        from p2ptrain.doctor.examine import examine
        from p2ptrain.doctor.findings import can_work, json_of, text_of, verdict_of
    except (ImportError, OSError) as error:  # OSError: the system cannot load one of torch's libraries
        fix = "Reinstall p2ptrain with its dependencies, preferably in its own virtual environment"
        raise DataError(f"a dependency of p2ptrain is missing or broken: {error}. {fix}") from error
    found = []
    if measure:
        found = _measure(node, as_json)
    else:
        for each in examine(node, config, is_asked_outside=bool(bootstrap)):
            found.append(each)
            if not as_json:
                typer.echo(text_of(each))  # printed one by one, because all checks together may take minutes
        typer.echo(json.dumps(json_of(found), indent=2) if as_json else verdict_of(found))
    if not can_work(found):
        raise typer.Exit(ExitStatus.FAILED)


def _measure(config: NodeConfig, as_json: bool) -> list[Diagnosis]:
    """Measures the device if it can work, and returns what was found out about that."""
    from p2ptrain.doctor.examine import examine_device
    from p2ptrain.doctor.findings import VERSION, can_work, text_of
    from p2ptrain.doctor.measure import json_of, measured, summary

    found, figures = examine_device(config.device), []
    told = {"version": VERSION, "device": asdict(found[0])}
    if not as_json:
        typer.echo(text_of(found[0]))
    try:
        for each in measured(config) if can_work(found) else ():
            figures.append(each)
            if not as_json:
                typer.echo(each.line())
    except KeyboardInterrupt:
        typer.echo("interrupted before all was measured", err=True)
        raise
    if as_json:
        typer.echo(json.dumps(told | json_of(figures), indent=2))
    elif figures:
        typer.echo(summary(figures))
    return found
