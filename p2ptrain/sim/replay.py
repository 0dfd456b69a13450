"""The event log of a simulated node, and the signer with which `p2ptrain replay` repeats it."""

from __future__ import annotations

from collections.abc import Sequence

from p2ptrain.core.events import Event
from p2ptrain.replay import FORMAT, EventLog, Header
from p2ptrain.sim.cluster import Cluster
from p2ptrain.sim.keys import FakeSigner
from p2ptrain.sim.machine import SimNode

SIMULATED = "simulated"


def watch(cluster: Cluster, index: int, log: EventLog) -> None:
    """Writes the events of one simulated node to a log."""
    life = 0

    def note(node: SimNode, event: Event, effects: Sequence[object] | None, local: float) -> None:
        nonlocal life
        if node.index != index:
            return
        if node.life != life:
            life = node.life
            setup = cluster.setup
            run, rng = setup.run_config.canonical().decode(), setup.rng_name("node", index, life)
            log.begin(Header(FORMAT, run, setup.run_id, node.key, rng, SIMULATED))
        log.note(local, event, effects)

    cluster.watch.observers.append(note)


def signer_of(header: Header) -> FakeSigner:
    """Returns the signer of the simulated node."""
    return FakeSigner(header.run_id, header.me)
