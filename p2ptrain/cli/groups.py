"""The commands' names and the first lines of their help, without importing their modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

# Where each command is, within this package, and the first line of its help.
COMMANDS = {
    "start": ("node:start", "Start the run in RUN.toml as its first node."),
    "join": ("node:join", "Join a run that other nodes are training."),
    "lend": ("node:lend", "Lend this machine's devices to a node of yours."),
    "leave": ("node:leave", "Leave the run properly, and stop the local daemon."),
    "pause": ("control:pause", "Pause training until `resume` or a restart."),
    "resume": ("control:resume", "Resume training after `pause`."),
    "limit": ("control:limit", "Show or change what the local daemon may use."),
    "status": ("node:status", "Show the status of the local daemon."),
    "swarm": ("node:swarm", "Show all members, and what to look at first."),
    "peers": ("node:peers", "List the peers connected to the local daemon."),
    "agenda": ("control:agenda", "Show what members move about the run's future."),
    "propose": ("control:propose", "Move that the run go on with other settings."),
    "assent": ("control:assent", "Assent to a motion that `agenda` shows."),
    "runs": ("node:runs", "List the runs of the nodes at these addresses."),
    "invite": ("invite:invite", "Create an invitation to this node's run."),
    "doctor": ("doctor:doctor", "Check whether a node can work on this machine."),
    "demo": ("node:demo", "Run a small swarm on this machine."),
    "export": ("model:export", "Export the model for Hugging Face transformers."),
    "generate": ("model:generate", "Continue TEXT with the trained model."),
    "evaluate": ("model:evaluate", "Measure the model's held-out loss."),
    "audit": ("audit:audit", "Verify the history of a run in DIR, offline."),
    "receipt": ("audit:receipt", "Prove what a key has contributed, in a file."),
    "report": ("report:report", "Write an HTML page about a run of this node."),
    "simulate": ("simulation:simulate", "Simulate a swarm in virtual time."),
    "replay": ("simulation:replay", "Replay a node's events, and compare the effects."),
    "config": ("config:app", "Check and show configurations."),
    "data": ("data:app", "Make training data."),
    "checkpoint": ("checkpoint:app", "List, copy and save this node's checkpoints."),
    "identity": ("node:identity_app", "Show or create this node's key."),
}


class Imported(Mapping[str, Any]):
    """The commands, each imported when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        module, _, attribute = COMMANDS[name][0].partition(":")
        found = getattr(import_module(f"p2ptrain.cli.{module}"), attribute)
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(add_completion=False, rich_markup_mode=None)
            alone.command(name)(found)
            found = alone
        return typer.main.get_command(found)

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class Commands(TyperGroup):
    """Lists its commands without importing them."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.commands = Imported()  # type: ignore[assignment]  # a group only reads them

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


def group(text: str) -> typer.Typer:
    """Returns a group of commands within a module, with its help text."""
    made = typer.Typer(add_completion=False, rich_markup_mode=None, invoke_without_command=True, help=text)
    made.callback()(help_without_command)
    return made


def help_without_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
