"""A training that goes wrong is told, with the motion that would undo it; noise is not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from p2ptrain.core.complaints import Code
from p2ptrain.observe.attention import BEFORE, BEFORE_LEAST, LATELY, spike_of

KEPT = (96, 88, 80)
COUNT = BEFORE + LATELY


def rounds(
    losses: Sequence[float | None],
    norms: Sequence[float | None] = (),
    gradients: Sequence[float | None] = (),
    first: int = 50,
) -> Any:
    told = [*norms] or [1.0] * len(losses), [*gradients] or [1.0] * len(losses)
    return [
        SimpleNamespace(round=first + place, swarm_loss=loss, update_norm=norm, gradient_norm=gradient)
        for place, (loss, norm, gradient) in enumerate(zip(losses, *told, strict=True))
    ]


def falling(count: int, seed: int, noise: float = 0.05) -> list[float]:
    rng = Random(seed)
    return [4.0 - 0.01 * place + rng.gauss(0.0, noise) for place in range(count)]


def test_a_loss_that_rises_and_stays_is_told_with_the_way_back() -> None:
    losses = falling(BEFORE, 1) + [loss + 0.6 for loss in falling(LATELY, 2)]
    found = spike_of(rounds(losses), KEPT)
    assert found is not None
    assert (found.code, found.hinders) == (Code.SPIKE, False)
    assert "the loss rose by 0." in found.text
    assert "`p2ptrain propose --back-to 88`" in found.text  # the newest before round 90, where it began
    nowhere = spike_of(rounds(losses), (95, 91))
    assert nowhere is not None
    assert "`p2ptrain agenda`" in nowhere.text


def test_a_loss_that_is_no_number_any_more_is_a_rise() -> None:
    assert spike_of(rounds(falling(BEFORE, 1) + [math.nan] * LATELY), KEPT) is not None
    assert spike_of(rounds(falling(BEFORE, 1) + [math.inf] * LATELY), KEPT) is not None


def test_updates_that_grow_are_told() -> None:
    losses, norms = falling(COUNT, 1), [2.0] * BEFORE + [40.0] * LATELY
    found = spike_of(rounds(losses, norms), KEPT)
    assert found is not None
    assert "updates are 20 times as large as before" in found.text
    assert spike_of(rounds(losses, [2.0] * BEFORE + [4.0] * LATELY), KEPT) is None


def test_gradients_that_a_step_clips_more_than_before_are_told() -> None:
    found = spike_of(rounds(falling(COUNT, 1), (), [0.5] * BEFORE + [6.0] * LATELY), KEPT)
    assert found is not None
    assert "gradients here, before a step clips them, are 12 times as large as before" in found.text
    assert spike_of(rounds(falling(COUNT, 1), (), [None] * BEFORE + [6.0] * LATELY), KEPT) is None


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1, 0.5])
def test_noise_is_no_spike(noise: float) -> None:
    assert not [seed for seed in range(500) if spike_of(rounds(falling(COUNT, seed, noise)), KEPT)]


def test_one_bad_round_and_too_few_rounds_say_nothing() -> None:
    losses = [*falling(BEFORE, 1), 9.0, *falling(LATELY - 1, 2)]
    assert spike_of(rounds(losses), KEPT) is None
    assert spike_of(rounds(falling(BEFORE_LEAST - 1, 1) + [9.0] * LATELY), KEPT) is None
    assert spike_of(rounds([None] * COUNT, [None] * COUNT), KEPT) is None
    assert spike_of([], KEPT) is None
