"""Checks and their diagnoses: the result, how bad it is and what to do; and a deadline for each check.

A check that touches a driver, a disk or a mount may never return. So each check runs in a thread of its own, for which
nobody waits longer than its deadline, not even the exiting process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, Literal, TypeVar

from p2ptrain.errors import ConfigError
from p2ptrain.observe.logs import plain

# good; warning: works but could be better, or is unknown; failed: a node cannot work like this
Level = Literal["good", "warning", "failed"]
T = TypeVar("T")
VERSION = 1  # of the answer as JSON
WHAT_WIDTH, LEVEL_WIDTH = 16, 8  # characters of the columns


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of one check."""

    what: str  # was checked
    level: Level
    result: str
    fix: str = ""  # what to do; nothing where all is well


def refused(what: str, error: ConfigError) -> Diagnosis:
    """Turns an error that would end a start into a diagnosis."""
    place = ": ".join(part for part in (error.source, error.key) if part)
    return Diagnosis(what, "failed", f"{place}: {error.problem}" if place else error.problem, error.fix)


@dataclass(frozen=True, slots=True)
class Check(Generic[T]):
    """A check, with its deadline."""

    what: str
    look: Callable[[], T]
    seconds: float
    late: Level = "failed"  # the level if it takes longer
    fix: str = "Find out what it waits for: a node would wait for it as well"

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
    assert found, f"the check of {check.what} ended without a finding; its traceback says why"
    return found[0]


def can_work(findings: Sequence[Diagnosis]) -> bool:
    return all(each.level != "failed" for each in findings)


def text_of(finding: Diagnosis) -> str:
    """Formats a diagnosis as a line, and its fix as a second one."""
    lines = [f"{finding.level:<{LEVEL_WIDTH}} {finding.what:<{WHAT_WIDTH}} {finding.result}"]
    if finding.fix:
        lines.append(f"{'':<{LEVEL_WIDTH + WHAT_WIDTH + 2}}{finding.fix}")
    return plain("\n".join(lines))


def verdict_of(findings: Sequence[Diagnosis]) -> str:
    counts = {level: sum(each.level == level for each in findings) for level in ("failed", "warning")}
    verdict = "a node can work here" if can_work(findings) else "a node cannot work so"
    return f"{verdict}: {counts['failed']} failed, {counts['warning']} warnings"


def json_of(findings: Sequence[Diagnosis]) -> dict[str, Any]:
    return {"version": VERSION, "can_work": can_work(findings), "checks": [asdict(each) for each in findings]}
