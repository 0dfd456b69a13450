"""A simulated machine: one node of the core with its clock, disk and device.

`disk` and `held_payloads` survive a SIGKILL; the rest belongs to one life of the process."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from msgspec import Struct

from p2ptrain.core.effect_queue import EffectQueue
from p2ptrain.core.events import CatchUp, Effect, Event, Pace, Record, Saved, Train
from p2ptrain.core.journal import Journal
from p2ptrain.core.manifest import Manifest
from p2ptrain.core.messages import Message
from p2ptrain.core.node import Node
from p2ptrain.core.state import AgreedState
from p2ptrain.digest import digest
from p2ptrain.sim.keys import FakeSigner

CHECKPOINTS_KEPT = 4
NEVER = float("inf")
HELD_UP_MAX = 20_000  # events that wait for a sleeping machine: what its connections' buffers hold; a guess


class SavedState(NamedTuple):
    round: int
    root: bytes
    head: bytes  # the manifest that led to this state; for a fetched state, its certified root


class Disk(Journal):
    """One node's disk: the journal that a real store keeps, and a few of the trainer's checkpoints."""

    def __init__(
        self, first: SavedState, base: AgreedState, kept: int, staleness: int, is_forgetful: bool = False
    ) -> None:
        super().__init__(base, kept, staleness)
        self.first = first  # the initial weights, which everyone has
        self.is_forgetful = is_forgetful  # the disk before this one was lost, and nothing was written since
        self.checkpoints: list[SavedState] = []

    def write(self, record: Record, message: Message | None) -> None:
        super().write(record, message)
        self.is_forgetful = False

    def save_checkpoint(self, checkpoint: SavedState) -> None:
        self.checkpoints.append(checkpoint)
        del self.checkpoints[:-CHECKPOINTS_KEPT]

    def saved(self) -> Saved:
        judged = ((each, self.judge(each.round, each.head, each.root)) for each in reversed(self.checkpoints))
        newest = next((each for each, verdict in judged if verdict.is_on_history), self.first)
        return self.saved_at(newest.round, newest.root)


class ToSome(Struct, frozen=True):
    """An effect that only liars have: publishes a message to these nodes and to nobody else."""

    envelope: bytes
    recipients: tuple[bytes, ...]


class Rewriter(Protocol):
    """Stands between an honest core and the world, which it knows: a liar (rewriting.py)."""

    works: bool  # whether its contributions come from its own sequences

    def rewrite(self, core: Node, effects: Sequence[Effect | ToSome]) -> list[Effect | ToSome]:
        """Replaces the effects of the honest core."""

    def serves(self, payload: bytes, key: bytes) -> bool:
        """Whether to serve a payload or a state to this peer."""


class HeldPayloads:
    """Holds payloads. One older than `rounds` rounds is dropped before it is twice as old."""

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
        if number >= self.turned_at + self.rounds:
            self.old, self.new, self.turned_at = self.new, set(), number

    def keep(self, payloads: Iterable[bytes]) -> None:
        self.new, self.old = {payload for payload in payloads if payload in self}, set()


class Stretch(NamedTuple):
    """Rounds that a machine applied one after the other. Each manifest names its parent, so the last stands for all."""

    branch: bytes
    first: int
    last: int
    head: bytes  # the last manifest


@dataclass(slots=True)
class ModelState:
    """The state of the model on one machine, a chain of digests: only the same manifests give the same state."""

    round: int
    root: bytes
    head: bytes  # the manifest that was applied last
    kept: dict[tuple[int, bytes], None] = field(default_factory=dict)  # states that it can serve
    is_wrong: bool = False  # a bit has flipped, and no state has been fetched since
    applied: list[Stretch] = field(default_factory=list)
    moved_at: float = 0.0  # when it last changed

    def become(self, number: int, root: bytes, head: bytes, kept: int, now: float | None = None) -> None:
        """Switches to another state; `now` is omitted at a start, which does not count as progress."""
        self.round, self.root, self.head = number, root, head
        self.moved_at = self.moved_at if now is None else now
        self.kept.pop((number, root), None)
        self.kept[number, root] = None
        while len(self.kept) > kept:
            del self.kept[next(iter(self.kept))]

    def note_applied(self, manifest: Manifest) -> None:
        stretch = Stretch(manifest.branch, manifest.round, manifest.round, manifest.digest)
        if self.applied and (self.applied[-1].branch, self.applied[-1].head) == (manifest.branch, manifest.parent):
            stretch = stretch._replace(first=self.applied.pop().first)
        self.applied.append(stretch)

    def mend(self) -> None:
        self.is_wrong = False

    def flip_a_bit(self) -> None:
        self.root, self.is_wrong = digest("simulated flip", self.root), True


@dataclass(slots=True)
class Accelerator:
    pace: float  # this machine's slowness: a factor on the scenario's seconds
    training: Train | None = None
    paced: tuple[Pace, float] | None = None  # the last pace, and when it was told
    catching: CatchUp | None = None  # the last attempt
    stalled_until: float = 0.0
    busy_until: float = 0.0  # applying and fetching take turns

    def train(self, effect: Train | None) -> None:
        self.training = effect

    def keep_pace(self, pace: Pace, now: float) -> None:
        self.paced = pace, now

    def seconds_left(self, number: int, now: float) -> tuple[float, float]:
        """Returns how long the others usually still take to contribute to a round, and how long they wait then."""
        if self.paced is None or self.paced[0].round != number:
            return NEVER, NEVER
        pace, told_at = self.paced
        return pace.usual - (now - told_at), pace.last - (now - told_at)

    def begin_catching_up(self, effect: CatchUp) -> None:
        self.catching = effect

    def book(self, now: float, seconds: float) -> float:
        """Queues a job of this duration; returns the time at which it will be done."""
        self.busy_until = max(self.busy_until, now) + seconds
        return self.busy_until

    def stall(self, until: float) -> None:
        self.stalled_until = max(self.stalled_until, until)

    def reset(self) -> None:
        self.training, self.paced, self.busy_until = None, None, 0.0


@dataclass(slots=True)
class Lifetime:
    """One life of a process; all of this is lost when the process ends."""

    core: Node | None = None  # None: the process is down
    queue: EffectQueue[Effect | ToSome] = field(default_factory=EffectQueue)
    held_up: deque[Event] = field(default_factory=deque)  # events that wait while the machine sleeps
    asleep_until: float = 0.0
    tick_at: float = NEVER  # local time of the next Tick on the heap
    questions: dict[int, int] = field(default_factory=dict)  # histories asked for: the question's number, by peer
    fuse: int | None = None  # effects until a SIGKILL
    was_stalled: bool = False
    busy: int = 0  # ticks in a row that left another one due
    swallowed: int = 0  # messages that were only taken in

    def sleep(self, until: float) -> None:
        self.asleep_until = until

    def wake(self) -> list[Event]:
        events, self.held_up, self.asleep_until = list(self.held_up), deque(), 0.0
        return events

    def expect_tick(self, at: float) -> None:
        self.tick_at = at

    def ticks_in_a_row(self, is_busy: bool) -> int:
        self.busy = self.busy + 1 if is_busy else 0
        return self.busy

    def swallow(self) -> int:
        self.swallowed += 1
        return self.swallowed

    def begins_to_stall(self, is_stalled: bool) -> bool:
        began, self.was_stalled = is_stalled and not self.was_stalled, is_stalled
        return began

    def light_fuse(self, effects: int) -> None:
        """Kills the process after this many more effects."""
        self.fuse = effects

    def burn(self) -> bool:
        """Whether the effect that was just carried out was the last one."""
        if self.fuse is not None:
            self.fuse -= 1
        return self.fuse is not None and self.fuse <= 0


@dataclass(slots=True)
class LocalClock:
    """A machine's own clock: local time is offset + rate * virtual time."""

    offset: float
    rate: float = 1.0

    def local(self, now: float) -> float:
        return self.offset + self.rate * now

    def virtual(self, local: float) -> float:
        return (local - self.offset) / self.rate

    def set(self, now: float, jump: float, rate: float) -> None:
        self.rate, self.offset = rate, self.local(now) + jump - rate * now


@dataclass(slots=True, eq=False)
class SimNode:
    index: int
    signer: FakeSigner
    honest: bool
    claim: bytes  # to the invitation that it shows
    clock: LocalClock
    disk: Disk
    held_payloads: HeldPayloads
    state: ModelState
    accelerator: Accelerator
    process: Lifetime = field(default_factory=Lifetime)
    life: int = 0  # counts its starts and ends
    liar: Rewriter | None = None  # rewrites its effects if it lies
    has_left: bool = False
    is_dead: bool = False  # crashed for good
    has_forgotten: bool = False  # lost its disk

    @property
    def key(self) -> bytes:
        return self.signer.key

    @property
    def core(self) -> Node | None:
        return self.process.core

    @property
    def alive(self) -> bool:
        return self.process.core is not None

    @property
    def is_gone(self) -> bool:
        """Whether the node will never come back."""
        return self.has_left or self.is_dead

    def begin(self, core: Node) -> None:
        self.process = Lifetime(core)
        self.life += 1

    def end(self) -> None:
        """Ends the process and drop its pending events and timers."""
        self.process.queue.clear()  # it may be running right now
        self.process = Lifetime()
        self.life += 1
        self.accelerator.reset()

    def forget(self, disk: Disk) -> None:
        self.disk, self.has_forgotten = disk, True
        self.held_payloads.keep(())

    def leave(self) -> None:
        self.has_left = True
        self._drop_disk()

    def die(self) -> None:
        self.is_dead = True
        self._drop_disk()

    def _drop_disk(self) -> None:
        """Keeps only the agreed state: nobody reads the rest again."""
        self.disk = Disk(self.disk.first, self.disk.state, self.disk.kept, self.disk.staleness)
        self.held_payloads.keep(())

    def lie(self, liar: Rewriter | None) -> None:
        """Lets this liar rewrite the node's effects from now on; None ends it."""
        self.liar = liar
