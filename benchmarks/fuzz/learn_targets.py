"""Targets of learning: payloads of every shape, manifests of data, tokenizers, and files of weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save

from benchmarks.fuzz import Target
from benchmarks.fuzz.core_targets import llama
from p2ptrain.config import ModelConfig, RecipeConfig, RunConfig
from p2ptrain.config.load import load_config, load_run_config
from p2ptrain.config.text import to_toml
from p2ptrain.data.corpus import Reading, _lines
from p2ptrain.data.dataset import DatasetIndex, Split, TokenizerName, manifest_digest, store_manifest
from p2ptrain.data.tokenizer import JsonTokenizer
from p2ptrain.data.tokenizer_rules import judged, try_out
from p2ptrain.errors import ConfigError, DataError, RemoteProtocolError
from p2ptrain.exact.codec import PayloadFormat, pack, read_exponents, read_squares, unpack
from p2ptrain.exact.outer import Outer
from p2ptrain.exact.transform import Layout
from p2ptrain.models.adapters import base_tensors
from p2ptrain.models.given_weights import _files, read_weights
from p2ptrain.models.kinds import exported_shapes
from tests.helpers.core import run_of
from tests.helpers.exact_numbers import contribution
from tests.helpers.golden import FAMILY
from tests.helpers.tokenizers import tokenizer_json
from tests.helpers.trainer import ONE_THREAD, Trainer, embedded

SHAPES = [(96, 64), (64, 64), (40,)]
# Recipe, chunk, k and bits of a value: ranks and bit strings, narrow and wide fields, with scales and without.
SPARSE = (
    ("distro", 64, 32, 1), ("distro", 64, 1, 1), ("distro", 64, 200, 1), ("distro", 16, 5, 1), ("distro", 8, 32, 1),
    ("demo", 64, 32, 3), ("demo", 8, 3, 4), ("local", 32, 16, 1), ("local", 16, 5, 8), ("local", 8, 3, 7),
)  # fmt: skip
ALIKE = ("nesterov", "delayed nesterov")  # payloads like those of momentum
FILES = (ConfigError, DataError)
TEXT = "The fox's 12 jumps.\r\n\t\u4e2d\u6587 \U0001f600\x00 " + "a" * 50


def _sparse(name: str, chunk: int, k: int, value_bits: int) -> Target:
    recipe = RecipeConfig(name=name, chunk=chunk, k=k, value_bits=value_bits)
    layout = Layout(SHAPES, chunk)
    form = PayloadFormat.of(layout, recipe)

    def read(payload: bytes) -> object:
        found = unpack(payload, form)
        read_squares(payload, form)
        if form.groups:
            read_exponents(payload, form)
        return found

    seeds = tuple(pack(contribution(number, layout, recipe), form) for number in range(2))
    return Target(
        f"payload-{name}-{chunk}-{k}-{value_bits}", "bytes", seeds, read, (RemoteProtocolError,),
        lambda found: pack(found, form), memory=2**21,
    )  # fmt: skip


def _of_family(name: str, changes: dict[str, object]) -> Target:
    """Payloads of all that a recipe may send: the parts of a model in turn, every weight, and a region's tail."""
    outer = Outer(RecipeConfig(**changes), SHAPES, covered=10 if name == "region" else 0)
    of_k = [outer.recipe.model_copy(update={"k": k}) for k in outer.recipe.ks]
    seeds = tuple(
        outer.pack(contribution(number, outer.layouts[number], own), number)
        for number in range(outer.recipe.fragments)
        for own in of_k
    )

    def encoded(payload: bytes) -> bytes:
        fragment = outer._read(payload).fragment
        packed = outer.pack(outer.unpack(payload), fragment)
        return packed[: -outer.tail_bytes] + payload[-outer.tail_bytes :] if outer.tail_bytes else packed

    def read(payload: bytes) -> bytes:
        outer.unpack(payload)
        return payload

    return Target(
        f"payload-{name.replace(' ', '-')}", "bytes", seeds, read, (RemoteProtocolError,), encoded,
        seconds=0.02, memory=2**21,
    )  # fmt: skip


def data_manifests() -> list[bytes]:
    name, nothing = TokenizerName("", "bytes", 256), Split((), 0)
    json_name = TokenizerName("ab" * 32, "json", 70_000)
    made = [
        DatasetIndex(Split(("cd" * 32,), 100), 1, name, Split(("ef" * 32, "12" * 32), 2**20 + 1), 1),
        DatasetIndex(nothing, 4, json_name, Split(("ef" * 32,), 5), 1, True),
    ]
    return [each.encode() for each in made]


def _judged(file_bytes: bytes) -> None:
    """Judges a tokenizer's file: what comes out is judged alike."""
    kept = judged(file_bytes, "FILE")
    assert judged(kept, "FILE") == kept


def _tokenizer(file_bytes: bytes) -> None:
    """Loads and uses a tokenizer's file as a newcomer does."""
    try_out(file_bytes, "FILE")
    made = JsonTokenizer(file_bytes, "FILE")
    made.decode(made.encode(TEXT))


def _from_file(path: Path, read: Callable[[Path], object], data: bytes) -> object:
    path.write_bytes(data)
    return read(path)


def _weights(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> bytes:
    drawn = {name: torch.arange(shape.numel()).reshape(shape).to(dtype) for name, shape in _sizes(shapes).items()}
    return save(drawn)


def _sizes(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Size]:
    return {name: torch.Size(shape) for name, shape in shapes.items()}


def run_files() -> list[bytes]:
    hf = run_of().model_copy(update={"model": ModelConfig(kind="transformers", config=llama(), sequence_length=8)})
    return [to_toml(each).encode() for each in (run_of(), hf)] + [b'name = "x"\n[model]\ndim = 64\n']


def _indexed(folder: Path, data: bytes) -> object:
    (folder / "model.safetensors.index.json").write_bytes(data)
    return _files(folder)


def _lines_read(folder: Path, data: bytes) -> int:
    """Reads JSON lines that somebody else made, to train on; leaves out what is no document."""
    path = folder / "lines.jsonl"
    path.write_bytes(data)
    with path.open("rb") as file:
        how = Reading(skipped=lambda error: None)
        return sum(len(how.tokenizer.encode(each.text)) for each in _lines(file, file, "FILE", how))


def learn_targets(folder: Path) -> list[Target]:
    model = ModelConfig(dim=8, layers=1, heads=1, kv_heads=1, ffn_dim=8, sequence_length=8)
    shapes = dict(exported_shapes(model))
    adapters = {"a.lora_A.weight": (2, 4), "a.lora_B.weight": (3, 2)}
    (folder / "sharded").mkdir()
    (folder / "sharded" / "a.safetensors").write_bytes(b"")
    (folder / "data").mkdir()
    index = json.dumps({"metadata": {"total_size": 1}, "weight_map": {"w": "a.safetensors"}}).encode()
    run = RunConfig(name="fuzz", model=model, recipe=RecipeConfig(name="distro", k=4, chunk=8))
    trainer = Trainer(run, ONE_THREAD, embedded(folder / "embedded"))
    trainer.save(folder / "trainer.safetensors")
    saved = (folder / "trainer.safetensors").read_bytes()
    of_adapters = _weights(adapters)

    def base(path: Path) -> object:
        return [each for _, each in base_tensors(path, adapters)]

    def given(path: Path) -> object:
        return read_weights(path, model)

    tensors = {"kind": "safetensors", "errors": FILES, "seconds": 0.02, "memory": 2**20}
    return [
        *(_sparse(*each) for each in SPARSE),
        *(_of_family(name, dict(changes)) for name, changes in FAMILY.items() if name not in ALIKE),
        Target("data-manifest", "json", tuple(data_manifests()),
               lambda data: store_manifest(folder / "data", data, manifest_digest(data)),
               (DataError, RemoteProtocolError), lambda found: found.manifest_bytes(), seconds=0.02),
        Target("tokenizer", "json", (tokenizer_json(), tokenizer_json(fill=3, normalizer={"type": "NFC"})), _judged,
               (ConfigError,), seconds=0.01),
        Target("tokenizer-loaded", "json", (tokenizer_json(),), _tokenizer, FILES, seconds=1.0, memory=2**24, every=25),
        Target("training-lines", "json lines", (b'{"text":"one"}\n{"text":"two","a":1}\n',),
               partial(_lines_read, folder), FILES),
        Target("run-file", "toml", tuple(run_files()), partial(_from_file, folder / "run.toml", load_run_config),
               (ConfigError,), seconds=0.05, memory=2**20, memory_a_byte=400),
        Target("config-file", "toml", tuple(run_files()), partial(_from_file, folder / "any.toml", load_config),
               (ConfigError,), seconds=0.05, memory=2**20, memory_a_byte=400, every=3),
        Target("base", seeds=(of_adapters, _weights(adapters, torch.bfloat16)),
               decode=partial(_from_file, folder / "base.safetensors", base), **tensors),
        Target("given-weights", seeds=(_weights(shapes, torch.float16),),
               decode=partial(_from_file, folder / "given.safetensors", given), **tensors),
        Target("weights-index", "json", (index,), partial(_indexed, folder / "sharded"), FILES, seconds=0.01),
        Target("trainer-state", seeds=(saved,),
               decode=partial(_from_file, folder / "state.safetensors", trainer.load), every=5, **tensors),
    ]  # fmt: skip
