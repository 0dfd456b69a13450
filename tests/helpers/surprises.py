"""Surprises: functions that deal with peers, each of which raises once what nobody foresaw, in a real daemon.

The functions are found by reading the code: whatever is called below a boundary (net/boundary.py), and the handlers
that are handed to the transport, in `net`, `node` and `audit`. So a new one is in the list without being named. Names
are resolved as a reader would: `self.x` in its class, another `x` wherever it is defined; so a function too many is
found now and then, and none too few.

As a program it becomes the command that follows, with these functions wrapped: it raises what the lines of ORDERS
say (`KIND NAME...`), each function once, and notes in the log which has raised; without a name, no more is raised.

    python surprises.py ORDERS LOG python -m p2ptrain join ...
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2] / "p2ptrain"
PARTS = ("net", "node", "audit")
KINDS: dict[str, Callable[[str], BaseException]] = {
    "TypeError": TypeError,
    "KeyError": KeyError,
    "IndexError": IndexError,
    "RecursionError": RecursionError,
    "UnicodeDecodeError": lambda text: UnicodeDecodeError("utf-8", b"\xff", 0, 1, text),
    "AssertionError": AssertionError,
    "OSError": OSError,
}
MEMORY: dict[str, Callable[[str], BaseException]] = {"MemoryError": MemoryError}
# Methods of Python's own types, which are called everywhere: only `self.x` is taken to be ours.
LOOK_SECONDS, ENDED = 0.1, "ended"
COMMON = {name for kind in (dict, list, set, str, bytes, bytearray, float) for name in dir(kind)}
COMMON |= {
    "set_result",
    "set_exception",
    "done",
    "cancel",
    "wait",
    "write",
    "drain",
    "appendleft",
    "popleft",
    "acquire",
}
# What is found by its name alone, or is this machine's and faces no peer: its processes, owner, disk and device.
OWN_MODULES = {
    *("audit.findings", "audit.history", "net.boundary", "net.libp2p.process", "net.tasks"),
    *(f"node.{name}" for name in ("consent", "control", "energy", "home", "socket_directory")),
    *(f"node.{name}" for name in ("gpu_use", "lag", "limits", "model_progress", "notify", "orders", "persistence")),
    *(f"node.{name}" for name in ("local_worker", "pacing", "replica_thread", "saved", "work")),
}
# The core's own handling, which ends the node if it is wrong: the queue of its events, and the loops that carry out its
# effects; and what runs as the node begins or ends.
OWN = {
    *("FileSink.read", "_read", "verified", "all_pieces", "SavedStates.offer"),  # what is on this disk
    *("Intake.give", "Intake.take", "Intake.wait", "Intake.begin", "Intake.end", "Intake._free"),
    *("Driver.run", "Driver._handle_for_ever", "NodeTasks.spawn", "NodeTasks.cancel"),
    *(f"EffectLoop.{name}" for name in ("add", "hurry", "run", "_act", "_write", "_stop")),
    *("Edges.tell", "Edges.reaches_all", "Intake.refusal"),  # around the boundary, for a word of the core
    *("Telling.publish", "PayloadFetches.fetch_payload"),  # likewise
    *("Gossip._listen", "P2pd._keep_dht"),  # loops with the boundary inside
    *(
        "P2pd.counters",
        "P2pd.start",
        "P2pd.close",
        "Shared.close",
        "Sockets.close",
        "Supervisor.close",
        "Supervisor.run",
        "Ports.close",
    ),
}


class PeerFacingFunctions:
    """The functions of the package's parts that face peers, by their full names."""

    def __init__(self) -> None:
        self.functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = {}
        self.by_name: dict[str, list[str]] = defaultdict(list)
        self.modules: dict[str, str] = {}
        self.class_of: dict[str, str] = {}
        for part in PARTS:
            for path in sorted((ROOT / part).rglob("*.py")):
                self._read(".".join(path.relative_to(ROOT).with_suffix("").parts), ast.parse(path.read_text()))
        self._read("daemon.life", ast.parse((ROOT / "daemon/life.py").read_text()))  # subscribes, and answers questions

    def _read(self, module: str, tree: ast.Module) -> None:
        for top in tree.body:
            inside = [(top.name, each) for each in top.body] if isinstance(top, ast.ClassDef) else [("", top)]
            for owner, each in inside:
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                    name = f"{module}:{owner}.{each.name}" if owner else f"{module}:{each.name}"
                    self.functions[name] = each
                    self.by_name[each.name].append(name)
                    self.modules[name], self.class_of[name] = module, f"{module}:{owner}"

    def facing_peers(self) -> list[str]:
        todo = [name for caller, node in self.functions.items() for name in self._begins(caller, node)]
        found: set[str] = set()
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                todo += self._named_in(name, self.functions[name])
        return sorted(name for name in found if self._is_to_raise(name))

    def _begins(self, caller: str, node: ast.AST) -> Iterator[str]:
        for each in ast.walk(node):
            if isinstance(each, ast.With | ast.AsyncWith) and any(_is_boundary(item) for item in each.items):
                for statement in each.body:
                    yield from self._named_in(caller, statement)
            elif isinstance(each, ast.Call) and _last(each.func) in ("serve", "subscribe"):
                for argument in each.args:
                    yield from self._named(caller, argument)
            elif isinstance(each, ast.Call) and _last(each.func) in ("contained", "_start"):
                yield from self._named_in(caller, node)  # its work is made near by

    def _named_in(self, caller: str, node: ast.AST) -> list[str]:
        """Returns what is called, or handed on, by a piece of code."""
        found: list[str] = []
        for each in ast.walk(node):
            if isinstance(each, ast.Call):
                for part in (each.func, *each.args, *(keyword.value for keyword in each.keywords)):
                    found += self._named(caller, part)
        return found

    def _named(self, caller: str, node: ast.AST) -> list[str]:
        if isinstance(node, ast.Attribute):
            mine = f"{self.class_of[caller]}.{node.attr}"
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") and mine in self.functions:
                return [mine]
            return [] if node.attr in COMMON else self.by_name.get(node.attr, [])
        if isinstance(node, ast.Name):
            mine = f"{self.modules[caller]}:{node.id}"
            if mine in self.functions:
                return [mine]
            return [each for each in self.by_name.get(node.id, []) if self.class_of[each].endswith(":")]
        return []

    def _is_to_raise(self, name: str) -> bool:
        node, short = self.functions[name], name.rpartition(".")[2].rpartition(":")[2]
        is_value = any(_last(each) in ("property", "cached_property", "overload") for each in node.decorator_list)
        is_own = name.partition(":")[2] in OWN or self.modules[name] in OWN_MODULES
        is_own |= self.modules[name] == "daemon.life" and short != "ask_by_peer"
        is_abstract = isinstance(node.body[-1], ast.Expr) and isinstance(node.body[-1].value, ast.Constant)
        return not (is_value or is_own or is_abstract or short.startswith("__"))


def _is_boundary(item: ast.withitem) -> bool:
    call = item.context_expr
    return isinstance(call, ast.Call) and _last(call.func) in ("guard", "contain")


def _last(node: ast.AST) -> str:
    while isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


# ---------------------------------------------------------------------------------------------------
# In the daemon


armed: dict[str, str] = {}  # by function: what it raises when it is called next


def wrapped(name: str, function: Any, note: Callable[[str], None]) -> Any:
    """Returns a function that does the same, unless it is armed."""

    def surprise() -> None:
        if armed and (kind := armed.pop(name, None)) is not None:
            note(f"{kind} {name}")
            raise (KINDS | MEMORY)[kind](f"a surprise in {name}.")

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def waits(*arguments: Any, **named: Any) -> Any:
            surprise()
            return await function(*arguments, **named)

        return waits

    @functools.wraps(function)
    def calls(*arguments: Any, **named: Any) -> Any:
        surprise()
        return function(*arguments, **named)

    return calls


def wrap_all(names: list[str], note: Callable[[str], None]) -> None:
    """Wraps these functions wherever a module or a class has them."""
    for name in names:
        module_name, _, qualified = name.partition(":")
        module = importlib.import_module(f"p2ptrain.{module_name}")
        owner, _, short = qualified.rpartition(".")
        if owner:
            kind = getattr(module, owner)
            held = kind.__dict__[short]
            if isinstance(held, staticmethod | classmethod):
                setattr(kind, short, type(held)(wrapped(name, held.__func__, note)))
            else:
                setattr(kind, short, wrapped(name, held, note))
            continue
        function = getattr(module, short)
        new = wrapped(name, function, note)
        for each in [each for each in sys.modules.values() if getattr(each, "__name__", "").startswith("p2ptrain")]:
            for key, value in list(vars(each).items()):
                if value is function:
                    setattr(each, key, new)


def tell_ends(note: Callable[[str], None]) -> None:
    """Notes what ends the daemon: what crashes a task of the network, or the tasks of the node."""
    tasks, launch = importlib.import_module("p2ptrain.net.tasks"), importlib.import_module("p2ptrain.daemon.launch")
    end, live = tasks.Tasks._end, launch.live

    def ended(self: Any, task: Any) -> None:
        if not task.cancelled() and task.exception():
            note(f"{ENDED} {task.exception()}")
        end(self, task)

    async def lived(*arguments: Any) -> Any:
        try:
            return await live(*arguments)
        except BaseExceptionGroup as group:
            leaf: BaseException = group
            while isinstance(leaf, BaseExceptionGroup):
                leaf = leaf.exceptions[0]
            note(f"{ENDED} {leaf}")
            raise

    tasks.Tasks._end, launch.live = ended, lived


def main() -> None:
    orders, log, *command = sys.argv[1:]
    for name in ("p2ptrain.daemon.launch", "p2ptrain.cli", "p2ptrain.cli.node", "p2ptrain.net.libp2p.p2pd"):
        importlib.import_module(name)
    notes = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(text: str) -> None:
        os.write(notes, f"{text}\n".encode())

    wrap_all(PeerFacingFunctions().facing_peers(), note)
    tell_ends(note)

    def hear() -> None:
        with open(orders, encoding="utf-8") as told:  # noqa: PTH123
            told.seek(0, os.SEEK_END)
            rest = ""
            while not ended.wait(LOOK_SECONDS):
                *lines, rest = (rest + told.read()).split("\n")
                for line in lines:
                    kind, *names = line.split()
                    armed.update(dict.fromkeys(names, kind))
                    if not names:
                        armed.clear()

    ended = threading.Event()
    threading.Thread(target=hear, daemon=True).start()
    sys.argv = ["p2ptrain", *command[3:]]  # after python -m p2ptrain
    sys.exit(importlib.import_module("p2ptrain.__main__").main())


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT.parent))
    main()
