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
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from p2ptrain.config import RunConfig
from p2ptrain.core import events as ev
from p2ptrain.core.node import Node
from p2ptrain.daemon.device import Device
from p2ptrain.daemon.keeping import Keeping
from p2ptrain.daemon.peer_history import PeerHistory
from p2ptrain.errors import DataError
from p2ptrain.identity import peer_id_of
from p2ptrain.store.records import Batch, Past, RoundRecord, read_rounds

ROUNDS_KEPT = 1_000  # in memory: what a page shows; of 1,024 contributors each they take 10 MB
RATE_ROUNDS = 32  # over which the swarm's speed is estimated
PEERS_SECONDS = 60.0  # between writes of peers: in a large swarm all of them have changed with every round
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
        self.peers = PeerHistory(past.peers)
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
        self._waiting: deque[RoundRecord] = deque(maxlen=ROUNDS_KEPT)  # to be written; of more, the oldest go
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
        view, mine = self.node.view(), self.mine
        deeds = self.peers.look(view.standings(), self.clock())
        tokens, training = int(since["tokens"]), since["training seconds"]
        self.mine = msgspec.structs.replace(
            mine,
            tokens=mine.tokens + tokens,
            training_seconds=mine.training_seconds + training,
            applied=mine.applied + deeds.applied[view.me],
            applied_of_all=mine.applied_of_all + deeds.applied.total(),
        )
        if (event.branch, event.round) in self._applied:
            return
        record = RoundRecord(
            branch=event.branch,
            round=event.round,
            applied_at=self.clock(),
            root=event.root,
            manifest=entry.manifest.digest,
            contributors=tuple(taken.author for taken in entry.manifest.taken),
            mine_taken=tuple(taken.round for taken in entry.manifest.taken if taken.author == view.me),
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
            late=deeds.late,
            refused=dict(deeds.refused),
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
        rounds, points = [*self._waiting], [*self.peers.points]
        is_time = all_of_it or self._at - self._peers_saved_at >= PEERS_SECONDS
        peers = self.peers.changed if is_time else []
        mine = self.mine
        if not (rounds or points or peers or mine != self._mine_saved):
            return
        if not await self._keeping.record(Batch(rounds, peers, points, mine)):
            return
        written = {id(each) for each in rounds}
        self._waiting = deque((each for each in self._waiting if id(each) not in written), ROUNDS_KEPT)
        self.peers.written(peers, points)
        self._mine_saved = mine
        if is_time:
            self._peers_saved_at = self._at


def _tokens_of(run: RunConfig) -> int:
    """Of one contribution."""
    recipe = run.recipe
    return recipe.local_steps * recipe.passes_per_step * recipe.sequences_per_pass * run.model.sequence_length


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
