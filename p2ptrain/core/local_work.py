"""Local work: decides when to train and what to apply, and checks this node's state against the certified one.

Training waits for the newest applied state, and for the last contribution to be taken or to expire: one is on offer at
a time, two with overlap (overlap.py), and the next rounds are left to these. If only contributions from the newest
state count, a training that begins late ends late, and so would the next one and all after it: such a node skips the
round, and begins the next one together with the others.

Certified rounds are applied in order, each once all its payloads are here. Every manifest carries the newest root that
q - f members attest; a node with a different root for that round has computed something wrong. It stops contributing
(`quarantine`), fetches the certified state from its peers, and goes on; a counter tells how often, because a machine on
which this happens repeatedly is broken."""

from __future__ import annotations

from dataclasses import dataclass, replace

from p2ptrain.core import events as ev
from p2ptrain.core.auditing import Auditing, share_of
from p2ptrain.core.chain import Chain
from p2ptrain.core.context import Context
from p2ptrain.core.history import Entry
from p2ptrain.core.manifest import Manifest
from p2ptrain.core.messages import SHORT_BYTES, Announcement, Received, read
from p2ptrain.core.overlap import Overlap
from p2ptrain.core.pace import pace_of
from p2ptrain.core.pools import Pools
from p2ptrain.core.round import Round
from p2ptrain.core.sizing import Sizing
from p2ptrain.core.succession import is_closing
from p2ptrain.core.tally import drawn

REPLAY_ROUNDS_MAX = 32  # above this, fetching the state is cheaper than fetching every round's payloads; a guess
FETCH_TRIES_MAX = 5  # for a certified payload; then the state itself is fetched
ROOTS_MAX = 128  # rounds whose own root is remembered: a manifest certifies one of the last few
RETRY_SECONDS = 1.0
RETRY_SECONDS_MAX = 30.0
CERTIFIED_MAX = 256  # roots that may be fetched: more states than any peer keeps
SOURCES_MAX = 8  # peers that a state is fetched from at once
AGAIN_SECONDS, AGAIN_SECONDS_MAX = 5.0, 60.0  # until a failed training is tried again; doubled each time
PASSED_TIMES = 2.0  # times a round's usual length without any contribution: then there may be nobody else


@dataclass(frozen=True, slots=True)
class Training:
    round: int
    base_round: int
    base_root: bytes
    began: float
    is_useful: bool = True  # False once its base is no longer on our chain, or its round too far ahead there
    is_moved: bool = False  # another state was adopted since it began: a later base may be of either
    is_paced: bool = False  # the device knows the others' pace
    is_over: bool = False  # and that its round has passed


class LocalWork:
    def __init__(self, context: Context, pools: Pools, chain: Chain, started: ev.Started) -> None:
        self.context, self.pools, self.chain = context, pools, chain
        self.overlap = Overlap(context.run.agreement.overlap_rounds, started.can_overlap)
        self.applied_round, applied_root = started.saved.applied_round, started.saved.applied_root
        self.roots = {self.applied_round: applied_root} if applied_root else {}  # our own, by round
        self.applying: Manifest | None = None
        self.training: Training | None = None
        self.training_seconds = 0.0  # of our last training, or of its least steps if it might have taken fewer
        self.passed = (b"", 0)  # branch and round that we skipped last, because we would have been too late
        self.passed_until = 0.0  # until then, skip it even if nobody else has contributed
        self.look_at: float | None = None  # when to reconsider training
        self.failed_for = (b"", 0)  # branch and round of our last training, if it failed
        self.again_at = self.again_seconds = 0.0  # when it is tried again, and how long that is after it failed
        self.outstanding: dict[int, Received] = {}  # our announcements that may still be taken
        self.sizing = Sizing(context.run.recipe.ks)
        self.auditing = Auditing(context, pools, chain, started.audit_share)
        self.announced: dict[bytes, int] = {}  # by branch: the last round that we announced for
        self.is_astray = not applied_root  # the applied state is not on our chain, or there is none
        self.is_quarantined = False  # our root is not the certified one
        self.catching: dict[int, bytes] | None = None  # the candidate roots of the state being fetched
        self.attempt = -1  # number of the last fetch of a state: the chain may change before an earlier one ends
        self.fetched_round = -REPLAY_ROUNDS_MAX  # of the state that was fetched last
        self.retry_at: float | None = None
        self.tries = 0

    @property
    def is_current(self) -> bool:
        """Whether our state is the newest agreed one."""
        return not (self.is_astray or self.is_quarantined) and self.applied_round == self.chain.state.round

    @property
    def is_near(self) -> bool:
        """Whether our state lacks no more rounds than we replay."""
        lacking = self.chain.state.round - self.applied_round
        return not (self.is_astray or self.is_quarantined) and lacking <= REPLAY_ROUNDS_MAX

    def own_root(self) -> tuple[int, bytes]:
        """Returns the newest root that we attest, with its round: our own, unless we know that it is wrong."""
        if self.is_astray or self.is_quarantined:
            return self.chain.state.root_round, self.chain.state.root
        decided = self.chain.state.succession.decided
        if decided is not None and decided.last in self.roots:  # rounds after it change nothing, and its root is whole
            return decided.last, self.roots[decided.last]
        return self.applied_round, self.roots[self.applied_round]

    # -- Progress of the chain ----------------------------------------------------------------------

    def advanced(self, manifest: Manifest | None) -> None:
        """Settles our contributions after the chain advanced by a manifest, or by the beginning of a branch (None)."""
        me, state = self.context.me, self.chain.state
        taken = {each.round for each in manifest.taken if each.author == me} if manifest else set()
        if manifest is not None and manifest.round in self.outstanding and (taken or not self._was_last(manifest)):
            self.sizing.decided(manifest.round, taken)
        for number in sorted(self.outstanding):
            announcement = read(self.outstanding[number], Announcement)
            if number in taken:
                self.context.counters["contributions taken"] += 1
                del self.outstanding[number]
            elif (
                announcement.branch != state.branch
                or is_closing(state)
                or (number <= state.round + 1 and not state.may_take(announcement, self.pools.offers.staleness))
            ):
                self.context.counters["contributions expired"] += 1
                self.context.emit(ev.Return(number))
                del self.outstanding[number]
        if manifest is None:
            self._give_up_ahead(state.round)
        self._check_root()

    def _was_last(self, manifest: Manifest) -> bool:
        """Whether our contribution was announced after all that a round takes: our training was late, not our line."""
        offsets, me = self.pools.arrivals.offsets, self.context.me
        others = [offsets[each.author] for each in manifest.taken if each.author in offsets and each.author != me]
        return me in offsets and bool(others) and offsets[me] > max(others)

    def _give_up_ahead(self, number: int) -> None:
        """Gives up a training for a round after the next one, once the chain goes on from `number` on another branch.

        On offer, it would leave the next round to all who trained ahead, and that round cannot take it."""
        if self.training is not None and self.training.round > number + 1:
            self.training = replace(self.training, is_useful=False)

    def _check_root(self) -> None:
        state = self.chain.state
        mine = self.roots.get(state.root_round)
        if mine is not None and mine != state.root and not (self.is_quarantined or self.is_astray):
            self.is_quarantined = True
            self.applying = None
            self.context.counters["root mismatches"] += 1
            self.context.emit(ev.NoteWrongState(self.applied_round))

    def rewound(self, number: int) -> None:
        """Drops work that was based on later rounds, after the chain went back to this one."""
        if self.applied_round > number or self.applying or self.catching:  # the replica may have begun
            self.is_astray = True
        self.applying = None
        self.catching = None
        self.roots = {at: root for at, root in self.roots.items() if at <= number}
        if self.training is not None and self.training.base_round > number:
            self.training = replace(self.training, is_useful=False)
        self._give_up_ahead(number)

    # -- Applying -----------------------------------------------------------------------------------

    def go_on(self) -> None:
        """Applies the next certified round if possible, and trains if it is time."""
        if self.catching is None:
            may_fetch = self.retry_at is None or self.context.now >= self.retry_at
            if self.is_astray or self.is_quarantined:
                if may_fetch:
                    self._catch_up()
            elif self.applying is None and self.applied_round < self.chain.state.round:
                self._apply_next(may_fetch)
        self._train()
        self._tell_pace()

    def _apply_next(self, may_fetch: bool) -> None:
        state = self.chain.state
        entry = self.chain.entry(self.applied_round + 1)
        can_jump = state.root_round > self.applied_round
        is_far = min(state.round - self.applied_round - 1, self.applied_round - self.fetched_round) >= REPLAY_ROUNDS_MAX
        if may_fetch and (entry is None or (can_jump and is_far)):
            self._catch_up()
        if entry is None or self.catching is not None:
            return  # between two attempts it goes on round by round, as peers may have no newer state for long
        payloads, tries = self.pools.payloads, 0
        missing = [taken for taken in entry.manifest.taken if not payloads.is_good(taken.payload)]
        peers, place = self.context.peers, state.place
        holders = [key for key in peers if key in place] or state.members  # likely to have what is certified
        for taken in missing:
            payloads.want(taken.payload, taken.payload_bytes, taken.author, holders, is_old=True)
            want = payloads.wanted.get(taken.payload)
            tries = max(tries, want.tries if want else FETCH_TRIES_MAX)
        if not missing:
            self.applying = entry.manifest
            self.context.emit(ev.Apply(entry.manifest))
        elif can_jump and may_fetch and tries >= FETCH_TRIES_MAX:
            self._catch_up()

    def applied(self, branch: bytes, number: int, root: bytes) -> None:
        manifest = self.applying
        if manifest is None or (manifest.branch, manifest.round) != (branch, number):
            return  # our chain has changed meanwhile
        self.applying = None
        self.applied_round = number
        self._remember(number, root)
        self._check_root()
        self._look_at_exchange(manifest)
        self.auditing.look(number)

    def _look_at_exchange(self, manifest: Manifest) -> None:
        """Decides anew whether to overlap, after a round was applied; one of this node alone has no exchange."""
        context = self.context
        took = self.pools.exchange.applied(manifest.round, context.now)
        if took is None or not manifest.taken:
            return
        if all(taken.author == context.me for taken in manifest.taken):
            took = replace(took, seconds=0.0)
        if self.overlap.look(took):
            context.counters["overlap begun" if self.overlap.is_on else "overlap ended"] += 1

    def _remember(self, number: int, root: bytes) -> None:
        self.roots[number] = root
        while len(self.roots) > ROOTS_MAX:
            del self.roots[min(self.roots)]

    def _catch_up(self) -> None:
        state, context = self.chain.state, self.context
        first_needed = state.root_round + 1
        if first_needed <= state.round and self.chain.entry(first_needed) is None:
            self.retry_at = None
            return  # the kept rounds do not continue from the certified root yet; those of later rounds will
        others = [peer for peer in context.peers if peer in state.place] or list(context.peers)
        context.rng.shuffle(others)
        sources = context.reputation.preferred(others[: 2 * SOURCES_MAX], context.now)[:SOURCES_MAX]
        is_lost = self.is_astray or self.is_quarantined  # otherwise only a later state is useful
        roots = [(number, root) for number, root in self._certified_roots() if is_lost or number > self.applied_round]
        self.catching = dict(roots)
        context.counters["states fetched"] += 1
        self.attempt += 1
        context.emit(ev.CatchUp(tuple(roots), tuple(sources), self.attempt))

    def _certified_roots(self) -> list[tuple[int, bytes]]:
        """Returns certified (round, root) pairs, the newest first, from which the kept rounds continue."""
        chain, found = self.chain, {self.chain.state.root_round: self.chain.state.root}
        first = next((step.step.manifest.round for step in chain.steps if isinstance(step.step, Entry)), None)
        for state in (*(certified.state for certified in reversed(chain.steps)), chain.base):
            if first is None or state.root_round < first - 1 or len(found) >= CERTIFIED_MAX:
                break
            found.setdefault(state.root_round, state.root)
        return sorted(found.items(), reverse=True)

    def caught_up(self, number: int, root: bytes, attempt: int) -> None:
        if self.catching is None or attempt != self.attempt or self.catching.get(number) != root:
            return
        self.catching, self.retry_at, self.tries = None, None, 0
        self.applied_round, self.fetched_round, self.roots = number, number, {number: root}
        self.is_astray = self.is_quarantined = False
        if self.training is not None:
            self.training = replace(self.training, is_moved=True)

    def peer_seen(self) -> None:
        """Retries a failed fetch at once, because a new peer may have the state."""
        if self.catching is None:
            self.retry_at = None

    def catch_up_failed(self, attempt: int) -> None:
        if self.catching is None or attempt != self.attempt:
            return
        self.catching = None
        self.retry_at = self.context.now + min(RETRY_SECONDS * 2.0 ** min(self.tries, 16), RETRY_SECONDS_MAX)
        self.tries += 1

    # -- Training -----------------------------------------------------------------------------------

    def _train(self) -> None:
        self.look_at = None
        state, context = self.chain.state, self.context
        overlap = int(self.overlap.is_on)
        is_free = self.training is None and not context.is_stopping and len(self.outstanding) <= overlap
        if not is_free or self.applying is not None or not self.is_current or context.me not in state.place:
            return
        free = state.round + 1 + len(self.outstanding)  # a round takes one contribution of ours, the oldest
        number = max(free, self.announced.get(state.branch, 0) + 1)
        if number > state.round + 1 + overlap or not context.voice.may_speak(state.branch, number):
            return
        if (decided := state.succession.decided) is not None and number > decided.last:
            return
        if self.failed_for == (state.branch, number) and context.now < self.again_at:
            self.look_at = self.again_at
            return
        if self._lets_pass(number):
            return
        self.training = Training(number, self.applied_round, self.roots[self.applied_round], context.now)
        unsettled = tuple(sorted(self.outstanding))  # everything agreed on is applied
        is_due = context.run.eval.is_due(state.round)
        looks = is_due, is_due and context.me in drawn(state)
        share = share_of(self.chain, state.branch, context.me, number, context.run)
        assert share is not None, "a node that is admitted has one, at the latest by this state"
        _, place, places, slots = share
        context.emit(ev.Train(number, self.applied_round, place, places, unsettled, *looks, self.sizing.k, slots))

    def _lets_pass(self, number: int) -> bool:
        """Whether to skip a round, because a training that begins now would end too late; never twice in a row."""
        context, state = self.context, self.chain.state
        now = context.now
        if self.passed != (state.branch, number):
            arrivals = self.pools.arrivals
            began = arrivals.starts.get(number)
            patience, _ = arrivals.patience(key for key in state.members if key != self.context.me)
            if (
                self.pools.offers.staleness
                or self.passed == (state.branch, number - 1)
                or began is None
                or patience is None
                or not arrivals.are_enough(state.members)  # the others would wait for us as for a lost quorum
            ):
                return False
            if not self.training_seconds <= patience < now - began + self.training_seconds:
                return False
            self.passed, self.passed_until = (state.branch, number), began + PASSED_TIMES * patience
            self.context.counters["rounds let pass"] += 1
        if now < self.passed_until:
            self.look_at = self.passed_until
            return True
        return any(self.pools.offers.has_from(author, state) for author in self.pools.offers.by_author)

    def _tell_pace(self) -> None:
        """Tells the device the others' pace once it is known, and when the round of the training is over."""
        training, context = self.training, self.context
        recipe, arrivals = context.run.recipe, self.pools.arrivals
        if training is None or training.is_over or not recipe.local_steps_min:
            return
        number, state = training.round, self.chain.state
        if not training.is_useful or number <= state.round:
            self.training = replace(training, is_over=True)
            context.emit(ev.Pace(number))
        elif not training.is_paced and number in arrivals.starts:
            others = [key for key in state.members if key != context.me]
            if (seconds := arrivals.pace(others, recipe.local_steps)) is not None:
                self.training = replace(training, is_paced=True)
                context.emit(pace_of(number, arrivals.starts[number], seconds, context.now))

    @property
    def counted(self) -> int:
        """The arrivals so far, while the next one may let us tell the pace and so advance."""
        is_waiting = self.training is not None and not self.training.is_paced
        return self.pools.arrivals.count if is_waiting and self.context.run.recipe.local_steps_min else 0

    def finished(self, event: ev.TrainingFinished, here: Round) -> None:
        """Announces the trained contribution, if it may still be taken."""
        training = self.training
        if training is None or training.round != event.round:
            return
        self.training = None
        self.sizing.sent(event.k)
        self.auditing.trained()
        state, context = self.chain.state, self.context
        recipe, seconds = context.run.recipe, context.now - training.began
        fewest = (recipe.local_steps_min or recipe.local_steps) / (event.steps or recipe.local_steps)
        self.training_seconds = seconds * min(1.0, fewest)
        base, base_root = training.base_round, training.base_root
        if not (event.held_out or training.is_moved):  # a loss is of the base that was asked for
            later = min(event.base_round, event.round)
            base, base_root = (later, self.roots[later]) if later in self.roots else (base, base_root)
        announcement = Announcement(
            state.branch, event.round, base, base_root, event.payload, event.payload_bytes,
            event.content or event.payload[:SHORT_BYTES], event.steps, event.loss, event.held_out, context.me,
        )  # fmt: skip
        is_mine_to_say = (
            training.is_useful
            and not (self.is_astray or self.is_quarantined)
            and context.me in state.place
            and event.round > self.announced.get(state.branch, 0)
            and context.voice.may_speak(state.branch, event.round)
        )
        if is_mine_to_say:
            self.pools.claims.hear(announcement)
        may = (
            is_mine_to_say
            and not is_closing(state)
            and (
                state.may_take(announcement, self.pools.offers.staleness)
                or state.round + 1 < event.round <= state.round + 1 + context.run.agreement.overlap_rounds_max
            )
        )
        if not may:
            context.counters["contributions too late"] += 1
            self.pools.tallies.of(context.me).late += 1
            context.emit(ev.Return(event.round))
            if is_mine_to_say and event.round <= state.round and not is_closing(state):
                # Too late, but the others learn how long to wait.
                self.announced[state.branch] = event.round
                context.voice.publish_once(context.signed(announcement))
            return
        received = context.signed(announcement, event.attachment)
        self.announced[state.branch] = event.round
        self.outstanding[event.round] = received
        self.pools.payloads.came_along(announcement, good=True)
        self.pools.offers.add(received)
        self.pools.tallies.of(context.me).offered += 1
        self.pools.arrivals.note(context.me, event.round, context.now, event.steps)
        if event.round <= here.number:
            here.offer_announced(context.me)
        context.voice.publish_once(received, payloads=(event.payload,))
        here.offer_held(context.me)

    def failed(self, event: ev.TrainingFailed) -> None:
        """Tries again after a while, if the round is still open then: it may wait for a contribution of ours alone."""
        if self.training is None or self.training.round != event.round:
            return
        self.training = None
        context, failed = self.context, (self.chain.state.branch, event.round)
        seconds = 2.0 * self.again_seconds if failed == self.failed_for else AGAIN_SECONDS
        self.failed_for, self.again_seconds = failed, min(seconds, AGAIN_SECONDS_MAX)
        self.again_at = context.now + self.again_seconds
        context.counters["rounds let pass" if event.has_passed else "trainings failed"] += 1

    def restore(self, announcements: list[Received]) -> None:
        state = self.chain.state
        for received in announcements:
            announcement = read(received, Announcement)
            last = self.announced.get(announcement.branch, 0)
            self.announced[announcement.branch] = max(last, announcement.round)
            may = announcement.round > state.round + 1 or state.may_take(announcement, self.pools.offers.staleness)
            if announcement.branch == state.branch and may and self.context.me in state.place:
                self.outstanding[announcement.round] = received
                self.pools.payloads.came_along(announcement, good=True)
                self.pools.offers.add(received)

    @property
    def deadline(self) -> float | None:
        if self.catching is None and (self.is_astray or self.is_quarantined):
            return self.retry_at
        return self.look_at

    def payloads_needed(self) -> set[bytes]:
        """Returns the payloads of rounds that were agreed on and are not applied yet."""
        return {
            taken.payload
            for entry in self.chain.entries_after(self.applied_round)[:REPLAY_ROUNDS_MAX]
            for taken in entry.manifest.taken
        }

    def limits(self) -> dict[str, tuple[int, int]]:
        return {"own roots": (len(self.roots), ROOTS_MAX), "own announcements": (len(self.outstanding), 8)}
