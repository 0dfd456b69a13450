"""A whole swarm in one process: real cores, drivers, stores and protocols over the in-memory network.

Only the trainer is not real: its state is a chain of hashes over all contributions, so that whoever applies anything
else, or in another order, has another root for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.config import NodeConfig, RunConfig
from p2ptrain.config.node import LimitsConfig, NetworkConfig, StorageConfig
from p2ptrain.daemon import Daemon, Outputs, save_last
from p2ptrain.errors import DataError
from p2ptrain.identity import Identity
from p2ptrain.learn.data import manifest_digest
from p2ptrain.net.connections import topic_of
from p2ptrain.node.assembly import Launch
from p2ptrain.observe.build import peers_of, status_of
from p2ptrain.replay import replay
from p2ptrain.store.store import Store
from tests.helpers.driver import STATE, ChainTrainer, LoopDevice, a_dataset, root_of
from tests.helpers.memory_network import MemoryTransport, Network
from tests.helpers.net import at, skipping_time, until

FOUNDERS = 4


class Member:
    """A node that a test can start repeatedly."""

    def __init__(self, swarm: Swarm, number: int) -> None:
        self.swarm, self.number = swarm, number
        self.identity = Identity(bytes([number + 1]) * 32)
        self.key = self.identity.key
        self.directory = swarm.directory / f"node{number}"
        self.transports: list[MemoryTransport] = []
        self.roots: dict[int, bytes] = {}
        self.why = ""
        self.daemon: Daemon
        self.outputs: Outputs | None = None
        self.device: LoopDevice
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
        self.device = LoopDevice(ChainTrainer(dataset, seed=self.number))
        state = STATE if is_founder else b""
        async with AsyncExitStack() as stack:
            stack.callback(self.device.close)
            launch = Launch(swarm.run, config, self.identity, transport, dataset, state=state)
            self.daemon = await Daemon.open(stack, launch, self.outputs, self.device)
            stack.callback(self.daemon.edges.persistence.close)
            driver = self.daemon.driver
            await transport.subscribe(topic_of(self.daemon.edges.run_id), driver.intake.hear)
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


class Swarm:
    """The founders of a run, and the nodes that join later."""

    def __init__(self, directory: Path, **agreement: Any) -> None:
        self.directory = directory
        self.network = Network(seed=1, latency_seconds=0.02, loss=0.02)
        self.nodes: list[Member] = []
        self.nodes += [Member(self, number) for number in range(FOUNDERS)]
        dataset = a_dataset(directory / "data")
        raw = {
            "name": "swarm",
            "agreement": {"inline_bytes_max": 0, "stall_seconds": 600, **agreement},
            "admission": {"probation_rounds": 1},
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
async def swarm(tmp_path: Path, outputs: Outputs | None = None, **agreement: Any) -> AsyncIterator[Swarm]:
    """Runs a swarm; `outputs` are the first node's."""
    made = Swarm(tmp_path, **agreement)
    made.nodes[0].outputs = outputs
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


@skipping_time
async def test_four_nodes_apply_the_same_rounds_and_their_logs_run_again(tmp_path: Path) -> None:
    async with swarm(tmp_path) as made:
        await made.reach(10)
        made.compare(10)
        for node in made.nodes:
            status = node.status
            assert status["health"] == []
            assert status["fault_tolerance"] == {"liars": 1, "crashes": 1, "mode": "byzantine"}
            assert len(status["peers"]) == 3
            assert len(peers_of(node.daemon).peers) == 3
            assert 8 in dict(node.daemon.edges.served_blobs.states.places())
        taken = [node.status["counters"]["contributions taken"] for node in made.nodes]
        assert sum(taken) >= 32  # of 40: a lost message costs its node two rounds, and threads say which are lost
        edges = made.nodes[0].daemon.edges
        assert (edges.mailboxes._upload.rate, edges.fetching.fetcher._sources.download.rate) == (10**9, 2 * 10**9)
        for node in made.nodes[1:]:  # also if it is killed now: whom it joined by
            assert node.daemon.edges.persistence.store.records.addresses() == [made.network.address(made.nodes[0].key)]
        directories = [node.daemon.edges.persistence.store.directory for node in made.nodes]
    for directory in directories:
        logs = sorted((directory / "events").glob("*.jsonl"))
        assert logs
        again = replay(logs[-1])
        assert again.difference == ""
        assert again.events > 100


@skipping_time
async def test_one_that_crashes_is_not_missed_and_comes_back_from_its_disk(tmp_path: Path) -> None:
    async with swarm(tmp_path) as made:
        *others, victim = made.nodes
        await made.reach(6)
        await victim.crash()
        was = victim.applied
        await made.reach(was + 12, *others)
        await victim.start()
        assert was - 10 < victim.applied <= was  # from a checkpoint, or the first weights
        await made.reach(made.newest + 3)
        await until(lambda: victim.status["health"] == [] and victim.key in others[0].members)
        made.compare(20)


@skipping_time
async def test_one_that_was_cut_off_follows_when_the_network_heals(tmp_path: Path) -> None:
    async with swarm(tmp_path) as made:
        *others, lonely = made.nodes
        await made.reach(4)
        for other in others:
            made.network.cut(lonely.key, other.key)
        stood = lonely.applied
        await made.reach(stood + 10, *others)
        assert lonely.applied <= stood + 1
        assert "no peers" in lonely.status["health"]
        made.network.heal()
        await made.reach(made.newest + 3)
        made.compare(15)
        await until(lambda: lonely.status["health"] == [])


@skipping_time
async def test_two_halves_stop_and_go_on_together(tmp_path: Path) -> None:
    async with swarm(tmp_path, on_quorum_loss="halt") as made:
        await made.reach(4)
        for one in made.nodes[:2]:
            for other in made.nodes[2:]:
                made.network.cut(one.key, other.key)
        now = asyncio.get_running_loop().time()
        stood = made.newest
        await at(now + 120.0)
        assert made.newest <= stood + 1
        made.network.heal()
        await made.reach(made.newest + 5)
        made.compare(8)


@skipping_time
async def test_a_newcomer_gets_data_and_state_from_the_others_and_takes_part(tmp_path: Path) -> None:
    async with swarm(tmp_path) as made:
        await made.reach(10)
        newcomer = Member(made, FOUNDERS)
        made.nodes.append(newcomer)
        await newcomer.start()
        await until(lambda: newcomer.key in made.nodes[0].members)
        await made.reach(made.newest + 3)
        adopted = [number for what, number, *_ in newcomer.device.chain.done if what == "adopt"]
        assert adopted
        assert newcomer.device.chain.dataset is not None
        assert newcomer.device.chain.dataset.missing_anywhere() == []
        assert newcomer.status["counters"]["contributions taken"] >= 1
        assert newcomer.status["health"] == []
        made.compare(13)


@skipping_time
async def test_who_leaves_is_missed_by_nobody_and_may_come_again(tmp_path: Path) -> None:
    async with swarm(tmp_path) as made:
        *others, leaver = made.nodes
        await made.reach(5)
        await leaver.leave()
        assert leaver.why
        rounds = [int(path.name.split("-")[-1]) for path in leaver.directory.glob("runs/*/checkpoints/*")]
        assert max(rounds) == leaver.device.chain.round >= 5  # the last thing it does is to save where it was
        await until(lambda: all(leaver.key not in node.members for node in others))  # who leaves hears of it first
        await made.reach(made.newest + 5, *others)
        assert all(len(node.members) == 3 for node in others)
        await leaver.start()
        await until(lambda: leaver.key in others[0].members)
        await made.reach(made.newest + 3)
        made.compare(15)


@skipping_time
async def test_a_disk_in_trouble_is_told_in_the_status_and_stops_one_node_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with swarm(tmp_path) as made:
        *others, victim = made.nodes
        await made.reach(4)
        store, write = victim.daemon.edges.persistence.store, Store.write
        full: Callable[..., None]

        def full(self: Store, records: Any) -> None:
            if self is store:
                raise DataError("the disk is full")
            write(self, records)

        monkeypatch.setattr(Store, "write", full)
        await until(lambda: bool(victim.daemon.driver.disk_trouble))
        stood = victim.applied
        await made.reach(stood + 10, *others)
        assert victim.status["health"][0] == "degraded: the disk is full"
        assert victim.applied <= stood + 1
        monkeypatch.undo()
        await made.reach(made.newest + 3)
        await until(lambda: victim.status["health"] == [])
        made.compare(15)


@skipping_time
async def test_all_stop_at_once_and_go_on_where_they_were(tmp_path: Path) -> None:
    async with swarm(tmp_path) as made:
        await made.reach(7)
        for node in made.nodes:
            await node.crash()
        stood = max(max(node.roots) for node in made.nodes)
        for node in made.nodes:
            await node.start()
        await made.reach(stood + 4)
        made.compare(stood + 4)
