"""Payloads: tracks which payloads are here and which are being fetched, and chooses the peers to fetch from.

The driver holds the bytes, fetches a payload from the first source that has it, and reports every source that does not.
This module decides which payloads are wanted, which peers are asked, and when to retry.

An announcement claims a payload's length and author, and a liar may announce somebody else's payload, even with a
false length. So each author's claim is fetched separately, and none of them blocks the right one. The digest covers
length, author and content: for a payload that is here they are known, and announcements with others are bad."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from msgspec import Struct

from p2ptrain.core.context import Context
from p2ptrain.core.events import Fetch
from p2ptrain.core.messages import ADMITTED_MAX, SHORT_BYTES, Announcement
from p2ptrain.core.reputation import Reason

SOURCES_MAX = 8  # sources per fetch; the next fetch tries others
RETRY_SECONDS = 1.0  # after all sources have failed; doubles
RETRY_SECONDS_MAX = 30.0
ANSWER_SECONDS = 120.0  # after this time without a result, the driver is asked again: 100 MB at 1 MB/s
CLAIMS_MAX = ADMITTED_MAX  # per payload: only admitted keys may announce it
PAYLOADS_MAX = 16 * ADMITTED_MAX  # on offer, or certified and not yet applied


class WantedPayload(Struct):
    claims: dict[bytes, int]  # by author: the length in bytes that it claimed last
    sources: dict[bytes, None]  # peers that may have it
    is_old: bool = False  # already agreed on: its author may have gone, but every member has it
    asked: int = 0  # sources that have not answered yet
    tries: int = 0
    next_at: float = 0.0


class HeldPayload(Struct, frozen=True):
    """A payload that is here: whether it was found good, and the fields that its digest covers."""

    is_good: bool
    author: bytes
    payload_bytes: int
    content: bytes


class Payloads:
    def __init__(self, context: Context) -> None:
        self.context = context
        self.held: dict[bytes, HeldPayload] = {}
        self.wanted: dict[bytes, WantedPayload] = {}
        self.deadline: float | None = None

    def is_good(self, payload: bytes) -> bool:
        held = self.held.get(payload)
        return held is not None and held.is_good

    def checked(self, offer: Announcement) -> bool | None:
        """Whether an announced payload is good, and has the announced author, length and content; None if not here."""
        held = self.held.get(offer.payload)
        return None if held is None else held == HeldPayload(True, offer.author, offer.payload_bytes, offer.content)

    def want(
        self, payload: bytes, payload_bytes: int, author: bytes, sources: Iterable[bytes] = (), is_old: bool = False
    ) -> None:
        """Fetches a payload that is not here. The driver looks into its own store first."""
        if payload in self.held:
            return
        want = self.wanted.get(payload)
        if want is None:
            if len(self.wanted) >= PAYLOADS_MAX:
                return
            want = self.wanted[payload] = WantedPayload({}, {})
        is_new = want.claims.get(author) != payload_bytes and (author in want.claims or len(want.claims) < CLAIMS_MAX)
        if is_new:
            want.claims[author] = payload_bytes
        want.is_old = want.is_old or is_old
        for source in sources:
            self.add_source(payload, source)
        if want.asked == 0 and want.next_at <= self.context.now:
            self._fetch(payload, want)
        elif is_new:  # in parallel, as the claim under way may be false; the retry stays scheduled
            want.asked += self._fetch_claim(payload, want, author)

    def add_source(self, payload: bytes, source: bytes) -> None:
        """Notes that a peer says it holds a payload that we lack."""
        want = self.wanted.get(payload)
        if want is not None and len(want.sources) < 4 * SOURCES_MAX and source != self.context.me:
            want.sources.setdefault(source)

    def _fetch(self, payload: bytes, want: WantedPayload) -> None:
        want.asked = sum(self._fetch_claim(payload, want, author) for author in want.claims)
        want.tries += 1
        want.next_at = self.context.now + ANSWER_SECONDS
        self._reschedule()

    def _fetch_claim(self, payload: bytes, want: WantedPayload, author: bytes) -> int:
        """Fetches a payload as one author has announced it, and returns the number of sources."""
        context = self.context
        others = context.reputation.preferred([peer for peer in want.sources if peer != author], context.now)
        if want.tries:
            start = want.tries * (SOURCES_MAX - 1) % max(1, len(others))
            others = others[start:] + others[:start]
        authors = [author] if author != context.me else []
        sources = tuple((others[: SOURCES_MAX - 1] + authors) if want.is_old else (authors + others)[:SOURCES_MAX])
        context.emit(Fetch(payload, want.claims[author], sources))
        return len(sources)

    def arrived(self, payload: bytes, good: bool, author: bytes, payload_bytes: int, content: bytes = b"") -> bool:
        """Records a payload that was fetched; returns False if it was not wanted."""
        if self.wanted.pop(payload, None) is None:
            return False
        self.held[payload] = HeldPayload(good, author, payload_bytes, content or payload[:SHORT_BYTES])
        self._reschedule()
        return True

    def came_along(self, offer: Announcement, good: bool) -> bool:
        """Records a payload that was attached to its announcement; returns False if it was not wanted."""
        self.held[offer.payload] = HeldPayload(good, offer.author, offer.payload_bytes, offer.content)
        return self.wanted.pop(offer.payload, None) is not None

    def failed(self, payload: bytes, peer: bytes) -> None:
        """Records that a source does not have a payload or cannot be reached."""
        want = self.wanted.get(payload)
        if want is None:
            return
        if len(set(want.claims.values())) <= 1:  # if authors disagree about the length, the source is not to blame
            self.context.reputation.note(peer, Reason.UNFETCHABLE, self.context.now)
        want.asked = max(0, want.asked - 1)
        if want.asked == 0:
            wait = min(RETRY_SECONDS * 2.0 ** min(want.tries - 1, 16), RETRY_SECONDS_MAX)
            want.next_at = self.context.now + wait
            self._reschedule()

    def tick(self) -> None:
        if self.deadline is None or self.context.now < self.deadline:
            return
        for payload, want in list(self.wanted.items()):
            if want.next_at <= self.context.now:
                self._fetch(payload, want)
        self._reschedule()

    def _reschedule(self) -> None:
        self.deadline = min((want.next_at for want in self.wanted.values()), default=None)

    def keep(self, payloads: Collection[bytes]) -> None:
        self.held = {payload: held for payload, held in self.held.items() if payload in payloads}
        self.wanted = {payload: want for payload, want in self.wanted.items() if payload in payloads}
        self._reschedule()

    def limits(self) -> dict[str, tuple[int, int]]:
        return {
            "payloads held": (len(self.held), PAYLOADS_MAX),
            "payloads wanted": (len(self.wanted), PAYLOADS_MAX),
            "sources of a payload": (
                max((len(want.sources) for want in self.wanted.values()), default=0),
                4 * SOURCES_MAX,
            ),
            "claims to a payload": (max((len(want.claims) for want in self.wanted.values()), default=0), CLAIMS_MAX),
        }
