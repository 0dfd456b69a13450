"""Complaints: what is wrong with a node, as data, and the one table of words that people read of it.

A complaint is a code with its fields. Codes are stable: /status, /metrics and alerts go by them, and nothing goes by
the words. The core makes those about the protocol, and the daemon those about its machine, its disk and its owner.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Literal, NamedTuple

Severity = Literal["info", "warning", "error"]


class Code(StrEnum):
    """Every complaint, the worst first."""

    DEGRADED = "degraded"
    HALTED = "halted"
    SPLIT = "split"
    BANNED = "banned"
    QUARANTINED = "quarantined"
    STALLED = "stalled"
    FEW_HEARD = "few_heard"
    NO_PEERS = "no_peers"
    CHECKPOINTS_NOT_SAVED = "checkpoints_not_saved"
    RECORDS_NOT_WRITTEN = "records_not_written"
    OVER_MEMORY = "over_memory"
    UNTRUSTED = "untrusted"
    CATCHING_UP = "catching_up"
    SILENT = "silent"
    NOT_ADMITTED = "not_admitted"
    OUTSIDE_HOURS = "outside_hours"
    ON_BATTERY = "on_battery"
    PAUSED = "paused"
    CRASH_ONLY = "crash_only"


@dataclass(frozen=True, slots=True)
class Complaint:
    """Something that is not as it should be."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}  # it is a part of /status as it is

    code: Code = field(metadata={"description": "stable, as in the metric p2ptrain_health"})
    severity: Severity = field(
        metadata={
            "description": "info: as the run or its owner wants it; warning: it passes by itself, as a rule; error: "
            "somebody has to look"
        }
    )
    hinders: bool = field(metadata={"description": "the node does not take part as it should, and /readyz says so"})
    text: str = field(metadata={"description": "in one line, with the fields; the same as in `health`"})
    title: str = field(metadata={"description": "in a few words"})
    advice: str = field(metadata={"description": "what it means, and what to do about it"})
    fields: dict[str, int | str] = field(metadata={"description": "what the text is made of, by name"})


class Meaning(NamedTuple):
    """A row of the table."""

    severity: Severity
    hinders: bool
    text: str  # with the names of the fields in braces
    title: str
    advice: str


MEANINGS: dict[Code, Meaning] = {
    Code.DEGRADED: Meaning(
        "error", True, "degraded: {why}", "The disk takes nothing",
        "The node says and applies nothing until it can save it. Free some space, or look at the disk: it tries "
        "again by itself.",
    ),
    Code.HALTED: Meaning(
        "error", True, "halted: two certificates for one round, more than f members lie",
        "The run has stopped, to be safe",
        "Two outcomes were certified for one round. That takes more liars than the roster can bear, and people have "
        "to decide how to go on.",
    ),
    Code.SPLIT: Meaning(
        "error", True, "split: another branch went its own way too long ago, an operator has to choose",
        "The run has split in two",
        "Another part went its own way too long ago to be joined again. Whoever operates the run has to choose "
        "which one goes on.",
    ),
    Code.BANNED: Meaning(
        "error", True, "banned", "This node is banned",
        "Others have proof that it broke the rules, such as a key that is in use twice. It can come back only with "
        "a new identity.",
    ),
    Code.QUARANTINED: Meaning(
        "error", True, "quarantined: own state is not the certified one", "This node’s model is not the agreed one",
        "It takes no part until it has fetched the right one, which it does by itself. If this comes again, test "
        "the memory and do not overclock.",
    ),
    Code.STALLED: Meaning(
        "error", True, "stalled: the quorum is lost", "Too few members answer",
        "Rounds wait until enough of them are back. Look at your own connection first; if others are gone, those "
        "left regroup by themselves.",
    ),
    Code.FEW_HEARD: Meaning(
        "error", True, "few heard: {heard} of {members} members in the last {seconds} s, and {quorum} decide",
        "Too few members are heard",
        "No round is decided until enough of them are heard again. Look at your own connection first, and then at the "
        "other nodes.",
    ),
    Code.NO_PEERS: Meaning(
        "error", True, "no peers", "Nobody can be reached",
        "This node is alone, though others belong to the run. Check the network and the firewall; it goes on trying.",
    ),
    Code.CHECKPOINTS_NOT_SAVED: Meaning(
        "error", False, "checkpoints are not saved: {why}", "Its state is not saved",
        "It takes part, but after a restart it begins at an older state, and repeats what came since. Look at the "
        "disk and the memory: it tries again by itself.",
    ),
    Code.RECORDS_NOT_WRITTEN: Meaning(
        "error", False, "records are not written: {why}", "Its history is not written",
        "No round is lost, only what is told of them later. Look at the disk: it tries again by itself.",
    ),
    Code.OVER_MEMORY: Meaning(
        "error", False, "over its memory limit: {used_bytes:,} bytes are in use, and limits.memory_bytes allows "
        "{limit_bytes:,}; end it, or raise the limit",
        "It takes more memory than its owner allows",
        "It goes on, and this machine may become slow. Raise the limit, or choose a smaller run.",
    ),
    Code.UNTRUSTED: Meaning(
        "warning", True, "untrusted: waiting for a history with the head {head}, {others} of {peers} peers have shown "
        "others; if it stays so, it is of another history, or older than peers keep: ask for a newer one where you got "
        "it",
        "Looking for the run that you named",
        "No peer has shown the history that was asked for yet.",
    ),
    Code.CATCHING_UP: Meaning(
        "warning", True, "catching up", "Catching up",
        "Others are some rounds ahead. It fetches what is missing, and then trains with them again.",
    ),
    Code.SILENT: Meaning(
        "warning", True, "silent: what this identity has said before is not known", "Listening only, for a moment",
        "It does not know what it has said before it was started, and waits until nothing can be said twice.",
    ),
    Code.NOT_ADMITTED: Meaning(
        "warning", True, "not admitted", "Not admitted yet",
        "Its work counts as soon as the members have let it in. That takes some rounds.",
    ),
    Code.OUTSIDE_HOURS: Meaning(
        "info", False, "paused outside its hours, {hours}: it trains again from {until}",
        "Resting until its hours begin",
        "Its owner lets it train at other hours. It goes on voting and applying.",
    ),
    Code.ON_BATTERY: Meaning(
        "info", False, "paused on battery: it trains again when the machine is plugged in; limits.on_battery says so",
        "Resting: the machine is on battery",
        "It trains again when it is plugged in. It goes on voting and applying.",
    ),
    Code.PAUSED: Meaning(
        "info", False, "paused by its owner: it trains no further; `p2ptrain resume` goes on", "Paused by its owner",
        "It trains no further, and goes on voting and applying. `p2ptrain resume` goes on.",
    ),
    Code.CRASH_ONLY: Meaning(
        "info", False, "crash-only: fewer than four members, a liar is not tolerated", "A small run",
        "With fewer than four members, one that lies could not be outvoted. Among people who trust each other that "
        "is fine.",
    ),
}  # fmt: skip


def complaint(code: Code, **fields: int | str) -> Complaint:
    """The complaint with its words; `fields` are those that its text names."""
    severity, hinders, text, title, advice = MEANINGS[code]
    return Complaint(code, severity, hinders, text.format(**fields), title, advice, fields)


def by_gravity(found: Iterable[Complaint]) -> list[Complaint]:
    """The worst first."""
    order = list(Code)
    return sorted(found, key=lambda each: order.index(each.code))
