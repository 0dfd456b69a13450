"""Trains a swarm in one process: the curve first, the machines later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from p2ptrain.config import RecipeConfig, RunConfig, exact, run_config_of
from p2ptrain.errors import ConfigError, DataError
from p2ptrain.learn.aggregate import apply_payloads
from p2ptrain.learn.codec import PayloadFormat, pack
from p2ptrain.learn.recipes import Residual
from p2ptrain.learn.schedule import learning_rate, reach
from p2ptrain.learn.transform import Layout


@dataclass(frozen=True, slots=True)
class SimulatedRound:
    """A round of a simulated swarm."""

    number: int
    loss: float  # mean over all peers' steps
    payload_bytes: int  # that each peer sends


@dataclass(slots=True)
class _Peer:
    optimizer: torch.optim.Optimizer
    residual: Residual


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
    trained = [each for each in model.parameters() if each.requires_grad]
    rate = float(run.recipe.inner_learning_rate)
    make = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0))
    layout = Layout([tuple(each.shape) for each in trained], run.recipe.chunk)
    swarm = [_Peer(make(trained), Residual(layout, torch.device("cpu"))) for _ in range(peers)]
    agreed = [each.detach().cpu().clone() for each in trained]
    form, found = PayloadFormat.of(layout, run.recipe), []
    for number in range(rounds):
        payloads, losses = [], []
        for peer in swarm:
            losses += _steps(model, data, loss, run.recipe, peer.optimizer)
            moved = [base - each.detach().cpu() for base, each in zip(agreed, trained, strict=True)]
            peer.residual.add(moved, float(run.recipe.decay))
            payloads.append(pack(peer.residual.take(number, run.recipe), form))
            _load(trained, agreed)
        _apply(run, layout, form, number, payloads, agreed, swarm)
        _load(trained, agreed)
        found.append(SimulatedRound(number + 1, sum(losses) / len(losses), form.payload_bytes))
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
def _apply(
    run: RunConfig,
    layout: Layout,
    form: PayloadFormat,
    number: int,
    payloads: list[bytes],
    agreed: list[Tensor],
    swarm: list[_Peer],
) -> None:
    rate, furthest = learning_rate(run.recipe, number), reach(run.recipe, number, 0)
    scales = apply_payloads(layout, run.recipe, form, payloads, rate, furthest, agreed)
    for place, peer in enumerate(swarm):
        peer.residual.forget(number, partial(scales.uncounted, place) if scales else None)


@torch.no_grad()
def _load(trained: list[nn.Parameter], agreed: list[Tensor]) -> None:
    for parameter, base in zip(trained, agreed, strict=True):
        parameter.copy_(base)
