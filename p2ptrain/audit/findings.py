"""An audit's findings, one for each thing that it examined, and their summary.

"Wrong" and "not checkable" are not the same. Wrong data contradicts a signature or its own digest; data that cannot be
checked may be right, but there is nothing to compare it with.

Somebody else may have chosen the names and texts in a directory, so `Report.note` escapes control characters and line
breaks before they reach a terminal."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from p2ptrain.visible import visible

FINDINGS_MAX = 1_000  # findings reported; nobody reads more about a million stray files
TEXT_MAX = 2_000  # characters; of a longer text both ends are shown: the longest path has 4,096


class Grade(StrEnum):
    HOLDS = "ok"
    WRONG = "wrong"
    OPEN = "not checkable"
    NOTE = "note"  # worth knowing, but nothing wrong


@dataclass(frozen=True, slots=True)
class Finding:
    verdict: Grade
    subject: str  # a file, a round or whatever else was examined
    what: str
    fix: str = ""

    def __str__(self) -> str:
        line = f"{self.verdict.upper():<13} {self.subject}: {self.what}"
        return f"{line}. {self.fix}" if self.fix else line


class Replay(msgspec.Struct, frozen=True):
    """How far the rounds were applied again."""

    first: int  # the round of the state that it began with
    last: int
    final_root: str  # after the last
    proved_round: int | None  # the newest round whose replayed root is the certified one


@dataclass(frozen=True, slots=True)
class Report:
    directory: str
    run_id: str = ""
    run_name: str = ""
    findings: list[Finding] = field(default_factory=list)
    counts: Counter[Grade] = field(default_factory=Counter)  # including findings beyond the limit
    signatures: int = 0  # verified ones
    certified: tuple[int, int] | None = None  # the first and the last round with a valid certificate
    replayed: Replay | None = None

    def note(self, verdict: Grade, subject: object, what: str, fix: str = "") -> None:
        self.counts[verdict] += 1
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(Finding(verdict, *(_shown(text) for text in (str(subject), what, fix))))

    def holds(self, subject: object, what: str) -> None:
        self.note(Grade.HOLDS, subject, what)

    def wrong(self, subject: object, what: str, fix: str = "") -> None:
        self.note(Grade.WRONG, subject, what, fix)

    def open(self, subject: object, what: str, fix: str = "") -> None:
        self.note(Grade.OPEN, subject, what, fix)

    @property
    def all_holds(self) -> bool:
        return not self.counts[Grade.WRONG] and not self.counts[Grade.OPEN]

    def lines(self) -> list[str]:
        found = [str(finding) for finding in self.findings]
        if left_out := self.counts.total() - len(found):
            found.append(f"and {left_out:,} more findings in the same directory")
        ends = self.certified
        rounds = f"rounds {ends[0]} to {ends[1]} certified" if ends else "no certified round"
        replayed = "nothing replayed"
        if (done := self.replayed) is not None:
            replayed = (
                f"replayed from the state of round {done.first} to round {done.last}, whose state root is "
                f"{done.final_root}; the newest certified root that it reproduced is of round "
                f"{'none' if done.proved_round is None else done.proved_round}"
            )
        bad = f"{self.counts[Grade.WRONG]} wrong, {self.counts[Grade.OPEN]} not checkable"
        last = f"run {self.run_name} {self.run_id}: {rounds}; {replayed}; {self.signatures} signatures; {bad}"
        return [*found, last]

    def as_json(self) -> dict[str, Any]:
        told: dict[str, Any] = msgspec.to_builtins(self)
        return told | {"all_holds": self.all_holds, "left_out": self.counts.total() - len(self.findings)}


def _shown(text: str) -> str:
    """Makes a text safe to print, and shortens a long one to its two ends."""
    if len(text) > TEXT_MAX:
        text = f"{text[: TEXT_MAX // 2]} ... {text[-TEXT_MAX // 2 :]}"
    return visible(text)
