"""The commands that control the running daemon, until it ends, and those about what its run is to become."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from p2ptrain.cli.node import AsJson, DataDir, NodeFile, home_of, setting, show
from p2ptrain.config import load_run_config, read_table
from p2ptrain.config.node import OPTIONS, Limits
from p2ptrain.errors import ConfigError
from p2ptrain.node.control import ask
from p2ptrain.node.limits import changed
from p2ptrain.visible import few


def pause(config: NodeFile = None, data_dir: DataDir = None) -> None:
    """Pause training until `resume` or a restart.

    The local daemon keeps voting and applying rounds."""
    ask(home_of(config, data_dir).directory, {"do": "pause"})
    typer.echo("paused: the current training is finished first; `p2ptrain resume` or a restart continues training")


def resume(config: NodeFile = None, data_dir: DataDir = None) -> None:
    """Resume training after `pause`.

    The local daemon may still be paused by its hours, on battery, or because other programs use the GPU."""
    left = ask(home_of(config, data_dir).directory, {"do": "resume"})["pauses"]
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

    A restart returns to the limits in the config."""
    if off and any(each is not None for each in order.values()):
        raise ConfigError("cannot be combined with a limit", key="--off", fix="Give one or the other")
    if off:
        order = {each.name: Limits.model_fields[name].default for name, each in OPTIONS.items() if each.unit}
    changed(Limits(), order)  # reports a user's mistake even if no daemon is running
    limits = ask(home_of(config, data_dir).directory, {"do": "limit", **order})
    for name, option in OPTIONS.items():
        value = limits[name]
        words = f"{value:,} {option.unit}" if value and isinstance(value, int) else value or "no limit"
        typer.echo(f"{option.name:<9} {words}".rstrip())


# -- The run's future -------------------------------------------------------------------------------


def propose(
    file: Annotated[
        Path | None, typer.Argument(metavar="RUN.toml", help="A run file: what it says otherwise is the change.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting, such as recipe.inner_learning_rate=0.005."),
    ] = None,
    after: Annotated[
        int | None, typer.Option(metavar="ROUND", help="The last round before the change; else in 20 rounds.")
    ] = None,
    back_to: Annotated[
        int | None, typer.Option(metavar="ROUND", help="Go back to the weights that this round made.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Go on with this prepared data, which others fetch from here.")
    ] = None,
    config: NodeFile = None,
    data_dir: DataDir = None,
) -> None:
    """Move that the run go on with other settings.

    The local daemon has to have a seat, and assents. If more than two thirds of the members assent before the last
    round, the run goes on as another then, with the same members and weights."""
    if file is None and not settings and back_to is None and data is None:
        raise ConfigError("nothing to move", key="--set", fix="Give KEY=VALUE, a run file, --data or --back-to ROUND")
    wanted = {**(_said_in(file) if file else {}), **dict(map(setting, settings or []))}
    place = str(data.absolute()) if data else ""
    order = {"do": "propose", "settings": wanted, "after": after, "back_to": back_to, "data": place}
    found = ask(home_of(config, data_dir).directory, order)
    typer.echo(f"moved: that the run {found['text']}")
    needed = few(found["needed"], "member", "members")
    typer.echo(f"motion {found['motion'][:8]} needs the assent of {needed}; this node assents")


def _said_in(file: Path) -> dict[str, object]:
    """Returns the settings that a run file names, with their values as the run's config has them."""
    said, run = read_table(file), load_run_config(file).model_dump(mode="json")
    tables = {name: table for name, table in said.items() if isinstance(table, dict)}
    alone = {name: run[name] for name in said if name not in tables}
    return alone | {f"{name}.{key}": run[name][key] for name, table in tables.items() for key in table}


def agenda(as_json: AsJson = False, config: NodeFile = None, data_dir: DataDir = None) -> None:
    """Show what members move about the run's future.

    For each motion: what changes, what that costs this machine, how many assent and have to, and if this node does."""
    from p2ptrain.observe.progress import agenda_lines

    show(ask(home_of(config, data_dir).directory, {"do": "agenda"}), as_json, agenda_lines)


def assent(
    motion: Annotated[str | None, typer.Argument(metavar="MOTION", help="Its name, or how it begins.")] = None,
    withdraw: Annotated[bool, typer.Option("--withdraw", help="Assent to nothing any more.")] = False,
    config: NodeFile = None,
    data_dir: DataDir = None,
) -> None:
    """Assent to a motion that `agenda` shows.

    A node assents to one at a time; until it is decided, to another instead, or with --withdraw to none. This node
    goes along with what was decided only if it assents, or succession.accept in its config does."""
    if (motion is None) != withdraw:
        fix = "Give the name of a motion, as `p2ptrain agenda` shows it, or --withdraw"
        raise ConfigError("give one or the other", key="MOTION", fix=fix)
    order = {"do": "withdraw"} if withdraw else {"do": "assent", "motion": motion}
    typer.echo(ask(home_of(config, data_dir).directory, order)["text"])
