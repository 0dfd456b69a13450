"""The commands that control the running daemon. Their changes last until it ends."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from p2ptrain.cli.node import DataDir, NodeFile, data_dir_of
from p2ptrain.config.node import OPTIONS, Limits
from p2ptrain.errors import ConfigError
from p2ptrain.node.control import ask
from p2ptrain.node.limits import changed


def pause(config: NodeFile = None, data_dir: DataDir = None) -> None:
    """Pause training until `resume` or a restart.

    The local daemon keeps voting and applying rounds.
    """
    ask(data_dir_of(data_dir, config), {"do": "pause"})
    typer.echo("paused: the current training is finished first; `p2ptrain resume` or a restart continues training")


def resume(config: NodeFile = None, data_dir: DataDir = None) -> None:
    """Resume training after `pause`.

    The local daemon may still be paused by its hours, on battery, or because other programs use the GPU.
    """
    left = ask(data_dir_of(data_dir, config), {"do": "resume"})["pauses"]
    typer.echo("\n".join(left) if left else "resumed: training starts with the next round at the latest")


def _with_limits(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command an option for each limit; `changed` checks their values."""
    own = inspect.signature(command, eval_str=True)
    parameters = []
    for name, option in OPTIONS.items():
        field = Limits.model_fields[name]
        words = str(field.description)
        shown = typer.Option(metavar=option.unit.upper() or None, help=f"{words[0].upper()}{words[1:]}.")
        kind: Any = Annotated[field.annotation | None, shown]  # type: ignore[operator]  # a type, as far as pydantic says
        parameters.append(inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind))
    kept = [each for each in own.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    command.__signature__ = own.replace(parameters=[*kept, *parameters])  # type: ignore[attr-defined]
    return command


@_with_limits
def limit(
    off: Annotated[
        bool, typer.Option("--off", help="Remove the limits on traffic, memory, hours and percent.")
    ] = False,
    config: NodeFile = None,
    data_dir: DataDir = None,
    **order: object,
) -> None:
    """Show or change what the local daemon may use.

    A restart returns to the limits in the config.
    """
    if off and any(each is not None for each in order.values()):
        raise ConfigError("cannot be combined with a limit", key="--off", fix="Give one or the other")
    if off:
        order = {each.name: Limits.model_fields[name].default for name, each in OPTIONS.items() if each.unit}
    changed(Limits(), order)  # reports a user's mistake even if no daemon is running
    limits = ask(data_dir_of(data_dir, config), {"do": "limit", **order})
    for name, option in OPTIONS.items():
        value = limits[name]
        words = f"{value:,} {option.unit}" if value and isinstance(value, int) else value or "no limit"
        typer.echo(f"{option.name:<9} {words}".rstrip())
