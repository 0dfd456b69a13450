"""Payloads: which are here, and which are being fetched, from whom.

The driver holds the bytes, fetches one payload from the first source that has it, and says so for every source that
does not. Here it is decided what is wanted and who is asked, and how long to wait before all are asked again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from msgspec import Struct

from p2ptrain.core.context import Context
from p2ptrain.core.events import Fetch
from p2ptrain.core.messages import ADMITTED_MAX
from p2ptrain.core.reputation import Reason

SOURCES_MAX = 8  # that one fetch tries; the next tries others
RETRY_SECONDS = 1.0  # after all sources have failed; doubles
RETRY_SECONDS_MAX = 30.0
ANSWER_SECONDS = 120.0  # a driver that says nothing for so long is asked again: 100 MB at 1 MB/s
PAYLOADS_MAX = 16 * ADMITTED_MAX  # on offer or certified and not yet applied


class Want(Struct):
    payload_bytes: int
    author: bytes
    sources: dict[bytes, None]  # who may have it
    is_old: bool = False  # it was agreed on: its author may be gone, and every member has it
    asked: int = 0  # sources that have not answered
    tries: int = 0
    next_at: float = 0.0


class Payloads:
    """Of one node."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.held: dict[bytes, bool] = {}  # good or bad
        self.wanted: dict[bytes, Want] = {}
        self.deadline: float | None = None

    def is_good(self, payload: bytes) -> bool:
        return self.held.get(payload, False)

    def want(
        self,
        payload: bytes,
        payload_bytes: int,
        author: bytes,
        sources: Iterable[bytes] = (),
        is_old: bool = False,
    ) -> None:
        """Get this payload, if it is not here. The driver looks into its own store first."""
        if payload in self.held:
            return
        want = self.wanted.get(payload)
        if want is None:
            if len(self.wanted) >= PAYLOADS_MAX:
                return
            want = self.wanted[payload] = Want(payload_bytes, author, {})
        want.is_old = want.is_old or is_old
        for source in sources:
            if len(want.sources) < 4 * SOURCES_MAX and source != self.context.me:
                want.sources.setdefault(source)
        if want.asked == 0 and want.next_at <= self.context.now:
            self._fetch(payload, want)

    def add_source(self, payload: bytes, source: bytes) -> None:
        """This peer says that it holds a payload that we lack."""
        want = self.wanted.get(payload)
        if want is not None and len(want.sources) < 4 * SOURCES_MAX and source != self.context.me:
            want.sources.setdefault(source)

    def _fetch(self, payload: bytes, want: Want) -> None:
        context = self.context
        others = context.reputation.preferred([peer for peer in want.sources if peer != want.author], context.now)
        if want.tries:
            start = want.tries * (SOURCES_MAX - 1) % max(1, len(others))
            others = others[start:] + others[:start]
        authors = [want.author] if want.author != context.me else []
        sources = tuple((others[: SOURCES_MAX - 1] + authors) if want.is_old else (authors + others)[:SOURCES_MAX])
        want.asked, want.tries = len(sources), want.tries + 1
        want.next_at = context.now + ANSWER_SECONDS
        context.emit(Fetch(payload, want.payload_bytes, sources))
        self._reschedule()

    def arrived(self, payload: bytes, good: bool) -> bool:
        """It is here; False if it had not been wanted."""
        if self.wanted.pop(payload, None) is None:
            return False
        self.held[payload] = good
        self._reschedule()
        return True

    def mine(self, payload: bytes) -> None:
        self.held[payload] = True

    def failed(self, payload: bytes, peer: bytes) -> None:
        """A source does not have it, or cannot be reached."""
        want = self.wanted.get(payload)
        if want is None:
            return
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
        """Forget all others."""
        self.held = {payload: good for payload, good in self.held.items() if payload in payloads}
        self.wanted = {payload: want for payload, want in self.wanted.items() if payload in payloads}
        self._reschedule()

    def limits(self) -> dict[str, tuple[int, int]]:
        """Sizes and their bounds."""
        return {
            "payloads held": (len(self.held), PAYLOADS_MAX),
            "payloads wanted": (len(self.wanted), PAYLOADS_MAX),
            "sources of a payload": (
                max((len(want.sources) for want in self.wanted.values()), default=0),
                4 * SOURCES_MAX,
            ),
        }
