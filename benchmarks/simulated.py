"""Swarms in one process, for benchmarks: real recipes, real payloads, one copy of the agreed weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from p2ptrain.config import RecipeConfig
from p2ptrain.learn.aggregate import apply_payloads
from p2ptrain.learn.codec import PayloadFormat, pack
from p2ptrain.learn.inner import INNER_OPTIMIZERS
from p2ptrain.learn.live import LiveModel
from p2ptrain.learn.recipes import make_recipe
from p2ptrain.learn.schedule import inner_rate, learning_rate, reach
from p2ptrain.learn.transform import Layout


class Swarm:
    """Peers with a residual each, one copy of the agreed weights, and real payloads between them."""

    def __init__(self, recipe: RecipeConfig, live: LiveModel, peers: int, delay: int = 0) -> None:
        self.config, self.live, self.delay = recipe, live, delay
        self.layout = Layout(live.shapes, recipe.chunk)
        self.form = PayloadFormat.of(self.layout, recipe)
        self.peers = [make_recipe(recipe, live, self.layout) for _ in range(peers)]
        self.agreed = self.peers[0].agreed
        for peer in self.peers:
            peer.agreed = self.agreed  # replicas are the same bits, so one will do
        self.payload_bytes = self.form.payload_bytes
        self.waiting: list[dict[int, bytes]] = []  # by peer

    def round(self, round_number: int, batches: list[list[Any]], alone: int | None = None) -> None:
        """Runs a round; `alone`: the one peer whose contribution the others had in time."""
        payloads = {}
        for number, (peer, own) in enumerate(zip(self.peers, batches, strict=True)):
            peer.begin(round_number)
            for step, batch in enumerate(own):
                peer.local_step(step, batch, [])
            peer.end()
            payload = pack(peer.contribute(round_number), self.form)
            if alone in (None, number):
                payloads[number] = payload
            else:
                peer.residual.restore(round_number)
        self.waiting.append(payloads)
        if len(self.waiting) > self.delay:
            self._apply(round_number, self.waiting.pop(0))
        self.live.weights.copy_(self.agreed)

    def _apply(self, round_number: int, payloads: dict[int, bytes]) -> None:
        rate, furthest = learning_rate(self.config, round_number), reach(self.config, round_number, self.delay)
        parts, offered = self.live.parts(self.agreed), list(payloads.values())
        scales = apply_payloads(self.layout, self.config, self.form, offered, rate, furthest, parts)
        for place, number in enumerate(payloads):
            uncounted = partial(scales.uncounted, place) if scales else None
            self.peers[number].residual.forget(round_number - self.delay, uncounted)


class FullySynchronised:
    """The baseline: one optimizer (the recipe's `inner`) on the mean gradient of all peers."""

    def __init__(self, recipe: RecipeConfig, live: LiveModel) -> None:
        self.config, self.live = recipe, live
        self.payload_bytes = 4 * live.weights.numel()
        self.optimizer = INNER_OPTIMIZERS[recipe.inner](recipe, live)

    def round(self, round_number: int, batches: list[list[Any]]) -> None:
        total = torch.zeros_like(self.live.gradient)
        for own in batches:
            self.live.gradient_step(0, own[0], [], self.config)
            total += self.live.gradient
        torch.div(total, len(batches), out=self.live.gradient)
        self.optimizer.step(float(inner_rate(self.config, round_number)))
