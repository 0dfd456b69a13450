"""A swarm that audits its members, for benchmarks/poison.py: real payloads and measurements, and the agreed state that
production agrees on; nothing is sent."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from audits import Run
from simulated import Swarm

from p2ptrain.config import RecipeConfig
from p2ptrain.core.auditing import sequences_of
from p2ptrain.core.audits import AUDIT_ROUNDS, SUMMONS_ROUNDS, Tier, counts
from p2ptrain.train.live import LiveModel
from p2ptrain.train.matched_filter import SET, audit

KEPT = AUDIT_ROUNDS + SUMMONS_ROUNDS + 1  # rounds whose contributions may still be measured
REFERENCES = 16


class AuditedSwarm(Swarm):
    """Applies what counts by the audits of the members themselves, liars included: they measure as others do."""

    def __init__(self, recipe: RecipeConfig, live: LiveModel, peers: int, seed: int) -> None:
        super().__init__(recipe, live, peers)
        batch = 8 if recipe.sequences_per_pass < 32 else 32
        self.run = Run(peers, f"batch {batch}, early", seed, typical=0)
        self.run.measured = self._measured  # type: ignore[method-assign]
        self.given: list[torch.Tensor] = []  # the sequences of each peer in this round
        self.kept: dict[int, tuple[torch.Tensor, dict[int, bytes], list[torch.Tensor]]] = {}  # by round
        self.found: dict[tuple[bytes, int, bool], tuple[int, int]] = {}
        self.suspended: dict[int, int] = {}  # by peer: the round

    def round(self, round_number: int, batches: list[list[Any]], *arguments: Any, **more: Any) -> None:
        self.given = [torch.cat(own) for own in batches]
        super().round(round_number, batches, *arguments, **more)

    @torch.no_grad()
    def _apply(self, round_number: int, payloads: dict[int, bytes], only: int | None = None) -> None:
        state, keys = self.run.state, self.run.keys
        number = state.round + 1
        self.kept[number] = self.agreed.clone(), payloads, self.given
        self.kept.pop(number - KEPT, None)
        counted = {place: payload for place, payload in payloads.items() if counts(state, keys[place])}
        super()._apply(round_number, counted, only)
        for place in payloads.keys() - counted.keys():
            self.peers[place].residual.forget(round_number + 1)
        with torch.enable_grad():
            after = self.run.turn()
        for entry in after.admitted:
            if entry.conduct.tier is not Tier.COUNTED:
                self.suspended.setdefault(keys.index(entry.key), number)

    @property
    def share(self) -> float:
        """The cost of all audits, as a share of the training."""
        return self.run.spent / max(1, self.run.state.round * len(self.peers))

    def _measured(self, key: bytes, number: int, *, is_summoned: bool) -> tuple[int, int]:
        place = key, number, is_summoned
        if place not in self.found:
            self.found[place] = self._measure(self.run.keys.index(key), number, is_summoned)
        return self.found[place]

    def _measure(self, author: int, number: int, is_summoned: bool) -> tuple[int, int]:
        base, payloads, given = self.kept[number]
        draw = Random(f"{author} {number}")  # noqa: S311
        others = [peer for peer in payloads if peer != author]
        beside = draw.sample(others, min(len(others), REFERENCES))
        count = sequences_of(self.run.config, is_summoned=is_summoned) // SET * SET
        own = given[author][draw.sample(range(len(given[author])), min(count, len(given[author]) // SET * SET))]
        rest = torch.cat([given[peer] for peer in others])
        compared = rest[draw.sample(range(len(rest)), len(own))]
        contributions = [self.outer.unpack(payloads[peer]) for peer in (author, *beside)]
        before = self.live.weights.clone()
        self.live.weights.copy_(base)
        layout = self.outer.layouts[self.outer.fragment_of(number)]
        sets = (list(torch.split(each, SET)) for each in (own, compared))
        match = audit(self.config, self.live, layout, contributions, 0, *sets)
        self.live.weights.copy_(before)
        return round(1_000 * match.z), round(1_000 * match.strength)
