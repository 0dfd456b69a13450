"""Runs the trainer in the one thread that may use torch.

Jobs run one after another, so that the trainer is consistent between them; a running job reports its progress through
plain attributes. Payloads are checked in another thread: strict decoding only uses numpy and must not wait for a round
of training.

After a restart the trainer is at its checkpoint, and the core has it apply the rounds since then. The trainings in
between are repeated, each from the state it started from, so that the residual, which this node has not sent yet,
is the same bit for bit: with as many steps as they took then, whatever the swarm's pace is now (core/pace.py). One that
failed midway is repeated as far as it went, because its steps have moved the inner optimizer.

Where contributions may be late, a round that is agreed on while this node trains is applied between two of its local
steps, and the rest of them goes on from the new weights: so little of a training rests on old ones. That happens once
in a training at most, and the diary says after which step; repeated, the training waits there for the same round.

If a state came out wrong, the digests of its pieces are kept until its round has been applied again from a correct
state: then the log can name the wrong pieces, even if no peer has kept the state of that round.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter, sleep
from typing import Any, Self, TypeVar

import torch

from p2ptrain.config import DeviceConfig, RunConfig
from p2ptrain.core.complaints import Complaint
from p2ptrain.core.messages import KEY_BYTES, authored, content_of, payload_digest
from p2ptrain.core.pace import takes_another
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.errors import DataError, MemoryShortError, P2ptrainError, TrainingError
from p2ptrain.exact.root import FLOAT_BYTES
from p2ptrain.models.adapters import Base
from p2ptrain.node.fetching import PIECES_TOLD
from p2ptrain.node.limits import rest_seconds
from p2ptrain.store.diary import Trained
from p2ptrain.train.live import StepResult, mean_loss
from p2ptrain.train.own_data import OwnData
from p2ptrain.train.private import Privacy
from p2ptrain.train.trainer import Trainer

log = logging.getLogger("p2ptrain.node")
T = TypeVar("T")
RATES_KEPT = 16  # rounds over which tokens per second are averaged
FAILED = "0" * 64  # in the diary, in place of a payload: the training failed after these steps
NAP_SECONDS = 0.2  # during rests, between checks whether the node is ending


def _use_threads(count: int) -> None:
    if count and count != torch.get_num_threads():
        torch.set_num_threads(count)


@dataclass(slots=True, eq=False)
class Applying:
    """A round that is to be applied, and what became of it: the new root, or None if another state was adopted."""

    number: int
    payloads: Sequence[bytes]
    mine: Mapping[int, bytes]
    manifest: bytes
    adopted: int
    done: Future[bytes | None] = field(default_factory=Future)


class StoppedError(P2ptrainError):
    """Training was interrupted because the node is ending."""


class _FailedAgainError(P2ptrainError):
    """A training is repeated as far as it had gone when it failed."""


class Device:
    """The trainer of a daemon, with the threads that its jobs run in."""

    def __init__(self, trainer: Trainer, me: bytes, thread: ThreadPoolExecutor | None = None, threads: int = 0) -> None:
        """`thread` is the one in which the trainer was made: torch counts its threads for each calling thread."""
        self.trainer, self.me = trainer, me
        self.loss: float | None = None  # mean of the last round trained here
        self.gradient_norm: float | None = None  # likewise, before clipping
        self.drift: float | None = None  # of the last round applied here
        self.step = 0  # within the current training
        self.steps = 0  # of the last round trained here
        self.base_round = -1  # what its last steps went on from
        self.own_drift: float | None = None  # how far they moved the weights, as a share of their norm
        self.training_seconds = self.last_training_seconds = 0.0  # of all trainings, and of the last one
        self.tokens = 0
        self.not_finite = 0  # trainings that failed because a loss or gradient was not finite
        self.adopted = 0  # states adopted
        self.trained = 0  # the number of the last training that the trainer's state includes
        self._failed: Trained | None = None  # the last training, if it failed after a step
        self._to_repeat: deque[Trained] = deque()
        # Name, payload and steps of each repeated training, by round, while its contribution is kept.
        self._repeated: dict[int, tuple[Trained, bytes, bytes, int]] = {}
        self._wrong: tuple[int, list[bytes]] | None = None  # the round of a wrong state, and its leaves
        self.is_stopping = False  # training ends after the current step
        self.reads_data = True  # whether trainings need the run's
        self.threads = threads  # of torch, for the next training; 0: unchanged
        self.percent = 100  # share of the training time in which the device works; it rests between steps
        self._stepped_at = 0.0  # when the last step ended
        self._owed = self._rested = 0.0  # seconds of rest still due, and taken in this training
        self._began = 0.0  # when this training did
        self._pace = (-1, 0.0, 0.0)  # a round, and when the others usually contribute to it, and no longer wait
        self._is_cut = False  # whether this training ended before all local steps
        self._waiting: deque[Applying] = deque()  # rounds to apply, also between two steps
        self._applied_after = 0  # local steps taken when the next round was applied in between; 0: none was
        self._shift: torch.Tensor | None = None  # of the weights, before the training's first step
        self._rates: deque[float] = deque(maxlen=RATES_KEPT)
        self._trainer_thread = thread or ThreadPoolExecutor(1, "trainer")
        self._check_thread = ThreadPoolExecutor(1, "check")

    @classmethod
    async def open(
        cls,
        run: RunConfig,
        config: DeviceConfig,
        dataset: TokenDataset,
        me: bytes,
        *,
        own: OwnData | None = None,
        base: Base | None = None,
        **parts: Any,
    ) -> Self:
        """Makes the trainer in its thread, and the device; `parts` are what the class takes besides."""
        loop, thread = asyncio.get_running_loop(), ThreadPoolExecutor(1, "trainer")
        make = partial(Trainer, run, config, dataset, own=own, initial=False, base=base.path if base else None)
        trainer = await loop.run_in_executor(thread, make)
        return cls(trainer, me, thread, await loop.run_in_executor(thread, torch.get_num_threads), **parts)

    @property
    def privacy(self) -> Privacy | None:
        """What contributions may tell of the data that this node trains on, if there is a limit."""
        return self.trainer.live.privacy

    def set_threads(self, count: int) -> None:
        self.threads = count

    def set_percent(self, percent: int) -> None:
        self.percent = percent

    def keep_pace(self, number: int, usual: float, last: float) -> None:
        """Lets the training of this round take as many steps as fit; `usual` and `last` are seconds from now."""
        now = perf_counter()
        self._pace = number, now + usual, now + last

    def stop_training(self) -> None:
        self.is_stopping = True

    @property
    def complaints(self) -> list[Complaint]:
        """Problems of the one who takes the steps, if that is not this thread."""
        return []

    def close(self) -> None:
        """Cancels the waiting jobs. A running job ends by itself, a training after its current step."""
        self.stop_training()
        self._trainer_thread.shutdown(wait=False, cancel_futures=True)
        self._check_thread.shutdown(wait=False, cancel_futures=True)

    async def run(self, job: Callable[..., T], *arguments: object) -> T:
        """Runs a job in the trainer's thread, after the jobs before it."""
        return await asyncio.get_running_loop().run_in_executor(self._trainer_thread, job, *arguments)

    @property
    def tokens_per_second(self) -> float | None:
        """The mean over the last rounds; None if it cannot be known."""
        return sum(self._rates) / len(self._rates) if self._rates else 0.0

    @property
    def state_bytes(self) -> int:
        return self.trainer.state_size

    @property
    def gradient_bytes(self) -> int:
        """The size of a gradient in fp32, as which contributions might be sent."""
        return FLOAT_BYTES * self.trainer.outer.parameters

    @property
    def payload_bytes(self) -> int:
        """The size of every contribution of the run; a dishonest peer may claim gigabytes."""
        return KEY_BYTES + self.trainer.outer.payload_bytes

    @property
    def attachment_bytes(self) -> int:
        """The size of every attachment; 0 if the run's contributions do not come with their announcements."""
        return self.payload_bytes if self.trainer.run.agreement.is_inline(self.payload_bytes) else 0

    # -----------------------------------------------------------------------------------------------
    # Jobs

    async def train(
        self, number: int, place: int, places: int, outstanding: frozenset[int]
    ) -> tuple[bytes, bytes, Trained | None]:
        """Trains a round. Returns the payload's name, the payload, and a diary entry (None if one exists already).

        `outstanding` are earlier rounds whose contributions may still be taken.
        """
        return await self.run(self._train, number, place, places, outstanding)

    def _train(
        self, number: int, place: int, places: int, outstanding: frozenset[int]
    ) -> tuple[bytes, bytes, Trained | None]:
        self._repeat()
        if number in self._repeated:  # the node was killed between training and announcing it
            before, name, payload, steps = self._repeated[number]
            base = before.base_round + bool(before.applied_after)
            if (base, before.place, before.places) == (self.trainer.round, place, places):
                self.steps, self.base_round = steps, base
                return name, payload, None
        _use_threads(self.threads)
        self._failed, sequences, base = None, self.trainer.live.sequences_per_pass, self.trainer.round
        try:
            payload = self._train_now(number, place, places, outstanding)
        except (DataError, MemoryShortError, TrainingError):
            if self.step:  # with as many sequences a pass as there was memory for before it failed
                self._failed = self._noted(number, base, place, places, outstanding, FAILED, sequences, self.step)
            raise
        sequences, steps = self.trainer.live.sequences_per_pass, self.steps if self._is_cut else 0
        self.base_round = self.trainer.round
        name = payload_digest(payload)
        return name, payload, self._noted(number, base, place, places, outstanding, name.hex(), sequences, steps)

    def _noted(
        self,
        number: int,
        base: int,
        place: int,
        places: int,
        outstanding: frozenset[int],
        payload: str,
        sequences: int,
        steps: int,
    ) -> Trained | None:
        """Counts a training, and returns its entry in the diary: with privacy it has none, and is never repeated."""
        if self.privacy is not None:
            return None
        self.trained += 1
        still, threads, applied = tuple(sorted(outstanding)), torch.get_num_threads(), self._applied_after
        return Trained(self.trained, number, base, place, places, still, payload, threads, sequences, steps, applied)

    def take_failed(self) -> Trained | None:
        """Returns, once, the diary entry of a training that failed after a step."""
        failed, self._failed = self._failed, None
        return failed

    def repeat(self, trainings: Iterable[Trained], last: int) -> None:
        """Schedules these trainings to be repeated, each from the state it started from, and counts on from `last`."""
        if self.privacy is None:  # with which the owner may have started again
            self._to_repeat.extend(trainings)
        self.trained = last

    async def due(self) -> Trained | None:
        """Returns the next training that is to be repeated from the present state; None if there is none."""
        return await self.run(self._due) if self._to_repeat else None

    async def repeat_next(self) -> bool:
        """Repeats that training now, unless it needs a round that is applied in its middle: then `apply` does."""
        return await self.run(self._repeat_next)

    def _due(self) -> Trained | None:
        is_due = self._to_repeat and self._to_repeat[0].base_round == self.trainer.round
        return self._to_repeat[0] if is_due else None

    def _repeat(self) -> None:
        while self._repeat_next():
            pass

    def _can_repeat(self) -> bool:
        """Whether the training that is due needs no round to be applied in its middle, or one is here."""
        return bool(self._waiting) or not self._to_repeat[0].applied_after

    def _repeat_next(self) -> bool:
        if self._due() is None or not self._can_repeat():
            return False
        sequences = self.trainer.live.sequences_per_pass
        try:
            self._repeat_one(self._to_repeat.popleft())
        finally:  # the current setting is for new trainings
            self.trainer.live.set_sequences_per_pass(sequences)
        return True

    def _repeat_one(self, each: Trained) -> None:
        _use_threads(each.threads)
        self.trainer.live.set_sequences_per_pass(each.sequences_per_pass)
        try:
            if each.payload == FAILED and each.steps:
                self._fail_again(each)
                return
            payload = self._train_now(each.round, each.place, each.places, frozenset(each.outstanding), each)
        except (DataError, MemoryShortError, TrainingError) as error:
            log.warning("the training of round %d cannot be repeated: %s", each.round, error)
            self._to_repeat.clear()
            return
        name = payload_digest(payload)
        self._repeated[each.round] = each, name, payload, self.steps
        if name.hex() != each.payload:
            log.warning("the training of round %d came out differently than before the restart", each.round)

    def _fail_again(self, each: Trained) -> None:
        """Takes the steps of a training that failed after them, and contributes nothing."""

        def on_step(result: StepResult) -> None:
            self.step += 1
            if self.is_stopping:
                raise StoppedError("the node ends")
            if self.step == each.applied_after:
                self._apply_between()
            if self.step == each.steps:
                raise _FailedAgainError("as before")

        self.step = 0
        self._give_back_all_but(frozenset(each.outstanding))
        with suppress(_FailedAgainError):
            self.trainer.train(each.round, each.place, each.places, on_step)

    def _train_now(
        self, number: int, place: int, places: int, outstanding: frozenset[int], before: Trained | None = None
    ) -> bytes:
        """Trains and contributes; `before`: what the diary says of this training, if it is repeated."""
        self._give_back_all_but(outstanding)
        self.step, self._is_cut, self._applied_after = 0, False, 0
        self._rest(self._owed - (perf_counter() - self._stepped_at))  # idle time since the last round counts
        self._stepped_at, self._owed, self._rested = perf_counter(), 0.0, 0.0
        self._began = self._stepped_at
        try:
            results = self.trainer.train(number, place, places, partial(self._note_step, number, before), self._shift)
        except TrainingError:
            self.not_finite += 1
            raise
        payload = authored(self.me, self.trainer.contribute(number))
        self.loss, self.steps = mean_loss(results), len(results)
        self.own_drift = self.trainer.own_drift
        self.gradient_norm = sum(result.gradient_norm for result in results) / len(results)
        tokens = sum(result.tokens for result in results)
        seconds = perf_counter() - self._began - self._rested
        self._rates.append(tokens / max(seconds, 1e-9))
        self.training_seconds += seconds
        self.last_training_seconds = seconds
        self.tokens += tokens
        return payload

    def _give_back_all_but(self, outstanding: frozenset[int]) -> None:
        for kept in self.trainer.kept_rounds:
            if kept not in outstanding:  # from a checkpoint; the node ended before it was announced or returned
                self._give_back(kept)

    def _give_back(self, number: int) -> None:
        self._repeated.pop(number, None)
        self.trainer.restore(number)

    def _note_step(self, number: int, before: Trained | None, result: StepResult) -> bool:
        """Rests if it has to, and returns whether to take another step: as many as fit the pace, or as `before`."""
        self.step += 1
        if self.is_stopping:
            raise StoppedError("the node ends")
        now, percent = perf_counter(), self.percent
        self._owed, self._stepped_at = rest_seconds(now - self._stepped_at, percent), now
        goes_on = self._takes_another(number, now) if before is None else self.step != before.steps
        if goes_on and (self._may_apply() if before is None else self.step == before.applied_after):
            self._apply_between()
        if goes_on and percent < 100 and self.step < self.trainer.run.recipe.local_steps:
            self._rested += self._rest(self._owed)
            self._owed, self._stepped_at = 0.0, perf_counter()
        self._is_cut = not goes_on and self.step < self.trainer.run.recipe.local_steps
        return goes_on

    def _may_apply(self) -> bool:
        """Whether a round that waits may be applied between these two steps."""
        is_last = self.step == self.trainer.run.recipe.local_steps
        is_free = self._waiting and not (is_last or self._applied_after or self._to_repeat)
        return bool(is_free and self.trainer.can_rebase)

    def _apply_between(self) -> None:
        """Applies the next round that waits, while this training goes on."""
        applying = self._waiting.popleft()
        try:
            with self.trainer.rebased():
                root = self._apply(applying)
        except (
            P2ptrainError,
            RuntimeError,
            MemoryError,
        ) as error:  # a state that may be half changed is not used again
            applying.done.set_exception(error)
            raise
        applying.done.set_result(root)
        self._applied_after = 0 if root is None else self.step

    def _takes_another(self, number: int, now: float) -> bool:
        paced, usual, last = self._pace
        if paced != number:
            return True
        recipe, worked = self.trainer.run.recipe, now - self._began - self._rested
        step_seconds = worked / self.step * 100 / self.percent  # with the rest that follows it
        least, most = recipe.local_steps_min, recipe.local_steps
        return takes_another(self.step, least, most, step_seconds, usual - now, last - now)

    def _rest(self, seconds: float) -> float:
        """Leaves the device idle, unless the node is ending. Returns the seconds it took."""
        before = perf_counter()
        while (left := seconds - (perf_counter() - before)) > 0 and not self.is_stopping and self.percent < 100:
            sleep(min(left, NAP_SECONDS))
        return perf_counter() - before

    async def apply(
        self, number: int, payloads: Sequence[bytes], mine: Mapping[int, bytes], manifest: bytes, adopted: int
    ) -> bytes | None:
        """Applies the payloads of round `number`; `mine` are this node's own among them, by their rounds.

        Returns the new root, or None if another state has been adopted since `adopted` was read.
        """
        applying = Applying(number, payloads, mine, manifest, adopted)
        self._waiting.append(applying)
        after_training = asyncio.ensure_future(self.run(self.settle, applying))
        done = asyncio.wrap_future(applying.done)
        try:
            await asyncio.wait((after_training, done), return_when=asyncio.FIRST_COMPLETED)
            if not done.done():  # it failed
                await after_training
            return await done
        finally:
            if applying in self._waiting:  # nobody waits for it any more: the core has to know what is applied
                self._waiting.remove(applying)
            after_training.cancel()  # the round was applied between two steps, or is not to be

    def settle(self, applying: Applying) -> None:
        """Applies a round, if it was not applied between two steps and is still to be."""
        if applying in self._waiting:
            self._repeat()  # which may apply it in its middle
        if applying in self._waiting:
            self._waiting.remove(applying)
            applying.done.set_result(self._apply(applying))

    def _apply(self, applying: Applying) -> bytes | None:
        number, payloads, manifest = applying.number, applying.payloads, applying.manifest
        if (self.trainer.round, self.adopted) != (number - 1, applying.adopted):
            return None
        own = {taken: content_of(payload) for taken, payload in applying.mine.items()}
        self.trainer.apply(number - 1, [content_of(payload) for payload in payloads], own)
        self.drift = self.trainer.drift
        for taken in own:
            self._repeated.pop(taken, None)
        if self._wrong is not None and number == self._wrong[0]:
            self._tell_what_differed(*self._wrong)
            self._wrong = None
        return self.trainer.root(manifest)

    def _tell_what_differed(self, number: int, before: list[bytes]) -> None:
        pairs = enumerate(zip(before, self.trainer.leaves(), strict=True))
        differing = [index for index, (was, now) in pairs if was != now]
        if not differing:
            log.error("the state of round %d, wrong before, came out the same again", number)
            return
        pieces = ", ".join(map(str, differing[:PIECES_TOLD]))
        what = "the state of round %d, wrong before, came out differently: %d pieces (1 MiB each) differ: %s"
        log.error(what, number, len(differing), pieces)

    async def give_back(self, number: int) -> None:
        await self.run(self._give_back, number)

    async def state_of(self, rounds: Collection[int]) -> tuple[int, bytes] | None:
        """Returns the current round and state, if it is one of `rounds`; a newcomer has none."""

        def look() -> tuple[int, bytes] | None:
            number = self.trainer.round
            return (number, self.trainer.state_bytes()) if number and number in rounds else None

        return await self.run(look)

    async def adopt(self, number: int, pieces: Iterable[bytes], was_wrong: bool = False) -> None:
        """Adopts a state; `was_wrong` if it replaces one that differed from what was agreed."""
        await self.run(self._adopt, number, pieces, was_wrong)

    def _adopt(self, number: int, pieces: Iterable[bytes], was_wrong: bool = False) -> None:
        wrong = self._wrong
        if was_wrong and number < self.trainer.round:  # for the same round, the fetch has logged the difference
            wrong = self.trainer.round, self.trainer.leaves()
        elif wrong is not None and number >= wrong[0]:  # that round will not be applied again
            wrong = None
        self.trainer.adopt(number, pieces)
        self._wrong = wrong
        self.adopted += 1
        self._to_repeat.clear()
        self._repeated.clear()

    async def check(self, payload: bytes) -> str | None:
        """Returns why a payload is invalid, or None."""
        return await asyncio.get_running_loop().run_in_executor(
            self._check_thread, self.trainer.check, content_of(payload)
        )
