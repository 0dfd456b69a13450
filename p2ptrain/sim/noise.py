"""Noise: replays, floods, forgeries, and endless questions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from msgspec.structs import replace

from p2ptrain.core import messages as msg
from p2ptrain.core.events import Ask, AskHistory, Publish
from p2ptrain.core.participant import Participant
from p2ptrain.digest import digest
from p2ptrain.errors import RemoteProtocolError
from p2ptrain.sim.keys import FakeSigner
from p2ptrain.sim.rewriting import Liar, Said, sign_with

MEMORY_MAX = 400  # old messages that a replaying liar keeps
WORDS_MAX = 40  # messages kept of one member, to be repeated when it is gone
# Messages of a flood: enough to overflow any unbounded buffer, few enough for a fast simulation, of slow rounds too.
FLOOD_A_SECOND = 60
FLOOD_A_ROUND = 240


@dataclass(eq=False)
class Replays(Liar):
    memory: list[bytes] = field(default_factory=list)

    def say(self, core: Participant, received: msg.Received) -> list[Said]:
        view = core.here.agreement.views[core.here.agreement.view]
        seen = [received, *core.here.availabilities.values(), *view.prevotes.values(), *view.precommits.values()]
        self.memory += [each.envelope for each in self.rng.sample(seen, min(4, len(seen)))]
        while len(self.memory) > MEMORY_MAX:
            del self.memory[self.rng.randrange(len(self.memory))]
        old = self.rng.sample(self.memory, min(6, len(self.memory)))
        return [Publish(received.envelope), *(Publish(envelope) for envelope in old)]


@dataclass(eq=False)
class Unsolicited(Liar):
    """Sends unsolicited messages made by `thing`: `a_second` at most, and FLOOD_A_ROUND while a round is trained."""

    last: float = 0.0
    tokens: float = 0.0

    a_second = FLOOD_A_SECOND

    def add(self, core: Participant) -> list[Said]:
        pace = min(float(self.a_second), FLOOD_A_ROUND / max(1.0, self.world.setup.scenario.training.seconds))
        self.tokens = min(float(self.a_second), self.tokens + (self.world.calendar.now - self.last) * pace)
        self.last = self.world.calendar.now
        count, self.tokens = int(self.tokens), self.tokens % 1.0
        return [said for _ in range(count) for said in self.thing(core)]

    def thing(self, core: Participant) -> list[Said]:
        raise NotImplementedError


@dataclass(eq=False)
class KeepsTheDead(Unsolicited):
    """Remembers each member's last messages, and repeats them again and again once that member is gone."""

    words: dict[bytes, dict[bytes, bytes]] = field(default_factory=dict)  # by author, by digest

    a_second = 12

    def add(self, core: Participant) -> list[Said]:
        here, offers = core.here, core.pools.offers.by_author
        view = here.agreement.views[here.agreement.view]
        said = [*here.availabilities.values(), *view.prevotes.values(), *view.precommits.values()]
        said += [each.received for each_of in offers.values() for each in each_of]
        said += [each for calls in core.regrouping.calls.values() for each in calls.values()]
        for received in said:
            words = self.words.setdefault(getattr(received.message, "author", b""), {})
            words[received.digest] = received.envelope
            while len(words) > WORDS_MAX:
                del words[next(iter(words))]
        return super().add(core)

    def thing(self, core: Participant) -> list[Said]:
        members = [self.world.nodes[self.world.key_index[key]] for key in core.here.roster.members]
        gone = [node.key for node in members if not node.alive and self.words.get(node.key)]
        return [Publish(self.rng.choice(list(self.words[self.rng.choice(gone)].values())))] if gone else []


class Asks(Unsolicited):
    """Asks one member for messages and histories, without waiting for answers."""

    def thing(self, core: Participant) -> list[Said]:
        rng, here, context = self.rng, core.here, core.context
        victim = next((key for key in here.roster.members if key in context.peers), None)
        if victim is None:
            return []
        known = [each.name for each in here.availabilities.values()] + list(core.pools.offers.by_name)
        names = known or [rng.randbytes(msg.SHORT_BYTES)]
        ways: tuple[Said, ...] = (
            Ask(victim, tuple(names)),
            Ask(victim, tuple(rng.randbytes(msg.SHORT_BYTES) for _ in names)),
            AskHistory(victim, context.run_id, 0),
            AskHistory(victim, rng.randbytes(32), 2**40),
        )
        return [rng.choice(ways)]


@dataclass(eq=False)
class Floods(Unsolicited):
    """Floods the others with absurd messages; `quietly`: only with those that are no evidence against the sender."""

    quietly: bool = False

    def thing(self, core: Participant) -> list[Said]:
        rng, here, me = self.rng, core.here, self.me
        branch, head = here.branch, here.state.head
        far = rng.choice((0, 0, 1, 2, 3, 50, 2**40))
        number, view = here.number + far, rng.choice((0, 1, 4, 5, 60, 2**40))
        short, long = rng.randbytes(msg.SHORT_BYTES), rng.randbytes(32)
        quiet: tuple[Callable[[], msg.Authored], ...] = (
            lambda: msg.Availability(branch, number, number, long, (short,), (), (), b"\xff", me),
            lambda: msg.Call(branch, head, far, me),
            lambda: msg.Regroup(branch, long, far, (me,), me),
            lambda: msg.Hello(branch, number, view, b"\xff", b"", b"", b"", False, me),
            lambda: msg.JoinRequest(branch, number, short, me),
            lambda: msg.Vote(long, number, view, msg.Ballot.PREVOTE, long, me),
            lambda: msg.Vote(branch, rng.getrandbits(40), view, msg.Ballot.PREVOTE, long, me),
        )
        loud: tuple[Callable[[], msg.Authored], ...] = (
            lambda: msg.Vote(branch, number, view, rng.choice(tuple(msg.Ballot)), long, me),
            lambda: msg.Announcement(branch, number, min(number, here.number - 1), long, long, 40, short, 1, 2, 0, me),
            lambda: msg.Proposal(branch, number, view, -1, (long,), long, me),
        )
        return [Publish(self.signed(rng.choice(quiet if self.quietly else quiet + loud)()).envelope)]


@dataclass(eq=False)
class Crowds(Unsolicited):
    """Asks for admission with ever new keys, which then announce others' payloads as their own."""

    crowd: dict[bytes, FakeSigner] = field(default_factory=dict)

    def thing(self, core: Participant) -> list[Said]:
        rng, here, run_id = self.rng, core.here, self.signer.run_id
        admitted = [self.crowd[key] for key in here.state.place if key in self.crowd]
        offers = [each.announcement for each in core.pools.offers.by_name.values()]
        if admitted and offers and rng.random() < 0.5:
            one, copied = rng.choice(admitted), rng.choice(offers)
            return [Publish(sign_with(one, replace(copied, author=one.key)).envelope)]
        one = FakeSigner(run_id, digest("simulated crowd", self.me, len(self.crowd).to_bytes(8, "little")))
        self.crowd[one.key], self.world.key_index[one.key] = one, self.world.key_index[self.me]
        request = sign_with(one, msg.JoinRequest(here.branch, here.number, b"", one.key))
        with suppress(RemoteProtocolError):
            core.pools.requests.add(request, here.state, is_needed=True)  # so that it attests it, and hands it over
        return [Publish(request.envelope)]


class Forges(Unsolicited):
    a_second = 12

    def thing(self, core: Participant) -> list[Said]:
        rng, here = self.rng, core.here
        branch, number, long = here.branch, here.number, rng.randbytes(32)
        victim = rng.choice([key for key in here.roster.members if key != self.me] or [bytes(32)])
        view, short = here.agreement.view, long[: msg.SHORT_BYTES]
        proposal = here.agreement.views[view].proposal
        wanted = getattr(proposal.message, "manifest", long) if proposal and rng.random() < 0.5 else long
        vote = msg.Vote(branch, number, view, rng.choice(tuple(msg.Ballot)), wanted, victim)
        announcement = msg.Announcement(branch, number, number - 1, long, long, 40, short, 1, 2, 0, victim)
        members = tuple(sorted({victim, self.me}))
        makes: tuple[Callable[[], bytes], ...] = (
            lambda: self.signed(vote).envelope,
            lambda: msg.encode(vote, bytes(64)),
            lambda: msg.encode(vote, rng.randbytes(64)),
            lambda: self.signed(msg.Leave(branch, number, victim)).envelope,
            lambda: self.signed(announcement).envelope,
            lambda: self.signed(msg.Proposal(branch, number, view, -1, (long,), long, victim)).envelope,
            lambda: self.signed(msg.Regroup(branch, here.state.head, 0, members, victim)).envelope,
            lambda: msg.encode(msg.Certificate(branch, number, view, long, b"\x01", (rng.randbytes(64),))),
            lambda: self._framed(vote),
            lambda: rng.randbytes(rng.randrange(1, 200)),
            lambda: self.signed(replace(vote, author=self.me)).envelope + b"\0",
        )
        return [Publish(rng.choice(makes)())]

    def _framed(self, vote: msg.Vote) -> bytes:
        """Makes false evidence: two conflicting votes in the name of a member that sent neither."""
        first, second = sorted((self.signed(vote).envelope, self.signed(replace(vote, manifest=msg.NOTHING)).envelope))
        return msg.encode(msg.Evidence(first, second))
