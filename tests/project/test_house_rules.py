"""The house rules as tests: layers, bans, sizes.

Each rule is a function from a source file to what it finds wrong, with its line. It is tried on snippets
that break it and on harmless look-alikes, and then on the whole tree.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]
LINES_MAX = 600  # what one can keep in mind; beyond it a module does two things

Finding = tuple[int, str]  # line, what is wrong
Rule = Callable[[PurePosixPath, ast.Module], Iterator[Finding]]

# ---------------------------------------------------------------------------------------------------
# The layers: who may import whom inside the package. A module that is not here has no place yet.

LEAVES = {"address", "config", "errors", "digest", "files", "capacity", "system", "visible", "share"}
LEARNING = {"exact", "data", "models", "train"}  # everything with tensors in it
LAYERS = {
    "core": {"core"},
    "exact": {"exact"},
    "data": {"data"},
    "models": {"models", "data", "exact"},
    "train": {"train", *LEARNING},
    "net": {"net", "core", "identity"},
    "store": {"store", "core"},
    "identity": {"identity"},
    "replay": {"replay", "core", "identity"},
    "sim": {"sim", "core", "replay", *LEARNING},
    "audit": {"audit", "core", "store", "identity", *LEARNING},
    "node": {"node", "core", "net", "store", "identity", "replay", *LEARNING},  # a node at work has no face
    "observe": {"observe", "node", "core", "net", "store", "identity", *LEARNING},
    "loop": {"loop", "node", "core", "net", "store", *LEARNING},
    "ranks": {"ranks", "loop", *LEARNING},  # a node's own processes
    "region": {"region", "loop", "node", "core", "net", "store", "identity", *LEARNING},
    "daemon": {
        *("daemon", "loop", "ranks", "region", "observe", "node", "core", "net", "store", "identity", "replay"),
        *LEARNING,
    },
    "swarm": {"swarm", "loop", "node", "core", *LEARNING},  # a script's process, whose node is another
    "hf": {"hf", "swarm"},
    "doctor": {"doctor", "node", "observe", "core", "net", "store", "identity", *LEARNING},
    "demo": {"demo", "node", "net"},  # its nodes are processes of their own
    "cli": {
        *("cli", "audit", "daemon", "demo", "doctor", "node", "observe", "ranks", "sim"),
        *("core", "net", "store", "identity", "replay"),
        *LEARNING,
    },
    "__main__": {"cli"},
    "__init__": {"swarm", "loop"},  # the library's names
    **{leaf: set() for leaf in LEAVES},
}
USERS_OF_HIVEMIND = "control", "dht", "pubsub"
HIVEMIND_USERS = {PurePosixPath(f"p2ptrain/net/libp2p/{name}.py") for name in USERS_OF_HIVEMIND}
BOUNDARY = "p2ptrain/net/boundary.py"  # the one place that catches all
HIVEMIND_USERS |= {PurePosixPath(f"benchmarks/{name}_peer.py") for name in ("hivemind", "frontier")}  # train with it
# What reads a clock, draws at random, waits, or touches the world outside the arguments.
IMPURE = {
    "asyncio", "concurrent", "ctypes", "datetime", "fcntl", "glob", "http", "importlib", "io", "logging", "mmap",
    "multiprocessing", "os", "pathlib", "platform", "queue", "sched", "secrets", "select", "selectors", "shutil",
    "signal", "socket", "sqlite3", "ssl", "subprocess", "sys", "tempfile", "threading", "time", "urllib", "uuid",
}  # fmt: skip
PURE = (sys.stdlib_module_names - IMPURE) | {"p2ptrain", "msgspec", "blake3"}
IMPURE_CALLS = {"open", "print", "input", "id", "hash"}  # hash and id differ from process to process
ORDERED = {"list", "tuple", "iter", "enumerate", "zip", "map", "join", "extend"}  # what keeps the order it is given
NETWORKING = {"asyncio", "socket", "selectors", "ssl", "aiohttp", "hivemind", "http", "urllib"}
TENSORS = {"torch", "numpy", "safetensors"}
UNSAFE_FORMATS = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "_pickle"}


def imports(path: PurePosixPath, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields every module that a file imports anywhere, with its line; also names imported from a package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(path.parts[: len(path.parts) - node.level]) if node.level else ""
            module = ".".join(filter(None, (package, node.module)))
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def layer(path: PurePosixPath) -> str | None:
    """Returns the part of the package that a file belongs to; None outside the package."""
    return path.with_suffix("").parts[1] if path.parts[0] == "p2ptrain" else None


def imports_follow_the_arrows(path: PurePosixPath, tree: ast.Module) -> Iterator[Finding]:
    place = layer(path)
    for line, name in imports(path, tree):
        if name.split(".")[0] == "hivemind" and path not in HIVEMIND_USERS:
            yield line, f"only {', '.join(USERS_OF_HIVEMIND)} in net/libp2p import hivemind"
    if place is None:
        return
    if place not in LAYERS:
        yield 1, f"{place} has no place in the layers"
        return
    for line, name in imports(path, tree):
        top, _, rest = name.partition(".")
        target = rest.split(".")[0]
        if top == "p2ptrain" and target in LAYERS and target not in LAYERS[place] | LEAVES:
            yield line, f"{place} must not import {target}"
        if place == "core" and top not in PURE:
            yield line, f"the core must not import {top}"
        if place in LEARNING and top in NETWORKING:
            yield line, f"{place} never communicates, and must not import {top}"
        if place in ("net", "identity", *LEAVES) and top in TENSORS:
            yield line, f"{place} knows no tensors, and must not import {top}"


def nothing_is_unpickled(path: PurePosixPath, tree: ast.Module) -> Iterator[Finding]:
    for line, name in imports(path, tree):
        if name.split(".")[0] in UNSAFE_FORMATS or name == "torch.load":
            yield line, f"{name} runs what it reads"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and dotted(node) in ("torch.load", "torch.jit.load", "torch.package"):
            yield node.lineno, f"{dotted(node)} runs what it reads"
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and not is_constant(node.value, False):
            yield node.value.lineno, "allow_pickle runs what it reads"


def the_core_has_no_clock_and_no_luck_of_its_own(path: PurePosixPath, tree: ast.Module) -> Iterator[Finding]:
    if layer(path) != "core":
        return
    for line, name in imports(path, tree):
        if name.startswith("random.") and name != "random.Random":
            yield line, f"{name} is the global generator: pass one in"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.fullmatch(r"random\.(?!Random\b)\w+", dotted(node)):
            yield node.lineno, f"{dotted(node)} is the global generator: pass one in"
        if isinstance(node, ast.Call) and dotted(node.func) in IMPURE_CALLS:
            yield node.lineno, f"{dotted(node.func)}() does not belong in the core"
        if isinstance(node, ast.Call) and dotted(node.func) == "random.Random" and not node.args:
            yield node.lineno, "random.Random() without a seed takes it from the system"


def the_core_iterates_over_no_set(path: PurePosixPath, tree: ast.Module) -> Iterator[Finding]:
    """Finds obvious iteration over sets: `for x in {...}`, `list(set(y))`, `[x for x in a | set(b)]`."""
    if layer(path) != "core":
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.comprehension):
            iterated = [node.iter]
        elif isinstance(node, ast.Starred):
            iterated = [node.value]
        elif isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in ORDERED:
            iterated = node.args
        else:
            continue
        yield from ((each.lineno, "the order of a set is luck: sort it") for each in iterated if is_set(each))


def errors_are_caught_by_name(path: PurePosixPath, tree: ast.Module) -> Iterator[Finding]:
    if str(path) == BOUNDARY:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        elif isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] == "suppress":
            caught = node.args
        elif isinstance(node, ast.TryStar):
            for each in (each for handler in node.handlers for each in ast.walk(handler)):
                if isinstance(each, ast.Raise):
                    yield each.lineno, "Python before 3.11.4 wraps in a group what is raised within except*"
            continue
        else:
            continue
        if any(each is None or dotted(each) in ("Exception", "BaseException") for each in caught):
            yield node.lineno, "name the errors that you expect"


def no_test_sleeps(path: PurePosixPath, tree: ast.Module) -> Iterator[Finding]:
    if path.parts[0] != "tests":
        return
    for line, name in imports(path, tree):
        if name in ("time.sleep", "asyncio.sleep"):
            yield line, f"{name} by its bare name hides from this rule"
    for node in ast.walk(tree):
        called = dotted(node.func) if isinstance(node, ast.Call) else ""
        lets_others_run = called == "asyncio.sleep" and [ast.unparse(each) for each in node.args] == ["0"]
        if called in ("time.sleep", "asyncio.sleep", "trio.sleep") and not lets_others_run:
            yield node.lineno, "wait for what happens, not for a time"


def modules_say_what_they_are(path: PurePosixPath, tree: ast.Module) -> Iterator[Finding]:
    if not ast.get_docstring(tree):
        yield 1, "no docstring"


# ---------------------------------------------------------------------------------------------------
# Rules about text


def modules_are_short(path: PurePosixPath, text: str) -> Iterator[Finding]:
    if path.suffix == ".py" and (lines := text.count("\n")) > LINES_MAX:
        yield LINES_MAX, f"{lines} lines; the limit is {LINES_MAX}"


# In pieces, so that this file does not name what it looks for.
UNWANTED = {
    "a path of one machine": r"/(wo" r"rk|ro" r"ot|ho" r"me/\w+|Us" r"ers/\w+|op" r"t/\w+)/",
    "a folder outside the project": r"\bsha" r"red/|\b(DES" r"IGN|STY" r"LE|FA" r"CTS)\.md",
    "an issue's number": r"\b[Ii]ss" r"ue #?\d",
    "a registry's host": r"py" r"pi\.org|python" r"hosted|npm" r"js\.|deb" r"ian\.org|download\.py" r"torch",
    "a tool's session": r"(?i)\bclau" r"de\b|\banthro" r"pic\b|\bco" r"pilot\b|\bchat" r"gpt\b",
}


def nothing_names_where_it_was_made(path: PurePosixPath, text: str) -> Iterator[Finding]:
    for number, line in enumerate(text.splitlines(), start=1):
        for what, pattern in UNWANTED.items():
            if found := re.search(pattern, line):
                yield number, f"{what}: {found.group()}"


# ---------------------------------------------------------------------------------------------------
# Helpers


def dotted(node: ast.expr | None) -> str:
    """Returns a.b.c as text; parts that are not names count as empty: the second part of `b"".join` is join."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def is_constant(node: ast.expr, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def is_set(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr | ast.BitAnd | ast.Sub | ast.BitXor):
        return is_set(node.left) or is_set(node.right)
    is_call = isinstance(node, ast.Call) and dotted(node.func) in ("set", "frozenset")
    return is_call or isinstance(node, ast.Set | ast.SetComp)


def what_tests_share_lies_in_helpers(path: PurePosixPath, tree: ast.Module) -> Iterator[Finding]:
    """Finds what a test takes from another test; the house rules are one test in several modules."""
    if path.parts[0] == "tests" and path.parts[1] != "project":
        for line, name in imports(path, tree):
            if re.match(r"tests\.(\w+\.)?test_", name):
                yield line, f"{name}: move it to tests/helpers"


def tree_files() -> list[PurePosixPath]:
    """Yields every file of the project, except what git ignores: caches, build results and hidden folders of tools."""
    ignored = {"__pycache__", "dist", "out", "build"}
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = sorted(n for n in folders if n == ".ci" or not (n.startswith(".") or n in ignored))
        found += [PurePosixPath((Path(folder) / name).relative_to(ROOT)) for name in sorted(names) if name != ".git"]
    return [
        path for path in found if not path.name.endswith((".png", ".pyc", ".so", ".xz")) and "egg-info" not in str(path)
    ]


FILES = tree_files()
MODULES = [path for path in FILES if path.suffix == ".py"]
MODULE_RULES: list[Rule] = [
    imports_follow_the_arrows,
    nothing_is_unpickled,
    the_core_has_no_clock_and_no_luck_of_its_own,
    the_core_iterates_over_no_set,
    errors_are_caught_by_name,
    no_test_sleeps,
    modules_say_what_they_are,
    what_tests_share_lies_in_helpers,
]

# ---------------------------------------------------------------------------------------------------
# The tree


@cache
def parsed(path: PurePosixPath) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


@pytest.mark.parametrize("rule", MODULE_RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps(rule: Rule) -> None:
    found = []
    for path in MODULES:
        found += [f"{path}:{line}: {what}" for line, what in rule(path, parsed(path))]
    assert found == []


@pytest.mark.parametrize("rule", [modules_are_short, nothing_names_where_it_was_made], ids=lambda rule: rule.__name__)
def test_the_text_keeps(rule: Callable[[PurePosixPath, str], Iterator[Finding]]) -> None:
    found = []
    for path in FILES:
        text = (ROOT / path).read_text(encoding="utf-8")
        found += [f"{path}:{line}: {what}" for line, what in rule(path, text)]
    assert found == []


def test_every_dependency_that_is_declared_is_used() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = [re.split(r"[<>=]", each)[0].replace("-", "_") for each in declared]
    imported = {name.split(".")[0] for path in MODULES if layer(path) for _, name in imports(path, parsed(path))}
    assert "pynvml" in imported, "nvidia-ml-py has another name than its module"
    assert set(names) - imported == {"nvidia_ml_py", "plotly"}, "plotly's JavaScript is served, and not imported"


def test_rules_name_modules_that_exist() -> None:
    names = {layer(path) for path in MODULES if path.parts[0] == "p2ptrain"}
    assert set(LAYERS) == names
    assert set(MODULES) >= HIVEMIND_USERS


def test_the_tree_is_all_there() -> None:
    assert {
        "p2ptrain/config/run.py",
        "p2ptrain/core/__init__.py",
        "p2ptrain/exact/codec.py",
        "tests/conftest.py",
    } <= set(map(str, MODULES))
    assert {"pyproject.toml", "Makefile", ".ci/run", "README.md", "examples/tiny.toml"} <= set(map(str, FILES))
    assert not [path for path in FILES if ".venv" in path.parts]


# ---------------------------------------------------------------------------------------------------
# The rules' own power

CORE, TRAIN, NET, CLI = "p2ptrain/core/node.py", "p2ptrain/train/a.py", "p2ptrain/net/a.py", "p2ptrain/cli.py"
BROKEN: dict[Rule, list[tuple[str, str]]] = {
    imports_follow_the_arrows: [
        (CORE, "import torch"),
        (CORE, "import numpy.linalg"),
        (CORE, "import pydantic"),
        (CORE, "import time"),
        (CORE, "from datetime import datetime"),
        (CORE, "import asyncio"),
        (CORE, "import threading"),
        (CORE, "from os import urandom"),
        (CORE, "from uuid import uuid4"),
        (CORE, "import secrets"),
        (CORE, "def late():\n    import socket"),
        (CORE, "if TYPE_CHECKING:\n    from torch import Tensor"),
        (CORE, "from p2ptrain.exact import codec"),
        (CORE, "from p2ptrain import exact"),
        (CORE, "from ..net.transport import Transport"),
        (CORE, "import p2ptrain.store"),
        ("p2ptrain/node/driver.py", "from p2ptrain.observe.schema import Status"),
        ("p2ptrain/node/owner.py", "if TYPE_CHECKING:\n    from p2ptrain.daemon.life import Daemon"),
        (TRAIN, "import asyncio"),
        (TRAIN, "from socket import socket"),
        (TRAIN, "import hivemind"),
        (TRAIN, "import p2ptrain.net.libp2p.p2pd"),
        (TRAIN, "from p2ptrain.node import driver"),
        (TRAIN, "from ..core.node import Node"),
        (NET, "import torch"),
        (NET, "from p2ptrain.exact.codec import pack"),
        (NET, "from hivemind.p2p import P2P"),
        (CLI, "import hivemind"),
        ("p2ptrain/daemon/life.py", "import p2ptrain.cli"),
        ("p2ptrain/config/run.py", "import torch"),
        ("p2ptrain/config/run.py", "from p2ptrain.core import node"),
        ("p2ptrain/sim.py", "from p2ptrain.net import transport"),
        ("p2ptrain/helpers.py", "pass"),
        ("tests/test_a.py", "import hivemind"),
    ],
    nothing_is_unpickled: [
        (TRAIN, "import pickle"),
        (CLI, "from marshal import loads"),
        ("benchmarks/a.py", "import shelve"),
        ("tests/test_a.py", "def f():\n    import cloudpickle.cloudpickle"),
        (TRAIN, "state = torch.load(path, weights_only=True)"),
        (TRAIN, "from torch import load"),
        (TRAIN, "numpy.load(path, allow_pickle=True)"),
        (TRAIN, "numpy.load(path, allow_pickle=flag)"),
    ],
    the_core_has_no_clock_and_no_luck_of_its_own: [
        (CORE, "import random\nrandom.shuffle(members)"),
        (CORE, "draw = random.random"),
        (CORE, "from random import choice"),
        (CORE, "rng = random.SystemRandom()"),
        (CORE, "rng = random.Random()"),
        (CORE, "key = hash(peer)"),
        (CORE, "open('log')"),
        (CORE, "print(event)"),
    ],
    the_core_iterates_over_no_set: [
        (CORE, "for peer in {a, b}:\n    pass"),
        (CORE, "for peer in set(peers) - gone:\n    pass"),
        (CORE, "[p for p in frozenset(peers)]"),
        (CORE, "list(set(peers))"),
        (CORE, "{p: 1 for p in {q for q in peers}}"),
        (CORE, "b''.join(set(parts))"),
        (CORE, "first = [*set(peers)]"),
    ],
    errors_are_caught_by_name: [
        (CORE, "try:\n    pass\nexcept Exception:\n    pass"),
        (TRAIN, "try:\n    pass\nexcept:\n    pass"),
        ("benchmarks/a.py", "try:\n    pass\nexcept (ValueError, BaseException) as error:\n    raise"),
        ("tests/test_a.py", "with contextlib.suppress(Exception):\n    pass"),
        (TRAIN, "try:\n    pass\nexcept* ValueError as errors:\n    raise TypeError from errors"),
    ],
    no_test_sleeps: [
        ("tests/test_a.py", "time.sleep(1)"),
        ("tests/test_a.py", "time.sleep(0)"),
        ("tests/test_a.py", "from time import sleep"),
        ("tests/sim/test_b.py", "async def f():\n    await asyncio.sleep(0.1)"),
        ("tests/sim/test_b.py", "async def f():\n    await asyncio.sleep(delay)"),
    ],
    modules_say_what_they_are: [(CORE, "x = 1"), ("tests/test_a.py", ""), (CLI, '""" """')],
    what_tests_share_lies_in_helpers: [("tests/core/test_a.py", "from tests.core.test_b import x")],
}
HARMLESS: dict[Rule, list[tuple[str, str]]] = {
    imports_follow_the_arrows: [
        (CORE, "from __future__ import annotations\nimport random, enum, msgspec\nfrom blake3 import blake3"),
        (
            CORE,
            "from p2ptrain.config import RunConfig\nfrom p2ptrain.core.roster import Roster\nfrom .events import Tick",
        ),
        (CORE, "from p2ptrain import config, errors, digest"),
        (TRAIN, "import torch\nfrom p2ptrain.exact import codec\nfrom p2ptrain.digest import digest"),
        ("p2ptrain/net/libp2p/control.py", "import hivemind, asyncio"),
        (CLI, "from p2ptrain import __version__\nimport p2ptrain.daemon"),
        ("tests/test_a.py", "import p2ptrain.exact.codec, p2ptrain.net.libp2p.p2pd, torch"),
    ],
    nothing_is_unpickled: [
        (TRAIN, "numpy.load(path, allow_pickle=False)\nsafetensors.torch.load(data)\njson.load(file)"),
    ],
    the_core_has_no_clock_and_no_luck_of_its_own: [
        (CORE, "from random import Random\ndef f(rng: random.Random):\n    return rng.random()"),
        (CORE, "rng = random.Random(seed)"),
        (TRAIN, "print(hash(x), random.random())"),
    ],
    the_core_iterates_over_no_set: [
        (CORE, "for peer in sorted({a, b}):\n    pass\nx in {1, 2}\nlen(set(peers))\n[p for p in a | b]"),
        (TRAIN, "list(set(x))"),
    ],
    errors_are_caught_by_name: [
        (TRAIN, "try:\n    pass\nexcept (ValueError, OSError):\n    pass\nwith suppress(KeyError):\n    pass"),
        (TRAIN, "try:\n    pass\nexcept* ValueError:\n    pass"),
    ],
    no_test_sleeps: [
        ("tests/test_a.py", "async def f():\n    await asyncio.sleep(0)"),
        ("p2ptrain/daemon/life.py", "async def f():\n    await asyncio.sleep(1)"),
    ],
    modules_say_what_they_are: [(CORE, '"""What it is."""')],
    what_tests_share_lies_in_helpers: [("tests/core/test_a.py", "from tests.helpers.core import x")],
}


def snippets(of: dict[Rule, list[tuple[str, str]]]) -> list[object]:
    return [
        pytest.param(rule, path, source, id=f"{rule.__name__}: {source[:40]!r}")
        for rule, examples in of.items()
        for path, source in examples
    ]


@pytest.mark.parametrize(("rule", "path", "source"), snippets(BROKEN))
def test_a_broken_rule_is_reported(rule: Rule, path: str, source: str) -> None:
    assert len(list(rule(PurePosixPath(path), ast.parse(source)))) >= 1


@pytest.mark.parametrize(("rule", "path", "source"), snippets(HARMLESS))
def test_what_keeps_a_rule_is_not_reported(rule: Rule, path: str, source: str) -> None:
    assert list(rule(PurePosixPath(path), ast.parse(source))) == []


def test_every_rule_has_been_seen_to_report_and_to_let_pass() -> None:
    assert list(BROKEN) == list(HARMLESS) == MODULE_RULES


def test_a_finding_names_its_line() -> None:
    source = "import enum\n\n\nimport torch"
    assert list(imports_follow_the_arrows(PurePosixPath(CORE), ast.parse(source))) == [
        (4, "the core must not import torch")
    ]


def test_a_long_module_is_reported_and_one_at_the_limit_is_not() -> None:
    path = PurePosixPath("p2ptrain/a.py")
    assert list(modules_are_short(path, "\n" * 601)) == [(600, "601 lines; the limit is 600")]
    assert list(modules_are_short(path, "\n" * 600)) == []
    assert list(modules_are_short(PurePosixPath("CHANGELOG.md"), "\n" * 601)) == []


@pytest.mark.parametrize(
    "text",
    [
        "see /wo" "rk/main/x", "/ro" "ot/.cache/x", "/ho" "me/user/x", "cat ../sha" "red/notes", "as in DES" "IGN.md",
        "iss" "ue 12", "Iss" "ue #3", "https://py" "pi.org/simple", "files.python" "hosted.org",
        "registry.npm" "js.org", "made with Clau" "de", "Co" "pilot",
    ],
)  # fmt: skip
def test_a_text_that_names_where_it_was_made_is_reported(text: str) -> None:
    assert [line for line, _ in nothing_names_where_it_was_made(PurePosixPath("README.md"), f"fine\n{text}\n")] == [2]


def test_a_text_about_the_work_itself_is_not_reported() -> None:
    text = "shared by all nodes; an issue of trust; homework/rooted; ~/.local/share; the style, its design and facts"
    assert list(nothing_names_where_it_was_made(PurePosixPath("README.md"), text)) == []
