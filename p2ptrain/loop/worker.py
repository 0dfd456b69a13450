"""A worker whose local steps a script's loop takes, in a process of its own.

When the core asks for a training, the script's next request is answered with its round, and the weights are put into
the memory that both share; when its steps are over, the node makes the contribution. A script that is elsewhere for ten
minutes comes too late with it: it then returns to the residual, as any late contribution does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

import torch

from p2ptrain.core.complaints import Code, Complaint, complaint
from p2ptrain.core.messages import authored, payload_digest
from p2ptrain.data.assignment import Positions
from p2ptrain.errors import ConfigError, DataError, NodeEndedError, P2ptrainError, PassedError, StoppedError
from p2ptrain.exact.outer import Uncounted
from p2ptrain.loop.channel import Memory, RoundTrained
from p2ptrain.node.local_worker import LearnerThread
from p2ptrain.node.work import Base, Done, Fetch, Figures, Task, Upstream
from p2ptrain.share import Share
from p2ptrain.store.diary import Trained
from p2ptrain.train.private import Privacy

AWAY_SECONDS = 60.0  # without a step, until the node says so; the first step of a compiled model takes as long


@dataclass(slots=True)
class Work:
    """A training that the core has asked for."""

    task: Task
    positions: Positions
    base: tuple[int, int]  # the replica's round, and the states that it had adopted
    done: asyncio.Future[RoundTrained]
    is_laid: bool = False  # the script has its weights
    began: float = field(default_factory=perf_counter)


class ScriptWorker:
    """Has a script take the steps."""

    privacy: Privacy | None = None
    can_overlap = False  # a script goes on from the weights that it has
    upstream: Upstream | None = None

    def __init__(self, thread: LearnerThread, me: bytes, memory: Memory, *, reads_data: bool = True) -> None:
        self.learner, self._thread, self._me, self.memory = thread.learner, thread, me, memory
        self.replica, self.figures, self.reads_data = thread.learner.replica, Figures(), reads_data
        self.threads, self.is_stopping, self._k_max = 0, False, 0
        self._trained = 0  # the number of the last training in the diary
        self.capture = partial(thread.capture, lambda: self._trained)
        self.evaluate, self.sample, self.measure = thread.evaluate, thread.sample, thread.measure
        if self.learner.run.recipe.fragments > 1:  # or its model, which it may save, would not be the agreed one
            what = "a script's model would not be the agreed one while its own movement waits for its round"
            fix = "Join with `p2ptrain join`, or use 1 in a run for scripts"
            raise ConfigError(what, key="recipe.fragments", fix=fix)
        self._work: Work | None = None
        self._loop = asyncio.get_running_loop()
        self._has_work = asyncio.Event()
        self._has_moved = asyncio.Event()  # what is agreed on

    @property
    def device(self) -> torch.device:
        return self.learner.device

    @property
    def drift(self) -> float | None:
        return self.learner.drift

    @property
    def complaints(self) -> list[Complaint]:
        """The loop's absence, once it has lasted."""
        if self._work is None:
            return []
        away = perf_counter() - max(self._work.began, self.memory.stepped_at)
        return [complaint(Code.LOOP_AWAY, minutes=int(away // 60))] if away >= AWAY_SECONDS else []

    def positions(self, share: Share) -> Positions:
        return self.learner.positions_for(share)

    def set_threads(self, count: int) -> None:
        self.threads = count

    def set_percent(self, percent: int) -> None:
        """Has no say in how a script uses its device."""

    def set_k_max(self, k: int) -> None:
        self._k_max = k

    def keep_pace(self, number: int, usual: float, last: float) -> None:
        self.memory.keep_pace(number, usual, last)

    def repeat_all(self, trainings: Sequence[Trained], last: int) -> None:
        """Cannot repeat what a script did."""
        self._trained = last

    async def repeat(self, fetch: Fetch, *, is_applying: bool = False) -> None:
        """Has nothing to repeat."""

    def settled(self, number: int, uncounted: Uncounted | None) -> None:
        self.learner.settle(number, uncounted)

    def moved(self, base: Base) -> None:
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._has_moved.set)

    def stop(self) -> None:
        self.is_stopping = True
        self.drop(StoppedError("the node ends"))

    def close(self) -> None:
        self.stop()
        self._thread.close()

    # -- Trainings ----------------------------------------------------------------------------------

    async def train(self, task: Task) -> Done:
        work = Work(task, self.positions(task.share), self._base, asyncio.get_running_loop().create_future())
        self._work = work
        self._has_work.set()
        return await self._thread.run(self._contribute, work, await work.done)

    @property
    def _base(self) -> tuple[int, int]:
        return self.replica.round, self.replica.adopted

    async def next(self, seen: int = -1) -> Work:
        """Waits for the next round to train, and puts its weights into the memory, if they are of another one than
        `seen`; until then, rounds pass without this node's contribution."""
        while True:
            await self._has_work.wait()
            work = self._work
            if work is None:
                continue
            if work.base[0] == seen:
                self._has_moved.clear()
                if self._base == work.base:
                    await self._has_moved.wait()
                if self._work is work and self._base != work.base:
                    self.drop(PassedError("its turn has not come"))
            elif work.is_laid or await self._thread.run(self._lay, work):
                return work
            else:
                self.drop(DataError("the training loop was elsewhere"))

    def _lay(self, work: Work) -> bool:
        """Puts the weights into the memory; returns whether they are still those that the core meant."""
        with self.replica.lock:
            if self._base != work.base:
                return False
            self.memory.base.copy_(self.replica.weights)
        work.is_laid = True
        return True

    def current(self) -> Work:
        """Returns the round that the script trains. ConfigError if there is none."""
        if self.is_stopping:
            raise NodeEndedError("the node is ending; its log says why")
        if self._work is None or not self._work.is_laid:
            raise ConfigError("no round is being trained", fix="Call step() first")
        return self._work

    def take(self, trained: RoundTrained) -> None:
        """Takes the steps of the script, and lets the training go on."""
        self.current()
        done = self._end()
        if not done.done():
            done.set_result(trained)

    def begin_again(self) -> None:
        """Has the script take the current round's steps from the start: what it had of them is lost."""
        self.current().is_laid = False

    def drop(self, error: P2ptrainError) -> None:
        """Ends the current training, if there is one, without a contribution."""
        if self._work is not None and not (done := self._end()).done():
            done.set_exception(error)

    def _end(self) -> asyncio.Future[RoundTrained]:
        """Forgets the current training; returns its future."""
        assert self._work is not None
        done, self._work = self._work.done, None
        self._has_work.clear()
        return done

    def _contribute(self, work: Work, trained: RoundTrained) -> Done:
        learner, number = self.learner, work.task.round
        learner.catch_up()  # what was counted is no longer in the residual, and must not return to it
        learner.restore_all_but(work.task.outstanding)
        learner.take_steps(number, self.memory.moved)
        k = learner.run.recipe.k_within(work.task.k, self._k_max)
        payload = authored(self._me, learner.contribute(number, k))
        self.figures.add(trained.loss, learner.own_drift, trained.steps, trained.tokens, trained.seconds, k=k)
        return Done(payload_digest(payload), payload, work.base[0])
