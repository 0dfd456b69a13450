"""Errors that no restart mends have their own exit status, so that a supervisor does not restart for ever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from p2ptrain.cli.exits import ExitStatus
from p2ptrain.daemon import launch
from p2ptrain.errors import DataError, DeviceError, TooLargeError, UnusableError
from p2ptrain.files import DiskError
from p2ptrain.identity import Identity
from tests.helpers.cli import p2ptrain
from tests.helpers.deploy import DEPLOY, read_yaml
from tests.helpers.driver import a_dataset
from tests.helpers.lone_node import lived


def damage_log(directory: Path) -> None:
    (log,) = (directory / "wal").iterdir()
    content = bytearray(log.read_bytes())
    content[100] ^= 1
    log.write_bytes(content)


def damage_trust(directory: Path) -> None:
    (directory / "trust").write_bytes(b"nobody\n")


def make_newer_checkpoint(directory: Path) -> None:
    (stamp,) = (directory / "checkpoints").glob("*-round-0/checkpoint.json")
    stamp.write_bytes(b'{"format":"p2ptrain checkpoint 2"}')


def make_newer_diary(directory: Path) -> None:
    (directory / "diary.jsonl").write_bytes(b'{"format":2}\n')


@pytest.mark.parametrize("spoil", [damage_log, damage_trust, make_newer_checkpoint, make_newer_diary])
def test_a_node_whose_files_no_start_can_go_on_with_ends_alike_each_time(
    spoil: Callable[[Path], None], tmp_path: Path
) -> None:
    dataset = a_dataset(tmp_path / "data")
    lived(tmp_path / "node", dataset, 2)
    (directory,) = (tmp_path / "node" / "runs").iterdir()
    spoil(directory)
    for _ in range(2):
        with pytest.raises(UnusableError):
            lived(tmp_path / "node", dataset, 4)


def test_a_disk_that_cannot_be_read_now_may_be_mended_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise DiskError(tmp_path, "cannot be read", OSError(5, "Input/output error"))

    monkeypatch.setattr("p2ptrain.daemon.assembly.Store", broken)
    with pytest.raises(DiskError):
        lived(tmp_path / "node", a_dataset(tmp_path / "data"), 2)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UnusableError("damaged"), ExitStatus.OWNER_NEEDED),
        (TooLargeError("too large", fix="Take a smaller one"), ExitStatus.OWNER_NEEDED),
        (DataError("a peer's"), ExitStatus.FAILED),
        (DeviceError("no driver yet", fix="Wait"), ExitStatus.FAILED),
    ],
)
def test_its_status_tells_it_from_what_may_go_better_the_next_time(
    error: Exception, status: ExitStatus, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(launch, "take_part", end)
    address = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity(bytes(range(32))).peer_id}"
    assert p2ptrain(capsys, "join", "--bootstrap", address)[::2] == (status, f"{error}\n")
    assert ExitStatus.OWNER_NEEDED == 5, "systemd's unit has the number"


def test_no_number_of_ends_keeps_a_container_of_a_node_down() -> None:
    services = read_yaml(DEPLOY / "compose.yaml")["services"]
    policies = {name: service["restart"] for name, service in services.items()}
    nodes = {name for name in services if name == "bootstrap" or name.startswith("node")}
    assert {policies[name] for name in nodes} == {"on-failure"}, "who has left stays ended"
    assert {policies[name] for name in services.keys() - nodes} == {"no", "unless-stopped"}
