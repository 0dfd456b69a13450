"""Tiny models of every model type of transformers that a run can train."""

from __future__ import annotations

import json
from typing import Any

from p2ptrain.config import ModelConfig
from p2ptrain.config.hf import ARCHITECTURES

SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def raw_config(kind: str, **changes: Any) -> dict[str, Any]:
    """Makes a config.json, where heads are shared if the model type can do that."""
    architecture = ARCHITECTURES[kind]
    raw: dict[str, Any] = {"model_type": kind} | {architecture.name(key): size for key, size in SIZES.items()}
    if "num_key_value_heads" in architecture.keys:
        raw["num_key_value_heads"] = 2
    if "head_dim" in architecture.also_needed:
        raw["head_dim"] = 16  # not the width over the heads
    return raw | changes


def hf_model(kind: str, sequence_length: int = 32, **changes: Any) -> ModelConfig:
    text = json.dumps(raw_config(kind, **changes))
    return ModelConfig(kind="transformers", config=text, sequence_length=sequence_length)
