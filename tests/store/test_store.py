"""The store: one process per directory, an identity that knows whether it has sent messages, and payloads."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from p2ptrain.core import events as ev
from p2ptrain.core.history import Entry
from p2ptrain.core.messages import payload_digest
from p2ptrain.digest import PIECE_BYTES
from p2ptrain.errors import ConfigError, DataError
from p2ptrain.files import DiskError
from p2ptrain.store.checkpoints import Checkpoints
from p2ptrain.store.lock import Lock
from p2ptrain.store.payloads import PayloadStore
from p2ptrain.store.store import Store
from tests.helpers.driver import a_dataset
from tests.helpers.lone_node import lived
from tests.helpers.store import ME, Power, folded, named_run, opened, some_records

STALENESS = named_run().agreement.staleness_rounds_max


def content_of(number: int) -> bytes:
    return Random(number).randbytes(100)


def named(number: int) -> bytes:
    return payload_digest(content_of(number))


def fail_with(code: int) -> Any:
    def fail(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    return fail


# ---------------------------------------------------------------------------------------------------
# Locks

HOLDER = """
import sys, time
from pathlib import Path
from p2ptrain.store.lock import Lock
lock = {make}
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["directory", "identity"])
def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "place"
    make = {"directory": Lock.of_directory, "identity": Lock.of_identity}[kind]
    code = HOLDER.format(make=f"Lock.of_{kind}(Path({str(path)!r}))")
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError) as error:
            make(path)
        for part in (f"process {process.pid}", f"the {kind} {path}", "Stop that process first"):
            assert part in str(error.value)
        process.send_signal(signal.SIGKILL)
        process.wait()
    with make(path) as lock:
        assert lock.path.read_text().strip() == str(os.getpid())
        with pytest.raises(ConfigError, match=f"process {os.getpid()}"):  # not even this one twice
            make(path)
    make(path).release()


def test_a_key_under_two_names_is_one_key(tmp_path: Path) -> None:
    key, link = tmp_path / "keys" / "identity.key", tmp_path / "link.key"
    key.parent.mkdir()
    link.symlink_to(key)  # which may still have to be made
    for names in ((key, link), (link, key)):
        with Lock.of_identity(names[0]), pytest.raises(ConfigError, match=f"the identity {names[1]} is in use by"):
            Lock.of_identity(names[1])
    for directory, name in (("run", link), ("again", key)):
        with Store(tmp_path / directory, named_run(), some_records()[0], ME, name) as store:
            assert store.is_forgetful == (directory == "again")  # it has spoken, as whatever it was called
    circle = tmp_path / "circle.key"
    circle.symlink_to(circle)
    Lock.of_identity(circle).release()


def test_a_store_is_open_once(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(ConfigError, match="in use by process"):
        opened(tmp_path)
    opened(tmp_path).close()


def test_a_store_that_could_not_be_opened_is_not_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail_with(errno.EIO))
        with pytest.raises(DiskError):
            opened(tmp_path)
    opened(tmp_path).close()


# ---------------------------------------------------------------------------------------------------
# Payloads


def test_a_payload_that_is_kept_is_there_after_a_restart_and_others_are_not(tmp_path: Path) -> None:
    payloads = PayloadStore(tmp_path)
    for number in range(4):
        payloads.put(named(number), content_of(number))
    assert payloads.fleeting([named(1), named(9)]) == [named(1)]
    assert payloads.keep([named(1), named(2), named(9)]) == [named(9)]
    assert payloads.fleeting([named(1), named(3)]) == [named(3)]
    assert [payloads.get(named(number)) for number in range(4)] == [content_of(number) for number in range(4)]
    again = PayloadStore(tmp_path)
    assert [again.get(named(number)) for number in range(4)] == [None, content_of(1), content_of(2), None]
    assert [named(number) in again for number in range(4)] == [False, True, True, False]
    assert [again.size(named(number)) for number in (1, 3)] == [100, None]
    name = named(1).hex()
    assert (tmp_path / name).read_bytes() == content_of(1)


def test_pieces_are_read_from_memory_and_from_the_disk(tmp_path: Path) -> None:
    content = Random(1).randbytes(2 * PIECE_BYTES + 5)
    name = payload_digest(content)
    payloads = PayloadStore(tmp_path)
    payloads.put(name, content)
    payloads.keep([name])
    pieces = [content[:PIECE_BYTES], content[PIECE_BYTES : 2 * PIECE_BYTES], content[-5:], None]
    for place in (payloads, PayloadStore(tmp_path)):
        assert [place.read_piece(name, index) for index in range(4)] == pieces
        assert place.read_piece(name, -1) is None
        assert place.read_piece(bytes(32), 0) is None


def test_a_damaged_payload_is_named_and_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    payloads = PayloadStore(tmp_path)
    payloads.put(named(1), content_of(1))
    payloads.keep([named(1)])
    name = named(1).hex()
    path = tmp_path / name
    path.write_bytes(b"damaged")
    again = PayloadStore(tmp_path)
    assert again.get(named(1)) is None
    assert caplog.messages == [f"removed a damaged payload: path {path}"]
    assert not path.exists()
    again.put(named(1), content_of(1))
    assert again.keep([named(1)]) == []
    assert PayloadStore(tmp_path).get(named(1)) == content_of(1)


@pytest.mark.parametrize("trouble", ["gone", "unreadable"])
def test_a_lasting_payload_that_cannot_be_read_any_more_can_be_stored_again(tmp_path: Path, trouble: str) -> None:
    payloads = PayloadStore(tmp_path, memory_bytes=0)
    payloads.put(named(1), content_of(1))
    payloads.keep([named(1)])
    path = tmp_path / named(1).hex()
    path.unlink()
    if trouble == "gone":
        assert payloads.get(named(1)) is None
    else:
        path.mkdir()
        with pytest.raises(DiskError):
            payloads.get(named(1))
        path.rmdir()
    payloads.put(named(1), content_of(1))
    assert payloads.get(named(1)) == content_of(1)


def test_a_good_payload_takes_the_place_of_a_damaged_file_that_nobody_has_read(tmp_path: Path) -> None:
    name = named(1).hex()
    (tmp_path / name).write_bytes(b"")  # of a power cut
    payloads = PayloadStore(tmp_path)
    payloads.put(named(1), content_of(1))
    assert payloads.keep([named(1)]) == []
    assert PayloadStore(tmp_path).get(named(1)) == content_of(1)


def test_what_memory_has_no_room_for_is_on_the_disk_the_longest_unused_first(tmp_path: Path) -> None:
    payloads = PayloadStore(tmp_path, memory_bytes=300)
    for number in range(3):
        payloads.put(named(number), content_of(number))
    assert list(tmp_path.iterdir()) == []
    payloads.get(named(0))
    payloads.put(named(3), content_of(3))
    assert [path.name for path in tmp_path.iterdir()] == [named(1).hex()]
    assert [payloads.get(named(number)) for number in range(4)] == [content_of(number) for number in range(4)]
    assert payloads.fleeting([named(1)]) == [named(1)]
    assert payloads.keep([named(1)]) == []
    assert payloads.fleeting([named(1)]) == []


def test_pruning_leaves_what_is_to_be_kept(tmp_path: Path) -> None:
    payloads = PayloadStore(tmp_path, memory_bytes=250)
    for number in range(4):
        payloads.put(named(number), content_of(number))
    payloads.keep([named(1)])
    (tmp_path / "ab").mkdir(exist_ok=True)
    (tmp_path / "ab" / "half.partial").write_bytes(b"half")
    payloads.prune({named(0), named(2), named(7)})
    assert [named(number) in payloads for number in range(4)] == [True, False, True, False]
    assert {path.name for path in tmp_path.iterdir()} <= {named(0).hex(), named(2).hex()}
    payloads.put(named(1), content_of(1))
    assert payloads.keep([named(1)]) == []
    assert PayloadStore(tmp_path).get(named(1)) == content_of(1)


def test_pruning_leaves_what_came_since_it_was_decided_what_to_keep(tmp_path: Path) -> None:
    payloads = PayloadStore(tmp_path, memory_bytes=250)
    payloads.put(named(0), content_of(0))
    known = payloads.names()
    for number in range(1, 5):  # the first of them is made to last, the others are spilled in their turn
        payloads.put(named(number), content_of(number))
        payloads.keep([named(1)])
    payloads.prune((), known)
    assert [named(number) in payloads for number in range(5)] == [False, True, True, True, True]
    assert payloads.fleeting(map(named, range(5))) == [named(2), named(3), named(4)]


def test_a_payload_that_could_not_be_kept_is_still_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    payloads = PayloadStore(tmp_path)
    payloads.put(named(1), content_of(1))
    for name in ("write", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail_with(errno.ENOSPC))
            with pytest.raises(DiskError, match="Free some space"):
                payloads.keep([named(1)])
    assert payloads.fleeting([named(1)]) == [named(1)]
    assert payloads.keep([named(1)]) == []
    assert [path.name for path in tmp_path.iterdir()] == [named(1).hex()]


# ---------------------------------------------------------------------------------------------------
# All of it


def held(store: Store, records: list[ev.Record]) -> None:
    """Stores fake payloads for records of a simulation, which has only their names."""
    for record in records:
        names = record.payloads if isinstance(record, ev.Said) else ()
        if isinstance(record, ev.Certified) and isinstance(record.step, Entry):
            names = tuple(taken.payload for taken in record.step.manifest.taken)
        for name in names:
            store.payloads.put(name, b"the payload of " + name)


@pytest.fixture
def _any_payload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2ptrain.store.payloads.payload_digest", lambda content: content[-32:])


@pytest.mark.usefixtures("_any_payload")
def test_a_store_gives_back_what_was_written(tmp_path: Path) -> None:
    base, records = some_records()
    with opened(tmp_path) as store:
        assert (store.is_forgetful, store.saved(None)) == (False, ev.Saved(base, (), (), 0, base.root))
        held(store, records)
        store.write(records)
        state, root = store.journal.history[-2].state, store.journal.history[-1].state.root
        made = store.checkpoints.write(
            state.round, state.branch, state.head, root, 3, lambda path: path.touch(), b"weights"
        )
        store.prune()
    with opened(tmp_path) as store:
        assert not store.is_forgetful
        assert store.newest_checkpoint() == made
        expected = folded(base, records, named_run().agreement.history_rounds, STALENESS)
        assert store.journal == expected
        assert store.saved(made) == expected.saved_at(state.round, root)
        assert len(expected.payloads()) >= 20
        assert all(store.payloads.get(name) for name in expected.payloads())
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "checkpoints", "identity", "lock", "payloads", "run.json", "wal",
    ]  # fmt: skip


def test_words_do_not_go_to_the_log_before_their_payloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, records = some_records()
    said = next(record for record in records if isinstance(record, ev.Said) and record.payloads)
    with opened(tmp_path) as store:
        with pytest.raises(DataError, match=f"payload {said.payloads[0].hex()} is no longer here"):
            store.write([said])
        held(store, [said])
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail_with(errno.ENOSPC))
            with pytest.raises(DiskError):
                store.write([said])
        assert store.journal == folded(base, [], store.journal.kept, STALENESS)
        assert store.log.size == store.log.path.stat().st_size


@pytest.mark.usefixtures("_any_payload")
def test_damaged_files_are_counted_and_a_payload_that_a_start_lacks_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, records = some_records()
    with opened(tmp_path) as store:
        held(store, records)
        store.write(records)
        state, root = store.journal.state, b"x" * 32
        for _ in range(2):
            made = store.checkpoints.write(
                state.round, state.branch, state.head, root, 3, lambda path: path.touch(), b"weights"
            )
        store.prune()
        first, *_, last = sorted(store.journal.payloads())
        assert store.damaged_files == 0
    (made.path / "state.bin").write_bytes(b"weighty")
    (tmp_path / "run" / "diary.jsonl").write_bytes(b"no line")
    (tmp_path / "run" / "payloads" / first.hex()).write_bytes(b"something that has the digest of something else")
    (tmp_path / "run" / "payloads" / last.hex()).unlink()
    with opened(tmp_path) as store:
        assert store.damaged_files == 1, "the diary"
        assert store.newest_checkpoint() is not None
        assert store.payloads.get(first) is None
        for _ in range(2):  # nothing is counted twice
            store.prune()
        assert store.damaged_files == 3
        caplog.clear()
        store.saved(None)
        [line] = caplog.messages
        assert line.endswith(f": count 2, first {store.payloads.directory / first.hex()}")
        assert store.journal.payloads(state.round) < store.journal.payloads()


@pytest.mark.usefixtures("_any_payload")
def test_a_payload_that_comes_after_its_round_was_decided_lasts_too(tmp_path: Path) -> None:
    _, records = some_records()
    certified = next(record for record in records if isinstance(record, ev.Certified))
    with opened(tmp_path) as store:
        store.write([certified])
        held(store, [certified])
        store.payloads.put(named(1), content_of(1))
        store.payloads.put(named(2), content_of(2))
        store.prune([named(1)])
        assert [named(number) in store.payloads for number in (1, 2)] == [True, False]
    with opened(tmp_path) as store:
        assert [name for name in store.journal.payloads() if store.payloads.get(name) is None] == []
        assert named(1) not in store.payloads


@pytest.mark.usefixtures("_any_payload")
def test_a_full_disk_is_pruned_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, records = some_records()
    certified = next(record for record in records if isinstance(record, ev.Certified))
    pruned: list[int] = []
    with opened(tmp_path) as store:
        store.payloads.put(named(1), content_of(1))
        store.payloads.keep([named(1)])
        store.write([certified])
        held(store, [certified])
        monkeypatch.setattr(store.checkpoints, "prune", lambda kept, *_: pruned.append(kept))
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", fail_with(errno.ENOSPC))
            with pytest.raises(DiskError, match="Free some space"):
                store.prune()
        assert named(1) not in store.payloads and pruned == [4]
        store.prune()
        assert store.payloads.fleeting(store.journal.payloads()) == []


def test_a_start_prunes_since_fewer_checkpoints_may_be_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk no round is applied, after which a node does so otherwise."""
    pruned: list[int] = []
    monkeypatch.setattr(Checkpoints, "prune", lambda _, kept, *__: pruned.append(kept))
    lived(tmp_path / "node", a_dataset(tmp_path / "set"), 1)
    assert pruned == [4]


def test_an_identity_that_has_spoken_and_lost_its_log_knows_it(tmp_path: Path) -> None:
    opened(tmp_path).close()
    assert (tmp_path / "identity.key.spoken" / named_run().run_id).read_bytes() == b""
    for _ in range(2):  # nothing was written in between, so it is as lost as before
        for path in (tmp_path / "run" / "wal").iterdir():
            path.unlink()
        with opened(tmp_path) as store:
            assert store.is_forgetful
    with opened(tmp_path) as store:
        assert store.is_forgetful
        store.write([ev.Silence(b"", 2**48)])
        assert not store.is_forgetful
    with opened(tmp_path) as store:
        assert (store.is_forgetful, store.journal.silences) == (False, [ev.Silence(b"", 2**48)])


def test_in_another_run_the_identity_is_new(tmp_path: Path) -> None:
    opened(tmp_path).close()
    with Store(tmp_path / "other", named_run("other"), some_records()[0], ME, tmp_path / "identity.key") as store:
        assert not store.is_forgetful
    moved = tmp_path / "moved"
    with Store(moved, named_run(), some_records()[0], ME, tmp_path / "identity.key") as store:
        assert store.is_forgetful


def test_a_newcomer_whose_power_is_cut_is_a_newcomer_or_has_its_log(tmp_path: Path) -> None:
    cuts = 0
    while True:
        root, after = tmp_path / f"{cuts}", tmp_path / f"{cuts} after"
        root.mkdir()
        power = Power(root, cuts, Random(cuts))
        with power.on():
            opened(root).close()
        power.disk_after(after)
        with opened(after) as store:
            assert not store.is_forgetful
        if not power.is_off:
            break
        cuts += 1
    assert cuts >= 25


@pytest.mark.usefixtures("_any_payload")
def test_wherever_the_power_is_cut_what_was_said_has_its_payloads(tmp_path: Path) -> None:
    base, records = some_records(30)
    kept = named_run().agreement.history_rounds
    cuts = 0
    while True:
        root, after = tmp_path / f"{cuts}", tmp_path / f"{cuts} after"
        root.mkdir()
        with opened(root) as store:  # its beginning is another test's
            pass
        power, done = Power(root, cuts, Random(cuts)), 0
        with power.on(), opened(root) as store:
            for at in range(0, len(records), 5):
                held(store, records[at : at + 5])
                store.write(records[at : at + 5])
                done = at + 5
        power.disk_after(after)
        with opened(after) as store:
            assert store.journal in [folded(base, records[:count], kept, STALENESS) for count in range(done, done + 6)]
            words = {name for _, said in store.journal.said for name in said.payloads}
            assert [name for name in sorted(words) if store.payloads.get(name) is None] == []
        if not power.is_off:
            break
        cuts += 7  # a few of a thousand
    assert cuts >= 70


def test_a_directory_of_another_run_or_identity_is_refused_and_left_alone(tmp_path: Path) -> None:
    opened(tmp_path).close()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"}
    with pytest.raises(DataError, match=r"run\.json: damaged, or the directory is not of run other"):
        opened(tmp_path, named_run("other"))
    with pytest.raises(DataError, match=f"identity: damaged, or .* not of the identity {'6f' * 8}"):
        opened(tmp_path, me=b"o" * 32)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"} == before


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "Free some space there"),
        (errno.EROFS, "Let this user write there, or choose another place"),
        (errno.EIO, "Check the disk"),
        (errno.EMFILE, "No saved data is lost"),
    ],
)
def test_a_disk_that_refuses_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    with opened(tmp_path) as store:
        monkeypatch.setattr(os, "write", fail_with(code))
        with pytest.raises(DiskError) as error:
            store.write([ev.Observed(b"scores")])
        assert str(error.value).startswith(f"{store.log.path}: cannot be written ({os.strerror(code)}). {words}")
