"""The models that a run can train, by `model.kind`.

A model is a torch module with a loss over token sequences (`Model` in built_in.py): the built-in one, one of
transformers, or a plug-in's. The agreed state is the list of its trained parameters in the order of `named_parameters`,
which yields tied ones once. A run of any kind but the built-in one names the digest of that list, so that nodes whose
library versions disagree about it get an error."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from p2ptrain.config import WHOLE, AdaptConfig, ModelConfig
from p2ptrain.digest import digest
from p2ptrain.errors import ConfigError, DeviceError
from p2ptrain.exact.root import octets
from p2ptrain.models import plugins
from p2ptrain.models.adapters import AdaptedModel, load_base
from p2ptrain.models.built_in import Model, Transformer, parameter_shapes

Shape = tuple[int, ...]
NamedShapes = tuple[tuple[str, Shape], ...]
ENTRY_BYTES_MAX = 512  # a tensor's entry in the header of a file of weights
BUILTIN_PREFIX = "model."  # present in Hugging Face's names, absent from the built-in model's


class OwnModel(Model):
    """The parameters of a model that the members' own scripts train; only these scripts can compute its loss."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._names = [name for name, _ in config.named]
        for number, (_, shape) in enumerate(config.named):  # torch allows no dot in a name
            self.register_parameter(f"parameter{number}", nn.Parameter(torch.zeros(shape)))

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        named = super().named_parameters(prefix, recurse, remove_duplicate)
        return ((name, parameter) for name, (_, parameter) in zip(self._names, named, strict=True))

    def vocabulary_matrices(self) -> list[Tensor]:
        return []


def build(
    config: ModelConfig,
    checkpointing: bool = False,
    seed: int = 0,
    adapt: AdaptConfig = WHOLE,
    base: Path | None = None,
) -> Model:
    """Makes the model; its weights are arbitrary until they are initialised or loaded, except those of a `base`.

    seed: for the random numbers of a plug-in's constructor; those of other code do not change"""
    model = _build(config, checkpointing, seed)
    if not adapt.is_on:
        return model
    adapted = AdaptedModel(model, adapt)
    if base is not None:
        load_base(adapted, base)
    return adapted


def _build(config: ModelConfig, checkpointing: bool, seed: int) -> Model:
    if config.kind == "builtin":
        return Transformer(config, checkpointing=checkpointing)
    if config.kind == "own":
        return OwnModel(config)
    if config.kind == "plugin":
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return _checked(plugins.make("model", config.plugin, config.settings, config), config.plugin)
    from p2ptrain.models.hf_model import HfModel  # noqa: PLC0415  # needs the extra [hf]

    model = HfModel(config, checkpointing=checkpointing)
    refuse_trained_buffers(model)
    return model


def first_model(
    config: ModelConfig, seed: int, checkpointing: bool = False, adapt: AdaptConfig = WHOLE, base: Path | None = None
) -> Model:
    """Makes the model with its first weights: the same for the same seed on the same machine."""
    model = build(config, checkpointing, seed, adapt, base)
    with torch.random.fork_rng(devices=[]), plugins.blamed_in_model(config, "made its first weights"):
        model.initialise(seed)
    return model


def _checked(model: object, plugin: str) -> Model:
    """Returns a plug-in's model. Raises ConfigError if the swarm could not agree on everything that it learns."""
    key = "model.plugin"
    if not isinstance(model, Model):
        what = f"{plugin} makes {type(model).__name__}, which is no p2ptrain.models.built_in.Model"
        raise ConfigError(what, key=key, fix=plugins.AUTHOR_FIX)
    parameters = dict(model.named_parameters())
    if not parameters:
        raise ConfigError(f"the model of {plugin} has no parameters", key=key, fix=plugins.AUTHOR_FIX)
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32 or not parameter.requires_grad:
            what = f"{name} of {plugin} is {str(parameter.dtype).removeprefix('torch.')}"
            what += "" if parameter.requires_grad else ", and frozen"
            fix = "A parameter is float32 and trained; what does not change is a buffer"
            raise ConfigError(what, key=key, fix=fix)
    refuse_trained_buffers(model)
    model.draws = True  # unknown, so assume it
    return model


def build_with(
    config: ModelConfig, weights: Mapping[str, Tensor], adapt: AdaptConfig = WHOLE, base: Path | None = None
) -> Model:
    """Makes the model from these tensors, by parameter name, without copying them; the frozen ones are in `base`."""
    if config.kind == "builtin" and not adapt.is_on:
        with torch.device("meta"):  # no memory, whatever the size
            model = build(config)
        model.load_state_dict(weights, assign=True)
        return model
    model = build(config, adapt=adapt, base=base)  # built for real, because it has buffers
    for name, parameter in model.named_parameters():  # yields a tied parameter once
        parameter.data = weights[name]
    return model


@contextmanager
def weightless() -> Iterator[None]:
    """Builds models whose parameters are on the device meta, and have no memory; their buffers are real."""

    def without_numbers(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.is_meta:  # tied ones stay one
            return None
        return nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    with register_module_parameter_registration_hook(without_numbers):  # type: ignore[arg-type]  # torch's types lag
        yield


def layers_of(model: Model, config: ModelConfig) -> nn.ModuleList:
    """Returns a model's layers. Raises ConfigError for a model that does not hold them in one list."""
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each)]
    found = max(lists, key=lambda each: sum(p.numel() for p in nn.Module.parameters(each)), default=None)
    wanted = {"builtin": config.layers, "transformers": config.hf.layers if config.hf else 0}.get(config.kind, 0)
    if found is None or len(found) != wanted:
        what = "the layers of this model are not known"
        raise ConfigError(what, key="device.shard", fix="Set it to false: each process then has the whole model")
    return found


def refuse_trained_buffers(model: nn.Module) -> None:
    """Refuses a model that learns outside of its parameters, because the swarm agrees only on these."""
    for name, module in model.named_modules():
        if getattr(module, "running_mean", None) is not None:
            what = f"{type(module).__name__} {name} keeps running averages, which training changes and no state covers"
            raise ConfigError(what, key="model.kind", fix="Use a norm without them, such as LayerNorm or GroupNorm")


@lru_cache(maxsize=8)
def named_shapes(config: ModelConfig, adapt: AdaptConfig = WHOLE) -> NamedShapes:
    """Returns the trained parameters' names and shapes, in the state's order, without allocating them.

    Raises DeviceError if they differ from those in the run."""
    with torch.device("meta"):
        model = build(config, adapt=adapt)
    found = tuple((name, tuple(parameter.shape)) for name, parameter in model.named_parameters())
    if config.shapes and shapes_digest(found) != config.shapes:
        what = f"{_maker(config)} makes other parameters than the run's: {shapes_digest(found)} instead of "
        what += config.shapes
        raise DeviceError(what, fix="Install the version that the run's founder has")
    return found


def _maker(config: ModelConfig) -> str:
    if config.kind != "transformers":
        return config.plugin or "the key model.parameters"
    from p2ptrain.models.hf_model import library  # noqa: PLC0415

    return f"the installed transformers {library().__version__}"


def shapes_digest(shapes: NamedShapes) -> str:
    """Returns the digest of all parameters' names and shapes, in their order."""
    return digest("model shapes", json.dumps(shapes, separators=(",", ":")).encode()).hex()


@torch.no_grad()
def frozen_digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """Returns the digest of the names, types, shapes and bytes of parameters that do not train; empty without any."""
    parts = []
    for name, each in sorted(named, key=lambda pair: pair[0]):
        if each.is_meta:
            fix = "Load its weights: whoever trains with you needs to have the same"
            raise ConfigError(f"{name} is on the device meta, and has no numbers", key="model", fix=fix)
        what = json.dumps([name, str(each.dtype), list(each.shape)], separators=(",", ":")).encode()
        try:
            content = octets(each)
        except RuntimeError as error:
            fix = "Make it a plain tensor"
            raise ConfigError(f"{name} cannot be read as bytes: {error}", key="model", fix=fix) from error
        parts.append(digest("frozen parameter", what, content))
    return digest("frozen parameters", *parts).hex() if parts else ""


def by_name(flat: Tensor, shapes: NamedShapes) -> dict[str, Tensor]:
    """Cuts a flat state into its parameters, without a copy."""
    parts = torch.split(flat, [prod(shape) for _, shape in shapes])
    return {name: part.view(shape) for (name, shape), part in zip(shapes, parts, strict=True)}


def shapes_of(config: ModelConfig, adapt: AdaptConfig = WHOLE) -> list[Shape]:
    """Returns the shapes of the trained parameters. The built-in model is not built for this, whatever its size."""
    if config.kind == "builtin" and not adapt.is_on:
        return parameter_shapes(config)
    return [shape for _, shape in named_shapes(config, adapt)]


def parameter_count(config: ModelConfig, adapt: AdaptConfig = WHOLE) -> int:
    """Returns the number of trained values."""
    return sum(prod(shape) for shape in shapes_of(config, adapt))


def without_adapters(config: ModelConfig) -> ModelConfig:
    """Returns the model of a run without its adapters; a run's `shapes` digest covers only the adapters."""
    return config.model_copy(update={"shapes": ""})


def check_base_bytes(config: ModelConfig, adapt: AdaptConfig) -> None:
    """Refuses frozen weights whose size does not fit the model, before they are fetched."""
    shapes = named_shapes(without_adapters(config))
    count = sum(prod(shape) for _, shape in shapes)
    if adapt.base and not 2 * count < adapt.base_bytes <= 4 * count + ENTRY_BYTES_MAX * (1 + len(shapes)):
        what = f"{adapt.base_bytes:,} bytes are not the size of the model's {count:,} weights"
        raise ConfigError(what, key="adapt.base_bytes", fix="Whoever began the run made it so: join another")


def exported_name(config: ModelConfig, name: str) -> str:
    """Returns the name that a parameter has in Hugging Face's files."""
    return BUILTIN_PREFIX + name if config.kind == "builtin" else name


def exported_shapes(config: ModelConfig) -> NamedShapes:
    """Returns the parameters under the names that they have in Hugging Face's files."""
    return tuple((exported_name(config, name), shape) for name, shape in named_shapes(config))
