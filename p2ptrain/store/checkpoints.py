"""Checkpoints: the trainer's state after a round, to continue from, and the agreed weights, to serve to peers.

    checkpoints/00000012-round-48/
        trainer.safetensors   everything that the trainer needs to continue bit for bit
        state.bin             the agreed weights as they are hashed: fp32, little-endian, in the model's order
        leaves.bin            the digests of its pieces, which lead to the root; recomputed if it is missing
        checkpoint.json       the round, and both files' sizes and BLAKE3 digests, as `b3sum` prints them

A directory gets its name once all its files are on the disk. Its number gives the order in which checkpoints were made:
a branch that lost may have had higher rounds than the one that won. A checkpoint that is damaged or not on the saved
history is skipped in favour of an older one. So is one whose root the log refutes: this node had computed a wrong state
and was killed before it was corrected.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from blake3 import blake3
from msgspec import Meta, Struct

from p2ptrain.core.journal import HistoryVerdict, Journal
from p2ptrain.digest import DIGEST_BYTES, PIECE_BYTES, digest, leaf_digest, piece_count, proves
from p2ptrain.errors import DataError
from p2ptrain.files import (
    PARTIAL_SUFFIX,
    digest_of,
    entries,
    forget,
    make_directory,
    read_regular,
    rename,
    sync,
    trouble,
    write_file,
)

STAMP_NAME, TRAINER_NAME, STATE_NAME = "checkpoint.json", "trainer.safetensors", "state.bin"
LEAVES_NAME = "leaves.bin"
LOOKS_MAX = 8  # attempts to list checkpoints while a running node prunes them
STAMP_BYTES_MAX = 65_536  # a stamp has 600 bytes

Hex = Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")]

_NAME = re.compile(r"([0-9]{8})-round-[0-9]{1,15}")
_log = logging.getLogger("p2ptrain.store")


FORMAT = "p2ptrain checkpoint 1"


class NewerError(DataError):
    """A checkpoint made by a later release, which is neither used nor removed."""

    def __init__(self, path: Path) -> None:
        super().__init__("made by a later release", path=path, fix="Use that release, or move it away")


class _AnyStamp(Struct):
    """The format field, whatever else the stamp contains."""

    format: str = ""


class FileStamp(Struct, frozen=True, forbid_unknown_fields=True):
    """Size and digest of one file of a checkpoint."""

    bytes: Annotated[int, Meta(ge=0)]
    blake3: Hex


class Stamp(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `checkpoint.json`."""

    format: Literal["p2ptrain checkpoint 1"]
    run: Hex
    round: Annotated[int, Meta(ge=0)]
    branch: Hex
    head: Hex  # the manifest after which it was made; empty if unknown, as for a fetched state
    root: Hex
    trained: Annotated[int, Meta(ge=0)]  # the number of the last training that it includes (diary.py)
    trainer: FileStamp
    state: FileStamp
    digest: Hex = ""  # the digest of all other fields

    def encoded(self) -> bytes:
        """Encodes the stamp canonically, with its digest."""
        plain = msgspec.json.encode(msgspec.structs.replace(self, digest=""))
        signed = msgspec.structs.replace(self, digest=digest("checkpoint", plain).hex())
        return msgspec.json.format(msgspec.json.encode(signed)) + b"\n"


class Checkpoint(Struct, frozen=True):
    """A checkpoint on the disk; `Checkpoints.verify` checks it for damage."""

    path: Path
    stamp: Stamp

    @property
    def number(self) -> int:
        return int(self.path.name[:8])

    @property
    def round(self) -> int:
        return self.stamp.round

    @property
    def branch(self) -> bytes:
        return bytes.fromhex(self.stamp.branch)

    @property
    def head(self) -> bytes:
        return bytes.fromhex(self.stamp.head)

    @property
    def root(self) -> bytes:
        return bytes.fromhex(self.stamp.root)

    def judged_by(self, journal: Journal) -> HistoryVerdict:
        return journal.judge(self.round, self.head, self.root)

    @property
    def trainer_path(self) -> Path:
        return self.path / TRAINER_NAME

    @property
    def state_bytes(self) -> int:
        return self.stamp.state.bytes

    def leaves(self) -> bytes:
        """Returns the concatenated digests of the state's pieces, from leaves.bin or else computed from the state.

        Empty if they do not lead to the root, because the state is damaged or the root covers only some pieces.
        """
        size = self.state_bytes
        try:
            kept = read_regular(self.path / LEAVES_NAME, DIGEST_BYTES * piece_count(size))
        except DataError as error:
            _log.warning("recomputing the digests of a saved state: %s", error)
            kept = None
        if kept is not None and proves(kept, size, self.root):
            return kept
        found = b"".join(leaf_digest(at, self.read_piece(at) or b"") for at in range(piece_count(size)))
        return found if proves(found, size, self.root) else b""

    def read_piece(self, index: int) -> bytes | None:
        """Returns a piece of the agreed weights, unchecked; None if there is no such piece or the file is gone."""
        if not 0 <= index < piece_count(self.state_bytes):
            return None
        path = self.path / STATE_NAME
        with trouble(path, "cannot be read"):
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            try:
                return os.pread(descriptor, PIECE_BYTES, index * PIECE_BYTES)
            finally:
                os.close(descriptor)


class Checkpoints:
    """The checkpoints of one node in one run."""

    def __init__(self, directory: Path, run_id: bytes) -> None:
        self.directory, self.run_id = directory, run_id
        self.damaged: set[Path] = set()  # damaged checkpoints that this process has found

    def tidy(self) -> None:
        """Makes the directory, and removes incomplete checkpoints after a crash. Call it before writing."""
        make_directory(self.directory)
        for path in entries(self.directory):
            if path.name.endswith(PARTIAL_SUFFIX):
                forget(path)

    def write(
        self,
        number: int,
        branch: bytes,
        head: bytes,
        root: bytes,
        trained: int,
        save: Callable[[Path], None],
        weights: bytes | memoryview,
        leaves: bytes = b"",
    ) -> Checkpoint:
        """Writes a checkpoint durably.

        save: writes the trainer's file; weights: the agreed weights; leaves: the digests of their pieces, if these lead
        to the root"""
        made = max((int(path.name[:8]) for path in self._directories()), default=0) + 1
        path = self.directory / f"{made:08d}-round-{number}"
        partial = path.with_name(path.name + PARTIAL_SUFFIX)
        forget(partial)
        with trouble(path), ThreadPoolExecutor(1, "digest") as beside:  # computes digests while the disk writes
            try:
                make_directory(partial)
                state_digest = beside.submit(lambda: blake3(weights).hexdigest())
                save(partial / TRAINER_NAME)
                trainer_digest = beside.submit(digest_of, partial / TRAINER_NAME)
                sync(partial / TRAINER_NAME)
                write_file(partial / STATE_NAME, weights)
                stamp = Stamp(
                    format="p2ptrain checkpoint 1",
                    run=self.run_id.hex(),
                    round=number,
                    branch=branch.hex(),
                    head=head.hex(),
                    root=root.hex(),
                    trained=trained,
                    trainer=FileStamp(*trainer_digest.result()),
                    state=FileStamp(memoryview(weights).nbytes, state_digest.result()),
                )
                if leaves:
                    write_file(partial / LEAVES_NAME, leaves)
                write_file(partial / STAMP_NAME, stamp.encoded())
                sync(partial)
                rename(partial, path)
            finally:
                forget(partial)
        return Checkpoint(path, self._stamp(path))

    def found(self) -> list[Checkpoint | DataError]:
        """Returns all checkpoints, newest last, with an error in place of an unreadable one."""
        for _ in range(LOOKS_MAX):
            found = {path: self._look(path) for path in self._directories()}
            if found.keys() <= {*self._directories()}:
                break  # otherwise a running node has just removed some
        errors = {path: each for path, each in found.items() if isinstance(each, DataError)}
        self.damaged |= {path for path, error in errors.items() if not isinstance(error, NewerError)}
        return [*found.values()]

    def _look(self, path: Path) -> Checkpoint | DataError:
        try:
            if path.is_symlink() or (path.exists() and not path.is_dir()):
                raise DataError("not a directory, so not a checkpoint", path=path)
            return Checkpoint(path, self._stamp(path))
        except DataError as error:
            return error

    def present(self) -> list[Checkpoint]:
        """Returns the readable checkpoints, newest last; logs and skips the others."""
        found = self.found()
        for each in found:
            if isinstance(each, DataError):
                _log.warning("checkpoint skipped: %s", each)
        return [each for each in found if isinstance(each, Checkpoint)]

    def verify(self, checkpoint: Checkpoint) -> str | None:
        """Reads both files and returns why the checkpoint cannot be used; None if it is undamaged."""
        why = self._damage_of(checkpoint)
        if why is not None:
            self.damaged.add(checkpoint.path)
        return why

    def _damage_of(self, checkpoint: Checkpoint) -> str | None:
        for name, stamp in ((TRAINER_NAME, checkpoint.stamp.trainer), (STATE_NAME, checkpoint.stamp.state)):
            path = checkpoint.path / name
            try:
                found = digest_of(path, stamp.bytes)
            except DataError as error:
                return str(error)
            if found != (stamp.bytes, stamp.blake3):
                return f"{path}: damaged: its digest is not the one in {STAMP_NAME}"
        return None

    def export(self, checkpoint: Checkpoint, target: Path, beside: Mapping[str, bytes]) -> None:
        """Copies a checkpoint to a new directory, with the files in `beside`, and verifies the copy."""
        if target.exists():
            raise DataError("already exists", path=target)
        partial = target.with_name(target.name + PARTIAL_SUFFIX)
        forget(partial)
        with trouble(target):
            try:
                make_directory(partial)
                for name in (TRAINER_NAME, STATE_NAME, STAMP_NAME):
                    shutil.copyfile(checkpoint.path / name, partial / name)
                    sync(partial / name)
                for name, content in beside.items():
                    write_file(partial / name, content)
                if why := self.verify(Checkpoint(partial, checkpoint.stamp)):
                    raise DataError(why)
                sync(partial)
                rename(partial, target)
            finally:
                forget(partial)

    def newest(self, journal: Journal) -> Checkpoint | None:
        """Returns the newest undamaged checkpoint on the saved history, after reading it completely.

        Raises NewerError if a later release has made any checkpoint."""
        for each in self.found():
            if isinstance(each, NewerError):
                raise each
        for checkpoint in reversed(self.present()):
            judgement = checkpoint.judged_by(journal)
            why = self.verify(checkpoint) if judgement.is_on_history else judgement.why
            if why is None:
                return checkpoint
            _log.warning("checkpoint skipped: path %s, why %s", checkpoint.path, why)
        return None

    def prune(self, kept: int, journal: Journal) -> None:
        """Removes all checkpoints but the newest `kept`, the newest `kept` on the saved history (the others' branch may
        have lost), and the newest certified one (later ones may turn out wrong)."""
        paths = self._directories()  # listed first, so that a checkpoint that another thread finishes now stays
        found = self.present()
        judged = [(each, each.judged_by(journal)) for each in found]
        ours = [each for each, judgement in judged if judgement.is_on_history]
        certified = [each for each, judgement in judged if judgement.is_certified]
        keep: set[Path | None] = {each.path for each in (*found[-kept:], *ours[-kept:], *certified[-1:])}
        keep |= {each.path for each in self.found() if isinstance(each, NewerError)}
        for path in paths:
            if path not in keep:
                forget(path)

    def _directories(self) -> list[Path]:
        return [path for path in entries(self.directory) if _NAME.fullmatch(path.name)]

    def _stamp(self, directory: Path) -> Stamp:
        stamp = read_stamp(directory)
        if stamp.run != self.run_id.hex():
            raise DataError(f"belongs to another run ({stamp.run})", path=directory / STAMP_NAME)
        return stamp


def read_stamp(directory: Path) -> Stamp:
    """Reads the stamp of a checkpoint, whichever run it belongs to."""
    path = directory / STAMP_NAME
    content = read_regular(path, STAMP_BYTES_MAX)
    if content is None:
        raise DataError("missing, or not a checkpoint file", path=path)
    try:
        if _is_newer(content):
            raise NewerError(directory)
        stamp = msgspec.json.decode(content, type=Stamp)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"not a checkpoint's stamp: {error}", path=path) from error
    if stamp.encoded() != content:
        raise DataError("damaged: its content does not match its digest", path=path)
    return stamp


def _is_newer(content: bytes) -> bool:
    """Whether a later version made this stamp. A stamp with a flipped bit in its version counts as damaged instead."""
    made = msgspec.json.decode(content, type=_AnyStamp).format
    if made == FORMAT or not made.startswith(FORMAT[:-1]):
        return False
    mended = content.replace(made.encode(), FORMAT.encode(), 1)
    try:
        return msgspec.json.decode(mended, type=Stamp).encoded() != mended
    except msgspec.MsgspecError:
        return True
