"""Reading files that someone else may have placed: regular files and directories only."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from blake3 import blake3

from p2ptrain import files
from p2ptrain.errors import DataError
from p2ptrain.files import below, digest_of, listed, open_regular, read_regular
from p2ptrain.visible import visible


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "a"
    assert read_regular(path, 5) is None
    path.write_bytes(b"12345")
    assert read_regular(path, 5) == b"12345"
    with pytest.raises(DataError, match=r"a: 5 bytes; the limit is 4"):
        read_regular(path, 4)
    path.write_bytes(b"")
    assert read_regular(path, 0) == b""


def test_a_device_is_not_even_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening one can be a command: it rewinds a tape, or starts a watchdog."""
    opened: list[object] = []
    monkeypatch.setattr(os, "open", lambda *arguments: opened.append(arguments))
    with pytest.raises(DataError, match="/dev/null: not a regular file, but a device"):
        open_regular(Path("/dev/null"))
    assert opened == []


@pytest.mark.linux
@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_what_is_exchanged_after_it_was_looked_at_is_not_read_either(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, look = tmp_path / "a", os.lstat
    (tmp_path / "other").write_bytes(b"secret")

    def exchanged(asked: Path) -> os.stat_result:
        found = look(asked)
        path.unlink()
        if kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(tmp_path / "other")
        return found

    path.write_bytes(b"12345")
    monkeypatch.setattr(files.os, "lstat", exchanged)
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(DataError):
        read_regular(path, 100)
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_a_file_that_grows_is_read_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    with open_regular(path) as file:
        assert file.read() == b"12345"
    look = os.fstat

    def growing(descriptor: int) -> os.stat_result:
        found = look(descriptor)
        with path.open("ab") as file:
            file.write(b"more")
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.os, "fstat", growing)
        content = read_regular(path, 100)
    assert content is not None
    assert len(content) < path.stat().st_size, "what came after it was opened is not waited for"


def test_of_a_file_that_is_too_large_no_more_is_digested_than_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.touch()
    os.truncate(path, 2**40)
    size, _ = digest_of(path, 5)
    assert 5 < size <= 5 + files.READ_BYTES
    path.write_bytes(b"12345")
    assert digest_of(path, 5) == digest_of(path) == (5, blake3(b"12345").hexdigest())


def test_a_directory_is_listed_without_following_links(tmp_path: Path) -> None:
    assert listed(tmp_path / "nothing", 3) == []
    (tmp_path / "b").mkdir()
    (tmp_path / "a").symlink_to("/dev/zero")
    (tmp_path / "c").write_bytes(b"123")
    found = listed(tmp_path, 3)
    assert [path.name for path, _ in found] == ["a", "b", "c"]
    assert [files._kind(kind) for _, kind in found[:2]] == ["a link", "a directory"]
    assert found[2][1].st_size == 3
    with pytest.raises(DataError, match="more than 2 files"):
        listed(tmp_path, 2)
    (tmp_path / "there").symlink_to(tmp_path / "b")
    with pytest.raises(DataError, match="there: not a directory, but a link"):
        listed(tmp_path / "there", 3)


def test_files_and_directories_may_vanish_while_they_are_listed(tmp_path: Path) -> None:
    for name in ("a/1", "a/2", "b/3"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"123")
    found = below(tmp_path)
    _, first = next(found)
    assert first.st_size == 3
    shutil.rmtree(tmp_path / "a")
    shutil.rmtree(tmp_path / "b")
    assert list(found) == []
    assert list(below(tmp_path / "nothing")) == []


def test_what_cannot_be_seen_becomes_visible() -> None:
    assert visible("naïve 節點 🙂") == "naïve 節點 🙂"
    assert visible("\x1b[2J\x9b\u202e\udcff\n\t") == r"\x1b[2J\x9b\u202e\udcff\n\t"
    assert visible("a\n\tb\r", keep="\n\t") == "a\n\tb\\r"
