"""Records of the rounds applied by this node, and of what peers have done: for /rounds, /peers and `p2ptrain report`.

Nothing depends on these records. After each event the core's phase is noted, and the time until the next event counts
towards it. When a round is applied, its record is made from the core's view (manifest, certificate, tallies) and from
the changes in the device's and transport's counters.

A round that came with a fetched state has no record. A round that is applied again after a restart keeps its record.
Records are written in batches every five seconds, peers' counts once a minute; up to 1,000 rounds wait in memory while
the disk takes none, and a kill loses the last few.

The core's tallies of peers restart with the process, and for peers that it has forgotten meanwhile; here the
differences are added up, over all starts of this node."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import ValidationError

from p2ptrain.config import RunConfig
from p2ptrain.core import events as ev
from p2ptrain.core.node import Node
from p2ptrain.core.tally import HeldOut, staleness_of
from p2ptrain.core.view import PeerView
from p2ptrain.errors import DataError
from p2ptrain.node.persistence import Persistence
from p2ptrain.node.work import Worker
from p2ptrain.observe.schema import PHASES, Mine, PeerRecord, RoundRecord
from p2ptrain.store.records import PEERS_MAX, Batch, Row, SavedRows, read_rounds

COUNTED = ("offered", "applied", "late")  # fall only if the core had to forget the peer (core/tally.py)
MEASURED = ("arrival_seconds", "tokens_per_second", "staleness")  # of each contribution
NEWEST_SHARE = 1 / 8  # of the newest value in a moving average: a machine that became slow shows within ten rounds
ROUNDS_KEPT = 1_000  # in memory, as many as a page shows; with 1,024 contributors each they take 10 MB
RATE_ROUNDS = 32  # over which the swarm's speed is estimated
PEERS_SECONDS = 60.0  # between writes of peers: in a large swarm all of them change in every round
KEYS_MAX = 4_096  # contributors' keys that rounds share in memory
BYTES = ("bytes_sent", "bytes_received")
HELD_OUT = ("held_out_loss", "held_out_round")

log = logging.getLogger("p2ptrain.observe")


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

        step_tokens: tokens of a step; 0: not known"""
        before, self._before = self._before, {each.peer: each for each in standings}
        contributions = ContributionCounts()
        for each in self._before.values():
            was = before.get(each.peer)
            if was is None or any(getattr(each, name) < getattr(was, name) for name in COUNTED):
                was = PeerView(each.peer, 0.0, False, 0, 0, 0, {}, {})  # has done nothing yet
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
            **{name: getattr(known, name) + getattr(each, name) - getattr(was, name) for name in COUNTED},
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


def _facts(each: PeerView | PeerRecord) -> tuple[Any, ...]:
    """The peer's contributions, without what changes by itself: points decay, and peers come and go."""
    return each.offered, each.applied, each.late, each.refused, each.observed, each.ban


class Recorder:
    """Records each round that the node applies, and keeps the last ones in memory."""

    def __init__(
        self,
        node: Node,
        worker: Worker,
        persistence: Persistence,
        counters: Callable[[], dict[str, int]],
        past: SavedRows,
        clock: Callable[[], float] = time.time,
        hears: Sequence[Callable[[RoundRecord], None]] = (),
    ) -> None:
        """`counters` returns the transport's counts; `hears` are called with each new record."""
        self.node, self.worker, self.clock = node, worker, clock
        self.mine = next(Mine.of_rows([past.mine]), Mine())
        self.peers = PeerHistory(past.peers)
        self.contribution_tokens = tokens_of(node.view().run)
        self._step_tokens = self.contribution_tokens // node.view().run.recipe.local_steps
        self._persistence, self._counters = persistence, counters
        self._keys: dict[bytes, bytes] = {}
        self._kept = {each.key: self._slim(each) for each in RoundRecord.of_rows(past.rounds)}  # the oldest first
        self.measured = next((each for each in reversed(self._kept.values()) if each.held_out_round is not None), None)
        self._hears = hears
        self._phase = ""  # empty until the core has started
        self._at = 0.0
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._before: dict[str, float] = self._counts()
        self._waiting: deque[RoundRecord] = deque(maxlen=ROUNDS_KEPT)  # to be written; the oldest are dropped first
        self._mine_saved = self.mine
        self._peers_saved_at = self._at

    # -- Events -------------------------------------------------------------------------------------

    def note(self, now: float, event: ev.Event) -> None:
        """Called after the core has handled an event."""
        if self._phase:
            self._seconds[self._phase] += now - self._at
        self._at, self._phase = now, self.node.view().phase
        if isinstance(event, ev.Applied):
            try:
                self._note_applied(event)
            except ValidationError as error:  # a bug costs a record, but does not end the node
                log.error("round %d is not recorded: %s", event.round, error)

    def note_energy(self, joules: float) -> None:
        """Adds the energy that the device has used since the last call."""
        self.mine = self.mine.model_copy(update={"energy_joules": (self.mine.energy_joules or 0.0) + joules})

    def _note_applied(self, event: ev.Applied) -> None:
        entry = self.node.view().entry(event.round)
        is_ours = entry is not None and entry.manifest.branch == event.branch
        if entry is None or not is_ours or self.node.view().applied_round != event.round:
            return  # on a branch that was abandoned meanwhile
        counts, seconds = self._counts(), self._seconds
        since = {name: max(0, counts[name] - self._before[name]) for name in counts}
        self._before, self._seconds = counts, dict.fromkeys(PHASES, 0.0)
        view, mine = self.node.view(), self.mine
        step_tokens = 0 if self.worker.figures.tokens_per_second is None else self._step_tokens  # a script's own data
        contributions = self.peers.look(view.standings(), self.clock(), step_tokens)
        training = since["training_seconds"]
        claims, held_out = view.training_of(event.round), view.held_out
        worker, figures, replica = self.worker, self.worker.figures, self.worker.replica
        if held_out is not None and self.measured is not None and held_out.round == self.measured.held_out_round:
            held_out = None  # it is in an earlier record
        sent = sum(taken.payload_bytes for taken in entry.manifest.taken)
        swarm_tokens = claims.steps * step_tokens
        self.mine = Mine(
            tokens=mine.tokens + int(since["tokens"]),
            swarm_tokens=mine.swarm_tokens + swarm_tokens,
            training_seconds=mine.training_seconds + training,
            applied=mine.applied + contributions.applied[view.me],
            applied_of_all=mine.applied_of_all + contributions.applied.total(),
            energy_joules=mine.energy_joules,
        )
        if (event.branch, event.round) in self._kept:
            return
        delays = [staleness_of(taken, entry.manifest) for taken in entry.manifest.taken]
        record = RoundRecord(
            **copied(event, "branch", "round", "root"),
            **{f"{phase}_seconds": seconds[phase] for phase in PHASES},
            **{name: int(since[name]) for name in (*BYTES, "tokens")},
            **held_out_of(held_out),
            **(copied(figures, "loss", "steps", "own_drift", "gradient_norm") if training else {"loss": None}),
            applied_at=self.clock(),
            manifest=entry.manifest.digest,
            contributors=self._shared(taken.author for taken in entry.manifest.taken),
            mine_taken=tuple(taken.round for taken in entry.manifest.taken if taken.author == view.me),
            views=entry.certificate.view + 1,
            swarm_loss=claims.loss,
            swarm_tokens=swarm_tokens,
            swarm_tokens_so_far=self.mine.swarm_tokens,
            tokens_so_far=self.mine.tokens,
            staleness_mean=fmean(delays) if delays else None,
            update_norm=replica.update_norm,
            drift=worker.drift,
            compression_ratio=round(replica.gradient_bytes * claims.steps / sent, 1) if claims.steps else None,
            tokens_per_second=since["tokens"] / training if training > 0 else 0.0,
            late=contributions.late,
            refused=dict(contributions.refused),
        )
        self._keep(record)

    def _keep(self, record: RoundRecord) -> None:
        self._kept[record.key] = record
        if len(self._kept) > ROUNDS_KEPT:
            del self._kept[next(iter(self._kept))]
        if record.held_out_round is not None:
            self.measured = record
        self._waiting.append(record)
        for hears in self._hears:
            hears(record)

    def _counts(self) -> dict[str, float]:
        traffic, figures = self._counters(), self.worker.figures
        counts = {name: traffic.get(name.replace("_", " "), 0) for name in BYTES}
        return counts | {"tokens": figures.tokens, "training_seconds": figures.seconds}

    def _slim(self, record: RoundRecord) -> RoundRecord:
        return record.model_copy(update={"contributors": self._shared(record.contributors)})

    def _shared(self, keys: Iterable[bytes]) -> tuple[bytes, ...]:
        """Shares equal keys in memory between rounds."""
        if len(self._keys) > KEYS_MAX:
            self._keys.clear()
        return tuple(self._keys.setdefault(key, key) for key in keys)

    # -- Queries ------------------------------------------------------------------------------------

    def last(self, count: int = ROUNDS_KEPT) -> list[RoundRecord]:
        """Returns the last rounds, the newest last. More than ROUNDS_KEPT are read from disk: call it in a thread."""
        kept = self._kept.copy()
        if count > len(kept) == ROUNDS_KEPT:
            try:
                saved = recorded(self._persistence.store.directory, count)
                kept = {each.key: each for each in saved} | kept
            except DataError as error:
                log.warning("%s", error)
        return [*kept.values()][-count:] if count > 0 else []

    @property
    def swarm_tokens_per_second(self) -> float | None:
        """The tokens behind the contributions of the last rounds, by their authors' word, over these rounds' time."""
        lately = [*self._kept.values()][-RATE_ROUNDS:]
        seconds = sum(each.seconds for each in lately)
        return sum(each.swarm_tokens for each in lately) / seconds if seconds > 0 else None

    async def save(self, *, all_of_it: bool = False) -> None:
        """Writes everything new in one batch; if that fails, it is retried with the next one."""
        rounds = [*self._waiting]
        is_time = all_of_it or self._at - self._peers_saved_at >= PEERS_SECONDS
        peers = self.peers.changed if is_time else []
        mine = self.mine
        if not (rounds or peers or mine != self._mine_saved):
            return
        batch = Batch([each.row for each in rounds], [each.row for each in peers], mine.row)
        if not await self._persistence.record(batch):
            return
        written = {id(each) for each in rounds}
        self._waiting = deque((each for each in self._waiting if id(each) not in written), ROUNDS_KEPT)
        self.peers.written(peers)
        self._mine_saved = mine
        if is_time:
            self._peers_saved_at = self._at


def copied(source: object, *names: str) -> dict[str, Any]:
    """Returns the fields of a record that `source` has under the same names; none if there is no source."""
    return {} if source is None else {name: getattr(source, name) for name in names}


def held_out_of(told: HeldOut | None) -> dict[str, Any]:
    return {} if told is None else dict(zip(HELD_OUT, (told.loss, told.round), strict=True))


def tokens_of(run: RunConfig) -> int:
    """Returns the number of tokens behind one contribution."""
    return run.recipe.round_sequences * run.model.sequence_length


def recorded(directory: Path, count: int) -> list[RoundRecord]:
    """Reads the last rounds of the run in this directory, the newest last; its daemon may be running."""
    return [*RoundRecord.of_rows(read_rounds(directory, count))]
