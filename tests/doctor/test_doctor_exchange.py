"""What doctor says of the exchange of contributions: its share of the time, and settings that keep it under 5 %."""

from __future__ import annotations

import re

import pytest

from p2ptrain.config import ModelConfig, RecipeConfig, RunConfig
from p2ptrain.doctor.exchange import judge_exchange
from p2ptrain.learn.memory import need_of


def run_of(**recipe: object) -> RunConfig:
    settings = {"sequences_per_pass": 4} | recipe
    return RunConfig(name="x", model=ModelConfig(preset="10m"), recipe=RecipeConfig.model_validate(settings))


@pytest.mark.parametrize(
    "recipe", [{"name": "local", "k": 256, "local_steps": 10}, {"name": "distro", "k": 32}, {"name": "demo", "k": 8}]
)
@pytest.mark.parametrize("rate", [10_000, 125_000, 2_500_000, 10**9])
def test_the_settings_that_are_told_keep_the_exchange_under_five_percent(recipe: dict[str, object], rate: int) -> None:
    run, nodes, pace = run_of(**recipe), 8, 2_000.0
    found = judge_exchange(run, nodes, pace, rate)

    def share(other: RunConfig) -> float:
        seconds = 4 * 512 * other.recipe.passes_per_step * other.recipe.local_steps / pace
        received = 7 * need_of(other).payload / rate
        return received / (received + seconds)

    assert f"{share(run):.0%} of the time" in found.result
    assert found.level == ("good" if share(run) <= 0.05 else "warning")
    settings = dict(re.findall(r"(\w+) = (\d+)", found.fix))
    assert bool(settings) == (found.level == "warning")
    for key, value in settings.items():
        changed = run.model_copy(update={"recipe": run.recipe.model_copy(update={key: int(value)})})
        assert share(changed) <= 0.05, key
        if key != "k":
            less = run.model_copy(update={"recipe": run.recipe.model_copy(update={key: int(value) - 1})})
            assert share(less) > 0.05, "and no more than it takes"


def test_without_a_measured_line_the_rate_that_is_needed_is_told() -> None:
    run = run_of(name="local", k=256)
    found = judge_exchange(run, 8, 2_000.0, 0.0)
    assert found.level == "good"
    (rate,) = re.findall(r"at ([0-9.]+) kB/s or more", found.result) or re.findall(r"at ([0-9.]+) MB/s", found.result)
    assert (
        judge_exchange(run, 8, 2_000.0, float(rate) * 1.1 * (10**3 if "kB/s" in found.result else 10**6)).level
        == "good"
    )
