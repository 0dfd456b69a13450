"""All targets: every decoder of bytes that this node has not made itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.fuzz import Target
from benchmarks.fuzz.core_targets import core_targets
from benchmarks.fuzz.disk_targets import disk_targets
from benchmarks.fuzz.learn_targets import learn_targets
from benchmarks.fuzz.net_targets import net_targets

MEMORY_DISK = Path("/dev/shm")  # noqa: S108  # where a file that is synced costs nothing


@contextmanager
def all_targets() -> Iterator[list[Target]]:
    """Returns the targets while their servers and folders are there."""
    with ExitStack() as stack:
        place = MEMORY_DISK if MEMORY_DISK.is_dir() else None
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="fuzz-", dir=place)))
        stack.enter_context(_in_silence())
        yield [*core_targets(), *net_targets(stack), *learn_targets(folder), *disk_targets(folder)]


@contextmanager
def _in_silence() -> Iterator[None]:
    """Lets nothing be logged: decoders tell of what they refuse."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(level)
