"""Files that survive a crash; store and data sets change the disk only through this module.

A file is written under a temporary name, synced and renamed, and its directory is synced, so that after a power cut the
file is either complete or as it was before (Pillai et al., "All file systems are not created equal", OSDI 2014).
Errors of the system become a `DiskError`, which names the file and says what to do.

`read` and `entries` are for files that a node wrote itself. They follow links, since the owner may have moved a file or
a directory to another disk and left a link.

`open_regular`, `read_regular` and `listed` are for files that may come from someone else: a pipe would block forever,
a link could lead anywhere, opening a device could trigger it, and a file could be larger than memory. Audit, export and
data sets use these, since they read directories of others."""

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
from p2ptrain.system import fsync

PARTIAL_SUFFIX = ".partial"  # for files being written; removed when left over after a crash
READ_BYTES = 2**20  # at a time: some files are as large as the model

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)
BROKEN = (errno.EIO, errno.ENXIO, errno.ENODEV, errno.ESTALE)


class DiskError(DataError):
    """An error of the file system, with the path and a fix."""

    def __init__(self, path: Path, what: str, error: OSError) -> None:
        self.code = error.errno
        super().__init__(f"{what} ({error.strerror or type(error).__name__})", path=path, fix=fix_of(self.code))

    @property
    def is_full(self) -> bool:
        return self.code in FULL


def fix_of(code: int | None) -> str:
    """Returns a person's fix for this errno."""
    if code in FULL:
        return "Free some space there: no saved data is lost"
    if code in FORBIDDEN:
        return "Let this user write there, or choose another place"
    if code in BROKEN:
        return "Check the disk, and copy the saved data elsewhere before using it again"
    return "No saved data is lost"


@contextmanager
def trouble(path: Path, what: str = "cannot be written") -> Iterator[None]:
    """Turns an OSError inside into a `DiskError` about this path."""
    try:
        yield
    except OSError as error:
        raise DiskError(path, what, error) from error


def write_all(descriptor: int, content: bytes | memoryview) -> None:
    """Writes everything: os.write may write less than it was given, and then the next call reports why."""
    view = memoryview(content).cast("B")
    while view:
        view = view[os.write(descriptor, view) :]


@contextmanager
def opened(path: Path, flags: int, mode: int = 0o600) -> Iterator[int]:
    """Opens a file or a directory inside the block, as a descriptor."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, mode)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Syncs a file, or the names in a directory, to the disk."""
    with opened(path, os.O_RDONLY) as descriptor:
        fsync(descriptor)


def make_directory(path: Path) -> None:
    """Makes a directory that only the node's user can enter, and its missing parents, and syncs its name."""
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
    """Replaces a file so that it is always complete, new or old; when this returns, the new one survives a crash."""
    replace_file(path, content)
    with trouble(path):
        sync(path.parent)


def replace_file(path: Path, content: bytes | memoryview, *, is_synced: bool = True, mode: int = 0o600) -> None:
    """Replaces a file so that it is always complete. Until its directory is synced, a crash may bring back the old."""
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    with trouble(path):
        try:
            write_file(partial, content, is_synced=is_synced, mode=mode)
            partial.replace(path)
        except OSError:
            forget(partial)
            raise


def write_file(path: Path, content: bytes | memoryview, *, is_synced: bool = True, mode: int = 0o600) -> None:
    """Writes a file, in place of any earlier one."""
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode) as descriptor:
        write_all(descriptor, content)
        if is_synced:
            fsync(descriptor)


def rename(path: Path, target: Path) -> None:
    """Renames a synced file or directory, and syncs the new name. The target must not exist."""
    path.rename(target)
    sync(target.parent)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Makes a directory that gets its name once the block has filled it, and survives a crash from then on."""
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    forget(partial)
    with trouble(path):
        try:
            make_directory(partial)
            yield partial
            sync(partial)
            rename(partial, path)
        finally:
            forget(partial)


def cut(path: Path, size: int) -> None:
    """Truncates a file to `size` bytes, durably."""
    with trouble(path), opened(path, os.O_WRONLY) as descriptor:
        os.ftruncate(descriptor, size)
        fsync(descriptor)


def forget(path: Path) -> None:
    """Removes a file or directory that only takes up space. Ignores errors; after a crash it may exist again.

    A directory stays complete under its name until it is gone, because somebody else may be reading it."""
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
    """Returns the contents of a file, or None if it does not exist."""
    with trouble(path, "cannot be read"):
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None


def read_at(path: Path, start: int, size: int) -> bytes | None:
    """Reads a part of a file; None if the file is gone, as one that was pruned just now."""
    with trouble(path, "cannot be read"):
        try:
            with path.open("rb", buffering=0) as file:
                return os.pread(file.fileno(), size, start)
        except FileNotFoundError:
            return None


def entries(directory: Path) -> list[Path]:
    """Returns the paths in a directory, sorted; none if it does not exist."""
    with trouble(directory, "cannot be read"):
        try:
            return sorted(directory.iterdir())
        except FileNotFoundError:
            return []


def open_regular(path: Path) -> BufferedReader:
    """Opens a regular file for reading. `DataError` if it is a link, a device or anything else.

    The check comes before opening, because opening a device can trigger it, and again afterwards, because the file may
    have been swapped in between."""
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
        fix = "Put a file in its place, or remove it"
        raise DataError(f"not a regular file, but {_kind(found)}", path=path, fix=fix)


def _kind(found: os.stat_result) -> str:
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(found.st_mode), "a device")


def read_regular(path: Path, bytes_max: int) -> bytes | None:
    """Returns a file's contents, as long as it was when opened, or None without one; `DataError` beyond `bytes_max`."""
    with trouble(path, "cannot be read"):
        try:
            file = open_regular(path)
        except FileNotFoundError:
            return None
        with file:
            size = os.fstat(file.fileno()).st_size
            if size > bytes_max:
                raise DataError(f"{size:,} bytes; the limit is {bytes_max:,}", path=path)
            return file.read(size)


def listed(directory: Path, names_max: int) -> list[tuple[Path, os.stat_result]]:
    """Returns a directory's paths with their lstat results, sorted; empty if the directory does not exist."""
    found: list[tuple[Path, os.stat_result]] = []
    with trouble(directory, "cannot be read"):
        try:
            kind = os.lstat(directory)
        except FileNotFoundError:
            return []
        if not stat.S_ISDIR(kind.st_mode):
            fix = "Put the right directory in its place"
            raise DataError(f"not a directory, but {_kind(kind)}", path=directory, fix=fix)
        with os.scandir(directory) as names:
            for each in names:
                if len(found) >= names_max:
                    fix = "Move away those that do not belong"
                    raise DataError(f"more than {names_max:,} files", path=directory, fix=fix)
                try:
                    found.append((Path(each.path), each.stat(follow_symlinks=False)))
                except FileNotFoundError:
                    continue  # removed meanwhile
    return sorted(found, key=lambda each: each[0])


def is_there(path: Path) -> bool:
    """Whether there is anything; False also where this user may not look."""
    return os.path.exists(path)  # noqa: PTH110  # Path's raises, until Python 3.14


def nearest_existing(directory: Path) -> Path:
    """Returns the path, or its nearest parent that exists."""
    while not is_there(directory) and directory != directory.parent:
        directory = directory.parent
    return directory


def below(directory: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yields every file below a directory with its lstat result; skips what vanishes meanwhile or cannot be read."""
    for folder, _, names in os.walk(directory):
        for name in names:
            path = Path(folder, name)
            try:
                kind = os.lstat(path)
            except OSError:
                continue
            yield path, kind


def digest_of(path: Path, bytes_max: int | None = None) -> tuple[int, str]:
    """Returns the size of a regular file and its BLAKE3 digest, as `b3sum` prints it. Reading stops once the file
    turns out to be longer than `bytes_max`."""
    hasher, size = blake3(), 0
    with trouble(path, "cannot be read"), open_regular(path) as file:
        while part := file.read(READ_BYTES):
            hasher.update(part)
            size += len(part)
            if bytes_max is not None and size > bytes_max:
                break
    return size, hasher.hexdigest()
