"""First weights that the owner brings: they fit exactly, or the tensor and both shapes are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from p2ptrain.config import ModelConfig, RunConfig
from p2ptrain.data.tokenizer import BytesTokenizer, JsonTokenizer
from p2ptrain.errors import ConfigError, DataError
from p2ptrain.exact.root import state_root
from p2ptrain.models.export import export, model_config
from p2ptrain.models.given_weights import read_checkpoint, read_weights
from p2ptrain.models.kinds import exported_shapes, first_model, named_shapes, parameter_count, shapes_digest
from p2ptrain.node.home import Home
from p2ptrain.node.saved import open_weights
from p2ptrain.train.begin import GivenWeights, begin
from tests.helpers.export import NodeDirectory, run_of, state_of, weights_of
from tests.helpers.hf_models import hf_model, raw_config
from tests.helpers.tokenizers import tokenizer_json
from tests.helpers.trainer import TINY

MODEL = ModelConfig(**TINY)
ME = "ab" * 32


def tensors(model: ModelConfig = MODEL, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    made = first_model(model, 7).parameters()
    return {name: each.detach().to(dtype) for (name, _), each in zip(exported_shapes(model), made, strict=True)}


def flat(named: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.float().flatten() for each in named.values()])


def saved(path: Path, named: dict[str, torch.Tensor]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: each.contiguous() for name, each in named.items()}, path)
    return path


def refusal(path: Path, model: ModelConfig = MODEL) -> str:
    with pytest.raises((ConfigError, DataError)) as caught:
        read_weights(path, model)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{path}: ")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_safetensors_file_is_read_by_name_and_becomes_fp32(dtype: torch.dtype, tmp_path: Path) -> None:
    named = tensors(dtype=dtype)
    path = saved(tmp_path / "a.safetensors", dict(reversed(named.items())))
    found = read_weights(path, MODEL)
    assert found.dtype == torch.float32
    assert torch.equal(found, flat(named))


def test_names_without_the_prefix_tied_heads_and_old_tables_are_understood(tmp_path: Path) -> None:
    named = tensors()
    shorter = {name.removeprefix("model."): each for name, each in named.items()}
    shorter["lm_head.weight"] = named["model.embed_tokens.weight"].clone()
    shorter["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    assert torch.equal(read_weights(saved(tmp_path / "a.safetensors", shorter), MODEL), flat(named))


def test_a_directory_is_read_as_one_file_or_as_shards(tmp_path: Path) -> None:
    named = tensors()
    saved(tmp_path / "one" / "model.safetensors", named)
    names, parts = list(named), tmp_path / "parts"
    places = {}
    for number, chosen in enumerate((names[:5], names[5:])):
        saved(parts / f"part-{number}.safetensors", {name: named[name] for name in chosen})
        places |= dict.fromkeys(chosen, f"part-{number}.safetensors")
    index = parts / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    assert torch.equal(read_weights(tmp_path / "one", MODEL), flat(named))
    assert torch.equal(read_weights(parts, MODEL), flat(named))
    for bad in ("../one/model.safetensors", "part-2.safetensors", "a.bin"):
        index.write_text(json.dumps({"weight_map": {"x": bad}}))
        assert refusal(parts).endswith(f"names '{bad}', which is no safetensors file beside it")
    index.write_text("[]")
    assert refusal(parts).endswith("not an index of safetensors")


def test_what_does_not_fit_is_named_with_both_shapes(tmp_path: Path) -> None:
    named = tensors()
    wrong = named | {"model.norm.weight": torch.ones(7), "extra": torch.ones(1), "more": torch.ones(1)}
    del wrong["model.layers.1.mlp.up_proj.weight"]
    assert refusal(saved(tmp_path / "a.safetensors", wrong)) == (
        "the weights do not fit the run's model: model.norm.weight is [7] there and [32] in the model; "
        "1 missing: model.layers.1.mlp.up_proj.weight; 2 left over: extra, more. "
        "Begin with the config.json that belongs to these weights"
    )
    deeper = ModelConfig(**(TINY | {"layers": 4}))
    why = refusal(saved(tmp_path / "b.safetensors", named), deeper)
    assert "18 missing: model.layers.2.input_layernorm.weight, " in why
    assert "and 14 more" in why


@pytest.mark.parametrize(("change", "what"), [
    (torch.full((32,), torch.nan), "model.norm.weight has numbers that are not finite. "),
    (torch.full((32,), torch.inf, dtype=torch.float64), "model.norm.weight has numbers that are not finite. "),
    (torch.full((32,), 1e300, dtype=torch.float64), "model.norm.weight has numbers that are not finite. "),
    (torch.ones(32, dtype=torch.int8), "model.norm.weight is int8: quantised weights are not read. Take"),
    (torch.ones(32).to(torch.float8_e4m3fn), "model.norm.weight is float8_e4m3fn: quantised weights are not read"),
])  # fmt: skip
def test_numbers_that_cannot_train_are_refused(change: torch.Tensor, what: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "a.safetensors", tensors() | {"model.norm.weight": change})
    assert refusal(path).startswith(what)


def test_a_head_of_its_own_does_not_pass_as_tied(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.safetensors", tensors() | {"lm_head.weight": torch.zeros(256, 32)})
    assert refusal(path).startswith(
        "lm_head.weight is not model.embed_tokens.weight, and the run's model has one matrix"
    )


def test_a_pickle_is_never_read(tmp_path: Path) -> None:
    trap = f"cos\nsystem\n(S'touch {tmp_path / 'sprung'}'\ntR.".encode()  # what reading a pickle would run
    for name in ("pytorch_model.bin", "model.pt", "a.pth"):
        place = tmp_path / name.partition(".")[0]
        place.mkdir(exist_ok=True)
        (place / name).write_bytes(trap)
        assert "a pickle" in refusal(place)
        assert "save_pretrained(DIR) of transformers does" in refusal(place / name)
    (tmp_path / "a.safetensors").write_bytes(trap)
    assert "not safetensors" in refusal(tmp_path / "a.safetensors")
    assert not (tmp_path / "sprung").exists()


def test_a_place_without_weights_says_what_to_name(tmp_path: Path) -> None:
    assert refusal(tmp_path / "missing").startswith("it does not exist. Name a directory or a file")
    assert refusal(tmp_path).startswith("there is no model.safetensors. Name a directory that a model was saved to")
    (tmp_path / "a.gguf").touch()
    assert refusal(tmp_path / "a.gguf").endswith(
        "Write it as safetensors: model.save_pretrained(DIR) of transformers does, or safetensors.torch.save_file"
    )


@pytest.mark.parametrize(("key", "value", "named"), [
    ("model_type", "mistral", "model_type"), ("num_attention_heads", 4, "num_attention_heads"),
    ("rms_norm_eps", 1e-6, "rms_norm_eps"), ("rope_theta", 500_000, "rope_theta"),
    ("rope_parameters", {"rope_theta": 500.0}, "rope_theta"), ("rope_parameters", {"rope_type": "yarn"}, "rope_type"),
    ("rope_scaling", {"rope_type": "llama3", "factor": 32.0}, "rope_type"),
    ("rope_scaling", {"type": "linear", "factor": 2.0}, "rope_type"),
])  # fmt: skip
def test_other_arithmetic_than_the_runs_is_refused_though_every_shape_fits(
    key: str, value: Any, named: str, tmp_path: Path
) -> None:
    saved(tmp_path / "model.safetensors", tensors())
    said = model_config(MODEL, 0)
    (tmp_path / "config.json").write_text(json.dumps(said))
    assert torch.equal(read_weights(tmp_path, MODEL), flat(tensors()))
    if key == "rope_parameters":
        del said["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(said | {key: value}))
    assert refusal(tmp_path).startswith(f"model: its config.json has {named} = ")


@pytest.mark.parametrize("said", [{}, {"rope_theta": 10_000.0, "rope_scaling": None}, {"rope_parameters": None}])
def test_what_a_config_json_leaves_out_is_as_in_the_run(said: dict[str, Any], tmp_path: Path) -> None:
    saved(tmp_path / "model.safetensors", tensors())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | said))
    assert torch.equal(read_weights(tmp_path, MODEL), flat(tensors()))


# ---------------------------------------------------------------------------------------------------
# Beginning with them


def test_a_run_begins_with_given_weights_and_their_root(tmp_path: Path) -> None:
    run = RunConfig(name="test", model=MODEL)
    path = saved(tmp_path / "a.safetensors", tensors())
    given, _ = open_weights(Home(NodeDirectory(tmp_path / "node", run_of()).config), path)
    begun = begin(run, tmp_path / "data", [ME], given=given)
    assert begun.run.state.initial_root == state_root(flat(tensors())).hex()
    assert begun.state == flat(tensors()).numpy().tobytes()
    assert begin(begun.run, tmp_path / "data", [ME], given=given) == begun
    with pytest.raises(ConfigError, match=r"different first weights .* or give the --weights that it began with"):
        begin(begun.run, tmp_path / "data", [ME])


def test_a_checkpoint_and_an_export_of_another_run_are_first_weights(tmp_path: Path) -> None:
    other = run_of()
    node = NodeDirectory(tmp_path / "node", other)
    checkpoint = node.save(8, state_of(other))
    given, _ = open_weights(Home(node.config), checkpoint.path)
    assert torch.equal(given.read(other.model), state_of(other))
    export(tmp_path / "out", weights_of(checkpoint, other), BytesTokenizer(), None)
    exported, _ = open_weights(Home(node.config), tmp_path / "out")
    assert torch.equal(exported.read(other.model), state_of(other))
    with pytest.raises(ConfigError, match=r"model\.embed_tokens\.weight is \[256, 24\] there and \[256, 32\] in the"):
        given.read(MODEL)
    (checkpoint.path / "state.bin").write_bytes(bytes(4 * state_of(other).numel()))
    with pytest.raises(DataError, match="damaged"):
        open_weights(Home(node.config), checkpoint.path)
    with pytest.raises(DataError, match="damaged"):
        read_checkpoint(weights_of(checkpoint, other, blake3="0" * 64), other.model)


@pytest.mark.parametrize(("changes", "named"), [
    ({"heads": 3, "kv_heads": 3, "dim": 24}, "num_attention_heads = 6, and the run 3"),
    ({"rope_theta": 500_000}, "rope_theta = 10000.0, and the run 500000.0"),
])  # fmt: skip
def test_a_checkpoint_of_other_arithmetic_is_refused_though_every_shape_fits(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    sizes = {"dim": 24, "heads": 6, "kv_heads": 6, "layers": 2, "ffn_dim": 40, "sequence_length": 33}
    other = run_of(model=sizes)
    weights = weights_of(NodeDirectory(tmp_path / "node", other).save(8, state_of(other)), other)
    longer = ModelConfig(**(sizes | {"sequence_length": 64}))  # which changes no number
    assert torch.equal(read_checkpoint(weights, longer), state_of(other))
    with pytest.raises(ConfigError) as caught:
        read_checkpoint(weights, ModelConfig(**(sizes | changes)))
    assert str(caught.value).startswith(f"{weights.path}: model: its run has {named}. ")


def test_the_weights_own_tokenizer_is_suggested(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = saved(tmp_path / "hf" / "model.safetensors", tensors())
    given = GivenWeights(path.parent, lambda model: flat(tensors()))
    run = RunConfig(name="test", model=MODEL)
    begin(run, tmp_path / "data", [ME], given=given)
    assert not caplog.records
    file = path.parent / "tokenizer.json"
    file.write_bytes(JsonTokenizer(tokenizer_json()).file_bytes)
    begin(run, tmp_path / "data", [ME], given=given)
    assert caplog.messages == [
        f"{file} is not the tokenizer of the data: `p2ptrain data prepare ... --tokenizer {file}` makes data whose "
        "tokens these weights know"
    ]


# ---------------------------------------------------------------------------------------------------
# Models of transformers


@pytest.mark.hf
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3", "gemma", "smollm3", "olmo2", "mistral", "qwen2", "phi"])
def test_what_transformers_saves_is_read(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers: make test-hf installs it")
    keys = transformers.AutoConfig.for_model(**raw_config(kind), pad_token_id=None)
    theirs = transformers.AutoModelForCausalLM.from_config(keys, dtype=torch.bfloat16)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    model = hf_model(kind)
    found = read_weights(tmp_path, model)
    assert torch.equal(found, flat(dict(theirs.named_parameters())))
    eps = "layer_norm_epsilon" if kind == "gpt2" else "layer_norm_eps" if kind == "phi" else "rms_norm_eps"
    assert refusal(tmp_path, hf_model(kind, **{eps: 1e-3})).startswith(f"model: its config.json has {eps} = 1e-0")


@pytest.mark.hf
@pytest.mark.filterwarnings("default")
def test_a_checkpoint_of_a_model_of_transformers_is_refused_if_its_arithmetic_is_other(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers: make test-hf installs it")
    model = hf_model("llama")
    names = {"manifest": "1" * 64, "initial_root": "2" * 64, "shapes": shapes_digest(named_shapes(model))}
    run = RunConfig(name="x", model=model).sealed(founders=[ME], **names)
    state = torch.ones(parameter_count(run.model))
    weights = weights_of(NodeDirectory(tmp_path / "node", run).save(8, state), run)
    assert torch.equal(read_checkpoint(weights, hf_model("llama", max_position_embeddings=99)), state)
    with pytest.raises(ConfigError, match=r"model: its run has hidden_act = \"silu\", and the run \"gelu\""):
        read_checkpoint(weights, hf_model("llama", hidden_act="gelu"))


GPT2 = """{
  "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
  "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
  "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
  "resid_pdrop": 0.1, "summary_activation": null, "summary_first_dropout": 0.1, "summary_proj_to_labels": true,
  "summary_type": "cls_index", "summary_use_proj": true,
  "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}}, "vocab_size": 50257
}"""


@pytest.mark.hf
@pytest.mark.filterwarnings("default")
def test_a_folder_as_gpt2_is_published_begins_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers: make test-hf installs it")
    assert parameter_count(ModelConfig(kind="transformers", config=GPT2, sequence_length=1_024)) == 124_439_808
    place, tiny = tmp_path / "gpt2", json.loads(GPT2) | {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 256}
    place.mkdir()
    (place / "config.json").write_text(json.dumps(tiny))
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**tiny, pad_token_id=None))
    named = {name.removeprefix("transformer."): each.detach() for name, each in theirs.named_parameters()}
    expected = flat(named)
    tables = {f"h.{layer}.attn.bias": torch.ones(1, 1, 1_024, 1_024).tril() for layer in range(2)}
    saved(place / "model.safetensors", {name: each.clone() for name, each in (named | tables).items()})
    given, beside = open_weights(Home(NodeDirectory(tmp_path / "node", run_of()).config), place)
    run = RunConfig(name="x", model=ModelConfig(kind="transformers", config=beside(), sequence_length=64))
    with caplog.at_level("INFO", "p2ptrain.train"):
        begun = begin(run, tmp_path / "data", [ME], given=given)
        assert begun.state == expected.numpy().tobytes()
        drawn = begin(run, tmp_path / "data", [ME])
    assert drawn.state != begun.state
    assert [each for each in caplog.messages if each.startswith("first weights")] == [
        f"first weights of the gpt2: those of {place}",
        "first weights of the gpt2: drawn from seed 0, because no --weights are given",
    ]
    weights = weights_of(NodeDirectory(tmp_path / "other", begun.run).save(0, expected), begun.run)
    export(tmp_path / "out", weights, BytesTokenizer(), None)
    assert torch.equal(
        transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out").lm_head.weight, named["wte.weight"]
    )


def test_weights_that_are_not_there_are_told_with_the_place_and_never_drawn_instead(tmp_path: Path) -> None:
    place = tmp_path / "gpt2"
    _, beside = open_weights(Home(NodeDirectory(tmp_path / "node", run_of()).config), place)
    with pytest.raises(ConfigError) as caught:
        beside()
    assert str(caught.value) == (
        f"{place}: it does not exist. Name a directory or a file with weights. For random weights leave "
        "--weights out, and write the text of config.json as model.config"
    )
    place.mkdir()
    (place / "config.json").write_text("{}")
    assert refusal(place).startswith("there is no model.safetensors. Name a directory that a model was saved to, or a")
