"""The models that a run can train, by `model.kind`.

A model is a torch module with a loss over token sequences (`Model` in model.py). The agreed state is the list of its
trained parameters, in the order of `named_parameters`, where tied ones stand once; a run of a kind other than the
built-in one names the digest of that list, so that two versions of a library that disagree about it are told so.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

import torch

from p2ptrain.config import ModelConfig
from p2ptrain.learn.model import Model, Transformer, parameter_shapes

Shape = tuple[int, ...]


def build(config: ModelConfig, checkpointing: bool = False) -> Model:
    """Makes the model; its weights are arbitrary until they are initialised or loaded."""
    return Transformer(config, checkpointing=checkpointing)


def first_model(config: ModelConfig, seed: int, checkpointing: bool = False) -> Model:
    """Makes the model with its first weights: the same for the same seed on the same machine."""
    model = build(config, checkpointing)
    model.initialise(seed)
    return model


@lru_cache(maxsize=8)
def named_shapes(config: ModelConfig) -> tuple[tuple[str, Shape], ...]:
    """Returns the trained parameters' names and shapes, in the order of the state, without memory for them."""
    with torch.device("meta"):
        return tuple((name, tuple(parameter.shape)) for name, parameter in build(config).named_parameters())


def shapes_of(config: ModelConfig) -> list[Shape]:
    """Returns the shapes alone; of the built-in model without building it, whatever its size."""
    return parameter_shapes(config) if config.kind == "builtin" else [shape for _, shape in named_shapes(config)]


def parameter_count(config: ModelConfig) -> int:
    return sum(prod(shape) for shape in shapes_of(config))
