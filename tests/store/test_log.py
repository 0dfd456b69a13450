"""The write-ahead log: appended records come back, torn ones are cut off, and damage is an error."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from p2ptrain.core import events as ev
from p2ptrain.core.journal import Journal
from p2ptrain.core.messages import Announcement
from p2ptrain.core.state import AgreedState
from p2ptrain.errors import DataError
from p2ptrain.files import DiskError
from p2ptrain.store import log as wal
from p2ptrain.store import segment
from p2ptrain.store.log import Log
from p2ptrain.store.segment import frame, frames_of, header
from tests.helpers.store import KEPT, Power, folded, lives, some_records

STALENESS = 4  # of tests/seeds/20261276.toml


def begun(directory: Path, records: list[ev.Record], base: AgreedState, kept: int = KEPT) -> Log:
    log = Log(directory, base, kept)
    log.append(records)
    return log


def reopened(directory: Path, base: AgreedState, kept: int = KEPT) -> Journal:
    log = Log(directory, base, kept)
    log.close()
    return log.journal


def offsets(path: Path) -> list[int]:
    """Returns where the frames of a segment begin, and its end."""
    bodies, end = frames_of(path, int(path.name[:8]), path.read_bytes())
    return [at for at, _ in bodies] + [end]


# ---------------------------------------------------------------------------------------------------
# What comes back


@pytest.mark.parametrize("kind", [ev.Said, ev.Certified, ev.Silence, ev.Observed, ev.Halted])
def test_every_kind_of_record_comes_back_as_it_was(kind: type) -> None:
    _, records = some_records()
    chosen = [record for record in records if type(record) is kind]
    assert len(chosen) >= 1
    encoded = [segment.encoded(record) for record in chosen]
    assert [segment._DECODER.decode(each) for each in encoded] == chosen


def test_steps_of_both_kinds_come_back_and_their_states_have_the_same_digest() -> None:
    _, _, disks = lives("partition-regroup")
    certified = [record for records in disks for record in records if isinstance(record, ev.Certified)]
    assert {type(record.step).__name__ for record in certified} == {"Entry", "Beginning"}
    for record in certified[::50]:
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=ev.Certified)
        assert (again, again.state.digest) == (record, record.state.digest)


def test_a_log_that_is_opened_again_has_the_same_journal(tmp_path: Path) -> None:
    base, records = some_records()
    begun(tmp_path, records, base).close()
    journal = reopened(tmp_path, base)
    assert journal == folded(base, records)
    assert journal.saved_at(3, b"r").said == tuple(said for _, said in journal.said)


def test_a_new_log_is_empty_and_remembers_where_it_began(tmp_path: Path) -> None:
    base, records = some_records()
    first = Log(tmp_path, base, KEPT)
    assert (first.journal, first.is_forgetful) == (Journal(base, KEPT), False)
    first.close()
    other = next(record.state for record in records if isinstance(record, ev.Certified))
    assert reopened(tmp_path, other) == Journal(base, KEPT)


def test_a_log_without_its_past_says_so_until_something_was_written(tmp_path: Path) -> None:
    base, _ = some_records()
    Log(tmp_path, base, KEPT, is_forgetful=True).close()
    log = Log(tmp_path, base, KEPT)
    assert log.is_forgetful
    log.append([ev.Silence(b"", 9)])
    assert not log.is_forgetful
    log.close()
    assert not Log(tmp_path, base, KEPT, is_forgetful=True).is_forgetful


@pytest.mark.parametrize("name", ["partition-regroup", "kill-storm", "trap-long-cut"])
def test_over_a_node_s_life_the_journal_is_the_same_before_and_after_every_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Random batches, restarts in between, and segments small enough that there are many."""
    monkeypatch.setattr(wal, "SEGMENT_BYTES", 20_000)
    base, kept, disks = lives(name)
    for index in (0, len(disks) // 2, len(disks) - 1):
        records, rng, at = disks[index], Random(index), 0
        log = Log(tmp_path / str(index), base, kept)
        plain = Journal(base, kept)
        while at < len(records):
            count = rng.randint(1, 20)
            log.append(records[at : at + count])
            for record in records[at : at + count]:
                plain.write(record, wal.read_own(record.envelope) if isinstance(record, ev.Said) else None)
            at += count
            if rng.random() < 0.2:
                log.close()
                log = Log(tmp_path / str(index), base, kept)
            assert log.journal == plain
        assert log.number > 3
        assert list(log.directory.iterdir()) == [log.path]
        log.close()


def test_an_announcement_that_a_later_round_may_take_survives_with_its_payload() -> None:
    base, kept_rounds, disks = lives("../tests/seeds/20261276", 20261276)  # all are killed while offers wait
    journal, announced, late = Journal(base, kept_rounds, STALENESS), list[Announcement](), 0
    for record in disks[5]:
        message = wal.read_own(record.envelope) if isinstance(record, ev.Said) else None
        journal.write(record, message)
        announced += [message] if isinstance(message, Announcement) else []
        if not isinstance(record, ev.Certified):
            continue
        state = journal.state
        kept = {said.payload for said, _ in journal.said if isinstance(said, Announcement)}
        past = {said.payload for said in announced if said.round <= state.round and state.may_take(said, STALENESS)}
        assert kept == past | {said.payload for said in announced if said.round > state.round} <= journal.payloads()
        late += len(past)
    assert late > 0


def test_a_record_that_does_not_follow_is_our_mistake_and_never_reaches_the_disk(tmp_path: Path) -> None:
    base, records = some_records()
    certified = [record for record in records if isinstance(record, ev.Certified)]
    log = begun(tmp_path, [certified[0]], base)
    with pytest.raises(AssertionError, match="follows a saved state"):
        log.append([certified[1], certified[3]])
    assert log.journal == folded(base, [certified[0]])
    log.close()
    assert reopened(tmp_path, base) == folded(base, [certified[0]])


def test_a_snapshot_larger_than_a_segment_is_not_made_again_with_every_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wal, "SEGMENT_BYTES", 500)
    base, records = some_records()
    log = begun(tmp_path, records, base)
    number = log.number
    for round_number in range(20):
        log.append([ev.Silence(b"s" * 32, round_number)])
    assert log.number == number
    log.close()


# ---------------------------------------------------------------------------------------------------
# What was torn


def test_whatever_part_of_the_last_record_is_there_it_is_cut_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base, records = some_records()
    records.append(ev.Silence(b"b" * 32, 300))
    log = begun(tmp_path / "whole", records, base)
    log.close()
    content = log.path.read_bytes()
    *_, last, end = offsets(log.path)
    (tmp_path / "torn").mkdir()
    path = tmp_path / "torn" / log.path.name
    for size in range(last, end):
        path.write_bytes(content[:size])
        caplog.clear()
        log = Log(tmp_path / "torn", base, KEPT)
        assert log.journal == folded(base, records[:-1])
        assert path.read_bytes() == content[:last]
        line = f"end of the log cut off: path {path}, offset {last}, bytes {size - last}"
        assert caplog.messages == ([line] if size > last else [])
        log.append(records[-1:])
        log.close()
        assert path.read_bytes() == content


@pytest.mark.parametrize("kept", [0, 5, 16, 200])
def test_blocks_that_were_never_written_are_cut_off(tmp_path: Path, kept: int) -> None:
    base, records = some_records()
    log = begun(tmp_path, records, base)
    log.close()
    content = log.path.read_bytes()
    *_, end = offsets(log.path)
    torn = frame(log.number, end, b"x" * 3_000)[:kept]
    log.path.write_bytes(content + torn + bytes(4_096 - len(torn)))
    assert reopened(tmp_path, base) == folded(base, records)
    assert log.path.read_bytes() == content


# ---------------------------------------------------------------------------------------------------
# What was damaged


def test_a_flipped_bit_anywhere_in_the_log_is_refused(tmp_path: Path) -> None:
    """In the last record, too: it may have been sent."""
    base, records = some_records()
    log = begun(tmp_path, [*records[:6], ev.Silence(b"b" * 32, 7)], base)
    log.close()
    content, starts = log.path.read_bytes(), offsets(log.path)
    rng = Random(1)
    for at in range(len(content)):
        flipped = bytearray(content)
        flipped[at] ^= 1 << rng.randrange(8)
        with pytest.raises(DataError) as error:
            frames_of(log.path, 1, bytes(flipped))
        begin = max([start for start in starts if start <= at], default=0)
        assert f"damaged at byte {begin}:" in str(error.value) or (12 <= at < 16 and "Update" in str(error.value))
    for at in starts[:-1]:
        flipped = bytearray(content)
        flipped[at + 20] ^= 1
        log.path.write_bytes(flipped)
        with pytest.raises(
            DataError, match=rf"^{log.path}: damaged at byte {at}: .* move the directory {tmp_path} away"
        ):
            Log(tmp_path, base, KEPT)
        assert log.path.read_bytes() == flipped


def test_a_damaged_record_that_ends_in_a_few_zeros_is_not_taken_for_one_that_was_never_written() -> None:
    content = header(1) + frame(1, len(header(1)), b"snapshot")
    at = len(content)
    content += frame(1, at, b"x" * 2 * segment.SECTOR_BYTES + bytes(9))
    flipped = bytearray(content)
    flipped[at + 100] ^= 1
    assert len(frames_of(Path("00000001.log"), 1, content)[0]) == 2
    with pytest.raises(DataError, match=f"damaged at byte {at}:"):
        frames_of(Path("00000001.log"), 1, bytes(flipped))


def test_a_record_in_another_place_is_refused(tmp_path: Path) -> None:
    base, records = some_records()
    log = begun(tmp_path, records[:6], base)
    log.close()
    content, starts = log.path.read_bytes(), offsets(log.path)
    first, second, third = starts[2:5]
    log.path.write_bytes(content[:first] + content[second:third] + content[first:second] + content[third:])
    with pytest.raises(DataError, match=f"damaged at byte {first}"):
        Log(tmp_path, base, KEPT)
    log.path.write_bytes(content)
    log.path.rename(tmp_path / "00000002.log")
    with pytest.raises(DataError, match="damaged at byte 0"):
        Log(tmp_path, base, KEPT)


@pytest.mark.parametrize("size", [0, 11, 23, 24, 60])
def test_a_segment_without_its_snapshot_is_refused(tmp_path: Path, size: int) -> None:
    base, records = some_records()
    log = begun(tmp_path, records[:6], base)
    log.close()
    log.path.write_bytes(log.path.read_bytes()[:size])
    with pytest.raises(DataError, match=r"00000001\.log: damaged.*move the directory"):
        Log(tmp_path, base, KEPT)


def test_a_newer_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    base, _ = some_records()
    path = tmp_path / "00000001.log"
    path.write_bytes(header(1, version=2) + b"in whatever form")
    before = path.read_bytes()
    with pytest.raises(DataError, match=r"has format 2, and this p2ptrain reads up to 1\. Update p2ptrain"):
        Log(tmp_path, base, KEPT)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("bodies", "why"),
    [
        ([{"type": "Silence", "branch": b"", "round": 1}], "does not begin with a snapshot"),
        ([None, {"type": "Promise"}], "not a record that this version knows"),
        ([None, {"type": "Silence", "branch": 5}], "not a record that this version knows"),
        ([None, {"type": "Said", "envelope": b"?"}], "this version would not send"),
        ([None, None], "the segment has a second snapshot"),
    ],
)
def test_what_stands_under_its_digest_and_is_no_record_is_refused(tmp_path: Path, bodies: list[Any], why: str) -> None:
    base, _ = some_records()
    snapshot = segment.encoded(segment.Snapshot(Journal(base, KEPT).saved_at(0, b""), False))
    content = header(1)
    for body in bodies:
        content += frame(1, len(content), snapshot if body is None else msgspec.msgpack.encode(body))
    (tmp_path / "00000001.log").write_bytes(content)
    with pytest.raises(DataError, match=why):
        Log(tmp_path, base, KEPT)


# ---------------------------------------------------------------------------------------------------
# Disks that fail


def failing(monkeypatch: pytest.MonkeyPatch, name: str, code: int, partly: bool = False) -> None:
    """Makes a system call fail once, with nothing or half of it done."""
    real = getattr(os, name)

    def fail(first: Any, *rest: Any) -> Any:
        if partly and len(rest[0]) > 1:  # a short write comes first
            return real(first, rest[0][: len(rest[0]) // 2])
        monkeypatch.setattr(os, name, real)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, name, fail)


@pytest.mark.parametrize(
    ("name", "code", "partly", "words"),
    [
        ("write", errno.ENOSPC, False, "Free some space"),
        ("write", errno.ENOSPC, True, "Free some space"),
        ("write", errno.EIO, True, "Check the disk"),
        ("fsync", errno.EIO, False, "Check the disk"),
        ("fsync", errno.ENOSPC, False, "Free some space"),
        ("fsync", errno.EDQUOT, False, "Free some space"),
    ],
)
def test_after_a_failed_append_nothing_is_lost_and_the_next_one_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int, partly: bool, words: str
) -> None:
    base, records = some_records()
    log = begun(tmp_path, records[:10], base)
    with monkeypatch.context() as patch:
        failing(patch, name, code, partly)
        with pytest.raises(DiskError, match=words) as error:
            log.append(records[10:20])
    assert (error.value.path, error.value.is_full) == (log.path, code != errno.EIO)
    assert log.journal == folded(base, records[:10])
    log.append(records[20:21])
    assert log.journal == folded(base, [*records[:10], records[20]])
    log.close()
    assert reopened(tmp_path, base) == log.journal


def test_a_disk_that_stays_full_is_tried_again_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, records = some_records()
    log = begun(tmp_path, records[:10], base)
    for _ in range(3):
        for name in ("write", "fsync"):
            with monkeypatch.context() as patch:
                failing(patch, name, errno.ENOSPC)
                with pytest.raises(DiskError):
                    log.append(records[10:20])
    log.append(records[10:])
    log.close()
    assert reopened(tmp_path, base) == folded(base, records)


def test_a_log_that_cannot_be_compacted_grows_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    base, records = some_records()
    log = begun(tmp_path, records[:10], base)
    log.limit = log.size

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(wal.files, "write_file", full)
        log.append(records[10:])
    [line] = caplog.messages
    assert line.startswith("log not compacted: ")
    assert (log.number, log.journal) == (1, folded(base, records))
    log.append([ev.Observed(b"more")])
    log.close()
    assert reopened(tmp_path, base).scores == b"more"


def test_a_directory_that_may_not_be_written_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, _ = some_records()
    with monkeypatch.context() as patch:
        failing(patch, "mkdir", errno.EACCES)
        with pytest.raises(DiskError, match=r"wal: cannot be made \(Permission denied\)\. Let this user write there"):
            Log(tmp_path / "wal", base, KEPT)


# ---------------------------------------------------------------------------------------------------
# Power cuts


@pytest.mark.parametrize("seed", range(3))
def test_wherever_the_power_is_cut_what_was_appended_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Before and in the middle of every change, with small segments; a killed process is the mild case."""
    monkeypatch.setattr(wal, "SEGMENT_BYTES", 1_000)
    base, records = some_records(60)
    batches = [records[at : at + 2] for at in range(0, len(records), 2)]
    journals = [folded(base, records[:count]) for count in range(len(records) + 1)]
    cuts = 0
    while True:
        root, after = tmp_path / f"{cuts}", tmp_path / f"{cuts} after"
        root.mkdir()
        power, done = Power(root, cuts, Random(f"{seed} {cuts}")), 0
        with power.on():
            log = Log(root / "wal", base, KEPT)
            for batch in batches:
                log.append(batch)
                done += len(batch)
        power.disk_after(after)
        again = Log(after / "wal", base, KEPT)
        found = [count for count in range(done, min(done + 2, len(records)) + 1) if journals[count] == again.journal]
        assert found, f"cut before change {cuts}: not the journal of {done} records, or of some that were being written"
        again.append(records[found[0] :])
        again.close()
        assert reopened(after / "wal", base) == journals[-1]
        if not power.is_off:
            break
        cuts += 1
    assert cuts >= 100
    assert log.number > 5


@pytest.mark.parametrize("seed", range(2))
def test_whichever_change_fails_what_was_appended_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """One system call fails, the batch is retried, and a little later the power fails."""
    monkeypatch.setattr(wal, "SEGMENT_BYTES", 1_000)
    base, records = some_records(60)
    number = 0
    while True:
        root, after = tmp_path / f"{number}", tmp_path / f"{number} after"
        (root / "wal").mkdir(parents=True)
        rng = Random(f"{seed} {number}")
        power, done, more = Power(root, number, rng, fails=True), 0, rng.randint(1, 4)
        with power.on():
            try:
                log = Log(root / "wal", base, KEPT)
            except DiskError:
                log = Log(root / "wal", base, KEPT)
            while done < len(records) and more:
                try:
                    log.append(records[done : done + 2])
                except DiskError:
                    log.append(records[done : done + 2])
                done += 2
                more -= power.changes > number
            log.close()
        power.disk_after(after)
        assert reopened(after / "wal", base) == folded(base, records[:done]), f"change {number} failed"
        if power.changes <= number:
            break
        number += 1
    assert number >= 100
