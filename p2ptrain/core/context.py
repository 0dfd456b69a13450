"""The context that all parts of a node share: its identity, the time, pending effects, and its peers."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Protocol

from p2ptrain.config import RunConfig
from p2ptrain.core.events import Effect, Publish, Send
from p2ptrain.core.messages import Authored, Received, Verifier, encode, message_digest, signed_bytes
from p2ptrain.core.reputation import Reputation
from p2ptrain.core.state import AgreedState
from p2ptrain.core.voice import Voice


class Signer(Verifier, Protocol):
    """Signs as this node, and verifies anyone."""

    def sign(self, signed: bytes) -> bytes: ...


class Context:
    def __init__(self, run: RunConfig, run_id: bytes, me: bytes, signer: Signer, rng: Random) -> None:
        self.run, self.run_id, self.me, self.signer, self.rng = run, run_id, me, signer, rng
        self.now = 0.0
        self.effects: list[Effect] = []
        self.counters: Counter[str] = Counter()
        self.reputation = Reputation()
        self.voice = Voice(run.agreement.overlap_rounds_max, self.emit, self.publish)
        self.peers: dict[bytes, str] = {}  # connected, in the order in which they came, with their ranges of addresses
        self.heard_at: dict[bytes, float] = {}  # by member: its last message about the current round
        self.published_at = 0.0
        self.is_stopping = self.has_stopped = False  # asked to, and done

    def emit(self, effect: Effect) -> None:
        self.effects.append(effect)

    def is_out(self, state: AgreedState) -> bool:
        """Whether this node has left by this state, or has stopped: later rounds do not concern it."""
        return self.has_stopped or (self.is_stopping and (self.me not in state.place or state.members == (self.me,)))

    def has_heard(self, member: bytes, since: float) -> bool:
        """Whether a member has sent anything about the current round since then; always true for ourselves."""
        return member == self.me or self.heard_at.get(member, -1.0) >= since

    def signed(self, message: Authored, attachment: bytes = b"") -> Received:
        signature = self.signer.sign(signed_bytes(self.run_id, message))
        return Received(message, message_digest(message), encode(message, signature, attachment), attachment)

    def publish(self, *messages: Received) -> None:
        self.effects.extend(Publish(message.envelope) for message in messages)
        self.published_at = self.now

    def send(self, peer: bytes, *messages: Received) -> None:
        self.emit(Send(peer, tuple(message.envelope for message in messages)))

    def some_peers(self, count: int) -> list[bytes]:
        """Draws a few connected peers at random, so that nobody can predict which are asked."""
        peers = [*self.peers]
        return peers if len(peers) <= count else self.rng.sample(peers, count)
