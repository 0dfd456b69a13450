"""One contribution is measured again from a copied directory, without the node, and with the same result everywhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.audit.contribution import measure
from p2ptrain.cli import audit as audit_command
from p2ptrain.config import DeviceConfig, NodeConfig, RunConfig
from p2ptrain.config.node import StorageConfig
from p2ptrain.errors import DataError
from p2ptrain.identity import peer_id_of
from p2ptrain.node.home import Home
from p2ptrain.node.saved import backed_up
from p2ptrain.store.backup import BackupPlace
from p2ptrain.store.checkpoints import STATE_NAME, Checkpoints
from tests.helpers.audit import IDENTITIES, entries_of, log_of, make_history
from tests.helpers.cli import p2ptrain

RECIPE = {"name": "local", "k": 32, "local_steps": 4, "sequences_per_pass": 8}
ME = IDENTITIES[0].key
Capsys = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, list[Path]]:
    """A run that is audited."""
    return make_history(tmp_path_factory.mktemp("history"), recipe=RECIPE)


@pytest.fixture
def data(history: tuple[RunConfig, list[Path]]) -> Path:
    return history[1][0].parents[2] / "data"


@pytest.fixture
def number(history: tuple[RunConfig, list[Path]]) -> int:
    """The newest round of which all nodes have applied our contribution, and the root is certified."""
    entries = [entries_of(directory) for directory in history[1]]
    newest = min(each[-1].manifest.root_round for each in entries)
    taken = [entry.manifest for entry in entries[0] if ME in {each.author for each in entry.manifest.taken}]
    return max(manifest.round for manifest in taken if manifest.round <= newest)


def measured(directory: Path, data: Path, number: int, key: bytes = ME) -> dict[str, Any]:
    device = DeviceConfig(name="cpu", threads=1, autocast="off")
    return measure(directory, number, key, device, lambda name: data, directory / "bases")


def keep_checkpoints(directory: Path, run: RunConfig, number: int, *, before: bool) -> None:
    """Removes all checkpoints but those before this round, or those from it on."""
    for each in Checkpoints(directory / "checkpoints", run.id).present():
        if (each.round < number) is not before:
            shutil.rmtree(each.path)


def test_the_directories_of_all_nodes_give_the_same(
    history: tuple[RunConfig, list[Path]], data: Path, number: int
) -> None:
    found = [measured(directory, data, number) for directory in history[1]]
    assert len({(each["z"], each["strength"]) for each in found}) == 1
    assert all(each["sequences"] == 32 and each["strength"] > 0.6 for each in found)


def test_rounds_are_applied_to_an_older_state_or_taken_back_from_a_later_one(
    directory: Path, run: RunConfig, data: Path, number: int
) -> None:
    later = directory.with_name("later") / directory.name
    shutil.copytree(directory, later)
    keep_checkpoints(directory, run, number - 2, before=True)
    keep_checkpoints(later, run, number, before=False)
    applied, taken_back = (measured(each, data, number) for each in (directory, later))
    assert applied["weights"].endswith("rounds applied; their root is certified")
    assert taken_back["weights"].endswith("rounds taken back")
    assert (applied["z"], applied["strength"]) == pytest.approx((taken_back["z"], taken_back["strength"]), abs=0.02)


def test_what_is_wrong_or_not_here_is_told(directory: Path, run: RunConfig, data: Path, number: int) -> None:
    def refused(at: int = number, key: bytes = ME) -> str:
        with pytest.raises(DataError) as caught:
            measured(directory, data, at, key)
        return str(caught.value)

    assert "is not kept here" in refused(10**6)
    assert "took no contribution of this key" in refused(key=bytes(32))
    taken = next(entry.manifest.taken for entry in entries_of(directory) if entry.manifest.round == number)
    path = directory / "payloads" / next(each.payload.hex() for each in taken if each.author == ME)
    payload = path.read_bytes()
    path.write_bytes(payload[:-1] + bytes([payload[-1] ^ 1]))
    assert "not all contributions to round" in refused()
    path.write_bytes(payload)
    for each in Checkpoints(directory / "checkpoints", run.id).present():
        state = each.path / STATE_NAME
        state.write_bytes(state.read_bytes()[:-1] + b"\1")
    assert "no checkpoint leads to the weights of round" in refused()
    log, _ = log_of(directory)
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 1
    log.write_bytes(content)
    assert refused().startswith("WRONG")


@pytest.mark.parametrize(("wanted", "by_daemon"), [((), True), (("--run", "ab"), True), (("--run", "cd"), False)])
def test_a_daemon_of_another_run_is_not_asked(
    wanted: tuple[str, ...], by_daemon: bool, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, measured = [], {"z": 9.0, "typical_z": 8.0, "strength": 1.0, "sequences": 2}

    def ask(_: Path, order: dict[str, Any]) -> dict[str, Any]:
        asked.append(order["do"])
        return {"run_id": "ab" * 32} if order["do"] == "status" else measured

    monkeypatch.setattr(audit_command, "ask", ask)
    status, _, error = p2ptrain(capsys, "audit", tmp_path, "--contribution", 3, peer_id_of(ME), *wanted)
    assert (status, "audit" in asked) == (0 if by_daemon else 2, by_daemon)
    assert by_daemon or f"no run in {tmp_path}" in error, "it looks at the files"


def test_the_command_takes_a_copied_directory(
    directory: Path, run: RunConfig, data: Path, number: int, capsys: Capsys
) -> None:
    home, peer = directory.parents[1], peer_id_of(ME)
    command = "audit", home, "--contribution", number, peer
    status, _, error = p2ptrain(capsys, *command)
    assert (status, "holds no data set" in error) == (1, True)
    shutil.copytree(data, home / "data" / "copied")
    status, out, _ = p2ptrain(capsys, *command, "--json")
    found = json.loads(out)
    assert (status, {*found}) == (0, {"z", "strength", "sequences", "typical_z", "weights"})
    status, out, _ = p2ptrain(capsys, "audit", directory, *command[2:])
    assert (status, out.splitlines()[0].split()[:2]) == (0, ["z", f"{found['z']:.2f}"])
    assert out.splitlines()[-1] == f"weights   {found['weights']}"
    for piece in (home / "data" / "copied" / "pieces").iterdir():
        piece.unlink()
    status, _, error = p2ptrain(capsys, *command)
    assert (status, "of its pieces are missing" in error) == (1, True)


def test_a_backup_has_no_contributions_and_says_so(
    directory: Path, tmp_path: Path, number: int, capsys: Capsys
) -> None:
    home = Home(NodeConfig(storage=StorageConfig(directory=str(directory.parents[1]))))
    name = backed_up(home, home.run(None), BackupPlace(str(tmp_path / "there")), None, 1)
    status, _, error = p2ptrain(
        capsys, "audit", tmp_path / "there" / str(name), "--contribution", number, peer_id_of(ME)
    )
    assert (status, "a backup has no contributions. Name the directory of a node" in error) == (1, True)
