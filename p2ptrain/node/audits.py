"""Carries out the audits that the core asks for, on the worker's device between two trainings.

All who measure a contribution read the same of its author's sequences, drawn by the digest of the manifest that took
it, and compare it with as many that the same author is given for the next round: those are of the same part of the
data, and it cannot have learned from them. The weights that it was computed from are computed back from the present
ones, which costs no copy between audits and differs by rounding only."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np
from torch import Tensor

from p2ptrain.core import events as ev
from p2ptrain.core.auditing import beside
from p2ptrain.core.manifest import Manifest
from p2ptrain.core.messages import STRENGTH_MAX, Z_MAX, content_of
from p2ptrain.core.state import Taken
from p2ptrain.data.assignment import Positions
from p2ptrain.errors import P2ptrainError
from p2ptrain.exact.shortage import is_out_of_memory
from p2ptrain.identity import peer_id_of
from p2ptrain.node.edges import Edges
from p2ptrain.node.replica_thread import ReplicaThread
from p2ptrain.node.work import Worker
from p2ptrain.train.learner import SetRead
from p2ptrain.train.matched_filter import SET, Match, drawn

FETCH_SECONDS = 300.0  # for the data that an audit takes; how long a measurement waits for a training is the run's

log = logging.getLogger("p2ptrain.node")


class DroppedError(P2ptrainError):
    """An audit cannot be done now, and is not done later."""


class Audits:
    """Carries out audits; `goes_on` says whether the node may train at all now."""

    def __init__(
        self,
        worker: Worker,
        replica: ReplicaThread,
        edges: Edges,
        give: Callable[[ev.Event], None],
        goes_on: Callable[[], bool],
    ) -> None:
        self.done, self.seconds = 0, 0.0  # audits, and the time that they took
        self._worker, self._replica, self._edges, self._give, self._goes_on = worker, replica, edges, give, goes_on

    async def audit(self, effect: ev.Audit) -> None:
        number, key = effect.manifest.round, effect.taken.author
        try:
            match = await self.measure(effect)
        except DroppedError as error:
            log.info("no audit of a contribution to round %d: %s", number, error)
            self._give(ev.Audited(number, key, why=str(error)))
            return
        what = "audit of %s's contribution to round %d: z %.2f, strength %.2f, from %d sequences"
        log.info(what, peer_id_of(key), number, match.z, match.strength, effect.sequences)
        self._give(ev.Audited(number, key, _thousandths(match.z, Z_MAX), _thousandths(match.strength, STRENGTH_MAX)))

    async def measure(self, effect: ev.Audit) -> Match:
        """Measures a contribution; DroppedError if that is impossible now."""
        try:
            with self._edges.transport.boundary.guard("the audit of a contribution"):
                return await self._measured(effect)
        except TimeoutError as error:
            raise DroppedError(f"its data did not come within {FETCH_SECONDS:.0f} s") from error
        except P2ptrainError as error:  # data, memory, a plug-in's model: no reason to end
            raise DroppedError(str(error)) from error

    async def _measured(self, effect: ev.Audit) -> Match:
        if not self._goes_on():
            raise DroppedError("the node does not train now")
        taken, count, draw = effect.taken, effect.sequences, effect.manifest.digest + effect.taken.author
        recipe, positions_of = self._edges.view.run.recipe, self._worker.positions
        places = await asyncio.to_thread(drawn, positions_of, effect.share, taken.steps, recipe, count, draw)
        async with asyncio.timeout(FETCH_SECONDS):
            own, others = [[await self._read(part) for part in np.split(each, len(each) // SET)] for each in places]
        rounds = [await self._payloads(manifest, manifest.counted) for manifest in effect.since]
        others_taken = beside(effect.manifest, taken, self._replica.replica.outer.fragment_of)
        payloads = await self._payloads(effect.manifest, (taken, *others_taken))
        weights = await self._replica.run(self._weights_before, effect.since[-1].round, rounds)
        began = perf_counter()
        match = await self._worker.measure(effect.share.round, weights, payloads, own, others)
        self.done, self.seconds = self.done + 1, self.seconds + perf_counter() - began
        if not (math.isfinite(match.z) and math.isfinite(match.strength)):
            raise DroppedError("the model's gradients are not finite")
        return match

    async def _read(self, part: Positions) -> SetRead:
        """Fetches a set, and reads it at once: room for one is enough, whatever a training fetches before the next."""
        fetching = self._edges.fetching
        await fetching.ahead(part, self._goes_on)
        return part, await asyncio.to_thread(fetching.dataset.batch, part, fetching.run.model.sequence_length)

    async def _payloads(self, manifest: Manifest, taken: Sequence[Taken]) -> list[bytes]:
        found = [await self._edges.persistence.payload(each.payload) for each in taken]
        if None in found:
            raise DroppedError(f"a contribution to round {manifest.round} is not kept here")
        return [content_of(each) for each in found if each is not None]

    def _weights_before(self, number: int, rounds: Sequence[Sequence[bytes]]) -> Tensor:
        replica = self._replica.replica
        with replica.lock:
            if replica.round != number:
                raise DroppedError("other rounds were applied meanwhile")
            try:
                return replica.weights_before(rounds)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                raise DroppedError("not enough memory for a copy of the weights") from error


def _thousandths(value: float, most: int) -> int:
    return max(-most, min(round(1_000 * value), most))
