"""Payloads between simulated nodes: makes them, fetches them from source after source, and serves them.

Only small payloads have content; large ones are a name and a length.
"""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import TYPE_CHECKING

from msgspec import Struct

from p2ptrain.core import events as ev
from p2ptrain.core.messages import authored, payload_digest
from p2ptrain.digest import digest
from p2ptrain.sim.machine import SimNode
from p2ptrain.sim.topology import DIAL_SECONDS, REQUEST_BYTES

if TYPE_CHECKING:
    from p2ptrain.sim.cluster import Cluster

CHECK_SECONDS = 0.001  # to check a payload's digest and decode it


class Payload(Struct, frozen=True):
    """A payload that some node has made."""

    author: bytes
    payload_bytes: int
    good: bool
    attachment: bytes  # empty: too large to be attached
    round: int


class PayloadExchange:
    """Makes payloads and moves them between nodes."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.payloads: dict[bytes, Payload] = {}
        self._made = count()

    def forget(self, before: int) -> None:
        """Forgets payloads of rounds before this one."""
        self.payloads = {name: payload for name, payload in self.payloads.items() if payload.round >= before}

    def is_good(self, name: bytes) -> bool:
        """Whether a payload that came with its announcement exists and decodes."""
        payload = self.payloads.get(name)
        return payload is not None and payload.good

    def make(self, node: SimNode, number: int, base_round: int, good: bool = True) -> tuple[bytes, Payload]:
        """Makes a payload, and returns it with its name."""
        size = self.cluster.setup.scenario.training.payload_bytes
        seed = b"".join(place.to_bytes(8, "little") for place in (number, base_round, next(self._made)))
        start = digest("simulated payload", node.key, seed)
        is_inline = self.cluster.setup.run_config.agreement.is_inline(size)
        content = authored(node.key, (start * (size // len(start) + 1))[: size - len(node.key)] if is_inline else start)
        name, payload = payload_digest(content), Payload(node.key, size, good, content if is_inline else b"", number)
        self.payloads[name] = payload
        return name, payload

    def fetch(self, node: SimNode, effect: ev.Fetch) -> None:
        cluster = self.cluster
        cluster.calendar.timer(
            node, cluster.calendar.now + CHECK_SECONDS, self._try_source, node, effect, deque(effect.sources)
        )

    def _try_source(self, node: SimNode, effect: ev.Fetch, sources: deque[bytes]) -> None:
        cluster = self.cluster
        if effect.payload in node.held_payloads and effect.payload in self.payloads:
            self._have(node, effect.payload)
        elif sources:
            source = sources.popleft()
            reached = cluster.topology.reach(node, source, REQUEST_BYTES)
            if reached:
                cluster.calendar.timer(node, reached[1], self._serve, node, effect, sources, reached[0])
            else:
                self._failed(node, effect, sources, source, "cannot be reached", DIAL_SECONDS)

    def _serve(self, node: SimNode, effect: ev.Fetch, sources: deque[bytes], source: SimNode) -> None:
        """Answers a request that has arrived at the source."""
        cluster, payload = self.cluster, self.payloads.get(effect.payload)
        withholds = source.liar is not None and not source.liar.serves(cluster, source.index, effect.payload, node.key)
        why = ""
        if payload is None or effect.payload not in source.held_payloads or withholds:
            why = "does not have it"
        elif payload.payload_bytes != effect.payload_bytes:
            why = "has another length"
        size = REQUEST_BYTES if why else effect.payload_bytes
        at = cluster.network.stream(source.index, node.index, cluster.calendar.now, size) if source.alive else None
        if at is None:
            self._failed(node, effect, sources, source.key, "lost", DIAL_SECONDS)
        elif why:
            self._failed(node, effect, sources, source.key, why, 0.0)
        else:
            cluster.metrics.sent(source, "payload", effect.payload_bytes)
            cluster.calendar.timer(node, at + CHECK_SECONDS, self._came, node, effect.payload)

    def _failed(
        self, node: SimNode, effect: ev.Fetch, sources: deque[bytes], source: bytes, why: str, seconds: float
    ) -> None:
        cluster = self.cluster
        at = cluster.calendar.now + seconds
        cluster.calendar.timer(node, at, cluster.give, node, ev.FetchFailed(effect.payload, source, why))
        cluster.calendar.timer(node, at, self._try_source, node, effect, sources)

    def _came(self, node: SimNode, payload: bytes) -> None:
        self.cluster.metrics.fetched_payload()
        node.held_payloads.add(payload)
        self._have(node, payload)

    def _have(self, node: SimNode, payload: bytes) -> None:
        held = self.payloads[payload]
        self.cluster.give(node, ev.PayloadArrived(payload, held.good, held.author, held.payload_bytes))
