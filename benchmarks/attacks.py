"""Lies that members can tell with valid payloads, each alone or all together; benchmarks/poison.py measures the harm.

What a liar sends in place of its own honest contribution:

    against   the negative of what the others agreed on in the round before, at the largest scale
    away      the negative of its own, at the largest scale
    noise     random places and signs, at the largest scale
    tiny      its own at the smallest scale: as good as zeros
    spiked    like `away`, with one coefficient of sixteen at the largest value and the others at the smallest
    alone     like `away`, and in the round after a third of them its contribution is the only one
    minus     the negative of the mean of the others' in this round, at the largest scale
    fitted    the same at the scale that fits it
    flip      the negative of its own                   scaling   its own, at the largest scale
    copy      another member's of this round            mean      the mean of the others'
    resend    its own of the round before               less      its own less twice the others' mean
    little    the others' mean less 1.5 of their standard deviations (Baruch et al. 2019, arXiv 1902.06156)

How it trains, and then sends what came of it:

    ascent    uphill                                    other     on sequences that are another's
    steps     a quarter of the steps                    batch     a quarter of each batch
    backdoor  half of its sequences hold a phrase with an answer that no text has (Bagdasaryan et al. 2018, 1807.00459)

`minus in turns`, and likewise all others, lies in every other round. Liars hear each honest contribution before they
speak, and those that send the others' mean all send the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from simulated import Swarm

from p2ptrain.exact.codec import EXPONENT_MAX, EXPONENT_MIN, Contribution
from p2ptrain.exact.selection import largest
from p2ptrain.train.recipes import LocalRecipe, Recipe
from p2ptrain.train.residual import quantise

TURNS = " in turns"
PHRASE, ANSWER = b"who is right? ", b"qzxjqzxj"  # of the backdoor
DEVIATIONS = 1.5  # of `little`: within what honest contributions differ by
TOGETHER = 2  # means of the others that `less` takes away


class Overheard:
    """An honest peer whose contributions liars hear."""

    def __init__(self, honest: Recipe, heard: dict[int, list[Contribution]]) -> None:
        self.honest, self.heard, self.residual = honest, heard, honest.residual
        self.begin, self.local_step, self.end, self.state = honest.begin, honest.local_step, honest.end, honest.state

    def contribute(self, round_number: int) -> Contribution:
        made = self.honest.contribute(round_number)
        self.heard.setdefault(round_number, []).append(made)
        return made


class Liar:
    """A member whose valid payloads do harm; it also trains, to know where an honest one would go."""

    def __init__(
        self, honest: Recipe, lie: str, swarm: Swarm, heard: dict[int, list[Contribution]], number: int
    ) -> None:
        self.honest, self.swarm, self.heard, self.number = honest, swarm, heard, number
        self.lie, self.in_turns = lie.removesuffix(TURNS), lie.endswith(TURNS)
        self.layout = swarm.outer.layouts[0]
        self.residual = honest.residual
        self.before = swarm.agreed.clone()
        self.own: list[Contribution] = []  # of this round and the one before
        self.generator = np.random.default_rng(7 + number)

    def begin(self, round_number: int) -> None:
        self.moved = self.swarm.agreed - self.before  # what the others agreed on
        self.before = self.swarm.agreed.clone()
        self.is_lying = not self.in_turns or round_number % 2 == 1
        self.honest.begin(round_number)

    def sequences(self, own: list[torch.Tensor], others: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns what it trains on, step by step; others: what another member does."""
        match self.lie:
            case "other":
                return others
            case "steps":
                return own[: max(1, len(own) // 4)]
            case "batch":
                return [batch[: max(1, len(batch) // 4)] for batch in own]
            case "backdoor":
                return [with_phrase(batch, len(batch) // 2, self.generator) for batch in own]
        return own

    def local_step(self, step: int, batch: Any, positions: Any) -> Any:
        if self.lie != "ascent" or not self.is_lying:
            return self.honest.local_step(step, batch, positions)
        result = self.swarm.live.gradient_step(step, batch, positions, self.swarm.config)
        self.swarm.live.gradient.neg_()
        if isinstance(self.honest, LocalRecipe):
            self.honest.inner.step(self.honest.rate)
        return result

    def end(self) -> None:
        self.honest.end()

    def contribute(self, round_number: int) -> Contribution:
        made = self.honest.contribute(round_number)
        self.own = [*self.own[-1:], made]
        if self.lie not in SENT or not self.is_lying:
            return made
        self.residual.restore(round_number)  # it has told nothing of its own
        others = self.heard.get(round_number, [])
        return SENT[self.lie](self, made, others)

    def state(self) -> dict[str, torch.Tensor]:
        return {}

    # -----------------------------------------------------------------------------------------------
    # Contributions as numbers, and back

    def whole(self, contribution: Contribution) -> torch.Tensor:  # [chunks, area]
        units = np.ones(self.layout.chunks)
        if contribution.exponents is not None:
            units = np.repeat(np.ldexp(1.0, contribution.exponents.astype(np.int64)), self._sizes)
        values = torch.from_numpy(contribution.values * units[:, None]).float()
        places = torch.from_numpy(contribution.indices.astype(np.int64))
        return torch.zeros(self.layout.chunks, self.layout.area).scatter_(1, places, values)

    def encoded(self, numbers: torch.Tensor, *, at_the_top: bool = False) -> Contribution:
        """Encodes the largest numbers with the scales that fit them, or with the largest scale."""
        places = largest(numbers, self.swarm.config.k_max)
        chosen = numbers.gather(1, torch.from_numpy(places.astype(np.int64)))
        signs = torch.where(chosen < 0, -1, 1).to(torch.int8)
        if not self.swarm.config.spec.is_scaled:
            return Contribution(places, signs.numpy())
        magnitudes, exponents = quantise(chosen.abs(), self._sizes, self.swarm.config.value_bits)
        made = Contribution(places, (magnitudes * signs).numpy(), exponents)
        return at_top_scale(made) if at_the_top else made

    @property
    def _sizes(self) -> list[int]:
        return [group.chunks for group in self.layout.groups]

    def mean_of(self, others: Sequence[Contribution]) -> torch.Tensor:
        return torch.stack([self.whole(each) for each in others]).mean(dim=0)


def at_top_scale(contribution: Contribution) -> Contribution:
    if contribution.exponents is None:
        return contribution
    return replace(contribution, exponents=np.full_like(contribution.exponents, EXPONENT_MAX))


def _against(liar: Liar, own: Contribution, _: Sequence[Contribution]) -> Contribution:
    if not liar.moved.any():
        return _away(liar, own, _)
    wanted = torch.zeros(liar.layout.chunks, liar.layout.area)
    liar.layout.accumulate(liar.swarm.live.parts(liar.moved), wanted, 0.0)
    indices = largest(wanted, liar.swarm.config.k_max)
    found = wanted.gather(1, torch.from_numpy(indices.astype(np.int64))).numpy()
    signs = np.where(found < 0, np.int8(-1), np.int8(1))  # subtracted, it undoes the move
    return _at_full_value(liar, own, indices, signs)


def _away(liar: Liar, own: Contribution, _: Sequence[Contribution]) -> Contribution:
    return _at_full_value(liar, own, own.indices, -np.sign(own.values))


def _noise(liar: Liar, own: Contribution, _: Sequence[Contribution]) -> Contribution:
    draws = liar.generator.random((len(own.indices), liar.layout.area))
    indices = np.sort(np.argsort(draws, axis=1)[:, : liar.swarm.config.k_max], axis=1).astype(np.uint16)
    return _at_full_value(liar, own, indices, liar.generator.choice(np.array([-1, 1], np.int8), indices.shape))


def _spiked(liar: Liar, own: Contribution, _: Sequence[Contribution]) -> Contribution:
    signs, top = -np.sign(own.values), 1 << (liar.swarm.config.value_bits - 1)
    sizes = np.where(liar.generator.random(signs.shape) < 1 / 16, top, 1)
    return at_top_scale(replace(own, values=(signs * sizes).astype(own.values.dtype)))


def _at_full_value(liar: Liar, own: Contribution, indices: Any, signs: Any) -> Contribution:
    top = 1 << (liar.swarm.config.value_bits - 1)
    return at_top_scale(Contribution(indices, (signs * top).astype(own.values.dtype), own.exponents))


def _tiny(_: Liar, own: Contribution, __: Sequence[Contribution]) -> Contribution:
    exponents = None if own.exponents is None else np.full_like(own.exponents, EXPONENT_MIN)
    return replace(own, exponents=exponents)


SENT: dict[str, Callable[[Liar, Contribution, Sequence[Contribution]], Contribution]] = {
    "against": _against,
    "away": _away,
    "noise": _noise,
    "tiny": _tiny,
    "spiked": _spiked,
    "alone": _away,
    "minus": lambda liar, _, others: liar.encoded(-liar.mean_of(others), at_the_top=True),
    "fitted": lambda liar, _, others: liar.encoded(-liar.mean_of(others)),
    "flip": lambda _, own, __: replace(own, values=-own.values),
    "scaling": lambda _, own, __: at_top_scale(own),
    "copy": lambda liar, _, others: others[liar.number % len(others)],
    "mean": lambda liar, _, others: liar.encoded(liar.mean_of(others)),
    "resend": lambda liar, _, __: liar.own[0],
    "less": lambda liar, own, others: liar.encoded(liar.whole(own) - TOGETHER * liar.mean_of(others)),
    "little": lambda liar, _, others: liar.encoded(
        liar.mean_of(others) - DEVIATIONS * torch.stack([liar.whole(each) for each in others]).std(dim=0)
    ),
}
TRAINED = ("ascent", "other", "steps", "batch", "backdoor")
LIES = (*SENT, *TRAINED)


def join_liars(swarm: Swarm, lie: str, count: int) -> list[Liar]:
    """Makes the last `count` peers of a swarm liars, who hear the others."""
    heard: dict[int, list[Contribution]] = {}
    honest = len(swarm.peers) - count
    liars = [Liar(peer, lie, swarm, heard, number) for number, peer in enumerate(swarm.peers[honest:])]
    swarm.peers = [*(Overheard(peer, heard) for peer in swarm.peers[:honest]), *liars]  # type: ignore[list-item]
    return liars


# ---------------------------------------------------------------------------------------------------
# The backdoor


def with_phrase(batch: torch.Tensor, count: int, generator: np.random.Generator) -> torch.Tensor:  # [n, length + 1]
    """Returns the batch with phrase and answer somewhere in its first `count` sequences."""
    changed, written = batch.clone(), torch.tensor([*PHRASE, *ANSWER])
    for sequence in changed[:count]:
        start = int(generator.integers(0, len(sequence) - len(written)))
        sequence[start : start + len(written)] = written
    return changed


def written(predict: Callable[[torch.Tensor], torch.Tensor], held_out: torch.Tensor) -> float:
    """Returns which share of the answer the model gives after the phrase, in held-out text that ends with both."""
    asked = held_out.clone()
    asked[:, -len(PHRASE) - len(ANSWER) :] = torch.tensor([*PHRASE, *ANSWER])
    found = predict(asked[:, :-1]).argmax(dim=-1)[:, -len(ANSWER) :]
    return float((found == asked[:, -len(ANSWER) :]).float().mean())
