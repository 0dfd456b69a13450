"""The command line. Each command parses its arguments, calls one function and prints the result.

`p2ptrain --help` answers at once, because a command's module is imported when the command is used. In a module, what
takes long to import (above all torch) is imported by the functions that need it. An error is one paragraph on stderr
that names the key or file and says how to fix it; exit statuses are in `exits`. Typer handles Ctrl-C and closed pipes.

`groups` lists the commands. `node` has those around a node (start, join, lend, leave, status, demo), `control` those
that change a running one or its run (propose, agenda, assent), `config`, `data`, `invite`, `checkpoint`, `doctor` and
`report` what their names say, `audit` has receipt too, `model` export, generate, evaluate, `simulation` also replay."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from p2ptrain import __version__
from p2ptrain.cli.exits import ExitStatus
from p2ptrain.cli.groups import Commands, help_without_command
from p2ptrain.errors import ConfigError, HardwareError, NoDaemonError, P2ptrainError, TooLargeError, UnusableError
from p2ptrain.visible import visible

# Help is plain text: importing rich would take half of the time budget of --help.
app = typer.Typer(
    cls=Commands,
    add_completion=False,
    rich_markup_mode=None,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
)

STATUSES: dict[type[P2ptrainError], ExitStatus] = {
    ConfigError: ExitStatus.USER_ERRED,
    NoDaemonError: ExitStatus.NO_DAEMON,
    HardwareError: ExitStatus.HARDWARE,
    UnusableError: ExitStatus.OWNER_NEEDED,
    TooLargeError: ExitStatus.OWNER_NEEDED,
}


def main() -> int:
    try:
        _refuse_deleted_directory()
        return app(prog_name="p2ptrain", standalone_mode=False) or 0
    except P2ptrainError as error:
        status = next((status for kind, status in STATUSES.items() if isinstance(error, kind)), ExitStatus.FAILED)
        return _complain(str(error), status)
    except typer.Abort:  # the end of the input, where something was asked
        return _complain("nothing was entered", ExitStatus.USER_ERRED)
    except typer.TyperException as error:  # an unknown command or option, or a missing argument
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "p2ptrain"
        return _complain(f"{error.format_message()}\nTry: {command} --help", ExitStatus.USER_ERRED)


def _refuse_deleted_directory() -> None:
    """ConfigError where no relative path leads anywhere, and torch's libraries cannot be loaded."""
    try:
        Path.cwd()
    except FileNotFoundError as error:
        what, fix = "the directory that this was started in has been deleted", "Change to another, such as by `cd`"
        raise ConfigError(what, fix=fix) from error


def _complain(text: str, status: int) -> int:
    typer.echo(visible(text, keep="\n"), err=True)  # the text may quote a file or a peer
    return status


@app.callback()
def top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Train one model together over the internet.

    There is no coordinator, no peer has to be trusted, and all replicas are bit-identical."""
    if version:
        typer.echo(f"p2ptrain {__version__}")
        raise typer.Exit
    help_without_command(context)
