"""A simulated machine: one node of the core with its clock, disk, device and connections.

What survives a SIGKILL stands in `disk` and `shelf`; the rest belongs to one life of the process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from p2ptrain.core.effect_queue import EffectQueue
from p2ptrain.core.events import CatchUp, Effect, Event, Train
from p2ptrain.core.node import Node
from p2ptrain.sim.disk import Disk
from p2ptrain.sim.keys import FakeSigner
from p2ptrain.sim.rewriting import Liar, ToSome

NEVER = float("inf")
HELD_UP_MAX = 20_000  # events that wait for a machine that sleeps: what the buffers of its connections hold; a guess


class Shelf:
    """Payloads that are held. Whatever is older than `rounds` rounds goes, some time within as many again."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.new: set[bytes] = set()
        self.old: set[bytes] = set()
        self.turned_at = 0

    def __contains__(self, payload: bytes) -> bool:
        return payload in self.new or payload in self.old

    def add(self, payload: bytes) -> None:
        self.new.add(payload)

    def turn(self, number: int) -> None:
        """A round has passed."""
        if number >= self.turned_at + self.rounds:
            self.old, self.new, self.turned_at = self.new, set(), number

    def keep(self, payloads: Iterable[bytes]) -> None:
        self.new, self.old = {payload for payload in payloads if payload in self}, set()


@dataclass(slots=True)
class Device:
    """The trainer, as far as agreement is concerned: which state it has, and what it is busy with."""

    round: int
    root: bytes
    head: bytes  # the manifest that was applied last
    pace: float  # this machine's own, as a multiple of the scenario's seconds
    kept: dict[tuple[int, bytes], None] = field(default_factory=dict)  # states that it can hand to others
    is_wrong: bool = False  # a bit has flipped, and no state was fetched since
    training: Train | None = None
    catching: CatchUp | None = None  # the last attempt
    stalled_until: float = 0.0
    busy_until: float = 0.0  # with applying and fetching, one after the other

    def become(self, number: int, root: bytes, head: bytes, kept: int) -> None:
        self.round, self.root, self.head = number, root, head
        self.kept.pop((number, root), None)
        self.kept[number, root] = None
        while len(self.kept) > kept:
            del self.kept[next(iter(self.kept))]


@dataclass(slots=True)
class Lifetime:
    """One life of a node: what is gone when it ends."""

    core: Node | None = None  # None: the process is down
    queue: EffectQueue[Effect | ToSome] = field(default_factory=EffectQueue)
    held_up: deque[Event] = field(default_factory=deque)  # events that wait while the machine sleeps
    asleep_until: float = 0.0
    tick_at: float = NEVER  # local time of the next Tick that is on the heap
    questions: dict[int, int] = field(default_factory=dict)  # histories asked for: by peer, which question
    fuse: int | None = None  # effects until a SIGKILL
    was_stalled: bool = False
    busy: int = 0  # ticks in a row that left another one due
    swallowed: int = 0  # messages that were only taken in


@dataclass(slots=True)
class LocalClock:
    """A machine's own: local time is offset + rate * virtual time."""

    offset: float
    rate: float = 1.0

    def local(self, now: float) -> float:
        return self.offset + self.rate * now

    def virtual(self, local: float) -> float:
        return (local - self.offset) / self.rate

    def set(self, now: float, jump: float, rate: float) -> None:
        here = self.local(now) + jump
        self.rate = rate
        self.offset = here - rate * now


class SimNode:
    """One node in the simulation."""

    def __init__(
        self, index: int, signer: FakeSigner, disk: Disk, device: Device, shelf: Shelf, clock: LocalClock, honest: bool
    ) -> None:
        self.index, self.key, self.signer, self.honest = index, signer.key, signer, honest
        self.disk, self.device, self.shelf, self.clock = disk, device, shelf, clock
        self.process = Lifetime()
        self.life = 0  # how often it was started, and has ended
        self.liar: Liar | None = None
        self.ticket = b""  # the invitation that it shows
        self.has_left = self.has_forgotten = False
        self.is_gone = False  # and will not come back
        self.applied: list[tuple[bytes, int, bytes, bytes]] = []  # branch, round, manifest, root
        self.moved_at = 0.0  # when its state was last another one
        self.peers: set[int] = set()  # whom it is connected with

    @property
    def core(self) -> Node | None:
        return self.process.core

    @property
    def alive(self) -> bool:
        return self.process.core is not None
