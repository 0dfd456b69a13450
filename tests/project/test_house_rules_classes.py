"""House rules about classes: one name each, no private method overridden, and few tests that reach into privates."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from tests.helpers.benchmarks import load
from tests.project.test_house_rules import MODULES, dotted, parsed

PRIVATES_MAX = 107  # accesses to privates in tests; `python benchmarks/shape.py` counts them. It only ever falls

PACKAGE = {path: parsed(path) for path in MODULES if path.parts[0] == "p2ptrain"}
TESTS = {path: parsed(path) for path in MODULES if path.parts[0] == "tests"}
Sources = Mapping[PurePosixPath, ast.Module]


def classes(sources: Sources) -> Iterator[tuple[PurePosixPath, ast.ClassDef]]:
    for path, tree in sources.items():
        yield from ((path, each) for each in ast.walk(tree) if isinstance(each, ast.ClassDef))


def sources_of(texts: Mapping[str, str]) -> Sources:
    return {PurePosixPath(path): ast.parse(text) for path, text in texts.items()}


# ---------------------------------------------------------------------------------------------------
# Names


def repeated(sources: Sources) -> dict[str, list[str]]:
    """Returns the names that several classes have, with the files of those."""
    places = defaultdict(list)
    for path, each in classes(sources):
        places[each.name].append(str(path))
    return {name: paths for name, paths in places.items() if len(paths) > 1}


def test_a_class_name_stands_once_in_the_package_and_its_tests() -> None:
    assert len([*classes(PACKAGE)]) > 400
    assert len([*classes(TESTS)]) > 100
    assert repeated(PACKAGE | TESTS) == {}


def test_a_name_of_two_classes_is_reported_wherever_they_are() -> None:
    texts = {
        "p2ptrain/a.py": "class Node:\n    pass",
        "tests/test_a.py": "class Node:\n    pass\nclass Once:\n    pass",
        "tests/test_b.py": "class Twice:\n    pass\ndef test():\n    class Twice:\n        pass\n    Once()",
    }
    assert repeated(sources_of(texts)) == {
        "Node": ["p2ptrain/a.py", "tests/test_a.py"],
        "Twice": ["tests/test_b.py", "tests/test_b.py"],
    }


# ---------------------------------------------------------------------------------------------------
# Private methods


def private_methods(each: ast.ClassDef) -> dict[str, int]:
    """Returns the lines of a class's methods whose names begin with one underscore."""
    methods = [part for part in each.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {part.name: part.lineno for part in methods if part.name.startswith("_") and not part.name.startswith("__")}


def overridden(sources: Sources) -> list[str]:
    """Returns the private methods that a base has too, also one that leaves them to its subclasses, or a base's."""
    known = {each.name: each for _, each in classes(sources)}

    def bases(of: ast.ClassDef) -> list[ast.ClassDef]:
        found, ahead = dict[str, ast.ClassDef](), [of]
        while ahead:
            for base in ahead.pop().bases:
                name = dotted(base.value if isinstance(base, ast.Subscript) else base).split(".")[-1]
                if name in known and name not in found and name != of.name:  # torch.nn.Linear may have our class's name
                    found[name] = known[name]
                    ahead.append(known[name])
        return [*found.values()]

    return [
        f"{path}:{line}: {each.name}.{name} overrides a private method of {base.name}"
        for path, each in classes(sources)
        for base in bases(each)
        for name, line in private_methods(each).items()
        if name in private_methods(base)
    ]


def test_no_subclass_overrides_a_private_method() -> None:
    assert overridden(PACKAGE) == []


def test_an_override_is_reported_and_a_look_alike_is_not() -> None:
    base = "class Base(Generic[T]):\n    def __init__(self): ...\n    @abstractmethod\n    async def _step(self): ...\n"
    base += "    def public(self): ...\n    @property\n    def _size(self): ...\n"
    texts = {
        "p2ptrain/base.py": base,
        "p2ptrain/near.py": "class Near(Base[int], other.Mixin):\n    async def _step(self): ...",
        "p2ptrain/far.py": "class Between(module.Base):\n    pass\nclass Far(Between):\n    def _size(self): ...",
        "p2ptrain/own.py": "class Own(Base):\n    def __init__(self): ...\n    def public(self): ...\n"
        "    def _own(self): ...",
        "p2ptrain/apart.py": "class Linear(nn.Linear):\n    def _step(self): ...\nclass Apart(Elsewhere):\n"
        "    def _step(self): ...",
    }
    assert overridden(sources_of(texts)) == [
        "p2ptrain/near.py:2: Near._step overrides a private method of Base",
        "p2ptrain/far.py:4: Far._size overrides a private method of Base",
    ]


# ---------------------------------------------------------------------------------------------------
# Privates in tests


def test_tests_reach_into_privates_no_more_often_than_before() -> None:
    """A test that does is bound to how a thing is done: there is a public way, or what it reads is to be public."""
    assert sum(map(load("shape").privates, TESTS.values())) <= PRIVATES_MAX


def test_an_access_to_a_private_of_another_is_counted_and_one_to_the_own_is_not() -> None:
    text = "driver._tasks; self.node._parts(); a[0]._b = module._c; self._mine; cls._made; each.__class__; _name; x.y"
    assert load("shape").privates(ast.parse(text)) == 4
