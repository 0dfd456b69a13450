"""The commands by which an owner steers the running daemon. What they change holds until it ends."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from p2ptrain.cli.node import DataDir, NodeFile, data_dir_of
from p2ptrain.errors import ConfigError

RATE_MAX = 10**12  # bytes a second, as in the config
Rate = Annotated[int | None, typer.Option(metavar="BYTES", min=0, max=RATE_MAX, help="Bytes a second; 0: no limit.")]
NO_LIMITS = {"upload": 0, "download": 0, "hours": "", "percent": 100, "memory": 0}


def pause(config: NodeFile = None, data_dir: DataDir = None) -> None:
    """Have the local daemon train no further until `resume`; it goes on voting and applying. A restart forgets it."""
    from p2ptrain.node.control import ask

    ask(data_dir_of(data_dir, config), {"do": "pause"})
    typer.echo("paused: the training that runs is the last; `p2ptrain resume`, or a restart, goes on")


def resume(config: NodeFile = None, data_dir: DataDir = None) -> None:
    """Let the local daemon train again after `pause`; its hours and its battery may still keep it from it."""
    from p2ptrain.node.control import ask

    left = ask(data_dir_of(data_dir, config), {"do": "resume"})["pauses"]
    typer.echo("\n".join(left) if left else "it trains again, from the next round on at the latest")


def limit(  # noqa: PLR0913, PLR0917  # a command has its options
    upload: Rate = None,
    download: Rate = None,
    hours: Annotated[
        str | None, typer.Option(metavar="HH:MM-HH:MM", help='When it may train, in local time; "": always.')
    ] = None,
    percent: Annotated[
        int | None, typer.Option(metavar="PERCENT", min=1, max=100, help="Of the time, that the device may work.")
    ] = None,
    threads: Annotated[int | None, typer.Option(metavar="N", min=1, max=1_024, help="Of torch, for training.")] = None,
    memory: Annotated[
        int | None, typer.Option(metavar="BYTES", min=0, help="Main memory, beyond which it complains; 0: no limit.")
    ] = None,
    battery: Annotated[
        Literal["pause", "train"] | None, typer.Option(help="What it does while the machine runs on its battery.")
    ] = None,
    off: Annotated[
        bool, typer.Option("--off", help="No limits of traffic, hours, percent and memory; threads and battery stay.")
    ] = False,
    config: NodeFile = None,
    data_dir: DataDir = None,
) -> None:
    """Change what the local daemon may take of this machine, or tell it; a restart goes back to the config's limits."""
    from p2ptrain.node.control import ask

    order: dict[str, object] = {"upload": upload, "download": download, "hours": hours}
    order |= {"percent": percent, "threads": threads, "memory": memory, "battery": battery}
    if off and any(each is not None for each in order.values()):
        raise ConfigError("no limits, and a limit", key="--off", fix="Give one or the other")
    order = {**NO_LIMITS} if off else order
    from p2ptrain.config import LimitsConfig
    from p2ptrain.node.limits import changed

    changed(LimitsConfig(), order)  # a mistake is the user's, whether or not a daemon runs
    limits = ask(data_dir_of(data_dir, config), {"do": "limit", **order})
    rows = {
        "upload": _rate(limits["upload_bytes_per_second"]),
        "download": _rate(limits["download_bytes_per_second"]),
        "hours": limits["hours"] or "always",
        "device": f"{limits['device_percent']}% of the time",
        "threads": str(limits["threads"] or "as torch has them"),
        "memory": f"{limits['memory_bytes']:,} bytes" if limits["memory_bytes"] else "no limit",
        "battery": "it pauses" if limits["on_battery"] == "pause" else "it trains",
    }
    for name, text in rows.items():
        typer.echo(f"{name:<9} {text}")


def _rate(rate: int) -> str:
    return f"{rate:,} bytes/s" if rate else "no limit"


def checkpoint_now(config: NodeFile = None, data_dir: DataDir = None) -> None:
    """Have the local daemon save its state, after the training that runs."""
    from p2ptrain.node.control import ask

    saved = ask(data_dir_of(data_dir, config), {"do": "checkpoint"})
    typer.echo(f"saved the state after round {saved['round']}")
