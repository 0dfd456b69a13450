"""The participant: a node from its start on, with all its parts.

`take` passes an event to the part that it concerns, and `go_on` lets the node advance as far as it can: a decided round
leads to the next one, a certified round is applied, training begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from p2ptrain.core import events as ev
from p2ptrain.core.admission import REQUEST_ROUNDS, Asking
from p2ptrain.core.catchup import CatchingUp, Verified
from p2ptrain.core.chain import Chain
from p2ptrain.core.context import Context
from p2ptrain.core.history import Beginning, Step, follow
from p2ptrain.core.inbox import Inbox
from p2ptrain.core.local_work import LocalWork
from p2ptrain.core.membership import Membership
from p2ptrain.core.messages import Announcement, Assent, Availability, Moving, Proposal, Regroup, Vote, decode
from p2ptrain.core.pools import Pools
from p2ptrain.core.regroup import Regrouping
from p2ptrain.core.repair import Repair
from p2ptrain.core.reputation import Reason
from p2ptrain.core.round import Round
from p2ptrain.core.state import AgreedState
from p2ptrain.core.succession import is_over
from p2ptrain.core.trust import Trust
from p2ptrain.errors import DataError, RemoteProtocolError

PEERS_MAX = 1_024  # connections that the core tracks; the network layer keeps far fewer
SAVE_SCORES_SECONDS = 60.0  # a restart may lose the observations of the last minute


class Participant:
    def __init__(self, context: Context, event: ev.Started) -> None:
        saved = event.saved
        self.context, self.began = context, context.now
        if saved.scores:
            try:
                context.reputation.restore(saved.scores, context.now)
            except DataError:  # scores are only a help: the node starts without them
                context.counters["saved scores damaged"] += 1
        self.pools = Pools(context)
        run = context.run
        self.chain = Chain.restored(saved, context.run_id, run.agreement.history_rounds, run.predecessor.round)
        said = context.voice.restore(saved, context.signer, event.forgetful)
        self.work = LocalWork(context, self.pools, self.chain, event)
        self.repair = Repair(context)
        self.catching_up = CatchingUp(context, self.chain, lambda: self.regrouping, saved.halted)
        self.membership = Membership(context, self.pools.requests, event.claim)
        self.trust = Trust(context, self.chain, event.trust) if event.trust else None  # until it finds the trusted head
        self._saved_scores, self._saved_scores_at = b"", 0.0
        self._handlers: dict[type, Callable[[Any], object]] = {
            ev.MessageReceived: self._message_received,
            ev.MalformedReceived: self._malformed_received,
            ev.PeerSeen: self._peer_seen,
            ev.PeerLost: self._peer_lost,
            ev.TrainingFinished: lambda event: self.work.finished(event, self.here),
            ev.TrainingFailed: self.work.failed,
            ev.Audited: self.work.auditing.done,
            ev.PayloadArrived: self._payload_arrived,
            ev.FetchFailed: lambda event: self.pools.payloads.failed(event.payload, event.peer),
            ev.Applied: self._applied,
            ev.CaughtUp: self._caught_up,
            ev.CatchUpFailed: lambda event: self.work.catch_up_failed(event.attempt),
            ev.Asked: self._asked,
            ev.HistoryAsked: self._history_asked,
            ev.HistoryArrived: self._history_arrived,
            ev.HistoryFailed: self._history_failed,
            ev.MoveRequested: self._move_requested,
            ev.AssentRequested: self._assent_requested,
            ev.StopRequested: self._stop_requested,
            ev.Tick: lambda event: None,  # `go_on` does everything that is due
        }
        self.work.restore([each for each in said if isinstance(each.message, Announcement)])
        self._forget()
        self.regrouping = Regrouping(context, self.chain.state)
        self.here = self._round(heard_since=0.0)
        self.inbox = Inbox(context, self.pools, self.chain, self.catching_up, self.repair, self.here, self.regrouping)
        self._enter()
        if self.work.outstanding:
            context.publish(*self.work.outstanding.values())

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
                self.inbox.announcement(context.me, received, is_needed=True)
            elif isinstance(received.message, Asking):
                self.pools.requests.add(received, self.chain.state, is_needed=True)
        here.agreement.restore(
            votes, [each for each in backing if isinstance(each.message, Proposal | Vote)], context.now
        )
        if votes:
            context.publish(*votes)

    # -- Events -------------------------------------------------------------------------------------

    def take(self, event: ev.Event) -> None:
        self._handlers[type(event)](event)

    def _message_received(self, event: ev.MessageReceived) -> None:
        if self.trust is None:
            self.inbox.take(event)
        else:
            self.context.counters["messages before the trusted head"] += 1

    def _malformed_received(self, event: ev.MalformedReceived) -> None:
        self.context.reputation.note(event.sender, Reason.MALFORMED, self.context.now)
        self.inbox.shun(event.sender)

    def _peer_seen(self, event: ev.PeerSeen) -> None:
        peers = self.context.peers
        if not peers:
            self.regrouping.restart_clock()
        peers.pop(event.peer, None)  # its range may be another now
        if len(peers) < PEERS_MAX and event.peer != self.context.me:
            peers[event.peer] = event.range
            if self.trust is None:
                self.repair.greet(self.here, event.peer)
            self.work.peer_seen()

    def _peer_lost(self, event: ev.PeerLost) -> None:
        self.context.peers.pop(event.peer, None)
        self.catching_up.late.pop(event.peer, None)  # its answer will not come

    def _payload_arrived(self, event: ev.PayloadArrived) -> None:
        if self.pools.payloads.arrived(event.payload, event.good, event.author, event.payload_bytes, event.content):
            self.inbox.payload_came(event.payload)

    def _applied(self, event: ev.Applied) -> None:
        self.work.applied(event.branch, event.round, event.root)
        self._keep_payloads()

    def _caught_up(self, event: ev.CaughtUp) -> None:
        self.work.caught_up(event.round, event.root, event.attempt)
        self._keep_payloads()

    def _asked(self, event: ev.Asked) -> None:
        if not self.context.reputation.is_greylisted(event.peer, self.context.now):
            self.repair.answer(self.here, event.peer, event.names)

    def _history_asked(self, event: ev.HistoryAsked) -> None:
        if self.repair.may_tell_history(event.peer):
            self.context.emit(ev.SendHistory(event.peer, self.chain.answer(event.branch, event.round)))

    def _history_arrived(self, event: ev.HistoryArrived) -> None:
        if self.trust is not None:
            trusted = self.trust.answered(event.peer, event.history)
            if trusted is not None:
                self.trust = None
                self._adopt(trusted)
            return
        verified = self.catching_up.answered(event.peer, event.history)
        if self.catching_up.proof_of_lies is not None:
            self.context.voice.halt(self.catching_up.proof_of_lies)
        if verified is not None:
            self._adopt(verified)

    def _history_failed(self, event: ev.HistoryFailed) -> None:
        if self.trust is not None:
            self.trust.failed(event.peer)
        self.catching_up.failed(event.peer)

    def _move_requested(self, event: ev.MoveRequested) -> None:
        state = self.chain.state
        what = event.last, event.weights, event.root, event.change
        self._ask_for(Moving(state.branch, state.round + 1, *what, self.context.me))

    def _assent_requested(self, event: ev.AssentRequested) -> None:
        state = self.chain.state
        self._ask_for(Assent(state.branch, state.round + 1, event.motion, self.context.me))

    def _ask_for(self, message: Moving | Assent) -> None:
        """Publishes a request of our own, and attests it; one that is refused was made impossible meanwhile."""
        received = self.context.signed(message)
        try:
            is_new = self.pools.requests.add(received, self.chain.state)
        except RemoteProtocolError:
            is_new = False
        if is_new:
            self.context.publish(received)
        else:
            self.context.counters["requests without effect"] += 1

    def _stop_requested(self, event: ev.StopRequested) -> None:
        self.context.is_stopping = True
        if event.keeps_place:
            self.membership.go_away()
        else:
            self.membership.leave(self.chain.state, self.pools.arrivals.round_seconds)

    def wake(self) -> None:
        """Looks around after a sleep: its time does not count, and messages have been missed."""
        self.context.counters["gaps"] += 1
        self.regrouping.restart_clock()
        self.repair.greet(self.here, *self.context.some_peers(3))

    # -- Advancing ----------------------------------------------------------------------------------

    @property
    def may_rest(self) -> bool:
        """Whether only a change of `counted`, the deadline, or an event other than a message can let us advance."""
        work, here = self.work, self.here
        is_working = work.is_current or work.applying is not None or work.catching is not None
        is_waiting = is_working and self.trust is None and self.context.me in here.state.place
        return is_waiting and not (self.regrouping.needs_every_message or here.needs_every_message)

    @property
    def counted(self) -> tuple[object, ...]:
        """Whatever `go_on` depends on and a message can change without an effect. Must be cheap."""
        return (
            self.here.counted,
            self.pools.counted,
            self.work.counted,
            self.catching_up.counted,
            self.regrouping.counted,
        )

    def go_on(self) -> float:
        """Does everything that can be done now, and returns when there is more to do."""
        context, state = self.context, self.chain.state
        if is_over(state):
            return self._after_the_end(state)
        if self.trust is not None:  # until then, it only looks for a history, or leaves
            self.trust.tick()
            self.membership.tick(state, self.work, is_near=False)
            return self._earliest(self.trust.deadline, self.membership.deadline(state))
        self.pools.payloads.tick()
        self.here.tick()
        while True:
            if self.here.closed_at is not None:
                self.regrouping.start_clock()
            self.regrouping.tick()
            if is_over(self.chain.state) or not (self._decide() or self._regroup()):
                break
            if not is_over(self.chain.state):
                self.here.tick()
        self.catching_up.tick()
        self.work.go_on()
        is_waiting = self.here.closed_at is not None or self.catching_up.is_behind  # and not only for our own device
        self.repair.tick(self.here, is_waiting or context.me not in self.chain.state.place)
        self.membership.tick(self.chain.state, self.work, self.catching_up.is_near)
        return self._earliest(
            self.here.deadline,
            self.pools.payloads.deadline,
            self.regrouping.deadline,
            self.catching_up.deadline,
            self.work.deadline,
            self.membership.deadline(self.chain.state),
            self.repair.deadline,
        )

    def _after_the_end(self, state: AgreedState) -> float:
        """Applies what is left, and tells those who lag behind, until the node ends."""
        self.pools.payloads.tick()
        self.work.go_on()
        self.repair.tick(self.here, False)
        self.membership.end(self.work)
        times = self.pools.payloads.deadline, self.work.deadline, self.repair.deadline
        return self._earliest(*times, self.membership.deadline(state))

    def _earliest(self, *times: float | None) -> float:
        return max(self.context.now, min(time for time in times if time is not None))

    def _decide(self) -> bool:
        """Enters the next round if this one was decided."""
        entry = self.here.decision() if self.here.agreement.decided else None
        if entry is None or self.context.voice.is_halted or self.context.has_stopped:
            return False
        self._follow(entry, self.chain.state.after(entry.manifest, self.context.run))
        self._next_round()
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
        self._next_round()
        return True

    def _follow(self, step: Step, state: AgreedState, base: AgreedState | None = None) -> None:
        if isinstance(step, Beginning):
            self._leave_branch()
        self.chain.append(step, state)
        trunk = self.chain.trunk(base) if self.chain.has_new_trunk else None
        self.context.emit(ev.Persist(ev.Certified(step, state, trunk)))
        if not isinstance(step, Beginning):
            self.pools.take(step.manifest)
        self.work.advanced(None if isinstance(step, Beginning) else step.manifest)

    def _leave_branch(self) -> None:
        left = self.chain.state
        self.context.voice.leave(left.branch, left.round + 1)

    def _forget(self) -> None:
        """Forgets what no longer counts after the chain's state."""
        context, state = self.context, self.chain.state
        self.catching_up.advanced()
        self.pools.begin_round(state, self.chain.recent(REQUEST_ROUNDS))
        self._keep_payloads()
        context.heard_at = {key: at for key, at in context.heard_at.items() if key in state.place}

    def _round(self, heard_since: float) -> Round:
        return Round(self.context, self.pools, self.chain.state, heard_since, self.work.own_root)

    def _next_round(self) -> None:
        self._forget()
        self.regrouping = Regrouping(self.context, self.chain.state)
        self.here.agreement.release()
        self.here = self._round(self.here.began)
        self.inbox.enter(self.here, self.regrouping)
        self._enter()

    def _enter(self) -> None:
        if records := self.context.voice.remembered(self.here.branch, self.here.number):
            self._stand_by(records)
        self.inbox.take_early()
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
        self.pools.payloads.keep(self.pools.offers.by_payload.keys() | self.work.payloads_needed())

    def _adopt(self, verified: Verified) -> None:
        """Follows the history that a peer has proved."""
        context, chain, point = self.context, self.chain, verified.point
        if point is not chain.state:
            self._leave_branch()
            context.counters["branches left"] += 1
            chain.rewind(point)
            self.work.rewound(point.round)
            self.pools.arrivals.rewound(point.round)
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
        self._next_round()

    def limits(self) -> dict[str, tuple[int, int]]:
        context = self.context
        owners: tuple[Any, ...] = (
            self.pools, self.chain, self.here, context.voice, self.work, self.repair, self.catching_up,
            self.regrouping, self.inbox, context.reputation, *([self.trust] if self.trust else []),
        )  # fmt: skip
        found = {name: limit for owner in owners for name, limit in owner.limits().items()}
        found["connected peers"] = (len(context.peers), PEERS_MAX)
        found["members heard"] = (len(context.heard_at), len(self.chain.state.place))
        return found
