"""Which robust rules a run may name, with what, and how they are encoded."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from p2ptrain.config import RecipeConfig, RunConfig
from p2ptrain.config.recipe import RULES

KEYS = [f"{number:064x}" for number in range(1, 20)]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"trim": 1}, 'trim = 1 does not belong to rule = "all": remove it'),
    ({"rule": "krum", "byzantine": 1, "trim": 1}, 'trim = 1 does not belong to rule = "krum": remove it'),
    ({"rule": "trimmed", "byzantine": 1}, 'byzantine = 1 does not belong to rule = "trimmed": remove it'),
    (
        {"rule": "bulyan"},
        'rule = "bulyan" has to know how many contributions of a round may be bad: set byzantine to 1 or more',
    ),
    ({"rule": "trimmed"}, "set trim to 1 or more"),
    (
        {"rule": "krum", "byzantine": 1, "transform": "none", "k": 4096, "value_bits": 9},
        'rule = "krum" cannot compare numbers of value_bits = 9 exactly: use at most 8',
    ),
    (
        {"rule": "multi_krum", "byzantine": 1, "k": [32, 64]},
        'rule = "multi_krum" and several k: the smallest contributions would be nearest to all others: use one k',
    ),
    (
        {"rule": "clipped", "byzantine": 1, "name": "distro"},
        'rule = "clipped" changes what contributions weigh, and those of recipe distro have no scale: use recipe local',
    ),
    ({"rule": "mean"}, "Input should be 'all', 'trimmed'"),
]


@pytest.mark.parametrize(("settings", "why"), REFUSED, ids=lambda each: str(each)[:50])
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError) as caught:
        RecipeConfig(**settings)
    assert why in str(caught.value)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_combines_with_momentum_fragments_signs_and_every_weight(rule: str) -> None:
    bad = {"rule": rule, RULES[rule].setting: 1}
    RecipeConfig(**bad, momentum="0.9", nesterov=True, fragments=3)
    RecipeConfig(**bad, transform="none", k=4096, value_bits=8)
    RecipeConfig(**bad, name="demo")
    assert RULES[rule].takes_several_k == (rule in ("trimmed", "clipped"))


def run_of(recipe: dict[str, Any], **admission: Any) -> RunConfig:
    return RunConfig.model_validate({"name": "a", "recipe": recipe, "admission": admission})


@pytest.mark.parametrize(
    ("rule", "bad", "sums"),
    [
        ("trimmed", 3, "2 * 3 + 1 = 7"), ("trimmed_coordinates", 2, "2 * 2 + 1 = 5"), ("krum", 1, "2 * 1 + 3 = 5"),
        ("multi_krum", 3, "2 * 3 + 3 = 9"), ("bulyan", 2, "4 * 2 + 3 = 11"), ("clipped", 4, "2 * 4 + 1 = 9"),
    ],
)  # fmt: skip
def test_a_roster_that_the_theory_does_not_allow_is_refused_with_the_arithmetic(rule: str, bad: int, sums: str) -> None:
    setting, least = RULES[rule].setting, int(sums.partition("= ")[2])
    recipe = {"rule": rule, setting: bad}
    assert RecipeConfig(**recipe).contributions_min == least
    run_of(recipe)  # whose founders are not known yet
    run_of(recipe, founders=KEYS[:least])
    what = f'recipe.rule = "{rule}" with {setting} = {bad} needs {sums} contributions in a round, and admission.'
    with pytest.raises(ValidationError) as caught:
        run_of(recipe, founders=KEYS[: least - 1])
    assert f"{what}founders has {least - 1}: name {least} founders or more" in str(caught.value)
    with pytest.raises(ValidationError) as caught:
        run_of(recipe, contributors_max=least - 1)
    assert f"{what}contributors_max is {least - 1}: raise it" in str(caught.value)


def test_the_usual_rule_is_left_out_of_the_encoding_and_another_one_is_not() -> None:
    usual, robust = run_of({}), run_of({"rule": "krum", "byzantine": 2})
    assert all(key not in usual.canonical() for key in (b'"rule"', b'"trim"', b'"byzantine"'))
    assert b'"byzantine":2,' in robust.canonical()
    assert b'"rule":"krum"' in robust.canonical()
    assert RunConfig.from_canonical(usual.canonical()) == usual
    assert RunConfig.from_canonical(robust.canonical()) == robust
