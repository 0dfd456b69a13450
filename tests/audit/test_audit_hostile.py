"""The audit of a hostile directory: it ends, with findings."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from p2ptrain.audit import findings as told
from p2ptrain.audit import run as audited
from p2ptrain.audit import weights
from p2ptrain.audit.findings import Finding, Grade, Report
from p2ptrain.audit.run import audit, find_directory
from p2ptrain.cli import app, main
from p2ptrain.config import RunConfig
from p2ptrain.errors import ConfigError, DataError
from p2ptrain.store import log
from p2ptrain.store.checkpoints import STATE_NAME, TRAINER_NAME, Checkpoint, Checkpoints
from tests.helpers.audit import log_of

ENDLESS_BYTES = 2**40  # of a file that has no content: more than any memory, and days to read
TEST_SECONDS = 90  # of any of these: what waits for ever is ended by a signal
COMMAND = "\x1b[2J\x1b]0;owned\x07"


@pytest.fixture(autouse=True)
def _nothing_waits_for_ever() -> Iterator[None]:
    def ends(*_: object) -> None:
        raise TimeoutError("it would have waited for ever")

    before = signal.signal(signal.SIGALRM, ends)
    signal.alarm(TEST_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def found(report: Report, verdict: Grade = Grade.WRONG) -> list[Finding]:
    return [finding for finding in report.findings if finding.verdict is verdict]


def checkpoints_of(directory: Path, run: RunConfig) -> list[Checkpoint]:
    return Checkpoints(directory / "checkpoints", run.id).present()


# ---------------------------------------------------------------------------------------------------
# What stands in the place of a file, or of a directory


def endless(path: Path) -> None:
    path.touch()
    os.truncate(path, ENDLESS_BYTES)


def bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        before = Path.cwd()
        os.chdir(path.parent)  # a socket's path may have 107 bytes
        listener.bind(path.name)
        os.chdir(before)


IN_THE_PLACE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a pipe": (os.mkfifo, "a pipe"),
    "a directory": (Path.mkdir, "a directory"),
    "a socket": (bound, "a socket"),
    "a link without an end": (lambda path: path.symlink_to("/dev/zero"), "a link"),
    "a link to itself": (lambda path: path.symlink_to(path), "a link"),
    "a file without an end": (endless, ""),
}
FILES = (
    "run.json",
    "identity",
    "wal/*.log",
    "payloads/*",
    "diary.jsonl",
    "checkpoints/*/checkpoint.json",
    f"checkpoints/*/{TRAINER_NAME}",
    f"checkpoints/*/{STATE_NAME}",
)


@pytest.mark.parametrize("what", IN_THE_PLACE)
def test_whatever_stands_in_the_place_of_a_file_is_told_and_not_read(directory: Path, what: str) -> None:
    make, name = IN_THE_PLACE[what]
    for kind in FILES:
        path = sorted(directory.glob(kind))[-1]
        content = path.read_bytes()
        path.unlink()
        make(path)
        report = audit(directory)
        assert not report.all_holds, kind
        lines = [line for line in report.lines() if str(path) in line]
        assert any(name in line for line in lines) or kind == "wal/*.log", (kind, report.lines())
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()
        path.write_bytes(content)
    assert audit(directory).all_holds


@pytest.mark.parametrize("what", ["a pipe", "a socket", "a link without an end", "a link to itself"])
def test_whatever_stands_in_the_place_of_a_directory_is_told(directory: Path, what: str) -> None:
    make, name = IN_THE_PLACE[what]
    for kind in ("wal", "payloads", "checkpoints", "checkpoints/*-round-*"):
        path = sorted(directory.glob(kind))[-1]
        aside = path.rename(directory / "aside")
        make(path)
        report = audit(directory)
        assert not report.all_holds, kind
        assert any(str(path) in line and "not a directory" in line for line in report.lines()), (kind, report.lines())
        assert name in "".join(report.lines()) or "not a checkpoint" in "".join(report.lines())
        path.unlink()
        aside.rename(path)
    assert audit(directory).all_holds


def test_a_link_to_the_right_content_is_not_followed(directory: Path) -> None:
    """It may be exchanged at any time, and what it leads to is not what is handed on."""
    payload = sorted((directory / "payloads").iterdir())[0]
    aside = payload.rename(directory / "aside")
    payload.symlink_to(aside)
    assert [finding.subject for finding in found(audit(directory))] == [str(payload)]


def test_another_name_of_the_same_file_is_a_file_like_any_other(directory: Path, tmp_path: Path) -> None:
    for number, path in enumerate(sorted(path for path in directory.rglob("*") if path.is_file())):
        os.link(path, tmp_path / str(number))
    assert audit(directory).all_holds


def test_what_is_no_part_of_a_history_is_not_touched(directory: Path) -> None:
    for name in ("records.sqlite", "lock", "trust", "fetching", "events"):
        path = directory / name
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    assert audit(directory).all_holds


# ---------------------------------------------------------------------------------------------------
# What is too much


def test_more_files_than_a_node_keeps_are_not_listed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, kind in (
        (weights, "PAYLOADS_MAX", "payloads"),
        (weights, "CHECKPOINTS_MAX", "checkpoints"),
        (log, "NAMES_MAX", "wal"),
    ):
        (directory / kind / "one more").touch()
        with monkeypatch.context() as patch:
            patch.setattr(module, name, 1)
            report = audit(directory)
        assert f"{directory / kind}: more than 1 files" in "".join(report.lines())
        assert not report.all_holds


def test_of_many_findings_some_are_told_and_all_are_counted(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(40):
        (directory / "payloads" / f"{number:064x}").touch()
    whole = audit(directory)
    monkeypatch.setattr(told, "FINDINGS_MAX", 12)
    report = audit(directory)
    assert report.counts[Grade.WRONG] == whole.counts[Grade.WRONG] == 40
    assert not report.all_holds
    left_out = len(whole.findings) - 12
    lines = report.lines()
    assert (len(lines), lines[12]) == (14, f"and {left_out} more findings in the same directory")
    assert (report.as_json()["left_out"], whole.as_json()["left_out"]) == (left_out, 0)


def test_a_log_beyond_the_limit_is_not_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = log_of(directory)
    monkeypatch.setattr(log, "READ_BYTES_MAX", path.stat().st_size - 1)
    report = audit(directory)
    assert any("the limit is" in str(finding) and str(path) in str(finding) for finding in found(report, Grade.OPEN))


@pytest.mark.parametrize("name", ["state", "trainer"])
def test_a_checkpoint_that_says_it_is_endless_is_not_read(directory: Path, run: RunConfig, name: str) -> None:
    """Its stamp and its file agree: there is nothing to be seen but the size."""
    newest = checkpoints_of(directory, run)[-1]
    file = newest.path / {"state": STATE_NAME, "trainer": TRAINER_NAME}[name]
    os.truncate(file, ENDLESS_BYTES)
    files: dict[str, Any] = {name: type(newest.stamp.state)(ENDLESS_BYTES, "ab" * 32)}
    (newest.path / "checkpoint.json").write_bytes(msgspec.structs.replace(newest.stamp, **files).encoded())
    [wrong] = found(audit(directory))
    assert str(wrong).startswith(f"WRONG         {newest.path}: {file.name} has {ENDLESS_BYTES} bytes, but ")


def test_what_this_machine_has_no_memory_for_is_not_replayed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunConfig.from_canonical((directory / "run.json").read_bytes())
    size = weights.RunModel(run).state_bytes
    monkeypatch.setattr(audited, "free_memory_bytes", lambda: 2 * size - 1)
    report = audit(directory)
    assert (report.replayed, [finding.subject for finding in found(report, Grade.OPEN)]) == (None, ["checkpoints"])
    monkeypatch.setattr(audited, "free_memory_bytes", lambda: 2 * size)
    largest = max(path.stat().st_size for path in (directory / "payloads").iterdir())
    monkeypatch.setattr(weights, "free_memory_bytes", lambda: largest)
    [finding] = found(audit(directory), Grade.OPEN)
    assert f"bytes of payloads, but only {largest:,} bytes of memory are free" in finding.what
    monkeypatch.setattr(weights, "free_memory_bytes", lambda: 1)  # not even for one of them
    monkeypatch.setattr(weights, "SMALL_BYTES", 0)
    assert "but only 1 bytes of memory are free here" in found(audit(directory), Grade.OPEN)[0].what


def test_a_state_that_changes_after_it_was_checked_is_not_replayed_from(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = weights.check_checkpoints

    def changing(*arguments: Any) -> Any:
        states = check(*arguments)
        for state in states:
            path = state.checkpoint.path / STATE_NAME
            content = bytearray(path.read_bytes())
            content[5] ^= 1
            path.write_bytes(content)
        return states

    monkeypatch.setattr(weights, "check_checkpoints", changing)
    report = audited._audit(directory, Report(str(directory)))
    assert [finding.subject for finding in found(report, Grade.OPEN)] == ["replay"]
    assert "changed after it was checked" in found(report, Grade.OPEN)[0].what
    assert report.replayed is None


# ---------------------------------------------------------------------------------------------------
# What names say


def test_a_name_is_a_payloads_in_one_spelling_only(directory: Path) -> None:
    names = ["aa " * 32, " " + "ab" * 32, "AB" * 32, "ab" * 33, "ab" * 32 + "\n"]
    for name in names:
        (directory / "payloads" / name).touch()
    report = audit(directory)
    assert report.all_holds, report.lines()
    notes = [finding for finding in found(report, Grade.NOTE) if "not a payload" in finding.what]
    assert len(notes) == len(names)


def test_no_name_commands_a_terminal_or_forges_a_line(directory: Path, capsysbinary: Any, monkeypatch: Any) -> None:
    place = directory / "payloads"
    for name in (COMMAND, "x\nOK            everything: holds", "\u202etxt", "\x9b31m"):
        (place / name).touch()
    (place / os.fsdecode(b"\xff\xfe")).touch()
    report = audit(directory)
    text = "\n".join(report.lines())
    assert len(text.splitlines()) == len(report.findings) + 1
    assert all(each.isprintable() or each == "\n" for each in text)
    assert r"/\x1b[2J\x1b]0;owned\x07: not a payload" in text
    assert r"x\nOK            everything: holds: not a payload" in text
    shown = CliRunner().invoke(app, ["audit", str(directory)])
    assert (shown.exit_code, shown.output) == (0, text + "\n")
    shutil.copytree(directory, directory.parent / COMMAND)
    monkeypatch.setattr("sys.argv", ["p2ptrain", "audit", str(directory.parents[1])])
    assert main() == 2
    complaint = capsysbinary.readouterr().err
    assert b"there are 2 runs" in complaint
    assert b"\\x1b[2J" in complaint
    assert b"\x1b" not in complaint


def test_a_long_text_is_told_by_its_ends() -> None:
    report = Report("")
    report.wrong("a" * 5_000 + "b", "x")
    [finding] = report.findings
    assert len(finding.subject) < 2_100
    assert finding.subject.startswith("aaa")
    assert finding.subject.endswith("ab")


@pytest.mark.parametrize("what", IN_THE_PLACE)
def test_a_data_directory_may_be_as_strange(tmp_path: Path, what: str) -> None:
    make, _ = IN_THE_PLACE[what]
    make(tmp_path / "runs")
    with pytest.raises((ConfigError, DataError)):
        find_directory(tmp_path, None)
    make(tmp_path / "run.json")
    assert find_directory(tmp_path, None) == tmp_path
    assert not audit(tmp_path).all_holds
    with pytest.raises(ConfigError, match="is not a directory"):
        find_directory(tmp_path / ("x" * 64), None)
