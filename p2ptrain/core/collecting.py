"""Collecting: whose contributions one round waits for, and until when (arrivals.py has the estimates).

A round waits for the members that were lately in time and for those never heard from. The deadline follows the pace of
the members that were heard, so it holds only once more have contributed than liars could: more than 2f, or everyone
that is expected, if fewer are. Until then a round lasts up to three times the median, or, where too few members have
been heard to trust a median, as long as until a quorum counts as lost: otherwise whoever announces first, with whatever
it had ready, would be alone in a round. Members that were waited for in vain are not expected in the next round.

Nobody is waited for longer than it pays, with a seat or without: one that always comes just before the deadline would
make every round a quarter longer, and brings one contribution. Only newcomers have their own second."""

from __future__ import annotations

from collections.abc import Callable

from p2ptrain.core.arrivals import GRACE, SILENT, SLACK
from p2ptrain.core.context import Context
from p2ptrain.core.pools import Pools
from p2ptrain.core.state import AgreedState


class Collecting:
    def __init__(
        self, context: Context, pools: Pools, state: AgreedState, looks_at: Callable[[bytes, int], bool]
    ) -> None:
        """looks_at: whether a contribution of this key to a round is taken in; nobody else is waited for"""
        self.context, self.pools, self.state, self.began = context, pools, state, context.now
        self.roster = state.roster
        self.others = [
            entry.key
            for entry in state.admitted
            if entry.key not in self.roster.seat and looks_at(entry.key, state.round + 1)
        ]
        self.enough = 2 * self.roster.tolerated + 1  # members that liars are a minority of
        offers = self.pools.offers
        self.has_any = any(offers.has_from(author, state) for author in offers.by_author)
        self.seats_in = {key for key in self.roster.members if offers.has_from(key, state)}  # who has contributed
        self.needed = self.enough  # of these, for the deadline to hold
        self.waiting: set[bytes] = set()  # members
        self.unseated: set[bytes] = set()
        self.newcomers: set[bytes] = set()
        self.patience = 0.0, 0.0  # after the round's start; who comes later is not waited for: members, and others
        self.unseated_at = self.began  # when they are no longer waited for
        self.usual_at: float | None = None  # the deadline; None: nothing is known
        self.longest_at = self.began  # the deadline while fewer than needed have contributed
        self.is_blind = False  # after a restart: a contribution of ours is on offer, and no arrivals are known
        self.is_new = True  # members are expected that were never heard from
        self.is_first = not self.pools.arrivals.offsets  # nobody was ever heard from: all members are waited for
        self.over_since: float | None = None  # when it would have ended without newcomers
        self.newcomers_at = self._await_newcomers()  # when they are no longer waited for
        self._expect()

    def _expect(self) -> None:
        """Determines which authors to wait for, and until when."""
        context, arrivals, members = self.context, self.pools.arrivals, self.roster.members
        stall = float(context.run.agreement.stall_seconds)
        usual, strangers = arrivals.patience(members)
        if usual is None:
            # We have an offer from before a restart, but no arrivals: the others may have moved on meanwhile.
            self.is_blind = self.has_any
            self.usual_at = context.now + stall if self.has_any else None
            self.waiting = set(members) - self.seats_in
            return
        if self.is_first and not arrivals.are_enough(members):
            self.usual_at, self.longest_at = self.began + strangers, self.began + max(strangers, stall)
            return
        self.patience = arrivals.worthwhile(members, self.others, usual, self.enough)
        expected = arrivals.expected(members, self.patience[0])
        self.needed = min(self.enough, len(expected))
        self.is_new = any(key not in arrivals.offsets for key in members if key != context.me)
        self.usual_at = self.began + (strangers if self.is_new else usual)
        self.longest_at = self.began + (strangers if arrivals.are_enough(members) else max(strangers, stall))
        self.waiting = expected - self.seats_in
        self.unseated_at = min(self.usual_at, self.began + (1.0 + GRACE) * self.patience[1])
        late = {key for key in self.others if arrivals.offsets.get(key, SILENT) <= self.patience[1]}
        self.unseated = {key for key in late if not self.pools.offers.has_from(key, self.state)}

    def _await_newcomers(self) -> float:
        context, state = self.context, self.state
        probation = context.run.admission.probation_rounds
        awaited = self.pools.newcomers.awaited(state, probation, context.peers)
        self.newcomers = {
            key for key in awaited.intersection(self.others) if not self.pools.offers.has_from(key, state)
        }
        return self.began + self.pools.newcomers.seconds(context.now) if self.newcomers else self.began

    @property
    def _is_enough(self) -> bool:
        return len(self.seats_in) >= self.needed or self.is_blind

    @property
    def at(self) -> float | None:
        """When the round ends at the latest; None: not before there is a contribution."""
        if self.usual_at is None or not self.has_any:
            return None
        if not self._is_enough:
            return max(self.usual_at, self.longest_at)
        return self.usual_at if self.waiting else min(self.usual_at, self.unseated_at)

    def is_over(self) -> bool:
        """Whether the round is over; notes since when it would be without newcomers."""
        now, at = self.context.now, self.at
        is_complete = self.has_any and not self.waiting and not self.unseated
        if not (is_complete or (at is not None and now >= at)):
            self.over_since = None
            return False
        self.over_since = now if self.over_since is None else self.over_since
        return not self.newcomers or now >= self.newcomers_at

    @property
    def deadline(self) -> float | None:
        """When the round may be over without anything else happening."""
        return self.at if self.over_since is None else self.newcomers_at

    @property
    def seconds_for_newcomers(self) -> float:
        """How much longer than otherwise the round has lasted until now."""
        return 0.0 if self.over_since is None else self.context.now - self.over_since

    def waits_for(self, author: bytes) -> bool:
        return author in self.waiting or author in self.unseated or author in self.newcomers

    def heard_late(self, author: bytes) -> None:
        """Waits for an author's next contribution if its last one missed its round only narrowly."""
        if self.usual_at is None or self.pools.offers.has_from(author, self.state):
            return
        is_seated = author in self.roster.seat
        if not is_seated and author not in self.others:
            return
        waiting, patience = (self.waiting, self.patience[0]) if is_seated else (self.unseated, self.patience[1])
        if self.pools.arrivals.offsets.get(author, SILENT) <= patience:
            waiting.add(author)

    def held(self, author: bytes) -> None:
        """Notes that a good contribution is here that this round may take."""
        was_enough = self.has_any and self._is_enough
        self.has_any = True
        if author in self.roster.seat:
            self.seats_in.add(author)
        self.waiting.discard(author)
        self.unseated.discard(author)
        self.newcomers.discard(author)
        is_told = author in self.roster.seat or not self.is_first  # others do not change how long a first round lasts
        if self.usual_at is None or (self.is_new and not was_enough and not self.is_blind and is_told):
            self._expect()
        if not was_enough and self.usual_at is not None:  # if our estimates are too short, leave the others some time
            self.usual_at = max(self.usual_at, self.began + (1.0 + SLACK) * (self.context.now - self.began))

    def let_pass(self, authors: set[bytes]) -> None:
        self.waiting -= authors

    def hurry(self, at: float) -> None:
        """Ends the round at this time, or when it would have ended."""
        if self.usual_at is not None:
            self.usual_at = min(self.usual_at, at)

    def missing(self) -> tuple[list[bytes], bool]:
        """Returns who was waited for in vain until now, and whether to the end of all patience."""
        now, at = self.context.now, self.at
        if at is None or now < at or self.is_blind:
            return [], False
        return sorted(self.waiting | self.unseated), self.usual_at is not None and now >= self.usual_at
