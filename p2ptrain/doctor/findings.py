"""Checks with their deadlines, and diagnoses: the result, its level, and what to do.

A check that touches a driver, a disk or a mount may never return. So each check runs in a thread of its own, which is
abandoned at its deadline and does not keep the process from exiting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, Literal, TypeVar

from p2ptrain.errors import ConfigError
from p2ptrain.observe.logs import plain

# warning: it works but could be better, or is unknown; failed: a node cannot work like this
Level = Literal["good", "warning", "failed"]
T = TypeVar("T")
VERSION = 1  # the version of the JSON output
WHAT_WIDTH, LEVEL_WIDTH = 16, 8  # characters of the columns


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of one check."""

    what: str  # the subject of the check
    level: Level
    result: str
    fix: str = ""  # what to do; empty if all is well


def refused(what: str, error: ConfigError) -> Diagnosis:
    """Turns an error that would make a start fail into a diagnosis."""
    place = ": ".join(part for part in (error.source, error.key) if part)
    return Diagnosis(what, "failed", f"{place}: {error.problem}" if place else error.problem, error.fix)


@dataclass(frozen=True, slots=True)
class Check(Generic[T]):
    """A check, with its deadline."""

    what: str
    look: Callable[[], T]
    seconds: float
    late: Level = "failed"  # the level if the deadline passes
    fix: str = "Find out what it is waiting for: a node would wait as well"

    @property
    def too_late(self) -> list[Diagnosis]:
        return [Diagnosis(self.what, self.late, f"no answer within {self.seconds:.0f} s", self.fix)]


def within(check: Check[list[Diagnosis]]) -> list[Diagnosis]:
    """Runs a check; past its deadline the diagnosis says that it took too long."""
    found = in_time(check)
    return check.too_late if found is None else found


def in_time(check: Check[T]) -> T | None:
    """Runs a check and returns what it found; None if it took too long."""
    found: list[T] = []

    def look() -> None:
        found.append(check.look())

    thread = threading.Thread(target=look, name=f"checking {check.what}", daemon=True)
    thread.start()
    thread.join(check.seconds)
    if thread.is_alive():
        return None
    assert found, f"the check of {check.what} failed; see its traceback"
    return found[0]


def can_work(findings: Sequence[Diagnosis]) -> bool:
    return all(each.level != "failed" for each in findings)


def text_of(finding: Diagnosis) -> str:
    """Formats a diagnosis as a line, followed by a line with its fix."""
    lines = [f"{finding.level:<{LEVEL_WIDTH}} {finding.what:<{WHAT_WIDTH}} {finding.result}"]
    if finding.fix:
        lines.append(f"{'':<{LEVEL_WIDTH + WHAT_WIDTH + 2}}{finding.fix}")
    return plain("\n".join(lines))


def verdict_of(findings: Sequence[Diagnosis]) -> str:
    counts = {level: sum(each.level == level for each in findings) for level in ("failed", "warning")}
    verdict = "a node can work here" if can_work(findings) else "a node cannot work here"
    return f"{verdict}: {counts['failed']} failed, {counts['warning']} warnings"


def json_of(findings: Sequence[Diagnosis]) -> dict[str, Any]:
    return {"version": VERSION, "can_work": can_work(findings), "checks": [asdict(each) for each in findings]}
