"""Model progress: measures the held-out loss of the agreed weights and has them write a line of text, now and then.

The core says when. Both happen before a training, in the trainer's thread, and together take at most 1 % of the time
since the start, by what earlier ones took. A few sequences and tokens are always allowed: every 50 rounds, they take
less than 1 % of the training.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter

from p2ptrain.core.claims import LOSS_MAX, MILLION
from p2ptrain.core.events import Train
from p2ptrain.errors import DataError, MemoryShortError
from p2ptrain.learn.sample import SampleRequest
from p2ptrain.learn.trainer import EVALUATED_SEQUENCES
from p2ptrain.node.device import Device, StoppedError
from p2ptrain.node.fetching import Fetching
from p2ptrain.visible import one_line

TIME_SHARE = 0.01
SEQUENCES_MIN, SEQUENCES_MAX = 4, EVALUATED_SEQUENCES
TOKENS_MIN, TOKENS_MAX = 16, 64
TEXT_LENGTH_MAX = 120  # characters
FETCH_SECONDS = 10.0  # for the held-out pieces: one or two of 1 MiB, once

log = logging.getLogger("p2ptrain.node")


class ModelProgress:
    """Looks at the agreed weights when the core asks for it, and keeps the last text that they wrote."""

    def __init__(self, device: Device, fetching: Fetching, clock: Callable[[], float] = perf_counter) -> None:
        self.text = ""  # written by the newest weights that were asked to
        self.text_round = 0  # after which they were
        self.seconds = 0.0  # spent so far
        self._device, self._fetching, self._clock = device, fetching, clock
        self._began = clock()
        self._sequence_seconds = self._token_seconds = 0.0  # of the last one; 0: there was none

    async def look(self, effect: Train) -> int:
        """Does what the core asks for before a training. Returns the held-out loss in millionths of a nat; 0: none."""
        found = 0
        try:
            if effect.evaluates and (count := await self._sequences_here()):
                found = await self._device.run(self._evaluate, effect.base_round, count)
            if effect.samples:
                await self._device.run(self._write, effect.base_round)
        except (DataError, MemoryShortError) as error:
            log.info("cannot look at the weights of round %d: %s", effect.base_round, error)
        return found

    def _affordable(self, each_seconds: float, least: int, most: int) -> int:
        """Returns how many there is time for, as a power of two, so that it rarely changes."""
        left = TIME_SHARE * (self._clock() - self._began) - self.seconds
        count = int(left / each_seconds) if each_seconds else 0
        return 1 << (min(most, max(least, count)).bit_length() - 1)

    async def _sequences_here(self) -> int:
        """Returns how many held-out sequences to measure, once they are here; 0: none, or not in time."""
        dataset, recipe = self._fetching.dataset, self._fetching.run.recipe
        length = self._fetching.run.model.sequence_length
        trained = recipe.local_steps * recipe.passes_per_step * recipe.sequences_per_pass
        most = min(SEQUENCES_MAX, max(SEQUENCES_MIN, trained * 3 // 4))  # a quarter of a training: others wait for us
        count = min(self._affordable(self._sequence_seconds, SEQUENCES_MIN, most), dataset.held_out_sequences(length))
        if not count or not await asyncio.to_thread(dataset.missing_held_out, count, length):
            return count
        began = self._clock()
        if self.seconds > TIME_SHARE * (began - self._began):
            return 0
        with suppress(TimeoutError):
            async with asyncio.timeout(FETCH_SECONDS):
                await self._fetching.held_out(count)
        self.seconds += self._clock() - began
        return 0 if await asyncio.to_thread(dataset.missing_held_out, count, length) else count

    # -----------------------------------------------------------------------------------------------
    # In the trainer's thread

    def _evaluate(self, base_round: int, count: int) -> int:
        if self._device.trainer.round != base_round:
            return 0  # another state was adopted meanwhile
        began = self._clock()
        loss = self._device.trainer.evaluate(count)
        self._sequence_seconds = (self._clock() - began) / count
        self.seconds += self._clock() - began
        return min(LOSS_MAX, max(1, round(loss * MILLION))) if math.isfinite(loss) else 0

    def _write(self, base_round: int) -> None:
        if self._device.trainer.round != base_round:
            return
        began, count = self._clock(), self._affordable(self._token_seconds, TOKENS_MIN, TOKENS_MAX)

        def go_on() -> None:
            if self._device.is_stopping:
                raise StoppedError("the node ends")

        written = self._device.trainer.sample(SampleRequest("", count, seed=base_round), go_on)
        self._token_seconds = (self._clock() - began) / count
        self.seconds += self._clock() - began
        self.text, self.text_round = one_line(written, TEXT_LENGTH_MAX), base_round
