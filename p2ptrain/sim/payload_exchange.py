"""Payloads between simulated nodes: fetches them from source after source, and serves them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from p2ptrain.core import events as ev
from p2ptrain.sim.machine import SimNode
from p2ptrain.sim.topology import DIAL_SECONDS, REQUEST_BYTES
from p2ptrain.sim.world import SimWorld

CHECK_SECONDS = 0.001  # to check a payload's digest and decode it


class PayloadExchange:
    """Moves payloads between nodes."""

    def __init__(self, world: SimWorld, give: Callable[[SimNode, ev.Event], None]) -> None:
        self.world, self.give = world, give

    def fetch(self, node: SimNode, effect: ev.Fetch) -> None:
        self.world.calendar.timer(
            node, self.world.calendar.now + CHECK_SECONDS, self._try_source, node, effect, deque(effect.sources)
        )

    def _try_source(self, node: SimNode, effect: ev.Fetch, sources: deque[bytes]) -> None:
        if effect.payload in node.held_payloads and effect.payload in self.world.payloads.by_name:
            self._have(node, effect.payload)
        elif sources:
            source = sources.popleft()
            reached = self.world.reach(node, source, REQUEST_BYTES)
            if reached:
                self.world.calendar.timer(node, reached[1], self._serve, node, effect, sources, reached[0])
            else:
                self._failed(node, effect, sources, source, "cannot be reached", DIAL_SECONDS)

    def _serve(self, node: SimNode, effect: ev.Fetch, sources: deque[bytes], source: SimNode) -> None:
        """Answers a request that has arrived at the source."""
        payload = self.world.payloads.by_name.get(effect.payload)
        withholds = source.liar is not None and not source.liar.serves(effect.payload, node.key)
        why = ""
        if payload is None or effect.payload not in source.held_payloads or withholds:
            why = "does not have it"
        elif payload.payload_bytes != effect.payload_bytes:
            why = "has another length"
        size = REQUEST_BYTES if why else effect.payload_bytes
        network, calendar = self.world.network, self.world.calendar
        at = network.stream(source.index, node.index, calendar.now, size) if source.alive else None
        if at is None:
            self._failed(node, effect, sources, source.key, "lost", DIAL_SECONDS)
        elif why:
            self._failed(node, effect, sources, source.key, why, 0.0)
        else:
            self.world.metrics.sent(source, "payload", effect.payload_bytes)
            calendar.timer(node, at + CHECK_SECONDS, self._came, node, effect.payload)

    def _failed(
        self, node: SimNode, effect: ev.Fetch, sources: deque[bytes], source: bytes, why: str, seconds: float
    ) -> None:
        at = self.world.calendar.now + seconds
        self.world.calendar.timer(node, at, self.give, node, ev.FetchFailed(effect.payload, source, why))
        self.world.calendar.timer(node, at, self._try_source, node, effect, sources)

    def _came(self, node: SimNode, payload: bytes) -> None:
        self.world.metrics.fetched_payload()
        node.held_payloads.add(payload)
        self._have(node, payload)

    def _have(self, node: SimNode, payload: bytes) -> None:
        held = self.world.payloads.by_name[payload]
        self.give(node, ev.PayloadArrived(payload, held.good, held.author, held.payload_bytes))
