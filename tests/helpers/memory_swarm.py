"""A whole swarm in one process: real cores, drivers, stores and protocols over the in-memory network.

Only the trainer is not real: its state is a chain of hashes over all contributions, so that whoever applies anything
else, or in another order, has another root for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from p2ptrain.config import NodeConfig, RunConfig
from p2ptrain.config.node import LimitsConfig, NetworkConfig, StorageConfig
from p2ptrain.daemon.assembly import Launch, Workshop
from p2ptrain.daemon.life import Daemon, save_last
from p2ptrain.data.dataset import manifest_digest
from p2ptrain.identity import Identity
from p2ptrain.net.connections import topic_of
from p2ptrain.node.home import Home
from p2ptrain.node.local_worker import Note
from p2ptrain.observe.build import status_of
from p2ptrain.observe.schema import RoundRecord
from tests.helpers.driver import STATE, ChainTrainer, a_dataset, loop_workshop, root_of
from tests.helpers.memory_network import MemoryTransport, Network
from tests.helpers.net import until

FOUNDERS = 4


class Member:
    """A node that a test can start repeatedly."""

    def __init__(self, swarm: MemorySwarm, number: int) -> None:
        self.swarm, self.number = swarm, number
        self.identity = Identity(bytes([number + 1]) * 32)
        self.key = self.identity.key
        self.directory = swarm.directory / f"node{number}"
        self.transports: list[MemoryTransport] = []
        self.roots: dict[int, bytes] = {}
        self.why = ""
        self.daemon: Daemon
        self.hears: Sequence[Callable[[RoundRecord], None]] = ()
        self.workshop: Workshop
        self.life: asyncio.Task[None]

    @property
    def applied(self) -> int:
        self.roots |= self.daemon.driver.node.view().roots
        return self.daemon.driver.node.view().applied_round

    @property
    def status(self) -> dict[str, Any]:
        return status_of(self.daemon).model_dump(mode="json")

    @property
    def members(self) -> tuple[bytes, ...]:
        return self.daemon.driver.node.view().state.members

    async def start(self) -> None:
        ready = asyncio.Event()
        self.life = asyncio.create_task(self._live(ready))
        await until(lambda: ready.is_set() or self.life.done())
        if self.life.done():
            self.life.result()

    async def _live(self, ready: asyncio.Event) -> None:
        swarm, is_founder = self.swarm, self.number < FOUNDERS
        transport = swarm.network.transport(self.key)
        self.transports.append(transport)
        first = swarm.nodes[0]
        bootstrap = () if first is self else (swarm.network.address(first.key),)
        config = NodeConfig(
            network=NetworkConfig(bootstrap=bootstrap),
            storage=StorageConfig(directory=str(self.directory)),
            limits=LimitsConfig(upload_bytes_per_second=10**9, download_bytes_per_second=2 * 10**9),
        )
        dataset = a_dataset(self.directory / "data", is_whole=is_founder)
        trainer = ChainTrainer(dataset, seed=self.number, run=swarm.run)

        async def opened(launch: Launch, note: Note) -> Workshop:
            self.workshop = loop_workshop(trainer, note, self.key)
            return self.workshop

        state = STATE if is_founder else b""
        async with AsyncExitStack() as stack:
            launch = Launch(swarm.run, Home(config), self.identity, transport, dataset, state=state)
            self.daemon = await Daemon.open(stack, launch, opened, hears=self.hears)
            stack.callback(self.daemon.edges.persistence.close)
            driver = self.daemon.driver
            is_in = driver.node.view().is_in
            await transport.subscribe(topic_of(self.daemon.edges.run_id), driver.intake.hear, is_in)
            async with asyncio.TaskGroup() as group:
                connections = group.create_task(self.daemon.edges.connections.run())
                running = group.create_task(driver.run(self.daemon.started))
                await until(lambda: driver.node.view().has_started)
                ready.set()
                self.why = await running
                connections.cancel()
            await save_last(self.daemon)

    async def crash(self) -> None:
        """Cuts the node off: whatever it still does has no effect on others."""
        assert self.applied >= 0
        self.swarm.network.kill(self.key)
        self.life.cancel()
        await asyncio.wait([self.life])

    async def leave(self) -> None:
        self.daemon.leave()
        await asyncio.wait([self.life])
        self.life.result()
        self.swarm.network.kill(self.key)


class MemorySwarm:
    """The founders of a run, and the nodes that join later."""

    def __init__(self, directory: Path, sections: dict[str, Any], **agreement: Any) -> None:
        self.directory = directory
        self.network = Network(seed=1, latency_seconds=0.02, loss=0.02)
        self.nodes: list[Member] = []
        self.nodes += [Member(self, number) for number in range(FOUNDERS)]
        dataset = a_dataset(directory / "data")
        raw = {
            "name": "swarm",
            "recipe": {"name": "distro"},
            "agreement": {"inline_bytes_max": 0, "stall_seconds": 600, **agreement},
            "admission": {"probation_rounds": 1},
            **sections,
        }
        self.run = RunConfig.model_validate(raw).sealed(
            manifest=manifest_digest(dataset.manifest_bytes()),
            initial_root=root_of(STATE).hex(),
            founders=[node.key.hex() for node in self.nodes],
        )

    async def reach(self, number: int, *nodes: Member) -> None:
        """Waits until these nodes have applied that many rounds."""
        waiting = nodes or tuple(self.nodes)

        def is_there() -> bool:
            for node in waiting:
                if node.life.done():
                    node.life.result()
            return min([node.applied for node in waiting]) >= number  # of all, so that all tell their roots

        await until(is_there)

    @property
    def newest(self) -> int:
        return max(node.applied for node in self.nodes if not node.life.done())

    def compare(self, least: int) -> None:
        """Asserts that all nodes have the same root for each round, and that there were enough rounds."""
        by_round: dict[int, set[bytes]] = {}
        for node in self.nodes:
            assert node.applied >= 0
            for number, root in node.roots.items():
                by_round.setdefault(number, set()).add(root)
        assert {number: roots for number, roots in by_round.items() if len(roots) > 1} == {}
        assert len(by_round) >= least
        assert len({next(iter(roots)) for roots in by_round.values()}) == len(by_round)  # every round changes it
        for node in self.nodes:
            assert not node.daemon.driver.node.view().state.banned


@asynccontextmanager
async def swarm(
    tmp_path: Path,
    hears: Sequence[Callable[[RoundRecord], None]] = (),
    sections: dict[str, Any] | None = None,
    **agreement: Any,
) -> AsyncIterator[MemorySwarm]:
    """Runs a swarm; `hears` are the first node's, `sections` of the run's config."""
    made = MemorySwarm(tmp_path, sections or {}, **agreement)
    made.nodes[0].hears = hears
    try:
        for node in made.nodes:
            await node.start()
        yield made
    finally:
        lives = [node.life for node in made.nodes if hasattr(node, "life")]
        for life in lives:
            life.cancel()
        if lives:
            await asyncio.wait(lives)
    for node in made.nodes:
        for transport in node.transports:
            await transport.close()  # and no handler of a stream has failed
