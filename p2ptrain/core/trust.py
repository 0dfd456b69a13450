"""Trust: adopts only a history that contains a head that a person has vouched for.

A newcomer verifies the rosters from genesis on by the signatures of their members. But keys of former members may have
leaked, and anyone with a quorum of them can sign another history of any length, which verifies just as well. No
protocol can tell the two apart from inside (weak subjectivity, Buterin 2014); it takes a recent fact from another
source. With `p2ptrain join --trust HEAD` that is the head of the history that somebody else follows, as shown by
`p2ptrain status`: the digest of a manifest, or a branch's id just after a regroup.

Why the head and not a state root: a manifest names its parent and the digest of the agreed state before it, including
the roster. So it cannot be put into another history, and continuing it needs a quorum of the right roster. A state root
is only a field, which a forger can copy into a manifest of his own and continue from there. For the same reason the
head counts only where the state before it was computed (`follow`), not among the changes of a jump, nor in a state that
a jump names: a forger could put it there between rosters of his own.

Until such a history is found, the node does not take part: it ignores messages, sends none, fetches no state, and asks
its connected peers in turn for the history after genesis. Each answer is followed on a trial chain, to its end or to
the head, whichever comes first; only a chain with the head is adopted. Everything before the head is verified as usual.
Peers keep `history_rounds` rounds: an older head is not found, and a newer one is found once it is certified.

No peer can hold a node in this state for long. A peer with more history has to fill its answers. A slow peer gives way
to others and gets more time on its next turn, so that a slow but honest peer finishes eventually. The next peer is
drawn at random: with any ranking, liars that just keep to the limits could stay ahead of an honest peer forever."""

from __future__ import annotations

from p2ptrain.core.catchup import ANSWER_SECONDS, Verified
from p2ptrain.core.chain import Chain
from p2ptrain.core.complaints import Code, Complaint, complaint
from p2ptrain.core.context import Context
from p2ptrain.core.events import AskHistory
from p2ptrain.core.history import ENTRIES_MAX, Beginning, Entry, History, Step, follow, jump
from p2ptrain.core.reputation import Reason
from p2ptrain.core.state import AgreedState
from p2ptrain.errors import RemoteProtocolError

PEER_SECONDS = 30.0  # per peer, if others wait: 256 rounds take a home connection ten; a guess, doubled each turn
PEER_SECONDS_MAX = 960.0
ANSWER_DOUBLINGS_MAX = 3  # of the seconds for an answer, one a turn: no edge waits for more than a minute
RETRY_SECONDS = 10.0  # until a peer without the head is asked again: the head's round may come later
ROUNDS_SPARE = 4 * ENTRIES_MAX  # that a peer may advance while we follow it; one whose history never ends is lying


class Trust:
    """The search for the trusted history, for a node that has not adopted any yet."""

    def __init__(self, context: Context, chain: Chain, head: bytes) -> None:
        self.context, self.head = context, head
        self.mine = chain.state  # genesis
        self.asked: bytes | None = None
        self.until = 0.0  # the deadline of the answer
        self.turn_until = 0.0  # the end of the peer's turn, if others wait
        self.turns_lost: dict[bytes, int] = {}  # by peer: turns that ended before its history did
        self.late: dict[bytes, None] = {}  # peers that may still answer an abandoned request
        self.trial = chain  # the trial chain of the peer being asked
        self.rounds = 0  # rounds followed on the trial chain
        self.rests: dict[bytes, float] = {}  # by failed peer: when to ask it again
        self.others: dict[bytes, None] = {}  # connected peers that showed a complete history without the head

    @property
    def complaint(self) -> Complaint:
        return complaint(
            Code.UNTRUSTED, head=self.head.hex()[:16], others=len(self.others), peers=len(self.context.peers)
        )

    @property
    def deadline(self) -> float:
        now = self.context.now
        if self.asked is not None:
            return self.until if self.turn_until <= now else min(self.until, self.turn_until)
        return min((self.rests.get(peer, now) for peer in self.context.peers), default=now + RETRY_SECONDS)

    def tick(self) -> None:
        now, peers = self.context.now, self.context.peers
        if self.asked is not None and (now >= self.until or self.asked not in peers):
            self.late[self.asked] = None
            self.turns_lost[self.asked] = self.turns_lost.get(self.asked, 0) + 1
            self.failed(self.asked)
        self.rests = {peer: at for peer, at in self.rests.items() if peer in peers}
        self.others = {peer: None for peer in self.others if peer in peers}
        self.turns_lost = {peer: count for peer, count in self.turns_lost.items() if peer in peers}
        self.late = {peer: None for peer in self.late if peer in peers}
        ready = sorted(peer for peer in peers if self.rests.get(peer, now) <= now and peer != self.asked)
        if self.asked is not None and now >= self.turn_until and ready:
            self.turns_lost[self.asked] = self.turns_lost.get(self.asked, 0) + 1
            self.late[self.asked] = None
            self.context.counters["slow histories broken off"] += 1
            self.failed(self.asked, None)
        if self.asked is None and ready:
            good = [peer for peer in ready if not self.context.reputation.is_greylisted(peer, now)]
            peer = self.context.rng.choice(good or ready)
            longer = 2.0 ** min(self.turns_lost.get(peer, 0), 16)
            self.turn_until = now + min(PEER_SECONDS * longer, PEER_SECONDS_MAX)
            run = self.context.run
            self.trial = Chain(self.mine, self.context.run_id, run.agreement.history_rounds, run.predecessor.round)
            self.rounds = 0
            self._ask(peer)

    def _ask(self, peer: bytes) -> None:
        state = self.trial.state
        longer = 2.0 ** min(self.turns_lost.get(peer, 0), ANSWER_DOUBLINGS_MAX)
        self.asked, self.until = peer, self.context.now + ANSWER_SECONDS * longer
        self.context.emit(AskHistory(peer, state.branch, state.round))

    def failed(self, peer: bytes, reason: Reason | None = Reason.SILENT) -> None:
        """Ends a peer's turn: it has no valid history with the head."""
        if peer != self.asked:
            return
        self.asked = None
        self.rests[peer] = self.context.now + RETRY_SECONDS
        if reason is not None:
            self.context.reputation.note(peer, reason, self.context.now)

    def answered(self, peer: bytes, history: History) -> Verified | None:
        """Takes in an answer; returns the history to adopt once it has the head, or None."""
        if peer != self.asked or self.context.has_stopped:
            return None
        try:
            is_found = self._follow(history)
        except RemoteProtocolError:
            self.context.counters["histories refused"] += 1
            may_be_old = peer in self.late  # it may answer an earlier request
            self.late.pop(peer, None)
            self.failed(peer, None if may_be_old else Reason.MALFORMED)
            return None
        if is_found:
            self.asked = None
            return self._verified()
        self.rounds += len(history.steps)
        is_more = len(history.steps) == ENTRIES_MAX and self.trial.state.round < history.round
        if is_more and self.rounds <= self.trial.kept + ROUNDS_SPARE:
            self._ask(peer)
            return None
        self.others[peer] = None
        self.context.counters["histories without the trusted head"] += 1
        self.failed(peer, None)
        return None

    def _follow(self, history: History) -> bool:
        """Extends the trial chain by an answer; returns whether the head is on it."""
        trial, context = self.trial, self.context
        if history.base is not None:
            jump(trial.state, history.changes, history.base, context.signer)
            if not history.steps or not isinstance(history.steps[0], Entry):
                raise RemoteProtocolError("no certified round follows the jump")
            trial.rebase(history.changes, history.base)
        is_found = False
        for step in history.steps:
            if is_found and isinstance(step, Beginning):
                break  # the usual rules decide about it once the rest is adopted
            state = follow(trial.state, step, context.run, context.signer)
            trial.append(step, state)
            # A branch's id covers its members, but not the whole agreed state; a round certified on it does.
            is_found |= isinstance(step, Entry) and self.head in (step.manifest.digest, step.manifest.branch)
        return is_found

    def _verified(self) -> Verified:
        """Returns the trial chain in a form that the node can adopt from genesis."""
        trial = self.trial
        steps = [(certified.step, certified.state) for certified in trial.steps]
        told = trial.answer(self.context.run_id, 0)
        if told.base is None:
            return Verified(self.mine, (), None, steps)
        skipped = next(place for place, (step, _) in enumerate(steps) if isinstance(step, Entry))
        return Verified(self.mine, told.changes, told.base, steps[skipped:])

    def limits(self) -> dict[str, tuple[int, int]]:
        peers = len(self.context.peers)
        return {
            "trial history": (len(self.trial.steps), self.trial.kept),
            "peers not trusted": (len(self.others), peers),
            "slow peers": (len(self.turns_lost | self.late), peers),
        }


def is_on(head: bytes, base: AgreedState, steps: tuple[Step, ...]) -> bool:
    """Whether a head lies on a chain that was verified before, as far back as it is kept."""
    heads = [step.branch if isinstance(step, Beginning) else step.manifest.digest for step in steps]
    return head in (base.head, *heads)
