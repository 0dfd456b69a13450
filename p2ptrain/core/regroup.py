"""Loss of the quorum: finds out which members are left, and whether to go on with them.

The quorum counts as lost when no round was decided for `stall_seconds` after our availability, while we ran and were
connected, and fewer members than a quorum were heard in that time: as long as a quorum is heard, it is only slow.
Then the node either waits (`halt`) or regroups (`regroup`): each member floods a call that names the last certificate,
and when no new call has arrived for `settle_seconds`, it signs the set of callers, once per attempt. A set signed by a
quorum of itself begins a new branch. With this rule alone, a single liar could sign a set of itself and take over a
healthy swarm; so a set that we have not signed binds us only if an honest member must have lost it (`may_follow`).

The settle time is longer than it takes until the last member notices the stall; otherwise sets would differ. A
failed attempt is followed by another after twice the time, up to a cap."""

from __future__ import annotations

from p2ptrain.core.complaints import Code, Complaint, complaint
from p2ptrain.core.context import Context
from p2ptrain.core.history import Beginning
from p2ptrain.core.messages import Call, Received, Regroup, read, signature_of
from p2ptrain.core.roster import quorum_of
from p2ptrain.core.state import AgreedState

ATTEMPTS_KEPT = 4  # the newest attempts, whose calls and signatures are kept
PATIENCE_MAX = 8  # times stall_seconds: the longest wait between attempts
REPEAT_SECONDS = 3.0  # calls and signatures are repeated: gossip may lose them, and newcomers have no history
ATTEMPTS_AHEAD = 2  # attempts beyond ours whose calls are kept, so that nobody can drive the number up alone
HEARD_SECONDS = 45.0  # a live member is heard in this time: two of repair.py's heartbeats, as gossip may lose one
SHARE_CALLED = 0.5  # share of the wait once others have called: members notice a stall at different times, and this
# brings them together


class Regrouping:
    """Detects the loss of the quorum after one agreed state, and collects calls and signatures for a regroup."""

    def __init__(self, context: Context, state: AgreedState) -> None:
        self.context, self.state = context, state
        self.is_member = context.me in state.roster.seat
        self.began = self.listening_since = context.now
        self.since: float | None = None  # start of the stall clock; None: it is not running
        self.attempt = -1  # the attempt that we have called for
        self.called_at = 0.0
        self.last_new_at = 0.0  # when the last new call arrived
        self.repeat_at = 0.0
        self.calls: dict[int, dict[bytes, Received]] = {}  # by attempt, by author
        self.signed: dict[int, dict[bytes, Received]] = {}
        self.mine: list[Received] = []  # our last call and signature, to repeat

    @property
    def is_stalled(self) -> bool:
        return self.attempt >= 0 or (self.since is not None and self._is_lost())

    @property
    def complaint(self) -> Complaint | None:
        """The complaint about missing members, if any. A live member is heard every twenty seconds in any round."""
        if self.is_stalled:
            return complaint(Code.STALLED)
        heard, quorum, size = self._present(HEARD_SECONDS), self.state.roster.quorum, self.state.roster.size
        is_early = self.context.now - self.listening_since < HEARD_SECONDS
        if not self.is_member or not self.context.peers or is_early or heard >= quorum:
            return None
        return complaint(Code.FEW_HEARD, heard=heard, members=size, quorum=quorum, seconds=round(HEARD_SECONDS))

    @property
    def needs_every_message(self) -> bool:
        """Whether any message may matter: the quorum seems lost, or others have called."""
        stall = self.context.run.agreement.stall_seconds
        is_late = self.since is not None and self.context.now >= self.since + stall
        return self.attempt >= 0 or is_late or bool(self.calls or self.signed)

    @property
    def counted(self) -> tuple[object, ...]:
        """Whatever may let the node advance and a message can change without an effect."""
        return len(self.calls), len(self.signed)

    # -- The clock ----------------------------------------------------------------------------------

    def start_clock(self) -> None:
        if self.since is None and self.is_member and self.state.roster.size > 1:
            self.since = self.context.now

    def restart_clock(self) -> None:
        """Restarts the stall clock after we slept or were cut off: that time does not count."""
        self.listening_since = self.context.now
        if self.since is not None:
            self.since = self.context.now

    def _patience(self) -> float:
        stall = float(self.context.run.agreement.stall_seconds)
        return min(stall * 2.0 ** min(self.attempt + 1, 16), stall * PATIENCE_MAX)

    def _is_lost(self, share: float = 1.0) -> bool:
        """Whether the clock has run for this share of `stall_seconds`, and fewer than a quorum were heard in it."""
        now = self.context.now
        stall = share * self.context.run.agreement.stall_seconds
        if self.since is None or now - self.since < stall or self._is_cut_off():
            return False
        return self._present(stall) < self.state.roster.quorum

    def _is_deserted(self) -> bool:
        """Whether fewer than a quorum were heard from for `stall_seconds`, whether or not the clock is running."""
        stall = float(self.context.run.agreement.stall_seconds)
        return self.context.now - self.began >= stall and self._present(stall) < self.state.roster.quorum

    def _present(self, seconds: float) -> int:
        """Returns how many members were heard from lately, including ourselves."""
        now, heard, me = self.context.now, self.context.heard_at, self.context.me
        return sum(key == me or now - heard.get(key, now - 2.0 * seconds) < seconds for key in self.state.members)

    def _is_cut_off(self) -> bool:
        """Whether we have no connection at all; never in a crash-only roster, whose few others may really be gone."""
        return not self.context.peers and not self.state.roster.is_crash_only

    @property
    def deadline(self) -> float | None:
        if self.since is None:
            return None
        stall = float(self.context.run.agreement.stall_seconds)
        if self.attempt < 0:
            due = self.since + stall
            return due if due > self.context.now else self.context.now + REPEAT_SECONDS
        if self._is_cut_off():
            return self.context.now + REPEAT_SECONDS
        times = [self.called_at + self._patience(), self.repeat_at]
        if self.attempt not in self._mine_signed():
            times.append(self.last_new_at + self.context.run.agreement.settle_seconds)
        return min(times)

    def tick(self) -> None:
        if self.since is None or self.context.run.agreement.on_quorum_loss == "halt":
            return
        now = self.context.now
        if self.attempt < 0:
            if self._is_lost() or (self.calls and self._is_lost(SHARE_CALLED)):
                self._call(max(0, *self.calls) if self.calls else 0)
            return
        if self._is_cut_off():
            return
        highest = max(self.calls, default=self.attempt)
        if now >= self.called_at + self._patience() * (1.0 if highest == self.attempt else SHARE_CALLED):
            self._call(max(self.attempt + 1, highest))
        settle = self.context.run.agreement.settle_seconds
        if now >= self.last_new_at + settle and self.attempt not in self._mine_signed():
            self._sign()
        if now >= self.repeat_at and self.mine:
            self.context.publish(*self.mine)
            self.repeat_at = now + REPEAT_SECONDS

    def _mine_signed(self) -> set[int]:
        return {attempt for attempt, signed in self.signed.items() if self.context.me in signed}

    # -- Calls and signatures -----------------------------------------------------------------------

    def _call(self, attempt: int) -> None:
        context, state = self.context, self.state
        if not context.voice.may_speak(state.branch, state.round + 1):
            self.called_at = context.now
            return
        context.counters["calls"] += 1
        self.attempt, self.called_at = attempt, context.now
        self.last_new_at = context.now
        call = context.signed(Call(state.branch, state.head, attempt, context.me))
        self.calls.setdefault(attempt, {})[context.me] = call
        self.mine = [call]
        self.repeat_at = context.now + REPEAT_SECONDS
        context.publish(call)

    def _sign(self) -> None:
        context, state = self.context, self.state
        members = tuple(sorted(self.calls[self.attempt]))
        regroup = context.signed(Regroup(state.branch, state.head, self.attempt, members, context.me))
        self.signed.setdefault(self.attempt, {})[context.me] = regroup
        self.mine.append(regroup)
        context.voice.publish_once(regroup)

    def hear_call(self, received: Received) -> bool:
        """Takes in a member's call after the same certificate; returns False if it is useless."""
        call = read(received, Call)
        is_new = call.author in self.state.roster.seat and self._keep(self.calls, call, received)
        if is_new and call.attempt == self.attempt:
            self.last_new_at = self.context.now
        return is_new

    def hear_regroup(self, received: Received) -> bool:
        """Takes in a member's signature of a set; returns False if it is useless."""
        regroup, seat = read(received, Regroup), self.state.roster.seat
        return all(key in seat for key in regroup.members) and self._keep(self.signed, regroup, received)

    def _keep(self, kept: dict[int, dict[bytes, Received]], said: Call | Regroup, received: Received) -> bool:
        """Keeps a member's first word in an attempt near ours; returns False for any other."""
        for each in (self.calls, self.signed):
            for old in [attempt for attempt in each if attempt <= self.attempt - ATTEMPTS_KEPT]:
                del each[old]
        is_near = self.attempt - ATTEMPTS_KEPT < said.attempt <= max(self.attempt, 0) + ATTEMPTS_AHEAD
        if not is_near or said.author in kept.setdefault(said.attempt, {}):
            return False
        kept[said.attempt][said.author] = received
        return True

    def beginning(self) -> Beginning | None:
        """Returns the beginning of a branch that a quorum of its own members has signed, if there is one."""
        for attempt in sorted(self.signed, reverse=True):
            sets: dict[tuple[bytes, ...], list[Received]] = {}
            for received in self.signed[attempt].values():
                sets.setdefault(read(received, Regroup).members, []).append(received)
            for members, signed in sorted(sets.items()):
                if len(signed) >= quorum_of(len(members)):
                    begun = self._begun(attempt, members, signed)
                    if self.may_follow(begun):
                        return begun
        return None

    def may_follow(self, beginning: Beginning) -> bool:
        """Whether a branch from our head binds us, and is not an attempt by a few liars to take over a healthy swarm.

        It binds us if we signed it, or if f + 1 members signed it, at least one of which is honest and has lost the
        quorum. It also does if we have lost the quorum ourselves and it has more signers than our call had answers or,
        if we have not called yet, more than half as many as the members that we still hear. A node without a vote
        cannot call, so it waits instead. Where runs halt no branch binds us."""
        signers, now, agreement = beginning.signers, self.context.now, self.context.run.agreement
        if agreement.on_quorum_loss == "halt":
            return False
        if self.context.me in signers or len(signers) > self.state.roster.tolerated:
            return True
        if not self.is_member:
            return self.has_waited
        if self.attempt >= 0:  # others have had time to answer our call
            has_settled = now >= self.last_new_at + agreement.settle_seconds
            return has_settled and len(signers) > len(self.calls.get(self.attempt, ()))
        return self._is_deserted() and 2 * len(signers) > self._present(agreement.stall_seconds)

    @property
    def has_waited(self) -> bool:
        """Whether we have no vote, and heard fewer than a quorum for as long as members need to notice its loss."""
        return not self.is_member and self._is_deserted()

    def _begun(self, attempt: int, members: tuple[bytes, ...], signed: list[Received]) -> Beginning:
        state, by_author = self.state, sorted((read(each, Regroup).author, signature_of(each)) for each in signed)
        signers, signatures = zip(*by_author, strict=True)
        return Beginning(state.branch, state.round, state.head, attempt, members, signers, signatures)

    def restore(self, said: list[Received]) -> None:
        """Restores our signatures after a restart: a signed set stays signed."""
        for received in said:
            regroup = read(received, Regroup)
            if (regroup.branch, regroup.parent) == (self.state.branch, self.state.head):
                self.signed.setdefault(regroup.attempt, {})[self.context.me] = received
                self.attempt, self.called_at, self.mine = regroup.attempt, self.context.now, [received]

    def limits(self) -> dict[str, tuple[int, int]]:
        size, kept = self.state.roster.size, ATTEMPTS_KEPT + ATTEMPTS_AHEAD + 1
        return {
            "attempts called for": (len(self.calls), kept),
            "attempts signed": (len(self.signed), kept),
            "calls of an attempt": (max(map(len, self.calls.values()), default=0), size),
        }
