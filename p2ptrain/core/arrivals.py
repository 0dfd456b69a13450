"""Arrival times: estimates how long to collect contributions, and which members to wait for.

Rounds take as long as training does, a second or ten minutes, so nothing here is a fixed number of seconds. The
estimate uses each author's last arrival, measured from the start of the round that the contribution was for; a late
contribution counts with its true time. The deadline is the members' median arrival plus a multiple of the median
absolute deviation (Hampel 1974: up to half of the values may be arbitrary). Members that are expected later, or were
silent last time, are not waited for, so a straggler or a crash costs the others nothing. Nor is anyone who always comes
just before the deadline, if the others would contribute more in that time: one of n makes rounds longer by an eighth
(without a seat not even that) or by 1/n at most.
A member never heard from gets three times the median, once: with less, empty rounds would pass before slow ones.

The pace of a swarm whose machines take fewer local steps where they are slow (pace.py) is the median of the arrivals
that there would have been, had everyone taken all of them; otherwise fewer steps would make the pace faster, and a
faster pace steps fewer. The numbers of steps are claims: less than half of them cannot move a median beyond the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median, median_low

from p2ptrain.core.messages import ADMITTED_MAX
from p2ptrain.core.roster import tolerated_by

DEVIATIONS = 4.0  # one in 140 normal arrivals is later: a median deviation is 0.67 standard deviations
SLACK = 0.25  # of the median, at least: identical arrivals would leave no room for a hiccup
GRACE = SLACK / 2  # of the time of a safe majority: members that take no longer are always waited for
STRANGERS = 3.0  # medians to wait for a member never heard from; a guess
STRETCH_MAX = 16  # times the time of a contribution for the steps that it lacks, however few it claims; a guess
LENGTHS = 3  # rounds, the longest of which tells how long they take lately
STARTS_MAX = 64  # rounds whose start is remembered: a machine 50 times slower still gets its true time
SILENT = float("inf")


class Arrivals:
    def __init__(self) -> None:
        self.starts: dict[int, float] = {}
        self.offsets: dict[bytes, float] = {}
        self.noted: dict[bytes, int] = {}  # by author: the newest round, so that repeats do not count
        self.steps: dict[bytes, int] = {}  # by author: local steps behind that contribution, as claimed
        self.count = 0  # contributions noted

    def begin(self, number: int, now: float) -> None:
        self.starts.setdefault(number, now)
        if len(self.starts) > STARTS_MAX:
            del self.starts[min(self.starts)]

    def note(self, author: bytes, number: int, now: float, steps: int = 0) -> None:
        """Records the arrival of a contribution, and how many local steps it claims."""
        if number <= self.noted.get(author, 0):  # only the first arrival counts: anyone can repeat it later
            return
        self.noted[author], self.steps[author] = number, steps
        self.count += 1
        start = self.starts.get(number)
        if start is not None:
            self.offsets[author] = now - start
        elif number > max(self.starts, default=0):  # we are behind, so keep the previous estimate if there is one
            self.offsets.setdefault(author, 0.0)
        else:  # so old that its start is unknown: it is at least this late
            self.offsets[author] = now - min(self.starts.values())

    @property
    def round_seconds(self) -> float:
        """The longest of the last few rounds that have ended here; 0 before the first."""
        starts = [self.starts[number] for number in sorted(self.starts)[-LENGTHS - 1 :]]
        return max((after - before for before, after in pairwise(starts)), default=0.0)

    def missed(self, author: bytes) -> None:
        """Records that a round waited for this author in vain."""
        self.offsets[author] = SILENT

    def rewound(self, number: int) -> None:
        """Forgets the rounds after this one, which come again on another branch."""
        self.starts = {at: began for at, began in self.starts.items() if at <= number}
        self.noted = {author: min(at, number) for author, at in self.noted.items()}

    def forget(self, authors: Iterable[bytes]) -> None:
        """Forgets all authors except these."""
        kept = set(authors)
        self.offsets = {author: offset for author, offset in self.offsets.items() if author in kept}
        self.noted = {author: number for author, number in self.noted.items() if author in kept}
        self.steps = {author: steps for author, steps in self.steps.items() if author in kept}

    def patience(self, members: Iterable[bytes]) -> tuple[float | None, float]:
        """Returns how long after a round's start to wait for known members (None if there are none) and for others."""
        known = [offset for member in members if (offset := self.offsets.get(member, SILENT)) != SILENT]
        if not known:
            return None, SILENT
        middle = median(known)
        deviation = median(abs(offset - middle) for offset in known)
        usual = min(middle + max(DEVIATIONS * deviation, SLACK * middle), STRANGERS * middle)
        return usual, STRANGERS * middle

    def are_enough(self, members: Sequence[bytes]) -> bool:
        """Whether so many of the members have been heard that liars are a minority of them: fewer are no pace."""
        known = sum(self.offsets.get(member, SILENT) != SILENT for member in members)
        return known > 2 * tolerated_by(len(members))

    def pace(self, others: Iterable[bytes], steps_max: int) -> float | None:
        """Returns how long after a round's start the median of the others would contribute, if all took all steps.

        None if half of them or fewer have been heard, or so few that liars could be half of those. Members that are
        silent are counted among the liars. A claim of no steps, or of more than there are, counts as all."""
        found, count, gone = [], 0, 0
        for other in others:
            count += 1
            offset, steps = self.offsets.get(other), self.steps.get(other, 0)
            if offset == SILENT:
                gone += 1
            elif offset:  # 0: of a round that had not begun here
                found.append(offset * min(STRETCH_MAX, steps_max / steps) if 0 < steps < steps_max else offset)
        liars = max(0, tolerated_by(count + 1) - gone)
        return median_low(found) if 2 * len(found) > count and len(found) > 2 * liars else None

    def worthwhile(
        self, members: Iterable[bytes], others: Iterable[bytes], patience: float, least: int
    ) -> tuple[float, float]:
        """Returns how long after a round's start to wait for members, and for others, of those that are in time.

        That is the time that brings most contributions a second, but not before so many members and half of them have
        come: whoever is very early would stop the wait at once. A little longer than these take is free for members."""
        seated = sorted(offset for member in members if (offset := self.offsets.get(member, SILENT)) <= patience)
        if not seated:
            return patience, patience
        floor = max(seated[min(least, len(seated)) - 1], seated[len(seated) // 2])
        unseated = [offset for other in others if (offset := self.offsets.get(other, SILENT)) <= patience]
        best, worth = floor, 0.0
        for count, offset in enumerate(sorted(seated + unseated), 1):
            if offset >= floor and count >= worth * offset:
                best, worth = offset, count / offset if offset else 0.0
        for_members = max(best, min(patience, (1.0 + GRACE) * floor))
        return for_members, max(best, *(offset for offset in seated if offset <= for_members))

    def expected(self, members: Iterable[bytes], patience: float) -> set[bytes]:
        """Returns the members to wait for: those that were in time, and those never heard from."""
        return {key for key in members if self.offsets.get(key, patience) <= patience}

    def limits(self) -> dict[str, tuple[int, int]]:
        return {"round starts": (len(self.starts), STARTS_MAX + 1), "arrivals": (len(self.offsets), 2 * ADMITTED_MAX)}
