"""The commands: they parse arguments, call one thing and print what it returns.

What takes long to import (pydantic, numpy, torch, rich) is imported in the commands that use it, so that
`p2ptrain --help` answers at once. Errors are one paragraph on stderr, which names the key or the file and says what to
do; exit statuses are in exits.py. Typer itself sees to Ctrl-C and to a reader that goes away.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from p2ptrain import __version__
from p2ptrain.cli import checkpoint, control, model, node, simulation
from p2ptrain.cli.audit import audit
from p2ptrain.cli.doctor import doctor
from p2ptrain.cli.exits import ExitStatus
from p2ptrain.cli.invite import invite
from p2ptrain.cli.report import report
from p2ptrain.cli.top import top as watch
from p2ptrain.errors import (
    ConfigError,
    HardwareError,
    NoDaemonError,
    P2ptrainError,
    TooLargeError,
    UnusableError,
)
from p2ptrain.visible import visible

if TYPE_CHECKING:
    from fractions import Fraction

    from p2ptrain.config import RunConfig

# Help is plain text: rich's would take half of the time that --help may take.
app = typer.Typer(
    add_completion=False, rich_markup_mode=None, invoke_without_command=True, pretty_exceptions_enable=False
)
config_app = typer.Typer(rich_markup_mode=None, invoke_without_command=True)
data_app = typer.Typer(rich_markup_mode=None, invoke_without_command=True)
app.add_typer(config_app, name="config", help="Check and show configurations.")
app.add_typer(data_app, name="data", help="Make training data.")
app.add_typer(checkpoint.app, name="checkpoint", help="What this node has saved.")
app.add_typer(node.identity_app, name="identity", help="This node's key, by which others know it.")
checkpoint.app.command("now")(control.checkpoint_now)
for command in (
    node.start,
    node.join,
    node.leave,
    control.pause,
    control.resume,
    control.limit,
    node.status,
    node.peers,
    watch,
    node.runs,
    invite,
    doctor,
    node.demo,
    model.export,
    model.generate,
    audit,
    report,
    simulation.simulate,
    simulation.replay,
):
    app.command()(command)


STATUSES: dict[type[P2ptrainError], ExitStatus] = {
    ConfigError: ExitStatus.USER_ERRED,
    NoDaemonError: ExitStatus.NO_DAEMON,
    HardwareError: ExitStatus.HARDWARE,
    UnusableError: ExitStatus.OWNER_NEEDED,
    TooLargeError: ExitStatus.OWNER_NEEDED,
}


def main() -> int:
    """Run the command line; the exit status."""
    try:
        return app(prog_name="p2ptrain", standalone_mode=False) or 0
    except P2ptrainError as error:
        status = next((status for kind, status in STATUSES.items() if isinstance(error, kind)), ExitStatus.FAILED)
        return _complain(str(error), status)
    except typer.TyperException as error:  # an option or a command that is not there, an argument missing
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "p2ptrain"
        return _complain(f"{error.format_message()}\nTry: {command} --help", ExitStatus.USER_ERRED)


def _complain(text: str, status: int) -> int:
    typer.echo(visible(text, keep="\n"), err=True)  # it may quote a file or a peer
    return status


@app.callback()
def top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Train one model together over the internet: no coordinator, bit-identical replicas, nobody trusted."""
    if version:
        typer.echo(f"p2ptrain {__version__}")
        raise typer.Exit
    _help_without_command(context)


@config_app.callback()
@data_app.callback()
@checkpoint.app.callback()
def _help_without_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


# ---------------------------------------------------------------------------------------------------
# p2ptrain config


ConfigFile = Annotated[Path, typer.Argument(help="A run's file or a node's; it is recognised by its keys.")]


@config_app.command()
def check(file: ConfigFile) -> None:
    """Say whether FILE is right, and if not, what to change."""
    from p2ptrain.config import RunConfig, load_config

    config = load_config(file)
    if not isinstance(config, RunConfig):
        typer.echo(f"{file}: OK, the settings of a node")
        return
    from p2ptrain.learn.model import parameter_count

    typer.echo(f"{file}: OK, a run")
    typer.echo(f"model    {parameter_count(config.model):,} parameters")
    typer.echo(f"payload  {_payload_bytes(config):,} bytes a contribution")
    typer.echo(f"run id   {config.run_id if config.is_sealed else 'none before it is started with its data'}")


def _payload_bytes(run: RunConfig) -> int:
    import torch

    from p2ptrain.learn.codec import PayloadFormat
    from p2ptrain.learn.model import Transformer
    from p2ptrain.learn.transform import Layout

    with torch.device("meta"):  # shapes alone, whatever the size
        shapes = [tuple(parameter.shape) for parameter in Transformer(run.model).parameters()]
    return PayloadFormat.of(Layout(shapes, run.recipe.chunk), run.recipe).payload_bytes


@config_app.command()
def schema(kind: Annotated[Literal["run", "node"], typer.Argument(help="Which configuration.")] = "run") -> None:
    """Print the JSON schema of a configuration, with every key's meaning."""
    import json

    from p2ptrain.config import NodeConfig, RunConfig

    typer.echo(json.dumps((RunConfig if kind == "run" else NodeConfig).model_json_schema(), indent=2))


@config_app.command()
def show(
    file: ConfigFile,
    canonical: Annotated[bool, typer.Option("--canonical", help="The bytes of a run that its id is made of.")] = False,
) -> None:
    """Print all values of FILE, with the defaults filled in and what each key means."""
    from p2ptrain.config import RunConfig, load_config, load_run_config
    from p2ptrain.config.text import to_toml

    config = load_run_config(file) if canonical else load_config(file)
    if canonical and isinstance(config, RunConfig):
        sys.stdout.buffer.write(config.canonical())
        return
    typer.echo(to_toml(config), nl=False)


# ---------------------------------------------------------------------------------------------------
# p2ptrain data


def _percent(text: str) -> Fraction:
    from p2ptrain.config.fields import parse_rational

    try:
        share = parse_rational(text) / 100
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--held-out") from error
    if not 0 <= share < 1:
        raise typer.BadParameter(f"{text} is not valid, choose 0 to below 100", param_hint="--held-out")
    return share


@data_app.command()
def prepare(
    out: Annotated[Path, typer.Argument(help="Directory to make; it must not hold anything else.")],
    files: Annotated[list[Path] | None, typer.Argument(help="Text files, or JSON lines with a text in each.")] = None,
    embedded: Annotated[bool, typer.Option("--embedded", help="Use the text that every Python carries, too.")] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json of the tokenizers library; without one, bytes.")
    ] = None,
    held_out: Annotated[
        str, typer.Option(metavar="PERCENT", help="Share of the documents that is never trained on.")
    ] = "1",
) -> None:
    """Turn text into a data set: tokens in pieces, and the manifest that names them."""
    share = _percent(held_out)
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from p2ptrain.learn.prepare import prepare as make
    from p2ptrain.learn.tokenizer import load_tokenizer

    chosen = load_tokenizer(tokenizer)
    terminal = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as bar:
        task = bar.add_task("reading", total=None)
        prepared = make(
            out,
            files or [],
            embedded=embedded,
            tokenizer=chosen,
            held_out=share,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    typer.echo(f"# {prepared.tokens:,} tokens to train on, {prepared.held_out_tokens:,} held out: {prepared.path}")
    typer.echo(f'[data]\nmanifest = "{prepared.digest}"\n\n[tokenizer]\nkind = "{chosen.kind}"')
    if chosen.digest:
        typer.echo(f'digest = "{chosen.digest}"\n\n[model]\nvocab_size = {chosen.vocab_size}')
