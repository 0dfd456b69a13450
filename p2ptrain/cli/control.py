"""The commands that control the running daemon. Their changes last until it ends."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from p2ptrain.cli.node import DataDir, NodeFile, data_dir_of
from p2ptrain.config import LimitsConfig
from p2ptrain.errors import ConfigError
from p2ptrain.node.control import ask
from p2ptrain.node.limits import changed

RATE_MAX = 10**12  # bytes per second, as in the config
Rate = Annotated[
    int | None, typer.Option(metavar="BYTES", min=0, max=RATE_MAX, help="Bytes per second; 0 means no limit.")
]
NO_LIMITS = {"upload": 0, "download": 0, "hours": "", "percent": 100, "memory": 0}


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


def limit(  # noqa: PLR0913, PLR0917  # a command has many options
    upload: Rate = None,
    download: Rate = None,
    hours: Annotated[
        str | None, typer.Option(metavar="HH:MM-HH:MM", help='When to train, in local time; "" means always.')
    ] = None,
    percent: Annotated[
        int | None,
        typer.Option(metavar="PERCENT", min=1, max=100, help="Percentage of the time in which the device may work."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=1_024, help="Torch's threads for training.")
    ] = None,
    memory: Annotated[
        int | None, typer.Option(metavar="BYTES", min=0, help="Complain if more main memory is used; 0 means no limit.")
    ] = None,
    battery: Annotated[
        Literal["pause", "train"] | None, typer.Option(help="What to do while the machine runs on battery.")
    ] = None,
    gpu: Annotated[
        Literal["pause", "ignore"] | None, typer.Option(help="What to do while other programs use the GPU.")
    ] = None,
    off: Annotated[
        bool, typer.Option("--off", help="Remove the limits on traffic, hours, percent and memory.")
    ] = False,
    config: NodeFile = None,
    data_dir: DataDir = None,
) -> None:
    """Show or change what the local daemon may use.

    A restart returns to the limits in the config.
    """
    order: dict[str, object] = {"upload": upload, "download": download, "hours": hours}
    order |= {"percent": percent, "threads": threads, "memory": memory, "battery": battery, "gpu": gpu}
    if off and any(each is not None for each in order.values()):
        raise ConfigError("cannot be combined with a limit", key="--off", fix="Give one or the other")
    order = {**NO_LIMITS} if off else order

    changed(LimitsConfig(), order)  # reports a user's mistake even if no daemon is running
    limits = ask(data_dir_of(data_dir, config), {"do": "limit", **order})
    rows = {
        "upload": _rate(limits["upload_bytes_per_second"]),
        "download": _rate(limits["download_bytes_per_second"]),
        "hours": limits["hours"] or "always",
        "device": f"{limits['device_percent']}% of the time",
        "threads": str(limits["threads"] or "torch's default"),
        "memory": f"{limits['memory_bytes']:,} bytes" if limits["memory_bytes"] else "no limit",
        "battery": limits["on_battery"],
        "busy GPU": limits["on_gpu_busy"],
    }
    for name, text in rows.items():
        typer.echo(f"{name:<9} {text}")


def _rate(rate: int) -> str:
    return f"{rate:,} bytes/s" if rate else "no limit"
