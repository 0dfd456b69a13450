"""Exports the agreed weights as a checkpoint that Hugging Face's transformers loads; the built-in model as a Llama.

Adapters are merged into the frozen weights, or exported alone for the peft library.

    config.json               the model's sizes
    model.safetensors         the weights; after its header come the bytes that the state root hashes
    generation_config.json    settings to sample text as `p2ptrain generate` does; not for a model that fills tokens in
    tokenizer.json            the run's tokenizer, or for bytes one that gives the same integers
    tokenizer_config.json     how to tokenize texts with it
    run.json                  the run's settings; their digest is its id
    README.md                 the model card

Adapters alone are adapter_config.json and adapter_model.safetensors, with the run's settings and a model card.

The built-in model computes what Llama computes and has the same parameter names (model.py), and a model of transformers
keeps its own, so nothing is converted: weights are copied from file to file, a piece at a time, and checked on the way.
The output depends only on the run and the state, but for the last bits of merged weights and the card's members."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from p2ptrain.config import ModelConfig, RunConfig
from p2ptrain.config.hf import HfConfig
from p2ptrain.data.tokenizer import MASK_NAMES, Tokenizer, WithoutPanic
from p2ptrain.digest import PIECE_BYTES, leaf_digest
from p2ptrain.errors import ConfigError, DataError
from p2ptrain.exact.root import FLOAT_BYTES, covered_pieces, octets, root_of_leaves
from p2ptrain.files import PARTIAL_SUFFIX, forget, open_regular, rename, sync, trouble, write_file
from p2ptrain.models import kinds
from p2ptrain.models.adapters import FIRST, SECOND, base_tensors, is_transposed, merged
from p2ptrain.models.built_in import INITIAL_DEVIATION, NORM_EPSILON, Model
from p2ptrain.models.sample import SampleRequest
from p2ptrain.models.tensor_file import write_tensors

MODE = 0o666  # reduced by the user's umask: an export is meant to be shared
PEFT_PREFIX = "base_model.model."  # begins the names of tensors in peft's files


@dataclass(frozen=True, slots=True)
class Weights:
    """A file of agreed weights, with the size, digests and root that it must have."""

    path: Path
    size: int  # in bytes
    blake3: str
    run: RunConfig
    round: int
    branch: bytes
    head: bytes  # the digest of that round's manifest; empty if unknown
    root: bytes
    base: Path | None = None  # the file of the frozen weights, if adapters train

    @property
    def covered(self) -> list[int] | None:
        """Returns the pieces that the root covers; None if it covers all."""
        return covered_pieces(self.size, self.run.state, self.round, self.head)

    def check_size(self) -> None:
        """Compares the file's size with the run's model before memory is allocated for it."""
        expected = FLOAT_BYTES * self.parameters * self.run.recipe.state_copies
        if self.size != expected:
            raise DataError(f"{self.path}: {self.size:,} bytes, but the run's state has {expected:,}")

    def pieces(self) -> Iterator[bytes]:
        """Yields pieces of 1 MiB; after the last one, raises `DataError` if the digest or the root is wrong."""
        self.check_size()
        leaves: list[bytes] = []
        hasher, size = blake3(), 0
        with trouble(self.path, "cannot be read"), open_regular(self.path) as file:
            while piece := file.read(PIECE_BYTES):
                leaves.append(leaf_digest(len(leaves), piece))
                hasher.update(piece)
                if (size := size + len(piece)) > self.size:
                    break
                yield piece
        if (size, hasher.hexdigest()) != (self.size, self.blake3):
            raise DataError(f"{self.path}: damaged: its digest is not the checkpoint's")
        if root_of_leaves(leaves, size, self.covered) != self.root:
            raise DataError(f"{self.path}: not the weights of round {self.round}: their root is not {self.root.hex()}")

    @property
    def parameters(self) -> int:
        return kinds.parameter_count(self.run.model, self.run.adapt)

    def flat(self) -> Tensor:  # -> [parameters] fp32
        """Reads all weights in the order of the state, without the outer momentum that may follow them."""
        return self.state()[: self.parameters]

    def state(self) -> Tensor:  # -> [parameters, or twice as many] fp32
        """Reads all of the state."""
        self.check_size()
        flat = torch.empty(self.size // FLOAT_BYTES, dtype=torch.float32)
        into, at = octets(flat), 0
        for piece in self.pieces():
            into[at : at + len(piece)] = piece
            at += len(piece)
        return flat

    def named(self) -> dict[str, Tensor]:
        """Reads all weights, by the names of the model's parameters."""
        return kinds.by_name(self.flat(), kinds.named_shapes(self.run.model, self.run.adapt))


def load_model(weights: Weights, device: torch.device) -> Model:
    """Loads the weights into a model, and checks them."""
    run, named = weights.run, weights.named()
    return kinds.build_with(run.model, named, run.adapt, weights.base).eval().to(device).requires_grad_(False)


def export(
    target: Path,
    weights: Weights,
    tokenizer: Tokenizer,
    members: tuple[int, int] | None,
    *,
    only_adapters: bool = False,
) -> None:
    """Exports to a new directory, completely or not at all.

    members: how many nodes have a vote, and how many are admitted; only_adapters: writes them alone, and merges nothing
    """
    check_target(target)
    files = {"run.json": weights.run.canonical(), "README.md": model_card(weights, members, only_adapters).encode()}
    if only_adapters:
        _write(target, files | {"adapter_config.json": _json(_peft_config(weights.run))}, weights, only_adapters=True)
        return
    is_masked = weights.run.model.objective == "masked"
    files["tokenizer.json"] = tokenizer.file_bytes or bytes_tokenizer(has_mask=is_masked)
    if weights.run.model.has_known_layers:  # any other is loaded by a plug-in's package or a script
        files |= {
            "config.json": _json(model_config(weights.run.model, tokenizer.end_of_document)),
            "tokenizer_config.json": _json(_tokenizer_config(weights.run.model, tokenizer)),
        }
        if not is_masked:
            files["generation_config.json"] = _json(_generation_config(tokenizer.end_of_document))
    _write(target, files, weights, only_adapters=False)


def _write(target: Path, files: Mapping[str, bytes], weights: Weights, *, only_adapters: bool) -> None:
    with trouble(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(suffix=PARTIAL_SUFFIX, dir=target.parent))  # with a unique name
        partial = place / target.name
        try:
            partial.mkdir()
            model = weights.run.model
            if only_adapters:
                trained = kinds.named_shapes(model, weights.run.adapt)
                shapes = tuple((PEFT_PREFIX + kinds.exported_name(model, name), shape) for name, shape in trained)
                _write_file(partial / "adapter_model.safetensors", weights, shapes, _without_momentum(weights))
            elif weights.run.adapt.is_on:
                shapes = kinds.exported_shapes(kinds.without_adapters(model))
                _write_file(partial / "model.safetensors", weights, shapes, _merged_numbers(weights))
            else:
                shapes = kinds.exported_shapes(model)
                _write_file(partial / "model.safetensors", weights, shapes, _without_momentum(weights))
            for name, content in files.items():
                write_file(partial / name, content, mode=MODE)
            sync(partial)
            rename(partial, target)
        finally:
            forget(place)


def check_target(target: Path) -> None:
    """Refuses to overwrite anything, before any long work."""
    if target.exists() or target.is_symlink():
        raise ConfigError("it exists already", source=str(target), fix="Name a directory that does not exist yet")


# -- Weights ----------------------------------------------------------------------------------------


def _without_momentum(weights: Weights) -> Iterator[bytes]:
    """Yields only the pieces of the weights; the momentum's pieces after them are checked as well."""
    left = FLOAT_BYTES * weights.parameters
    for piece in weights.pieces():
        if left > 0:
            yield piece[:left]
        left -= len(piece)


def _merged_numbers(weights: Weights) -> Iterator[memoryview]:
    """Yields the frozen weights with the adapters' changes added, a tensor at a time."""
    run, adapters, base = weights.run, weights.named(), weights.base
    assert base is not None, "a run that trains adapters has one"
    for name, frozen in base_tensors(base, dict(kinds.named_shapes(kinds.without_adapters(run.model)))):
        module = name.removesuffix("weight")
        is_adapted = module + FIRST in adapters
        yield octets(merged(frozen, adapters[module + FIRST], adapters[module + SECOND], run) if is_adapted else frozen)


def _write_file(path: Path, weights: Weights, shapes: kinds.NamedShapes, content: Iterable[bytes | memoryview]) -> None:
    """Writes fp32 tensors of these shapes. A tied output matrix is left out, because it is the embedding."""
    told = {"run": weights.run.run_id, "round": str(weights.round), "state_root": weights.root.hex()}
    tensors = [(name, torch.float32, shape) for name, shape in shapes]
    write_tensors(path, tensors, content, {"format": "pt", **told})


# -- The other files for transformers ---------------------------------------------------------------


def _json(content: object) -> bytes:
    return json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"


def model_config(config: ModelConfig, end: int) -> dict[str, Any]:
    """Returns the run's config.json, or translates the built-in model's sizes to Hugging Face's keys."""
    if config.hf is not None:
        return _carried_config(config, config.hf, end)
    return {  # a few keys appear twice, for older versions of the library
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": end,  # a document begins where the previous one ends
        "dtype": "float32",
        "eos_token_id": end,
        "head_dim": config.dim // config.heads,
        "hidden_act": "silu",
        "hidden_size": config.dim,
        "initializer_range": INITIAL_DEVIATION,
        "intermediate_size": config.ffn_dim,
        "max_position_embeddings": config.sequence_length,
        "mlp_bias": False,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.kv_heads,
        "pad_token_id": None,  # a padding token's row would not be trained
        "rms_norm_eps": NORM_EPSILON,
        "rope_parameters": {"rope_theta": float(config.rope_theta), "rope_type": "default"},
        "rope_theta": float(config.rope_theta),
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }


def _peft_config(run: RunConfig) -> dict[str, Any]:
    """Returns the adapter_config.json with which the peft library loads the adapters beside the run's model."""
    named = kinds.named_shapes(run.model, run.adapt)
    modules = [name.removesuffix(f".{FIRST}") for name, _ in named if name.endswith(FIRST)]
    return {
        "base_model_name_or_path": None,
        "bias": "none",
        "fan_in_fan_out": is_transposed(run.model),
        "inference_mode": True,
        "lora_alpha": run.adapt.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": run.adapt.rank,
        "target_modules": [kinds.exported_name(run.model, module) for module in modules],
        "task_type": "CAUSAL_LM",
    }


def _carried_config(config: ModelConfig, hf: HfConfig, end: int) -> dict[str, Any]:
    """Returns the run's config.json, completed so that it loads in fp32 and samples as p2ptrain does."""
    from p2ptrain.models.hf_model import class_name  # noqa: PLC0415  # needs the extra [hf]

    raw: dict[str, Any] = json.loads(config.config)
    for key in ("_name_or_path", "task_specific_params"):
        raw.pop(key, None)
    return raw | dict(hf.keys) | {  # with the defaults written out
        "architectures": [class_name(hf)],
        "bos_token_id": end,
        "dtype": "float32",
        "eos_token_id": end,
        "pad_token_id": None,
        "torch_dtype": "float32",
        "use_cache": True,
    }  # fmt: skip


def _generation_config(end: int) -> dict[str, Any]:
    temperature = SampleRequest("", 1, 0).temperature
    drawn = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}  # from all tokens
    return {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, **drawn}


def _tokenizer_config(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    end, is_masked = _name(tokenizer, tokenizer.end_of_document), config.objective == "masked"
    special = {} if end is None else {"bos_token": end, "eos_token": end}
    if is_masked and tokenizer.mask is not None:
        special["mask_token"] = _name(tokenizer, tokenizer.mask) or MASK_NAMES[0]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": config.sequence_length,
        "split_special_tokens": not is_masked,  # special tokens written in a text are plain text, but for the mask
        **special,
    }


def _name(tokenizer: Tokenizer, token: int) -> str | None:
    """Returns the name of a special token. Bytes have none for an end: a text could contain any name."""
    if not tokenizer.file_bytes:
        return None
    from tokenizers import Tokenizer as LibraryTokenizer  # noqa: PLC0415  # bytes do not need it

    with WithoutPanic("the run's tokenizer"):
        return LibraryTokenizer.from_buffer(tokenizer.file_bytes).id_to_token(token)


def bytes_tokenizer(*, has_mask: bool = False) -> bytes:
    """Makes a tokenizer.json whose tokens are the bytes of UTF-8.

    Its model has no merges, and its tokens are GPT-2's characters for bytes: printable bytes stand for themselves, and
    the others are mapped to characters above the first 256. (Bytes written as <0x41> would not work: that decoder
    drops a whole run of bytes if one of them is not UTF-8.)"""
    from tokenizers import Tokenizer as LibraryTokenizer  # noqa: PLC0415  # as above
    from tokenizers import decoders, models, pre_tokenizers  # noqa: PLC0415

    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unseen = [byte for byte in range(256) if byte not in seen]
    names = {byte: chr(byte) for byte in seen} | {byte: chr(256 + place) for place, byte in enumerate(unseen)}
    library = LibraryTokenizer(models.BPE(vocab={names[byte]: byte for byte in range(256)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    if has_mask:
        library.add_special_tokens([MASK_NAMES[0]])  # the next free number, 256
    return library.to_str(pretty=True).encode()


# -- The model card ---------------------------------------------------------------------------------


def model_card(weights: Weights, members: tuple[int, int] | None, only_adapters: bool = False) -> str:
    """Writes the README: the model's sizes, its origin, and how to load it."""
    run, config, recipe = weights.run, weights.run.model, weights.run.recipe
    founders = f"{len(run.admission.founders)} when it began"
    now = f"; after this round {members[0]} with a vote, {members[1]} admitted" if members else ""
    part = "all weights" if weights.covered is None else f"a sample of {len(weights.covered)} MiB of the weights"
    tokenizer = f"json, `{run.tokenizer.digest}`" if run.tokenizer.digest else "bytes: a token is a byte of UTF-8"
    schedule = f"{recipe.schedule}, highest {float(recipe.learning_rate):g}"
    numbers = "coefficients" if recipe.transform == "dct" else "weights"
    sent = " or ".join(map(str, recipe.ks))
    facts = {
        "run": f"{run.name}, `{run.run_id}`",
        "rounds applied": f"{weights.round:,}",
        "state root": f"`{weights.root.hex()}`, over {part}",
        "branch": f"`{weights.branch.hex()}`" if weights.branch else "not known here",
        "last manifest": f"`{weights.head.hex()}`" if weights.head else "not known here",
        "members": founders + now,
        "data manifest": f"`{run.data.manifest}`",
        "tokenizer": tokenizer,
        "recipe": f"{recipe.name}: {recipe.outer} update, {sent} {numbers} of {recipe.chunk} x {recipe.chunk}, "
        f"{recipe.local_steps} steps a round, learning rate {schedule}",
        "model": f"{_sizes(config)}, {config.vocab_size:,} tokens, sequences of {config.sequence_length:,}",
    }
    if run.adapt.is_on:
        facts["adapters"] = f"{run.adapt.kind}, rank {run.adapt.rank}, alpha {run.adapt.alpha}: "
        count = kinds.parameter_count(config, run.adapt)
        facts["adapters"] += f"{count:,} parameters beside the base `{run.adapt.base}`"
    table = "\n".join(f"| {name} | {fact} |" for name, fact in facts.items())
    kind = config.hf.model_type if config.hf else "llama"
    length = f"{config.sequence_length:,}"
    front, load, check = _part("front"), "load", "check_merged" if run.adapt.is_on else "check"
    if not config.has_known_layers:
        front, load = "", "load_plugin" if config.plugin else "load_own"
    if config.objective == "masked":
        front, load = front.replace("text-generation", "fill-mask"), "load_masked"
    told = _part(check)
    if only_adapters:
        front, load = _part("front").replace("transformers", "peft", 1), "load_adapters"
        told = _part("check").replace("model.", "adapter_model.", 1)
    names = {"name": run.name, "kind": kind, "round": f"{weights.round:,}", "table": table, "length": length}
    how = _part(load).rstrip().format(plugin=config.plugin, length=length)
    return "\n".join(filter(None, (front, _part("card"), told))).format(load=how, **names)


def _part(name: str) -> str:
    return (Path(__file__).with_name("card") / f"{name}.md").read_text(encoding="utf-8")


def _sizes(config: ModelConfig) -> str:
    """Describes the model's size."""
    count = f"{kinds.parameter_count(kinds.without_adapters(config)):,} parameters"
    if not config.has_known_layers:
        return f"{config.plugin or 'a model of scripts'}, {count}"
    kind = f"{config.hf.model_type}, " if config.hf else ""
    return f"{kind}{count}, {config.layers} layers, width {config.dim}, {config.heads} heads on {config.kv_heads}"
