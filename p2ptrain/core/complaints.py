"""Complaints: a node's problems as data, and the one table of the texts that people read.

A complaint is a code with fields. Codes are stable: /status, /metrics and alerts use them, and nothing matches the
texts. The core raises complaints about the protocol; the daemon raises those about its machine, disk and owner."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Literal, NamedTuple, Self

Severity = Literal["info", "warning", "error"]


class Meaning(NamedTuple):
    """The severity and texts of one code."""

    severity: Severity
    hinders: bool
    text: str  # a format string of the fields
    title: str
    advice: str
    ended: str  # the news when the complaint ends


class Code(StrEnum):
    """All complaints, the worst first."""

    meaning: Meaning

    def __new__(cls, value: str, meaning: Meaning) -> Self:
        code = str.__new__(cls, value)
        code._value_, code.meaning = value, meaning
        return code

    # fmt: off
    DEGRADED = "degraded", Meaning(
        "error", True, "degraded: {why}", "The disk cannot be written",
        "The node sends and applies nothing that it cannot save first. Free some space, or check the disk; the node "
        "keeps retrying.",
        "the disk can be written again",
    )
    HALTED = "halted", Meaning(
        "error", True, "halted: two certificates exist for one round, so more than f members lie",
        "The run has stopped for safety",
        "Two outcomes were certified for one round. That takes more liars than the roster tolerates, so people have "
        "to decide how to continue.",
        "no longer halted",
    )
    SPLIT = "split", Meaning(
        "error", True, "split: another branch diverged too long ago, and an operator has to choose",
        "The run has split in two",
        "The two parts diverged too long ago to be merged automatically. The run's operator has to choose which one "
        "continues.",
        "no longer split",
    )
    BANNED = "banned", Meaning(
        "error", True, "banned", "This node is banned",
        "The members have proof that it broke the rules, for example by using one key on two machines. It can only "
        "come back with a new identity.",
        "no longer banned",
    )
    QUARANTINED = "quarantined", Meaning(
        "error", True, "quarantined: this node's state differs from the certified one",
        "This node’s model differs from the agreed one",
        "It does not take part until it has fetched the right one, which happens automatically. If this happens again, "
        "test the memory and turn off overclocking.",
        "no longer quarantined: this node's state is the certified one again",
    )
    SUSPENDED = "suspended", Meaning(
        "error", False, "suspended: the members found no work of this node's own in {what}; since then, {passed} of "
        "{needed} have found some",
        "Its contributions count for nothing",
        "All members measured a contribution of this node, and it did not answer to the data that the node was given. "
        "Faulty memory, overclocking or changed code can be the reason. `p2ptrain audit DIR --contribution ROUND PEER` "
        "measures it again: DIR is the data directory, ROUND as above, PEER this node's id. It counts again once "
        "enough members have found its work.",
        "no longer suspended: its contributions count again",
    )
    STALLED = "stalled", Meaning(
        "error", True, "stalled: quorum lost", "The quorum is lost",
        "Rounds wait until enough members are back. Check your own connection first; if others are gone, the "
        "remaining members regroup automatically.",
        "no longer stalled: the quorum is back",
    )
    FEW_HEARD = "few_heard", Meaning(
        "error", True, "few heard: {heard} of {members} members in the last {seconds} s; the quorum is {quorum}",
        "Too few members are heard",
        "No round is decided until enough members are heard again. Check your own connection first, and then the other "
        "nodes.",
        "enough members are heard again",
    )
    NO_PEERS = "no_peers", Meaning(
        "error", True, "no peers", "No peer can be reached",
        "This node has no connection, though the run has other members. Check the network and the firewall; the node "
        "keeps trying.",
        "connected to peers",
    )
    CLOCK_WRONG = "clock_wrong", Meaning(
        "error", False, "the clock is wrong: {seconds:,} s {way} the clocks of {peers} peers", "The clock is wrong",
        "Peers refuse what this node says of its addresses in the DHT, so others may not find it. Have the system set "
        "the clock over the network (`timedatectl set-ntp true`).",
        "the clock is right again",
    )
    CHECKPOINTS_NOT_SAVED = "checkpoints_not_saved", Meaning(
        "error", False, "checkpoints are not being saved: {why}", "Checkpoints are not being saved",
        "The node takes part, but after a restart it would begin at an older state and replay the rounds since. Check "
        "disk space and memory; the node keeps retrying.",
        "checkpoints are saved again",
    )
    RECORDS_NOT_WRITTEN = "records_not_written", Meaning(
        "error", False, "records are not being written: {why}", "Records are not being written",
        "Training is not affected, but the history of these rounds will be missing. Check the disk; the node keeps "
        "retrying.",
        "records are written again",
    )
    DISK_LOW = "disk_low", Meaning(
        "error", False, "the disk is nearly full: {free_bytes:,} bytes are left", "The disk is nearly full",
        "When it is full, the node stands still until there is room. Free some space, or keep fewer checkpoints "
        "(`storage.checkpoints_kept`).",
        "there is room on the disk again",
    )
    OVER_MEMORY = "over_memory", Meaning(
        "error", False, "over its memory limit: {used_bytes:,} bytes are in use, and limits.memory_bytes allows "
        "{limit_bytes:,}; stop the node, or raise the limit",
        "It uses more memory than its owner allows",
        "It keeps running, and this machine may become slow. Raise the limit, or choose a smaller run.",
        "within its memory limit again",
    )
    TOO_SLOW = "too_slow", Meaning(
        "error", False, "too slow: it trains, and the last {rounds} rounds took nothing of it",
        "Its work comes too late",
        "This machine or its line is too slow for the others. Close other programs, raise the limits on percent and "
        "upload, send less (`limits.k_max`), or choose a run with a smaller model or longer rounds.",
        "its contributions are in time again",
    )
    SPIKE = "spike", Meaning(
        "warning", False, "spike: since about round {round} {what}: `{way}`", "The training goes wrong",
        "A rate that is too high, bad data or liars can be the reason. Members can go back to earlier weights, with "
        "other settings: the command moves that, and more than two thirds of the seats have to assent. Nothing is "
        "rolled back by itself.",
        "the training is as before the spike again",
    )
    QUORUM_NEAR = "quorum_near", Meaning(
        "warning", False, "the quorum is nearly lost: {heard} of {members} members are heard, and {quorum} have to be",
        "One more loss stops the run",
        "No round is decided if another member is lost. `p2ptrain swarm` names those that are not heard: ask their "
        "owners. Members that stay away lose their seats after some rounds.",
        "more members than the quorum are heard again",
    )
    EXCHANGE_FAULT = "exchange_fault", Meaning(
        "warning", False, "an exchange with a peer failed in a way that is a bug of p2ptrain: please report "
        "({count} since the start, {of_whom} with {whom} ({range}), the last one's peer; that was {error} in {place})",
        "p2ptrain has a bug",
        "A peer sent or did something that p2ptrain does not handle. That exchange was ended, and the node goes on. "
        "The log has the traceback: please report it.",
        "no more exchanges failed by a bug of p2ptrain",
    )
    UNTRUSTED = "untrusted", Meaning(
        "warning", True, "untrusted: waiting for a history with head {head}; {others} of {peers} peers have others. "
        "If this lasts, the head belongs to a different history or is older than peers keep: ask your source for a "
        "newer one",
        "Looking for the trusted history",
        "No peer has shown a history with the head given to --trust yet.",
        "found the trusted history",
    )
    CATCHING_UP = "catching_up", Meaning(
        "warning", True, "catching up", "Catching up",
        "Others are some rounds ahead. It fetches the missing rounds, and then trains again.",
        "caught up",
    )
    SILENT = "silent", Meaning(
        "warning", True, "silent: it is unknown how this identity has voted before", "Listening only for now",
        "The record of its earlier votes is lost. It does not vote until it cannot contradict any of them.",
        "no longer silent: it votes again",
    )
    NOT_ADMITTED = "not_admitted", Meaning(
        "warning", True, "not admitted", "Not admitted yet",
        "Its contributions count as soon as the members have admitted it. That takes a few rounds.",
        "admitted",
    )
    WORLD_AWAY = "world_away", Meaning(
        "warning", False, "the world's run is away: {why}", "The world’s run cannot be followed",
        "A node that has reached it once trains on, and the region’s other nodes contribute for it; one that begins "
        "waits. Check `region.bootstrap`, and the log in the directory `world`; the node keeps trying.",
        "the world's run is followed again",
    )
    ON_TRIAL = "on_trial", Meaning(
        "info", False, "on trial: {passed} of {needed} members have found this node's own work in what it contributes",
        "Its contributions do not count yet",
        "In a run that is open to everyone, members first measure whether a newcomer trains. It takes a few audits; "
        "then its contributions count, and it can get a vote.",
        "its contributions count",
    )
    LOOP_AWAY = "loop_away", Meaning(
        "info", False, "the training loop is elsewhere: no step for {minutes} min; the node keeps its place",
        "The training loop is elsewhere",
        "The script that trains has called no step() for a while. The node goes on voting and applying rounds. If the "
        "script is not evaluating or waiting at a breakpoint, look at its output.",
        "the training loop is back",
    )
    OUTSIDE_HOURS = "outside_hours", Meaning(
        "info", False, "paused outside its hours, {hours}: training resumes at {until}",
        "Paused until its hours begin",
        "Its owner has set the hours in which it trains. It keeps voting and applying rounds.",
        "no longer paused by its hours",
    )
    ON_BATTERY = "on_battery", Meaning(
        "info", False, "paused on battery: training resumes when the machine is plugged in (limits.on_battery)",
        "Paused: the machine is on battery",
        "Training resumes when the machine is plugged in. It keeps voting and applying rounds.",
        "no longer paused on battery",
    )
    GPU_BUSY = "gpu_busy", Meaning(
        "info", False, "paused while other programs use the GPU: training resumes when it has been free for a minute "
        "(limits.on_gpu_busy)",
        "Paused: other programs use the GPU",
        "Its owner has it yield the card to a game or another program. Training resumes when the card has been free "
        "for a minute. It keeps voting and applying rounds.",
        "no longer paused for other programs on the GPU",
    )
    PRIVACY_SPENT = "privacy_spent", Meaning(
        "info", False, "the privacy budget is spent: epsilon {spent} of {budget}, too little is left for another round",
        "The privacy budget is spent",
        "More training would tell more of this machine's data than its owner allowed. The node goes on voting and "
        "applying rounds. A larger privacy.epsilon lets it train again after a restart.",
        "the privacy budget allows training again",
    )
    PAUSED = "paused", Meaning(
        "info", False, "paused by its owner: `p2ptrain resume` continues training", "Paused by its owner",
        "It does not train, but keeps voting and applying rounds. `p2ptrain resume` continues training.",
        "resumed by its owner",
    )
    BEHIND_ROUTER = "behind_router", Meaning(
        "info", False, "nobody can connect to it: no address is known that is open to the internet",
        "Others cannot connect to this node",
        "It takes part by the connections that it opens itself, and by relays. If others are to join through it, "
        "forward the port of `network.listen` on the router. `p2ptrain doctor` looks further.",
        "others can connect to it",
    )
    CRASH_ONLY = "crash_only", Meaning(
        "info", False, "crash-only: with fewer than four members, no liar is tolerated", "A small run",
        "With fewer than four members, a liar cannot be outvoted, and nothing bounds how far one moves the model. That "
        "is fine among people who trust each other.",
        "no longer crash-only: a liar is tolerated",
    )
    # fmt: on


MEANINGS = {code: code.meaning for code in Code}


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


@dataclass(frozen=True, slots=True)
class Concern:
    """A reason to look at the swarm, or at some of its nodes."""

    text: str = field(metadata={"description": "what, and the ends of the first nodes' ids"})
    advice: str = field(metadata={"description": "what to do about it"})
    peers: list[str] = field(metadata={"description": "the nodes, by id; empty: the swarm"})


def complaint(code: Code, **fields: int | str) -> Complaint:
    """Builds a complaint; `fields` are the values that its text needs."""
    severity, hinders, text, title, advice, _ = code.meaning
    return Complaint(code, severity, hinders, text.format(**fields), title, advice, fields)


def by_gravity(found: Iterable[Complaint]) -> list[Complaint]:
    """Sorts complaints, the worst first."""
    order = list(Code)
    return sorted(found, key=lambda each: order.index(each.code))
