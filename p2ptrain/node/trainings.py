"""Has the worker train what the core asks for, with the data that this takes, and tells the core what it made."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from p2ptrain.core import events as ev
from p2ptrain.core.complaints import Code, complaint
from p2ptrain.core.messages import NUMBER_MAX, content_name
from p2ptrain.data.assignment import Positions
from p2ptrain.errors import DataError, MemoryShortError, PassedError, PrivacySpentError, TrainingError
from p2ptrain.net.blobs.server import FetchError
from p2ptrain.net.transport import TransportError
from p2ptrain.node.edges import Edges
from p2ptrain.node.intake import Spawn
from p2ptrain.node.limits import Pauses
from p2ptrain.node.model_progress import ModelProgress
from p2ptrain.node.work import StoppedError, Task, Worker
from p2ptrain.share import Share

DATA_SECONDS = 120.0  # to fetch a round's training data

FetchPositions = Callable[[Positions], Awaitable[None]]

log = logging.getLogger("p2ptrain.node")


class Trainings:
    """Carries out trainings one after the other, and holds the next one back while the node is paused."""

    def __init__(self, worker: Worker, edges: Edges, give: Callable[[ev.Event], None], spawn: Spawn) -> None:
        self.pauses = Pauses()
        self.progress = ModelProgress(worker, edges.fetching)
        self.ahead: asyncio.Task[None] | None = None  # fetches the data of the next training
        self._worker, self._edges, self._give, self._spawn = worker, edges, give, spawn

    async def train(self, effect: ev.Train) -> None:
        await self.pauses.are_over()
        if self.ahead is not None:
            self.ahead.cancel()  # what is needed now comes first
        await self._edges.persistence.is_safe.wait()
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
        except (TrainingError, MemoryShortError, DataError, FetchError, TransportError, TimeoutError) as error:
            why = str(error) or "timed out fetching the training data"
            log.warning("no contribution to round %d: %s", effect.round, why)
            # The log of events may be given to others, and a damaged piece's name tells of the data.
            self._give(ev.TrainingFailed(effect.round, why if self._is_data_shared else type(error).__name__))
            return
        self._edges.persistence.put(done.name, done.payload)
        figures, size = self._worker.figures, len(done.payload)
        attachment = done.payload if self._edges.view.run.agreement.is_inline(size) else b""
        loss = 0 if self._worker.privacy else min(round(1e6 * (figures.loss or 0.0)), NUMBER_MAX - 1)
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
