"""House rules about interfaces: no part matches another's texts, or reads its internals."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

import pytest

from p2ptrain.core.complaints import MEANINGS
from p2ptrain.core.node import Node
from tests.project.test_house_rules import BOUNDARY, MODULES, Finding, Rule, dotted, imports, layer, parsed

HEADS = re.compile("|".join(re.escape(re.split("[:,]", each.text)[0]) for each in MEANINGS.values()))


def nobody_looks_into_the_words_of_a_complaint(path: PurePosixPath, tree: ast.Module) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "startswith":
            given = [each.value for argument in node.args for each in ast.walk(argument) if type(each) is ast.Constant]
            if any(isinstance(each, str) and HEADS.match(each) for each in given):
                yield node.lineno, "go by the code of a complaint, not by its words"


# A liar is the honest node around which it stands, and lies with what that node knows.
INSIDE = {f"p2ptrain/sim/{name}.py" for name in ("rewriting", "round_lies", "branch_lies", "noise", "liars")}
WINDOW = {"handle", "deadline", "view", "limits"}


def parts_of_the_core() -> set[str]:
    """Returns the attributes of a node that other packages must not access."""
    trees = [parsed(PurePosixPath(f"p2ptrain/core/{name}.py")) for name in ("node", "participant")]
    nodes = [each for tree in trees for each in ast.walk(tree)]
    own = [each for each in nodes if isinstance(each, ast.Attribute) and dotted(each.value) == "self"]
    return {each.attr for each in own if not each.attr.startswith("_")} - WINDOW


def the_core_is_seen_through_its_window(path: PurePosixPath, tree: ast.Module) -> Iterator[Finding]:
    """Finds access to the core's parts, such as `node.chain` or `driver.node.work`, from outside."""
    if layer(path) == "core" or str(path) in INSIDE:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in PARTS:
            whose = dotted(node.value).split(".")[-1]
            if whose in ("node", "core", "_node", "_core"):
                yield node.lineno, f"{whose}.{node.attr}: ask {whose}.view()"


# Where objects are made and joined: what is set on one there was missing when it was made.
JOINTS = {"p2ptrain/daemon/assembly.py", "p2ptrain/daemon/launch.py", "p2ptrain/daemon/life.py"}


def an_object_is_whole_when_it_is_made(path: PurePosixPath, tree: ast.Module) -> Iterator[Finding]:
    for node in ast.walk(tree):
        target = node.target if isinstance(node, ast.AnnAssign) and node.value is None else None
        if isinstance(target, ast.Attribute):
            yield node.lineno, f"{dotted(target)} has no value yet"
        is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_set and str(path) in JOINTS and dotted(node.value) != "self":
            yield node.lineno, f"{dotted(node)} is set from outside: hand it over when it is made"


# Objects of libraries that have no other way, and the one record that all parts of the core share.
FOREIGN = {"p2ptrain/net/libp2p/dht.py", "p2ptrain/observe/progress.py"}
SHARED = ("self.context", "core")


def nobody_sets_the_attributes_of_its_parts(path: PurePosixPath, tree: ast.Module) -> Iterator[Finding]:
    """Finds `self.device.percent = 50`: a part has a method for it. A record in a local variable is its owner's."""
    if path.parts[0] != "p2ptrain" or str(path) in FOREIGN:
        return
    for node in ast.walk(tree):
        is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_set and isinstance(node.value, ast.Attribute) and (dotted(node.value), layer(path)) != SHARED:
            yield node.lineno, f"{dotted(node)} is set from outside: give its owner a method"


# Texts of others that carry no field: torch's, when memory runs out; the words that it has for this are listed there.
FOREIGN_TEXTS = {"p2ptrain/exact/cards.py", "p2ptrain/exact/shortage.py"}
LOOKS_INTO = {
    "startswith", "endswith", "split", "rsplit", "partition", "rpartition", "removeprefix", "removesuffix", "replace",
    "find", "rfind", "index", "count", "match", "search", "fullmatch", "findall", "finditer", "sub",
}  # fmt: skip
TEXTS_OF_ERRORS = {"args", "problem", "why", "fix", "msg"}


def nobody_parses_the_text_of_an_error(path: PurePosixPath, tree: ast.Module) -> Iterator[Finding]:
    """Finds `"in use" in str(error)`, `error.args[0]`, `str(error).partition(": ")`: what is needed is a field, or a
    class of its own. A text may be cut to its first line or to a length, and be quoted."""
    if path.parts[0] != "p2ptrain" or str(path) in FOREIGN_TEXTS:
        return
    nodes = [*ast.walk(tree)]
    errors = {"error"} | {each.name for each in nodes if isinstance(each, ast.ExceptHandler) and each.name}
    arguments = [each for each in nodes if isinstance(each, ast.arg) and each.annotation]
    errors |= {each.arg for each in arguments if each.annotation and "Error" in ast.unparse(each.annotation)}
    texts: set[str] = set()

    def is_text(node: ast.AST) -> bool:
        match node:
            case ast.Name(id=name):
                return name in texts
            case ast.Call(func=ast.Name(id="str" | "repr" | "ascii"), args=[ast.expr() as whole]):
                return is_text(whole) or any(
                    isinstance(each, ast.Name) and each.id in errors for each in ast.walk(whole)
                )
            case ast.Call(func=ast.Attribute(value=whole)) | ast.Subscript(value=whole):
                return is_text(whole)
            case ast.Attribute(value=ast.Name(id=name), attr=attribute, ctx=ast.Load()):
                return name in errors and attribute in TEXTS_OF_ERRORS
        return False

    for node in nodes:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.NamedExpr(target=ast.Name(id=name), value=value)
            ):
                texts |= {name} if is_text(value) else set()
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(value=whole, attr=method), args=[_, *_] as given) if method in LOOKS_INTO:
                inspected = [whole, *given]
            case ast.Compare(left=left, comparators=others):
                inspected = [left, *others]
            case ast.Match(subject=subject):
                inspected = [subject]
            case ast.Subscript(value=ast.Attribute(attr="args") as whole):
                inspected = [whole]
            case _:
                continue
        if any(map(is_text, inspected)):
            yield node.lineno, "an error carries fields: give it one, or a class of its own"


PARTS = parts_of_the_core()
RULES: dict[Rule, tuple[list[tuple[str, str]], list[tuple[str, str]]]] = {  # what breaks each, and what does not
    nobody_looks_into_the_words_of_a_complaint: (
        [
            ("p2ptrain/cli.py", 'small = [each for each in health if each.startswith("crash-only")]'),
            ("p2ptrain/node/a.py", 'text.startswith(("paused on battery", "new"))'),
        ],
        [("p2ptrain/cli.py", 'name.startswith("p2ptrain")\nmode = "crash-only"')],
    ),
    the_core_is_seen_through_its_window: (
        [
            ("p2ptrain/node/a.py", "round = driver.node.chain.state.round"),
            ("p2ptrain/node/a.py", "def f(node):\n    return node.work.is_quarantined"),
            ("p2ptrain/sim/checkers.py", "view = core.here.agreement.view"),
            ("benchmarks/a.py", "node.context.now"),
        ],
        [
            ("p2ptrain/node/a.py", "driver.node.view().state; node.handle(event, now); node.deadline; self.line = 1"),
            ("p2ptrain/core/view.py", "self._node.chain.state"),
            ("p2ptrain/sim/noise.py", "core.here"),
        ],
    ),
    an_object_is_whole_when_it_is_made: (
        [
            ("p2ptrain/node/driver.py", "class A:\n    def __init__(self):\n        self.edges: Edges"),
            ("p2ptrain/daemon/assembly.py", "driver.edges = edges"),
            ("p2ptrain/daemon/launch.py", "owner.daemon = http.daemon = daemon"),
        ],
        [
            ("p2ptrain/daemon/launch.py", "class A:\n    def __init__(self):\n        self.edges: Edges = Edges()"),
            ("p2ptrain/daemon/launch.py", "class A:\n    edges: Edges\nlaunch = replace(launch, http=url)"),
            ("p2ptrain/node/owner.py", "record.round = number"),
        ],
    ),
    nobody_sets_the_attributes_of_its_parts: (
        [
            ("p2ptrain/node/limits.py", "self._device.percent = 50"),
            ("p2ptrain/node/owner.py", "driver.device.threads += 1"),
            ("p2ptrain/node/driver.py", "self.context.now = 1.0"),
        ],
        [
            ("p2ptrain/core/work.py", "self.context.now = 1.0\nself.percent = 50"),
            ("p2ptrain/net/mailbox.py", "question.parts = b''\nself.known[peer] = record"),
        ],
    ),
    nobody_parses_the_text_of_an_error: (
        [
            ("p2ptrain/audit/run.py", 'why = str(error).removeprefix(f"{path}: ")'),
            ("p2ptrain/doctor/network.py", 'if "is in use" in error.problem:\n    pass'),
            ("p2ptrain/config/text.py", 'what, _, fix = str(error["ctx"]["error"]).partition(": ")'),
            ("p2ptrain/a.py", "try:\n    pass\nexcept OSError as trouble:\n    code = trouble.args[0]"),
            ("p2ptrain/a.py", 'try:\n    pass\nexcept OSError as trouble:\n    re.search("full", str(trouble))'),
            ("p2ptrain/a.py", 'text = str(error)\nif text.lower().startswith("no"):\n    pass'),
            ("p2ptrain/a.py", 'match error.why:\n    case "late":\n        pass'),
            ("p2ptrain/a.py", 'def f(trouble: OSError | None):\n    return str(trouble) == "full"'),
        ],
        [
            ("p2ptrain/a.py", "first = str(error).splitlines()[0][:200]\nline = ' '.join(str(error).split())"),
            (
                "p2ptrain/a.py",
                "Diagnosis('ports', error.problem, error.fix) if isinstance(error, PortTakenError) else None",
            ),
            ("p2ptrain/a.py", "error.args = (text,)\nif error.errno == errno.ENOSPC:\n    name.partition('.')"),
            ("p2ptrain/exact/shortage.py", "SIGNS.search(str(error))"),
            ("tests/a.py", 'assert "full" in str(error)'),
        ],
    ),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps(rule: Rule) -> None:
    modules = [path for path in MODULES if path.parts[0] != "tests"]
    assert [f"{path}:{line}: {what}" for path in modules for line, what in rule(path, parsed(path))] == []


def test_the_exceptions_and_the_window_are_there() -> None:
    assert {*map(PurePosixPath, INSIDE | JOINTS | FOREIGN | FOREIGN_TEXTS)} <= {*MODULES}
    assert {"context", "participant", "chain", "here", "work"} <= PARTS
    assert all(hasattr(Node, name) for name in WINDOW - {"deadline"})


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_broken_rule_is_reported_and_a_look_alike_is_not(rule: Rule) -> None:
    broken, harmless = RULES[rule]
    assert [source for path, source in broken if not list(rule(PurePosixPath(path), ast.parse(source)))] == []
    assert [source for path, source in harmless if list(rule(PurePosixPath(path), ast.parse(source)))] == []


# ---------------------------------------------------------------------------------------------------
# Circles

# Modules of one package that import each other, with the reason.
CIRCLES = {
    (
        "p2ptrain/core/audits.py",
        "p2ptrain/core/manifest.py",
        "p2ptrain/core/state.py",
        "p2ptrain/core/succession.py",
    ): "a manifest names the state that it changes to the next, and carries the audits and motions that change it",
    ("p2ptrain/net/boundary.py", "p2ptrain/net/transport.py"): "a connection reports what its boundary has caught",
    (
        "p2ptrain/observe/app.py",
        "p2ptrain/observe/http.py",
    ): "the routes answer with what the face that serves them has",
}


def circles(sources: dict[PurePosixPath, ast.Module]) -> set[tuple[str, ...]]:
    """Returns the sets of modules of one package that reach each other by imports, those for types only included."""
    names = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in sources}
    imported: dict[PurePosixPath, set[PurePosixPath]] = {}
    for path, tree in sources.items():
        modules = {names.get(name) or names.get(name.rpartition(".")[0]) for _, name in imports(path, tree)}
        imported[path] = {each for each in modules if each and each != path and layer(each) == layer(path)}

    def reached(start: PurePosixPath) -> set[PurePosixPath]:
        found, ahead = set[PurePosixPath](), [start]
        while ahead:
            new = imported[ahead.pop()] - found
            found |= new
            ahead += new
        return found

    all_reached = {path: reached(path) for path in sources}
    rings = {path: [each for each in all_reached[path] if path in all_reached[each]] for path in sources}
    return {tuple(sorted(map(str, ring))) for ring in rings.values() if ring}


def test_no_modules_of_a_package_import_each_other() -> None:
    package = {path: parsed(path) for path in MODULES if path.parts[0] == "p2ptrain"}
    assert circles(package) == CIRCLES.keys()


def test_a_circle_is_found_and_a_ladder_is_not() -> None:
    texts = {
        "a": "from p2ptrain.sim.b import B",
        "b": "from p2ptrain.sim import c",
        "c": "if TYPE_CHECKING:\n    from p2ptrain.sim.a import A",
        "d": "import p2ptrain.sim.a\nfrom p2ptrain.core import node",
    }
    sources = {PurePosixPath(f"p2ptrain/sim/{name}.py"): ast.parse(text) for name, text in texts.items()}
    assert circles(sources) == {tuple(f"p2ptrain/sim/{name}.py" for name in "abc")}
    del sources[PurePosixPath("p2ptrain/sim/c.py")]
    assert circles(sources) == set()


# ---------------------------------------------------------------------------------------------------
# The boundary around exchanges with peers


def places_of_the_boundary() -> dict[str, list[str]]:
    """Returns where the package has a boundary, by file: each place as it is told to an owner."""
    found: dict[str, list[str]] = {}
    for path in MODULES:
        if path.parts[0] != "p2ptrain" or path == PurePosixPath(BOUNDARY):
            continue
        for node in ast.walk(parsed(path)):
            called = node.func if isinstance(node, ast.Call) else None
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if isinstance(node, ast.Call) and name in ("guard", "contain", "contained"):
                place = node.args[0]
                assert isinstance(place, ast.Constant), "a place is named where it is"
                found.setdefault("/".join(path.parts[1:]), []).append(str(place.value))
    return {name: sorted(told) for name, told in found.items()}


PLACES = {
    "daemon/life.py": [
        "the addresses to remember",
        "the last addresses to remember",
        "the node's status",
        "the question for a successor",
    ],
    "net/blobs/fetch.py": ["a fetch", "a source"],
    "net/blobs/swarm_fetch.py": ["a source of pieces"],
    "net/connections.py": [
        "a dial",
        "a look at who is connected",
        "a meeting with a peer",
        "a search for peers",
        "announcing our addresses",
        "asking around",
        "asking for addresses",
        "the choice of whom to dial",
        "the networks of a connected peer",
    ],
    "node/agenda.py": ["the agenda"],  # it reads the agreed state, and asks peers for checkpoints
    "node/heirs.py": ["where a run comes from"],
    "node/audits.py": ["the audit of a contribution"],  # it reads our own state, and changes none of it
    "net/libp2p/dht.py": ["a request of the DHT", "an answer to a search in the DHT"],
    "net/libp2p/p2pd.py": [
        "a connection to an address",
        "a list of the connected peers",
        "a publication",
        "an introduction to the DHT",
        "the start of the DHT",
    ],
    "net/libp2p/pubsub.py": [
        "a gossiped message",
        "a message of a publisher",
        "a subscription",
        "gossip as it arrives",
    ],
    "net/libp2p/streams.py": ["a stream's opening", "an incoming stream"],
    "net/libp2p/process.py": [
        "a watch over p2pd",
        "another start of p2pd",
        "the end of p2pd",
    ],
    "net/libp2p/control.py": ["a message of the DHT's connection", "the DHT's connection"],
    "net/mailbox.py": ["a look at a peer's protocol", "mail to a peer"],
    "net/questions.py": ["a question to a peer"],
    "node/driver.py": [
        "the fetch of a lost payload",
        "the fetch of a payload",
        "the fetch of a state",
        "what the core says to a peer",
    ],
    "node/edges.py": [
        "a message for a peer",
        "gossiping a message",
        "parting from a peer",
        "the history for a peer",
    ],
    "node/fetching.py": ["the fetch of data"],
    "node/intake.py": ["the check of a payload", "the reading of a history"],
    "region/world.py": ["the world's run"],
}


def test_the_boundary_is_where_this_list_says() -> None:
    """A new exchange with a peer needs one, and nothing of our own state may be below it."""
    places = places_of_the_boundary()
    assert places == PLACES
    told = [each for of_file in places.values() for each in of_file]
    assert len(told) == len(set(told)), "an owner's report could mean two places"
