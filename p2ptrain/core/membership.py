"""This node's own membership: asks for admission, and leaves the run properly.

A newcomer sends join requests, with its invitation if it has one, from when it has a state and lacks no more rounds
than it can replay, until a manifest admits it. (Where rounds take a few milliseconds it cannot have the newest state
before they are held open for it: newcomers.py.) It sends them to a few members each, because nobody listens to the
gossip of strangers. One member that attests it is enough, since the others ask that one for it. A leaving node
announces that, and keeps voting until a manifest carries its leave, so that the others do not lose the quorum when it
goes: for `leave_seconds`, or two rounds, whichever is longer, because a leave that comes after the availabilities of
one round is carried by the next. Then it takes in no later round, and ends when it has applied what its log has: others
may be many rounds further by the time that it ends, and without their payloads no audit could replay its log.
After the end of the run a node ends as well."""

from __future__ import annotations

from contextlib import suppress

from p2ptrain.core.admission import Requests
from p2ptrain.core.context import Context
from p2ptrain.core.events import Stop
from p2ptrain.core.local_work import LocalWork
from p2ptrain.core.messages import JoinRequest, Leave
from p2ptrain.core.state import AgreedState
from p2ptrain.errors import RemoteProtocolError

JOIN_SECONDS = 5.0  # between requests; doubles, so as not to load a busy swarm
JOIN_SECONDS_MAX = 60.0
JOIN_MEMBERS = 8  # that are told at a time: some may be liars, or may have too many other newcomers
LEAVE_SECONDS = 5.0  # between repetitions of a leave
LEAVE_ROUNDS, LEAVE_SECONDS_MAX = 2, 600.0  # that it waits: an owner who is still there then ends it by hand
END_SECONDS = 3.0  # after the run has ended, for the others to get its last certificate
END_SECONDS_MAX = 600.0  # more, for a state that lacks the last rounds
OVER = "the run is over, and goes on as another"


class Membership:
    def __init__(self, context: Context, requests: Requests, claim: bytes) -> None:
        self.context, self.requests, self.claim = context, requests, claim
        self.next_at = 0.0
        self.tries = 0
        self.leave_until: float | None = None
        self.was_inside = False  # when it began to leave
        self.end_at: float | None = None  # when it ends, after the end of the run
        self.has_ended = False

    def leave(self, state: AgreedState, round_seconds: float) -> None:
        """round_seconds: how long rounds take lately"""
        if self.leave_until is None:
            self.was_inside = self.context.me in state.place
            wait = min(LEAVE_ROUNDS * round_seconds, LEAVE_SECONDS_MAX)
            self.leave_until = self.context.now + max(wait, self.context.run.admission.leave_seconds)
            self.next_at = 0.0

    def go_away(self) -> None:
        """Stops the node without leaving the run: to the others it looks like a crash."""
        if not self.context.has_stopped:
            self.leave_until = self.context.now
            self._stop("away")

    def end(self, work: LocalWork) -> None:
        """Ends the node with its run: once others had time to hear of the end, and its own state is the last one."""
        context = self.context
        if self.end_at is None:
            self.end_at = context.now + END_SECONDS
        is_ready = work.is_current or context.now >= self.end_at + END_SECONDS_MAX or context.is_stopping
        if context.now >= self.end_at and is_ready and not self.has_ended:
            self.has_ended = True  # until the process does end, it still tells those who lag behind
            context.emit(Stop(OVER))

    def _stop(self, why: str) -> None:
        self.context.has_stopped = True
        self.context.emit(Stop(why))

    def tick(self, state: AgreedState, work: LocalWork, is_near: bool) -> None:
        """Asks for admission if the chain is near the others', or leaves once the last rounds are applied."""
        context = self.context
        is_inside = context.me in state.place
        if self.leave_until is not None:
            if context.has_stopped:
                return
            is_out, is_over = context.is_out(state), context.now >= self.leave_until
            is_applying = self.was_inside and not (work.is_current or work.is_astray or work.is_quarantined)
            if is_out and (is_over or not is_applying):
                self._stop("left")
            elif is_over:
                self._stop("left without being heard")
            elif not is_out and context.now >= self.next_at:
                leave = context.signed(Leave(state.branch, state.round + 1, context.me))
                context.publish(leave)
                with suppress(RemoteProtocolError):  # of who is muted or suspended, which nobody attests
                    self.requests.add(leave, state)  # a member attests its own leave, too
                self.next_at = context.now + LEAVE_SECONDS
            return
        if is_inside:
            self.tries = 0
            return
        if is_near and work.is_near and context.me not in state.banned and context.now >= self.next_at:
            members = [peer for peer in context.peers if peer in state.roster.seat]
            if not members:
                return
            join = context.signed(JoinRequest(state.branch, state.round + 1, self.claim, context.me))
            for member in members if len(members) <= JOIN_MEMBERS else context.rng.sample(members, JOIN_MEMBERS):
                context.send(member, join)
            self.next_at = context.now + min(JOIN_SECONDS * 2.0 ** min(self.tries, 8), JOIN_SECONDS_MAX)
            self.tries += 1

    def deadline(self, state: AgreedState) -> float | None:
        if self.context.has_stopped:
            return None
        if self.end_at is not None:
            return None if self.has_ended else max(self.end_at, self.context.now + 0.1)
        if self.leave_until is not None:
            return self.leave_until if self.context.is_out(state) else min(self.leave_until, self.next_at)
        return None if self.context.me in state.place else max(self.next_at, self.context.now + 1.0)
