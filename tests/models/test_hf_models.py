"""Models of transformers in training: they compute what transformers computes, and replicas stay the same bits."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from p2ptrain.config import ModelConfig, RecipeConfig, RunConfig
from p2ptrain.config.hf import ARCHITECTURES, parameters_most
from p2ptrain.data.dataset import TokenDataset
from p2ptrain.data.tokenizer import BytesTokenizer
from p2ptrain.errors import ConfigError, DeviceError
from p2ptrain.models import hf_model as hf_models
from p2ptrain.models.export import export, load_model
from p2ptrain.models.kinds import (
    build,
    exported_shapes,
    first_model,
    named_shapes,
    parameter_count,
    refuse_trained_buffers,
    shapes_digest,
)
from p2ptrain.share import Share
from p2ptrain.train.begin import begin
from p2ptrain.train.live import LiveModel, drawing
from p2ptrain.train.memory import PassSettings, activations, need_of
from tests.helpers.export import NodeDirectory, weights_of
from tests.helpers.hf_models import CAUSAL, hf_model
from tests.helpers.live_memory import peak_of_pass
from tests.helpers.trainer import ONE_THREAD, RECIPES, Trainer, swarm_round

ME = "ab" * 32
TOLERANCE = 2e-5  # by which fp32 differs from fp64 here, as for the built-in model
DROPOUTS = {
    "gpt2": {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1},
    "llama": {"attention_dropout": 0.2},
    "phi": {"resid_pdrop": 0.1, "embd_pdrop": 0.1},
}

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
LINEAR = {"type": "linear", "factor": 2.0}
SLIDING = {"sliding_window": 8, "use_sliding_window": True}
FORMS: list[tuple[str, dict[str, Any]]] = [  # of the same thing in older and newer files, and what no default shows
    ("llama", {"rope_theta": 500}),
    ("llama", {"rope_theta": 500, "rope_scaling": LINEAR}),
    ("llama", {"rope_theta": 500.0, "rope_scaling": LLAMA3, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"rope_parameters": LLAMA3 | {"rope_theta": 500.0}, "tie_word_embeddings": True, "head_dim": 12}),
    ("mistral", {"sliding_window": 8}),
    ("qwen2", SLIDING | {"layer_types": ["full_attention", "sliding_attention"]}),
    ("smollm3", SLIDING | {"no_rope_layers": [1, 0]}),
    ("gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 500, "use_parallel_residual": False}),
    ("granite", {"logits_scaling": 4.0, "embedding_multiplier": 2.0}),
    ("olmo", {"clip_qkv": 1.5}),
]
VALUES: list[Any] = [
    None, True, False, 0, 1, 2, 3, 4, 8, 12, 16, 32, 48, 0.0, 0.1, 0.5, 1.0, 1e-6, 1e6, 2.5, "silu", "gelu", "gelu_new",
    "relu", [], ["full_attention", "sliding_attention"], [0, 1], {}, LINEAR, LLAMA3, {"rope_theta": 1.0},
    {"partial_rotary_factor": 0.25}, {"factor": 2.0}, {"rope_type": "default", "type": "linear", "factor": 3},
]  # fmt: skip

pytestmark = [
    pytest.mark.hf,
    pytest.mark.usefixtures("transformers"),
    pytest.mark.filterwarnings("default"),  # what another package deprecates is not ours
]


def tokens_of(model: ModelConfig, length: int) -> torch.Tensor:
    return torch.randint(0, model.vocab_size, (2, length), generator=torch.Generator().manual_seed(1))


def run_of(model: ModelConfig, recipe: str = "local", **changes: Any) -> RunConfig:
    return RunConfig(
        name="test",
        seed=1,
        model=model,
        recipe=RecipeConfig(name=recipe, sequences_per_pass=4, **(RECIPES[recipe] | changes)),
    )


def without_dropout(kind: str) -> dict[str, Any]:
    return dict.fromkeys(DROPOUTS["gpt2"], 0.0) if kind == "gpt2" else {}


# ---------------------------------------------------------------------------------------------------
# The model


@pytest.mark.parametrize(("kind", "changes"), [*((kind, {}) for kind in CAUSAL), *FORMS])
def test_forward_and_loss_are_those_of_transformers(kind: str, changes: dict[str, Any], transformers: Any) -> None:
    config = hf_model(kind, **changes)
    model = first_model(config, 3).eval()
    keys = transformers.AutoConfig.for_model(**json.loads(config.config), pad_token_id=None)
    theirs = transformers.AutoModelForCausalLM.from_config(keys, dtype=torch.float32)
    told = theirs.load_state_dict(dict(model.named_parameters()), strict=False)
    assert told.unexpected_keys == []
    assert {name.rpartition("lm_head")[1] for name in told.missing_keys} <= {"lm_head"}, "at most a tied head"
    theirs.eval()
    tokens = tokens_of(config, config.sequence_length + 1)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(input_ids=tokens).logits, rtol=0, atol=TOLERANCE)
        expected = theirs(input_ids=tokens, labels=tokens).loss
        torch.testing.assert_close(model.loss(tokens), expected, rtol=0, atol=TOLERANCE)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_whatever_is_accepted_makes_a_model_that_trains() -> None:
    rng = random.Random(1)
    made = 0
    for _ in range(200):
        kind = rng.choice(CAUSAL)
        rules, changes = ARCHITECTURES[kind].keys, {}
        for key in rng.sample(sorted(rules), 4):
            if accepted := [value for value in VALUES if rules[key].accepts(value)]:
                changes[key] = rng.choice(accepted)
        try:
            config = hf_model(kind, 8, **changes)
        except ValueError:
            continue
        model = build(config)
        model.loss(torch.zeros(1, 9, dtype=torch.int64)).backward()
        assert config.hf is not None
        assert sum(parameter.numel() for parameter in model.parameters()) <= parameters_most(config.hf)
        made += 1
    assert made > 100


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", CAUSAL)
def test_gradients_are_those_of_transformers(kind: str, checkpointing: bool) -> None:
    config = hf_model(kind, **without_dropout(kind))
    model = build(config, checkpointing)
    tokens = tokens_of(config, config.sequence_length + 1)
    model.loss(tokens).backward()
    ours = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.net(input_ids=tokens, labels=tokens).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", CAUSAL)
def test_parameters_are_bounded_before_anything_is_built(kind: str) -> None:
    for changes in ({}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}):
        config = hf_model(kind, **changes)
        assert config.hf is not None
        count = parameter_count(config)
        assert count == sum(parameter.numel() for parameter in build(config).parameters())
        assert count <= parameters_most(config.hf) < 1.6 * count
        names = [name for name, _ in named_shapes(config)]
        assert len(set(names)) == len(names)
        assert ("lm_head.weight" in names) == (not config.hf.is_tied), "a tied head stands once"


def test_every_flag_that_adds_parameters_is_bounded() -> None:
    flags = ("attention_bias", "mlp_bias", "qk_layernorm", "use_bias")
    for kind, architecture in ARCHITECTURES.items():
        config = hf_model(kind, **{flag: True for flag in flags if flag in architecture.keys})
        assert config.hf is not None
        assert parameter_count(config) <= parameters_most(config.hf)


def test_first_weights_are_those_of_the_seed_and_disturb_nobody() -> None:
    config = hf_model("llama")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, two, other = (first_model(config, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    flat = [torch.cat([parameter.detach().flatten() for parameter in each.parameters()]) for each in (one, two, other)]
    assert torch.equal(flat[0], flat[1])
    assert not torch.equal(flat[0], flat[2])


def test_no_padding_token_keeps_its_row_from_being_trained() -> None:
    config = hf_model("gemma", pad_token_id=0)
    model = build(config)
    model.loss(torch.zeros(1, 9, dtype=torch.int64)).backward()
    assert model.net.get_input_embeddings().padding_idx is None


@pytest.mark.parametrize("kind", CAUSAL)
def test_the_output_head_is_no_hidden_matrix(kind: str) -> None:
    config = hf_model(kind, tie_word_embeddings=False)
    live = LiveModel(build(config), autocast=False)
    hidden = {name for name, is_hidden in zip(live.names, live.is_hidden_matrix, strict=True) if is_hidden}
    assert "lm_head.weight" in live.names
    assert not any("lm_head" in name or "embed" in name or "wte" in name or "wpe" in name for name in hidden)
    assert len(hidden) == sum(len(shape) == 2 for shape in live.shapes) - (3 if kind == "gpt2" else 2)


def test_nothing_in_a_config_reaches_code_or_a_path() -> None:
    config = hf_model("llama", _name_or_path="/etc", torch_dtype="float16", use_cache=True, architectures=["Evil"])
    model = build(config)
    assert type(model.net).__module__ == "transformers.models.llama.modeling_llama"
    assert model.net.config._attn_implementation == "sdpa"
    assert model.net.config._name_or_path == ""
    assert model.net.config.use_cache is False


def test_importing_the_library_turns_the_hub_off() -> None:
    code = (
        "from p2ptrain.models.hf_model import library\nlibrary()\n"
        "import os, huggingface_hub.constants as hub\n"
        "from transformers.utils.hub import is_offline_mode\n"
        "print(os.environ['HF_HUB_OFFLINE'], hub.HF_HUB_OFFLINE, is_offline_mode())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.split() == ["1", "True", "True"]


def test_a_model_whose_buffers_train_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"BatchNorm1d 1 keeps running averages, .*Use a norm without them"):
        refuse_trained_buffers(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    refuse_trained_buffers(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False)))


def test_a_version_that_makes_other_parameters_is_told_before_anything_is_built() -> None:
    config = hf_model("qwen3")
    right = config.model_copy(update={"shapes": shapes_digest(named_shapes(config))})
    assert named_shapes(right) == named_shapes(config)
    wrong = config.model_copy(update={"shapes": "12" * 32})
    with pytest.raises(
        DeviceError, match=rf"transformers 5\S+ makes other parameters than the run's: .* of {'12' * 32}"
    ):
        need_of(run_of(wrong))


def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    hf_models.library.cache_clear()
    monkeypatch.setattr(hf_models, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        need_of(run_of(hf_model("olmo", vocab_size=300, sequence_length=24)))
    hf_models.library.cache_clear()
    assert str(caught.value) == "model.kind: this run trains a transformers model: pip install 'p2ptrain[hf]'"


# ---------------------------------------------------------------------------------------------------
# Training


@pytest.mark.parametrize("kind", CAUSAL)
def test_two_nodes_learn_and_stay_the_same_bits(kind: str, dataset: TokenDataset) -> None:
    run = run_of(hf_model(kind))
    trainers = [Trainer(run, ONE_THREAD, dataset) for _ in range(2)]
    before = trainers[0].evaluate(16)
    for number in range(6):
        swarm_round(trainers, number)
        assert trainers[0].root() == trainers[1].root()
    assert trainers[0].evaluate(16) < before - 0.2


@pytest.mark.parametrize("recipe", ["distro", "demo"])
def test_the_other_recipes_train_it_too(recipe: str, dataset: TokenDataset) -> None:
    trainers = [Trainer(run_of(hf_model("qwen2"), recipe), ONE_THREAD, dataset) for _ in range(2)]
    for number in range(2):
        swarm_round(trainers, number)
    assert trainers[0].root() == trainers[1].root()


@pytest.mark.parametrize("kind", DROPOUTS)
def test_a_training_that_is_repeated_gives_the_same_payload_also_with_dropout(
    kind: str, dataset: TokenDataset, tmp_path: Path
) -> None:
    run = run_of(hf_model(kind, **DROPOUTS[kind]))
    first, again = Trainer(run, ONE_THREAD, dataset), Trainer(run, ONE_THREAD, dataset)
    payloads = []
    for number in range(2):
        first.train(Share(number, 0, 1))
        payloads.append(first.contribute(number))
        first.apply(number, payloads[-1:], {number: payloads[-1]})
        if number == 0:
            first.save(tmp_path / "saved")
    torch.rand(7)  # whatever else has drawn numbers since
    again.load(tmp_path / "saved")
    again.train(Share(1, 0, 1))
    assert again.contribute(1) == payloads[1]
    still = Trainer(run_of(hf_model(kind, **dict.fromkeys(DROPOUTS[kind], 0.0))), ONE_THREAD, dataset)
    still.train(Share(0, 0, 1))
    assert still.contribute(0) != payloads[0], "there was dropout"


def test_dropout_differs_from_step_to_step_and_is_off_in_evaluation(dataset: TokenDataset) -> None:
    run = run_of(hf_model("gpt2", **DROPOUTS["gpt2"]), inner_learning_rate=0)
    trainer = Trainer(run, ONE_THREAD, dataset)
    assert trainer.evaluate(8) == trainer.evaluate(8)
    assert trainer.live.model.training
    drawn = []
    for number, place, step in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, 0)):
        with drawing(run, torch.device("cpu"), Share(number, place, 1), step, is_drawn=True):
            drawn.append(float(torch.rand(())))
    assert len(set(drawn[:4])) == 4
    assert drawn[4] == drawn[0]


# ---------------------------------------------------------------------------------------------------
# Beginning, exporting, memory


@pytest.mark.parametrize("kind", CAUSAL)
def test_an_export_loads_in_transformers_and_gives_the_same_logits(
    kind: str, tmp_path: Path, transformers: Any, dataset: TokenDataset
) -> None:
    config = hf_model(kind, torch_dtype="bfloat16", architectures=["Something"], pad_token_id=3)
    run = begin(run_of(config), dataset.directory, [ME]).run
    assert run.model.shapes == shapes_digest(named_shapes(config))
    trainer = Trainer(run, ONE_THREAD, dataset)
    assert trainer.root().hex() == run.state.initial_root
    swarm_round([trainer], 0)
    weights = weights_of(NodeDirectory(tmp_path / "node", run).save(1, trainer.replica.weights), run)
    export(tmp_path / "out", weights, BytesTokenizer(), (3, 3))
    theirs, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert {name: sorted(found) for name, found in told.items() if found} == {}, "nothing missing, nothing left over"
    assert {parameter.dtype for parameter in theirs.parameters()} == {torch.float32}
    ours = load_model(weights, torch.device("cpu"))
    tokens = tokens_of(config, config.sequence_length)
    with torch.no_grad():
        torch.testing.assert_close(theirs(input_ids=tokens).logits, ours(tokens), rtol=0, atol=TOLERANCE)
    start = torch.tensor([[0, 50, 60]])
    likeliest = theirs.generate(start, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert ours.generate(start, 8, 0.0, torch.Generator())[0].tolist() == likeliest[0].tolist()
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    carried = json.loads(config.config)
    assert {key: written[key] for key in carried if key not in {"torch_dtype", "architectures", "pad_token_id"}} == {
        key: carried[key] for key in carried if key not in {"torch_dtype", "architectures", "pad_token_id"}
    }
    assert [name for name, _ in exported_shapes(config)] == [name for name, _ in ours.named_parameters()]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", CAUSAL)
def test_the_memory_of_a_pass_is_estimated_generously(kind: str, checkpointing: bool) -> None:
    name = ARCHITECTURES[kind].name
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "vocab_size": 1_024}
    made = {name(key): size for key, size in sizes.items()}
    for dropout in ({}, DROPOUTS.get(kind, {})):
        config = hf_model(kind, sequence_length=64, **made, **(without_dropout(kind) | dropout))
        for autocast in (False, True):
            passes = PassSettings(autocast=autocast, checkpointing=checkpointing)
            real, told = peak_of_pass(config, 4, passes), activations(config, 4, passes)
            assert real <= told < 4.5 * real, f"{told / real:.2f} times the real use"  # most: recomputed halves


def test_memory_is_known_for_every_kind() -> None:
    for kind in ARCHITECTURES:
        config = hf_model(kind, vocab_size=257)
        need = need_of(run_of(config))
        assert need.state == 4 * parameter_count(config)
        assert math.isfinite(need.main("cpu"))
