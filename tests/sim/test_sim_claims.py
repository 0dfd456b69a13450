"""Simulated nodes claim losses, and every liar lies in them: no honest node shows what only a liar has claimed."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from p2ptrain.core import tally as core_claims
from p2ptrain.sim.checkers import HonestClaims
from p2ptrain.sim.outcome import simulate
from p2ptrain.sim.scenario import Scenario, scenario_of

FOLDER = Path(__file__).parents[2] / "scenarios"


def lying(nodes: str | list[int]) -> Scenario:
    table = tomllib.loads((FOLDER / "liar-replay.toml").read_text(encoding="utf-8"))
    table["fault"][0]["nodes"] = nodes
    return scenario_of(table)


@pytest.mark.parametrize("liars", ["f", [0], [3]])
@pytest.mark.parametrize("seed", [1, 2])
def test_no_honest_node_shows_what_only_liars_have_claimed(liars: str | list[int], seed: int) -> None:
    checker = HonestClaims()
    outcome = simulate(lying(liars), seed, [checker])
    assert [each for each in outcome.failures if "claimed" in each] == []
    assert checker.looked_at > 100
    assert liars == "f" or checker.shown > 50


def test_a_mean_of_what_is_claimed_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        core_claims, "weighted_median", lambda values: sum(loss * weight for loss, weight in values) / len(values)
    )
    outcome = simulate(lying("f"), 1, [HonestClaims()])
    assert any("which no honest node has claimed" in each for each in outcome.failures)


def test_the_upper_of_two_held_out_losses_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_claims, "median_low", max)
    found = [simulate(lying([index]), 1, [HonestClaims()]).failures for index in range(7)]
    assert any("held-out loss" in each for failures in found for each in failures)
