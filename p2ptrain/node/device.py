"""The device's edge: the trainer, in the one thread that torch may use.

Jobs run one after the other, so that between two of them the trainer is whole; what a job reports while it runs goes
through plain attributes. A payload is checked in a thread of its own: strict reading is numpy's work and must not wait
for a round of training.

After a restart the trainer stands where its checkpoint was made, and the core has it apply the rounds since. The
trainings in between are repeated, each from the state from which it was made, so that what this node still has to tell
the swarm (its residual) is the same bits again.

Of a state that came out wrong, the digests of its pieces are kept until its round is applied once more, from the right
one: then it can be told what was wrong, also where no peer has kept the state of that very round.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter, sleep
from typing import TypeVar

import torch

from p2ptrain.config import DeviceConfig, RunConfig
from p2ptrain.core.messages import payload_digest
from p2ptrain.errors import DataError, MemoryShortError, P2ptrainError, TrainingError
from p2ptrain.learn.data import TokenDataset
from p2ptrain.learn.live import StepResult
from p2ptrain.learn.trainer import Trainer
from p2ptrain.node.fetching import PIECES_TOLD
from p2ptrain.node.limits import rest_seconds
from p2ptrain.store.diary import Trained

log = logging.getLogger("p2ptrain.daemon")
T = TypeVar("T")
RATES_KEPT = 16  # rounds over which tokens a second are told
NAP_SECONDS = 0.2  # the longest of rests between steps, until it is looked whether the node ends


def _use_threads(count: int) -> None:
    if count and count != torch.get_num_threads():
        torch.set_num_threads(count)


class StoppedError(P2ptrainError):
    """Training was broken off because the node ends."""


class Device:
    """The trainer of a daemon."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.loss: float | None = None  # the mean of the last round that was trained here
        self.step = 0  # of the round in training
        self.training_seconds = 0.0
        self.tokens = 0
        self.not_finite = 0  # trainings that a loss or a gradient has ended which is no number
        self.adopted = 0  # states that were taken over
        self.trained = 0  # the number of the last training that the trainer's state rests on
        self._to_repeat: deque[Trained] = deque()
        self._repeated: dict[
            int, tuple[Trained, bytes, bytes]
        ] = {}  # name and payload by round, as long as its contribution is kept
        self._wrong: tuple[int, list[bytes]] | None = None  # the round of a state that was wrong, and its leaves
        self.is_stopping = False  # training ends after the step that it is at
        self.threads = 0  # of torch, for the next training; 0: as they are
        self.percent = 100  # of the time that the device may train; the rest of it, it rests between steps
        self._stepped_at, self._owed, self._rested = (
            0.0,
            0.0,
            0.0,
        )  # of the last step's end; rest to be taken, and taken
        self._rates: deque[float] = deque(maxlen=RATES_KEPT)
        self._trainer_thread = ThreadPoolExecutor(1, "trainer")
        self._check_thread = ThreadPoolExecutor(1, "check")

    @classmethod
    async def open(cls, run: RunConfig, config: DeviceConfig, dataset: TokenDataset) -> Device:
        loop = asyncio.get_running_loop()
        first = ThreadPoolExecutor(1, "trainer")
        trainer = await loop.run_in_executor(first, lambda: Trainer(run, config, dataset, initial=False))
        device = cls(trainer)
        device._trainer_thread.shutdown()
        device._trainer_thread = first  # torch counts its threads for each that calls it
        device.threads = await device.run(torch.get_num_threads)
        return device

    def close(self) -> None:
        """Do not begin what waits; what runs now ends by itself, training after its step."""
        self.is_stopping = True
        self._trainer_thread.shutdown(wait=False, cancel_futures=True)
        self._check_thread.shutdown(wait=False, cancel_futures=True)

    async def run(self, job: Callable[..., T], *arguments: object) -> T:
        """Do something with the trainer, after what was asked for before."""
        return await asyncio.get_running_loop().run_in_executor(self._trainer_thread, job, *arguments)

    @property
    def tokens_per_second(self) -> float:
        return sum(self._rates) / len(self._rates) if self._rates else 0.0

    @property
    def state_bytes(self) -> int:
        return self.trainer.state_size

    @property
    def payload_bytes(self) -> int:
        """All contributions of a run have the same number of bytes; a liar may claim four gigabytes."""
        return self.trainer.form.payload_bytes

    # -----------------------------------------------------------------------------------------------
    # Jobs

    async def train(
        self, number: int, place: int, places: int, outstanding: frozenset[int]
    ) -> tuple[bytes, bytes, Trained | None]:
        """Name and payload of a round, and what to note of it; `outstanding` are rounds that may still be taken."""
        return await self.run(self._train, number, place, places, outstanding)

    def _train(
        self, number: int, place: int, places: int, outstanding: frozenset[int]
    ) -> tuple[bytes, bytes, Trained | None]:
        self._repeat()
        if number in self._repeated:  # a kill came between its training and its announcement
            before, name, payload = self._repeated[number]
            if (before.base_round, before.place, before.places) == (self.trainer.round, place, places):
                return name, payload, None
        _use_threads(self.threads)
        payload = self._train_now(number, place, places, outstanding)
        self.trained += 1
        base, still, name = self.trainer.round, tuple(sorted(outstanding)), payload_digest(payload)
        threads, sequences = torch.get_num_threads(), self.trainer.live.sequences_per_pass
        noted = Trained(self.trained, number, base, place, places, still, name.hex(), threads, sequences)
        return name, payload, noted

    def repeat(self, trainings: Iterable[Trained], last: int) -> None:
        """Do these again, when the state is there from which each was made, and count on behind the `last`."""
        self._to_repeat.extend(trainings)
        self.trained = last

    def _repeat(self) -> None:
        sequences = self.trainer.live.sequences_per_pass
        try:
            while self._to_repeat and self._to_repeat[0].base_round == self.trainer.round:
                self._repeat_one(self._to_repeat.popleft())
        finally:  # what the owner has set, or this life has found out, is for what comes
            self.trainer.live.sequences_per_pass = sequences

    def _repeat_one(self, each: Trained) -> None:
        _use_threads(each.threads)
        self.trainer.live.sequences_per_pass = each.sequences_per_pass
        try:
            payload = self._train_now(each.round, each.place, each.places, frozenset(each.outstanding))
        except (DataError, MemoryShortError, TrainingError) as error:
            log.warning("the training of round %d cannot be repeated: %s", each.round, error)
            self._to_repeat.clear()
            return
        name = payload_digest(payload)
        self._repeated[each.round] = each, name, payload
        if name.hex() != each.payload:
            log.warning("the training of round %d came out otherwise than before the restart", each.round)

    def _train_now(self, number: int, place: int, places: int, outstanding: frozenset[int]) -> bytes:
        for kept in self.trainer.kept_rounds:
            if kept not in outstanding:  # a checkpoint has it, and we ended before it was announced or returned
                self._let_go(kept, self.trainer.restore)
        self.step = 0
        self._rest(self._owed - (perf_counter() - self._stepped_at))  # what it idled since the last round counts
        self._stepped_at, self._owed, self._rested = perf_counter(), 0.0, 0.0
        before = self._stepped_at
        try:
            results = self.trainer.train(number, place, places, self._note_step)
        except TrainingError:
            self.not_finite += 1
            raise
        payload = self.trainer.contribute(number)
        self.loss = sum(result.loss for result in results) / len(results)
        tokens = sum(result.tokens for result in results)
        seconds = perf_counter() - before - self._rested
        self._rates.append(tokens / max(seconds, 1e-9))
        self.training_seconds += seconds
        self.tokens += tokens
        return payload

    def _let_go(self, number: int, how: Callable[[int], object]) -> None:
        self._repeated.pop(number, None)
        how(number)

    def _note_step(self, result: StepResult) -> None:
        self.step += 1
        if self.is_stopping:
            raise StoppedError("the node ends")
        now, percent = perf_counter(), self.percent
        self._owed, self._stepped_at = rest_seconds(now - self._stepped_at, percent), now
        if percent < 100 and self.step < self.trainer.run.recipe.local_steps:
            self._rested += self._rest(self._owed)
            self._owed, self._stepped_at = 0.0, perf_counter()

    def _rest(self, seconds: float) -> float:
        """Leave the device to others, but not the node waiting when it ends; how long it took."""
        before = perf_counter()
        while (left := seconds - (perf_counter() - before)) > 0 and not self.is_stopping and self.percent < 100:
            sleep(min(left, NAP_SECONDS))
        return perf_counter() - before

    async def apply(
        self, number: int, payloads: Sequence[bytes], mine: Sequence[int], manifest: bytes, adopted: int
    ) -> bytes | None:
        """Apply what round `number` agreed on; `mine` are the rounds of my contributions in it.

        The new root; None if more states than `adopted` were taken over meanwhile: it follows another.
        """
        return await self.run(self._apply, number, payloads, mine, manifest, adopted)

    def _apply(
        self, number: int, payloads: Sequence[bytes], mine: Sequence[int], manifest: bytes, adopted: int
    ) -> bytes | None:
        if (self.trainer.round, self.adopted) != (number - 1, adopted):
            return None
        self._repeat()
        self.trainer.apply(number - 1, payloads)
        for taken in mine:
            self._let_go(taken, self.trainer.forget)
        if self._wrong is not None and number == self._wrong[0]:
            self._tell_what_differed(*self._wrong)
            self._wrong = None
        return self.trainer.root(manifest)

    def _tell_what_differed(self, number: int, before: list[bytes]) -> None:
        pairs = enumerate(zip(before, self.trainer.leaves(), strict=True))
        differing = [index for index, (was, now) in pairs if was != now]
        if not differing:
            log.error("the state of round %d came out again as it was when it was wrong", number)
            return
        pieces = ", ".join(map(str, differing[:PIECES_TOLD]))
        what = "the state of round %d came out otherwise than when it was wrong: %d pieces differ, each of 1 MiB: %s"
        log.error(what, number, len(differing), pieces)

    async def give_back(self, number: int) -> None:
        await self.run(self._let_go, number, self.trainer.restore)

    async def state_of(self, rounds: Collection[int]) -> tuple[int, bytes] | None:
        """The round and the state that are here, if it is one of these rounds; a newcomer has none."""

        def look() -> tuple[int, bytes] | None:
            number = self.trainer.round
            return (number, self.trainer.state_bytes()) if number and number in rounds else None

        return await self.run(look)

    async def adopt(self, number: int, pieces: Iterable[bytes], was_wrong: bool = False) -> None:
        """Goes on from the state of that round; `was_wrong` if the one that is here did not come out as agreed on."""
        await self.run(self._adopt, number, pieces, was_wrong)

    def _adopt(self, number: int, pieces: Iterable[bytes], was_wrong: bool = False) -> None:
        if was_wrong and number < self.trainer.round:  # of the same round, the fetch has told
            self._wrong = self.trainer.round, self.trainer.leaves()
        elif self._wrong is not None and number >= self._wrong[0]:  # which will not come again
            self._wrong = None
        self.trainer.adopt(number, pieces)
        self.adopted += 1
        self._to_repeat.clear()
        self._repeated.clear()

    async def check(self, payload: bytes) -> str | None:
        """Why a payload is refused; None if it is good."""
        return await asyncio.get_running_loop().run_in_executor(self._check_thread, self.trainer.check, payload)
