"""Attention: where a person should look first in a swarm, by one node: reasons by node, and the few that cost most.

A node that is silent counts as in core/regroup.py. The other bounds are guesses, wide enough that equal machines on
home lines raise nothing. Speeds are what nodes claim.

A training that goes wrong shows as a spike in the records of the last rounds: the swarm's loss, the norm of the agreed
update and that of this node's gradients, which a step clips, are compared with those of the rounds before, by medians
and by how far these usually lie apart, so that one liar's claim moves nothing and a loss that is noisy by nature is
none. The complaint names the motion that would undo it. Nothing is rolled back by itself: members decide."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

from p2ptrain.core.complaints import Code, Complaint, Concern, complaint
from p2ptrain.core.regroup import HEARD_SECONDS
from p2ptrain.observe.schema import Peer, PeerList, RoundRecord
from p2ptrain.visible import duration, few

CONCERNS_MAX = 5  # what fits into a glance
NAMED = 4  # nodes in the text of one
TAIL = 8  # characters of a peer's id: all begin alike
SPEEDS_LEAST = 3  # nodes of known speed: two say nothing of each other
ROUNDS_LEAST = 10  # since a node was admitted: fewer say nothing of what it misses
MISSED = 0.5  # of these rounds: machines that take three rounds for a contribution are worth a look
SLOWER = 4.0  # times than the median
WORK = 0.5  # of the swarm's tokens/s by one node
DELAY = 3.0  # rounds: the mean of contributions that are taken
SWARM = (Code.HALTED, Code.SPLIT, Code.STALLED, Code.FEW_HEARD, Code.SPIKE, Code.QUORUM_NEAR)  # no single node's
LOOKS = (  # title and next step, by what they cost the run; `_reasons` has these in the same order
    ("on another branch of the run", "Branches settle by themselves which goes on, unless a node says `split`. Compare "
     "`head` in `p2ptrain status --json` of both sides."),
    ("with a seat and not heard", "Ask the owners whether the machine runs and is online. A seat that stays silent is "
     "lost after some rounds; until then the quorum counts it."),
    ("whose work does not count", "`p2ptrain status` tells its owner why. Suspect the memory, overclocking and changed "
     "code first."),
    ("whose contributions are missed", "Ask the owners whether training is paused, and how fast machine and line are. "
     "A lower `limits.k_max` makes contributions smaller."),
    ("with most of the swarm's speed", "If it leaves, the run is slower by as much. Ask its owner how long it stays."),
    ("far slower than the median", "Nobody waits for it. If its owner did not expect that, other programs or `limit "
     "--percent` take its time."),
    ("with very old contributions", "It takes many rounds for one. A lower `agreement.staleness_rounds_max` leaves "
     "those out: `p2ptrain propose`."),
    ("on trial", "Newcomers to an open run: members measure whether they train. It takes a few audits."),
)  # fmt: skip
LATELY, BEFORE = 5, 40  # rounds that are compared with those before them
BEFORE_LEAST = 15  # of these: fewer say nothing
LOSS_RISE, SPREADS = 0.15, 6.0  # nats, and times the usual distance from the median, that are no noise
NORMS = {"update_norm": "updates", "gradient_norm": "gradients here, before a step clips them,"}
NORM_TIMES = 8.0  # a rise of a norm that is none either: rates that warm up double that of updates within such a time


def _reasons(peer: Peer, speeds: Sequence[float]) -> list[str]:
    """Returns the words for each of LOOKS, empty where it does not hold.

    speeds: those of all nodes, if enough are known"""
    silent = (peer.heard_seconds or 0.0) if peer.is_member else 0.0
    rounds, missed = peer.rounds_lately, peer.rounds_lately - peer.taken_lately
    speed, delay = (peer.tokens_per_second_mean or 0.0) if speeds else 0.0, peer.staleness_mean or 0.0
    share, times = (speed / sum(speeds), median(speeds) / speed) if speed else (0.0, 0.0)
    conduct = "kept away" if peer.is_greylisted else ""
    found = [
        "on another branch" * peer.is_elsewhere,
        f"silent for {duration(silent)}" * (silent >= HEARD_SECONDS),
        peer.standing if peer.standing in {"suspended", "expelled"} else conduct,
        f"missed {missed} of {rounds}" * (rounds >= ROUNDS_LEAST and missed >= MISSED * rounds),
        f"does {share:.0%} of the work" * (share > WORK),
        f"{times:.0f} times slower" * (times >= SLOWER),
        f"{delay:.1f} rounds of delay" * (delay >= DELAY),
        "on trial" * (peer.standing == "on trial"),
    ]
    return found if peer.is_admitted else [""] * len(LOOKS)


def looked_at(peers: Iterable[Peer], me: Peer, complaints: Iterable[Complaint] = ()) -> PeerList:
    """Returns the nodes with the reasons to look at each, the worst first, and the concerns that follow.

    complaints: of this node; those about the swarm come first"""
    peers = [*peers]
    speeds = [each.tokens_per_second_mean or 0.0 for each in (*peers, me) if each.is_admitted]
    speeds = [*filter(None, speeds)] if sum(map(bool, speeds)) >= SPEEDS_LEAST else []
    found = [Concern(text=each.text, advice=each.advice, peers=[]) for each in complaints if each.code in SWARM]
    whose: list[list[str]] = [[] for _ in LOOKS]
    ranked = []
    for peer in (*peers, me):
        words = _reasons(peer, speeds)
        first = next((number for number, word in enumerate(words) if word), len(LOOKS))
        if first < len(LOOKS):
            whose[first].append(peer.peer_id)
        rank = (first, -peer.points, not peer.is_member, not peer.is_connected, -peer.applied, peer.peer_id)
        ranked.append((rank, peer.model_copy(update={"reasons": [*filter(None, words)]})))
    for (title, advice), ids in zip(LOOKS, whose, strict=True):
        if ids:
            found.append(Concern(text=_named(ids, title, me.peer_id), advice=advice, peers=sorted(ids)))
    told_me = ranked.pop()[1]
    in_order = [peer for _, peer in sorted(ranked, key=lambda each: each[0])]
    return PeerList(concerns=found[:CONCERNS_MAX], peers=in_order, me=told_me)


def _named(ids: Sequence[str], title: str, me: str) -> str:
    names = ", ".join("this one" if each == me else f"…{each[-TAIL:]}" for each in sorted(ids)[:NAMED])
    rest = f" and {len(ids) - NAMED} more" if len(ids) > NAMED else ""
    return f"{few(len(ids), 'node', 'nodes')} {title}: {names}{rest}"


def spike_of(records: Sequence[RoundRecord], kept: Sequence[int]) -> Complaint | None:
    """Returns the complaint about the last rounds, if there is one.

    records: of the last rounds, the newest last; kept: rounds whose weights are here or with a peer, newest first"""
    usual, since = records[:-LATELY][-BEFORE:], records[-LATELY:]
    began = since[0].round if since else 0
    back = next((number for number in kept if number < began), None)
    what = ""
    losses, now = (_known(part, "swarm_loss") for part in (usual, since))
    if len(losses) >= BEFORE_LEAST and len(now) == LATELY:
        middle = median(losses)
        rise = median(now) - middle
        if rise > max(LOSS_RISE, SPREADS * median(abs(each - middle) for each in losses)):
            what = f"the loss rose by {rise:.2f} to {median(now):.3f}"
    for name, norm in NORMS.items():
        norms, now = (_known(part, name) for part in (usual, since))
        are_known = len(norms) >= BEFORE_LEAST and len(now) == LATELY
        if not what and are_known and median(now) > NORM_TIMES * median(norms) > 0:
            what = f"{norm} are {median(now) / median(norms):.0f} times as large as before"
    if not what:
        return None
    way = f"p2ptrain propose --back-to {back}" if back is not None else "p2ptrain agenda"
    return complaint(Code.SPIKE, what=what, round=began, way=way)


def _known(records: Sequence[RoundRecord], name: str) -> list[float]:
    values = (getattr(each, name) for each in records)
    return [math.inf if math.isnan(value) else value for value in values if value is not None]
