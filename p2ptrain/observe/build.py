"""Builds the schema's models from the core's view of the node and the counters of its edges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

from p2ptrain import __version__
from p2ptrain.config import RunConfig
from p2ptrain.core.audits import CLEAN, CREDIT, DOUBT, HARM, Tier
from p2ptrain.core.complaints import Code, Complaint, by_gravity, complaint
from p2ptrain.core.messages import KEY_BYTES
from p2ptrain.core.view import PeerView
from p2ptrain.identity import peer_id_of
from p2ptrain.net import questions
from p2ptrain.net.addresses import Reach, kind_of_address
from p2ptrain.node.agenda import Agenda
from p2ptrain.node.clock import ClockWatch, Lag
from p2ptrain.node.driver import Driver
from p2ptrain.node.edges import Edges
from p2ptrain.node.limits import MachineLimits
from p2ptrain.observe import schema
from p2ptrain.observe.attention import BEFORE, LATELY, looked_at, spike_of
from p2ptrain.observe.rounds import HELD_OUT, Recorder, copied, held_out_of
from p2ptrain.train.private import Privacy

SPIKE_ROUNDS = LATELY + BEFORE
ROOTS_TOLD = 32  # rounds: a program that compares nodes asks more often than once in so many
BANNED_TOLD = 256  # in the list of peers, the latest
LATELY_ROUNDS = 50  # in which the contributions of each node are counted
SLOW_ROUNDS = 20  # that take nothing of a node which trains: it is too slow
REACHED_SECONDS = 600.0  # in which AutoNAT finds out whether others can connect
ROOM_BYTES, ROOM_STATES = 10**9, 4  # on the disk: as in deploy/prometheus/alerts.yml
CONTRIBUTORS_TOLD = 20_000  # in all rounds of one answer: 1.2 MB
# Kinds of blobs (net/blobs/blob.py) by purpose.
BLOB_PURPOSES: dict[schema.Purpose, tuple[str, ...]] = {
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
    clock: ClockWatch
    agenda: Agenda
    http: str | None
    owner: str
    lag: Lag

    @property
    def uptime(self) -> float: ...

    @property
    def since_applied(self) -> float | None: ...


def status_of(daemon: Running) -> schema.Status:
    driver, edges, records = daemon.driver, daemon.edges, daemon.records
    view, worker, figures = driver.node.view(), driver.worker, driver.worker.figures
    upstream, k = worker.upstream, figures.k or daemon.run.recipe.ks[0]
    payload_bytes = KEY_BYTES + worker.replica.outer.sizes[k]
    state, roots, roster, decided = view.state, view.roots, view.state.roster, view.state.succession.decided
    speed, complaints = figures.tokens_per_second, complaints_of(daemon)
    swarm = None if speed is None else records.swarm_tokens_per_second  # the others' scripts have loaders, too
    return schema.Status(
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
        compression_ratio=round(worker.replica.gradient_bytes / payload_bytes * daemon.run.recipe.local_steps, 1),
        tokens_per_second=None if speed is None else round(speed, 1),
        training_seconds=round(figures.seconds, 3),
        swarm_tokens_per_second=None if swarm is None else round(swarm, 1),
        world_round=upstream.round if upstream else None,
        device=str(worker.device),
        ranks=list(figures.ranks),
        is_paused=bool(driver.trainings.pauses),
        peers=sorted(peer_id_of(peer) for peer in edges.connections.linked),
        roster=[peer_id_of(key) for key in state.members],
        quorum=roster.quorum,
        fault_tolerance=schema.FaultTolerance(
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
        unaudited=daemon.run.why_not_audited,
        audits=driver.audits.done,
        audit_seconds=round(driver.audits.seconds, 3),
        typical_z=state.typical / 1_000 if daemon.run.is_audited else None,
        suspended=sum(entry.conduct.tier is Tier.SUSPENDED for entry in state.admitted),
        motions=[daemon.agenda.item(motion) for motion in state.succession.motions],
        successor=decided and daemon.agenda.item(decided),
        ends_after_round=decided and decided.last,
        own_data=_own_data_text(daemon.run, worker.privacy),
        privacy_epsilon=worker.privacy.spent if worker.privacy else None,
        roots={str(number): root.hex() for number, root in sorted(roots.items())[-ROOTS_TOLD:]},
        k=k,
        payload_bytes=payload_bytes,
        **copied(worker.replica, "state_bytes", "update_norm"),
        bytes=edges.transport.counters(),
        traffic=traffic_of(edges),
        limits=daemon.machine_limits.limits,
        queued_frames=edges.mailboxes.queued_frames,
        disk_free_bytes=edges.persistence.free_bytes,
        counters=view.counters
        | dict(driver.intake.counters)
        | edges.mailboxes.counters
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
    kept = [number for number, _ in daemon.edges.served_blobs.states.places()]
    possible = [
        *(complaint(code, why=why) for code, why in disk.items() if why),
        machine_limits.over_memory,
        *daemon.edges.transport.boundary.complaints,
        spike_of(daemon.records.last(SPIKE_ROUNDS), kept),
        daemon.clock.complaint,
        _room_complaint(daemon),
        _pace_complaint(daemon),
        complaint(Code.BEHIND_ROUTER) if _is_behind_router(daemon) else None,
        *driver.node.view().complaints,
        *driver.trainings.pauses,
        *driver.worker.complaints,
    ]
    return by_gravity(filter(None, possible))


def _room_complaint(daemon: Running) -> Complaint | None:
    free = daemon.edges.persistence.free_bytes
    least = ROOM_BYTES + ROOM_STATES * daemon.driver.worker.replica.state_bytes
    return None if free is None or free >= least else complaint(Code.DISK_LOW, free_bytes=free)


def _pace_complaint(daemon: Running) -> Complaint | None:
    """A node that trained long ago, and of which no round has taken anything since."""
    view, records = daemon.driver.node.view(), daemon.records.last(SLOW_ROUNDS)
    place = view.state.place.get(view.me)
    if place is None or len(records) < SLOW_ROUNDS or records[0].round <= view.state.admitted[place].since:
        return None
    is_missed = not any(each.mine_taken for each in records) and not daemon.driver.trainings.pauses
    has_trained = any(each.tokens for each in records[: SLOW_ROUNDS // 2])
    return complaint(Code.TOO_SLOW, rounds=SLOW_ROUNDS) if is_missed and has_trained else None


def _is_behind_router(daemon: Running) -> bool:
    """Whether peers are elsewhere on the internet, and none of our addresses has been found to be open to it."""
    connections, kinds = daemon.edges.connections, map(kind_of_address, daemon.edges.transport.addresses())
    is_outside = any(connections.met.get(peer) is Reach.PUBLIC for peer in connections.linked)
    return is_outside and daemon.uptime >= REACHED_SECONDS and not {"public", "name"} & {*kinds}


def unreadiness_of(daemon: Running) -> list[str]:
    """Returns why the node does not take part fully; empty if it does."""
    return [each.text for each in complaints_of(daemon) if each.hinders]


def traffic_of(edges: Edges) -> dict[schema.Purpose, schema.Traffic]:
    """Returns the bytes sent and received by purpose: the transport's counts by protocol, divided by content."""
    counted, blobs = edges.transport.counters(), edges.blob_bytes()

    def bytes_of(way: str) -> dict[schema.Purpose, int]:
        histories = edges.mailboxes.history_bytes[way]
        found: dict[schema.Purpose, int] = {
            "gossip": counted.get(f"{way} gossip", 0),
            "messages": max(0, counted.get(f"{way} {edges.mailboxes.protocol}", 0) - histories),
            "histories": histories,
            **{purpose: sum(blobs[f"{way} {kind}"] for kind in kinds) for purpose, kinds in BLOB_PURPOSES.items()},
            "questions": counted.get(f"{way} {questions.PROTOCOL}", 0),
        }
        return {**found, "other": max(0, counted.get(f"bytes {way}", 0) - sum(found.values()))}

    sent, received = map(bytes_of, WAYS)
    return {purpose: schema.Traffic(sent=sent[purpose], received=received[purpose]) for purpose in sent}


def peers_of(daemon: Running) -> schema.PeerList:
    """Describes the peers that are connected, admitted, banned lately or kept away, those to look at first."""
    view, linked = daemon.driver.node.view(), daemon.edges.connections.linked
    known = {each.peer: each for each in view.standings()}
    admitted = (peer for peer in known if peer in view.state.place)
    everyone = sorted({*linked, *admitted, *view.state.bans[-BANNED_TOLD:], *view.kept_away})
    lately = [each for each in daemon.records.last(LATELY_ROUNDS) if each.branch == view.state.branch]
    taken = Counter(key for each in lately for key in {*each.contributors})
    told = {peer: _peer(daemon, peer, known.get(peer), lately, taken[peer]) for peer in (*everyone, view.me)}
    me = told.pop(view.me)
    return looked_at(told.values(), me, complaints_of(daemon))


def _peer(
    daemon: Running, peer: bytes, seen: PeerView | None, lately: Sequence[schema.RoundRecord], taken_lately: int
) -> schema.Peer:
    """lately: the last rounds, of which so many have taken a contribution of the peer"""
    view, connections = daemon.driver.node.view(), daemon.edges.connections
    is_me = peer == view.me
    known = connections.known.get(peer)
    addresses = daemon.edges.transport.addresses() if is_me else list(known.addresses) if known else []
    record = daemon.records.peers.by_key.get(peer) or schema.PeerRecord(peer=peer)
    place = view.state.place.get(peer)
    admitted = None if place is None else view.state.admitted[place]
    conduct = admitted.conduct if admitted else CLEAN
    since = sum(each.round > admitted.since for each in lately) if admitted else 0
    now = {
        "standing": conduct.tier.name.lower().replace("_", " ") if admitted else "",
        "audits_passed": round(conduct.credit / CREDIT, 2),
        "doubt": round(conduct.doubt / DOUBT, 2),
        "harm": round(conduct.harm / HARM, 2),
        "muted": conduct.muted if conduct.muted > view.state.round else 0,
        "strikes": conduct.strikes,
        "addresses": addresses,
        "address_kind": kind_of_address(addresses[0]) if addresses else "unknown",
        "release": __version__ if is_me else known.release if known else "",
        "owner": daemon.owner if is_me else known.owner if known else "",
        "latency_seconds": None if is_me else connections.latency(peer),
        "is_connected": is_me or peer in connections.linked,
        "is_member": peer in view.state.members,
        "is_admitted": peer in view.state.place,
        "ban": ban_of(daemon, peer) if peer in view.state.banned else "",
        "points": round(seen.points, 2) if seen else 0.0,
        "is_greylisted": seen.is_greylisted if seen else False,
        "observed": dict(seen.observed) if seen else {},
        "heard_seconds": round(view.silence_of(peer), 3) if admitted else None,
        "rounds_lately": since,
        "taken_lately": min(taken_lately, since),
        "is_elsewhere": view.is_elsewhere(peer),
    }
    return schema.Peer(**record.row | now)


def ban_of(daemon: Running, key: bytes) -> str:
    """Returns why a key was banned, as far as it was seen here."""
    record = daemon.records.peers.by_key.get(key)
    return (record and record.ban) or schema.BAN_UNKNOWN


def rounds_of(daemon: Running, last: int) -> list[schema.RoundRecord]:
    """Returns the last rounds applied here, the newest last; fewer if they have very many contributors."""
    records = daemon.records.last(last)
    sums = accumulate(len(each.contributors) for each in reversed(records))
    return records[-max(1, sum(each <= CONTRIBUTORS_TOLD for each in sums)) :]
