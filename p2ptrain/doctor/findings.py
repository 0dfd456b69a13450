"""Checks with their deadlines, and diagnoses: the result, its level, and what to do.

A check that touches a driver, a disk or a mount may never return. So each check runs in a thread of its own, which is
abandoned at its deadline and does not keep the process from exiting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from p2ptrain.errors import ConfigError, P2ptrainError
from p2ptrain.observe.logs import plain

# warning: it works but could be better, or is unknown; failed: a node cannot work like this
Level = Literal["good", "warning", "failed"]
VERSION = 1  # the version of the JSON output
WHAT_WIDTH, LEVEL_WIDTH = 16, 8  # characters of the columns


@dataclass(frozen=True, slots=True)
class Diagnosis:
    what: str  # the subject of the check
    level: Level
    result: str
    fix: str = ""  # what to do; empty if all is well


def refused(what: str, error: ConfigError) -> Diagnosis:
    """Turns an error that would make a start fail into a diagnosis."""
    place = ": ".join(part for part in (error.source, error.key) if part)
    return Diagnosis(what, "failed", f"{place}: {error.problem}" if place else error.problem, error.fix)


def within(what: str, look: Callable[[], list[Diagnosis]], seconds: float, late: Level = "failed") -> list[Diagnosis]:
    """Runs a check and returns what it found; past its deadline, of level `late`, that it took too long."""
    found: list[list[Diagnosis]] = []

    def work() -> None:
        try:
            found.append(look())
        except P2ptrainError as error:
            found.append([Diagnosis(what, "failed", str(error), "Mend it first: a node would meet the same")])

    thread = threading.Thread(target=work, name=f"checking {what}", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        fix = "Find out what it is waiting for: a node would wait as well"
        return [Diagnosis(what, late, f"no answer within {seconds:.0f} s", fix)]
    assert found, f"the check of {what} failed; see its traceback"
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
