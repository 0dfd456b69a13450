"""A bootstrap offers what a node cannot join; no supervisor must take that for the owner's mistake."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.cli import STATUSES
from p2ptrain.config import RunConfig
from p2ptrain.config.node import HttpConfig, LimitsConfig, NetworkConfig, NodeConfig, StorageConfig
from p2ptrain.daemon import launch
from p2ptrain.daemon.order import JoinOrder
from p2ptrain.digest import digest
from p2ptrain.errors import ConfigError, P2ptrainError, TooLargeError
from p2ptrain.net import questions
from p2ptrain.net.questions import RUNS_MAX
from p2ptrain.node.find import OfferError
from tests.helpers.core import KEYS
from tests.helpers.memory_network import Network
from tests.helpers.net import skipping_time

ME, BOOTSTRAP = KEYS[:2]
HUGE = {"dim": 16_384, "layers": 128, "heads": 128, "kv_heads": 128, "ffn_dim": 65_536}
SMALL = {"name": "distro", "k": 1}
OWN: dict[str, Any] = {"data": {"source": "own"}, "admission": {"policy": "invite", "keys": [KEYS[6].hex()]}}


def encoded(name: str = "offered", **said: Any) -> bytes:
    run = RunConfig.model_validate({"name": name, **said})
    return run.sealed(
        manifest="1" * 64, initial_root="2" * 64, founders=[KEYS[5].hex()], shapes="3" * 64 * bool(run.model.parameters)
    ).canonical()


OFFERS: dict[str, tuple[list[bytes], type[P2ptrainError], str]] = {
    "two runs": ([encoded("one"), encoded("two")], ConfigError, "there are 2 runs"),
    "as many as fit": ([encoded(f"n{n}") for n in range(RUNS_MAX)], ConfigError, f"there are {RUNS_MAX} runs"),
    "a later protocol": (
        [encoded().replace(b'"protocol":2', b'"protocol":9')],
        ConfigError, "uses protocol 9, and this release speaks 2",
    ),
    "too large a model": ([encoded(model=HUGE, recipe=SMALL)], TooLargeError, "but there are only"),
    "data of each node": ([encoded(**OWN)], ConfigError, "bring their own data, and this one has none"),
    "a script's model": (
        [encoded(model={"kind": "own", "parameters": ["a 2 2"]}, recipe={"name": "local"})],
        ConfigError, "only its members' own scripts have",
    ),
}  # fmt: skip


@asynccontextmanager
async def offering(
    directory: Path, configs: Mapping[bytes, bytes], patch: pytest.MonkeyPatch
) -> AsyncIterator[NodeConfig]:
    """A node's config whose bootstrap offers these runs."""
    network = Network(latency_seconds=0.01)
    me, bootstrap = network.transport(ME), network.transport(BOOTSTRAP)

    def answer(peer: bytes, question: questions.Question) -> questions.Answer:
        if isinstance(question, questions.AskRuns):
            return questions.Runs(tuple(questions.RunInfo(run_id, "x", 9, 9) for run_id in configs))
        assert isinstance(question, questions.AskConfig)
        return questions.Config(configs[question.run_id])

    async def opened(*_: object) -> object:
        return me

    patch.setattr(launch.Opened, "network", opened)
    patch.setattr(launch, "set_up", lambda config: logging.getLogger("p2ptrain"))
    await questions.serve(bootstrap, answer)
    yield NodeConfig(
        network=NetworkConfig(bootstrap=(network.address(BOOTSTRAP),)),
        storage=StorageConfig(directory=str(directory / "node")),
        http=HttpConfig(enabled=False),
        limits=LimitsConfig(nice=0),
    )
    for node in list(network.nodes.values()):
        await node.close()


@pytest.mark.parametrize(("offered", "kind", "why"), OFFERS.values(), ids=OFFERS)
@skipping_time
async def test_whatever_a_bootstrap_offers_a_supervisor_starts_the_node_again(
    offered: list[bytes], kind: type[P2ptrainError], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = {digest("run id", each): each for each in offered}
    async with offering(tmp_path, configs, monkeypatch) as config:
        with pytest.raises(OfferError, match=why) as caught:
            await launch.follow(JoinOrder(config=config))
        assert not any(isinstance(caught.value, each) for each in STATUSES), "only these are not started again"
        if len(configs) == 1:
            [run_id] = configs
            with pytest.raises(kind, match=why):  # of the run that the owner has named
                await launch.follow(JoinOrder(config=config, wanted=run_id.hex()))
