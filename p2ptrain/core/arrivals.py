"""When to stop collecting: how long after a round's start contributions arrive, and whom it is worth waiting for.

Rounds are paced by work, whether it takes a second or ten minutes, so nothing here is a number of seconds. Of each
author the last arrival counts, measured from the start of the round that the contribution was for: one that came
too late counts with its true time. The deadline is the median of the members' arrivals plus a multiple of their median
deviation (Hampel 1974: half of them may be anything). Whom we expect later, or who was silent last time, is not waited
for; so a straggler, or a crash, costs the others nothing. A member that we have never heard is given three times
the median once: too low a bound would let empty rounds tick past every slow contribution.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from p2ptrain.core.messages import ADMITTED_MAX

DEVIATIONS = 4.0  # of normal arrivals one in 140 is later: a median deviation is 0.67 standard deviations
SLACK = 0.25  # of the median, at least: arrivals that all look alike would leave no room for a hiccup
STRANGERS = 3.0  # medians that a member is given of which nothing is known; a guess
STARTS_MAX = 64  # rounds whose start is remembered: a machine 50 times slower still gets its true time
SILENT = float("inf")


class Arrivals:
    """Estimates from what one node saw."""

    def __init__(self) -> None:
        self.starts: dict[int, float] = {}
        self.offsets: dict[bytes, float] = {}
        self.noted: dict[bytes, int] = {}  # the newest round of each: whoever repeats an old message says nothing new

    def begin(self, number: int, now: float) -> None:
        """A round starts."""
        self.starts.setdefault(number, now)
        if len(self.starts) > STARTS_MAX:
            del self.starts[min(self.starts)]

    def note(self, author: bytes, number: int, now: float) -> None:
        """A contribution for a round arrived."""
        if number <= self.noted.get(author, 0):  # the first hearing counts: anybody can say it again later
            return
        self.noted[author] = number
        start = self.starts.get(number)
        if start is not None:
            self.offsets[author] = now - start
        elif number > max(self.starts, default=0):  # we are behind: what we know of it is better than that it was early
            self.offsets.setdefault(author, 0.0)
        else:  # of so long ago that we only know: at least as late
            self.offsets[author] = now - min(self.starts.values())

    def missed(self, author: bytes) -> None:
        """The round closed without this author, for which it had waited."""
        self.offsets[author] = SILENT

    def forget(self, authors: Iterable[bytes]) -> None:
        """Keep only these authors."""
        kept = set(authors)
        self.offsets = {author: offset for author, offset in self.offsets.items() if author in kept}
        self.noted = {author: number for author, number in self.noted.items() if author in kept}

    def patience(self, members: Iterable[bytes]) -> tuple[float | None, float]:
        """How long after a round's start to wait for those we know, and for strangers; None: nothing is known."""
        known = [offset for member in members if (offset := self.offsets.get(member, SILENT)) != SILENT]
        if not known:
            return None, SILENT
        middle = median(known)
        deviation = median(abs(offset - middle) for offset in known)
        usual = min(middle + max(DEVIATIONS * deviation, SLACK * middle), STRANGERS * middle)
        return usual, STRANGERS * middle

    def is_in_time(self, author: bytes, members: Iterable[bytes]) -> bool:
        """Whether it is worth waiting for the next contribution of an author that was heard."""
        usual, _ = self.patience(members)
        return usual is not None and self.offsets.get(author, SILENT) <= usual

    def expected(self, members: Iterable[bytes], others: Iterable[bytes], patience: float) -> set[bytes]:
        """Whom to wait for: who has been in time, and members that we do not know yet."""
        in_time = {key for key in others if self.offsets.get(key, SILENT) <= patience}
        return in_time | {key for key in members if self.offsets.get(key, patience) <= patience}

    def limits(self) -> dict[str, tuple[int, int]]:
        """Sizes and their bounds."""
        return {
            "round starts": (len(self.starts), STARTS_MAX + 1),
            "arrivals": (len(self.offsets), 2 * ADMITTED_MAX),
        }
