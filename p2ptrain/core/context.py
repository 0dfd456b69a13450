"""The context that all parts of a node share: its identity, the time, pending effects, and state that outlives a round.

A message that may be sent only once goes to the disk before it goes out, so that a node that is killed in between
sends the same again and nothing else. A node that no longer knows what it has sent, or that returns to a branch that it
left long ago, stays silent in the rounds in which it may have spoken.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Protocol

from msgspec import Struct

from p2ptrain.config import RunConfig
from p2ptrain.core.arrivals import Arrivals
from p2ptrain.core.claims import Claims
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
from p2ptrain.core.newcomers import NewcomerTime
from p2ptrain.core.offers import Offers
from p2ptrain.core.payloads import Payloads
from p2ptrain.core.reputation import Reputation
from p2ptrain.core.requests import Requests
from p2ptrain.core.state import AgreedState
from p2ptrain.core.tally import Tallies

SILENT_BRANCHES_MAX = 64  # branches left; the oldest is forgotten, and by then its rounds are long past
PLACES_MAX = 64  # rounds whose own messages are remembered; a node that returns to an older one is silent there
SAID_MAX = 256  # messages of a round: three a view, and peers accept those of 64 views
BACKING_BYTES_MAX = 2**26  # for all rounds but the current one, which takes as much as its messages: 30 MB at most


class OwnMessages(Struct):
    """Our messages of one round of one branch, which we must not contradict."""

    said: list[Said]
    lock: bytes = b""  # the envelope of our newest precommit for a manifest: our lock
    backing_bytes: int = 0

    def add(self, said: Said) -> None:
        """Adds a message. If there are too many, drops one of an old view, to which nobody returns; never the lock."""
        self.said.append(said)
        self.backing_bytes += sum(map(len, said.backing))
        if len(self.said) > SAID_MAX:
            old = next(each for each in self.said if each.envelope != self.lock)
            self.said.remove(old)
            self.backing_bytes -= sum(map(len, old.backing))

    def drop_backing(self) -> None:
        if self.backing_bytes:
            self.said, self.backing_bytes = [Said(said.envelope) for said in self.said], 0


class Signer(Verifier, Protocol):
    """Signs as this node, and verifies anyone."""

    def sign(self, signed: bytes) -> bytes: ...


class Context:
    """State and helpers shared by the parts of one node."""

    def __init__(self, run: RunConfig, run_id: bytes, me: bytes, signer: Signer, rng: Random) -> None:
        self.run, self.run_id, self.me, self.signer, self.rng = run, run_id, me, signer, rng
        self.now = 0.0
        self.effects: list[Effect] = []
        self.counters: Counter[str] = Counter()
        self.reputation = Reputation()
        self.tallies = Tallies()  # counts of contributions, only shown
        self.claims = Claims(run)  # only shown, too
        self.payloads = Payloads(self)
        self.offers = Offers(run.agreement.staleness_rounds_max, self.payloads)
        self.requests = Requests(self)
        self.arrivals = Arrivals()
        self.newcomers = NewcomerTime()
        self.applied_root: tuple[int, bytes] = (0, NOTHING)  # the round and root that our availabilities carry
        self.peers: dict[bytes, None] = {}  # connected, in the order in which they came
        self.heard_at: dict[bytes, float] = {}  # by member: its last message about the current round
        self.silent: dict[bytes, int] = {}  # by branch: the last round in which we stay silent
        self.said: dict[tuple[bytes, int], OwnMessages] = {}  # by branch and round: messages that may be sent only once
        self.regroups: dict[tuple[bytes, bytes], Said] = {}  # by branch and parent: our newest regroup
        self.here: tuple[bytes, int] = (b"", -1)  # the current branch and round
        self.silent_everywhere = -1  # the same for any branch: our record of it is lost
        self.is_halted = False  # more than f members have lied, so no vote can be trusted any more
        self.is_stopping = self.has_stopped = False  # asked to, and done
        self.published_at = 0.0
        self.round_began_at = 0.0  # when the previous round began

    def emit(self, effect: Effect) -> None:
        self.effects.append(effect)

    def is_out(self, state: AgreedState) -> bool:
        """Whether this node has left by this state, or has stopped: later rounds do not concern it."""
        return self.has_stopped or (self.is_stopping and (self.me not in state.place or state.members == (self.me,)))

    def may_speak(self, branch: bytes, number: int) -> bool:
        """Whether we know everything that we have sent in this round."""
        return number > max(self.silent_everywhere, self.silent.get(branch, -1)) and not self.is_halted

    def keep_silent(self, branch: bytes, number: int) -> None:
        self.silent[branch] = max(number, self.silent.pop(branch, -1))
        while len(self.silent) > SILENT_BRANCHES_MAX:  # never the current branch: we might contradict ourselves there
            del self.silent[next(at for at in self.silent if at != self.here[0])]

    def enter(self, branch: bytes, number: int) -> None:
        """Enters a round, and drops the backing of our messages in earlier rounds of its branch, which are certified.

        The cost: if those certificates were lost everywhere and we entered such a round again, we would still be
        locked, but could not propose our locked manifest; only a member that still has it could. A round that we leave
        by leaving its branch keeps its backing.
        """
        self.here = branch, number
        for (at, place), words in self.said.items():
            if at == branch and place < number:
                words.drop_backing()
        self._forget_backing(self.here)

    def has_heard(self, member: bytes, since: float) -> bool:
        """Whether a member has sent anything about the current round since then; always true for ourselves."""
        return member == self.me or self.heard_at.get(member, -1.0) >= since

    def signed(self, message: Authored, attachment: bytes = b"") -> Received:
        """Signs a message as this node."""
        signature = self.signer.sign(signed_bytes(self.run_id, message))
        return Received(message, message_digest(message), encode(message, signature, attachment), attachment)

    def publish(self, *messages: Received) -> None:
        self.effects.extend(Publish(message.envelope) for message in messages)
        self.published_at = self.now

    def publish_once(
        self, message: Received, backing: tuple[bytes, ...] = (), payloads: tuple[bytes, ...] = ()
    ) -> None:
        """Publishes a message that may be sent only once, after it is on the disk."""
        said = Said(message.envelope, backing, payloads)
        self.remember(message, said)
        self.emit(Persist(said))
        self.publish(message)

    def remember(self, message: Received, said: Said) -> None:
        """Keeps a message, so that we do not contradict it if we return to its round later or after a restart."""
        content = message.message
        if isinstance(content, Regroup):
            parent = content.branch, content.parent
            self.regroups.pop(parent, None)  # attempts only rise: older ones are over
            self.regroups[parent] = said
            if len(self.regroups) > PLACES_MAX:
                del self.regroups[next(iter(self.regroups))]
            return
        assert isinstance(content, Announcement | Proposal | Vote), "no other kind may be sent only once"
        place = content.branch, content.round
        words = self.said.pop(place, None) or OwnMessages([])
        self.said[place] = words  # at the end: the least recently used are forgotten first
        if isinstance(content, Vote) and content.ballot is Ballot.PRECOMMIT and content.manifest != NOTHING:
            words.drop_backing()  # those of an older lock
            words.lock = message.envelope
        words.add(Said(said.envelope, said.backing))  # the payloads are only needed for the disk
        self._forget_places()
        if said.backing:
            self._forget_backing(place)

    def _forget_places(self) -> None:
        """Forgets the oldest rounds and stays silent there for good, but not in the current round or later ones of its
        branch.

        Rounds that are not the last of their branch go first: if a branch that we left wins after all, the swarm may
        need our vote in its last rounds.
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
        """Drops the oldest backing, as in `enter`, when many branches were left while we were locked."""
        sizes = {place: words.backing_bytes for place, words in self.said.items() if place != but}
        total = sum(sizes.values())
        for place, size in sizes.items():
            if total > BACKING_BYTES_MAX and size:
                self.said[place].drop_backing()
                total -= size

    def remembered(self, branch: bytes, number: int) -> list[Said]:
        """Returns our messages of a round, and our regroups from its branch."""
        regroups = [said for (at, _), said in self.regroups.items() if at == branch]
        words = self.said.get((branch, number))
        return regroups + (words.said if words else [])

    def send(self, peer: bytes, *messages: Received) -> None:
        self.emit(Send(peer, tuple(message.envelope for message in messages)))

    def some_peers(self, count: int, but: bytes = b"") -> list[bytes]:
        """Draws a few connected peers at random, so that nobody can predict which are asked."""
        peers = [peer for peer in self.peers if peer != but]
        return peers if len(peers) <= count else self.rng.sample(peers, count)

    def limits(self) -> dict[str, tuple[int, int]]:
        """Returns each buffer's size and bound. Rounds after the current one, two at most, are kept."""
        backing = [words.backing_bytes for place, words in self.said.items() if place != self.here]
        return {
            "rounds spoken in": (len(self.said), PLACES_MAX + 2),
            "words of a round": (max((len(words.said) for words in self.said.values()), default=0), SAID_MAX),
            "sets signed": (len(self.regroups), PLACES_MAX),
            "silent branches": (len(self.silent), SILENT_BRANCHES_MAX),
            "bytes that back what we said": (sum(backing), BACKING_BYTES_MAX),
        }
