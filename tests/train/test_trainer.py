"""The trainer: swarms learn and stay bit-identical, also when they continue from saved state."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from p2ptrain.config import DeviceConfig, ModelConfig, RunConfig, StateConfig, TokenizerConfig
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.errors import ConfigError, DataError, DeviceError, MemoryShortError, TrainingError
from p2ptrain.exact.transform import Layout
from p2ptrain.models.built_in import Transformer
from p2ptrain.models.sample import SampleRequest
from p2ptrain.share import Share
from p2ptrain.train import learner
from p2ptrain.train.learner import open_device
from tests.helpers.tokenizers import prepared
from tests.helpers.trainer import ONE_THREAD, RECIPES, TINY, Trainer, embedded, make, swarm_round


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    return embedded(tmp_path_factory.mktemp("corpus") / "data")


@pytest.mark.parametrize("name", RECIPES)
def test_a_swarm_learns_the_embedded_corpus_and_its_replicas_stay_the_same_bits(
    dataset: TokenDataset, name: str
) -> None:
    rounds = 15 if name == "local" else 50
    trainers = [make(dataset, name) for _ in range(3)]
    before = trainers[0].evaluate()
    assert before == pytest.approx(np.log(256), abs=0.1)
    roots = set()
    for round_number in range(rounds):
        swarm_round(trainers, round_number)
        roots |= {trainer.root() for trainer in trainers}
        assert len(roots) == round_number + 1
    losses = {trainer.evaluate() for trainer in trainers}
    assert len(losses) == 1
    assert losses.pop() < before - 1.5


@pytest.mark.parametrize("change", [lambda gradient: gradient.zero_(), lambda gradient: gradient.neg_()])
def test_nothing_is_learned_from_a_gradient_that_is_zero_or_reversed(
    dataset: TokenDataset, change: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The power of the test above: it must fail under such a mistake."""
    trainer = make(dataset)
    real = trainer.live.gradient_step

    def broken(*arguments: Any) -> Any:
        result = real(*arguments)
        change(trainer.live.gradient)
        return result

    monkeypatch.setattr(trainer.live, "gradient_step", broken)
    before = trainer.evaluate()
    for round_number in range(20):
        swarm_round([trainer], round_number)
    assert trainer.evaluate() > before - 0.2


@pytest.mark.parametrize(("name", "half_state"), [*((name, False) for name in RECIPES), ("local", True)])
def test_a_trainer_that_loads_what_another_saved_goes_on_to_the_same_bits(
    dataset: TokenDataset, name: str, half_state: bool, tmp_path: Path
) -> None:
    """With contributions whose fate is open: one is taken later, one comes back to the residual."""
    never_stopped = make(dataset, name, half_state=half_state)
    others = [make(dataset, name, seed=1) for _ in range(2)]

    def go_on(trainer: Trainer, round_number: int, payloads: list[bytes]) -> bytes:
        trainer.train(Share(round_number, 0, 3))
        own = trainer.contribute(round_number)
        if round_number % 2:
            trainer.apply(round_number, payloads)
        else:
            trainer.apply(round_number, [*payloads, own], {round_number: own})
        if round_number == 3:
            trainer.restore(1)
        return own

    def others_payloads(round_number: int) -> list[bytes]:
        payloads = []
        for place, other in enumerate(others, start=1):
            other.train(Share(round_number, place, 3))
            payloads.append(other.contribute(round_number))
        return payloads

    history = []
    for round_number in range(3):
        payloads = others_payloads(round_number)
        own = go_on(never_stopped, round_number, payloads)
        for other in others:
            given = dict.fromkeys([round_number], payloads[others.index(other)])
            other.apply(round_number, payloads if round_number % 2 else [*payloads, own], given)
    never_stopped.save(tmp_path / "state")
    restarted = make(dataset, name, half_state=half_state)
    restarted.replica.weights.add_(1)  # all weights must come from the file
    restarted.load(tmp_path / "state")
    assert restarted.round == 3
    assert sorted(restarted.recipe.residual.kept) == sorted(never_stopped.recipe.residual.kept) == [1]
    for round_number in range(3, 7):
        payloads = others_payloads(round_number)
        own = go_on(never_stopped, round_number, payloads)
        assert go_on(restarted, round_number, payloads) == own
        assert restarted.root() == never_stopped.root()
        assert torch.equal(restarted.recipe.residual.coefficients, never_stopped.recipe.residual.coefficients)
        for other in others:
            given = dict.fromkeys([round_number], payloads[others.index(other)])
            other.apply(round_number, payloads if round_number % 2 else [*payloads, own], given)
        history.append(own)
    assert len(set(history)) == 4


def spoil(path: Path, change: Callable[[dict[str, torch.Tensor], dict[str, str]], None]) -> None:
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
    change(tensors, metadata)
    save_file(tensors, path, metadata)


SPOILED: dict[str, tuple[Callable[[dict[str, Any], dict[str, str]], Any], str]] = {
    "a tensor is missing": (lambda tensors, _: tensors.pop("residual"), "residual is missing"),
    "a tensor has another shape": (
        lambda tensors, _: tensors.update({"weights.norm.weight": torch.ones(31)}),
        r"weights\.norm\.weight is missing or not of shape \(32,\)",
    ),
    "a tensor has another type": (
        lambda tensors, _: tensors.update(residual=tensors["residual"].double()),
        "residual is missing or not",
    ),
    "weights in bf16": (
        lambda tensors, _: tensors.update({"weights.norm.weight": tensors["weights.norm.weight"].bfloat16()}),
        r"weights\.norm\.weight is missing or not",
    ),
    "a tensor too many": (lambda tensors, _: tensors.update(more=torch.ones(1)), "does not belong to this run: more"),
    "kept values without their indices": (
        lambda tensors, _: tensors.pop("kept.0.indices"),
        r"does not belong to this run: kept\.0\.removed",
    ),
    "kept indices out of range": (
        lambda tensors, _: tensors["kept.0.indices"].fill_(4096),
        r"kept\.0 names a coefficient that does not exist",
    ),
    "kept values of another shape": (
        lambda tensors, _: tensors.update({"kept.0.removed": torch.ones(3, 3)}),
        r"kept\.0 is not of shape",
    ),
    "weights that are not finite": (
        lambda tensors, _: tensors["weights.norm.weight"].fill_(float("nan")),
        r"weights\.norm\.weight is not finite",
    ),
    "another format": (lambda _, metadata: metadata.update(format="p2ptrain trainer 2"), "not the saved state"),
    "another run": (lambda _, metadata: metadata.update(run="0" * 64), "not the saved state of run test"),
    "a round of many digits": (lambda _, metadata: metadata.update(round="9" * 5000), "the round is missing"),
    "kept indices that do not rise": (
        lambda tensors, _: tensors["kept.0.indices"].fill_(7),
        r"kept\.0 names a coefficient that does not exist",
    ),
    "kept values that are not finite": (
        lambda tensors, _: tensors["kept.0.removed"].fill_(float("nan")),
        r"kept\.0 is not finite",
    ),
    "no round": (lambda _, metadata: metadata.pop("round"), "the round is missing"),
    "a round that is no number": (lambda _, metadata: metadata.update(round="-1"), "the round is missing"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_saved_state_that_is_not_whole_is_refused_and_changes_nothing(
    dataset: TokenDataset, case: str, tmp_path: Path
) -> None:
    change, reason = SPOILED[case]
    trainer = make(dataset)
    trainer.train(Share(0, 0, 1))
    payload = trainer.contribute(0)
    trainer.apply(0, [payload])
    trainer.save(tmp_path / "state")
    spoil(tmp_path / "state", change)
    root, residual = trainer.root(), trainer.recipe.residual.coefficients.clone()
    with pytest.raises(DataError, match=reason):
        trainer.load(tmp_path / "state")
    assert trainer.root() == root
    assert torch.equal(trainer.recipe.residual.coefficients, residual)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff" * 100])
def test_a_file_that_is_no_saved_state_is_named(dataset: TokenDataset, content: bytes, tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(content)
    with pytest.raises(DataError, match="not a saved state"):
        make(dataset).load(tmp_path / "state")
    with pytest.raises(DataError, match="not a saved state"):
        make(dataset).load(tmp_path / "nowhere")


@pytest.mark.parametrize("name", RECIPES)
def test_a_poisoned_step_is_an_error_and_never_a_contribution(dataset: TokenDataset, name: str) -> None:
    trainer, healthy = make(dataset, name), make(dataset, name)
    trainer.replica.weights[0] = float("nan")
    with pytest.raises(TrainingError) as caught:
        trainer.train(Share(0, 0, 1))
    assert caught.value.what == "the loss"
    assert len(caught.value.positions) == 4
    with pytest.raises(AssertionError, match="a contribution follows its training"):
        trainer.contribute(0)
    trainer.replica.weights.copy_(healthy.replica.weights)  # as catching up would
    for one in (trainer, healthy):
        one.train(Share(0, 0, 1))
    assert trainer.contribute(0) == healthy.contribute(0)


def test_state_of_a_run_with_another_setting_is_refused(dataset: TokenDataset, tmp_path: Path) -> None:
    make(dataset).save(tmp_path / "state")
    with pytest.raises(DataError, match="not the saved state of run test"):
        make(dataset, decay=Fraction(1, 2)).load(tmp_path / "state")


@pytest.mark.parametrize("name", RECIPES)
def test_an_update_between_training_and_contributing_changes_nothing_that_is_said(
    dataset: TokenDataset, name: str
) -> None:
    """As happens with overlap, and when a round closes empty."""
    early, late, other = make(dataset, name), make(dataset, name), make(dataset, name)
    other.train(Share(0, 1, 2))
    payload = other.contribute(0)
    for trainer in (early, late):
        trainer.train(Share(0, 0, 2))
    early.apply(0, [payload])
    assert early.contribute(0) == late.contribute(0)
    late.apply(0, [payload])
    for trainer in (early, late):
        trainer.train(Share(1, 0, 2))
    assert early.contribute(1) == late.contribute(1)


def test_a_failed_training_takes_back_the_one_before(dataset: TokenDataset) -> None:
    trainer = make(dataset)
    trainer.train(Share(0, 0, 1))
    trainer.replica.weights[0] = float("nan")
    with pytest.raises(TrainingError):
        trainer.train(Share(0, 0, 1))
    with pytest.raises(AssertionError, match="a contribution follows its training"):
        trainer.contribute(0)


def test_a_rounds_contribution_is_made_once_and_a_second_try_changes_nothing(dataset: TokenDataset) -> None:
    trainer = make(dataset)
    trainer.train(Share(0, 0, 1))
    trainer.contribute(0)
    residual = trainer.recipe.residual.coefficients.clone()
    trainer.train(Share(0, 0, 1))
    with pytest.raises(AssertionError, match="made once"):
        trainer.contribute(0)
    assert torch.equal(trainer.recipe.residual.coefficients, residual)


def test_evaluating_looks_at_the_agreed_weights_and_costs_no_contribution(
    dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(dataset, "local")
    agreed = trainer.evaluate()
    trainer.train(Share(0, 0, 1))
    assert not torch.equal(trainer.live.weights, trainer.replica.weights)
    with pytest.raises(AssertionError, match="between two rounds"):
        trainer.evaluate()
    payload = trainer.contribute(0)
    assert trainer.evaluate() == agreed
    assert agreed == pytest.approx(np.log(256), abs=0.1)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(trainer.live, "loss", lambda batch: 1 / 0)
        trainer.evaluate()
    other = make(dataset, "local")
    other.train(Share(0, 0, 1))
    assert other.contribute(0) == payload
    for each in (trainer, other):
        each.train(Share(1, 0, 1))
    assert other.contribute(1) == trainer.contribute(1), "nor the next one"


def test_the_root_of_a_large_state_covers_what_the_manifest_draws(dataset: TokenDataset) -> None:
    run = make(dataset).run
    large = RunConfig(
        name="test",
        seed=1,
        model=ModelConfig(**(TINY | {"dim": 512, "heads": 8, "kv_heads": 8, "ffn_dim": 1024})),
        recipe=run.recipe,
        state=StateConfig(full_root_bytes_max=2**20, partial_root_leaves=2),
    )
    trainer = Trainer(large, ONE_THREAD, dataset)
    assert trainer.root(bytes(32)) == trainer.root(bytes([1]) * 32)  # round 0 is covered whole
    trainer.apply(0, [])
    roots = {trainer.root(bytes([n]) * 32) for n in range(6)}
    assert len(roots) == 6


def test_a_device_that_is_not_exact_is_refused_at_once(dataset: TokenDataset) -> None:
    try:
        torch.set_flush_denormal(True)
        with pytest.raises(DeviceError, match="flushes small numbers"):
            make(dataset)
    finally:
        torch.set_flush_denormal(False)


def test_payloads_are_refused_with_the_reason(dataset: TokenDataset) -> None:
    trainer = make(dataset)
    trainer.train(Share(0, 0, 1))
    payload = trainer.contribute(0)
    assert trainer.check(payload) is None
    reason = trainer.check(payload[:-1])
    assert reason == f"payload of {len(payload) - 1} bytes; this run's have {len(payload)}"
    assert trainer.check(bytes(len(payload))) == "indices of a chunk do not rise"


def test_a_round_without_contributions_leaves_the_weights(dataset: TokenDataset) -> None:
    trainer = make(dataset)
    root = trainer.root()
    trainer.apply(0, [])
    assert (trainer.root(), trainer.round) == (root, 1)


@pytest.mark.parametrize("name", RECIPES)
def test_the_norm_of_an_update_is_that_of_how_far_it_moved_the_weights_and_all_replicas_have_it(
    dataset: TokenDataset, name: str
) -> None:
    trainers = [make(dataset, name, chunk=32) for _ in range(3)]  # what votes say of the padding of a chunk, counts too
    for number in range(3):
        before = trainers[0].replica.weights.double()
        swarm_round(trainers, number)
        found = {each.replica.update_norm for each in trainers}
        assert len(found) == 1
        moved = float((trainers[0].replica.weights.double() - before).norm())
        assert found.pop() == pytest.approx(moved, rel=0.05)
    trainers[1].adopt(9, [trainers[0].state_bytes()])
    assert trainers[1].replica.update_norm is None, "that state came from others"


def test_rounds_are_applied_one_after_the_other(dataset: TokenDataset) -> None:
    with pytest.raises(AssertionError, match="round 2 cannot follow 0 applied rounds"):
        make(dataset).apply(1, [])


def test_data_of_another_tokenizer_or_too_little_of_it_is_refused(dataset: TokenDataset, tmp_path: Path) -> None:
    run = make(dataset).run
    other = TokenizerConfig(kind="json", digest="0" * 64)
    for changed, reason in (
        (run.model_copy(update={"tokenizer": other}), "tokenizer: the data was made with tokenizer bytes"),
        (run.model_copy(update={"model": ModelConfig(**TINY, vocab_size=255)}), "set it to 256 or more"),
    ):
        with pytest.raises(ConfigError, match=f"(?i){reason}"):
            Trainer(changed, ONE_THREAD, dataset)
    (tmp_path / "short.txt").write_text("a few words\n")
    made = prepared(tmp_path / "data", tmp_path / "short.txt", held_out=Fraction(0))
    with pytest.raises(ConfigError, match=r"model\.sequence_length: the data is shorter than one sequence"):
        Trainer(run, ONE_THREAD, TokenDataset.open(made.path, made.digest))


def test_steps_are_reported_as_they_happen(dataset: TokenDataset) -> None:
    trainer = make(dataset, "local", local_steps=3)
    seen: list[float] = []
    results = trainer.train(Share(0, 0, 2), on_step=lambda result: seen.append(result.loss))
    assert seen == [result.loss for result in results]
    assert [result.tokens for result in results] == [256, 256, 256]


def test_a_device_that_is_not_there_is_named_with_the_fix() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(DeviceError, match=r"device cuda:3 not found \(0 CUDA devices found\). Set device\.name"):
        open_device(DeviceConfig(name="cuda:3"))


def test_the_thread_count_is_the_configs() -> None:
    before = torch.get_num_threads()
    try:
        open_device(DeviceConfig(name="cpu", threads=2))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_training_in_bf16_changes_the_steps_and_not_what_is_applied(dataset: TokenDataset) -> None:
    run = make(dataset).run
    coarse = Trainer(run, DeviceConfig(name="cpu", threads=1, autocast="bf16"), dataset)
    fine = make(dataset)
    payloads, losses = [], []
    for trainer in (coarse, fine):
        losses.append(trainer.train(Share(0, 0, 2))[0].loss)
        payloads.append(trainer.contribute(0))
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    for trainer in (coarse, fine):
        trainer.apply(0, payloads)
    assert coarse.root() == fine.root()


@pytest.mark.parametrize(("cores", "threads", "wanted"), [(5, 0, 4), (1, 0, 1), (5, 3, 3)])
def test_one_of_the_cores_that_may_be_used_stays_free(
    cores: int, threads: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(learner, "cores", lambda: cores)
    try:
        open_device(DeviceConfig(name="cpu", threads=threads))
        assert torch.get_num_threads() == wanted
    finally:
        torch.set_num_threads(before)


def test_a_sample_or_a_loss_that_finds_no_memory_leaves_the_weights_as_they_were(
    dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(dataset, "local")
    root = trainer.root()

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trainer.live.model, "hidden", full)
    with pytest.raises(MemoryShortError, match=r"out of memory while looking at the agreed weights: .* are free"):
        trainer.evaluate()
    with pytest.raises(MemoryShortError):
        trainer.sample(SampleRequest(prompt="a", tokens=1, seed=0))
    assert trainer.root() == root


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("place", ["_transformed", "_projected", "scatter_", "gather"])
def test_a_contribution_that_a_device_has_no_room_for_is_made_on_the_cpu_with_nothing_half_done(
    dataset: TokenDataset, name: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these fails every other time; the residual and what is sent come out as without."""
    payloads, residuals = [], []
    for is_short in (False, True):
        trainer = make(dataset, name)
        trainer.train(Share(0, 0, 1))
        if is_short:
            fails_every_other_time(monkeypatch, place)
        payloads.append(trainer.contribute(0))
        trainer.restore(0)
        residuals.append(trainer.recipe.residual.coefficients.clone())
    assert payloads[0] == payloads[1]
    assert torch.equal(*residuals)


def fails_every_other_time(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    owner: Any = torch.Tensor if place in ("scatter_", "gather") else Layout
    real, calls = getattr(owner, place), itertools.count()

    def failing(*arguments: Any, **named: Any) -> Any:
        if next(calls) % 2 == 0:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)")
        return real(*arguments, **named)

    monkeypatch.setattr(owner, place, failing)


def test_a_training_that_runs_out_of_memory_anywhere_says_so_and_can_be_followed_by_another(
    dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(dataset, "local")

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    for owner, name in ((trainer.recipe.inner, "step"), (trainer.recipe, "begin"), (trainer.recipe, "end")):
        with monkeypatch.context() as here:
            here.setattr(owner, name, full)
            with pytest.raises(MemoryShortError, match=r"out of memory while training: .* are free\. A smaller device"):
                trainer.train(Share(0, 0, 1))
    trainer.train(Share(0, 0, 1))
    assert trainer.check(trainer.contribute(0)) is None


def test_settings_of_the_device_are_used(dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(dataset).run
    sizes: list[int] = []
    trainer = Trainer(run, ONE_THREAD.model_copy(update={"sequences_per_pass": 1}), dataset)
    real = trainer.live.model.loss
    monkeypatch.setattr(trainer.live.model, "loss", lambda batch: (sizes.append(len(batch)), real(batch))[1])
    trainer.train(Share(0, 0, 1))
    trainer.contribute(0)
    trainer.evaluate(3)
    assert sizes == [1] * 4 + [1] * 3
    assert Trainer(run, ONE_THREAD.model_copy(update={"checkpointing": True}), dataset).live.model.checkpointing
    compiled: list[object] = []
    monkeypatch.setattr(torch, "compile", lambda function: lambda value: value)
    monkeypatch.setattr(Transformer, "compile_layers", lambda model: compiled.append(model.config))
    Trainer(run, ONE_THREAD.model_copy(update={"compile": True}), dataset)
    assert len(compiled) == 1


def test_compiling_without_a_compiler_is_refused_at_the_start(
    dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(value: object) -> None:
        raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found\nmore")

    monkeypatch.setattr(torch, "compile", lambda function: fail)
    with pytest.raises(DeviceError, match=r"No working C\+\+ compiler found\. Install a C\+\+ compiler"):
        Trainer(make(dataset).run, ONE_THREAD.model_copy(update={"compile": True}), dataset)
