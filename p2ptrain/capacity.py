"""How much of this machine a process may take: what the machine has, or less in a container or a service with limits.

torch and psutil see the whole machine. A node in a container with two of 64 cores would train with 63 threads that
stop one another, and `p2ptrain doctor` in one with 4 of 256 GB find that a large model fits. Linux tells in the control
groups of the process that asks, each of which is limited by those above it (cgroups(7), versions 1 and 2).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from math import ceil
from pathlib import Path

import psutil

LIMITS = (  # what is limited, what is taken, and how the files in it are called: version 2, and 1
    ("memory.max", "memory.current", ""),
    ("memory.high", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
KINDS = ("active", "inactive")
M_MMAP_THRESHOLD = -3  # malloc.h
GROUPS_MOUNT, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cores() -> int:
    """How many of them can work at a time, at least one."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([allowed, *(max(1, ceil(share)) for share in _shares())])


def free_memory_bytes() -> int:
    """What could be taken now."""
    return min([int(psutil.virtual_memory().available), *_rests()])


def memory_bytes() -> int:
    """Returns the machine's memory with swap, or the limit of the process where that is lower."""
    there = int(psutil.virtual_memory().total + psutil.swap_memory().total)
    return min(
        [there, *(most for group in _groups("memory") for name, _, _ in LIMITS for most in _numbers(group, name))]
    )


def _shares() -> Iterator[float]:
    """How many cores' time each group may use that has a limit."""
    for group in _groups("cpu"):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            match _numbers(group, *names):
                case [quota, period] if period:
                    yield quota / period


def _rests() -> Iterator[int]:
    """What each group that has a limit may still take; files that were read make way."""
    for group in _groups("memory"):
        for limit, used, kept in LIMITS:
            match _numbers(group, limit), _numbers(group, used):
                case [most], [taken]:
                    stat = _words(group / "memory.stat")
                    counts = dict(zip(stat[::2], stat[1::2], strict=False))
                    yield max(0, most - taken + sum(int(counts.get(f"{kept}{kind}_file", 0)) for kind in KINDS))


def _groups(controller: str) -> Iterator[Path]:
    """The folders of the groups that this process is in, with those above; in a container the first is its own."""
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except OSError:  # not Linux, or it is hidden
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
    """All that these files say; empty if one says something else: "max" and -1 are no limits."""
    words = [word for name in names for word in _words(group / name)]
    return [int(word) for word in words] if all(word.isdigit() for word in words) else []


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def return_large_blocks() -> None:
    """Have the C library give each block of a mebibyte or more back to the system as soon as it is freed.

    By itself glibc keeps blocks of up to 32 MiB, and the holes between them. Without holes training with checkpointing
    takes half of the memory, and a quarter more time. Other C libraries have no such call.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)
