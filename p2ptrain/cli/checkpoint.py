"""`p2ptrain checkpoint`: the local node's checkpoints."""

from __future__ import annotations

from pathlib import Path
from time import sleep
from typing import Annotated

import typer

from p2ptrain.cli.groups import group
from p2ptrain.cli.node import DataDir, NodeFile, Run, home_of
from p2ptrain.config import RunConfig
from p2ptrain.errors import DataError
from p2ptrain.files import DiskError
from p2ptrain.node.control import ask
from p2ptrain.node.home import Home
from p2ptrain.store.backup import KEPT, BackupPlace
from p2ptrain.store.checkpoints import Checkpoint, Checkpoints, NewerError
from p2ptrain.store.store import CHECKPOINTS_NAME

LOOK_SECONDS = 10.0  # between looks for a new checkpoint
app = group("List, copy and save this node's checkpoints.")


def _checkpoints(home: Home, run: RunConfig) -> Checkpoints:
    return Checkpoints(home.of_run(run.id) / CHECKPOINTS_NAME, run.id)


def _line(checkpoint: Checkpoint) -> str:
    size = checkpoint.stamp.trainer.bytes + checkpoint.stamp.state.bytes
    return f"round {checkpoint.round:>8}  root {checkpoint.root.hex()[:16]}  {size:>15,} bytes  {checkpoint.path}"


@app.command("list")
def list_checkpoints(config: NodeFile = None, data_dir: DataDir = None, run: Run = None) -> None:
    """List this node's checkpoints, the newest last."""
    home = home_of(config, data_dir)
    for each in _checkpoints(home, home.run(run)).found():
        word = "unreadable" if isinstance(each, NewerError | DiskError) else "DAMAGED"
        typer.echo(f"{word} {each}" if isinstance(each, DataError) else _line(each))


@app.command()
def export(
    out: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write the copy; must not exist yet.")],
    number: Annotated[
        int | None,
        typer.Option("--round", min=0, help="The round of the checkpoint; by default, the newest certified one."),
    ] = None,
    config: NodeFile = None,
    data_dir: DataDir = None,
    run: Run = None,
) -> None:
    """Copy an intact checkpoint, and verify the copy.

    The copy includes the run's config and tokenizer, so that it can be read on its own."""
    from p2ptrain.node.saved import JudgedCheckpoint, beside, newest_whole, reading, though_pruned

    home = home_of(config, data_dir)
    meant = home.run(run)
    checkpoints = _checkpoints(home, meant)

    def copy() -> JudgedCheckpoint:
        found = newest_whole(checkpoints, number)
        with reading(found.checkpoint):
            checkpoints.export(found.checkpoint, out, beside(home, meant))
        return found

    found = though_pruned(copy)
    typer.echo(f"{_line(found.checkpoint)}  {found.judgement}")


@app.command("copy")
def copy_out(
    to: Annotated[str, typer.Option("--to", metavar="DIR|URL", help="Where to: a directory, or s3://bucket/run.")],
    every: Annotated[
        int | None,
        typer.Option(metavar="ROUNDS", min=1, help="Go on until Ctrl-C, with a copy whenever so many have passed."),
    ] = None,
    keep: Annotated[int, typer.Option(min=1, help="Backups that stay; of older ones, every tenth.")] = KEPT,
    config: NodeFile = None,
    data_dir: DataDir = None,
    run: Run = None,
) -> None:
    """Back up the newest certified state, with its proof.

    `p2ptrain audit` verifies a backup, and `p2ptrain start --from` goes on from it. The node may run or not."""
    from p2ptrain.node.saved import backed_up, though_pruned

    home, place = home_of(config, data_dir), BackupPlace(to)
    meant = home.run(run)
    while True:
        try:
            with place.locked():  # of a disk that was gone meanwhile, once more
                while True:
                    made = though_pruned(lambda: backed_up(home, meant, place, every, keep))
                    if made or every is None:
                        typer.echo(f"{place.where}/{made}" if made else "nothing is newer than the newest backup")
                    if every is None:
                        return
                    sleep(LOOK_SECONDS)
        except DataError as error:
            if every is None:
                raise
            typer.echo(f"{error}; trying again", err=True)
            sleep(LOOK_SECONDS)


@app.command()
def now(config: NodeFile = None, data_dir: DataDir = None) -> None:
    """Save the state now, after the current training.

    The local daemon does it; see `checkpoint list`."""
    saved = ask(home_of(config, data_dir).directory, {"do": "checkpoint"})
    typer.echo(f"saved the state after round {saved['round']}")
