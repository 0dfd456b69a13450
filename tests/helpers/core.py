"""Test helpers for the core: members with keys and a fake signer, and a bench with one node whose peers the test
plays."""

from __future__ import annotations

from random import Random
from typing import Any

from p2ptrain.config import RunConfig
from p2ptrain.core import events as ev
from p2ptrain.core.chain import grown
from p2ptrain.core.history import Beginning, Entry
from p2ptrain.core.manifest import Manifest, Missing, manifest_of
from p2ptrain.core.messages import (
    SHORT_BYTES,
    Announcement,
    Authored,
    Availability,
    Ballot,
    Certificate,
    Evidence,
    Hello,
    Message,
    Proposal,
    Received,
    Regroup,
    Vote,
    authored,
    content_name,
    decode,
    encode,
    message_digest,
    payload_digest,
    signed_bytes,
)
from p2ptrain.core.node import Node
from p2ptrain.core.participant import Participant
from p2ptrain.core.roster import bitmap, proposers
from p2ptrain.core.state import AgreedState, genesis
from p2ptrain.digest import digest

RUN = digest("core test", b"run")
ROOT0 = digest("core test", b"root 0")
KEYS = tuple(sorted(digest("core test key", bytes([number])) for number in range(16)))  # so that a seat is its place
BYTES = 20_000  # of a payload that does not ride along


class DigestSigner:
    """Fake signatures, made of digests over the key: sufficient where only their binding to key and data matters."""

    def __init__(self, key: bytes = b"") -> None:
        self.run_id, self.key = RUN, key

    def sign(self, signed: bytes) -> bytes:
        return digest("core test signature", self.key, signed) * 2

    def __call__(self, key: bytes, signed: bytes, signature: bytes) -> bool:
        return signature == DigestSigner(key).sign(signed)


def signed(message: Message, attachment: bytes = b"") -> Received:
    """A message as its author sends it."""
    if isinstance(message, Certificate | Evidence):
        envelope = encode(message)
    else:
        envelope = encode(message, DigestSigner(message.author).sign(signed_bytes(RUN, message)), attachment)
    return Received(message, message_digest(message), envelope, attachment)


def name_of(message: Message) -> bytes:
    return message_digest(message)[:SHORT_BYTES]


def payload(author: bytes, number: int, which: bytes = b"") -> bytes:
    """The bytes of a contribution that is small enough to be attached."""
    return authored(
        author, digest("core test payload", author, number.to_bytes(1 + number.bit_length() // 8, "big"), which)
    )


def announced(
    author: bytes, number: int = 1, which: bytes = b"", inline: bool = False, branch: bytes = RUN, **changes: Any
) -> Announcement:
    body = payload(author, number, which)
    fields: dict[str, Any] = {
        "base_round": number - 1,
        "base_root": ROOT0 if number == 1 else root_of(number - 1),
        "payload": payload_digest(body),
        "payload_bytes": len(body) if inline else BYTES,
        # Large payloads have no bytes in these tests.
        "content": content_name(body) if inline else changes.get("payload", payload_digest(body))[:SHORT_BYTES],
        "steps": 1,
        "loss": 2_500_000,
        "held_out": 0,
    }
    return Announcement(branch=branch, round=number, author=author, **(fields | changes))


def root_of(number: int) -> bytes:
    """The root that the trainer reports after a round."""
    return digest("core test root", number.to_bytes(1 + number.bit_length() // 8, "big")) if number else ROOT0


def voted(author: bytes, ballot: Ballot, manifest: bytes, view: int = 0, number: int = 1, branch: bytes = RUN) -> Vote:
    return Vote(branch, number, view, ballot, manifest, author)


def signed_set(
    members: tuple[bytes, ...], author: bytes, attempt: int = 0, state: AgreedState | None = None
) -> Regroup:
    branch, parent = (state.branch, state.head) if state else (RUN, RUN)
    return Regroup(branch, parent, attempt, tuple(sorted(members)), author)


def begun(members: tuple[bytes, ...], signers: tuple[bytes, ...], state: AgreedState, attempt: int = 0) -> Beginning:
    """The beginning of a branch after `state`."""
    ordered = tuple(sorted(members))
    regroups = [Regroup(state.branch, state.head, attempt, ordered, key) for key in sorted(signers)]
    signatures = tuple(DigestSigner(each.author).sign(signed_bytes(RUN, each)) for each in regroups)
    return Beginning(state.branch, state.round, state.head, attempt, ordered, tuple(sorted(signers)), signatures)


def certified(manifest: Manifest, state: AgreedState, view: int = 0, signers: tuple[bytes, ...] = ()) -> Entry:
    """A manifest with a certificate by a quorum of the roster of `state`."""
    chosen = tuple(sorted(signers or state.members[: state.roster.quorum]))
    votes = [Vote(manifest.branch, manifest.round, view, Ballot.PRECOMMIT, manifest.digest, key) for key in chosen]
    signatures = tuple(DigestSigner(vote.author).sign(signed_bytes(RUN, vote)) for vote in votes)
    seats = bitmap(state.roster.seat[key] for key in chosen)
    return Entry(manifest, Certificate(manifest.branch, manifest.round, view, manifest.digest, seats, signatures))


def plain_manifest(state: AgreedState, run: RunConfig, offers: list[Announcement] = [], **changes: Any) -> Manifest:  # noqa: B006
    """The manifest of a quorum that holds exactly these contributions."""
    names = tuple(sorted(name_of(offer) for offer in offers))
    by_name = {name_of(offer): offer for offer in offers}
    heard = bitmap(range(state.roster.size))
    fields: dict[str, Any] = {"root_round": state.root_round, "root": state.root} | changes
    named = [
        Availability(
            state.branch, state.round + 1, held=names, refused=(), requests=(), heard=heard, author=key, **fields
        )
        for key in state.members[: state.roster.quorum]
    ]
    manifest = manifest_of(state, run, named, by_name.get, lambda name: None)
    assert isinstance(manifest, Manifest)
    return manifest


def line_of(
    state: AgreedState, run: RunConfig, rounds: int, signers: tuple[bytes, ...] = (), which: bytes = b""
) -> list[tuple[Entry, AgreedState]]:
    """A chain of `rounds` rounds after a state, each with a contribution by every member."""
    steps: list[tuple[Entry, AgreedState]] = []
    for number in range(state.round + 1, state.round + rounds + 1):
        root = {"root_round": number - 1, "root": root_of(number - 1)}
        offers = [announced(key, number, which, branch=state.branch) for key in state.members]
        entry = certified(plain_manifest(state, run, offers, **root), state, signers=signers)
        state = state.after(entry.manifest, run)
        steps.append((entry, state))
    return steps


def run_of(
    agreement: dict[str, Any] | None = None,
    admission: dict[str, Any] | None = None,
    recipe: dict[str, Any] | None = None,
    every_rounds: int = 0,
    data: dict[str, Any] | None = None,
) -> RunConfig:
    """`every_rounds`: between measurements of the held-out loss."""
    sections = {"agreement": agreement or {}, "admission": admission or {}, "recipe": recipe or {"name": "distro"}}
    others = {"eval": {"every_rounds": every_rounds}, "data": data or {}}
    return RunConfig.model_validate({"name": "test", **sections, **others})


class Bench:
    """A node among `size` founders, the others of which the test plays, and the node's clock."""

    def __init__(
        self,
        size: int = 4,
        me: int = 0,
        agreement: dict[str, Any] | None = None,
        admission: dict[str, Any] | None = None,
        peers: bool = True,
        start: bool = True,
        seed: int = 0,
        *,
        recipe: dict[str, Any] | None = None,
        every_rounds: int = 0,
    ) -> None:
        self.run = run_of(agreement, admission, recipe, every_rounds)
        self.founders = KEYS[:size]
        self.me = KEYS[me]  # a newcomer, if it is beyond the founders
        self.others = tuple(key for key in self.founders if key != self.me)
        self.genesis = genesis(RUN, self.founders, ROOT0)
        self.seed = seed
        self.node = self.make()
        self.now = 0.0
        self.started: list[ev.Effect] = []
        if start:
            self.started = self.start()
            for peer in self.others if peers else ():
                self.do(ev.PeerSeen(peer))

    def make(self) -> Node:
        return Node(self.run, RUN, self.me, DigestSigner(self.me), Random(self.seed))

    def saved(self, **changes: Any) -> ev.Saved:
        fields: dict[str, Any] = {
            "history": (),
            "said": (),
            "applied_round": 0,
            "applied_root": ROOT0,
            "base": self.genesis,
        }
        return ev.Saved(**(fields | changes))

    def start(self, forgetful: bool = False, claim: bytes = b"", **changes: Any) -> list[ev.Effect]:
        return self.do(ev.Started(self.saved(**changes), forgetful, claim))

    # -----------------------------------------------------------------------------------------------
    # Events

    def do(self, event: ev.Event, at: float | None = None) -> list[ev.Effect]:
        self.now = self.now if at is None else at
        return self.node.handle(event, self.now)

    def tick(self, at: float | None = None) -> list[ev.Effect]:
        """Ticks at a given time, or at the deadline."""
        deadline = self.node.deadline
        assert deadline is not None
        return self.do(ev.Tick(), max(self.now, deadline) if at is None else at)

    def wait(self, seconds: float) -> list[ev.Effect]:
        """Ticks at every deadline for this long and once at the end, because a longer silence would be taken for
        sleep."""
        until, effects = self.now + seconds, []
        while self.node.deadline is not None and self.node.deadline < until:
            effects += self.tick()
        return effects + self.do(ev.Tick(), until)

    def hear(
        self, message: Message, sender: bytes = b"", attachment: bytes = b"", good: bool | None = None
    ) -> list[ev.Effect]:
        """Delivers a message by gossip, or from `sender` by stream, decoded as a driver does it."""
        received = decode(signed(message, attachment).envelope, DigestSigner())
        author = b"" if isinstance(message, Certificate | Evidence) else message.author
        return self.do(ev.MessageReceived(sender or author or self.others[0], received, good))

    def hear_all(self, *messages: Message) -> list[ev.Effect]:
        return [effect for message in messages for effect in self.hear(message)]

    def hear_offer(self, offer: Announcement, which: bytes = b"", good: bool = True) -> list[ev.Effect]:
        """Delivers an announcement with its payload attached."""
        return self.hear(offer, attachment=payload(offer.author, offer.round, which), good=good)

    def arrives(self, payload: bytes, good: bool = True) -> list[ev.Effect]:
        """Delivers a payload that was fetched, of the author and length that were announced first."""
        wanted = self.parts.pools.payloads.wanted.get(payload)
        author, size = next(iter(wanted.claims.items())) if wanted else (self.founders[-1], BYTES)
        return self.do(ev.PayloadArrived(payload, good, author, size))

    def train(self, number: int = 1, inline: bool = False) -> list[ev.Effect]:
        body = payload(self.me, number)
        size = len(body) if inline else BYTES
        attached = {"attachment": body, "content": content_name(body)} if inline else {}
        return self.do(
            ev.TrainingFinished(number, payload_digest(body), size, steps=1, loss=2_500_000, **attached)  # type: ignore[arg-type]
        )

    # -----------------------------------------------------------------------------------------------
    # What is to be expected

    @property
    def health(self) -> tuple[str, ...]:
        """The texts of the node's complaints."""
        return tuple(each.text for each in self.node.view().complaints)

    @property
    def parts(self) -> Participant:
        assert self.node.participant is not None
        return self.node.participant

    @property
    def state(self) -> AgreedState:
        return self.parts.chain.state

    def said(self, message: Authored, *backing: Message, manifest: Manifest | None = None) -> list[ev.Effect]:
        """The effects of a message that may be sent only once; a prevote comes with the payloads that have to be on
        the disk."""
        received = signed(message)
        payloads = tuple(taken.payload for taken in manifest.taken) if manifest else ()
        if isinstance(message, Announcement):
            payloads = (message.payload,)
        return [ev.Persist(ev.Said(received.envelope, envelopes(*backing), payloads)), ev.Publish(received.envelope)]

    def order(self, number: int = 1, state: AgreedState | None = None) -> tuple[bytes, ...]:
        at = state or self.genesis
        return proposers(RUN, at.branch, number, at.members)

    def available(self, author: bytes, offers: tuple[Announcement, ...] = (), **changes: Any) -> Availability:
        """A member's availability in the node's current round, with these contributions held and every member heard."""
        at = self.state
        fields: dict[str, Any] = {
            "branch": at.branch,
            "round": at.round + 1,
            "root_round": at.round,
            "root": root_of(at.round),
            "held": tuple(sorted(name_of(offer) for offer in offers)),
            "refused": (),
            "requests": (),
            "heard": bitmap(range(at.roster.size)),
        }
        return Availability(author=author, **(fields | changes))

    def proposed(
        self, named: list[Availability], offers: tuple[Announcement, ...] = (), view: int = 0, **changes: Any
    ) -> tuple[Proposal, Manifest]:
        """A proposal by the proposer of a view of the current round, and its manifest."""
        at, requests = self.state, changes.pop("asked", {})
        by_name = {name_of(offer): offer for offer in offers}
        manifest = manifest_of(at, self.run, named, by_name.get, requests.get)
        assert not isinstance(manifest, Missing)
        order = self.order(at.round + 1, at)
        fields: dict[str, Any] = {
            "valid_view": -1,
            "availabilities": tuple(sorted(message_digest(each) for each in named)),
            "manifest": manifest.digest,
            "author": order[view % len(order)],
        }
        return Proposal(branch=at.branch, round=at.round + 1, view=view, **(fields | changes)), manifest

    def hello(self, author: bytes, **changes: Any) -> Hello:
        """A hello of a member in the same round that holds nothing yet."""
        at = self.state
        fields: dict[str, Any] = {
            "branch": at.branch,
            "round": at.round + 1,
            "view": 0,
        }
        bitmaps: dict[str, Any] = dict.fromkeys(("announced", "available", "prevoted", "precommitted"), b"")
        return Hello(author=author, **({"is_silent": False} | fields | bitmaps | changes))

    # -----------------------------------------------------------------------------------------------
    # Whole rounds

    def collect(self, offers: tuple[Announcement, ...] | None = None) -> tuple[Announcement, ...]:
        """Plays ten seconds of training and everyone's contribution, until the node has published its availability."""
        self.now += 10.0
        number = self.state.round + 1
        mine = announced(self.me, number, branch=self.state.branch)
        others = [announced(key, number, inline=True, branch=self.state.branch) for key in self.others]
        for offer in others:
            self.hear_offer(offer)
        self.train(number)
        return (*others, mine)

    def decide(self, apply: bool = True, asked: bool = False) -> list[ev.Effect]:
        """Plays a whole round without faults; returns the effects of its decision and everything after it.

        asked: whether all attest the requests that this node knows
        """
        return self.agree(self.collect(), apply, asked)

    def agree(self, offers: tuple[Announcement, ...], apply: bool = True, asked: bool = False) -> list[ev.Effect]:
        """Plays the rest of a round after the node has published its availability."""
        at, mine = self.state, self.parts.here.mine
        number = at.round + 1
        assert mine is not None
        assert isinstance(mine.message, Availability)
        requests = self.parts.pools.requests
        known = {"requests": requests.names(at)} if asked else {}
        named = [mine.message, *(self.available(key, offers, **known) for key in self.others)]
        self.hear_all(*named[1:])
        received = self.parts.here.agreement.views[0].proposal
        if received is None:
            waiting = {name: each.request for name, each in requests.by_name.items()}
            proposal, manifest = self.proposed(named[: at.roster.quorum], offers, asked=waiting)
            self.hear(proposal)
        else:
            assert isinstance(received.message, Proposal)
            manifest = self.parts.here.manifests[received.message.manifest]
        effects: list[ev.Effect] = []
        for ballot in Ballot:
            for key in self.others:
                if self.state is at:
                    vote = voted(key, ballot, manifest.digest, number=number, branch=at.branch)
                    effects = self.hear(vote)
        assert self.state.head == manifest.digest, "the round was decided"
        return effects + (self.do(ev.Applied(at.branch, number, root_of(number))) if apply else [])


def offers_of(bench: Bench, number: int = 1) -> tuple[Announcement, ...]:
    """The announcements as in `Bench.collect`: the others' payloads are attached, the node's own is not."""
    return tuple(announced(key, number, inline=key != bench.me, branch=bench.state.branch) for key in bench.founders)


def collecting(
    size: int = 4, me: int = 1, at: float = 10.0, **settings: object
) -> tuple[Bench, tuple[Announcement, ...]]:
    """A node that holds everyone else's contribution, and has yet to offer its own."""
    bench = Bench(size, me=me, **settings)  # type: ignore[arg-type]
    bench.now = at
    offers = offers_of(bench)
    for offer in offers:
        if offer.author != bench.me:
            bench.hear_offer(offer)
    return bench, offers


def proposed(me: int = 1) -> tuple[Bench, tuple[Announcement, ...], list[Availability], Proposal, Manifest]:
    """A node that has closed its round and has all availabilities, with the current proposal."""
    bench, offers = collecting(me=me)
    bench.train()
    named = [bench.available(key, offers) for key in bench.founders]
    proposal, manifest = bench.proposed(named[:3], offers)
    return bench, offers, named, proposal, manifest


class MemoryStore:
    """A driver's disk: keeps records, and returns them at startup."""

    def __init__(self, base: AgreedState, kept: int = 256) -> None:
        self.base, self.kept = base, kept
        self.history: list[ev.Certified] = []
        self.said: list[tuple[Message, ev.Said]] = []
        self.trunk: ev.Trunk | None = None
        self.silences: dict[bytes, ev.Silence] = {}
        self.scores = b""
        self.halted: ev.Halted | None = None
        self.checkpoints = [(base.head, 0, ROOT0)]  # after which manifest; round and root

    @property
    def state(self) -> AgreedState:
        return self.history[-1].state if self.history else self.base

    def keep(self, effects: list[ev.Effect]) -> None:
        for effect in effects:
            match effect.record if isinstance(effect, ev.Persist) else None:
                case ev.Said() as said:
                    self.said.append((decode(said.envelope, DigestSigner()).message, said))
                case ev.Certified() as certified:
                    self._certify(certified)
                case ev.Silence() as silence:
                    self.silences[silence.branch] = silence
                case ev.Observed(scores=scores):
                    self.scores = scores
                case ev.Halted() as halted:
                    self.halted = halted
                case _:
                    pass

    def _certify(self, certified: ev.Certified) -> None:
        """Stores a step, which replaces everything after the step that it follows; one that follows none is a new
        base."""
        step = certified.step
        trunk = certified.trunk
        if trunk is None and self.trunk is not None:
            trunk = grown(self.trunk, step, self.state, self.history[-1].step if self.history else None)
        self.trunk = trunk or self.trunk
        if certified.trunk and certified.trunk.base:
            self.base, self.history = certified.trunk.base, []
        parent = step.parent if isinstance(step, Beginning) else step.manifest.parent
        while self.history and self.state.head != parent:
            self.history.pop()
        if self.state.head == parent:
            self.history.append(certified)
        else:
            self.base = certified.state
        if len(self.history) > self.kept:
            self.base = self.history.pop(0).state

    def saved(self) -> ev.Saved:
        heads = {self.base.head, *(certified.state.head for certified in self.history)}
        on_line = [(number, root) for head, number, root in self.checkpoints if head in heads]
        number, root = on_line[-1] if on_line else (0, ROOT0)
        later = [
            said
            for message, said in self.said
            if isinstance(message, Regroup) or getattr(message, "round", 0) > self.state.round
        ]
        return ev.Saved(
            self.base,
            tuple(self.history),
            tuple(later),
            number,
            root,
            self.trunk,
            tuple(self.silences.values()),
            self.scores,
            self.halted,
        )


def envelopes(*messages: Message) -> tuple[bytes, ...]:
    return tuple(signed(message).envelope for message in messages)


def published(effects: list[ev.Effect]) -> list[Message]:
    """The messages that are published to everyone."""
    return [decode(effect.envelope, DigestSigner()).message for effect in effects if isinstance(effect, ev.Publish)]


def sent(effects: list[ev.Effect]) -> list[tuple[bytes, Message]]:
    """The messages that are sent to one peer."""
    return [
        (effect.peer, decode(envelope, DigestSigner()).message)
        for effect in effects
        if isinstance(effect, ev.Send)
        for envelope in effect.envelopes
    ]


class Restless(Node):
    """A node that never rests."""

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        self._rested = None
        return super().handle(event, now)
