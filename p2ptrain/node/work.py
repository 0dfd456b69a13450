"""Whoever takes a node's steps, as the rest of the node sees it: a thread with a device, a script, a region's member.

What was agreed on is the replica's (replica_thread.py), and is applied at once, whatever a worker does. So a slow step,
memory that runs out or a script that is elsewhere costs a contribution, and never a vote."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from p2ptrain.core.complaints import Complaint
from p2ptrain.data.assignment import Positions
from p2ptrain.errors import DataError, MemoryShortError, RanksLostError, TrainingError
from p2ptrain.exact.outer import Uncounted
from p2ptrain.exact.replica import Replica
from p2ptrain.models.sample import SampleRequest
from p2ptrain.share import Share
from p2ptrain.store.diary import Trained
from p2ptrain.train.learner import RankFigures, SetRead
from p2ptrain.train.matched_filter import Match
from p2ptrain.train.private import Privacy
from p2ptrain.train.saved_state import Capture

COST_A_ROUND = DataError, MemoryShortError, RanksLostError, TrainingError  # what a training may fail by
RATES_KEPT = 16  # rounds over which tokens per second are averaged

Fetch = Callable[[Share], Awaitable[None]]  # fetches this data


class Shift(Protocol):
    """Lets a region add to a training. Both methods are called in the worker's thread."""

    def begin(self, number: int, weights: Tensor) -> Tensor | None:
        """Returns what to add to the agreed weights before a round's first step, or None. The replica is locked."""

    def end(self, number: int) -> bytes:
        """Returns the end of the contribution, once its steps are taken."""


@dataclass(frozen=True, slots=True)
class Task:
    share: Share  # of its data
    outstanding: frozenset[int] = frozenset()  # earlier rounds whose contributions may still be taken
    shift: Shift | None = None
    k: int = 0  # numbers of each chunk in the contribution; 0: the most that the run allows
    step_sequences: int = 0  # 0: all

    @property
    def round(self) -> int:
        return self.share.round


@dataclass(frozen=True, slots=True)
class Done:
    name: bytes  # the payload's digest
    payload: bytes
    base: int  # the round whose weights its last steps went on from


@dataclass(frozen=True, slots=True)
class Base:
    """The replica as it is now; it stays locked while a worker hears of it."""

    round: int
    weights: Tensor  # the replica's own
    payloads: Sequence[bytes] | None  # that led to it; None: it was adopted


@dataclass(slots=True)
class Figures:
    """The figures that a node shows of its worker's steps."""

    loss: float | None = None  # mean of the last round
    gradient_norm: float | None = None  # likewise, before clipping
    own_drift: float | None = None  # how far its steps moved the weights, as a share of their norm
    k: int = 0  # numbers of each chunk in the last contribution; 0: there was none
    ranks: Sequence[RankFigures] = ()  # the processes that take its steps
    step: int = 0  # within the current training
    steps: int = 0  # of the last round
    seconds: float = 0.0  # of all trainings
    last_seconds: float = 0.0
    tokens: int = 0
    not_finite: int = 0  # trainings that failed because a loss or gradient was not finite
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=RATES_KEPT))

    def begin(self) -> None:
        self.step = 0

    def stepped(self) -> int:
        """Counts a step of the current training, and returns its number."""
        self.step += 1
        return self.step

    def fail(self) -> None:
        """Counts a training in which a number was not finite."""
        self.not_finite += 1

    def again(self, steps: int, k: int) -> None:
        """Notes that a round's contribution was made before."""
        self.steps, self.k = steps, k

    def add(
        self,
        loss: float | None,
        own_drift: float | None,
        steps: int,
        tokens: int,
        seconds: float,
        gradient_norm: float | None = None,
        *,
        k: int,
        ranks: Sequence[RankFigures] = (),
    ) -> None:
        """Counts a training that has ended."""
        self.k, self.ranks = k, ranks
        self.loss, self.own_drift, self.gradient_norm = loss, own_drift, gradient_norm
        self.step = self.steps = steps
        self.seconds += seconds
        self.last_seconds = seconds
        self.tokens += tokens
        if tokens:
            self.rates.append(tokens / max(seconds, 1e-9))

    @property
    def tokens_per_second(self) -> float | None:
        """The mean over the last rounds; None while a script trains on what a loader of its own reads."""
        if not self.rates:
            return None if self.seconds else 0.0
        return sum(self.rates) / len(self.rates)


@dataclass(frozen=True, slots=True)
class Upstream:
    """The world's run, as the worker of a region sees it."""

    run: str  # its id
    round: int | None  # that the region goes on from
    contributions: int  # of the region to it, by this node
    addresses: tuple[str, ...]  # of this node in it


class Worker(Protocol):
    """Whoever takes the steps."""

    replica: Replica  # whose weights its steps go on from
    figures: Figures
    reads_data: bool  # whether trainings need the run's
    can_overlap: bool  # whether its steps go on from weights that are applied between two of them

    @property
    def threads(self) -> int:
        """How many threads of torch the next training takes; 0: unchanged."""

    @property
    def device(self) -> torch.device:
        """The device that the steps are taken on, or that stands in for a script's."""

    @property
    def drift(self) -> float | None:
        """How far the swarm has moved the weights before the last training, as a share of their norm."""

    @property
    def privacy(self) -> Privacy | None:
        """The limit on how much contributions tell of the data that this node trains on, if there is one."""

    @property
    def upstream(self) -> Upstream | None:
        """The other run that this one's steps follow, if it is a region."""

    @property
    def is_stopping(self) -> bool:
        """Whether training ends after the current step."""

    @property
    def complaints(self) -> list[Complaint]:
        """Lists the problems of whoever takes the steps."""

    def positions(self, share: Share) -> Positions:
        """Returns the sequences of a round."""

    async def train(self, task: Task) -> Done:
        """Takes a round's steps."""

    def set_threads(self, count: int) -> None:
        """Sets how many threads of torch the next training takes."""

    def set_percent(self, percent: int) -> None:
        """Sets the share of the training time in which the device works."""

    def set_k_max(self, k: int) -> None:
        """Sets the most numbers of a chunk in a contribution; 0: as many as the run allows."""

    def keep_pace(self, number: int, usual: float, last: float) -> None:
        """Lets the training of this round take as many steps as fit; `usual` and `last` are seconds from now."""

    def repeat_all(self, trainings: Sequence[Trained], last: int) -> None:
        """Schedules trainings of before a restart, by the diary, to be repeated, and counts on from `last`."""

    async def repeat(self, fetch: Fetch, *, is_applying: bool = False) -> None:
        """After a restart, repeats what was trained from the replica's present state. It is not to change before; only
        a training that took in the next round goes on meanwhile, if that `is_applying`."""

    def settled(self, number: int, uncounted: Uncounted | None) -> None:
        """Hears what a round counted of the contribution made for round `number`; None: none can take it any more.
        Called before `moved`, while the replica is locked; with None, at any time."""

    def moved(self, base: Base) -> None:
        """Hears that the replica has changed, in the replica's thread."""

    async def capture(self) -> Capture:
        """Copies replica and all that the next round depends on, between two trainings; DataError without memory."""

    async def evaluate(self, number: int, sequences: int) -> float | None:
        """Returns the held-out loss of the agreed weights; None if they are not those of this round any more."""

    async def sample(self, request: SampleRequest, go_on: Callable[[], None], number: int | None = None) -> str | None:
        """Continues a text with the agreed weights; None if these are not those of round `number` any more."""

    async def measure(
        self, number: int, weights: Tensor, payloads: Sequence[bytes], own: Sequence[SetRead], others: Sequence[SetRead]
    ) -> Match:
        """Measures the first of these contributions to a round, computed from these weights, between two trainings."""

    def stop(self) -> None:
        """Ends after the current step."""

    def close(self) -> None:
        """Stops, and cancels what waits."""
