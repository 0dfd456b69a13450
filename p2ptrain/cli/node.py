"""The commands of a node: start a run, join, watch and leave it."""

from __future__ import annotations

import json
import os
import stat
import sys
import tomllib
from collections.abc import Callable
from decimal import Decimal
from getpass import getpass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from p2ptrain.cli.exits import ExitStatus
from p2ptrain.cli.groups import group
from p2ptrain.config import load_node_config, load_run_config, read_table, with_options
from p2ptrain.config.load import renewed
from p2ptrain.daemon.order import JoinOrder, StartOrder
from p2ptrain.errors import ConfigError, DataError
from p2ptrain.files import replace_file
from p2ptrain.identity import Identity
from p2ptrain.models.plugins import allow
from p2ptrain.node.control import ask
from p2ptrain.node.home import Home

DIGITS_MAX = 40  # of a number on the command line: a longer one is none of a run's
BACKUPS_NAME = "backups"  # in the node's directory: those fetched from an object store
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
Nnodes = Annotated[int | None, typer.Option("--nnodes", metavar="N", help="Your machines that train; see `lend`.")]
Rendezvous = Annotated[
    str | None, typer.Option("--rendezvous", metavar="ADDR", help="Where they meet: /ip4/192.168.1.10/tcp/4100, say.")
]
Run = Annotated[str | None, typer.Option("--run", metavar="ID", help="The run, if there are several.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def put_out(path: Path, content: bytes) -> None:
    """Writes a file that may be shared, in place of an earlier one; ConfigError for a device or a link."""
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise ConfigError("not a file", source=str(path), key="--out", fix="Name a file, which is replaced")
    replace_file(path, content, mode=0o644)


def home_of(
    file: Path | None,
    data_dir: Path | None = None,
    bootstrap: list[str] | None = None,
    listen: list[str] | None = None,
    level: str | None = None,
    form: str | None = None,
    rendezvous: str | None = None,
    nnodes: int | None = None,
) -> Home:
    """Loads the node's settings, which name its directory. Options override the environment, which overrides the file.

    It also lets this process use the plug-ins that the settings allow."""
    options = {
        ("storage", "directory"): str(data_dir) if data_dir else None,
        ("network", "bootstrap"): bootstrap or None,
        ("network", "listen"): listen or None,
        ("logging", "level"): level,
        ("logging", "format"): form,
        ("device", "rendezvous"): rendezvous,  # before the number of machines, which needs it
        ("device", "nnodes"): nnodes,
    }
    given: dict[tuple[str, str], object] = {name: value for name, value in options.items() if value is not None}
    config = with_options(load_node_config(file), given)
    allow(config.plugins.allow)
    return Home(config)


def show(found: Any, as_json: bool, lines: Callable[[Any], str]) -> None:
    """Prints what a daemon has answered: as it is, or in lines for a person."""
    typer.echo(json.dumps(found, indent=2) if as_json else lines(found))


# -- Taking part ------------------------------------------------------------------------------------


def start(  # noqa: PLR0913, PLR0917  # a command has many options
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN.toml", help="The run's config; `config example` prints some.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", metavar="DIR", help="The data set, if the run names one, or your own; see `data prepare`."
        ),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option("--weights", metavar="DIR|FILE", help="First weights: a Hugging Face model, or safetensors."),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="DIR|URL", help="First weights: another run's checkpoint, export or backup."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting other than the backup's, such as recipe.k=32."),
    ] = None,
    config: NodeFile = None,
    data_dir: DataDir = None,
    listen: Listen = None,
    nnodes: Nnodes = None,
    rendezvous: Rendezvous = None,
    log_level: Level = None,
    log_format: Format = None,
) -> None:
    """Start the run in RUN.toml as its first node.

    If this node has already started the run, it continues. Without RUN.toml, a backup's run begins anew: with its
    config and all of its state, and this node as the first."""
    home, given = home_of(config, data_dir, None, listen, log_level, log_format, rendezvous, nnodes), None
    said = {} if run is None else read_table(run)
    if weights is not None and source is not None:
        raise ConfigError("the first weights come from one place", key="--weights", fix="Leave it or --from out")
    if run is not None and settings:
        raise ConfigError("RUN.toml has the settings", key="--set", fix="Write it there")
    backup = None if source is None else _verified(source, home)
    place = weights or backup or (Path(source) if source else None)
    if run is None:
        if backup is None:
            fix = "Name a run's file, or a backup with --from"
            if source:
                raise ConfigError(f"no backup is in {source}", key="--from", fix=fix)
            raise ConfigError("no run is named", key="RUN.toml", fix=fix)
        from p2ptrain.node.saved import open_state

        before, given = open_state(home, backup)
        changes = dict(map(setting, settings or ()))
        what, said = renewed(before, changes), {"backup": backup.name, "run": before.run_id, "set": changes}
    elif place is None:
        what = load_run_config(run)
    else:
        from p2ptrain.node.saved import open_weights

        given, beside = open_weights(home, place)
        what = load_run_config(run, beside)
    from p2ptrain.daemon.launch import take_part  # last, so that errors need not wait two seconds for torch

    take_part(StartOrder(config=home.config, data=data, run=what, said=said, given=given))


def _verified(source: str, home: Home) -> Path | None:
    """Returns the folder of a backup, and shows what could be verified of it; None if `source` is another thing."""
    from p2ptrain.store.backup import find_backup

    if (folder := find_backup(source, home.directory / BACKUPS_NAME)) is None:
        return None
    from p2ptrain.audit.findings import Grade
    from p2ptrain.audit.run import audit

    report = audit(folder)
    unproved = [each for each in report.findings if each.verdict is Grade.OPEN]
    if any(each.subject == "roster" for each in unproved):
        unproved = []  # its beginning is kept nowhere any more, which the report says
    for found in (*(each for each in report.findings if each.verdict is Grade.WRONG), *unproved):
        raise DataError(f"{found.subject}: {found.what}", fix="Name another backup with --from")
    typer.echo("\n".join(report.lines()), err=True)
    return folder


def setting(text: str) -> tuple[str, object]:
    """Reads KEY=VALUE; the value as in a run file, but texts need no quotes."""
    key, equals, written = (part.strip() for part in text.partition("="))
    if not key or not equals:
        fix = "Write KEY=VALUE, such as recipe.inner_learning_rate=0.005"
        raise ConfigError(f"{text!r} is no setting", key="--set", fix=fix)
    try:
        value = tomllib.loads(f"value = {written}", parse_float=Decimal)["value"]
    except (tomllib.TOMLDecodeError, ValueError, ArithmeticError, RecursionError):
        return key, written
    if isinstance(value, Decimal) and value.is_finite() and abs(value.adjusted()) < DIGITS_MAX:
        return key, f"{value:f}"
    is_list = isinstance(value, list) and all(isinstance(each, int | str) for each in value)
    return key, value if is_list or isinstance(value, bool | int | str) else written


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
    nnodes: Nnodes = None,
    rendezvous: Rendezvous = None,
    log_level: Level = None,
    log_format: Format = None,
) -> None:
    """Join a run that other nodes are training.

    Its settings, data and weights are fetched from those nodes and verified. The first time it shows on a terminal
    what the run asks of this machine, and asks whether to take part."""
    home = home_of(config, data_dir, bootstrap, listen, log_level, log_format, rendezvous, nnodes)
    home.check_whom_to_ask(home.current(run))
    from p2ptrain.daemon.launch import take_part  # last, so that errors need not wait two seconds for torch

    take_part(JoinOrder(config=home.config, data=data, wanted=run, invitation=invitation, trust=trust, asks=not yes))


def lend(
    rendezvous: Annotated[str, typer.Argument(metavar="ADDR", help="The --rendezvous of that node.")],
    config: NodeFile = None,
    log_level: Level = None,
) -> None:
    """Lend this machine's devices to a node of yours.

    The node, on another machine of your network, was started with --nnodes and says in its log where its token is: that
    is asked for here, or read from standard input. What is sent between these machines is not encrypted."""
    node = home_of(config, level=log_level, rendezvous=rendezvous).config
    token = (getpass("token: ") if sys.stdin.isatty() else sys.stdin.readline()).strip()
    from p2ptrain.observe.logs import set_up
    from p2ptrain.ranks.machines import lend_devices

    set_up(node.logging)
    lend_devices(node, token.encode())


def leave(config: NodeFile = None, data_dir: DataDir = None) -> None:
    """Leave the run properly, and stop the local daemon.

    In an invitation-only run this gives up the admission, which Ctrl-C does not."""
    ask(home_of(config, data_dir).directory, {"do": "leave"})
    typer.echo("leaving: the daemon tells the others, saves its state and ends")


# -- Watching ---------------------------------------------------------------------------------------


def status(as_json: AsJson = False, config: NodeFile = None, data_dir: DataDir = None) -> None:
    """Show the status of the local daemon.

    The exit status is 3 if no daemon answers."""
    from p2ptrain.observe.progress import lines_of

    show(ask(home_of(config, data_dir).directory, {"do": "status"}), as_json, lines_of)


def swarm(
    everyone: Annotated[bool, typer.Option("--all", help="Show all nodes, not just the first 20.")] = False,
    as_json: AsJson = False,
    config: NodeFile = None,
    data_dir: DataDir = None,
) -> None:
    """Show all members, and what to look at first.

    The columns, as the local daemon sees each node: the end of its id; its seat; when it was last heard; tokens/s; how
    soon it answers; the last rounds that took a contribution of it; their rounds of delay; why to look at it."""
    from p2ptrain.observe.progress import swarm_lines

    found = ask(home_of(config, data_dir).directory, {"do": "peers"})
    show(found, as_json, lambda found: swarm_lines(found, everyone))


def peers(as_json: AsJson = False, config: NodeFile = None, data_dir: DataDir = None) -> None:
    """List the peers connected to the local daemon.

    The columns: its id and seat; how soon it answers; tokens/s, and how long after the beginning of a round its
    contributions come, both moving averages; rounds of delay of the last one taken; its address. Whoever is banned,
    does not count, may not audit or is kept away follows, with the reason."""
    from p2ptrain.observe.progress import peer_lines

    found = ask(home_of(config, data_dir).directory, {"do": "peers"})
    show(found, as_json, lambda found: peer_lines(found["peers"]))


def runs(bootstrap: Bootstrap = None, as_json: AsJson = False, config: NodeFile = None) -> None:
    """List the runs of the nodes at these addresses."""
    home = home_of(config, None, bootstrap)
    home.check_whom_to_ask([])
    from p2ptrain.daemon.launch import list_runs

    line = "{run_id}  {name}  round {round}  {members} members"
    show(list_runs(home.config), as_json, lambda found: "\n".join(line.format(**each) for each in found))


@identity_app.command("show")
def show_identity(config: NodeFile = None, data_dir: DataDir = None) -> None:
    """Print this node's id and public key."""
    identity = Identity.load(home_of(config, data_dir).identity_file)
    typer.echo(f"peer id     {identity.peer_id}\npublic key  {identity.key.hex()}")


@identity_app.command("new")
def new_identity(config: NodeFile = None, data_dir: DataDir = None) -> None:
    """Create a key, if there is none.

    A node creates its own key when it is first started."""
    path = home_of(config, data_dir).identity_file
    typer.echo(f"{Identity.make(path).peer_id}\n{path}")


@identity_app.command("path")
def identity_path(config: NodeFile = None, data_dir: DataDir = None) -> None:
    """Print the path of this node's key."""
    typer.echo(home_of(config, data_dir).identity_file)


def demo(
    nodes: Annotated[int, typer.Option(min=1, max=16, help="Number of daemons, each with its own p2pd.")] = 3,
    rounds: Annotated[int, typer.Option(min=4, help="Stop when the slowest node has applied this many.")] = 200,
    keep: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep all data and logs in this directory.")] = None,
) -> None:
    """Run a small swarm on this machine.

    Real daemons train a small model. One is killed and comes back, and in the end all replicas are compared."""
    from p2ptrain.demo import run_demo

    if not run_demo(nodes, rounds, keep):
        raise typer.Exit(ExitStatus.FAILED)
