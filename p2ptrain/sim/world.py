"""The simulated world: everything that checkers, liars and reports see, and that nodes act in.

All that is drawn comes from generators seeded by the scenario's seed and a name, so that the same seed gives the same
run on every machine. A message is decoded and verified once for everyone, and one event serves all its receivers
(calendar.py): that makes millions of deliveries a minute possible. Messages and bytes are counted before gossip's own
duplication: a published message counts once for its sender and once for every receiver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import count
from random import Random
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from p2ptrain.core.events import Certified
from p2ptrain.core.history import Beginning
from p2ptrain.core.manifest import Manifest
from p2ptrain.core.messages import Availability, Received, authored, content_name, decode, payload_digest
from p2ptrain.core.state import Admitted, genesis
from p2ptrain.core.succession import is_over
from p2ptrain.digest import digest
from p2ptrain.errors import RemoteProtocolError
from p2ptrain.sim.calendar import Calendar
from p2ptrain.sim.keys import FakeSigner, node_key
from p2ptrain.sim.machine import Accelerator, Disk, HeldPayloads, LocalClock, ModelState, SavedState, SimNode
from p2ptrain.sim.network import LinkModel, bits
from p2ptrain.sim.scenario import Expect, Lie, Scenario

APART_SECONDS = 120.0  # for who goes on to hear that the run is over for others, or that their branch lost
LISTS_MAX = 256  # different ones of a round or two
DECODED_MAX = 20_000  # decoded messages kept: those of a few rounds


class ManifestFacts(NamedTuple):
    """The facts of a decided manifest that are evaluated in the end: a long simulation cannot keep all manifests."""

    round: int
    digest: bytes
    taken: int  # contributions
    authors: int  # nodes that made them, as bits


class Measurements:
    def __init__(self, key_index: Mapping[bytes, int], expect: Expect) -> None:
        self._key_index = key_index
        periods = [(each.since, each.until) for each in expect.paused]
        periods += [(each.since, each.until) for each in expect.progress]
        self._applied: dict[tuple[float, float], Counter[int]] = {period: Counter() for period in periods}
        self.last_applied: dict[int, tuple[float, int]] = {}  # by node: when it applied its last round, and which
        self.heard_messages = 0  # all nodes together
        self.heard_bytes = 0
        self.kinds: Counter[str] = Counter()  # messages sent, by kind
        self.ticks: Counter[int] = Counter()
        self.views: dict[tuple[bytes, int], int] = {}  # last view, by branch and round
        self.manifests: dict[tuple[bytes, int], ManifestFacts] = {}
        self.taken: Counter[bytes] = Counter()  # contributions, by author
        self.counted: Counter[bytes] = Counter()  # those that were applied
        self.banned: dict[bytes, int] = {}  # by key: the round
        self.unseated: Counter[bytes] = Counter()
        self.branches: dict[bytes, Beginning] = {}
        self.states_fetched: Counter[int] = Counter()  # from other nodes, by node
        self.disconnects: Counter[int] = Counter()
        self.stalls: Counter[int] = Counter()
        self.mismatches: Counter[int] = Counter()  # states that came out wrong, by node
        self.payloads_fetched: Counter[int] = Counter()  # from other nodes, by node
        self.audits: Counter[int] = Counter()

    def sent(self, kind: str, size: int, receivers: int = 1) -> None:
        self.kinds[kind] += 1
        self.heard_messages += receivers
        self.heard_bytes += receivers * size

    def certified(self, node: SimNode, record: Certified) -> None:
        if not node.honest:
            return
        step = record.step
        if isinstance(step, Beginning):
            self.branches.setdefault(step.branch, step)
            return
        manifest = step.manifest
        place = manifest.branch, manifest.round
        self.views[place] = max(step.certificate.view, self.views.get(place, 0))
        if place not in self.manifests:
            authors = [self._key_index[each.author] for each in manifest.taken if each.author in self._key_index]
            facts = ManifestFacts(manifest.round, manifest.digest, len(manifest.taken), bits(authors))
            self.manifests[place] = facts
            self.taken.update(taken.author for taken in manifest.taken)
            self.counted.update(taken.author for taken in manifest.taken if taken.counts)
            self.unseated.update(manifest.unseated)
            for key in manifest.banned:
                self.banned.setdefault(key, manifest.round)

    def applied(self, node: SimNode, manifest: Manifest, now: float) -> None:
        self.last_applied[node.index] = now, manifest.round
        for (since, until), applied in self._applied.items():
            applied[node.index] += since < now <= until

    def look_for_stall(self, node: SimNode) -> None:
        if node.core is not None:
            self.stalls[node.index] += node.process.begins_to_stall(node.core.view().is_stalled)

    def rounds_between(self, index: int, since: float, until: float) -> int:
        """Returns how many rounds a node applied in a period that the scenario has expectations of."""
        return self._applied[since, until][index]


class Setup:
    def __init__(self, seed: int, scenario: Scenario) -> None:
        self.seed, self.scenario, self.run_config = seed, scenario, scenario.run(seed)
        self.run_id = digest("simulated run", str(seed).encode())
        keys = [node_key(seed, index) for index in range(scenario.nodes)]
        members = tuple(keys[: self.run_config.admission.seats_max])
        first = genesis(self.run_id, members, digest("simulated state", self.run_id))
        admitted = tuple(Admitted(key, 0, 0, 0) for key in sorted(keys))
        self.genesis = replace(first, admitted=admitted)
        lies = [fault for fault in scenario.fault if isinstance(fault, Lie)]
        self._liars = {index for lie in lies for index in scenario.pick(lie.nodes)}

    def rng_name(self, *names: object) -> str:
        return " ".join(map(str, (self.seed, *names)))

    def stream(self, *names: object) -> Random:
        """Returns the generator for one use: each use has its own, so that an extra draw changes no other."""
        return Random(self.rng_name(*names))

    def signer(self, index: int) -> FakeSigner:
        return FakeSigner(self.run_id, node_key(self.seed, index))

    def new_disk(self, is_forgetful: bool = False) -> Disk:
        start = self.genesis
        agreement = self.run_config.agreement
        first = SavedState(0, start.root, start.head)
        return Disk(first, start, agreement.history_rounds, agreement.staleness_rounds_max, is_forgetful)

    def machine(self, index: int, claim: bytes = b"") -> SimNode:
        """Makes a machine whose process has not started; `claim` is what the node shows of an invitation."""
        draw = self.stream("machine", index)
        training = self.scenario.training
        pace = 1.0 + training.spread * draw.uniform(-1.0, 1.0)
        for slow in training.slow:
            if index in self.scenario.pick(slow.nodes):
                pace *= slow.times
        return SimNode(
            index,
            self.signer(index),
            honest=index not in self._liars,
            claim=claim,
            clock=LocalClock(draw.uniform(0.0, 10_000.0)),
            disk=self.new_disk(),
            held_payloads=HeldPayloads(self.run_config.agreement.history_rounds),
            state=ModelState(0, self.genesis.root, self.genesis.head),
            accelerator=Accelerator(pace),
        )


def decoder(verifier: FakeSigner) -> Callable[[bytes], Received | None]:
    """Makes a function that decodes and verifies each message once for all nodes; it returns None for a bad one."""

    same: Callable[[tuple[bytes, ...]], tuple[bytes, ...]] = lru_cache(LISTS_MAX)(lambda names: names)

    @lru_cache(DECODED_MAX)
    def decoded(envelope: bytes) -> Received | None:
        try:
            received = decode(envelope, verifier)
        except RemoteProtocolError:
            return None
        message = received.message
        if type(message) is Availability:  # what most members hold is the same, and is compared often
            received = replace(received, message=replace(message, held=same(message.held)))
        return received

    return decoded


class Payload(Struct, frozen=True):
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
        self.by_name = {name: payload for name, payload in self.by_name.items() if payload.round >= before}

    def is_good(self, name: bytes) -> bool:
        """Whether a payload that came with its announcement exists and decodes."""
        return name in self.by_name and self.by_name[name].good

    def make(self, node: SimNode, number: int, base_round: int, good: bool = True) -> tuple[bytes, Payload]:
        size = self.payload_bytes
        seed = b"".join(place.to_bytes(8, "little") for place in (number, base_round, next(self._made)))
        start = digest("simulated payload", node.key, seed)
        content = start if not self.is_inline else (start * (size // len(start) + 1))[: size - len(node.key)]
        content = authored(node.key, content)
        attachment, is_work = content if self.is_inline else b"", node.liar is None or node.liar.works
        payload = Payload(node.key, size, good, attachment, number, content_name(content), is_work)
        name = payload_digest(content)
        self.by_name[name] = payload
        return name, payload


class Goal:
    """The round that every honest node has to apply, except those gone for good: the run's last one if it has one."""

    def __init__(self, scenario: Scenario, calendar: Calendar, nodes: Sequence[SimNode]) -> None:
        self.round = scenario.rounds
        self.resumed_at: float | None = None  # when everyone had made progress after the faults
        self._scenario, self._calendar, self._nodes = scenario, calendar, nodes
        self._next_look = 0.0

    def look(self, at_once: bool = False) -> None:
        """Ends the simulation if the goal is reached; called after each applied round and each loaded state."""
        calendar = self._calendar
        if calendar.is_over or (calendar.now < self._next_look and not at_once):
            return
        self._next_look = calendar.now + min(1.0, self._scenario.training.seconds / 4)
        if calendar.now < self._scenario.end_of_faults:
            return
        waiting = [node for node in self._nodes if node.honest and not node.is_gone]
        if self.resumed_at is None and not self._has_resumed(waiting):
            return
        # If nobody is left, nobody has reached it.
        is_apart = len({is_over(node.disk.state) for node in waiting}) > 1
        if is_apart and calendar.now < self._scenario.end_of_faults + APART_SECONDS:
            return
        if waiting and all(map(self.is_reached_by, waiting)):
            calendar.stop()

    def is_reached_by(self, node: SimNode) -> bool:
        state = node.disk.state
        if state.succession.decided is None:
            return node.alive and node.state.round >= self.round
        return node.alive and is_over(state) and node.state.round >= state.round

    def _has_resumed(self, waiting: Sequence[SimNode]) -> bool:
        """Whether everyone's state has advanced since the faults ended, on one branch."""
        since = self._scenario.end_of_faults
        going = [node for node in waiting if not is_over(node.disk.state)]
        is_one = len({node.disk.state.branch for node in going}) <= 1
        if not (is_one and all(node.alive and node.state.moved_at > since for node in going)):
            return False
        self.resumed_at = self._calendar.now
        if self._scenario.fault:
            highest = max((node.state.round for node in going), default=0)
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
        return max((node.disk.state.round for node in self.nodes if node.honest), default=0)

    def reach(self, node: SimNode, peer: bytes, size: int) -> tuple[SimNode, float] | None:
        """Returns the peer and the arrival time of a message on a stream; None if the peer cannot be reached."""
        index = self.key_index.get(peer)
        if index is None or not self.nodes[index].alive:
            return None
        at = self.network.stream(node.index, index, self.calendar.now, size)
        return None if at is None else (self.nodes[index], at)
