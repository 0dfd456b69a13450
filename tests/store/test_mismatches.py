"""A machine that computes wrong states is detected across restarts, and refuses to run until its owner intervenes."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from p2ptrain import files
from p2ptrain.cli.exits import ExitStatus
from p2ptrain.core import events as ev
from p2ptrain.daemon import launch
from p2ptrain.errors import DataError, HardwareError
from p2ptrain.files import DiskError
from p2ptrain.identity import Identity
from p2ptrain.store.mismatches import Mismatches
from tests.helpers.cli import p2ptrain
from tests.helpers.driver import PEER, a_dataset, bench
from tests.helpers.lone_node import lived
from tests.helpers.net import skipping_time, until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mismatches"


async def miscalculate(tmp_path: Path, number: int) -> None:
    """Starts a node that computes one wrong state."""
    async with bench(tmp_path) as each, each.running():
        each.node.answer = lambda event: [ev.NoteWrongState(number)] if event == ev.PeerSeen(PEER) else []
        each.driver.intake.give(ev.PeerSeen(PEER))
        await until(lambda: number in each.store.mismatches.rounds)


@skipping_time
async def test_the_third_wrong_state_ends_a_node_that_was_started_again_after_each(tmp_path: Path) -> None:
    await miscalculate(tmp_path, 10)
    await miscalculate(tmp_path, 60)
    with pytest.raises(ExceptionGroup) as raised:
        await miscalculate(tmp_path, 108)
    assert raised.group_contains(HardwareError, match=r"in rounds 10, 60, 108, .* Suspect this machine's hardware")


@skipping_time
async def test_three_wrong_states_of_one_life_end_it(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        async with bench(tmp_path) as each, each.running() as task:
            each.node.answer = lambda event: [ev.NoteWrongState(event.peer[0])] if type(event) is ev.PeerSeen else []
            for number in (10, 60, 108):
                each.driver.intake.give(ev.PeerSeen(bytes([number]) * 32))
            await asyncio.wait([task])
    assert raised.group_contains(HardwareError, match="in rounds 10, 60, 108,")


def test_no_start_goes_on_until_the_owner_has_removed_the_note(tmp_path: Path) -> None:
    dataset = a_dataset(tmp_path / "data")
    lived(tmp_path / "node", dataset, 2)
    (directory,) = (tmp_path / "node" / "runs").iterdir()
    note = directory / "mismatches"
    assert not note.exists()
    made = Mismatches(note)
    made.note(7)
    made.note(8)
    with pytest.raises(
        HardwareError, match=f"Then remove {re.escape(str(note))}: the node does not start until you do"
    ):
        made.note(9)
    for _ in range(2):
        with pytest.raises(HardwareError, match="in rounds 7, 8, 9,"):
            lived(tmp_path / "node", dataset, 4)
    note.unlink()
    assert 4 in lived(tmp_path / "node", dataset, 4)


def test_a_round_counts_once_however_often_it_comes_out_wrong(path: Path) -> None:
    for _ in range(5):
        Mismatches(path).note(7)
    assert Mismatches(path).rounds == (7,)


def test_wrong_states_far_apart_end_nothing_and_only_those_of_the_window_are_kept(path: Path) -> None:
    for number in (10, 60, 110, 161, 211):
        Mismatches(path).note(number)
    assert Mismatches(path).rounds == (161, 211)
    with pytest.raises(HardwareError, match="in rounds 161, 211, 212,"):
        Mismatches(path).note(212)


def test_a_note_that_is_damaged_counts_for_nothing_and_counting_begins_anew(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Mismatches(path).note(1)
    Mismatches(path).note(2)
    good = path.read_bytes()
    for at in range(8 * len(good)):
        bad = bytearray(good)
        bad[at // 8] ^= 1 << at % 8
        path.write_bytes(bad)
        caplog.clear()
        assert Mismatches(path).rounds == ()
        [line] = caplog.messages
        assert line.startswith(f"earlier wrong states are unknown: path {path}, ")
    made = Mismatches(path)
    made.note(3)
    assert Mismatches(path).rounds == (3,)


def test_a_note_of_a_later_format_is_refused_and_kept(path: Path) -> None:
    Mismatches(path).note(1)
    assert b"format" not in path.read_bytes(), "as the releases before wrote it"
    later = b'{"format":2,"rounds":[[1,2,3]]}\n'
    path.write_bytes(later)
    with pytest.raises(DataError, match=r"mismatches: has format 2, and this p2ptrain reads up to 1\. Update p2ptrain"):
        Mismatches(path)
    assert path.read_bytes() == later


def test_a_disk_that_takes_nothing_does_not_hide_them_from_this_life(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise DiskError(path, "cannot be written", OSError(28, "No space left on device"))

    monkeypatch.setattr(files, "replace_file", full)
    made = Mismatches(path)
    made.note(1)
    made.note(2)
    with pytest.raises(HardwareError):
        made.note(3)
    assert [line.partition(":")[0] for line in caplog.messages] == ["cannot note a wrong state"] * 3
    assert Mismatches(path).rounds == ()


def test_its_exit_status_is_one_of_its_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def end(*_: object, **__: object) -> None:
        raise HardwareError("suspect it")

    monkeypatch.setattr(launch, "take_part", end)
    address = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity(bytes(range(32))).peer_id}"
    assert p2ptrain(capsys, "join", "--bootstrap", address)[::2] == (4, "suspect it\n")
    assert ExitStatus.HARDWARE == 4
