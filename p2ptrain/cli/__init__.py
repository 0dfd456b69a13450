"""The command line. Each command parses its arguments, calls one function and prints the result.

Slow imports (pydantic, numpy, torch, rich) happen inside the commands that need them, so `p2ptrain --help` answers at
once. An error is one paragraph on stderr that names the key or file and says how to fix it; exit statuses are in
`exits`. Typer handles Ctrl-C and closed pipes.

`node` has the commands around a node (start, join, leave, status, demo), `control` those that change a running one,
`invite`, `checkpoint`, `audit`, `doctor`, `report` and `top` one command each, `model` export, generate and evaluate,
`simulation` simulate and replay; `preparing` is what `data prepare` shows.
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

# Help is plain text: importing rich would take half of the time budget of --help.
app = typer.Typer(
    add_completion=False, rich_markup_mode=None, invoke_without_command=True, pretty_exceptions_enable=False
)
config_app = typer.Typer(rich_markup_mode=None, invoke_without_command=True)
data_app = typer.Typer(rich_markup_mode=None, invoke_without_command=True)
app.add_typer(config_app, name="config", help="Check and show configurations.")
app.add_typer(data_app, name="data", help="Make training data.")
app.add_typer(checkpoint.app, name="checkpoint", help="List, check and copy this node's checkpoints.")
app.add_typer(node.identity_app, name="identity", help="Show or create this node's key.")
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
    model.evaluate,
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
    """Runs the command line and returns the exit status."""
    try:
        return app(prog_name="p2ptrain", standalone_mode=False) or 0
    except P2ptrainError as error:
        status = next((status for kind, status in STATUSES.items() if isinstance(error, kind)), ExitStatus.FAILED)
        return _complain(str(error), status)
    except typer.TyperException as error:  # an unknown command or option, or a missing argument
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "p2ptrain"
        return _complain(f"{error.format_message()}\nTry: {command} --help", ExitStatus.USER_ERRED)


def _complain(text: str, status: int) -> int:
    typer.echo(visible(text, keep="\n"), err=True)  # the text may quote a file or a peer
    return status


@app.callback()
def top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Train one model together over the internet.

    There is no coordinator, no peer has to be trusted, and all replicas are bit-identical.
    """
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


ConfigFile = Annotated[Path, typer.Argument(help="A run's or a node's config; its keys tell which it is.")]


@config_app.command()
def check(file: ConfigFile) -> None:
    """Check FILE, and say what to fix if it is wrong."""
    from p2ptrain.config import RunConfig, load_config

    config = load_config(file)
    if not isinstance(config, RunConfig):
        typer.echo(f"{file}: OK, a node's settings")
        return
    from p2ptrain.cli.node import node_config
    from p2ptrain.models.kinds import parameter_count

    node_config(None)  # the owner's settings may allow the run's plug-ins
    parameters, payload = parameter_count(config.model, config.adapt), _payload_bytes(config)
    typer.echo(f"{file}: OK, a run")
    typer.echo(f"model    {parameters:,} parameters")
    typer.echo(f"payload  {payload:,} bytes a contribution")
    typer.echo(f"run id   {config.run_id if config.is_sealed else 'none until the run is started with its data'}")


def _payload_bytes(run: RunConfig) -> int:
    from p2ptrain.exact.outer import Outer
    from p2ptrain.models.kinds import shapes_of

    return Outer.of(run, shapes_of(run.model, run.adapt)).payload_bytes


@config_app.command()
def example(
    name: Annotated[str | None, typer.Argument(help="Which one; without it, they are listed.")] = None,
) -> None:
    """Print a file to begin with.

    p2ptrain config example tiny > tiny.toml; p2ptrain start tiny.toml
    """
    from p2ptrain.errors import ConfigError

    here = Path(__file__).parents[1]
    folder = here / "examples" if (here / "examples").is_dir() else here.parent / "examples"  # installed; in a checkout
    found = {path.stem: path.read_text() for path in sorted(folder.rglob("*.toml")) if path.stem != "pyproject"}
    if (settings := here.parent / "node_config.example.toml").is_file():  # where an installed package has it
        found["node"] = settings.read_text()
    if name is None:
        width = max(map(len, found))
        for each, text in found.items():
            typer.echo(f"{each:<{width}}  {text.removeprefix('# ').partition(':')[0]}")
    elif name in found:
        typer.echo(found[name], nl=False)
    else:
        raise ConfigError(f"there is no example {name!r}", key="NAME", fix=f"Take one of {', '.join(found)}")


@config_app.command()
def schema(kind: Annotated[Literal["run", "node"], typer.Argument(help="Which configuration.")] = "run") -> None:
    """Print a configuration's JSON schema."""
    import json

    from p2ptrain.config import NodeConfig, RunConfig

    typer.echo(json.dumps((RunConfig if kind == "run" else NodeConfig).model_json_schema(), indent=2))


@config_app.command()
def show(
    file: ConfigFile,
    canonical: Annotated[
        bool, typer.Option("--canonical", help="Print the exact bytes whose hash is the run's id.")
    ] = False,
) -> None:
    """Print FILE with all defaults and explanations."""
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
        raise typer.BadParameter(
            f"{text} is out of range: choose at least 0 and less than 100", param_hint="--held-out"
        )
    return share


@data_app.command()
def prepare(  # noqa: PLR0913, PLR0917  # a command has many options
    out: Annotated[Path, typer.Argument(help="Directory to create; it must be empty if it exists.")],
    files: Annotated[
        list[Path] | None, typer.Argument(help="Directories, text, JSON lines, Parquet, Arrow, .npy or .bin.")
    ] = None,
    embedded: Annotated[bool, typer.Option("--embedded", help="Also use the texts that ship with Python.")] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json, or a model's directory; by default, tokens are bytes.")
    ] = None,
    held_out: Annotated[
        str, typer.Option(metavar="PERCENT", help="Share of documents to keep for validation, never trained on.")
    ] = "1",
    column: Annotated[
        str, typer.Option(metavar="NAME", help='The key or column to read; by default "text", with --chat "messages".')
    ] = "",
    chat: Annotated[
        bool, typer.Option("--chat", help="The files hold chats; train only on the assistant's turns.")
    ] = False,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Jinja template that turns a chat into text; by default, the tokenizer's own."
        ),
    ] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Name what is broken, and leave it out.")] = False,
    processes: Annotated[
        int, typer.Option(min=0, max=1_024, help="Processes that tokenize; 0: one for each core.")
    ] = 0,
) -> None:
    """Turn text into a data set for training.

    The data set consists of pieces of tokens and a manifest of their digests. Text and JSON
    lines may end with .gz or .zst, too. If this is interrupted, the same command goes on where it was.
    """
    share = _percent(held_out)
    from p2ptrain.capacity import cores
    from p2ptrain.cli.preparing import Preparing
    from p2ptrain.data.chats import load_template
    from p2ptrain.data.corpus import Reading
    from p2ptrain.data.prepare import prepare as make
    from p2ptrain.data.tokenizer import load_tokenizer

    chosen = load_tokenizer(tokenizer)
    if chat_template is not None and not chat:
        raise ConfigError("a template is for chats", key="--chat-template", fix="Add --chat, or leave it out")
    template = load_template(chat_template, tokenizer, chosen.added) if chat else None
    column = column or ("messages" if chat else "text")
    with Preparing() as shown:
        prepared = make(
            out,
            files or [],
            embedded=embedded,
            how=Reading(column, chosen, shown.skip if skip_bad else None, template),
            held_out=share,
            progress=shown.progress,
            processes=processes or cores(),
        )
    if prepared.chats_cut:
        what = f"{prepared.chats_cut:,} chats contain the token that ends a document"
        typer.echo(f'{what}: leave data.documents = "together", or their turns would not see each other', err=True)
    typer.echo(f"# {prepared.tokens:,} tokens to train on, {prepared.held_out_tokens:,} held out: {prepared.path}")
    typer.echo(f'[data]\nmanifest = "{prepared.digest}"\n\n[tokenizer]\nkind = "{chosen.kind}"')
    if chosen.digest:
        typer.echo(f'digest = "{chosen.digest}"\n\n[model]\nvocab_size = {chosen.vocab_size}')
