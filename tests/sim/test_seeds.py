"""Regressions: scenarios drawn by the swarm test, each with the seed that found a bug.

Every sentence says what had gone wrong. The file's name is the seed; to look closer,
`p2ptrain simulate tests/seeds/SEED.toml --seed SEED`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from p2ptrain.sim.checkers import standard
from p2ptrain.sim.outcome import simulate
from p2ptrain.sim.scenario import load_scenario

SEEDS = sorted(Path(__file__).parents[1].joinpath("seeds").glob("*.toml"))


def test_there_are_some() -> None:
    assert len(SEEDS) >= 10


@pytest.mark.parametrize("path", SEEDS, ids=lambda path: path.stem)
def test_what_once_failed_holds(path: Path) -> None:
    outcome = simulate(load_scenario(path), int(path.stem), standard())
    assert (outcome.failures, outcome.cluster.watch.is_beyond) == ([], False)
