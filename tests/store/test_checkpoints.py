"""Checkpoints: complete or absent, and skipped if damaged or on a branch that lost."""

from __future__ import annotations

import errno
import itertools
import json
import os
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from p2ptrain import files
from p2ptrain.core import events as ev
from p2ptrain.core.journal import Journal
from p2ptrain.core.state import AgreedState
from p2ptrain.core.succession import UNMOVED, Assented, Motion, Succession
from p2ptrain.digest import PIECE_BYTES, leaf_digests, leaves_of, merkle_root
from p2ptrain.files import DiskError
from p2ptrain.store import checkpoints as module
from p2ptrain.store.checkpoints import LEAVES_NAME, Checkpoint, Checkpoints, NewerError
from tests.helpers.store import KEPT, Power, folded, some_records, void

RUN = b"r" * 32
LOST = b"l" * 32  # a head that is on no history


def history() -> tuple[Journal, list[AgreedState]]:
    base, records = some_records()
    certified = [record for record in records if isinstance(record, ev.Certified)]
    return folded(base, list(certified)), [record.state for record in certified]


def opened(directory: Path, run_id: bytes = RUN) -> Checkpoints:
    made = Checkpoints(directory, run_id)
    made.tidy()
    return made


def write(
    checkpoints: Checkpoints, number: int, head: bytes, root: bytes | None = None, weights: bytes = b"weights"
) -> Checkpoint:
    """Writes a checkpoint, by default with the root that the history certifies."""
    content = f"all of round {number}".encode()
    if root is None:
        root = b"x" * 32 if head == LOST else history()[0].roots.get(number, b"x" * 32)
    return checkpoints.write(number, RUN, head, root, 0, lambda path: void(path.write_bytes(content)), weights)


def test_a_checkpoint_comes_back_as_it_was_written(tmp_path: Path) -> None:
    weights = Random(1).randbytes(PIECE_BYTES + 100)
    root = merkle_root(leaf_digests(weights), len(weights))
    made = write(opened(tmp_path), 7, b"h" * 32, root, weights)
    checkpoints = opened(tmp_path)
    [found] = checkpoints.present()
    assert found == made
    assert (found.round, found.branch, found.head, found.root) == (7, RUN, b"h" * 32, root)
    assert found.trainer_path.read_bytes() == b"all of round 7"
    assert checkpoints.verify(found) is None
    assert [found.read_piece(index) for index in (-1, 0, 1, 2)] == [
        None, weights[:PIECE_BYTES], weights[PIECE_BYTES:], None,
    ]  # fmt: skip
    assert sorted(path.name for path in found.path.iterdir()) == ["checkpoint.json", "state.bin", "trainer.safetensors"]


def with_leaves(directory: Path) -> tuple[Checkpoint, bytes, bytes]:
    """Writes a checkpoint. Returns it, its weights, and the digests of their pieces."""
    weights = Random(2).randbytes(2 * PIECE_BYTES + 100)
    root = merkle_root(leaf_digests(weights), len(weights))
    leaves = leaves_of(weights, root)
    checkpoints = opened(directory)
    made = checkpoints.write(7, RUN, LOST, root, 0, lambda path: void(path.write_bytes(b"")), weights, leaves)
    return made, weights, leaves


def test_the_digests_of_a_states_pieces_are_kept_beside_it_and_the_state_is_not_read_for_them(tmp_path: Path) -> None:
    made, weights, leaves = with_leaves(tmp_path)
    (made.path / "state.bin").write_bytes(bytes(len(weights)))
    assert made.leaves() == leaves


@pytest.mark.parametrize("damage", ["gone", "bit", "short", "long", "another's", "directory"])
def test_wrong_digests_beside_a_state_are_noticed_and_worked_out_again(tmp_path: Path, damage: str) -> None:
    made, weights, leaves = with_leaves(tmp_path)
    path = made.path / "leaves.bin"
    match damage:
        case "bit":
            path.write_bytes(leaves[:-1] + bytes([leaves[-1] ^ 1]))
        case "short":
            path.write_bytes(leaves[:-1])
        case "long":
            path.write_bytes(leaves + b"?")
        case "another's":
            path.write_bytes(b"".join(leaf_digests(weights[:-1])))
        case _:
            path.unlink()
    if damage == "directory":
        path.mkdir()
    assert made.leaves() == leaves
    (made.path / "state.bin").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    assert made.leaves() == b"", "of neither is it known what it is"


def test_digests_are_those_that_a_person_can_check(tmp_path: Path) -> None:
    made = write(opened(tmp_path), 7, b"h" * 32, weights=b"")
    stamp = json.loads((made.path / "checkpoint.json").read_text())
    empty = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"  # BLAKE3 of nothing, as published
    assert stamp["state"] == {"bytes": 0, "blake3": empty}
    assert (stamp["format"], stamp["run"], stamp["round"]) == ("p2ptrain checkpoint 1", RUN.hex(), 7)


def test_the_newest_is_the_last_made_of_the_saved_history(tmp_path: Path) -> None:
    journal, states = history()
    checkpoints = opened(tmp_path)
    assert checkpoints.newest(journal) is None
    write(checkpoints, 1, LOST)
    assert checkpoints.newest(journal) is None
    write(checkpoints, states[0].round, states[0].head)  # older than the history that is kept
    assert len(states) > KEPT + 1
    assert checkpoints.newest(journal) is None
    third = write(checkpoints, states[-3].round, states[-3].head)
    write(checkpoints, 900, LOST)
    assert checkpoints.newest(journal) == third
    fetched = write(checkpoints, states[-2].root_round, b"", states[-2].root)
    assert checkpoints.newest(journal) == fetched
    older = write(checkpoints, states[-4].round, states[-4].head)  # gone back, and made later
    assert checkpoints.newest(journal) == older


def test_a_start_does_not_go_on_from_a_state_that_the_history_refutes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The node had computed a wrong state, saved it, and was killed before it was corrected."""
    journal, states = history()
    wronged, newest = states[-2], states[-1]
    assert newest.root_round == wronged.round
    checkpoints = opened(tmp_path)
    older = write(checkpoints, states[-3].round, states[-3].head)
    wrong = write(checkpoints, wronged.round, wronged.head, b"w" * 32)
    assert checkpoints.newest(journal) == older
    [line] = caplog.messages
    assert str(wrong.path) in line
    assert "was certified with the root" in line
    healed = write(checkpoints, wronged.round, wronged.head, newest.root)
    assert checkpoints.newest(journal) == healed
    not_yet = write(checkpoints, newest.round, newest.head, b"w" * 32)
    assert checkpoints.newest(journal) == not_yet, "what is not certified yet may be right"


def test_pruning_keeps_the_newest_that_is_certified(tmp_path: Path) -> None:
    journal, states = history()
    checkpoints = opened(tmp_path)
    write(checkpoints, states[-3].round, states[-3].head)
    certified = write(checkpoints, states[-2].round, states[-2].head)
    newest = [write(checkpoints, states[-1].round, states[-1].head) for _ in range(3)]
    checkpoints.prune(1, journal)
    assert checkpoints.present() == [certified, newest[-1]]


@pytest.mark.parametrize("name", ["trainer.safetensors", "state.bin", "checkpoint.json"])
@pytest.mark.parametrize("damage", ["bit", "short", "long", "gone", "no text"])
def test_a_damaged_checkpoint_is_named_and_passed_over(
    tmp_path: Path, name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    journal, states = history()
    checkpoints = opened(tmp_path)
    good = write(checkpoints, states[-2].round, states[-2].head)
    path = write(checkpoints, states[-1].round, states[-1].head).path / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    match damage:
        case "bit":
            path.write_bytes(content)
        case "short":
            path.write_bytes(path.read_bytes()[:-3])
        case "long":
            path.write_bytes(path.read_bytes() + b"?")
        case "no text":
            path.write_bytes(b'{"format": "\xb1"}')
        case _:
            path.unlink()
    assert checkpoints.newest(journal) == good
    [line] = caplog.messages
    assert line.startswith("checkpoint skipped: ")
    assert str(path.parent) in line


def test_a_flipped_bit_anywhere_in_a_stamp_is_noticed(tmp_path: Path) -> None:
    journal, states = history()
    checkpoints = opened(tmp_path)
    made = write(checkpoints, states[-1].round, states[-1].head)
    path = made.path / "checkpoint.json"
    content = path.read_bytes()
    for at in range(len(content)):
        flipped = bytearray(content)
        flipped[at] ^= 1
        path.write_bytes(flipped)
        assert checkpoints.newest(journal) is None, f"byte {at}"


def test_a_checkpoint_of_a_later_release_is_refused_and_not_removed(tmp_path: Path) -> None:
    journal, states = history()
    checkpoints = opened(tmp_path)
    newer = write(checkpoints, states[-1].round, states[-1].head).path
    stamp = newer / "checkpoint.json"
    changed = stamp.read_bytes().replace(b"p2ptrain checkpoint 1", b"p2ptrain checkpoint 2")
    stamp.write_bytes(changed.replace(b'"trained"', b'"trainings"'))
    for _ in range(3):
        write(checkpoints, states[-1].round, states[-1].head)
    checkpoints.prune(1, journal)
    assert newer.exists()
    with pytest.raises(NewerError, match="made by a later release"):
        checkpoints.newest(journal)


def test_a_checkpoint_of_another_run_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(opened(tmp_path, b"o" * 32), 7, b"h" * 32)
    assert opened(tmp_path).present() == []
    assert "belongs to another run" in caplog.messages[0]


def test_pruning_keeps_the_last_made_and_those_of_the_history(tmp_path: Path) -> None:
    journal, states = history()
    checkpoints = opened(tmp_path)
    write(checkpoints, 1, LOST)
    mine = [write(checkpoints, state.round, state.head) for state in states[-4:-1]]
    lost = [write(checkpoints, 900 + number, LOST) for number in range(3)]
    checkpoints.prune(2, journal)
    assert checkpoints.present() == [*mine[1:], *lost[1:]]
    assert checkpoints.newest(journal) == mine[2]
    again = write(checkpoints, 5, LOST)
    assert int(again.path.name[:8]) == int(lost[-1].path.name[:8]) + 1


def test_checkpoints_that_peers_still_fetch_stay_in_the_place_of_others(tmp_path: Path) -> None:
    journal, states = history()
    checkpoints = opened(tmp_path)
    made = [write(checkpoints, state.round, state.head) for state in states[-7:-1]]
    checkpoints.prune(4, journal, [each.path for each in (made[0], made[1], made[5])])
    assert checkpoints.present() == [made[0], made[1], *made[-2:]]
    for read in ([made[0].path, made[1].path], [each.path for each in made]):
        checkpoints.prune(3, journal, read)
        assert checkpoints.present() == [made[0], made[1], made[-1]], "one place is left to the newest"
    checkpoints.prune(3, journal, [made[-1].path])
    assert checkpoints.present() == [made[0], made[1], made[-1]], "that is one of the newest"
    checkpoints.prune(1, journal, [made[0].path])
    assert checkpoints.present() == made[-1:], "a node of one checkpoint goes on from its newest"


def test_the_newest_checkpoint_that_peers_can_fetch_stays_until_there_is_another(tmp_path: Path) -> None:
    """The roots of a large state cover all of it only now and then, and peers fetch no state without such a root."""
    journal, states = history()
    checkpoints = opened(tmp_path)
    made = [write(checkpoints, state.round, state.head) for state in states]
    old, whole, *_, last = [each for each in made if each.judged_by(journal).is_certified][-4:]
    for each in (old, whole):
        (each.path / LEAVES_NAME).write_bytes(bytes(32))
    checkpoints.prune(1, journal)
    assert checkpoints.present() == [whole, last, made[-1]]


def test_a_checkpoint_to_which_members_move_to_go_back_stays_until_that_is_settled(tmp_path: Path) -> None:
    journal, states = history()
    checkpoints = opened(tmp_path)
    mine = [write(checkpoints, number, LOST, bytes([number]) * 32) for number in range(1, 9)]
    motions = [Motion(bytes([each.round]) * 32, 9, 40, each.round, each.root, b"{}") for each in mine]
    assents = [Assented(b"a" * 32, 9, motions[4].name), Assented(b"b" * 32, 9, motions[2].name)]

    def kept(here: Succession) -> list[int]:
        journal.history[-1] = replace(journal.history[-1], state=replace(states[-1], succession=here))
        checkpoints.prune(1, journal)
        return [each.round for each in checkpoints.present()]

    ahead = [Motion(bytes([number]) * 32, 9, 40, 40, bytes(32), b"{}") for number in range(100, 104)]
    assert kept(Succession((*ahead, *motions[:6]), tuple(assents))) == [3, 5, 8]
    assert kept(Succession(decided=motions[2])) == [3, 8]
    assert kept(UNMOVED) == [8]


def test_a_checkpoint_that_cannot_be_read_just_now_is_not_pruned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, states = history()
    checkpoints = opened(tmp_path)
    made = [write(checkpoints, state.round, state.head) for state in states[-3:]]

    def read(path: Path, most: int) -> bytes | None:
        if path.parent == made[-1].path:
            raise DiskError(path, "cannot be read", OSError(errno.EMFILE, "too many open files"))
        return files.read_regular(path, most)

    with monkeypatch.context() as patch:
        patch.setattr(module, "files", SimpleNamespace(**{**vars(files), "read_regular": read}))
        checkpoints.prune(1, journal)
    assert made[-1] in checkpoints.present()


@pytest.mark.parametrize("moment", range(3))
def test_a_checkpoint_that_is_finished_while_others_are_pruned_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """The trainer's thread writes while the disk's thread scans the directory."""
    journal, states = history()
    checkpoints, looks, made = opened(tmp_path), itertools.count(), []
    for state in states[-4:]:
        write(checkpoints, state.round, state.head)

    def entries(directory: Path) -> list[Path]:
        found = files.entries(directory)
        if next(looks) == moment:
            made.append(write(checkpoints, 900, LOST))
        return found

    monkeypatch.setattr(module, "files", SimpleNamespace(**{**vars(files), "entries": entries}))
    checkpoints.prune(2, journal)
    assert checkpoints.present()[-1:] == made
    assert checkpoints.verify(made[0]) is None
    assert len(checkpoints.present()) <= 4


def test_what_a_crash_left_half_written_is_removed(tmp_path: Path) -> None:
    partial = tmp_path / "00000001-round-4.partial"
    partial.mkdir()
    (partial / "state.bin").write_bytes(b"half")
    assert opened(tmp_path).present() == []
    assert list(tmp_path.iterdir()) == []


def test_a_trainer_that_cannot_save_leaves_nothing_behind(tmp_path: Path) -> None:
    checkpoints = opened(tmp_path)

    def save(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(DiskError, match=r"00000001-round-7: cannot be written \(full\)\. Free some space"):
        checkpoints.write(7, RUN, b"h" * 32, b"x" * 32, 0, save, b"weights")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["write", "fsync"])
def test_on_a_full_disk_the_checkpoints_before_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    journal, states = history()
    checkpoints = opened(tmp_path)
    good = write(checkpoints, states[-2].round, states[-2].head)

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        with pytest.raises(DiskError, match="Free some space"):
            write(checkpoints, states[-1].round, states[-1].head)
    assert checkpoints.newest(journal) == good
    assert list(tmp_path.iterdir()) == [good.path]


def test_wherever_the_power_is_cut_a_checkpoint_is_whole_or_not_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal, states = history()
    cuts = 0
    while True:
        root, after = tmp_path / f"{cuts}", tmp_path / f"{cuts} after"
        root.mkdir()
        power, written = Power(root, cuts, Random(cuts)), []
        with power.on():
            checkpoints = opened(root / "checkpoints")
            for state in states[-4:]:
                written.append(write(checkpoints, state.round, state.head))
                checkpoints.prune(2, journal)
        power.disk_after(after)
        caplog.clear()
        again = opened(after / "checkpoints")
        newest = again.newest(journal)
        if written:
            assert newest is not None
            assert newest.round >= written[-1].round
        intact = [each.round for each in again.present() if again.verify(each) is None]
        assert intact[-1:] == ([newest.round] if newest else [])
        # A directory that was being removed may be there in part; it is older than what is whole.
        assert all(line.startswith("checkpoint skipped: ") for line in caplog.messages)
        if not power.is_off:
            break
        cuts += 1
    assert cuts >= 40


def test_a_directory_is_made_with_all_above_it_and_only_for_the_user(tmp_path: Path) -> None:
    files.make_directory(tmp_path / "a" / "b" / "c")
    assert [(tmp_path / part).stat().st_mode & 0o777 for part in ("a", "a/b", "a/b/c")] == [0o700] * 3
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DiskError, match="file: cannot be made"):
        files.make_directory(tmp_path / "file" / "d")
