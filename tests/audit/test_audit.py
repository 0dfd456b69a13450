"""The audit of a run's directory: a correct one passes, and any damage is found and named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from p2ptrain.audit import run as audited
from p2ptrain.audit.findings import Finding, Grade, Report
from p2ptrain.audit.run import audit, find_directory
from p2ptrain.cli import app
from p2ptrain.config import RunConfig
from p2ptrain.core import events as ev
from p2ptrain.core.history import Entry
from p2ptrain.core.manifest import Join
from p2ptrain.core.messages import authored, content_name, payload_digest
from p2ptrain.errors import ConfigError
from p2ptrain.files import digest_of
from p2ptrain.store.checkpoints import STATE_NAME, TRAINER_NAME, Checkpoint, Checkpoints
from p2ptrain.store.segment import frame
from tests.helpers.audit import (
    FOUNDERS,
    IDENTITIES,
    ROUNDS,
    certified_of,
    compacted,
    ended,
    entries_of,
    forged,
    log_of,
    rewind,
    rewrite,
    write_log,
)


def bad(report: Report, verdict: Grade = Grade.WRONG) -> list[Finding]:
    return [finding for finding in report.findings if finding.verdict is verdict]


def only(report: Report) -> str:
    """Returns the only finding."""
    assert not report.all_holds
    assert len(bad(report)) == 1, report.lines()
    return str(bad(report)[0])


def checkpoints_of(directory: Path, run: RunConfig) -> list[Checkpoint]:
    return Checkpoints(directory / "checkpoints", run.id).present()


# ---------------------------------------------------------------------------------------------------
# What is right


def test_what_nodes_kept_of_a_real_run_holds(history: tuple[RunConfig, list[Path]]) -> None:
    roots = {}
    for directory in history[1]:
        report = audit(directory)
        assert report.all_holds, report.lines()
        entries = entries_of(directory)
        last = entries[-1].manifest.round
        assert report.certified == (entries[0].manifest.round, last)
        assert report.replayed is not None
        assert report.replayed.first < report.replayed.last == last
        assert (report.replayed.proved_round or 0) > last - 4
        assert report.signatures >= sum(len(entry.certificate.signatures) for entry in entries)
        roots.setdefault(last, set()).add(report.replayed.final_root)
    assert all(len(found) == 1 for found in roots.values())
    assert any(entry.manifest.seated == (IDENTITIES[FOUNDERS].key,) for entry in entries_of(history[1][0]))


def test_a_log_that_has_forgotten_its_beginning_is_proved_from_genesis_by_the_changes_of_the_roster(
    directory: Path,
) -> None:
    compacted(directory)
    report = audit(directory)
    assert report.all_holds, report.lines()
    assert report.certified is not None
    assert report.certified[0] > ROUNDS
    subjects = {finding.subject: finding.what for finding in bad(report, Grade.HOLDS)}
    assert subjects["roster"].startswith("1 changes lead from genesis to the 5 members")
    assert "agreed state" in subjects


def test_it_reads_and_changes_nothing(directory: Path) -> None:
    def everything() -> dict[Path, Any]:
        return {path: digest_of(path) if path.is_file() else None for path in directory.rglob("*")}

    (directory / "payloads" / ("00" * 32)).write_bytes(b"what a node would remove")
    (directory / "diary.jsonl").write_bytes(b"what a node would cut off\n")
    path, _ = log_of(directory)
    path.write_bytes(path.read_bytes()[:-3])
    before = everything()
    for each in [path, *directory.rglob("*")]:
        each.chmod(0o500 if each.is_dir() else 0o400)
    report = audit(directory)
    for each in directory.rglob("*"):
        each.chmod(0o700)
    assert everything() == before
    assert len(bad(report)) == 2


def test_a_torn_end_is_what_a_crash_leaves(directory: Path) -> None:
    path, _ = log_of(directory)
    content = path.read_bytes()
    path.write_bytes(content + frame(int(path.name[:8]), len(content), b"a record")[:-3])
    report = audit(directory)
    assert report.all_holds
    assert any("incomplete" in finding.what for finding in bad(report, Grade.NOTE))


def test_what_a_running_node_replaces_meanwhile_is_looked_at_again(
    directory: Path, run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prunes the oldest checkpoint while that is being read."""
    oldest, verify, times = checkpoints_of(directory, run)[0], Checkpoints.verify, []

    def pruning(self: Checkpoints, checkpoint: Checkpoint) -> str | None:
        if not times:
            (oldest.path / STATE_NAME).unlink()
        why = verify(self, checkpoint)
        times.append(checkpoint)
        return why

    def looked(path: Path) -> list[tuple[str, int]]:
        found = look(path)
        if times and oldest.path.exists():
            shutil.rmtree(oldest.path)
            return look(path)
        return found

    look = audited._look
    monkeypatch.setattr(audited, "_look", looked)
    monkeypatch.setattr(Checkpoints, "verify", pruning)
    report = audit(directory)
    assert report.all_holds, report.lines()
    assert report.replayed is not None
    assert report.replayed.first > oldest.round


# ---------------------------------------------------------------------------------------------------
# What a disk does


def flips(path: Path, rng: Random, count: int) -> Iterator[tuple[int, bytes]]:
    content = path.read_bytes()
    for _ in range(count):
        at = rng.randrange(len(content))
        flipped = bytearray(content)
        flipped[at] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        yield at, content
        path.write_bytes(content)


def a_file(directory: Path, kind: str) -> Path:
    return sorted(path for path in directory.glob(kind) if path.stat().st_size)[-1]


@pytest.mark.parametrize(
    "kind",
    [
        "run.json",
        "identity",
        "wal/*.log",
        "payloads/*",
        "checkpoints/*/checkpoint.json",
        f"checkpoints/*/{TRAINER_NAME}",
        f"checkpoints/*/{STATE_NAME}",
        "diary.jsonl",
    ],
)
def test_a_flipped_bit_in_each_kind_of_file_is_found_and_the_file_named(directory: Path, kind: str) -> None:
    path = a_file(directory, kind)
    for at, _ in flips(path, Random(kind), 12):
        report = audit(directory)
        named = [finding for finding in bad(report) if str(path) in str(finding) or path.name == finding.subject]
        torn = kind == "wal/*.log" and any("incomplete" in finding.what for finding in report.findings)
        parent = str(path.parent) in " ".join(map(str, bad(report)))
        assert named or torn or parent, (at, report.lines())


def test_a_missing_file_is_told(directory: Path, run: RunConfig) -> None:
    (directory / "identity").unlink()
    assert only(audit(directory)).startswith(f"WRONG         {directory / 'identity'}: missing")
    path, _ = log_of(directory)
    path.unlink()
    report = audit(directory)
    assert "there is no log" in str(bad(report, Grade.OPEN)[0])
    (directory / "run.json").unlink()
    report = audit(directory)
    assert [str(each) for each in bad(report, Grade.OPEN)] == [str(report.findings[0])]
    assert report.run_id == ""


def test_whatever_is_damaged_nothing_but_findings_comes_of_it(directory: Path) -> None:
    rng = Random(5)
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != "lock")
    for _ in range(60):
        path = rng.choice(files)
        content = path.read_bytes()
        start = rng.randrange(len(content) + 1)
        spoiled = rng.choice([content[:start], b"", content[:start] + rng.randbytes(40) + content[start:], bytes(80)])
        path.write_bytes(spoiled)
        report = audit(directory)
        assert report.lines()
        path.write_bytes(content)
    assert audit(directory).all_holds


# ---------------------------------------------------------------------------------------------------
# What somebody does who wants to deceive


def test_a_certificate_that_nobody_signed_is_found(directory: Path) -> None:
    number = entries_of(directory)[20].manifest.round

    def change(record: Any) -> Any:
        if not isinstance(record, ev.Certified) or record.step.manifest.round != number:
            return record
        certificate = record.step.certificate
        signatures = (bytes(64), *certificate.signatures[1:])
        bent = Entry(record.step.manifest, msgspec.structs.replace(certificate, signatures=signatures))
        return ev.Certified(bent, record.state, record.trunk)

    rewrite(directory, change)
    report = audit(directory)
    assert f"round {number}: the certificate has an invalid signature" in only(report)
    assert report.certified == (1, number - 1)


def test_a_certificate_of_too_few_is_found(directory: Path, run: RunConfig) -> None:
    target = certified_of(directory)[5]
    before = certified_of(directory)[4].state

    def change(record: Any) -> Any:
        if not isinstance(record, ev.Certified) or record.step.manifest.round != target.state.round:
            return record
        return ev.Certified(forged(run, before, record.step.manifest, signers=2), record.state, record.trunk)

    rewrite(directory, change)
    assert "the certificate has 2 signatures; the quorum is 3" in only(audit(directory))


def test_a_state_root_that_all_keys_sign_falsely_is_found_by_replaying(directory: Path, run: RunConfig) -> None:
    last = entries_of(directory)[-1].manifest

    def change(manifest: Any) -> Any:
        return msgspec.structs.replace(manifest, root=b"x" * 32)

    rewind(directory, run, last.round, change)
    found = [str(each) for each in bad(audit(directory))]  # and of the checkpoint of that round, if there is one
    texts = (f"round {last.root_round}: it gives the state root", "of another history")
    assert any(any(text in each for text in texts) and (b"x" * 32).hex()[:16] in each for each in found), found


def test_a_contribution_that_all_keys_leave_out_later_is_found_by_replaying(directory: Path, run: RunConfig) -> None:
    number = entries_of(directory)[-5].manifest.round

    def change(manifest: Any) -> Any:
        return msgspec.structs.replace(manifest, taken=manifest.taken[1:])

    rewind(directory, run, number, change)
    report = audit(directory)
    assert any("it gives the state root" in finding.what for finding in bad(report)), report.lines()


def test_a_member_that_all_keys_admit_without_its_having_earned_it_is_found(directory: Path, run: RunConfig) -> None:
    last = entries_of(directory)[-1].manifest
    stranger = bytes(range(32))

    def change(manifest: Any) -> Any:
        return msgspec.structs.replace(manifest, seated=(stranger,), joins=(Join(stranger, bytes(32), 0, 0),))

    rewind(directory, run, last.round, change)
    assert "keys get seats that have not earned them" in " ".join(map(str, bad(audit(directory))))


def test_a_payload_in_the_place_of_another_is_found(directory: Path) -> None:
    one, other = sorted((directory / "payloads").iterdir())[:2]
    one.write_bytes(other.read_bytes())
    report = audit(directory)
    assert [finding.subject for finding in bad(report)] == [str(one)]
    assert "does not match its name" in bad(report)[0].what


@pytest.mark.parametrize("author", ["the right one", "another"])
def test_a_payload_that_nobody_takes_is_found_where_all_keys_say_that_it_was_applied(
    author: str, directory: Path, run: RunConfig
) -> None:
    last = entries_of(directory)[-1].manifest
    first = last.taken[0]
    key = first.author if author == "the right one" else bytes(32)
    payload = authored(key, b"\xff" * (first.payload_bytes - len(key)))
    why = "the strict decoder refuses it" if author == "the right one" else "took it as another author's"

    def change(manifest: Any) -> Any:
        named = {"payload": payload_digest(payload), "content": content_name(payload)}
        first = msgspec.structs.replace(manifest.taken[0], **named)
        return msgspec.structs.replace(manifest, taken=(first, *manifest.taken[1:]))

    (directory / "payloads" / payload_digest(payload).hex()).write_bytes(payload)
    rewind(directory, run, last.round, change)
    assert any(why in finding.what for finding in bad(audit(directory)))


def test_a_missing_payload_cannot_be_checked(directory: Path, run: RunConfig) -> None:
    ended(directory, max(each.round for each in checkpoints_of(directory, run) if each.round % 3 == 0))
    before, last = [entry.manifest for entry in entries_of(directory)][-2:]  # a checkpoint of the last, none before it
    (directory / "payloads" / last.taken[0].payload.hex()).unlink()
    report = audit(directory)
    proved = report.replayed and report.replayed.proved_round
    assert (report.all_holds, proved) == (True, before.round)  # it may be on its way to a node that runs
    (directory / "payloads" / before.taken[0].payload.hex()).unlink()
    for ends in (f"no root of round {last.round} or later is", f"ends after round {before.round - 1} of {last.round}"):
        report = audit(directory)
        payload, replay = bad(report, Grade.OPEN)
        assert (bad(report), payload.subject, replay.subject) == ([], f"round {before.round}", "replay")
        assert replay.what.startswith(ends)
        for path in directory.glob(f"checkpoints/*-round-{last.round}"):
            shutil.rmtree(path)  # then it has to begin before the payload that is missing


def test_a_change_of_the_roster_that_was_left_out_is_found(directory: Path) -> None:
    compacted(directory)
    path, [snapshot] = log_of(directory)
    trunk = msgspec.structs.replace(snapshot.saved.trunk, changes=())
    saved = msgspec.structs.replace(snapshot.saved, trunk=trunk)
    write_log(path, [msgspec.structs.replace(snapshot, saved=saved)])
    report = audit(directory)
    assert "its changes do not lead from genesis" in str(bad(report)[0])
    assert report.certified is None


def test_a_roster_that_its_founders_did_not_change_is_found(directory: Path) -> None:
    """The agreed state before the history is another, and its certificates are of others."""
    compacted(directory)
    path, [snapshot] = log_of(directory)
    base = msgspec.structs.replace(snapshot.saved.base, members=snapshot.saved.base.members[1:])
    saved = msgspec.structs.replace(snapshot.saved, base=base)
    write_log(path, [msgspec.structs.replace(snapshot, saved=saved)])
    assert {finding.subject for finding in bad(audit(directory))} >= {"roster", f"round {base.round + 1}"}


def test_an_agreed_state_that_the_manifests_do_not_lead_to_is_found(directory: Path) -> None:
    number = entries_of(directory)[-1].manifest.round

    def change(record: Any) -> Any:
        if not isinstance(record, ev.Certified) or record.state.round != number:
            return record
        return ev.Certified(record.step, msgspec.structs.replace(record.state, bans=(bytes(32),)), record.trunk)

    rewrite(directory, change)
    assert f"round {number}: the agreed state in the log is not" in only(audit(directory))


def test_a_record_that_follows_nothing_is_found(directory: Path) -> None:
    number = entries_of(directory)[9].manifest.round
    rewrite(
        directory,
        lambda record: None if isinstance(record, ev.Certified) and record.state.round == number else record,
    )
    report = audit(directory)
    assert "does not follow from those before it" in str(bad(report)[0])
    assert report.certified == (1, number - 1)


def test_what_another_identity_said_is_found(directory: Path) -> None:
    (directory / "identity").write_text(IDENTITIES[1].key.hex() + "\n")
    assert "are not by" in only(audit(directory))


def restamped(checkpoint: Checkpoint, **changes: Any) -> None:
    """Rewrites a checkpoint's stamp with these fields, and digests that match its files."""
    files = {
        "trainer": type(checkpoint.stamp.trainer)(*digest_of(checkpoint.trainer_path)),
        "state": type(checkpoint.stamp.state)(*digest_of(checkpoint.path / STATE_NAME)),
    }
    stamp = msgspec.structs.replace(checkpoint.stamp, **(files | changes))
    (checkpoint.path / "checkpoint.json").write_bytes(stamp.encoded())


def test_a_checkpoint_of_another_history_is_found(directory: Path, run: RunConfig) -> None:
    older, newer = checkpoints_of(directory, run)[:2]
    restamped(older, root=newer.stamp.root)
    assert "is not the one in its stamp" in only(audit(directory))
    shutil.copyfile(newer.path / STATE_NAME, older.path / STATE_NAME)
    restamped(older, root=newer.stamp.root)
    assert f"from another history: round {older.round} was certified" in only(audit(directory))


def test_a_checkpoint_after_another_manifest_cannot_be_checked(directory: Path, run: RunConfig) -> None:
    """As one is of whose branch has lost."""
    newest = checkpoints_of(directory, run)[-1]
    restamped(newest, head="ab" * 32)
    report = audit(directory)
    assert bad(report) == []
    assert [finding.subject for finding in bad(report, Grade.OPEN)] == [str(newest.path)]


def spoil_weights(checkpoint: Checkpoint) -> None:
    """Changes one weight, and recomputes all digests and the root."""
    import numpy as np
    import torch

    from p2ptrain.exact.root import state_root

    weights = np.fromfile(checkpoint.path / STATE_NAME, dtype="<f4")
    weights[0] += 1.0
    weights.tofile(checkpoint.path / STATE_NAME)
    restamped(checkpoint, root=state_root(torch.from_numpy(weights)).hex())


def test_a_checkpoint_with_another_root_than_the_certified_one_is_found(directory: Path, run: RunConfig) -> None:
    older = checkpoints_of(directory, run)[0]
    spoil_weights(older)
    assert f"{older.path}: from another history: round {older.round} was certified" in only(audit(directory))


def test_a_checkpoint_that_the_rounds_do_not_lead_to_is_found_by_replaying(directory: Path, run: RunConfig) -> None:
    """A state of the newest round, whose root is certified nowhere yet."""
    newest = checkpoints_of(directory, run)[-1]
    for each in checkpoints_of(directory, run)[:-1]:
        if each.round == newest.round:
            shutil.rmtree(each.path)
    spoil_weights(newest)
    found = only(audit(directory))
    assert str(newest.path) in found
    assert "of another history: round" in found


# ---------------------------------------------------------------------------------------------------
# The command


def test_the_command_says_what_holds_and_exits_by_it(directory: Path, run: RunConfig) -> None:
    data_dir = directory.parents[1]
    found = CliRunner().invoke(app, ["audit", str(data_dir)])
    assert found.exit_code == 0
    assert f"run audited {run.run_id}: rounds 1 to" in found.output
    assert found.output.rstrip().endswith("0 wrong, 0 not checkable")
    (directory / "identity").unlink()
    found = CliRunner().invoke(app, ["audit", str(directory), "--json"])
    assert found.exit_code == 1
    told = json.loads(found.output)
    assert (told["run_id"], told["all_holds"], told["counts"]["wrong"]) == (run.run_id, False, 1)
    assert "not checkable" not in told["counts"]


def test_a_directory_without_a_run_and_one_with_several_are_the_users_error(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="DIR: no run in"):
        find_directory(directory / "payloads", None)
    with pytest.raises(ConfigError, match="is not a directory"):
        find_directory(tmp_path / "nowhere", None)
    shutil.copytree(directory, directory.parent / ("ab" * 8))
    with pytest.raises(ConfigError, match="--run: there are 2 runs"):
        find_directory(tmp_path, None)
    assert find_directory(tmp_path, "ab" * 32).name == "ab" * 8
    with pytest.raises(ConfigError, match="no run cd in"):
        find_directory(tmp_path, "cd")
    with pytest.raises(ConfigError, match="does not belong to run cd"):
        find_directory(directory, "cd")
    assert "damaged, or from another run" in only(audit(directory.parent / ("ab" * 8)))
