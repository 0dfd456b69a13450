"""Payloads: which are here, and which are being fetched, from whom.

The driver holds the bytes, fetches one payload from the first source that has it, and says so for every source that
does not. Here it is decided what is wanted and who is asked, and how long to wait before all are asked again.

How long a payload is, and whose, is what an announcement claims, and a liar may announce another's payload with a
false length. So each author's claim is fetched by itself, and none stands in the way of the right one. The digest
covers the length: of what is here it is known, and an announcement with another one has been found to be bad.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from msgspec import Struct

from p2ptrain.core.events import Fetch
from p2ptrain.core.messages import ADMITTED_MAX
from p2ptrain.core.reputation import Reason

if TYPE_CHECKING:
    from p2ptrain.core.context import Context

SOURCES_MAX = 8  # that one fetch tries; the next tries others
RETRY_SECONDS = 1.0  # after all sources have failed; doubles
RETRY_SECONDS_MAX = 30.0
ANSWER_SECONDS = 120.0  # a driver that says nothing for so long is asked again: 100 MB at 1 MB/s
CLAIMS_MAX = ADMITTED_MAX  # of one payload: nobody else may announce
PAYLOADS_MAX = 16 * ADMITTED_MAX  # on offer or certified and not yet applied


class Want(Struct):
    claims: dict[bytes, int]  # by author: how many bytes it says there are, as it said last
    sources: dict[bytes, None]  # who may have it
    is_old: bool = False  # it was agreed on: its author may be gone, and every member has it
    asked: int = 0  # sources that have not answered
    tries: int = 0
    next_at: float = 0.0

    @property
    def is_contested(self) -> bool:
        """Whether some author lies about the length: then who does not have it so has done nothing wrong."""
        return len(set(self.claims.values())) > 1


class Payloads:
    """Of one node."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.held: dict[bytes, bool] = {}  # good or bad
        self.sizes: dict[bytes, int] = {}  # of those, in bytes, where it is known, and of ours
        self.wanted: dict[bytes, Want] = {}
        self.deadline: float | None = None

    def is_good(self, payload: bytes, payload_bytes: int = 0) -> bool:
        """Whether it is here, and of this length if one is given."""
        return self.checked(payload, payload_bytes) is True

    def checked(self, payload: bytes, payload_bytes: int) -> bool | None:
        """Whether what was announced with this length is good; None: it is not here."""
        good = self.held.get(payload)
        size = self.sizes.get(payload, 0)
        is_false = good is True and 0 not in (size, payload_bytes) and size != payload_bytes
        return False if is_false else good

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
            want = self.wanted[payload] = Want({}, {})
        is_new = want.claims.get(author) != payload_bytes and (author in want.claims or len(want.claims) < CLAIMS_MAX)
        if is_new:
            want.claims[author] = payload_bytes
        want.is_old = want.is_old or is_old
        for source in sources:
            if len(want.sources) < 4 * SOURCES_MAX and source != self.context.me:
                want.sources.setdefault(source)
        if want.asked == 0 and want.next_at <= self.context.now:
            self._fetch(payload, want)
        elif is_new:  # beside what is under way, which may be a liar's claim, and without putting off the next try
            want.asked += self._fetch_claim(payload, want, author)

    def add_source(self, payload: bytes, source: bytes) -> None:
        """This peer says that it holds a payload that we lack."""
        want = self.wanted.get(payload)
        if want is not None and len(want.sources) < 4 * SOURCES_MAX and source != self.context.me:
            want.sources.setdefault(source)

    def _fetch(self, payload: bytes, want: Want) -> None:
        want.asked = sum(self._fetch_claim(payload, want, author) for author in want.claims)
        want.tries += 1
        want.next_at = self.context.now + ANSWER_SECONDS
        self._reschedule()

    def _fetch_claim(self, payload: bytes, want: Want, author: bytes) -> int:
        """Fetch what one author has claimed; how many are asked."""
        context = self.context
        others = context.reputation.preferred([peer for peer in want.sources if peer != author], context.now)
        if want.tries:
            start = want.tries * (SOURCES_MAX - 1) % max(1, len(others))
            others = others[start:] + others[:start]
        authors = [author] if author != context.me else []
        sources = tuple((others[: SOURCES_MAX - 1] + authors) if want.is_old else (authors + others)[:SOURCES_MAX])
        context.emit(Fetch(payload, want.claims[author], sources))
        return len(sources)

    def arrived(self, payload: bytes, good: bool, payload_bytes: int = 0) -> bool:
        """It is here; False if it had not been wanted."""
        if self.wanted.pop(payload, None) is None:
            return False
        self._hold(payload, good, payload_bytes)
        self._reschedule()
        return True

    def came_along(self, payload: bytes, good: bool, payload_bytes: int = 0) -> bool:
        """It rode along with its announcement; False if it had not been wanted."""
        want = self.wanted.pop(payload, None)
        self._hold(payload, good, payload_bytes)
        return want is not None

    def mine(self, payload: bytes) -> None:
        self.held[payload] = True

    def _hold(self, payload: bytes, good: bool, payload_bytes: int) -> None:
        self.held[payload] = good
        if payload_bytes:
            self.sizes[payload] = payload_bytes

    def failed(self, payload: bytes, peer: bytes) -> None:
        """A source does not have it, or cannot be reached."""
        want = self.wanted.get(payload)
        if want is None:
            return
        if not want.is_contested:
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
        self.sizes = {payload: size for payload, size in self.sizes.items() if payload in payloads}
        self.wanted = {payload: want for payload, want in self.wanted.items() if payload in payloads}
        self._reschedule()

    def limits(self) -> dict[str, tuple[int, int]]:
        """Sizes and their bounds."""
        return {
            "payloads held": (len(self.held), PAYLOADS_MAX),
            "payloads whose length is known": (len(self.sizes), PAYLOADS_MAX),
            "payloads wanted": (len(self.wanted), PAYLOADS_MAX),
            "sources of a payload": (
                max((len(want.sources) for want in self.wanted.values()), default=0),
                4 * SOURCES_MAX,
            ),
            "claims to a payload": (max((len(want.claims) for want in self.wanted.values()), default=0), CLAIMS_MAX),
        }
