"""The read-only view of a node, for everything outside the core. It decides and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from statistics import median_low

from msgspec import Struct

from p2ptrain.core.arrivals import SILENT
from p2ptrain.core.auditing import audit_of
from p2ptrain.core.audits import CLEAN, SUMMONS_ROUNDS, Tier, passes_needed
from p2ptrain.core.complaints import Code, Complaint, by_gravity, complaint
from p2ptrain.core.context import Context
from p2ptrain.core.events import Audit
from p2ptrain.core.history import Entry
from p2ptrain.core.manifest import Manifest
from p2ptrain.core.messages import Announcement
from p2ptrain.core.origin import Descent, origin_of
from p2ptrain.core.participant import Participant
from p2ptrain.core.regroup import HEARD_SECONDS
from p2ptrain.core.state import AgreedState
from p2ptrain.core.tally import UNKNOWN, HeldOut, Tally, TrainingClaims


class PeerView(Struct, frozen=True):
    """Statistics on one peer, or on this node itself, as observed by this node since its start."""

    peer: bytes
    points: float  # against it, at present
    is_greylisted: bool
    offered: int  # contributions (tally.py)
    applied: int
    late: int
    refused: dict[str, int]  # by reason
    observed: dict[str, int]  # the reasons for the points (reputation.py), including earlier starts
    arrival_seconds: float | None = None  # of its last contribution, after its round began; None: unknown, or it missed
    steps: int = 0  # behind that, as it claims
    staleness: int | None = None  # of its contribution that was applied last
    ban: str = ""  # why it was banned (tally.py), if that was seen here


def failed_text(manifests: Iterable[Manifest], key: bytes, since: int) -> str:
    """Names the contribution that a key was suspended for in round `since`, and what all measured, if that is kept."""
    audits = [each for manifest in manifests if manifest.round <= since for each in manifest.audits]
    if not (told := [each for each in audits if each.is_summoned and each.key == key]):
        return "a contribution"
    last = [(each.z, each.strength) for each in told if each.round == told[-1].round]
    z, strength = (median_low(values) / 1_000 for values in zip(*last, strict=True))
    return f"the contribution that round {told[-1].round} took (z {z:.2f}, strength {strength:.2f} in the median)"


class NodeView:
    """A live view: each property reads the node's current state. Before the start, only its identity is available."""

    def __init__(self, context: Context, current: Callable[[], Participant | None]) -> None:
        self._context, self._current = context, current
        self.run, self.run_id, self.me = context.run, context.run_id, context.me

    @property
    def _node(self) -> Participant:
        node = self._current()
        assert node is not None, "only its identity is known before a node starts"
        return node

    @property
    def has_started(self) -> bool:
        return self._current() is not None

    def is_in(self, peer: bytes) -> bool:
        """Whether a peer is admitted, as far as this node knows."""
        node = self._current()  # asked for every message
        return node is not None and peer in node.chain.state.place

    def is_welcome(self, peer: bytes) -> bool:
        """Whether a peer is admitted and not kept away. What it publishes is heard in any case."""
        context = self._context
        return self.is_in(peer) and not context.reputation.is_greylisted(peer, context.now)

    def may_take(self, said: Announcement) -> bool:
        """Whether a contribution of an admitted key may be taken by this round, or by one that follows soon."""
        soon = range(self.state.round + 2, self.state.round + 3 + self.run.agreement.overlap_rounds_max)
        is_soon = said.branch == self.state.branch and said.round in soon
        return is_soon or self.state.may_take(said, self._node.pools.offers.staleness)

    # -- The current round, and the agreed state before it ------------------------------------------

    @property
    def state(self) -> AgreedState:
        return self._node.chain.state

    @property
    def origin(self) -> Descent | None:
        """How the run has ended, for its successor; None before that."""
        return origin_of(self._node.chain, self.run)

    def entry(self, number: int) -> Entry | None:
        return self._node.chain.entry(number)

    @property
    def view(self) -> int:
        """The current view of this round's agreement; 0 is the first."""
        return self._node.here.agreement.view

    @property
    def phase(self) -> str:
        """The current phase: train, collect, agree or apply."""
        work = self._node.work
        if work.applying is not None or work.catching is not None:
            return "apply"
        if self._node.here.closed_at is not None:
            return "agree"
        return "train" if work.training is not None else "collect"

    @property
    def held_out(self) -> HeldOut | None:
        """The newest held-out loss that drawn members have said."""
        return self._node.pools.claims.held_out

    def audit_of(self, number: int, key: bytes) -> Audit | str:
        """Returns the order to measure a contribution as all members do when they are summoned, or why it cannot be."""
        return audit_of(self._node.chain, self.run, number, key, is_summoned=True)

    def silence_of(self, peer: bytes) -> float:
        """Returns for how many seconds an admitted peer was not heard, of those since this node's start."""
        node, now = self._node, self._context.now
        entry = self.state.admitted[self.state.place[peer]]
        there = node.here.began if entry.absent == 0 else node.began  # by the last manifest, perhaps without a seat
        since = max(self._context.heard_at.get(peer, node.began), there)
        return 0.0 if peer == self.me else now - since

    def is_elsewhere(self, peer: bytes) -> bool:
        """Whether a peer was lately on another branch, which this node has not followed or found to lose."""
        branch, _ = self._node.catching_up.ahead.get(peer, (self.state.branch, 0))
        return branch != self.state.branch

    def training_of(self, number: int) -> TrainingClaims:
        """Returns what is claimed of the training behind a round's contributions, as far as it is known here."""
        return self._node.pools.claims.rounds.get(number, UNKNOWN)

    @property
    def held(self) -> int:
        return len(self._node.pools.offers.by_name)

    @property
    def waiting_for(self) -> int:
        here = self._node.here
        return len(here.collecting.waiting) + len(here.collecting.unseated) if here.closed_at is None else 0

    @property
    def payloads(self) -> Collection[bytes]:
        """The digests of payloads that peers may still ask for."""
        return self._node.pools.payloads.held.keys()

    # -- This node ----------------------------------------------------------------------------------

    @property
    def is_member(self) -> bool:
        return self.me in self.state.roster.seat

    @property
    def is_admitted(self) -> bool:
        return self.me in self.state.place

    @property
    def is_quarantined(self) -> bool:
        return self._node.work.is_quarantined

    @property
    def is_stalled(self) -> bool:
        return self._node.regrouping.is_stalled

    @property
    def is_stopping(self) -> bool:
        return self._context.is_stopping

    @property
    def applied_round(self) -> int:
        return self._node.work.applied_round

    @property
    def is_overlapping(self) -> bool:
        return self._node.work.overlap.is_on

    @property
    def exchange_share(self) -> float | None:
        """The share of a round that exchange takes, or would take without overlap; None: no round was timed."""
        return self._node.work.overlap.share

    @property
    def roots(self) -> dict[int, bytes]:
        return dict(self._node.work.roots)

    @property
    def complaints(self) -> list[Complaint]:
        node = self._node
        context, state, work = node.context, node.chain.state, node.work
        found = {
            Code.HALTED: context.voice.is_halted,
            Code.SPLIT: node.catching_up.is_split,
            Code.BANNED: context.me in state.banned,
            Code.QUARANTINED: work.is_quarantined,
            Code.CATCHING_UP: work.is_astray or node.catching_up.is_behind or work.applied_round + 1 < state.round,
            Code.SILENT: not context.voice.may_speak(state.branch, state.round + 1),
            Code.NOT_ADMITTED: context.me not in state.place and not context.is_stopping,
            Code.NO_PEERS: not context.peers and state.members != (context.me,),
            Code.CRASH_ONLY: state.roster.is_crash_only,
        }
        told = [complaint(code) for code, holds in found.items() if holds]
        place = state.place.get(context.me)
        conduct = CLEAN if place is None else state.admitted[place].conduct
        passes = {"passed": len(conduct.passed_by), "needed": passes_needed(state)}
        if conduct.tier is Tier.ON_TRIAL:
            told.append(complaint(Code.ON_TRIAL, **passes))
        elif conduct.tier is not Tier.COUNTED:
            entries = node.chain.entries_after(conduct.since - SUMMONS_ROUNDS - 1)
            what = failed_text((each.manifest for each in entries), context.me, conduct.since)
            told.append(complaint(Code.SUSPENDED, what=what, **passes))
        heard = sum(self.silence_of(key) < HEARD_SECONDS for key in state.members)
        if self.is_member and heard == (quorum := state.roster.quorum) < state.roster.size and not self.is_stalled:
            told.append(complaint(Code.QUORUM_NEAR, heard=heard, members=state.roster.size, quorum=quorum))
        told += [each for each in (node.regrouping.complaint, node.trust and node.trust.complaint) if each]
        return by_gravity(told)

    # -- Counters -----------------------------------------------------------------------------------

    @property
    def counters(self) -> dict[str, int]:
        """Event counts by name since the start."""
        return dict(sorted(self._context.counters.items()))

    @property
    def staleness(self) -> dict[int, int]:
        """How many contributions rounds took since the start, by the rounds between their base and that round."""
        return dict(sorted(self._node.pools.tallies.staleness.items()))

    @property
    def observed(self) -> dict[str, int]:
        """How often each reason (reputation.py) was noted since the start."""
        return dict(sorted(self._context.reputation.noted.items()))

    @property
    def bans(self) -> dict[bytes, str]:
        """The banned keys, the newest last, each with the reason, which is empty if it was not seen here."""
        tallies = self._node.pools.tallies.by_author
        return {key: tallies[key].ban if key in tallies else "" for key in self.state.bans}

    @property
    def kept_away(self) -> dict[bytes, dict[str, int]]:
        """The peers that this node keeps away, with what it has observed of each."""
        reputation, now = self._context.reputation, self._context.now
        return {
            peer: {reason.value: count for reason, count in record.counters.items()}
            for peer, record in reputation.records.items()
            if reputation.is_greylisted(peer, now)
        }

    def standings(self) -> list[PeerView]:
        """Returns the statistics of all peers that are connected, admitted, or were admitted recently."""
        context = self._context
        reputation, tallies = context.reputation, self._node.pools.tallies.by_author
        arrivals = self._node.pools.arrivals
        found = []
        for peer in sorted({**context.peers, **tallies}):
            tally, record = tallies.get(peer) or Tally(), reputation.records.get(peer)
            offset = arrivals.offsets.get(peer)
            found.append(
                PeerView(
                    peer=peer,
                    points=reputation.score(peer, context.now),
                    is_greylisted=reputation.is_greylisted(peer, context.now),
                    offered=tally.offered,
                    applied=tally.applied,
                    late=tally.late,
                    refused=dict(tally.refused),
                    observed={reason.value: count for reason, count in record.counters.items()} if record else {},
                    arrival_seconds=None if offset in {0.0, SILENT} else offset,
                    steps=arrivals.steps.get(peer, 0),
                    staleness=tally.staleness,
                    ban=tally.ban,
                )
            )
        return found
