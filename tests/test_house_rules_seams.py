"""House rules about seams: nobody matches another part's prose, or reads its internals."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

import pytest
from test_house_rules import MODULES, Finding, Rule, parsed

from p2ptrain.core.complaints import MEANINGS

HEADS = re.compile("|".join(re.escape(re.split("[:,]", each.text)[0]) for each in MEANINGS.values()))


def nobody_looks_into_the_words_of_a_complaint(path: PurePosixPath, tree: ast.Module) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "startswith":
            given = [each.value for argument in node.args for each in ast.walk(argument) if type(each) is ast.Constant]
            if any(isinstance(each, str) and HEADS.match(each) for each in given):
                yield node.lineno, "go by the code of a complaint, not by its words"


RULES: dict[Rule, tuple[list[tuple[str, str]], list[tuple[str, str]]]] = {  # what breaks each, and what does not
    nobody_looks_into_the_words_of_a_complaint: (
        [
            ("p2ptrain/cli.py", 'small = [each for each in health if each.startswith("crash-only")]'),
            ("p2ptrain/daemon/a.py", 'text.startswith(("paused on battery", "new"))'),
        ],
        [("p2ptrain/cli.py", 'name.startswith("p2ptrain")\nmode = "crash-only"')],
    ),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps(rule: Rule) -> None:
    modules = [path for path in MODULES if path.parts[0] == "p2ptrain"]
    assert [f"{path}:{line}: {what}" for path in modules for line, what in rule(path, parsed(path))] == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_broken_rule_is_reported_and_a_look_alike_is_not(rule: Rule) -> None:
    broken, harmless = RULES[rule]
    assert [source for path, source in broken if not list(rule(PurePosixPath(path), ast.parse(source)))] == []
    assert [source for path, source in harmless if list(rule(PurePosixPath(path), ast.parse(source)))] == []
