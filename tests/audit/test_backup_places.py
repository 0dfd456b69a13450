"""Places of backups: what becomes rotten there is found, each has one command, and trouble is a line."""

from __future__ import annotations

import ftplib
import shutil
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from blake3 import blake3
from fsspec.implementations.memory import MemoryFileSystem

from p2ptrain.audit.findings import Grade, Report
from p2ptrain.audit.weights import check_beside
from p2ptrain.cli import checkpoint as checkpoint_commands
from p2ptrain.config import RunConfig
from p2ptrain.data.tokenizer import tokenizer_digest
from p2ptrain.errors import ConfigError, DataError
from p2ptrain.models.adapters import read_base
from p2ptrain.store.backup import BackupPlace, copy_to
from p2ptrain.store.checkpoints import FORMAT, STATE_NAME, Checkpoint, FileStamp, Stamp
from p2ptrain.store.lock import Lock
from tests.helpers.cli import p2ptrain
from tests.helpers.trainer import TINY

WEIGHTS = b"x" * 1_000
Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoint:
    source = tmp_path / "saved"
    source.mkdir()
    (source / STATE_NAME).write_bytes(WEIGHTS)
    state = FileStamp(len(WEIGHTS), blake3(WEIGHTS).hexdigest())
    return Checkpoint(source, Stamp(FORMAT, "a" * 64, 1, "", "", "b" * 64, 0, FileStamp(0, ""), state))


@pytest.fixture
def place(tmp_path: Path) -> BackupPlace:
    (tmp_path / "there").mkdir()
    return BackupPlace(str(tmp_path / "there"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)


# ---------------------------------------------------------------------------------------------------
# What becomes rotten


def test_frozen_weights_that_are_rotten_are_copied_again(saved: Checkpoint, place: BackupPlace, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.write_bytes(b"frozen" * 100)
    for _ in range(2):
        copy_to(place, saved, {}, base)
        assert (tmp_path / "there" / "bases" / "base").read_bytes() == base.read_bytes()
        flip(tmp_path / "there" / "bases" / "base")


def test_frozen_weights_and_a_tokenizer_that_are_rotten_are_found(tmp_path: Path) -> None:
    backup, made = tmp_path / "backup", tmp_path / "base"
    backup.mkdir()
    made.write_bytes(b"frozen" * 100)
    (backup / "tokenizer.json").write_bytes(b"{}" * 100)
    digest = read_base(made).digest
    tokenizer = {"kind": "json", "digest": tokenizer_digest(b"{}" * 100)}
    raw = {"name": "adapted", "model": TINY, "adapt": {"kind": "lora", "rank": 2, "base": digest, "base_bytes": 600}}
    run = RunConfig.model_validate(raw | {"tokenizer": tokenizer})
    base = tmp_path / "bases" / f"{digest}.safetensors"
    base.parent.mkdir()
    made.rename(base)

    def graded() -> list[tuple[Grade, str]]:
        report = Report(str(backup))
        check_beside(backup, run, report)
        return [(each.verdict, each.subject) for each in report.findings]

    assert graded() == [(Grade.HOLDS, str(base))]
    flip(base)
    flip(backup / "tokenizer.json")
    both = [(Grade.WRONG, str(base)), (Grade.WRONG, str(backup / "tokenizer.json"))]
    assert graded() == both
    base.unlink()
    assert graded() == both
    base.symlink_to(base)  # in somebody else's directory
    (backup / "tokenizer.json").unlink()
    assert graded() == [both[0], (Grade.NOTE, both[1][1])], "a node that has lost it makes its backups without it"


# ---------------------------------------------------------------------------------------------------
# Room


def test_fewer_backups_make_room_before_the_next_one_is_copied(
    saved: Checkpoint, place: BackupPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [copy_to(place, saved, {}, kept=5) for _ in range(5)]

    def usage(_: Path) -> Any:
        held = sum(file.stat().st_size for file in (tmp_path / "there").rglob(STATE_NAME))
        return SimpleNamespace(free=5_500 - held)  # room for five and a bit

    monkeypatch.setattr(shutil, "disk_usage", usage)
    with pytest.raises(DataError, match="or keep fewer of them with --keep"):
        copy_to(place, saved, {}, kept=5)
    assert [*place.folders()] == names
    made = copy_to(place, saved, {}, kept=3)
    assert [*place.folders()] == [names[0], names[3], names[4], made], "the first of ten stays"


# ---------------------------------------------------------------------------------------------------
# One command, and what it goes on after


def copy(capsys: Capsys, to: Path | str, *more: str | int) -> tuple[int, str, str]:
    return p2ptrain(capsys, "checkpoint", "copy", "--to", to, *more)


@pytest.fixture
def _home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_commands, "home_of", lambda *_: SimpleNamespace(run=lambda _: None))


@pytest.mark.usefixtures("_home")
def test_a_second_command_is_refused_also_between_two_copies(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[str] = []

    def sleep(_: float) -> None:
        with pytest.raises(ConfigError) as caught:
            Lock.of_directory(tmp_path / "there")
        refused.append(caught.value.problem)
        raise KeyboardInterrupt

    monkeypatch.setattr("p2ptrain.node.saved.backed_up", lambda *_: "a backup")
    monkeypatch.setattr(checkpoint_commands, "sleep", sleep)
    status, out, _ = copy(capsys, tmp_path / "there", "--every", 5)
    assert (status, out.strip(), len(refused)) == (130, f"{tmp_path}/there/a backup", 1)
    with Lock.of_directory(tmp_path / "there"):
        status, _, err = copy(capsys, tmp_path / "there", "--every", 5)
    assert status == 2 and "is in use by process" in err


@pytest.mark.usefixtures("_home")
@pytest.mark.parametrize(
    ("module", "name"), [("gcsfs.retry", "HttpError"), ("azure.core.exceptions", "AzureError"), ("ftplib", "Error")]
)
def test_what_a_package_raises_is_said_and_tried_again(
    module: str, name: str, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of their errors are no OSError."""
    kind = type(name, (Exception,), {}) if module != "ftplib" else ftplib.Error
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{name: kind}))  # type: ignore[misc]
    slept: list[float] = []

    def away(*_: Any, **__: Any) -> None:
        raise kind("503, try later")

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise KeyboardInterrupt

    def back_up(home: Any, run: Any, place: BackupPlace, *_: Any) -> None:
        with place.trouble():
            place.newest()

    monkeypatch.setattr(MemoryFileSystem, "ls", away)
    monkeypatch.setattr("p2ptrain.node.saved.backed_up", back_up)
    monkeypatch.setattr(checkpoint_commands, "sleep", sleep)
    status, _, err = copy(capsys, "memory://there", "--every", 5)
    line = "memory://there: 503, try later. Check the address, the keys and the line; trying again\n"
    assert (status, err.count(line)) == (130, 3)


def test_places_that_cannot_be_reached_are_said_in_a_line(tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "file").write_text("no archive")
    assert zipfile.is_zipfile(tmp_path / "file") is False
    for address in ("ftp://127.0.0.1:1/x", "zip://a::b", f"zip://a::{tmp_path}/file", "reference://x"):
        for command in (("audit",), ("checkpoint", "copy", "--data-dir", tmp_path, "--to")):
            status, _, err = p2ptrain(capsys, *command, address)
            assert status in (1, 2) and len(err.splitlines()) == 1 and "Traceback" not in err, (address, err)
