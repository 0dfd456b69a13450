"""The commands of a node: start a run, join, watch and leave it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from p2ptrain.cli.exits import ExitStatus
from p2ptrain.cli.groups import group
from p2ptrain.config import NodeConfig, load_node_config, load_run_config, read_table, with_options
from p2ptrain.daemon.order import JoinOrder, StartOrder
from p2ptrain.errors import ConfigError
from p2ptrain.identity import Identity
from p2ptrain.models.plugins import allow
from p2ptrain.node.control import ask
from p2ptrain.node.home import Home

identity_app = group("Show or create this node's key.")

DataDir = Annotated[
    Path | None, typer.Option("--data-dir", metavar="DIR", help="This node's data; each daemon needs its own.")
]
NodeFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="NODE.toml", help="This node's settings; `config example node` prints all."),
]
Bootstrap = Annotated[
    list[str] | None,
    typer.Option(
        "--bootstrap",
        metavar="ADDR",
        help="A node to connect to first, such as /ip4/203.0.113.7/tcp/4001/p2p/12D3KooW...",
    ),
]
Listen = Annotated[
    list[str] | None,
    typer.Option(
        "--listen", metavar="ADDR", help="Address to listen on, instead of the config's, such as /ip4/0.0.0.0/tcp/0."
    ),
]
Level = Annotated[
    Literal["debug", "info", "warning", "error"] | None, typer.Option(help="The lowest level that is logged.")
]
Format = Annotated[
    Literal["auto", "text", "json"] | None,
    typer.Option(help="auto means text on a terminal, and JSON lines elsewhere."),
]
Run = Annotated[str | None, typer.Option("--run", metavar="ID", help="The run, if there are several.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def node_config(
    file: Path | None,
    data_dir: Path | None = None,
    bootstrap: list[str] | None = None,
    listen: list[str] | None = None,
    level: str | None = None,
    form: str | None = None,
) -> NodeConfig:
    """Loads the node's settings. Options override the environment, which overrides the file.

    It also lets this process use the plug-ins that the settings allow.
    """
    options = {
        ("storage", "directory"): str(data_dir) if data_dir else None,
        ("network", "bootstrap"): bootstrap or None,
        ("network", "listen"): listen or None,
        ("logging", "level"): level,
        ("logging", "format"): form,
    }
    given: dict[tuple[str, str], object] = {name: value for name, value in options.items() if value is not None}
    config = with_options(load_node_config(file), given)
    allow(config.plugins.allow)
    return config


def data_dir_of(data_dir: Path | None, file: Path | None = None) -> Path:
    return Home(node_config(file, data_dir)).directory


# ---------------------------------------------------------------------------------------------------
# Taking part


def start(  # noqa: PLR0913, PLR0917  # a command has many options
    run: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run's config; `config example` prints some.")],
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", metavar="DIR", help="The data set, if the run names one, or your own; see `data prepare`."
        ),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option("--weights", metavar="DIR|FILE", help="First weights: a Hugging Face model, safetensors or GGUF."),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="DIR", help="First weights: a checkpoint or an export of another run."),
    ] = None,
    config: NodeFile = None,
    data_dir: DataDir = None,
    listen: Listen = None,
    log_level: Level = None,
    log_format: Format = None,
) -> None:
    """Start the run in RUN.toml as its first node.

    If this node has already started the run, it continues.
    """
    node = node_config(config, data_dir, None, listen, log_level, log_format)
    said = read_table(run)
    if weights is not None and source is not None:
        raise ConfigError("the first weights come from one place", key="--weights", fix="Leave it or --from out")
    if (place := weights or source) is None:
        what, given = load_run_config(run), None
    else:
        from p2ptrain.node.saved import open_weights

        given, beside = open_weights(Home(node), place)
        what = load_run_config(run, beside)
    from p2ptrain.daemon.launch import take_part  # last, so that errors need not wait two seconds for torch

    take_part(StartOrder(config=node, data=data, run=what, said=said, given=given))


def join(  # noqa: PLR0913, PLR0917  # a command has many options
    bootstrap: Bootstrap = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="ID", help="The run: all of its id, or how it begins.")
    ] = None,
    invitation: Annotated[
        str | None, typer.Option("--invitation", metavar="TEXT|FILE", help="An invitation, if the run requires one.")
    ] = None,
    trust: Annotated[
        str | None,
        typer.Option("--trust", metavar="HEAD", help="Join only a history with this head; `status --json` shows one."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="DIR", help="Your own data, if the run asks for it; see `data prepare`."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask first whether to take part.")] = False,
    config: NodeFile = None,
    data_dir: DataDir = None,
    listen: Listen = None,
    log_level: Level = None,
    log_format: Format = None,
) -> None:
    """Join a run that other nodes are training.

    Its settings, data and weights are fetched from those nodes and verified. The first time it shows on a terminal
    what the run asks of this machine, and asks whether to take part.
    """
    node = node_config(config, data_dir, bootstrap, listen, log_level, log_format)
    from p2ptrain.daemon.launch import take_part  # last, so that errors need not wait two seconds for torch

    take_part(JoinOrder(config=node, data=data, wanted=run, invitation=invitation, trust=trust, asks=not yes))


def leave(config: NodeFile = None, data_dir: DataDir = None) -> None:
    """Leave the run properly, and stop the local daemon.

    In an invitation-only run this gives up the admission, which Ctrl-C does not.
    """
    ask(data_dir_of(data_dir, config), {"do": "leave"})
    typer.echo("leaving: the daemon tells the others, saves its state and ends")


# ---------------------------------------------------------------------------------------------------
# Watching


def status(as_json: AsJson = False, config: NodeFile = None, data_dir: DataDir = None) -> None:
    """Show the status of the local daemon.

    The exit status is 3 if no daemon answers.
    """
    found = ask(data_dir_of(data_dir, config), {"do": "status"})
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    from p2ptrain.observe.progress import lines_of

    typer.echo(lines_of(found))


def peers(as_json: AsJson = False, config: NodeFile = None, data_dir: DataDir = None) -> None:
    """List the peers connected to the local daemon.

    The columns: its id and seat; how soon it answers; tokens/s, and how long after the beginning of a round its
    contributions come, both moving averages; rounds of delay of the last one taken; its address. Whoever is banned or
    kept away follows, with the reason.
    """
    found = ask(data_dir_of(data_dir, config), {"do": "peers"})
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    from p2ptrain.observe.progress import peer_lines

    typer.echo(peer_lines(found["peers"]))


def runs(bootstrap: Bootstrap = None, as_json: AsJson = False, config: NodeFile = None) -> None:
    """List the runs of the nodes at these addresses."""
    node = node_config(config, None, bootstrap)
    if not node.network.bootstrap:
        fix = "Give a node's address: --bootstrap ADDR, or network.bootstrap in the config file"
        raise ConfigError("no address to ask", key="--bootstrap", fix=fix)
    from p2ptrain.daemon.launch import list_runs

    found = list_runs(node)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for each in found:
        typer.echo(f"{each['run_id']}  {each['name']}  round {each['round']}  {each['members']} members")


# ---------------------------------------------------------------------------------------------------
# p2ptrain identity


def _identity_file(config: Path | None, data_dir: Path | None) -> Path:
    return Home(node_config(config, data_dir)).identity_file


@identity_app.command("show")
def show_identity(config: NodeFile = None, data_dir: DataDir = None) -> None:
    """Print this node's id and public key."""
    identity = Identity.load(_identity_file(config, data_dir))
    typer.echo(f"peer id     {identity.peer_id}\npublic key  {identity.key.hex()}")


@identity_app.command("new")
def new_identity(config: NodeFile = None, data_dir: DataDir = None) -> None:
    """Create a key, if there is none.

    A node creates its own key when it is first started.
    """
    path = _identity_file(config, data_dir)
    typer.echo(f"{Identity.make(path).peer_id}\n{path}")


@identity_app.command("path")
def identity_path(config: NodeFile = None, data_dir: DataDir = None) -> None:
    """Print the path of this node's key."""
    typer.echo(_identity_file(config, data_dir))


# ---------------------------------------------------------------------------------------------------
# p2ptrain demo


def demo(
    nodes: Annotated[int, typer.Option(min=1, max=16, help="Number of daemons, each with its own p2pd.")] = 3,
    rounds: Annotated[int, typer.Option(min=4, help="Stop when the slowest node has applied this many.")] = 200,
    keep: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep all data and logs in this directory.")] = None,
) -> None:
    """Run a small swarm on this machine.

    Real daemons train a small model. One is killed and comes back, and in the end all replicas are compared.
    """
    from p2ptrain.demo import run_demo

    if not run_demo(nodes, rounds, keep):
        raise typer.Exit(ExitStatus.FAILED)
