"""Backups of a run are verified without a node; those that were cut off are none; and another run begins with one."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from msgspec.structs import replace

from p2ptrain.audit import history as history_of_a_log
from p2ptrain.audit.findings import Grade
from p2ptrain.audit.run import audit
from p2ptrain.cli import checkpoint as checkpoint_commands
from p2ptrain.config import NodeConfig, RunConfig
from p2ptrain.config.load import renewed
from p2ptrain.config.node import StorageConfig
from p2ptrain.daemon import launch
from p2ptrain.daemon.order import StartOrder
from p2ptrain.digest import digest
from p2ptrain.errors import ConfigError, DataError
from p2ptrain.exact.root import state_root
from p2ptrain.node.home import Home
from p2ptrain.node.saved import backed_up, open_state
from p2ptrain.store.backup import KEPT, BackupPlace, copy_to, find_backup, proof_of
from p2ptrain.store.checkpoints import STAMP_NAME, STATE_NAME, Checkpoint, Checkpoints, read_stamp
from p2ptrain.store.log import read_journal
from p2ptrain.train.begin import begin
from tests.helpers.audit import IDENTITIES, compacted, ended, entries_of, make_history, rewrite
from tests.helpers.cli import p2ptrain
from tests.helpers.store import void
from tests.helpers.trainer import TINY

FILES = ["checkpoint.json", "run.json", "state.bin", "wal/00000001.log"]
CUTS = 8  # of the steps that a copy takes at its place
PRUNES = range(24, 32)  # steps while it prunes
Capsys = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, list[Path]]:
    """A run with outer momentum."""
    recipe = {"name": "local", "k": 8, "local_steps": 1, "sequences_per_pass": 1, "momentum": "0.5"}
    return make_history(tmp_path_factory.mktemp("history"), recipe=recipe)


@pytest.fixture
def run(history: tuple[RunConfig, list[Path]]) -> RunConfig:
    return history[0]


@pytest.fixture
def home(history: tuple[RunConfig, list[Path]], tmp_path: Path) -> Home:
    """A copy of the first node's directory."""
    shutil.copytree(history[1][0].parents[1], tmp_path / "node")
    return Home(NodeConfig(storage=StorageConfig(directory=str(tmp_path / "node"))))


def back_up(home: Home, to: Path | str, every: int | None = None, kept: int = KEPT) -> str | None:
    return backed_up(home, home.run(None), BackupPlace(str(to)), every, kept)


@pytest.fixture
def backup(home: Home, tmp_path: Path) -> Path:
    name = back_up(home, tmp_path / "there")
    assert name is not None
    return tmp_path / "there" / name


def checkpoints(home: Home, run: RunConfig) -> list[Checkpoint]:
    return Checkpoints(home.of_run(run.id) / "checkpoints", run.id).present()


# ---------------------------------------------------------------------------------------------------
# Copies


def test_a_backup_is_the_certified_state_with_its_proof_and_nothing_of_the_node(
    home: Home, run: RunConfig, backup: Path
) -> None:
    assert sorted(str(path.relative_to(backup)) for path in backup.rglob("*") if path.is_file()) == FILES
    report = audit(backup)
    assert report.all_holds, report.lines()
    assert report.replayed is not None and report.certified is not None
    number = read_stamp(backup).round
    assert report.replayed.proved_round == number <= report.certified[1]
    [original] = [each for each in checkpoints(home, run) if each.round == number]
    assert (backup / STATE_NAME).read_bytes() == (original.path / STATE_NAME).read_bytes()
    assert "residual" not in repr(read_stamp(backup))
    log = (backup / "wal" / "00000001.log").read_bytes()
    own = (home.of_run(run.id) / "identity").read_text().strip()
    assert not (backup / "identity").exists() and bytes.fromhex(own) in log  # as a member's, like all keys
    assert report.signatures == sum(  # and no signature of a message of its own is there
        len(entry.certificate.signatures) for entry in entries_of(backup)
    )


def test_a_log_that_has_forgotten_its_beginning_proves_it_too(home: Home, run: RunConfig, tmp_path: Path) -> None:
    directory = home.of_run(run.id)
    compacted(directory)
    newest = checkpoints(home, run)[-1]
    name = back_up(home, tmp_path / "there")
    report = audit(tmp_path / "there" / str(name))
    assert report.all_holds, report.lines()
    assert str(name).endswith(f"-backup-of-round-{newest.round}") or report.replayed is not None
    notes = [finding.what for finding in report.findings if finding.verdict is Grade.NOTE]
    assert any("are not in it, but for the changes of the roster" in what for what in notes)


def test_an_older_state_is_proved_by_the_log_up_to_its_own_certificate(
    home: Home, run: RunConfig, tmp_path: Path
) -> None:
    for each in checkpoints(home, run)[1:]:
        (each.path / STATE_NAME).write_bytes(b"weighty")
    name = back_up(home, tmp_path / "there")
    report = audit(tmp_path / "there" / str(name))
    assert report.all_holds, report.lines()
    assert report.certified is not None
    assert report.certified[1] <= checkpoints(home, run)[0].round + 3 < checkpoints(home, run)[-1].round


def test_a_log_that_ends_at_any_round_holds_and_proves_no_later_state(
    home: Home, run: RunConfig, backup: Path, tmp_path: Path, capsys: Capsys
) -> None:
    """Changes of the roster that come later are not in it."""
    journal = read_journal(home.of_run(run.id) / "wal")
    assert journal is not None and journal.trunk is not None and len(journal.trunk.changes) == 1
    stamp = read_stamp(backup)
    [change] = journal.trunk.changes
    at = next(at for at, each in enumerate(journal.history) if each.step == change)
    base, rest = journal.history[at - 4].state, journal.history[at - 3 :]
    shorter = dataclasses.replace(journal, base=base, history=rest)
    logs = [(number, journal) for number in range(stamp.round)]
    logs += [(number, shorter) for number in range(base.round, stamp.round)]
    for number, kept in logs:
        log = proof_of(Checkpoint(backup, replace(stamp, round=number)), kept)
        (backup / "wal" / "00000001.log").write_bytes(log)
        report = audit(backup)
        assert not report.counts[Grade.WRONG], report.lines()
        assert report.certified is not None and number <= report.certified[1] <= number + 3
        if report.certified[1] < stamp.round:
            line = one_line(capsys, "start", "--from", backup, "--data-dir", tmp_path / "new")
            assert f"but the certified history ends with {report.certified[1]}. Name another backup" in line


def test_a_run_with_too_many_changes_of_its_roster_goes_on_though_its_beginning_is_not_proved(
    home: Home, run: RunConfig, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    compacted(home.of_run(run.id))
    backup = tmp_path / "there" / str(back_up(home, tmp_path / "there"))
    rewrite(
        backup, lambda first: replace(first, saved=replace(first.saved, trunk=replace(first.saved.trunk, changes=())))
    )
    place = ("--from", backup, "--data-dir", tmp_path / "new")
    assert "its changes do not lead from genesis to" in one_line(capsys, "start", *place)
    monkeypatch.setattr(history_of_a_log, "CHANGES_MAX", 0)
    _, err = started(monkeypatch, capsys, *place)
    assert "NOT CHECKABLE roster: more than 0 changes: the first ones are not kept" in err


def test_nothing_is_copied_twice_and_only_every_so_many_rounds(home: Home, backup: Path) -> None:
    assert back_up(home, backup.parent) is None
    assert back_up(home, backup.parent, every=1) is None
    stamp = read_stamp(backup)
    (backup / STAMP_NAME).write_bytes(replace(stamp, round=3).encoded())
    assert back_up(home, backup.parent, every=stamp.round - 2) is None
    assert back_up(home, backup.parent, every=stamp.round - 3) == f"00000002-backup-of-round-{stamp.round}"


def test_a_run_that_has_a_successor_is_backed_up_to_its_end(home: Home, run: RunConfig, tmp_path: Path) -> None:
    (home.of_run(run.id) / "successor").write_bytes(b"ab" * 32)
    (home.of_run(run.id) / "origin").write_bytes(b"how the run before ended")
    made = backed_up(home, run, BackupPlace(str(tmp_path / "there")), 5, KEPT)
    assert made is not None and (tmp_path / "there" / made / "origin").exists()
    with pytest.raises(ConfigError, match=f"--run: the run has a successor, {'ab' * 32}. Name that one"):
        backed_up(home, run, BackupPlace(str(tmp_path / "there")), 5, KEPT)


def test_without_a_certified_state_nothing_is_copied(
    home: Home, run: RunConfig, tmp_path: Path, capsys: Capsys
) -> None:
    for each in checkpoints(home, run):
        (each.path / STATE_NAME).write_bytes(b"weighty")
    place = ("--to", tmp_path / "there", "--data-dir", home.directory)
    status, out, err = p2ptrain(capsys, "checkpoint", "copy", *place)
    assert (status, out) == (1, "")
    assert err.splitlines()[-1] == (
        f"{home.of_run(run.id)}: no certified state yet. Try again later, or give --every, which waits for one"
    )
    assert back_up(home, tmp_path / "there", every=5) is None


def test_the_newest_stay_and_every_tenth_of_the_older(home: Home, run: RunConfig, tmp_path: Path) -> None:
    place, newest = BackupPlace(str(tmp_path)), checkpoints(home, run)[0]
    for _ in range(26):
        copy_to(place, newest, {"run.json": run.canonical()}, kept=3)
    assert [int(name[:8]) for name in place.folders()] == [1, 11, 21, 24, 25, 26]


def test_it_follows_a_node_until_it_is_stopped(
    home: Home, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 1:
            shutil.rmtree(tmp_path / "there")
            (tmp_path / "there").write_text("in the way")  # as a disk that is gone for a while
        elif len(slept) == 2:
            (tmp_path / "there").unlink()
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_commands, "sleep", sleep)
    place = ("--to", tmp_path / "there", "--data-dir", home.directory)
    status, out, err = p2ptrain(capsys, "checkpoint", "copy", "--every", 5, *place)
    made = [line for line in out.splitlines() if line]
    assert status == 130
    assert made == [f"{tmp_path}/there/{each}" for each in [made[0].rpartition("/")[2]] * 2]
    assert err.count("; trying again\n") == 1


# ---------------------------------------------------------------------------------------------------
# Bad input


def one_line(capsys: Capsys, *arguments: str | Path | int) -> str:
    status, out, err = p2ptrain(capsys, *arguments)
    lines = [line for line in err.splitlines() if not line.startswith("passed over: ")]
    assert status in (1, 2) and out == "" and len(lines) == 1, (status, out, err)
    assert ". " in lines[0], "says what to do"
    return lines[0]


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_found_wherever_it_is(
    name: str, home: Home, backup: Path, tmp_path: Path, capsys: Capsys
) -> None:
    content, rng = (backup / name).read_bytes(), Random(name)
    cuts: list[bytes | None] = [content[: rng.randrange(len(content))] for _ in range(3)]
    places = [0, len(content) - 1, *(rng.randrange(len(content)) for _ in range(8))]
    cuts += [content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :] for at in places]
    for changed in [*cuts, None]:
        if changed is None:
            (backup / name).unlink()
        else:
            (backup / name).write_bytes(changed)
        report = audit(backup)
        assert not report.all_holds, (name, report.lines())
        assert report.counts[Grade.WRONG]
        line = one_line(capsys, "start", "--from", backup, "--data-dir", tmp_path / "new")
        assert str(backup) in line and "Name another backup" in line
    assert not (tmp_path / "new" / "runs").exists()


def test_a_copy_that_was_cut_off_is_none_and_the_next_one_mends_it(
    home: Home, backup: Path, tmp_path: Path, capsys: Capsys
) -> None:
    (backup / STAMP_NAME).unlink()
    assert "the copy was cut off, or " in str(audit(backup).findings[0])
    line = one_line(capsys, "start", "--from", backup.parent, "--data-dir", tmp_path / "new")
    assert line == f"{backup.parent}: no complete backup is there. Name another place"
    (backup.parent / "00000009-backup-of-round-9.txt").write_text("somebody else's")
    assert back_up(home, backup.parent) == backup.name
    assert audit(backup).all_holds
    assert (backup.parent / "00000009-backup-of-round-9.txt").exists()


def test_a_newest_backup_that_is_damaged_does_not_keep_others_from_being_made(home: Home, backup: Path) -> None:
    (backup / STAMP_NAME).write_bytes(b"{}")
    made = back_up(home, backup.parent)
    assert made is not None and made.startswith("00000002-")
    assert audit(backup.parent / made).all_holds


def test_a_place_of_another_run_is_left_alone(home: Home, run: RunConfig, backup: Path, capsys: Capsys) -> None:
    stamp = read_stamp(backup)
    (backup / STAMP_NAME).write_bytes(replace(stamp, run="ab" * 32).encoded())
    line = one_line(capsys, "checkpoint", "copy", "--to", backup.parent, "--data-dir", home.directory)
    assert line == (f"{backup.parent}: --to: holds backups of run {'ab' * 32}. Name a place of its own for each run")
    assert [path.name for path in backup.parent.glob("0*")] == [backup.name]


def test_places_that_cannot_be_used_are_refused_in_a_line(home: Home, tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "file").write_text("")
    copy = ("checkpoint", "copy", "--data-dir", home.directory, "--to")
    assert one_line(capsys, *copy, tmp_path / "file").startswith(f"{tmp_path}/file: not a directory. ")
    assert one_line(capsys, *copy, tmp_path / "file" / "in it").startswith(f"{tmp_path}/file/in it: not a directory. ")
    assert "Install s3fs" in one_line(capsys, *copy, "s3://bucket/run")
    assert "'p2ptrain[backup]'" in one_line(capsys, *copy, "nowhere://bucket/run")
    assert "'p2ptrain[backup]'" in one_line(capsys, "start", "--from", "s3://bucket/run")
    assert "memory://empty: no complete backup is there" in one_line(capsys, "start", "--from", "memory://empty")
    assert "no backup is in" in one_line(capsys, "start", "--from", tmp_path, "--data-dir", tmp_path / "new")


def test_a_disk_without_room_is_left_as_it_was(
    home: Home, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000))
    line = one_line(capsys, "checkpoint", "copy", "--to", tmp_path / "there", "--data-dir", home.directory)
    assert line.endswith(" and 1,000 are free there. Make room, or keep fewer of them with --keep")
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["lock"]


def test_a_disk_that_fills_up_meanwhile_leaves_no_backup(
    home: Home, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", full)
        line = one_line(capsys, "checkpoint", "copy", "--to", tmp_path / "there", "--data-dir", home.directory)
    assert (
        line
        == f"{tmp_path}/there: cannot be used (No space left on device). Free some space there: no saved data is lost"
    )
    assert find_or_none(tmp_path / "there", tmp_path) is None
    assert back_up(home, tmp_path / "there") is not None


def find_or_none(place: Path | str, fetched: Path) -> Path | None:
    """Returns the backup that a start would take."""
    try:
        return find_backup(str(place), fetched)
    except DataError:
        return None


# ---------------------------------------------------------------------------------------------------
# Killed in the middle of it

KILLED = """
import os, signal, sys
from pathlib import Path
from p2ptrain.config import NodeConfig
from p2ptrain.config.node import StorageConfig
from p2ptrain.node.home import Home
from p2ptrain.node.saved import backed_up
from p2ptrain.store.backup import BackupPlace

home, target = Home(NodeConfig(storage=StorageConfig(directory=sys.argv[1]))), sys.argv[2]
run = home.run(None)
CHANGES = ("open", "os.", "shutil.")

def copy(cut_at, place):
    count = 0
    def watch(event, arguments):
        nonlocal count
        if event == "os.remove" or event.startswith(CHANGES) and any(place in str(each) for each in arguments):
            count += 1
            if count == cut_at:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(watch)
    there = BackupPlace(place)
    with there.locked():
        backed_up(home, run, there, None, 1)

for line in sys.stdin:
    cut_at, place = line.split()
    child = os.fork()
    if child == 0:
        copy(int(cut_at), place)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.linux
def test_a_copy_that_is_killed_at_any_point_is_mended_by_the_next(home: Home, tmp_path: Path) -> None:
    """Real processes, each killed before another change that it makes to the place, while it copies and prunes."""
    ends: list[int] = []
    before = older(home, tmp_path, (17, 20))  # the second one goes when another is made and one is kept
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", KILLED, str(home.directory), str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def kill(cut_at: int, place: Path) -> int:
            print(cut_at, place, file=process.stdin, flush=True)
            return int(process.stdout.readline())

        for cut_at in [*sorted(Random(43).sample(range(6, 24), CUTS)), *PRUNES]:
            place = shutil.copytree(before, tmp_path / f"there-{cut_at}")
            ends.append(kill(cut_at, place))
            found = find_or_none(place, tmp_path)
            assert found is not None and audit(found).all_holds, "the copy before is still there, or the new one"
            made = back_up(home, place, kept=1)  # unless the killed one had finished, but for what goes after it
            folders = BackupPlace(str(place)).folders()
            assert all(audit(place / name).all_holds for name, is_complete in folders.items() if is_complete), cut_at
            assert [*folders][-1].startswith("00000003-") and (made is None or len(folders) == 2), (cut_at, folders)
        process.stdin.close()
    assert set(ends) == {-signal.SIGKILL}


def older(home: Home, tmp_path: Path, numbers: tuple[int, ...]) -> Path:
    """Makes a place with backups as of earlier rounds."""
    for number in numbers:
        copied = Home(NodeConfig(storage=StorageConfig(directory=str(tmp_path / f"until-{number}"))))
        shutil.copytree(home.directory, copied.directory)
        ended(copied.of_run(copied.run(None).id), number)
        assert back_up(copied, tmp_path / "before") is not None
    return tmp_path / "before"


# ---------------------------------------------------------------------------------------------------
# Object stores


class CutError(Exception):
    """The process is gone."""


def test_an_object_store_holds_them_and_gives_them_back(
    home: Home, run: RunConfig, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, store = "memory://bucket/run", fsspec.filesystem("memory")
    for cut_at in range(1, 5):
        puts = 0

        def stopping(real: Callable[..., Any], cut_at: int = cut_at) -> Callable[..., Any]:
            def put(*arguments: Any, **options: Any) -> Any:
                nonlocal puts
                puts += 1
                if puts == cut_at:
                    raise CutError
                return real(*arguments, **options)

            return put

        with monkeypatch.context() as patch:
            for name in ("pipe_file", "put_file"):
                patch.setattr(MemoryFileSystem, name, stopping(getattr(MemoryFileSystem, name)))
            with pytest.raises(CutError):
                back_up(home, url)
        assert find_or_none(url, tmp_path / "fetched") is None
    name = back_up(home, url)
    assert BackupPlace(url).folders() == {name: True}
    for address in (url, f"{url}/{name}"):
        status, out, _ = p2ptrain(capsys, "audit", address)
        assert status == 0 and f"run {run.name} {run.run_id}: rounds 1 to " in out
    folder = find_backup(url, tmp_path / "fetched")
    assert folder is not None and audit(folder).all_holds
    store.pipe_file(f"/bucket/run/{name}/{STATE_NAME}", b"other")
    assert find_backup(url, tmp_path / "fetched") == folder, "it is not fetched again"
    assert back_up(home, url) is None
    assert not audit(find_backup(url, tmp_path / "again") or tmp_path).all_holds
    store.rm("/bucket", recursive=True)


# ---------------------------------------------------------------------------------------------------
# Another run


def started(monkeypatch: pytest.MonkeyPatch, capsys: Capsys, *arguments: str | Path) -> tuple[StartOrder, str]:
    orders: list[StartOrder] = []
    monkeypatch.setattr(launch, "take_part", orders.append)
    status, _, err = p2ptrain(capsys, "start", *arguments)
    assert status == 0, err
    return orders[0], err


def test_a_run_goes_on_from_all_of_the_state_with_the_config_and_what_is_changed(
    history: tuple[RunConfig, list[Path]],
    run: RunConfig,
    backup: Path,
    tmp_path: Path,
    capsys: Capsys,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = ("--set", "recipe.inner_learning_rate=0.005", "--set", "name=next")
    place = ("--data-dir", tmp_path / "new")
    order, err = started(monkeypatch, capsys, "--from", backup.parent, *settings, *place)
    assert f"run {run.name} {run.run_id}: rounds 1 to " in err and "compare it with one that you know" in err
    assert order.said == {
        "backup": backup.name, "run": run.run_id, "set": {"recipe.inner_learning_rate": "0.005", "name": "next"},
    }  # fmt: skip
    me, data = IDENTITIES[0].key.hex(), history[1][0].parents[2] / "data"
    with caplog.at_level("INFO"):
        begun = begin(order.run, tmp_path / "made", [me], data, order.given)
    assert begun.state == (backup / STATE_NAME).read_bytes(), "with the outer momentum"
    number = read_stamp(backup).round
    assert f"goes on from the state of round {number} of run audited, {run.run_id}" in caplog.messages
    expected = renewed(run, {"recipe.inner_learning_rate": "0.005", "name": "next"})
    assert begun.run == expected.sealed(manifest=run.data.manifest, initial_root=read_stamp(backup).root, founders=[me])
    assert any(begun.state[len(begun.state) // 2 :]), "which is not zero"
    without = begin(renewed(run, {"recipe.momentum": 0}), tmp_path / "made", [me], data, order.given)
    assert without.state == begun.state[: len(begun.state) // 2]


def test_with_a_run_file_a_backup_gives_the_weights(
    backup: Path, tmp_path: Path, run: RunConfig, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "next.toml"
    model = {**TINY, "layers": 1}
    file.write_text('name = "next"\n[model]\n' + "".join(f"{key} = {value}\n" for key, value in model.items()))
    order, err = started(monkeypatch, capsys, file, "--from", backup, "--data-dir", tmp_path / "new")
    assert order.said == {"name": "next", "model": model} and "certificates" in err
    assert order.given is not None
    weights = order.given.read(order.run.model)
    both = torch.frombuffer(bytearray((backup / STATE_NAME).read_bytes()), dtype=torch.float32)
    assert torch.equal(weights, both[: len(weights)]) and len(both) == 2 * len(weights)
    line = one_line(capsys, "start", file, "--from", backup, "--set", "recipe.k=3", "--data-dir", tmp_path / "new")
    assert line.startswith("--set: RUN.toml has the settings")


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("recipe.k", "--set: 'recipe.k' is no setting. "),
        ("recipe.kk=3", "--set: recipe.kk: unknown key. "),
        ("x.y=3", "--set: x.y: unknown. "),
        ("recipe.inner_learning_rate=nan", "--set: recipe.inner_learning_rate: "),
        ("model.layers=3", "--set: model.layers: the weights decide it, or the start. "),
        ("name.x=3", "--set: name.x: the weights decide it, or the start. "),
        ("state.initial_root=ab", "--set: state.initial_root: the weights decide it, or the start. "),
        ("admission.founders=[]", "--set: admission.founders: the weights decide it, or the start. "),
        ("predecessor.round=3", "--set: predecessor.round: "),
    ],
)
def test_settings_that_a_run_from_a_backup_cannot_have_are_told(
    setting: str, told: str, backup: Path, tmp_path: Path, capsys: Capsys
) -> None:
    status, _, err = p2ptrain(capsys, "start", "--from", backup, "--set", setting, "--data-dir", tmp_path / "new")
    assert status == 2
    assert err.splitlines()[-1].startswith(told)


def test_a_config_that_this_release_cannot_read_is_told(
    run: RunConfig, backup: Path, tmp_path: Path, capsys: Capsys
) -> None:
    later = run.canonical().replace(b'"agreement":', b'"agreement2":', 1)
    stamp = read_stamp(backup)
    (backup / "run.json").write_bytes(later)
    (backup / STAMP_NAME).write_bytes(replace(stamp, run=digest("run id", later).hex()).encoded())
    assert "run.json: not of this release: " in one_line(capsys, "start", "--from", backup, "--data-dir", tmp_path)


def test_a_node_takes_no_backup_for_a_checkpoint_of_its_own(home: Home, run: RunConfig, backup: Path) -> None:
    directory = home.of_run(run.id) / "checkpoints"
    shutil.copytree(backup, directory / "00000099-round-99")
    assert [each.path.name[:8] for each in checkpoints(home, run)] != ["00000099"] and len(checkpoints(home, run)) > 1
    assert "00000099" not in {each.path.name[:8] for each in checkpoints(home, run)}


def test_the_frozen_weights_go_along_once(tmp_path: Path) -> None:
    raw = {"name": "adapted", "model": TINY, "adapt": {"kind": "lora", "rank": 2}}
    me, first, second = IDENTITIES[0].key.hex(), tmp_path / "first", tmp_path / "second"
    begun = begin(RunConfig.model_validate(raw), first / "data", [me], bases=first / "bases")
    assert begun.base is not None
    state = bytearray(begun.state)
    state[:4] = b"\0\0\x80?"
    root = state_root(torch.frombuffer(state, dtype=torch.float32))
    made = Checkpoints(first / "checkpoints", begun.run.id)
    made.tidy()
    saved = made.write(8, begun.run.id, b"", root, 0, lambda path: void(path.write_bytes(b"trainer")), bytes(state))
    (tmp_path / "there").mkdir()
    place = BackupPlace(str(tmp_path / "there"))
    names = [copy_to(place, saved, {"run.json": begun.run.canonical()}, begun.base.path) for _ in range(2)]
    assert [path.name for path in (tmp_path / "there" / "bases").iterdir()] == [begun.base.path.name]
    home = Home(NodeConfig(storage=StorageConfig(directory=str(second))))
    run, given = open_state(home, tmp_path / "there" / names[1])
    again = begin(renewed(run, {}), first / "data", [me], given=given, bases=home.bases)
    assert again.state == bytes(state) and again.base is not None
    assert (again.run.adapt.base, again.base.path.parent) == (begun.run.adapt.base, home.bases)
