"""A card that fails while a node works: the node ends with the reason, and goes on from its disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from p2ptrain.config import NodeConfig, RunConfig
from p2ptrain.daemon import launch
from p2ptrain.errors import DeviceError, TooLargeError
from p2ptrain.exact import cards
from p2ptrain.node.home import Home
from tests.helpers.memory_swarm import swarm
from tests.helpers.net import skipping_time, until

LOST = torch.AcceleratorError("CUDA error: unspecified launch failure\nCUDA kernel errors might be reported later")


def lost(*_: Any, **__: Any) -> Any:
    raise LOST


def in_a_step(worker: Any) -> tuple[Any, str]:
    return worker.learner, "train"


def in_an_apply(worker: Any) -> tuple[Any, str]:
    return worker.replica, "apply"


@pytest.mark.parametrize("where", [in_a_step, in_an_apply])
@skipping_time
async def test_a_node_ends_with_its_card_and_goes_on_from_its_disk_with_the_same_bits(
    tmp_path: Path, where: Callable[[Any], tuple[Any, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with swarm(tmp_path) as made:
        *others, victim = made.nodes
        await made.reach(6)
        with monkeypatch.context() as patch:
            owner, name = where(victim.workshop.worker)
            patch.setattr(owner, name, lost)
            await until(victim.life.done)
        was = victim.applied
        error = victim.life.exception()
        assert isinstance(error, ExceptionGroup)
        found = cards.failure_of(error)
        assert found is not None and found.problem.endswith("has failed: CUDA error: unspecified launch failure")
        made.network.kill(victim.key)
        await made.reach(was + 8, *others)
        await victim.start()
        assert victim.applied <= was
        await made.reach(made.newest + 3)
        made.compare(15)


def test_the_process_of_a_node_whose_card_fails_ends_with_that_line() -> None:
    async def fail() -> None:
        raise LOST

    async def life() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            group.create_task(asyncio.Event().wait())

    for work in (life, fail):
        with pytest.raises(
            DeviceError, match=r"^the graphics card has failed: CUDA error: unspecified launch failure\. S"
        ):
            launch._run(work())


def test_another_mistake_in_a_task_keeps_its_traceback() -> None:
    async def life() -> None:
        raise RuntimeError("a mistake of ours")

    with pytest.raises(RuntimeError, match="a mistake of ours"):
        launch._run(life())


@pytest.mark.parametrize(("name", "lines"), [("auto", 1), ("cpu", 0)])
def test_a_start_says_that_torch_cannot_use_the_card(
    name: str, lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launch, "why_unusable", lambda: "the driver is too old")
    config = NodeConfig.model_validate({"device": {"name": name}, "storage": {"directory": str(tmp_path)}})
    launch.make_it_fit(RunConfig(name="small"), Home(config))
    said = [each.getMessage() for each in caplog.records if "torch" in each.getMessage()]
    assert said == ["torch cannot use the graphics card: the driver is too old"] * lines


def test_a_card_that_the_owner_named_and_torch_cannot_use_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = NodeConfig.model_validate({"device": {"name": "cuda"}, "storage": {"directory": str(tmp_path)}})
    with pytest.raises(DeviceError, match="device cuda:0 not found") as raised:
        launch.make_it_fit(RunConfig(name="small"), Home(config))
    assert not isinstance(raised.value, TooLargeError), "a supervisor may try again"
