"""The cores and memory available to this process: those of the machine, or fewer under the limits of a container.

torch and psutil see the whole machine. A node in a container with two of 64 cores would train with 63 threads that
compete, and `p2ptrain doctor` in one with 4 of 256 GB would find that a large model fits. Linux keeps the limits in the
control groups of the process, each of which is also limited by its parents (cgroups(7), versions 1 and 2)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from math import ceil
from pathlib import Path

import psutil

LIMITS = (  # file of the limit, file of the usage, prefix of keys in memory.stat: version 2, then 1
    ("memory.max", "memory.current", ""),
    ("memory.high", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
KINDS = ("active", "inactive")
M_MMAP_THRESHOLD = -3  # malloc.h
GROUPS_MOUNT, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cores() -> int:
    """The number of cores this process may use, at least one."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([allowed, *(max(1, ceil(share)) for share in _shares())])


def free_memory_bytes() -> int:
    """The memory that can be allocated now, under all limits."""
    return min([int(psutil.virtual_memory().available), *_rests()])


def memory_bytes() -> int:
    """The machine's memory and swap, or the limit of the process if that is lower."""
    there = int(psutil.virtual_memory().total + psutil.swap_memory().total)
    return min(
        [there, *(most for group in _groups("memory") for name, _, _ in LIMITS for most in _numbers(group, name))]
    )


def _shares() -> Iterator[float]:
    """Yields the CPU limit, in cores, of each group that has one."""
    for group in _groups("cpu"):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            match _numbers(group, *names):
                case [quota, period] if period:
                    yield quota / period


def _rests() -> Iterator[int]:
    """Yields the bytes left in each group with a limit; the page cache counts as free."""
    for group in _groups("memory"):
        for limit, used, kept in LIMITS:
            match _numbers(group, limit), _numbers(group, used):
                case [most], [taken]:
                    stat = _words(group / "memory.stat")
                    counts = dict(zip(stat[::2], stat[1::2], strict=False))
                    yield max(0, most - taken + sum(int(counts.get(f"{kept}{kind}_file", 0)) for kind in KINDS))


def _groups(controller: str) -> Iterator[Path]:
    """Yields the directories of this process's groups and their parents; in a container the first is its own."""
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except OSError:  # not Linux, or /proc is hidden
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = GROUPS_MOUNT / controller if controllers else GROUPS_MOUNT
        yield top
        below = Path(path.lstrip("/"))
        yield from (top / each for each in (below, *below.parents) if each.parts and ".." not in each.parts)


def _numbers(group: Path, *names: str) -> list[int]:
    """Returns the numbers in these files; empty if one holds anything else: "max" and -1 mean no limit."""
    words = [word for name in names for word in _words(group / name)]
    return [int(word) for word in words] if all(word.isdigit() for word in words) else []


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def return_large_blocks() -> None:
    """Makes the C library return each freed block of 1 MiB or more to the system at once.

    By default glibc keeps blocks of up to 32 MiB, which fragments the heap. With this, training with checkpointing
    takes half the memory and a quarter more time. Other C libraries have no such call."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)
