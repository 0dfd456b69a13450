"""Which run a script may take part in."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from p2ptrain.config import DataConfig, ModelConfig, RecipeConfig, RunConfig, WorldConfig
from p2ptrain.daemon import script
from p2ptrain.daemon.script import run_of as run_and_said
from p2ptrain.daemon.script_loop import ScriptLoop
from p2ptrain.errors import ConfigError, DataError
from p2ptrain.loop.channel import Answer, Begin, Request, TakeHeldOut, TakeSequences
from p2ptrain.models.kinds import frozen_digest
from tests.helpers.hf_models import hf_model
from tests.helpers.net import skipping_time

WEIGHT = (("weight", (3, 4)),)
FROZEN, OTHERS = "ab" * 32, "cd" * 32


def check(begin: Begin, run: RunConfig) -> None:
    ScriptLoop(None, None, begin, Path()).check(run)  # type: ignore[arg-type]  # nothing is said yet


def begun(frozen: str = "", **said: Any) -> Begin:
    return Begin(False, {"name": "mine", **said}, {}, WEIGHT, frozen)


def run_of(begin: Begin) -> RunConfig:
    return run_and_said(begin)[1]


def test_a_node_whose_steps_a_script_takes_has_no_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also a region's world node: it gets the owner's settings by the environment."""
    for name, value in {"SHARD": "true", "NNODES": "2", "RENDEZVOUS": "/ip4/127.0.0.1/tcp/1", "PROCESSES": "2"}.items():
        monkeypatch.setenv(f"P2PTRAIN_DEVICE__{name}", value)
    orders = list[Any]()
    monkeypatch.setattr(script.launch, "take_part", lambda order, loop: orders.append(order))
    begin = Begin(True, {}, {"storage.directory": str(tmp_path)}, WEIGHT)
    script.take_part(begin, None, None)  # type: ignore[arg-type]  # nothing is said yet
    device = orders[0].config.device
    assert (device.name, device.processes, device.is_sharded, device.nnodes) == ("cpu", 1, False, 1)


def test_a_run_names_what_does_not_train() -> None:
    assert run_of(begun(FROZEN)).model.frozen == FROZEN
    assert run_of(begun()).model.frozen == ""


@pytest.mark.parametrize(("mine", "theirs"), [(OTHERS, FROZEN), ("", FROZEN), (OTHERS, "")])
def test_a_script_with_other_frozen_parameters_than_the_run_s_is_refused(mine: str, theirs: str) -> None:
    run = run_of(begun(theirs))
    check(begun(theirs), run)
    digests = f"digest {mine[:16] or 'none'} instead of {theirs[:16] or 'none'}"
    with pytest.raises(ConfigError, match=rf"do not train are others than in the run \({digests}\)\. Load the same"):
        check(begun(mine), run)


@pytest.mark.parametrize("model", ["1m", 5])
def test_a_model_that_is_no_table_is_named(model: Any) -> None:
    with pytest.raises(ConfigError, match="the script: model: "):
        run_of(begun(model=model))


def test_a_run_whose_steps_are_a_plug_in_s_is_refused() -> None:
    run = run_of(begun(recipe={"plugin": "p2ptrain-noise 0.1.0"}))
    with pytest.raises(ConfigError, match=r"recipe\.plugin: the run's steps are those of the plug-in p2ptrain-noise"):
        check(begun(), run)


def test_a_region_is_no_run_for_a_script() -> None:
    dense = RecipeConfig(transform="none", k=64**2, value_bits=8)
    run = RunConfig(name="region", recipe=dense, world=WorldConfig(run="ab" * 32))
    with pytest.raises(ConfigError, match=r"world\.run: the run is a region, .* Take part with `p2ptrain join`"):
        check(begun(), run)


def test_the_digest_of_frozen_parameters_is_of_names_types_shapes_and_numbers() -> None:
    one, two = torch.arange(6.0).view(2, 3), torch.tensor(1.5, dtype=torch.bfloat16)
    named: list[tuple[str, Tensor]] = [("one", one), ("two", two)]
    found = frozen_digest(named)
    assert frozen_digest(reversed(named)) == found, "their order in the model is its author's"
    assert frozen_digest([("one", one.T.contiguous().T), ("two", two)]) == found
    changed = one.clone()
    changed[1, 2] += 1e-6
    others: list[list[tuple[str, Tensor]]] = [
        [("other", one), ("two", two)], [("one", one.T), ("two", two)], [("one", one), ("two", two.float())],
        [("one", changed), ("two", two)], [("one", one)],
    ]  # fmt: skip
    assert len({found, *map(frozen_digest, others)}) == 1 + len(others)
    assert frozen_digest([]) == ""
    with pytest.raises(ConfigError, match="bias is on the device meta, and has no numbers"):
        frozen_digest(nn.Linear(2, 2, device="meta").named_parameters())


@pytest.mark.parametrize(
    ("is_masked", "documents", "model"),
    [
        (True, "together", ModelConfig()),
        (False, "apart", ModelConfig()),
        (False, "together", hf_model("bert", vocab_size=257)),
    ],
)
async def test_batches_that_cannot_tell_what_is_learned_are_refused(
    is_masked: bool, documents: Any, model: ModelConfig
) -> None:
    dataset = SimpleNamespace(is_masked=is_masked)
    run = RunConfig(name="mine", data=DataConfig(documents=documents), model=model)
    worker = SimpleNamespace(learner=SimpleNamespace(dataset=dataset, trained_on=dataset))
    daemon: Any = SimpleNamespace(run=run)
    loop = ScriptLoop(None, None, begun(), Path())  # type: ignore[arg-type]  # nothing is said yet
    loop._worker = worker  # type: ignore[assignment]
    with pytest.raises(DataError, match=r"and a plain batch can carry neither\. Load and mask the data in the script"):
        await loop._read(range(2), daemon)


async def asked(what: Request, learner: Any, daemon: Any) -> Answer:
    """What a script's request comes to."""
    loop = ScriptLoop(None, None, begun(), Path())  # type: ignore[arg-type]  # nothing is said yet
    loop._worker, loop._daemon = SimpleNamespace(learner=learner), daemon  # type: ignore[assignment]
    return await loop._do(1, what)


async def test_a_script_that_names_no_data_gets_no_batches_of_a_run_whose_nodes_bring_theirs() -> None:
    closed = {"policy": "allowlist", "keys": ["ab" * 32]}
    run = RunConfig.model_validate({"name": "mine", "data": {"source": "own"}, "admission": closed})
    with pytest.raises(
        ConfigError, match=r"this script has none\. Give the directory .* or read batches from a loader"
    ):
        await asked(TakeSequences(0), SimpleNamespace(own=None), SimpleNamespace(run=run))


@skipping_time
async def test_held_out_sequences_that_nobody_sends_are_an_error_and_hold_nothing() -> None:
    needed = list[int]()

    async def never(count: int) -> None:
        needed.append(count)
        await asyncio.Event().wait()

    data = SimpleNamespace(
        held_out_sequences=lambda length: 8, need_held_out=lambda count, length: needed.append(count)
    )
    driver = SimpleNamespace(edges=SimpleNamespace(fetching=SimpleNamespace(held_out=never)))
    daemon = SimpleNamespace(run=RunConfig(name="mine"), driver=driver)
    with pytest.raises(DataError, match="no connected peer has sent the held-out sequences in time"):
        await asked(TakeHeldOut(0), SimpleNamespace(dataset=data), daemon)
    assert needed == [8, 0]
