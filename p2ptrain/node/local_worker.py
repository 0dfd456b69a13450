"""A worker with a device of this machine, in the one thread that may use it.

Jobs run one after another, so that the learner is consistent between them.

After a restart the learner is at its checkpoint, and the core has the replica apply the rounds since then. The
trainings in between are repeated, each from the state it started from, so that the residual, which this node has not
sent yet, is the same bit for bit: with as many steps as they took then, whatever the swarm's pace is now
(core/pace.py). One that failed midway is repeated as far as it went, because its steps have moved the inner optimizer.

Where contributions may be late, a round that is agreed on while this node trains is taken in between two of its local
steps, and the rest of them goes on from the new weights: so little of a training rests on old ones. That happens once
in a training at most, and the diary says after which step; repeated, the training waits there for the same round."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from threading import Event, Thread
from typing import Self, TypeVar

import torch
from torch import Tensor

from p2ptrain.config import DeviceConfig, RunConfig
from p2ptrain.core.complaints import Complaint
from p2ptrain.core.messages import authored, payload_digest
from p2ptrain.data.assignment import Positions
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.errors import DataError, P2ptrainError, PassedError, RanksLostError, StoppedError, TrainingError
from p2ptrain.exact.outer import Uncounted
from p2ptrain.exact.shortage import is_out_of_memory
from p2ptrain.models.adapters import FrozenBase
from p2ptrain.models.sample import SampleRequest
from p2ptrain.node.pacing import NAP_SECONDS, Pacing
from p2ptrain.node.work import COST_A_ROUND, Base, Done, Fetch, Figures, Task, Upstream
from p2ptrain.share import Share
from p2ptrain.store.diary import Trained
from p2ptrain.train.learner import Learner, MakeElsewhere
from p2ptrain.train.live import StepResult, mean_loss
from p2ptrain.train.own_data import OwnData
from p2ptrain.train.private import Privacy
from p2ptrain.train.saved_state import Capture

FAILED = "0" * 64  # in the diary, in place of a payload: the training failed after these steps

log = logging.getLogger("p2ptrain.node")
T = TypeVar("T")

Note = Callable[[Trained], Awaitable[None]]  # writes an entry into the diary
Shifted = Callable[[Tensor], Tensor | None]


class _FailedAgainError(P2ptrainError):
    """A training is repeated as far as it had gone when it failed."""


@dataclass(frozen=True, slots=True)
class _Repeated:
    """A training that was repeated, while its contribution is kept."""

    entry: Trained
    done: Done
    steps: int


class _Diary:
    """The trainings that the diary knows, from before a restart and since."""

    def __init__(self) -> None:
        self.trained = 0  # the number of the last training
        self.included = 0  # of the last one that the learner's state includes
        self._failed: Trained | None = None  # the last training, if it failed after a step
        self.waiting: deque[Trained] = deque()  # trainings that are to be repeated
        self.repeated: dict[int, _Repeated] = {}  # by round
        self._in_middle: asyncio.Future[None] | None = None  # a repeated training that awaits a round
        self.turn = asyncio.Lock()  # one by one: each is trained on the data that was fetched for it

    def due(self, round_number: int) -> Trained | None:
        """Returns the next training that is to be repeated from the state of this round; None if there is none."""
        is_due = self.waiting and self.waiting[0].base_round == round_number
        return self.waiting[0] if is_due else None

    def again(self, task: Task, round_number: int) -> _Repeated | None:
        """Returns what the repeated training of this task, which ended with the weights of this round, has given."""
        repeated = self.repeated.get(task.round)
        is_it = repeated and (repeated.entry.share, repeated.done.base) == (task.share, round_number)
        return repeated if is_it else None

    def next_number(self) -> int:
        self.trained += 1
        self.included = self.trained
        return self.trained

    def go_on_from(self, last: int) -> None:
        self.trained = last
        self.include()

    def include(self) -> None:
        """Notes that the learner's state includes all trainings but those that wait."""
        waiting = [*self.waiting]  # which another thread may clear
        self.included = waiting[0].number - 1 if waiting else self.trained

    def fail(self, entry: Trained) -> None:
        self._failed = entry

    def take_failed(self) -> Trained | None:
        """Returns, once, the entry of a training that failed after a step."""
        failed, self._failed = self._failed, None
        return failed

    def begin_middle(self, job: asyncio.Future[None]) -> None:
        """Notes a repeated training that awaits a round in its middle."""
        self._in_middle = job
        job.add_done_callback(lambda job: job.cancelled() or job.exception())  # a node that ends waits for no job

    async def end_middle(self) -> None:
        """Waits until that has ended."""
        if self._in_middle is not None:
            await self._in_middle
            self._in_middle = None

    def clear(self) -> None:
        self.waiting.clear()
        self.repeated.clear()
        self.include()


class LearnerThread:
    """A learner, and the one thread that its jobs run in."""

    def __init__(self, learner: Learner, thread: ThreadPoolExecutor | None = None, threads: int = 0) -> None:
        """`thread` is the one in which the learner was made: torch counts its threads for each calling thread."""
        self.learner, self.threads = learner, threads
        self._thread = thread or ThreadPoolExecutor(1, "worker")
        self.measure = partial(self.run, learner.audit)

    @classmethod
    async def open(
        cls,
        run: RunConfig,
        config: DeviceConfig,
        dataset: TokenDataset,
        *,
        own: OwnData | None = None,
        base: FrozenBase | None = None,
        elsewhere: MakeElsewhere | None = None,
    ) -> Self:
        """Makes the learner in its thread."""
        thread = ThreadPoolExecutor(1, "worker")
        path = base.path if base else None
        make = partial(Learner, run, config, dataset, own=own, initial=False, base=path, elsewhere=elsewhere)
        loop = asyncio.get_running_loop()
        learner = await loop.run_in_executor(thread, make)
        return cls(learner, thread, await loop.run_in_executor(thread, torch.get_num_threads))

    async def run(self, job: Callable[..., T], *arguments: object) -> T:
        """Runs a job after the jobs before it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, job, *arguments)

    async def capture(self, trained: Callable[[], int] = lambda: 0) -> Capture:
        """Copies everything; `trained` returns the number of the last training in it."""

        def copy() -> Capture:
            try:
                return replace(self.learner.capture(), trained=trained())
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                raise DataError("not enough memory for a copy of the state") from error

        return await self.run(copy)

    async def evaluate(self, number: int, sequences: int) -> float | None:
        def look() -> float | None:
            loss = self.learner.evaluate(sequences) if self.learner.replica.round == number else None
            return loss if self.learner.round == number else None

        return await self.run(look)

    async def sample(self, request: SampleRequest, go_on: Callable[[], None], number: int | None = None) -> str | None:
        def look() -> str | None:
            if number not in (None, self.learner.replica.round):
                return None
            return self.learner.sample(request, go_on)

        return await self.run(look)

    def close(self) -> None:
        """Cancels the waiting jobs. A running job ends by itself, a training after its current step."""
        if self.learner.elsewhere is not None:  # which may take seconds, that the caller's loop does not have
            Thread(target=self.learner.elsewhere.close, name="end of the ranks").start()
        self._thread.shutdown(wait=False, cancel_futures=True)


class LocalWorker:
    """Takes the steps on a device of this machine; `note` writes the diary."""

    reads_data = True
    upstream: Upstream | None = None

    def __init__(self, thread: LearnerThread, me: bytes, note: Note) -> None:
        self.learner, self._thread, self._me, self._note = thread.learner, thread, me, note
        self.replica, self.figures = thread.learner.replica, Figures()
        self.can_overlap = thread.learner.can_overlap
        self.threads, self._k_max = thread.threads, 0
        self.pacing = Pacing(thread.learner.run.recipe)
        self._diary = _Diary()
        self._applied_after = 0  # local steps taken when the next round was taken in; 0: none was
        self._has_moved = Event()  # the replica
        # For a repeated training: how many states were adopted before it, and a call that tells that it awaits a round.
        self._awaits: tuple[int, Callable[[], object]] = (0, lambda: None)
        self.capture = partial(thread.capture, lambda: self._diary.included)
        self.evaluate, self.sample, self.measure = thread.evaluate, thread.sample, thread.measure
        self.set_percent, self.keep_pace = self.pacing.set_percent, self.pacing.keep
        self.device = thread.learner.device

    @property
    def drift(self) -> float | None:
        return self.learner.drift

    @property
    def privacy(self) -> Privacy | None:
        return self.learner.live.privacy

    @property
    def is_stopping(self) -> bool:
        return self.pacing.is_stopping

    @property
    def complaints(self) -> list[Complaint]:
        return []

    def positions(self, share: Share) -> Positions:
        return self.learner.positions_for(share)

    def set_threads(self, count: int) -> None:
        self.threads = count

    def set_k_max(self, k: int) -> None:
        self._k_max = k

    def stop(self) -> None:
        self.pacing.stop()
        if self.learner.elsewhere is not None:
            self.learner.elsewhere.stop()
        self._has_moved.set()

    def close(self) -> None:
        self.stop()
        self._thread.close()

    # -- What the swarm agrees on -------------------------------------------------------------------

    def settled(self, number: int, uncounted: Uncounted | None) -> None:
        self._diary.repeated.pop(number, None)
        self.learner.settle(number, uncounted)

    def moved(self, base: Base) -> None:
        if base.payloads is None:
            self._diary.clear()
        self._has_moved.set()

    # -- Trainings ----------------------------------------------------------------------------------

    async def train(self, task: Task) -> Done:
        try:
            done, entry = await self._thread.run(self._train, task)
        except COST_A_ROUND:
            if (failed := self._diary.take_failed()) is not None:
                await self._note(failed)
            raise
        if entry is not None:
            await self._note(entry)
        return done

    def _train(self, task: Task) -> tuple[Done, Trained | None]:
        """Returns the contribution, and its entry in the diary; None if it has one, or is never repeated."""
        learner, diary = self.learner, self._diary
        has_rested, has_waited = self.pacing.rest_before(), learner.wait()
        if (has_rested or has_waited) and self.replica.round >= task.round:
            raise PassedError("it passed while the device rested")  # the next order is for a round that is still open
        learner.catch_up()
        if (again := diary.again(task, learner.round)) is not None:  # killed between training and announcing it
            self.figures.again(again.steps, again.entry.k)
            return again.done, None
        _use_threads(self.threads)
        few = self.pacing.step_sequences if self._takes_fewer else 0
        task = replace(task, k=learner.run.recipe.k_within(task.k, self._k_max), step_sequences=few)
        sequences = learner.live.sequences_per_pass
        is_noted = self.privacy is None  # otherwise it is never repeated

        def shifted(weights: Tensor) -> Tensor | None:
            nonlocal is_noted
            shift = task.shift.begin(task.round, weights) if task.shift else None
            is_noted = is_noted and shift is None
            return shift

        try:
            payload = self._steps(task, None, shifted)
        except COST_A_ROUND as error:
            elsewhere = learner.elsewhere
            steps = elsewhere.kept if elsewhere and isinstance(error, RanksLostError) else self.figures.step
            if steps and is_noted:  # with as many sequences a pass as there was memory for before it failed
                diary.fail(self._entry(task, FAILED, sequences, steps))
            elif steps:
                self._leave_out()
            raise
        tail = task.shift.end(task.round) if task.shift else b""
        done = _done(payload, tail, learner.round)
        if not is_noted:
            self._leave_out()
            return done, None
        steps = self.figures.steps if self.figures.steps < learner.run.recipe.local_steps else 0
        return done, self._entry(task, done.name.hex(), learner.live.sequences_per_pass, steps, tail)

    def _leave_out(self) -> None:
        """Leaves a gap in the diary, so that nothing is repeated without this training."""
        if self.privacy is None:  # with which nothing is ever noted
            self._diary.next_number()

    def _entry(self, task: Task, payload: str, sequences: int, steps: int, tail: bytes = b"") -> Trained:
        diary, base = self._diary, self.learner.round - bool(self._applied_after)
        outstanding, threads = tuple(sorted(task.outstanding)), torch.get_num_threads()
        return Trained(
            diary.next_number(), task.round, base, task.share.place, task.share.places, outstanding, payload, threads,
            sequences, steps, self._applied_after, tail.hex(), task.k, task.share.slots, task.step_sequences,
        )  # fmt: skip

    def _steps(self, task: Task, before: Trained | None, shifted: Shifted = lambda weights: None) -> bytes:
        """Trains and contributes; `before`: what the diary says of this training, if it is repeated."""
        self.learner.restore_all_but(task.outstanding)
        self._applied_after = 0
        self.pacing.begin()
        self.figures.begin()
        on_step = partial(self._on_step, task.round, before)
        try:
            results = self.learner.train(task.share, on_step, shifted, task.step_sequences)
        except TrainingError:
            self.figures.fail()
            raise
        try:
            payload = authored(self._me, self.learner.contribute(task.round, task.k))
        except COST_A_ROUND:  # its steps lie on the residual: it did not fail amid them
            self._leave_out()
            self.figures.begin()
            raise
        tokens = sum(result.tokens for result in results)
        norm = sum(result.gradient_norm for result in results) / len(results)
        seconds = self.pacing.worked
        if before is None and self._takes_fewer:
            self.pacing.end(task.round, len(results))
        ranks = self.learner.elsewhere.figures if self.learner.elsewhere else ()
        drift = self.learner.own_drift
        self.figures.add(mean_loss(results), drift, len(results), tokens, seconds, norm, k=task.k, ranks=ranks)
        return payload

    def _on_step(self, number: int, before: Trained | None, result: StepResult) -> bool:
        """Returns whether to take another step: as many as fit the pace, or as `before`."""
        step, most = self.figures.stepped(), self.learner.run.recipe.local_steps
        if self.is_stopping:
            raise StoppedError("the node ends")
        self.pacing.step()
        goes_on = self.pacing.takes_another(number, step) if before is None else step != before.steps
        fails = before is not None and before.payload == FAILED and not goes_on
        if (goes_on or fails) and before is not None and step == before.applied_after:
            self._await_round()
        if fails:
            raise _FailedAgainError("as before")
        if goes_on and step < most:
            if before is None and self._may_rebase:
                base = self.learner.round
                try:
                    self.learner.rebase()
                finally:  # also if ranks are lost while they get it
                    self._applied_after = step if self.learner.round > base else 0
            self.pacing.rest()
        return goes_on

    @property
    def _takes_fewer(self) -> bool:
        """Whether a step may take fewer sequences: the noise of privacy and plug-ins count on whole steps."""
        return self.privacy is None and not self.learner.run.recipe.plugin

    @property
    def _may_rebase(self) -> bool:
        """Whether a round that was agreed on meanwhile may be taken in now."""
        is_next = self.replica.round == self.learner.round + 1
        return is_next and not self._applied_after and not self._diary.waiting and self.learner.can_overlap

    # -- Trainings before a restart -----------------------------------------------------------------

    def repeat_all(self, trainings: Sequence[Trained], last: int) -> None:
        if self.privacy is None:  # with which the owner may have started again
            self._diary.waiting.extend(trainings)
        self._diary.go_on_from(last)

    async def repeat(self, fetch: Fetch, *, is_applying: bool = False) -> None:
        diary = self._diary
        async with diary.turn:
            await diary.end_middle()
            if diary.waiting and diary.waiting[0].base_round < self.replica.round:  # as after an end in its middle
                log.warning("the training of round %d cannot be repeated: its base has passed", diary.waiting[0].round)
                diary.waiting.clear()
                diary.include()
            while (each := diary.due(self.replica.round)) is not None and (is_applying or not each.applied_after):
                await fetch(each.share)
                begun, adopted = asyncio.get_running_loop().create_future(), self.replica.adopted
                if diary.due(self.replica.round) is not each:
                    return  # another state was adopted
                diary.waiting.popleft()
                awaits = adopted, partial(asyncio.get_running_loop().call_soon_threadsafe, _set, begun)
                job = asyncio.ensure_future(self._thread.run(self._repeat, each, awaits))
                if each.applied_after:
                    diary.begin_middle(job)
                    await asyncio.wait((job, begun), return_when=asyncio.FIRST_COMPLETED)
                    return
                await job

    def _repeat(self, each: Trained, awaits: tuple[int, Callable[[], object]]) -> None:
        learner, sequences = self.learner, self.learner.live.sequences_per_pass
        self._awaits = awaits
        self.pacing.rest_before()
        _use_threads(each.threads)
        learner.live.set_sequences_per_pass(each.sequences_per_pass)
        task = Task(each.share, frozenset(each.outstanding), k=each.k, step_sequences=each.step_sequences)
        try:
            learner.catch_up()
            self._refuse_another_state()
            payload = self._steps(task, each)
        except _FailedAgainError:
            self._diary.include()
            return
        except COST_A_ROUND as error:
            log.warning("the training of round %d cannot be repeated: %s", each.round, error)
            self._diary.waiting.clear()
            self._diary.include()
            return
        finally:  # the current setting is for new trainings
            learner.live.set_sequences_per_pass(sequences)
        done = _done(payload, bytes.fromhex(each.tail), learner.round)
        self._diary.include()
        self._diary.repeated[each.round] = _Repeated(each, done, self.figures.steps)
        if done.name.hex() != each.payload:
            log.warning("the training of round %d came out differently than before the restart", each.round)

    def _await_round(self) -> None:
        """Takes in the next round, once the replica has it."""
        _, tell = self._awaits
        tell()
        while not self.learner.rebase():
            if self.is_stopping:
                raise StoppedError("the node ends")
            self._refuse_another_state()
            self._has_moved.wait(NAP_SECONDS)
            self._has_moved.clear()

    def _refuse_another_state(self) -> None:
        """Raises DataError once the state that a repeated training goes on from is none that it began with."""
        adopted, _ = self._awaits
        if self.replica.adopted != adopted:
            raise DataError("another state was adopted")


def _done(payload: bytes, tail: bytes, base: int) -> Done:
    """Returns a contribution, which ends with this tail."""
    payload = payload[: len(payload) - len(tail)] + tail
    return Done(payload_digest(payload), payload, base)


def _set(begun: asyncio.Future[None]) -> None:
    if not begun.done():
        begun.set_result(None)


def _use_threads(count: int) -> None:
    if count and count != torch.get_num_threads():
        torch.set_num_threads(count)
