"""The estimated memory of a run, against the measured one."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from p2ptrain.config import MODEL_PRESETS, ModelConfig, NodeConfig, RecipeConfig, RunConfig
from p2ptrain.data.dataset import manifest_digest
from p2ptrain.models import loss as loss_module
from p2ptrain.models.kinds import parameter_count
from p2ptrain.share import Share
from p2ptrain.train import memory as memory_module
from p2ptrain.train.memory import (
    CARD_SHARE,
    PROCESS_BYTES,
    WITHIN_OPERATIONS,
    PassSettings,
    activations,
    fitting,
    need_of,
)
from tests.helpers.live_memory import peak_of_pass
from tests.helpers.trainer import embedded, make

BOTH = (False, True)
PROGRAM_GROWS_BYTES = 35 * 10**6  # torch's libraries, as they are used for the first time
SHAPES = [
    *({"preset": name} for name in MODEL_PRESETS if name != "1b"),
    {"dim": 128, "layers": 5, "heads": 4, "kv_heads": 4, "ffn_dim": 512, "sequence_length": 512, "vocab_size": 8_192},
    {"dim": 512, "layers": 3, "heads": 8, "ffn_dim": 1_024, "sequence_length": 256, "vocab_size": 50_304},
]
PROGRAM = """
import ctypes, json, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import numpy as np
from p2ptrain.config import DeviceConfig, RunConfig
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.share import Share
from tests.helpers.trainer import Trainer

def most(reset):
    if reset:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))

run, device, data, digest, rounds, audits = json.loads(sys.argv[1])
dataset = TokenDataset.open(Path(data), digest)
before = most(True)

def live():
    trainer = Trainer(RunConfig.model_validate(run), DeviceConfig(**device), dataset)
    for number in range(rounds):
        trainer.train(Share(number, 0, 1))
        payload = trainer.contribute(number)
        trainer.apply(number, [payload] * 10, {number: payload})
        if audits:
            weights = trainer.replica.weights_before([[payload] * 10])
            drawn = [trainer.positions_for(Share(each, 0, 1))[:16] for each in (number, number + 1)]
            length = trainer.run.model.sequence_length
            own, others = ([(part, dataset.batch(part, length)) for part in np.split(each, 2)] for each in drawn)
            trainer.audit(number, weights, [payload] * 10, own, others)

with ThreadPoolExecutor(1) as thread:  # as in a daemon
    thread.submit(live).result()
print(json.dumps([before, most(False)]))
"""


@pytest.mark.parametrize(("autocast", "checkpointing"), list(itertools.product(BOTH, BOTH)))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_formula_of_a_pass_is_what_is_alive_in_it(
    shape: dict[str, Any], autocast: bool, checkpointing: bool
) -> None:
    """Within a tenth of all that a trainer takes: weights, gradient and residual besides."""
    model, passes = ModelConfig.model_validate(shape), PassSettings(autocast, checkpointing)
    besides = 3 * 4 * parameter_count(model)
    for sequences in (1, 8):
        alive = peak_of_pass(model, sequences, passes)
        assert activations(model, sequences, passes) + besides == pytest.approx(alive + besides, rel=0.1)


ON_AN_H100: dict[str, int] = {  # peaks of a pass beside weights and gradient, measured with torch 2.11 and CUDA 13.0
    "32 fp32": 394_986_496,
    "16 fp32": 197_657_600,
    "32 bf16": 260_016_640,
    "32 fp32 layers=4": 730_924_032,
    "32 bf16 layers=4": 473_272_832,
    "32 fp32 ffn_dim=1536": 647_693_312,
    "32 bf16 ffn_dim=1536": 375_589_888,
    "32 fp32 dim=512 heads=8 kv_heads=4": 546_636_288,
    "32 bf16 dim=512 heads=8 kv_heads=4": 407_964_160,
    "32 fp32 kv_heads=4": 394_986_496,
    "32 bf16 kv_heads=4": 268_667_392,
    "8 fp32 sequence_length=1024": 395_183_104,
    "8 bf16 sequence_length=1024": 260_213_248,
    "32 fp32 vocab_size=50304": 1_487_470_592,
    "32 bf16 vocab_size=50304": 1_392_052_224,
    "32 fp32 vocab_size=8192": 906_592_768,
    "32 bf16 vocab_size=8192": 792_300_032,
    "32 fp32 checkpointing": 235_406_336,
    "32 bf16 checkpointing": 148_506_624,
    "32 bf16 checkpointing layers=4": 165_283_840,
}


@pytest.mark.parametrize("case", ON_AN_H100)
def test_the_formula_of_a_pass_is_what_an_h100_took(case: str) -> None:
    sequences, precision, *rest = case.split()
    shape = {"dim": 256, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 768, "sequence_length": 256}
    changes = {name: int(value) for name, value in (each.split("=") for each in rest if "=" in each)}
    model = ModelConfig.model_validate({"vocab_size": 256} | shape | changes)
    passes = PassSettings(precision == "bf16", "checkpointing" in rest, device="cuda", has_programs=False)
    told = WITHIN_OPERATIONS * activations(model, int(sequences), passes)
    assert -0.02 <= told / ON_AN_H100[case] - 1 <= 0.08


@pytest.mark.parametrize("autocast", BOTH)
def test_the_formula_of_a_loss_in_a_program_is_what_is_alive_in_it(
    autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model whose vocabulary takes nearly all, on a card that keeps logits as they are computed."""
    monkeypatch.setattr(loss_module, "is_usable", lambda device: True)
    monkeypatch.setattr(loss_module, "program", lambda: defaultdict(lambda: lambda *_, **__: None))
    monkeypatch.setattr(loss_module, "LOGITS_BYTES", loss_module.DEVICE_LOGITS_BYTES)
    shape = {"dim": 128, "layers": 1, "heads": 4, "ffn_dim": 128, "sequence_length": 256, "vocab_size": 50_304}
    model, passes = ModelConfig.model_validate(shape), PassSettings(autocast, device="cuda")
    for sequences in (1, 32):
        alive = peak_of_pass(model, sequences, passes)
        assert activations(model, sequences, passes) == pytest.approx(alive, rel=0.1)


@pytest.mark.parametrize(
    ("room", "expected"), [(10**12, 64), (1.0, 64), (0.99, 32), (0.51, 32), (0.49, 16), (0.1, 4), (0.0, 0)]
)
def test_a_card_takes_as_many_sequences_of_a_step_at_a_time_as_fit(
    room: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In equal passes. The room is that share of what all of a step's take, beside what is always there."""
    run = RunConfig.model_validate({"name": "card", "recipe": {"sequences_per_pass": 16, "passes_per_step": 4}})
    whole, nothing = (
        need_of(run, PassSettings(device="cuda", sequences_per_pass=count, audits=True)) for count in (64, 1)
    )
    free = int((nothing.trainer - nothing.activations + room * whole.activations) / CARD_SHARE) + 1
    monkeypatch.setattr(memory_module, "find_device", lambda config: (torch.device("cuda:0"), False))
    monkeypatch.setattr(memory_module, "is_usable", lambda device: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10**12))
    open_config = NodeConfig.model_validate({"device": {"compile": False}})
    chosen = NodeConfig.model_validate({"device": {"sequences_per_pass": 8}})
    assert fitting(run, open_config).device == open_config.device.model_copy(update={"sequences_per_pass": expected})
    assert fitting(run, chosen) == chosen
    private = NodeConfig.model_validate({"privacy": {"epsilon": 1}})
    assert fitting(run, private) == private


@pytest.mark.parametrize(("name", "took"), [("distro", 25_406_500_000), ("local", 26_548_400_000)])
def test_compiled_layers_take_what_they_took_on_an_h200(name: str, took: int) -> None:
    """benchmarks/figures/gpu-h200.json; the vocabulary is larger than that of the bytes that a run's config knows."""
    shape = {"dim": 768, "layers": 12, "heads": 12, "kv_heads": 12, "ffn_dim": 2_048, "sequence_length": 1_024}
    recipe = RecipeConfig(name=name, sequences_per_pass=64)
    run = RunConfig(name="told", recipe=recipe).model_copy(
        update={"model": ModelConfig.model_validate(shape | {"vocab_size": 50_304})}
    )
    told = need_of(run, PassSettings(True, device="cuda", is_compiled=True)).trainer
    assert told == pytest.approx(took, rel=0.08)


def _took(
    tmp_path: Path, run: dict[str, Any], device: dict[str, Any], rounds: int = 2, audits: bool = False
) -> tuple[int, int]:
    """Measures a process's memory before it has a trainer, and its peak, with one thread and rounds of ten."""
    if sys.platform != "linux":
        pytest.skip("asks Linux how much memory it takes")
    dataset = embedded(tmp_path / "data")
    name = manifest_digest(dataset.manifest_bytes())
    argument = json.dumps([run, device, str(dataset.directory), name, rounds, audits])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, argument], check=True, stdout=subprocess.PIPE, timeout=1_000,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    before, most = json.loads(done.stdout)
    return before, most


def _compare(
    tmp_path: Path,
    preset: str,
    recipe: str,
    autocast: bool,
    checkpointing: bool,
    half_state: bool = False,
    rounds: int = 2,
    **settings: Any,
) -> None:
    run: dict[str, Any] = {"name": "memory", "model": {"preset": preset}, "recipe": {"name": recipe} | settings}
    if recipe == "local":
        run["recipe"]["local_steps"] = 2
    device = {"name": "cpu", "threads": 1, "autocast": "bf16" if autocast else "off", "checkpointing": checkpointing}
    device["half_state"] = half_state
    need = need_of(RunConfig.model_validate(run), PassSettings(autocast, checkpointing, half_state=half_state))
    before, most = _took(tmp_path, run, device, rounds)
    told = before + PROGRAM_GROWS_BYTES + need.program - PROCESS_BYTES + need.trainer
    assert told == pytest.approx(most, rel=0.1)


@pytest.mark.parametrize(
    ("recipe", "autocast", "checkpointing", "half_state"),
    [("distro", False, True, False), ("local", True, False, False), ("local", False, True, True)],
)
def test_a_run_takes_the_memory_that_it_is_said_to_take(
    recipe: str, autocast: bool, checkpointing: bool, half_state: bool, tmp_path: Path
) -> None:
    _compare(tmp_path, "5m", recipe, autocast, checkpointing, half_state)


@pytest.mark.timeout(300)  # two processes, each of which trains
def test_audits_take_the_memory_that_they_are_said_to_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside passes so small that the difference shows; how much malloc keeps of what is freed differs by 60 MB."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "131072")  # of blocks larger than this, nothing
    recipe = {"name": "local", "local_steps": 2, "sequences_per_pass": 1, "passes_per_step": 8, "momentum": "1/2"}
    run = {"name": "memory", "model": {"preset": "5m"}, "recipe": recipe}
    (without, few), (audited, most) = (
        _took(tmp_path / name, run, {"name": "cpu", "threads": 1, "autocast": "off"}, audits=audits)
        for name, audits in (("without", False), ("audited", True))
    )
    needs = [need_of(RunConfig.model_validate(run), PassSettings(audits=audits)).trainer for audits in BOTH]
    assert needs[1] - needs[0] == pytest.approx((most - audited) - (few - without), rel=0.25)


@pytest.mark.parametrize("bits", [4, 16, 24])
def test_a_run_without_compression_takes_the_memory_that_it_is_said_to_take(bits: int, tmp_path: Path) -> None:
    dense = {"k": 64**2, "transform": "none", "value_bits": bits, "decay": 0}
    _compare(tmp_path, "5m", "local", False, False, **dense)


@pytest.mark.parametrize(("half_state", "bytes_a_parameter"), [(False, 12.5), (True, 8.5)])
def test_half_of_the_private_state_takes_half_its_memory(half_state: bool, bytes_a_parameter: float) -> None:
    """A hundred million parameters; the embedding, which takes half a byte of them all, has a second moment, too."""
    run = RunConfig.model_validate({"name": "memory", "model": {"preset": "100m"}, "recipe": {"name": "local"}})
    need = need_of(run, PassSettings(half_state=half_state))
    assert bytes_a_parameter - 0.5 <= (need.residual + need.optimizer) / need.parameters <= bytes_a_parameter


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["distro", "demo", "local"])
@pytest.mark.parametrize("autocast", BOTH)
@pytest.mark.parametrize("preset", ["1m", "10m", "30m"])
def test_every_preset_takes_the_memory_that_it_is_said_to_take(
    preset: str, autocast: bool, recipe: str, tmp_path: Path
) -> None:
    _compare(tmp_path, preset, recipe, autocast, checkpointing=False)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "autocast"), [("distro", False), ("local", True)])
def test_the_preset_of_a_hundred_million_takes_the_memory_that_it_is_said_to_take(
    recipe: str, autocast: bool, tmp_path: Path
) -> None:
    _compare(tmp_path, "100m", recipe, autocast, checkpointing=False, rounds=1)


@pytest.mark.parametrize("name", ["distro", "demo", "local", "momentum", "diloco", "fragments"])
def test_the_disk_has_room_for_what_a_checkpoint_holds(name: str, tmp_path: Path) -> None:
    """For the trainer's file, and for the state that peers are served from."""
    trainer = make(embedded(tmp_path), name)
    for number in range(1, 4):
        trainer.train(Share(number, 0, 1))
        payload = trainer.contribute(number)
        trainer.apply(number - 1, [payload], {number: payload})
    trainer.save(tmp_path / "saved")
    written = (tmp_path / "saved").stat().st_size + len(trainer.state_bytes())
    need = need_of(trainer.run)
    room = need.disk(2, 0, 0) - need.disk(1, 0, 0)
    header = 10_000
    assert written <= room + header
    assert room <= 2 * written
