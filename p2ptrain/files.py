"""Files that survive a crash: the only place in which store and data sets change anything on the disk.

A file is written under a temporary name, synced, renamed, and its directory synced, so that after a power cut it is
there as a whole or as it was before (Pillai et al., "All file systems are not created equal", OSDI 2014). What the
system refuses becomes a `DiskError`, which names the file and says what to do.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blake3 import blake3

from p2ptrain.errors import DataError

PARTIAL_SUFFIX = ".partial"  # of what is still being written; left over after a crash, and removed
READ_BYTES = 2**20  # at a time: some files are as large as the model

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)
BROKEN = (errno.EIO, errno.ENXIO, errno.ENODEV, errno.ESTALE)


class DiskError(DataError):
    """The disk, or whoever set it up, does not let us."""

    def __init__(self, path: Path, what: str, error: OSError) -> None:
        self.path, self.code = path, error.errno
        found = error.strerror or type(error).__name__
        super().__init__(f"{path}: {what} ({found}). {fix_of(self.code)}")

    @property
    def is_full(self) -> bool:
        return self.code in FULL


def fix_of(code: int | None) -> str:
    """What a person can do about an error of this number."""
    if code in FULL:
        return "Free some space there: nothing that was saved is lost"
    if code in FORBIDDEN:
        return "Let this user write there, or name another place"
    if code in BROKEN:
        return "Check the disk: what was saved should be copied elsewhere before it is used again"
    return "Nothing that was saved before is lost"


@contextmanager
def trouble(path: Path, what: str = "cannot be written") -> Iterator[None]:
    """Errors of the system inside become a `DiskError` about this path."""
    try:
        yield
    except OSError as error:
        raise DiskError(path, what, error) from error


def write_all(descriptor: int, content: bytes | memoryview) -> None:
    """A write may write less than it was given: the rest then says why."""
    view = memoryview(content).cast("B")
    while view:
        view = view[os.write(descriptor, view) :]


def sync(path: Path) -> None:
    """Make a file, or the names in a directory, as lasting as the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """A directory for the node's user alone, and whatever is missing above it; its name lasts."""
    with trouble(path, "cannot be made"):
        if path.is_dir():
            return
        make_directory(path.parent)
        try:
            path.mkdir(0o700)
        except FileExistsError:
            if not path.is_dir():
                raise
        sync(path.parent)


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Under its name the file is whole, or is as it was before; once this returns, it lasts."""
    replace_file(path, content)
    with trouble(path):
        sync(path.parent)


def replace_file(path: Path, content: bytes | memoryview, *, is_synced: bool = True, mode: int = 0o600) -> None:
    """Under its name the file is whole, or is as it was before; which one lasts is open until its place is synced."""
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    with trouble(path):
        try:
            write_file(partial, content, is_synced=is_synced, mode=mode)
            partial.replace(path)
        except OSError:
            forget(partial)
            raise


def write_file(path: Path, content: bytes | memoryview, *, is_synced: bool = True, mode: int = 0o600) -> None:
    """A new file in place of whatever has its name."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        write_all(descriptor, content)
        if is_synced:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(path: Path, target: Path) -> None:
    """What is under the first name, and on the disk, is under the second; nothing may be there."""
    path.rename(target)
    sync(target.parent)


def cut(path: Path, size: int) -> None:
    """Let a file end here."""
    with trouble(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def forget(path: Path) -> None:
    """Remove what nobody needs, if it can be: it only takes space. After a crash it may be there again."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError:
        return


def read(path: Path) -> bytes | None:
    """What is in a file; None if there is none."""
    with trouble(path, "cannot be read"):
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None


def entries(directory: Path) -> list[Path]:
    """What is in a directory, by name; nothing if there is none."""
    with trouble(directory, "cannot be read"):
        try:
            return sorted(directory.iterdir())
        except FileNotFoundError:
            return []


def digest_of(path: Path) -> tuple[int, str]:
    """The size of a file and its BLAKE3 digest, as `b3sum` prints it."""
    hasher, size = blake3(), 0
    with trouble(path, "cannot be read"), path.open("rb", buffering=0) as file:
        while part := file.read(READ_BYTES):
            hasher.update(part)
            size += len(part)
    return size, hasher.hexdigest()
