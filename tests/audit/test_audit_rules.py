"""A run with a robust rule: a newcomer catches up, all nodes have the same roots, and an audit repeats each round."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2ptrain.audit.run import audit
from p2ptrain.config.recipe import RULES
from tests.helpers.audit import FOUNDERS, entries_of, make_history


@pytest.mark.parametrize("rule", [name for name, spec in RULES.items() if spec.least(1) <= FOUNDERS])
def test_rounds_by_a_rule_are_repeated_to_the_same_roots(rule: str, tmp_path: Path) -> None:
    recipe = {"name": "demo", "k": 8, "sequences_per_pass": 1, "rule": rule, RULES[rule].setting: 1}
    run, directories = make_history(tmp_path, recipe=recipe)
    assert run.recipe.contributions_min == 3
    roots = {entry.manifest.root for directory in directories for entry in entries_of(directory)[-3:]}
    for directory in directories:
        report = audit(directory)
        assert report.all_holds, report.lines()
    assert len(roots) > 1, "the weights moved"
