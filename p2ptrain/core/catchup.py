"""Catching up: notices that peers are ahead or on another branch, and follows the history that they can prove.

A message of a later round says that its author is ahead. Usually the certificate is already on its way to us, so we
wait a moment before asking for history; the same goes for a peer on another branch. The answer is followed step by
step, each proved by the roster before it; the chain's rules decide whether a branch is preferred to ours.

Only one answer is awaited at a time, and any connected peer can claim to be ahead. So admitted keys are asked first.
Strangers, whose keys cost nothing, are asked only while no admitted key claims to be ahead, and give way once if one
does. A request leads to at most one follow-up, and a peer that was asked in vain is left alone (exponential backoff).

Branches that lost to ours are remembered, so that we do not check them again and again. This rests on the verified
beginning of the branch and on nobody's claim: a branch's id covers where it began, its members and all its history."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from p2ptrain.core.chain import Chain, are_level, common_branch, wins
from p2ptrain.core.context import Context
from p2ptrain.core.events import AskHistory, Halted
from p2ptrain.core.history import (
    Beginning,
    BranchStart,
    Entry,
    History,
    Step,
    check_beginning,
    check_certificate,
    follow,
    jump,
)
from p2ptrain.core.regroup import Regrouping
from p2ptrain.core.reputation import Reason
from p2ptrain.core.roster import Roster, changed, roster_of
from p2ptrain.core.state import AgreedState
from p2ptrain.errors import RemoteProtocolError

PATIENCE_SECONDS = 0.5  # how long the certificate may take to arrive by itself when a peer is ahead
ANSWER_SECONDS = 10.0  # until another peer is asked as well; what comes later still counts
LATE_SECONDS = 60.0  # after a request was given up its answer may still come: the mailbox waits no longer
AHEAD_MAX = 64  # peers known to be ahead or on another branch; the oldest are forgotten, strangers first
NEAR_ROUNDS = 32  # half of those that a join request may be old
LOST_SECONDS = 60.0  # until a branch that lost is checked again: there may be more signatures for it
LOST_MAX = 64
SPLIT_SECONDS = 3.0 * LOST_SECONDS  # a split unseen for this long is over: the other side is checked more often
SPLITS_MAX = 64  # branches of our chain after which others diverged
RETRY_SECONDS = 2.0  # until a peer asked in vain is asked again; doubles each time
RETRY_SECONDS_MAX = 30.0  # short, because in a small swarm only this peer may have what we lack
RETRIES_MAX = 1_024  # peers that were asked in vain: as many as can be admitted; strangers are forgotten first

Value = TypeVar("Value")


@dataclass(slots=True)
class HistoryRequest:
    peer: bytes
    branch: bytes
    round: int
    until: float
    is_second: bool  # a follow-up: the first answer said where to start
    mine: AgreedState  # the head of our chain when we asked
    cut_at: float | None = None  # when to ask instead a member that is also ahead


@dataclass(slots=True)
class Verified:
    """Verified steps that follow a state of our chain, with the states that they lead to."""

    point: AgreedState  # the state that they follow
    changes: tuple[Step, ...]
    base: AgreedState | None  # set if they start with a jump ahead from `point`
    steps: list[tuple[Step, AgreedState]]

    def steps_for(self, context: Context) -> list[tuple[Step, AgreedState]]:
        """Returns the steps, without those after the one that lets this node go if it is leaving."""
        out = (at for at, (_, state) in enumerate(self.steps) if context.is_out(state))
        return self.steps[: next(out, len(self.steps)) + 1]


class CatchingUp:
    def __init__(
        self, context: Context, chain: Chain, regrouping: Callable[[], Regrouping], proof_of_lies: Halted | None
    ) -> None:
        self.context, self.chain = context, chain
        self.regrouping = regrouping  # that of the current round
        self.ahead: dict[bytes, tuple[bytes, int]] = {}  # by peer: the branch and round it was seen in
        self.asked: HistoryRequest | None = None
        self.late: dict[bytes, HistoryRequest] = {}  # by peer: the first request that we gave up
        self.ask_at: float | None = None
        self.retries: dict[bytes, tuple[int, float]] = {}  # by peer: failures, and when to ask again
        self.was_in_vain = False  # the last request failed, and no peer has since proved that it is ahead
        self.lost: dict[bytes, float] = {}  # branches that lost to ours, and when we checked
        self.cut_short: bytes | None = None  # the peer whose request was dropped; its next one is not
        self.splits: dict[bytes, tuple[bytes, float]] = {}  # by common branch: our branch after it, and when we noticed
        self.proof_of_lies = proof_of_lies  # two certificates for one round

    @property
    def is_behind(self) -> bool:
        """Whether to assume that others are ahead.

        Claims of strangers, and of no more members than may lie, count only until a request was in vain: otherwise any
        two keys could keep a newcomer from asking for admission forever, by taking turns."""
        if not self.was_in_vain:
            return bool(self.ahead)
        roster = self.chain.state.roster
        return sum(peer in roster.seat for peer in self.ahead) > roster.tolerated

    @property
    def counted(self) -> tuple[object, ...]:
        """Whatever may let the node advance and a message can change without an effect."""
        return (self.deadline, self.is_behind) if self.ahead or self.asked is not None else ()

    @property
    def is_near(self) -> bool:
        """Whether others are ahead by a few rounds of our branch at most, as far as we assume it."""
        state = self.chain.state
        claims = self.ahead.values() if self.is_behind else ()
        return all(branch == state.branch and number <= state.round + NEAR_ROUNDS for branch, number in claims)

    @property
    def is_split(self) -> bool:
        """Whether another branch diverged from ours too long ago to be settled, and a peer was on it lately."""
        return any(self.context.now - at < SPLIT_SECONDS for _, at in self.splits.values())

    def has_lost(self, branch: bytes) -> bool:
        """Whether we checked this branch lately, and stayed on ours."""
        return self.context.now - self.lost.get(branch, -LOST_SECONDS) < LOST_SECONDS

    def notice(self, peer: bytes, branch: bytes, number: int) -> None:
        """Records that a peer is in a later round or on another branch."""
        _, retry_at = self.retries.get(peer, (0, self.context.now))
        if self.context.now < retry_at:
            return
        self._keep(self.ahead, peer, (branch, number), AHEAD_MAX)
        asked, place = self.asked, self.chain.state.place
        is_sent_none = peer in place and self.context.me not in place  # a newcomer, to whom nobody sends votes
        ask_at = self.context.now + (0.0 if is_sent_none else PATIENCE_SECONDS)
        self.ask_at = ask_at if self.ask_at is None else min(ask_at, self.ask_at)
        if asked is not None and asked.cut_at is None and peer in place and asked.peer not in (*place, self.cut_short):
            asked.cut_at = self.context.now + PATIENCE_SECONDS

    def _keep(self, kept: dict[bytes, Value], peer: bytes, value: Value, most: int) -> None:
        """Stores a value for a peer, evicting the oldest stranger first: new keys must not push out members."""
        kept.pop(peer, None)
        kept[peer] = value
        if len(kept) > most:
            place = self.chain.state.place
            del kept[next((key for key in kept if key not in place), next(iter(kept)))]

    def advanced(self) -> None:
        """Forgets the peers that we have caught up with, after our chain has advanced."""
        state = self.chain.state
        if self.context.is_out(state):
            self.ahead, self.asked = {}, None
        self.ahead = {
            peer: (branch, number)
            for peer, (branch, number) in self.ahead.items()
            if branch != state.branch or number > state.round + 1
        }
        if not self.ahead:
            self.ask_at = None
        for branch, (mine, _) in list(self.splits.items()):
            after = self.chain.successor_of(branch)
            if after is None or after.branch != mine:  # our chain continues differently there now
                del self.splits[branch]

    @property
    def deadline(self) -> float | None:
        if self.asked is not None:
            return self.asked.until if self.asked.cut_at is None else min(self.asked.until, self.asked.cut_at)
        return self.ask_at if self.ahead else None

    def tick(self) -> None:
        now = self.context.now
        if self.asked is not None and now >= self.asked.until:
            self.failed(self.asked.peer)
        if self.asked is not None and self.asked.cut_at is not None and now >= self.asked.cut_at:
            self._cut_short(self.asked)
        if self.asked is None and self.ahead and self.ask_at is not None and now >= self.ask_at:
            place = self.chain.state.place
            ordered = sorted(peer for peer in self.ahead if peer in place) or sorted(self.ahead)
            self.context.rng.shuffle(ordered)
            peer = self.context.reputation.preferred(ordered[:8], now)[0]
            self._ask(peer, self.chain.state.branch, self.chain.state.round)

    def _cut_short(self, asked: HistoryRequest) -> None:
        """Drops the request to a stranger, which may be stalling us, in favour of a member that is ahead.

        This happens once per stranger: otherwise members could take turns to keep strangers from ever answering."""
        asked.cut_at = None
        if any(peer in self.chain.state.place for peer in self.ahead):
            self._give_up(asked)
            self.cut_short = asked.peer

    def _ask(self, peer: bytes, branch: bytes, number: int, is_second: bool = False) -> None:
        now = self.context.now
        late = sum(now - each.until < LATE_SECONDS for each in self.late.values())  # they share our line with it
        until = now + ANSWER_SECONDS * 2.0 ** min(late, 3)
        self.asked = HistoryRequest(peer, branch, number, until, is_second, self.chain.state)
        self.context.emit(AskHistory(peer, branch, number))

    def failed(self, peer: bytes) -> None:
        if self.asked is not None and self.asked.peer == peer:
            self._give_up(self.asked)
            self._in_vain(peer, Reason.SILENT)

    def _give_up(self, asked: HistoryRequest) -> None:
        """Waits no longer for an answer. The next one of that peer, which answers in order, is to its first request."""
        asked.until = min(asked.until, self.context.now)
        if asked.peer not in self.late and asked.peer in self.context.peers:
            self._keep(self.late, asked.peer, asked, AHEAD_MAX)
        self._close()

    def _close(self) -> None:
        if self.asked is not None and self.asked.peer == self.cut_short:
            self.cut_short = None
        self.asked = None

    def _in_vain(self, peer: bytes, reason: Reason | None) -> None:
        """Handles a request in vain: other peers are asked now, and this one not for a while."""
        now = self.context.now
        if reason is not None:
            self.context.reputation.note(peer, reason, now)
        count, _ = self.retries.get(peer, (0, now))
        wait = min(RETRY_SECONDS * 2.0 ** min(count, 16), RETRY_SECONDS_MAX)
        self._keep(self.retries, peer, (count + 1, now + wait), RETRIES_MAX)
        self.ahead.pop(peer, None)
        self.ask_at = now if self.ahead else None
        self.was_in_vain = True

    def answered(self, peer: bytes, history: History) -> Verified | None:
        """Returns the steps of an answer that we should follow, or None if there are none or a follow-up was sent."""
        asked, late = self.asked, self.late.pop(peer, None)
        answers = late or (asked if asked is not None and asked.peer == peer else None)
        if answers is None or self.context.is_out(self.chain.state):
            return None
        if asked is not None and asked.peer != peer:
            self._give_up(asked)
        self._close()
        try:
            verified = self._weigh(answers, history)
        except RemoteProtocolError:
            self.context.counters["histories refused"] += 1
            self._in_vain(peer, None if late else Reason.MALFORMED)
            return None
        if verified is not None:
            self.retries.pop(peer, None)
            self.was_in_vain = False
            self.ask_at = self.context.now
        elif self.asked is None:
            self._proved_nothing(peer)
        return verified

    def _proved_nothing(self, peer: bytes) -> None:
        """Handles a valid answer with nothing to follow: we have caught up, our branch wins, or the claim was false."""
        claim = self.ahead.get(peer)
        if claim is not None and not self.has_lost(claim[0]):  # the claim may be true, but another peer has to prove it
            self._in_vain(peer, None)
            return
        self.ahead.pop(peer, None)
        self.was_in_vain = True
        self.ask_at = self.context.now if self.ahead else None

    def _stay(self, asked: HistoryRequest, history: History, beginning: Beginning) -> None:
        """Remembers that a branch whose beginning was verified has lost, and so has the peer's current branch if it
        descends from that one. Other branches are not recorded, because the peer may have made them up."""
        begun = {beginning.branch}
        for step in (*history.changes, *history.steps):
            if isinstance(step, Beginning) and step.parent_branch in begun:
                begun.add(step.branch)
        claimed = self.ahead.get(asked.peer, (beginning.branch, 0))[0]
        for branch in (beginning.branch, claimed):
            if branch in begun:
                self.lost.pop(branch, None)
                self.lost[branch] = self.context.now
        while len(self.lost) > LOST_MAX:
            del self.lost[next(iter(self.lost))]

    def _part(self, common: bytes) -> None:
        """Records a split: others diverged from our chain after this branch, and no rule can settle it any more."""
        mine = self.chain.successor_of(common)
        assert mine is not None, "a split follows a branch that our chain has left"
        self.splits.pop(common, None)
        self.splits[common] = (mine.branch, self.context.now)
        if len(self.splits) > SPLITS_MAX:
            del self.splits[next(iter(self.splits))]

    # -- Choosing between chains --------------------------------------------------------------------

    def _weigh(self, asked: HistoryRequest, history: History) -> Verified | None:
        chain = self.chain
        common = common_branch(chain.lineage, history.lineage)
        if common is None:
            raise RemoteProtocolError("the history belongs to another run")
        branch = common.branch
        place = history.lineage.index(common)
        their_next = history.lineage[place + 1] if place + 1 < len(history.lineage) else None
        my_next = chain.successor_of(branch)
        their_end = their_next.start if their_next else history.round
        my_end = my_next.start if my_next else chain.state.round
        if their_next is None and their_end <= my_end:
            return None  # we are level or ahead
        if their_next is not None and their_end < my_end:
            self._weigh_shorter(asked, history, branch, their_next)
            return None
        if (asked.branch, asked.round) != (branch, my_end):
            self._ask_again(asked, branch, my_end)
            return None
        verified = self._verify(asked, branch, my_end, history)
        if verified is None or my_next is None:
            return verified
        first = (*verified.changes, *(step for step, _ in verified.steps))[0]  # their first step after the fork
        if isinstance(first, Entry) or self._beats_mine(branch, my_next.branch, first, verified.point):
            return verified  # the old roster's quorum, or the larger part of the roster, is with them
        self._stay(asked, history, first)
        return None

    def _weigh_shorter(self, asked: HistoryRequest, history: History, branch: bytes, their_next: BranchStart) -> None:
        """Handles a branch that forked before ours: it has lost, as the quorum stayed with us, if it began there."""
        state = self.chain.state_at(branch, their_next.start)
        if state is None:
            return
        if (asked.branch, asked.round) != (branch, their_next.start):
            self._ask_again(asked, branch, their_next.start)
            return
        first = (*history.changes, *history.steps)[:1]
        if first and isinstance(first[0], Beginning) and first[0].branch == their_next.branch:
            check_beginning(first[0], state, self.context.signer)
            self._stay(asked, history, first[0])

    def _ask_again(self, asked: HistoryRequest, branch: bytes, point: int) -> None:
        """Sends one follow-up from another point. With a third request, a liar could occupy the only slot forever."""
        if not asked.is_second:
            self._ask(asked.peer, branch, point, is_second=True)
            return
        if asked.mine is self.chain.state:  # our own chain has not advanced meanwhile
            self._in_vain(asked.peer, Reason.UNFETCHABLE)
        self.ahead.pop(asked.peer, None)

    def _verify(self, asked: HistoryRequest, branch: bytes, point: int, history: History) -> Verified | None:
        state = self.chain.state_at(branch, point)
        if state is None:
            if asked.peer in self.chain.state.place:  # we cannot check it, and a stranger's claim is cheap
                self._part(branch)
            return None
        start = state
        settled = state if state is not self.chain.state else None  # a rule settles a branch that begins there
        self._look_for_lies(state, history)
        if history.base is not None:
            jump(state, history.changes, history.base, self.context.signer)
            if not history.steps or not isinstance(history.steps[0], Entry):
                raise RemoteProtocolError("no certified round follows the jump")
            if not self._may_jump(state, history.changes, settled):
                if settled is not None:  # the chains forked, and theirs cannot bind us
                    self._part(branch)
                self._stay(asked, history, next(step for step in history.changes if isinstance(step, Beginning)))
                return None
            state = history.base
        steps: list[tuple[Step, AgreedState]] = []
        for step in history.steps:
            if isinstance(step, Beginning) and state is not settled and not self._may_follow(step, state.roster, state):
                check_beginning(step, state, self.context.signer)
                self._stay(asked, history, step)
                break  # the steps before it are still valid
            state = follow(state, step, self.context.run, self.context.signer)
            steps.append((step, state))
        changes = history.changes if history.base is not None else ()  # without a jump they are unchecked
        return Verified(start, changes, history.base, steps) if steps else None

    def _may_jump(self, state: AgreedState, changes: tuple[Step, ...], settled: AgreedState | None) -> bool:
        """Whether every branch of a jump binds us: a few liars could have begun one in the part that is left out."""
        roster = state.roster
        for place, change in enumerate(changes):
            if isinstance(change, Entry):
                roster = roster_of(changed(roster.members, change.manifest.seated, change.manifest.unseated))
                continue
            is_ours = change.parent_branch == state.branch and roster.members == state.roster.members
            at = state if place == 0 or (settled is None and is_ours) else None  # as if it began from our head
            if (at is None or at is not settled) and not self._may_follow(change, roster, at):
                return False
            roster = roster_of(change.members)
        return True

    def _may_follow(self, beginning: Beginning, roster: Roster, state: AgreedState | None) -> bool:
        """Answers the same question as `Regrouping.may_follow`, for a branch that begins anywhere."""
        if state is self.chain.state:
            return self.regrouping().may_follow(beginning)
        is_bound = len(set(beginning.signers)) > roster.tolerated or beginning.branch in self.chain.beginnings
        is_bound = is_bound or (self.context.me not in roster.seat and self.regrouping().has_waited)
        return is_bound and self.context.run.agreement.on_quorum_loss != "halt"

    def _look_for_lies(self, state: AgreedState, history: History) -> None:
        """Looks for a round that our roster certified on top of a different parent: then more than f members lied."""
        theirs, mine = (history.steps[0] if history.steps else None), self.chain.entry(state.round)
        if (
            isinstance(theirs, Entry)
            and mine is not None
            and (theirs.manifest.branch, theirs.manifest.round) == (state.branch, state.round + 1)
            and theirs.manifest.parent != state.head
        ):
            check_certificate(theirs, state.roster, self.context.signer)
            self.proof_of_lies = Halted(mine, theirs)

    def _beats_mine(self, common: bytes, mine: bytes, other: Beginning, point: AgreedState) -> bool:
        my_beginning = self.chain.beginnings.get(mine)
        is_long_ago = self.chain.state.round - point.round > self.chain.kept
        if my_beginning is None or (is_long_ago and are_level(other, my_beginning)):
            self._part(common)
            return False
        return wins(other, my_beginning)

    def limits(self) -> dict[str, tuple[int, int]]:
        return {
            "peers ahead": (max(len(self.ahead), len(self.late)), AHEAD_MAX),
            "peers asked in vain": (len(self.retries), RETRIES_MAX),
            "branches that lost": (len(self.lost), LOST_MAX),
            "splits": (len(self.splits), SPLITS_MAX),
        }
