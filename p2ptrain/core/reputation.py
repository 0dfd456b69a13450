"""Reputation: records misbehaviour of peers, as proof for everyone or as our own observation.

Equivocation can be proved: two signed announcements, votes or proposals by one author for the same place in the
protocol. Such evidence goes into a manifest, everyone verifies it, and the author is banned. (A payload that q - f
members refuse also gets its author banned, without evidence: see manifest.py.)

Our own observations (late, silent, unfetchable, malformed, flooding) add up to a score that decays, with a counter for
each reason. The score decides which peers we prefer, dial and keep away; it never decides which contributions are
averaged, because no two nodes observe the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import Enum
from math import inf
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from p2ptrain.core import messages as msg
from p2ptrain.errors import DataError, RemoteProtocolError

HALF_LIFE_SECONDS = 3_600.0  # a laptop that slept overnight should not be shunned in the morning; a guess
GREYLISTED_FROM = 20.0  # points; two dozen malformed messages, or a flood that lasts ten seconds
PARDONED_BELOW = 10.0  # points; below the threshold above, so that no peer flips back and forth
BURST = 256.0  # useless messages that cost nothing: a repair answer that crossed with gossip
REFILL_A_SECOND = 16.0
FLOOD_SECONDS = 1.0  # a flood is noted at most once in this time, and who is gone is not sent away again
PEERS_MAX = 4_096
SAVED_BYTES_MAX = 2**20  # 4,096 peers take 600 kB
SCORE_MAX = 1_000.0  # points; whatever a peer did, it may try again after seven quiet hours


class Reason(Enum):
    """Kinds of observed misbehaviour. Their points are guesses: only malformed and flooding imply intent."""

    LATE = "late"
    SILENT = "silent"
    UNFETCHABLE = "unfetchable"
    MALFORMED = "malformed"
    FLOODING = "flooding"


POINTS = {Reason.LATE: 0.05, Reason.SILENT: 0.05, Reason.UNFETCHABLE: 0.1, Reason.MALFORMED: 1.0, Reason.FLOODING: 2.0}
REASONS = tuple(Reason)

# -- Proof ------------------------------------------------------------------------------------------


def conflict(first: msg.Message, second: msg.Message) -> bool:
    """Whether no honest author would have signed both."""
    place = _place(first)
    return place is not None and place == _place(second) and first != second


def _place(message: msg.Message) -> tuple[object, ...] | None:
    """Returns the place in the protocol for which an author signs one message; None for any other kind."""
    match message:
        case msg.Announcement(branch=branch, round=number, author=author):
            return msg.Announcement, branch, number, author
        case msg.Proposal(branch=branch, round=number, view=view, author=author):
            return msg.Proposal, branch, number, view, author
        case msg.Vote(branch=branch, round=number, view=view, ballot=ballot, author=author):
            return msg.Vote, branch, number, view, ballot, author
    return None


def prove(first: bytes, second: bytes) -> msg.Evidence:
    """Builds evidence from two envelopes, without their attachments, which prove nothing."""
    return msg.Evidence(*sorted(map(msg.without_attachment, (first, second))))


def convict(evidence: msg.Evidence, verifier: msg.Verifier) -> bytes:
    """Returns the key that evidence proves guilty; raises RemoteProtocolError if it proves nothing."""
    first, second = msg.decode(evidence.first, verifier), msg.decode(evidence.second, verifier)
    if first.attachment or second.attachment:
        raise RemoteProtocolError("the evidence contains an attachment")
    if not conflict(first.message, second.message):
        raise RemoteProtocolError("an honest author may have signed both messages of the evidence")
    assert isinstance(first.message, msg.Announcement | msg.Proposal | msg.Vote)
    return first.message.author


# -- Observation ------------------------------------------------------------------------------------


class Observations(Struct):
    score: float = 0.0
    at: float = 0.0  # when the score was computed
    is_greylisted: bool = False
    tokens: float = BURST
    tokens_at: float = 0.0
    flood_at: float = -inf  # when a flood was last noted
    sent_away_at: float = -inf  # when it was last disconnected
    counters: dict[Reason, int] = msgspec.field(default_factory=dict)


class SavedRecord(Struct, frozen=True, array_like=True):
    """A record on disk, with ages instead of times, because the clock restarts with the process."""

    key: msg.Key
    score: Annotated[float, Meta(ge=0, le=SCORE_MAX)]
    age: Annotated[float, Meta(ge=0, le=1e12)]
    is_greylisted: bool
    counters: Annotated[tuple[Annotated[int, Meta(ge=0, lt=2**62)], ...], Meta(max_length=len(REASONS))]


_SAVED = msgspec.msgpack.Decoder(Annotated[tuple[SavedRecord, ...], Meta(max_length=PEERS_MAX)])


class Reputation:
    def __init__(self) -> None:
        self.records: dict[bytes, Observations] = {}
        self.noted: Counter[str] = Counter()  # since the start, including peers that were forgotten

    def note(self, peer: bytes, reason: Reason, now: float) -> None:
        record = self._record(peer, now)
        was_greylisted = self._is_greylisted(record, now)
        record.score, record.at = min(self._decayed(record, now) + POINTS[reason], SCORE_MAX), now
        record.counters[reason] = record.counters.get(reason, 0) + 1
        self.noted[reason.value] += 1
        record.is_greylisted = was_greylisted or record.score >= GREYLISTED_FROM

    def score(self, peer: bytes, now: float) -> float:
        """Returns the points against a peer; zero is best."""
        record = self.records.get(peer)
        return self._decayed(record, now) if record else 0.0

    def is_greylisted(self, peer: bytes, now: float) -> bool:
        record = self.records.get(peer)
        return record is not None and self._is_greylisted(record, now)

    def is_to_go(self, peer: bytes, now: float, has_come_back: bool) -> bool:
        """Whether to disconnect a peer now; once is enough, however many of its messages are still queued."""
        record = self.records.get(peer)
        if record is None or not self._is_greylisted(record, now):
            return False
        if not has_come_back and now - record.sent_away_at < FLOOD_SECONDS:
            return False
        record.sent_away_at = now
        return True

    def allow(self, peer: bytes, now: float) -> bool:
        """Counts a useless message of a peer; returns False if it has sent too many."""
        record = self._record(peer, now)
        elapsed = max(0.0, now - record.tokens_at)
        record.tokens = min(BURST, record.tokens + elapsed * REFILL_A_SECOND)
        record.tokens_at = now
        if record.tokens >= 1.0:
            record.tokens -= 1.0
            return True
        if now - record.flood_at >= FLOOD_SECONDS:
            record.flood_at = now
            self.note(peer, Reason.FLOODING, now)
        return False

    def preferred(self, peers: Iterable[bytes], now: float) -> list[bytes]:
        """Sorts peers, the best first; equals keep their order."""
        return sorted(peers, key=lambda peer: (self.is_greylisted(peer, now), round(self.score(peer, now), 3)))

    def _is_greylisted(self, record: Observations, now: float) -> bool:
        return record.is_greylisted and self._decayed(record, now) >= PARDONED_BELOW

    def _decayed(self, record: Observations, now: float) -> float:
        return float(record.score * 0.5 ** (max(0.0, now - record.at) / HALF_LIFE_SECONDS))

    def _record(self, peer: bytes, now: float) -> Observations:
        record = self.records.get(peer)
        if record is None:
            if len(self.records) >= PEERS_MAX:
                self._forget_the_most_harmless(now)
            record = self.records[peer] = Observations(at=now, tokens_at=now)
        return record

    def _forget_the_most_harmless(self, now: float) -> None:
        """Forgets the peers with the best scores: new keys cost nothing, and must not push out bad records."""
        harmless = sorted(self.records, key=lambda peer: (self.is_greylisted(peer, now), self.score(peer, now)))
        for peer in harmless[: PEERS_MAX // 16]:  # many at once, so that a flood of keys does not sort each time
            del self.records[peer]

    def saved(self, now: float) -> bytes:
        records = tuple(
            SavedRecord(
                key,
                record.score,
                max(0.0, now - record.at),
                self._is_greylisted(record, now),
                tuple(record.counters.get(reason, 0) for reason in REASONS),
            )
            for key, record in sorted(self.records.items())
        )
        return msgspec.msgpack.encode(records)

    def restore(self, saved: bytes, now: float) -> None:
        """Restores the output of `saved`; raises DataError if it is damaged."""
        if len(saved) > SAVED_BYTES_MAX:
            raise DataError(f"saved reputation of {len(saved)} bytes; the limit is {SAVED_BYTES_MAX}")
        try:
            records = _SAVED.decode(saved)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DataError(f"saved reputation is damaged: {error}") from error
        for record in records:
            counters = {reason: count for reason, count in zip(REASONS, record.counters, strict=False) if count}
            self.records[record.key] = Observations(
                score=record.score,
                at=now - record.age,
                is_greylisted=record.is_greylisted,
                tokens_at=now,
                counters=counters,
            )

    def limits(self) -> dict[str, tuple[int, int]]:
        return {"peers remembered": (len(self.records), PEERS_MAX)}
