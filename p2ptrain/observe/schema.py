"""The schema of everything that a node tells, as pydantic models: HTTP answers and stored records.

Within a version, fields keep their names and meanings; new ones may be added. Units are in the names or descriptions,
which docs/reference/http.md has too. A number is annotated with its Figure (figures.py), by which every interface
shows it. Each record (RoundRecord, PeerRecord, Mine) is one row of records.sqlite: a msgpack map with the
fields' names as keys, under a digest. A field that is added later needs a default, for older rows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, ValidationError, computed_field

from p2ptrain.config.node import Limits
from p2ptrain.core.complaints import Code, Complaint, Concern
from p2ptrain.core.reputation import Reason
from p2ptrain.core.tally import Ban
from p2ptrain.identity import peer_id_of
from p2ptrain.node.agenda import AgendaItem
from p2ptrain.observe.figures import Figure
from p2ptrain.train.learner import RankFigures
from p2ptrain.visible import few

log = logging.getLogger("p2ptrain.observe")

LOSS_SHOWN_MAX = 100.0  # nats a token: the perplexity of a larger claim would not fit a float
PHASES = ("train", "collect", "agree", "apply")
BAN_UNKNOWN = "not known here"  # it was agreed while this node was away
BANS = (*(each.value for each in Ban), BAN_UNKNOWN)
LIAR, CRASH = ((("fault", fault),) for fault in ("liar", "crash"))  # labels of metrics
SENT, RECEIVED = ((("direction", way),) for way in ("sent", "received"))
TRAFFIC = "Bytes by purpose, as the node counts them: without the overhead of libp2p and without relayed traffic."
Phase = Literal["train", "collect", "agree", "apply"]
Purpose = Literal["gossip", "messages", "histories", "payloads", "states", "data", "questions", "other"]
Level = Literal["debug", "info", "warning", "error", "critical"]
Count = Annotated[int, Field(ge=0)]
Hex = Annotated[bytes, PlainSerializer(bytes.hex, return_type=str, when_used="json")]
PeerId = Annotated[bytes, PlainSerializer(peer_id_of, return_type=str, when_used="json")]


class Part(BaseModel):
    """A part of an answer."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_serialization_defaults_required=True)


class Stored(Part):
    """A row of records.sqlite."""

    @classmethod
    def of(cls, row: dict[str, Any]) -> Self:
        """Reads a row, ignoring fields that a newer release may have written."""
        return cls(**{name: value for name, value in row.items() if name in cls.model_fields})

    @classmethod
    def of_rows(cls, rows: Iterable[dict[str, Any]]) -> Iterator[Self]:
        """Reads the rows that fit the schema; others, perhaps from another release, must not prevent a start."""
        for row in rows:
            try:
                yield cls.of(row)
            except (ValidationError, TypeError) as error:
                log.warning("skipping a row of the records: %s", str(error).splitlines()[0])

    @property
    def row(self) -> dict[str, Any]:
        return dict(self)


class Answer(Part):
    """The body of an HTTP answer."""

    version: Literal[1] = Field(1, description="of this schema; fields are renamed or removed only in a new version")


class FaultTolerance(Part):
    """The faults that the roster tolerates."""

    liars: Annotated[
        Count,
        Figure(
            "may lie", metric="tolerated_members", labels=LIAR, text="Members that may fail in this way without harm."
        ),
    ] = Field(description="members that may lie without harm")
    crashes: Annotated[Count, Figure("may crash", metric="tolerated_members", labels=CRASH)] = Field(
        description="members that may be absent while rounds continue"
    )
    mode: Literal["byzantine", "crash-only"] = Field(description="crash-only: no liar is tolerated")


class Traffic(Part):
    """Bytes for one purpose, without libp2p's overhead, copies made by gossip, and relayed traffic."""

    sent: Annotated[Count, Figure("sent", "bytes", "traffic_bytes", "counter", TRAFFIC, SENT)] = Field(
        description="bytes"
    )
    received: Annotated[Count, Figure("received", "bytes", "traffic_bytes", "counter", labels=RECEIVED)] = Field(
        description="bytes"
    )


class Mine(Stored):
    """This node's work in the run, over all its starts."""

    applied: Annotated[Count, Figure("my contributions applied")] = Field(
        0, description="contributions of this node that rounds took"
    )
    applied_of_all: Annotated[Count, Figure("contributions applied meanwhile")] = Field(
        0, description="all contributions that rounds took while this node was running"
    )
    tokens: Annotated[Count, Figure("tokens trained on, over all starts", "tokens")] = Field(
        0, description="trained on by this node, whether or not the contributions were taken"
    )
    swarm_tokens: Annotated[Count, Figure("tokens of the swarm, over all starts", "tokens")] = Field(
        0, description="behind the contributions that rounds took while this node was running, as their authors claim"
    )
    training_seconds: Annotated[float, Figure("time of training, over all starts", "seconds")] = Field(
        0.0, ge=0, description="spent training here"
    )
    energy_joules: Annotated[float | None, Figure("energy", "joules", "energy_joules", "counter")] = Field(
        None,
        ge=0,
        description="an estimate of what the whole device used while this node was not paused, over all starts; null: "
        "the device does not report it",
    )

    @computed_field(description="its part of all contributions taken")  # type: ignore[prop-decorator]  # as its own documentation does it
    @property
    def share(self) -> Annotated[float, Figure("my share", "share")]:
        return round(self.applied / self.applied_of_all, 6) if self.applied_of_all else 0.0


class SameModel(Part):
    """Whether all nodes have the same model, as far as this node knows."""

    verdict: Literal["same", "unknown", "other"] = Field(description="other: this node's model is not the agreed one")
    text: str = Field(description="what was signed, for people")


class LearningFigures(BaseModel):
    """How well the agreed weights do, and how the last round moved them. Claims are signed, and not verified."""

    held_out_loss: Annotated[float | None, Figure("held-out loss", "nats a token")] = Field(
        None,
        description="of agreed weights, nats a token: the median of what three drawn members (all, if there are fewer) "
        "claim to have measured on the same held-out text, or the lower of two; null: not measured, in a round: not "
        "since the previous one",
    )
    held_out_round: int | None = Field(
        None, ge=0, description="the round after which the weights had the held-out loss; null: it was not measured"
    )
    swarm_loss: Annotated[float | None, Figure("training loss of the swarm", "nats a token")] = Field(
        None,
        description="median over the steps behind the round's contributions, nats a token, as their authors claim; "
        "null: unknown",
    )
    gradient_norm: Annotated[float | None, Figure("gradient norm", tracked="mine/gradient_norm")] = Field(
        None, description="mean over the steps of the last training here, before clipping; null: there was none"
    )
    drift: Annotated[float | None, Figure("drift")] = Field(
        None, description="how far the round moved the weights, over their norm; null: unknown"
    )
    update_norm: Annotated[float | None, Figure("norm of the agreed update")] = Field(
        None,
        description="norm of the update that the round's contributions make, before momentum and weight decay; "
        "about, from some blocks of each matrix, and the same on all nodes; null: the state was fetched, or loaded",
    )
    compression_ratio: Annotated[float | None, Figure("compression")] = Field(
        None,
        description="bytes that the gradients of all steps have in fp32, over those of the contribution; in a round "
        "by the steps that the authors claim; null: unknown",
    )

    @computed_field(description="e to the held-out loss")  # type: ignore[prop-decorator]  # as its own documentation does it
    @property
    def perplexity(self) -> Annotated[float | None, Figure("perplexity")]:
        loss = self.held_out_loss
        return None if loss is None else round(math.exp(min(loss, LOSS_SHOWN_MAX)), 4)


class Status(Answer, LearningFigures):
    """The node's status."""

    release: str = Field(description="of p2ptrain, as in `p2ptrain --version`")
    run_id: str = Field(description="hex")
    run_name: str
    peer_id: str = Field(description="of this node")
    addresses: list[str] = Field(description="where others can reach this node, as far as it knows")
    branch: str = Field(description="id of the history that the node follows, hex; the run id until a regroup")
    head: str = Field(description="of that history, hex, for `join --trust`")
    round: Annotated[Count, Figure("round")] = Field(description="the current round")
    phase: Annotated[Phase, Figure("phase", label="phase", values=PHASES, text="1 for the current phase of the round.")]
    view: Annotated[Count, Figure("tries to agree")] = Field(
        description="the view of the round's agreement; 0: the first try"
    )
    applied_round: Annotated[Count, Figure("applied round")] = Field(
        description="the last round whose update is in this node's weights"
    )
    since_applied_seconds: Annotated[float | None, Figure("since a round was applied", "seconds")] = Field(
        ge=0, description="time since then; null: none since this start"
    )
    state_root: str = Field(description="digest of the weights after the applied round, hex; empty: none yet")
    is_overlapping: Annotated[bool, Figure("trains while rounds are agreed on", "is")] = Field(
        description="training does not wait for the last round to be agreed on (agreement.overlap_rounds)"
    )
    exchange_share: Annotated[float | None, Figure("exchange, of a round's time", "share")] = Field(
        ge=0,
        description="the time from the announcement of the last contribution that a round waited for until it is "
        "applied, over the time of a round in which training waits for that; the median of the last rounds; null: none "
        "was timed",
    )
    certified_round: Annotated[Count, Figure("certified round")] = Field(
        description="the newest round whose state root the roster has certified"
    )
    loss: Annotated[float | None, Figure("loss", "nats a token", "loss_nats")] = Field(
        description="mean over the last round trained here, nats a token; null: none yet"
    )
    text: str = Field(description="a line that the model wrote here after `text_round`; empty: none since the start")
    text_round: Count
    step: Count = Field(description="optimizer steps done in the current training")
    tokens: Annotated[Count, Figure("tokens", "tokens", kind="counter")] = Field(
        description="trained on since this start"
    )
    tokens_per_second: Annotated[float | None, Figure("speed", "tokens/s")] = Field(
        ge=0, description="mean over the last rounds trained here; null: a script reads data of its own"
    )
    training_seconds: Annotated[float, Figure("time of training", "seconds", kind="counter")] = Field(
        ge=0, description="spent training since this start"
    )
    swarm_tokens_per_second: Annotated[float | None, Figure("speed of the swarm", "tokens/s")] = Field(
        ge=0, description="estimated from the last rounds' contributions; null: no round yet, or a script's own data"
    )
    contribution_tokens: Count = Field(description="tokens behind one contribution")
    mine: Mine
    world_round: Annotated[Count | None, Figure("world's round")] = Field(
        description="the world's round that this region goes on from; null: not known, or the run is no region"
    )
    device: str = Field(description="the training device: cpu, cuda or cuda:N")
    ranks: list[RankFigures] = Field(description="the processes that take the steps together; empty: this one does")
    is_paused: Annotated[bool, Figure("paused", "is")] = Field(
        description="training is paused, while it keeps voting and applying rounds; `health` says why"
    )
    peers: Annotated[list[str], Figure("peers", metric="connected_peers")] = Field(
        description="the connected nodes of this run, by id"
    )
    roster: Annotated[list[str], Figure("members", metric="roster_members")] = Field(
        description="the peers with a vote, by id"
    )
    quorum: Annotated[Count, Figure("quorum", metric="quorum_members")] = Field(
        description="members needed for a decision"
    )
    fault_tolerance: FaultTolerance
    admitted: Annotated[Count, Figure("may contribute", metric="admitted_peers")] = Field(
        description="peers that may contribute"
    )
    is_member: Annotated[bool, Figure("a member", "is")] = Field(description="this node has a vote")
    is_admitted: Annotated[bool, Figure("admitted", "is")] = Field(description="this node may contribute")
    held: Annotated[Count, Figure("contributions here", metric="held_contributions")] = Field(
        description="offered contributions that this node has fetched"
    )
    waiting_for: Count = Field(description="contributions that the round still waits for")
    health: list[str] = Field(description="the texts of all complaints, the worst first; empty: all is well")
    complaints: list[Complaint] = Field(description="the same as data")
    http: str | None = Field(description="the URL of the dashboard; null: HTTP is off")
    loop_lag_seconds: Annotated[float, Figure("event loop's lag", "seconds", "event_loop_lag_seconds")] = Field(
        ge=0, description="the longest delay of the event loop in the last minute"
    )
    uptime_seconds: Annotated[float, Figure("up", "seconds")] = Field(ge=0, description="since its start with the run")
    is_audited: Annotated[bool, Figure("contributions are audited", "is")] = Field(
        description="members can find out whether contributions come from training; not with data of their own"
    )
    audits: Annotated[Count, Figure("audits", kind="counter")] = Field(
        description="contributions of others that this node has measured since this start"
    )
    audit_seconds: Annotated[float, Figure("time of audits", "seconds", kind="counter")] = Field(
        ge=0, description="spent on that"
    )
    typical_z: Annotated[float | None, Figure("z of a contribution")] = Field(
        description="how clearly a member's contribution answers to its own sequences, by all audits: from -2 to 2; "
        "null: not audited"
    )
    suspended: Annotated[Count, Figure("suspended", metric="suspended_peers")] = Field(
        description="peers whose contributions count for nothing, because members found no work in them"
    )
    motions: Annotated[list[AgendaItem], Figure("open motions", metric="open_motions")] = Field(
        description="motions of members that the run go on as another, neither decided nor lapsed, by author"
    )
    successor: AgendaItem | None = Field(description="the motion that was decided, for good; null: none was")
    ends_after_round: Annotated[Count | None, Figure("last round of the run")] = Field(
        description="the last round that takes contributions; null: no successor was decided"
    )
    own_data: str = Field(description="what of its owner's data leaves this machine; empty: data is shared")
    privacy_epsilon: Annotated[float | None, Figure("epsilon spent", metric="privacy_epsilon")] = Field(
        description="the most that all steps so far tell of one sequence of the owner's data; null: no limit is set"
    )
    roots: dict[str, str] = Field(description="this node's own state roots after the last rounds, by round, hex")
    k: Annotated[Count, Figure("numbers of a chunk", metric="numbers_per_chunk")] = Field(
        description="numbers that this node sends of each chunk, one of the run's k"
    )
    payload_bytes: Annotated[Count, Figure("size of a contribution", "bytes")] = Field(
        description="bytes of this node's contribution, with that k"
    )
    state_bytes: Annotated[Count, Figure("size of the state", "bytes")] = Field(
        description="of the weights, and of the outer momentum if there is one"
    )
    bytes: dict[str, int] = Field(description="the transport's own counters, by name, since this start")
    traffic: Annotated[dict[Purpose, Traffic], Figure("traffic", label="purpose")] = Field(
        description="bytes by purpose, since this start"
    )
    limits: Annotated[
        Limits,
        Figure(
            "upload limit", "bytes/s", "limit_bytes_per_second", key="upload_bytes_per_second",
            text="The owner's limit; 0: no limit.", labels=SENT
        ),
        Figure(
            "download limit", "bytes/s", "limit_bytes_per_second", key="download_bytes_per_second", labels=RECEIVED
        ),
    ]  # fmt: skip
    queued_frames: Annotated[Count, Figure("queued frames")] = Field(
        description="messages waiting to be sent over streams"
    )
    disk_free_bytes: Annotated[Count | None, Figure("room on the disk", "bytes")] = Field(
        description="free for this node on the disk of its data; null: unknown"
    )
    counters: Annotated[
        dict[str, int],
        Figure(
            "wrong results of this node", metric="root_mismatches", kind="counter", key="root mismatches",
            text="States computed here that differ from the certified ones."
        ),
        Figure(
            "my contributions taken", metric="contributions", kind="counter", key="contributions taken",
            labels=(("outcome", "taken"),), text="This node's own contributions, by outcome."
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
            text="Trainings ended by a loss or gradient that was not finite."
        ),
        Figure(
            "damaged files", metric="damaged_files", kind="counter", key="damaged files",
            text="Files of this node that were found damaged and were skipped."
        ),
        Figure(
            "occurrences", kind="counter", metric="occurrences", label="what",
            text="Counts of other events, by name; the names come from the code."
        )
    ] = Field(description="counts of events, by name, since this start")  # fmt: skip
    staleness: Annotated[dict[str, int], Figure(
        "contributions by rounds of delay", metric="taken_contributions", kind="counter", label="staleness_rounds",
    )] = Field(description="contributions that rounds took since this start, by the number of rounds between the state "
               "that they were trained from and the round: 0 if none lies between")  # fmt: skip
    banned: Annotated[dict[str, int], Figure("banned", metric="banned_peers", label="reason", values=BANS)] = Field(
        description="keys that the members have banned, by reason; `/peers` names them"
    )
    kept_away: Annotated[Count, Figure("kept away", metric="kept_away_peers")] = Field(
        description="peers that this node keeps away because of their points; `/peers` names them"
    )
    observed: Annotated[
        dict[str, int],
        Figure(
            "faults of peers",
            metric="peer_faults",
            kind="counter",
            label="reason",
            values=tuple(each.value for each in Reason),
        ),
    ] = Field(description="faults observed in peers, by reason, since this start")

    @computed_field(description="the complaints, except that the run is small")  # type: ignore[prop-decorator]  # as its own documentation does it
    @property
    def troubles(self) -> list[Complaint]:
        return [each for each in self.complaints if each.code != Code.CRASH_ONLY]

    @computed_field(description="whether all nodes have the same model")  # type: ignore[prop-decorator]  # as its own documentation does it
    @property
    def same_model(self) -> SameModel:
        """A certificate proves a quorum minus its possible liars (core/roster.py)."""
        if any(each.code == Code.QUARANTINED for each in self.complaints):
            text = "No: this node's model differs from the certified one. It is fetching the right one."
            return SameModel(verdict="other", text=text)
        number, liars = self.certified_round, self.fault_tolerance.liars
        if number == 0:
            return SameModel(verdict="unknown", text="Not known yet: the roster has not certified any round.")
        if str(number) not in self.roots:
            why = f"The roster has certified round {number:,}, which this node did not apply, so it cannot compare."
            return SameModel(verdict="unknown", text=why)
        if self.roster == [self.peer_id]:
            text = f"Yes: this node is the only member, and signed its own model after round {number:,}."
            return SameModel(verdict="same", text=text)
        members = few(self.quorum - liars, "member", "members")
        but = f", and at most {liars:,} of them may lie" if liars > 0 else ""
        signed = f"signed that their model after round {number:,} was bit for bit this node's"
        return SameModel(verdict="same", text=f"Yes: at least {members} {signed}{but}.")


class PeerRecord(Stored):
    """A peer's contributions and faults, over all starts of this node."""

    peer: PeerId = Field(exclude=True)
    changed_at: float = Field(0.0, exclude=True, description="seconds since 1970")
    offered: Count = Field(
        0, description="contributions that it announced, over all starts of this node, as are the next three"
    )
    applied: Count = Field(0, description="contributions that rounds in this node's history took")
    late: Count = Field(0, description="contributions that came after the last round that could have taken them")
    refused: dict[str, int] = Field({}, description="contributions that were refused, by reason")
    observed: dict[str, int] = Field({}, description="faults observed, by reason, for which it has points")
    points: float = Field(0.0, ge=0, description="penalty points for its faults; they halve each hour")
    ban: str = Field("", description="why the members have banned it; empty: they have not")
    arrival_seconds: float | None = Field(
        None, description="from the beginning of a round until its contribution came, the last time; null: unknown"
    )
    arrival_seconds_mean: float | None = Field(None, description="moving average of that, an eighth of it the newest")
    tokens_per_second: float | None = Field(
        None,
        description="tokens behind that contribution, as it claims, over that time: an estimate, waiting included; "
        "null: unknown, or a script reads data of its own",
    )
    tokens_per_second_mean: float | None = Field(None, description="moving average of that")
    staleness: int | None = Field(
        None,
        description="rounds between the state that its contribution taken last began from and the round; null: none",
    )
    staleness_mean: float | None = Field(None, description="moving average of that")


class Peer(PeerRecord):
    """A peer as this node sees it. All counts are this node's own observations."""

    addresses: list[str] = Field(description="where it can be reached, the best first; empty: unknown")
    address_kind: Literal["loopback", "private", "public", "relay", "name", "unknown"] = Field(
        description="of the best address; relay: through another node; name: a host name"
    )
    release: str = Field("", description="of p2ptrain, as the peer says; empty: unknown")
    owner: str = Field("", description="its owner's name, as the peer says (network.owner); empty: none, or unknown")
    latency_seconds: float | None = Field(ge=0, description="median round trip of its last questions; null: unknown")
    is_connected: bool
    is_member: bool = Field(description="it has a vote")
    is_admitted: bool = Field(description="it may contribute")
    is_greylisted: bool = Field(description="it is kept away because of its points")
    standing: Literal["", "on trial", "counted", "suspended", "expelled"] = Field(
        description="whether its contributions count, by the audits of all members; empty: it is not admitted"
    )
    audits_passed: float = Field(ge=0, description="audits that found its work, old ones fading")
    doubt: float = Field(ge=0, description="of audits that did not; at 1 all members measure")

    heard_seconds: float | None = Field(ge=0, description="since its last message about a round; null: not admitted")
    rounds_lately: Count = Field(0, description="the last rounds applied here, 50 at most, since it was admitted")
    taken_lately: Count = Field(0, description="of these, those that took a contribution of it")
    is_elsewhere: bool = Field(False, description="it was lately on another branch of the run")
    reasons: list[str] = Field([], description="why a person should look at it, the worst first; empty: no reason")

    @computed_field(description="of the node")  # type: ignore[prop-decorator]  # as its own documentation does it
    @property
    def peer_id(self) -> str:
        return peer_id_of(self.peer)


class PeerList(Answer):
    """The connected peers, and others that may contribute, are banned or are kept away."""

    concerns: list[Concern] = Field(description="what to look at first: what costs the run most")
    peers: list[Peer] = Field(description="those to look at first")
    me: Peer = Field(description="this node itself, as far as the fields apply")


class RoundRecord(Answer, LearningFigures, Stored):
    """A round that this node has applied.

    Its four phases add up to the time since the previous round was applied. Bytes, tokens and late contributions are
    those of that time, whichever round they were meant for."""

    branch: Hex = Field(description="hex")
    round: Count
    applied_at: float = Field(description="seconds since 1970")
    root: Hex = Field(description="digest of the weights after the round, hex")
    manifest: Hex = Field(description="digest of the agreed manifest, hex")
    contributors: Annotated[tuple[PeerId, ...], Figure("contributions taken")] = Field(
        description="the peers whose contributions it took, by id"
    )
    mine_taken: Annotated[tuple[int, ...], Figure("mine taken", tracked="mine/taken")] = Field(
        description="the rounds for which this node made the contributions that were taken"
    )
    views: Annotated[Count, Figure("tries", tracked="round/tries")] = Field(
        description="tries needed to agree; usually 1"
    )
    train_seconds: Annotated[float, Figure("training", "seconds")] = Field(ge=0)
    collect_seconds: Annotated[float, Figure("collecting", "seconds")] = Field(ge=0)
    agree_seconds: Annotated[float, Figure("agreeing", "seconds")] = Field(ge=0)
    apply_seconds: Annotated[float, Figure("applying", "seconds")] = Field(ge=0)
    bytes_sent: Annotated[Count, Figure("sent", "bytes", tracked="bytes/sent")] = Field(
        description="by the whole node, for all purposes"
    )
    bytes_received: Annotated[Count, Figure("received", "bytes", tracked="bytes/received")] = Field(
        description="by the whole node, for all purposes"
    )
    loss: Annotated[float | None, Figure("loss", "nats a token", "last_round_loss_nats", tracked="mine/loss")] = Field(
        description="mean over the training done here, nats a token; null: there was none"
    )
    steps: Annotated[Count, Figure("steps", tracked="mine/steps", skips_zero=True)] = Field(
        0, description="optimizer steps of the training done here; a slow machine takes fewer (recipe.local_steps_min)"
    )
    own_drift: Annotated[float | None, Figure("own drift", "share", tracked="mine/drift")] = Field(
        None, ge=0, description="how far those steps moved the weights, over their norm; null: no local steps"
    )
    swarm_tokens: Annotated[Count, Figure("tokens of the swarm", "tokens")] = Field(
        0, description="behind the contributions that it took, as their authors claim"
    )
    swarm_tokens_so_far: Annotated[Count | None, Figure("tokens of the swarm so far", "tokens")] = Field(
        None,
        description="the same of all rounds so far in which this node was running; null: an early release's record",
    )
    staleness_mean: Annotated[float | None, Figure("rounds of delay", tracked="round/staleness")] = Field(
        None,
        ge=0,
        description="mean over the contributions that it took of the rounds between the state that they began from and "
        "this one; null: it took none",
    )
    tokens_so_far: Annotated[Count | None, Figure("tokens so far", "tokens", tracked="mine/tokens_so_far")] = Field(
        None, description="trained on here so far, over all starts; null: an early release's record"
    )
    tokens: Annotated[Count, Figure("tokens", "tokens", tracked="mine/tokens")] = Field(description="trained on here")
    tokens_per_second: Annotated[
        float, Figure("speed of training", "tokens/s", tracked="mine/tokens_per_second", skips_zero=True)
    ] = Field(ge=0, description="while this node trained")
    late: Annotated[Count, Figure("too late")] = Field(description="contributions that came too late to be taken")
    refused: Annotated[dict[str, int], Figure("refused")] = Field(description="contributions refused, by reason")

    @computed_field(description="since the previous round was applied: the sum of its four phases")  # type: ignore[prop-decorator]  # as its own documentation does it
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
    """The process is alive."""

    ok: bool


class Readiness(Answer):
    """Whether the node takes part fully."""

    ready: bool
    reasons: list[str] = Field(description="why not; only for clients that may read the status")


class LogLine(Part):
    """A line of the node's log."""

    at: str = Field(description="UTC, ISO 8601")
    level: Level
    message: str


class LogLines(Answer):
    """The last lines of the node's log, the oldest first."""

    lines: list[LogLine]


class Error(Answer):
    """An error response."""

    error: str
    fix: str = Field(description="what to do about it; empty if unknown")
