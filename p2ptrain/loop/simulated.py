"""Trains a swarm in one process: the curve first, the machines later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from p2ptrain.config import RecipeConfig, exact, run_config_of
from p2ptrain.errors import ConfigError, DataError
from p2ptrain.exact.outer import Outer
from p2ptrain.train.residual import Residual


@dataclass(frozen=True, slots=True)
class SimulatedRound:
    """A round of a simulated swarm."""

    number: int
    loss: float  # mean over all peers' steps
    payload_bytes: int  # that each peer sends


def simulate(
    model: nn.Module,
    data: Iterator[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    *,
    peers: int = 4,
    rounds: int = 50,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    recipe: Mapping[str, object] | None = None,
) -> list[SimulatedRound]:
    """Trains this model as that many peers would, one after the other here, and returns a row for each round.

    What they send is encoded and applied exactly as in a swarm; none is late and none lies. The model ends with the
    weights that they agree on.

    data: batches, of which each step of each peer takes the next; loss: of the model and a batch; optimizer: makes that
    of a peer, AdamW at the recipe's rate by default; recipe: the keys of a run's [recipe], such as {"local_steps": 20}
    """
    table = {"name": "simulated", "recipe": {"inner": "adamw", **exact(recipe or {})}}
    run = run_config_of(table, Path("simulate"))
    if run.recipe.spec.kind != "local":
        raise ConfigError("only steps move weights", key="recipe.name", fix='Use "local"')
    if run.recipe.fragments > 1:
        raise ConfigError("is more than one: simulate has no fragments", key="recipe.fragments", fix="Use 1")
    trained = [each for each in model.parameters() if each.requires_grad]
    rate = float(run.recipe.inner_learning_rate)
    make = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0))
    outer, found = Outer(run.recipe, [tuple(each.shape) for each in trained]), []
    swarm = [(make(trained), Residual(outer.layouts, torch.device("cpu"))) for _ in range(peers)]
    state = torch.zeros(outer.state_numbers)
    agreed = outer.parts(state[: outer.parameters])
    for base, each in zip(agreed, trained, strict=True):
        base.copy_(each.detach())
    for number in range(rounds):
        payloads, losses = [], []
        for steps, residual in swarm:
            losses += _steps(model, data, loss, run.recipe, steps)
            moved = [base - each.detach().cpu() for base, each in zip(agreed, trained, strict=True)]
            residual.add(number, moved, float(run.recipe.decay))
            payloads.append(outer.pack(residual.take(number, run.recipe), 0))
            _load(trained, agreed)
        counted = outer.apply(state, number, payloads)
        for (_, residual), payload in zip(swarm, payloads, strict=True):
            residual.forget(number, counted.uncounted(payload))
        _load(trained, agreed)
        found.append(SimulatedRound(number + 1, sum(losses) / len(losses), outer.payload_bytes))
    return found


def _steps(
    model: nn.Module,
    data: Iterator[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    recipe: RecipeConfig,
    optimizer: torch.optim.Optimizer,
) -> list[float]:
    losses = []
    for _ in range(recipe.local_steps):
        optimizer.zero_grad(set_to_none=True)
        if (batch := next(data, None)) is None:
            raise DataError("the data has ended: give batches for ever, or fewer rounds")
        value = loss(model, batch)
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(value.detach()))
    return losses


@torch.no_grad()
def _load(trained: list[nn.Parameter], agreed: list[Tensor]) -> None:
    for parameter, base in zip(trained, agreed, strict=True):
        parameter.copy_(base)
