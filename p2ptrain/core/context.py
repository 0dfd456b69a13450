"""Everything that the parts of a node share: its identity, the time, its voice, and what outlives a round.

A message that may be said only once goes to the disk before it goes out, so that a node that is killed in between
says the same again and not something else. A node that no longer knows what it has said, or that comes back to a
branch it had left so long ago, says nothing for the rounds in which it may have spoken.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Protocol

from msgspec import Struct

from p2ptrain.config import RunConfig
from p2ptrain.core.arrivals import Arrivals
from p2ptrain.core.events import Effect, Persist, Publish, Said, Send
from p2ptrain.core.messages import (
    NOTHING,
    Announcement,
    Authored,
    Ballot,
    Proposal,
    Received,
    Regroup,
    Verifier,
    Vote,
    encode,
    message_digest,
    signed_bytes,
)
from p2ptrain.core.offers import Offers
from p2ptrain.core.payloads import Payloads
from p2ptrain.core.reputation import Reputation
from p2ptrain.core.requests import Requests
from p2ptrain.core.tally import Tallies

SILENT_BRANCHES_MAX = 64  # branches left; the oldest is forgotten, and by then its rounds are long past
PLACES_MAX = 64  # branches and rounds whose own words are remembered; of an older one, a node that comes back is silent
SAID_MAX = 256  # messages of a place: three a view, and others hear those of 64 views
BACKING_BYTES_MAX = 2**26  # of all places but the one we are in, where it takes what its round takes: 30 MB at most


class Words(Struct):
    """What we said in one round of one branch, and may not say otherwise."""

    said: list[Said]
    lock: bytes = b""  # the envelope of the newest precommit for a manifest, which is what we are locked on

    @property
    def backing_bytes(self) -> int:
        return sum(len(envelope) for said in self.said for envelope in said.backing)

    def drop_backing(self) -> None:
        self.said = [Said(said.envelope) if said.backing else said for said in self.said]


class Signer(Verifier, Protocol):
    """Signs as this node, and verifies anyone."""

    def sign(self, signed: bytes) -> bytes: ...


class Context:
    """Shared by the parts of one node."""

    def __init__(self, run: RunConfig, run_id: bytes, me: bytes, signer: Signer, rng: Random) -> None:
        self.run, self.run_id, self.me, self.signer, self.rng = run, run_id, me, signer, rng
        self.now = 0.0
        self.effects: list[Effect] = []
        self.counters: Counter[str] = Counter()
        self.reputation = Reputation()
        self.tallies = Tallies()  # of contributions, for people
        self.payloads = Payloads(self)
        self.offers = Offers(run.agreement.staleness_rounds_max, self.payloads)
        self.requests = Requests(self)
        self.arrivals = Arrivals()
        self.applied_root: tuple[int, bytes] = (0, NOTHING)  # the round and root that our availabilities carry
        self.peers: dict[bytes, None] = {}  # connected, in the order in which they came
        self.heard_at: dict[bytes, float] = {}  # when a member last said something about the round we are in
        self.silent: dict[bytes, int] = {}  # by branch: the last round in which we say nothing
        self.said: dict[tuple[bytes, int], Words] = {}  # by branch and round: what may be said only once
        self.regroups: dict[tuple[bytes, bytes], Said] = {}  # by branch and parent: the newest set that we signed
        self.here: tuple[bytes, int] = (b"", -1)  # the branch and the round we are in
        self.silent_everywhere = -1  # the same on any branch: what we said there is lost
        self.is_halted = False  # more than f members have lied, and nothing that we say could be trusted
        self.published_at = 0.0
        self.round_began_at = 0.0  # the round before this one

    def emit(self, effect: Effect) -> None:
        self.effects.append(effect)

    def may_speak(self, branch: bytes, number: int) -> bool:
        """Whether we know all that we have said there."""
        return number > max(self.silent_everywhere, self.silent.get(branch, -1)) and not self.is_halted

    def keep_silent(self, branch: bytes, number: int) -> None:
        self.silent[branch] = max(number, self.silent.pop(branch, -1))
        while len(self.silent) > SILENT_BRANCHES_MAX:  # never of our branch: we would say something else there
            del self.silent[next(at for at in self.silent if at != self.here[0])]

    def enter(self, branch: bytes, number: int) -> None:
        """A round begins: those before it on its branch are certified, and what backs our words there is dropped.

        Lost with it: should the certificates of those rounds be lost everywhere that we look, and we be in one of them
        again, then we are as locked as before, but cannot ourselves propose again what we are locked on; a member
        that is still there, or has it on its disk, must. A round that we leave with its branch keeps its backing.
        """
        self.here = branch, number
        for (at, place), words in self.said.items():
            if at == branch and place < number:
                words.drop_backing()
        self._forget_backing(self.here)

    def has_heard(self, member: bytes, since: float) -> bool:
        """Whether a member has said anything about the round we are in since then; we have."""
        return member == self.me or self.heard_at.get(member, -1.0) >= since

    def signed(self, message: Authored, attachment: bytes = b"") -> Received:
        """A message of ours."""
        signature = self.signer.sign(signed_bytes(self.run_id, message))
        return Received(message, message_digest(message), encode(message, signature, attachment), attachment)

    def publish(self, *messages: Received) -> None:
        self.effects.extend(Publish(message.envelope) for message in messages)
        self.published_at = self.now

    def publish_once(
        self, message: Received, backing: tuple[bytes, ...] = (), payloads: tuple[bytes, ...] = ()
    ) -> None:
        """Say what may be said only once: to the disk first."""
        said = Said(message.envelope, backing, payloads)
        self.remember(message, said)
        self.emit(Persist(said))
        self.publish(message)

    def remember(self, message: Received, said: Said) -> None:
        """Should we come back to this round, over a restart or from another branch, we stand by this."""
        content = message.message
        if isinstance(content, Regroup):
            parent = content.branch, content.parent
            self.regroups.pop(parent, None)  # attempts only rise: of older ones nothing is said any more
            self.regroups[parent] = said
            if len(self.regroups) > PLACES_MAX:
                del self.regroups[next(iter(self.regroups))]
            return
        assert isinstance(content, Announcement | Proposal | Vote), "nothing else is said only once"
        place = content.branch, content.round
        words = self.said.pop(place, None) or Words([])
        self.said[place] = words  # at the end: the longest unused are forgotten first
        if isinstance(content, Vote) and content.ballot is Ballot.PRECOMMIT and content.manifest != NOTHING:
            words.drop_backing()  # of an older lock
            words.lock = message.envelope
        words.said.append(Said(said.envelope, said.backing))  # the payloads are the disk's business
        if len(words.said) > SAID_MAX:  # of old views, to which nobody returns; but the lock holds in all of them
            words.said.remove(next(each for each in words.said if each.envelope != words.lock))
        self._forget_places()
        if said.backing:
            self._forget_backing(place)

    def _forget_places(self) -> None:
        """Be silent for good where we spoke longest ago, but not in the round we are in, nor further on from here.

        Rounds that others of their branch have followed go first: a branch that we left ends with its last rounds, and
        if it wins, the swarm may need us there.
        """
        if len(self.said) <= PLACES_MAX:
            return
        branch, number = self.here
        last: dict[bytes, int] = {}
        for at, place in self.said:
            last[at] = max(place, last.get(at, place))
        ahead = self.run.agreement.overlap_rounds
        free = [place for place in self.said if place[0] != branch or place[1] < number]
        free.sort(key=lambda place: place[1] >= last[place[0]] - ahead)  # and the oldest first
        for old in free[: len(self.said) - PLACES_MAX]:
            del self.said[old]
            self.keep_silent(*old)

    def _forget_backing(self, but: tuple[bytes, int]) -> None:
        """As in `enter`, for the oldest, when many branches were left while we were locked."""
        sizes = {place: words.backing_bytes for place, words in self.said.items() if place != but}
        total = sum(sizes.values())
        for place, size in sizes.items():
            if total > BACKING_BYTES_MAX and size:
                self.said[place].drop_backing()
                total -= size

    def remembered(self, branch: bytes, number: int) -> list[Said]:
        """What we have said in a round, or about leaving its branch."""
        regroups = [said for (at, _), said in self.regroups.items() if at == branch]
        words = self.said.get((branch, number))
        return regroups + (words.said if words else [])

    def send(self, peer: bytes, *messages: Received) -> None:
        self.emit(Send(peer, tuple(message.envelope for message in messages)))

    def some_peers(self, count: int, but: bytes = b"") -> list[bytes]:
        """A few connected peers at random: whom to ask is nobody else's business."""
        peers = [peer for peer in self.peers if peer != but]
        return peers if len(peers) <= count else self.rng.sample(peers, count)

    def limits(self) -> dict[str, tuple[int, int]]:
        """Sizes and their bounds. Places further on than the one we are in are not forgotten: two at a time are new."""
        backing = [words.backing_bytes for place, words in self.said.items() if place != self.here]
        return {
            "rounds spoken in": (len(self.said), PLACES_MAX + 2),
            "words of a round": (max((len(words.said) for words in self.said.values()), default=0), SAID_MAX),
            "sets signed": (len(self.regroups), PLACES_MAX),
            "silent branches": (len(self.silent), SILENT_BRANCHES_MAX),
            "bytes that back what we said": (sum(backing), BACKING_BYTES_MAX),
        }
