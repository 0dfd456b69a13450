"""`p2ptrain checkpoint` lists and copies a node's checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from p2ptrain.config.node import NodeConfig, StorageConfig
from p2ptrain.node.home import Home
from p2ptrain.store.checkpoints import STATE_NAME, Checkpoint, Checkpoints
from p2ptrain.store.store import CHECKPOINTS_NAME
from tests.helpers.cli import p2ptrain
from tests.helpers.store import named_run, void


@pytest.fixture
def node(tmp_path: Path) -> NodeConfig:
    return NodeConfig(storage=StorageConfig(directory=str(tmp_path / "node")))


@pytest.fixture
def checkpoints(node: NodeConfig) -> Checkpoints:
    run = named_run()
    run_id = run.id
    directory = Home(node).of_run(run_id)
    directory.mkdir(parents=True)
    (directory / "run.json").write_bytes(run.canonical())
    made = Checkpoints(directory / CHECKPOINTS_NAME, run_id)
    made.tidy()
    for number in (8, 16, 24):
        root = bytes([number]) * 32
        made.write(number, run_id, root, root, number, lambda path: void(path.write_bytes(b"trainer")), b"weights")
    return made


def test_checkpoints_are_listed(node: NodeConfig, checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str]) -> None:
    place = ("--data-dir", node.storage.directory)
    status, out, _ = p2ptrain(capsys, "checkpoint", "list", *place)
    lines = out.splitlines()
    assert (status, len(lines)) == (0, 3)
    assert lines[2].startswith(f"round       24  root {'18' * 8}               14 bytes  {checkpoints.directory}")
    (checkpoints.present()[1].path / "checkpoint.json").write_bytes(b"{}")
    assert p2ptrain(capsys, "checkpoint", "list", *place)[1].splitlines()[1].startswith("DAMAGED ")
    oldest = checkpoints.found()[0]
    assert isinstance(oldest, Checkpoint)
    (oldest.path / "checkpoint.json").write_bytes(b'{"format":"p2ptrain checkpoint 2"}')
    assert p2ptrain(capsys, "checkpoint", "list", *place)[1].splitlines()[0].startswith("unreadable ")


def test_a_copy_is_made_of_what_is_whole(
    node: NodeConfig,
    checkpoints: Checkpoints,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = ("--data-dir", node.storage.directory)
    (checkpoints.present()[2].path / STATE_NAME).write_bytes(b"weighty")
    assert p2ptrain(capsys, "checkpoint", "export", tmp_path / "copy", *place)[0] == 0
    stamp = json.loads((tmp_path / "copy" / "checkpoint.json").read_text())
    assert (stamp["round"], (tmp_path / "copy" / STATE_NAME).read_bytes()) == (16, b"weights")
    status, _, err = p2ptrain(capsys, "checkpoint", "export", tmp_path / "copy", *place)
    assert (status, err) == (1, f"{tmp_path / 'copy'}: already exists\n")
    assert p2ptrain(capsys, "checkpoint", "export", tmp_path / "old", "--round", "8", *place)[0] == 0
    for number in ("24", "9"):  # damaged, and not there
        status, _, err = p2ptrain(capsys, "checkpoint", "export", tmp_path / "no", "--round", number, *place)
        assert (status, err) == (1, f"{checkpoints.directory}: no undamaged checkpoint of round {number}\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "node", "old"]


def test_which_run_is_meant_has_to_be_clear(
    node: NodeConfig, checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ("--data-dir", node.storage.directory)
    other = named_run("y")
    directory = Home(node).of_run(other.id)
    directory.mkdir(parents=True)
    (directory / "run.json").write_bytes(other.canonical())
    status, _, err = p2ptrain(capsys, "checkpoint", "list", *place)
    assert status == 2
    assert "there are 2 runs" in err
    assert p2ptrain(capsys, "checkpoint", "list", "--run", other.run_id[:8], *place) == (0, "", "")
    assert p2ptrain(capsys, "checkpoint", "list", "--run", "none", *place)[0] == 2
    empty = checkpoints.directory / "empty"
    assert p2ptrain(capsys, "checkpoint", "list", "--data-dir", empty)[2].startswith(f"--data-dir: no run in {empty}.")
