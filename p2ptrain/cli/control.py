"""The commands by which an owner steers the running daemon. What they change holds until it ends."""

from __future__ import annotations

from typing import Annotated

import typer

from p2ptrain.cli.node import DataDir, NodeFile, data_dir_of
from p2ptrain.errors import ConfigError

Rate = Annotated[int | None, typer.Option(metavar="BYTES", min=0, help="Bytes a second; 0: no limit.")]


def pause(config: NodeFile = None, data_dir: DataDir = None) -> None:
    """Have the local daemon train no further until `resume`; it goes on voting and applying. A restart forgets it."""
    from p2ptrain.daemon.control import ask

    ask(data_dir_of(data_dir, config), {"do": "pause"})
    typer.echo("paused: the training that runs is the last; `p2ptrain resume`, or a restart, goes on")


def resume(config: NodeFile = None, data_dir: DataDir = None) -> None:
    """Let the local daemon train again after `pause`."""
    from p2ptrain.daemon.control import ask

    ask(data_dir_of(data_dir, config), {"do": "resume"})
    typer.echo("it trains again, from the next round on at the latest")


def limit(
    upload: Rate = None,
    download: Rate = None,
    off: Annotated[bool, typer.Option("--off", help="No limits.")] = False,
    config: NodeFile = None,
    data_dir: DataDir = None,
) -> None:
    """Change what the local daemon may send and receive, or tell it; until it ends, then the config's limits hold."""
    from p2ptrain.daemon.control import ask

    if off and (upload is not None or download is not None):
        raise ConfigError("no limits, and a limit", key="--off", fix="Give one or the other")
    order = {"do": "limit", "upload": 0 if off else upload, "download": 0 if off else download}
    limits = ask(data_dir_of(data_dir, config), order)
    for way in ("upload", "download"):
        rate = limits[f"{way}_bytes_per_second"]
        typer.echo(f"{way:<9} {f'{rate:,} bytes/s' if rate else 'no limit'}")


def checkpoint_now(config: NodeFile = None, data_dir: DataDir = None) -> None:
    """Have the local daemon save its state, after the training that runs."""
    from p2ptrain.daemon.control import ask

    saved = ask(data_dir_of(data_dir, config), {"do": "checkpoint"})
    typer.echo(f"saved the state after round {saved['round']}")
