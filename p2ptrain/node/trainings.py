"""Has the worker train what the core asks for, with the data that this takes, and tells the core what it made.

Also measures the held-out loss of the agreed weights and has them write a line of text, now and then. The core says
when. Both happen in the worker's thread: the loss before a training, because the announcement says it, and the text
after it, when nobody waits for it any more. One look takes at most an eighth of a training, half of what the others
wait for a late contribution, and all of them 1 % of the time since the start; what does not fit is left out, but the
first. Text takes at most half of that, so that it leaves some for the loss, which is that of the same sequences on
every node and in every round, or its curve would compare texts: a tenth of what a node trains on in a round. Where this
is dear, a node measures more rarely."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from time import perf_counter

from p2ptrain.config import RunConfig
from p2ptrain.core import events as ev
from p2ptrain.core.complaints import Code, complaint
from p2ptrain.core.messages import NUMBER_MAX, content_name
from p2ptrain.core.tally import LOSS_MAX, MILLION
from p2ptrain.data.assignment import Positions
from p2ptrain.errors import ConfigError, DataError, MemoryShortError, PassedError, PrivacySpentError, StoppedError
from p2ptrain.models.sample import SampleRequest
from p2ptrain.net.blobs.server import FetchError
from p2ptrain.net.transport import TransportError
from p2ptrain.node.edges import Edges
from p2ptrain.node.fetching import Fetching
from p2ptrain.node.intake import Spawn
from p2ptrain.node.limits import Pauses
from p2ptrain.node.work import COST_A_ROUND, Task, Worker
from p2ptrain.share import Share
from p2ptrain.train.learner import EVALUATED_SEQUENCES
from p2ptrain.visible import one_line

TIME_SHARE, TRAINING_SHARE = 0.01, 1 / 8  # of the time since the start, and of a training
SEQUENCES_SHARE = 10  # a forward pass takes up to 0.8 of the time of a training's pass on the same sequence
TOKENS_MIN, TOKENS_MAX = 16, 64
TEXT_LENGTH_MAX = 120  # characters
FETCH_SECONDS = 10.0  # for the held-out pieces: one or two of 1 MiB, once
DATA_SECONDS = 120.0  # to fetch a round's training data

FetchPositions = Callable[[Positions], Awaitable[None]]

log = logging.getLogger("p2ptrain.node")


def evaluated_sequences(run: RunConfig) -> int:
    """Returns how many held-out sequences a measurement of this run takes."""
    return min(EVALUATED_SEQUENCES, max(1, run.recipe.round_sequences // SEQUENCES_SHARE))


class ModelProgress:
    """Looks at the agreed weights when the core asks for it, and keeps the last text that they wrote."""

    def __init__(self, worker: Worker, fetching: Fetching, clock: Callable[[], float] = perf_counter) -> None:
        self.text = ""  # written by the newest weights that were asked to
        self.text_round = 0  # after which they were
        self.seconds = 0.0  # spent so far
        self._worker, self._fetching, self._clock = worker, fetching, clock
        self._began = clock()
        self._sequence_seconds = self._token_seconds = 0.0  # of the last one; 0: there was none
        self._text_seconds = 0.0  # spent on text
        self._left_out = 0  # measurements in a row that were too long for a training
        self._look_seconds = 0.0  # of the last look, so far

    @property
    def _knows_the_model(self) -> bool:
        """Whether this node can compute the model's loss: of a script's own, it has the parameters alone."""
        return self._fetching.run.model.kind != "own"

    async def look(self, effect: ev.Train) -> int:
        """Measures before a training what the core asks for, in millionths of a nat; 0: nothing."""
        self._look_seconds = 0.0
        try:
            if effect.evaluates and self._knows_the_model and (count := await self._sequences_here()):
                return await self._evaluate(effect.base_round, count)
        except (ConfigError, DataError, MemoryShortError) as error:  # a plug-in's model may fail here alone
            log.info("cannot look at the weights of round %d: %s", effect.base_round, error)
        return 0

    async def write(self, effect: ev.Train) -> None:
        """Has the weights write a line, once the training is announced, if the core asks for it."""
        try:
            if effect.samples and self._knows_the_model:
                await self._write(effect.base_round)
        except (ConfigError, DataError, MemoryShortError) as error:
            log.info("cannot look at the weights of round %d: %s", effect.base_round, error)

    def _time_left(self) -> float:
        """Returns how long this look may still take by its share of all time."""
        return TIME_SHARE * (self._clock() - self._began) - self.seconds

    def _training_left(self) -> float:
        """Returns how long this look may still take by its share of a training."""
        training = self._worker.figures.last_seconds
        return TRAINING_SHARE * training - self._look_seconds if training else math.inf

    def _spent(self, began: float) -> float:
        seconds = self._clock() - began
        self.seconds += seconds
        self._look_seconds += seconds
        return seconds

    def _may_measure(self, count: int) -> bool:
        expected = count * self._sequence_seconds
        if not expected:
            return True
        if expected > self._time_left():
            return False
        # A single slow measurement, the first for example, must not be the last one.
        if expected * 0.5**self._left_out > self._training_left():
            self._left_out += 1
            return False
        self._left_out = 0
        return True

    async def _sequences_here(self) -> int:
        """Returns how many held-out sequences to measure, once they are here; 0: none, or not now."""
        dataset, run = self._fetching.dataset, self._fetching.run
        length = run.model.sequence_length
        count = min(evaluated_sequences(run), dataset.held_out_sequences(length))
        if not count or not self._may_measure(count):
            return 0
        if not await asyncio.to_thread(dataset.need_held_out, count, length):
            return count
        began = self._clock()
        if self.seconds > TIME_SHARE * (began - self._began):
            return 0
        with suppress(TimeoutError):
            async with asyncio.timeout(FETCH_SECONDS):
                await self._fetching.held_out(count)
        self._spent(began)
        return 0 if await asyncio.to_thread(dataset.missing_held_out, count, length) else count

    async def _evaluate(self, base_round: int, count: int) -> int:
        began = self._clock()
        loss = await self._worker.evaluate(base_round, count)
        if loss is None:
            return 0  # another state was adopted meanwhile
        self._sequence_seconds = self._spent(began) / count
        return max(1, _millionths(loss, LOSS_MAX)) if math.isfinite(loss) else 0

    async def _write(self, base_round: int) -> None:
        began, count = self._clock(), TOKENS_MIN
        if self._token_seconds:
            mine = TIME_SHARE / 2 * (began - self._began) - self._text_seconds
            left = min(mine, self._time_left(), self._training_left())
            count = min(TOKENS_MAX, int(left / self._token_seconds))
            if count < TOKENS_MIN:
                return

        def go_on() -> None:
            if self._worker.is_stopping:
                raise StoppedError("the node ends")

        written = await self._worker.sample(SampleRequest("", count, seed=base_round), go_on, base_round)
        if written is None:
            return
        seconds = self._spent(began)
        self._token_seconds = seconds / count
        self._text_seconds += seconds
        self.text, self.text_round = one_line(written, TEXT_LENGTH_MAX), base_round


def _millionths(loss: float, most: int) -> int:
    """Returns a loss as it is claimed; what is no number, or below zero, as nothing."""
    return 0 if math.isnan(loss) else round(min(max(0.0, loss * MILLION), most))


class Trainings:
    """Carries out trainings one after the other, and holds the next one back while the node is paused."""

    def __init__(self, worker: Worker, edges: Edges, give: Callable[[ev.Event], None], spawn: Spawn) -> None:
        self.pauses = Pauses()
        self.progress = ModelProgress(worker, edges.fetching)
        self.ahead: asyncio.Task[None] | None = None  # fetches the data of the next training
        self._worker, self._edges, self._give, self._spawn = worker, edges, give, spawn

    async def train(self, effect: ev.Train) -> None:
        was_held = bool(self.pauses)
        await self.pauses.are_over()
        if self.ahead is not None:
            self.ahead.cancel()  # what is needed now comes first
        await self._edges.persistence.is_safe.wait()
        if was_held and self._edges.view.state.round >= effect.round:
            self._give(ev.TrainingFailed(effect.round, "it passed while the node was paused", has_passed=True))
            return
        task = Task(effect.share, frozenset(effect.unsettled), k=effect.k)
        try:
            await self._worker.repeat(self.fetch_again)
            await self._fetch_data(self._edges.fetching.data, effect.share)
            held_out = await self.progress.look(effect)
            self.ahead = self._spawn(self.fetch_ahead(effect), "data ahead")
            done = await self._worker.train(task)
        except StoppedError:
            return
        except PassedError as error:
            self._give(ev.TrainingFailed(effect.round, str(error), has_passed=True))
            return
        except PrivacySpentError as error:  # from now on this node is one that never finishes its training
            self.pauses.begin(complaint(Code.PRIVACY_SPENT, spent=f"{error.spent:.2f}", budget=f"{error.budget:g}"))
            return
        except (*COST_A_ROUND, FetchError, TransportError, TimeoutError) as error:
            why = str(error) or "timed out fetching the training data"
            log.warning("no contribution to round %d: %s", effect.round, why)
            # The log of events may be given to others, and a damaged piece's name tells of the data.
            self._give(ev.TrainingFailed(effect.round, why if self._is_data_shared else type(error).__name__))
            return
        self._edges.persistence.put(done.name, done.payload)
        figures, size = self._worker.figures, len(done.payload)
        attachment = done.payload if self._edges.view.run.agreement.is_inline(size) else b""
        loss = 0 if self._worker.privacy else _millionths(figures.loss or 0.0, NUMBER_MAX - 1)
        steps, k, content = figures.steps, figures.k, content_name(done.payload)
        self._give(
            ev.TrainingFinished(effect.round, done.name, size, attachment, steps, loss, held_out, done.base, k, content)
        )
        with suppress(StoppedError):
            await self.progress.write(effect)

    async def _fetch_data(self, fetch: FetchPositions, share: Share) -> None:
        if self._is_data_shared and self._worker.reads_data:
            async with asyncio.timeout(DATA_SECONDS):
                await fetch(await asyncio.to_thread(self._worker.positions, share))

    @property
    def _is_data_shared(self) -> bool:
        """Whether peers have the data that this node trains on; its own is all here."""
        return self._edges.view.run.data.source == "shared"

    async def fetch_ahead(self, effect: ev.Train) -> None:
        """Fetches the data of the next round while this one trains, assuming that the roster stays as it is."""

        def goes_on() -> bool:
            return not self.pauses and not self._edges.view.is_stopping

        try:
            fetch = partial(self._edges.fetching.ahead, goes_on=goes_on)
            await self._fetch_data(fetch, effect.share.next)
        except (DataError, FetchError, TransportError, TimeoutError) as error:  # the next training tells
            log.debug("no data ahead of round %d: %s", effect.round + 1, error)

    async def fetch_again(self, share: Share) -> None:
        """Fetches the data of a training that is repeated after a restart; some of it may have had to go since."""
        try:
            await self._fetch_data(self._edges.fetching.data, share)
        except (DataError, FetchError, TransportError, TimeoutError) as error:  # the worker tells it, too
            log.info("no data to repeat the training of round %d: %s", share.round, error)
