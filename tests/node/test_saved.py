"""Choosing checkpoints: the node's own log certifies the right one, and those it contradicts are never chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from p2ptrain.core.state import AgreedState, genesis
from p2ptrain.errors import DataError
from p2ptrain.files import forget
from p2ptrain.node import saved
from p2ptrain.store import checkpoints
from p2ptrain.store.checkpoints import STATE_NAME, Checkpoint, Checkpoints
from p2ptrain.store.log import Log
from tests.helpers.core import KEYS
from tests.helpers.export import HEAD, Command, NodeDirectory, run_of, saved_node, state_of

ROUNDS = (8, 16, 24)


@pytest.fixture
def p2ptrain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("P2PTRAIN_DEVICE__NAME", "cpu")
    monkeypatch.setenv("P2PTRAIN_DEVICE__THREADS", "1")
    return Command(capsys)


@pytest.fixture
def node(tmp_path: Path) -> NodeDirectory:
    return saved_node(tmp_path / "node", ROUNDS)


def checkpoint_of(node: NodeDirectory, number: int) -> Checkpoint:
    return next(each for each in node.checkpoints.present() if each.round == number)


def log_of(node: NodeDirectory, **known: Any) -> None:
    """Makes a node's log that begins with a given agreed state."""
    first = genesis(node.run.id, tuple(sorted(KEYS[:3])), bytes(32))
    Log(node.run_directory / "wal", msgspec.structs.replace(first, **known), kept=64).close()


def certify(node: NodeDirectory, number: int, root: bytes | None = None, last: int = 30) -> None:
    """Makes the log certify a root of a round, by default the checkpoint's."""
    root = checkpoint_of(node, number).root if root is None else root
    log_of(node, round=last, head=b"l" * 32, root_round=number, root=root)


def short(node: NodeDirectory, number: int) -> str:
    return checkpoint_of(node, number).root.hex()[:16]


def test_the_newest_that_the_log_certifies_is_taken_and_said(
    p2ptrain: Command, node: NodeDirectory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certify(node, 16)
    told = f"round 16 of x, root {short(node, 16)}, certified by this node's log"
    out = tmp_path / "out"
    assert p2ptrain("export", out, *node.place) == (0, f"{told}: {out}\n", "")
    newest = checkpoint_of(node, 24)
    why = "not certified: the newest certified root in the log is of round 16, before round 24"
    assert f"skipped: {newest.path}: {why}" in caplog.text
    status, text, err = p2ptrain("generate", "ab", "--tokens", "3", *node.place)
    assert (status, text[:2], err) == (0, "ab", f"{told}\n")
    status, said, _ = p2ptrain("checkpoint", "export", tmp_path / "copy", *node.place)
    assert (status, said.startswith("round       16"), said.endswith("certified by this node's log\n")) == (
        0,
        True,
        True,
    )


def test_another_root_than_the_certified_one_is_not_taken(
    p2ptrain: Command, node: NodeDirectory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its files match its stamp, but the stamp's root is not the agreed one."""
    certify(node, 24, b"r" * 32)
    wrong, out = checkpoint_of(node, 24), tmp_path / "out"
    told = f"round 16 of x, root {short(node, 16)}, not certified: the log has no certified root for round 16"
    assert p2ptrain("export", out, *node.place) == (0, f"{told}: {out}\n", "")
    why = f"round 24 was certified with the root {(b'r' * 32).hex()[:16]}, but this state has {short(node, 24)}"
    assert f"skipped: {wrong.path}: not part of this node's history: {why}" in caplog.text
    for command in (("export", tmp_path / "no"), ("generate", "a"), ("checkpoint", "export", tmp_path / "no")):
        status, _, err = p2ptrain(*command, "--round", "24", *node.place)
        assert (status, err) == (1, f"{node.checkpoints.directory}: no undamaged checkpoint of round 24\n")
    assert not (tmp_path / "no").exists()


def test_a_copy_with_another_root_than_the_certified_one_is_not_taken_either(
    p2ptrain: Command, node: NodeDirectory, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    status, said, _ = p2ptrain("checkpoint", "export", copy, *node.place)
    assert (status, said.endswith("  not certified: there is no log of its run here\n")) == (0, True)
    away = ("--data-dir", tmp_path / "nothing")
    status, said, _ = p2ptrain("export", tmp_path / "out", "--checkpoint", copy, *away)
    assert (status, ", not certified: there is no log of its run here: " in said) == (0, True)
    certify(node, 24)
    status, said, _ = p2ptrain("export", tmp_path / "two", "--checkpoint", copy, *node.place)
    assert (status, ", certified by this node's log: " in said) == (0, True)
    for path in (node.run_directory / "wal").iterdir():
        path.unlink()
    certify(node, 24, b"r" * 32)
    status, said, err = p2ptrain("export", tmp_path / "no", "--checkpoint", copy, *node.place)
    assert (status, said) == (1, "")
    assert err.startswith(f"{copy}: not part of this node's history: round 24 was certified with the root ")


def test_a_checkpoint_of_a_branch_that_the_log_has_left_is_not_taken(
    p2ptrain: Command, node: NodeDirectory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log_of(node, round=24, head=b"o" * 32, root_round=16, root=b"r" * 32)
    status, said, _ = p2ptrain("export", tmp_path / "out", *node.place)
    assert (status, said.startswith("round 8 of x, ")) == (0, True)
    assert "it follows another manifest of round 24 than the one in the log" in caplog.text
    assert "round 16 was certified with the root " in caplog.text


def test_what_follows_the_log_on_its_branch_is_taken_where_nothing_is_certified(
    p2ptrain: Command, node: NodeDirectory, tmp_path: Path
) -> None:
    log_of(node, round=24, head=HEAD)
    status, said, _ = p2ptrain("export", tmp_path / "out", *node.place)
    why = "not certified: the newest certified root in the log is of round 0, before round 24"
    assert (status, said) == (0, f"round 24 of x, root {short(node, 24)}, {why}: {tmp_path / 'out'}\n")


def test_a_certified_one_that_is_damaged_is_passed_over(
    p2ptrain: Command, node: NodeDirectory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certify(node, 16)
    damaged = checkpoint_of(node, 16).path / STATE_NAME
    damaged.write_bytes(damaged.read_bytes()[:-1])
    status, said, _ = p2ptrain("export", tmp_path / "out", *node.place)
    assert (status, said.startswith(f"round 24 of x, root {short(node, 24)}, not certified: ")) == (0, True)
    assert f"skipped: {damaged}: damaged" in caplog.text


def test_a_log_that_cannot_be_read_certifies_nothing(
    p2ptrain: Command, node: NodeDirectory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certify(node, 16)
    [path] = (node.run_directory / "wal").iterdir()
    path.write_bytes(path.read_bytes()[:-20] + bytes(20))
    status, said, _ = p2ptrain("export", tmp_path / "out", *node.place)
    assert (status, said.startswith(f"round 24 of x, root {short(node, 24)}, not certified: ")) == (0, True)
    assert ", not certified: the log of its run here cannot be read: " in said
    assert f"checkpoints cannot be certified, and the members are unknown: {path}: damaged" in caplog.text


def test_an_error_that_quotes_a_name_commands_no_terminal(p2ptrain: Command, tmp_path: Path) -> None:
    status, _, err = p2ptrain("export", tmp_path / "out", "--checkpoint", tmp_path / "\x1b[2J")
    assert (status, "\x1b" in err, "\\x1b[2J holds no checkpoint" in err) == (2, False, True)


def test_looking_changes_nothing_of_a_log_whose_end_is_torn(
    p2ptrain: Command, node: NodeDirectory, tmp_path: Path
) -> None:
    certify(node, 24)
    [path] = (node.run_directory / "wal").iterdir()
    path.write_bytes(path.read_bytes() + b"torn")
    before = path.read_bytes()
    status, said, _ = p2ptrain("export", tmp_path / "out", *node.place)
    assert (status, ", certified by this node's log: " in said) == (0, True)
    assert path.read_bytes() == before


def test_a_first_state_is_certified_by_the_run_itself(p2ptrain: Command, tmp_path: Path) -> None:
    node = NodeDirectory(tmp_path / "node", run_of())
    saved = node.save(0, state_of(node.run))
    first: AgreedState = genesis(node.run.id, tuple(sorted(KEYS[:3])), saved.root)
    Log(node.run_directory / "wal", first, kept=64).close()
    status, said, _ = p2ptrain("export", tmp_path / "out", *node.place)
    assert (status, ", certified by this node's log: " in said) == (0, True)


@pytest.mark.parametrize("when", ["listed", "stamped", "verified", "chosen"])
@pytest.mark.parametrize("command", ["export", "generate", "checkpoint export"])
def test_what_a_node_prunes_while_it_is_read_is_not_missed(
    when: str,
    command: str,
    p2ptrain: Command,
    node: NodeDirectory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A running node may save a newer one and remove older ones at any moment."""
    seen: list[str] = []

    def goes_on() -> None:
        if not seen:
            seen.append(when)
            node.save(32, state_of(node.run, 32))
            for each in node.checkpoints.present()[:-1]:
                forget(each.path)

    of, name, goes_first = {
        "listed": (checkpoints, "read_stamp", True),
        "stamped": (Checkpoints, "verify", True),
        "verified": (Checkpoints, "verify", False),
        "chosen": (saved, "_tokenizer", False),
    }[when]
    if (when, command) == ("chosen", "checkpoint export"):
        of, name, goes_first = Checkpoints, "export", True
    real = getattr(of, name)

    def moved(*arguments: Any) -> Any:
        if goes_first:
            goes_on()
        found = real(*arguments)
        goes_on()
        return found

    monkeypatch.setattr(of, name, moved)
    words = {"export": [tmp_path / "out"], "generate": ["ab"], "checkpoint export": [tmp_path / "out"]}[command]
    status, out, err = p2ptrain(*command.split(), *words, *node.place)
    assert (status, seen, "skipped" in caplog.text) == (0, [when], False), err
    assert "round 32" in " ".join((out + err).split())


def test_what_is_pruned_again_and_again_is_told(
    p2ptrain: Command, node: NodeDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export(found: Checkpoints, checkpoint: Checkpoint, *_: Any) -> None:
        node.save(checkpoint.round + 8, state_of(node.run))
        forget(checkpoint.path)
        raise DataError("gone")

    monkeypatch.setattr(Checkpoints, "export", export)
    status, out, err = p2ptrain("checkpoint", "export", tmp_path / "out", *node.place)
    assert (status, out, err.endswith("faster than they can be read. Stop it first\n")) == (
        1, "", True,
    )  # fmt: skip
