"""The directory for sockets is private and is not removed while we run."""

from __future__ import annotations

import fcntl
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2ptrain.errors import ConfigError
from p2ptrain.node import socket_directory as directories
from p2ptrain.node.socket_directory import BASE_MAX, SOCKETS_LOCK, SOCKETS_PREFIX, private_directory


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="p2p-") as made:  # pytest's paths are too long for sockets
        monkeypatch.setenv("XDG_RUNTIME_DIR", made)
        yield Path(made)


def test_it_is_ours_alone_and_goes_with_us(base: Path) -> None:
    with private_directory() as path:
        assert path.parent == base
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert list(base.iterdir()) == []


def test_what_is_in_use_stays_and_what_is_left_goes(base: Path) -> None:
    left = base / f"{SOCKETS_PREFIX}left"
    left.mkdir()
    (left / SOCKETS_LOCK).touch()
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(left / "control.sock"))
    foreign = base / f"{SOCKETS_PREFIX}of-another-kind"
    foreign.mkdir()
    with private_directory() as one, private_directory() as other:
        assert one != other
        assert one.exists()
        assert not left.exists()
        assert foreign.exists()


@pytest.mark.parametrize("lock", [SOCKETS_LOCK, "lock"])
def test_what_holds_more_than_sockets_is_never_removed(base: Path, lock: str) -> None:
    """A data directory below a temporary one was once taken for the leftovers of a killed process, keys included."""
    for name in ("p2ptrain-one", f"{SOCKETS_PREFIX}one"):
        (base / name).mkdir()
        for file in (lock, "identity.key"):
            (base / name / file).write_text("precious")
    with private_directory() as path:
        pass
    assert not path.exists()
    assert len(list(base.rglob("*"))) == 6


def test_one_that_another_start_removes_before_it_is_locked_is_made_again(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, removed = fcntl.flock, []

    def flock(lock: int, how: int) -> None:
        if how == fcntl.LOCK_EX and not removed:
            [path] = base.iterdir()
            shutil.rmtree(path)
            removed.append(path)
        real(lock, how)

    monkeypatch.setattr(directories.fcntl, "flock", flock)
    with private_directory() as path:
        assert removed
        assert path not in removed
        assert path.is_dir()


def test_a_place_that_is_too_long_for_sockets_is_passed_over(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base / ("x" * BASE_MAX)))
    monkeypatch.setattr(tempfile, "tempdir", str(base))
    with private_directory() as path:
        assert path.parent == base


def test_without_any_place_it_is_said_what_to_do(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directories.os, "access", lambda place, how: False)
    with (
        pytest.raises(
            ConfigError, match=r"no directory for sockets.*XDG_RUNTIME_DIR|XDG_RUNTIME_DIR.*no directory for sockets"
        ),
        private_directory(),
    ):
        pass
