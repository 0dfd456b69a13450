"""`p2ptrain checkpoint`: the local node's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from p2ptrain.cli.exits import ExitStatus
from p2ptrain.cli.groups import group
from p2ptrain.cli.node import DataDir, NodeFile, Run, data_dir_of, node_config
from p2ptrain.config import NodeConfig, RunConfig
from p2ptrain.errors import DataError
from p2ptrain.node.control import ask
from p2ptrain.node.home import Home
from p2ptrain.store.checkpoints import Checkpoint, Checkpoints
from p2ptrain.store.lock import Lock
from p2ptrain.store.store import CHECKPOINTS_NAME

app = group("List, check and copy this node's checkpoints.")


def _open(config: Path | None, data_dir: Path | None, run: str | None) -> Checkpoints:

    node = node_config(config, data_dir)
    return _checkpoints(node, Home(node).run(run))


def _checkpoints(node: NodeConfig, run: RunConfig) -> Checkpoints:
    run_id = run.id
    return Checkpoints(Home(node).of_run(run_id) / CHECKPOINTS_NAME, run_id)


def _line(checkpoint: Checkpoint) -> str:
    size = checkpoint.stamp.trainer.bytes + checkpoint.stamp.state.bytes
    return f"round {checkpoint.round:>8}  root {checkpoint.root.hex()[:16]}  {size:>15,} bytes  {checkpoint.path}"


@app.command("list")
def list_checkpoints(config: NodeFile = None, data_dir: DataDir = None, run: Run = None) -> None:
    """List this node's checkpoints, the newest last."""
    for each in _open(config, data_dir, run).found():
        typer.echo(f"DAMAGED {each}" if isinstance(each, DataError) else _line(each))


@app.command()
def verify(config: NodeFile = None, data_dir: DataDir = None, run: Run = None) -> None:
    """Verify the digests of all checkpoints.

    The exit status is 1 if a checkpoint is damaged.
    """
    checkpoints, is_bad = _open(config, data_dir, run), False
    for each in checkpoints.found():
        why = str(each) if isinstance(each, DataError) else checkpoints.verify(each)
        typer.echo(f"DAMAGED {why}" if isinstance(each, DataError) or why else f"OK      {_line(each)}")
        is_bad = is_bad or why is not None
    if is_bad:
        raise typer.Exit(ExitStatus.FAILED)


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

    The copy includes the run's config and tokenizer, so that it can be read on its own.
    """
    from p2ptrain.node.saved import JudgedCheckpoint, beside, newest_whole, reading, though_pruned

    node = node_config(config, data_dir)
    meant = Home(node).run(run)
    checkpoints = _checkpoints(node, meant)

    def copy() -> JudgedCheckpoint:
        found = newest_whole(checkpoints, number)
        with reading(found.checkpoint):
            checkpoints.export(found.checkpoint, out, beside(Home(node), meant))
        return found

    found = though_pruned(copy)
    typer.echo(f"{_line(found.checkpoint)}  {found.judgement}")


@app.command()
def prune(
    keep: Annotated[int, typer.Option(min=1, help="How many of the newest intact checkpoints to keep.")] = 1,
    config: NodeFile = None,
    data_dir: DataDir = None,
    run: Run = None,
) -> None:
    """Remove old checkpoints of a stopped node.

    A running node does this by itself. The newest checkpoint that the node's log certifies is always kept.
    """
    from p2ptrain.node.saved import to_keep

    checkpoints = _open(config, data_dir, run)
    with Lock.of_directory(checkpoints.directory.parent):
        kept, others = to_keep(checkpoints, keep)
        for each in reversed(others):
            checkpoints.remove(each.checkpoint)
            typer.echo(f"removed {_line(each.checkpoint)}")
        for each in reversed(kept):
            typer.echo(f"kept    {_line(each.checkpoint)}  {each.judgement}")


@app.command()
def now(config: NodeFile = None, data_dir: DataDir = None) -> None:
    """Save the state now, after the current training.

    The local daemon does it; see `checkpoint list`.
    """
    saved = ask(data_dir_of(data_dir, config), {"do": "checkpoint"})
    typer.echo(f"saved the state after round {saved['round']}")
