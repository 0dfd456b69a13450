"""Every JSON answer of the node, as pydantic models: the contract with whoever reads it.

A field keeps its name and its meaning within a version; new ones may come. Units are in the names, or in the
descriptions, which also make the descriptions of /openapi.json. What the daemon hands over is checked against these:
a field that is not described here does not go out.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from p2ptrain.core.complaints import Complaint

Purpose = Literal["gossip", "messages", "histories", "payloads", "states", "data", "questions", "other"]
Direction = Literal["sent", "received"]
Count = Annotated[int, Field(ge=0)]


class Part(BaseModel):
    """Of an answer."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_serialization_defaults_required=True)


class Answer(Part):
    """What an address or an event answers with."""

    version: Literal[1] = Field(1, description="of this description; a field is renamed or removed only in another")


class FaultTolerance(Part):
    """What the roster survives."""

    liars: Count = Field(description="members that may lie without harm")
    crashes: Count = Field(description="members that may be away, and rounds still go on")
    mode: Literal["byzantine", "crash-only"] = Field(description="crash-only: no liar is tolerated")


class Traffic(Part):
    """Bytes of one purpose, as this node counts them: each message once, without what libp2p adds or passes on."""

    sent: Count = Field(description="bytes")
    received: Count = Field(description="bytes")


class Limits(Part):
    """What the owner allows: of the network, for payloads, states, data and histories; and of the machine."""

    upload_bytes_per_second: Count = Field(description="0: no limit")
    download_bytes_per_second: Count = Field(description="0: no limit")
    memory_bytes: Count = Field(description="of main memory; 0: no limit")
    hours: str = Field(
        description="in which it trains, in the machine's local time, such as 22:00-07:00; empty: always"
    )
    device_percent: int = Field(ge=1, le=100, description="of the time, that the device may work")
    threads: Count = Field(description="of torch, for training; 0: not known")
    on_battery: Literal["pause", "train"] = Field(description="what it does on the machine's battery")


class Mine(Part):
    """What this node has done in the run, over all its starts."""

    applied: Count = Field(description="contributions of its own that rounds took")
    applied_of_all: Count = Field(description="contributions of everyone that they took, while this node was there")
    share: float = Field(ge=0, le=1, description="of its own in all of them")
    tokens: Count = Field(description="trained on here, whatever became of it")
    training_seconds: float = Field(ge=0, description="spent training here")
    energy_joules: float | None = Field(
        ge=0,
        description="an estimate: what the whole device used while this node was not paused; null: it does not tell",
    )


class Status(Answer):
    """Where the node stands."""

    release: str = Field(description="of p2ptrain, as `p2ptrain --version` tells it")
    run_id: str = Field(description="hex")
    run_name: str
    peer_id: str = Field(description="of this node")
    addresses: list[str] = Field(description="under which others may reach this node, as far as is known")
    branch: str = Field(description="id of the history that the node follows, hex; the run id until a regroup")
    head: str = Field(description="of that history, hex: what `join --trust` takes")
    round: Count = Field(description="the one that is being worked on")
    phase: Literal["train", "collect", "agree", "apply"]
    view: Count = Field(description="tries of this round to agree; 0: the first")
    applied_round: Count = Field(description="the last round whose update is in this node's weights")
    since_applied_seconds: float | None = Field(ge=0, description="since then; null: none in this life")
    state_root: str = Field(description="digest of the weights after the applied round, hex; empty: none yet")
    certified_round: Count = Field(description="the newest round whose root the roster has certified")
    loss: float | None = Field(description="mean of the round that was trained here last, nats a token; null: none yet")
    step: Count = Field(description="optimizer steps done of the round in training")
    tokens: Count = Field(description="trained on here, in this life")
    tokens_per_second: float = Field(ge=0, description="mean of the last rounds that were trained here")
    training_seconds: float = Field(ge=0, description="spent training, in this life")
    swarm_tokens_per_second: float | None = Field(
        ge=0, description="an estimate: what the contributions of the last rounds were trained on; null: no round yet"
    )
    contribution_tokens: Count = Field(description="that one contribution is trained on")
    mine: Mine
    device: str = Field(description="what trains: cpu, cuda or cuda:N")
    is_paused: bool = Field(description="it trains no further, and goes on voting and applying; health says why")
    peers: list[str] = Field(description="ids of the connected nodes of this run")
    roster: list[str] = Field(description="ids of the peers with a vote")
    quorum: Count = Field(description="members that decide together")
    fault_tolerance: FaultTolerance
    admitted: Count = Field(description="peers that may contribute")
    is_member: bool = Field(description="this node has a vote")
    is_admitted: bool = Field(description="this node may contribute")
    held: Count = Field(description="contributions on offer that are here")
    waiting_for: Count = Field(description="contributions that the round still waits for")
    health: list[str] = Field(description="all that is not as it should be, the worst first; empty: nothing")
    complaints: list[Complaint] = Field(description="the same as data")
    http: str | None = Field(description="where this is served; null: nowhere")
    loop_lag_seconds: float = Field(ge=0, description="how late the event loop was at worst in the last minute")
    uptime_seconds: float = Field(ge=0, description="since this daemon took up the run")
    roots: dict[str, str] = Field(description="this node's own state roots of the last rounds, by round, hex")
    payload_bytes: Count = Field(description="of one contribution")
    state_bytes: Count = Field(description="of the weights")
    bytes: dict[str, int] = Field(description="the transport's own counts, by name, in this life")
    traffic: dict[Purpose, Traffic] = Field(description="bytes by purpose, in this life")
    limits: Limits
    queued_frames: Count = Field(description="of messages, that wait to be sent over streams")
    disk_free_bytes: Count | None = Field(
        description="that this node may still write to the disk of its run; null: not known"
    )
    counters: dict[str, int] = Field(description="what happened how often, by name, in this life")
    observed: dict[str, int] = Field(description="faults of peers that were noted, by reason, in this life")


class Peer(Part):
    """A node of the run, as this node sees it. What is counted is what this node has seen itself."""

    peer_id: str
    addresses: list[str] = Field(description="where it is reached, the best first; empty: not known")
    address_kind: Literal["loopback", "private", "public", "relay", "name", "unknown"] = Field(
        description="of the best address; relay: by way of another node; name: a host name"
    )
    latency_seconds: float | None = Field(
        ge=0,
        description="until it answers a small question, the median of the last few: the way there and back, and how "
        "busy both are; null: not known, or not connected",
    )
    is_connected: bool
    is_member: bool = Field(description="it has a vote")
    is_admitted: bool = Field(description="it may contribute")
    offered: Count = Field(description="contributions that it announced, over all starts of this node, like the next")
    applied: Count = Field(description="contributions that were taken, and are in this node's history")
    late: Count = Field(description="contributions that came after the last round that could have taken them")
    refused: dict[str, int] = Field(description="contributions that do not count, by reason")
    points: float = Field(ge=0, description="against it, for what was observed; they halve each hour")
    is_greylisted: bool = Field(description="so many points that it is kept away")
    observed: dict[str, int] = Field(description="what they are for: faults noted, by reason")


class Peers(Answer):
    """Who is connected, and who else may contribute."""

    peers: list[Peer]
    me: Peer = Field(description="this node itself, as far as that makes sense")


class Round(Answer):
    """A round that was applied here, as this node lived it.

    Its four phases add up to the time since the round before was applied. Bytes, tokens and lateness are those of that
    time, whichever round they were meant for.
    """

    branch: str = Field(description="hex")
    round: Count
    applied_at: float = Field(description="seconds since 1970")
    root: str = Field(description="digest of the weights after it, hex")
    manifest: str = Field(description="digest of what was agreed, hex")
    contributors: list[str] = Field(description="ids of those whose contributions it took")
    mine_taken: list[int] = Field(description="the rounds of those that were this node's own")
    views: Count = Field(description="tries that it took to agree; 1 is usual")
    train_seconds: float = Field(ge=0)
    collect_seconds: float = Field(ge=0)
    agree_seconds: float = Field(ge=0)
    apply_seconds: float = Field(ge=0)
    bytes_sent: Count = Field(description="by the whole node, of all purposes")
    bytes_received: Count = Field(description="by the whole node, of all purposes")
    bulk_bytes_sent: Count = Field(description="of these, payloads, states and data")
    bulk_bytes_received: Count = Field(description="of these, payloads, states and data")
    loss: float | None = Field(description="mean of what was trained here, nats a token; null: nothing was")
    tokens: Count = Field(description="trained on here")
    tokens_per_second: float = Field(ge=0, description="while this node trained")
    late: Count = Field(description="contributions that came too late to be taken")
    refused: dict[str, int] = Field(description="contributions that do not count, by reason")


class Rounds(Answer):
    """Rounds, the oldest first."""

    rounds: list[Round]


class Health(Answer):
    """Whether the process is alive."""

    ok: bool


class Readiness(Answer):
    """Whether the node takes part as it should."""

    ready: bool
    reasons: list[str] = Field(description="why not; told to those who may read the status")


class LogLine(Answer):
    """Something the node has said."""

    at: str = Field(description="UTC, ISO 8601")
    level: Literal["debug", "info", "warning", "error", "critical"]
    message: str


class Error(Answer):
    """Why there is no answer."""

    error: str
    fix: str = Field(description="what to do about it; empty: nothing that is known here")
