"""Catching up: learning that others are further on or on another branch, and following what they can prove.

A message of a later round says that its author is ahead; mostly the certificate is on its way to us anyway, so we
wait a moment, and then ask for history. Another branch is looked at at once. What comes back is followed step by
step, each proved by the roster before it; whether a branch is to be preferred to ours is settled by line.py. Nothing
that was not verified changes anything here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from p2ptrain.core.context import Context
from p2ptrain.core.events import AskHistory
from p2ptrain.core.history import Beginning, Entry, History, Step, check_certificate, follow, jump
from p2ptrain.core.line import Line, are_level, common_branch, wins
from p2ptrain.core.reputation import Reason
from p2ptrain.core.state import AgreedState
from p2ptrain.errors import RemoteProtocolError

PATIENCE_SECONDS = 0.5  # for the certificate to come by itself, when somebody is ahead
ANSWER_SECONDS = 10.0  # for a history; then somebody else is asked
AHEAD_MAX = 64  # peers known to be ahead or elsewhere; of more, the newest are remembered
LOST_SECONDS = 60.0  # until a branch that lost is looked at again: signatures under its beginning may have come up
LOST_MAX = 64
RETRY_SECONDS = 1.0
RETRY_SECONDS_MAX = 30.0


@dataclass(slots=True)
class Question:
    peer: bytes
    branch: bytes
    round: int
    until: float


@dataclass(slots=True)
class Verified:
    """Steps that follow a state of my line, with the states that they lead to."""

    point: AgreedState  # where they start
    changes: tuple[Step, ...]
    base: AgreedState | None  # a jump ahead of `point`
    steps: list[tuple[Step, AgreedState]]


class CatchingUp:
    """Of one node."""

    def __init__(self, context: Context, line: Line, may_follow: Callable[[Beginning], bool]) -> None:
        self.context, self.line = context, line
        self.may_follow = may_follow  # a branch from our head
        self.ahead: dict[bytes, tuple[bytes, int]] = {}  # branch and round in which a peer was seen
        self.asked: Question | None = None
        self.ask_at: float | None = None
        self.tries = 0
        self.lost: dict[bytes, float] = {}  # branches that lost to ours, and when we found that out
        self.is_split = False  # another branch went its own way too long ago
        self.proof_of_lies: tuple[Entry, Entry] | None = None  # two certificates for one round

    @property
    def is_behind(self) -> bool:
        return bool(self.ahead)

    def has_lost(self, branch: bytes) -> bool:
        """Whether we have looked at this branch lately, and stayed with ours."""
        return self.context.now - self.lost.get(branch, -LOST_SECONDS) < LOST_SECONDS

    def notice(self, peer: bytes, branch: bytes, number: int) -> None:
        """A peer is in a later round, or on another branch."""
        self.ahead.pop(peer, None)
        self.ahead[peer] = (branch, number)
        if len(self.ahead) > AHEAD_MAX:
            del self.ahead[next(iter(self.ahead))]
        if self.ask_at is None:
            self.ask_at = self.context.now + PATIENCE_SECONDS

    def advanced(self) -> None:
        """Our line went on: forget whom we have caught up with."""
        state = self.line.state
        self.ahead = {
            peer: (branch, number)
            for peer, (branch, number) in self.ahead.items()
            if branch != state.branch or number > state.round + 1
        }
        if not self.ahead:
            self.ask_at = None

    @property
    def deadline(self) -> float | None:
        if self.asked is not None:
            return self.asked.until
        return self.ask_at if self.ahead else None

    def tick(self) -> None:
        now = self.context.now
        if self.asked is not None and now >= self.asked.until:
            self.failed(self.asked.peer)
        if self.asked is None and self.ahead and self.ask_at is not None and now >= self.ask_at:
            ordered = sorted(self.ahead)
            self.context.rng.shuffle(ordered)
            peer = self.context.reputation.preferred(ordered[:8], now)[0]
            self.ask(peer, self.line.state.branch, self.line.state.round)

    def ask(self, peer: bytes, branch: bytes, number: int) -> None:
        self.asked = Question(peer, branch, number, self.context.now + ANSWER_SECONDS)
        self.context.emit(AskHistory(peer, branch, number))

    def failed(self, peer: bytes) -> None:
        """No answer, or a wrong one."""
        if self.asked is None or self.asked.peer != peer:
            return
        self.asked = None
        self.ahead.pop(peer, None)
        self.tries += 1
        wait = min(RETRY_SECONDS * 2.0 ** min(self.tries, 16), RETRY_SECONDS_MAX)
        self.ask_at = self.context.now + (wait if not self.ahead else 0.0)

    def answered(self, peer: bytes, history: History) -> Verified | None:
        """What an answer proves that we should follow; None: nothing, or more has to be asked first."""
        asked = self.asked
        if asked is None or asked.peer != peer:
            return None
        self.asked = None
        try:
            verified = self._weigh(asked, history)
        except RemoteProtocolError:
            self.context.counters["histories refused"] += 1
            self.context.reputation.note(peer, Reason.MALFORMED, self.context.now)
            verified = None
        if self.asked is None and verified is None:
            branch, _ = self.ahead.pop(peer, (self.line.state.branch, 0))
            if branch != self.line.state.branch:
                self.lost.pop(branch, None)
                self.lost[branch] = self.context.now
                while len(self.lost) > LOST_MAX:
                    del self.lost[next(iter(self.lost))]
            self.ask_at = self.context.now if self.ahead else None
        if verified is not None:
            self.tries = 0
            self.ask_at = self.context.now
        return verified

    # -----------------------------------------------------------------------------------------------
    # Whose line goes on

    def _weigh(self, asked: Question, history: History) -> Verified | None:
        line = self.line
        common = common_branch(line.lineage, history.lineage)
        if common is None:
            raise RemoteProtocolError("the history of another run")
        branch = common.branch
        place = history.lineage.index(common)
        their_next = history.lineage[place + 1] if place + 1 < len(history.lineage) else None
        my_next = line.successor_of(branch)
        their_end = their_next.start if their_next else history.round
        my_end = my_next.start if my_next else line.state.round
        if my_next is None:
            if their_end < my_end or (their_end == my_end and their_next is None):
                return None  # we are further on, on the same branch
            point = my_end
        elif their_end > my_end or (their_next is not None and their_end == my_end):
            point = my_end
        else:
            return None  # the old roster's quorum went on with us
        if (asked.branch, asked.round) != (branch, point):
            self.ask(asked.peer, branch, point)
            return None
        verified = self._verify(branch, point, history)
        if verified is None or my_next is None:
            return verified
        if their_end > my_end:  # the old roster's quorum went on with them
            first = verified.steps[0][0] if verified.steps else None
            return verified if isinstance(first, Entry) and first.manifest.branch == branch else None
        return verified if self._beats_mine(my_next.branch, verified) else None

    def _verify(self, branch: bytes, point: int, history: History) -> Verified | None:
        state = self.line.state_at(branch, point)
        if state is None:
            self.is_split = True
            return None
        start, settled = state, state if state is not self.line.state else None  # the rule settles what begins there
        self._look_for_lies(state, history)
        if history.base is not None:
            jump(state, history.changes, history.base, self.context.signer)
            state = history.base
            if not history.steps or not isinstance(history.steps[0], Entry):
                raise RemoteProtocolError("a jump that nothing certifies")
        steps: list[tuple[Step, AgreedState]] = []
        for step in history.steps:
            if isinstance(step, Beginning) and state is not settled and not self._may_follow(step, state):
                break  # what comes before it is true all the same
            state = follow(state, step, self.context.run, self.context.signer)
            steps.append((step, state))
        return Verified(start, history.changes, history.base, steps) if steps else None

    def _may_follow(self, beginning: Beginning, state: AgreedState) -> bool:
        """The same question as `Regrouping.may_follow`, wherever the branch begins."""
        if state is self.line.state:
            return self.may_follow(beginning)
        is_bound = len(set(beginning.signers)) > state.roster.tolerated
        return is_bound or self.context.me not in state.roster.seat or beginning.branch in self.line.beginnings

    def _look_for_lies(self, state: AgreedState, history: History) -> None:
        """A round that our own roster certified, after another round than ours: more than f members have lied."""
        theirs, mine = (history.steps[0] if history.steps else None), self.line.entry(state.round)
        if (
            isinstance(theirs, Entry)
            and mine is not None
            and (theirs.manifest.branch, theirs.manifest.round) == (state.branch, state.round + 1)
            and theirs.manifest.parent != state.head
        ):
            check_certificate(theirs, state.roster, self.context.signer)
            self.proof_of_lies = mine, theirs

    def _beats_mine(self, mine: bytes, verified: Verified) -> bool:
        my_beginning, other = self.line.beginnings.get(mine), verified.steps[0][0]
        if not isinstance(other, Beginning) or my_beginning is None:
            self.is_split = self.is_split or my_beginning is None
            return False
        is_long_ago = self.line.state.round - verified.point.round > self.line.kept
        if is_long_ago and are_level(other, my_beginning):
            self.is_split = True
            return False
        return wins(other, my_beginning)

    def limits(self) -> dict[str, tuple[int, int]]:
        """Sizes and their bounds."""
        return {"peers ahead": (len(self.ahead), AHEAD_MAX), "branches that lost": (len(self.lost), LOST_MAX)}
