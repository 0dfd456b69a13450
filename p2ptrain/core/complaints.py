"""Complaints: a node's problems as data, and the one table of the texts that people read.

A complaint is a code with fields. Codes are stable: /status, /metrics and alerts use them, and nothing matches the
texts. The core raises complaints about the protocol; the daemon raises those about its machine, disk and owner.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Literal, NamedTuple

Severity = Literal["info", "warning", "error"]


class Code(StrEnum):
    """All complaints, the worst first."""

    DEGRADED = "degraded"
    HALTED = "halted"
    SPLIT = "split"
    BANNED = "banned"
    QUARANTINED = "quarantined"
    SUSPENDED = "suspended"
    STALLED = "stalled"
    FEW_HEARD = "few_heard"
    NO_PEERS = "no_peers"
    CHECKPOINTS_NOT_SAVED = "checkpoints_not_saved"
    RECORDS_NOT_WRITTEN = "records_not_written"
    OVER_MEMORY = "over_memory"
    EXCHANGE_FAULT = "exchange_fault"
    UNTRUSTED = "untrusted"
    CATCHING_UP = "catching_up"
    SILENT = "silent"
    NOT_ADMITTED = "not_admitted"
    WORLD_AWAY = "world_away"
    ON_TRIAL = "on_trial"
    LOOP_AWAY = "loop_away"
    OUTSIDE_HOURS = "outside_hours"
    ON_BATTERY = "on_battery"
    GPU_BUSY = "gpu_busy"
    PRIVACY_SPENT = "privacy_spent"
    PAUSED = "paused"
    CRASH_ONLY = "crash_only"


@dataclass(frozen=True, slots=True)
class Complaint:
    """A problem, or a state that keeps the node from taking part fully."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}  # used as it is in /status

    code: Code = field(metadata={"description": "stable, as in the metric p2ptrain_health"})
    severity: Severity = field(
        metadata={
            "description": "info: intended by the run or the owner; warning: usually passes by itself; error: needs "
            "attention"
        }
    )
    hinders: bool = field(metadata={"description": "the node does not take part fully, and /readyz fails"})
    text: str = field(metadata={"description": "one line, with the fields filled in; the same as in `health`"})
    title: str = field(metadata={"description": "a few words"})
    advice: str = field(metadata={"description": "meaning, and what to do about it"})
    fields: dict[str, int | str] = field(metadata={"description": "the values in the text, by name"})


class Meaning(NamedTuple):
    """A row of the table: severity and texts of one code."""

    severity: Severity
    hinders: bool
    text: str  # a format string of the fields
    title: str
    advice: str
    ended: str  # the news when the complaint ends


MEANINGS: dict[Code, Meaning] = {
    Code.DEGRADED: Meaning(
        "error", True, "degraded: {why}", "The disk cannot be written",
        "The node sends and applies nothing that it cannot save first. Free some space, or check the disk; the node "
        "keeps retrying.",
        "the disk can be written again",
    ),
    Code.HALTED: Meaning(
        "error", True, "halted: two certificates exist for one round, so more than f members lie",
        "The run has stopped for safety",
        "Two outcomes were certified for one round. That takes more liars than the roster tolerates, so people have "
        "to decide how to continue.",
        "no longer halted",
    ),
    Code.SPLIT: Meaning(
        "error", True, "split: another branch diverged too long ago, and an operator has to choose",
        "The run has split in two",
        "The two parts diverged too long ago to be merged automatically. The run's operator has to choose which one "
        "continues.",
        "no longer split",
    ),
    Code.BANNED: Meaning(
        "error", True, "banned", "This node is banned",
        "The members have proof that it broke the rules, for example by using one key on two machines. It can only "
        "come back with a new identity.",
        "no longer banned",
    ),
    Code.QUARANTINED: Meaning(
        "error", True, "quarantined: this node's state differs from the certified one",
        "This node’s model differs from the agreed one",
        "It does not take part until it has fetched the right one, which happens automatically. If this happens again, "
        "test the memory and turn off overclocking.",
        "no longer quarantined: this node's state is the certified one again",
    ),
    Code.SUSPENDED: Meaning(
        "error", False, "suspended: the members found no work of this node's own in a contribution; since then, "
        "{passed} of {needed} have found some",
        "Its contributions count for nothing",
        "All members measured a contribution of this node, and it did not answer to the data that the node was given. "
        "Faulty memory, overclocking or changed code can be the reason. `p2ptrain audit --contribution` measures one "
        "again on this machine. It counts again once enough members have found its work.",
        "no longer suspended: its contributions count again",
    ),
    Code.STALLED: Meaning(
        "error", True, "stalled: quorum lost", "The quorum is lost",
        "Rounds wait until enough members are back. Check your own connection first; if others are gone, the "
        "remaining members regroup automatically.",
        "no longer stalled: the quorum is back",
    ),
    Code.FEW_HEARD: Meaning(
        "error", True, "few heard: {heard} of {members} members in the last {seconds} s; the quorum is {quorum}",
        "Too few members are heard",
        "No round is decided until enough members are heard again. Check your own connection first, and then the other "
        "nodes.",
        "enough members are heard again",
    ),
    Code.NO_PEERS: Meaning(
        "error", True, "no peers", "No peer can be reached",
        "This node has no connection, though the run has other members. Check the network and the firewall; the node "
        "keeps trying.",
        "connected to peers",
    ),
    Code.CHECKPOINTS_NOT_SAVED: Meaning(
        "error", False, "checkpoints are not being saved: {why}", "Checkpoints are not being saved",
        "The node takes part, but after a restart it would begin at an older state and replay the rounds since. Check "
        "disk space and memory; the node keeps retrying.",
        "checkpoints are saved again",
    ),
    Code.RECORDS_NOT_WRITTEN: Meaning(
        "error", False, "records are not being written: {why}", "Records are not being written",
        "Training is not affected, but the history of these rounds will be missing. Check the disk; the node keeps "
        "retrying.",
        "records are written again",
    ),
    Code.OVER_MEMORY: Meaning(
        "error", False, "over its memory limit: {used_bytes:,} bytes are in use, and limits.memory_bytes allows "
        "{limit_bytes:,}; stop the node, or raise the limit",
        "It uses more memory than its owner allows",
        "It keeps running, and this machine may become slow. Raise the limit, or choose a smaller run.",
        "within its memory limit again",
    ),
    Code.EXCHANGE_FAULT: Meaning(
        "warning", False, "an exchange with a peer failed in a way that is a bug of p2ptrain: please report "
        "({count} since the start, {of_whom} with {whom} ({range}), the last one's peer; that was {error} in {place})",
        "p2ptrain has a bug",
        "A peer sent or did something that p2ptrain does not handle. That exchange was ended, and the node goes on. "
        "The log has the traceback: please report it.",
        "no more exchanges failed by a bug of p2ptrain",
    ),
    Code.UNTRUSTED: Meaning(
        "warning", True, "untrusted: waiting for a history with head {head}; {others} of {peers} peers have others. "
        "If this lasts, the head belongs to a different history or is older than peers keep: ask your source for a "
        "newer one",
        "Looking for the trusted history",
        "No peer has shown a history with the head given to --trust yet.",
        "found the trusted history",
    ),
    Code.CATCHING_UP: Meaning(
        "warning", True, "catching up", "Catching up",
        "Others are some rounds ahead. It fetches the missing rounds, and then trains again.",
        "caught up",
    ),
    Code.SILENT: Meaning(
        "warning", True, "silent: it is unknown how this identity has voted before", "Listening only for now",
        "The record of its earlier votes is lost. It does not vote until it cannot contradict any of them.",
        "no longer silent: it votes again",
    ),
    Code.NOT_ADMITTED: Meaning(
        "warning", True, "not admitted", "Not admitted yet",
        "Its contributions count as soon as the members have admitted it. That takes a few rounds.",
        "admitted",
    ),
    Code.WORLD_AWAY: Meaning(
        "warning", False, "the world's run is away: {why}", "The world’s run cannot be followed",
        "A node that has reached it once trains on, and the region’s other nodes contribute for it; one that begins "
        "waits. Check `region.bootstrap`, and the log in the directory `world`; the node keeps trying.",
        "the world's run is followed again",
    ),
    Code.ON_TRIAL: Meaning(
        "info", False, "on trial: {passed} of {needed} members have found this node's own work in what it contributes",
        "Its contributions do not count yet",
        "In a run that is open to everyone, members first measure whether a newcomer trains. It takes a few audits; "
        "then its contributions count, and it can get a vote.",
        "its contributions count",
    ),
    Code.LOOP_AWAY: Meaning(
        "info", False, "the training loop is elsewhere: no step for {minutes} min; the node keeps its place",
        "The training loop is elsewhere",
        "The script that trains has called no step() for a while. The node goes on voting and applying rounds. If the "
        "script is not evaluating or waiting at a breakpoint, look at its output.",
        "the training loop is back",
    ),
    Code.OUTSIDE_HOURS: Meaning(
        "info", False, "paused outside its hours, {hours}: training resumes at {until}",
        "Paused until its hours begin",
        "Its owner has set the hours in which it trains. It keeps voting and applying rounds.",
        "no longer paused by its hours",
    ),
    Code.ON_BATTERY: Meaning(
        "info", False, "paused on battery: training resumes when the machine is plugged in (limits.on_battery)",
        "Paused: the machine is on battery",
        "Training resumes when the machine is plugged in. It keeps voting and applying rounds.",
        "no longer paused on battery",
    ),
    Code.GPU_BUSY: Meaning(
        "info", False, "paused while other programs use the GPU: training resumes when it has been free for a minute "
        "(limits.on_gpu_busy)",
        "Paused: other programs use the GPU",
        "Its owner has it yield the card to a game or another program. Training resumes when the card has been free "
        "for a minute. It keeps voting and applying rounds.",
        "no longer paused for other programs on the GPU",
    ),
    Code.PRIVACY_SPENT: Meaning(
        "info", False, "the privacy budget is spent: epsilon {spent} of {budget}, too little is left for another round",
        "The privacy budget is spent",
        "More training would tell more of this machine's data than its owner allowed. The node goes on voting and "
        "applying rounds. A larger privacy.epsilon lets it train again after a restart.",
        "the privacy budget allows training again",
    ),
    Code.PAUSED: Meaning(
        "info", False, "paused by its owner: `p2ptrain resume` continues training", "Paused by its owner",
        "It does not train, but keeps voting and applying rounds. `p2ptrain resume` continues training.",
        "resumed by its owner",
    ),
    Code.CRASH_ONLY: Meaning(
        "info", False, "crash-only: with fewer than four members, no liar is tolerated", "A small run",
        "With fewer than four members, a liar cannot be outvoted, and nothing bounds how far one moves the model. That "
        "is fine among people who trust each other.",
        "no longer crash-only: a liar is tolerated",
    ),
}  # fmt: skip


def complaint(code: Code, **fields: int | str) -> Complaint:
    """Builds a complaint; `fields` are the values that its text needs."""
    severity, hinders, text, title, advice, _ = MEANINGS[code]
    return Complaint(code, severity, hinders, text.format(**fields), title, advice, fields)


def by_gravity(found: Iterable[Complaint]) -> list[Complaint]:
    """Sorts complaints, the worst first."""
    order = list(Code)
    return sorted(found, key=lambda each: order.index(each.code))
