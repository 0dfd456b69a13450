"""A bootstrap that turned hostile offers another run to a node that returns."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from p2ptrain.config import RunConfig
from p2ptrain.config.node import NetworkConfig, NodeConfig, StorageConfig
from p2ptrain.daemon import launch
from p2ptrain.errors import ConfigError
from p2ptrain.net import questions
from p2ptrain.node.find import find_run
from p2ptrain.node.home import Home
from p2ptrain.store.records import RECORDS_NAME, Records
from tests.helpers.core import KEYS
from tests.helpers.memory_network import MemoryTransport, Network
from tests.helpers.net import skipping_time

ME, BOOTSTRAP = KEYS[:2]


def named(name: str) -> RunConfig:
    return RunConfig.model_validate({"name": name}).sealed(
        manifest="1" * 64, initial_root="2" * 64, founders=[KEYS[5].hex()]
    )


MINE, THEIRS = named("mine-for-months"), named("the-attackers")


@dataclass
class Returning:
    """A node with runs on its disk, and a bootstrap that offers others."""

    me: MemoryTransport
    config: NodeConfig


@asynccontextmanager
async def returning(directory: Path, *offered: RunConfig, is_known: bool = True) -> AsyncIterator[Returning]:
    network = Network(latency_seconds=0.01)
    me, bootstrap = network.transport(ME), network.transport(BOOTSTRAP)
    config = NodeConfig(
        network=NetworkConfig(bootstrap=(network.address(BOOTSTRAP),)), storage=StorageConfig(directory=str(directory))
    )
    stored = Home(config).of_run(MINE.id)
    stored.mkdir(parents=True)
    (stored / "run.json").write_bytes(MINE.canonical())
    if is_known:
        with closing(Records(stored / RECORDS_NAME)) as records:
            records.remember([network.address(BOOTSTRAP)])
    configs = {run.id: run for run in offered}

    def answer(peer: bytes, question: questions.Question) -> questions.Answer:
        if isinstance(question, questions.AskRuns):
            return questions.Runs(tuple(questions.RunInfo(run_id, run.name, 9, 9) for run_id, run in configs.items()))
        assert isinstance(question, questions.AskConfig)
        return questions.Config(configs[question.run_id].canonical())

    await questions.serve(bootstrap, answer)
    yield Returning(me, config)
    for node in list(network.nodes.values()):
        await node.close()


@skipping_time
async def test_a_bootstrap_does_not_move_a_node_to_another_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with returning(tmp_path, THEIRS) as each:
        run, sources = await find_run(each.me, Home(each.config), None)
        assert (run, sources.peers) == (MINE, [])
        assert f"know only {THEIRS.run_id} (the-attackers); continuing run mine-for-months" in caplog.text
        assert (await find_run(each.me, Home(each.config), THEIRS.run_id))[0] == THEIRS, "the owner may, by its name"


@skipping_time
async def test_the_run_on_the_disk_is_chosen_of_several_that_are_offered(tmp_path: Path) -> None:
    async with returning(tmp_path, THEIRS, MINE) as each:
        run, sources = await find_run(each.me, Home(each.config), None)
        assert (run, sources.peers) == (MINE, [BOOTSTRAP])


@skipping_time
async def test_a_bootstrap_that_the_run_does_not_know_moves_nobody_either(tmp_path: Path) -> None:
    async with returning(tmp_path, THEIRS, is_known=False) as each:
        with pytest.raises(ConfigError, match=rf"^--run: .* know only {THEIRS.run_id} \(the-attackers\), and this dir"):
            await find_run(each.me, Home(each.config), None)


@skipping_time
async def test_a_prefix_that_an_attacker_can_grind_names_the_run_on_the_disk(tmp_path: Path) -> None:
    shared = next(run for number in range(200) if (run := named(f"ground-{number}")).run_id[0] == MINE.run_id[0])
    async with returning(tmp_path, shared) as each:
        run, _ = await find_run(each.me, Home(each.config), MINE.run_id[0])
        assert run == MINE


def test_the_runs_id_is_no_head_to_trust() -> None:
    with pytest.raises(ConfigError, match=r"^--trust: that is the run's id, .* it protects from nothing\. Give the 64"):
        launch.refuse_trust_in_the_start(MINE.id, MINE)
    launch.refuse_trust_in_the_start(bytes(32), MINE)
    launch.refuse_trust_in_the_start(b"", MINE)
