"""The node: events in, effects out.

`handle` passes an event to the part that it concerns, and then lets the node advance as far as it can: a decided round
leads to the next one, a certified round is applied, training begins. The parts are the round (round.py), the pools that
outlive it (offers, payloads, requests, arrivals), the chain and catching up with others (chain.py, catchup.py),
training and applying (local_work.py), and recovery from lost messages and lost members (repair.py, regroup.py).

Most messages only increase a count, and the node advances when the count reaches a threshold. `_may_rest` and
`_counted` are the only place that knows which state `_go_on` depends on: while none of it has changed and the deadline
has not passed, `_go_on` would do nothing.

A single deadline stands for all timers. Only time in which the node ran counts: a clock that jumps back is treated as
having stood still, and so is one that jumps far beyond the deadline, because the machine slept or the clock was set.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nextafter
from random import Random
from typing import Any

from p2ptrain.config import RunConfig
from p2ptrain.core import events as ev
from p2ptrain.core.admission import REQUEST_ROUNDS
from p2ptrain.core.agreement import Stage
from p2ptrain.core.catchup import CatchingUp, Verified
from p2ptrain.core.chain import Chain
from p2ptrain.core.context import Context, Signer
from p2ptrain.core.history import Beginning, Step, follow
from p2ptrain.core.inbox import Inbox
from p2ptrain.core.local_work import LocalWork
from p2ptrain.core.membership import Membership
from p2ptrain.core.messages import (
    NUMBER_MAX,
    Announcement,
    Availability,
    Evidence,
    JoinRequest,
    Leave,
    Proposal,
    Regroup,
    Vote,
    decode,
)
from p2ptrain.core.regroup import Regrouping
from p2ptrain.core.repair import Repair
from p2ptrain.core.reputation import Reason
from p2ptrain.core.round import Round
from p2ptrain.core.state import AgreedState
from p2ptrain.core.trust import Trust
from p2ptrain.core.view import NodeView
from p2ptrain.errors import DataError

GAP_SECONDS = 5.0  # after the deadline: if the driver is later than this, the machine slept
PEERS_MAX = 1_024  # connections that the core tracks; the network layer keeps far fewer
SAVE_SCORES_SECONDS = 60.0  # a restart may lose the observations of the last minute
RECALL_MARGIN = 2  # rounds: others may be one behind what we had seen, and we may have been one ahead


class Node:
    """The protocol's state machine for one participant."""

    def __init__(self, run: RunConfig, run_id: bytes, me: bytes, signer: Signer, rng: Random) -> None:
        self.context = Context(run, run_id, me, signer, rng)
        self.deadline: float | None = None
        self.has_started = False
        self.chain: Chain
        self.here: Round
        self.work: LocalWork
        self.repair: Repair
        self.catching_up: CatchingUp
        self.regrouping: Regrouping
        self.membership: Membership
        self.inbox: Inbox
        self.trust: Trust | None = None  # until a history with the trusted head is found
        self.recalled: dict[bytes, int] | None = None  # members' rounds, while we do not know what we have sent
        self._view = NodeView(self)
        self._saved_scores = b""
        self._saved_scores_at = 0.0
        self._last = 0.0
        self._shift = 0.0  # from the driver's clock to ours, which never jumps or goes back
        self._due = 0.0  # the deadline on our own clock
        self._rested: tuple[object, ...] | None = None  # `_counted` after the last `_go_on`; None: must not rest
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.Started: self._started,
            ev.MalformedReceived: self._malformed_received,
            ev.PeerSeen: self._peer_seen,
            ev.PeerLost: self._peer_lost,
            ev.TrainingFinished: self._training_finished,
            ev.TrainingFailed: self._training_failed,
            ev.PayloadArrived: self._payload_arrived,
            ev.FetchFailed: self._fetch_failed,
            ev.Applied: self._applied,
            ev.CaughtUp: self._caught_up,
            ev.CatchUpFailed: self._catch_up_failed,
            ev.Asked: self._asked,
            ev.HistoryAsked: self._history_asked,
            ev.HistoryArrived: self._history_arrived,
            ev.HistoryFailed: self._history_failed,
            ev.StopRequested: self._stop_requested,
            ev.Tick: self._tick,
        }

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Processes an event and returns the effects to carry out."""
        context, before = self.context, self._shift
        if now < self._last:
            self._shift += self._last - now
        self._last = now
        slept = self.deadline is not None and now > self.deadline + GAP_SECONDS
        if self.deadline is not None and slept:
            self._shift -= now - self.deadline
        if now + self._shift < context.now:  # a rounding error
            self._shift = context.now - now
        context.now = max(context.now, now + self._shift)
        if slept:
            self._woke_up()
        self._handlers[type(event)](event)
        is_quiet = type(event) is ev.MessageReceived and not context.effects and self._shift == before
        if is_quiet and context.now < self._due and self._rested is not None and self._counted() == self._rested:
            return []  # nothing to do, and the deadline is unchanged
        self._go_on()
        self._rested = self._counted() if self.trust is None and self._may_rest() else None
        effects, context.effects = context.effects, []
        return effects

    def _may_rest(self) -> bool:
        """Whether only a change of `_counted`, the deadline, or an event other than a message can let us advance."""
        regrouping, work, now = self.regrouping, self.work, self.context.now
        is_working = work.is_current or work.applying is not None or work.catching is not None
        is_called = regrouping.attempt >= 0 or bool(regrouping.calls or regrouping.signed)
        stall = self.context.run.agreement.stall_seconds
        is_late = regrouping.since is not None and now >= regrouping.since + stall  # then every message counts
        is_waiting = is_working and not (is_called or is_late) and self.context.me in self.here.state.place
        return is_waiting and not self._is_agreeing()

    def _is_agreeing(self) -> bool:
        """Whether any message may advance this round, and not only one that reaches a threshold."""
        here, agreement = self.here, self.here.agreement
        if agreement.is_due or agreement.decided is not None or here.questions.open:
            return True
        proposal = agreement.views[agreement.view].proposal
        if proposal is not None:
            judged = here.judged.get(proposal.digest)
            return judged is None or not (judged.is_held or judged.is_bad)
        may_propose = agreement.stage is Stage.PROPOSE and agreement.proposed < agreement.view
        return may_propose and agreement.proposer(agreement.view) == self.context.me

    def _counted(self) -> tuple[object, ...]:
        """Returns the state that `_go_on` depends on and that a message may change without an effect. Must be cheap."""
        here, catching_up, regrouping = self.here, self.catching_up, self.regrouping
        agreement = here.agreement
        return (
            here.closed_at,
            here.collecting.deadline,
            here.collecting.has_any,
            here.propose_at,
            len(here.questions.open),
            agreement.is_due,
            agreement.decided,
            agreement.stage,
            agreement.timer,
            agreement.views[agreement.view].proposal,
            len(self.context.requests.by_name),
            self.work.arrivals_counted,
            self.context.payloads.deadline,
            catching_up.deadline,
            catching_up.is_behind,
            len(regrouping.calls),
            len(regrouping.signed),
        )

    # -----------------------------------------------------------------------------------------------
    # Startup

    def _started(self, event: ev.Started) -> None:
        context, saved = self.context, event.saved
        if saved.scores:
            try:
                context.reputation.restore(saved.scores, context.now)
            except DataError:  # scores are only a help: the node starts without them
                context.counters["saved scores damaged"] += 1
        self.chain = Chain.restored(saved, context.run_id, context.run.agreement.history_rounds)
        is_forgetful = event.forgetful and self.chain.state.members != (context.me,)
        if is_forgetful:
            context.emit(ev.Persist(ev.Silence(b"", NUMBER_MAX)))
        for silence in saved.silences:
            if silence.branch:
                context.keep_silent(silence.branch, silence.round)
            else:
                context.silent_everywhere = silence.round
        if is_forgetful or context.silent_everywhere >= NUMBER_MAX:
            self.recalled, context.silent_everywhere = {}, NUMBER_MAX
        self.work = LocalWork(context, self.chain, saved.applied_round, saved.applied_root)
        self.repair = Repair(context)
        lies = (saved.halted.first, saved.halted.second) if saved.halted is not None else None
        self.catching_up = CatchingUp(context, self.chain, self._may_follow, lambda: self.regrouping.has_waited, lies)
        context.is_halted = lies is not None
        self.membership = Membership(context, context.requests, event.claim)
        self.inbox = Inbox(self)
        if event.trust:
            self.trust = Trust(context, self.chain, event.trust)
        self._handlers[ev.MessageReceived] = self._not_heard if self.trust else self.inbox.take
        said = [decode(record.envelope, context.signer) for record in saved.said]
        for received, record in zip(said, saved.said, strict=True):
            context.remember(received, record)
        self.work.restore([each for each in said if isinstance(each.message, Announcement)])
        self._begin_round()
        if again := self.work.say_again():
            context.publish(*again)
        self.has_started = True

    def _stand_by(self, records: list[ev.Said]) -> None:
        """Restores our own messages of a round that we were in before, and the messages that back them."""
        here, context = self.here, self.context
        said = [decode(record.envelope, context.signer) for record in records]
        self.regrouping.restore([each for each in said if isinstance(each.message, Regroup)])
        votes = [each for each in said if isinstance(each.message, Proposal | Vote)]
        backing = [decode(envelope, context.signer) for record in records for envelope in record.backing]
        for received in backing:
            if isinstance(received.message, Availability):
                here.availabilities.setdefault(received.digest, received)
            elif isinstance(received.message, Announcement):
                self.inbox.announcement(context.me, received, asked_for=True)
            elif isinstance(received.message, JoinRequest | Leave | Evidence):
                self.context.requests.add(received, self.chain.state, asked_for=True)
        here.agreement.restore(
            votes, [each for each in backing if isinstance(each.message, Proposal | Vote)], context.now
        )
        if votes:
            context.publish(*votes)

    # -----------------------------------------------------------------------------------------------
    # Events

    def _malformed_received(self, event: ev.MalformedReceived) -> None:
        self.context.reputation.note(event.sender, Reason.MALFORMED, self.context.now)
        self.inbox.shun(event.sender)

    def _peer_seen(self, event: ev.PeerSeen) -> None:
        peers = self.context.peers
        if not peers:
            self.regrouping.restart_clock()
        if len(peers) < PEERS_MAX and event.peer != self.context.me:
            peers[event.peer] = None
            if self.trust is None:
                self.repair.greet(self.here, event.peer)
            self.work.peer_seen()

    def _peer_lost(self, event: ev.PeerLost) -> None:
        self.context.peers.pop(event.peer, None)

    def _training_finished(self, event: ev.TrainingFinished) -> None:
        self.work.finished(event, self.here)

    def _training_failed(self, event: ev.TrainingFailed) -> None:
        self.work.failed(event.round)

    def _payload_arrived(self, event: ev.PayloadArrived) -> None:
        if self.context.payloads.arrived(event.payload, event.good, event.author, event.payload_bytes):
            self.inbox.payload_came(event.payload)

    def _fetch_failed(self, event: ev.FetchFailed) -> None:
        self.context.payloads.failed(event.payload, event.peer)

    def _applied(self, event: ev.Applied) -> None:
        self.work.applied(event.branch, event.round, event.root)
        self._keep_payloads()

    def _caught_up(self, event: ev.CaughtUp) -> None:
        self.work.caught_up(event.round, event.root, event.attempt)
        self._keep_payloads()

    def _catch_up_failed(self, event: ev.CatchUpFailed) -> None:
        self.work.catch_up_failed(event.attempt)

    def _asked(self, event: ev.Asked) -> None:
        if not self.context.reputation.is_greylisted(event.peer, self.context.now):
            self.repair.answer(self.here, event.peer, event.names)

    def _history_asked(self, event: ev.HistoryAsked) -> None:
        if self.repair.may_tell_history(event.peer):
            self.context.emit(ev.SendHistory(event.peer, self.chain.answer(event.branch, event.round)))

    def _not_heard(self, event: ev.MessageReceived) -> None:
        self.context.counters["messages before the trusted head"] += 1

    def _history_arrived(self, event: ev.HistoryArrived) -> None:
        if self.trust is not None:
            trusted = self.trust.answered(event.peer, event.history)
            if trusted is not None:
                self.trust, self._handlers[ev.MessageReceived] = None, self.inbox.take
                self._adopt(trusted)
            return
        verified = self.catching_up.answered(event.peer, event.history)
        if self.catching_up.proof_of_lies is not None and not self.context.is_halted:
            self.context.is_halted = True
            self.context.emit(ev.Persist(ev.Halted(*self.catching_up.proof_of_lies)))
        if verified is not None:
            self._adopt(verified)

    def _history_failed(self, event: ev.HistoryFailed) -> None:
        if self.trust is not None:
            self.trust.failed(event.peer)
        self.catching_up.failed(event.peer)

    def _stop_requested(self, event: ev.StopRequested) -> None:
        self.context.is_stopping = True
        if event.keeps_place:
            self.membership.go_away()
        else:
            self.membership.leave(self.chain.state)

    def _tick(self, event: ev.Tick) -> None:
        """Does nothing: `_go_on` does everything that is due."""

    def _woke_up(self) -> None:
        self.context.counters["gaps"] += 1
        self.regrouping.restart_clock()
        self.repair.greet(self.here, *self.context.some_peers(3))

    # -----------------------------------------------------------------------------------------------
    # Advancing

    def _go_on(self) -> None:
        """Does everything that can be done now."""
        if self.trust is not None:  # until then, it only looks for a history, or leaves
            self.trust.tick()
            self.membership.tick(self.chain.state, self.work, is_near=False)
            self._rest(self.trust.deadline, self.membership.deadline(self.chain.state))
            return
        self.context.payloads.tick()
        self.here.tick()
        while True:
            if self.here.closed_at is not None:
                self.regrouping.start_clock()
            self.regrouping.tick()
            if not (self._decide() or self._regroup()):
                break
            self.here.tick()
        self.catching_up.tick()
        self.work.go_on()
        self.repair.tick(self.here, self._is_waiting)
        self.membership.tick(self.chain.state, self.work, self.catching_up.is_near)
        self._rest(
            self.here.deadline,
            self.context.payloads.deadline,
            self.regrouping.deadline,
            self.catching_up.deadline,
            self.work.deadline,
            self.membership.deadline(self.chain.state),
            self.repair.deadline,
        )

    def _rest(self, *times: float | None) -> None:
        """Sets the deadline to the earliest of these times."""
        due = self._due = max(self.context.now, min(time for time in times if time is not None))
        self.deadline = due - self._shift
        while self.deadline + self._shift < due:  # if rounded down, the tick would come slightly early
            self.deadline = nextafter(self.deadline, inf)

    @property
    def _is_waiting(self) -> bool:
        """Whether we are waiting for others, and not only for our own device."""
        is_outside = self.context.me not in self.chain.state.place
        return self.here.closed_at is not None or self.catching_up.is_behind or is_outside

    def _decide(self) -> bool:
        """Enters the next round if this one was decided."""
        entry = self.here.decision() if self.here.agreement.decided else None
        if entry is None or self.context.is_halted or self.context.has_stopped:
            return False
        self._follow(entry, self.chain.state.after(entry.manifest, self.context.run))
        self._begin_round(self.here)
        return True

    def _regroup(self) -> bool:
        """Begins a branch with the remaining members if a quorum of them has signed it."""
        if not self.regrouping.signed or self.context.run.agreement.on_quorum_loss == "halt":
            return False
        beginning = self.regrouping.beginning()
        if beginning is None:
            return False
        self.context.counters["regroups"] += 1
        self._follow(beginning, follow(self.chain.state, beginning, self.context.run, self.context.signer))
        self._begin_round(self.here)
        return True

    def _may_follow(self, beginning: Beginning) -> bool:
        return self.regrouping.may_follow(beginning)

    def _follow(self, step: Step, state: AgreedState, base: AgreedState | None = None) -> None:
        if isinstance(step, Beginning):
            self._leave_branch()
        self.chain.append(step, state)
        trunk = self.chain.trunk(base) if self.chain.has_new_trunk else None
        self.context.emit(ev.Persist(ev.Certified(step, state, trunk)))
        if not isinstance(step, Beginning):
            self.context.tallies.take(step.manifest)
            self.context.claims.take(step.manifest, self.context.offers)
        self.work.advanced(None if isinstance(step, Beginning) else step.manifest)

    def _leave_branch(self) -> None:
        """Records that we stay silent on the branch that we leave, which may win in the end, after a restart."""
        left = self.chain.state
        spoken = left.round + 1 + self.context.run.agreement.overlap_rounds
        self.context.emit(ev.Persist(ev.Silence(left.branch, spoken)))

    def _begin_round(self, before: Round | None = None) -> None:
        context, state = self.context, self.chain.state
        self.catching_up.advanced()
        context.offers.prune(state)
        context.claims.begin(state, context.offers)
        context.requests.prune(state, self.chain.recent(REQUEST_ROUNDS))
        self._keep_payloads()
        context.heard_at = {key: at for key, at in context.heard_at.items() if key in state.place}
        context.arrivals.forget(state.place)
        context.tallies.forget(state.place)
        self.regrouping = Regrouping(context, state)
        if before is not None:
            before.agreement.release()
        self.here = Round(context, state)
        if records := context.remembered(state.branch, self.here.number):
            self._stand_by(records)
        self.inbox.begin_round()
        self.repair.welcome(self.here)
        self._save_scores()

    def _save_scores(self) -> None:
        """Persists the peers' scores now and then, so that they survive a restart."""
        context = self.context
        if context.now - self._saved_scores_at < SAVE_SCORES_SECONDS:
            return
        self._saved_scores_at = context.now
        scores = context.reputation.saved(context.now)
        if context.reputation.records and scores != self._saved_scores:
            self._saved_scores = scores
            context.emit(ev.Persist(ev.Observed(scores)))

    def _keep_payloads(self) -> None:
        self.context.payloads.keep(self.context.offers.by_payload.keys() | self.work.payloads_needed())

    def _adopt(self, verified: Verified) -> None:
        """Follows the history that a peer has proved."""
        context, chain, point = self.context, self.chain, verified.point
        if point is not chain.state:
            self._leave_branch()
            context.counters["branches left"] += 1
            chain.rewind(point)
            self.work.rewound(point.round)
        base = verified.base
        if base is not None:
            chain.rebase(verified.changes, base)
        elif not chain.steps:  # the point may be older than the kept history: the store has to begin there, too
            base = chain.base
        steps = verified.steps_for(context)
        for step, state in steps:
            self._follow(step, state, base)
            base = None
        context.counters["rounds caught up"] += len(steps)
        self._begin_round(self.here)

    def recall(self, member: bytes, number: int) -> None:
        """Notes a member's round, to find out how long we have to stay silent after losing our log.

        Any quorum includes an honest member that voted in the last decided round, and we can have spoken in the next
        one at most. Rounds far beyond the others, which f liars may have made up, must not silence us forever.
        """
        assert self.recalled is not None
        self.recalled[member] = number
        roster = self.chain.state.roster
        if len(self.recalled) >= min(roster.quorum, roster.size - 1):
            overlap = self.context.run.agreement.overlap_rounds
            claimed = sorted(self.recalled.values(), reverse=True)
            highest = min(claimed[0], claimed[roster.tolerated] + self.chain.kept)
            self.context.silent_everywhere = highest + overlap + RECALL_MARGIN
            self.recalled = None
            self.context.emit(ev.Persist(ev.Silence(b"", self.context.silent_everywhere)))

    # -----------------------------------------------------------------------------------------------
    # Views for others

    def view(self) -> NodeView:
        """Returns the read-only view of the node, for everyone outside the core."""
        return self._view

    def limits(self) -> dict[str, tuple[int, int]]:
        """Returns the size and bound of every buffer."""
        context = self.context
        members = self.chain.state.place
        owners: tuple[Any, ...] = (
            context.offers, context.payloads, context.requests, context.arrivals, self.chain, self.here, self.work,
            self.repair, self.catching_up, self.regrouping, self.inbox, context.reputation,
            context.tallies, context.claims, *([self.trust] if self.trust else []),
        )  # fmt: skip
        found = {name: limit for owner in owners for name, limit in owner.limits().items()}
        found["connected peers"] = (len(context.peers), PEERS_MAX)
        found["members heard"] = (len(context.heard_at), len(members))
        return found
