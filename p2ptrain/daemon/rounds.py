"""The rounds that this node has lived, as records for people: /rounds, the dashboard, `p2ptrain report`.

Nothing here decides, and nothing waits for it. After each event it is looked at the phase in which the core stands:
the time until the next event counts towards it. When a round is applied, a record is made of what the core knows of it
(manifest, certificate, tallies) and of the differences in what device and transport count. So the four phases of a
record add up to the time since the round before was applied, and its bytes, tokens and lateness are those of that time,
whichever round they were meant for.

A round that was taken over with a state, and not applied here, has no record. One that a restart applies again keeps
the record that it has. Records are written together every few seconds; a kill costs the last of them.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import msgspec

from p2ptrain.config import RunConfig
from p2ptrain.core import events as ev
from p2ptrain.core.node import Node
from p2ptrain.core.snapshot import Standing
from p2ptrain.daemon.device import Device
from p2ptrain.daemon.keeping import Keeping
from p2ptrain.errors import DataError
from p2ptrain.identity import peer_id_of
from p2ptrain.store.records import PEERS_MAX, Batch, Past, PeerRecord, Points, RoundRecord, read_rounds

ROUNDS_KEPT = 1_000  # in memory: what a page shows; of 1,024 contributors each they take 10 MB
RATE_ROUNDS = 32  # over which the swarm's speed is estimated
PEERS_SECONDS = 60.0  # between writes of peers: in a large swarm all of them have changed with every round
POINTS_STEP = 0.5  # by which points have to grow for a row of their own: ten times late, or once malformed
POINTS_WAITING_MAX = 1_000  # rows that wait for a disk in trouble; then the oldest goes
KEYS_MAX = 4_096  # of contributors that share their memory
PHASES = ("train", "collect", "agree", "apply")

log = logging.getLogger("p2ptrain.daemon")


class Rounds:
    """Of one node."""

    def __init__(
        self,
        run: RunConfig,
        node: Node,
        device: Device,
        keeping: Keeping,
        counters: Callable[[], dict[str, int]],
        bulk: str,
        past: Past,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`counters` are the transport's, of which `bulk` is the protocol of what goes in pieces."""
        self.node, self.device, self.clock = node, device, clock
        self.mine = past.mine
        self.peers = {each.peer: each for each in past.peers}
        self.contribution_tokens = _tokens_of(run)
        self._keeping, self._counters, self._bulk = keeping, counters, bulk
        self._keys: dict[bytes, bytes] = {}
        self._kept: deque[RoundRecord] = deque(map(self._slim, past.rounds), ROUNDS_KEPT)
        self._applied = {(each.branch, each.round) for each in self._kept}
        self.on_round: list[Callable[[RoundRecord], None]] = []  # they hear of each that is new
        self._phase = ""  # empty: the core has not begun
        self._at = 0.0
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._before: dict[str, float] = self._counts()
        self._tallied: dict[bytes, Standing] = {}  # as of the last round
        self._pointed = {each.peer: each.points for each in past.peers}  # points that have a row
        self._waiting: deque[RoundRecord] = deque(maxlen=ROUNDS_KEPT)  # to be written; of more, the oldest go
        self._changed: dict[bytes, None] = {}
        self._points: deque[Points] = deque(maxlen=POINTS_WAITING_MAX)
        self._mine_saved = past.mine
        self._peers_saved_at = self._at

    # -----------------------------------------------------------------------------------------------
    # What happens

    def note(self, now: float, event: ev.Event) -> None:
        """After the core has handled an event."""
        if self._phase:
            self._seconds[self._phase] += now - self._at
        self._at, self._phase = now, self.node.view().phase
        if isinstance(event, ev.Applied):
            self._note_applied(event)

    def note_energy(self, joules: float) -> None:
        """That the device has used since the last time."""
        self.mine = msgspec.structs.replace(self.mine, energy_joules=(self.mine.energy_joules or 0.0) + joules)

    def _note_applied(self, event: ev.Applied) -> None:
        entry = self.node.view().entry(event.round)
        is_ours = entry is not None and entry.manifest.branch == event.branch
        if entry is None or not is_ours or self.node.view().applied_round != event.round:
            return  # of a line that was left meanwhile
        counts, seconds = self._counts(), self._seconds
        since = {name: counts[name] - self._before[name] for name in counts}
        self._before, self._seconds = counts, dict.fromkeys(PHASES, 0.0)
        late, refused = self._note_standings()
        tokens, training = int(since["tokens"]), since["training seconds"]
        self.mine = msgspec.structs.replace(
            self.mine, tokens=self.mine.tokens + tokens, training_seconds=self.mine.training_seconds + training
        )
        if (event.branch, event.round) in self._applied:
            return
        me = self.node.view().me
        record = RoundRecord(
            branch=event.branch,
            round=event.round,
            applied_at=self.clock(),
            root=event.root,
            manifest=entry.manifest.digest,
            contributors=tuple(taken.author for taken in entry.manifest.taken),
            mine_taken=tuple(taken.round for taken in entry.manifest.taken if taken.author == me),
            views=entry.certificate.view + 1,
            train_seconds=seconds["train"],
            collect_seconds=seconds["collect"],
            agree_seconds=seconds["agree"],
            apply_seconds=seconds["apply"],
            bytes_sent=int(since["sent"]),
            bytes_received=int(since["received"]),
            bulk_bytes_sent=int(since["bulk sent"]),
            bulk_bytes_received=int(since["bulk received"]),
            loss=self.device.loss if tokens else None,
            tokens=tokens,
            tokens_per_second=tokens / training if training > 0 else 0.0,
            late=late,
            refused=dict(refused),
        )
        self._keep(self._slim(record))

    def _keep(self, record: RoundRecord) -> None:
        if len(self._kept) == ROUNDS_KEPT:
            self._applied.discard((self._kept[0].branch, self._kept[0].round))
        self._kept.append(record)
        self._applied.add((record.branch, record.round))
        self._waiting.append(record)
        for hears in self.on_round:
            hears(record)

    def _counts(self) -> dict[str, float]:
        traffic, bulk = self._counters(), self._bulk
        return {
            "sent": traffic.get("bytes sent", 0),
            "received": traffic.get("bytes received", 0),
            "bulk sent": traffic.get(f"sent {bulk}", 0),
            "bulk received": traffic.get(f"received {bulk}", 0),
            "tokens": self.device.tokens,
            "training seconds": self.device.training_seconds,
        }

    def _slim(self, record: RoundRecord) -> RoundRecord:
        """Its keys once in memory, and not once for each round."""
        if len(self._keys) > KEYS_MAX:
            self._keys.clear()
        shared = tuple(self._keys.setdefault(key, key) for key in record.contributors)
        return msgspec.structs.replace(record, contributors=shared)

    # -----------------------------------------------------------------------------------------------
    # Peers

    def _note_standings(self) -> tuple[int, Counter[str]]:
        """Add what peers have done since the last round: contributions that were late, and those refused, by reason."""
        before, self._tallied = self._tallied, {each.peer: each for each in self.node.view().standings()}
        late, refused = 0, Counter[str]()
        for now in self._tallied.values():
            was = before.get(now.peer)
            if was is None or _is_forgotten(now, was):
                was = _nobody(now.peer)
            if _facts(was) != _facts(now):
                more = Counter(now.refused)
                more.subtract(was.refused)
                self._add(now, was, +more)
                late += now.late - was.late
                refused += more
        return late, refused

    def _add(self, now: Standing, was: Standing, refused: Counter[str]) -> None:
        known = self.peers.get(now.peer) or PeerRecord(now.peer)
        applied = now.applied - was.applied
        record = PeerRecord(
            peer=now.peer,
            changed_at=self.clock(),
            offered=known.offered + now.offered - was.offered,
            applied=known.applied + applied,
            late=known.late + now.late - was.late,
            refused=dict(refused + Counter(known.refused)),
            observed=now.observed,  # which the core itself keeps over a restart
            points=now.points,
        )
        if _facts(record) != _facts(known):
            self._keep_peer(record)
        is_mine = now.peer == self.node.view().me
        self.mine = msgspec.structs.replace(
            self.mine,
            applied=self.mine.applied + applied * is_mine,
            applied_of_all=self.mine.applied_of_all + applied,
        )

    def _keep_peer(self, record: PeerRecord) -> None:
        self.peers.pop(record.peer, None)  # so that the longest unchanged is the first
        self.peers[record.peer] = record
        self._changed[record.peer] = None
        if len(self.peers) > PEERS_MAX:
            oldest = next(iter(self.peers))
            del self.peers[oldest]
            self._changed.pop(oldest, None)
            self._pointed.pop(oldest, None)
        if record.points - self._pointed.get(record.peer, 0.0) >= POINTS_STEP:
            self._points.append(Points(record.peer, record.changed_at, record.points, record.observed))
            self._pointed[record.peer] = record.points
        elif record.points < self._pointed.get(record.peer, 0.0):
            self._pointed[record.peer] = record.points  # they have decayed, and may grow again

    # -----------------------------------------------------------------------------------------------
    # What people see

    def last(self, count: int = ROUNDS_KEPT) -> list[RoundRecord]:
        """The newest last. More than ROUNDS_KEPT are read from the disk: then call it in a thread."""
        kept = [*self._kept]
        if count > len(kept) == ROUNDS_KEPT:
            known = {(each.branch, each.round) for each in kept}
            try:
                saved = read_rounds(self._keeping.store.directory, count)
            except DataError as error:
                log.warning("%s", error)
                saved = []
            kept = [each for each in saved if (each.branch, each.round) not in known] + kept
        return kept[-count:] if count > 0 else []

    @property
    def swarm_tokens_per_second(self) -> float | None:
        """An estimate: what the contributions of the last rounds were trained on, by the time these rounds took.

        Every contribution of a run has the same number of tokens. What was trained and never taken does not count.
        """
        lately = [*self._kept][-RATE_ROUNDS:]
        seconds = sum(each.seconds for each in lately)
        tokens = self.contribution_tokens * sum(len(each.contributors) for each in lately)
        return tokens / seconds if seconds > 0 else None

    # -----------------------------------------------------------------------------------------------
    # The disk

    async def save(self, *, all_of_it: bool = False) -> None:
        """Write what is new, in one go; what the disk does not take waits for the next time."""
        rounds, points = [*self._waiting], [*self._points]
        is_time = all_of_it or self._at - self._peers_saved_at >= PEERS_SECONDS
        peers = [self.peers[peer] for peer in self._changed] if is_time else []
        mine = self.mine
        if not (rounds or points or peers or mine != self._mine_saved):
            return
        if not await self._keeping.record(Batch(rounds, peers, points, mine)):
            return
        written = {id(each) for each in (*rounds, *points)}
        self._waiting = deque((each for each in self._waiting if id(each) not in written), ROUNDS_KEPT)
        self._points = deque((each for each in self._points if id(each) not in written), POINTS_WAITING_MAX)
        for each in peers:
            if self.peers.get(each.peer) is each:
                del self._changed[each.peer]
        self._mine_saved = mine
        if is_time:
            self._peers_saved_at = self._at


def _tokens_of(run: RunConfig) -> int:
    """Of one contribution."""
    recipe = run.recipe
    return recipe.local_steps * recipe.passes_per_step * recipe.sequences_per_pass * run.model.sequence_length


def _nobody(peer: bytes) -> Standing:
    """Before it did anything."""
    return Standing(peer, False, False, False, 0.0, False, 0, 0, 0, {}, {})


def _is_forgotten(now: Standing, was: Standing) -> bool:
    """The core has let go of what it had counted, since it tallies only so many (core/tally.py), and counts anew."""
    return now.offered < was.offered or now.applied < was.applied or now.late < was.late


def _facts(each: Standing | PeerRecord) -> tuple[Any, ...]:
    """What it has done; that its points decay, or that it comes and goes, is nothing of the kind."""
    return each.offered, each.applied, each.late, each.refused, each.observed


def told(record: RoundRecord) -> dict[str, Any]:
    """A record as plain data for JSON: digests as hexadecimal digits, peers by their ids.

    Records of earlier releases may count less than none late: what the core had forgotten was subtracted.
    """
    names = {"branch": record.branch, "root": record.root, "manifest": record.manifest}
    return (
        msgspec.structs.asdict(record)
        | {"late": max(0, record.late)}
        | {name: value.hex() for name, value in names.items()}
        | {"contributors": [peer_id_of(key) for key in record.contributors], "mine_taken": [*record.mine_taken]}
    )
