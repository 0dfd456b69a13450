"""Lies about branches, histories and succession: calls, coups, answers, claims to be ahead, motions and ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from p2ptrain.config import RunConfig
from p2ptrain.core import messages as msg
from p2ptrain.core.chain import Chain
from p2ptrain.core.events import Publish, SendHistory
from p2ptrain.core.history import Beginning, BranchStart, Entry, History, Step
from p2ptrain.core.manifest import Manifest
from p2ptrain.core.participant import Participant
from p2ptrain.core.state import AgreedState
from p2ptrain.core.succession import Assented, Motion, Succession
from p2ptrain.sim.noise import Unsolicited
from p2ptrain.sim.rewriting import Liar, Said
from p2ptrain.sim.succession import CHANGE

JUMP_ROUNDS = 20  # length of the branch that a liar makes up
WORDS_MAX = 64  # motions and assents of others that it keeps, to repeat them
HUGE = bytes(2**21)  # always the same, so that it is looked at only once
HUGE_SHARE = 0.02  # of what it says: it is disconnected for that
NAMED_SHARE = 0.2  # of its availabilities, which name a motion that cannot be


class DoubleCalls(Liar):
    is_two_faced = True

    def say(self, core: Participant, received: msg.Received) -> list[Said]:
        message = received.message
        match message:
            case msg.Call(attempt=attempt):
                more = [self.signed(replace(message, attempt=attempt + ahead)) for ahead in (1, 2, 7, 10**9)]
                return [Publish(received.envelope), *(Publish(each.envelope) for each in more)]
            case msg.Regroup(members=members) if len(members) > 2:
                fewer = tuple(key for key in members if key != next(each for each in members if each != self.me))
                other = self.twin(received, lambda: self.signed(replace(message, members=fewer)))
                return self.two_faced(message.attempt, received, other)
            case _:
                return [Publish(received.envelope)]


class Coup(Unsolicited):
    a_second = 1

    def thing(self, core: Participant) -> list[Said]:
        state = core.here.state
        return [Publish(self.signed(msg.Regroup(state.branch, state.head, 0, (self.me,), self.me)).envelope)]


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


# -- Claims to be ahead -----------------------------------------------------------------------------


class ClaimsToBeAhead(Unsolicited):
    """Says that it is ahead, and does not answer when asked, or answers without proof."""

    a_second = 2

    def thing(self, core: Participant) -> list[Said]:
        rng, state = self.rng, core.here.state
        branch = rng.choice((state.branch, state.branch, rng.randbytes(32)))
        number = rng.choice((state.round + 2, state.round + 100, msg.NUMBER_MAX - 1))
        hello = msg.Hello(branch, number, 0, b"", b"", b"", b"", False, self.me)  # it has heard nothing yet
        return [Publish(self.signed(hello).envelope)]

    def tell(self, core: Participant, effect: SendHistory) -> list[Said]:
        told = self.told(core, effect)
        return [SendHistory(effect.peer, told)] if told is not None else []

    def told(self, core: Participant, effect: SendHistory) -> History | None:
        return self.rng.choice((None, History(effect.history.lineage, msg.NUMBER_MAX - 1, (), None, ())))


@dataclass(eq=False)
class EndlessHistories(ClaimsToBeAhead):
    """Puts a different lineage into each answer, so that each answer leads to another question."""

    told_short: set[bytes] = field(default_factory=set)  # peers whose last answer had the shorter lineage

    def told(self, core: Participant, effect: SendHistory) -> History | None:
        core.repair.budgets.pop(effect.peer, None)  # the honest core inside would soon stop answering
        self.told_short ^= {effect.peer}
        lineage = effect.history.lineage
        return History(lineage[:1] if effect.peer in self.told_short else lineage, msg.NUMBER_MAX - 1, (), None, ())


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
        signature = msg.signature_of(self.signed(msg.Regroup(state.branch, state.head, 0, members, self.me)))
        return Beginning(state.branch, state.round, state.head, 0, members, members, (signature,))

    def _alone(self, state: AgreedState, run: RunConfig) -> tuple[Entry, AgreedState]:
        """Makes a round that we certify alone, as the only member of the roster."""
        place = state.branch, state.round + 1
        manifest = Manifest(
            branch=state.branch, round=state.round + 1, parent=state.head, state=state.digest,
            root_round=state.root_round, root=state.root, taken=(), refused=(), evidence=(), joins=(), leaves=(),
            banned=(), absent=b"", seated=(), unseated=(),
        )  # fmt: skip
        vote = self.signed(msg.Vote(*place, 0, msg.Ballot.PRECOMMIT, manifest.digest, self.me))
        certificate = msg.Certificate(*place, 0, manifest.digest, b"\x01", (msg.signature_of(vote),))
        return Entry(manifest, certificate), state.after(manifest, run)


@dataclass(eq=False)
class FalseSuccession(Unsolicited):
    a_second = 4
    words: dict[bytes, bytes] = field(default_factory=dict)  # of others, by digest

    def say(self, core: Participant, received: msg.Received) -> list[Said]:
        message = received.message
        if not isinstance(message, msg.Availability) or self.rng.random() >= NAMED_SHARE:
            return [Publish(received.envelope)]
        wrong = self.signed(self._impossible(core))
        named = replace(message, requests=tuple(sorted({*message.requests, wrong.name})))
        return [Publish(wrong.envelope), Publish(self.signed(named).envelope)]

    def add(self, core: Participant) -> list[Said]:
        for received in [waiting.received for waiting in core.pools.requests.by_name.values()]:
            if isinstance(received.message, msg.Moving | msg.Assent):
                self.words[received.digest] = received.envelope
        while len(self.words) > WORDS_MAX:
            del self.words[self.rng.choice(list(self.words))]
        return super().add(core)

    def thing(self, core: Participant) -> list[Said]:
        rng, number = self.rng, core.here.number
        if rng.random() < HUGE_SHARE:
            return [Publish(HUGE)]
        make = rng.choice((self._motion, self._assent))
        ways: tuple[list[Said], ...] = (
            [Publish(self.signed(self._impossible(core)).envelope)],
            self.two_faced(number, self.signed(make(core)), self.signed(make(core))),
            [Publish(envelope) for envelope in rng.sample(list(self.words.values()), min(2, len(self.words)))],
        )
        return rng.choice(ways)

    def _motion(self, core: Participant) -> msg.Moving:
        here, last = core.here, core.here.number + self.rng.randint(4, 20)
        return msg.Moving(here.branch, here.number, last, last, msg.NOTHING, CHANGE % self.rng.randint(51, 99), self.me)

    def _assent(self, core: Participant) -> msg.Assent:
        here, rng = core.here, self.rng
        names = *(motion.name for motion in here.state.succession.motions), msg.NOTHING, bytes(31) + b"1"
        return msg.Assent(here.branch, here.number + rng.randint(0, 1), rng.choice(names), self.me)

    def _impossible(self, core: Participant) -> msg.Moving | msg.Assent:
        rng, here, motion = self.rng, core.here, self._motion(core)
        victim, root, newest = rng.choice(here.roster.members), rng.randbytes(32), here.state.root_round
        return rng.choice(
            (
                replace(motion, last=rng.choice((0, here.number - 1, here.number, 2**40))),
                replace(motion, weights=rng.choice((newest, here.number + 1)), root=root),  # only owners see the first
                replace(motion, change=rng.choice((b"{}", b"no", b'{"model":{"layers":1}}', bytes(1_500)))),
                replace(motion, author=victim),
                replace(self._assent(core), author=victim),
                replace(self._assent(core), round=here.number + rng.choice((-100, 50))),
            )
        )

    def tell(self, core: Participant, effect: SendHistory) -> list[Said]:
        """Ends a history early; or puts a motion and everyone's assent to it into a round that a quorum has signed
        without them, or into the state that follows a gap."""
        history, made = effect.history, self._motion(core)
        steps, last = history.steps, history.steps[-1] if history.steps else None
        motion = Motion(self.me, made.round, made.round, made.round, msg.NOTHING, made.change)
        ways = [history]
        if isinstance(last, Entry):
            assents = tuple(Assented(member, motion.made, motion.name) for member in core.here.roster.members)
            manifest = replace(last.manifest, motions=(motion,), assents=assents)
            ended = Entry(manifest, replace(last.certificate, manifest=manifest.digest))
            cut = steps[: self.rng.randint(1, len(steps))]
            ways.append(replace(history, steps=cut, round=history.round - len(steps) + len(cut)))
            ways.append(replace(history, steps=(*steps[:-1], ended)))
        if history.base is not None:
            ways.append(replace(history, base=replace(history.base, succession=Succession((), (), motion))))
        return [SendHistory(effect.peer, self.rng.choice(ways))]
