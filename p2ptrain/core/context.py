"""What the parts of a node share: who it is, what time it is, and its voice.

A message that may be said only once goes to the disk before it goes out, so that a node that is killed in between
says the same again and not something else. A node that no longer knows what it has said, or that comes back to a
branch it had left so long ago, says nothing for the rounds in which it may have spoken.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Protocol

from p2ptrain.config import RunConfig
from p2ptrain.core.events import Effect, Persist, Publish, Said, Send
from p2ptrain.core.messages import (
    Announcement,
    Authored,
    Proposal,
    Received,
    Regroup,
    Verifier,
    Vote,
    encode,
    message_digest,
    signed_bytes,
)
from p2ptrain.core.reputation import Reputation

SILENT_BRANCHES_MAX = 64  # branches left; the oldest is forgotten, and by then its rounds are long past
PLACES_MAX = 64  # branches and rounds whose own words are remembered; of an older one, a node that comes back is silent


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
        self.peers: dict[bytes, None] = {}  # connected, in the order in which they came
        self.heard_at: dict[bytes, float] = {}  # when a member last said something about the round we are in
        self.silent: dict[bytes, int] = {}  # by branch: the last round in which we say nothing
        self.said: dict[tuple[bytes, int], list[Said]] = {}  # by branch and round: what may be said only once
        self.silent_everywhere = -1  # the same on any branch: what we said there is lost
        self.is_halted = False  # more than f members have lied, and nothing that we say could be trusted
        self.published_at = 0.0

    def emit(self, effect: Effect) -> None:
        self.effects.append(effect)

    def may_speak(self, branch: bytes, number: int) -> bool:
        """Whether we know all that we have said there."""
        return number > max(self.silent_everywhere, self.silent.get(branch, -1)) and not self.is_halted

    def keep_silent(self, branch: bytes, number: int) -> None:
        self.silent[branch] = max(number, self.silent.get(branch, -1))
        while len(self.silent) > SILENT_BRANCHES_MAX:
            del self.silent[next(iter(self.silent))]

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
            place = content.branch, -1 - content.attempt  # once an attempt, whatever the round
        else:
            assert isinstance(content, Announcement | Proposal | Vote), "nothing else is said only once"
            place = content.branch, content.round
        self.said.setdefault(place, []).append(said)
        while len(self.said) > PLACES_MAX:
            branch, number = next(iter(self.said))
            del self.said[branch, number]
            self.keep_silent(branch, number)

    def remembered(self, branch: bytes, number: int) -> list[Said]:
        """What we have said in a round, or about leaving its branch."""
        regroups = [said for (at, place), kept in self.said.items() if at == branch and place < 0 for said in kept]
        return regroups + self.said.get((branch, number), [])

    def send(self, peer: bytes, *messages: Received) -> None:
        self.emit(Send(peer, tuple(message.envelope for message in messages)))

    def some_peers(self, count: int, but: bytes = b"") -> list[bytes]:
        """A few connected peers at random: whom to ask is nobody else's business."""
        peers = [peer for peer in self.peers if peer != but]
        return peers if len(peers) <= count else self.rng.sample(peers, count)
