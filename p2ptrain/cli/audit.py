"""`p2ptrain audit` and `receipt`: verify a run's history offline, and prove what a key has contributed to it."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from p2ptrain.cli.exits import ExitStatus
from p2ptrain.cli.node import AsJson, DataDir, NodeFile, Run, home_of, put_out, show
from p2ptrain.core.history import HISTORY_BYTES_MAX
from p2ptrain.core.wire import encode
from p2ptrain.errors import ConfigError, DataError, NoDaemonError, RemoteProtocolError
from p2ptrain.files import read_regular
from p2ptrain.identity import PeerIdError, key_of
from p2ptrain.node.control import ask
from p2ptrain.visible import visible


def _key(peer: str) -> bytes:
    """Returns the key whose peer id the user has typed."""
    try:
        return key_of(peer)
    except PeerIdError as error:
        raise ConfigError(str(error), key="PEER", fix="`p2ptrain swarm` shows them") from error


def _measured(found: dict[str, Any]) -> str:
    return (
        f"z         {found['z']:.2f}   of its own work typically {found['typical_z']:.2f}, of a copy or noise 0\n"
        f"strength  {found['strength']:.2f}   of contributions that go the common way 1\n"
        f"from {found['sequences']} of its sequences; the same on all machines but for the last digits"
    ) + (f"\nweights   {found['weights']}" if "weights" in found else "")


def _measured_alone(directory: Path, run: str | None, number: int, key: bytes) -> dict[str, Any]:
    """Measures a contribution by the files of a directory whose daemon does not run here."""
    from p2ptrain.audit.contribution import measure
    from p2ptrain.audit.run import find_directory

    place = find_directory(directory, run).absolute()
    home = home_of(None, place.parent.parent)  # the owner's settings may allow the run's plug-ins
    return measure(place, number, key, home.config.device, home.dataset, home.bases)


def _checked(content: bytes, path: Path, run: str) -> dict[str, Any]:
    """Verifies a receipt of a run, whose id may be cut off."""
    from p2ptrain.audit.receipt import check, decode_receipt

    try:
        return check(decode_receipt(content), run)
    except RemoteProtocolError as error:
        raise DataError(f"it proves nothing: {error.why}", path=path) from error


def _proved(found: dict[str, Any]) -> str:
    rounds = found["rounds"]
    first, last, share = rounds[0]["round"], rounds[-1]["round"], sum(each["share"] for each in rounds) / len(rounds)
    size, sequences = (sum(each[name] for each in rounds) for name in ("bytes", "sequences"))
    text = f"""\
peer       {found["peer"]}
run        {found["run"]["name"]}, {found["run"]["id"]}: is it the one that you mean?
rounds     {len(rounds)} from {first} to {last} took a contribution of the key: {share:.1%} of what they applied
work       {size:,} bytes; by its own claim {sequences:,} sequences
audits     {found["audits"]} by members, {found["audits_passed"]} of them found its work
standing   {found["standing"]}
proved by  {found["signatures"]:,} signatures, from the founders to state root {found["root"]["root"]}
not proved that nothing was left out: who made the receipt chose its rounds, but not the standing"""
    return visible(text, keep="\n")


def audit(
    directory: Annotated[
        str, typer.Argument(metavar="DIR|URL", help="A node's data directory, a run's inside it, or a backup.")
    ] = "",
    run: Run = None,
    contribution: Annotated[
        tuple[int, str] | None,
        typer.Option(
            metavar="ROUND PEER",
            help="Measure a contribution instead, as all members do before they suspend somebody; by DIR's daemon, or "
            "its files.",
        ),
    ] = None,
    receipt: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Verify a receipt instead, of the run with the id --run.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Verify the history of a run in DIR, offline.

    Checks signatures, payloads and states, and replays the rounds to verify the final state root. The audit only
    reads, so the node may keep running, and DIR may be somebody else's. Of several backups it takes the newest. The
    exit status is 1 if anything is wrong or cannot be checked."""
    if receipt is not None:
        if (content := read_regular(receipt, HISTORY_BYTES_MAX)) is None:
            raise ConfigError(f"no such file: {receipt}", key="--receipt", fix="Name the file of a receipt")
        show(_checked(content, receipt, run or ""), as_json, _proved)
        return
    if not directory:
        raise ConfigError("nothing to audit", key="DIR", fix="Name a node's data directory, or a --receipt")
    if contribution is not None:
        number, peer = contribution
        place, key, measured = Path(directory), _key(peer), None
        with suppress(NoDaemonError):
            if not run or str(ask(place, {"do": "status"})["run_id"]).startswith(run):
                measured = ask(place, {"do": "audit", "round": number, "peer": peer})
        show(measured or _measured_alone(place, run, number, key), as_json, _measured)
        return
    from p2ptrain.audit.run import audit as look
    from p2ptrain.audit.run import find_directory
    from p2ptrain.store.backup import find_backup

    home_of(None)  # the owner's settings may allow the run's plug-ins
    with TemporaryDirectory() as fetched:
        report = look(find_backup(directory, Path(fetched)) or find_directory(Path(directory), run))
    typer.echo(json.dumps(report.as_json(), indent=2) if as_json else "\n".join(report.lines()))
    if not report.all_holds:
        raise typer.Exit(ExitStatus.FAILED)


def receipt(
    peer: Annotated[str, typer.Argument(metavar="PEER", help="The peer id of the key: 12D3KooW...")],
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="The file to write.")] = None,
    run: Run = None,
    config: NodeFile = None,
    data_dir: DataDir = None,
) -> None:
    """Prove what a key has contributed, in a file.

    It has the rounds that took a contribution of the key, as far as this node keeps them, with their certificates.
    Anyone verifies it with `audit --receipt`."""
    from p2ptrain.audit.receipt import receipt_of
    from p2ptrain.store.log import read_journal
    from p2ptrain.store.store import origin_in

    home, key = home_of(config, data_dir), _key(peer)
    chosen = home.run(run)
    directory = home.of_run(chosen.id)
    if (journal := read_journal(directory / "wal")) is None:
        raise DataError("there is no log yet", path=directory, fix="Wait for a few rounds")
    made = encode(receipt_of(chosen, origin_in(directory), journal, key))
    path = out or Path(f"{chosen.name}-{chosen.run_id[:8]}-{peer[-8:]}.receipt")
    found = _checked(made, path, chosen.run_id)
    put_out(path, made)
    typer.echo(f"{_proved(found)}\n{path}")
