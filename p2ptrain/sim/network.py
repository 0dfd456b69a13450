"""The network: when messages arrive, if they do.

Each node reaches every other over a link of its own, so gossip is one message per link, and losses that gossip would
repair stay: harsher than the real thing. A node's uplink is shared by all its messages; gossip costs it FANOUT copies,
since others pass them on. Streams (to one peer) lose nothing, but take longer on a lossy link, and fail on a cut one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import log
from random import Random

from p2ptrain.core.messages import Message, Vote, kind_of
from p2ptrain.sim.scenario import Links

FANOUT = 8  # copies of a message that its publisher sends
RETRANSMISSIONS_MAX = 8  # attempts until a packet of a stream gets through

Arrival = tuple[float, int]  # when, to whom


class LinkModel:
    def __init__(self, links: Links, rng: Random) -> None:
        self.links, self.rng = links, rng
        self.cuts: dict[int, list[tuple[int, int]]] = {}  # cut links by fault: (sources, targets) as bits
        self.clogs: dict[int, tuple[int, float]] = {}  # by fault: sources as bits, and when their messages are released
        self.losing: dict[int, tuple[int, frozenset[str]]] = {}  # by fault: authors as bits, and kinds of message
        self.uplink: dict[int, float] = {}  # when a node's uplink is free again

    def change(self, links: Links) -> None:
        self.links = links

    def cut(self, fault: int, pairs: list[tuple[int, int]]) -> None:
        """Cuts the links from any of the first to any of the second, as bits; no pairs: heals them."""
        self.cuts[fault] = pairs
        if not pairs:
            del self.cuts[fault]

    def clog(self, fault: int, sources: int, until: float) -> None:
        self.clogs[fault] = sources, until

    def unclog(self, fault: int) -> None:
        del self.clogs[fault]

    def lose(self, fault: int, authors: int, kinds: frozenset[str]) -> None:
        """Loses messages of these kinds by these authors (bits); no kinds ends it."""
        self.losing[fault] = authors, kinds
        if not kinds:
            del self.losing[fault]

    def is_open(self, source: int, target: int) -> bool:
        cuts = chain.from_iterable(self.cuts.values())
        return not any(sources >> source & 1 and targets >> target & 1 for sources, targets in cuts)

    def loses(self, author: int, message: Message) -> bool:
        return any(authors >> author & 1 and name_of(message) in kinds for authors, kinds in self.losing.values())

    # -- When things arrive -------------------------------------------------------------------------

    def _leaves(self, source: int, now: float, size: int) -> float:
        """Returns when the last byte has left the source's uplink."""
        rate = self.links.bytes_per_second
        if not rate:
            return now
        leaves = self.uplink[source] = max(now, self.uplink.get(source, 0.0)) + size / rate
        return leaves

    def spread(self, source: int, targets: Sequence[int], now: float, size: int) -> list[Arrival]:
        """Returns when a published message reaches each target, the last arrival first."""
        links, draw = self.links, self.rng.random
        start = self._leaves(source, now, size * min(FANOUT, len(targets))) + links.latency_seconds
        jitter = links.jitter_seconds
        is_reliable = not (links.loss or links.duplicate or links.reorder)
        if is_reliable and not self.cuts and not self.clogs:
            found = [(start - jitter * log(1.0 - draw()), target) for target in targets if target != source]
        else:
            found = [
                (at, target)
                for target in targets
                if target != source
                for at in self._adverse(source, target, start - jitter * log(1.0 - draw()))
            ]
        found.sort(reverse=True)
        return found

    def _adverse(self, source: int, target: int, at: float) -> list[float]:
        """Returns the arrival times of a message's copies: none, one or two."""
        links, draw = self.links, self.rng.random
        if not self.is_open(source, target) or draw() < links.loss:
            return []
        if draw() < links.reorder:
            at -= links.reorder_seconds * log(1.0 - draw())
        at = self._held_up(source, at)
        return [at, at - links.reorder_seconds * log(1.0 - draw())] if draw() < links.duplicate else [at]

    def _held_up(self, source: int, at: float) -> float:
        for sources, until in self.clogs.values():
            if sources >> source & 1 and at < until:
                at = until + 0.01 * self.rng.random()
        return at

    def stream(self, source: int, target: int, now: float, size: int) -> float | None:
        """Returns when a message on a stream arrives; None if the link is cut."""
        if not self.is_open(source, target):
            return None
        links, draw = self.links, self.rng.random
        at = self._leaves(source, now, size) + links.latency_seconds - links.jitter_seconds * log(1.0 - draw())
        for _ in range(RETRANSMISSIONS_MAX):
            if draw() >= links.loss:
                break
            at += 2.0 * links.latency_seconds + links.jitter_seconds
        return self._held_up(source, at)


def name_of(message: Message) -> str:
    """Returns the kind of a message, by which faults and figures tell votes apart as well."""
    return message.ballot.name.lower() if isinstance(message, Vote) else kind_of(message)


def bits(nodes: Sequence[int]) -> int:
    return sum(1 << node for node in {*nodes})
