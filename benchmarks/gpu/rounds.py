"""A node's rounds on a device: its steps, and all that the swarm adds to them but the network, a stage at a time."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor

from benchmarks.gpu import model_config
from p2ptrain.config import RecipeConfig
from p2ptrain.exact.codec import Contribution
from p2ptrain.exact.kernels.launches import OnCard
from p2ptrain.exact.outer import Outer
from p2ptrain.exact.root import state_root
from p2ptrain.models.built_in import Transformer
from p2ptrain.train.live import LiveModel
from p2ptrain.train.recipes import make_recipe

LOCAL_STEPS = BLOCK_STEPS = 10
RECIPES = {
    "distro": RecipeConfig(name="distro"),
    "local": RecipeConfig(name="local", local_steps=LOCAL_STEPS, inner_learning_rate=Fraction(3, 10_000)),
}


class Rounds:
    """A node's rounds on the device that has the model.

    batch: of each step; None if no step is taken
    """

    def __init__(self, live: LiveModel, config: RecipeConfig, batch: Tensor | None = None) -> None:
        self.live, self.config, self.batch = live, config, batch
        self.outer = Outer(config, live.shapes)
        self.recipe = make_recipe(config, live, self.outer.layouts)
        self.agreed = live.weights.clone()
        self.payloads: list[bytes] = []
        self.number = 0

    def steps(self, count: int = BLOCK_STEPS) -> None:
        assert self.batch is not None
        for step in range(count):
            self.recipe.local_step(step, self.batch, [])

    def begin(self) -> None:
        self.number += 1
        self.recipe.base.copy_(self.agreed)
        self.recipe.begin(self.number)

    def end(self) -> None:
        self.recipe.end()

    def take(self) -> Contribution | OnCard:
        return self.recipe.contribute(self.number)

    def pack(self, made: Contribution | OnCard) -> bytes:
        payload = self.outer.pack(made, 0)
        self.recipe.residual.forget(self.number)
        return payload

    def contribute(self) -> bytes:
        self.end()
        return self.pack(self.take())

    def apply(self) -> None:
        self.outer.apply(self.agreed, 0, self.payloads)

    def root(self) -> None:
        state_root(self.agreed)

    def block(self) -> None:
        """Takes as many steps as `steps`, in whole rounds."""
        for _ in range(BLOCK_STEPS // self.config.local_steps):
            self.begin()
            self.steps(self.config.local_steps)
            self.contribute()
            self.apply()
            self.root()

    def with_contributions(self, count: int) -> None:
        """Makes a contribution without a step, and has each round apply that many copies of it."""
        self.begin()
        self.recipe.residual.coefficients.normal_()
        self.payloads = [self.contribute()] * count

    def stages(self) -> list[tuple[str, Callable[[], None]]]:
        """Returns a round without its steps as stages, which are called in this order."""
        made: list[Contribution | OnCard] = []

        def take() -> None:
            made.append(self.take())

        def pack() -> None:
            self.pack(made.pop())

        named = {"begin": self.begin, "end": self.end, "take": take, "pack": pack}
        return [*named.items(), ("apply", self.apply), ("root", self.root)]


def stepless(size: str, vocabulary: int, recipe: str, device: torch.device) -> Rounds:
    """Makes rounds of a model whose weights nobody trains: small numbers, or none on the device `meta`."""
    with torch.device(device):
        live = LiveModel(Transformer(model_config(size, vocab_size=vocabulary)), autocast=False)
    return Rounds(live, RECIPES[recipe])
