"""Lies about branches and histories: calls, coups, answers, and claims to be ahead.

Each class is an honest node that misbehaves in one way; liars.py names them.
"""

from __future__ import annotations

from random import Random

from msgspec.structs import replace

from p2ptrain.config import RunConfig
from p2ptrain.core.chain import Chain
from p2ptrain.core.events import Publish, SendHistory
from p2ptrain.core.history import Beginning, BranchStart, Entry, History, Step
from p2ptrain.core.manifest import Manifest
from p2ptrain.core.messages import (
    NUMBER_MAX,
    Ballot,
    Call,
    Certificate,
    Hello,
    Received,
    Regroup,
    Vote,
    signature_of,
)
from p2ptrain.core.participant import Participant
from p2ptrain.core.state import AgreedState
from p2ptrain.sim.keys import FakeSigner
from p2ptrain.sim.noise import Unsolicited
from p2ptrain.sim.rewriting import Liar, Said
from p2ptrain.sim.world import SimWorld

JUMP_ROUNDS = 20  # length of the branch that a liar makes up


class DoubleCalls(Liar):
    is_two_faced = True

    def say(self, core: Participant, received: Received) -> list[Said]:
        message = received.message
        match message:
            case Call(attempt=attempt):
                more = [self.signed(replace(message, attempt=attempt + ahead)) for ahead in (1, 2, 7, 10**9)]
                return [Publish(received.envelope), *(Publish(each.envelope) for each in more)]
            case Regroup(members=members) if len(members) > 2:
                fewer = tuple(key for key in members if key != next(each for each in members if each != self.me))
                other = self.twin(received, lambda: self.signed(replace(message, members=fewer)))
                return self.two_faced(message.attempt, received, other)
            case _:
                return [Publish(received.envelope)]


class Coup(Unsolicited):
    a_second = 1

    def thing(self, core: Participant) -> list[Said]:
        state = core.here.state
        return [Publish(self.signed(Regroup(state.branch, state.head, 0, (self.me,), self.me)).envelope)]


class FalseHistories(Liar):
    def tell(self, core: Participant, effect: SendHistory) -> list[Said]:
        history, rng = effect.history, self.rng
        steps = history.steps
        ways = (
            lambda: replace(history, steps=steps[1:]),
            lambda: replace(history, steps=steps[::-1]),
            lambda: replace(history, round=history.round + 1_000, steps=()),
            lambda: replace(history, changes=(), lineage=history.lineage[:1]),
            lambda: replace(history, lineage=(*history.lineage, replace(history.lineage[-1], branch=bytes(32)))),
            lambda: replace(history, steps=tuple(self._bent(step) for step in steps)),
        )
        return [SendHistory(effect.peer, rng.choice(ways)())]

    def _bent(self, step: Step) -> Step:
        """Returns the step with its last signature replaced by random bytes."""
        if not isinstance(step, Entry):
            return step
        signatures = (*step.certificate.signatures[:-1], self.rng.randbytes(64))
        return replace(step, certificate=replace(step.certificate, signatures=signatures))


# ---------------------------------------------------------------------------------------------------
# Claims to be ahead


class ClaimsToBeAhead(Unsolicited):
    """Says that it is ahead, and does not answer when asked, or answers without proof."""

    a_second = 2

    def thing(self, core: Participant) -> list[Said]:
        rng, state = self.rng, core.here.state
        branch = rng.choice((state.branch, state.branch, rng.randbytes(32)))
        number = rng.choice((state.round + 2, state.round + 100, NUMBER_MAX - 1))
        return [Publish(self.signed(_hello(branch, number, self.me)).envelope)]

    def tell(self, core: Participant, effect: SendHistory) -> list[Said]:
        told = self.told(core, effect)
        return [SendHistory(effect.peer, told)] if told is not None else []

    def told(self, core: Participant, effect: SendHistory) -> History | None:
        nothing = History(effect.history.lineage, NUMBER_MAX - 1, (), None, ())
        return self.rng.choice((None, nothing))


class EndlessHistories(ClaimsToBeAhead):
    """Puts a different lineage into each answer, so that each answer leads to another question."""

    def __init__(self, rng: Random, signer: FakeSigner, world: SimWorld) -> None:
        super().__init__(rng, signer, world)
        self.told_short: set[bytes] = set()  # peers whose last answer had the shorter lineage

    def told(self, core: Participant, effect: SendHistory) -> History | None:
        core.repair.budgets.pop(effect.peer, None)  # the honest core inside would soon stop answering
        self.told_short ^= {effect.peer}
        lineage = effect.history.lineage
        return History(lineage[:1] if effect.peer in self.told_short else lineage, NUMBER_MAX - 1, (), None, ())


class FalseJumps(ClaimsToBeAhead):
    """Answers with a jump to a branch whose only member is the liar. The branch begins where the asker is, later, or
    where the asker's branch began, and every signature in it is genuine."""

    def told(self, core: Participant, effect: SendHistory) -> History | None:
        victim = self.world.nodes[self.world.key_index[effect.peer]].core
        if victim is None or victim.participant is None:
            return effect.history
        chain = victim.participant.chain
        state, changes = self._start(core, chain)
        if self.me not in state.members:
            return effect.history
        beginning = self._beginning(state)
        after = state.regrouped(beginning.branch, beginning.members)
        place = next(place for place, stage in enumerate(chain.lineage) if stage.branch == state.branch)
        lineage = (*chain.lineage[: place + 1], BranchStart(beginning.branch, beginning.round))
        run = core.context.run
        if self.rng.random() < 0.25 and not changes:
            entry, _ = self._alone(after, run)
            return History(lineage, entry.manifest.round, (), None, (beginning, entry))
        for _ in range(JUMP_ROUNDS):
            entry, after = self._alone(after, run)
        base, (entry, _) = after, self._alone(after, run)
        return History(lineage, entry.manifest.round, (*changes, beginning), base, (entry,))

    def _start(self, core: Participant, chain: Chain) -> tuple[AgreedState, tuple[Step, ...]]:
        """Returns the state that our branch begins from, and the steps that lead there from the asker's state."""
        state = chain.state
        fork = chain.forks.get(state.branch)
        entry, later = core.chain.entry(state.round + 1), core.chain.state_at(state.branch, state.round + 1)
        starts: list[tuple[AgreedState, tuple[Step, ...]]] = [(state, ())]
        if fork is not None:
            starts.append((fork, ()))
        if entry is not None and later is not None and entry.manifest.parent == state.head:
            starts.append((later, (entry,)))
        return self.rng.choice(starts)

    def _beginning(self, state: AgreedState) -> Beginning:
        members = (self.me,)
        signature = signature_of(self.signed(Regroup(state.branch, state.head, 0, members, self.me)))
        return Beginning(state.branch, state.round, state.head, 0, members, members, (signature,))

    def _alone(self, state: AgreedState, run: RunConfig) -> tuple[Entry, AgreedState]:
        """Makes a round that we certify alone, as the only member of the roster."""
        place = state.branch, state.round + 1
        manifest = Manifest(
            branch=state.branch, round=state.round + 1, parent=state.head, state=state.digest,
            root_round=state.root_round, root=state.root, taken=(), refused=(), evidence=(), joins=(), leaves=(),
            banned=(), absent=b"", seated=(), unseated=(),
        )  # fmt: skip
        vote = self.signed(Vote(*place, 0, Ballot.PRECOMMIT, manifest.digest, self.me))
        certificate = Certificate(*place, 0, manifest.digest, b"\x01", (signature_of(vote),))
        return Entry(manifest, certificate), state.after(manifest, run)


def _hello(branch: bytes, number: int, author: bytes) -> Hello:
    """Makes the hello of a node that is in this round and has heard nothing yet."""
    return Hello(branch, number, 0, b"", b"", b"", b"", False, author)
