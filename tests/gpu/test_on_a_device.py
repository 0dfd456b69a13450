"""The exact path and the trainer on a GPU, against the CPU; GPU_TESTS_DEVICE=cpu tries the tests themselves."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu.compiling import COMPILING, compiled
from p2ptrain.config import DeviceConfig, RecipeConfig, RunConfig
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.exact import aggregate
from p2ptrain.exact.aggregate import apply_payloads
from p2ptrain.exact.codec import Contribution, Packed, PayloadFormat, pack
from p2ptrain.exact.exactness import check_exactness
from p2ptrain.exact.kernels import launches
from p2ptrain.exact.kernels.launches import OnCard
from p2ptrain.exact.root import state_root
from p2ptrain.exact.schedule import Terms
from p2ptrain.exact.selection import largest
from p2ptrain.exact.transform import Layout
from p2ptrain.models import built_in as model_module
from p2ptrain.node.gpu_use import meter_of
from p2ptrain.share import Share
from p2ptrain.train.memory import CUDA_LIBRARIES_BYTES, PassSettings, need_of
from p2ptrain.train.residual import Residual
from tests.helpers.exact_numbers import contribution, weights
from tests.helpers.golden import FAMILY, SHAPES, family_root, flat_weights, golden, golden_cases, golden_root, parts
from tests.helpers.trainer import RECIPES, TINY, Trainer, embedded, make, swarm_round

DEVICE = torch.device(os.environ.get("GPU_TESTS_DEVICE") or "cuda")
if DEVICE.type == "cuda" and DEVICE.index is None:
    DEVICE = torch.device("cuda", 0)  # a limit of memory can only be set with an index
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE.type == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none"
    ),
]
SIDE = 2_048 if DEVICE.type == "cuda" else 256  # a processor refuses no memory, and takes long
CUDA_ALONE = pytest.mark.skipif(DEVICE.type != "cuda", reason="of a CUDA device; the CPU has tests of its own")


def on_device(**settings: object) -> DeviceConfig:
    """With one thread: each trainer sets how many torch uses."""
    return DeviceConfig.model_validate(
        {"name": str(DEVICE), "threads": 1, "autocast": "off", "compile": False} | settings
    )


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    return embedded(tmp_path_factory.mktemp("corpus") / "data")


@pytest.fixture(autouse=True)
def _compiling(record_property: Callable[[str, object], None]) -> Iterator[None]:
    before = compiled().seconds
    yield
    record_property(COMPILING, compiled().seconds - before)


@contextmanager
def memory_of_bytes(size: int) -> Iterator[None]:
    """The device has so much more than is taken now, and really refuses the rest; on a CPU nothing is refused."""
    if DEVICE.type != "cuda":
        yield
        return
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    allowed = min(1.0, (torch.cuda.memory_reserved(DEVICE) + size) / total)
    torch.cuda.set_per_process_memory_fraction(allowed, DEVICE)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)


@contextmanager
def tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def chosen_cases() -> list[str]:
    """Picks one of the golden cases of each recipe, outer rule, bits and transform; all of them run on the CPU."""
    wanted = [each for each in golden_cases() if "reach" in each or "peers=7" in each]
    wanted = [each for each in wanted if "reach" not in each or "peers=40" in each]
    few = [each for each in wanted if " k=8 " not in each and "chunk=8 " not in each]
    return [*few, *(each for each in golden_cases() if "peers=40" in each and "mean chunk=64 k=32" in each)]


@pytest.mark.parametrize("case", chosen_cases())
def test_it_gives_the_golden_state_roots(case: str) -> None:
    assert golden_root(golden_cases()[case], DEVICE) == golden()[case]


@pytest.mark.parametrize("name", [*FAMILY, "trimmed", "trimmed coordinates", "krum", "clipped"])
def test_it_gives_the_golden_state_roots_of_the_family(name: str) -> None:
    assert family_root(name, 7, DEVICE) == golden()[f"{name} peers=7"]


def test_it_is_exact_also_where_tf32_is_allowed() -> None:
    check_exactness(RecipeConfig(), DEVICE)
    with tf32():
        check_exactness(RecipeConfig(), DEVICE)
        for case in chosen_cases()[::6]:
            assert golden_root(golden_cases()[case], DEVICE) == golden()[case]


@pytest.mark.parametrize("name", ["distro", "demo", "local"])
def test_without_memory_it_leaves_an_update_to_the_cpu_and_the_bits_are_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory for the weights and hardly more: votes and blocks are refused by the device itself."""
    shapes = [(SIDE, SIDE), *SHAPES]
    recipe = RecipeConfig(name=name, outer="normalised", weight_decay=Fraction(1, 10))
    layout = Layout(shapes, recipe.chunk)
    form = PayloadFormat.of(layout, recipe)
    payloads = [pack(contribution(peer, layout, recipe), form) for peer in range(5)]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    monkeypatch.setattr(launches, "is_usable", lambda device: False)
    roots, real, used = [], aggregate.where_it_fits, set()

    def noted(work: Callable[[torch.device], Any], device: torch.device) -> Any:
        def note_and_work(where: torch.device) -> Any:
            used.add(where.type)
            return work(where)

        return real(note_and_work, device)

    monkeypatch.setattr(aggregate, "where_it_fits", noted)
    for device, size in ((torch.device("cpu"), 2**40), (DEVICE, 2**40), (DEVICE, 2**22), (DEVICE, 2**10)):
        flat = weights(7, (sum(sizes),)).to(device)
        views = [part.view(shape) for part, shape in zip(torch.split(flat, sizes), shapes, strict=True)]
        used.clear()
        with memory_of_bytes(size):
            apply_payloads(layout, recipe, [Packed(each, form) for each in payloads], Terms(Fraction(1, 3)), views)
        fits = size == 2**40
        assert used == ({device.type} if fits else {DEVICE.type, "cpu"}), "where there is no memory, the CPU took over"
        roots.append(state_root(flat).hex())
    assert len(set(roots)) == 1


@pytest.mark.parametrize(("name", "chunk"), [("distro", 32), ("demo", 64), ("local", 32), ("local", 64), ("local", 16)])
def test_its_programs_give_the_bits_of_torch_and_leave_an_update_to_it_without_memory(name: str, chunk: int) -> None:
    """For chunks of 16 there are no programs."""
    shapes = [(SIDE, SIDE), *SHAPES]
    recipe = RecipeConfig.model_validate({"name": name, "chunk": chunk} | ({"k": 32} if chunk == 16 else {}))
    layout = Layout(shapes, recipe.chunk)
    form = PayloadFormat.of(layout, recipe)
    payloads = [Packed(pack(contribution(peer, layout, recipe), form), form) for peer in range(5)]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    check_exactness(recipe, DEVICE)
    assert launches.is_usable(DEVICE) == (DEVICE.type == "cuda"), launches.refused
    roots = []
    for device, size in ((torch.device("cpu"), 2**40), (DEVICE, 2**40), (DEVICE, 2**10)):
        flat = weights(7, (sum(sizes),)).to(device)
        views = [part.view(shape) for part, shape in zip(torch.split(flat, sizes), shapes, strict=True)]
        with memory_of_bytes(size):
            apply_payloads(layout, recipe, payloads, Terms(Fraction(1, 3)), views)
        roots.append(state_root(flat.cpu()).hex())
    assert len(set(roots)) == 1


def in_memory(made: Contribution | OnCard) -> Contribution:
    if isinstance(made, Contribution):
        return made
    exponents = None if made.exponents is None else made.exponents.cpu().numpy()
    return Contribution(made.indices.cpu().numpy().view(np.uint16), made.values.cpu().numpy(), exponents)


def test_it_chooses_the_same_coefficients() -> None:
    """As magnitudes: of equal ones at the edge either may be taken."""
    coefficients = weights(9, (3_000, 4_096))
    magnitudes = []
    for device in (torch.device("cpu"), DEVICE):
        indices = torch.from_numpy(largest(coefficients.to(device), 32).astype("int64"))
        assert (indices.diff(dim=1) > 0).all()
        magnitudes.append(coefficients.abs().gather(1, indices).sort(dim=1).values)
    assert torch.equal(*magnitudes)


def _without_ties(drawn: torch.Tensor) -> torch.Tensor:  # [chunks, area]
    """Returns numbers of the same order and sign whose magnitudes differ in bf16 too: its largest below one."""
    one, area = 0x3F80, drawn.shape[1]  # bf16's 1.0; the patterns of positive numbers are in their order
    magnitudes = torch.arange(one - area, one, dtype=torch.int16).view(torch.bfloat16).float()
    return magnitudes[drawn.abs().argsort(1).argsort(1)] * torch.where(drawn < 0, -1.0, 1.0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, torch.float32) for name in (*RECIPES, *FAMILY)),
        *((name, torch.bfloat16) for name in (*RECIPES, "dense 4 bits nesterov", "fragments")),
    ],
)
def test_it_makes_the_same_contribution_of_the_same_residual(name: str, kind: torch.dtype) -> None:
    """Also after one was given back, and where every weight is sent of zeros."""
    recipe = RecipeConfig.model_validate(FAMILY.get(name) or {"name": name, "k": 64})
    layout = Layout.of(SHAPES, recipe)
    made = []
    for device in (torch.device("cpu"), DEVICE):
        residual = Residual((layout,), device, kind)
        drawn = weights(5, tuple(residual.coefficients.shape))
        if recipe.is_dense:
            drawn[1] = 0.0
        else:
            drawn = _without_ties(drawn)  # of equal ones either may be taken
        residual.coefficients.copy_(drawn)
        first = in_memory(residual.take(1, recipe))
        residual.restore(1)
        again = in_memory(residual.take(2, recipe))
        made.append((first, again, residual))
    for here, there in zip(made[0][:2], made[1][:2], strict=True):
        assert np.array_equal(here.values, there.values) and np.array_equal(here.indices, there.indices)
        assert here.exponents is None or np.array_equal(here.exponents, there.exponents)
    assert torch.equal(made[0][2].coefficients, made[1][2].coefficients.cpu())


def test_a_root_of_many_pieces_is_that_of_the_cpu() -> None:
    pieces = 200 if DEVICE.type == "cuda" else 70  # more blocks than there are rooms for
    flat = weights(3, (pieces * 2**18 + 5,))
    assert state_root(flat.to(DEVICE)) == state_root(flat)
    assert state_root(flat.to(DEVICE), [0, 69, pieces]) == state_root(flat, [0, 69, pieces])


def test_a_root_is_the_same_where_memory_cannot_be_kept_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no memory to pin")

    flat = weights(3, (70 * 2**18 + 5,))
    monkeypatch.setattr(torch, "empty_like", refuse)
    assert state_root(flat.to(DEVICE)) == state_root(flat)


@pytest.mark.parametrize("autocast", ["off", "bf16"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_swarm_with_a_cpu_stays_the_same_bits(dataset: TokenDataset, name: str, autocast: str) -> None:
    cpu = make(dataset, name)
    other = Trainer(cpu.run, on_device(autocast=autocast), dataset)
    before = cpu.evaluate()
    for round_number in range(10):
        swarm_round([cpu, other], round_number)
        assert cpu.root() == other.root()
    assert cpu.evaluate() < before - 0.3
    assert other.evaluate() == pytest.approx(cpu.evaluate(), rel=0.02)


@pytest.mark.parametrize("name", RECIPES)
def test_what_it_saves_a_cpu_goes_on_with(dataset: TokenDataset, name: str, tmp_path: Path) -> None:
    cpu = make(dataset, name)
    other = Trainer(cpu.run, on_device(), dataset)
    swarm_round([other], 0)
    other.save(tmp_path / "state")
    cpu.load(tmp_path / "state")
    assert cpu.root() == other.root()
    assert torch.equal(cpu.recipe.residual.coefficients, other.recipe.residual.coefficients.cpu())


@pytest.mark.parametrize(
    ("settings", "passes", "is_checkpointed"),
    [({}, [4], False), ({"checkpointing": True}, [4], True), ({"sequences_per_pass": 1}, [1, 1, 1, 1], False)],
)
def test_settings_that_save_memory_change_a_step_by_rounding_alone(
    dataset: TokenDataset,
    settings: dict[str, object],
    passes: list[int],
    is_checkpointed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And they do what they say: so many sequences a pass, and each layer computed again."""
    run = make(dataset).run
    plain = Trainer(run, on_device(), dataset).train(Share(0, 0, 1))[0]
    trainer = Trainer(run, on_device(**settings), dataset)
    sizes, layers = [], []
    loss, checkpoint = trainer.live.model.loss, model_module.checkpoint

    def noted_loss(batch: torch.Tensor) -> torch.Tensor:
        sizes.append(len(batch))
        return loss(batch)

    def noted_checkpoint(block: torch.nn.Module, *rest: Any, **options: Any) -> Any:
        layers.append(block)
        return checkpoint(block, *rest, **options)

    monkeypatch.setattr(trainer.live.model, "loss", noted_loss)
    monkeypatch.setattr(model_module, "checkpoint", noted_checkpoint)
    step = trainer.train(Share(0, 0, 1))[0]
    assert step.loss == pytest.approx(plain.loss, rel=1e-4)
    assert step.gradient_norm == pytest.approx(plain.gradient_norm, rel=1e-3)
    assert sizes == passes
    assert layers == (list(trainer.live.model.layers) if is_checkpointed else [])


def larger_run(dataset: TokenDataset) -> RunConfig:
    large = {"dim": 256, "heads": 4, "kv_heads": 2, "ffn_dim": 768, "sequence_length": 256}
    model, sequences = (TINY | large, 32) if DEVICE.type == "cuda" else (TINY, 4)
    return RunConfig.model_validate({"name": "memory", "model": model, "recipe": {"sequences_per_pass": sequences}})


def test_out_of_memory_it_trains_on_with_fewer_sequences(
    dataset: TokenDataset, caplog: pytest.LogCaptureFixture
) -> None:
    """The device itself refuses: what is left is a third of what a pass takes."""
    run = larger_run(dataset)
    trainer = Trainer(run, on_device(), dataset)
    with memory_of_bytes(need_of(run, PassSettings(device=DEVICE.type)).activations // 3):
        loss = trainer.train(Share(0, 0, 1))[0].loss
        payload = trainer.contribute(0)
        trainer.apply(0, [payload])
    assert 5 < loss < 6.5
    if DEVICE.type == "cuda":
        assert 1 <= trainer.live.sequences_per_pass <= 16
        assert "out of memory in a pass of 32 sequences (cuda" in caplog.text


@CUDA_ALONE
def test_what_it_takes_is_what_was_told(dataset: TokenDataset) -> None:
    run = larger_run(dataset)
    Trainer(run, on_device(), dataset).train(Share(0, 0, 1))  # what cuBLAS takes stays taken
    for autocast in ("off", "bf16"):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(DEVICE)
        before = torch.cuda.memory_allocated(DEVICE)
        trainer = Trainer(run, on_device(autocast=autocast), dataset)
        trainer.train(Share(0, 0, 1))
        trainer.apply(0, [trainer.contribute(0)] * 10)
        took = torch.cuda.max_memory_allocated(DEVICE) - before
        need = need_of(run, PassSettings(autocast == "bf16", device="cuda"))
        told = need.trainer - CUDA_LIBRARIES_BYTES
        sys.stdout.write(f"told {told} without libraries, took {took}: {need.of_trainer()}\n")
        assert told == pytest.approx(took, rel=0.07)
        del trainer
        gc.collect()


def test_votes_on_the_device_are_those_of_the_cpu() -> None:
    recipe = RecipeConfig(name="local")
    layout = Layout(SHAPES, recipe.chunk)
    form = PayloadFormat.of(layout, recipe)
    payloads = [pack(contribution(peer, layout, recipe), form) for peer in range(40)]
    states = []
    for device in (torch.device("cpu"), DEVICE):
        flat = flat_weights(3).to(device)
        apply_payloads(layout, recipe, [Packed(each, form) for each in payloads], Terms(Fraction(1, 3)), parts(flat))
        states.append(flat.cpu())
    assert torch.equal(*states)


@CUDA_ALONE
def test_a_card_tells_what_it_draws() -> None:
    """NVML really answers."""
    read = meter_of(DEVICE)
    before = read()
    much = torch.randn(4_096, 4_096, device=DEVICE)
    for _ in range(300):
        much = torch.nn.functional.normalize(much @ much)
    torch.cuda.synchronize()
    assert read() > before
