"""Builds the schema's models from the core's view of the node and the counters of its edges."""

from __future__ import annotations

from collections import Counter, deque
from typing import Protocol

from p2ptrain import __version__
from p2ptrain.config import RunConfig
from p2ptrain.config.node import Limits
from p2ptrain.core.audits import CREDIT, DOUBT, Tier
from p2ptrain.core.complaints import Code, Complaint, by_gravity, complaint
from p2ptrain.core.messages import KEY_BYTES
from p2ptrain.core.view import PeerView
from p2ptrain.identity import peer_id_of
from p2ptrain.net import questions
from p2ptrain.net.addresses import kind_of_address
from p2ptrain.node.driver import Driver
from p2ptrain.node.edges import Edges
from p2ptrain.node.lag import Lag
from p2ptrain.node.limits import MachineLimits
from p2ptrain.observe.rounds import HELD_OUT, Recorder, copied, held_out_of
from p2ptrain.observe.schema import (
    BAN_UNKNOWN,
    FaultTolerance,
    Peer,
    PeerList,
    PeerRecord,
    Purpose,
    RoundRecord,
    Status,
    Traffic,
)
from p2ptrain.train.private import Privacy

ROOTS_TOLD = 32  # rounds: a program that compares nodes asks more often than once in so many
BANNED_TOLD = 256  # in the list of peers, the latest
CONTRIBUTORS_TOLD = 20_000  # in all rounds of one answer: 1.2 MB
# Kinds of blobs (net/blobs/blob.py) by purpose.
BLOB_PURPOSES: dict[Purpose, tuple[str, ...]] = {
    "payloads": ("payload",),
    "states": ("state", "base"),
    "data": ("data", "manifest", "tokenizer"),
}
OWN_DATA = "the owner's, which stays on this machine; contributions leave it, which are made of it"
WAYS = ("sent", "received")


class Running(Protocol):
    """A running node, as far as its interfaces read it (the daemon is one)."""

    run: RunConfig
    driver: Driver
    edges: Edges
    records: Recorder
    machine_limits: MachineLimits
    http: str | None
    lag: Lag

    @property
    def uptime(self) -> float: ...

    @property
    def since_applied(self) -> float | None: ...


def status_of(daemon: Running) -> Status:
    """Builds the node's status."""
    driver, edges, records = daemon.driver, daemon.edges, daemon.records
    view, worker, figures = driver.node.view(), driver.worker, driver.worker.figures
    upstream, k = worker.upstream, figures.k or daemon.run.recipe.ks[0]
    payload_bytes = KEY_BYTES + worker.replica.outer.sizes[k]
    state, roots, roster = view.state, view.roots, view.state.roster
    speed, complaints = figures.tokens_per_second, complaints_of(daemon)
    swarm = None if speed is None else records.swarm_tokens_per_second  # the others' scripts have loaders, too
    return Status(
        **copied(view, "phase", "view", "applied_round", "is_member", "is_admitted", "held", "waiting_for", "observed"),
        is_overlapping=view.is_overlapping,
        exchange_share=None if view.exchange_share is None else round(view.exchange_share, 4),
        **copied(figures, "loss", "gradient_norm", "step", "tokens"),
        **copied(records, "mine", "contribution_tokens"),
        **copied(driver.trainings.progress, "text", "text_round"),
        **(held_out_of(view.held_out) or copied(records.measured, *HELD_OUT)),
        release=__version__,
        run_id=view.run_id.hex(),
        run_name=daemon.run.name,
        peer_id=peer_id_of(view.me),
        addresses=edges.transport.addresses(),
        branch=state.branch.hex(),
        head=state.head.hex(),
        round=state.round + 1,
        since_applied_seconds=daemon.since_applied,
        state_root=roots.get(view.applied_round, b"").hex(),
        certified_round=state.root_round,
        swarm_loss=view.training_of(view.applied_round).loss,
        drift=worker.drift,
        update_norm=worker.replica.update_norm,
        compression_ratio=round(worker.replica.gradient_bytes / payload_bytes * daemon.run.recipe.local_steps, 1),
        tokens_per_second=None if speed is None else round(speed, 1),
        training_seconds=round(figures.seconds, 3),
        swarm_tokens_per_second=None if swarm is None else round(swarm, 1),
        world_round=upstream.round if upstream else None,
        device=str(worker.device),
        is_paused=bool(driver.trainings.pauses),
        peers=sorted(peer_id_of(peer) for peer in edges.connections.linked),
        roster=[peer_id_of(key) for key in state.members],
        quorum=roster.quorum,
        fault_tolerance=FaultTolerance(
            liars=roster.tolerated,
            crashes=len(state.members) - roster.quorum,
            mode="byzantine" if roster.tolerated else "crash-only",
        ),
        admitted=len(state.admitted),
        health=[each.text for each in complaints],
        complaints=complaints,
        http=daemon.http,
        loop_lag_seconds=round(daemon.lag.worst, 4),
        uptime_seconds=round(daemon.uptime, 1),
        is_audited=daemon.run.is_audited,
        audits=driver.audits.done,
        audit_seconds=round(driver.audits.seconds, 3),
        typical_z=state.typical / 1_000 if daemon.run.is_audited else None,
        suspended=sum(entry.conduct.tier is Tier.SUSPENDED for entry in state.admitted),
        own_data=_own_data_text(daemon.run, worker.privacy),
        privacy_epsilon=worker.privacy.spent if worker.privacy else None,
        roots={str(number): root.hex() for number, root in sorted(roots.items())[-ROOTS_TOLD:]},
        k=k,
        payload_bytes=payload_bytes,
        state_bytes=worker.replica.state_bytes,
        bytes=edges.transport.counters(),
        traffic=traffic_of(edges),
        limits=limits_of(daemon),
        queued_frames=edges.mailboxes.queued_frames,
        disk_free_bytes=edges.persistence.free_bytes,
        counters=view.counters
        | dict(driver.intake.counters)
        | edges.mailboxes.counters()
        | {"trainings not finite": figures.not_finite, "damaged files": edges.persistence.store.damaged_files}
        | ({"contributions for the region": upstream.contributions} if upstream else {}),
        banned=Counter(ban_of(daemon, key) for key in state.bans),
        kept_away=len(view.kept_away),
        staleness={str(rounds): count for rounds, count in view.staleness.items()},
    )


def _own_data_text(run: RunConfig, privacy: Privacy | None) -> str:
    if run.data.source == "shared":
        return ""
    return OWN_DATA if privacy is None else f"{OWN_DATA}, with noise: {privacy}"


def complaints_of(daemon: Running) -> list[Complaint]:
    """Returns the complaints of the core and the daemon, the worst first."""
    driver, persistence, machine_limits = daemon.driver, daemon.edges.persistence, daemon.machine_limits
    disk = {
        Code.DEGRADED: driver.effects.disk_trouble,
        Code.CHECKPOINTS_NOT_SAVED: persistence.checkpoint_trouble,
        Code.RECORDS_NOT_WRITTEN: persistence.records_trouble,
    }
    found = [complaint(code, why=why) for code, why in disk.items() if why]
    found += [machine_limits.over_memory] if machine_limits.over_memory else []
    found += daemon.edges.transport.boundary.complaints
    return by_gravity([*found, *driver.node.view().complaints, *driver.trainings.pauses, *driver.worker.complaints])


def unreadiness_of(daemon: Running) -> list[str]:
    """Returns why the node does not take part fully; empty if it does."""
    return [each.text for each in complaints_of(daemon) if each.hinders]


# ---------------------------------------------------------------------------------------------------
# Traffic


def limits_of(daemon: Running) -> Limits:
    return daemon.machine_limits.limits


def traffic_of(edges: Edges) -> dict[Purpose, Traffic]:
    """Returns the bytes sent and received by purpose: the transport's counts by protocol, divided by content."""
    counted = edges.transport.counters()
    purposes: dict[Purpose, Traffic] = {}

    def add(purpose: Purpose, sent_and_received: list[int]) -> None:
        sent, received = (max(0, count) for count in sent_and_received)
        purposes[purpose] = Traffic(sent=sent, received=received)

    def of_protocol(protocol: str) -> list[int]:
        return [counted.get(f"{way} {protocol}", 0) for way in WAYS]

    add("gossip", of_protocol("gossip"))
    histories = [edges.mailboxes.history_bytes[way] for way in WAYS]
    messages = of_protocol(edges.mailboxes.protocol)
    add("messages", [all_of_it - of_it for all_of_it, of_it in zip(messages, histories, strict=True)])
    add("histories", histories)
    blobs = edges.blob_bytes()
    for purpose, kinds in BLOB_PURPOSES.items():
        add(purpose, [sum(blobs[f"{way} {kind}"] for kind in kinds) for way in WAYS])
    add("questions", of_protocol(questions.PROTOCOL))
    known = [sum(getattr(each, way) for each in purposes.values()) for way in WAYS]
    totals = [counted.get(f"bytes {way}", 0) for way in WAYS]
    add("other", [total - of_it for total, of_it in zip(totals, known, strict=True)])
    return purposes


# ---------------------------------------------------------------------------------------------------
# Peers and rounds


def peers_of(daemon: Running) -> PeerList:
    """Describes the peers that are connected, admitted, banned lately or kept away, with their standing."""
    view, linked = daemon.driver.node.view(), daemon.edges.connections.linked
    known = {each.peer: each for each in view.standings()}
    admitted = (peer for peer in known if peer in view.state.place)
    everyone = sorted({*linked, *admitted, *view.state.bans[-BANNED_TOLD:], *view.kept_away})
    peers = [_peer(daemon, peer, known.get(peer)) for peer in everyone if peer != view.me]
    return PeerList(peers=peers, me=_peer(daemon, view.me, known.get(view.me)))


def _peer(daemon: Running, peer: bytes, seen: PeerView | None) -> Peer:
    view, connections = daemon.driver.node.view(), daemon.edges.connections
    is_me = peer == view.me
    if is_me:
        addresses = daemon.edges.transport.addresses()
    else:
        addresses = list(connections.known[peer].addresses) if peer in connections.known else []
    record = daemon.records.peers.by_key.get(peer) or PeerRecord(peer=peer)
    place = view.state.place.get(peer)
    conduct = None if place is None else view.state.admitted[place].conduct
    now = {
        "standing": conduct.tier.name.lower().replace("_", " ") if conduct else "",
        "audits_passed": round(conduct.credit / CREDIT, 2) if conduct else 0.0,
        "doubt": round(conduct.doubt / DOUBT, 2) if conduct else 0.0,
        "addresses": addresses,
        "address_kind": kind_of_address(addresses[0]) if addresses else "unknown",
        "latency_seconds": None if is_me else connections.latency(peer),
        "is_connected": is_me or peer in connections.linked,
        "is_member": peer in view.state.members,
        "is_admitted": peer in view.state.place,
        "ban": ban_of(daemon, peer) if peer in view.state.banned else "",
        "points": round(seen.points, 2) if seen else 0.0,
        "is_greylisted": seen.is_greylisted if seen else False,
        "observed": dict(seen.observed) if seen else {},
    }
    return Peer(**record.row | now)


def ban_of(daemon: Running, key: bytes) -> str:
    """Returns why a key was banned, as far as it was seen here."""
    record = daemon.records.peers.by_key.get(key)
    return (record and record.ban) or BAN_UNKNOWN


def rounds_of(daemon: Running, last: int) -> list[RoundRecord]:
    """Returns the last rounds applied here, the newest last; fewer if they have very many contributors."""
    found: deque[RoundRecord] = deque()
    room = CONTRIBUTORS_TOLD
    for record in reversed(daemon.records.last(last)):
        room -= len(record.contributors)
        if room < 0 and found:
            break
        found.appendleft(record)
    return [*found]
