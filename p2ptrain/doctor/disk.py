"""The disk: write access, other users' access, locks, free space and speed."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from time import perf_counter

from p2ptrain.doctor.findings import Diagnosis
from p2ptrain.errors import ConfigError
from p2ptrain.exact.shortage import mega
from p2ptrain.files import is_there, nearest_existing
from p2ptrain.identity import Identity
from p2ptrain.node.limits import LESS_DISK
from p2ptrain.store.lock import FIX, LOCK_NAME, LOCK_SUFFIX, beside
from p2ptrain.train.memory import DiskDemand, Need

PROBE_BYTES = 64 * 2**20  # a guess at more than a disk's own cache holds
PROBE_PART_BYTES = 2**20
CHECKPOINT_SECONDS = 60.0  # a checkpoint that takes longer may overlap with the next one
SLOW_BYTES_PER_SECOND = 10 * 10**6  # an old memory card; each round's signed messages wait for this disk
LOCKS = Path("/proc/locks")


def check_writable(directory: Path) -> Diagnosis:
    there = nearest_existing(directory)
    fix = "Choose another with --data-dir or storage.directory"
    if not there.is_dir():
        return Diagnosis("data directory", "failed", f"{there} is not a directory", fix)
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        return Diagnosis("data directory", "failed", f"{there} cannot be written: {error.strerror}", fix)
    if there != directory:
        return Diagnosis("data directory", "good", f"{directory} will be created")
    return _for_its_owner(there)


def _for_its_owner(there: Path) -> Diagnosis:
    status = there.stat()
    if status.st_uid != os.geteuid():
        text = f"{there} belongs to another user"
        return Diagnosis("data directory", "warning", text, f"sudo chown -R $USER {there}, or choose another")
    for bits, verb in ((0o022, "write"), (0o055, "read")):
        if stat.S_IMODE(status.st_mode) & bits:
            return Diagnosis("data directory", "warning", f"other users may {verb} in {there}", f"chmod 700 {there}")
    return Diagnosis("data directory", "good", f"{there}, accessible to its owner only")


def check_key(path: Path) -> Diagnosis:
    if not is_there(path):
        return Diagnosis("key", "good", f"none yet: the first start creates {path}")
    try:
        identity = Identity.load(path)
    except ConfigError as error:
        return Diagnosis("key", "failed", f"{path}: {error.problem}", error.fix)
    return Diagnosis("key", "good", f"{identity.peer_id}, readable by its owner only")


def holder_of(path: Path, locks: Path = LOCKS) -> int | None:
    """Returns the process that holds this file's lock, from /proc/locks; None if none does, 0 if it is invisible here.

    Taking the lock would also give the answer, but could keep a node from starting at that moment."""
    try:
        file = path.stat()
        lines = locks.read_text().splitlines()
    except OSError:
        return None
    wanted = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    for line in lines:
        words = line.split()
        if len(words) > 5 and words[1] == "FLOCK" and words[5] == wanted:
            return max(0, int(words[4]))
    return None


def check_locks(directory: Path, key: Path, note: Path, answers: bool, locks: Path = LOCKS) -> Diagnosis:
    """Checks the two locks that a start takes. `note` is a daemon's file; `answers`: whether that daemon answers."""
    if not locks.exists():
        return Diagnosis("locks", "warning", f"unknown: there is no {locks}")
    holder = holder_of(directory / LOCK_NAME, locks)
    if answers:
        return Diagnosis("locks", "good", f"held by the running daemon, process {holder or 'unknown'}")
    if holder is not None:
        fix = "It may be starting, stopped (kill -CONT) or hung: end it before starting another one here"
        return Diagnosis("locks", "failed", f"process {holder or 'unknown'} holds {directory} and does not answer", fix)
    if (other := holder_of(beside(key, LOCK_SUFFIX), locks)) is not None:
        return Diagnosis("locks", "failed", f"process {other or 'unknown'} uses the key {key}", FIX)
    if note.exists():
        text = "the last daemon did not end properly; its locks are free, and the next start continues from the disk"
        return Diagnosis("locks", "good", text)
    return Diagnosis("locks", "good", "free")


def check_space(demand: DiskDemand) -> Diagnosis:
    """Compares the free disk space with the run's need, as a start does."""
    text = f"{demand.takes}, {mega(demand.used)} are used, {mega(demand.free)} are free; kept data comes on top"
    return Diagnosis("disk space", demand.level, text, "" if demand.level == "good" else LESS_DISK)


def check_speed(directory: Path, need: Need | None, free: int, probe_bytes: int = PROBE_BYTES) -> Diagnosis:
    """Measures synced writes in the node's directory, and leaves nothing behind."""
    there = nearest_existing(directory)
    if free < 4 * probe_bytes:
        return Diagnosis("disk speed", "warning", f"not measured: only {mega(free)} are free", "Make room")
    part = os.urandom(PROBE_PART_BYTES)  # random, because some disks compress zeros
    try:
        with tempfile.TemporaryFile(dir=there, buffering=0) as file:
            before = perf_counter()
            for _ in range(0, probe_bytes, PROBE_PART_BYTES):
                file.write(part)
            os.fsync(file.fileno())
            rate = probe_bytes / max(perf_counter() - before, 1e-9)
    except OSError as error:
        text = f"writing {mega(probe_bytes)} to {there} failed: {error.strerror}"
        return Diagnosis("disk speed", "failed", text, "Choose another disk with --data-dir")
    return judge_speed(rate, need)


def judge_speed(rate: float, need: Need | None) -> Diagnosis:
    text = f"{mega(int(rate))}/s, synced to the disk"
    fix = "Choose a faster disk with --data-dir"
    if need is not None:
        seconds = need.checkpoint / rate
        text += f"; a checkpoint of {mega(need.checkpoint)} takes {seconds:.1f} s"
        if seconds > CHECKPOINT_SECONDS:
            return Diagnosis("disk speed", "warning", text, f"{fix}, or raise storage.checkpoint_every_rounds")
    is_slow = rate < SLOW_BYTES_PER_SECOND
    return Diagnosis("disk speed", "warning" if is_slow else "good", text, fix if is_slow else "")
