"""The simulated world: everything that checkers, liars and reports see, and that nodes act in.

A message is decoded and verified once for everyone, and one event serves all its receivers (calendar.py): that makes
millions of deliveries a minute possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import count

from msgspec import Struct

from p2ptrain.core.messages import Received, authored, content_name, decode, payload_digest
from p2ptrain.digest import digest
from p2ptrain.errors import RemoteProtocolError
from p2ptrain.sim.calendar import Calendar
from p2ptrain.sim.keys import FakeSigner
from p2ptrain.sim.machine import SimNode
from p2ptrain.sim.measurements import Measurements
from p2ptrain.sim.network import LinkModel
from p2ptrain.sim.scenario import Scenario
from p2ptrain.sim.setup import Setup

DECODED_MAX = 20_000  # decoded messages kept: those of a few rounds


def decoder(verifier: FakeSigner) -> Callable[[bytes], Received | None]:
    """Makes a function that decodes and verifies each message once for all nodes; it returns None for a bad one."""

    @lru_cache(DECODED_MAX)
    def decoded(envelope: bytes) -> Received | None:
        try:
            return decode(envelope, verifier)
        except RemoteProtocolError:
            return None

    return decoded


class Payload(Struct, frozen=True):
    """A payload that some node has made."""

    author: bytes
    payload_bytes: int
    good: bool
    attachment: bytes  # empty: too large to be attached
    round: int
    content: bytes  # its name
    is_work: bool = True  # of its author, on its own sequences


class MadePayloads:
    """All payloads that nodes have made. Only small ones have content; large ones are a name and a length."""

    def __init__(self, payload_bytes: int, is_inline: bool) -> None:
        self.payload_bytes, self.is_inline = payload_bytes, is_inline
        self.by_name: dict[bytes, Payload] = {}
        self._made = count()

    def forget(self, before: int) -> None:
        """Forgets payloads of rounds before this one."""
        self.by_name = {name: payload for name, payload in self.by_name.items() if payload.round >= before}

    def is_good(self, name: bytes) -> bool:
        """Whether a payload that came with its announcement exists and decodes."""
        payload = self.by_name.get(name)
        return payload is not None and payload.good

    def make(self, node: SimNode, number: int, base_round: int, good: bool = True) -> tuple[bytes, Payload]:
        """Makes a payload, and returns it with its name."""
        size = self.payload_bytes
        seed = b"".join(place.to_bytes(8, "little") for place in (number, base_round, next(self._made)))
        start = digest("simulated payload", node.key, seed)
        content = start if not self.is_inline else (start * (size // len(start) + 1))[: size - len(node.key)]
        content = authored(node.key, content)
        payload = Payload(
            node.key,
            size,
            good,
            content if self.is_inline else b"",
            number,
            content_name(content),
            node.liar is None or node.liar.works,
        )
        name = payload_digest(content)
        self.by_name[name] = payload
        return name, payload


class Goal:
    """The round that every honest node has to apply, except nodes that are gone for good."""

    def __init__(self, scenario: Scenario, calendar: Calendar, nodes: Sequence[SimNode]) -> None:
        self.round = scenario.rounds
        self.resumed_at: float | None = None  # when everyone had made progress after the faults
        self._scenario, self._calendar, self._nodes = scenario, calendar, nodes
        self._next_look = 0.0

    def look(self) -> None:
        """Ends the simulation if the goal is reached; called after each applied round and each loaded state."""
        calendar = self._calendar
        if calendar.is_over or calendar.now < self._next_look:
            return
        self._next_look = calendar.now + min(1.0, self._scenario.training.seconds / 4)
        if calendar.now < self._scenario.end_of_faults:
            return
        waiting = [node for node in self._nodes if node.honest and not node.is_gone]
        if self.resumed_at is None and not self._has_resumed(waiting):
            return
        # If nobody is left, nobody has reached it.
        if waiting and all(node.alive and node.state.round >= self.round for node in waiting):
            calendar.stop()

    def faults_ended(self) -> None:
        """Notes that all faults are over, so that the swarm has to recover from here on."""
        self._next_look = 0.0
        self.look()

    def _has_resumed(self, waiting: Sequence[SimNode]) -> bool:
        """Whether everyone's state has advanced since the faults ended, on one branch."""
        since = self._scenario.end_of_faults
        branches = {node.disk.state.branch for node in waiting}
        if len(branches) > 1 or not all(node.alive and node.state.moved_at > since for node in waiting):
            return False
        self.resumed_at = self._calendar.now
        if self._scenario.fault:
            highest = max((node.state.round for node in waiting), default=0)
            self.round = max(self.round, highest + self._scenario.rounds_after)
        return True


class SimWorld:
    """Time, machines and the network between them, with all that is measured of them."""

    def __init__(self, seed: int, scenario: Scenario) -> None:
        self.setup = Setup(seed, scenario)
        self.rng = self.setup.stream("cluster")
        self.calendar = Calendar(self.rng)
        self.decode = decoder(FakeSigner(self.setup.run_id, b""))
        self.network = LinkModel(scenario.links, self.setup.stream("network"))
        payload_bytes = scenario.training.payload_bytes
        self.payloads = MadePayloads(payload_bytes, self.setup.run_config.agreement.is_inline(payload_bytes))
        self.nodes: list[SimNode] = []
        self.key_index: dict[bytes, int] = {}
        self.metrics = Measurements(self.key_index, scenario.expect)
        for _ in range(scenario.nodes):
            self.add_node()
        self.goal = Goal(scenario, self.calendar, self.nodes)

    def add_node(self, claim: bytes = b"") -> SimNode:
        """Adds a machine, whose process is not running yet."""
        node = self.setup.machine(len(self.nodes), claim)
        self.nodes.append(node)
        self.key_index[node.key] = node.index
        return node

    def node_of(self, key: bytes) -> SimNode:
        return self.nodes[self.key_index[key]]

    @property
    def honest(self) -> list[SimNode]:
        """The honest nodes whose processes are running."""
        return [node for node in self.nodes if node.honest and node.alive]

    @property
    def rounds(self) -> int:
        """The number of rounds that the swarm has decided."""
        return max((node.disk.state.round for node in self.nodes if node.honest), default=0)

    def reach(self, node: SimNode, peer: bytes, size: int) -> tuple[SimNode, float] | None:
        """Returns the peer and the arrival time of a message on a stream; None if the peer cannot be reached."""
        index = self.key_index.get(peer)
        if index is None or not self.nodes[index].alive:
            return None
        at = self.network.stream(node.index, index, self.calendar.now, size)
        return None if at is None else (self.nodes[index], at)
