"""Backups: a run's certified states in a directory or an object store, each with what proves it.

    00000012-backup-of-round-500/
        run.json          the run's config; and origin, how the run before it ended, if it follows one
        tokenizer.json    if it has one
        wal/00000001.log  the certified steps of the node's log, up to the certificate of the state's root
        state.bin         the agreed weights, with the outer momentum
        checkpoint.json   its stamp, as of a checkpoint (checkpoints.py) without a trainer
    bases/                the frozen weights of a run that trains adapters, once for all of its backups

The stamp is written last, because an object store cannot rename: a folder without it is a copy that was cut off, which
readers pass over and the next copy removes. It has the digests of the state and of the config; the log has its own.
Folders are numbered in the order in which they were made; the newest stay, and of the older ones every tenth.

Nothing of the node itself is in a backup, no key, message or residual, so that no node goes on from one: restored, it
could contradict what it has said since."""

from __future__ import annotations

import logging
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path

from msgspec.structs import replace

from p2ptrain.core.events import Saved, Trunk
from p2ptrain.core.history import name_of
from p2ptrain.core.journal import Journal
from p2ptrain.digest import digest
from p2ptrain.errors import ConfigError, DataError
from p2ptrain.files import DiskError, digest_of, is_there, make_directory, nearest_existing, sync, write_atomically
from p2ptrain.store.checkpoints import STAMP_NAME, STATE_NAME, Checkpoint, FileStamp, Stamp, decode_stamp, read_stamp
from p2ptrain.store.lock import Lock
from p2ptrain.store.segment import Snapshot, encoded, frame, header
from p2ptrain.store.store import ORIGIN_NAME

KEPT = 4
KEPT_OF_OLDER = 10  # the first of so many stays
SEGMENT, BASES = "wal/00000001.log", "bases"
FILES = ("run.json", ORIGIN_NAME, "tokenizer.json", SEGMENT, STATE_NAME, STAMP_NAME)  # the stamp last
# By the packages that reach a place, if they are loaded. Besides these, they raise what is an OSError.
ERRORS = (
    *(("botocore.exceptions", "BotoCoreError"), ("gcsfs.retry", "HttpError"), ("azure.core.exceptions", "AzureError")),
    *(("google.auth.exceptions", "GoogleAuthError"), ("aiohttp", "ClientError"), ("paramiko", "SSHException")),
    *(("builtins", "OSError"), ("ftplib", "Error"), ("zipfile", "BadZipFile"), ("tarfile", "TarError")),
)
_NAME = re.compile(r"[0-9]{8}-backup-of-round-[0-9]{1,15}")
_log = logging.getLogger("p2ptrain.store")


class BackupPlace:
    """A directory, or an object store that fsspec reaches, such as s3://bucket/run."""

    def __init__(self, text: str) -> None:
        self.where = text.rstrip("/") or "/"
        self.local: Path | None = None
        try:
            with self.trouble():  # some are reached at once
                self._system, self._root = import_module("fsspec.core").url_to_fs(self.where)
        except (ImportError, TypeError, ValueError) as error:
            fix = "pip install 'p2ptrain[backup]' and the package that fsspec takes for it, or name a directory"
            raise ConfigError(f"this address cannot be used here ({error})", source=text, fix=fix) from error
        self.local = Path(self._root) if "file" in self._system.protocol else None
        if self.local is not None and not nearest_existing(self.local).is_dir():
            raise ConfigError("not a directory", source=text, fix="Name another, or move it away")

    @contextmanager
    def trouble(self) -> Iterator[None]:
        """Turns errors of the place into DataError."""
        try:
            yield
        except tuple(getattr(sys.modules.get(module), name, OSError) for module, name in ERRORS) as error:
            if self.local is not None and isinstance(error, OSError):
                raise DiskError(self.local, "cannot be used", error) from error
            what = " ".join(str(error).split())[:200] or type(error).__name__
            raise DataError(f"{self.where}: {what}", fix="Check the address, the keys and the line") from error

    def locked(self) -> AbstractContextManager[object]:
        return nullcontext() if self.local is None else Lock.of_directory(self.local)

    def check_room(self, size: int) -> None:
        if self.local is not None and size > (free := shutil.disk_usage(nearest_existing(self.local)).free):
            what = f"a backup takes {size:,} bytes, and {free:,} are free there"
            raise DataError(what, path=self.local, fix="Make room, or keep fewer of them with --keep")

    def names(self, folder: str = "") -> list[str]:
        self._system.invalidate_cache()
        try:
            paths = self._system.ls(self._at(folder), detail=False)
        except FileNotFoundError:
            return []
        return sorted(path.rstrip("/").rpartition("/")[2] for path in paths)

    def folders(self) -> dict[str, bool]:
        """Returns the backups' folders in order, and whether each is complete."""
        found = [name for name in self.names() if _NAME.fullmatch(name)]
        return {name: self.size_of(f"{name}/{STAMP_NAME}") is not None for name in found}

    def newest(self) -> str | None:
        """Returns the folder of the newest complete backup."""
        complete = [name for name, is_complete in self.folders().items() if is_complete]
        return complete[-1] if complete else None

    def stamp(self, folder: str) -> Stamp:
        return decode_stamp(self._system.cat_file(self._at(f"{folder}/{STAMP_NAME}")), Path(self.where, folder))

    def size_of(self, name: str) -> int | None:
        try:
            size: int = self._system.info(self._at(name))["size"]
        except FileNotFoundError:
            return None
        return size

    def has_same(self, name: str, source: Path) -> bool:
        """Whether a file is there, by its size, and in a directory by what is in it."""
        is_there = self.size_of(name) == source.stat().st_size
        return is_there and (self.local is None or digest_of(self.local / name) == digest_of(source))

    def put(self, name: str, source: Path | bytes) -> None:
        path = self._at(name)
        self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
        if isinstance(source, Path):
            self._system.put_file(str(source), path)
            if self.local is not None:
                sync(Path(path))
        elif self.local is not None:
            write_atomically(Path(path), source)
        else:
            self._system.pipe_file(path, source)

    def get(self, name: str, target: Path) -> None:
        if self.size_of(name) is not None:
            make_directory(target.parent)
            self._system.get_file(self._at(name), str(target))

    def remove(self, folder: str) -> None:
        """Removes a backup, its stamp first, so that what is left of it is none."""
        if self.size_of(f"{folder}/{STAMP_NAME}") is not None:
            self._system.rm_file(self._at(f"{folder}/{STAMP_NAME}"))
        self._system.rm(self._at(folder), recursive=True)

    def keep(self, kept: int) -> None:
        """Removes the older backups, but for every tenth."""
        for name in [*self.folders()][:-kept]:
            if int(name[:8]) % KEPT_OF_OLDER != 1:
                self.remove(name)

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"


# -- Writing ----------------------------------------------------------------------------------------


def newest_round(place: BackupPlace, run_id: bytes) -> int:
    """Returns the round of the newest backup, or -1; ConfigError if it is of another run."""
    if (name := place.newest()) is None:
        return -1
    try:
        stamp = place.stamp(name)
    except DataError as error:
        _log.warning("passed over: %s", error)
        return -1
    if stamp.run != run_id.hex():
        fix = "Name a place of its own for each run"
        raise ConfigError(f"holds backups of run {stamp.run}", source=place.where, key="--to", fix=fix)
    return stamp.round


def newest_certified(checkpoints: Sequence[Checkpoint], journal: Journal, after: int) -> Checkpoint | None:
    """Returns the newest checkpoint after a round whose agreed weights are intact and certified by the journal."""
    for each in reversed(checkpoints):
        if each.round > after and each.round >= journal.base.round and each.judged_by(journal).is_certified:
            try:
                each.stamp.state.check(each.path / STATE_NAME)
            except DataError as error:
                _log.warning("passed over: %s", error)
            else:
                return each
    return None


def proof_of(checkpoint: Checkpoint, journal: Journal) -> bytes:
    """Encodes a log that ends with the certificate of a checkpoint's root, without what the node itself has said."""
    proved = next(at for at, state in enumerate(journal.states) if state.root_round == checkpoint.round)
    count = max(proved, 1)  # the first step names the agreed state before it
    later = {name_of(each.step) for each in journal.history[count:]}
    trunk = journal.trunk
    if trunk is not None:
        lineage = tuple(each for each in trunk.lineage if each.branch not in later)
        trunk = Trunk(lineage, tuple(each for each in trunk.changes if name_of(each) not in later), ())
    saved = Saved(journal.base, tuple(journal.history[:count]), (), 0, b"", trunk, halted=journal.halted)
    head = header(1)
    return head + frame(1, len(head), encoded(Snapshot(saved, False)))


def copy_to(
    place: BackupPlace, checkpoint: Checkpoint, small: Mapping[str, bytes], base: Path | None = None, kept: int = KEPT
) -> str:
    """Prunes, copies a certified checkpoint, prunes again, and returns the folder's name.

    small: the files that go along; base: the frozen weights, if adapters train"""
    stamp = replace(checkpoint.stamp, trainer=FileStamp(0, ""), trained=0)
    size = stamp.state.bytes + sum(map(len, small.values()))
    for name, is_complete in place.folders().items():
        if not is_complete:
            place.remove(name)  # it was cut off
    place.keep(kept)
    if base is not None and not place.has_same(f"{BASES}/{base.name}", base):
        place.check_room(size + base.stat().st_size)
        place.put(f"{BASES}/{base.name}", base)
    place.check_room(size)
    number = 1 + max((int(name[:8]) for name in place.folders()), default=0)
    folder = f"{number:08d}-backup-of-round-{stamp.round}"
    for name, content in small.items():
        place.put(f"{folder}/{name}", content)
    place.put(f"{folder}/{STATE_NAME}", checkpoint.path / STATE_NAME)
    if place.local is not None:
        stamp.state.check(place.local / folder / STATE_NAME)  # by reading what was written
        sync(place.local)
    place.put(f"{folder}/{STAMP_NAME}", stamp.encoded())
    place.keep(kept)
    return folder


# -- Reading ----------------------------------------------------------------------------------------


def is_backup(folder: Path) -> bool:
    """Whether a folder is a backup, or what is left of one."""
    return _NAME.fullmatch(folder.name) is not None or all(is_there(folder / name) for name in (STAMP_NAME, SEGMENT))


def read_backup(folder: Path) -> Stamp:
    """Reads the stamp of a backup; DataError if a file is missing."""
    for name in (STAMP_NAME, STATE_NAME, SEGMENT, "run.json"):
        if not (folder / name).exists():
            raise DataError("missing: the copy was cut off, or somebody has removed it", path=folder / name)
    return read_stamp(folder)


def find_backup(text: str, fetched: Path) -> Path | None:
    """Returns the folder of the backup that `text` names, or of the newest there; None if there is no backup.

    One in an object store is fetched first, into the directory `fetched`."""
    if "://" not in text and (is_backup(Path(text)) or not is_there(Path(text)) or not Path(text).is_dir()):
        return Path(text) if is_backup(Path(text)) else None
    outer, _, own = text.rstrip("/").rpartition("/")
    place = BackupPlace(outer if _NAME.fullmatch(own) else text)
    with place.trouble():
        name = own if _NAME.fullmatch(own) else place.newest()
        if name is None and (place.local is None or place.folders()):
            raise DataError(f"{place.where}: no complete backup is there", fix="Name another place")
        if name is None or place.local is not None:
            return None if name is None or place.local is None else place.local / name
        folder = fetched / digest("backup", place.stamp(name).encoded()).hex()[:16] / name
        if not (folder / STAMP_NAME).exists():
            for each in place.names(BASES):
                place.get(f"{BASES}/{each}", folder.parent / BASES / each)
            for each in FILES:
                place.get(f"{name}/{each}", folder / each)
    return folder
