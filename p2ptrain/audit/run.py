"""Audits a run's directory from beginning to end.

Somebody else may have prepared it. So everything is inspected before it is opened, and only regular files are opened,
no links, pipes or devices; each kind has a size limit beyond which it is not read (files.py: `read_regular`, `listed`).
"""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from p2ptrain.audit import weights
from p2ptrain.audit.findings import Grade, Report
from p2ptrain.audit.history import RESTORE_FIX, CountingVerifier, ProvedLog, check_said, prove, read_log
from p2ptrain.capacity import free_memory_bytes
from p2ptrain.config import RunConfig
from p2ptrain.config.run import CONFIG_BYTES_MAX
from p2ptrain.core.messages import KEY_BYTES
from p2ptrain.digest import digest
from p2ptrain.errors import ConfigError, DataError, RemoteProtocolError
from p2ptrain.files import listed, read_regular, trouble
from p2ptrain.store.backup import is_backup, read_backup
from p2ptrain.store.diary import read_entries
from p2ptrain.visible import visible

TRIES = 5  # audits in a row while a running node changes something; each takes a second for a small model
NAME_LENGTH = 16  # characters of a run's id in its directory's name
PARTS = ("run.json", "wal", "checkpoints")  # by which a run's directory is recognised, even if some are missing
MISSING = "missing"
RUNS_MAX = 1_024  # in a node's data directory; nobody takes part in more
IDENTITY_BYTES = 2 * KEY_BYTES + 1
DIARY_BYTES_MAX = 2**22  # 1,024 trainings with 128 open contributions each take 2.5 MB


def find_directory(directory: Path, wanted: str | None) -> Path:
    """Returns the run's directory: this one, or one in a node's data directory."""
    with trouble(directory, "cannot be read"):
        is_directory = directory.is_dir()
    if not is_directory:
        raise ConfigError(f"{directory} is not a directory", key="DIR", fix="Name a node's data directory")
    if _is_run(directory):
        if wanted and not directory.absolute().name.startswith(wanted[:NAME_LENGTH]):
            raise ConfigError(f"{directory} does not belong to run {wanted}", key="--run", fix="Leave it out")
        return directory
    inside = listed(directory / "runs", RUNS_MAX)
    found = [path for path, kind in inside if stat.S_ISDIR(kind.st_mode) and _is_run(path)]
    matching = [path for path in found if path.name.startswith((wanted or "")[:NAME_LENGTH])]
    if len(matching) == 1:
        return matching[0]
    names = visible(", ".join(path.name for path in found))
    if matching:
        raise ConfigError(f"there are {len(found)} runs: {names}", key="--run", fix="Name one of them")
    if found:
        raise ConfigError(f"no run {wanted} in {directory}, only {names}", key="--run", fix="Name one of them")
    raise ConfigError(f"no run in {directory}", key="DIR", fix="Name a node's data directory, or one of a run in it")


def _is_run(directory: Path) -> bool:
    return any(os.path.lexists(directory / name) for name in PARTS)


def audit(directory: Path) -> Report:
    """Audits a run's directory; tries again if a running node changes it meanwhile."""
    for _ in range(TRIES):
        before = _look(directory)
        report = _audit(directory, Report(str(directory)))
        if report.all_holds or _look(directory) == before:
            break
    return report


def _look(directory: Path) -> list[tuple[str, int]]:
    """Lists names and sizes, to notice changes. Anything that cannot be listed is reported where it is needed."""
    found: list[tuple[str, int]] = []
    for name in ("wal", "checkpoints", "payloads"):
        with suppress(DataError):
            found += [(path.name, kind.st_size) for path, kind in listed(directory / name, weights.PAYLOADS_MAX)]
    return found


def _audit(directory: Path, report: Report) -> Report:
    name, is_copy = directory.name, is_backup(directory)
    if is_copy:
        try:
            name = read_backup(directory).run[:NAME_LENGTH]
        except DataError as error:
            report.wrong(error.path or directory, error.problem, error.fix or "Name another backup")
            return report
    run = read_run(directory / "run.json", name, report)
    if run is None:
        return report
    verifier, proved, replayed = CountingVerifier(run.id), ProvedLog(), None
    try:
        me = None if is_copy else _read_identity(directory / "identity", report)
        found = weights.found_checkpoints(directory, run, report)
        kept = read_log(directory, run, verifier, report)
        model = weights.RunModel(run)
        payloads = weights.PayloadFiles(directory / "payloads", model)
        if kept is not None:
            check_said(kept, me, report)
            proved = prove(kept, run, verifier, report)
        if is_copy:
            weights.check_beside(directory, run, report)
        else:
            payloads.check(proved, report)
        if model.memory_bytes > (free := free_memory_bytes()):
            what = f"the run's state has {model.state_bytes:,} bytes, but only {free:,} bytes of memory are free here"
            report.open("checkpoints", f"{what}: nothing is replayed", weights.LARGER_FIX)
        else:
            states = weights.check_checkpoints(found, directory, model, proved, report)
            replayed = weights.replay(states, payloads, model, proved, report)
        _check_hints(directory, report)
    except DataError as error:  # the disk
        report.open(directory, str(error), "Let this user read it, and check the disk")
    if is_copy and proved.entries:
        if (first := proved.entries[0].manifest.round) > run.predecessor.round + 1:
            what = f"those before round {first} are not in it, but for the changes of the roster"
            report.note(Grade.NOTE, "certificates", what)
        report.note(Grade.NOTE, "run", "only the id says whose it is: compare it with one that you know")
    named = replace(report, run_id=run.run_id, run_name=run.name)
    return replace(named, signatures=verifier.count, certified=proved.certified, replayed=replayed)


def read_run(path: Path, name: str, report: Report) -> RunConfig | None:
    content, why = _read(path, CONFIG_BYTES_MAX)
    if content is None:
        report.open(path, f"{why}: without the run's config nothing can be checked", RESTORE_FIX)
        return None
    found = digest("run id", content).hex()
    try:
        run = RunConfig.from_canonical(content)
    except RemoteProtocolError as error:
        what = "not of this release" if found.startswith(name) else "damaged"
        report.wrong(path, f"{what}: {error.why}; nothing else can be checked without it", RESTORE_FIX)
        return None
    is_named = re.fullmatch(rf"[0-9a-f]{{{NAME_LENGTH}}}", name) is not None
    if not run.is_sealed or (is_named and not found.startswith(name)):
        what = f"its id is {found[:NAME_LENGTH]}, but the directory is named {name}" if run.is_sealed else "not sealed"
        report.wrong(path, f"damaged, or from another run: {what}; nothing else can be checked with it", RESTORE_FIX)
        return None
    report.holds(path, f"run {run.name}, whose id is the digest of this config: {found}")
    return run


def _read(path: Path, bytes_max: int) -> tuple[bytes | None, str]:
    """Returns a file's content, or None and the reason."""
    try:
        return read_regular(path, bytes_max), MISSING
    except DataError as error:
        return None, error.problem


def _read_identity(path: Path, report: Report) -> bytes | None:
    content, why = _read(path, IDENTITY_BYTES)
    if content is not None and re.fullmatch(rb"[0-9a-f]{%d}\n" % (2 * KEY_BYTES), content):
        return bytes.fromhex(content.decode())
    what = why if content is None else "damaged: this is not a public key"
    report.wrong(path, f"{what}, so nobody can say whose directory this is", RESTORE_FIX)
    return None


def _check_hints(directory: Path, report: Report) -> None:
    """Checks files that the node could do without; the history does not depend on them."""
    path = directory / "diary.jsonl"
    content, why = _read(path, DIARY_BYTES_MAX)
    if content is None and why != MISSING:
        report.wrong(path, why)
    lines = content or b""
    try:
        trainings, whole = read_entries(path, lines)
    except DataError as error:  # from a later release
        report.wrong(path, error.problem, error.fix)
        return
    if whole != lines and b"\n" not in lines[len(whole) :]:
        what = "its last line is incomplete: this is normal after a crash, or while it is being written"
        report.note(Grade.NOTE, path, what)
    elif whole != lines:
        fix = "Part of what the last contributions carried is sent twice; nothing else is lost"
        report.wrong(path, f"damaged after the first {len(trainings)} trainings", fix)
    elif lines:
        report.holds(path, f"{len(trainings)} trainings")
