"""`p2ptrain invite`: creates an invitation to an invitation-only run."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from p2ptrain.cli.node import DataDir, NodeFile, Run, node_config
from p2ptrain.errors import ConfigError, P2ptrainError

if TYPE_CHECKING:
    from p2ptrain.config import NodeConfig, RunConfig
    from p2ptrain.identity import Identity

SERIAL_BYTES = 16  # a serial's size in a ticket
ROUND_MAX = 2**48 - 1  # the limit of messages


def invite(
    last_round: Annotated[
        int,
        typer.Option("--last-round", metavar="R", min=1, max=ROUND_MAX, help="The last round in which it is valid."),
    ],
    serial: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, max=2**63, help="Only one invitation with this number can be used; random by default."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="A new file to write to, instead of stdout.")] = None,
    run: Run = None,
    config: NodeFile = None,
    data_dir: DataDir = None,
) -> None:
    """Create an invitation to this node's run.

    The first node that uses it with `join --ticket` is admitted. The run's config must have this node's key in
    admission.keys. The node may keep running; nothing is sent to anybody.
    """
    from p2ptrain.core.admission import make_ticket
    from p2ptrain.identity import Identity
    from p2ptrain.node.directories import identity_file
    from p2ptrain.node.find import choose_run

    node = node_config(config, data_dir)
    meant = choose_run(node, run)
    identity = Identity.load(identity_file(node))
    _check_may_invite(meant, identity)
    _check_is_ahead(node, meant, last_round)
    number = secrets.token_bytes(SERIAL_BYTES) if serial is None else serial.to_bytes(SERIAL_BYTES, "big")
    ticket = make_ticket(identity.key, identity.sign, bytes.fromhex(meant.run_id), number, last_round).hex()
    if out is None:
        typer.echo(ticket)
        return
    _write_for_me_alone(out, f"{ticket}\n")
    typer.echo(f"an invitation to {meant.name}, good up to round {last_round}: {out}")


def _check_may_invite(run: RunConfig, identity: Identity) -> None:
    if run.admission.policy != "invite":
        what = f"run {run.name} does not use invitations: its policy is {run.admission.policy}"
        raise ConfigError(what, key="admission.policy", fix="A run's policy is chosen before it starts")
    if identity.key.hex() not in run.admission.keys:
        what = f"this node's key {identity.key.hex()} may not issue invitations to run {run.name}"
        raise ConfigError(what, key="admission.keys", fix="Create it on a node whose key is listed there")


def _check_is_ahead(node: NodeConfig, run: RunConfig, last_round: int) -> None:
    """Rejects a round that a running daemon knows to be over: members would silently refuse the invitation."""
    from p2ptrain.node.control import ask
    from p2ptrain.node.directories import data_directory

    try:
        status = ask(data_directory(node), {"do": "status"})
    except P2ptrainError:  # no daemon is running, or it is starting
        return
    if status["run_id"] == run.run_id and last_round < status["round"]:
        what = f"round {last_round} is over: the run is in round {status['round']}"
        raise ConfigError(what, key="--last-round", fix="Choose a later one")


def _write_for_me_alone(path: Path, text: str) -> None:
    """Writes a file that only its owner can read, because anyone who has the invitation can use it."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        fix = "Choose another name"
        raise ConfigError(f"cannot be created: {error.strerror}", source=str(path), key="--out", fix=fix) from error
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
