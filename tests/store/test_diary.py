"""The diary: entries are durable, and damaged ones are ignored."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.daemon import assembly
from p2ptrain.errors import DataError
from p2ptrain.node.persistence import Persistence
from p2ptrain.store.diary import ENTRIES_MAX, Diary, Trained
from tests.helpers.driver import a_dataset
from tests.helpers.lone_node import lived


def trained(number: int) -> Trained:
    return Trained(number, number, number - 1, 1, 3, (number - 1,) if number % 2 else (), "ab" * 32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "diary.jsonl"


def numbers(path: Path) -> list[int]:
    return [each.number for each in Diary(path).entries]


def test_what_is_noted_is_there_after_a_restart(path: Path) -> None:
    diary = Diary(path)
    assert diary.entries == []
    diary.note(trained(4))
    diary.note(trained(5))
    assert Diary(path).entries == [trained(4), trained(5)]


def test_what_all_checkpoints_have_is_forgotten(path: Path) -> None:
    diary = Diary(path)
    for number in range(1, 7):
        diary.note(trained(number))
    diary.forget(3)
    assert numbers(path) == [4, 5, 6]
    diary.note(trained(7))
    diary.forget(6)
    assert diary.entries == Diary(path).entries == [trained(7)]


def test_what_comes_after_a_checkpoint_is_told_whole_or_not_at_all(path: Path) -> None:
    diary = Diary(path)
    for number in range(4, 7):
        diary.note(trained(number))
    assert [each.number for each in diary.after(4)] == [5, 6]
    assert diary.after(3) == diary.entries
    assert diary.after(2) == [], "the third is missing"
    assert diary.after(6) == []


def test_it_does_not_grow_without_bound(path: Path) -> None:
    diary = Diary(path)
    diary.entries = [trained(number) for number in range(1, ENTRIES_MAX + 1)]
    diary.note(trained(ENTRIES_MAX + 1))
    kept = list(range(ENTRIES_MAX // 2 + 2, ENTRIES_MAX + 2))  # what only the oldest checkpoints need makes way
    assert numbers(path) == [each.number for each in diary.entries] == kept


def test_it_has_what_the_newest_checkpoint_needs_however_long_the_history_is(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []

    def noted(*arguments: Any, **others: Any) -> Persistence:
        told.append(arguments[3:5])
        return Persistence(*arguments, **others)

    monkeypatch.setattr(assembly, "Persistence", noted)
    monkeypatch.setattr(assembly, "ENTRIES_MAX", 8)
    lived(path.parent, a_dataset(path.parent / "set"), 2)
    assert told == [(2, 4)], "the rounds between checkpoints, and those that may pass without one"


def test_a_disk_that_is_full_leaves_what_was_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    diary = Diary(path)
    diary.note(trained(4))
    write = os.write

    def half(descriptor: int, data: bytes) -> int:
        if len(data) < 40:
            raise OSError(errno.ENOSPC, "full")
        return write(descriptor, data[:40])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        with pytest.raises(DataError, match=r"diary\.jsonl: cannot be written \(full\)"):
            diary.note(trained(5))
    assert diary.entries == [trained(4)]
    diary.note(trained(5))
    assert numbers(path) == [4, 5]


def test_every_flipped_bit_and_every_cut_is_noticed(path: Path) -> None:
    for number in (4, 5, 6):
        Diary(path).note(trained(number))
    good = path.read_bytes()
    ends = [at + 1 for at, octet in enumerate(good) if octet == ord("\n")]
    for bit in range(0, 8 * len(good), 3):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bytes(bad))
        intact = sum(end <= bit // 8 for end in ends)
        assert numbers(path) == [4, 5, 6][:intact]
        assert path.read_bytes() == good[: ([0, *ends])[intact]], "what follows can be read"
    for size in range(len(good)):
        path.write_bytes(good[:size])
        assert numbers(path) == [4, 5, 6][: sum(end <= size for end in ends)]


def test_lines_of_a_later_format_are_refused_and_kept(path: Path) -> None:
    """Even after a damaged line: cutting that off would remove the later release's entries, too."""
    for number in (4, 5):
        Diary(path).note(trained(number))
    good = path.read_bytes()
    assert b"format" not in good, "as the releases before wrote it"
    later = b'{"format":2,"more":"than is known here"}\n'
    for content in (good + later, later, later + good, good + good[:20] + b"\n" + later):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"diary\.jsonl: has format 2, and this p2ptrain reads up to 1\. Update"):
            Diary(path)
        assert path.read_bytes() == content
    path.write_bytes(good)
    assert numbers(path) == [4, 5]


def test_lines_of_another_order_or_of_another_file_are_left_out(path: Path) -> None:
    for number in (4, 5, 6):
        Diary(path).note(trained(number))
    first, second, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + third)  # the disk did not take one
    diary = Diary(path)
    assert [each.number for each in diary.after(5)] == [6]
    assert diary.after(3) == diary.after(4) == []
    path.write_bytes(first + third + second)
    assert numbers(path) == [4, 6]
    path.write_bytes(first + second + second)
    assert numbers(path) == [4, 5]
