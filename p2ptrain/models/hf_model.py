"""Models of Hugging Face's transformers: any of the tested architectures, made from the run's config.json.

`config/hf.py` checks the run's config.json; only keys on its lists reach transformers. Everything else is our choice:
fp32 weights, torch's own attention (sdpa), no cache, and no padding token (its row would not be trained). Files, remote
code and the network are never used. Weights come from elsewhere (begin.py, or the swarm).

The loss is the mean cross entropy that transformers computes. Where logits are one product of the hidden states and
the output matrix it is computed a block of tokens at a time (`FusedLoss`), so that a large vocabulary takes no more
memory than the built-in model's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from p2ptrain.config import ModelConfig
from p2ptrain.config.hf import HfConfig, Objective
from p2ptrain.errors import ConfigError, DeviceError
from p2ptrain.models.built_in import Model, only_learned
from p2ptrain.models.loss import cross_entropy

INSTALL = "pip install 'p2ptrain[hf]'"
AUTO_CLASSES: dict[Objective, str] = {"causal": "AutoModelForCausalLM", "masked": "AutoModelForMaskedLM"}


@cache
def library() -> Any:
    """Imports transformers, which then stays off the network. Raises ConfigError if it is not installed."""
    if find_spec("transformers") is None:
        raise ConfigError(f"this run trains a transformers model: {INSTALL}", key="model.kind")
    os.environ["HF_HUB_OFFLINE"] = "1"  # huggingface_hub reads this when it is imported
    transformers = import_module("transformers")  # imported by name, because mypy may run without the extra
    transformers.utils.logging.set_verbosity_error()
    return transformers


def make_net(config: HfConfig, seed: int = 0) -> Any:
    """Makes the module as transformers does, with weights drawn from the seed; no other random numbers change."""
    transformers = library()
    from huggingface_hub.errors import StrictDataclassError  # noqa: PLC0415

    fixed = {"use_cache": False, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    try:
        keys = transformers.AutoConfig.for_model(config.model_type, **config.keys, **fixed)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return getattr(transformers, AUTO_CLASSES[config.architecture.objective]).from_config(
                keys, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
            )
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        why = " ".join(str(error).split())[:300]
        what = f"transformers {transformers.__version__} makes no model of the run's config.json: {why}"
        raise DeviceError(what, fix="Install the version that the run's founder has") from error


def class_name(config: HfConfig) -> str:
    """Returns the name of transformers' class for this model."""
    with torch.device("meta"):
        return type(make_net(config)).__name__


def _arguments(inputs: Tensor, positions: Tensor | None) -> dict[str, Any]:
    """Returns the arguments of a forward pass. Where positions restart, transformers takes a document to begin."""
    return {"input_ids": inputs, "use_cache": False} | ({} if positions is None else {"position_ids": positions})


class HfModel(Model):
    """A language model of transformers, with its parameters under their own names."""

    def __init__(self, config: ModelConfig, *, checkpointing: bool = False) -> None:
        super().__init__()
        assert config.hf is not None, "the kind is transformers"
        self.hf, self.checkpointing = config.hf, checkpointing
        self.context = config.sequence_length if config.objective == "causal" else 0
        self.draws = config.hf.dropout > 0
        self.net = make_net(config.hf)
        self._prepare()

    def _prepare(self) -> None:
        self.net.train()
        if self.checkpointing:
            enable = getattr(self.net, "activation_checkpointing_enable", None)
            (enable or self.net.gradient_checkpointing_enable)({"use_reentrant": False})  # the older name

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.net.named_parameters(prefix, recurse, remove_duplicate)

    def initialise(self, seed: int) -> None:
        self.net = make_net(self.hf, seed)
        self._prepare()

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, length] int64 -> [batch, length, vocab]
        logits: Tensor = self.net(input_ids=tokens, use_cache=False).logits
        return logits

    def loss(self, sequences: Tensor) -> Tensor:  # [batch, length + 1] int64 -> scalar fp32
        """Returns the mean cross entropy, in nats, of every token but the first, given those before it."""
        assert self.hf.architecture.objective == "causal", "a model that sees both sides would see its targets"
        inputs, targets = sequences[:, :-1], sequences[:, 1:].flatten()
        if not self.hf.architecture.is_head_plain:
            return functional.cross_entropy(self(inputs).flatten(0, 1).float(), targets)
        return cross_entropy(self._hidden(inputs, None).flatten(0, 1), self._head(), targets)

    def packed_loss(self, inputs: Tensor, targets: Tensor, positions: Tensor | None) -> Tensor:
        if self.hf.architecture.is_head_plain:
            hidden, kept = only_learned(self._hidden(inputs, positions), targets)
            return cross_entropy(hidden, self._head(), kept)
        logits, kept = only_learned(self.net(**_arguments(inputs, positions)).logits, targets)
        return functional.cross_entropy(logits.float(), kept, reduction="sum") / max(1, len(kept))

    def _hidden(self, inputs: Tensor, positions: Tensor | None) -> Tensor:  # -> [batch, length, dim]
        hidden: Tensor = self.net.base_model(**_arguments(inputs, positions)).last_hidden_state
        return hidden

    def _head(self) -> Tensor:  # [vocab, dim]
        weight: Tensor = self.net.get_output_embeddings().weight
        return weight

    def vocabulary_matrices(self) -> list[Tensor]:
        return [*super().vocabulary_matrices(), self._head()]

    def compile_layers(self) -> None:
        self.net.base_model.compile()
