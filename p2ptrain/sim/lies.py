"""The lies of one: each class is an honest node but for one thing.

`liars.KINDS` gives them their names and says what each does.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from blake3 import blake3
from msgspec.structs import replace

from p2ptrain.core.events import Publish, Send, SendHistory
from p2ptrain.core.history import Entry, Step
from p2ptrain.core.messages import (
    NOTHING,
    PROTOCOL_VERSION,
    SHORT_BYTES,
    Announcement,
    Authored,
    Availability,
    Ballot,
    Call,
    Certificate,
    Evidence,
    Hello,
    JoinRequest,
    Leave,
    Proposal,
    Received,
    Regroup,
    Vote,
    encode,
)
from p2ptrain.sim.keys import FakeSigner
from p2ptrain.sim.liar import Liar, Proposer, Said, ToSome, availability_of, is_here

if TYPE_CHECKING:
    from p2ptrain.core.node import Node
    from p2ptrain.sim.cluster import Cluster

MEMORY_MAX = 400  # old messages that a replaying liar has at hand
FLOOD_A_SECOND = 60  # messages: enough to fill every buffer that has no bound, and the simulation stays fast

# ---------------------------------------------------------------------------------------------------
# Proposals


class EquivocatesProposals(Proposer):
    is_two_faced = True

    def say(self, cluster: Cluster, core: Node, received: Received) -> list[Said]:
        message = received.message
        if not isinstance(message, Proposal) or not is_here(core, message):
            return [Publish(received.envelope)]
        other = self.twin(received, lambda: self.propose(core, message, core.here.availabilities.values()))
        if other is None or other.digest == received.digest:
            return [Publish(received.envelope)]
        return self.two_faced(cluster, message.round, received, other)


class ProposesTheUnavailable(Proposer):
    def say(self, cluster: Cluster, core: Node, received: Received) -> list[Said]:
        message = received.message
        if not isinstance(message, Proposal) or not is_here(core, message) or core.here.mine is None:
            return [Publish(received.envelope)]
        mine = availability_of(core.here.mine)
        secret = self.signed(replace(mine, held=(), requests=(self.rng.randbytes(SHORT_BYTES),)))
        other = self.twin(received, lambda: self.propose(core, message, [*core.here.availabilities.values(), secret]))
        return [Publish((other or received).envelope)]

    def rank(self, availability: Availability) -> object:
        return availability.author != self.me, len(availability.held)


class Censors(Proposer):
    """The victim is the first other member."""

    hidden: frozenset[bytes] = frozenset()  # its announcements

    def say(self, cluster: Cluster, core: Node, received: Received) -> list[Said]:
        message = received.message
        if isinstance(message, Availability | Proposal) and is_here(core, message):
            victim = next((key for key in core.here.roster.members if key != self.me), b"")
            self.hidden = frozenset(offer.name for offer in core.parts.offers.by_author.get(victim, ()))
        if isinstance(message, Availability):
            kept = tuple(name for name in message.held if name not in self.hidden)
            return [Publish(self.signed(replace(message, held=kept)).envelope)]
        if not isinstance(message, Proposal) or not is_here(core, message):
            return [Publish(received.envelope)]
        other = self.twin(received, lambda: self.propose(core, message, core.here.availabilities.values()))
        return [Publish((other or received).envelope)]

    def rank(self, availability: Availability) -> object:
        return sum(name in self.hidden for name in availability.held)


class FalseManifests(Liar):
    def say(self, cluster: Cluster, core: Node, received: Received) -> list[Said]:
        message = received.message
        if not isinstance(message, Proposal):
            return [Publish(received.envelope)]
        false = self.twin(received, lambda: self.signed(replace(message, manifest=self.rng.randbytes(32))))
        return [Publish((false or received).envelope)]


# ---------------------------------------------------------------------------------------------------
# Announcements, payloads, availabilities


class EquivocatesAnnouncements(Liar):
    is_two_faced = True

    def say(self, cluster: Cluster, core: Node, received: Received) -> list[Said]:
        message = received.message
        if not isinstance(message, Announcement):
            return [Publish(received.envelope)]
        other = self.twin(received, lambda: self._another(cluster, message))
        return self.two_faced(cluster, message.round, received, other)

    def _another(self, cluster: Cluster, message: Announcement, good: bool = True) -> Received:
        node = cluster.nodes[cluster.key_index[self.me]]
        name, payload = cluster.driver.make_payload(node, message.round, message.base_round, good)
        node.shelf.add(name)
        return self.signed(replace(message, payload=name, payload_bytes=payload.payload_bytes), payload.attachment)


class BadPayloads(EquivocatesAnnouncements):
    is_two_faced = False

    def say(self, cluster: Cluster, core: Node, received: Received) -> list[Said]:
        message = received.message
        if not isinstance(message, Announcement):
            return [Publish(received.envelope)]
        bad = self.twin(received, lambda: self._another(cluster, message, good=False))
        return [Publish((bad or received).envelope)]


class Withholds(Liar):
    def say(self, cluster: Cluster, core: Node, received: Received) -> list[Said]:
        message = received.message
        if not isinstance(message, Announcement):
            return [Publish(received.envelope)]
        left, right = self.sides(cluster, 0)
        bare = self.signed(message)
        return [ToSome(received.envelope, left[: len(left) // 2]), ToSome(bare.envelope, right + left)]

    def hand_over(self, cluster: Cluster, effect: Send) -> list[Said]:
        return [Send(effect.peer, tuple(each for each in effect.envelopes if not self._has_payload(cluster, each)))]

    def _has_payload(self, cluster: Cluster, envelope: bytes) -> bool:
        received = cluster.decode(envelope)
        return received is not None and bool(received.attachment)

    def serves(self, cluster: Cluster, index: int, payload: bytes, key: bytes) -> bool:
        left, _ = self.sides(cluster, 0)
        return key in left[: len(left) // 2]


class TwoFacedAvailabilities(Liar):
    is_two_faced = True

    def say(self, cluster: Cluster, core: Node, received: Received) -> list[Said]:
        message = received.message
        if not isinstance(message, Availability):
            return [Publish(received.envelope)]
        other = self.twin(received, lambda: self._poorer(message))
        return self.two_faced(cluster, message.round, received, other)

    def _poorer(self, message: Availability) -> Received:
        kept = tuple(name for name in message.held if self.rng.random() < 0.5)
        return self.signed(replace(message, held=kept, requests=(), heard=b""))


class FalseRoots(Liar):
    def say(self, cluster: Cluster, core: Node, received: Received) -> list[Said]:
        message = received.message
        if isinstance(message, Availability):
            false = blake3(b"a false root" + message.root_round.to_bytes(8, "little")).digest()
            ahead = message.root_round + self.rng.choice((0, 0, 1, 1_000))
            return [Publish(self.signed(replace(message, root_round=ahead, root=false)).envelope)]
        return [Publish(received.envelope)]


# ---------------------------------------------------------------------------------------------------
# Votes


class EquivocatesVotes(Liar):
    is_two_faced = True

    def say(self, cluster: Cluster, core: Node, received: Received) -> list[Said]:
        message = received.message
        if not isinstance(message, Vote):
            return [Publish(received.envelope)]
        other = self.twin(received, lambda: self.signed(replace(message, manifest=self._another(core, message))))
        return self.two_faced(cluster, message.round, received, other)

    def _another(self, core: Node, vote: Vote) -> bytes:
        if vote.manifest != NOTHING:
            return NOTHING
        view = core.here.agreement.views.get(vote.view) if is_here(core, vote) else None
        proposal = view.proposal.message if view and view.proposal else None
        return proposal.manifest if isinstance(proposal, Proposal) else self.rng.randbytes(32)


class VotesForAll(Liar):
    """Without a lock, and without a look."""

    def say(self, cluster: Cluster, core: Node, received: Received) -> list[Said]:
        message = received.message
        if not isinstance(message, Vote) or not is_here(core, message):
            return [Publish(received.envelope)]
        view = core.here.agreement.views.get(message.view)
        proposal = view.proposal.message if view and view.proposal else None
        if not isinstance(proposal, Proposal) or message.manifest == proposal.manifest:
            return [Publish(received.envelope)]
        other = self.twin(received, lambda: self.signed(replace(message, manifest=proposal.manifest)))
        return [Publish((other or received).envelope)]


# ---------------------------------------------------------------------------------------------------
# Noise


class Replays(Liar):
    def __init__(self, rng: Random, signer: FakeSigner) -> None:
        super().__init__(rng, signer)
        self.memory: list[bytes] = []

    def say(self, cluster: Cluster, core: Node, received: Received) -> list[Said]:
        view = core.here.agreement.views[core.here.agreement.view]
        seen = [received, *core.here.availabilities.values(), *view.prevotes.values(), *view.precommits.values()]
        self.memory += [each.envelope for each in self.rng.sample(seen, min(4, len(seen)))]
        while len(self.memory) > MEMORY_MAX:
            del self.memory[self.rng.randrange(len(self.memory))]
        old = self.rng.sample(self.memory, min(6, len(self.memory)))
        return [Publish(received.envelope), *(Publish(envelope) for envelope in old)]


class Unasked(Liar):
    """Of the liars who say things that no honest node would: `things` makes them, at most so many a second."""

    a_second = FLOOD_A_SECOND

    def __init__(self, rng: Random, signer: FakeSigner) -> None:
        super().__init__(rng, signer)
        self.last, self.tokens = 0.0, 0.0

    def add(self, cluster: Cluster, core: Node) -> list[Said]:
        self.tokens = min(float(self.a_second), self.tokens + (cluster.now - self.last) * self.a_second)
        self.last = cluster.now
        count, self.tokens = int(self.tokens), self.tokens % 1.0
        return [Publish(self.thing(cluster, core)) for _ in range(count)]

    def thing(self, cluster: Cluster, core: Node) -> bytes:
        raise NotImplementedError


class Floods(Unasked):
    """`quietly`: without a message that would prove anything."""

    def __init__(self, rng: Random, signer: FakeSigner, quietly: bool = False) -> None:
        super().__init__(rng, signer)
        self.quietly = quietly

    def thing(self, cluster: Cluster, core: Node) -> bytes:
        rng, here, me = self.rng, core.here, self.me
        branch, head = here.branch, here.state.head
        far = rng.choice((0, 0, 1, 2, 3, 50, 2**40))
        number, view = here.number + far, rng.choice((0, 1, 4, 5, 60, 2**40))
        short, long = rng.randbytes(SHORT_BYTES), rng.randbytes(32)
        quiet: tuple[Callable[[], Authored], ...] = (
            lambda: Availability(branch, number, number, long, (short,), (), (), b"\xff", me),
            lambda: Call(branch, head, far, me),
            lambda: Regroup(branch, long, far, (me,), me),
            lambda: Hello((PROTOCOL_VERSION,), branch, number, view, b"\xff", b"", b"", b"", me),
            lambda: JoinRequest(branch, number, short, me),
            lambda: Vote(long, number, view, Ballot.PREVOTE, long, me),
            lambda: Vote(branch, rng.getrandbits(40), view, Ballot.PREVOTE, long, me),
        )
        loud: tuple[Callable[[], Authored], ...] = (
            lambda: Vote(branch, number, view, rng.choice(tuple(Ballot)), long, me),
            lambda: Announcement(branch, number, min(number, here.number - 1), long, long, 40, me),
            lambda: Proposal(branch, number, view, -1, (long,), long, me),
        )
        return self.signed(rng.choice(quiet if self.quietly else quiet + loud)()).envelope


class Forges(Unasked):
    a_second = 12

    def thing(self, cluster: Cluster, core: Node) -> bytes:
        rng, here = self.rng, core.here
        branch, number, long = here.branch, here.number, rng.randbytes(32)
        victim = rng.choice([key for key in here.roster.members if key != self.me] or [bytes(32)])
        view = here.agreement.view
        proposal = here.agreement.views[view].proposal
        wanted = getattr(proposal.message, "manifest", long) if proposal and rng.random() < 0.5 else long
        vote = Vote(branch, number, view, rng.choice(tuple(Ballot)), wanted, victim)
        members = tuple(sorted({victim, self.me}))
        makes: tuple[Callable[[], bytes], ...] = (
            lambda: self.signed(vote).envelope,
            lambda: encode(vote, bytes(64)),
            lambda: encode(vote, rng.randbytes(64)),
            lambda: self.signed(Leave(branch, number, victim)).envelope,
            lambda: self.signed(Announcement(branch, number, number - 1, long, long, 40, victim)).envelope,
            lambda: self.signed(Proposal(branch, number, view, -1, (long,), long, victim)).envelope,
            lambda: self.signed(Regroup(branch, here.state.head, 0, members, victim)).envelope,
            lambda: encode(Certificate(branch, number, view, long, b"\x01", (rng.randbytes(64),))),
            lambda: self._framed(vote),
            lambda: rng.randbytes(rng.randrange(1, 200)),
            lambda: self.signed(replace(vote, author=self.me)).envelope + b"\0",
        )
        return rng.choice(makes)()

    def _framed(self, vote: Vote) -> bytes:
        """Evidence against somebody who said neither of these things."""
        first, second = sorted((self.signed(vote).envelope, self.signed(replace(vote, manifest=NOTHING)).envelope))
        return encode(Evidence(first, second))


# ---------------------------------------------------------------------------------------------------
# Silence


class Silent(Liar):
    """Says nothing of some kinds, neither to all nor to one."""

    def __init__(self, rng: Random, signer: FakeSigner, phase: str = "all") -> None:
        super().__init__(rng, signer)
        self.phase = phase

    def _is_silent(self, received: Received | None) -> bool:
        match received.message if received else None:
            case Announcement():
                return self.phase in ("announce", "all")
            case Availability():
                return self.phase in ("avail", "all")
            case Proposal():
                return self.phase in ("propose", "all")
            case Vote(ballot=ballot):
                return self.phase in (ballot.name.lower(), "all")
            case _:
                return self.phase == "all"

    def say(self, cluster: Cluster, core: Node, received: Received) -> list[Said]:
        return [] if self._is_silent(received) else [Publish(received.envelope)]

    def hand_over(self, cluster: Cluster, effect: Send) -> list[Said]:
        kept = tuple(each for each in effect.envelopes if not self._is_silent(cluster.decode(each)))
        return [Send(effect.peer, kept)] if kept else []

    def tell(self, effect: SendHistory) -> list[Said]:
        return [] if self.phase == "all" else [effect]

    def serves(self, cluster: Cluster, index: int, payload: bytes, key: bytes) -> bool:
        return self.phase != "all"


class SpeaksToSome(Liar):
    def say(self, cluster: Cluster, core: Node, received: Received) -> list[Said]:
        number = getattr(received.message, "round", 0)
        return [ToSome(received.envelope, self.sides(cluster, number)[0])]


# ---------------------------------------------------------------------------------------------------
# Branches and history


class DoubleCalls(Liar):
    is_two_faced = True

    def say(self, cluster: Cluster, core: Node, received: Received) -> list[Said]:
        message = received.message
        match message:
            case Call(attempt=attempt):
                more = [self.signed(replace(message, attempt=attempt + ahead)) for ahead in (1, 2, 7, 10**9)]
                return [Publish(received.envelope), *(Publish(each.envelope) for each in more)]
            case Regroup(members=members) if len(members) > 2:
                fewer = tuple(key for key in members if key != next(each for each in members if each != self.me))
                other = self.twin(received, lambda: self.signed(replace(message, members=fewer)))
                return self.two_faced(cluster, message.attempt, received, other)
            case _:
                return [Publish(received.envelope)]


class Coup(Unasked):
    a_second = 1

    def thing(self, cluster: Cluster, core: Node) -> bytes:
        state = core.here.state
        return self.signed(Regroup(state.branch, state.head, 0, (self.me,), self.me)).envelope


class FalseHistories(Liar):
    def tell(self, effect: SendHistory) -> list[Said]:
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
        """With a signature that nobody made in place of the last."""
        if not isinstance(step, Entry):
            return step
        signatures = (*step.certificate.signatures[:-1], self.rng.randbytes(64))
        return replace(step, certificate=replace(step.certificate, signatures=signatures))
