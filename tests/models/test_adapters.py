"""Adapters: they train beside frozen weights, whose file is the same everywhere and is checked before it is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from p2ptrain.config import AdaptConfig, ModelConfig, RecipeConfig, RunConfig
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.data.tokenizer import BytesTokenizer
from p2ptrain.errors import ConfigError, DataError
from p2ptrain.models.adapters import FrozenBase, load_base, make_base, read_base
from p2ptrain.models.export import export, load_model
from p2ptrain.models.given_weights import read_weights
from p2ptrain.models.kinds import build, check_base_bytes, exported_shapes, first_model, named_shapes, parameter_count
from p2ptrain.train.begin import GivenWeights, NewRun, begin
from p2ptrain.train.memory import need_of
from tests.helpers.export import NodeDirectory, model_of, weights_of
from tests.helpers.trainer import ONE_THREAD, TINY, Trainer, swarm_round

ME = "ab" * 32
MODEL = ModelConfig(**TINY)
LORA = AdaptConfig(kind="lora", rank=4, alpha=8)


def run_of(adapt: AdaptConfig = LORA, model: ModelConfig = MODEL, **recipe: Any) -> RunConfig:
    settings = {"local_steps": 4, "sequences_per_pass": 4, "inner_learning_rate": "1/50", "chunk": 16, "k": 64} | recipe
    return RunConfig(name="test", seed=1, model=model, adapt=adapt, recipe=RecipeConfig(name="local", **settings))


def begun(place: Path, run: RunConfig | None = None, given: GivenWeights | None = None) -> NewRun:
    return begin(run or run_of(), place / "data", [ME], None, given, place / "bases")


def base_of(place: Path, seed: int = 3, dtype: torch.dtype = torch.float32) -> FrozenBase:
    weights = first_model(MODEL, seed).named_parameters()
    return make_base(place, {name: each.detach().to(dtype).float() for name, each in weights})


def flat_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def tokens() -> torch.Tensor:
    return torch.randint(0, 256, (2, 65), generator=torch.Generator().manual_seed(1))


def test_the_state_is_the_adapters_alone_and_nothing_changes_until_they_have_learned(tmp_path: Path) -> None:
    names = [name for name, _ in named_shapes(MODEL, LORA)]
    assert all(name.endswith(("lora_A.weight", "lora_B.weight")) for name in names)
    assert len(names) == 2 * 7 * TINY["layers"], "every matrix of a layer, and no norm or embedding"
    model = first_model(MODEL, 1, adapt=LORA, base=base_of(tmp_path).path)
    whole = first_model(MODEL, 3)
    assert torch.equal(model.loss(tokens()), whole.loss(tokens()))
    model.loss(tokens()).backward()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    assert all(each is not None for each in gradients.values())
    assert any(bool(each.any()) for name, each in gradients.items() if name.endswith("lora_B.weight"))
    assert all(each.grad is None for each in model.base().values())


def test_targets_choose_by_the_end_of_a_name() -> None:
    some = AdaptConfig(kind="lora", rank=4, targets=("q_proj", "1.mlp.up_proj"))
    found = {name.rpartition(".lora_")[0] for name, _ in named_shapes(MODEL, some)}
    assert found == {"layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj", "layers.1.mlp.up_proj"}


def test_a_base_is_the_same_file_for_the_same_weights_and_as_small_as_they_allow(tmp_path: Path) -> None:
    full, half = base_of(tmp_path), base_of(tmp_path, dtype=torch.bfloat16)
    assert base_of(tmp_path / "again").digest == full.digest
    assert half.size < 0.6 * full.size
    assert read_base(half.path) == half
    model = build(MODEL, adapt=LORA, base=half.path)
    expected = dict(first_model(MODEL, 3).named_parameters())
    for name, each in model.base().items():
        assert each.dtype == torch.float32
        assert torch.equal(each, expected[name].bfloat16().float())


@pytest.mark.parametrize("how", ["missing", "more", "shape", "type", "infinite", "cut", "empty"])
def test_a_base_of_another_model_is_refused(how: str, tmp_path: Path) -> None:
    named = load_file(base_of(tmp_path).path)
    path, name = tmp_path / "other.safetensors", "norm.weight"
    match how:
        case "missing":
            del named[name]
        case "more":
            named["evil"] = torch.zeros(1)
        case "shape":
            named[name] = named[name][:-1].clone()
        case "type":
            named[name] = named[name].long()
        case "infinite":
            named[name][3] = torch.inf
    save_file(named, path)
    if how in ("cut", "empty"):
        path.write_bytes(path.read_bytes()[: -100 if how == "cut" else 0])
    with pytest.raises(DataError, match=str(path)):
        load_base(build(MODEL, adapt=LORA), path)


def test_a_strangers_header_is_quoted_shortly_and_as_plain_text(tmp_path: Path) -> None:
    evil = "\x1b[31mEVIL\n" * 10_000
    header = json.dumps({"w": {"dtype": evil, "shape": [1], "data_offsets": [0, 4]}}).encode()
    path = tmp_path / "evil"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(DataError) as caught:
        load_base(build(MODEL, adapt=LORA), path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("size", [1, 2 * 26_784, 4 * 26_784 + 2**15])
def test_frozen_weights_of_an_impossible_size_are_not_fetched(size: int) -> None:
    count = parameter_count(MODEL)
    assert count == 26_784
    with pytest.raises(ConfigError, match=r"adapt.base_bytes: .* bytes are not the size of the model's 26,784 weights"):
        check_base_bytes(MODEL, LORA.model_copy(update={"base": "1" * 64, "base_bytes": size}))
    check_base_bytes(MODEL, LORA.model_copy(update={"base": "1" * 64, "base_bytes": 4 * count + 1_000}))


def test_replicas_learn_and_stay_the_same_bits(dataset: TokenDataset, tmp_path: Path) -> None:
    made = begun(tmp_path)
    assert made.base is not None
    assert made.run.adapt.base == made.base.digest
    trainers = [
        Trainer(made.run, ONE_THREAD, TokenDataset.open(made.dataset, made.run.data.manifest), base=made.base.path)
        for _ in range(2)
    ]
    for trainer in trainers:
        trainer.adopt(0, [made.state])
    before = trainers[0].evaluate()
    frozen = [each.clone() for each in trainers[0].live.model.base().values()]
    for number in range(4):
        swarm_round(trainers, number)
    assert trainers[0].root() == trainers[1].root()
    assert trainers[0].evaluate() < before - 0.05
    assert all(map(torch.equal, frozen, trainers[0].live.model.base().values()))
    again = Trainer(made.run, ONE_THREAD, dataset, initial=False, base=made.base.path)
    trainers[0].save(tmp_path / "state")
    again.load(tmp_path / "state")
    assert (again.root(), again.evaluate()) == (trainers[0].root(), trainers[0].evaluate())


def test_a_begin_is_repeated_and_refuses_other_weights(tmp_path: Path) -> None:
    made = begun(tmp_path)
    assert made.base is not None
    assert begun(tmp_path, made.run) == made
    content = made.base.path.read_bytes()
    made.base.path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert begun(tmp_path, made.run) == made, "a damaged one is made again"
    assert made.base.path.read_bytes() == content
    (made.base.path.parent / "new.partial").mkdir()  # cannot be written
    assert begun(tmp_path, made.run) == made, "a good one is not written again"
    (made.base.path.parent / "new.partial").rmdir()
    made.base.path.unlink()
    assert begun(tmp_path, made.run) == made, "made again from the seed"
    shapes = dict(exported_shapes(MODEL))
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, tmp_path / "other.safetensors")
    given = GivenWeights(
        tmp_path / "other.safetensors", lambda model: read_weights(tmp_path / "other.safetensors", model)
    )
    with pytest.raises(ConfigError, match=r"adapt.base: these weights are others than those that the run adapts"):
        begun(tmp_path, made.run, given)


def test_frozen_weights_that_are_refused_take_no_room_and_those_of_another_run_stay(tmp_path: Path) -> None:
    made, other = begun(tmp_path), begun(tmp_path, run_of().model_copy(update={"seed": 2}))
    assert made.base is not None
    assert other.base is not None
    made.base.path.unlink()
    for seed in (3, 2):  # the second are those of the other run
        given = GivenWeights(tmp_path, lambda model, seed=seed: flat_of(first_model(model, seed)))
        with pytest.raises(ConfigError, match=r"adapt.base: these weights are others than those that the run adapts"):
            begun(tmp_path, made.run, given)
        assert [*(tmp_path / "bases").iterdir()] == [other.base.path]


def test_an_export_merges_or_has_the_adapters_alone(tmp_path: Path) -> None:
    made = begun(tmp_path)
    assert made.base is not None
    drawn = torch.Generator().manual_seed(2)
    state = torch.randn(parameter_count(MODEL, LORA), generator=drawn) * 0.05
    node = NodeDirectory(tmp_path / "node", made.run)
    weights = weights_of(node.save(8, state), made.run, base=made.base.path)
    model = load_model(weights, torch.device("cpu"))
    export(tmp_path / "whole", weights, BytesTokenizer(), None)
    whole = model_of(made.run, read_weights(tmp_path / "whole", MODEL))
    torch.testing.assert_close(whole(tokens()), model(tokens()), rtol=0, atol=2e-5)
    export(tmp_path / "adapters", weights, BytesTokenizer(), None, only_adapters=True)
    names = {path.name for path in (tmp_path / "adapters").iterdir()}
    assert names == {"README.md", "adapter_config.json", "adapter_model.safetensors", "run.json"}
    named = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    expected = [f"base_model.model.model.{name}" for name, _ in named_shapes(MODEL, LORA)]
    assert torch.cat([named[name].flatten() for name in expected]).equal(state)
    assert len(named) == len(expected)
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], len(config["target_modules"])) == (4, 8, 14)


def test_the_need_is_that_of_the_adapters_and_the_frozen_weights() -> None:
    whole, lora = need_of(run_of(AdaptConfig())), need_of(run_of())
    assert lora.base == whole.state
    assert (lora.state, lora.parameters) == (4 * parameter_count(MODEL, LORA), parameter_count(MODEL, LORA))
    assert lora.payload < whole.payload / 2
    assert lora.trainer == 3 * lora.state + lora.base + lora.residual + lora.optimizer + max(
        lora.codec, lora.activations
    )
    assert "frozen weights" in lora.of_trainer()


def refusal(**adapt: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        named_shapes(MODEL, AdaptConfig(kind="lora", **adapt))
    return str(caught.value)


def test_what_does_not_fit_the_model_is_told_with_what_does() -> None:
    expected = "adapt.rank: 33 is more than layers.0.self_attn.q_proj has rows or columns. Set it to 32 or less"
    assert refusal(rank=33, targets=("q_proj",)).startswith(expected)
    expected = "adapt.targets: the model has no matrix query. Choose from down_proj, gate_proj, k_proj"
    assert refusal(rank=4, targets=("query",)).startswith(expected)
    expected = "adapt.targets: the model has no matrix embed_tokens"
    assert refusal(rank=4, targets=("embed_tokens",)).startswith(expected), "it has a row for each token"
