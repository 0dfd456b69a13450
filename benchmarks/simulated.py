"""Swarms in one process, for benchmarks: real recipes, real payloads, one copy of the agreed weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from p2ptrain.config import RecipeConfig
from p2ptrain.exact.outer import Outer
from p2ptrain.exact.schedule import inner_rate
from p2ptrain.region.shift import Region, World
from p2ptrain.train.inner import INNER_OPTIMIZERS
from p2ptrain.train.live import LiveModel
from p2ptrain.train.recipes import EARLY_SHARE, LocalRecipe, make_recipe
from p2ptrain.train.residual import Residual


@dataclass(frozen=True)
class Origin:
    """Where a contribution comes from: the weights that its steps began at, each with its share of them."""

    began: list[tuple[float, torch.Tensor]]
    moved: float

    def gap(self, agreed: torch.Tensor) -> float:
        """Returns how far they are from the weights that it is applied to, over the distance that it moved."""
        away = sum(share * float(torch.linalg.vector_norm(start - agreed)) for share, start in self.began)
        return away / self.moved if self.moved else 0.0


class Swarm:
    """Peers with a residual each, one copy of the agreed state, and real payloads between them.

    delay: how many more rounds have trained before a round's contributions are applied; between_steps: after so many
    of the last one's steps, and 0 once all are taken; covered: how many other rounds' movement a contribution may hold
    as well; shares: of a step's sequences, by peer, none: all; early_share: of a peer's own contribution that waits,
    with which it begins
    """

    def __init__(
        self,
        recipe: RecipeConfig,
        live: LiveModel,
        peers: int,
        delay: int = 0,
        between_steps: int = 0,
        covered: int = 0,
        shares: Sequence[float] = (),
        early_share: float = EARLY_SHARE,
    ) -> None:
        self.config, self.live, self.delay, self.between_steps = recipe, live, delay, between_steps
        self.shares = shares
        self.outer = Outer(recipe, live.shapes, delay, covered)
        self.peers = [make_recipe(recipe, live, self.outer.layouts) for _ in range(peers)]
        self.state = torch.zeros(self.outer.state_numbers, device=live.weights.device)
        self.agreed = self.state[: self.outer.parameters].copy_(live.weights)
        for peer in self.peers:
            if isinstance(peer, LocalRecipe):
                peer.early_share = early_share
            peer.base = self.agreed  # replicas are the same bits, so one will do
        self.payload_bytes = self.outer.payload_bytes
        self.waiting: list[dict[int, bytes]] = []  # by round: payloads by peer
        self.origins: dict[bytes, Origin] = {}  # of the payloads that wait
        self.gaps: list[float] = []  # of the contributions of `local` that were applied

    def round(
        self,
        round_number: int,
        batches: list[list[Any]],
        alone: int | None = None,
        shift: torch.Tensor | None = None,
    ) -> None:
        """Runs a round; `alone`: the one peer whose contribution the others had in time; shift: what all add first."""
        payloads = {}
        old, last = self.state.clone(), self.waiting.pop(0) if self.between_steps and self.waiting else {}
        for number, (peer, own) in enumerate(zip(self.peers, batches, strict=True)):
            if not own:  # it is away
                continue
            self.state.copy_(old)
            self.live.weights.copy_(self.agreed)
            peer.begin(round_number + 1)
            if isinstance(peer, LocalRecipe) and self.shares:
                peer.shorten(self.shares[number])
            if shift is not None:
                self.live.weights.add_(shift)
            starts = {0: self.live.weights.clone()} if isinstance(peer, LocalRecipe) else {}
            for step, batch in enumerate(own):
                if last and step == self.between_steps:
                    assert isinstance(peer, LocalRecipe)
                    before = self.live.weights.clone()
                    with peer.rebased():
                        self._apply(round_number, last, number)
                    starts[step] = starts[0] + (self.live.weights - before)
                peer.local_step(step, batch, [])
            peer.end()
            origin = self._origin(starts, len(own)) if isinstance(peer, LocalRecipe) else None
            agreed = round_number + 1  # the swarm counts from 1
            payload = self.outer.pack(peer.contribute(agreed), self.outer.fragment_of(agreed))
            if alone in (None, number):
                payloads[number] = payload
                if origin is not None:
                    self.origins[payload] = origin
            else:
                peer.residual.restore(agreed)
        self.waiting.append(payloads)
        if len(self.waiting) > self.delay:
            self._apply(round_number, self.waiting.pop(0))
        self.live.weights.copy_(self.agreed)

    def settle(self, rounds: int) -> None:
        """Applies what still waits after so many rounds, when training has ended."""
        for number, payloads in enumerate(self.waiting, rounds):
            self._apply(number, payloads)
        self.waiting.clear()
        self.live.weights.copy_(self.agreed)

    def _origin(self, starts: dict[int, torch.Tensor], steps: int) -> Origin:
        """Returns it once the steps have ended, and the live weights are how far they moved; starts: by first step."""
        ends = [*list(starts)[1:], steps]
        shares = [(end - first) / steps for first, end in zip(starts, ends, strict=True)]
        moved = float(torch.linalg.vector_norm(self.live.weights))
        return Origin(list(zip(shares, starts.values(), strict=True)), moved)

    @torch.no_grad()
    def _apply(self, round_number: int, payloads: dict[int, bytes], only: int | None = None) -> None:
        """Applies the round before the last `delay` ones; only: the peer that hears of it, instead of all."""
        for number, payload in payloads.items():
            if only in (None, number) and (origin := self.origins.pop(payload, None)):
                self.gaps.append(origin.gap(self.agreed))
        taken = round_number - self.delay
        counted = self.outer.apply(self.state, taken if self.between_steps else round_number, list(payloads.values()))
        for number, payload in payloads.items():
            if only in (None, number):
                self.peers[number].residual.forget(taken + 1, counted.uncounted(payload))


class RadialSwarm(Swarm):
    """Each tensor moves in the direction of the mean, as far as contributions move it on average: however many there
    are, their noise does not shorten the step. In floating point."""

    @torch.no_grad()
    def _apply(self, round_number: int, payloads: dict[int, bytes], only: int | None = None) -> None:
        before, each = self.state.clone(), []
        for payload in payloads.values():
            alone = torch.zeros_like(self.state)
            self.outer.apply(alone, round_number, [payload])
            each.append([float(part.norm()) for part in self.outer.parts(alone)])
        super()._apply(round_number, payloads, only)
        for part, old, norms in zip(
            self.outer.parts(self.state), self.outer.parts(before), zip(*each, strict=True), strict=True
        ):
            moved = part - old
            if norm := float(moved.norm()):
                part.copy_(old + moved * (sum(norms) / len(norms) * float(self.config.learning_rate) / norm))


class SwarmOfSpeeds(Swarm):
    """Peers of which each takes as many rounds for a training as `speeds` says, and contributes late.

    Nothing is too late here: what a daemon's run has staleness_rounds_max for.
    """

    def __init__(self, recipe: RecipeConfig, live: LiveModel, speeds: Sequence[int]) -> None:
        super().__init__(recipe, live, len(speeds))
        self.speeds = speeds
        self.outer = Outer(recipe, live.shapes, max(speeds) - 1)
        self.bases = [self.state.clone() for _ in speeds]  # from which each trains

    def round(self, round_number: int, batches: list[list[Any]], alone: int | None = None) -> None:
        """Trains those whose training ends in this round, each from where it began, and applies what they made."""
        now, payloads = self.state.clone(), {}
        ready = [number for number, speed in enumerate(self.speeds) if speed and (round_number + 1) % speed == 0]
        for number in ready:
            self.state.copy_(self.bases[number])
            self.live.weights.copy_(self.agreed)
            self.peers[number].begin(round_number + 1)
            for step, batch in enumerate(batches[number]):
                self.peers[number].local_step(step, batch, [])
            self.peers[number].end()
            payloads[number] = self.outer.pack(self.peers[number].contribute(round_number + 1), 0)
        self.state.copy_(now)
        self._apply(round_number, payloads)
        for number in ready:
            self.bases[number].copy_(self.state)
        self.live.weights.copy_(self.agreed)


class TwoLevelSwarm:
    """Regions that agree by themselves, and whose movement over some of their rounds is one contribution to the world's
    round (p2ptrain/train/region.py). `payload_bytes` are a region's, for the world; regional: what is otherwise inside.

    late: rounds of the regions after which a round of the world is taken in
    """

    def __init__(
        self,
        recipe: RecipeConfig,
        live: LiveModel,
        peers: int,
        regions: int,
        rounds: int,
        late: int,
        regional: dict[str, Any],
    ) -> None:
        own = {"local_steps": recipe.local_steps // rounds, "rounds": recipe.rounds * rounds}
        inside = recipe.model_copy(update=own | {"warmup_rounds": recipe.warmup_rounds * rounds} | regional)
        self.config, self.live, self.rounds, self.late = recipe, live, rounds, late
        self.swarms = [Swarm(inside, live, peers // regions, covered=rounds) for _ in range(regions)]
        round_reach = inside.local_steps * float(inside.inner_learning_rate)
        self.regions = [Region(b"one for all", rounds, round_reach) for _ in range(regions)]
        self.outer = Outer(recipe, live.shapes)
        self.residuals = [Residual(self.outer.layouts, live.weights.device) for _ in range(regions)]
        self.state = self.swarms[0].state.clone()
        self.payload_bytes = self.outer.payload_bytes
        self.said: dict[int, tuple[int, bytes]] = {}  # by region: when it contributed to the next round, and what
        self.world_rounds = 0
        self._tell()

    def _tell(self) -> None:
        for region in self.regions:
            region.hear(World(self.world_rounds, self.state.cpu().clone()))

    def round(self, round_number: int, batches: list[list[Any]]) -> None:
        count = len(self.swarms[0].peers)
        for turn in range(self.rounds):
            now = round_number * self.rounds + turn
            if len(self.said) == len(self.regions) and now >= max(at for at, _ in self.said.values()) + self.late:
                self._agree()
            for place, (region, swarm) in enumerate(zip(self.regions, self.swarms, strict=True)):
                own = batches[place * count : (place + 1) * count]
                steps = slice(turn * len(own[0]) // self.rounds, (turn + 1) * len(own[0]) // self.rounds)
                swarm.round(now, [each[steps] for each in own], shift=region.begin(now + 1, swarm.agreed))
                region.offer(now + 1)
                if (moved := region.applied(now + 1, {region.me: region.tail}, swarm.agreed)) is not None:
                    self.residuals[place].add(self.world_rounds, self.outer.parts(moved), float(self.config.decay))
                    contribution = self.residuals[place].take(self.world_rounds, self.config)
                    self.said[place] = now + 1, self.outer.pack(contribution, 0)
        self.live.weights.copy_(self.swarms[0].agreed)

    @torch.no_grad()
    def _agree(self) -> None:
        counted = self.outer.apply(self.state, self.world_rounds, [payload for _, payload in self.said.values()])
        for place, (_, payload) in self.said.items():
            self.residuals[place].forget(self.world_rounds, counted.uncounted(payload))
        self.said.clear()
        self.world_rounds += 1
        self._tell()


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
