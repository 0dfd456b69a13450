"""Counts the programs that Triton compiles in this process, and the seconds that they take."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

COMPILING = "compiling_seconds"  # the name of this figure
MICROSECONDS = 1e6  # in which Triton tells times


@dataclass(slots=True)
class Compiled:
    """What this process has compiled; what Triton has kept from another one takes no time."""

    programs: int = 0
    kept: int = 0
    seconds: float = 0.0

    def note(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        """Is called by Triton for each program."""
        if cache_hit:
            self.kept += 1
        else:
            self.programs += 1
            self.seconds += times.total / MICROSECONDS

    def figures(self) -> dict[str, float]:
        return {"programs": self.programs, "seconds": round(self.seconds, 1), "kept": self.kept}


@cache
def compiled() -> Compiled:
    """Returns the one count of this process, which begins with the first call."""
    counts = Compiled()
    with suppress(ImportError):  # a processor's torch has no Triton
        from triton import knobs  # noqa: PLC0415

        knobs.compilation.listener = counts.note
    return counts
