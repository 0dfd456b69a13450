"""`p2ptrain invite`: creates an invitation to an invitation-only run."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer

from p2ptrain.cli.node import DataDir, NodeFile, Run, home_of
from p2ptrain.config import RunConfig
from p2ptrain.core.admission import encode_invitation, make_ticket
from p2ptrain.core.messages import NUMBER_MAX
from p2ptrain.core.state import USES_MAX
from p2ptrain.errors import ConfigError, P2ptrainError
from p2ptrain.identity import KEY_BYTES, Identity
from p2ptrain.node.control import ask
from p2ptrain.node.home import Home


def invite(
    last_round: Annotated[int, typer.Option(metavar="R", min=1, help="The last round in which it is valid.")],
    uses: Annotated[int, typer.Option(metavar="N", min=1, help="The number of nodes that it admits.")] = 1,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="A new file to write to, instead of stdout.")] = None,
    run: Run = None,
    config: NodeFile = None,
    data_dir: DataDir = None,
) -> None:
    """Create an invitation to this node's run.

    A node that uses it with `join --invitation` is admitted, and the invitation can be given to as many as it has
    uses. It contains a secret key, so send it where only they can read it. The run's config must have this node's key
    in admission.keys. The node may keep running; nothing is sent to anybody."""
    home = home_of(config, data_dir)
    meant = home.run(run)
    identity = Identity.load(home.identity_file)
    _check_may_invite(meant, identity)
    for key, number, most in (("--last-round", last_round, NUMBER_MAX - 1), ("--uses", uses, USES_MAX)):
        if number > most:
            raise ConfigError(f"at most {most:,}, not {number:,}", key=key, fix="Choose a smaller number")
    _check_is_ahead(home, meant, last_round)
    seed = secrets.token_bytes(KEY_BYTES)
    run_id, bearer = meant.id, Identity(seed).key
    ticket = make_ticket(identity.key, identity.sign, run_id, bearer, uses, last_round)
    text = encode_invitation(ticket, seed)
    if out is None:
        typer.echo(text)
        return
    _write_for_me_alone(out, f"{text}\n")
    who = "a node" if uses == 1 else f"{uses} nodes"
    typer.echo(f"an invitation of {who} to {meant.name}, good up to round {last_round}: {out}")


def _check_may_invite(run: RunConfig, identity: Identity) -> None:
    if run.admission.policy != "invite":
        what = f"run {run.name} does not use invitations: its policy is {run.admission.policy}"
        raise ConfigError(what, key="admission.policy", fix="A run's policy is chosen before it starts")
    if identity.key.hex() not in run.admission.keys:
        what = f"this node's key {identity.key.hex()} may not issue invitations to run {run.name}"
        raise ConfigError(what, key="admission.keys", fix="Create it on a node whose key is listed there")


def _check_is_ahead(home: Home, run: RunConfig, last_round: int) -> None:
    """Refuses a last round that a running daemon knows to be over, because members would ignore the invitation."""
    try:
        status = ask(home.directory, {"do": "status"})
    except P2ptrainError:  # no daemon is running, or it is starting
        return
    if status["run_id"] == run.run_id and last_round < status["round"]:
        what = f"round {last_round} is over: the run is in round {status['round']}"
        raise ConfigError(what, key="--last-round", fix="Choose a later one")


def _write_for_me_alone(path: Path, text: str) -> None:
    """Writes a new file that only its owner can read, because whoever has the invitation can use it."""
    try:
        path.touch(0o600, exist_ok=False)
        path.write_text(text)
    except OSError as error:
        fix = "Choose another name"
        raise ConfigError(f"cannot be created: {error.strerror}", source=str(path), key="--out", fix=fix) from error
