"""Fetches contributions from peers, and checks them before the core hears that they are here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from p2ptrain.core import events as ev
from p2ptrain.core.messages import author_of, content_name
from p2ptrain.core.state import Taken
from p2ptrain.net.blobs.server import FetchError
from p2ptrain.net.transport import TransportError
from p2ptrain.node.edges import Edges
from p2ptrain.node.fetching import ignore
from p2ptrain.node.intake import Intake, Spawn
from p2ptrain.node.persistence import DISK_SECONDS
from p2ptrain.node.replica_thread import ReplicaThread

log = logging.getLogger("p2ptrain.node")


class PayloadFetches:
    """Fetches payloads from peers, each of them once, and checks them."""

    def __init__(self, replica: ReplicaThread, intake: Intake, edges: Edges, spawn: Spawn) -> None:
        self.running: dict[bytes, dict[asyncio.Task[None], Sequence[bytes]]] = {}  # by payload: who is asked by each
        self._replica, self._intake, self._edges, self._spawn = replica, intake, edges, spawn
        self._boundary = edges.transport.boundary

    def fetch_payload(self, effect: ev.Fetch) -> None:
        """Fetches a payload that the core wants, unless its size is none that the run has."""
        if effect.payload_bytes not in self._replica.payload_sizes:
            for source in effect.sources:
                why = f"no contribution has {effect.payload_bytes} bytes"
                self._intake.give(ev.FetchFailed(effect.payload, source, why))
            return
        fetches = self.running.setdefault(effect.payload, {})
        asked = {source for sources in fetches.values() for source in sources}
        fresh = tuple(source for source in effect.sources if source not in asked)
        task = self._spawn(self._beside(list(fetches), fresh, effect), "fetch")
        fetches[task] = fresh
        task.add_done_callback(lambda task: self._forget(effect.payload, task))

    def _forget(self, payload: bytes, task: asyncio.Task[None]) -> None:
        del self.running[payload][task]
        if not self.running[payload]:
            del self.running[payload]

    async def _beside(self, others: list[asyncio.Task[None]], fresh: Sequence[bytes], effect: ev.Fetch) -> None:
        """Fetches a payload from those who are not being asked for it: another announcement of it may be a lie, whose
        author holds up what is fetched from it. If there are none, the other fetches may make this one unnecessary."""
        if others and not fresh:
            await asyncio.wait(others)
            others, fresh = [], effect.sources
        payload = await self._edges.persistence.payload(effect.payload)
        if payload is None:
            failed = dict.fromkeys(effect.sources, "")

            def tell(peer: bytes, why: str) -> None:
                failed.pop(peer, None)
                self._intake.give(ev.FetchFailed(effect.payload, peer, why))

            try:
                with self._boundary.guard("the fetch of a payload"):
                    payload = await self._edges.fetching.payload(effect.payload, effect.payload_bytes, fresh, tell)
            except (FetchError, TransportError) as error:
                if others:
                    await asyncio.wait(others)
                for source in failed:
                    self._intake.give(ev.FetchFailed(effect.payload, source, str(error)))
                return
            for other in others:
                other.cancel()
            self._edges.persistence.put(effect.payload, payload)
        why = await self._intake.refusal(author_of(payload), payload)
        if why is not None:
            log.info("contribution rejected: %s", why)
        self._intake.give(
            ev.PayloadArrived(effect.payload, why is None, author_of(payload), len(payload), content_name(payload))
        )

    async def fetch_lost(self, name: bytes, payload_bytes: int = 0) -> None:
        """Fetches a payload that was stored here but has been lost. Any connected peer may still have it.

        payload_bytes: its size; 0: one of those that there are
        """
        sources = list(self._edges.connections.linked)
        for size in (payload_bytes,) if payload_bytes else sorted(self._replica.payload_sizes):
            try:
                with self._boundary.guard("the fetch of a lost payload"):
                    payload = await self._edges.fetching.payload(name, size, sources, ignore)
            except (FetchError, TransportError) as error:
                log.warning("%s; trying again", error)
            else:
                self._edges.persistence.put(name, payload)
                return
        await asyncio.sleep(DISK_SECONDS)

    async def agreed(self, taken: Taken, adopted: int) -> bytes | None:
        """Returns a payload of an agreed round, and fetches it again if the disk has lost it.

        None if another state has been adopted meanwhile, and the payload is no longer needed.
        """
        store, held = self._edges.persistence, self._replica.replica
        while (payload := await store.payload(taken.payload)) is None and held.adopted == adopted:
            log.warning("payload %s of an agreed round is lost; fetching it again", taken.payload.hex()[:16])
            await self.fetch_lost(taken.payload, taken.payload_bytes)
        return payload
