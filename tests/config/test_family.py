"""Which settings of the DiLoCo family go together; the rest is refused, with what to change."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from p2ptrain.config import RecipeConfig, RunConfig

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"k": 4096}, 'choose at most 2048, or with transform = "none" k = 4096 to send every weight'),
    ({"transform": "none", "k": 3000}, "k = 3000 is more than half of the 4096 coefficients of a chunk"),
    ({"name": "distro", "momentum": "0.9"}, "momentum = 9/10 belongs to recipe local: remove it, or use that"),
    ({"name": "demo", "transform": "none"}, "transform = none belongs to recipe local"),
    ({"name": "demo", "residual_share": "1/4"}, "recipe demo takes its gradient at the agreed weights, use 0"),
    ({"residual_share": "5/4"}, "less than or equal to 1"),
    ({"nesterov": True}, "nesterov and momentum_rounds need a momentum: set one, such as 0.9, or remove them"),
    ({"momentum": "0.99999"}, "momentum = 99999/100000 is above 9999/10000, and rounds to 1: lower it"),
    ({"momentum": "0.9", "momentum_rounds": 2}, "momentum_rounds above 1 delays Nesterov's momentum"),
    (
        {"momentum": "0.9", "nesterov": True, "momentum_rounds": 2, "fragments": 2},
        "momentum_rounds above 1 does not work with fragments: set one of them to 1",
    ),
    ({"value_bits": 9}, "value_bits = 9: the largest numbers of a chunk take at most 8"),
    ({"transform": "none", "outer": "sign"}, 'transform = "none" needs outer = "mean", not "sign": change one'),
]


@pytest.mark.parametrize(("settings", "why"), REFUSED, ids=lambda each: str(each)[:50])
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError) as caught:
        RecipeConfig(**settings)
    assert why in str(caught.value)


def test_fragments_want_every_contribution_in_its_round() -> None:
    with pytest.raises(ValidationError, match="fragments = 2 does not work with agreement"):
        RunConfig.model_validate(
            {"name": "a", "recipe": {"fragments": 2}, "agreement": {"staleness_rounds_max": 1}}, strict=False
        )


REGION = {"run": "ab" * 32, "rounds": 5}
DENSE = {"transform": "none", "k": 64**2, "value_bits": 8}


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"recipe": {"name": "demo"}}, 'recipe.name = "demo"'),
        ({"recipe": {"fragments": 2}}, "recipe.fragments = 2"),
        ({"recipe": {"k": 64}}, 'recipe.transform = "dct" and k = 64'),
        ({"recipe": {"transform": "none", "k": 64}}, 'recipe.transform = "none" and k = 64'),
        ({"recipe": {**DENSE, "value_bits": 3}}, "recipe.value_bits = 3"),
        ({"recipe": {**DENSE, "learning_rate": "3/2"}}, "recipe.learning_rate = 3/2"),
        ({"recipe": {**DENSE, "momentum": "1/2"}}, "recipe.momentum = 1/2"),
        ({"recipe": {**DENSE, "rule": "krum", "byzantine": 1}}, 'recipe.rule = "krum"'),
        ({"recipe": DENSE, "agreement": {"staleness_rounds_max": 2}}, "agreement.staleness_rounds_max = 2"),
        ({"recipe": {"plugin": "p2ptrain-noise 0.1.0"}}, "recipe.plugin = p2ptrain-noise 0.1.0"),
        ({"recipe": DENSE, "model": {"kind": "own", "parameters": ["a 3 4"]}}, 'model.kind = "own"'),
        ({"recipe": DENSE, "adapt": {"kind": "lora", "rank": 2}}, 'adapt.kind = "lora"'),
    ],
)
def test_a_region_is_refused_what_would_not_add_the_worlds_changes_once(settings: dict[str, Any], why: str) -> None:
    RunConfig.model_validate({"name": "a", **settings}, strict=False)
    with pytest.raises(ValidationError) as caught:
        RunConfig.model_validate({"name": "a", "world": REGION, **settings}, strict=False)
    assert f"world.run does not work with {why}: a region moves by the mean" in str(caught.value)


def test_a_region_names_its_world_in_what_is_hashed() -> None:
    region = RunConfig.model_validate({"name": "a", "world": REGION, "recipe": DENSE})
    assert RunConfig.from_canonical(region.canonical()) == region
    assert b'"world":{"rounds":5,"run":"abab' in region.canonical()
    assert (region.world.covered, RunConfig(name="a").world.covered) == (5, 0)


def test_so_many_contributions_of_every_weight_are_refused_that_their_sum_would_not_fit() -> None:
    dense = {"transform": "none", "k": 64**2, "value_bits": 16}
    assert RunConfig.model_validate({"name": "a", "recipe": dense}).admission.contributors_max == 1024
    assert RecipeConfig(**dense).vote_max * 1024 < 2**31


def test_the_settings_of_the_family_are_encoded() -> None:
    run = RunConfig.model_validate({"name": "a", "recipe": {"momentum": "0.9", "nesterov": True}})
    assert RunConfig.from_canonical(run.canonical()) == run
    assert b'"momentum":"9/10"' in run.canonical()
