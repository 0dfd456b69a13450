"""Reads first weights that the owner has: a Hugging Face directory, a safetensors file, or a run's checkpoint.

Tensors are matched by name, with or without the prefix that transformers gives a model's body; a second copy of a tied
matrix is ignored. They become fp32. Tensors that do not fit are named. A pickle is refused: reading it runs code."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from p2ptrain.config import ModelConfig
from p2ptrain.config.hf import ARCHITECTURES, HF_CONFIG_BYTES_MAX, HfConfig, read_hf_config
from p2ptrain.errors import ConfigError, DataError
from p2ptrain.files import read_regular
from p2ptrain.models.export import Weights, model_config
from p2ptrain.models.kinds import BUILTIN_PREFIX, Shape, exported_shapes

INDEX_NAME, SINGLE_NAME, CONFIG_NAME = "model.safetensors.index.json", "model.safetensors", "config.json"
INDEX_BYTES_MAX = 2**26  # the index maps tensors to files; for 70B parameters it has some 100 KB
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
SAFE_FIX = "Write it as safetensors: model.save_pretrained(DIR) of transformers does, or safetensors.torch.save_file"
BELONGS_FIX = "Begin with the config.json that belongs to these weights"
HEADS = ("lm_head.weight", "cls.predictions.decoder.weight")
# Tensors that files hold besides the weights: tables that older versions of transformers saved and that every model
# makes anew, a second copy of a tied bias, and BERT's parts for other uses.
UNUSED = (
    ".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias",
    "embeddings.position_ids", "cls.predictions.decoder.bias", "cls.seq_relationship.weight",
    "cls.seq_relationship.bias", "pooler.dense.weight", "pooler.dense.bias",
)  # fmt: skip
OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}  # in BERT's first files
DRAWN = "For random weights leave --weights out, and write the text of config.json as model.config"
NAMED_MAX = 4  # tensors listed in an error
# Keys of a config.json that decide what the built-in model's weights mean, beside their shapes.
BUILTIN_KEYS = (
    "model_type", "num_attention_heads", "num_key_value_heads", "hidden_act", "rms_norm_eps", "rope_theta", "rope_type",
)  # fmt: skip
# Keys of a config.json that a run may set differently from the given weights.
FREE_KEYS = ("max_position_embeddings", "n_positions", "initializer_range", "use_cache", "transformers_version")
FREE_ENDINGS = ("dropout", "pdrop")


@dataclass(frozen=True, slots=True)
class Found:
    """A tensor in a file that has not been read yet."""

    shape: Shape
    read: Callable[[], Tensor]


def read_weights(path: Path, model: ModelConfig) -> Tensor:  # -> [parameters] fp32
    """Reads the weights at `path` for this model, in the order of its state. Raises ConfigError if they do not fit."""
    with _opened(path) as found:
        _refuse_other_config(path, model)
        return _flat(path, model, found)


def read_checkpoint(weights: Weights, model: ModelConfig) -> Tensor:  # -> [parameters] fp32
    """Reads another run's agreed weights and checks their root. Raises ConfigError if its model is different."""
    if weights.run.adapt.is_on:
        fix = "Give what `p2ptrain export` makes of it, in which they are merged"
        raise ConfigError("it has only the adapters of a model", source=str(weights.path), fix=fix)
    ours, theirs = exported_shapes(model), exported_shapes(weights.run.model)
    shapes = {name: Found(shape, lambda: torch.empty(0)) for name, shape in theirs}
    _refuse(weights.path, _misfits(dict(ours), shapes))
    if ours != theirs:
        raise ConfigError("its tensors are in another order", source=str(weights.path), fix=BELONGS_FIX)
    if model.has_known_layers and weights.run.model.has_known_layers:
        _refuse_other_arithmetic(weights.path, "its run", model_config(weights.run.model, 0), model)
    return weights.flat()


def config_beside(path: Path) -> str:
    """Returns the config.json beside weights, for a run that has none of its own; empty if there is none."""
    _check_exists(path)
    place = (path if path.is_dir() else path.parent) / CONFIG_NAME
    encoded = read_regular(place, HF_CONFIG_BYTES_MAX)
    try:
        return (encoded or b"").decode()
    except UnicodeDecodeError as error:
        raise ConfigError("not UTF-8 text", source=str(place), fix="Save it as UTF-8") from error


# -- Files ------------------------------------------------------------------------------------------


def _check_exists(path: Path) -> None:
    if not path.exists():
        fix = f"Name a directory or a file with weights. {DRAWN}"
        raise ConfigError("it does not exist", source=str(path), fix=fix)


@contextmanager
def _opened(path: Path) -> Iterator[dict[str, Found]]:
    """Opens all tensors at `path`, by their names in the files."""
    _check_exists(path)
    if path.suffix in PICKLES:
        raise ConfigError("a pickle runs code when it is read, so it is not", source=str(path), fix=SAFE_FIX)
    with ExitStack() as stack:
        found: dict[str, Found] = {}
        for file in _files(path):
            try:
                opened = stack.enter_context(safe_open(file, framework="pt"))
                for name in opened.keys():  # noqa: SIM118
                    if name in found:
                        raise ConfigError(f"{name} stands there twice", source=str(path), fix="Remove one of the files")
                    shape = tuple(opened.get_slice(name).get_shape())
                    found[name] = Found(shape, lambda opened=opened, name=name: opened.get_tensor(name))  # type: ignore[misc]
            except (SafetensorError, OSError) as error:
                raise DataError(f"{file}: not safetensors ({error})", fix=SAFE_FIX) from error
        yield found


def _files(path: Path) -> list[Path]:
    """Returns the safetensors files of a directory, or the file itself."""
    if path.is_file():
        return [path]
    encoded = read_regular(path / INDEX_NAME, INDEX_BYTES_MAX)
    if encoded is None:
        if (path / SINGLE_NAME).is_file():
            return [path / SINGLE_NAME]
        if pickles := sorted(each.name for each in path.iterdir() if each.suffix in PICKLES):
            what = f"its weights are a pickle ({pickles[0]}), which runs code when it is read, so it is not read"
            raise ConfigError(what, source=str(path), fix=SAFE_FIX)
        fix = f"Name a directory that a model was saved to, or a file. {DRAWN}"
        raise ConfigError(f"there is no {SINGLE_NAME}", source=str(path), fix=fix)
    try:
        names = {str(name) for name in json.loads(encoded)["weight_map"].values()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(f"{path / INDEX_NAME}: not an index of safetensors") from error
    here = {each.name for each in path.iterdir() if each.is_file()}
    for name in sorted(names):
        if name not in here or not name.endswith(".safetensors"):
            raise DataError(f"{path / INDEX_NAME}: names {ascii(name)[:100]}, which is no safetensors file beside it")
    return [path / name for name in sorted(names)]


# -- Fitting them to a model ------------------------------------------------------------------------


def _flat(path: Path, model: ModelConfig, found: Mapping[str, Found]) -> Tensor:
    prefix = BUILTIN_PREFIX if model.kind == "builtin" else "" if model.hf is None else model.hf.architecture.base
    wanted = dict(exported_shapes(model))
    here: dict[str, Found] = {}
    for written, each in found.items():
        name = written
        for old, new in OLD_NAMES.items():
            name = name.removesuffix(old) + new if name.endswith(old) else name
        key = name if name in wanted or prefix + name not in wanted else prefix + name
        if key in here:
            raise ConfigError(f"{name} stands there with and without {prefix}", source=str(path), fix=BELONGS_FIX)
        here[key] = each
    head = next((name for name in HEADS if name in here and name not in wanted), None)
    copy = None if head is None else here.pop(head)
    here = {name: each for name, each in here.items() if name in wanted or not name.endswith(UNUSED)}
    _refuse(path, _misfits(wanted, here))
    flat, at = torch.empty(sum(prod(shape) for shape in wanted.values()), dtype=torch.float32), 0
    for name, shape in wanted.items():
        flat[at : at + prod(shape)] = _as_numbers(path, name, here[name].read()).reshape(-1)
        at += prod(shape)
    first = next(iter(wanted))
    if copy is not None and not torch.equal(copy.read(), here[first].read()):
        what = f"{head} is not {first}, and the run's model has one matrix for both"
        raise ConfigError(what, source=str(path), fix='Write "tie_word_embeddings": false in model.config')
    return flat


def _as_numbers(path: Path, name: str, tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        what = f"{name} is {str(tensor.dtype).removeprefix('torch.')}: quantised weights are not read"
        raise ConfigError(what, source=str(path), fix="Take the weights in bfloat16, float16 or float32")
    numbers = tensor.float()
    if not bool(torch.isfinite(numbers).all()):
        raise ConfigError(f"{name} has numbers that are not finite", source=str(path), fix="Take weights that work")
    return numbers


def _misfits(wanted: Mapping[str, Shape], found: Mapping[str, Found]) -> list[str]:
    """Describes the tensors that are missing, left over or of another shape."""
    pairs = [(name, found[name].shape, shape) for name, shape in wanted.items() if name in found]
    told = _first([
        f"{name} is {list(there)} there and {list(here)} in the model" for name, there, here in pairs if there != here
    ])  # fmt: skip
    for names, word in ((wanted.keys() - found.keys(), "missing"), (found.keys() - wanted.keys(), "left over")):
        if names:
            told.append(f"{len(names)} {word}: {', '.join(_first(sorted(names)))}")
    return told


def _first(all_of_them: Sequence[str]) -> list[str]:
    more = [f"and {len(all_of_them) - NAMED_MAX} more"] if len(all_of_them) > NAMED_MAX else []
    return [*all_of_them[:NAMED_MAX], *more]


def _refuse(path: Path, misfits: list[str]) -> None:
    if misfits:
        what = f"the weights do not fit the run's model: {'; '.join(misfits)}"
        raise ConfigError(what, source=str(path), fix=BELONGS_FIX)


def _accepted(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of a config.json that a run can carry."""
    architecture = ARCHITECTURES.get(str(raw.get("model_type")))
    if architecture is None:
        return dict(raw)
    return {key: value for key, value in raw.items() if key in architecture.keys or key == "model_type"}


def _refuse_other_config(path: Path, model: ModelConfig) -> None:
    """Refuses weights whose own config.json describes different arithmetic, which the shapes would not reveal."""
    if not model.has_known_layers or not (text := config_beside(path)):
        return
    try:
        _refuse_other_arithmetic(path, f"its {CONFIG_NAME}", json.loads(text), model)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(str(error)[:300], source=str(path), fix=f"Correct its {CONFIG_NAME}") from error


def _refuse_other_arithmetic(path: Path, place: str, raw: Mapping[str, Any], model: ModelConfig) -> None:
    """Refuses weights whose config.json, which this place has, is `raw`, if the model computes otherwise."""
    if model.hf is None:
        rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
        ours = model_config(model, 0) | {"rope_type": "default"}
        theirs = {"rope_theta": rope.get("rope_theta"), "rope_type": rope.get("rope_type", rope.get("type")), **raw}
    else:
        ours, theirs = _in_full(model.hf), _in_full(read_hf_config(json.dumps(_accepted(raw))))
    for key in BUILTIN_KEYS if model.hf is None else ours:
        is_free = key in FREE_KEYS or key.endswith(FREE_ENDINGS)
        if theirs.get(key) not in (None, ours[key]) and not is_free:
            there, here = (json.dumps(each[key])[:80] for each in (theirs, ours))
            what = f"{place} has {key} = {there}, and the run {here}"
            raise ConfigError(what, source=str(path), key="model", fix=BELONGS_FIX)


def _in_full(hf: HfConfig) -> dict[str, Any]:
    """Returns a config as transformers reads it, with all defaults filled in."""
    from p2ptrain.models.hf_model import library  # noqa: PLC0415

    said: dict[str, Any] = library().AutoConfig.for_model(hf.model_type, **hf.keys).to_dict()
    return said
