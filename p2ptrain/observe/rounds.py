"""Records of the rounds applied by this node: for /rounds, the dashboard and `p2ptrain report`.

Nothing depends on these records. After each event the core's phase is noted, and the time until the next event counts
towards it. When a round is applied, its record is made from the core's view (manifest, certificate, tallies) and from
the changes in the device's and transport's counters. So the four phases of a record add up to the time since the
previous round was applied, and its bytes, tokens and late contributions are those of that time, whichever round they
were meant for.

A round that came with a fetched state has no record. A round that is applied again after a restart keeps its record.
Records are written in batches every few seconds; a kill loses the last few.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import ValidationError

from p2ptrain.config import RunConfig
from p2ptrain.core import events as ev
from p2ptrain.core.claims import HeldOut
from p2ptrain.core.node import Node
from p2ptrain.core.tally import staleness_of
from p2ptrain.errors import DataError
from p2ptrain.node.persistence import Persistence
from p2ptrain.node.work import Worker
from p2ptrain.observe.peer_history import PeerHistory
from p2ptrain.observe.schema import PHASES, Mine, RoundRecord, Stored
from p2ptrain.store.records import Batch, Row, SavedRows, read_rounds

ROUNDS_KEPT = 1_000  # in memory, as many as a page shows; with 1,024 contributors each they take 10 MB
RATE_ROUNDS = 32  # over which the swarm's speed is estimated
PEERS_SECONDS = 60.0  # between writes of peers: in a large swarm all of them change in every round
KEYS_MAX = 4_096  # contributors' keys that rounds share in memory
BYTES = ("bytes_sent", "bytes_received")
HELD_OUT = ("held_out_loss", "held_out_round")

log = logging.getLogger("p2ptrain.observe")


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
        self._kept: deque[RoundRecord] = deque(map(self._slim, RoundRecord.of_rows(past.rounds)), ROUNDS_KEPT)
        self.measured = next((each for each in reversed(self._kept) if each.held_out_round is not None), None)
        self._applied = {each.key for each in self._kept}
        self._hears = hears
        self._phase = ""  # empty until the core has started
        self._at = 0.0
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._before: dict[str, float] = self._counts()
        self._waiting: deque[RoundRecord] = deque(maxlen=ROUNDS_KEPT)  # to be written; the oldest are dropped first
        self._mine_saved = self.mine
        self._peers_saved_at = self._at

    # -----------------------------------------------------------------------------------------------
    # Events

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
        if (event.branch, event.round) in self._applied:
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
        if len(self._kept) == ROUNDS_KEPT:
            self._applied.discard(self._kept[0].key)
        self._kept.append(record)
        self._applied.add(record.key)
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

    # -----------------------------------------------------------------------------------------------
    # Queries

    def last(self, count: int = ROUNDS_KEPT) -> list[RoundRecord]:
        """Returns the last rounds, the newest last. More than ROUNDS_KEPT are read from disk: call it in a thread."""
        kept = [*self._kept]
        if count > len(kept) == ROUNDS_KEPT:
            known = {each.key for each in kept}
            try:
                saved = recorded(self._persistence.store.directory, count)
            except DataError as error:
                log.warning("%s", error)
                saved = []
            kept = [each for each in saved if each.key not in known] + kept
        return kept[-count:] if count > 0 else []

    @property
    def swarm_tokens_per_second(self) -> float | None:
        """The tokens behind the contributions of the last rounds, by their authors' word, over these rounds' time."""
        lately = [*self._kept][-RATE_ROUNDS:]
        seconds = sum(each.seconds for each in lately)
        return sum(each.swarm_tokens for each in lately) / seconds if seconds > 0 else None

    # -----------------------------------------------------------------------------------------------
    # The disk

    async def save(self, *, all_of_it: bool = False) -> None:
        """Writes everything new in one batch; if that fails, it is retried with the next one."""
        rounds = [*self._waiting]
        is_time = all_of_it or self._at - self._peers_saved_at >= PEERS_SECONDS
        peers = self.peers.changed if is_time else []
        mine = self.mine
        if not (rounds or peers or mine != self._mine_saved):
            return
        batch = Batch([*_rows(rounds)], [*_rows(peers)], mine.row)
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


def _rows(records: Iterable[Stored]) -> Iterator[Row]:
    return (each.row for each in records)


def recorded(directory: Path, count: int) -> list[RoundRecord]:
    """Reads the last rounds of the run in this directory, the newest last; its daemon may be running."""
    return [*RoundRecord.of_rows(read_rounds(directory, count))]
