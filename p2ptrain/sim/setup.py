"""The setup: everything that a scenario and a seed determine before the simulation starts.

Everything is drawn from generators seeded by the scenario's seed and a name, so that the same seed gives the same run
on every machine.
"""

from __future__ import annotations

from random import Random

import msgspec

from p2ptrain.core.state import Admitted, genesis
from p2ptrain.digest import digest
from p2ptrain.sim.disk import Disk, SavedState
from p2ptrain.sim.keys import FakeSigner, node_key
from p2ptrain.sim.machine import Accelerator, HeldPayloads, LocalClock, ModelState, SimNode
from p2ptrain.sim.scenario import Lie, Scenario


class Setup:
    """The run, its genesis, and the machines before their start."""

    def __init__(self, seed: int, scenario: Scenario) -> None:
        self.seed, self.scenario, self.run_config = seed, scenario, scenario.run(seed)
        self.run_id = digest("simulated run", str(seed).encode())
        keys = [node_key(seed, index) for index in range(scenario.nodes)]
        members = tuple(keys[: self.run_config.admission.seats_max])
        first = genesis(self.run_id, members, digest("simulated state", self.run_id))
        admitted = tuple(Admitted(key, 0, 0, 0) for key in sorted(keys))
        self.genesis = msgspec.structs.replace(first, admitted=admitted)
        lies = [fault for fault in scenario.fault if isinstance(fault, Lie)]
        self._liars = {index for lie in lies for index in scenario.pick(lie.nodes)}

    def rng_name(self, *names: object) -> str:
        """Returns the seed of the generator for one use."""
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
