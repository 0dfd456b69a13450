"""Records of what peers have done, over all starts of this node.

The core's tallies restart with the process, and for peers that it has forgotten meanwhile; here the differences are
added up. The records are written together with those of rounds (rounds.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from p2ptrain.core.view import PeerView
from p2ptrain.observe.schema import PeerRecord
from p2ptrain.store.records import PEERS_MAX, Row

MEASURED = ("arrival_seconds", "tokens_per_second", "staleness")  # of each contribution
NEWEST_SHARE = 1 / 8  # of the newest value in a moving average: a machine that became slow shows within ten rounds


@dataclass(slots=True)
class ContributionCounts:
    """The contributions of all peers since the last look."""

    late: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by reason
    applied: Counter[bytes] = field(default_factory=Counter)  # by peer


class PeerHistory:
    """Adds up what each peer has done, as records for the disk."""

    def __init__(self, past: Iterable[Row]) -> None:
        self.by_key = {each.peer: each for each in PeerRecord.of_rows(past)}  # the longest unchanged first
        self._changed: dict[bytes, None] = {}
        self._before: dict[bytes, PeerView] = {}  # as of the last look

    @property
    def changed(self) -> list[PeerRecord]:
        return [self.by_key[peer] for peer in self._changed]

    def look(self, standings: Iterable[PeerView], now: float, step_tokens: int = 0) -> ContributionCounts:
        """Adds what the core has tallied since the last look, and returns it.

        step_tokens: tokens of a step; 0: not known
        """
        before, self._before = self._before, {each.peer: each for each in standings}
        contributions = ContributionCounts()
        for each in self._before.values():
            was = before.get(each.peer)
            if was is None or _is_forgotten(each, was):
                was = _nobody(each.peer)
            if _facts(was) != _facts(each):
                refused = Counter(each.refused)
                refused.subtract(was.refused)
                contributions.refused += +refused
                contributions.late += each.late - was.late
                contributions.applied[each.peer] += each.applied - was.applied
                self._add(each, was, +refused, now, step_tokens)
        return contributions

    def _add(self, each: PeerView, was: PeerView, refused: Counter[str], now: float, step_tokens: int) -> None:
        took, known = each.arrival_seconds, self.by_key.get(each.peer) or PeerRecord(peer=each.peer)
        seen: dict[str, float | None] = {}
        if (each.offered, each.late) != (was.offered, was.late) and took is not None:
            seen["arrival_seconds"] = round(took, 3)
            seen["tokens_per_second"] = round(each.steps * step_tokens / took, 1) if each.steps * step_tokens else None
        if each.applied != was.applied:
            seen["staleness"] = each.staleness
        record = PeerRecord(
            peer=each.peer,
            changed_at=now,
            offered=known.offered + each.offered - was.offered,
            applied=known.applied + each.applied - was.applied,
            late=known.late + each.late - was.late,
            refused=dict(refused + Counter(known.refused)),
            observed=each.observed,  # kept over restarts by the core itself
            points=each.points,
            ban=each.ban or known.ban,
            **{name: seen.get(name, getattr(known, name)) for name in MEASURED},
            **{f"{name}_mean": _averaged(getattr(known, f"{name}_mean"), seen.get(name)) for name in MEASURED},
        )
        if _facts(record) != _facts(known):
            self._keep(record)

    def _keep(self, record: PeerRecord) -> None:
        self.by_key.pop(record.peer, None)  # so that the longest unchanged is the first
        self.by_key[record.peer] = record
        self._changed[record.peer] = None
        if len(self.by_key) > PEERS_MAX:
            oldest = next(iter(self.by_key))
            del self.by_key[oldest]
            self._changed.pop(oldest, None)

    def written(self, peers: Iterable[PeerRecord]) -> None:
        """Forgets what is on the disk now; later changes stay to be written."""
        for each in peers:
            if self.by_key.get(each.peer) is each:
                del self._changed[each.peer]


def _averaged(mean: float | None, value: float | None) -> float | None:
    """Returns a moving average with another value, if there is one."""
    if mean is None or value is None:
        return value if mean is None else mean
    return round(mean + NEWEST_SHARE * (value - mean), 3)


def _nobody(peer: bytes) -> PeerView:
    """The view of a peer that has done nothing yet."""
    return PeerView(peer, 0.0, False, 0, 0, 0, {}, {})


def _is_forgotten(now: PeerView, was: PeerView) -> bool:
    """True if the core has dropped its tally of this peer, because these are bounded (core/tally.py), and restarted."""
    return now.offered < was.offered or now.applied < was.applied or now.late < was.late


def _facts(each: PeerView | PeerRecord) -> tuple[Any, ...]:
    """The peer's contributions, without what changes by itself: points decay, and peers come and go."""
    return each.offered, each.applied, each.late, each.refused, each.observed, each.ban
