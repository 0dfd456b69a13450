"""One node that is a swarm by itself, with its real core, driver, store and log.

Only its trainer is a chain of hashes, over all that was applied and all that was trained, on which data: whatever is
lost, done twice or done in another order shows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from p2ptrain.config import NodeConfig, RunConfig
from p2ptrain.config.node import StorageConfig
from p2ptrain.daemon.assembly import Launch, Workshop
from p2ptrain.daemon.life import Daemon
from p2ptrain.data.dataset import TokenDataset, manifest_digest
from p2ptrain.digest import digest
from p2ptrain.errors import P2ptrainError
from p2ptrain.identity import Identity
from p2ptrain.node.home import Home
from p2ptrain.node.local_worker import Note
from p2ptrain.node.work import Base
from p2ptrain.observe.build import complaints_of
from p2ptrain.share import Share
from p2ptrain.train.live import StepResult
from tests.helpers.driver import SEQUENCE, STATE, ChainTrainer, loop_workshop, root_of
from tests.helpers.memory_network import Network
from tests.helpers.net import SkippingLoop, until
from tests.helpers.store import PowerCut

ROUNDS = 13  # with a checkpoint in every third
LIFE_SECONDS = 600.0  # of virtual time; the rounds take less than one
Bits = tuple[bytes, bytes]  # the weights, and what is still to be told
ME = Identity(bytes(31) + b"\1")


class WatchedTrainer(ChainTrainer):
    """Records its bits after each round: weights, residual, and contributions whose fate is open."""

    def __init__(self, dataset: TokenDataset) -> None:
        super().__init__(dataset)
        self.bits: dict[int, Bits] = {}

    def train(
        self,
        share: Share,
        on_step: Callable[[StepResult], object],
        shifted: Any = None,
        sequences: int = 0,
    ) -> list[StepResult]:
        results = super().train(share, on_step)
        assert self.dataset is not None
        batch = self.dataset.batch(self.positions_for(share), SEQUENCE)
        self.residual = digest("test data", self.residual, batch.tobytes())
        return results

    def note(self) -> None:
        self.bits[self.round] = self.state[:32], digest("test bits", self.residual, bytes(self.kept_rounds))


async def live(root: Path, dataset: TokenDataset, rounds: int, me: Identity = ME) -> dict[int, Bits]:
    """Runs until some rounds are applied and recorded, and is then killed."""
    run = RunConfig.model_validate(
        {"name": "alone", "recipe": {"name": "distro"}, "agreement": {"inline_bytes_max": 0}}
    ).sealed(
        manifest=manifest_digest(dataset.manifest_bytes()), initial_root=root_of(STATE).hex(), founders=[ME.key.hex()]
    )
    network, trainer = Network(), WatchedTrainer(dataset)

    async def opened(launch: Launch, note: Note) -> Workshop:
        workshop = loop_workshop(trainer, note, me.key)
        moved = workshop.worker.moved

        def noted(base: Base) -> None:
            moved(base)
            if base.payloads is not None:
                trainer.note()

        workshop.worker.moved = noted  # type: ignore[method-assign]
        return workshop

    transport = network.transport(me.key)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(transport.close)
        config = NodeConfig(storage=StorageConfig(directory=str(root), checkpoint_every_rounds=3))
        daemon = await Daemon.open(stack, Launch(run, Home(config), me, transport, dataset, state=STATE), opened=opened)
        running = asyncio.create_task(daemon.driver.run(daemon.started))
        try:
            async with asyncio.timeout(LIFE_SECONDS):
                await until(lambda: running.done() or trainer.round >= rounds)
            if running.done():
                running.result()
            await daemon.records.save(all_of_it=True)
        except TimeoutError as error:  # what it says of itself meanwhile
            driver = daemon.driver
            found = [each.text for each in complaints_of(daemon)] if driver.has_begun.is_set() else ["it has not begun"]
            raise TimeoutError("; ".join(found)) from error
        finally:
            running.cancel()
            await asyncio.wait([running])
    return trainer.bits


def lived(root: Path, dataset: TokenDataset, rounds: int = ROUNDS, me: Identity = ME) -> dict[int, Bits]:
    try:
        with asyncio.Runner(loop_factory=SkippingLoop) as runner:
            return runner.run(live(root, dataset, rounds, me))
    except BaseExceptionGroup as group:
        ended, rest = group.split((PowerCut, TimeoutError, P2ptrainError))
        assert rest is None and ended is not None, rest
        first: BaseException = ended
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from group
