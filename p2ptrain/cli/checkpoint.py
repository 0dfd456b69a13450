"""`p2ptrain checkpoint`: the local node's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from p2ptrain.cli.groups import group
from p2ptrain.cli.node import DataDir, NodeFile, Run, data_dir_of, node_config
from p2ptrain.config import NodeConfig, RunConfig
from p2ptrain.errors import DataError
from p2ptrain.node.control import ask
from p2ptrain.node.home import Home
from p2ptrain.store.checkpoints import Checkpoint, Checkpoints
from p2ptrain.store.store import CHECKPOINTS_NAME

app = group("List, copy and save this node's checkpoints.")


def _checkpoints(node: NodeConfig, run: RunConfig) -> Checkpoints:
    run_id = run.id
    return Checkpoints(Home(node).of_run(run_id) / CHECKPOINTS_NAME, run_id)


def _line(checkpoint: Checkpoint) -> str:
    size = checkpoint.stamp.trainer.bytes + checkpoint.stamp.state.bytes
    return f"round {checkpoint.round:>8}  root {checkpoint.root.hex()[:16]}  {size:>15,} bytes  {checkpoint.path}"


@app.command("list")
def list_checkpoints(config: NodeFile = None, data_dir: DataDir = None, run: Run = None) -> None:
    """List this node's checkpoints, the newest last."""
    node = node_config(config, data_dir)
    for each in _checkpoints(node, Home(node).run(run)).found():
        typer.echo(f"DAMAGED {each}" if isinstance(each, DataError) else _line(each))


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
def now(config: NodeFile = None, data_dir: DataDir = None) -> None:
    """Save the state now, after the current training.

    The local daemon does it; see `checkpoint list`.
    """
    saved = ask(data_dir_of(data_dir, config), {"do": "checkpoint"})
    typer.echo(f"saved the state after round {saved['round']}")
