"""Checks the config.json of a Hugging Face model: a run carries one, so it comes from strangers.

For each model type that p2ptrain trains there is a list of keys with their types and ranges; every other key is refused
by name. The accepted keys choose sizes and arithmetic, but no code, implementation, path or network, and an upper bound
on the parameters is computed before a model is built. This module imports neither torch nor transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NoReturn

from p2ptrain.errors import SettingError

HF_CONFIG_BYTES_MAX = 16_384  # the largest that were found have 4 KB, most of it a list with an entry for each layer
NESTED_MAX = 500  # brackets: the usual ones have ten; how deep JSON may be depends on the version of Python
PARAMETERS_MAX = 2**38  # a TB of weights in fp32, more than any swarm of volunteers holds
SHOWN_KEYS_MAX = 5  # refused keys listed in an error
SHOWN_KEY_LENGTH_MAX = 40
Objective = Literal["causal", "masked"]


@dataclass(frozen=True, slots=True)
class Rule:
    """The values that a key accepts, in words and as a check."""

    words: str
    accepts: Callable[[Any], bool]

    def or_null(self) -> Rule:
        return Rule(f"{self.words}, or null", lambda value: value is None or self.accepts(value))


def _whole(least: int, most: int) -> Rule:
    return Rule(f"a whole number from {least:,} to {most:,}", lambda each: type(each) is int and least <= each <= most)


def _number(least: float, most: float) -> Rule:
    def accepts(value: object) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most

    return Rule(f"a number from {least:g} to {most:g}", accepts)


def _one_of(*choices: object) -> Rule:
    def accepts(value: object) -> bool:
        return any(type(value) is type(choice) and value == choice for choice in choices)

    return Rule(" or ".join(json.dumps(choice) for choice in choices), accepts)


def _text(length: int) -> Rule:
    return Rule(f"text of at most {length} characters", lambda each: isinstance(each, str) and len(each) <= length)


def _list(rule: Rule, length: int) -> Rule:
    def accepts(value: object) -> bool:
        return isinstance(value, list) and len(value) <= length and all(map(rule.accepts, value))

    return Rule(f"a list of at most {length:,}, each {rule.words}", accepts)


def _table(rules: Mapping[str, Rule]) -> Rule:
    def accepts(value: object) -> bool:
        return isinstance(value, dict) and all(key in rules and rules[key].accepts(each) for key, each in value.items())

    return Rule("; ".join(f"{key}: {rule.words}" for key, rule in rules.items()), accepts)


FLAG = Rule("true or false", lambda value: isinstance(value, bool))
DROPOUT = _number(0, 0.9)
EPSILON = _number(1e-12, 0.1)
MULTIPLIER = _number(1e-6, 1e6)
POSITIONS_MAX = 2**24
TOKEN_TYPES_MAX = 16  # BERT has 2
LAYERS_MAX = 1_024  # this and the other bounds are those of the built-in model
TOKEN = _whole(0, 2**20).or_null()
ACTIVATION = _one_of("silu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu")
ROPE = _table({
    "rope_theta": _number(1, 1e12),
    "rope_type": _one_of("default", "linear", "llama3"),  # other types change with the length of a text
    "type": _one_of("default", "linear", "llama3"),
    "factor": _number(1, 1_024),
    "low_freq_factor": _number(0.01, 1_024),
    "high_freq_factor": _number(0.01, 1_024),
    "original_max_position_embeddings": _whole(8, POSITIONS_MAX),
    "partial_rotary_factor": _number(0.01, 1),
})  # fmt: skip
_DRAWING = _table({"do_sample": FLAG, "max_length": _whole(1, POSITIONS_MAX)})

# Keys about files, texts or other uses of a model: they are checked, and then ignored.
WITHOUT_EFFECT: dict[str, Rule] = {
    "_name_or_path": _text(200),
    "architectures": _list(_text(80), 4).or_null(),
    "bos_token_id": TOKEN,
    "classifier_dropout": DROPOUT.or_null(),
    "dtype": _one_of("float32", "bfloat16", "float16").or_null(),  # a run trains in fp32
    "eos_token_id": Rule(TOKEN.words, lambda value: TOKEN.accepts(value) or _list(TOKEN, 16).accepts(value)),
    "is_decoder": FLAG,
    "is_llama_config": _one_of(True),
    "pad_token_id": Rule("a token's number", lambda value: value == -1 or TOKEN.accepts(value)),
    "pretraining_tp": _one_of(1),
    "rope_interleaved": _one_of(False),
    "task_specific_params": _table({"text-generation": _DRAWING}).or_null(),  # in GPT-2's
    "torch_dtype": _one_of("float32", "bfloat16", "float16").or_null(),
    "transformers_version": _text(40),
    "use_cache": FLAG,
}
_POSITIONS = {"rope_theta": _number(1, 1e12), "rope_scaling": ROPE.or_null(), "rope_parameters": ROPE.or_null()}
_WINDOW = {
    "layer_types": _list(_one_of("full_attention", "sliding_attention"), LAYERS_MAX).or_null(),
    "max_window_layers": _whole(0, LAYERS_MAX),
    "sliding_window": _whole(1, POSITIONS_MAX).or_null(),
    "use_sliding_window": FLAG,
}
_USUAL = {
    "vocab_size": _whole(2, 2**20),
    "hidden_size": _whole(8, 65_536),
    "intermediate_size": _whole(8, 2**18),
    "num_hidden_layers": _whole(1, LAYERS_MAX),
    "num_attention_heads": _whole(1, 1_024),
    "max_position_embeddings": _whole(8, POSITIONS_MAX),
    "attention_dropout": DROPOUT,
    "hidden_act": ACTIVATION,
    "initializer_range": _number(0, 1),
    "tie_word_embeddings": FLAG,
}
_SHARED_HEADS = {"num_key_value_heads": _whole(1, 1_024)}
_HEAD_DIM = {"head_dim": _whole(2, 1_024).or_null()}
_RMS = {"rms_norm_eps": EPSILON}
_LAYER_NORM = {"layer_norm_eps": EPSILON}
_BIAS = {"attention_bias": FLAG}
_LLAMA = {**_USUAL, **_SHARED_HEADS, **_RMS, **_BIAS, **_POSITIONS}


@dataclass(frozen=True, slots=True)
class Architecture:
    """Everything that is special about a model type; no other code depends on a type's name."""

    keys: Mapping[str, Rule]
    names: Mapping[str, str] = field(default_factory=dict)  # the type's names for the usual sizes
    is_head_plain: bool = True  # whether logits are linear(hidden, weight) and nothing else
    also_needed: tuple[str, ...] = ()  # sizes whose defaults in transformers belong to one published model
    is_tied: bool = False  # transformers' default, for a config without the key
    dropout: float = 0.0  # likewise transformers' default
    is_transposed: bool = False  # whether its matrices are [inputs, outputs]
    objective: Objective = "causal"  # what its models learn
    has_positions: bool = False  # whether each position has weights of its own
    base: str = "model."  # prefix of all parameter names but the output head's

    def name(self, usual: str) -> str:
        return self.names.get(usual, usual)


_GPT2_NAMES = {
    "hidden_size": "n_embd", "intermediate_size": "n_inner", "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head", "max_position_embeddings": "n_positions", "hidden_act": "activation_function",
}  # fmt: skip
_GPT2_KEYS = {
    "vocab_size": _USUAL["vocab_size"],
    "n_embd": _USUAL["hidden_size"],
    "n_inner": _USUAL["intermediate_size"].or_null(),
    "n_layer": _USUAL["num_hidden_layers"],
    "n_head": _USUAL["num_attention_heads"],
    "n_positions": _whole(8, 2**20),  # each position has weights of its own
    "n_ctx": _whole(8, 2**20),
    "activation_function": ACTIVATION,
    "attn_pdrop": DROPOUT,
    "embd_pdrop": DROPOUT,
    "resid_pdrop": DROPOUT,
    "initializer_range": _number(0, 1),
    "layer_norm_epsilon": EPSILON,
    "add_cross_attention": _one_of(False),
    "reorder_and_upcast_attn": _one_of(False),
    "scale_attn_by_inverse_layer_idx": FLAG,
    "scale_attn_weights": FLAG,
    "summary_activation": _text(40).or_null(),
    "summary_first_dropout": DROPOUT,
    "summary_proj_to_labels": FLAG,
    "summary_type": _text(40),
    "summary_use_proj": FLAG,
    "tie_word_embeddings": FLAG,
}
_BERT_KEYS = {
    **{key: rule for key, rule in _USUAL.items() if key != "attention_dropout"},
    **_LAYER_NORM,
    "max_position_embeddings": _whole(8, 2**20),  # each has weights of its own
    "add_cross_attention": _one_of(False),
    "attention_probs_dropout_prob": DROPOUT,
    "hidden_dropout_prob": DROPOUT,
    "is_decoder": _one_of(False),
    "position_embedding_type": _one_of("absolute"),
    "type_vocab_size": _whole(1, TOKEN_TYPES_MAX),
}
ARCHITECTURES: dict[str, Architecture] = {
    "bert": Architecture(_BERT_KEYS, is_tied=True, dropout=0.1, is_head_plain=False, objective="masked",
        has_positions=True, base="bert."),
    "gemma": Architecture({**_LLAMA, **_HEAD_DIM, "hidden_activation": ACTIVATION.or_null(),
        "use_bidirectional_attention": _one_of(False).or_null()},
        also_needed=("num_key_value_heads", "head_dim"), is_tied=True),
    "gpt2": Architecture(_GPT2_KEYS, _GPT2_NAMES, is_tied=True, dropout=0.1,
        is_transposed=True, has_positions=True, base="transformer."),
    "gpt_neox": Architecture({**_USUAL, **_LAYER_NORM, **_BIAS, **_POSITIONS, "hidden_dropout": DROPOUT,
        "rotary_emb_base": _number(1, 1e12), "rotary_pct": _number(0.01, 1), "use_parallel_residual": FLAG},
        base="gpt_neox."),
    "granite": Architecture({**_LLAMA, "attention_multiplier": MULTIPLIER, "embedding_multiplier": MULTIPLIER,
        "logits_scaling": MULTIPLIER, "mlp_bias": FLAG, "residual_multiplier": MULTIPLIER}, is_head_plain=False),
    "llama": Architecture({**_LLAMA, **_HEAD_DIM, "mlp_bias": FLAG}),
    "mistral": Architecture({**_USUAL, **_SHARED_HEADS, **_HEAD_DIM, **_RMS, **_POSITIONS,
        "sliding_window": _WINDOW["sliding_window"]}, also_needed=("num_key_value_heads",)),
    "olmo": Architecture({**_USUAL, **_SHARED_HEADS, **_BIAS, **_POSITIONS,
        "clip_qkv": _number(0.1, 1_000).or_null()}),
    "olmo2": Architecture(_LLAMA),
    "phi": Architecture({**_USUAL, **_SHARED_HEADS, **_LAYER_NORM, **_POSITIONS, "embd_pdrop": DROPOUT,
        "partial_rotary_factor": _number(0.01, 1), "qk_layernorm": FLAG, "resid_pdrop": DROPOUT}, is_head_plain=False),
    "qwen2": Architecture({**_USUAL, **_SHARED_HEADS, **_RMS, **_POSITIONS, **_WINDOW},
        also_needed=("num_key_value_heads",)),
    "qwen3": Architecture({**_LLAMA, **_HEAD_DIM, **_WINDOW}, also_needed=("num_key_value_heads", "head_dim")),
    "smollm3": Architecture({**_LLAMA, **_WINDOW, "mlp_bias": FLAG, "no_rope_layer_interval": _whole(1, LAYERS_MAX),
        "no_rope_layers": _list(_one_of(0, 1), LAYERS_MAX).or_null()},
        also_needed=("num_key_value_heads",), is_tied=True),
    "starcoder2": Architecture({**_USUAL, **_SHARED_HEADS, **_POSITIONS, "embedding_dropout": DROPOUT,
        "norm_epsilon": EPSILON, "residual_dropout": DROPOUT, "sliding_window": _WINDOW["sliding_window"],
        "use_bias": FLAG}, also_needed=("num_key_value_heads",), is_tied=True),
}  # fmt: skip
REAL = ("initializer_range", "clip_qkv")  # transformers rejects whole numbers for these
REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",  # except for gpt2, where it is always four times the width
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


@dataclass(frozen=True, slots=True)
class HfConfig:
    """An accepted config.json: the keys for transformers, and the sizes under our own names."""

    model_type: str
    keys: Mapping[str, Any]  # without keys that have no effect
    vocab_size: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    positions: int
    is_tied: bool
    dropout: float  # the highest of all dropout rates

    @property
    def architecture(self) -> Architecture:
        return ARCHITECTURES[self.model_type]

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes under the built-in model's names."""
        names = ("vocab_size", "dim", "layers", "heads", "kv_heads", "ffn_dim")
        return {name: getattr(self, name) for name in names}


@lru_cache(maxsize=8)
def read_hf_config(text: str) -> HfConfig:
    """Checks the text of a config.json. Raises ValueError with the problem, a colon and the fix."""
    raw = _parsed(text)
    kind = raw.pop("model_type", None)
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        found = f"model_type {_shown(kind)}" if kind is not None else "no model_type"
        raise SettingError(f"config.json has {found}, which p2ptrain does not train", f"use one of {known}")
    architecture = ARCHITECTURES[kind]
    rules = {**WITHOUT_EFFECT, **architecture.keys}
    if refused := sorted(key for key in raw if key not in rules):
        shown = ", ".join(map(_shown, refused[:SHOWN_KEYS_MAX])) + (", ..." if len(refused) > SHOWN_KEYS_MAX else "")
        it = "it" if len(refused) == 1 else "them"
        raise SettingError(f"config.json has {shown}, which p2ptrain does not accept", f"remove {it}")
    for key, value in raw.items():
        if not rules[key].accepts(value):
            raise SettingError(
                f"{key} in config.json has a value that p2ptrain does not accept", f"use {rules[key].words}"
            )
    for usual in (*REQUIRED, *architecture.also_needed):
        if raw.get(architecture.name(usual)) is None and not (kind == "gpt2" and usual == "intermediate_size"):
            raise SettingError(f"config.json lacks {architecture.name(usual)}", "add it, a size is never guessed")
    used = {key: float(value) if key in REAL and value is not None else value for key, value in raw.items()}
    return _checked(kind, {key: value for key, value in used.items() if key in architecture.keys})


def _parsed(text: str) -> dict[str, Any]:
    if len(text.encode(errors="surrogatepass")) > HF_CONFIG_BYTES_MAX:
        raise SettingError(
            f"config.json is larger than {HF_CONFIG_BYTES_MAX:,} bytes", "no model that p2ptrain trains is"
        )
    if not all(character.isprintable() or character in "\n\r\t" for character in text):
        raise SettingError("config.json has characters that cannot be printed", "write them as JSON escapes")
    if text.count("[") + text.count("{") > NESTED_MAX:
        raise SettingError("config.json is nested too deeply", "use the config.json of a model")
    try:
        raw = json.loads(text, object_pairs_hook=_without_twins, parse_constant=_refuse_constant, parse_float=_finite)
    except ValueError as error:
        raise SettingError(
            f"config.json cannot be read ({str(error)[:100]})", "use the config.json of a model"
        ) from None
    if not isinstance(raw, dict):
        raise SettingError("config.json is not a table of keys and values", "use the config.json of a model")
    return raw


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        twin = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{_shown(twin)} twice")
    return dict(pairs)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _finite(written: str) -> float:
    if not math.isfinite(value := float(written)):
        raise ValueError("a number is too large")
    return value


def _shown(name: object) -> str:
    """Makes a stranger's key or value safe to quote in a message."""
    if isinstance(name, str) and name.isascii() and name.replace("_", "").replace(".", "").isalnum():
        return name[:SHOWN_KEY_LENGTH_MAX]
    return ascii(name)[:SHOWN_KEY_LENGTH_MAX].replace(": ", ":")


def _checked(kind: str, keys: dict[str, Any]) -> HfConfig:
    architecture = ARCHITECTURES[kind]

    def of(usual: str, otherwise: Any = None) -> Any:
        value = keys.get(architecture.name(usual))
        return otherwise if value is None else value

    dim, heads, layers = of("hidden_size"), of("num_attention_heads"), of("num_hidden_layers")
    if "num_key_value_heads" in architecture.keys and "num_key_value_heads" not in keys:
        keys = {**keys, "num_key_value_heads": heads}
    kv_heads, ffn_dim = keys.get("num_key_value_heads", heads), of("intermediate_size", 4 * dim)
    if dim % heads:
        raise SettingError(
            f"{heads} attention heads in config.json do not divide a width of {dim}", "change one of them"
        )
    if heads % kv_heads:
        raise SettingError(f"num_key_value_heads in config.json does not divide {heads} heads", "choose a divisor")
    if "head_dim" in architecture.keys and keys.get("head_dim") is None:
        keys = {**keys, "head_dim": dim // heads}
    head_dim = keys.get("head_dim", dim // heads)
    _check_rotary(keys, head_dim, {"gpt_neox": 0.25, "phi": 0.5}.get(kind, 1.0))
    for name in ("layer_types", "no_rope_layers"):
        if keys.get(name) is not None and len(keys[name]) != layers:
            raise SettingError(
                f"{name} in config.json has {len(keys[name])} entries", f"it needs {layers}, one a layer"
            )
    is_sliding = keys.get("sliding_window") is not None and keys.get("use_sliding_window", False)
    if "sliding_attention" in (keys.get("layer_types") or ()) and not is_sliding:
        raise SettingError(
            "layer_types in config.json has sliding_attention and no window",
            "add sliding_window and use_sliding_window",
        )
    dropouts = [value for key, value in keys.items() if architecture.keys[key] is DROPOUT]
    has_all = len(dropouts) == sum(rule is DROPOUT for rule in architecture.keys.values())
    config = HfConfig(
        kind, keys, of("vocab_size"), dim, layers, heads, kv_heads, head_dim, ffn_dim, of("max_position_embeddings"),
        of("tie_word_embeddings", architecture.is_tied),
        max([*dropouts, 0.0 if has_all else architecture.dropout]),
    )  # fmt: skip
    if (most := parameters_most(config)) > PARAMETERS_MAX:
        raise SettingError(f"config.json describes {most:,} parameters", f"p2ptrain trains at most {PARAMETERS_MAX:,}")
    return config


def _check_rotary(keys: Mapping[str, Any], head_dim: int, usual: float) -> None:
    """Refuses a rotary encoding that does not turn whole pairs, or lacks a number that its kind needs."""
    share = float(keys.get("partial_rotary_factor", keys.get("rotary_pct", usual)))
    for name in ("rope_scaling", "rope_parameters"):
        rope = keys.get(name) or {}
        share = float(rope.get("partial_rotary_factor", share))
        needed = {
            "linear": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        }
        for key in needed.get(rope.get("rope_type", rope.get("type", "default")), ()):
            if key not in rope:
                raise SettingError(f"{name} in config.json lacks {key}", "add it")
        if rope.get("low_freq_factor", 0) >= rope.get("high_freq_factor", math.inf):
            raise SettingError("low_freq_factor in config.json is not below high_freq_factor", f"correct {name}")
    if int(head_dim * share) % 2 or int(head_dim * share) < 2:
        what = f"{int(head_dim * share)} numbers of a head in config.json are turned by rotary positions"
        raise SettingError(what, "they need pairs, change head_dim")


def parameters_most(config: HfConfig) -> int:
    """Returns an upper bound on the parameters, with gated feed-forward layers, biases and norms everywhere."""
    wide, shared = config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention = config.dim * (2 * wide + 2 * shared)
    vectors = 8 * config.dim + 4 * (wide + shared) + 4 * config.ffn_dim + 8 * config.head_dim * config.heads
    layer = attention + 3 * config.dim * config.ffn_dim + vectors
    rows = config.vocab_size * (1 if config.is_tied else 2)
    rows += config.positions if config.architecture.has_positions else 0
    if config.architecture.objective == "masked":  # its token types, and a layer before the head
        rows += TOKEN_TYPES_MAX + config.dim
    return config.layers * layer + rows * config.dim + config.vocab_size + 4 * config.dim
