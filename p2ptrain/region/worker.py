"""The worker of a region's node: one that trains from what the world has agreed on (shift.py), and says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from time import monotonic

import torch
from torch import Tensor

from p2ptrain.core.complaints import Code, Complaint, complaint
from p2ptrain.core.messages import author_of
from p2ptrain.errors import PassedError
from p2ptrain.exact.outer import Tail
from p2ptrain.node.local_worker import LocalWorker
from p2ptrain.node.work import Base, Done, Task, Upstream
from p2ptrain.region.shift import Region, World
from p2ptrain.train.private import Privacy

AWAY_SECONDS = 60.0  # without the world's run, until the node says so


class RegionWorker:
    """Wraps a worker whose run is a region; `contribute` passes a movement on to the world's run."""

    reads_data = True
    can_overlap = False

    def __init__(
        self, inner: LocalWorker, region: Region, world_run: str, contribute: Callable[[Tensor], None]
    ) -> None:
        self._inner, self.region, self._world_run, self._contribute = inner, region, world_run, contribute
        self.replica, self.figures, self.learner = inner.replica, inner.figures, inner.learner
        self.capture, self.evaluate, self.sample = inner.capture, inner.evaluate, inner.sample
        self.set_threads, self.set_percent, self.positions = inner.set_threads, inner.set_percent, inner.positions
        self.set_k_max, self.measure = inner.set_k_max, inner.measure
        self.keep_pace, self.repeat_all, self.repeat = inner.keep_pace, inner.repeat_all, inner.repeat
        self.settled, self.stop, self.close = inner.settled, inner.stop, inner.close
        self.contributions = 0  # to the world, by this node
        self.addresses: tuple[str, ...] = ()  # at which this node takes part in the world's run
        self.is_lost = True  # the world's run
        self._lost = monotonic(), "not joined yet"
        self._is_known = asyncio.Event()  # the world; a region that begins would train in vain before

    # -----------------------------------------------------------------------------------------------
    # The world, as the event loop hears of it

    def hear(self, world: World) -> None:
        """Takes notice of the world's agreed weights."""
        self.region.hear(world)
        self.follow()
        self._is_known.set()

    def follow(self) -> None:
        """Notes that the world's run can be followed."""
        self.region.follow()
        self.is_lost = False

    def lose(self, why: str) -> None:
        """Notes that the world's run cannot be followed at the moment."""
        self.region.lose()
        self._lost = self._lost[0] if self.is_lost else monotonic(), why
        self.is_lost = True

    def meet(self, addresses: tuple[str, ...]) -> None:
        """Notes at which addresses this node takes part in the world's run."""
        self.addresses = addresses

    def contributed(self) -> None:
        """Notes that this node has contributed to the world."""
        self.contributions += 1

    @property
    def upstream(self) -> Upstream:
        return Upstream(self._world_run, self.region.world_round, self.contributions, self.addresses)

    @property
    def complaints(self) -> list[Complaint]:
        """The world's absence, once it has lasted."""
        since, why = self._lost
        is_told = self.is_lost and monotonic() - since >= AWAY_SECONDS
        return [*self._inner.complaints, *([complaint(Code.WORLD_AWAY, why=why)] if is_told else [])]

    # -----------------------------------------------------------------------------------------------
    # The region's rounds

    async def train(self, task: Task) -> Done:
        if not self.replica.round:
            await self._is_known.wait()
            if self.replica.round + 1 != task.round:  # rounds have passed that let others in
                raise PassedError("the world was not known yet")
        return await self._inner.train(replace(task, shift=self))

    def begin(self, number: int, weights: Tensor) -> Tensor | None:
        return self.region.begin(number, weights)

    def end(self, number: int) -> bytes:
        with self.replica.lock:  # as `begin` and `moved` do
            self.region.offer(number)
            return self.region.tail.encoded()

    def moved(self, base: Base) -> None:
        if base.payloads is None:
            self.region.forget()
        else:
            tails = {author_of(payload): Tail.of(payload) for payload in base.payloads}
            shift = self.region.applied(base.round, tails, base.weights)
            if shift is not None:
                self._contribute(shift)
        self._inner.moved(base)

    # -----------------------------------------------------------------------------------------------
    # As the worker inside does

    @property
    def device(self) -> torch.device:
        return self._inner.device

    @property
    def drift(self) -> float | None:
        return self._inner.drift

    @property
    def privacy(self) -> Privacy | None:
        return self._inner.privacy

    @property
    def is_stopping(self) -> bool:
        return self._inner.is_stopping

    @property
    def threads(self) -> int:
        return self._inner.threads
