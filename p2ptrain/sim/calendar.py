"""The calendar: virtual time, and one heap of everything that is scheduled to happen.

A published message is one entry, however many nodes it reaches: it walks a list of arrivals, one at a time, and all
receivers share one event. Together with the shared decoder (world.py) this makes millions of deliveries a minute."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from heapq import heappop, heappush, heapreplace
from itertools import count
from random import Random
from typing import Any, NamedTuple, TypeAlias

from p2ptrain.core.events import MalformedReceived, MessageReceived
from p2ptrain.sim.machine import SimNode

Gossiped: TypeAlias = MessageReceived | MalformedReceived


class Flight(NamedTuple):
    """A published message on its way: one entry on the heap, one event for all."""

    arrivals: list[tuple[float, int]]
    event: Gossiped
    payload: bytes  # attached to the message; empty: none


class Timer(NamedTuple):
    """A scheduled action, of one life of a node if it has one."""

    node: SimNode | None
    life: int
    action: Callable[..., None]
    arguments: tuple[Any, ...]


class Calendar:
    """Runs actions and deliveries in the order of their virtual times."""

    def __init__(self, rng: Random) -> None:
        self.now = 0.0
        self.deliveries = 0
        self.is_over = False
        self._rng = rng
        self._heap: list[tuple[float, int, Flight | Timer]] = []
        self._order = count()

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        heappush(self._heap, (max(time, self.now), next(self._order), Timer(None, 0, action, arguments)))

    def after(self, low: float, high: float, action: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now + self._rng.uniform(low, high), action, *arguments)

    def timer(self, node: SimNode, time: float, action: Callable[..., None], *arguments: Any) -> None:
        """Schedules a node's action, which is dropped if the process ends first and put off while it sleeps."""
        heappush(self._heap, (max(time, self.now), next(self._order), Timer(node, node.life, action, arguments)))

    def fly(self, arrivals: list[tuple[float, int]], event: Gossiped, payload: bytes) -> None:
        """Schedules an event's arrival at several nodes; `arrivals` has the last one first."""
        if arrivals:
            self.deliveries += len(arrivals)
            heappush(self._heap, (arrivals[-1][0], next(self._order), Flight(arrivals, event, payload)))

    def stop(self) -> None:
        self.is_over = True

    def run(self, until: float, nodes: Sequence[SimNode], give: Callable[[SimNode, Gossiped], None]) -> None:
        """Runs until stopped, or until this time, with the garbage collector off: it would scan millions of messages
        again and again, and the garbage of a round has no cycles."""
        was_on = gc.isenabled()
        gc.disable()
        try:
            self._run(until, nodes, give)
        finally:
            if was_on:
                gc.enable()

    def _run(self, until: float, nodes: Sequence[SimNode], give: Callable[[SimNode, Gossiped], None]) -> None:
        heap = self._heap
        while heap and not self.is_over:
            time, place, item = heap[0]
            if time > until:
                break
            self.now = time
            if isinstance(item, Flight):
                arrivals = item.arrivals
                node = nodes[arrivals.pop()[1]]
                if arrivals:
                    heapreplace(heap, (arrivals[-1][0], place, item))
                else:
                    heappop(heap)
                if item.payload and node.process.core is not None:
                    node.held_payloads.add(item.payload)
                give(node, item.event)
            else:
                heappop(heap)
                self._fire(item)
        self.now = min(self.now, until)

    def _fire(self, timer: Timer) -> None:
        node = timer.node
        if node is None or (node.life == timer.life and node.process.asleep_until <= self.now):
            timer.action(*timer.arguments)
        elif node.life == timer.life:
            heappush(self._heap, (node.process.asleep_until, next(self._order), timer))
