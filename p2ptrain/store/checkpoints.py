"""Checkpoints: the trainer's state after a round, to continue from, and the agreed weights, to serve to peers.

    checkpoints/00000012-round-48/
        trainer.safetensors   everything that the trainer needs to continue bit for bit
        state.bin             the agreed weights as they are hashed: fp32, little-endian, in the model's order
        leaves.bin            the digests of its pieces, which lead to the root; recomputed if it is missing
        checkpoint.json       the round, and both files' sizes and BLAKE3 digests, as `b3sum` prints them

A directory gets its name once all its files are on the disk. Its number gives the order in which checkpoints were made:
a branch that lost may have had higher rounds than the one that won. A checkpoint that is damaged or not on the saved
history is skipped in favour of an older one. So is one whose root the log refutes: this node had computed a wrong state
and was killed before it was corrected."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from blake3 import blake3
from msgspec import Meta, Struct

from p2ptrain import files
from p2ptrain.core.journal import HistoryVerdict, Journal
from p2ptrain.digest import DIGEST_BYTES, PIECE_BYTES, digest, leaf_digest, piece_count, proves
from p2ptrain.errors import DataError

STAMP_NAME, TRAINER_NAME, STATE_NAME = "checkpoint.json", "trainer.safetensors", "state.bin"
LEAVES_NAME = "leaves.bin"
LOOKS_MAX = 8  # attempts to list checkpoints while a running node prunes them
SPARED_MAX = 2  # open motions to go back for which checkpoints are kept: a member may move as often as it likes
STAMP_BYTES_MAX = 65_536  # a stamp has 600 bytes

Hex = Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")]

_NAME = re.compile(r"([0-9]{8})-round-[0-9]{1,15}")
_log = logging.getLogger("p2ptrain.store")


FORMAT: Literal["p2ptrain checkpoint 1"] = "p2ptrain checkpoint 1"


class NewerError(DataError):
    """A checkpoint made by a later release, which is neither used nor removed."""

    def __init__(self, path: Path) -> None:
        super().__init__("made by a later release", path=path, fix="Use that release, or move it away")


class _AnyStamp(Struct):
    """The format field, whatever else the stamp contains."""

    format: str = ""


class FileStamp(Struct, frozen=True, forbid_unknown_fields=True):
    bytes: Annotated[int, Meta(ge=0)]
    blake3: Hex

    def check(self, path: Path) -> None:
        """Reads the file; DataError if it is another."""
        if files.digest_of(path, self.bytes) != (self.bytes, self.blake3):
            raise DataError(f"damaged: its digest is not the one in {STAMP_NAME}", path=path)


class Stamp(Struct, frozen=True, forbid_unknown_fields=True):
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
        plain = msgspec.json.encode(msgspec.structs.replace(self, digest=""))
        signed = msgspec.structs.replace(self, digest=digest("checkpoint", plain).hex())
        return msgspec.json.format(msgspec.json.encode(signed)) + b"\n"


class Checkpoint(Struct, frozen=True):
    """A checkpoint on the disk; `Checkpoints.verify` checks it for damage."""

    path: Path
    stamp: Stamp

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

        Empty if they do not lead to the root, because the state is damaged or the root covers only some pieces."""
        size = self.state_bytes
        try:
            kept = files.read_regular(self.path / LEAVES_NAME, DIGEST_BYTES * piece_count(size))
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
        return files.read_at(self.path / STATE_NAME, index * PIECE_BYTES, PIECE_BYTES)


class Checkpoints:
    def __init__(self, directory: Path, run_id: bytes) -> None:
        self.directory, self.run_id = directory, run_id
        self.damaged: set[Path] = set()  # damaged checkpoints that this process has found

    def tidy(self) -> None:
        """Makes the directory, and removes incomplete checkpoints after a crash. Call it before writing."""
        files.make_directory(self.directory)
        for path in files.entries(self.directory):
            if path.name.endswith(files.PARTIAL_SUFFIX):
                files.forget(path)

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

        save: writes the trainer's file; weights: the agreed weights; leaves: their digests, if they lead to the root"""
        made = max((int(path.name[:8]) for path in self._directories()), default=0) + 1
        path = self.directory / f"{made:08d}-round-{number}"
        with files.new_directory(path) as partial, ThreadPoolExecutor(1, "digest") as beside:  # digests meanwhile
            state_digest = beside.submit(lambda: blake3(weights).hexdigest())
            save(partial / TRAINER_NAME)
            trainer_digest = beside.submit(files.digest_of, partial / TRAINER_NAME)
            files.sync(partial / TRAINER_NAME)
            files.write_file(partial / STATE_NAME, weights)
            stamp = Stamp(
                format=FORMAT,
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
                files.write_file(partial / LEAVES_NAME, leaves)
            files.write_file(partial / STAMP_NAME, stamp.encoded())
        return Checkpoint(path, self._stamp(path))

    def found(self) -> list[Checkpoint | DataError]:
        """Returns all checkpoints, newest last, with an error in place of an unreadable one."""
        for _ in range(LOOKS_MAX):
            found = {path: self._look(path) for path in self._directories()}
            if found.keys() <= {*self._directories()}:
                break  # otherwise a running node has just removed some
        self.damaged |= {path for path, each in found.items() if not isinstance(each, Checkpoint | NewerError)}
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
        try:
            if checkpoint.stamp.trainer.blake3:  # a backup has none
                checkpoint.stamp.trainer.check(checkpoint.trainer_path)
            checkpoint.stamp.state.check(checkpoint.path / STATE_NAME)
        except DataError as error:
            self.damaged.add(checkpoint.path)
            return str(error)
        return None

    def export(self, checkpoint: Checkpoint, target: Path, beside: Mapping[str, bytes]) -> None:
        """Copies a checkpoint to a new directory, with the files in `beside`, and verifies the copy."""
        if target.exists():
            raise DataError("already exists", path=target)
        with files.new_directory(target) as partial:
            for name in (TRAINER_NAME, STATE_NAME, STAMP_NAME):
                shutil.copyfile(checkpoint.path / name, partial / name)
                files.sync(partial / name)
            for name, content in beside.items():
                files.write_file(partial / name, content)
            if why := self.verify(Checkpoint(partial, checkpoint.stamp)):
                raise DataError(why)

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

    def prune(self, kept: int, journal: Journal, fetched: Collection[Path] = ()) -> None:
        """Removes all checkpoints but the newest `kept`, the newest `kept` on the saved history (the others' branch may
        have lost), the newest certified one (later ones may turn out wrong), the newest one whose root covers all of it
        (peers can fetch no other), and those that a successor may begin with: of several motions to go back, those with
        most assents (core/succession.py). What cannot be read stays. Those `fetched`, which peers still read, stay in
        the place of others: or who is slow would never have one."""
        paths = self._directories()  # listed first, so that a checkpoint that another thread finishes now stays
        looked = self.found()
        found = [each for each in looked if isinstance(each, Checkpoint)]
        judged = [(each, each.judged_by(journal)) for each in found]
        certified = [each for each, judgement in judged if judgement.is_certified]
        whole = [each for each in certified if (each.path / LEAVES_NAME).exists()]
        read = [each for each in found if each.path in fetched][: kept - 1]
        kept -= len(read)
        others = [each for each in found if each not in read]
        ours = [each for each, judgement in judged if judgement.is_on_history and each not in read]
        stay = (*read, *others[-kept:], *ours[-kept:], *certified[-1:], *whole[-1:])
        keep: set[Path | None] = {each.path for each in stay}
        keep |= {each.path for each in looked if isinstance(each, NewerError)}
        keep |= {each.path.parent for each in looked if isinstance(each, files.DiskError) and each.path}
        here = journal.state.succession
        moved = sorted(
            (each for each in here.motions if each.goes_back), key=lambda motion: -here.assents_to(motion.name)
        )
        roots = {motion.root for motion in (*moved[:SPARED_MAX], *([here.decided] if here.decided else []))}
        keep |= {each.path for each in found if each.root in roots}
        for path in paths:
            if path not in keep:
                files.forget(path)

    def _directories(self) -> list[Path]:
        return [path for path in files.entries(self.directory) if _NAME.fullmatch(path.name)]

    def _stamp(self, directory: Path) -> Stamp:
        stamp = read_stamp(directory)
        if stamp.run != self.run_id.hex():
            raise DataError(f"belongs to another run ({stamp.run})", path=directory / STAMP_NAME)
        if not stamp.trainer.blake3:
            raise DataError("from a backup, without a trainer: no node goes on from it", path=directory)
        return stamp


def read_stamp(directory: Path) -> Stamp:
    """Reads the stamp of a checkpoint, whichever run it belongs to."""
    content = files.read_regular(directory / STAMP_NAME, STAMP_BYTES_MAX)
    if content is None:
        raise DataError("missing, or not a checkpoint file", path=directory / STAMP_NAME)
    return decode_stamp(content, directory)


def decode_stamp(content: bytes, directory: Path) -> Stamp:
    """Decodes the content of a stamp; DataError if it is damaged, or a later release's."""
    path = directory / STAMP_NAME
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
