"""The snapshot: where a node stands, as data for people and their tools. It decides nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from p2ptrain.core.complaints import Code, Complaint, by_gravity, complaint
from p2ptrain.core.tally import Tally

if TYPE_CHECKING:
    from p2ptrain.core.node import Node


class Snapshot(Struct, frozen=True):
    """One moment of one node."""

    run_id: bytes
    me: bytes
    branch: bytes
    round: int  # the one that is being worked on
    phase: str  # train, collect, agree, apply
    view: int
    head: bytes
    applied_round: int
    root: bytes
    certified_round: int  # of the newest certified root
    members: tuple[bytes, ...]
    quorum: int
    tolerated: int
    admitted: int
    is_member: bool
    is_admitted: bool
    peers: int
    held: int  # contributions on offer
    waiting_for: int  # contributions that collecting still waits for
    complaints: tuple[Complaint, ...]  # the worst first
    counters: dict[str, int]
    observed: dict[str, int]  # how often each reason (reputation.py) was noted, in this life
    scores: tuple[tuple[bytes, float], ...]  # points against connected peers, the worst first


class Standing(Struct, frozen=True):
    """One peer, or this node itself, as this node has seen it since it began."""

    peer: bytes
    is_connected: bool
    is_member: bool
    is_admitted: bool
    points: float  # against it, now
    is_greylisted: bool
    offered: int  # contributions (tally.py)
    applied: int
    late: int
    refused: dict[str, int]  # by reason
    observed: dict[str, int]  # what the points are for (reputation.py), of earlier starts too


def snapshot_of(node: Node) -> Snapshot:
    """What `Node.snapshot` returns."""
    context, state, here, work = node.context, node.line.state, node.here, node.work
    scores = [(peer, context.reputation.score(peer, context.now)) for peer in context.peers]
    return Snapshot(
        run_id=context.run_id,
        me=context.me,
        branch=state.branch,
        round=here.number,
        phase=phase_of(node),
        view=here.agreement.view,
        head=state.head,
        applied_round=work.applied_round,
        root=work.roots.get(work.applied_round, b""),
        certified_round=state.root_round,
        members=state.members,
        quorum=state.roster.quorum,
        tolerated=state.roster.tolerated,
        admitted=len(state.admitted),
        is_member=here.is_member,
        is_admitted=context.me in state.place,
        peers=len(context.peers),
        held=len(node.parts.offers.by_name),
        waiting_for=len(here.waiting) if here.closed_at is None else 0,
        complaints=tuple(complaints_of(node)),
        counters=dict(sorted(context.counters.items())),
        observed=dict(sorted(context.reputation.counters().items())),
        scores=tuple(sorted(scores, key=lambda pair: (-pair[1], pair[0]))),
    )


def standings_of(node: Node) -> list[Standing]:
    """Everyone who is connected, and who is admitted or was lately."""
    context, state = node.context, node.line.state
    reputation, tallies, seats = context.reputation, context.tallies.by_author, state.roster.seat
    found = []
    for peer in sorted({**context.peers, **tallies}):
        tally, record = tallies.get(peer) or Tally(), reputation.records.get(peer)
        found.append(
            Standing(
                peer=peer,
                is_connected=peer in context.peers,
                is_member=peer in seats,
                is_admitted=peer in state.place,
                points=reputation.score(peer, context.now),
                is_greylisted=reputation.is_greylisted(peer, context.now),
                offered=tally.offered,
                applied=tally.applied,
                late=tally.late,
                refused=dict(tally.refused),
                observed={reason.value: count for reason, count in record.counters.items()} if record else {},
            )
        )
    return found


def phase_of(node: Node) -> str:
    if node.work.applying is not None or node.work.catching is not None:
        return "apply"
    if node.here.closed_at is not None:
        return "agree"
    return "train" if node.work.training is not None else "collect"


def complaints_of(node: Node) -> list[Complaint]:
    """Everything that a person should know of, the worst first."""
    context, state, work = node.context, node.line.state, node.work
    found = {
        Code.HALTED: context.is_halted,
        Code.SPLIT: node.catching_up.is_split,
        Code.BANNED: context.me in state.banned,
        Code.QUARANTINED: work.is_quarantined,
        Code.CATCHING_UP: work.is_astray or node.catching_up.is_behind or work.applied_round + 1 < state.round,
        Code.SILENT: not context.may_speak(state.branch, state.round + 1),
        Code.NOT_ADMITTED: context.me not in state.place,
        Code.NO_PEERS: not context.peers and state.members != (context.me,),
        Code.CRASH_ONLY: state.roster.is_crash_only,
    }
    told = [complaint(code) for code, holds in found.items() if holds]
    told += [each for each in (node.regrouping.complaint, node.trust and node.trust.complaint) if each]
    return by_gravity(told)
