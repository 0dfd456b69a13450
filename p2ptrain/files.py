"""Files that survive a crash: the only place in which store and data sets change anything on the disk.

A file is written under a temporary name, synced, renamed, and its directory synced, so that after a power cut it is
there as a whole or as it was before (Pillai et al., "All file systems are not created equal", OSDI 2014). What the
system refuses becomes a `DiskError`, which names the file and says what to do.

What a node has written itself is read by `read` and `entries`. They follow links: its owner may have moved a file or a
directory to another disk and left a link.

What somebody else may have put there is read by `open_regular`, `read_regular` and `listed`: a pipe would block for
ever, a link lead anywhere, a device obey, and a file claim to be larger than any memory. Whoever only looks at a
directory that may be of somebody else (an audit, an export, a data set) reads with these.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
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
    """Remove what nobody needs, if it can be: it only takes space. After a crash it may be there again.

    A directory is whole under its name until it is gone: somebody else may be reading it.
    """
    try:
        if path.is_dir() and not path.is_symlink():
            if not path.name.endswith(PARTIAL_SUFFIX):
                partial = path.with_name(path.name + PARTIAL_SUFFIX)
                forget(partial)
                path = path.rename(partial)
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


def open_regular(path: Path) -> BufferedReader:
    """A file for reading, and no link and no device: `DataError` if it is anything else.

    It is looked at before it is opened, because to open a device can set it off, and afterwards, because it may have
    been exchanged in between.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    _check_regular(path, os.lstat(path))
    file = os.fdopen(os.open(path, flags), "rb")
    try:
        _check_regular(path, os.fstat(file.fileno()))
    except DataError:
        file.close()
        raise
    return file


def _check_regular(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"{path}: not a regular file, but {_kind(found)}. Put a file in its place, or nothing")


def _kind(found: os.stat_result) -> str:
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(found.st_mode), "a device")


def read_regular(path: Path, bytes_max: int) -> bytes | None:
    """What is in a file of at most so many bytes, as long as it was when it was opened; None if there is none."""
    with trouble(path, "cannot be read"):
        try:
            file = open_regular(path)
        except FileNotFoundError:
            return None
        with file:
            size = os.fstat(file.fileno()).st_size
            if size > bytes_max:
                raise DataError(f"{path}: {size:,} bytes, and at most {bytes_max:,} of such a file are read")
            return file.read(size)


def listed(directory: Path, names_max: int) -> list[tuple[Path, os.stat_result]]:
    """What is in a directory, by name, and what it is, links not followed; nothing if there is none."""
    found: list[tuple[Path, os.stat_result]] = []
    with trouble(directory, "cannot be read"):
        try:
            kind = os.lstat(directory)
        except FileNotFoundError:
            return []
        if not stat.S_ISDIR(kind.st_mode):
            raise DataError(f"{directory}: not a directory, but {_kind(kind)}. Put what belongs there in its place")
        with os.scandir(directory) as names:
            for each in names:
                if len(found) >= names_max:
                    raise DataError(f"{directory}: more than {names_max:,} files. Move away what does not belong there")
                try:
                    found.append((Path(each.path), each.stat(follow_symlinks=False)))
                except FileNotFoundError:
                    continue  # it has just gone
    return sorted(found, key=lambda each: each[0])


def digest_of(path: Path, bytes_max: int | None = None) -> tuple[int, str]:
    """The size of a regular file and its BLAKE3 digest, as `b3sum` prints it; of one that has more bytes than it
    may, no more are read than tell so."""
    hasher, size = blake3(), 0
    with trouble(path, "cannot be read"), open_regular(path) as file:
        while part := file.read(READ_BYTES):
            hasher.update(part)
            size += len(part)
            if bytes_max is not None and size > bytes_max:
                break
    return size, hasher.hexdigest()
