"""The config.json that a run carries comes from strangers: only listed keys, within bounds, and counted before use."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from p2ptrain.config import CONFIG_BYTES_MAX, ModelConfig, RunConfig
from p2ptrain.config.hf import ARCHITECTURES, HF_CONFIG_BYTES_MAX, PARAMETERS_MAX, parameters_most, read_hf_config
from p2ptrain.config.text import config_error
from p2ptrain.errors import RemoteProtocolError
from tests.helpers.hf_models import hf_model, raw_config

SMOLLM2 = """{
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 0,
  "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
  "intermediate_size": 1536, "is_llama_config": true, "max_position_embeddings": 8192, "model_type": "llama",
  "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "pretraining_tp": 1,
  "rms_norm_eps": 1e-05, "rope_interleaved": false, "rope_scaling": null, "rope_theta": 100000,
  "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": true,
  "vocab_size": 49152
}"""


def refusal(text: str) -> str:
    with pytest.raises(ValueError, match=": ") as caught:
        read_hf_config(text)
    return str(caught.value)


def refused(kind: str = "llama", **changes: Any) -> str:
    return refusal(json.dumps(raw_config(kind, **changes)))


def test_a_published_config_passes_and_its_sizes_are_the_models() -> None:
    model = ModelConfig(kind="transformers", config=SMOLLM2, sequence_length=2_048)
    assert model.hf is not None
    assert (model.vocab_size, model.dim, model.layers, model.heads, model.kv_heads) == (49_152, 576, 30, 9, 3)
    assert 134_515_008 < parameters_most(model.hf) < 1.02 * 134_515_008
    assert "torch_dtype" not in model.hf.keys
    assert model.hf.keys["rope_theta"] == 100_000


@pytest.mark.parametrize("key", [
    "auto_map", "attn_implementation", "_attn_implementation", "_attn_implementation_internal", "quantization_config",
    "base_model_tp_plan", "kernel_config", "custom_pipelines", "trust_remote_code", "gradient_checkpointing",
    "experts_implementation", "num_experts", "name_or_path", "adapter_path", "text_config", "torchscript",
    "problem_type", "id2label", "rope_theta ", "", "hidden_size\x00", "__class__",
])  # fmt: skip
def test_a_key_that_is_not_listed_is_refused_by_its_name(key: str) -> None:
    why = refused(**{key: 1})
    assert "\n" not in why
    assert why.isprintable()
    if key.strip() == key and key.isidentifier():
        assert why == f"config.json has {key}, which p2ptrain does not accept: remove it"


def test_many_refused_keys_are_named_in_one_short_line() -> None:
    why = refused(**{f"key{number}": 0 for number in range(400)})
    assert why == "config.json has key0, key1, key10, key100, key101, ..., which p2ptrain does not accept: remove them"


@pytest.mark.parametrize(("changes", "what"), [
    ({"hidden_size": 2**40}, "hidden_size in config.json has a value that p2ptrain does not accept: use a whole"),
    ({"hidden_size": 32.0}, "hidden_size in config.json has a value"),
    ({"hidden_size": True}, "hidden_size in config.json has a value"),
    ({"hidden_size": -32}, "hidden_size in config.json has a value"),
    ({"hidden_size": "32"}, "hidden_size in config.json has a value"),
    ({"hidden_size": None}, "hidden_size in config.json has a value"),
    ({"hidden_size": 33}, "4 attention heads in config.json do not divide a width of 33: "),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers in config.json has a value"),
    ({"vocab_size": 2**21}, "vocab_size in config.json has a value"),
    ({"num_key_value_heads": 3}, "num_key_value_heads in config.json does not divide 4 heads: "),
    ({"rms_norm_eps": 0}, "rms_norm_eps in config.json has a value"),
    ({"hidden_act": "os.system"}, "hidden_act in config.json has a value"),
    ({"attention_dropout": 1.5}, "attention_dropout in config.json has a value"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings in config.json has a value"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling in config.json has a value"),
    ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling in config.json lacks factor: add it"),
    ({"rope_scaling": {"rope_type": "linear", "factor": [2]}}, "rope_scaling in config.json has a value"),
    ({"rope_parameters": {"file": "/etc/passwd"}}, "rope_parameters in config.json has a value"),
    ({"head_dim": 7}, "7 numbers of a head in config.json are turned by rotary positions: they need pairs"),
    ({"architectures": ["x" * 1_000]}, "architectures in config.json has a value"),
    ({"pretraining_tp": 2}, "pretraining_tp in config.json has a value"),
    ({"torch_dtype": "torch.float64"}, "torch_dtype in config.json has a value"),
    ({"_name_or_path": "a" * 300}, "_name_or_path in config.json has a value"),
    ({"model_type": "mamba"}, "config.json has model_type mamba, which p2ptrain does not train: use one of bert"),
    ({"model_type": ["llama"]}, "config.json has model_type ['llama'], which p2ptrain does not train: "),
    ({"model_type": None}, "config.json has no model_type, which p2ptrain does not train: "),
])  # fmt: skip
def test_a_value_out_of_range_is_refused_with_its_key_and_the_range(changes: dict[str, Any], what: str) -> None:
    assert refused(**changes).startswith(what)


def test_a_list_for_each_layer_has_that_length_and_a_window_where_it_slides() -> None:
    why = refused("smollm3", no_rope_layers=[1])
    assert why == "no_rope_layers in config.json has 1 entries: it needs 2, one a layer"
    sliding = {"layer_types": ["full_attention", "sliding_attention"]}
    assert refused("qwen2", **sliding).startswith("layer_types in config.json has sliding_attention and no window: add")
    read_hf_config(json.dumps(raw_config("qwen2", **sliding, sliding_window=8, use_sliding_window=True)))


@pytest.mark.parametrize("missing", ["hidden_size", "vocab_size", "num_hidden_layers", "intermediate_size"])
def test_a_size_is_never_guessed(missing: str) -> None:
    raw = raw_config("llama")
    del raw[missing]
    assert refusal(json.dumps(raw)) == f"config.json lacks {missing}: add it, a size is never guessed"


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_model_beyond_every_swarm_is_refused_by_its_count(kind: str) -> None:
    name = ARCHITECTURES[kind].name
    sizes = {name("hidden_size"): 65_536, name("num_hidden_layers"): 1_024, name("intermediate_size"): 2**18}
    why = refused(kind, **sizes)
    assert why.endswith(f" parameters: p2ptrain trains at most {PARAMETERS_MAX:,}")


@pytest.mark.parametrize(("text", "what"), [
    ("", "cannot be read"),
    ("[" * 16_000, "is nested too deeply"),
    ('{"a":' * 3_000, "is nested too deeply"),
    ("[1, 2]", "is not a table of keys and values"),
    ('{"rms_norm_eps": NaN}', "cannot be read (NaN is not a number)"),
    ('{"rms_norm_eps": -Infinity}', "cannot be read (-Infinity is not a number)"),
    ('{"rms_norm_eps": 1e999}', "cannot be read (a number is too large)"),
    ('{"hidden_size": ' + "9" * 10_000 + "}", "cannot be read (Exceeds the limit"),
    ('{"hidden_size": 32, "hidden_size": 64}', "cannot be read (hidden_size twice)"),
    (" " * (HF_CONFIG_BYTES_MAX + 1), "is larger than 16,384 bytes"),
    ('{"\x1b[2J": 1}', "has characters that cannot be printed"),
    ('{"\ud800": 1}', "has characters that cannot be printed"),
])  # fmt: skip
def test_a_text_that_is_no_config_is_refused_in_one_line(text: str, what: str) -> None:
    why = refusal(text)
    assert why.startswith(f"config.json {what}")
    assert len(why) < 300
    assert why.isprintable()


@settings(max_examples=200, deadline=None)
@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=8), each, max_size=3),
    max_leaves=8,
), st.sampled_from(sorted(ARCHITECTURES["smollm3"].keys)))  # fmt: skip
def test_any_value_is_accepted_or_refused_in_a_line(value: Any, key: str) -> None:
    try:
        read_hf_config(json.dumps(raw_config("smollm3", **{key: value})))
    except ValueError as error:
        assert "\n" not in str(error)
        assert ": " in str(error)


# ---------------------------------------------------------------------------------------------------
# As part of a run


def messages(**model: Any) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        RunConfig(name="x", model=model)
    return [str(config_error(each, RunConfig, RunConfig)) for each in caught.value.errors(include_url=False)]


def test_sizes_of_the_built_in_model_are_refused_beside_a_config() -> None:
    text = json.dumps(raw_config("llama"))
    for key, value in (("dim", 64), ("layers", 3), ("preset", "10m"), ("rope_theta", 500), ("vocab_size", 300)):
        assert messages(kind="transformers", config=text, **{key: value}) == [
            f'model: {key} describes a model of kind = "builtin". Remove it, config has the sizes'
        ]


def test_a_config_is_refused_for_the_built_in_model_and_missed_for_the_other() -> None:
    text = json.dumps(raw_config("llama"))
    assert messages(config=text) == [
        'model: config belongs to a model of kind = "transformers". Remove it, or set that kind'
    ]
    [why] = messages(kind="transformers")
    assert why.startswith('model: kind = "transformers" needs the config.json of a model. Write its text as config = ')
    [why] = messages(kind="transformers", config=text, sequence_length=65)
    assert why == "model: sequence_length = 65. The model of config reads at most 64 tokens, lower it"


def test_a_run_carries_the_config_as_it_is_and_gets_an_id_with_the_shapes() -> None:
    run = RunConfig(name="x", model=hf_model("qwen2"))
    assert RunConfig.from_canonical(run.canonical()) == run
    founders = ["ab" * 32]
    assert not run.sealed(manifest="1" * 64, initial_root="2" * 64, founders=founders).is_sealed, "shapes are missing"
    sealed = run.sealed(manifest="1" * 64, initial_root="2" * 64, founders=founders, shapes="3" * 64)
    assert sealed.is_sealed
    assert sealed.model.config == run.model.config
    assert RunConfig.from_canonical(sealed.canonical()).run_id == sealed.run_id


def test_a_config_of_a_peer_that_is_not_accepted_is_a_broken_rule() -> None:
    run = RunConfig(name="x", model=hf_model("llama"))
    bad = run.canonical().replace(b'\\"hidden_size\\"', b'\\"auto_map\\"')
    with pytest.raises(RemoteProtocolError, match=r"run config: model: .*config\.json has auto_map, which"):
        RunConfig.from_canonical(bad)


def test_a_run_that_fits_no_message_is_refused_before_it_has_an_id() -> None:
    text = json.dumps(raw_config("llama")) + "\n" * (HF_CONFIG_BYTES_MAX - 1_000)  # escaped, each takes two bytes
    model = ModelConfig(kind="transformers", config=text, sequence_length=32)
    assert len(RunConfig(name="x", model=model).canonical()) < CONFIG_BYTES_MAX
    keys = tuple(f"{index:064x}" for index in range(640))
    with pytest.raises(ValidationError, match=r"a config of [0-9,]+ bytes, and 65,536 fit a message: shorten"):
        RunConfig.model_validate({"name": "x", "model": model, "admission": {"policy": "allowlist", "keys": keys}})
