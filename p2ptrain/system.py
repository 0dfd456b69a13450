"""Does what Linux and macOS do differently: one name for each such thing, with a half for either system.

What only one of them has is named here, or in `capacity` (control groups, glibc's malloc), `loop/channel` (shared
memory), `doctor` (/proc) and `data/tokenizer_trial` (a program by itself); a test holds that list. The halves for
macOS follow its manual pages: they are type-checked and tested with stand-ins, and have not run on a Mac."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from enum import Enum

SOCKET_PATH_BYTES_MAX = 103 if sys.platform == "darwin" else 107  # sun_path has one more, for a zero
# A socket that is bound and does not listen keeps a port for p2pd, which shares it. In BSD's tables, where macOS looks
# a connection up, such a socket may be found before the one that listens.
HOLDS_PORTS = sys.platform == "linux"
OPEN_FILES = 10_240  # macOS allows a process no more (OPEN_MAX), and begins with 256
# With these options of TCP a connection ends after 30 s without a sign of life; no system has all of them.
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPALIVE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}
UNKNOWN_TO_FULLFSYNC = (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY)  # a network's file system


def fsync(descriptor: int) -> None:
    """Returns when an open file, or the names in an open directory, would survive a power cut.

    macOS's fsync stops at the disk's own cache, which F_FULLFSYNC empties."""
    if sys.platform == "darwin":
        try:
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
        except OSError as error:
            if error.errno not in UNKNOWN_TO_FULLFSYNC:
                raise
        else:
            return
    os.fsync(descriptor)


def since_boot() -> float:
    """Returns seconds since boot, including sleep, during which `time.monotonic` stands still."""
    if sys.platform == "darwin":
        return time.clock_gettime(time.CLOCK_MONOTONIC)  # goes on in sleep there, unlike Linux's
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def allow_open_files() -> None:
    """Lets this process and its children open as many files as a node needs, where the system begins with few."""
    if sys.platform == "darwin":
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < (wanted := OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


# -- A process that does not outlive us -------------------------------------------------------------


class Tie(Enum):
    """Which signal a process gets when we end, and how it asks Linux for it."""

    # When the other end of its standard input, a socket of ours, closes.
    KILL_WITHOUT_INPUT = (
        signal.SIGKILL,
        "import fcntl; fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid()); fcntl.fcntl(0, fcntl.F_SETSIG, 9);"
        "fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)",
    )
    END_WITH_PARENT = (signal.SIGTERM, "import ctypes; ctypes.CDLL(None).prctl(1, 15)")  # PR_SET_PDEATHSIG


# macOS sends no such signal. A child of the process waits for the end of either; whose parent has changed, has none.
WATCH = """
import select
watched = os.getpid()
if not os.fork():
    ends = select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT
    select.kqueue().control([select.kevent(each, *ends) for each in (watched, int(sys.argv[1]))], 1)
    os.getppid() == watched and os.kill(watched, {number})
    os._exit(0)
"""


def tied_to_us(tie: Tie, command: Sequence[str]) -> list[str]:
    """Returns the command of a small interpreter that asks for a signal when we end, and then becomes `command`."""
    number, request = tie.value
    if sys.platform == "darwin":
        request = WATCH.format(number=int(number))
    code = (
        f"import os, sys; {request}\n"
        "os.getppid() == int(sys.argv[1]) or sys.exit(1)\n"  # we have gone already: the signal would never come
        "os.execv(sys.argv[2], sys.argv[2:])"
    )
    return [sys.executable, "-I", "-S", "-c", code, str(os.getpid()), *command]
