"""The topology: who is connected to whom, and when nodes notice that a peer has come or gone.

Messages reach everyone over links of their own; connections are what the core is told about. A connection exists while
both processes run and are awake and the link is open at least one way; either change is noticed only after a while."""

from __future__ import annotations

from collections.abc import Callable

from p2ptrain.core.events import Event, PeerLost, PeerSeen
from p2ptrain.sim.machine import SimNode
from p2ptrain.sim.world import SimWorld

PEERS_MAX = 32  # connections per node that the core is told about; gossip reaches everyone
ALL_CONNECTED_MAX = 33  # nodes: up to this size everyone is connected to everyone
NOTICE_SECONDS = (1.0, 4.0)  # until a lost or a new connection is noticed
DIAL_SECONDS = 3.0  # until dialling an unreachable peer is given up
REQUEST_BYTES = 100  # size of a request on a stream


class Topology:
    def __init__(self, world: SimWorld, give: Callable[[SimNode, Event], None]) -> None:
        self.world, self.give = world, give
        size = len(self.world.nodes)
        self.possible: list[set[int]] = [set() for _ in range(size)]  # a node's peers while both are running
        self.connected: list[set[int]] = [set() for _ in range(size)]  # the peers that it believes to be connected
        for index in range(size):
            others = [other for other in range(size) if other != index]
            if size > ALL_CONNECTED_MAX:
                others = self.world.rng.sample(others, PEERS_MAX // 2)
            for other in others:
                self.possible[index].add(other)
                self.possible[other].add(index)

    def introduce(self, node: SimNode) -> None:
        others = [other for other in range(node.index) if not self.world.nodes[other].is_gone]
        found = self.world.rng.sample(others, min(len(others), PEERS_MAX))
        self.possible.append(set(found))
        self.connected.append(set())
        for other in found:
            self.possible[other].add(node.index)

    def refresh(self, *nodes: SimNode) -> None:
        """Lets these nodes and their peers notice, after a while, which of their connections have changed."""
        for node in nodes:
            for other in sorted(self.possible[node.index]):
                if self._is_possible(node, self.world.nodes[other]) != (other in self.connected[node.index]):
                    low, high = NOTICE_SECONDS if self.world.calendar.now > 0 else (0.0, 0.2)
                    self.world.calendar.after(low, high, self._notice, node, self.world.nodes[other])

    def _is_possible(self, one: SimNode, other: SimNode) -> bool:
        network = self.world.network
        is_open = network.is_open(one.index, other.index) or network.is_open(other.index, one.index)
        is_awake = max(one.process.asleep_until, other.process.asleep_until) <= self.world.calendar.now
        return one.alive and other.alive and is_awake and is_open

    def tell(self, node: SimNode, peer: bytes, event: Event) -> bool:
        """Schedules an event's arrival at a peer, on a stream; False if the peer cannot be reached."""
        if reached := self.world.reach(node, peer, REQUEST_BYTES):
            self.world.calendar.timer(reached[0], reached[1], self.give, reached[0], event)
        return reached is not None

    def _notice(self, one: SimNode, other: SimNode) -> None:
        if not self._is_possible(one, other):
            self._lose(one, other)
        elif other.index not in self.connected[one.index]:
            for here, peer in ((one, other), (other, one)):
                self.connected[here.index].add(peer.index)
                self.give(here, PeerSeen(peer.key, f"range of {peer.index}"))

    def _lose(self, one: SimNode, other: SimNode) -> None:
        if other.index in self.connected[one.index]:
            for here, peer in ((one, other), (other, one)):
                self.connected[here.index].discard(peer.index)
                self.give(here, PeerLost(peer.key))

    def drop(self, node: SimNode) -> None:
        """Closes the connections of a killed process that restarted before anyone noticed."""
        for other in sorted(self.connected[node.index]):
            self._lose(node, self.world.nodes[other])

    def disconnect(self, one: SimNode, other: SimNode, seconds: float) -> None:
        """Closes a connection, and restores it after a while."""
        self._lose(one, other)
        self.world.calendar.after(seconds, 2 * seconds, self._notice, one, other)
