"""LoRA: trains two small matrices beside each of a model's own, which stay as they are (arXiv 2106.09685).

A matrix W becomes W + alpha / rank * B A, where A [rank, inputs] is drawn at random and B [outputs, rank] begins as 0.
Only A and B are the agreed state. The model's own weights are the base: a safetensors file that the first node of a run
writes and all others fetch once. It is named by the Merkle root over its pieces, so that each piece can be checked as
it arrives. The same weights make the same file everywhere: tensors sorted by name, each in the smallest exact type.

Names are those of the peft library, which reads what `p2ptrain export --adapter` writes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional

from p2ptrain.config import AdaptConfig, ModelConfig, RunConfig
from p2ptrain.digest import PIECE_BYTES, leaf_digest, merkle_root
from p2ptrain.errors import ConfigError, DataError
from p2ptrain.exact.root import FLOAT_BYTES, octets
from p2ptrain.files import PARTIAL_SUFFIX, forget, make_directory, open_regular, rename, trouble
from p2ptrain.models.built_in import Linear, Model
from p2ptrain.models.tensor_file import Shape, write_tensors

FIRST, SECOND = "lora_A.weight", "lora_B.weight"  # how the adapters' names end
STORED = (torch.bfloat16, torch.float16, torch.float32)  # the first that fits is taken
NAMED_MAX = 6  # modules listed in an error
ORIGIN_FIX = "Whoever began the run made it so: install the versions that its founder has, or join another"


# -- The model --------------------------------------------------------------------------------------


class Adapter(nn.Module):
    """A frozen matrix of a model, with the two small ones that train beside it."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, frozen: nn.Module, adapt: AdaptConfig) -> None:
        super().__init__()
        for name in ("weight", "bias"):
            self.register_parameter(name, getattr(frozen, name))
        self.scale = adapt.alpha / adapt.rank
        self.is_transposed = not isinstance(frozen, nn.Linear)  # GPT-2's are [inputs, outputs]
        outputs, inputs = _sizes(frozen)
        self.lora_A, self.lora_B = Linear(inputs, adapt.rank), Linear(adapt.rank, outputs)

    def forward(self, inputs: Tensor) -> Tensor:  # [..., inputs] -> [..., outputs]
        weight = self.weight.T if self.is_transposed else self.weight
        change: Tensor = self.lora_B(self.lora_A(inputs))
        return functional.linear(inputs, weight, self.bias) + self.scale * change


class AdaptedModel(Model):
    """A model whose own weights are frozen; its parameters are those of the adapters, in the model's order."""

    def __init__(self, model: Model, adapt: AdaptConfig) -> None:
        super().__init__()
        self.model, self.context, self.draws = model, model.context, model.draws
        outer = {id(matrix) for matrix in model.vocabulary_matrices()}
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for name, module in _targets(model, outer, adapt):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, Adapter(module, adapt))

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        named = self.model.named_parameters(prefix, recurse, remove_duplicate)
        return ((name, each) for name, each in named if name.endswith((FIRST, SECOND)))

    def base(self) -> dict[str, nn.Parameter]:
        """Returns the frozen parameters, by the names that they have without adapters."""
        return {name: each for name, each in self.model.named_parameters() if not name.endswith((FIRST, SECOND))}

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens)
        return logits

    def loss(self, sequences: Tensor) -> Tensor:
        return self.model.loss(sequences)

    def packed_loss(self, inputs: Tensor, targets: Tensor, positions: Tensor | None) -> Tensor:
        return self.model.packed_loss(inputs, targets, positions)

    def compile_layers(self) -> None:
        self.model.compile_layers()

    def vocabulary_matrices(self) -> list[Tensor]:
        return []

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draws the adapters, as peft does: the model is unchanged until the second matrices have been trained."""
        generator = torch.Generator("cpu").manual_seed(seed)
        for name, parameter in self.named_parameters():
            drawn = torch.zeros(parameter.shape)
            if name.endswith(FIRST):
                most = 1 / math.sqrt(parameter.shape[1])
                drawn.uniform_(-most, most, generator=generator)
            parameter.copy_(drawn)


def _sizes(module: nn.Module) -> tuple[int, int]:
    """Returns a matrix's outputs and inputs."""
    first, second = module.weight.shape  # type: ignore[misc]  # a matrix
    return (first, second) if isinstance(module, nn.Linear) else (second, first)


def _is_matrix(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"  # the latter is transformers' own


def _targets(model: Model, outer: set[int], adapt: AdaptConfig) -> list[tuple[str, nn.Module]]:
    """Returns the modules that get adapters, by name. Raises ConfigError if a named module does not exist."""
    able = [(name, each) for name, each in model.named_modules() if _is_matrix(each) and id(each.weight) not in outer]
    ends = tuple(f".{target}" for target in adapt.targets)
    chosen = [(name, each) for name, each in able if not ends or f".{name}".endswith(ends)]
    for target in adapt.targets:
        if not any(f".{name}".endswith(f".{target}") for name, _ in able):
            known = sorted({name.rpartition(".")[2] for name, _ in able})
            fix = f"Choose from {', '.join(known[:NAMED_MAX])}{', ...' if len(known) > NAMED_MAX else ''}"
            raise ConfigError(f"the model has no matrix {target}", key="adapt.targets", fix=fix)
    for name, each in chosen:
        if adapt.rank > (least := min(_sizes(each))):
            what = f"{adapt.rank} is more than {name} has rows or columns"
            raise ConfigError(what, key="adapt.rank", fix=f"Set it to {least} or less, usually 8 to 64")
    return chosen


def is_transposed(model: ModelConfig) -> bool:
    """Whether the model's matrices are [inputs, outputs]."""
    return model.hf is not None and model.hf.architecture.is_transposed


def merged(weight: Tensor, first: Tensor, second: Tensor, run: RunConfig) -> Tensor:
    """Adds the change of its adapters to a matrix of the base."""
    change = second @ first * (run.adapt.alpha / run.adapt.rank)
    return weight + (change.T if is_transposed(run.model) else change)


# -- The base ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FrozenBase:
    """The file of a run's frozen weights, with its digest and the digests of its pieces."""

    path: Path
    size: int
    digest: str
    leaves: bytes


def make_base(directory: Path, weights: Mapping[str, Tensor]) -> FrozenBase:
    """Writes a base into the directory, under its digest; the same weights make the same file everywhere."""
    make_directory(directory)
    partial = directory / f"new{PARTIAL_SUFFIX}"  # one process at a time uses a data directory
    stored = {name: _stored_type(tensor) for name, tensor in sorted(weights.items())}
    tensors = [(name, dtype, tuple(weights[name].shape)) for name, dtype in stored.items()]
    try:
        with trouble(partial):
            write_tensors(partial, tensors, (octets(weights[name].to(dtype)) for name, dtype in stored.items()))
        written = read_base(partial)
        path = base_file(directory, written.digest)
        with trouble(path):
            rename(partial, path)
    finally:
        forget(partial)
    return replace(written, path=path)


def base_file(directory: Path, digest: str) -> Path:
    """Returns the path of the base with this digest, if the file exists."""
    return directory / f"{digest}.safetensors"


def _stored_type(tensor: Tensor) -> torch.dtype:
    """Returns the smallest type that holds these numbers exactly."""
    return next((dtype for dtype in STORED if torch.equal(tensor.to(dtype).float(), tensor)), torch.float32)


def read_base(path: Path) -> FrozenBase:
    """Reads the whole file to compute its digests."""
    leaves, size = list[bytes](), 0
    with trouble(path, "cannot be read"), open_regular(path.resolve()) as file:  # may be a link
        while piece := file.read(PIECE_BYTES):
            leaves.append(leaf_digest(len(leaves), piece))
            size += len(piece)
    leaves = leaves or [leaf_digest(0, b"")]
    return FrozenBase(path, size, merkle_root(leaves, size).hex(), b"".join(leaves))


def load_base(model: AdaptedModel, path: Path) -> None:
    """Loads a base into the model, in fp32. Raises DataError if it does not fit, since a stranger may have made it."""
    wanted = model.base()
    for name, tensor in base_tensors(path, {name: tuple(each.shape) for name, each in wanted.items()}):
        wanted[name].data = tensor


def base_tensors(path: Path, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, Tensor]]:
    """Yields a base's tensors in fp32, in this order. Raises DataError unless it has exactly these names and shapes."""
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            if found != dict(shapes):
                name = min(found.items() ^ shapes.items())[0]
                raise DataError(f"{path}: {ascii(name)[:100]} does not match the run's model. {ORIGIN_FIX}")
            for name in shapes:
                tensor = file.get_tensor(name)
                if tensor.dtype not in STORED or not bool(torch.isfinite(tensor).all()):
                    raise DataError(f"{path}: {ascii(name)[:100]} has values that are not finite floats. {ORIGIN_FIX}")
                is_aligned = tensor.data_ptr() % FLOAT_BYTES == 0  # not after an odd number of two-byte values
                yield name, tensor.float() if is_aligned else tensor.float().clone()
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path}: not the weights of a model ({ascii(str(error))[:200]}). {ORIGIN_FIX}") from error
