"""A child process that loads a tokenizer from stdin and encodes a text, within limits of memory and time.

It is a separate program that imports nothing from p2ptrain; its only result is its exit status. The process of a chat
template (chats.py) has the same limits."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

MEMORY_BYTES = 4 * 2**30  # of address space; a vocabulary of 262,144 tokens takes less than one GiB
PROCESSOR_SECONDS = 30
WATCHERS: list[subprocess.Popen[bytes]] = []  # of this process, on macOS
TEXT = "The quick brown fox's 12,345 jumps.\r\n\tÜber \u4e2d\u6587 \U0001f600\x00 " + "  a" * 200 + "b" * 500


# macOS does not hold a process to RLIMIT_AS. Another one looks at what it has in memory, and kills it.
WATCH = """
import os, subprocess, sys, time
pid, most = map(int, sys.argv[1:])
while os.getppid() == pid:
    found = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    if found and int(found) * 1024 > most:
        os.kill(pid, 9)
    time.sleep(0.2)
"""


def limit_memory() -> None:
    """Limits this process to MEMORY_BYTES more than it has mapped so far, on macOS about, and of memory in use."""
    _limit(resource.RLIMIT_CORE, 0)
    if sys.platform == "darwin":
        command = [sys.executable, "-I", "-S", "-c", WATCH, str(os.getpid()), str(MEMORY_BYTES)]
        quiet = subprocess.DEVNULL
        WATCHERS.append(subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet))  # noqa: S603
        return
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _limit(resource.RLIMIT_AS, mapped + MEMORY_BYTES)


def limit_time() -> None:
    """Makes the system end this process after PROCESSOR_SECONDS more of processor time."""
    _limit(resource.RLIMIT_CPU, int(time.process_time()) + PROCESSOR_SECONDS)


def _limit(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def main() -> None:
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    limit_memory()
    limit_time()
    from tokenizers import Tokenizer  # noqa: PLC0415  # under the limits, too

    tokenizer = Tokenizer.from_buffer(sys.stdin.buffer.read())
    tokenizer.decode(tokenizer.encode(TEXT).ids, skip_special_tokens=False)


if __name__ == "__main__":
    main()
