"""Compiled layers: how often, what becomes of what cannot be compiled, and the same numbers."""

from __future__ import annotations

import logging
import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from p2ptrain.config import DeviceConfig, ModelConfig
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.data.packing import PLAIN, Packing
from p2ptrain.errors import DeviceError
from p2ptrain.models.built_in import Transformer, initialise
from p2ptrain.share import Share
from p2ptrain.train.compiling import Compiling
from p2ptrain.train.live import LiveModel
from tests.helpers.exact_numbers import integers
from tests.helpers.trainer import ONE_THREAD, TINY, Trainer, embedded, make

pytestmark = [  # torch's own, while it compiles
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]
MODEL = ModelConfig.model_validate(TINY | {"layers": 3, "sequence_length": 16})
CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """Has torch only trace what it compiles, and counts that."""
    torch.compiler.reset()
    made = CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=made))
    return made


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets torch compile a function, and no layers."""
    torch.compiler.reset()

    def compile_graph(graph: Any, inputs: list[Any]) -> Any:
        if len(inputs) > 1:
            raise RuntimeError("no such kernel\nmore")
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compile_graph))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    return embedded(tmp_path_factory.mktemp("corpus") / "data")


def live_model(checkpointing: bool, packing: Packing, *, is_compiled: bool) -> LiveModel:
    model = Transformer(MODEL, checkpointing=checkpointing)
    initialise(model, 1)
    if is_compiled:
        model.compile_layers()
    return LiveModel(model, autocast=False, packing=packing)


@pytest.mark.parametrize("packing", [PLAIN, Packing(document_end=3)], ids=["together", "apart"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_passes_of_all_sizes_are_compiled_three_times_and_are_what_they_were(
    checkpointing: bool, packing: Packing, counter: CompileCounterWithBackend
) -> None:
    """All layers at once: for the first size, for any, and for a single sequence."""
    lives = [live_model(checkpointing, packing, is_compiled=is_compiled) for is_compiled in (False, True)]
    times = []
    for sequences in (8, 8, 5, 3, 1, 4, 1, 8, 7, 2, 9, 16):
        batch = torch.from_numpy(
            (integers(sequences, sequences * 17) % np.uint64(256)).astype(np.int64).reshape(-1, 17)
        )
        for live in lives:
            live.gradient.zero_()
            live.loss(batch).backward()
        assert torch.equal(lives[0].gradient, lives[1].gradient)
        times.append(counter.frame_count)
    assert times == [1, 1, 2, 2, *([3] * 8)]


def made(compile: Any, device: torch.device = CPU, *, is_built_in: bool = True) -> Compiling:  # noqa: A002
    return Compiling(Transformer(MODEL), DeviceConfig(compile=compile), device, is_built_in=is_built_in)


def test_a_card_compiles_the_built_in_model_unless_its_owner_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: set[int] = set()
    monkeypatch.setattr(Transformer, "compile_layers", lambda model: compiled.add(id(model)))
    monkeypatch.setattr(torch, "compile", lambda function: lambda *_: None)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: None)
    for setting, on in (("auto", [False, True, False]), (True, [True] * 3), (False, [False] * 3)):
        found = made(setting), made(setting, CARD), made(setting, CARD, is_built_in=False)
        assert [each.is_on for each in found] == [id(each.model) in compiled for each in found] == on


def test_without_a_compiler_a_card_trains_on_with_a_line(caplog: pytest.LogCaptureFixture) -> None:
    """Here there is no card."""
    assert not made("auto", CARD).is_on
    assert "training on cuda:0 goes on without torch.compile, which takes longer: Torch not compiled" in caplog.text
    with pytest.raises(DeviceError, match=r"Torch not compiled with CUDA enabled\. Install a C"):
        made(True, CARD)


def test_layers_are_compiled_before_the_first_step_and_only_then(
    dataset: TokenDataset, counter: CompileCounterWithBackend, caplog: pytest.LogCaptureFixture
) -> None:
    """What is contributed is the same; a look at the agreed weights is not compiled."""
    caplog.set_level(logging.INFO, "p2ptrain.train")
    plain = make(dataset, "local")
    trainer = Trainer(plain.run, ONE_THREAD.model_copy(update={"compile": True}), dataset)
    began = counter.frame_count
    assert plain.evaluate(3) == trainer.evaluate(3)
    assert counter.frame_count == began
    for number in range(2):
        for one in (plain, trainer):
            one.train(Share(number, 0, 1))
        assert plain.contribute(number) == trainer.contribute(number)
    assert counter.frame_count == began + 1
    begins, ends = [each.getMessage() for each in caplog.records if each.name == "p2ptrain.train"]
    assert begins == "compiling the layers for cpu before the first step"
    assert re.fullmatch(r"the layers are compiled: the first pass took \d+\.\d s", ends)


@pytest.mark.usefixtures("broken")
def test_layers_that_cannot_be_compiled_are_not_unless_their_owner_wants_nothing_else(
    dataset: TokenDataset, caplog: pytest.LogCaptureFixture
) -> None:
    plain = make(dataset, "local")
    wanted, trainer = (Trainer(plain.run, ONE_THREAD.model_copy(update={"compile": True}), dataset) for _ in range(2))
    with pytest.raises(DeviceError, match=r"torch.compile does not work here: backend='compile_graph' raised: Runtime"):
        wanted.train(Share(0, 0, 1))
    trainer.compiling.is_wanted = False  # as on a card
    for number in range(2):
        for one in (plain, trainer):
            one.train(Share(number, 0, 1))
        assert plain.contribute(number) == trainer.contribute(number)
    assert caplog.text.count("goes on without torch.compile") == 1
    assert "takes longer: backend='compile_graph' raised: RuntimeError: no such kernel" in caplog.text
    assert not trainer.compiling.is_on
