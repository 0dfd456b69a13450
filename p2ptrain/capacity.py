"""How much of this machine a process may take: what the machine has, or less in a container or a service with limits.

torch and psutil see the whole machine. A node in a container with two of 64 cores would train with 63 threads that
stop one another, and one with 4 of 256 GB would be ended by the kernel. Linux tells in the control groups of the
process, each of which is limited by those above it (the kernel's cgroups(7), versions 1 and 2).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import ceil
from pathlib import Path

import psutil

MOUNT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cores() -> int:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([allowed, *(max(1, ceil(share)) for share in _shares())])


def free_memory() -> int:
    """Bytes that could be taken now."""
    return min([int(psutil.virtual_memory().available), *_rests()])


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
        for limit, used, kept in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            match _numbers(group, limit, used):
                case [most, taken]:
                    stat = _words(group / "memory.stat")
                    files = dict(zip(stat[::2], stat[1::2], strict=False)).get(kept, "0")
                    yield max(0, most - taken + int(files))


def _groups(controller: str) -> Iterator[Path]:
    """The folders of the groups that this process is in, with those above; in a container the first is its own."""
    try:
        lines = OWN.read_text().splitlines()
    except OSError:  # not Linux, or it is hidden
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = MOUNT / controller if controllers else MOUNT
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
