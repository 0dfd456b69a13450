"""Our inner optimizers (p2ptrain/train/inner.py) in torch's form, for others who train with a torch.optim.Optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from p2ptrain.config import RecipeConfig
from p2ptrain.train.inner import MUON_MOMENTUM, MUON_RMS, adamw, orthogonalised


class Inner(torch.optim.Optimizer):
    """Muon where `hidden` says so of a parameter, AdamW for the others."""

    def __init__(self, params: Iterable[Any], hidden: list[bool], recipe: RecipeConfig, rate: float) -> None:
        super().__init__(params, {"lr": rate})
        assert len(self.param_groups) == 1, "`hidden` tells of one group"
        self.hidden, self.recipe = hidden, recipe

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        (group,) = self.param_groups
        for parameter, is_hidden in zip(group["params"], self.hidden, strict=True):
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state |= {name: torch.zeros_like(parameter) for name in ("mean", *([] if is_hidden else ["square"]))}
                state["steps"] = torch.zeros(())
            state["steps"] += 1
            gradient = parameter.grad.clone()  # our steps overwrite it, but it may be another's buffer
            if is_hidden:
                self._muon(parameter, gradient, state["mean"], group["lr"])
            else:
                flat = [[each.view(-1)] for each in (parameter, gradient, state["mean"], state["square"])]
                adamw(*flat, int(state["steps"]), group["lr"], self.recipe)

    def _muon(self, weights: Tensor, gradient: Tensor, mean: Tensor, rate: float) -> None:
        mean.lerp_(gradient, 1 - MUON_MOMENTUM)
        gradient.lerp_(mean, MUON_MOMENTUM)
        (update,) = orthogonalised([gradient], is_half=False)
        turned = update.T if update.shape != weights.shape else update
        weights.mul_(1 - rate * float(self.recipe.inner_weight_decay))
        weights.sub_(turned, alpha=rate * MUON_RMS * max(weights.shape) ** 0.5)


def hidden_matrices(model: nn.Module, inner: str) -> list[bool]:
    """Returns for each parameter whether Muon moves it."""
    embeddings = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    return [inner == "muon" and each.dim() == 2 and id(each) not in embeddings for each in model.parameters()]
