"""Every answer of the node, as pydantic models: the contract with whoever reads it, and what is stored of a round.

A field keeps its name and its meaning within a version; new ones may come. Units are in the names, or in the
descriptions, which also make the descriptions of /openapi.json. A number to be seen carries its Figure (figures.py), by
which every face shows it. Records (RoundRecord, PeerRecord, Points, Mine) are rows of records.sqlite under the names of
their fields: a field that comes later has a default, for the rows that lack it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, computed_field

from p2ptrain.core.complaints import Complaint
from p2ptrain.core.reputation import Reason
from p2ptrain.identity import peer_id_of
from p2ptrain.observe.figures import Figure

PHASES = ("train", "collect", "agree", "apply")
LIAR, CRASH = ((("fault", fault),) for fault in ("liar", "crash"))  # labels of metrics
SENT, RECEIVED = ((("direction", way),) for way in ("sent", "received"))
TRAFFIC = "Bytes by purpose, as the node counts them: without what libp2p adds or passes on."
Phase = Literal["train", "collect", "agree", "apply"]
Purpose = Literal["gossip", "messages", "histories", "payloads", "states", "data", "questions", "other"]
Direction = Literal["sent", "received"]
Level = Literal["debug", "info", "warning", "error", "critical"]
Count = Annotated[int, Field(ge=0)]
Hex = Annotated[bytes, PlainSerializer(bytes.hex, return_type=str, when_used="json")]
PeerId = Annotated[bytes, PlainSerializer(peer_id_of, return_type=str, when_used="json")]
# Records of early releases may count less than none: what the core had forgotten was subtracted.
Late = Annotated[Count, BeforeValidator(lambda count: max(0, count))]


class Part(BaseModel):
    """A part of an answer."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_serialization_defaults_required=True)


class Answer(Part):
    """What an address or an event answers with."""

    version: Literal[1] = Field(1, description="of this description; a field is renamed or removed only in another")


class Stored(Part):
    """A row of records.sqlite."""

    @classmethod
    def of(cls, row: dict[str, Any]) -> Self:
        """A newer release may have written fields that this one does not know."""
        return cls(**{name: value for name, value in row.items() if name in cls.model_fields})

    @property
    def row(self) -> dict[str, Any]:
        return dict(self)


class FaultTolerance(Part):
    """What the roster survives."""

    liars: Annotated[
        Count, Figure("may lie", metric="tolerated_members", labels=LIAR, text="Members that may fail so without harm.")
    ] = Field(description="members that may lie without harm")
    crashes: Annotated[Count, Figure("may crash", metric="tolerated_members", labels=CRASH)] = Field(
        description="members that may be away, and rounds still go on"
    )
    mode: Literal["byzantine", "crash-only"] = Field(description="crash-only: no liar is tolerated")


class Traffic(Part):
    """Bytes of one purpose, as this node counts them: each message once, without what libp2p adds or passes on."""

    sent: Annotated[Count, Figure("sent", "bytes", "traffic_bytes", "counter", TRAFFIC, SENT)] = Field(
        description="bytes"
    )
    received: Annotated[Count, Figure("received", "bytes", "traffic_bytes", "counter", labels=RECEIVED)] = Field(
        description="bytes"
    )


class Limits(Part):
    """What the owner allows: of the network, for payloads, states, data and histories; and of the machine."""

    upload_bytes_per_second: Annotated[
        Count,
        Figure(
            "upload limit", "bytes/s", "limit_bytes_per_second", text="What the owner allows; 0: no limit.", labels=SENT
        ),
    ] = Field(description="0: no limit")
    download_bytes_per_second: Annotated[
        Count, Figure("download limit", "bytes/s", "limit_bytes_per_second", labels=RECEIVED)
    ] = Field(description="0: no limit")
    memory_bytes: Count = Field(description="of main memory; 0: no limit")
    hours: str = Field(
        description="in which it trains, in the machine's local time, such as 22:00-07:00; empty: always"
    )
    device_percent: int = Field(ge=1, le=100, description="of the time, that the device may work")
    threads: Count = Field(description="of torch, for training; 0: not known")
    on_battery: Literal["pause", "train"] = Field(description="what it does on the machine's battery")


class Mine(Stored):
    """What this node has done in the run, over all its starts."""

    applied: Annotated[Count, Figure("my contributions applied")] = Field(
        0, description="contributions of its own that rounds took"
    )
    applied_of_all: Annotated[Count, Figure("contributions applied meanwhile")] = Field(
        0, description="contributions of everyone that they took, while this node was there"
    )
    tokens: Annotated[Count, Figure("tokens trained on, over all starts", "tokens")] = Field(
        0, description="trained on here, whatever became of it"
    )
    training_seconds: Annotated[float, Figure("time of training, over all starts", "seconds")] = Field(
        0.0, ge=0, description="spent training here"
    )
    energy_joules: Annotated[
        float | None,
        Figure("energy", "joules", "energy_joules", "counter", "What the whole device has used, over all starts."),
    ] = Field(
        None,
        ge=0,
        description="an estimate: what the whole device used while this node was not paused; null: it does not tell",
    )

    @computed_field(description="of its own in all of them")  # type: ignore[prop-decorator]  # as its own documentation does it
    @property
    def share(self) -> Annotated[float, Figure("my share", "share")]:
        return round(self.applied / self.applied_of_all, 6) if self.applied_of_all else 0.0


class Status(Answer):
    """Where the node stands."""

    release: str = Field(description="of p2ptrain, as `p2ptrain --version` tells it")
    run_id: str = Field(description="hex")
    run_name: str
    peer_id: str = Field(description="of this node")
    addresses: list[str] = Field(description="under which others may reach this node, as far as is known")
    branch: str = Field(description="id of the history that the node follows, hex; the run id until a regroup")
    head: str = Field(description="of that history, hex: what `join --trust` takes")
    round: Annotated[Count, Figure("round")] = Field(description="the one that is being worked on")
    phase: Annotated[Phase, Figure("phase", label="phase", values=PHASES, text="1 for the phase that the round is in.")]
    view: Annotated[Count, Figure("tries to agree", text="Tries of this round to agree before this one.")] = Field(
        description="tries of this round to agree; 0: the first"
    )
    applied_round: Annotated[Count, Figure("applied round")] = Field(
        description="the last round whose update is in this node's weights"
    )
    since_applied_seconds: Annotated[float | None, Figure("since a round was applied", "seconds")] = Field(
        ge=0, description="since then; null: none in this life"
    )
    state_root: str = Field(description="digest of the weights after the applied round, hex; empty: none yet")
    certified_round: Annotated[Count, Figure("certified round")] = Field(
        description="the newest round whose root the roster has certified"
    )
    loss: Annotated[float | None, Figure("loss", "nats a token", "loss_nats")] = Field(
        description="mean of the round that was trained here last, nats a token; null: none yet"
    )
    step: Count = Field(description="optimizer steps done of the round in training")
    tokens: Annotated[Count, Figure("tokens", "tokens", kind="counter")] = Field(
        description="trained on here, in this life"
    )
    tokens_per_second: Annotated[float, Figure("speed", "tokens/s")] = Field(
        ge=0, description="mean of the last rounds that were trained here"
    )
    training_seconds: Annotated[float, Figure("time of training", "seconds", kind="counter")] = Field(
        ge=0, description="spent training, in this life"
    )
    swarm_tokens_per_second: Annotated[float | None, Figure("speed of the swarm", "tokens/s")] = Field(
        ge=0, description="an estimate: what the contributions of the last rounds were trained on; null: no round yet"
    )
    contribution_tokens: Count = Field(description="that one contribution is trained on")
    mine: Mine
    device: str = Field(description="what trains: cpu, cuda or cuda:N")
    is_paused: Annotated[
        bool, Figure("paused", "is", text="1 while it is not to train: its owner, hours, battery.")
    ] = Field(description="it trains no further, and goes on voting and applying; health says why")
    peers: Annotated[list[str], Figure("peers", metric="connected_peers", text="Peers that are connected.")] = Field(
        description="ids of the connected nodes of this run"
    )
    roster: Annotated[list[str], Figure("members", metric="roster_members", text="Peers with a vote.")] = Field(
        description="ids of the peers with a vote"
    )
    quorum: Annotated[Count, Figure("quorum", metric="quorum_members")] = Field(
        description="members that decide together"
    )
    fault_tolerance: FaultTolerance
    admitted: Annotated[Count, Figure("may contribute", metric="admitted_peers", text="Peers that may contribute.")] = (
        Field(description="peers that may contribute")
    )
    is_member: Annotated[bool, Figure("a member", "is", text="1 if this node has a vote.")] = Field(
        description="this node has a vote"
    )
    is_admitted: Annotated[bool, Figure("admitted", "is", text="1 if this node may contribute.")] = Field(
        description="this node may contribute"
    )
    held: Annotated[Count, Figure("contributions here", metric="held_contributions")] = Field(
        description="contributions on offer that are here"
    )
    waiting_for: Count = Field(description="contributions that the round still waits for")
    health: list[str] = Field(description="all that is not as it should be, the worst first; empty: nothing")
    complaints: list[Complaint] = Field(description="the same as data")
    http: str | None = Field(description="where this is served; null: nowhere")
    loop_lag_seconds: Annotated[float, Figure("event loop's lag", "seconds", "event_loop_lag_seconds")] = Field(
        ge=0, description="how late the event loop was at worst in the last minute"
    )
    uptime_seconds: Annotated[float, Figure("up", "seconds")] = Field(
        ge=0, description="since this daemon took up the run"
    )
    roots: dict[str, str] = Field(description="this node's own state roots of the last rounds, by round, hex")
    payload_bytes: Annotated[Count, Figure("size of a contribution", "bytes", text="Size of one contribution.")] = (
        Field(description="of one contribution")
    )
    state_bytes: Annotated[Count, Figure("size of the weights", "bytes", text="Size of the weights.")] = Field(
        description="of the weights"
    )
    bytes: dict[str, int] = Field(description="the transport's own counts, by name, in this life")
    traffic: Annotated[dict[Purpose, Traffic], Figure("traffic", label="purpose")] = Field(
        description="bytes by purpose, in this life"
    )
    limits: Limits
    queued_frames: Annotated[Count, Figure("queued frames")] = Field(
        description="of messages, that wait to be sent over streams"
    )
    disk_free_bytes: Annotated[Count | None, Figure("room on the disk", "bytes")] = Field(
        description="that this node may still write to the disk of its run; null: not known"
    )
    counters: Annotated[
        dict[str, int],
        Figure(
            "own results that were wrong", metric="root_mismatches", kind="counter", key="root mismatches",
            text="States that came out wrong here."
        ),
        Figure(
            "my contributions taken", metric="contributions", kind="counter", key="contributions taken",
            labels=(("outcome", "taken"),), text="This node's own contributions, by what became of them."
        ),
        Figure(
            "expired", metric="contributions", kind="counter", key="contributions expired",
            labels=(("outcome", "expired"),)
        ),
        Figure(
            "too late", metric="contributions", kind="counter", key="contributions too late",
            labels=(("outcome", "too_late"),)
        ),
        Figure(
            "trainings failed", metric="contributions", kind="counter", key="trainings failed",
            labels=(("outcome", "failed"),)
        ),
        Figure(
            "trainings not finite", metric="trainings_not_finite", kind="counter", key="trainings not finite",
            text="Trainings ended by a loss or gradient that is not finite."
        ),
        Figure(
            "damaged files", metric="damaged_files", kind="counter", key="damaged files",
            text="Files of this node that were found damaged, and done without."
        ),
        Figure(
            "occurrences", kind="counter", metric="occurrences", label="what",
            text="What else happened, by name; names come from the code."
        )
    ] = Field(description="what happened how often, by name, in this life")  # fmt: skip
    observed: Annotated[
        dict[str, int],
        Figure(
            "faults of peers",
            metric="peer_faults",
            kind="counter",
            label="reason",
            values=tuple(each.value for each in Reason),
        ),
    ] = Field(description="faults of peers that were noted, by reason, in this life")


class PeerRecord(Stored):
    """What became of a peer's contributions, over all starts of this node, and what it did wrong."""

    peer: PeerId = Field(exclude=True)
    changed_at: float = Field(0.0, exclude=True, description="seconds since 1970")
    offered: Count = Field(
        0, description="contributions that it announced, over all starts of this node, like the next"
    )
    applied: Count = Field(0, description="contributions that were taken, and are in this node's history")
    late: Late = Field(0, description="contributions that came after the last round that could have taken them")
    refused: dict[str, int] = Field({}, description="contributions that do not count, by reason")
    observed: dict[str, int] = Field({}, description="what the points are for: faults noted, by reason")
    points: float = Field(0.0, ge=0, description="against it, for what was observed; they halve each hour")


class Points(Stored):
    """The points against a peer, when they had grown: a row of their own."""

    peer: PeerId
    at: float = Field(description="seconds since 1970")
    points: float
    observed: dict[str, int]


class Peer(PeerRecord):
    """A node of the run, as this node sees it. What is counted is what this node has seen itself."""

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
    is_greylisted: bool = Field(description="so many points that it is kept away")

    @computed_field(description="of the node")  # type: ignore[prop-decorator]  # as its own documentation does it
    @property
    def peer_id(self) -> str:
        return peer_id_of(self.peer)


class PeerList(Answer):
    """Who is connected, and who else may contribute."""

    peers: list[Peer]
    me: Peer = Field(description="this node itself, as far as that makes sense")


class RoundRecord(Answer, Stored):
    """A round that was applied here, as this node lived it.

    Its four phases add up to the time since the round before was applied. Bytes, tokens and lateness are those of that
    time, whichever round they were meant for.
    """

    branch: Hex = Field(description="hex")
    round: Count
    applied_at: float = Field(description="seconds since 1970")
    root: Hex = Field(description="digest of the weights after it, hex")
    manifest: Hex = Field(description="digest of what was agreed, hex")
    contributors: Annotated[tuple[PeerId, ...], Figure("contributions taken", text="Contributions that it took.")] = (
        Field(description="ids of those whose contributions it took")
    )
    mine_taken: Annotated[
        tuple[int, ...], Figure("mine taken", tracked="mine/taken", text="Contributions of this node that it took.")
    ] = Field(description="the rounds of those that were this node's own")
    views: Annotated[Count, Figure("tries", tracked="round/tries")] = Field(
        description="tries that it took to agree; 1 is usual"
    )
    train_seconds: Annotated[float, Figure("training", "seconds")] = Field(ge=0)
    collect_seconds: Annotated[float, Figure("collecting", "seconds")] = Field(ge=0)
    agree_seconds: Annotated[float, Figure("agreeing", "seconds")] = Field(ge=0)
    apply_seconds: Annotated[float, Figure("applying", "seconds")] = Field(ge=0)
    bytes_sent: Annotated[Count, Figure("sent", "bytes", tracked="bytes/sent")] = Field(
        description="by the whole node, of all purposes"
    )
    bytes_received: Annotated[Count, Figure("received", "bytes", tracked="bytes/received")] = Field(
        description="by the whole node, of all purposes"
    )
    bulk_bytes_sent: Count = Field(description="of these, payloads, states and data")
    bulk_bytes_received: Count = Field(description="of these, payloads, states and data")
    loss: Annotated[float | None, Figure("loss", "nats a token", "last_round_loss_nats", tracked="mine/loss")] = Field(
        description="mean of what was trained here, nats a token; null: nothing was"
    )
    tokens: Annotated[Count, Figure("tokens", "tokens", tracked="mine/tokens")] = Field(description="trained on here")
    tokens_per_second: Annotated[
        float, Figure("speed of training", "tokens/s", tracked="mine/tokens_per_second", skips_zero=True)
    ] = Field(ge=0, description="while this node trained")
    late: Annotated[Late, Figure("too late")] = Field(description="contributions that came too late to be taken")
    refused: Annotated[dict[str, int], Figure("refused")] = Field(
        description="contributions that do not count, by reason"
    )

    @computed_field(description="since the round before was applied: the sum of its four phases")  # type: ignore[prop-decorator]  # as its own documentation does it
    @property
    def seconds(self) -> Annotated[float, Figure("time of the round", "seconds")]:
        return self.train_seconds + self.collect_seconds + self.agree_seconds + self.apply_seconds

    @property
    def key(self) -> tuple[bytes, int]:
        return self.branch, self.round

    @property
    def row(self) -> dict[str, Any]:
        return {name: value for name, value in self if name != "version"}


class Rounds(Answer):
    """Rounds, the oldest first."""

    rounds: list[RoundRecord]


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
    level: Level
    message: str


class Error(Answer):
    """Why there is no answer."""

    error: str
    fix: str = Field(description="what to do about it; empty: nothing that is known here")
