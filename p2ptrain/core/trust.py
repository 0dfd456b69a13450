"""Trust: following no history but one that a person has vouched for.

A newcomer verifies the chain of rosters from genesis, by the signatures of whoever had a vote. But keys of members of
long ago may have leaked, and whoever has a quorum of them can sign another history, as long as they like, which
verifies as well. No protocol can tell the two apart from inside (weak subjectivity, Buterin 2014); what can is a recent
fact that came another way. With `p2ptrain join --trust HEAD` it is the head of the history that somebody else follows,
as `p2ptrain status` shows it: the digest of a manifest, or a branch's id just after a regroup.

Why the head and not a state root: a manifest names its parent and the digest of the agreed state before it, roster
included. So nobody can put it into another history; what follows it needs the quorum of the right roster. A state root
is only a field, which a forger writes into a manifest of his own, and goes on from there as he likes. For the same
reason the head counts only where the state before it was followed to it (`follow`), not among the changes of a jump,
nor in a state that a jump names: there a forger may put it between rosters of his own.

Until such a history was found, the node takes part in nothing: it hears no round, says nothing, fetches no state,
and asks the peers that it is connected with, one after the other, for what came after genesis. What they answer is
followed on a line of its own, to its end or to the head, whichever comes first; only one with the head becomes the
node's. Everything before the head is verified as without it. Peers keep `history_rounds` rounds: an older head is found
with nobody, and a newer one as soon as it is certified.

Nobody may hold a node in this for long. Who has more to tell fills its answers. Who answers slowly makes way for
others, and has longer the next time, so that a peer that is slow and honest comes to its end. Who is asked next is
drawn: by any order of merit, liars who just keep to the limits could stand before an honest peer for ever.
"""

from __future__ import annotations

from p2ptrain.core.catchup import ANSWER_SECONDS, Verified
from p2ptrain.core.complaints import Code, Complaint, complaint
from p2ptrain.core.context import Context
from p2ptrain.core.events import AskHistory
from p2ptrain.core.history import ENTRIES_MAX, Beginning, Entry, History, Step, follow, jump
from p2ptrain.core.line import Line
from p2ptrain.core.reputation import Reason
from p2ptrain.core.state import AgreedState
from p2ptrain.errors import RemoteProtocolError

PEER_SECONDS = 30.0  # for one peer, if others wait: 256 rounds take a home's line ten; a guess, which doubles each time
PEER_SECONDS_MAX = 960.0
RETRY_SECONDS = 10.0  # until a peer whose history lacks the head is asked again: the round of the head may be to come
ROUNDS_SPARE = 4 * ENTRIES_MAX  # that a peer may get ahead by while we follow it; one that leads us on for ever lies


class Trust:
    """Of one node that has adopted nothing yet."""

    def __init__(self, context: Context, line: Line, head: bytes) -> None:
        self.context, self.head = context, head
        self.mine = line.state  # genesis
        self.asked: bytes | None = None
        self.until = 0.0  # for the answer
        self.turn_until = 0.0  # for all of its answers, if others wait
        self.turns_lost: dict[bytes, int] = {}  # how often a peer's turn ended before its history did
        self.late: dict[bytes, None] = {}  # peers that may still answer what they are not asked any more
        self.trial = line  # of the peer that is asked
        self.rounds = 0  # followed on it
        self.rests: dict[bytes, float] = {}  # peers whose histories were not it, and until when they are left alone
        self.others: dict[bytes, None] = {}  # connected peers that showed a whole history without the head

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
            self.trial, self.rounds = Line(self.mine, self.context.run_id, self.context.run.agreement.history_rounds), 0
            self._ask(peer)

    def _ask(self, peer: bytes) -> None:
        state = self.trial.state
        self.asked, self.until = peer, self.context.now + ANSWER_SECONDS
        self.context.emit(AskHistory(peer, state.branch, state.round))

    def failed(self, peer: bytes, reason: Reason | None = Reason.SILENT) -> None:
        """It has no history with the head, or none that holds."""
        if peer != self.asked:
            return
        self.asked = None
        self.rests[peer] = self.context.now + RETRY_SECONDS
        if reason is not None:
            self.context.reputation.note(peer, reason, self.context.now)

    def answered(self, peer: bytes, history: History) -> Verified | None:
        """What to adopt, once a history has the head; None: not yet."""
        if peer != self.asked:
            return None
        try:
            is_found = self._follow(history)
        except RemoteProtocolError:
            self.context.counters["histories refused"] += 1
            may_be_old = peer in self.late  # the answer to what it was asked before
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
        """Go on with the trial; whether the head is on it, and what follows is a quorum's of the right roster."""
        trial, context = self.trial, self.context
        if history.base is not None:
            jump(trial.state, history.changes, history.base, context.signer)
            if not history.steps or not isinstance(history.steps[0], Entry):
                raise RemoteProtocolError("no certified round follows the jump")
            trial.rebase(history.changes, history.base)
        is_found = False
        for step in history.steps:
            if is_found and isinstance(step, Beginning):
                break  # whether to follow it is asked as ever, when the rest is ours
            state = follow(trial.state, step, context.run, context.signer)
            trial.append(step, state)
            # A branch's id covers its members, and not all that is agreed: a round that they certify on it does.
            is_found |= isinstance(step, Entry) and self.head in (step.manifest.digest, step.manifest.branch)
        return is_found

    def _verified(self) -> Verified:
        """The trial, as an answer that the node can adopt from genesis on."""
        trial = self.trial
        steps = [(certified.step, certified.state) for certified in trial.steps]
        told = trial.answer(self.context.run_id, 0)
        if told.base is None:
            return Verified(self.mine, (), None, steps)
        skipped = next(place for place, (step, _) in enumerate(steps) if isinstance(step, Entry))
        return Verified(self.mine, told.changes, told.base, steps[skipped:])

    def limits(self) -> dict[str, tuple[int, int]]:
        """Sizes and their bounds."""
        peers = len(self.context.peers)
        return {
            "trial history": (len(self.trial.steps), self.trial.kept),
            "peers not trusted": (len(self.others), peers),
            "slow peers": (len(self.turns_lost | self.late), peers),
        }


def is_on(head: bytes, base: AgreedState, steps: tuple[Step, ...]) -> bool:
    """Whether a head lies on a line that was verified before, as far back as it is kept."""
    heads = [step.branch if isinstance(step, Beginning) else step.manifest.digest for step in steps]
    return head in (base.head, *heads)
