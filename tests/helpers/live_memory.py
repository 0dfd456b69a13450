"""Measures the memory of a training pass by running it on meta tensors, which have shapes but no data."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from p2ptrain.config import ModelConfig
from p2ptrain.data.packing import PLAIN, Packing
from p2ptrain.models.kinds import build
from p2ptrain.train.live import LiveModel
from p2ptrain.train.memory import PassSettings


def peak_of_pass(model: ModelConfig, sequences: int, passes: PassSettings, packing: Packing = PLAIN) -> int:
    """Returns the peak of live bytes, without the weights and their gradient."""
    with FakeTensorMode():
        live = LiveModel(build(model, passes.checkpointing), autocast=passes.autocast, packing=packing)
        known = [live.weights, live.gradient]
        batch = torch.zeros(sequences, model.sequence_length + 1, dtype=torch.int64)
        with Alive(known) as alive:
            loss = live.loss(batch)
        with alive:
            loss.backward()
    return alive.peak


class Alive(TorchDispatchMode):
    """Adds up the bytes of all storages that operations have made and that are still referenced."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen = weakref.WeakSet(each.untyped_storage() for each in known)

    def __torch_dispatch__(
        self, function: Callable[..., Any], _: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        made = function(*arguments, **(named or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()) not in self._seen:
                self._seen.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._let_go, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return made

    def _let_go(self, size: int) -> None:
        self.now -= size
